#include <doctest/doctest.h>
#include <support/manager/model_rig.hpp>
#include <support/manager/rig.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

static_assert(std::input_iterator<block_stream<hits_manager>::iterator>);

kv_geometry plain()
{
  return {
    .layers = 3,
    .query_heads = 4,
    .kv_heads = 2,
    .head_dim = 8,
    .block_tokens = 4,
    .key_type = dtype::float32,
    .value_type = dtype::float32};
}

kv_geometry headwise()
{
  kv_geometry g = plain();
  g.kv_heads = 4;
  g.head_groups = 4;
  return g;
}

kv_geometry latent()
{
  kv_geometry g = plain();
  g.kv_heads = 1;
  g.value_is_key_prefix = true;
  g.value_dim = 5;
  g.block_tokens = 3;
  return g;
}

kv_geometry mixed()
{
  kv_geometry g = plain();
  g.layers = 4;
  g.layer_groups = {
    {.first = 0, .count = 1},
    {.first = 1, .count = 1, .kind = layer_kind::windowed, .window_tokens = 10, .sink_tokens = 4},
    {.first = 2, .count = 1, .kind = layer_kind::dense},
    {.first = 3, .count = 1}};
  return g;
}

solo_head_selector<> const six_blocks{.budget_tokens = 24, .sink_tokens = 4, .recent_tokens = 4, .dense_tokens = 24};

manager_options small_options(std::uint32_t stream_tokens)
{
  return {
    .max_rows = 3,
    .max_tokens = 200,
    .max_prefill_tokens = 8,
    .quota_tokens = 36,
    .stream_tokens = stream_tokens,
    .slots = 8000};
}

/// What a row attends in a visit and the streams behind it, against one pass over a copy of all of its blocks.
template <class Manager>
struct one_pass {
  explicit one_pass(model_rig<Manager>& r) : rig{r}
  {
    r.engine.attended = [this](visit const& v) { compare(v); };
  }

  void compare(visit const& v)
  {
    if (v.part == part::landed || rig.kv.geometry().group_of(v.layer).kind != layer_kind::selected) { return; }
    for (row_id const row : v.rows) {
      if (rig.kv.prompt_streams(row)) { compare(v, row); }
    }
  }

  void compare(visit const& v, row_id row)
  {
    REQUIRE(rig.backend.synchronize(rig.stream) == status::ok);
    kv_geometry const& g = rig.kv.geometry();
    std::uint64_t const bytes = rig.kv.layout().block_bytes;
    std::uint32_t const blocks = v.table.info[to_index(row)].blocks(g.block_tokens);
    std::uint32_t const sealed = rig.kv.sequences()[row].sealed;
    std::vector<std::byte> memory(std::uint64_t{blocks} * g.head_groups * bytes);
    std::vector<std::byte*> bases(g.layers, memory.data());
    std::size_t const lanes = std::size_t{3} * g.head_groups;
    std::vector<slot_id> slots(lanes * blocks, none<slot_id>);
    std::vector<std::uint32_t> counts(lanes, 0);
    for (std::uint32_t group = 0; group < g.head_groups; ++group) {
      lane_id const lane = lane_of(row, group, g.head_groups);
      counts[to_index(lane)] = blocks;
      for (std::uint32_t b = 0; b < blocks; ++b) {
        std::uint64_t const place = std::uint64_t{group} * blocks + b;
        std::byte const* const source = b < sealed
          ? rig.kv.store().ref().address(v.layer, group, rig.kv.sequences()[row].host_blocks[b])
          : v.table.pool.address(v.layer, rig.kv.books().residency().slots_of_lane(v.layer, lane)[b]);
        std::memcpy(memory.data() + place * bytes, source, bytes);
        slots[to_index(lane) * blocks + b] = static_cast<slot_id>(place);
      }
    }
    block_table all = v.table;
    all.slots = slots.data();
    all.counts = counts.data();
    all.stride = blocks;
    all.pool = {.layer_base = bases.data(), .slot_stride = bytes, .slots = blocks * g.head_groups};
    all.which = part::whole;
    tensor_view const merged = rig.engine.attention_view();
    std::vector<float> once(merged.tokens * merged.heads * merged.dim);
    tensor_view out = merged;
    out.data = reinterpret_cast<std::byte*>(once.data());
    std::vector<std::byte> scratch(1 << 20);
    row_list const one{.ids = &row, .count = 1};
    run_operation(
      paged_attention{
        .table = all,
        .rows = one,
        .queries = rig.engine.query_view(),
        .out = out,
        .scale = 1.0F / std::sqrt(static_cast<float>(g.head_dim)),
        .most_queries = 8},
      {.data = scratch.data(), .bytes = scratch.size()});
    row_info const info = v.table.info[to_index(row)];
    for (std::int32_t t = 0; t < info.new_tokens; ++t) {
      auto const token = static_cast<std::uint64_t>(info.token_offset + t);
      for (std::uint32_t head = 0; head < merged.heads; ++head) {
        auto const* const a = reinterpret_cast<float const*>(merged.row(token, head));
        auto const* const b = reinterpret_cast<float const*>(out.row(token, head));
        double size = 0.0, difference = 0.0;
        for (std::uint32_t d = 0; d < merged.dim; ++d) {
          size = std::max(size, std::fabs(double{b[d]}));
          double const apart = std::fabs(double{a[d]} - double{b[d]});
          difference = apart <= difference ? difference : apart;  // NaN counts
        }
        worst = difference / size <= worst ? worst : difference / size;
        ++compared;
      }
    }
  }

  model_rig<Manager>& rig;
  double worst = 0.0;
  std::uint64_t compared = 0;
};

}  // namespace

TEST_SUITE("manager")
{
  TEST_CASE_TEMPLATE(
    "law 2: a prompt that streams attends what one that stays resident attends, within 1e-6 relative", Manager,
    lockstep_manager, hits_manager, fragment_manager)
  {
    for (kv_geometry const& geometry : {plain(), headwise(), latent(), mixed()}) {
      synthetic_model const model{geometry};
      std::vector<sequence_plan> const resident{{1, 90, 130}, {2, 61, 100, 5}, {3, 40, 120}};
      std::vector<sequence_plan> streaming = resident;
      for (sequence_plan& plan : streaming) { plan.stream_prompt = true; }
      model_rig<lockstep_manager> expected{model, small_options(0), six_blocks};
      run_plans(expected, resident);
      // Halves of one block, of a few, and of more than there are.
      for (std::uint32_t const stream_tokens : {1U, 18U, 400U}) {
        CAPTURE(stream_tokens);
        model_rig<Manager> r{model, small_options(stream_tokens), six_blocks};
        one_pass<Manager> check{r};
        run_plans(r, streaming);
        CHECK(r.engine.parts > 50);
        CHECK(check.compared > 1000);
        // Each merge rounds once more: those of one block add up.
        CHECK(check.worst < (stream_tokens == 1 ? 22 * 1.2e-7 : 1e-6));
        float worst = 0.0F;
        for (sequence_plan const& plan : resident) {
          for (std::uint32_t t = 0; t < plan.prompt; ++t) {
            worst = std::max(worst, difference(r.engine.output(plan.seed, t), expected.engine.output(plan.seed, t)));
          }
        }
        CHECK(worst < 2e-5F);
      }
    }
  }

  TEST_CASE_TEMPLATE(
    "a row whose prompt has streamed selects and recalls what one does whose prompt stayed resident", Manager,
    lockstep_manager, hits_manager, fragment_manager, checked_manager)
  {
    for (kv_geometry const& geometry : {plain(), headwise(), latent(), mixed()}) {
      for (std::uint32_t const stream_tokens : {1U, 20U}) {
        rig_options options{.geometry = geometry, .manager = small_options(stream_tokens), .per_row = 8};
        rig<Manager> streaming{options, six_blocks};
        rig<Manager> resident{options, six_blocks};
        // One row after the other, and two at once; one decodes while another's prompt comes in.
        std::array<std::uint32_t, 3> const prompts{90, 61, 50};
        std::array<row_id, 3> rows{};
        for (std::uint32_t i = 0; i < 3; ++i) {
          rows[i] = streaming.open(i + 1, prompts[i], 150, true);
          REQUIRE(resident.open(i + 1, prompts[i], 150) == rows[i]);
        }
        std::uint32_t compared = 0;
        for (std::uint32_t step = 0; step < 60; ++step) {
          std::vector<step_row> batch;
          for (std::uint32_t i = 0; i < 3; ++i) {
            std::uint32_t const now = streaming.kv.tokens_of(rows[i]);
            REQUIRE(resident.kv.tokens_of(rows[i]) == now);
            if (step < 7 * i) { continue; }
            batch.push_back({.row = rows[i], .tokens = now < prompts[i] ? std::min(7U, prompts[i] - now) : 1});
          }
          for (auto* const r : {&streaming, &resident}) {
            REQUIRE(r->engine.step(std::span<step_row const>{batch}) == status::ok);
            REQUIRE(r->engine.fault() == "");
            REQUIRE(r->kv.audit() == "");
          }
          for (step_row const& r : batch) {
            if (streaming.kv.mode_of(r.row) != row_mode::sparse_offloaded) {
              CHECK(streaming.kv.prompt_streams(r.row));
              continue;
            }
            CHECK_FALSE(streaming.kv.prompt_streams(r.row));
            for (std::uint32_t l = 0; l < geometry.layers; ++l) {
              for (std::uint32_t g = 0; g < geometry.head_groups; ++g) {
                auto const layer = static_cast<layer_id>(l);
                REQUIRE(std::ranges::equal(
                  streaming.engine.selected(r.row, layer, g), resident.engine.selected(r.row, layer, g)));
                ++compared;
              }
            }
          }
        }
        CHECK(compared > 100);
        CHECK(streaming.engine.parts > 50);
        CHECK(resident.engine.parts == 0);
        streaming.close_all();
        resident.close_all();
      }
    }
  }

  TEST_CASE("a prompt that no slots hold streams through a few: a step's blocks, a lease, and two halves")
  {
    rig_options options{.geometry = plain(), .manager = small_options(12), .per_row = 8};
    // Three layers: a lease of 9 slots, and two halves of 3 blocks beside them.
    options.manager.slots = 3 * 9 + 2 * 3;
    options.manager.max_rows = 1;
    rig<lockstep_manager> r{options, six_blocks};
    row_id row{};
    CHECK(r.kv.open({.prompt_tokens = 180, .max_tokens = 200}, row) == admission::rejected);
    CHECK(
      r.kv.explain_refusal({.prompt_tokens = 180, .max_tokens = 200}).find("138 slots (27 of 27 free)") !=
      std::string::npos);
    row = r.open(1, 180, 200, true);
    std::uint64_t most = 0;
    for (std::uint32_t done = 0; done < 180; done += 6) {
      r.step({{.row = row, .tokens = 6}});
      REQUIRE(r.kv.audit() == "");
      CHECK(r.kv.prompt_streams(row));
      CHECK(r.kv.mode_of(row) == row_mode::dense_resident);
      most = std::max(most, r.kv.memory().slot_bytes / r.kv.layout().block_bytes);
    }
    CHECK(most == 2 * 3 + 3 * 2);  // six tokens from an even place on touch two blocks
    for (std::uint32_t i = 0; i < 20; ++i) { r.step({{.row = row}}); }
    CHECK(r.kv.mode_of(row) == row_mode::sparse_offloaded);
    CHECK(r.kv.memory().slot_bytes == r.kv.pool().total_slots() * r.kv.layout().block_bytes);
    r.close_all();
  }

  TEST_CASE("a prompt streams in every layer's own lent pool")
  {
    rig_options options{.geometry = mixed(), .manager = small_options(12), .per_row = 8};
    options.manager.max_rows = 2;
    options.manager.slots = 120;
    std::uint64_t const stride = make_block_layout(options.geometry).block_bytes + 64;
    std::vector<std::byte> memory(4 * 120 * stride + 256);
    auto* base = memory.data() + (256 - reinterpret_cast<std::uintptr_t>(memory.data()) % 256);
    for (std::uint32_t l = 0; l < 4; ++l) { options.manager.lent_slots.push_back(base + l * 120 * stride); }
    options.manager.slot_stride = stride;
    rig<hits_manager> r{options, six_blocks};
    CHECK(r.kv.memory().slot_bytes == 4 * 6 * r.kv.layout().block_bytes);
    row_id const a = r.open(1, 110, 150, true), b = r.open(2, 40, 150, true);
    r.engine.prefill(a, 110, 8);
    r.engine.prefill(b, 40, 8);
    for (std::uint32_t i = 0; i < 20; ++i) {
      r.step({{.row = a}, {.row = b}});
      REQUIRE(r.kv.audit() == "");
    }
    r.close_all();
  }

  TEST_CASE("a manager whose slots cannot hold what streams is refused with the numbers")
  {
    rig_options options{.geometry = headwise(), .manager = small_options(12)};
    options.manager.slots = 3 * 9 * 4 + 2 * 3 * 4 - 1;
    std::string text;
    try {
      rig<lockstep_manager> const r{options, six_blocks};
    } catch (configuration_error const& problem) {
      text = problem.what();
    }
    CHECK(
      text ==
      "invalid_argument: 131 slots; one row of 200 tokens needs 108 once it decodes, prompts stream through 24: two "
      "halves of 3 blocks in 4 head groups");
    ++options.manager.slots;
    rig<lockstep_manager> r{options, six_blocks};
    CHECK(r.kv.audit() == "");
  }

  TEST_CASE("a request that cannot stream is rejected and told why")
  {
    rig<lockstep_manager> without{{.geometry = plain(), .manager = small_options(0)}, six_blocks};
    rig<lockstep_manager> with{{.geometry = plain(), .manager = small_options(12)}, six_blocks};
    row_id row{};
    sequence_options const request{.prompt_tokens = 100, .max_tokens = 150, .stream_prompt = true};
    CHECK(without.kv.open(request, row) == admission::rejected);
    CHECK(without.kv.explain_refusal(request).find("stream_tokens 0") != std::string::npos);
    sequence_options const brief{.prompt_tokens = 10, .max_tokens = 24, .stream_prompt = true};
    CHECK(with.kv.open(brief, row) == admission::rejected);
    CHECK(with.kv.explain_refusal(brief).find("24 tokens") != std::string::npos);
    CHECK(with.kv.explain_refusal(brief).find("up to 24 keep every block resident") != std::string::npos);
    sequence_options both = request;
    both.keep_resident = true;
    CHECK(with.kv.open(both, row) == admission::rejected);
    CHECK(with.kv.explain_refusal(both).find("one or the other") != std::string::npos);
    CHECK(with.kv.open(request, row) == admission::admitted);
    CHECK(with.kv.promote(row) == status::invalid_state);
    CHECK(with.kv.demote(row) == status::invalid_state);
    CHECK(with.kv.explain_refusal(request).find("27 slots") != std::string::npos);
  }

  TEST_CASE("a prompt below the sparse threshold streams as well, and the row selects once it is in")
  {
    solo_head_selector<> late = six_blocks;
    late.dense_tokens = 60;
    rig<hits_manager> r{{.geometry = plain(), .manager = small_options(4), .per_row = 8}, late};
    row_id const row = r.open(1, 30, 100, true), resident = r.open(2, 30, 100);
    r.engine.prefill(row, 30, 8);
    r.engine.prefill(resident, 30, 8);
    r.step({{.row = row}, {.row = resident}});
    CHECK(r.kv.mode_of(row) == row_mode::sparse_offloaded);
    CHECK(r.kv.mode_of(resident) == row_mode::dense_resident);
    while (r.kv.tokens_of(row) < 100) { r.step({{.row = row}, {.row = resident}}); }
    r.close_all();
  }

  TEST_CASE("a sequence leaves and comes back while its prompt streams in; forks and prefixes stream on")
  {
    for (kv_geometry const& geometry : {plain(), mixed()}) {
      rig<hits_manager> r{{.geometry = geometry, .manager = small_options(8), .per_row = 8}, six_blocks};
      auto& engine = r.engine;
      engine.rows_differ = true;
      row_id const row = r.open(1, 120, 160, true);
      engine.prefill(row, 51, 7);
      saved_id saved;
      auto const before = engine.history_of(row);
      REQUIRE(r.kv.preempt(row, saved) == status::ok);
      CHECK(r.kv.audit() == "");
      row_id back{};
      REQUIRE(r.kv.resume(saved, back) == admission::admitted);
      CHECK(r.kv.audit() == "");
      engine.assign(back, before);
      CHECK(r.kv.prompt_streams(back));
      engine.prefill(back, 20, 6);
      // A copy that stays resident, and one that streams its own further prompt.
      row_id resident{}, other{};
      REQUIRE(r.kv.fork(back, {.prompt_tokens = 90, .max_tokens = 110}, resident) == admission::admitted);
      REQUIRE(
        r.kv.fork(back, {.prompt_tokens = 100, .max_tokens = 110, .stream_prompt = true}, other) ==
        admission::admitted);
      CHECK_FALSE(r.kv.prompt_streams(resident));
      CHECK(r.kv.prompt_streams(other));
      engine.assign(resident, engine.history_of(back));
      engine.assign(other, engine.history_of(back));
      for (std::uint32_t i = 0; i < 35; ++i) {
        std::vector<step_row> batch;
        for (row_id const each : {back, resident, other}) {
          std::uint32_t const prompt = each == back ? 120 : each == resident ? 90 : 100;
          std::uint32_t const now = r.kv.tokens_of(each);
          if (each != back && now == 110) { continue; }
          batch.push_back({.row = each, .tokens = now < prompt ? std::min(3U, prompt - now) : 1});
        }
        REQUIRE(engine.step(std::span<step_row const>{batch}) == status::ok);
        REQUIRE(engine.fault() == "");
        REQUIRE(r.kv.audit() == "");
      }
      CHECK(r.kv.mode_of(back) == row_mode::sparse_offloaded);
      r.close_all();
    }
  }

  TEST_CASE("a row whose prompt has streamed in is promoted and demoted as any other")
  {
    for (std::uint32_t const prompt : {20U, 80U}) {
      rig<hits_manager> r{{.geometry = mixed(), .manager = small_options(8), .per_row = 8}, six_blocks};
      row_id const row = r.open(1, prompt, 160, true);
      r.engine.prefill(row, prompt, 7);
      r.step({{.row = row}});
      REQUIRE(r.kv.promote(row) == status::ok);
      CHECK(r.kv.mode_of(row) == row_mode::sparse_resident);
      REQUIRE(r.kv.audit() == "");
      for (int i = 0; i < 12; ++i) { r.step({{.row = row}}); }
      auto const before = r.engine.history_of(row);
      saved_id saved;
      REQUIRE(r.kv.preempt(row, saved) == status::ok);
      row_id back{};
      REQUIRE(r.kv.resume(saved, back) == admission::admitted);
      r.engine.assign(back, before);
      for (int i = 0; i < 6; ++i) { r.step({{.row = back}}); }
      CHECK(r.kv.mode_of(back) == row_mode::sparse_resident);
      REQUIRE(r.kv.demote(back) == status::ok);
      for (int i = 0; i < 12; ++i) { r.step({{.row = back}}); }
      REQUIRE(r.kv.audit() == "");
      r.close_all();
    }
  }

  TEST_CASE("a prompt that streams in is cut where a block has left its slots, and goes on")
  {
    for (std::uint32_t const tokens : {61U, 60U, 57U, 56U, 30U, 29U, 28U, 3U, 0U}) {
      CAPTURE(tokens);
      rig<hits_manager> r{{.geometry = plain(), .manager = small_options(8), .per_row = 8}, six_blocks};
      row_id const row = r.open(1, 120, 160, true);
      r.engine.prefill(row, 62, 7);
      REQUIRE(r.kv.truncate(row, tokens) == status::ok);
      REQUIRE(r.kv.audit() == "");
      CHECK(r.kv.tokens_of(row) == tokens);
      r.engine.prefill(row, 120 - tokens, 8);
      for (std::uint32_t i = 0; i < 10; ++i) { r.step({{.row = row}}); }
      REQUIRE(r.engine.fault() == "");
      r.close_all();
    }
  }
}
