#include <pulseinfer/workload/counted_workload.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

using namespace pulseinfer;

namespace {

constexpr std::uint32_t rows = 8, layers = 8;

[[nodiscard]] workload_options load(std::uint64_t seed = 1)
{
  return {.layers = layers, .rows = rows, .misses = {.mean_logit = -2.0}, .seed = seed};
}

/// A step in which `pieces` background pieces move after each layer. @return the misses that a generator counts
std::uint64_t step(counted_workload& workload, std::uint32_t pieces)
{
  std::uint64_t misses = 0;
  for (std::int32_t row = 0; row < static_cast<std::int32_t>(rows); ++row) {
    workload.begin_step(static_cast<row_id>(row));
  }
  for (std::int32_t l = 0; l < static_cast<std::int32_t>(layers); ++l) {
    auto const layer = static_cast<layer_id>(l);
    for (std::int32_t r = 0; r < static_cast<std::int32_t>(rows); ++r) {
      auto const row = static_cast<row_id>(r);
      misses += workload.generator().misses(row, layer);
      static_cast<void>(workload.plan(row, layer));
    }
    for (std::uint32_t i = 0; i < pieces; ++i) {
      background_source::piece given;
      if (!workload.next(given)) { break; }
      workload.done(given.name);
    }
    for (std::int32_t r = 0; r < static_cast<std::int32_t>(rows); ++r) {
      static_cast<void>(workload.attend(static_cast<row_id>(r), layer, part::landed));
    }
  }
  return misses;
}

}  // namespace

TEST_SUITE("workload")
{
  TEST_CASE("without foresight every miss is demanded and nothing moves in the background")
  {
    miss_generator generator{load()};
    counted_workload workload{generator, {}};
    std::uint64_t misses = 0;
    for (int i = 0; i < 20; ++i) { misses += step(workload, 1000); }
    CHECK(workload.totals().misses == misses);
    CHECK(workload.totals().demanded == misses);
    CHECK(workload.totals().moved == 0);
    CHECK(workload.totals().skipped_share == 0.0);
  }

  TEST_CASE("a free link fetches what the estimate names: its share of the misses, and wrong ones beside them")
  {
    miss_generator generator{load()};
    counted_workload workload{generator, {.prefetch = true}};
    std::uint64_t misses = 0;
    for (int i = 0; i < 50; ++i) { misses += step(workload, 1000); }
    workload_totals const& t = workload.totals();
    newcomer_model const model;
    CHECK(t.demanded + t.prefetched == misses);
    // Of all layers but the first.
    double const share = static_cast<double>(t.prefetched) / static_cast<double>(misses);
    CHECK(share == doctest::Approx(model.estimate_recall * (layers - 1) / layers).epsilon(0.05));
    double const precision = static_cast<double>(t.prefetched) / static_cast<double>(t.moved);
    CHECK(precision == doctest::Approx(model.estimate_precision).epsilon(0.03));
    CHECK(t.moved - t.prefetched == t.wasted);
    CHECK(workload.waiting_blocks() == 0);
  }

  TEST_CASE("what stands below the cuts comes while nothing else moves, and serves the next step")
  {
    for (std::uint32_t const pieces : {1000U, 3U}) {
      miss_generator generator{load()};
      counted_workload workload{generator, {.near_share = 1.0}};
      std::uint64_t misses = 0;
      for (int i = 0; i < 50; ++i) { misses += step(workload, pieces); }
      workload_totals const& t = workload.totals();
      CHECK(t.demanded + t.prefetched == misses);
      double const share = static_cast<double>(t.prefetched) / static_cast<double>(misses);
      double const all = newcomer_model{}.near_recall * 49.0 / 50.0;  // the first step has none before it
      if (pieces == 1000) {
        CHECK(share == doctest::Approx(all).epsilon(0.05));
        // What came last has not been asked for yet.
        std::uint64_t const waits = t.moved / 50;
        CHECK(t.moved == t.prefetched + t.wasted + waits);
      } else {
        CHECK(share > 0.0);
        CHECK(share < all / 2);
      }
      CHECK(workload.waiting_blocks() == 0);
    }
  }

  TEST_CASE("a prefetch that has no time is dropped, and its blocks are demanded")
  {
    miss_generator generator{load()};
    counted_workload none{generator, {.prefetch = true}};
    std::uint64_t const misses = step(none, 0);
    CHECK(none.totals().demanded == misses);
    CHECK(none.totals().moved == 0);
    CHECK(none.waiting_blocks() == 0);

    miss_generator other{load()};
    counted_workload few{other, {.prefetch = true}};
    std::uint64_t all = 0;
    for (int i = 0; i < 20; ++i) { all += step(few, 5); }
    CHECK(few.totals().prefetched > 0);
    CHECK(few.totals().demanded + few.totals().prefetched == all);
    CHECK(few.totals().moved <= 20 * (layers - 1) * 5 * 4);  // five pieces of at most four blocks
    CHECK(few.totals().moved > 20 * (layers - 1) * 5 * 2);
  }

  TEST_CASE("what is deferred comes before its row is back at the layer, or is demanded then")
  {
    for (std::uint32_t const pieces : {1000U, 3U, 0U}) {
      miss_generator generator{load(5)};
      counted_workload workload{generator, {.deferred_share = 0.02}};
      std::vector<float> skipped;
      workload.skipped = &skipped;
      std::uint64_t misses = 0;
      for (int i = 0; i < 30; ++i) { misses += step(workload, pieces); }
      workload_totals const& t = workload.totals();
      CHECK(t.deferred > misses / 2);
      CHECK(*std::ranges::max_element(skipped) <= 0.02F);
      // Every miss is demanded, has moved later, or waits still.
      CHECK(t.demanded + t.moved - t.wasted + workload.waiting_blocks() == misses);
      if (pieces == 1000) {
        CHECK(t.skipped_share < 1e-6);  // all of it has come before it is attended
        CHECK(workload.waiting_blocks() == 0);
      } else {
        CHECK(t.skipped_share > 0.0);
      }
      if (pieces == 0) { CHECK(t.moved == 0); }
    }
  }
}
