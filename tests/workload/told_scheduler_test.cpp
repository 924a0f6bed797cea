// What a scheduler is told and how long it may wait, in a manager on simulated time.

#include <pulseinfer/admission/fixed_admission.hpp>
#include <pulseinfer/backend/sim/sim_backend.hpp>
#include <pulseinfer/manager/offload_manager.hpp>
#include <pulseinfer/operation/gather_blocks.hpp>
#include <pulseinfer/scheduler/interruptible_scheduler.hpp>
#include <pulseinfer/selector/external_selector.hpp>
#include <pulseinfer/transfer/gather_scatter_engine.hpp>
#include <pulseinfer/workload/timed_engine.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

using namespace pulseinfer;
using namespace std::chrono_literals;

namespace {

/// Refuses one gather in some, or one launch after so many others.
class refusing_backend : public sim_backend {
 public:
  using sim_backend::sim_backend;

  std::uint64_t mix = 1;
  std::uint32_t one_in = 0;  ///< 0: never
  std::uint64_t refused = 0;
  std::uint64_t refuse_after = ~std::uint64_t{0};

  template <operation Op>
  status launch(stream_ref stream, Op const& op, observation* observed = nullptr) noexcept
  {
    if (refuse_after-- == 0) {
      ++refused;
      return status::transfer_failed;
    }
    if constexpr (std::is_same_v<Op, gather_blocks>) {
      if (one_in != 0 && next(one_in) == 0) {
        ++refused;
        return status::transfer_failed;
      }
    }
    return sim_backend::launch(stream, op, observed);
  }

  std::uint64_t next(std::uint64_t below) noexcept
  {
    mix = mix * 6'364'136'223'846'793'005ULL + 1'442'695'040'888'963'407ULL;
    return (mix >> 33U) % below;
  }
};

static_assert(observed_backend<refusing_backend>);

constexpr std::uint32_t block_tokens = 4, budget = 8, prompt_tokens = 96, most_tokens = 200;

/// With `every` set it sleeps no longer than that at a time, until everything has landed.
struct asking_scheduler {
  static constexpr bool hits_first = true;
  static constexpr bool reads_mailbox = true;
  interruptible_scheduler<> base = {};
  nanoseconds every{0};
  std::uint64_t* asked = nullptr;
  double* rate = nullptr;  ///< what it was last told of the link

  decision decide(
    std::span<scheduler_row const> rows, link_state const& link, nanoseconds now, std::span<row_id> chosen) noexcept
  {
    if (rate != nullptr) { *rate = link.bytes_per_second; }
    bool const travels =
      std::ranges::any_of(rows, [](scheduler_row const& row) { return row.phase != row_phase::ready; });
    if (every.count() == 0 || !travels) { return base.decide(rows, link, now, chosen); }
    ++*asked;
    return {.kind = decision_kind::wait, .until = now + every};
  }
};

static_assert(layer_scheduler<asking_scheduler>);

using manager =
  offload_manager<refusing_backend, external_selector, gather_scatter_engine, asking_scheduler, fixed_admission>;

/// Blocks at random, for rows that have more than they may select.
void import(manager& kv, refusing_backend& backend, layer_id layer, row_list list)
{
  for (row_id const row : list) {
    if (kv.mode_of(row) != row_mode::sparse_offloaded) { continue; }
    auto const blocks = static_cast<std::uint32_t>(blocks_of(kv.tokens_of(row) + 1, block_tokens));
    std::vector<block_id> chosen;
    while (chosen.size() + 1 < budget) {
      auto const block = static_cast<block_id>(backend.next(blocks - 1));
      if (std::ranges::find(chosen, block) == chosen.end()) { chosen.push_back(block); }
    }
    if (kv.selector().import_selection(layer, lane_of(row, 0, 1), chosen, blocks) != status::ok) {
      FAIL("an import was refused");
    }
  }
}

}  // namespace

TEST_SUITE("workload")
{
  TEST_CASE(
    "a scheduler that asks again and again waits no longer than the limit all the same; then its rows have failed")
  {
    sim_options machine;
    machine.kernels.to_device_bytes_per_s = 1e4;  // a block takes tens of milliseconds
    refusing_backend backend{machine};
    auto const stream = backend.create_stream();
    std::uint64_t asked = 0;
    manager kv{
      backend,
      stream,
      kv_geometry{.layers = 2, .query_heads = 1, .kv_heads = 1, .head_dim = 16, .block_tokens = block_tokens},
      {.max_rows = 1,
       .max_tokens = most_tokens,
       .max_prefill_tokens = 32,
       .quota_tokens = (budget + 3) * block_tokens,
       .wait_limit = 1ms},
      external_selector{.budget_tokens = budget * block_tokens},
      gather_scatter_engine{},
      asking_scheduler{.every = 10us, .asked = &asked}};
    auto shares = [](row_id, layer_id, part) { return 1.0; };
    timed_engine<refusing_backend, manager, decltype(shares)> engine{
      backend, stream, kv, 1, {.pass = {.per_pass = 30us, .per_row = 3us}}, shares};
    engine.before_enter = [&](layer_id layer, row_list list) { import(kv, backend, layer, list); };
    row_id row = none<row_id>;
    REQUIRE(kv.open({.prompt_tokens = prompt_tokens, .max_tokens = most_tokens}, row) == admission::admitted);
    for (std::uint32_t done = 0; done < prompt_tokens; done += 32) { REQUIRE(engine.append(row, 32) == status::ok); }
    asked = 0;
    nanoseconds const begin = backend.now();
    REQUIRE(engine.step(std::vector{row}, [](row_id) {}, [] {}) == status::ok);
    CHECK(kv.row_status(row) == status::drain_timeout);
    CHECK(backend.now() - begin >= 1ms);
    CHECK(backend.now() - begin < 2ms);
    CHECK(asked >= 90);
    CHECK(kv.tokens_of(row) == prompt_tokens);
    CHECK(kv.close(row) == status::ok);
    CHECK(kv.drain(no_deadline) == status::ok);
    CHECK(kv.audit() == "");
  }

  TEST_CASE("a scheduler is told the link's rate, as fitted to the recalls that have landed")
  {
    for (double const link : {5e7, 4e8}) {
      sim_options machine;
      machine.kernels = {.per_operation = 1us, .to_device_bytes_per_s = link, .to_host_bytes_per_s = 1e9};
      refusing_backend backend{machine};
      auto const stream = backend.create_stream();
      double rate = -1.0;
      manager kv{
        backend,
        stream,
        kv_geometry{.layers = 3, .query_heads = 1, .kv_heads = 1, .head_dim = 64, .block_tokens = block_tokens},
        {.max_rows = 4,
         .max_tokens = most_tokens,
         .max_prefill_tokens = 32,
         .quota_tokens = (budget + 3) * block_tokens,
         .slots = 20'000},
        external_selector{.budget_tokens = budget * block_tokens},
        gather_scatter_engine{},
        asking_scheduler{.rate = &rate}};
      auto shares = [](row_id, layer_id, part) { return 1.0; };
      timed_engine<refusing_backend, manager, decltype(shares)> engine{
        backend, stream, kv, 4, {.pass = {.per_pass = 5us, .per_row = 1us}}, shares};
      engine.before_enter = [&](layer_id layer, row_list list) { import(kv, backend, layer, list); };
      std::vector<row_id> all(4, none<row_id>);
      for (row_id& row : all) {
        REQUIRE(kv.open({.prompt_tokens = prompt_tokens, .max_tokens = most_tokens}, row) == admission::admitted);
        for (std::uint32_t done = 0; done < prompt_tokens; done += 32) {
          REQUIRE(engine.append(row, 32) == status::ok);
        }
      }
      CHECK(rate <= 0.0);
      for (int step = 0; step < 20; ++step) {
        REQUIRE(engine.step(all, [](row_id) {}, [] {}) == status::ok);
      }
      CHECK(rate > 0.8 * link);
      CHECK(rate <= 1.02 * link);
    }
  }

  TEST_CASE(
    "a launch that is refused in mid-step stops neither the step nor those after it, whatever ends between them")
  {
    std::uint32_t told = 0;
    std::uint64_t place = 0;
    for (bool within = true; within; ++place) {
      CAPTURE(place);
      refusing_backend backend{sim_options{}};
      auto const stream = backend.create_stream();
      manager kv{
        backend,
        stream,
        kv_geometry{.layers = 3, .query_heads = 1, .kv_heads = 1, .head_dim = 16, .block_tokens = block_tokens},
        {.max_rows = 4,  // one ends at the next commit if it stands in a step
         .max_tokens = most_tokens,
         .max_prefill_tokens = 32,
         .quota_tokens = (budget + 3) * block_tokens,
         .slots = 20'000},
        external_selector{.budget_tokens = budget * block_tokens},
        gather_scatter_engine{},
        asking_scheduler{}};
      auto shares = [](row_id, layer_id, part) { return 1.0; };
      timed_engine<refusing_backend, manager, decltype(shares)> engine{
        backend, stream, kv, 4, {.pass = {.per_pass = 5us, .per_row = 1us}}, shares};
      engine.before_enter = [&](layer_id layer, row_list list) { import(kv, backend, layer, list); };
      std::vector<row_id> all(3, none<row_id>);
      auto const open = [&](row_id& row) {
        REQUIRE(kv.open({.prompt_tokens = prompt_tokens, .max_tokens = most_tokens}, row) == admission::admitted);
        for (std::uint32_t done = 0; done < prompt_tokens; done += 32) {
          REQUIRE(engine.append(row, 32) == status::ok);
        }
      };
      for (row_id& row : all) { open(row); }
      auto const step = [&] { return engine.step(all, [](row_id) {}, [] {}); };
      REQUIRE(step() == status::ok);
      backend.refuse_after = place;
      told += step() == status::ok ? 0U : 1U;
      within = backend.refused != 0;
      backend.refuse_after = ~std::uint64_t{0};
      if (place % 2 == 0) {
        // One that the refusal met, perhaps, and another in its place.
        REQUIRE(kv.close(all[1]) == status::ok);
        open(all[1]);
      }
      CHECK(step() == status::ok);
      CHECK(step() == status::ok);
      CHECK(engine.tokens() == 3);
      CHECK(kv.audit() == "");
    }
    CHECK(place > 20);
    CHECK(told > 3);
  }
}
