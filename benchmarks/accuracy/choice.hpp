/// How one layer's blocks are chosen, position after position, with the library's own formulas; and which of them would have
/// to be recalled into hot slots.
#pragma once

#include "attention.hpp"
#include "configuration.hpp"
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/row_info.hpp>

#include <cstdint>
#include <span>
#include <vector>

namespace accuracy {

/// Digests of one layer's full blocks, as a selector stores them, and scores from them.
class layer_digests {
 public:
  layer_digests(attention_geometry const& geometry, configuration const& options, std::uint32_t capacity);

  /// Estimated shares of blocks, for `count` queries from `position` on, of the query heads of the KV heads in `heads`. The digest of
  /// a block that is being filled is made of the keys that the position sees.
  /// @param queries [count, query_heads, head_dim]   @param shares [query_heads, count], rows of other heads stay
  void estimate(
    layer_cache const& cache, float const* queries, std::uint32_t position, std::uint32_t count, head_mask heads,
    share_table& shares);

 private:
  void estimate_parts(
    layer_cache const& cache, float const* queries, std::uint32_t position, std::uint32_t count, head_mask heads,
    share_table& shares);
  template <class Form, class Value>
  void make(layer_cache const& cache, std::uint32_t head, std::uint32_t block, std::uint32_t tokens, float* digest);
  void make_digest(
    layer_cache const& cache, std::uint32_t head, std::uint32_t block, std::uint32_t tokens, float* digest);

  attention_geometry geometry_;
  digest_kind kind_;
  pulseinfer::dtype type_;
  std::uint32_t block_tokens_;  // of one digest
  std::uint32_t block_parts_;   // digests of a block
  std::uint32_t capacity_blocks_;
  std::uint32_t elements_;         // of one digest
  std::uint32_t full_blocks_ = 0;  // digests that are made
  std::vector<float> digests_;     // [kv_heads, capacity_blocks, elements]
  std::vector<float> open_, spread_, temp_;
  std::vector<std::byte> stored_;
  share_table parts_;
};

/// Hot slots of one lane and layer, the least recently used one replaced.
class slot_cache {
 public:
  /// What a prompt has written last lies in them at first.
  slot_cache(std::uint32_t slots, std::uint32_t capacity_blocks, std::uint32_t written_blocks);

  [[nodiscard]] bool holds(pulseinfer::block_id block) const
  {
    auto const at = static_cast<std::size_t>(pulseinfer::to_number(block));
    return at >= written_ || (at < stamps_.size() && stamps_[at] != 0);
  }
  /// The blocks of a step come in, and count as used.
  void use(std::span<pulseinfer::block_id const> blocks);

 private:
  std::uint32_t slots_;
  std::uint32_t held_ = 0;
  std::size_t written_;  // blocks from here on have never left the device
  std::uint32_t clock_ = 1;
  std::vector<std::uint32_t> stamps_;  // by block: when it was used last; 0: it is not there
};

/// Sums over the steps of one layer, all lanes.
struct recall_counts {
  std::uint64_t steps = 0;
  std::uint64_t selected = 0;
  std::uint64_t missing = 0;   // recalled, deferred ones included
  std::uint64_t deferred = 0;  // of them, those that their step did not wait for
  double skipped_share = 0.0;  // estimated, sum over steps of the largest of any query head
  double skipped_most = 0.0;

  void add(recall_counts const& other);
};

/// The choice of one layer, step by step.
class layer_choice {
 public:
  /// @param written_blocks of the prompt
  layer_choice(
    attention_geometry const& geometry, configuration const& options, std::uint32_t layer,
    std::uint32_t capacity_blocks, std::uint32_t written_blocks);

  /// Chooses for token `index` of the shares, which stands at `position`.
  /// @param count_recalls false in the first steps, while the slots warm up
  void choose(share_table const& shares, std::uint32_t index, std::uint32_t position, bool count_recalls);

  [[nodiscard]] std::uint32_t lanes() const { return static_cast<std::uint32_t>(lanes_.size()); }
  /// Ascending.
  [[nodiscard]] std::span<pulseinfer::block_id const> chosen(std::uint32_t lane) const { return lanes_[lane].chosen; }
  /// What attention reads: the chosen ones, but for those that are deferred.
  [[nodiscard]] std::span<pulseinfer::block_id const> read(std::uint32_t lane) const { return lanes_[lane].read; }
  /// Of the last step: chosen and not there.
  [[nodiscard]] std::span<pulseinfer::block_id const> missing(std::uint32_t lane) const { return lanes_[lane].missing; }
  [[nodiscard]] recall_counts const& counts() const { return counts_; }
  /// Votes of the last step, without what favours the previous selection.
  [[nodiscard]] std::span<float const> votes() const { return plain_votes_; }
  [[nodiscard]] slot_cache const& slots(std::uint32_t lane) const { return lanes_[lane].slots; }

 private:
  struct lane_state {
    std::vector<std::vector<std::uint32_t>> previous;  // [choosers], one bit for each block
    slot_cache slots;
    std::vector<pulseinfer::block_id> chosen = {}, read = {}, missing = {};
  };
  void pick(
    lane_state& lane, std::size_t chooser, pulseinfer::row_info const& row, std::vector<pulseinfer::block_id>& ids);
  void defer(lane_state& lane, share_table const& shares, std::uint32_t index, std::uint32_t first, std::uint32_t last);

  attention_geometry geometry_;
  configuration const* options_;
  std::uint32_t budget_, sinks_, recent_;
  head_mask heads_;
  float favour_;
  std::vector<lane_state> lanes_;
  recall_counts counts_;
  std::vector<float> votes_, plain_votes_;
  std::vector<std::uint32_t> temp_;
  std::vector<pulseinfer::block_id> ids_, merged_;
  std::vector<std::pair<float, pulseinfer::block_id>> order_;
};

}  // namespace accuracy
