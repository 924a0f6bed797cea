/// What a layer's queries see of a sequence: the mass of each block, exactly from its keys, and as digests predict it.
#pragma once

#include "engine/dense_kv_cache.hpp"
#include "engine/llama_engine.hpp"
#include <pulseinfer/numeric.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace calibrate {

/// Shares of the blocks of one row at one layer, for one query position.
struct block_shares {
  std::vector<float> target;  // [blocks] mean over all query heads of the exact softmax mass
  std::vector<float> shares;  // [kv_heads, blocks] by digests, summed over the query heads of a KV head
};

/// Digests of one row's full blocks in all layers, and the scores that they give.
class digest_book {
 public:
  virtual ~digest_book() = default;

  /// Takes up the blocks of `layer` that are full and have no digest yet.
  virtual void update(std::uint32_t layer, host_engine::kv_blocks const& kv) = 0;

  /// @param queries [query_heads, head_dim] of the position   @param tokens that it sees, itself the last; their full blocks
  ///        have digests   @return shares of the full blocks
  [[nodiscard]] virtual block_shares shares(
    std::uint32_t layer, host_engine::kv_blocks const& kv, float const* queries, std::uint32_t tokens) const = 0;

  /// Forgets all but the first blocks of the row in all layers; 0: another row begins.
  virtual void keep(std::size_t blocks) = 0;
};

/// @param digest cuboid_mean, min_max, mean_key or log_mass   @param pieces of a block, each with a digest of its own
/// @throws std::invalid_argument for another name or type, or pieces that do not divide a block
[[nodiscard]] std::unique_ptr<digest_book> make_digest_book(
  std::string const& digest, pulseinfer::dtype type, std::uint32_t pieces, std::uint32_t block_tokens,
  host_engine::llama_geometry const& geometry);

}  // namespace calibrate
