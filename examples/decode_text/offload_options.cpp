#include "offload_options.hpp"

#include "offload_compositions.hpp"
#include "paged_engine.hpp"
#include <pulseinfer/backend/cpu/cpu_backend.hpp>
#include <pulseinfer/backend/traced.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/selector/calibrated_heads.hpp>
#include <pulseinfer/selector/designated_head.hpp>
#include <pulseinfer/selector/max_share.hpp>
#include <pulseinfer/selector/soft_vote.hpp>

#include <algorithm>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace decode_text {

std::vector<pulseinfer::layer_group> layer_groups(std::uint32_t layers, std::span<std::uint32_t const> dense_layers)
{
  std::vector<pulseinfer::layer_group> groups;
  for (std::uint32_t const layer : dense_layers) {
    if (layer >= layers) {
      throw pulseinfer::configuration_error{
        "layer " + std::to_string(layer) + " is to be dense, the model has " + std::to_string(layers) + " layers"};
    }
  }
  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    bool const dense = std::ranges::find(dense_layers, layer) != dense_layers.end();
    auto const kind = dense ? pulseinfer::layer_kind::dense : pulseinfer::layer_kind::selected;
    if (groups.empty() || groups.back().kind != kind) groups.push_back({.first = layer, .kind = kind});
    ++groups.back().count;
  }
  return groups;
}

pulseinfer::calibration load_calibration(std::string const& path)
{
  std::ifstream file{path};
  if (!file) { throw std::runtime_error{path + ": no calibration can be read there"}; }
  try {
    return pulseinfer::read_calibration(file);
  } catch (pulseinfer::argument_error const& problem) {
    throw pulseinfer::argument_error{problem.code(), path + ": " + problem.what()};
  }
}

namespace {

template <class Rule>
pulseinfer::few_heads heads_of(Rule const& rule, pulseinfer::kv_geometry const& geometry)
{
  rule.validate(geometry);
  pulseinfer::few_heads heads;
  for (std::uint32_t layer = 0; layer < geometry.layers; ++layer) {
    heads.layers.push_back(rule.of_layer(static_cast<pulseinfer::layer_id>(layer), geometry));
  }
  return heads;
}

std::string_view form_of(digest_choice choice)
{
  switch (choice) {
    case digest_choice::min_max:
    case digest_choice::split_min_max: return pulseinfer::min_max::form::name;
    case digest_choice::mean_key: return pulseinfer::mean_key::form::name;
    case digest_choice::log_mass: return pulseinfer::log_mass::form::name;
    case digest_choice::cuboid_mean:
    case digest_choice::split_cuboid_mean: break;
  }
  return pulseinfer::cuboid_mean::form::name;
}

}  // namespace

pulseinfer::few_heads choosing_heads(offload_options const& options, host_engine::llama_geometry const& model)
{
  pulseinfer::kv_geometry const geometry{
    .layers = model.layers,
    .query_heads = model.query_heads,
    .kv_heads = model.kv_heads,
    .head_dim = model.head_dim,
    .block_tokens = options.block_tokens};
  switch (options.selector) {
    case selector_choice::max_share: return heads_of(pulseinfer::max_share{}, geometry);
    case selector_choice::designated_head: {
      pulseinfer::designated_head named{.head_of_layer = options.designated_heads};
      if (named.head_of_layer.size() == 1) named.head_of_layer.assign(model.layers, named.head_of_layer.front());
      return heads_of(named, geometry);
    }
    case selector_choice::calibrated_heads: {
      pulseinfer::calibrated_heads const calibrated{.measured = options.measured};
      calibrated.validate_digest(form_of(options.digest));
      return heads_of(calibrated, geometry);
    }
    case selector_choice::soft_vote: break;
  }
  return heads_of(pulseinfer::soft_vote{}, geometry);
}

std::unique_ptr<offload_decoder> make_offload_decoder(
  host_engine::llama_weights const& weights, offload_options const& options, std::span<row_lengths const> rows)
{
  return offload_compositions<paged_engine<pulseinfer::traced<pulseinfer::cpu_backend>>>{weights, options, rows}.make();
}

}  // namespace decode_text
