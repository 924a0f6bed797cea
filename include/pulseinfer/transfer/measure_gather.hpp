#pragma once

/// How many thread groups a gather needs on this device, by trying.

#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/detail/handles.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/operation/gather_blocks.hpp>
#include <pulseinfer/store/set_up_copy.hpp>
#include <pulseinfer/store/slab.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/copy_list.hpp>
#include <pulseinfer/view/recall_plan.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace pulseinfer {

/// What a number of groups came to.
struct gather_rate {
  std::uint32_t groups = 0;
  double bytes_per_second = 0;
};

/// Numbers of groups that are tried. @source measured: benchmarks/results/h200/interference.json; more than 12 slow what runs
/// beside them and bring nothing
inline constexpr std::array<std::uint32_t, 4> tried_gather_groups{4, 6, 8, 12};

/// The fewest groups that come within a twentieth of the best rate: each group more is taken from the kernels beside.
/// @return `otherwise` where nothing was measured
[[nodiscard]] constexpr std::uint32_t choose_gather_groups(
  std::span<gather_rate const> rates, std::uint32_t otherwise) noexcept
{
  double best = 0;
  for (gather_rate const& rate : rates) { best = std::max(best, rate.bytes_per_second); }
  std::uint32_t chosen = 0;
  for (gather_rate const& rate : rates) {
    bool const enough = best > 0 && rate.bytes_per_second >= 0.95 * best;
    if (enough && (chosen == 0 || rate.groups < chosen)) { chosen = rate.groups; }
  }
  return chosen == 0 ? otherwise : chosen;
}

/// Gathers blocks of `block_bytes` with each number of groups in turn, beside copies that keep the device's memory as busy as a
/// model does. Set-up: takes some hundredths of a second and 272 MiB, gives the memory back, and returns when all is over.
/// @throws resource_error where the backend refuses memory or work
template <class B>
[[nodiscard]] std::vector<gather_rate> measure_gather(B& backend, std::uint64_t block_bytes)
{
  constexpr std::uint64_t volume = std::uint64_t{16} << 20U;
  constexpr std::uint64_t copied = std::uint64_t{128} << 20U;
  constexpr std::uint32_t gathers = 12;
  constexpr std::uint32_t copies = 256;  // they outlast the gathers
  std::uint64_t const bytes = block_bytes == 0 ? 65536 : std::min(block_bytes, volume);
  auto const count = static_cast<std::uint32_t>(volume / bytes);

  slab<B> const host{backend, memory_space::pinned, volume};
  slab<B> const slots{backend, memory_space::device, volume};
  slab<B> const beside{backend, memory_space::device, copied};
  std::uint64_t const list_bytes = count * sizeof(recall_entry) + 2 * sizeof(std::uint32_t);
  slab<B> const list{backend, memory_space::device, list_bytes};
  slab<B> const written{backend, memory_space::pinned, list_bytes};
  slab<B> const tables{backend, memory_space::pinned, 2 * sizeof(std::byte*)};
  std::fill_n(host.data(), volume, std::byte{1});
  tables.template as<std::byte*>()[0] = host.data();
  tables.template as<std::byte*>()[1] = slots.data();
  auto* const entries = written.template as<recall_entry>();
  for (std::uint32_t i = 0; i < count; ++i) {
    // Neighbours in the plan are none in memory.
    auto const place = static_cast<std::int32_t>(std::uint64_t{i} * 7919U % count);
    entries[i] = {
      .source = static_cast<host_block_id>(place),
      .target = static_cast<slot_id>(i),
      .lane = lane_id{0},
      .block = static_cast<block_id>(i)};
  }
  auto* const begins = reinterpret_cast<std::uint32_t*>(entries + count);
  begins[0] = 0;
  begins[1] = count;
  set_up_copy(backend, list.data(), written.data(), list_bytes);
  recall_plan_ref const plan{
    .entries = list.template as<recall_entry>(),
    .row_begin = reinterpret_cast<std::uint32_t const*>(list.template as<recall_entry>() + count),
    .host = {.slab_base = tables.template as<std::byte*>(), .block_stride = bytes, .blocks = count},
    .pool = {.layer_base = tables.template as<std::byte*>() + 1, .slot_stride = bytes, .slots = count},
    .layer = layer_id{0},
    .block_bytes = bytes,
    .capacity = count};

  std::vector<gather_rate> rates;
  {
    detail::owned_event<B> const gathered{backend};
    detail::owned_event<B> const copied_event{backend};
    detail::owned_stream<B> const recalls{backend, stream_priority::high};
    detail::owned_stream<B> const model{backend, stream_priority::low};
    auto const require = [&](status result) {
      if (result != status::ok) { throw resource_error{std::string{"measuring the gather: "} + name_of(result)}; }
    };
    auto const wait = [&](typename B::event_ref event) { require(backend.wait_any({&event, 1}, no_deadline)); };
    copy_run const run{.target = beside.data(), .source = beside.data() + copied / 2, .bytes = copied / 2};
    auto const gather = [&](std::uint32_t groups) {
      require(
        backend.launch(recalls.get(), gather_blocks{.plan = plan, .first_row = 0, .row_count = 1, .groups = groups}));
    };
    gather(tried_gather_groups[0]);  // what a first launch costs is none of its rate
    for (std::uint32_t const groups : tried_gather_groups) {
      for (std::uint32_t i = 0; i < copies; ++i) {
        require(backend.copy(model.get(), {.runs = &run, .count = 1, .direction = copy_direction::device_to_device}));
      }
      require(backend.record(model.get(), copied_event.get()));
      nanoseconds const begin = backend.now();
      for (std::uint32_t i = 0; i < gathers; ++i) { gather(groups); }
      require(backend.record(recalls.get(), gathered.get()));
      wait(gathered.get());
      double const seconds = std::chrono::duration<double>(backend.now() - begin).count();
      wait(copied_event.get());
      rates.push_back(
        {.groups = groups, .bytes_per_second = seconds > 0 ? static_cast<double>(volume) * gathers / seconds : 0.0});
    }
  }
  return rates;
}

}  // namespace pulseinfer
