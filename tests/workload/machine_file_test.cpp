// The simulated machine's costs, read from a file: benchmarks/machines/machine_file.hpp.

#include "../../benchmarks/machines/machine_file.hpp"
#include <pulseinfer/backend/sim/control_cost.hpp>
#include <pulseinfer/backend/sim/link_model.hpp>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

using namespace pulseinfer;
using pulseinfer_bench::read_machine;

namespace {

std::string const h200 =
  (std::filesystem::path{__FILE__}.parent_path() / "../../benchmarks/machines/h200.json").string();

/// The committed machine with a change.
template <class Change>
std::string read_changed(Change change)
{
  std::ifstream in{h200};
  nlohmann::json file = nlohmann::json::parse(in);
  change(file);
  std::string const path = (std::filesystem::temp_directory_path() / "pulseinfer_machine_file_test.json").string();
  std::ofstream{path} << file.dump();
  std::string said;
  try {
    static_cast<void>(read_machine(path));
  } catch (argument_error const& e) {
    said = e.what();
  }
  std::remove(path.c_str());
  if (!said.empty()) { CHECK(said.find(path) != std::string::npos); }
  return said;
}

}  // namespace

TEST_SUITE("workload")
{
  TEST_CASE("the committed machine is the one whose costs the library names")
  {
    pulseinfer_bench::machine const m = read_machine(h200);
    CHECK(m.name.find("H200") != std::string::npos);
    CHECK(m.select_chain == nanoseconds{14'500});
    CHECK(m.options.kernels.per_operation == pcie5_kernel.per_operation);
    CHECK(m.options.kernels.per_run == pcie5_kernel.per_run);
    CHECK(m.options.kernels.to_device_bytes_per_s == doctest::Approx(pcie5_kernel.to_device_bytes_per_s));
    CHECK(m.options.kernels.to_host_bytes_per_s == doctest::Approx(pcie5_kernel.to_host_bytes_per_s));
    CHECK(m.options.copies.to_device_bytes_per_s == doctest::Approx(pcie5_copy_engine.to_device_bytes_per_s));
    CHECK(m.options.copies.per_run == pcie5_copy_engine.per_run);
    CHECK(m.options.control.resume == h200_control.resume);
    CHECK(m.options.control.wake == h200_control.wake);
    CHECK(m.options.control.host_per_segment == h200_control.host_per_segment);
    for (std::size_t by = 0; by < 2; ++by) {
      CHECK(
        m.options.sharing.compute_beside_link[by] ==
        doctest::Approx(h200_sharing.compute_beside_link[by]).epsilon(0.001));
      CHECK(
        m.options.sharing.link_beside_compute[by] ==
        doctest::Approx(h200_sharing.link_beside_compute[by]).epsilon(0.001));
      for (std::size_t down = 0; down < 2; ++down) {
        link_sharing::rates const& read = m.options.sharing.both_ways[by][down];
        link_sharing::rates const& named = h200_sharing.both_ways[by][down];
        CHECK(read.to_device == doctest::Approx(named.to_device).epsilon(0.002));
        CHECK(read.to_host == doctest::Approx(named.to_host).epsilon(0.002));
      }
    }
  }

  TEST_CASE("a machine's file that is not there, is no JSON, or lacks a number is refused by name")
  {
    CHECK_THROWS_WITH_AS(
      static_cast<void>(read_machine("no/such/file.json")), doctest::Contains("no/such/file.json: cannot be read"),
      argument_error);
    CHECK_THROWS_AS(static_cast<void>(read_machine(__FILE__)), argument_error);
    CHECK(read_changed([](nlohmann::json&) {}).empty());
    CHECK(read_changed([](nlohmann::json& f) { f["links"].erase("kernel"); }).find("kernel") != std::string::npos);
    CHECK(
      read_changed([](nlohmann::json& f) { f["control"]["wake_us"] = "soon"; }).find("number") != std::string::npos);
    std::string const mover =
      read_changed([](nlohmann::json& f) { f["sharing"]["both_ways"][0]["to_device_by"] = "mail"; });
    CHECK(mover.find("mail") != std::string::npos);
  }
}
