#pragma once

/// Sizes and costs of the simulation backend.

#include <pulseinfer/backend/memory_ledger.hpp>
#include <pulseinfer/backend/sim/compute_model.hpp>
#include <pulseinfer/backend/sim/control_cost.hpp>
#include <pulseinfer/backend/sim/link_model.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

struct sim_options {
  std::uint32_t max_streams = 16;
  std::uint32_t max_events = 4096;
  std::uint32_t queue_depth = 1024;                       ///< tasks of a stream that are not complete
  std::uint32_t max_copy_runs = 16384;                    ///< runs of them in all, and of one call of `copy`
  std::size_t max_scratch_bytes = std::size_t{1} << 20U;  ///< of one item of an operation
  memory_limits memory = {};
  bool move_data = false;  ///< copies move their bytes and operations on data run, beside being charged
  link_cost copies = pcie5_copy_engine;
  link_cost kernels = pcie5_kernel;
  compute_cost compute = h200_compute;
  link_sharing sharing = {};
  control_cost control = {};
};

}  // namespace pulseinfer
