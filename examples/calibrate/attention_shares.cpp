#include "attention_shares.hpp"

#include <pulseinfer/device/block_score.hpp>
#include <pulseinfer/device/group.hpp>
#include <pulseinfer/selector/cuboid_mean.hpp>
#include <pulseinfer/selector/log_mass.hpp>
#include <pulseinfer/selector/mean_key.hpp>
#include <pulseinfer/selector/min_max.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <stdexcept>

namespace calibrate {
namespace {

namespace device = pulseinfer::device;

/// Replaces scores by their softmax.
void share(std::vector<float>& scores)
{
  float const top = *std::max_element(scores.begin(), scores.end());
  double total = 0.0;
  for (float& score : scores) total += static_cast<double>(score = std::exp(score - top));
  for (float& score : scores) score = static_cast<float>(static_cast<double>(score) / total);
}

template <class Policy, class T>
class book_of final : public digest_book {
 public:
  book_of(std::uint32_t pieces, host_engine::llama_geometry const& geometry)
    : geometry_{geometry},
      pieces_{pieces},
      elements_{device::digest_values<T>::elements(Policy::form::parts, geometry.head_dim)},
      head_bytes_{device::digest_values<T>::bytes(Policy::form::parts, geometry.head_dim)},
      digests_(geometry.layers),
      storage_(3 * std::size_t{geometry.head_dim})
  {}

  void update(std::uint32_t layer, host_engine::kv_blocks const& kv) override
  {
    std::size_t const full = kv.tokens / kv.block_tokens;
    std::uint32_t const piece_tokens = kv.block_tokens / pieces_;
    for (std::size_t block = digests_[layer].size() / block_bytes(); block < full; ++block) {
      digests_[layer].resize((block + 1) * block_bytes());
      for (std::uint32_t head = 0; head < geometry_.kv_heads; ++head) {
        for (std::uint32_t piece = 0; piece < pieces_; ++piece) {
          Policy::form::make(
            device::solo_group{}, keys_of(kv, block, head) + std::size_t{piece} * piece_tokens * geometry_.head_dim,
            geometry_.head_dim * sizeof(float), piece_tokens, geometry_.head_dim, values(layer, block, head, piece),
            storage_.data());
        }
      }
    }
  }

  block_shares shares(
    std::uint32_t layer, host_engine::kv_blocks const& kv, float const* queries, std::uint32_t tokens) const override
  {
    std::uint32_t const dim = geometry_.head_dim, group = geometry_.query_heads / geometry_.kv_heads;
    std::size_t const blocks = (std::size_t{tokens} + kv.block_tokens - 1) / kv.block_tokens;
    std::size_t const full = tokens / kv.block_tokens;
    float const scale = 1.0F / std::sqrt(static_cast<float>(dim));
    block_shares result{.target = std::vector<float>(full), .shares = std::vector<float>(geometry_.kv_heads * full)};
    std::vector<float> exact(tokens), scores(blocks), spread(elements_);
    for (std::uint32_t head = 0; head < geometry_.query_heads; ++head) {
      float const* const query = queries + std::size_t{head} * dim;
      std::uint32_t const kv_head = head / group;
      device::spread_query<typename Policy::spread>(
        device::solo_group{}, query, pulseinfer::dtype::float32, dim, scale, spread.data(),
        device::digest_values<T>::stride(dim), elements_);
      float const* const same[] = {spread.data(), spread.data(), spread.data(), spread.data()};
      for (std::size_t block = 0; block < blocks; ++block) {
        float const* const keys = keys_of(kv, block, kv_head);
        std::size_t const valid = std::min<std::size_t>(kv.block_tokens, tokens - block * kv.block_tokens);
        double open = 0.0;
        for (std::size_t t = 0; t < valid; ++t) {
          float sum = 0.0F;
          for (std::uint32_t j = 0; j < dim; ++j) sum += query[j] * keys[t * dim + j];
          exact[block * kv.block_tokens + t] = scale * sum;
          open += std::exp(static_cast<double>(scale * sum));
        }
        if (block < full) {
          double sum = 0.0;
          for (std::uint32_t piece = 0; piece < pieces_; ++piece) {
            float score[device::score_quad];
            device::block_scores(same, values(layer, block, kv_head, piece), elements_, score);
            sum += std::exp(static_cast<double>(score[0]));
          }
          scores[block] = static_cast<float>(std::log(sum * static_cast<double>(kv.block_tokens / pieces_)));
        } else {  // it has no digest, and is always selected
          scores[block] = static_cast<float>(std::log(open));
        }
      }
      share(exact);
      share(scores);
      for (std::size_t block = 0; block < full; ++block) {
        float mass = 0.0F;
        for (std::size_t t = 0; t < kv.block_tokens; ++t) mass += exact[block * kv.block_tokens + t];
        result.target[block] += mass / static_cast<float>(geometry_.query_heads);
        result.shares[kv_head * full + block] += scores[block];
      }
    }
    return result;
  }

  void keep(std::size_t blocks) override
  {
    for (auto& layer : digests_) layer.resize(std::min(layer.size(), blocks * block_bytes()));
  }

 private:
  [[nodiscard]] float const* keys_of(host_engine::kv_blocks const& kv, std::size_t block, std::uint32_t head) const
  {
    return kv.blocks[block] + std::size_t{head} * kv.block_tokens * geometry_.head_dim;
  }
  [[nodiscard]] std::size_t block_bytes() const { return geometry_.kv_heads * pieces_ * head_bytes_; }
  [[nodiscard]] device::digest_values<T> values(
    std::uint32_t layer, std::size_t block, std::uint32_t head, std::uint32_t piece) const
  {
    std::byte* const at = const_cast<std::byte*>(digests_[layer].data()) + block * block_bytes() +
      (std::size_t{head} * pieces_ + piece) * head_bytes_;
    return device::digest_values<T>{reinterpret_cast<T*>(at), elements_};
  }

  host_engine::llama_geometry geometry_;
  std::uint32_t pieces_;
  std::uint32_t elements_;                       // of a piece's digest
  std::size_t head_bytes_;                       // of a piece
  std::vector<std::vector<std::byte>> digests_;  // [layer][block, kv_head, piece, head_bytes]
  std::vector<float> storage_;
};

template <class Policy>
std::unique_ptr<digest_book> book_of_type(
  pulseinfer::dtype type, std::uint32_t pieces, host_engine::llama_geometry const& geometry)
{
  switch (type) {
    case pulseinfer::dtype::float16: return std::make_unique<book_of<Policy, pulseinfer::half>>(pieces, geometry);
    case pulseinfer::dtype::int8: return std::make_unique<book_of<Policy, std::int8_t>>(pieces, geometry);
    default: throw std::invalid_argument{std::string{"digests of "} + name_of(type) + ", not float16 or int8"};
  }
}

}  // namespace

std::unique_ptr<digest_book> make_digest_book(
  std::string const& digest, pulseinfer::dtype type, std::uint32_t pieces, std::uint32_t block_tokens,
  host_engine::llama_geometry const& geometry)
{
  if (pieces == 0 || block_tokens % pieces != 0) {
    throw std::invalid_argument{
      "digests of " + std::to_string(pieces) + " pieces of blocks of " + std::to_string(block_tokens) + " tokens"};
  }
  auto const is = [&](char const* name) { return digest == name; };
  if (is(pulseinfer::cuboid_mean::form::name)) return book_of_type<pulseinfer::cuboid_mean>(type, pieces, geometry);
  if (is(pulseinfer::min_max::form::name)) return book_of_type<pulseinfer::min_max>(type, pieces, geometry);
  if (is(pulseinfer::mean_key::form::name)) return book_of_type<pulseinfer::mean_key>(type, pieces, geometry);
  if (is(pulseinfer::log_mass::form::name)) return book_of_type<pulseinfer::log_mass>(type, pieces, geometry);
  throw std::invalid_argument{"'" + digest + "' is no digest"};
}

}  // namespace calibrate
