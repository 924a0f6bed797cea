#pragma once

/// Costs of a simulated machine, read from JSON: benchmarks/machines/*.json.

#include <pulseinfer/backend/sim/options.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/types.hpp>

#include <nlohmann/json.hpp>

#include <cmath>
#include <fstream>
#include <string>

namespace pulseinfer_bench {

struct machine {
  std::string name;
  pulseinfer::sim_options options = {};
  pulseinfer::nanoseconds select_chain{0};  ///< from a layer's queries to the posted plan
};

/// @throws pulseinfer::argument_error naming the file and what is wrong with it
[[nodiscard]] inline machine read_machine(std::string const& path)
{
  using namespace pulseinfer;
  auto const refuse = [&](std::string const& what) -> argument_error {
    return argument_error{status::invalid_argument, path + ": " + what};
  };
  std::ifstream in{path};
  if (!in) { throw refuse("cannot be read"); }
  try {
    nlohmann::json const file = nlohmann::json::parse(in);
    auto const time = [](nlohmann::json const& us) { return nanoseconds{std::llround(us.get<double>() * 1000.0)}; };
    auto const link = [&](char const* name) {
      nlohmann::json const& of = file.at("links").at(name);
      return link_cost{
        .per_operation = time(of.at("per_operation_us")),
        .per_run = time(of.at("per_run_us")),
        .to_device_bytes_per_s = of.at("to_device_gb_per_s").get<double>() * 1e9,
        .to_host_bytes_per_s = of.at("to_host_gb_per_s").get<double>() * 1e9};
    };
    auto const mover_of = [&](nlohmann::json const& name) {
      if (name == "copy_engine") { return mover::copy_engine; }
      if (name == "kernel") { return mover::kernel; }
      throw refuse("a mover is copy_engine or kernel, not " + name.dump());
    };
    machine read{.name = file.at("name").get<std::string>(), .select_chain = time(file.at("select_chain_us"))};
    read.options.copies = link("copy_engine");
    read.options.kernels = link("kernel");
    nlohmann::json const& sharing = file.at("sharing");
    for (char const* name : {"copy_engine", "kernel"}) {
      auto const by = static_cast<std::size_t>(mover_of(name));
      read.options.sharing.link_beside_compute[by] = sharing.at("link_beside_compute").at(name).get<double>();
      read.options.sharing.compute_beside_link[by] = sharing.at("compute_beside_link").at(name).get<double>();
    }
    for (nlohmann::json const& both : sharing.at("both_ways")) {
      auto const up = static_cast<std::size_t>(mover_of(both.at("to_device_by")));
      auto const down = static_cast<std::size_t>(mover_of(both.at("to_host_by")));
      read.options.sharing.both_ways[up][down] = {both.at("to_device").get<double>(), both.at("to_host").get<double>()};
    }
    nlohmann::json const& compute = file.at("compute");
    read.options.compute = {
      .per_launch = time(compute.at("per_launch_us")),
      .device_bytes_per_s = compute.at("device_gb_per_s").get<double>() * 1e9,
      .flops_per_s = compute.at("tera_flops").get<double>() * 1e12};
    nlohmann::json const& control = file.at("control");
    read.options.control = {
      .resume = time(control.at("resume_us")),
      .wake = time(control.at("wake_us")),
      .host_per_segment = time(control.at("host_per_segment_us"))};
    return read;
  } catch (nlohmann::json::exception const& e) {
    throw refuse(e.what());
  }
}

}  // namespace pulseinfer_bench
