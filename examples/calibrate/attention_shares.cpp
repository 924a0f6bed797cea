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
  explicit book_of(host_engine::llama_geometry const& geometry)
    : geometry_{geometry},
      elements_{device::digest_values<T>::elements(Policy::form::parts, geometry.head_dim)},
      head_bytes_{device::digest_values<T>::bytes(Policy::form::parts, geometry.head_dim)},
      digests_(geometry.layers),
      storage_(3 * std::size_t{geometry.head_dim})
  {}

  void update(std::uint32_t layer, host_engine::kv_blocks const& kv) override
  {
    std::size_t const block_bytes = geometry_.kv_heads * head_bytes_;
    std::size_t const full = kv.tokens / kv.block_tokens;
    for (std::size_t block = digests_[layer].size() / block_bytes; block < full; ++block) {
      digests_[layer].resize((block + 1) * block_bytes);
      for (std::uint32_t head = 0; head < geometry_.kv_heads; ++head) {
        Policy::form::make(
          device::solo_group{}, keys_of(kv, block, head), geometry_.head_dim * sizeof(float), kv.block_tokens,
          geometry_.head_dim, values(layer, block, head), storage_.data());
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
          float score[device::score_quad];
          device::block_scores(same, values(layer, block, kv_head), elements_, score);
          scores[block] = score[0] + std::log(static_cast<float>(valid));
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

  void clear() override
  {
    for (auto& layer : digests_) layer.clear();
  }

 private:
  [[nodiscard]] float const* keys_of(host_engine::kv_blocks const& kv, std::size_t block, std::uint32_t head) const
  {
    return kv.blocks[block] + std::size_t{head} * kv.block_tokens * geometry_.head_dim;
  }
  [[nodiscard]] device::digest_values<T> values(std::uint32_t layer, std::size_t block, std::uint32_t head) const
  {
    std::byte* const at =
      const_cast<std::byte*>(digests_[layer].data()) + (block * geometry_.kv_heads + head) * head_bytes_;
    return device::digest_values<T>{reinterpret_cast<T*>(at), elements_};
  }

  host_engine::llama_geometry geometry_;
  std::uint32_t elements_;
  std::size_t head_bytes_;
  std::vector<std::vector<std::byte>> digests_;  // [layer][block, kv_head, head_bytes]
  std::vector<float> storage_;
};

template <class Policy>
std::unique_ptr<digest_book> book_of_type(pulseinfer::dtype type, host_engine::llama_geometry const& geometry)
{
  switch (type) {
    case pulseinfer::dtype::float16: return std::make_unique<book_of<Policy, pulseinfer::half>>(geometry);
    case pulseinfer::dtype::int8: return std::make_unique<book_of<Policy, std::int8_t>>(geometry);
    default: throw std::invalid_argument{std::string{"digests of "} + name_of(type) + ", not float16 or int8"};
  }
}

}  // namespace

std::unique_ptr<digest_book> make_digest_book(
  std::string const& digest, pulseinfer::dtype type, host_engine::llama_geometry const& geometry)
{
  auto const is = [&](char const* name) { return digest == name; };
  if (is(pulseinfer::cuboid_mean::form::name)) return book_of_type<pulseinfer::cuboid_mean>(type, geometry);
  if (is(pulseinfer::min_max::form::name)) return book_of_type<pulseinfer::min_max>(type, geometry);
  if (is(pulseinfer::mean_key::form::name)) return book_of_type<pulseinfer::mean_key>(type, geometry);
  if (is(pulseinfer::log_mass::form::name)) return book_of_type<pulseinfer::log_mass>(type, geometry);
  throw std::invalid_argument{"'" + digest + "' is no digest"};
}

}  // namespace calibrate
