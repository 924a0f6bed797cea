#include <pulseinfer/transfer/run_merge.hpp>

#include <doctest/doctest.h>
#include <rapidcheck.h>

#include <cstddef>
#include <cstdint>
#include <vector>

using namespace pulseinfer;

namespace {

/// Merges all of `runs` through a buffer of `places` runs, as an engine does.
std::vector<copy_run> merged(std::vector<copy_run> const& runs, std::size_t places)
{
  std::vector<copy_run> all;
  std::vector<copy_run> buffer(places);
  std::span<copy_run const> rest{runs};
  while (!rest.empty()) {
    merge_result const done = merge_runs(rest, buffer);
    if (done.taken == 0) { break; }
    rest = rest.subspan(done.taken);
    all.insert(all.end(), buffer.begin(), buffer.begin() + static_cast<std::ptrdiff_t>(done.written));
  }
  return all;
}

}  // namespace

TEST_SUITE("transfer")
{
  TEST_CASE("runs merge where the end of one is the begin of the next in source and target, and nowhere else")
  {
    std::byte target[100];
    std::byte source[100];
    std::vector<copy_run> const runs{{target, source, 10},           {target + 10, source + 10, 5},  // neighbours
                                     {target + 15, source + 20, 5},                                  // target alone
                                     {target + 30, source + 25, 5},                                  // source alone
                                     {target + 40, source + 30, 0},                                  // empty
                                     {target + 35, source + 30, 20},  // neighbour of the one before the empty one
                                     {target + 54, source + 49, 2}};  // overlaps
    std::vector<copy_run> const result = merged(runs, 64);
    REQUIRE(result.size() == 4);
    CHECK(result[0].bytes == 15);
    CHECK(result[1].bytes == 5);
    CHECK(result[2].target == target + 30);
    CHECK(result[2].bytes == 25);
    CHECK(result[3].bytes == 2);
  }

  TEST_CASE("a full buffer still takes what merges into its last run, and then stops")
  {
    std::byte target[100];
    std::byte source[100];
    std::vector<copy_run> const runs{
      {target, source, 10}, {target + 10, source + 10, 5}, {target + 50, source + 50, 5}};
    copy_run one;
    merge_result const done = merge_runs(runs, {&one, 1});
    CHECK(done.taken == 2);
    CHECK(done.written == 1);
    CHECK(one.bytes == 15);
  }

  // Report: sgl-project/sglang#23609
  TEST_CASE("no runs, or empty ones, give no runs")
  {
    copy_run one;
    CHECK(merge_runs({}, {&one, 1}).written == 0);
    std::byte byte{};
    std::vector<copy_run> const empty{{&byte, &byte, 0}, {&byte, &byte, 0}};
    merge_result const done = merge_runs(empty, {&one, 1});
    CHECK(done.taken == 2);
    CHECK(done.written == 0);
  }

  TEST_CASE("law 1: merged runs move each byte from where the runs moved it, in fewer runs")
  {
    bool const held = rc::check([](std::vector<std::uint8_t> const& steps) {
      static std::byte target[8192];
      static std::byte source[8192];
      std::vector<copy_run> runs;
      std::size_t to = 0;
      std::size_t from = 0;
      for (std::uint8_t const step : steps) {
        std::uint64_t const bytes = step % 8U;
        to += (step & 64U) != 0 ? 3U : 0U;
        from += (step & 128U) != 0 ? 5U : 0U;
        if (to + bytes > sizeof(target) || from + bytes > sizeof(source)) { break; }
        runs.push_back({target + to, source + from, bytes});
        to += bytes;
        from += bytes;
      }
      std::size_t const places = *rc::gen::inRange<std::size_t>(1, 6);
      auto const bytes_of = [](std::vector<copy_run> const& list) {
        std::vector<std::pair<std::byte*, std::byte const*>> bytes;
        for (copy_run const& run : list) {
          for (std::uint64_t i = 0; i < run.bytes; ++i) { bytes.emplace_back(run.target + i, run.source + i); }
        }
        return bytes;
      };
      std::vector<copy_run> const result = merged(runs, places);
      RC_ASSERT(bytes_of(result) == bytes_of(runs));
      for (copy_run const& run : result) { RC_ASSERT(run.bytes > 0U); }
      if (places > runs.size()) {
        for (std::size_t i = 1; i < result.size(); ++i) {
          bool const neighbours = result[i - 1].target + result[i - 1].bytes == result[i].target &&
            result[i - 1].source + result[i - 1].bytes == result[i].source;
          RC_ASSERT(!neighbours);
        }
      }
    });
    CHECK(held);
  }
}
