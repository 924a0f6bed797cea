/// How many requests a machine serves, and how fast, by how their KV cache is kept.
#pragma once

#include "presets.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace plan_capacity {

struct setting {
  model_shape model = models[0];
  gpu_shape gpu = gpus[0];
  double host_bytes = 512e9;  ///< pinned memory for blocks
  std::uint32_t prompt_tokens = 65536;
  std::uint32_t output_tokens = 2048;
  double target_seconds = 0.0;  ///< longest step; 0: none
  double miss_ratio = 0.08;     ///< of a selection, at hot slots of three budgets
  std::uint32_t budget_tokens = 2048;
  std::uint32_t hot_tokens = 6144;
  std::uint32_t block_tokens = 16;
  double weight_bytes = 2.0;     ///< of a parameter
  double cache_bytes = 2.0;      ///< of an element
  double digest_share = 0.0625;  ///< of a block's bytes: two vectors in half precision for blocks of 16 tokens
  double memory_share = 0.90;    ///< of the GPU's memory that weights and cache may fill
  double read_share = 0.80;      ///< of the GPU's bandwidth that decoding reaches
  double step_overhead = 1e-3;   ///< seconds of a step whatever runs: launches, sampling
  double exposed = 0.2;          ///< part of the shorter of computing and recalling that the longer one does not hide
};

enum class way { resident_dense, resident_sparse, offload_all, adaptive };
[[nodiscard]] char const* name_of(way w);

/// One way of running at one number of requests.
struct operating_point {
  std::uint32_t rows = 0;
  std::uint32_t offloaded = 0;  ///< of them
  double compute = 0.0;         ///< seconds of a step
  double recall = 0.0;
  double step = 0.0;
  double tokens_per_second = 0.0;
  double device_bytes = 0.0;  ///< cache and digests on the GPU
  double host_bytes = 0.0;
};

struct capacity_plan {
  way how = way::resident_dense;
  std::vector<operating_point> curve = {};  ///< by number of requests, as far as memory goes
  operating_point best = {};                ///< the most tokens a second within the target; 0 rows: none is possible
  std::string limit = {};                   ///< what ends the curve
};

/// Formulas: docs/admission.md#before-anything-runs. Requests are at the middle of their output; memory is counted for their full length.
/// @throws std::invalid_argument with the numbers where nothing can run
[[nodiscard]] capacity_plan plan(setting const& s, way how);

/// Seconds and bytes of `resident` requests with every block on the GPU and `offloaded` ones.
[[nodiscard]] operating_point point(setting const& s, std::uint32_t resident, std::uint32_t offloaded, bool sparse);

}  // namespace plan_capacity
