#pragma once

/// A host engine without a model: its keys, values and extra planes say where they belong, and every table that it is
/// handed is checked against what the table should list, block by block and byte by byte.

#include <pulseinfer/backend/host_function.hpp>
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/manager/offload_manager.hpp>
#include <pulseinfer/numeric.hpp>
#include <pulseinfer/operation/select_window.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace pulseinfer_test {

/// splitmix64 over the parts of a place.
inline std::uint64_t mixed(std::initializer_list<std::uint64_t> parts)
{
  std::uint64_t state = 0x243F6A8885A308D3U;
  for (std::uint64_t const part : parts) {
    state += part + 0x9E3779B97F4A7C15U;
    state = (state ^ (state >> 30U)) * 0xBF58476D1CE4E5B9U;
    state = (state ^ (state >> 27U)) * 0x94D049BB133111EBU;
    state ^= state >> 31U;
  }
  return state;
}

/// Steps never allocate, so that what they allocate is the manager's. The first thing that is wrong is kept as a sentence.
template <class Backend, class Manager>
class pattern_engine {
 public:
  struct row_state {
    std::uint64_t seed = 0;
    std::uint32_t begin = 0;  ///< first position of this step's tokens
    std::uint32_t count = 0;
    std::uint32_t accept = ~0U;  ///< tokens of the step that commit keeps, at most
    bool in_step = false;
    std::uint32_t visits = 0;                    ///< whole and landed visits in this step
    std::vector<std::uint32_t> version;          // [max_tokens] which append of the position is the latest
    std::vector<pulseinfer::block_id> missing;   // [head_groups, max_blocks] blocks that the hits visit left out
    std::vector<std::uint32_t> missing_count;    // [head_groups]
    std::vector<pulseinfer::block_id> selected;  // [layers, head_groups, max_blocks] of the last visit
    std::vector<std::uint32_t> selected_count;   // [layers, head_groups]
    std::string fault;                           ///< what is wrong with this step, if the row comes through it
  };

  /// What a row's work needs to know when it runs, which may be after the next step has begun.
  struct moment {
    std::uint64_t seed = 0;
    std::uint32_t begin = 0;
    std::uint32_t count = 0;
    std::uint32_t const* version = nullptr;  // [max_tokens]
    bool streams = false;                    ///< its prompt comes in without staying resident
  };

  /// What a sequence's tokens are: whoever goes on from them, in whatever row, reads these.
  struct history {
    std::uint64_t seed = 0;
    std::vector<std::uint32_t> version;  // [max_tokens]
  };

  pattern_engine(
    Backend& backend, typename Backend::stream_ref stream, Manager& manager, std::uint32_t max_rows,
    std::uint32_t max_tokens, std::uint32_t tokens_per_row)
    : backend_{backend}, stream_{stream}, kv_{manager}, per_row_{tokens_per_row}, rows_(max_rows)
  {
    pulseinfer::kv_geometry const& g = kv_.geometry();
    max_blocks_ = static_cast<std::uint32_t>(pulseinfer::blocks_of(max_tokens, g.block_tokens));
    for (row_state& row : rows_) {
      row.version.assign(max_tokens, 0);
      row.missing.assign(std::size_t{g.head_groups} * max_blocks_, pulseinfer::none<pulseinfer::block_id>);
      row.missing_count.assign(g.head_groups, 0);
      row.selected.assign(std::size_t{g.layers} * g.head_groups * max_blocks_, pulseinfer::none<pulseinfer::block_id>);
      row.selected_count.assign(std::size_t{g.layers} * g.head_groups, 0);
      row.fault.reserve(512);
    }
    std::size_t const tokens = std::size_t{max_rows} * tokens_per_row;
    keys_.resize(tokens * g.kv_heads * g.head_dim);
    values_.resize(tokens * g.kv_heads * g.value_elements());
    queries_.resize(tokens * g.query_heads * g.head_dim);
    moments_.resize(std::size_t{moment_places} * max_rows);
    step_rows_.reserve(max_rows);
    commit_rows_.reserve(max_rows);
    fault_.reserve(512);
  }

  /// Names the sequence that runs in a row.
  void assign(pulseinfer::row_id row, std::uint64_t seed)
  {
    row_state& state = rows_[to_index(row)];
    state.seed = seed;
    state.in_step = false;
    state.accept = ~0U;
    std::ranges::fill(state.version, 0U);
  }

  [[nodiscard]] history history_of(pulseinfer::row_id row) const
  {
    return {.seed = rows_[to_index(row)].seed, .version = rows_[to_index(row)].version};
  }

  /// The row's sequence goes on from another's tokens: a fork, a kept prefix, or itself after it was away.
  void assign(pulseinfer::row_id row, history const& from)
  {
    assign(row, from.seed);
    rows_[to_index(row)].version = from.version;
  }

  /// Blocks selected for a lane in its last visit of a layer; all blocks where every one was resident.
  [[nodiscard]] std::span<pulseinfer::block_id const> selected(
    pulseinfer::row_id row, pulseinfer::layer_id layer, std::uint32_t group = 0) const
  {
    row_state const& state = rows_[to_index(row)];
    std::size_t const lane = to_index(layer) * kv_.geometry().head_groups + group;
    return {state.selected.data() + lane * max_blocks_, state.selected_count[lane]};
  }

  [[nodiscard]] row_state& row(pulseinfer::row_id id) { return rows_[to_index(id)]; }

  /// Begins a step of these rows. Each append of a position has a version of its own, with `rows_differ` whichever row makes
  /// it: rows that go on from the same tokens differ then.
  /// @return what begin_step said
  pulseinfer::status begin(std::span<pulseinfer::step_row const> rows)
  {
    step_rows_.assign(rows.begin(), rows.end());
    for (pulseinfer::step_row& r : step_rows_) {
      r.token_offset = static_cast<std::uint32_t>(to_index(r.row)) * per_row_;
    }
    pulseinfer::status const begun = kv_.begin_step(step_rows_);
    if (begun != pulseinfer::status::ok) { return begun; }
    ++stamp_;
    for (pulseinfer::step_row const& r : step_rows_) {
      row_state& state = rows_[to_index(r.row)];
      state.begin = kv_.tokens_of(r.row);
      state.count = r.tokens;
      state.in_step = true;
      state.visits = 0;
      auto const version = rows_differ ? static_cast<std::uint32_t>(stamp_ * rows_.size() + to_index(r.row)) : stamp_;
      for (std::uint32_t t = 0; t < r.tokens && !runs_ahead; ++t) { state.version[state.begin + t] = version; }
    }
    return begun;
  }

  /// One step of these rows, with the rows that an earlier one left late. @return what begin_step said
  pulseinfer::status step(std::span<pulseinfer::step_row const> rows)
  {
    pulseinfer::status const begun = begin(rows);
    if (begun != pulseinfer::status::ok) { return begun; }
    if (kv_.rows().count != 0) { enter(kv_.first_layer(), kv_.rows()); }
    std::uint32_t left = most_visits;
    if (left != 0) {
      for (pulseinfer::visit const& v : kv_.step()) {
        take(v);
        if (--left == 0) { break; }
      }
    }
    commit();
    return begun;
  }

  pulseinfer::status step(std::initializer_list<pulseinfer::step_row> rows)
  {
    return step(std::span<pulseinfer::step_row const>{rows.begin(), rows.size()});
  }

  /// Brings a prompt in, in chunks.
  void prefill(pulseinfer::row_id row, std::uint32_t tokens, std::uint32_t chunk)
  {
    for (std::uint32_t done = 0; done < tokens && fault_.empty();) {
      std::uint32_t const now = std::min(chunk, tokens - done);
      pulseinfer::step_row const one{.row = row, .tokens = now};
      require(step({&one, 1}), "begin_step");
      done += now;
    }
  }

  /// What a row's host engine does with a visit.
  void take(pulseinfer::visit const& v)
  {
    ++visits;
    enqueue([this, v, now = note()] { look(v, now); });
    if (v.part != pulseinfer::part::landed) {
      for (pulseinfer::row_id const row : v.rows) { take_stream(v.layer, row); }
    }
    if (v.part == pulseinfer::part::hits) { return; }
    if (warm_up) { require(kv_.warm_up(v.layer, v.rows, query_view()), "warm_up"); }
    if (!v.last) {
      enter(v.next, v.rows);
    } else if (!runs_ahead) {
      require(backend_.synchronize(stream_), "synchronize");
    }
  }

  /// What a row's host engine does with the blocks that stream by.
  void take_stream(pulseinfer::layer_id layer, pulseinfer::row_id row)
  {
    using namespace pulseinfer;
    bool const selects = kv_.geometry().group_of(layer).kind == layer_kind::selected;
    std::uint32_t const sealed = rows_[to_index(row)].begin / kv_.geometry().block_tokens;
    std::uint32_t const wanted = selects && kv_.prompt_streams(row) ? sealed : 0;
    moment const now = note()[to_index(row)];
    std::uint32_t next = 0;
    block_stream<Manager> earlier = kv_.stream_blocks(layer, row);
    for (stream_part const& part : earlier) {
      ++parts;
      if (part.first_block != next || part.layer != layer || part.rows.count != 1) {
        report("row %d, layer %d: block %u streams, not %u", to_number(row), to_number(layer), part.first_block, next);
      }
      next += part.block_count;
      enqueue([this, part, now] { look(part, now); });
    }
    stream_status = earlier.status();
    if (stream_may_fail && stream_status != status::ok) { return; }
    require(stream_status, "stream_blocks");
    if (next != wanted) {
      report("row %d, layer %d: %u blocks streamed, not %u", to_number(row), to_number(layer), next, wanted);
    }
  }

  /// Checks a part of a stream. In stream order.
  void look(pulseinfer::stream_part const& part, moment const& now)
  {
    using namespace pulseinfer;
    row_id const id = part.rows[0];
    row_info info;
    info.tokens = static_cast<std::int32_t>((part.first_block + part.block_count) * kv_.geometry().block_tokens);
    block_table const& table = part.table;
    visit const as_visit{.layer = part.layer, .rows = part.rows, .table = table, .part = part.part};
    for (std::uint32_t g = 0; g < kv_.geometry().head_groups; ++g) {
      lane_id const lane = lane_of(id, g, kv_.geometry().head_groups);
      slot_id const* const listed = table.slots + to_index(lane) * table.stride;
      std::uint32_t const count = table.counts[to_index(lane)];
      bool const behind = count < table.stride && !is_none(listed[count]);
      if (count != part.block_count || table.tokens(lane) != count * table.layout.block_tokens || behind) {
        report(
          "row %d, layer %d: a part of %u blocks lists %u", to_number(id), to_number(part.layer), part.block_count,
          count);
        return;
      }
      for (std::uint32_t i = 0; i < count; ++i) {
        auto const block = static_cast<block_id>(part.first_block + i);
        check_block(as_visit, id, now, g, block, table.pool.address(part.layer, listed[i]), info);
      }
    }
  }

  /// Keeps the accepted tokens of every row that has come through.
  void commit()
  {
    commit_rows_.clear();
    for (std::uint32_t r = 0; r < rows_.size(); ++r) {
      if (!rows_[r].in_step) { continue; }
      commit_rows_.push_back(
        {.row = static_cast<pulseinfer::row_id>(r), .accepted = std::min(rows_[r].accept, rows_[r].count)});
    }
    require(kv_.commit(commit_rows_), "commit");
    for (pulseinfer::commit_row const& r : commit_rows_) {
      row_state& state = rows_[to_index(r.row)];
      if (kv_.is_late(r.row)) { continue; }
      state.in_step = false;
      if (!state.fault.empty() && kv_.row_status(r.row) == pulseinfer::status::ok) {
        report("%s", state.fault.c_str());
      }
      state.fault.clear();
    }
  }

  void enter(pulseinfer::layer_id layer, pulseinfer::row_list rows)
  {
    if (before_enter) { before_enter(layer, rows); }
    enqueue([this, layer, rows, now = note()] { fill(layer, rows, now); });
    pulseinfer::kv_geometry const& g = kv_.geometry();
    pulseinfer::tensor_view const values = g.value_is_key_prefix ? pulseinfer::tensor_view{} : value_view();
    pulseinfer::status const entered = kv_.enter(layer, rows, key_view(), values, query_view());
    if (forgives_failed && entered != pulseinfer::status::ok) {
      ++refused;
    } else {
      require(entered, "enter");
    }
  }

  [[nodiscard]] pulseinfer::tensor_view key_view()
  {
    return view(keys_, kv_.geometry().kv_heads, kv_.geometry().head_dim);
  }
  [[nodiscard]] pulseinfer::tensor_view value_view()
  {
    return view(values_, kv_.geometry().kv_heads, kv_.geometry().value_elements());
  }
  [[nodiscard]] pulseinfer::tensor_view query_view()
  {
    return view(queries_, kv_.geometry().query_heads, kv_.geometry().head_dim);
  }

  /// Writes keys, values and queries of the rows' tokens at a layer. In stream order.
  void fill(pulseinfer::layer_id layer, pulseinfer::row_list rows) { fill(layer, rows, note()); }

  void fill(pulseinfer::layer_id layer, pulseinfer::row_list rows, moment const* now)
  {
    pulseinfer::kv_geometry const& g = kv_.geometry();
    for (pulseinfer::row_id const id : rows) {
      moment const& state = now[to_index(id)];
      for (std::uint32_t t = 0; t < state.count; ++t) {
        std::size_t const place = to_index(id) * per_row_ + t;
        std::uint32_t const position = state.begin + t;
        for (std::uint32_t head = 0; head < g.kv_heads; ++head) {
          for (std::uint32_t d = 0; d < g.head_dim; ++d) {
            keys_[(place * g.kv_heads + head) * g.head_dim + d] = element(state, layer, 0, head, position, d);
          }
          for (std::uint32_t d = 0; d < g.value_elements(); ++d) {
            values_[(place * g.kv_heads + head) * g.value_elements() + d] = element(state, layer, 1, head, position, d);
          }
        }
        // Neighbouring positions ask alike, so that selections move slowly.
        for (std::uint32_t i = 0; i < g.query_heads * g.head_dim; ++i) {
          std::uint64_t const h = mixed({state.seed, 77, to_index(layer), position / query_persistence, query_seed, i});
          queries_[place * g.query_heads * g.head_dim + i] = static_cast<float>(h % 2001) / 1000.0F - 1.0F;
        }
      }
    }
  }

  /// Checks a visit's tables. In stream order.
  void look(pulseinfer::visit const& v) { look(v, note()); }

  void look(pulseinfer::visit const& v, moment const* now)
  {
    for (pulseinfer::row_id const id : v.rows) {
      row_state& state = rows_[to_index(id)];
      if (v.part != pulseinfer::part::hits) { ++state.visits; }
      if (forgives_failed) { reported_ = &state.fault; }
      for (std::uint32_t g = 0; g < kv_.geometry().head_groups; ++g) { look(v, id, state, now[to_index(id)], g); }
      reported_ = &fault_;
    }
  }

  /// Keeps where the rows stand now, for work that runs later. @return [max_rows]; overwritten `moment_places` notes later
  moment const* note()
  {
    moment* const now = moments_.data() + next_moment_++ % moment_places * rows_.size();
    for (std::size_t r = 0; r < rows_.size(); ++r) {
      bool const streams = kv_.prompt_streams(static_cast<pulseinfer::row_id>(r));
      now[r] = {rows_[r].seed, rows_[r].begin, rows_[r].count, rows_[r].version.data(), streams};
    }
    return now;
  }

  /// Writes what the manager leaves to the host engine, for rows whose tables nobody looks at. In stream order.
  void write_extras(pulseinfer::layer_id layer, pulseinfer::row_list rows, moment const* now)
  {
    for (pulseinfer::row_id const id : rows) {
      for (std::uint32_t g = 0; g < kv_.geometry().head_groups; ++g) {
        static_cast<void>(write_extras(layer, id, now[to_index(id)], g));
      }
    }
  }

  /// Compares what the host has of a row's sealed blocks with what was appended, in the layers that are written back.
  /// @param all every sealed block must be there   @param most blocks to look at
  void look_at_host(pulseinfer::row_id id, bool all = true, std::uint32_t most = ~0U)
  {
    moment const now = note()[to_index(id)];
    pulseinfer::sequence_state const& sequence = kv_.sequences()[id];
    pulseinfer::row_info info;
    info.tokens = static_cast<std::int32_t>(sequence.tokens);
    for (std::uint32_t l = 0; l < kv_.geometry().layers; ++l) {
      auto const layer = static_cast<pulseinfer::layer_id>(l);
      if (kv_.geometry().group_of(layer).kind != pulseinfer::layer_kind::selected) { continue; }
      for (std::uint32_t b = 0; b < std::min(most, sequence.sealed); ++b) {
        if (is_none(sequence.host_blocks[b])) {
          if (!all) { continue; }
          report("row %d: block %u is sealed and not on the host", to_number(id), b);
          return;
        }
        for (std::uint32_t g = 0; g < kv_.geometry().head_groups; ++g) {
          std::byte* const block = kv_.store().ref().address(layer, g, sequence.host_blocks[b]);
          check_block(
            {.layer = layer, .part = pulseinfer::part::whole}, id, now, g, static_cast<pulseinfer::block_id>(b), block,
            info);
        }
      }
    }
  }

  [[nodiscard]] std::string const& fault() const { return fault_; }
  [[nodiscard]] std::uint32_t per_row() const { return per_row_; }

  bool warm_up = false;
  bool rows_differ = false;
  /// Tables of rows that the manager says have failed may list anything; rows that may not enter a layer stay in their step.
  bool forgives_failed = false;
  std::uint64_t refused = 0;  ///< times that rows could not enter a layer
  bool runs_ahead = false;  ///< commits without waiting for the last visit; tokens have the same bytes in each try then
  bool stream_may_fail = false;
  std::uint64_t parts = 0;                                    ///< of streams
  pulseinfer::status stream_status = pulseinfer::status::ok;  ///< of the last stream
  std::uint32_t query_persistence = 4;
  std::uint64_t query_seed = 0;
  std::uint32_t most_visits = ~0U;  ///< the loop is left early after so many
  std::uint64_t visits = 0;
  std::uint64_t selections = 0;  ///< a sum that tells what was selected, for every row, layer and position so far
  std::function<void(pulseinfer::layer_id, pulseinfer::row_list)> before_enter;

 private:
  void require(pulseinfer::status s, char const* call)
  {
    if (s != pulseinfer::status::ok) { report("%s: %s", call, name_of(s)); }
  }

  template <class... Args>
  void report(char const* format, Args... args)
  {
    if (!reported_->empty()) { return; }
    char text[400];
    std::snprintf(text, sizeof(text), format, args...);
    *reported_ = text;
  }

  template <class F>
  void enqueue(F f)
  {
    require(backend_.launch(stream_, pulseinfer::host_function{f}), "launch");
  }

  [[nodiscard]] pulseinfer::tensor_view view(std::vector<float>& data, std::uint32_t heads, std::uint32_t dim)
  {
    return pulseinfer::contiguous_tensor(data.data(), pulseinfer::dtype::float32, rows_.size() * per_row_, heads, dim);
  }

  /// A whole number that every element type holds.
  [[nodiscard]] static float element(
    moment const& state, pulseinfer::layer_id layer, std::uint32_t plane, std::uint32_t head, std::uint32_t position,
    std::uint32_t d)
  {
    return static_cast<float>(
             mixed({state.seed, to_index(layer), plane, head, position, state.version[position], d}) % 15U) -
      7.0F;
  }

  [[nodiscard]] static std::byte extra_byte(
    moment const& state, pulseinfer::layer_id layer, std::uint32_t group, std::uint32_t plane, std::uint32_t token,
    std::uint32_t version, std::uint64_t i)
  {
    return static_cast<std::byte>(mixed({state.seed, to_index(layer), group, plane, token, version, 5, i}));
  }

  /// Calls f(byte of the block, right value) for the extra planes of a block: rows of the tokens [from, to), and what
  /// belongs to the block as a whole.
  template <class F>
  void each_extra(
    moment const& state, pulseinfer::layer_id layer, std::uint32_t group, std::byte* block, std::uint32_t number,
    std::uint32_t from, std::uint32_t to, F f)
  {
    pulseinfer::block_layout const& layout = kv_.layout();
    std::uint32_t const first = layout.value_is_key_prefix ? 1U : 2U;
    for (std::uint32_t p = first; p < layout.plane_count; ++p) {
      pulseinfer::plane_layout const& plane = layout.planes[p];
      for (std::uint32_t t = from; t < to; ++t) {
        std::uint32_t const position = number * layout.block_tokens + t;
        std::byte* const row = block + row_offset(plane, 0, t);
        for (std::uint32_t i = 0; i < plane.row_bytes; ++i) {
          f(row[i], extra_byte(state, layer, group, p, position, state.version[position], i));
        }
      }
      std::uint64_t const tokens = std::uint64_t{plane.row_bytes} * layout.block_tokens;
      for (std::uint64_t i = tokens; i < plane.bytes; ++i) {
        f(block[plane.offset + i], extra_byte(state, layer, group, p, 1000000 + number, 0, i));
      }
    }
  }

  /// Extra planes of the new tokens are the host engine's to write. @return whether the blocks have slots
  bool write_extras(pulseinfer::layer_id layer, pulseinfer::row_id id, moment const& now, std::uint32_t g)
  {
    using namespace pulseinfer;
    std::uint32_t const block_tokens = kv_.geometry().block_tokens;
    lane_id const lane = lane_of(id, g, kv_.geometry().head_groups);
    slot_id const* const slot_of = kv_.books().residency().slots_of_lane(layer, lane);
    auto const blocks = static_cast<std::uint32_t>(blocks_of(now.begin + now.count, block_tokens));
    for (std::uint32_t b = now.begin / block_tokens; b < blocks; ++b) {
      std::uint32_t const from = std::max(now.begin, b * block_tokens) - b * block_tokens;
      std::uint32_t const to = std::min(now.begin + now.count, (b + 1) * block_tokens) - b * block_tokens;
      if (is_none(slot_of[b])) {
        report("row %d, layer %d: open block %u has no slot", to_number(id), to_number(layer), b);
        return false;
      }
      each_extra(
        now, layer, g, kv_.pool().ref().address(layer, slot_of[b]), b, from, to,
        [](std::byte& place, std::byte right) { place = right; });
    }
    return true;
  }

  void look(pulseinfer::visit const& v, pulseinfer::row_id id, row_state& state, moment const& now, std::uint32_t g)
  {
    using namespace pulseinfer;
    kv_geometry const& geometry = kv_.geometry();
    std::uint32_t const block_tokens = geometry.block_tokens;
    block_table const& table = v.table;
    row_info const info = table.info[to_index(id)];
    lane_id const lane = lane_of(id, g, geometry.head_groups);
    int const layer = to_number(v.layer), row = to_number(id);
    std::uint32_t const blocks = info.blocks(block_tokens);
    if (info.tokens != static_cast<int>(now.begin + now.count) || info.new_tokens != static_cast<int>(now.count)) {
      report("row %d, layer %d: %d tokens, %d of them new", row, layer, info.tokens, info.new_tokens);
      return;
    }

    // What the tables must list together.
    std::size_t const selected_lane = to_index(v.layer) * geometry.head_groups + g;
    block_id* const wanted = state.selected.data() + selected_lane * max_blocks_;
    std::uint32_t& count = state.selected_count[selected_lane];
    std::uint32_t const open = now.begin / block_tokens;  // first block that this step's tokens touch
    layer_group const group = geometry.group_of(v.layer);
    bool const chosen = group.kind == layer_kind::selected &&
      (info.mode == row_mode::sparse_offloaded || info.mode == row_mode::sparse_resident);
    count = 0;
    if (chosen) {
      selection_ref const selection = kv_.books().selection();
      std::uint32_t const most = std::min(blocks, kv_.selector().budget_blocks(v.layer));
      if (selection.counts[to_index(lane)] > most) {
        report("row %d, layer %d: %u blocks selected, %u may be", row, layer, selection.counts[to_index(lane)], most);
        return;
      }
      for (; count < selection.counts[to_index(lane)]; ++count) { wanted[count] = selection.ids_of(lane)[count]; }
      if (blocks <= kv_.selector().budget_blocks(v.layer) && count != blocks) {
        report("row %d, layer %d: %u of %u blocks selected, all fit", row, layer, count, blocks);
      }
    } else if (group.kind == layer_kind::windowed) {
      std::uint32_t const first =
        now.begin + 1 <= group.window_tokens ? 0 : (now.begin + 1 - group.window_tokens) / block_tokens;
      for (std::uint32_t b = 0; b < blocks; ++b) {
        if (b >= first || b * block_tokens < group.sink_tokens) { wanted[count++] = static_cast<block_id>(b); }
      }
    } else {
      // The blocks before those that the step opens stream by.
      bool const streams = group.kind == layer_kind::selected && now.streams;
      for (std::uint32_t b = streams ? open : 0; b < blocks; ++b) { wanted[count++] = static_cast<block_id>(b); }
    }
    for (std::uint32_t i = 0; i < count; ++i) {
      bool const ascends = i == 0 || wanted[i - 1] < wanted[i];
      if (!ascends || to_index(wanted[i]) >= blocks) {
        report(
          "row %d, layer %d: block %d after %d of %u", row, layer, to_number(wanted[i]), to_number(wanted[i - 1]),
          blocks);
        return;
      }
    }
    for (std::uint32_t b = open; b < blocks; ++b) {
      if (count < blocks - open || to_index(wanted[count - (blocks - b)]) != b) {
        report("row %d, layer %d: open block %u of %u is not selected", row, layer, b, blocks);
        return;
      }
    }

    if (v.part != part::landed) {
      std::uint64_t told = mixed({now.seed, now.begin, to_index(v.layer), g});
      for (std::uint32_t i = 0; i < count; ++i) { told = mixed({told, to_index(wanted[i])}); }
      selections += told;
    }

    residency_ref const books = kv_.books().residency();
    slot_id const* const slot_of = books.slots_of_lane(v.layer, lane);
    slot_id const* const listed = table.slots + to_index(lane) * table.stride;
    std::uint32_t const listed_count = table.counts[to_index(lane)];
    if (listed_count > table.stride || (listed_count < table.stride && !is_none(listed[listed_count]))) {
      report("row %d, layer %d: entry behind the %u listed ones", row, layer, listed_count);
      return;
    }

    if (v.part != part::landed && !write_extras(v.layer, id, now, g)) { return; }

    std::uint32_t next = 0;
    std::uint32_t& missing = state.missing_count[g];
    block_id* const left_out = state.missing.data() + std::size_t{g} * max_blocks_;
    std::uint32_t const whole = v.part == part::landed ? missing : count;
    block_id const* const expected = v.part == part::landed ? left_out : wanted;
    if (v.part == part::hits) { missing = 0; }
    for (std::uint32_t i = 0; i < whole; ++i) {
      block_id const block = expected[i];
      slot_id const slot = slot_of[to_index(block)];
      bool const here = next < listed_count && listed[next] == slot && !is_none(slot);
      if (!here && v.part == part::hits) {
        left_out[missing++] = block;
        continue;
      }
      if (!here) {
        report(
          "row %d, layer %d, %s: block %d of %u (place %u of %u) is not listed, slot %d, selected %u", row, layer,
          name_of(v.part), to_number(block), blocks, i, whole, to_number(slot), count);
        return;
      }
      slot_word const& word = books.slots[table.pool.word(v.layer, slot)];
      if (to_index(slot) >= table.pool.slots || word.block != block) {
        report(
          "row %d, layer %d: slot %d holds block %d, not %d", row, layer, to_number(slot), to_number(word.block),
          to_number(block));
        return;
      }
      check_block(v, id, now, g, block, table.pool.address(v.layer, slot), info);
      ++next;
    }
    if (next != listed_count) {
      report("row %d, layer %d, %s: %u listed, %u expected", row, layer, name_of(v.part), listed_count, next);
    }
    if (v.part == part::hits && missing != 0 && !chosen) {
      report("row %d, layer %d: a row that selects nothing misses %u blocks", row, layer, missing);
    }
    if (listed_count != 0 && v.part != part::landed) {
      std::uint32_t tokens = 0;
      for (std::uint32_t i = 0; i < count; ++i) {
        tokens += info.valid_tokens(static_cast<std::uint32_t>(to_index(wanted[i])), block_tokens);
      }
      for (std::uint32_t i = 0; v.part == part::hits && i < missing; ++i) { tokens -= block_tokens; }
      if (table.tokens(lane) != tokens) {
        report("row %d, layer %d: the table holds %u tokens, not %u", row, layer, table.tokens(lane), tokens);
      }
    }
  }

  void check_block(
    pulseinfer::visit const& v, pulseinfer::row_id id, moment const& state, std::uint32_t g, pulseinfer::block_id block,
    std::byte* bytes, pulseinfer::row_info const& info)
  {
    using namespace pulseinfer;
    block_layout const& layout = kv_.layout();
    auto const number = static_cast<std::uint32_t>(to_index(block));
    std::uint32_t const valid = info.valid_tokens(number, layout.block_tokens);
    for (std::uint32_t t = 0; t < valid; ++t) {
      std::uint32_t const position = number * layout.block_tokens + t;
      for (std::uint32_t head = 0; head < layout.heads; ++head) {
        std::uint32_t const kv_head = g * layout.heads + head;
        for (std::uint32_t p = 0; p < (layout.value_is_key_prefix ? 1U : 2U); ++p) {
          plane_layout const& plane = layout.planes[p];
          std::byte const* const row = bytes + row_offset(plane, head, t);
          for (std::uint32_t d = 0; d < plane.dim; ++d) {
            float const right = element(state, v.layer, p, kv_head, position, d);
            if (load_as_float(row, plane.type, d) != right) {
              report(
                "row %d, layer %d, %s: block %u, plane %u, head %u, token %u, element %u is %g, not %g", to_number(id),
                to_number(v.layer), name_of(v.part), number, p, kv_head, t, d,
                double{load_as_float(row, plane.type, d)}, double{right});
              return;
            }
          }
        }
      }
    }
    bool sound = true;
    each_extra(state, v.layer, g, bytes, number, 0, valid, [&](std::byte& is, std::byte right) {
      sound = sound && is == right;
    });
    if (!sound) {
      report(
        "row %d, layer %d, %s: an extra plane of block %u is damaged", to_number(id), to_number(v.layer),
        name_of(v.part), number);
    }
  }

  Backend& backend_;
  typename Backend::stream_ref stream_;
  Manager& kv_;
  std::uint32_t per_row_;
  std::uint32_t max_blocks_ = 0;
  std::uint32_t stamp_ = 0;
  std::vector<row_state> rows_;
  static constexpr std::uint32_t moment_places = 256;
  std::vector<moment> moments_;  // [moment_places, max_rows]
  std::uint64_t next_moment_ = 0;
  std::vector<float> keys_, values_, queries_;
  std::vector<pulseinfer::step_row> step_rows_;
  std::vector<pulseinfer::commit_row> commit_rows_;
  std::string fault_;
  std::string* reported_ = &fault_;
};

}  // namespace pulseinfer_test
