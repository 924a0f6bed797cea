/// One document under one configuration after another: its prompt is attended densely once, its last tokens, given to the
/// model as they stand, once for each configuration.
#pragma once

#include "attention.hpp"
#include "choice.hpp"
#include "configuration.hpp"
#include "engine/llama_engine.hpp"

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace accuracy {

struct document {
  std::string name = {}, kind = {};
  std::vector<std::int32_t> tokens = {};
  std::uint32_t scored = 0;  // the last ones
};

/// Counts of values between 0 and 1, for quantiles of many.
class histogram {
 public:
  static constexpr std::size_t bins = 2000;
  void add(double value);
  void add(histogram const& other);
  /// The value below which `part` of all lie, to half a bin.
  [[nodiscard]] double quantile(double part) const;
  [[nodiscard]] double mean() const { return count_ == 0 ? 0.0 : sum_ / static_cast<double>(count_); }
  [[nodiscard]] std::uint64_t count() const { return count_; }

 private:
  std::vector<std::uint32_t> counts_ = std::vector<std::uint32_t>(bins + 1);
  double sum_ = 0.0;
  std::uint64_t count_ = 0;
};

/// What a query head lost in one position by blocks that were deferred, as logarithms of parts of its softmax.
struct skipped_mass {
  std::uint32_t layer = 0, head = 0;
  std::uint32_t index = 0;  // of the scored token
  float truth = 0.0F;
  float told = 0.0F;     // by the shares that the choice is made of, as the library tells it
  float centres = 0.0F;  // by the centres of the digests alone, over the true sum of all blocks
};

/// What one document gave under one configuration. Attention's figures are those of sparse layers.
struct outcome {
  bool done = false;
  std::vector<float> kl = {};  // [scored] nat, of dense against sparse
  double loss = 0.0;           // mean cross entropy
  double dense_loss = 0.0;
  double same_top = 0.0;                    // part of the tokens whose likeliest next token agrees
  histogram mass = {};                      // of a query head's softmax, recovered by what is read
  std::vector<double> head_mass = {};       // [layers, query_heads] mean
  histogram error = {};                     // relative, behind the output projection
  std::vector<recall_counts> recalls = {};  // [layers]
  double recalled_bytes = 0.0;              // a step, all layers, keys and values of 16 bits
  std::vector<skipped_mass> skipped = {};   // where blocks are deferred
};

/// One choice, as it is made: for those who record selections.
struct choice_event {
  std::uint32_t layer = 0;
  std::uint32_t index = 0;     // of the scored token
  std::uint32_t position = 0;  // where it stands
  layer_choice const& choice;
  share_table const& shares;   // by which was chosen
  share_table const* guessed;  // the same with the queries guessed one layer before, where asked
};
using choice_observer = std::function<void(choice_event const&)>;

/// A text written by the model under a configuration, and how far it was from the dense model token by token.
struct generated_text {
  std::vector<std::int32_t> tokens = {};
  std::vector<float> kl = {};
};

/// A document's state: caches of all layers, and what the dense model says.
class document_run {
 public:
  static constexpr std::uint32_t chunk =
    512;  // tokens that go through a layer together; the engine's rows hold so many

  /// @param extra tokens that are generated behind the document
  document_run(host_engine::llama_weights const& weights, document const& text, std::uint32_t extra = 0);

  /// Attends the prompt and the scored tokens densely. @param keep_shares true and estimated shares stay, for `replay`
  void attend_densely(host_engine::llama_engine& engine, configuration const& options, bool keep_shares);
  /// The scored tokens under a configuration. `attend_densely` comes first.
  [[nodiscard]] outcome evaluate(
    host_engine::llama_engine& engine, configuration const& options, choice_observer const& observer = {},
    bool guess = false);
  /// The same where one layer alone is sparse.
  [[nodiscard]] outcome evaluate_layer(host_engine::llama_engine& engine, configuration options, std::uint32_t layer);
  /// Recalled bytes of a step if the queries of the dense pass were those of the configuration.
  [[nodiscard]] double replay(configuration const& options) const;
  /// For each layer and mask: the mean over steps of all heads' mass that the choice of these KV heads covers; and last
  /// the most that any choice could. Blocks that are always selected don't count. @return [layers, masks + 1]
  [[nodiscard]] std::vector<double> covered(configuration const& options, std::vector<head_mask> const& masks) const;

  /// Reads the document's prompt densely, then writes `count` tokens under a configuration, each drawn from what the sparse
  /// model says, and lets the dense model read them. @param more false ends the text before `count`
  [[nodiscard]] generated_text generate(
    host_engine::llama_engine& engine, configuration const& options, std::uint32_t count, double temperature,
    std::uint64_t seed, std::function<bool()> const& more = {});

  [[nodiscard]] std::uint32_t prompt_tokens() const { return position_; }
  [[nodiscard]] document const& text() const { return *text_; }

 private:
  template <class Attend>
  void forward(
    host_engine::llama_engine& engine, std::span<std::int32_t const> tokens, std::uint32_t position, Attend&& attend,
    std::uint32_t first_layer = 0);
  [[nodiscard]] outcome evaluate_from(
    host_engine::llama_engine& engine, configuration const& options, choice_observer const& observer, bool guess,
    std::uint32_t first_layer);
  void read_prompt(host_engine::llama_engine& engine);
  [[nodiscard]] double recalled_bytes(configuration const& options, std::vector<recall_counts> const& recalls) const;
  void compare_logits(host_engine::llama_engine& engine, outcome& result);
  [[nodiscard]] std::uint32_t scored_position(std::uint32_t index) const { return position_ + index; }

  host_engine::llama_weights const* weights_;
  document const* text_;
  attention_geometry geometry_;
  std::uint32_t capacity_;
  std::uint32_t position_;  // of the first token whose successor is scored
  std::vector<layer_cache> caches_;
  std::vector<float> dense_log_;                                               // [scored, vocabulary] log-probabilities
  std::vector<std::vector<pulseinfer::half>> true_shares_, estimated_shares_;  // [layers]
  std::vector<std::vector<float>> dense_hidden_;                               // [layers] before them, [scored, hidden]
  dense_scratch scratch_;
};

[[nodiscard]] attention_geometry geometry_of(host_engine::llama_geometry const& model);

/// Replaces logits by log-probabilities.
void log_softmax(float* logits, std::size_t count);

}  // namespace accuracy
