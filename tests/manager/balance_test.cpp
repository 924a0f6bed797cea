#include <pulseinfer/concepts/admission_policy.hpp>

#include <doctest/doctest.h>
#include <support/manager/model_rig.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

/// Answers what the test says, and keeps what it was asked.
struct dictated_admission {
  bool keep = true;
  balance_answer answer = {};
  std::vector<std::uint32_t> deal = {};
  std::vector<row_figures> rows = {};
  std::vector<layer_figures> layers = {};
  std::uint32_t least = 0, most = 0, mean = 0;

  void observe(step_sample const&) noexcept {}
  admission admit(demand const& request, capacity const& free) noexcept
  {
    return fixed_admission{}.admit(request, free);
  }
  [[nodiscard]] bool keeps_resident(demand const&, capacity const&) const noexcept { return keep; }
  balance_answer plan(balance_question const& asked, std::span<std::uint32_t> slots) noexcept
  {
    rows.assign(asked.rows.begin(), asked.rows.end());
    layers.assign(asked.layers.begin(), asked.layers.end());
    least = asked.least_slots;
    most = asked.most_slots;
    mean = asked.mean_slots;
    if (answer.spread) { std::ranges::copy(deal, slots.begin()); }
    return std::exchange(answer, {});
  }
};

static_assert(balancing_admission<dictated_admission>);

using balancing_manager = offload_manager<
  cpu_backend, solo_head_selector<>, gather_scatter_engine, lockstep_scheduler<visit_order::whole>, dictated_admission>;

constexpr std::uint32_t length = 120;

synthetic_model model_of()
{
  return synthetic_model{
    {.layers = 4,
     .query_heads = 4,
     .kv_heads = 2,
     .head_dim = 8,
     .block_tokens = 4,
     .head_groups = 2,
     .key_type = dtype::float32,
     .value_type = dtype::float32,
     .layer_groups = {
       {.first = 0, .count = 1}, {.first = 1, .count = 1, .kind = layer_kind::dense}, {.first = 2, .count = 2}}}};
}

solo_head_selector<> const six_blocks{.budget_tokens = 24, .sink_tokens = 4, .recent_tokens = 4, .dense_tokens = 24};

manager_options options_of(std::uint32_t most = 0)
{
  return {
    .max_rows = 2,
    .max_tokens = 200,
    .max_prefill_tokens = 8,
    .quota_tokens = 48,
    .max_quota_tokens = most,
    .slots = 2000};
}

template <class Manager>
row_id open(model_rig<Manager>& r, std::uint64_t seed, bool freely)
{
  row_id row = none<row_id>;
  sequence_options const request{.prompt_tokens = 40, .max_tokens = length, .place_freely = freely};
  REQUIRE(r.kv.open(request, row) == admission::admitted);
  r.engine.assign(row, seed);
  r.engine.prefill(row, 40, 8);
  return row;
}

template <class Manager, class Between>
void decode(model_rig<Manager>& r, row_id row, std::uint32_t until, Between between)
{
  while (r.kv.tokens_of(row) < until) {
    between();
    r.engine.step({{.row = row}});
    REQUIRE(r.kv.audit() == "");
  }
}

template <class Manager>
void decode(model_rig<Manager>& r, row_id row, std::uint32_t until)
{
  decode(r, row, until, [] {});
}

}  // namespace

TEST_SUITE("manager")
{
  TEST_CASE("balance carries out what admission says of rows, and only of those that are placed freely")
  {
    synthetic_model const model = model_of();
    model_rig<balancing_manager> r{model, options_of(), six_blocks};
    dictated_admission& policy = r.kv.admission_policy_state();
    row_id const mine = open(r, 1, false);
    row_id const free = open(r, 2, true);
    REQUIRE(r.kv.balance() == status::ok);
    REQUIRE(policy.rows.size() == 1);
    CHECK(policy.rows[0].row == free);
    CHECK_FALSE(policy.rows[0].recalls);
    CHECK_FALSE(policy.rows[0].measured);
    CHECK(policy.rows[0].max_tokens == length);
    CHECK(policy.rows[0].slots_now == policy.rows[0].slots_all);
    CHECK(policy.rows[0].slots_all == 4 * 2 * length / 4);
    CHECK(policy.rows[0].slots_lease == 2 * (length / 4 + 3 * 12));  // its prompt is shorter than that
    decode(r, mine, 60);
    decode(r, free, 60);
    CHECK(r.kv.mode_of(mine) == row_mode::sparse_offloaded);
    CHECK(r.kv.mode_of(free) == row_mode::sparse_resident);
    policy.answer = {.demote = free};
    REQUIRE(r.kv.balance() == status::ok);
    CHECK(r.kv.mode_of(free) == row_mode::sparse_offloaded);
    decode(r, free, 90);
    REQUIRE(r.kv.balance() == status::ok);
    REQUIRE(policy.rows.size() == 1);
    CHECK(policy.rows[0].recalls);
    CHECK(policy.rows[0].measured);
    CHECK(policy.rows[0].recalled_blocks > 0.0);
    CHECK(policy.rows[0].slots_now == policy.rows[0].slots_lease);
    policy.answer = {.promote = free};
    REQUIRE(r.kv.balance() == status::ok);
    CHECK(r.kv.mode_of(free) == row_mode::sparse_resident);
    decode(r, free, length);
    // What the row computes does not depend on where its blocks were.
    model_rig<lockstep_manager> reference{model, options_of(), six_blocks};
    row_id const same = open(reference, 2, false);
    decode(reference, same, length);
    for (std::uint32_t t = 0; t < length; ++t) { REQUIRE(r.engine.output(2, t) == reference.engine.output(2, t)); }
    // A row that steps or is gone cannot be asked for.
    policy.answer = {.demote = none<row_id>, .promote = row_id{9}};
    CHECK(r.kv.balance() == status::out_of_range);
  }

  TEST_CASE("a row that admission does not keep offloads from the beginning")
  {
    synthetic_model const model = model_of();
    model_rig<balancing_manager> r{model, options_of(), six_blocks};
    r.kv.admission_policy_state().keep = false;
    row_id const row = open(r, 2, true);
    decode(r, row, 60);
    CHECK(r.kv.mode_of(row) == row_mode::sparse_offloaded);
    REQUIRE(r.kv.balance() == status::ok);
    CHECK(r.kv.admission_policy_state().rows.at(0).recalls);
  }

  TEST_CASE("leases that begin after slots were dealt out have them, those before keep theirs, and bytes stay the same")
  {
    synthetic_model const model = model_of();
    model_rig<balancing_manager> r{model, options_of(96), six_blocks};
    dictated_admission& policy = r.kv.admission_policy_state();
    row_id const before = open(r, 1, false);
    decode(r, before, 60);
    policy.answer.spread = true;
    policy.deal = {20, 0, 9, 7 + 0};  // 36 = 3 x 12, but the last is below what a step can pin
    CHECK(r.kv.balance() == status::invalid_argument);
    CHECK(policy.least == 8);
    CHECK(policy.most == 24);
    CHECK(policy.mean == 12);
    policy.answer.spread = true;
    policy.deal = {21, 0, 8, 8};  // one more than there are
    CHECK(r.kv.balance() == status::invalid_argument);
    policy.answer.spread = true;
    policy.deal = {20, 0, 8, 8};
    REQUIRE(r.kv.balance() == status::ok);
    row_id const after = open(r, 2, false);
    decode(r, after, length);
    CHECK(r.kv.leased_slots(before, layer_id{0}) == 12);
    CHECK(r.kv.leased_slots(after, layer_id{0}) == 20);
    CHECK(r.kv.leased_slots(after, layer_id{1}) == 0);
    CHECK(r.kv.leased_slots(after, layer_id{3}) == 8);
    REQUIRE(r.kv.balance() == status::ok);
    CHECK(policy.layers[0].slots == 16.0);
    CHECK(policy.layers[0].next_slots == 20);
    CHECK_FALSE(policy.layers[1].selects);
    // A selection's six blocks, in each lane and step that both counted and was seen through.
    CHECK(policy.layers[2].selected_blocks > 0.0);
    CHECK(policy.layers[2].missed_blocks > policy.layers[0].missed_blocks);
    // To other rows and back, with leases of all sizes.
    saved_id saved;
    REQUIRE(r.kv.truncate(after, 100) == status::ok);
    REQUIRE(r.kv.preempt(after, saved) == status::ok);
    REQUIRE(r.kv.audit() == "");
    row_id again = none<row_id>;
    REQUIRE(r.kv.resume(saved, again) == admission::admitted);
    CHECK(r.kv.leased_slots(again, layer_id{0}) == 20);
    REQUIRE(r.kv.promote(again) == status::ok);
    REQUIRE(r.kv.demote(again) == status::ok);
    REQUIRE(r.kv.audit() == "");
    model_rig<lockstep_manager> reference{model, options_of(), six_blocks};
    row_id const same = open(reference, 2, false);
    decode(reference, same, length);
    for (std::uint32_t t = 0; t < length; ++t) { REQUIRE(r.engine.output(2, t) == reference.engine.output(2, t)); }
  }

  TEST_CASE("a most that is below the mean, or that pools lent by layer would need, is refused with the numbers")
  {
    cpu_backend backend{{.mode = cpu_mode::manual}};
    auto const stream = backend.create_stream();
    CHECK_THROWS_WITH_AS(
      (balancing_manager{backend, stream, model_of().geometry, options_of(40), six_blocks}),
      doctest::Contains("max_quota_tokens is 40, 10 slots; each layer has 12"), configuration_error);
    manager_options lent = options_of(96);
    std::vector<std::byte> memory(16);
    lent.lent_slots.assign(4, memory.data());
    CHECK_THROWS_AS((balancing_manager{backend, stream, model_of().geometry, lent, six_blocks}), configuration_error);
  }
}
