#pragma once

/// Token and block books of the running sequences. Plain host state: no memory of the device, no backend.

#include <pulseinfer/config.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/types.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace pulseinfer {

/// Blocks [first, last).
struct block_range {
  std::uint32_t first = 0;
  std::uint32_t last = 0;

  [[nodiscard]] std::uint32_t size() const { return last - first; }
  [[nodiscard]] bool empty() const { return first == last; }
};

/// One sequence: tokens that are committed (`tokens`), tokens that the current step appends on trial (`pending`), and the
/// host block of each block that has one. Blocks of committed tokens that are full are sealed.
struct sequence_state {
  sequence_id id = none<sequence_id>;
  std::uint32_t max_tokens = 0;
  std::uint32_t tokens = 0;
  std::uint32_t pending = 0;
  std::uint32_t sealed = 0;                ///< sealed blocks: [0, sealed)
  std::vector<host_block_id> host_blocks;  ///< [max_blocks] none where the host has no copy

  [[nodiscard]] bool open() const { return !is_none(id); }
};

/// Books by row. No call after construction allocates.
class sequence_book {
 public:
  /// @throws configuration_error
  sequence_book(std::uint32_t max_rows, std::uint32_t max_blocks, std::uint32_t block_tokens)
    : block_tokens_{block_tokens}
  {
    if (max_rows == 0 || max_blocks == 0 || block_tokens == 0) {
      throw configuration_error{
        "sequence book of " + std::to_string(max_rows) + " rows, " + std::to_string(max_blocks) + " blocks a row and " +
        std::to_string(block_tokens) + " tokens a block"};
    }
    rows_.resize(max_rows);
    for (sequence_state& row : rows_) { row.host_blocks.assign(max_blocks, none<host_block_id>); }
  }

  /// Begins a sequence of at most `max_tokens` tokens in a free row.
  /// @status out_of_range: no such row; invalid_state: the row is taken; capacity_exceeded: more blocks than a row has
  status open(row_id row, std::uint32_t max_tokens) noexcept
  {
    if (!in_range(row)) { return status::out_of_range; }
    sequence_state& state = rows_[to_index(row)];
    if (state.open()) { return status::invalid_state; }
    if (max_tokens == 0) { return status::invalid_argument; }
    if ((std::uint64_t{max_tokens} + block_tokens_ - 1) / block_tokens_ > state.host_blocks.size()) {
      return status::capacity_exceeded;
    }
    state.id = static_cast<sequence_id>(next_id_++);
    state.max_tokens = max_tokens;
    state.tokens = 0;
    state.pending = 0;
    state.sealed = 0;
    return status::ok;
  }

  /// Appends `tokens` on trial. They become part of the sequence by `commit`.
  /// @status invalid_state: not open, or a trial is pending; invalid_argument: 0 tokens; capacity_exceeded: past max_tokens
  status append(row_id row, std::uint32_t tokens) noexcept
  {
    if (!in_range(row)) { return status::out_of_range; }
    sequence_state& state = rows_[to_index(row)];
    if (!state.open() || state.pending != 0) { return status::invalid_state; }
    if (tokens == 0) { return status::invalid_argument; }
    if (std::uint64_t{state.tokens} + tokens > state.max_tokens) { return status::capacity_exceeded; }
    state.pending = tokens;
    return status::ok;
  }

  /// Keeps the first `accepted` tokens of the trial and drops the rest; `sealed` receives the blocks that became full.
  /// @status invalid_state: no trial; invalid_argument: more accepted than appended
  status commit(row_id row, std::uint32_t accepted, block_range& sealed) noexcept
  {
    if (!in_range(row)) { return status::out_of_range; }
    sequence_state& state = rows_[to_index(row)];
    if (!state.open() || state.pending == 0) { return status::invalid_state; }
    if (accepted > state.pending) { return status::invalid_argument; }
    state.tokens += accepted;
    state.pending = 0;
    sealed = {state.sealed, state.tokens / block_tokens_};
    state.sealed = sealed.last;
    return status::ok;
  }

  /// Drops the row's trial where there is one.
  void drop(row_id row) noexcept
  {
    PULSEINFER_EXPECTS(in_range(row), "drop needs a row");
    rows_[to_index(row)].pending = 0;
  }

  /// Ends a row's sequence. The caller has taken the host blocks back.
  void close(row_id row) noexcept
  {
    PULSEINFER_EXPECTS(in_range(row) && rows_[to_index(row)].open(), "close needs an open row");
    sequence_state& state = rows_[to_index(row)];
    state.id = none<sequence_id>;
    for (host_block_id& block : state.host_blocks) { block = none<host_block_id>; }
  }

  [[nodiscard]] bool in_range(row_id row) const noexcept { return !is_none(row) && to_index(row) < rows_.size(); }
  [[nodiscard]] sequence_state& operator[](row_id row) { return rows_[to_index(row)]; }
  [[nodiscard]] sequence_state const& operator[](row_id row) const { return rows_[to_index(row)]; }
  [[nodiscard]] std::uint32_t rows() const noexcept { return static_cast<std::uint32_t>(rows_.size()); }
  [[nodiscard]] std::uint32_t block_tokens() const noexcept { return block_tokens_; }

 private:
  std::vector<sequence_state> rows_;
  std::uint32_t block_tokens_;
  std::int64_t next_id_ = 0;
};

}  // namespace pulseinfer
