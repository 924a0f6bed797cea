/// Models and GPUs by name, each figure with its source.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace plan_capacity {

struct model_shape {
  char const* name;
  double parameters;         ///< all of them
  double shared_parameters;  ///< read in every step whatever is routed: all of a dense model's
  std::uint32_t experts;     ///< of a layer; 0: a dense model
  std::uint32_t experts_per_token;
  std::uint32_t layers;
  std::uint32_t kv_heads;
  std::uint32_t head_dim;
  std::uint32_t
    latent_dim;  ///< elements of the single latent row of a token (MLA); 0: keys and values of kv_heads heads
  char const* source;

  /// Elements of a token's cache in one layer.
  [[nodiscard]] std::uint32_t cache_elements() const { return latent_dim != 0 ? latent_dim : 2 * kv_heads * head_dim; }
};

struct gpu_shape {
  char const* name;
  double memory_bytes;
  double memory_bytes_per_second;
  double link_bytes_per_second;  ///< of recalls, one direction
  char const* source;
};

/// Shared parameters of mixtures: all of them less the routed experts' (expert layers x experts x 3 x hidden x expert width of
/// config.json: 48 x 128 x 3 x 2048 x 768, 26 x 64 x 3 x 2048 x 1408). What a token activates comes to 3.3e9 and 2.6e9 so, as the model
/// cards say (the latter counts 2.4e9, without the embedding).
inline constexpr model_shape models[] = {
  {"llama-3.1-8b", 8.03e9, 8.03e9, 0, 0, 32, 8, 128, 0, "config.json of meta-llama/Llama-3.1-8B"},
  {"llama-3.1-70b", 70.6e9, 70.6e9, 0, 0, 80, 8, 128, 0, "config.json of meta-llama/Llama-3.1-70B"},
  {"qwen3-14b", 14.8e9, 14.8e9, 0, 0, 40, 8, 128, 0, "config.json of Qwen/Qwen3-14B"},
  {"qwen3-30b-a3b", 30.5e9, 1.5e9, 128, 8, 48, 4, 128, 0, "config.json and model card of Qwen/Qwen3-30B-A3B"},
  {"deepseek-v2-lite", 15.7e9, 1.3e9, 64, 6, 27, 1, 128, 576,
   "config.json and model card of deepseek-ai/DeepSeek-V2-Lite"},
  {"smollm2-135m", 0.135e9, 0.135e9, 0, 0, 30, 3, 64, 0, "config.json of HuggingFaceTB/SmolLM2-135M"},
};

/// Link rates: what recalls reach. Measured for the H200 (docs/performance.md), else nine tenths of what PCIe of its generation
/// gives in practice (55 GB/s for 5.0 x16, 26 GB/s for 4.0 x16).
inline constexpr gpu_shape gpus[] = {
  {"h200", 141e9, 4.8e12, 50e9, "NVIDIA H200 data sheet; link measured"},
  {"h100-sxm", 80e9, 3.35e12, 50e9, "NVIDIA H100 data sheet"},
  {"a100-80gb", 80e9, 2.04e12, 23e9, "NVIDIA A100 data sheet"},
  {"l40s", 48e9, 0.864e12, 23e9, "NVIDIA L40S data sheet"},
  {"rtx-4090", 24e9, 1.008e12, 23e9, "NVIDIA Ada GPU architecture paper"},
};

/// How often selected blocks are missing where the hot slots are three budgets, by kind of work. Means of the ranges that sparse
/// offloading systems have published (ESS, RetroInfer, InfLLM-V2, HiSparse: 4 % to 21 %); measure your own.
struct work_kind {
  char const* name;
  double miss_ratio;
};
inline constexpr work_kind works[] = {
  {"retrieval", 0.14}, {"summary", 0.08}, {"reasoning", 0.055}, {"trained-sparse", 0.04}};

template <class T>
[[nodiscard]] std::optional<T> by_name(std::span<T const> list, std::string_view name)
{
  for (T const& entry : list) {
    if (name == entry.name) { return entry; }
  }
  return std::nullopt;
}

}  // namespace plan_capacity
