/// The managers that the options choose among. Policies are compile-time choices, options are not: each level below turns one
/// option into a type.
#pragma once

#include "offload_options.hpp"
#include "pace.hpp"
#include "pulseinfer_decoder.hpp"
#include <pulseinfer/scheduler/lockstep_scheduler.hpp>
#include <pulseinfer/selector/designated_head.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>
#include <pulseinfer/transfer/batch_copy_engine.hpp>
#include <pulseinfer/transfer/fragment_copy_engine.hpp>
#include <pulseinfer/transfer/gather_scatter_engine.hpp>

#include <memory>
#include <span>

namespace decode_text {

/// Decoders whose model runs in an `Engine`, a paged_engine or what has its members.
template <class Engine>
class offload_compositions {
 public:
  using weights_type = typename Engine::weights_type;

  /// All but `options` is borrowed for the time of the call, weights for the decoder's life.
  offload_compositions(weights_type const& weights, offload_options const& options, std::span<row_lengths const> rows)
    : weights_{weights}, options_{options}, rows_{rows}
  {}

  /// @throws pulseinfer::error, std::runtime_error with the numbers that don't fit
  [[nodiscard]] std::unique_ptr<offload_decoder> make() const
  {
    if (options_.selector == selector_choice::designated_head) {
      pulseinfer::designated_head heads{.head_of_layer = options_.designated_heads};
      if (heads.head_of_layer.size() == 1) {
        heads.head_of_layer.assign(weights_.geometry.layers, heads.head_of_layer.front());
      }
      return with_transfer(
        pulseinfer::solo_head_selector<pulseinfer::cuboid_mean, pulseinfer::designated_head>{.heads = heads});
    }
    return with_transfer(pulseinfer::solo_head_selector<>{});
  }

 private:
  template <class Selector>
  [[nodiscard]] std::unique_ptr<offload_decoder> with_transfer(Selector selector) const
  {
    selector.budget_tokens = options_.budget_tokens;
    selector.sink_tokens = options_.sink_tokens;
    selector.recent_tokens = options_.recent_tokens;
    selector.hysteresis = options_.hysteresis;
    // A batched copy is a fragment copy with as many fragments as there are in one call.
    if (options_.transfer == transfer_choice::gather_scatter) {
      return with_scheduler(selector, pulseinfer::gather_scatter_engine{});
    }
    pulseinfer::batch_copy_engine const batched;
    return with_scheduler(
      selector,
      options_.transfer == transfer_choice::fragment_copy
        ? pulseinfer::fragment_copy_engine{}
        : pulseinfer::fragment_copy_engine{.fragments_per_copy = batched.fragments_per_copy, .rows_per_landing = 0});
  }

  template <class TransferEngine, class Selector>
  [[nodiscard]] std::unique_ptr<offload_decoder> with_scheduler(
    Selector const& selector, TransferEngine const& transfer) const
  {
    if (options_.scheduler == scheduler_choice::lockstep) {
      return with<pulseinfer::lockstep_scheduler<pulseinfer::visit_order::whole>>(selector, transfer);
    }
    return with<paced_scheduler>(selector, transfer);
  }

  template <class Scheduler, class TransferEngine, class Selector>
  [[nodiscard]] std::unique_ptr<offload_decoder> with(Selector const& selector, TransferEngine const& transfer) const
  {
    return std::make_unique<pulseinfer_decoder<Engine, Selector, TransferEngine, Scheduler>>(
      weights_, options_, selector, transfer, rows_);
  }

  weights_type const& weights_;
  offload_options const& options_;
  std::span<row_lengths const> rows_;
};

}  // namespace decode_text
