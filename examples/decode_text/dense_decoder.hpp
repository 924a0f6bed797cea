/// Decodes with the engine's own cache: all of it, or sink and recent blocks alone.
#pragma once

#include "decoder.hpp"
#include "engine/dense_kv_cache.hpp"
#include "engine/llama_engine.hpp"

#include <cstdint>
#include <span>
#include <vector>

namespace decode_text {

class dense_decoder : public reference_decoder {
 public:
  /// @param weights borrowed   @param max_tokens of the longest row
  dense_decoder(
    host_engine::llama_weights const& weights, std::uint32_t rows, std::uint32_t max_tokens, std::uint32_t chunk,
    std::uint32_t block_tokens);

  void prefill(std::uint32_t row, std::span<std::int32_t const> prompt, progress const& report) override;
  void step(std::span<std::int32_t const> tokens) override;
  [[nodiscard]] std::span<float const> logits(std::uint32_t row) const override { return engine_.logits(row); }

  void read_only(std::uint32_t sink_blocks, std::uint32_t recent_blocks) override;
  void copy_prompts_from(reference_decoder const& other) override;
  [[nodiscard]] std::uint64_t bytes() const noexcept override;

 private:
  void run_layers(std::span<std::uint32_t const> rows);

  host_engine::llama_engine engine_;
  host_engine::dense_kv_cache cache_;
  std::uint32_t chunk_;
  std::uint32_t sink_blocks_ = 0, recent_blocks_ = 0;
  std::vector<std::uint32_t> rows_, lengths_;
};

}  // namespace decode_text
