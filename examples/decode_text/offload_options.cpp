#include "offload_options.hpp"

#include "offload_compositions.hpp"
#include "paged_engine.hpp"
#include <pulseinfer/backend/cpu/cpu_backend.hpp>
#include <pulseinfer/backend/traced.hpp>

#include <algorithm>
#include <string>

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

std::unique_ptr<offload_decoder> make_offload_decoder(
  host_engine::llama_weights const& weights, offload_options const& options, std::span<row_lengths const> rows)
{
  return offload_compositions<paged_engine<pulseinfer::traced<pulseinfer::cpu_backend>>>{weights, options, rows}.make();
}

}  // namespace decode_text
