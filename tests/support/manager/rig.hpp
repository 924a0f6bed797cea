#pragma once

/// A manager over the CPU backend with an engine that drives it.

#include "compositions.hpp"

#include <doctest/doctest.h>

#include <cstdint>

namespace pulseinfer_test {

struct rig_options {
  pulseinfer::kv_geometry geometry = {};
  pulseinfer::manager_options manager = {};
  pulseinfer::cpu_options cpu = {.mode = pulseinfer::cpu_mode::manual};
  std::uint32_t per_row = 16;  ///< most tokens of a row in a step
};

template <class Manager>
struct rig;

template <class Backend, class Selector, class Transfer, class Scheduler>
struct rig<offload_manager<Backend, Selector, Transfer, Scheduler, fixed_admission>> {
  using manager_type = offload_manager<Backend, Selector, Transfer, Scheduler, fixed_admission>;

  rig(rig_options const& options, Selector const& selector, Scheduler const& scheduler = {})
    : backend{options.cpu},
      stream{backend.create_stream(pulseinfer::stream_priority::normal)},
      kv{backend, stream, options.geometry, options.manager, selector, Transfer{}, scheduler, fixed_admission{}},
      engine{backend, stream, kv, options.manager.max_rows, options.manager.max_tokens, options.per_row}
  {}

  pulseinfer::row_id open(std::uint64_t seed, std::uint32_t prompt, std::uint32_t tokens, bool stream_prompt = false)
  {
    pulseinfer::row_id row = pulseinfer::none<pulseinfer::row_id>;
    REQUIRE(
      kv.open({.prompt_tokens = prompt, .max_tokens = tokens, .stream_prompt = stream_prompt}, row) ==
      pulseinfer::admission::admitted);
    engine.assign(row, seed);
    return row;
  }

  /// One step that must go well.
  void step(std::initializer_list<pulseinfer::step_row> rows)
  {
    REQUIRE(engine.step(rows) == pulseinfer::status::ok);
    REQUIRE(engine.fault() == "");
  }

  /// Closes every row and checks that all memory is back.
  void close_all()
  {
    REQUIRE(kv.drain(pulseinfer::no_deadline) == pulseinfer::status::ok);
    for (std::uint32_t r = 0; r < kv.sequences().rows(); ++r) {
      auto const row = static_cast<pulseinfer::row_id>(r);
      if (kv.sequences()[row].open()) { REQUIRE(kv.close(row) == pulseinfer::status::ok); }
    }
    REQUIRE(kv.drain(pulseinfer::no_deadline) == pulseinfer::status::ok);
    std::uint64_t const pools = kv.pool().per_layer() ? kv.geometry().layers : 1;
    CHECK(
      kv.memory().slot_bytes == kv.budget().stream_slots(kv.geometry().head_groups) * pools * kv.layout().block_bytes);
    CHECK(kv.memory().host_bytes == 0);
    CHECK(kv.memory().digest_bytes == 0);
    CHECK(kv.audit() == "");
  }

  Backend backend;
  typename Backend::stream_ref stream;
  manager_type kv;
  pattern_engine<Backend, manager_type> engine;
};

}  // namespace pulseinfer_test
