#pragma once

/// A manager over the CPU backend with a small model that decodes through it.

#include "compositions.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

namespace pulseinfer_test {

template <class Manager>
struct model_rig {
  model_rig(
    synthetic_model const& model, pulseinfer::manager_options const& options, solo_head_selector<> const& selector,
    pulseinfer::cpu_options const& cpu = {.mode = pulseinfer::cpu_mode::manual}, std::uint32_t per_row = 8)
    : backend{cpu},
      stream{backend.create_stream(pulseinfer::stream_priority::normal)},
      kv{backend, stream, model.geometry, options, selector},
      engine{backend, stream, model, kv, options.max_rows, per_row}
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

  cpu_backend backend;
  cpu_backend::stream_ref stream;
  Manager kv;
  synthetic_engine<cpu_backend, Manager> engine;
};

/// A sequence of a batch: its prompt comes in in chunks, then it decodes a token a step until `length`.
struct sequence_plan {
  std::uint64_t seed = 0;
  std::uint32_t prompt = 0;
  std::uint32_t length = 0;
  std::uint32_t chunk = 8;
  bool stream_prompt = false;
};

/// Runs the plans together to their ends, each step with all rows that go on.
template <class Manager>
void run_plans(model_rig<Manager>& r, std::vector<sequence_plan> const& plans)
{
  std::vector<pulseinfer::row_id> rows;
  for (sequence_plan const& plan : plans) {
    rows.push_back(r.open(plan.seed, plan.prompt, plan.length, plan.stream_prompt));
  }
  for (;;) {
    std::vector<pulseinfer::step_row> batch;
    for (std::size_t i = 0; i < plans.size(); ++i) {
      std::uint32_t const now = r.kv.tokens_of(rows[i]);
      if (now == plans[i].length) { continue; }
      std::uint32_t const left = plans[i].prompt > now ? plans[i].prompt - now : 0;
      batch.push_back({.row = rows[i], .tokens = left == 0 ? 1 : std::min(plans[i].chunk, left)});
    }
    if (batch.empty()) { return; }
    r.engine.step(batch);
    REQUIRE(r.kv.audit() == "");
  }
}

}  // namespace pulseinfer_test
