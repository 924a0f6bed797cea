#pragma once

/// A visit's table in the forms that other libraries' paged-attention kernels read, in arrays of the host engine's own.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/reduce.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/row_list.hpp>
#include <pulseinfer/view/table.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// The lists of a table that an export takes, and the places that each has in the engine's arrays. List i * head_groups + g is
/// head group g of the i-th row of `rows`; the lists of the places behind them, up to `padded_rows`, are empty. An export
/// writes every place of its arrays, so that nothing of an earlier step stays in them, and nothing else.
///
/// A lane with more blocks than `width` is refused: its list is empty and `refused` says so. `table.stride` is always wide
/// enough; the layer's budget is where every row is sparse.
struct export_lists {
  block_table table = {};
  row_list rows = {};
  std::uint32_t padded_rows = 0;    ///< places of a batch of fixed size; 0: as many as there are rows
  std::uint32_t width = 0;          ///< blocks that a list has places for
  std::int32_t* refused = nullptr;  // [lists], written: blocks of a lane that was refused, else 0; may be null

  [[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint64_t count() const
  {
    return std::uint64_t{padded_rows == 0 ? rows.count : padded_rows} * table.head_groups;
  }

  /// The lane of a list; none for padding.
  [[nodiscard]] PULSEINFER_HOST_DEVICE lane_id lane(std::uint64_t list) const
  {
    std::uint64_t const place = list / table.head_groups;
    if (place >= rows.count) { return none<lane_id>; }
    return lane_of(rows[place], static_cast<std::uint32_t>(list % table.head_groups), table.head_groups);
  }

  /// Blocks that the table lists for the list's lane; 0 for padding.
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint32_t listed(std::uint64_t list) const
  {
    lane_id const id = lane(list);
    return is_none(id) ? 0U : table.counts[to_index(id)];
  }

  /// Blocks that the export lists: 0 where the lane is refused.
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint32_t blocks(std::uint64_t list) const
  {
    std::uint32_t const all = listed(list);
    return all > width ? 0U : all;
  }

  /// Valid tokens of the blocks that the export lists.
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint32_t tokens(std::uint64_t list) const
  {
    return blocks(list) == 0 ? 0U : table.tokens(lane(list));
  }

  /// Slots of a list, [blocks(list)]; null for padding.
  [[nodiscard]] PULSEINFER_HOST_DEVICE slot_id const* slots(std::uint64_t list) const
  {
    lane_id const id = lane(list);
    return is_none(id) ? nullptr : table.slots + to_index(id) * table.stride;
  }

  PULSEINFER_HOST_DEVICE void tell_refusal(std::uint64_t list) const
  {
    if (refused == nullptr) { return; }
    std::uint32_t const all = listed(list);
    refused[list] = all > width ? static_cast<std::int32_t>(all) : 0;
  }

  [[nodiscard]] launch_shape shape() const
  {
    PULSEINFER_EXPECTS(padded_rows == 0 || padded_rows >= rows.count, "an export has places for all of its rows");
    return {.items = count(), .group_threads = 128};
  }
};

static_assert(std::is_trivially_copyable_v<export_lists>);

/// The dense form: a row of slots for each list, with its tokens. One item is one list.
struct export_dense_table {
  static constexpr char const* name = "export_dense_table";
  static constexpr operation_kind kind = operation_kind::metadata;

  export_lists lists = {};
  std::int32_t* slots = nullptr;    // [lists, width], -1 past a list's blocks
  std::int32_t* lengths = nullptr;  // [lists] valid tokens of the listed blocks; may be null

  [[nodiscard]] launch_shape shape() const { return lists.shape(); }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const { return {.device_bytes = lists.count() * (lists.width * 8ULL + 16ULL)}; }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref) const
  {
    std::uint32_t const blocks = lists.blocks(item);
    slot_id const* const listed = lists.slots(item);
    std::int32_t* const out = slots + item * lists.width;
    for (std::uint32_t i = group.thread_rank(); i < lists.width; i += group.size()) {
      out[i] = i < blocks ? to_number(listed[i]) : -1;
    }
    if (group.thread_rank() != 0) { return; }
    if (lengths != nullptr) { lengths[item] = static_cast<std::int32_t>(lists.tokens(item)); }
    lists.tell_refusal(item);
  }
};

static_assert(operation<export_dense_table>);

/// The compressed form: the slots of all lists one behind the other, as FlashInfer's paged kernels read them. An empty list
/// has an empty range and a last page of 0 tokens. With slots as pages, [slots, K|V, heads, tokens, dim] in the default
/// order. One item is one list.
///
/// A kernel that plans its work on the host needs the counts there: they are the budget, the same in each step, where every
/// row is sparse and visits are whole. `width` is that bound.
struct export_csr_table {
  static constexpr char const* name = "export_csr_table";
  static constexpr operation_kind kind = operation_kind::metadata;

  export_lists lists = {};
  std::int32_t* indptr = nullptr;   // [lists + 1] begin of each list in `indices`
  std::int32_t* indices = nullptr;  // [lists * width] slots, -1 past the last list
  std::int32_t* last_page_len =
    nullptr;  // [lists] valid tokens of a list's last block, 1 to block_tokens; 0 without blocks

  [[nodiscard]] launch_shape shape() const { return lists.shape(); }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t group_threads) const
  {
    return group_threads * sizeof(std::uint64_t);
  }
  [[nodiscard]] operation_cost cost() const
  {
    return {.device_bytes = lists.count() * (lists.width * 8ULL + lists.count() * 4ULL + 20ULL)};
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref scratch) const
  {
    std::uint64_t const count = lists.count();
    // Items know nothing of one another, so each adds the counts up for itself: of the lists before it, and of all.
    std::uint64_t before = 0;
    std::uint64_t behind = 0;
    for (std::uint64_t list = group.thread_rank(); list < count; list += group.size()) {
      (list < item ? before : behind) += lists.blocks(list);
    }
    auto* const sums = reinterpret_cast<std::uint64_t*>(scratch.data);
    std::uint64_t const begin = device::reduce(group, before, sums, device::plus{});
    std::uint64_t const end = begin + device::reduce(group, behind, sums, device::plus{});

    std::uint32_t const blocks = lists.blocks(item);
    slot_id const* const slots = lists.slots(item);
    for (std::uint32_t i = group.thread_rank(); i < blocks; i += group.size()) {
      indices[begin + i] = to_number(slots[i]);
    }
    std::uint64_t const places = count * lists.width;
    for (std::uint64_t i = end + item * group.size() + group.thread_rank(); i < places; i += count * group.size()) {
      indices[i] = -1;
    }
    if (group.thread_rank() != 0) { return; }
    indptr[item] = static_cast<std::int32_t>(begin);
    if (item + 1 == count) { indptr[count] = static_cast<std::int32_t>(end); }
    last_page_len[item] =
      blocks == 0 ? 0 : static_cast<std::int32_t>(lists.tokens(item) - (blocks - 1) * lists.table.layout.block_tokens);
    lists.tell_refusal(item);
  }
};

static_assert(operation<export_csr_table>);

/// The flat form: a number for each token, slot * block_tokens + its place in the block, in the order of the tokens. 64 bits,
/// since a pool may have more tokens than 32 count. One item is one list.
struct export_token_slots {
  static constexpr char const* name = "export_token_slots";
  static constexpr operation_kind kind = operation_kind::metadata;

  export_lists lists = {};
  std::int64_t* token_slots = nullptr;  // [lists, width * block_tokens], -1 past a list's tokens
  std::int32_t* lengths = nullptr;      // [lists] tokens; may be null

  [[nodiscard]] launch_shape shape() const { return lists.shape(); }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const
  {
    return {.device_bytes = lists.count() * (lists.width * (lists.table.layout.block_tokens * 8ULL + 4ULL) + 16ULL)};
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref) const
  {
    std::uint32_t const block_tokens = lists.table.layout.block_tokens;
    std::uint64_t const places = std::uint64_t{lists.width} * block_tokens;
    std::uint32_t const tokens = lists.tokens(item);
    slot_id const* const slots = lists.slots(item);
    std::int64_t* const out = token_slots + item * places;
    for (std::uint64_t i = group.thread_rank(); i < places; i += group.size()) {
      out[i] = i < tokens
        ? static_cast<std::int64_t>(to_index(slots[i / block_tokens]) * block_tokens + i % block_tokens)
        : -1;
    }
    if (group.thread_rank() != 0) { return; }
    if (lengths != nullptr) { lengths[item] = static_cast<std::int32_t>(tokens); }
    lists.tell_refusal(item);
  }
};

static_assert(operation<export_token_slots>);

}  // namespace pulseinfer
