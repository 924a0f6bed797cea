#include <pulseinfer/admission/fixed_admission.hpp>

#include <doctest/doctest.h>
#include <rapidcheck.h>

#include <cstdint>
#include <string>
#include <vector>

using namespace pulseinfer;

namespace {

/// An idle system with room for anything.
capacity idle(std::uint32_t rows = 8)
{
  return {
    .rows_total = rows,
    .host_blocks_free = 1000,
    .slots_free = 1000,
    .slots_total = 1000,
    .host_blocks_total = 1000,
    .digest_extents_free = 1000,
    .digest_extents_total = 1000};
}

/// The books that the manager keeps, in numbers.
class system_model {
 public:
  explicit system_model(capacity const& all) : free_{all} {}

  admission offer(fixed_admission& policy, demand const& request)
  {
    admission const answer = policy.admit(request, free_);
    if (answer == admission::admitted) {
      ++free_.rows_running;
      free_.host_blocks_free -= request.host_blocks;
      free_.slots_free -= std::max(request.slots_prefill, request.slots_decode);
      free_.digest_extents_free -= request.digest_extents;
    }
    return answer;
  }

  void end(demand const& request)
  {
    --free_.rows_running;
    free_.host_blocks_free += request.host_blocks;
    free_.slots_free += std::max(request.slots_prefill, request.slots_decode);
    free_.digest_extents_free += request.digest_extents;
  }

  [[nodiscard]] capacity const& free() const { return free_; }

 private:
  capacity free_;
};

}  // namespace

TEST_SUITE("admission")
{
  // Report: sgl-project/sglang#22453
  TEST_CASE("no more requests are admitted than the slots serve")
  {
    fixed_admission policy;
    capacity all = idle();
    all.slots_total = all.slots_free = 10'000;
    system_model system{all};
    demand const request{.slots_decode = 4096};
    CHECK(system.offer(policy, request) == admission::admitted);
    CHECK(system.offer(policy, request) == admission::admitted);
    CHECK(system.offer(policy, request) == admission::queued);
    system.end(request);
    CHECK(system.offer(policy, request) == admission::admitted);
    CHECK(policy.admit({.slots_decode = 10'001}, all) == admission::rejected);
  }

  // Report: vllm-project/vllm#45388
  TEST_CASE("law 9: requests that do not fit together run one after the other, and neither holds blocks while it waits")
  {
    fixed_admission policy;
    capacity all = idle();
    all.host_blocks_total = all.host_blocks_free = 16;
    system_model system{all};
    demand const a{.host_blocks = 12};
    demand const b{.host_blocks = 9};
    REQUIRE(system.offer(policy, a) == admission::admitted);
    for (int turn = 0; turn < 200; ++turn) { REQUIRE(system.offer(policy, b) == admission::queued); }
    CHECK(system.free().host_blocks_free == 4);
    system.end(a);
    CHECK(system.offer(policy, b) == admission::admitted);
    CHECK(policy.admit({.host_blocks = 17}, system.free()) == admission::rejected);
    CHECK(policy.admit({.host_blocks = 16}, system.free()) == admission::queued);
  }

  TEST_CASE("each kind of memory queues a request that it has no room for now, and rejects one that it never will")
  {
    fixed_admission policy;
    CHECK(policy.admit({}, idle()) == admission::admitted);
    struct given {
      char const* what;
      demand request;
      std::uint64_t capacity::*wide_free;
      std::uint32_t capacity::*narrow_free;
    };
    for (given const& it :
         {given{"host blocks", {.host_blocks = 1000}, &capacity::host_blocks_free, nullptr},
          given{"prefill slots", {.slots_prefill = 1000, .slots_decode = 1}, &capacity::slots_free, nullptr},
          given{"decode slots", {.slots_prefill = 1, .slots_decode = 1000}, &capacity::slots_free, nullptr},
          given{"digest extents", {.digest_extents = 1000}, nullptr, &capacity::digest_extents_free}}) {
      CAPTURE(it.what);
      capacity free = idle();
      CHECK(policy.admit(it.request, free) == admission::admitted);
      if (it.wide_free != nullptr) { free.*it.wide_free = 999; }
      if (it.narrow_free != nullptr) { free.*it.narrow_free = 999; }
      CHECK(policy.admit(it.request, free) == admission::queued);
      demand more = it.request;
      more.host_blocks += more.host_blocks > 1 ? 1U : 0U;
      more.slots_prefill += more.slots_prefill > 1 ? 1U : 0U;
      more.slots_decode += more.slots_decode > 1 ? 1U : 0U;
      more.digest_extents += more.digest_extents > 1 ? 1U : 0U;
      CHECK(policy.admit(more, idle()) == admission::rejected);
    }
  }

  TEST_CASE("at most max_rows rows run, and never more than the system has")
  {
    for (std::uint32_t const limit : {0U, 1U, 3U, 8U, 20U}) {
      fixed_admission policy{.max_rows = limit};
      system_model system{idle(8)};
      std::uint32_t const expected = limit == 0 ? 8 : std::min(limit, 8U);
      for (std::uint32_t i = 0; i < expected; ++i) { REQUIRE(system.offer(policy, {}) == admission::admitted); }
      CHECK(system.offer(policy, {}) == admission::queued);
    }
    fixed_admission policy;
    CHECK(policy.admit({}, idle(0)) == admission::rejected);
  }

  TEST_CASE("what was measured changes nothing")
  {
    fixed_admission policy{.max_rows = 2};
    policy.observe({.rows = 2, .recalled_bytes = 1U << 30U, .stalled = nanoseconds{1'000'000'000}});
    CHECK(policy.admit({}, idle()) == admission::admitted);
  }

  TEST_CASE("law 9: whatever is offered and ends, all requests that can run do run, and memory never runs out")
  {
    bool const held = rc::check([](std::vector<std::uint16_t> const& sizes) {
      fixed_admission policy{.max_rows = *rc::gen::inRange(1U, 5U)};
      capacity all = idle(4);
      all.host_blocks_total = all.host_blocks_free = 64;
      all.slots_total = all.slots_free = 64;
      all.digest_extents_total = all.digest_extents_free = 8;
      system_model system{all};
      std::vector<demand> waiting;
      for (std::uint16_t const size : sizes) {
        waiting.push_back(
          {.host_blocks = size % 70U,
           .slots_prefill = size / 8U % 66U,
           .slots_decode = size / 64U % 32U,
           .digest_extents = size % 9U});
      }
      std::vector<demand> running;
      std::size_t next = 0;
      for (std::size_t turn = 0; next < waiting.size(); ++turn) {
        RC_ASSERT(turn <= 2 * waiting.size());
        bool const possible = waiting[next].host_blocks <= 64U && waiting[next].slots_prefill <= 64U;
        admission const answer = system.offer(policy, waiting[next]);
        RC_ASSERT((answer == admission::rejected) == (!possible || waiting[next].digest_extents > 8U));
        RC_ASSERT(system.free().host_blocks_free <= 64U && system.free().slots_free <= 64U);
        if (answer == admission::queued) {
          RC_ASSERT(!running.empty());
          system.end(running.front());
          running.erase(running.begin());
          continue;
        }
        if (answer == admission::admitted) { running.push_back(waiting[next]); }
        ++next;
      }
    });
    CHECK(held);
  }
}
