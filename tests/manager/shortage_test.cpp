#include <doctest/doctest.h>
#include <support/manager/chosen_blocks.hpp>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

kv_geometry two_layers(std::uint32_t block_tokens)
{
  return {.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 2, .block_tokens = block_tokens};
}

/// What must be as before once a request has come and gone.
struct counters {
  block_counts host;
  std::uint64_t slots = 0, reserved = 0, digests = 0;

  explicit counters(rig<chosen_manager>& r)
    : host{r.kv.store().counts()},
      slots{r.kv.memory().slot_bytes},
      reserved{r.kv.store().reserved()},
      digests{r.kv.memory().digest_bytes}
  {}
  friend bool operator==(counters const& a, counters const& b)
  {
    return a.host.free == b.host.free && a.host.held == b.host.held && a.host.in_flight == b.host.in_flight &&
      a.slots == b.slots && a.reserved == b.reserved && a.digests == b.digests;
  }
};

}  // namespace

TEST_SUITE("manager")
{
  // Report: vllm-project/vllm-ascend#16662, sgl-project/sglang#21652
  TEST_CASE("a request that is cancelled, whatever of it flies, leaves nothing taken and lets the next one in")
  {
    // One row's worth of host blocks: while a cancelled one still holds any, nobody gets in.
    rig<chosen_manager> r{
      {.geometry = two_layers(2),
       .manager = {.max_rows = 2, .max_tokens = 20, .max_prefill_tokens = 8, .quota_tokens = 12, .host_blocks = 10},
       .per_row = 8},
      {.budget_tokens = 8, .dense_tokens = 8}};
    random_choice choice{r, 1};
    counters const before{r};
    std::uint64_t waited = 0, recalls_cut = 0, writes_cut = 0;
    for (std::uint32_t round = 0; round < 10'000; ++round) {
      CAPTURE(round);
      row_id row{};
      REQUIRE(r.kv.open({.prompt_tokens = 14, .max_tokens = 20}, row) == admission::admitted);
      r.engine.assign(row, round + 1);
      r.engine.prefill(row, 14, 8);
      if (round % 3 == 0) { r.step({{.row = row}}); }
      // Into a step: at the first layer blocks are chosen and recalled, and a number of tasks of all this has run.
      step_row const one{.row = row};
      if (round % 3 != 2) {
        REQUIRE(r.engine.begin({&one, 1}) == status::ok);
        r.engine.enter(layer_id{0}, r.kv.rows());
      }
      for (std::uint64_t tasks = mixed({round, 1}) % 24; tasks > 0; --tasks) { static_cast<void>(r.backend.run_one()); }
      bool const writes = r.kv.store().counts().in_flight != 0;
      REQUIRE(r.kv.close(row) == status::ok);
      r.engine.row(row).in_step = false;
      row_id next{};
      admission const said = r.kv.open({.prompt_tokens = 14, .max_tokens = 20}, next);
      if (said != admission::admitted) {
        REQUIRE(said == admission::queued);
        ++waited;
        ++(writes ? writes_cut : recalls_cut);
        REQUIRE(r.backend.synchronize() == status::ok);
        REQUIRE(r.kv.open({.prompt_tokens = 14, .max_tokens = 20}, next) == admission::admitted);
      }
      REQUIRE(r.kv.close(next) == status::ok);
      REQUIRE(r.backend.synchronize() == status::ok);
      r.kv.poll();
      REQUIRE(counters{r} == before);
      REQUIRE(r.kv.audit() == "");
      REQUIRE(r.engine.fault() == "");
    }
    CHECK(waited > 1000);
    CHECK(recalls_cut > 100);
    CHECK(writes_cut > 100);
  }

  // Report: vllm-project/vllm#45388
  TEST_CASE("law 9: of two requests that do not fit together one waits and holds nothing, and both come to their ends")
  {
    rig<chosen_manager> r{
      {.geometry = two_layers(2),
       .manager =
         {.max_rows = 3, .max_tokens = 40, .max_prefill_tokens = 8, .quota_tokens = 12, .slots = 60, .host_blocks = 16},
       .per_row = 8},
      {.budget_tokens = 8, .dense_tokens = 8}};
    random_choice choice{r, 1};
    // 17 blocks will never be had: that is said at once.
    row_id row{};
    CHECK(r.kv.open({.prompt_tokens = 4, .max_tokens = 34}, row) == admission::rejected);
    std::string const text = r.kv.explain_refusal({.prompt_tokens = 4, .max_tokens = 34});
    CHECK(text.starts_with("can never have its host blocks: it needs "));
    CAPTURE(text);
    CHECK(text.find("17 host blocks (16 of 16 free)") != std::string::npos);
    sequence_options const requests[2] = {
      {.prompt_tokens = 14, .max_tokens = 24}, {.prompt_tokens = 9, .max_tokens = 18}};
    row_id rows[2] = {none<row_id>, none<row_id>};
    bool ended[2] = {};
    std::uint32_t turns = 0, waited = 0;
    for (; turns < 200 && !(ended[0] && ended[1]); ++turns) {
      std::vector<step_row> batch;
      for (std::uint32_t i = 0; i < 2; ++i) {
        if (ended[i]) { continue; }
        if (is_none(rows[i])) {
          std::uint32_t const held = r.kv.store().counts().held + r.kv.store().reserved();
          if (r.kv.open(requests[i], rows[i]) != admission::admitted) {
            CHECK(r.kv.store().counts().held + r.kv.store().reserved() == held);  // it holds nothing while it waits
            ++waited;
            continue;
          }
          r.engine.assign(rows[i], i + 1);
        }
        std::uint32_t const now = r.kv.tokens_of(rows[i]);
        if (now == requests[i].max_tokens) {
          REQUIRE(r.kv.close(rows[i]) == status::ok);
          ended[i] = true;
          continue;
        }
        std::uint32_t const left = requests[i].prompt_tokens > now ? requests[i].prompt_tokens - now : 0;
        batch.push_back({.row = rows[i], .tokens = left == 0 ? 1 : std::min(left, 8U)});
      }
      // Copies are complete a turn later; whoever is in goes on in each turn.
      REQUIRE(r.backend.synchronize() == status::ok);
      REQUIRE(r.engine.step(batch) == status::ok);
      REQUIRE(r.engine.fault() == "");
      REQUIRE(r.kv.audit() == "");
    }
    CHECK(turns < 60);
    CHECK(waited > 5);
    CHECK(ended[0]);
    CHECK(ended[1]);
    r.close_all();
  }

  // Report: sgl-project/sglang#20049, sgl-project/sglang#35869
  TEST_CASE("what has been written back is no longer held by a copy: after the next step, or one poll without any")
  {
    constexpr std::uint32_t depth = 3;
    rig<chosen_manager> r{
      {.geometry = two_layers(1),
       .manager =
         {.max_rows = 1, .max_tokens = 1200, .max_prefill_tokens = 8, .quota_tokens = 12, .write_back_depth = depth},
       .per_row = 8},
      {.budget_tokens = 8, .dense_tokens = 8}};
    random_choice choice{r, 1};
    row_id const row = r.open(1, 8, 1200);
    r.engine.prefill(row, 8, 8);
    auto const flying = [&] { return r.kv.pool().counts(layer_id{0}).in_flight; };
    std::uint32_t most = 0;
    while (r.kv.tokens_of(row) < 1100) {
      r.step({{.row = row}});  // nothing but decoding: each step writes one block
      most = std::max(most, flying());
      REQUIRE(flying() <= (depth + 1) * 2);
      REQUIRE(r.kv.store().counts().in_flight <= depth + 1);
    }
    CHECK(most > 0);
    // The engine finishes, and nobody asks for a step.
    while (flying() == 0) { r.step({{.row = row}}); }
    REQUIRE(r.backend.synchronize() == status::ok);
    CHECK(flying() > 0);
    r.kv.poll();
    CHECK(flying() == 0);
    CHECK(r.kv.store().counts().in_flight == 0);
    // Without a sequence one poll is enough too.
    while (flying() == 0) { r.step({{.row = row}}); }
    REQUIRE(r.kv.close(row) == status::ok);
    REQUIRE(r.backend.synchronize() == status::ok);
    r.kv.poll();
    CHECK(flying() == 0);
    CHECK(r.kv.memory().slot_bytes == 0);
    CHECK(r.kv.memory().host_bytes == 0);
    r.close_all();
  }

  // Report: LMCache/LMCache#2206, LMCache/LMCache#2263
  TEST_CASE("a recall brings what is missing and leaves alone what is resident; with nothing missing nothing is copied")
  {
    constexpr std::uint32_t tokens = 14'820;
    rig<chosen_manager> r{
      {.geometry = two_layers(16),
       .manager = {.max_rows = 2, .max_tokens = 15'000, .max_prefill_tokens = 256, .quota_tokens = 40 * 16},
       .per_row = 256},
      {.budget_tokens = 34 * 16, .dense_tokens = 34 * 16}};
    std::uint32_t first = 0, last = 0;
    r.engine.before_enter = [&](layer_id layer, row_list rows) {
      for (row_id const row : rows) {
        if (r.kv.mode_of(row) != row_mode::sparse_offloaded) { continue; }
        auto const& state = r.engine.row(row);
        std::vector<block_id> ids;
        for (std::uint32_t b = first; b < last; ++b) { ids.push_back(static_cast<block_id>(b)); }
        auto const blocks = static_cast<std::uint32_t>(blocks_of(state.begin + state.count, 16));
        REQUIRE(r.kv.selector().import_selection(layer, lane_of(row, 0, 1), ids, blocks) == status::ok);
      }
    };
    row_id row = r.open(1, tokens, 15'000);
    r.engine.prefill(row, tokens, 256);
    CHECK(r.kv.sequences()[row].sealed == 926);
    auto const history = r.engine.history_of(row);
    saved_id saved;
    REQUIRE(r.kv.preempt(row, saved) == status::ok);  // so that nothing is resident
    REQUIRE(r.kv.resume(saved, row) == admission::admitted);
    r.engine.assign(row, history);
    CHECK(r.kv.tokens_of(row) == tokens);
    auto const recalled = [&] {
      r.step({{.row = row}});
      REQUIRE(r.kv.truncate(row, tokens) == status::ok);
      return r.kv.finish_sample().recalled_blocks / 2;  // layers
    };
    last = 18;
    CHECK(recalled() == 18);
    CHECK(recalled() == 0);
    // The resident 16 and 17 are marked with something newer than what the host has.
    residency_ref const books = r.kv.books().residency();
    auto const address = [&](std::uint32_t block) {
      slot_id const slot = books.slots_of_lane(layer_id{1}, lane_of(row, 0, 1))[block];
      REQUIRE_FALSE(is_none(slot));
      return r.kv.pool().ref().address(layer_id{1}, slot);
    };
    std::vector<std::byte> kept[2];
    for (std::uint32_t i = 0; i < 2; ++i) {
      std::byte* const block = address(16 + i);
      kept[i].assign(block, block + r.kv.layout().block_bytes);
      std::fill_n(block, r.kv.layout().block_bytes, std::byte{0x3C});
    }
    last = 32;
    step_row const one{.row = row};
    REQUIRE(r.engine.begin({&one, 1}) == status::ok);
    row_list const rows = r.kv.rows();
    for (std::uint32_t l = 0; l < 2; ++l) {
      auto const layer = static_cast<layer_id>(l);
      REQUIRE(r.backend.synchronize() == status::ok);
      r.engine.fill(layer, rows);
      REQUIRE(r.kv.append(layer, rows, r.engine.key_view(), r.engine.value_view()) == status::ok);
      ticket given;
      r.engine.before_enter(layer, rows);
      REQUIRE(r.kv.begin_recall(layer, rows, r.engine.query_view(), r.stream, given) == status::ok);
      while (r.backend.run_one(r.stream)) {}
      CHECK(r.kv.books().plan().misses[0] == 14);  // 224 tokens
      CHECK(r.kv.wait_on(given, r.stream) == status::ok);
      REQUIRE(r.backend.synchronize() == status::ok);
      // All there: the list is empty, and it has landed without a copy.
      ticket again;
      r.engine.before_enter(layer, rows);
      REQUIRE(r.kv.begin_recall(layer, rows, r.engine.query_view(), r.stream, again) == status::ok);
      while (r.backend.run_one(r.stream)) {}
      CHECK(r.kv.books().plan().misses[0] == 0);
      CHECK(r.kv.landed(again).test(0));
      CHECK(r.kv.status_of(again) == status::ok);
      REQUIRE(r.backend.synchronize() == status::ok);
    }
    for (std::uint32_t i = 0; i < 2; ++i) {
      std::byte* const block = address(16 + i);
      CHECK(std::all_of(block, block + r.kv.layout().block_bytes, [](std::byte b) { return b == std::byte{0x3C}; }));
      std::copy(kept[i].begin(), kept[i].end(), block);
    }
    commit_row const dropped{.row = row, .accepted = 0};
    REQUIRE(r.kv.commit({&dropped, 1}) == status::ok);
    r.engine.row(row).in_step = false;

    // The last of the 927 blocks has 4 valid tokens, also after it was away.
    row_info const info{.tokens = static_cast<std::int32_t>(tokens)};
    CHECK(info.blocks(16) == 927);
    CHECK(info.valid_tokens(926, 16) == 4);
    first = 895;
    last = 926;
    CHECK(recalled() == 31);
    r.close_all();
  }
}
