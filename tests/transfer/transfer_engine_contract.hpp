#pragma once

/// What every transfer engine must do, written once.

#include <pulseinfer/concepts/transfer_engine.hpp>
#include <pulseinfer/types.hpp>

#include <doctest/doctest.h>
#include <support/immediate_backend.hpp>
#include <support/recall_scene.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace pulseinfer_test {

inline pulseinfer::transfer_limits limits_of(recall_scene const& scene)
{
  return {
    .max_rows = scene.sizes().max_rows,
    .max_entries = 64,
    .head_groups = scene.sizes().head_groups,
    .layout = scene.sizes().layout};
}

/// Recalls three rows in each of three layers on `backend`; `finish()` returns once the stream has run.
template <class Engine, class B, class Finish>
void recalls_arrive(Engine const& engine, B& backend, scene_sizes const& sizes, Finish finish)
{
  using namespace pulseinfer;
  recall_scene scene{sizes};
  auto bound = engine.bind(backend, limits_of(scene));
  typename B::stream_ref const stream = backend.create_stream(stream_priority::high);
  for (std::uint32_t const layer : {2U, 0U, 1U}) {
    plan_three_rows(scene, layer);
    REQUIRE(bound.recall_async(stream, scene.plan(), scene.landed()) == status::ok);
    finish(stream);
    scene.expect_all_arrived();
    REQUIRE(scene.difference() == "");
    for (std::uint32_t place = 0; place < scene.rows(); ++place) { REQUIRE(scene.has_landed(place)); }
  }
  backend.destroy_stream(stream);
}

// Report: vllm-project/vllm#45466, vllm-project/vllm#57019
template <class Engine>
void recalls_any_layout(Engine const& engine)
{
  immediate_backend backend;
  auto const finished = [](immediate_backend::stream_ref) {};
  for (std::uint32_t const pitch : {92U, 132U, 160U, 192U, 384U, 576U, 584U, 656U, 1152U, 37U}) {
    for (std::uint32_t const tokens : {1U, 3U, 16U, 17U, 64U}) {
      for (std::uint32_t const offset : {0U, 4U}) {
        CAPTURE(pitch);
        CAPTURE(tokens);
        CAPTURE(offset);
        recalls_arrive(engine, backend, {.layout = layout_of_pitch(pitch, tokens, 1), .offset = offset}, finished);
      }
      if (tokens > 16) { continue; }
      for (bool const token_major : {false, true}) {
        recalls_arrive(
          engine, backend,
          {.layout = layout_of_pitch(pitch, tokens, 3, token_major, 20), .offset = 4, .slot_padding = 12}, finished);
      }
    }
  }
}

// Report: sgl-project/sglang#23609
template <class Engine>
void empty_recalls_ask_for_nothing(Engine const& engine)
{
  using namespace pulseinfer;
  immediate_backend backend;
  recall_scene scene{{}};
  auto bound = engine.bind(backend, limits_of(scene));
  scene.begin_plan(1);
  CHECK(bound.recall_async({}, scene.plan(), scene.landed()) == status::ok);
  CHECK(bound.move_async({}, {}) == status::ok);
  std::byte byte{};
  copy_run const nothing{.target = &byte, .source = &byte, .bytes = 0};
  CHECK(bound.move_async({}, {.runs = &nothing, .count = 1}) == status::ok);
  CHECK(backend.launches == 0);
  CHECK(backend.copies == 0);

  // Rows without misses move nothing and are posted all the same, so that who waits for them goes on.
  for (std::int32_t const row : {3, 0, 7}) { scene.add_row(row); }
  REQUIRE(bound.recall_async({}, scene.plan(), scene.landed()) == status::ok);
  CHECK(backend.copies == 0);
  CHECK(scene.difference() == "");
  for (std::uint32_t place = 0; place < 3; ++place) { CHECK(scene.has_landed(place)); }
}

template <class Engine>
void more_rows_than_the_limit_are_refused(Engine const& engine)
{
  using namespace pulseinfer;
  immediate_backend backend;
  recall_scene scene{{}};
  transfer_limits limits = limits_of(scene);
  limits.max_rows = 2;
  auto bound = engine.bind(backend, limits);
  plan_three_rows(scene, 1);
  CHECK(bound.recall_async({}, scene.plan(), scene.landed()) == status::invalid_argument);
  CHECK(backend.launches + backend.copies == 0);
  for (std::uint32_t place = 0; place < 3; ++place) { CHECK(scene.is_in_flight(place)); }
}

// Report: vllm-project/vllm#45466
template <class Engine>
void moves_runs_both_ways(Engine const& engine)
{
  using namespace pulseinfer;
  for (std::uint32_t const bytes : {92U, 132U, 1152U, 17U}) {
    for (std::uint32_t const offset : {0U, 4U, 1U}) {
      immediate_backend backend;
      recall_scene scene{{.layout = layout_of_pitch(bytes, 3), .offset = offset}};
      auto bound = engine.bind(backend, limits_of(scene));
      auto const slot = [&](std::uint32_t layer, std::uint32_t number) {
        return scene.pool_ref().address(recall_scene::layer(layer), static_cast<slot_id>(number));
      };
      auto const block = [&](std::uint32_t layer, std::uint32_t number) {
        return scene.host_ref().address(recall_scene::layer(layer), 1, recall_scene::host_block(number));
      };
      std::uint64_t const size = scene.sizes().layout.block_bytes;
      std::vector<std::byte> const before = scene.host_memory();
      std::vector<copy_run> in;
      std::vector<copy_run> out;
      for (std::uint32_t i = 0; i < 5; ++i) {
        in.push_back({slot(2, i + 1), block(2, i), size});
        in.push_back({slot(0, 7 - i), block(0, i), size});
      }
      for (copy_run const& run : in) { out.push_back({const_cast<std::byte*>(run.source), run.target, size}); }
      auto const count = static_cast<std::uint32_t>(in.size());
      REQUIRE(bound.move_async({}, {in.data(), count, copy_direction::host_to_device}) == status::ok);
      for (copy_run const& run : in) { REQUIRE(std::memcmp(run.target, run.source, size) == 0); }
      for (copy_run const& run : out) { std::memset(run.target, 0, size); }
      REQUIRE(bound.move_async({}, {out.data(), count, copy_direction::device_to_host}) == status::ok);
      REQUIRE(scene.host_memory() == before);
    }
  }
}

}  // namespace pulseinfer_test
