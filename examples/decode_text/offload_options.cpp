#include "offload_options.hpp"

#include "pulseinfer_decoder.hpp"
#include <pulseinfer/scheduler/interruptible_scheduler.hpp>
#include <pulseinfer/scheduler/lockstep_scheduler.hpp>
#include <pulseinfer/selector/designated_head.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>
#include <pulseinfer/transfer/batch_copy_engine.hpp>
#include <pulseinfer/transfer/fragment_copy_engine.hpp>
#include <pulseinfer/transfer/gather_scatter_engine.hpp>

#include <algorithm>
#include <string>

namespace decode_text {
namespace {

using pulseinfer::visit_order;

// Policies are compile-time choices; options are not. Each level below turns one option into a type.
struct request {
  host_engine::llama_weights const& weights;
  offload_options const& options;
  std::span<row_lengths const> rows;
};

template <class TransferEngine, class Scheduler, class Selector>
std::unique_ptr<offload_decoder> make(request const& wanted, Selector const& selector)
{
  return std::make_unique<pulseinfer_decoder<Selector, TransferEngine, Scheduler>>(
    wanted.weights, wanted.options, selector, wanted.rows);
}

template <class TransferEngine, class Selector>
std::unique_ptr<offload_decoder> with_scheduler(request const& wanted, Selector const& selector)
{
  switch (wanted.options.scheduler) {
    case scheduler_choice::lockstep:
      return make<TransferEngine, pulseinfer::lockstep_scheduler<visit_order::whole>>(wanted, selector);
    case scheduler_choice::lockstep_hits_first:
      return make<TransferEngine, pulseinfer::lockstep_scheduler<visit_order::hits_first>>(wanted, selector);
    case scheduler_choice::interruptible: break;
  }
  return make<TransferEngine, pulseinfer::interruptible_scheduler<visit_order::hits_first>>(wanted, selector);
}

template <class Selector>
std::unique_ptr<offload_decoder> with_transfer(request const& wanted, Selector selector)
{
  selector.budget_tokens = wanted.options.budget_tokens;
  selector.sink_tokens = wanted.options.sink_tokens;
  selector.recent_tokens = wanted.options.recent_tokens;
  selector.hysteresis = wanted.options.hysteresis;
  switch (wanted.options.transfer) {
    case transfer_choice::fragment_copy: return with_scheduler<pulseinfer::fragment_copy_engine>(wanted, selector);
    case transfer_choice::batch_copy: return with_scheduler<pulseinfer::batch_copy_engine>(wanted, selector);
    case transfer_choice::gather_scatter: break;
  }
  return with_scheduler<pulseinfer::gather_scatter_engine>(wanted, selector);
}

}  // namespace

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
  request const wanted{weights, options, rows};
  if (options.selector == selector_choice::designated_head) {
    pulseinfer::designated_head heads{.head_of_layer = options.designated_heads};
    if (heads.head_of_layer.size() == 1) {
      heads.head_of_layer.assign(weights.geometry.layers, heads.head_of_layer.front());
    }
    return with_transfer(
      wanted, pulseinfer::solo_head_selector<pulseinfer::cuboid_mean, pulseinfer::designated_head>{.heads = heads});
  }
  return with_transfer(wanted, pulseinfer::solo_head_selector<>{});
}

}  // namespace decode_text
