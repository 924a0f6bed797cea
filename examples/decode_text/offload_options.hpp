/// What can be chosen about the library's part of a run, and the decoder that comes of it.
#pragma once

#include "decoder.hpp"
#include "engine/llama_weights.hpp"
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/manager/offload_manager.hpp>
#include <pulseinfer/observe/counters.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <span>
#include <string>
#include <vector>

namespace decode_text {

enum class selector_choice : std::uint8_t { soft_vote, designated_head };
enum class transfer_choice : std::uint8_t { gather_scatter, fragment_copy, batch_copy };
enum class scheduler_choice : std::uint8_t { lockstep, lockstep_hits_first, interruptible };

/// The word for a choice, on the command line and in what is written.
[[nodiscard]] constexpr char const* name_of(selector_choice choice)
{
  return choice == selector_choice::soft_vote ? "soft_vote" : "designated_head";
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

/// @param weights borrowed
/// @throws pulseinfer::error, std::runtime_error with the numbers that don't fit
[[nodiscard]] std::unique_ptr<offload_decoder> make_offload_decoder(
  host_engine::llama_weights const& weights, offload_options const& options, std::span<row_lengths const> rows);

}  // namespace decode_text
