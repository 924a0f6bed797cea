/// What can be chosen about the library's part of a run, and the decoder that comes of it.
#pragma once

#include "decoder.hpp"
#include "engine/llama_weights.hpp"
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/manager/offload_manager.hpp>
#include <pulseinfer/numeric.hpp>
#include <pulseinfer/observe/counters.hpp>
#include <pulseinfer/selector/calibration.hpp>
#include <pulseinfer/selector/few_heads.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <span>
#include <string>
#include <vector>

namespace decode_text {

enum class digest_choice : std::uint8_t { split_cuboid_mean, cuboid_mean, split_min_max, min_max, mean_key, log_mass };
enum class selector_choice : std::uint8_t { soft_vote, max_share, designated_head, calibrated_heads };
enum class transfer_choice : std::uint8_t { gather_scatter, fragment_copy, batch_copy };
enum class scheduler_choice : std::uint8_t { lockstep, lockstep_hits_first, interruptible };

/// The word for a choice, on the command line and in what is written.
[[nodiscard]] constexpr char const* name_of(digest_choice choice)
{
  switch (choice) {
    case digest_choice::cuboid_mean: return "cuboid_mean";
    case digest_choice::split_min_max: return "split_min_max";
    case digest_choice::min_max: return "min_max";
    case digest_choice::mean_key: return "mean_key";
    case digest_choice::log_mass: return "log_mass";
    case digest_choice::split_cuboid_mean: break;
  }
  return "split_cuboid_mean";
}
[[nodiscard]] constexpr char const* name_of(selector_choice choice)
{
  switch (choice) {
    case selector_choice::max_share: return "max_share";
    case selector_choice::designated_head: return "designated_head";
    case selector_choice::calibrated_heads: return "calibrated_heads";
    case selector_choice::soft_vote: break;
  }
  return "soft_vote";
}
[[nodiscard]] constexpr char const* name_of(transfer_choice choice)
{
  switch (choice) {
    case transfer_choice::fragment_copy: return "fragment_copy";
    case transfer_choice::batch_copy: return "batch_copy";
    case transfer_choice::gather_scatter: break;
  }
  return "gather_scatter";
}
[[nodiscard]] constexpr char const* name_of(scheduler_choice choice)
{
  switch (choice) {
    case scheduler_choice::lockstep: return "lockstep";
    case scheduler_choice::lockstep_hits_first: return "lockstep_hits_first";
    case scheduler_choice::interruptible: break;
  }
  return "interruptible";
}

struct offload_options {
  digest_choice digest = digest_choice::split_cuboid_mean;
  pulseinfer::dtype digest_type = pulseinfer::dtype::int8;
  pulseinfer::calibration measured = {};  // of the model, for calibrated_heads
  selector_choice selector = selector_choice::soft_vote;
  transfer_choice transfer = transfer_choice::gather_scatter;
  scheduler_choice scheduler = scheduler_choice::interruptible;
  std::uint32_t budget_tokens = 1024;
  std::uint32_t slots_tokens = 1280;
  std::uint32_t block_tokens = 16;
  std::uint32_t sink_tokens = 16;
  std::optional<std::uint32_t> recent_tokens = {};
  float hysteresis = 0.25F;
  std::vector<std::uint32_t> dense_layers = {};      // these keep all their blocks
  std::vector<std::uint32_t> designated_heads = {};  // one for all layers, or one each
  std::uint32_t chunk = 256;                         // tokens of a prompt that run together
  std::uint32_t trace_records = 0;                   // 0: no timeline
};

/// Tokens that a row takes in as a prefill, one less than its prompt has, and all that it may have.
struct row_lengths {
  std::uint32_t prompt_tokens = 0;
  std::uint32_t max_tokens = 0;
};

/// A decoder that also says what its cache did.
class offload_decoder : public decoder {
 public:
  [[nodiscard]] virtual pulseinfer::counters const& counters() const = 0;  // of the decode steps
  [[nodiscard]] virtual pulseinfer::memory_use memory() const = 0;         // now
  [[nodiscard]] virtual std::uint64_t device_bytes() const = 0;            // slots, digests and books now
  [[nodiscard]] virtual std::uint64_t device_bytes_peak() const = 0;       // prompts included
  [[nodiscard]] virtual std::string schedule() const = 0;                  // how rows went through the layers at last
  [[nodiscard]] virtual std::uint64_t graph_launches() const = 0;  // of whole steps or visits; 0: nothing is captured
  virtual void write_timeline(std::ostream& out) = 0;
};

/// Layers as the library's groups: those named are dense, the others selected.
/// @throws pulseinfer::configuration_error for a layer that the model does not have
[[nodiscard]] std::vector<pulseinfer::layer_group> layer_groups(
  std::uint32_t layers, std::span<std::uint32_t const> dense_layers);

/// Reads a calibration's file.
/// @throws pulseinfer::argument_error with the line, std::runtime_error where there is none
[[nodiscard]] pulseinfer::calibration load_calibration(std::string const& path);

/// The heads that choose in each layer.
/// @throws pulseinfer::configuration_error where designated heads or a calibration are of another model
[[nodiscard]] pulseinfer::few_heads choosing_heads(
  offload_options const& options, host_engine::llama_geometry const& model);

/// @param weights borrowed
/// @throws pulseinfer::error, std::runtime_error with the numbers that don't fit
[[nodiscard]] std::unique_ptr<offload_decoder> make_offload_decoder(
  host_engine::llama_weights const& weights, offload_options const& options, std::span<row_lengths const> rows);

}  // namespace decode_text
