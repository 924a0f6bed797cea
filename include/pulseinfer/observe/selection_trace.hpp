#pragma once

/// Recorded selections: an observer that writes them down as a selector makes them, and their text form.

#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/concepts/selector.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/detail/printable.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/store/slab.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/row_info.hpp>
#include <pulseinfer/view/row_list.hpp>
#include <pulseinfer/view/selection.hpp>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <istream>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

namespace pulseinfer {

/// What one lane selected in one layer. Selections of a lane follow one another by `tokens`.
struct selection_record {
  lane_id lane = none<lane_id>;
  layer_id layer = none<layer_id>;
  std::uint32_t tokens = 0;             ///< of the row, with those of the step
  std::vector<block_id> selected = {};  ///< ascending

  friend bool operator==(selection_record const&, selection_record const&) = default;
};

/// Copies the selections of some rows into memory that the host reads. One item per lane.
struct copy_selections {
  static constexpr char const* name = "copy_selections";
  static constexpr operation_kind kind = operation_kind::metadata;
  static constexpr std::uint32_t head_words = 4;  ///< lane, layer, tokens, count

  row_list rows = {};
  row_info const* info = nullptr;
  selection_ref selection = {};
  std::uint32_t* records = nullptr;  // [rows.count * head_groups, record_words], mapped
  std::uint32_t record_words = 0;    // head_words and the most blocks of a selection
  layer_id layer = none<layer_id>;
  std::uint32_t head_groups = 1;

  [[nodiscard]] launch_shape shape() const
  {
    return {.items = std::uint64_t{rows.count} * head_groups, .group_threads = 32};
  }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const
  {
    return {.device_bytes = shape().items * std::uint64_t{record_words} * 4};
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref) const
  {
    row_id const row = rows[item / head_groups];
    lane_id const lane = lane_of(row, static_cast<std::uint32_t>(item % head_groups), head_groups);
    std::uint32_t const count = selection.counts[to_index(lane)];
    std::uint32_t* const record = records + item * record_words;
    if (group.thread_rank() == 0) {
      record[0] = static_cast<std::uint32_t>(to_index(lane));
      record[1] = static_cast<std::uint32_t>(to_index(layer));
      record[2] = static_cast<std::uint32_t>(info[to_index(row)].tokens);
      record[3] = count;
    }
    for (std::uint32_t i = group.thread_rank(); i < count; i += group.size()) {
      record[head_words + i] = static_cast<std::uint32_t>(to_index(selection.ids_of(lane)[i]));
    }
  }
};

static_assert(operation<copy_selections>);

/// Selects as `Selector` does, and keeps what was selected. Prefetches are not kept.
template <class Selector>
struct recorded_selector {
  Selector selector = {};
  std::uint32_t max_records = 1U << 16U;  ///< what comes after them is counted and not kept

  template <class B>
  class bound : public bound_selector_t<Selector, B> {
   public:
    bound(recorded_selector const& options, B& backend, selector_limits const& limits)
      : bound_selector_t<Selector, B>{options.selector.bind(backend, limits)},
        backend_{&backend},
        head_groups_{limits.geometry.head_groups},
        max_records_{options.max_records},
        width_{copy_selections::head_words + most_selected(limits.geometry)},
        memory_{backend, memory_space::pinned, std::uint64_t{options.max_records} * width_ * sizeof(std::uint32_t)}
    {}

    status select_async(typename B::stream_ref stream, select_request const& request) noexcept
    {
      status const selected = bound_selector_t<Selector, B>::select_async(stream, request);
      if (selected != status::ok || !request.remember) { return selected; }
      std::uint32_t const wanted = request.rows.count * head_groups_;
      if (wanted > max_records_ - used_) {
        dropped_ += wanted;
        return status::ok;
      }
      std::uint32_t* const records = memory_.template as<std::uint32_t>() + std::uint64_t{used_} * width_;
      used_ += wanted;
      return backend_->launch(
        stream,
        copy_selections{
          .rows = request.rows,
          .info = request.info,
          .selection = request.selection,
          .records = records,
          .record_words = width_,
          .layer = request.layer,
          .head_groups = head_groups_});
    }

    /// Those kept so far, in the order of the calls. Ask when no selection is under way.
    [[nodiscard]] std::vector<selection_record> records() const
    {
      std::vector<selection_record> result;
      for (std::uint32_t i = 0; i < used_; ++i) {
        std::uint32_t const* const words = memory_.template as<std::uint32_t>() + std::uint64_t{i} * width_;
        selection_record& record = result.emplace_back(selection_record{
          .lane = static_cast<lane_id>(words[0]), .layer = static_cast<layer_id>(words[1]), .tokens = words[2]});
        for (std::uint32_t b = 0; b < words[3]; ++b) {
          record.selected.push_back(static_cast<block_id>(words[copy_selections::head_words + b]));
        }
      }
      return result;
    }
    [[nodiscard]] std::uint64_t dropped() const noexcept { return dropped_; }
    void clear() noexcept { used_ = 0; }

   private:
    [[nodiscard]] std::uint32_t most_selected(kv_geometry const& geometry) const noexcept
    {
      std::uint32_t most = 0;
      for (std::uint32_t layer = 0; layer < geometry.layers; ++layer) {
        auto const id = static_cast<layer_id>(layer);
        if (geometry.group_of(id).kind == layer_kind::selected) { most = std::max(most, this->budget_blocks(id)); }
      }
      return most;
    }

    B* backend_;
    std::uint32_t head_groups_;
    std::uint32_t max_records_;
    std::uint32_t width_;  // words of a record
    std::uint32_t used_ = 0;
    std::uint64_t dropped_ = 0;
    slab<B> memory_;
  };

  template <class B>
  [[nodiscard]] bound<B> bind(B& backend, selector_limits const& limits) const
  {
    return bound<B>{*this, backend, limits};
  }
};

inline constexpr char const* selection_trace_header = "pulseinfer selections 1";

/// One selection a line: `LANE LAYER TOKENS BLOCK...`, runs of blocks as FIRST-LAST.
inline void write_selections(std::ostream& out, std::vector<selection_record> const& records)
{
  out << selection_trace_header << '\n';
  for (selection_record const& r : records) {
    out << to_number(r.lane) << ' ' << to_number(r.layer) << ' ' << r.tokens;
    for (std::size_t i = 0; i < r.selected.size();) {
      std::size_t end = i + 1;
      while (end < r.selected.size() && to_number(r.selected[end]) == to_number(r.selected[end - 1]) + 1) { ++end; }
      out << ' ' << to_number(r.selected[i]);
      if (end - i > 1) { out << '-' << to_number(r.selected[end - 1]); }
      i = end;
    }
    out << '\n';
  }
}

/// @throws argument_error naming the line and what is wrong with it: blocks that the row's tokens cannot fill or from 2^24 on too
[[nodiscard]] inline std::vector<selection_record> read_selections(std::istream& in)
{
  std::size_t number = 1;
  std::string line;
  auto const refuse = [&](std::string const& what) {
    throw argument_error{status::invalid_argument, "selections, line " + std::to_string(number) + ": " + what};
  };
  bool const begins = static_cast<bool>(std::getline(in, line));
  if (!begins && !in.eof()) { refuse("the file cannot be read"); }
  if (!begins || line != selection_trace_header) {
    refuse("'" + detail::printable(line.substr(0, 40)) + "' where '" + selection_trace_header + "' begins the file");
  }
  constexpr std::int32_t most_block =
    (1 << 24) - 1;  // of a sequence: a run in the file is a few bytes, in memory its blocks
  std::vector<selection_record> records;
  while (std::getline(in, line)) {
    ++number;
    char const* at = line.data();
    char const* const end = line.data() + line.size();
    auto const next = [&](char const* what) {
      std::int32_t value = 0;
      auto const [after, error] = std::from_chars(at, end, value);
      if (error != std::errc{} || value < 0) { refuse(std::string{"no number for "} + what); }
      at = after;
      return value;
    };
    auto const space = [&] {
      if (at != end && *at++ != ' ') { refuse("numbers with a space between them are wanted"); }
    };
    selection_record record;
    record.lane = static_cast<lane_id>(next("the lane"));
    space();
    record.layer = static_cast<layer_id>(next("the layer"));
    space();
    record.tokens = static_cast<std::uint32_t>(next("the tokens"));
    while (at != end) {
      space();
      std::int32_t const first = next("a block");
      std::int32_t last = first;
      if (at != end && *at == '-') {
        ++at;
        last = next("a run's last block");
      }
      bool const ascends = record.selected.empty() || first > to_number(record.selected.back());
      if (!ascends || last < first) { refuse("blocks that do not ascend"); }
      if (last > most_block) {
        refuse("block " + std::to_string(last) + ", where " + std::to_string(most_block) + " is the last");
      }
      if (static_cast<std::uint32_t>(last) >= record.tokens) {
        refuse("block " + std::to_string(last) + " of a row of " + std::to_string(record.tokens) + " tokens");
      }
      for (std::int32_t block = first; block <= last; ++block) {
        record.selected.push_back(static_cast<block_id>(block));
      }
    }
    records.push_back(std::move(record));
  }
  if (in.bad()) {
    ++number;
    refuse("the file cannot be read");
  }
  return records;
}

}  // namespace pulseinfer
