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

  /// Forgets the row, so that another begins.
  virtual void clear() = 0;
};

/// @param digest cuboid_mean, min_max, mean_key or log_mass
/// @throws std::invalid_argument for another name or type
[[nodiscard]] std::unique_ptr<digest_book> make_digest_book(
  std::string const& digest, pulseinfer::dtype type, host_engine::llama_geometry const& geometry);

}  // namespace calibrate
