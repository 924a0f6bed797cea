#include <doctest/doctest.h>
#include <support/manager/mixed_batch.hpp>

#include <cstdint>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

struct outcome {
  std::uint64_t selections = 0;
  std::uint64_t recalled = 0;
};

template <class Manager>
outcome run(cpu_options const& cpu, std::uint32_t quota_tokens = 32)
{
  rig<Manager> r{mixed_batch::options(cpu, quota_tokens), mixed_batch::selector()};
  mixed_batch batch{r};
  outcome result;
  for (std::uint32_t step = 0; step < mixed_batch::steps; ++step) {
    REQUIRE(batch.step(r, step) == status::ok);
    REQUIRE(r.engine.fault() == "");
    result.recalled += r.kv.finish_sample().recalled_blocks;
  }
  result.selections = r.engine.selections;
  return result;
}

}  // namespace

TEST_SUITE("manager")
{
  TEST_CASE("law 8: the same inputs give the same selection, whatever order things run in and whoever schedules them")
  {
    outcome const reference = run<lockstep_manager>({.mode = cpu_mode::manual});
    CHECK(reference.recalled > 0);
    for (std::uint64_t const seed : {1U, 2U, 3U, 4U}) {
      cpu_options const cpu{.mode = cpu_mode::manual, .seed = seed};
      CHECK(run<lockstep_manager>(cpu).selections == reference.selections);
      CHECK(run<hits_manager>(cpu).selections == reference.selections);
      CHECK(run<fragment_manager>(cpu).selections == reference.selections);
    }
    for (int again = 0; again < 2; ++again) {
      cpu_options const cpu{.mode = cpu_mode::threaded};
      CHECK(run<lockstep_manager>(cpu).selections == reference.selections);
      CHECK(run<hits_manager>(cpu).selections == reference.selections);
      CHECK(run<fragment_manager>(cpu).selections == reference.selections);
    }
  }

  TEST_CASE("law 8: what is resident does not sway the selection, and one engine recalls as much as another")
  {
    outcome const small = run<lockstep_manager>({.mode = cpu_mode::manual});
    outcome const large = run<lockstep_manager>({.mode = cpu_mode::manual}, 200);
    CHECK(large.selections == small.selections);
    CHECK(large.recalled < small.recalled);
    CHECK(run<hits_manager>({.mode = cpu_mode::manual, .seed = 7}).recalled == small.recalled);
    CHECK(run<fragment_manager>({.mode = cpu_mode::manual, .seed = 7}).recalled == small.recalled);
  }
}
