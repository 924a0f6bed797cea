#pragma once

/// From which length of a run on the copy engine moves what the host plans, by trying.

#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/detail/handles.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/operation/move_runs.hpp>
#include <pulseinfer/store/slab.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/copy_list.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

namespace pulseinfer {

/// What the two movers came to with runs of one length.
struct move_rate {
  copy_direction direction = copy_direction::host_to_device;
  std::uint64_t run_bytes = 0;
  double copy_engine = 0;  ///< bytes per second
  double gather = 0;       ///< likewise, by move_runs
};

/// Lengths of runs that are tried, upwards. @source measured: benchmarks/results/h200/recall.json; the movers meet between them
inline constexpr std::array<std::uint64_t, 5> tried_run_bytes{8192, 16384, 32768, 65536, 131072};

/// No run is as long.
inline constexpr std::uint64_t never_by_copy_engine = std::numeric_limits<std::uint64_t>::max();

/// The shortest run from which on the copy engine comes within a twentieth of the gather: it takes no multiprocessor.
/// @param rates of any directions, upwards by run_bytes   @return `otherwise` where nothing of the direction was measured
[[nodiscard]] constexpr std::uint64_t choose_copy_engine_from(
  std::span<move_rate const> rates, copy_direction direction, std::uint64_t otherwise) noexcept
{
  bool measured = false;
  std::uint64_t from = never_by_copy_engine;
  for (move_rate const& rate : rates) {
    if (rate.direction != direction || rate.copy_engine <= 0 || rate.gather <= 0) { continue; }
    measured = true;
    if (rate.copy_engine < 0.95 * rate.gather) {
      from = never_by_copy_engine;
    } else {
      from = std::min(from, rate.run_bytes);
    }
  }
  return measured ? from : otherwise;
}

/// Launches move_runs over any number of runs.
/// @status the backend's first refusal; earlier runs are enqueued then
template <class B>
status launch_moves(
  B& backend, typename B::stream_ref stream, std::span<copy_run const> runs, copy_direction direction,
  std::uint32_t groups) noexcept
{
  while (!runs.empty()) {
    move_runs op{.groups = groups, .direction = direction};
    op.count = static_cast<std::uint32_t>(std::min<std::size_t>(runs.size(), move_runs::most_runs));
    std::copy_n(runs.begin(), op.count, op.runs);
    if (status const result = backend.launch(stream, op); result != status::ok) { return result; }
    runs = runs.subspan(op.count);
  }
  return status::ok;
}

/// Moves runs of each length in both directions, by the copy engine in calls of `runs_per_copy` and by move_runs. Set-up: takes
/// about a tenth of a second and 32 MiB, gives the memory back, and returns when all is over.
/// @throws resource_error where the backend refuses memory or work
template <class B>
[[nodiscard]] std::vector<move_rate> measure_moves(B& backend, std::uint32_t groups, std::uint32_t runs_per_copy)
{
  constexpr std::uint64_t volume = std::uint64_t{8} << 20U;
  constexpr std::uint32_t rounds = 4;
  slab<B> const host{backend, memory_space::pinned, 2 * volume};
  slab<B> const slots{backend, memory_space::device, 2 * volume};
  std::fill_n(host.data(), 2 * volume, std::byte{1});
  detail::owned_event<B> const ended{backend};
  detail::owned_stream<B> const stream{backend, stream_priority::normal};
  auto const require = [&](status result) {
    if (result != status::ok) { throw resource_error{std::string{"measuring the movers: "} + name_of(result)}; }
  };
  std::vector<copy_run> runs;
  std::vector<move_rate> rates;
  for (copy_direction const direction : {copy_direction::host_to_device, copy_direction::device_to_host}) {
    bool const up = direction == copy_direction::host_to_device;
    auto const seconds = [&](auto&& enqueue) {
      nanoseconds begin{0};
      for (std::uint32_t round = 0; round <= rounds; ++round) {
        if (round == 1) { begin = backend.now(); }  // what the first one costs is none of the rate
        require(enqueue());
        if (round != 0 && round != rounds) { continue; }
        require(backend.record(stream.get(), ended.get()));
        typename B::event_ref const event = ended.get();
        require(backend.wait_any({&event, 1}, no_deadline));
      }
      return std::chrono::duration<double>(backend.now() - begin).count();
    };
    for (std::uint64_t const bytes : tried_run_bytes) {
      runs.clear();
      auto const count = static_cast<std::uint32_t>(volume / bytes);
      for (std::uint32_t i = 0; i < count; ++i) {
        // Neighbours in the list are none in memory, on neither side.
        std::byte* const slot = slots.data() + std::uint64_t{i} * 2 * bytes;
        std::byte* const block = host.data() + std::uint64_t{i} * 7919U % count * 2 * bytes;
        runs.push_back({.target = up ? slot : block, .source = up ? block : slot, .bytes = bytes});
      }
      double const copied = seconds([&] {
        status result = status::ok;
        for (std::size_t i = 0; i < runs.size() && result == status::ok; i += runs_per_copy) {
          std::size_t const most = std::min<std::size_t>(runs_per_copy, runs.size() - i);
          result = backend.copy(
            stream.get(), {.runs = runs.data() + i, .count = static_cast<std::uint32_t>(most), .direction = direction});
        }
        return result;
      });
      double const gathered = seconds([&] { return launch_moves(backend, stream.get(), runs, direction, groups); });
      double const moved = static_cast<double>(volume) * rounds;
      rates.push_back(
        {.direction = direction,
         .run_bytes = bytes,
         .copy_engine = copied > 0 ? moved / copied : 0.0,
         .gather = gathered > 0 ? moved / gathered : 0.0});
    }
  }
  return rates;
}

}  // namespace pulseinfer
