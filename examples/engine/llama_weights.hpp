/// What a model of the Llama architecture is: its shape, its weights, and where they come from.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace host_engine {

/// Shape of a model; the names in brackets are those of config.json.
struct llama_geometry {
  std::uint32_t layers = 0;          // [num_hidden_layers]
  std::uint32_t hidden = 0;          // [hidden_size]
  std::uint32_t query_heads = 0;     // [num_attention_heads]
  std::uint32_t kv_heads = 0;        // [num_key_value_heads] divides query_heads
  std::uint32_t head_dim = 0;        // [head_dim] even
  std::uint32_t feed_forward = 0;    // [intermediate_size]
  std::uint32_t vocabulary = 0;      // [vocab_size]
  std::uint32_t context_tokens = 0;  // [max_position_embeddings]
  float rope_theta = 10'000.0F;      // [rope_theta]
  float norm_epsilon = 1e-5F;        // [rms_norm_eps]

  [[nodiscard]] std::uint32_t queries_per_kv_head() const noexcept { return query_heads / kv_heads; }
  [[nodiscard]] std::uint32_t query_width() const noexcept { return query_heads * head_dim; }
  [[nodiscard]] std::uint32_t kv_width() const noexcept { return kv_heads * head_dim; }

  /// @throws model_file_error if the sizes don't fit together
  void check() const;
};

/// Weights, row-major with one row per output. Matrices that take the same input are stacked, so that one product
/// computes all of them. The last product uses the embedding again (tied embeddings).
struct llama_weights {
  struct layer {
    std::vector<float> attention_norm;  // [hidden]
    std::vector<float> qkv;             // [query_width + 2 * kv_width, hidden]
    std::vector<float> output;          // [hidden, query_width]
    std::vector<float> mlp_norm;        // [hidden]
    std::vector<float> gate_up;         // [2 * feed_forward, hidden]
    std::vector<float> down;            // [hidden, feed_forward]
  };

  std::string name;
  llama_geometry geometry;
  std::vector<float> embedding;  // [vocabulary, hidden]
  std::vector<layer> layers;
  std::vector<float> final_norm;  // [hidden]
};

/// Reads config.json and model.safetensors (32-bit floats, tensors named and shaped as transformers names them).
/// @throws model_file_error with the file, the tensor and the numbers
[[nodiscard]] llama_weights load_llama(std::filesystem::path const& folder);

/// Random weights of any geometry; the same seed gives the same weights on every machine.
[[nodiscard]] llama_weights make_random_llama(llama_geometry const& geometry, std::uint64_t seed);

}  // namespace host_engine
