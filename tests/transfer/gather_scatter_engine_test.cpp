#include <pulseinfer/backend/checked.hpp>
#include <pulseinfer/backend/cpu/cpu_backend.hpp>
#include <pulseinfer/backend/sim/sim_backend.hpp>
#include <pulseinfer/backend/traced.hpp>
#include <pulseinfer/transfer/gather_scatter_engine.hpp>

#include <doctest/doctest.h>
#include <support/immediate_backend.hpp>
#include <support/recall_scene.hpp>
#include <transfer/transfer_engine_contract.hpp>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

/// A backend whose launches are dear.
template <class B>
struct dear : B {
  static constexpr bool prefers_few_launches = true;
};

/// Work takes the time that a test says and does nothing. Launches are dear.
struct timed_backend : immediate_backend {
  static constexpr bool prefers_few_launches = true;

  template <operation Op>
  status launch(stream_ref, Op const& op) noexcept
  {
    if (launches == refuse_launch) { return status::resource_exhausted; }
    ++launches;
    if constexpr (std::is_same_v<Op, move_runs>) { time += nanoseconds{op.count * 1000}; }
    if constexpr (std::is_same_v<Op, gather_blocks>) {
      time += nanoseconds{static_cast<std::int64_t>(1e9 * static_cast<double>(op.plan.capacity) / rate_of(op.groups))};
      gathered = op.groups;
    }
    return status::ok;
  }
  status copy(stream_ref, copy_list list) noexcept
  {
    ++copies;
    for (std::uint32_t i = 0; i < list.count && list.direction != copy_direction::device_to_device; ++i) {
      bool const up = list.direction == copy_direction::host_to_device;
      time += nanoseconds{list.runs[i].bytes >= (up ? copies_up : copies_down) ? 900 : 1100};
    }
    return status::ok;
  }
  [[nodiscard]] nanoseconds now() const noexcept { return time; }
  [[nodiscard]] double rate_of(std::uint32_t groups) const
  {
    return groups < saturated ? 90.0 * groups : 90.0 * saturated;
  }

  nanoseconds time{0};
  std::uint32_t saturated = 6;    ///< groups that more do not pass
  std::uint32_t gathered = 0;     ///< groups of the last gather
  std::uint64_t copies_up = 0;    ///< runs of so many bytes and more are copied faster than moved by a kernel
  std::uint64_t copies_down = 0;  ///< likewise to the host
};

/// Says when it is asked whether it captures.
struct capturing_backend : immediate_backend {
  bool captures = false;
  [[nodiscard]] bool is_capturing(stream_ref) const noexcept { return captures; }
};

}  // namespace

TEST_SUITE("transfer")
{
  TEST_CASE("law 1: gather_scatter_engine brings every block to its slot, whatever the layout and the options")
  {
    recalls_any_layout(gather_scatter_engine{});
    recalls_any_layout(gather_scatter_engine{.groups = 1, .rows_per_landing = 0});
    recalls_any_layout(gather_scatter_engine{.groups = 3, .rows_per_landing = 2});
  }

  TEST_CASE("law 1: gather_scatter_engine does the same on each backend")
  {
    auto const each_way = [](auto& backend) {
      auto const finish = [&](auto stream) { REQUIRE(backend.synchronize(stream) == status::ok); };
      for (std::uint32_t const rows : {0U, 1U, 2U}) {
        recalls_arrive(gather_scatter_engine{.rows_per_landing = rows}, backend, {.offset = 4}, finish);
      }
    };
    cpu_backend manual{{.mode = cpu_mode::manual}};
    each_way(manual);
    cpu_backend threaded;
    each_way(threaded);
    sim_backend moving{{.move_data = true}};
    each_way(moving);
  }

  TEST_CASE("a simulation that moves no data still lands the rows, after the time that the plan's bytes take")
  {
    sim_backend backend{{.move_data = false}};
    recall_scene scene{{}};
    auto bound = gather_scatter_engine{}.bind(backend, limits_of(scene));
    sim_backend::stream_ref const stream = backend.create_stream(stream_priority::high);
    plan_three_rows(scene, 1);
    REQUIRE(bound.recall_async(stream, scene.plan(), scene.landed()) == status::ok);
    CHECK(scene.is_in_flight(0));
    REQUIRE(backend.synchronize(stream) == status::ok);
    for (std::uint32_t place = 0; place < 3; ++place) { CHECK(scene.has_landed(place)); }
    CHECK(scene.difference() == "");
    CHECK(backend.busy(sim_resource::to_device) > nanoseconds{0});
  }

  TEST_CASE("the first rows of a plan land while later ones still travel")
  {
    cpu_backend backend{{.mode = cpu_mode::manual}};
    recall_scene scene{{}};
    auto bound = gather_scatter_engine{}.bind(backend, limits_of(scene));
    cpu_backend::stream_ref const stream = backend.create_stream();
    plan_three_rows(scene, 1);
    REQUIRE(bound.recall_async(stream, scene.plan(), scene.landed()) == status::ok);
    CHECK(scene.is_in_flight(0));
    REQUIRE(backend.run_one());
    CHECK(scene.is_in_flight(0));
    REQUIRE(backend.run_one());
    CHECK(scene.has_landed(0));
    scene.expect_arrived(0);
    CHECK(scene.difference() == "");
    CHECK(scene.is_in_flight(2));
    backend.run_all();
    CHECK(scene.has_landed(2));

    plan_three_rows(scene, 2);
    auto together = gather_scatter_engine{.rows_per_landing = 0}.bind(backend, limits_of(scene));
    REQUIRE(together.recall_async(stream, scene.plan(), scene.landed()) == status::ok);
    CHECK(backend.queued_tasks() == 2);
    backend.run_all();
    backend.destroy_stream(stream);
  }

  TEST_CASE("rows land together by default where launches are dear, also behind decorators, and one by one elsewhere")
  {
    using dear_cpu = dear<cpu_backend>;
    static_assert(prefers_few_launches<traced<dear_cpu>> && prefers_few_launches<checked<dear_cpu>>);
    static_assert(!prefers_few_launches<traced<cpu_backend>> && !prefers_few_launches<sim_backend>);
    auto const launches = [&](auto& backend, gather_scatter_engine engine) {
      engine.measure = false;
      recall_scene scene{{.layout = layout_of_pitch(64, 17)}};
      plan_three_rows(scene, 1);
      backend.launches = 0;
      auto bound = engine.bind(backend, limits_of(scene));
      CHECK(bound.recall_async({}, scene.plan(), scene.landed()) == status::ok);
      for (std::uint32_t place = 0; place < 3; ++place) { CHECK(scene.has_landed(place)); }
      return backend.launches;
    };
    dear<immediate_backend> dear_one;
    immediate_backend cheap_one;
    CHECK(launches(dear_one, {}) == 2);
    CHECK(launches(cheap_one, {}) == 6);
    CHECK(launches(dear_one, {.rows_per_landing = 1}) == 6);
    CHECK(launches(cheap_one, {.rows_per_landing = 0}) == 2);
  }

  TEST_CASE("law 1: small blocks are gathered in the order of their host addresses where launches are dear")
  {
    for (std::uint32_t refused = 0; refused < 4; ++refused) {
      dear<immediate_backend> backend;
      recall_scene scene{{}};
      REQUIRE(scene.sizes().layout.block_bytes < order_entries::ordered_below_bytes);
      auto bound = gather_scatter_engine{.groups = 2, .measure = false}.bind(backend, limits_of(scene));
      CHECK(backend.allocated > 0);
      plan_three_rows(scene, 1);
      backend.refuse_launch = refused;
      backend.refused_launches = 1;
      CHECK(bound.recall_async({}, scene.plan(), scene.landed()) == status::ok);
      for (std::uint32_t place = 0; place < 3; ++place) {
        CHECK(scene.has_landed(place) == (refused == 3));
        CHECK(scene.has_failed(place) == (refused != 3));
      }
      CHECK(backend.launches == (refused == 3 ? 3 : refused + 1));
      if (refused == 3) { scene.expect_all_arrived(); }
      CHECK((refused < 3 || scene.difference() == ""));
    }
  }

  TEST_CASE("law 1: a host block that rows share is read once where that is wanted, on each backend")
  {
    auto const plan_eight = [](recall_scene& scene) {
      scene.begin_plan(2);
      for (std::int32_t row = 0; row < 8; ++row) {
        scene.add_row(row);
        auto const slot = static_cast<std::uint32_t>(row) * 3;
        scene.add_entry(0, 0, 1, slot);
        scene.add_entry(1, 0, 1, slot + 2);
        scene.add_entry(0, 1, row == 3 ? 0U : 4U, slot + 1);
      }
    };
    auto const each_way = [&](auto& backend) {
      // Small blocks, which are put in order too where launches are dear, and larger ones.
      for (std::uint32_t const pitch : {16U, 260U}) {
        recall_scene scene{{.layout = layout_of_pitch(pitch, 17), .slots = 24, .offset = 4}};
        auto bound =
          gather_scatter_engine{.groups = 3, .rows_per_landing = 0, .join_shared = true, .measure = false}.bind(
            backend, limits_of(scene));
        auto const stream = backend.create_stream(stream_priority::high);
        for (bool const shared : {true, false}) {
          plan_eight(scene);
          recall_plan_ref plan = scene.plan();
          plan.may_share = shared;
          REQUIRE(bound.recall_async(stream, plan, scene.landed()) == status::ok);
          if constexpr (requires { backend.synchronize(stream); }) {
            REQUIRE(backend.synchronize(stream) == status::ok);
          }
          scene.expect_all_arrived();
          REQUIRE(scene.difference() == "");
          for (std::uint32_t place = 0; place < 8; ++place) { REQUIRE(scene.has_landed(place)); }
          scene.clear_device();
        }
        backend.destroy_stream(stream);
      }
    };
    dear<immediate_backend> dear_one;
    each_way(dear_one);
    cpu_backend manual{{.mode = cpu_mode::manual}};
    each_way(manual);
    cpu_backend threaded;
    each_way(threaded);
    sim_backend moving{{.move_data = true}};
    each_way(moving);

    // What is known not to share, rows by themselves and engines that were not asked launch nothing more.
    auto const launches = [&](gather_scatter_engine engine, bool shared) {
      immediate_backend backend;
      recall_scene scene{{.layout = layout_of_pitch(64, 17), .slots = 24}};
      auto bound = engine.bind(backend, limits_of(scene));
      plan_eight(scene);
      recall_plan_ref plan = scene.plan();
      plan.may_share = shared;
      CHECK(bound.recall_async({}, plan, scene.landed()) == status::ok);
      return backend.launches;
    };
    CHECK(launches({.rows_per_landing = 0, .join_shared = true}, true) == 3);
    CHECK(launches({.rows_per_landing = 0, .join_shared = true}, false) == 2);
    CHECK(launches({.rows_per_landing = 0}, true) == 2);
    CHECK(launches({.rows_per_landing = 1, .join_shared = true}, true) == 16);
    CHECK(launches({.rows_per_landing = 4, .join_shared = true}, true) == 6);
  }

  TEST_CASE("law 10: rows whose entries could not be joined are failed")
  {
    immediate_backend backend;
    recall_scene scene{{}};
    auto bound = gather_scatter_engine{.rows_per_landing = 0, .join_shared = true}.bind(backend, limits_of(scene));
    plan_three_rows(scene, 1);
    recall_plan_ref plan = scene.plan();
    plan.may_share = true;
    backend.refuse_launch = 0;
    backend.refused_launches = 1;
    CHECK(bound.recall_async({}, plan, scene.landed()) == status::ok);
    for (std::uint32_t place = 0; place < 3; ++place) { CHECK(scene.has_failed(place)); }
  }

  TEST_CASE("the fewest groups that come near the best rate are chosen")
  {
    using rates = std::vector<gather_rate>;
    CHECK(choose_gather_groups(rates{}, 7) == 7);
    CHECK(choose_gather_groups(rates{{4, 0.0}, {8, 0.0}}, 7) == 7);
    CHECK(choose_gather_groups(rates{{4, 40.0}, {6, 49.0}, {8, 50.0}, {12, 50.5}}, 7) == 6);
    CHECK(choose_gather_groups(rates{{12, 50.0}, {4, 48.0}, {8, 49.0}}, 7) == 4);
    CHECK(choose_gather_groups(rates{{4, 10.0}, {12, 50.0}}, 7) == 12);
  }

  TEST_CASE("where launches are dear the groups of a gather are measured, unless they are given")
  {
    for (std::uint32_t const saturated : {1U, 5U, 8U, 40U}) {
      timed_backend backend;
      backend.saturated = saturated;
      auto const bound = gather_scatter_engine{}.bind(backend, transfer_limits{.layout = layout_of_pitch(64, 16)});
      CHECK(bound.groups() == (saturated == 1 ? 4U : saturated == 5 ? 6U : saturated == 8 ? 8U : 12U));
      CHECK(backend.allocated == 0);
      CHECK(backend.streams == 0);
      CHECK(backend.events == 0);
    }
    timed_backend backend;
    CHECK(
      gather_scatter_engine{.groups = 5, .copy_engine_from_bytes = 0}.bind(backend, transfer_limits{}).groups() == 5);
    CHECK(
      gather_scatter_engine{.measure = false}.bind(backend, transfer_limits{}).groups() ==
      gather_scatter_engine::groups_unmeasured);
    CHECK(backend.launches + backend.copies == 0);
    backend.refuse_launch = 3;
    CHECK_THROWS_AS(static_cast<void>(gather_scatter_engine{}.bind(backend, transfer_limits{})), resource_error);
    CHECK(backend.allocated == 0);
    CHECK(backend.streams == 0);
    immediate_backend cheap;
    CHECK(gather_scatter_engine{}.bind(cheap, transfer_limits{}).groups() == gather_scatter_engine::groups_unmeasured);
    CHECK(cheap.launches + cheap.copies == 0);
  }

  TEST_CASE("the copy engine moves from the shortest run on from which it stays near the gather")
  {
    constexpr auto up = copy_direction::host_to_device, down = copy_direction::device_to_host;
    using rates = std::vector<move_rate>;
    auto const chosen = [](rates const& measured, copy_direction direction) {
      return choose_copy_engine_from(measured, direction, 7);
    };
    CHECK(chosen({}, up) == 7);
    CHECK(chosen({{up, 8, 0.0, 10.0}, {down, 8, 5.0, 5.0}}, up) == 7);
    rates const both{{up, 8, 5.0, 30.0}, {up, 16, 9.6, 10.0}, {up, 32, 50.0, 40.0}, {down, 8, 50.0, 50.0}};
    CHECK(chosen(both, up) == 16);
    CHECK(chosen(both, down) == 8);
    CHECK(chosen({{up, 8, 50.0, 30.0}, {up, 16, 9.0, 10.0}, {up, 32, 50.0, 40.0}}, up) == 32);
    CHECK(chosen({{up, 8, 50.0, 30.0}, {up, 16, 9.0, 10.0}}, up) == never_by_copy_engine);
  }

  TEST_CASE("where launches are dear the movers are measured, unless the length is given, and told")
  {
    timed_backend backend;
    backend.copies_up = 32768;
    backend.copies_down = 1U << 20U;
    transfer_limits const limits{.max_rows = 1, .layout = layout_of_pitch(64, 16)};
    {
      auto const bound = gather_scatter_engine{.groups = 3}.bind(backend, limits);
      transfer_report const& told = bound.report();
      CHECK(told.groups == 3);
      CHECK(told.gather_rates.empty());
      CHECK(told.move_rates.size() == 2 * tried_run_bytes.size());
      CHECK(told.copy_engine_from_bytes == 32768);
      CHECK(told.copy_engine_to_host_from_bytes == never_by_copy_engine);
      CHECK(backend.allocated == 0);
      CHECK(backend.streams == 0);
      CHECK(backend.events == 0);
    }
    auto const given = gather_scatter_engine{.groups = 3, .copy_engine_from_bytes = 5}.bind(backend, limits);
    CHECK(given.report().copy_engine_from_bytes == 5);
    CHECK(given.report().copy_engine_to_host_from_bytes == 5);
    CHECK(given.report().move_rates.empty());
    std::uint64_t const before = backend.launches + backend.copies;
    auto const unmeasured = gather_scatter_engine{.measure = false}.bind(backend, limits);
    CHECK(unmeasured.report().copy_engine_from_bytes == gather_scatter_engine::copy_engine_unmeasured_bytes);
    CHECK(backend.launches + backend.copies == before);
    immediate_backend cheap;
    CHECK(gather_scatter_engine{}.bind(cheap, limits).report().copy_engine_from_bytes == 0);
    backend.refuse_launch = backend.launches + 2;
    CHECK_THROWS_AS(static_cast<void>(gather_scatter_engine{.groups = 3}.bind(backend, limits)), resource_error);
    CHECK(backend.allocated == 0);
    CHECK(backend.streams == 0);
  }

  TEST_CASE(
    "law 1: short runs go by a kernel, long ones, those within the device and none under capture by the copy engine")
  {
    capturing_backend backend;
    auto bound = gather_scatter_engine{.runs_per_copy = 50, .copy_engine_from_bytes = 100}.bind(
      backend, transfer_limits{.max_rows = 1});
    std::vector<std::byte> source(200 * 200);
    for (std::size_t i = 0; i < source.size(); ++i) { source[i] = static_cast<std::byte>(i * 7 + i / 256); }
    auto const moves = [&](std::uint64_t bytes, std::uint32_t count, copy_direction direction) {
      std::vector<std::byte> target(source.size());
      std::vector<std::byte> wanted(source.size());
      std::vector<copy_run> runs;
      for (std::size_t i = 0; i < count; ++i) {
        runs.push_back({target.data() + i * 200, source.data() + (count - 1 - i) * 200, bytes});
        std::copy_n(source.data() + (count - 1 - i) * 200, bytes, wanted.data() + i * 200);
      }
      backend.launches = backend.copies = 0;
      REQUIRE(bound.move_async({}, {runs.data(), count, direction}) == status::ok);
      CHECK(target == wanted);
      return std::pair{backend.launches, backend.copies};
    };
    using calls = std::pair<std::uint64_t, std::uint64_t>;
    CHECK(moves(99, 100, copy_direction::host_to_device) == calls{4, 0});  // twice 40 and 10
    CHECK(moves(99, 100, copy_direction::device_to_host) == calls{4, 0});
    CHECK(moves(100, 100, copy_direction::host_to_device) == calls{0, 5});  // 6, 12, 24, 8 and 50
    CHECK(moves(7, 3, copy_direction::device_to_device) == calls{0, 1});
    backend.captures = true;
    CHECK(moves(100, 40, copy_direction::host_to_device) == calls{1, 0});
    CHECK(moves(7, 3, copy_direction::device_to_device) == calls{1, 0});
  }

  TEST_CASE("a plan that can hold no entries is posted without a gather")
  {
    immediate_backend backend;
    recall_scene scene{{}};
    auto bound = gather_scatter_engine{.rows_per_landing = 0}.bind(backend, limits_of(scene));
    scene.begin_plan(0);
    scene.add_row(6);
    recall_plan_ref plan = scene.plan();
    plan.capacity = 0;
    CHECK(bound.recall_async({}, plan, scene.landed()) == status::ok);
    CHECK(backend.launches == 1);
    CHECK(scene.has_landed(0));
  }

  TEST_CASE("empty recalls and moves ask gather_scatter_engine's backend for nothing")
  {
    empty_recalls_ask_for_nothing(gather_scatter_engine{});
    empty_recalls_ask_for_nothing(gather_scatter_engine{.rows_per_landing = 0});
  }

  TEST_CASE("gather_scatter_engine refuses more rows than its limit before it enqueues anything")
  {
    more_rows_than_the_limit_are_refused(gather_scatter_engine{});
  }

  // Report: ai-dynamo/dynamo#15079
  TEST_CASE("law 10: rows whose gather is refused are failed, and those enqueued before land")
  {
    for (std::uint32_t refused = 0; refused < 6; ++refused) {
      CAPTURE(refused);
      immediate_backend backend;
      recall_scene scene{{}};
      auto bound = gather_scatter_engine{}.bind(backend, limits_of(scene));
      plan_three_rows(scene, 1);
      backend.refuse_launch = refused;
      backend.refused_launches = 1;
      CHECK(bound.recall_async({}, scene.plan(), scene.landed()) == status::ok);
      std::uint32_t const landed = refused / 2;  // a gather and a landing each
      for (std::uint32_t place = 0; place < 3; ++place) {
        CHECK(scene.has_landed(place) == (place < landed));
        CHECK(scene.has_failed(place) == (place >= landed));
      }
    }
  }

  TEST_CASE("law 10: where the failing is refused too, the refusal is returned and the rows are still in flight")
  {
    for (std::uint32_t refused = 0; refused < 6; ++refused) {
      CAPTURE(refused);
      immediate_backend backend;
      recall_scene scene{{}};
      auto bound = gather_scatter_engine{}.bind(backend, limits_of(scene));
      plan_three_rows(scene, 1);
      backend.refuse_launch = refused;
      CHECK(bound.recall_async({}, scene.plan(), scene.landed()) == status::resource_exhausted);
      for (std::uint32_t place = 0; place < 3; ++place) {
        CHECK(scene.has_landed(place) == (place < refused / 2));
        CHECK(scene.is_in_flight(place) == (place >= refused / 2));
      }
    }
  }

  TEST_CASE("law 1: gather_scatter_engine moves runs both ways, byte by byte")
  {
    moves_runs_both_ways(gather_scatter_engine{});
    moves_runs_both_ways(gather_scatter_engine{.runs_per_copy = 1});
    moves_runs_both_ways(gather_scatter_engine{.runs_per_copy = 3});
    moves_runs_both_ways(gather_scatter_engine{.copy_engine_from_bytes = never_by_copy_engine});
  }

  TEST_CASE("bulk moves go out as merged runs, in calls that grow to runs_per_copy")
  {
    immediate_backend backend;
    recall_scene scene{{}};
    std::vector<std::byte> target(1000);
    std::vector<std::byte> const source(1000);
    std::vector<copy_run> runs;
    for (std::size_t i = 0; i < 20; ++i) {
      std::size_t const gap = i / 4 * 10;  // five groups of four neighbours
      runs.push_back({target.data() + i * 10 + gap, source.data() + i * 10 + gap, 10});
    }
    auto bound = gather_scatter_engine{.runs_per_copy = 2}.bind(backend, limits_of(scene));
    CHECK(bound.move_async({}, {runs.data(), 20, copy_direction::device_to_host}) == status::ok);
    CHECK(backend.copies == 4);  // of one, one, two and one
    REQUIRE(backend.runs.size() == 5);
    for (copy_run const& run : backend.runs) { CHECK(run.bytes == 40); }
    backend.refuse_copy = 5;
    CHECK(bound.move_async({}, {runs.data(), 20, copy_direction::device_to_host}) == status::transfer_failed);
    CHECK(backend.copies == 5);
  }

  TEST_CASE("gather_scatter_engine refuses options that could move nothing")
  {
    immediate_backend backend;
    CHECK_THROWS_WITH_AS(
      static_cast<void>(gather_scatter_engine{.groups = 0}.bind(backend, transfer_limits{})),
      "invalid_argument: gather_scatter_engine of 0 groups and 64 runs per copy; both need at least 1",
      configuration_error);
    CHECK_THROWS_AS(
      static_cast<void>(gather_scatter_engine{.runs_per_copy = 0}.bind(backend, transfer_limits{})),
      configuration_error);
  }
}
