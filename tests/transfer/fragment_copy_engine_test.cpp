#include <pulseinfer/backend/cpu/cpu_backend.hpp>
#include <pulseinfer/backend/sim/sim_backend.hpp>
#include <pulseinfer/transfer/fragment_copy_engine.hpp>

#include <doctest/doctest.h>
#include <support/immediate_backend.hpp>
#include <support/recall_scene.hpp>
#include <transfer/transfer_engine_contract.hpp>

#include <cstdint>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

TEST_SUITE("transfer")
{
  TEST_CASE("law 1: fragment_copy_engine brings every block to its slot, whatever the layout and the options")
  {
    recalls_any_layout(fragment_copy_engine{});
    recalls_any_layout(fragment_copy_engine{.fragments_per_copy = 5, .rows_per_landing = 0});
    recalls_any_layout(fragment_copy_engine{.fragments_per_copy = 1000, .rows_per_landing = 2});
  }

  TEST_CASE("law 1: fragment_copy_engine does the same on each backend")
  {
    auto const each_way = [](auto& backend) {
      auto const finish = [&](auto stream) { REQUIRE(backend.synchronize(stream) == status::ok); };
      recalls_arrive(fragment_copy_engine{}, backend, {.offset = 4}, finish);
      recalls_arrive(fragment_copy_engine{.fragments_per_copy = 64}, backend, {.offset = 4}, finish);
    };
    cpu_backend manual{{.mode = cpu_mode::manual}};
    each_way(manual);
    cpu_backend threaded;
    each_way(threaded);
    sim_backend moving{{.move_data = true}};
    each_way(moving);
  }

  TEST_CASE("fragment_copy_engine makes one copy for each head's keys and each head's values of each block")
  {
    immediate_backend backend;
    recall_scene scene{{.layout = layout_of_pitch(64, 16, 3)}};
    plan_three_rows(scene, 1);
    auto single = fragment_copy_engine{}.bind(backend, limits_of(scene));
    REQUIRE(single.recall_async({}, scene.plan(), scene.landed()) == status::ok);
    CHECK(backend.copies == 6 * 2 * 3);
    CHECK(backend.runs.size() == 36);
    for (copy_run const& run : backend.runs) { CHECK(run.bytes == 16 * 64); }
    CHECK(backend.launches == 3);

    auto batched = fragment_copy_engine{.fragments_per_copy = 8, .rows_per_landing = 0}.bind(backend, limits_of(scene));
    REQUIRE(batched.recall_async({}, scene.plan(), scene.landed()) == status::ok);
    CHECK(backend.copies == 36 + 2 * 3);  // 18 fragments a row with misses: 8, 8, 2
    CHECK(backend.runs.size() == 72);
    CHECK(backend.launches == 4);
  }

  TEST_CASE("empty recalls and moves ask fragment_copy_engine's backend for nothing")
  {
    empty_recalls_ask_for_nothing(fragment_copy_engine{});
    empty_recalls_ask_for_nothing(fragment_copy_engine{.fragments_per_copy = 7, .rows_per_landing = 0});
  }

  TEST_CASE("fragment_copy_engine refuses more rows than its limit before it enqueues anything")
  {
    more_rows_than_the_limit_are_refused(fragment_copy_engine{});
  }

  // Report: ai-dynamo/dynamo#15079
  TEST_CASE("law 10: a refused copy costs its block alone: the row's other blocks and the other rows land")
  {
    for (std::uint32_t const together : {0U, 1U, 2U}) {
      for (std::uint32_t refused = 0; refused < 24; ++refused) {
        CAPTURE(together);
        CAPTURE(refused);
        immediate_backend backend;
        recall_scene scene{{}};
        auto bound = fragment_copy_engine{.rows_per_landing = together}.bind(backend, limits_of(scene));
        plan_three_rows(scene, 1);
        backend.refuse_copy = refused;
        backend.refused_copies = 1;
        CHECK(bound.recall_async({}, scene.plan(), scene.landed()) == status::ok);
        std::uint32_t const failed = refused < 12 ? 0 : 2;
        for (std::uint32_t place = 0; place < 3; ++place) {
          CHECK(scene.has_landed(place) == (place != failed));
          CHECK(scene.has_failed_in(place, refused % 12 / 4) == (place == failed));
        }
      }
    }
  }

  TEST_CASE(
    "law 10: where a posting is refused, the refusal is returned and the rows from there on are still in flight")
  {
    for (std::uint32_t refused = 0; refused < 3; ++refused) {
      immediate_backend backend;
      recall_scene scene{{}};
      auto bound = fragment_copy_engine{}.bind(backend, limits_of(scene));
      plan_three_rows(scene, 1);
      backend.refuse_launch = refused;
      CHECK(bound.recall_async({}, scene.plan(), scene.landed()) == status::resource_exhausted);
      for (std::uint32_t place = 0; place < 3; ++place) {
        CHECK(scene.has_landed(place) == (place < refused));
        CHECK(scene.is_in_flight(place) == (place >= refused));
      }
    }
  }

  TEST_CASE("law 1: fragment_copy_engine moves runs both ways, byte by byte, and does not merge them")
  {
    moves_runs_both_ways(fragment_copy_engine{});
    moves_runs_both_ways(fragment_copy_engine{.fragments_per_copy = 3});
    immediate_backend backend;
    recall_scene scene{{}};
    auto bound = fragment_copy_engine{}.bind(backend, limits_of(scene));
    std::byte target[40];
    std::byte const source[40] = {};
    std::vector<copy_run> const runs{{target, source, 20}, {target + 20, source + 20, 20}};
    CHECK(bound.move_async({}, {runs.data(), 2, copy_direction::host_to_device}) == status::ok);
    CHECK(backend.copies == 2);
    backend.refuse_copy = 3;
    CHECK(bound.move_async({}, {runs.data(), 2, copy_direction::host_to_device}) == status::transfer_failed);
  }

  TEST_CASE("fragment_copy_engine refuses a batch of no fragments")
  {
    immediate_backend backend;
    CHECK_THROWS_AS(
      static_cast<void>(fragment_copy_engine{.fragments_per_copy = 0}.bind(backend, transfer_limits{})),
      configuration_error);
  }
}
