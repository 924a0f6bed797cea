/// The managers that the options choose among. Policies are compile-time choices, options are not: each level below turns one
/// option into a type.
#pragma once

#include "offload_options.hpp"
#include "pace.hpp"
#include "pulseinfer_decoder.hpp"
#include <pulseinfer/scheduler/lockstep_scheduler.hpp>
#include <pulseinfer/selector/cuboid_mean.hpp>
#include <pulseinfer/selector/few_heads.hpp>
#include <pulseinfer/selector/log_mass.hpp>
#include <pulseinfer/selector/mean_key.hpp>
#include <pulseinfer/selector/min_max.hpp>
#include <pulseinfer/selector/selector_among.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>
#include <pulseinfer/selector/split.hpp>
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
    using namespace pulseinfer;
    switch (options_.digest) {
      case digest_choice::cuboid_mean: return with_transfer(selecting<cuboid_mean>());
      case digest_choice::split_min_max: return with_transfer(selecting<split<min_max, 4>>());
      case digest_choice::min_max: return with_transfer(selecting<min_max>());
      case digest_choice::mean_key: return with_transfer(selecting<mean_key>());
      case digest_choice::log_mass: return with_transfer(selecting<log_mass>());
      case digest_choice::split_cuboid_mean: break;
    }
    return with_transfer(selecting<split<cuboid_mean, 4>>());
  }

 private:
  // Head rules are lists of heads, and digests are told apart at set-up: managers are compiled once for all of them.
  template <class Digest>
  using selector_with = pulseinfer::solo_head_selector<Digest, pulseinfer::few_heads>;
  using selector_type = pulseinfer::selector_among<
    selector_with<pulseinfer::split<pulseinfer::cuboid_mean, 4>>, selector_with<pulseinfer::cuboid_mean>,
    selector_with<pulseinfer::split<pulseinfer::min_max, 4>>, selector_with<pulseinfer::min_max>,
    selector_with<pulseinfer::mean_key>, selector_with<pulseinfer::log_mass>>;

  template <class Digest>
  [[nodiscard]] selector_type selecting() const
  {
    return {
      .chosen = selector_with<Digest>{
        .budget_tokens = options_.budget_tokens,
        .sink_tokens = options_.sink_tokens,
        .recent_tokens = options_.recent_tokens,
        .hysteresis = options_.hysteresis,
        .digest = {.type = options_.digest_type},
        .heads = choosing_heads(options_, weights_.geometry)}};
  }

  [[nodiscard]] std::unique_ptr<offload_decoder> with_transfer(selector_type const& selector) const
  {
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

  template <class TransferEngine>
  [[nodiscard]] std::unique_ptr<offload_decoder> with_scheduler(
    selector_type const& selector, TransferEngine const& transfer) const
  {
    if (options_.scheduler == scheduler_choice::lockstep) {
      return with<pulseinfer::lockstep_scheduler<pulseinfer::visit_order::whole>>(selector, transfer);
    }
    return with<paced_scheduler>(selector, transfer);
  }

  template <class Scheduler, class TransferEngine>
  [[nodiscard]] std::unique_ptr<offload_decoder> with(
    selector_type const& selector, TransferEngine const& transfer) const
  {
    return std::make_unique<pulseinfer_decoder<Engine, selector_type, TransferEngine, Scheduler>>(
      weights_, options_, selector, transfer, rows_);
  }

  weights_type const& weights_;
  offload_options const& options_;
  std::span<row_lengths const> rows_;
};

}  // namespace decode_text
