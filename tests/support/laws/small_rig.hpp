#pragma once

/// A manager of the smallest sizes over a scripted backend, with an engine that looks at every byte. What is wrong is thrown,
/// so that a program which ends has gone well.

#include "compositions.hpp"

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace pulseinfer_test {

inline void need(bool holds, std::string const& what)
{
  if (!holds) { throw std::runtime_error{what}; }
}
inline void need(pulseinfer::status said, char const* call)
{
  need(said == pulseinfer::status::ok, std::string{call} + ": " + name_of(said));
}

/// Streams in the order in which a manager creates them, behind the engine's own.
struct streams_of_manager {
  static constexpr std::uint32_t compute = 0, write_back = 1, recall = 2, move = 3;
};

/// A selection of three blocks of two tokens, one of them open, and quotas of `spare_slots` above the floor.
struct small_sizes {
  std::uint32_t rows = 1;
  std::uint32_t layers = 2;
  std::uint32_t max_tokens = 20;
  std::uint32_t depth = 1;  ///< of write-back
  std::uint32_t spare_slots = 0;
  std::uint32_t head_groups = 1;
  std::uint64_t slots = 0;        ///< 0: all rows decode, one prefills
  std::uint64_t host_blocks = 0;  ///< 0: every row at its longest
  std::uint32_t recalls = 0;
  std::uint32_t max_tries = 2;
  std::uint32_t saved_sequences = 0;
  bool verify = false;
  pulseinfer::nanoseconds wait_limit{std::chrono::seconds{30}};

  static constexpr std::uint32_t block_tokens = 2, budget_blocks = 3, dense_tokens = 6;

  [[nodiscard]] pulseinfer::kv_geometry geometry() const
  {
    return {
      .layers = layers,
      .query_heads = head_groups,
      .kv_heads = head_groups,
      .head_dim = 2,
      .block_tokens = block_tokens,
      .head_groups = head_groups};
  }
  [[nodiscard]] pulseinfer::manager_options options() const
  {
    return {
      .max_rows = rows,
      .max_tokens = max_tokens,
      .max_prefill_tokens = 8,
      .quota_tokens = (budget_blocks + depth + spare_slots) * block_tokens,
      .write_back_depth = depth,
      .slots = slots,
      .host_blocks = host_blocks,
      .recalls = recalls,
      .max_tries = max_tries,
      .saved_sequences = saved_sequences,
      .verify = verify,
      .wait_limit = wait_limit};
  }
  [[nodiscard]] static pulseinfer::external_selector selector()
  {
    return {.budget_tokens = budget_blocks * block_tokens, .dense_tokens = dense_tokens};
  }
};

template <class Manager>
struct small_rig;

template <class Transfer, class Scheduler>
struct small_rig<pulseinfer::offload_manager<
  scripted_backend, pulseinfer::external_selector, Transfer, Scheduler, pulseinfer::fixed_admission>> {
  using manager_type = pulseinfer::offload_manager<
    scripted_backend, pulseinfer::external_selector, Transfer, Scheduler, pulseinfer::fixed_admission>;
  using row_id = pulseinfer::row_id;
  using block_id = pulseinfer::block_id;

  explicit small_rig(
    scripted_backend& b, small_sizes const& sizes = {}, Scheduler const& scheduler = {}, Transfer const& transfer = {})
    : backend{b},
      stream{b.create_stream()},
      kv{b, stream, sizes.geometry(), sizes.options(), small_sizes::selector(), transfer, scheduler},
      engine{b, stream, kv, sizes.rows, sizes.max_tokens, 8}
  {
    engine.before_enter = [this](pulseinfer::layer_id layer, pulseinfer::row_list rows) { import(layer, rows); };
  }
  small_rig(small_rig&&) = delete;
  /// What still names the engine runs before it goes.
  ~small_rig()
  {
    backend.choose(false);
    static_cast<void>(backend.synchronize(stream));
  }

  /// Opens a sequence and brings its prompt in, with nothing to choose between meanwhile.
  row_id open(std::uint64_t seed, std::uint32_t prompt, std::uint32_t tokens = 20)
  {
    backend.choose(false);
    row_id row = pulseinfer::none<row_id>;
    need(
      kv.open({.prompt_tokens = prompt, .max_tokens = tokens}, row) == pulseinfer::admission::admitted,
      "no place: " + kv.explain_refusal({.prompt_tokens = prompt, .max_tokens = tokens}));
    engine.assign(row, seed);
    engine.prefill(row, prompt, 8);
    need(engine.fault().empty(), engine.fault());
    backend.choose(true);
    return row;
  }

  /// One step that must go well.
  void step(std::initializer_list<pulseinfer::step_row> rows)
  {
    need(engine.step(rows), "begin_step");
    look();
  }

  void look()
  {
    need(engine.fault().empty(), engine.fault());
    std::string const books = kv.audit();
    need(books.empty(), books);
  }

  /// Looks at what the host has, closes every row, and sees to it that nothing is left.
  void finish()
  {
    need(kv.drain(pulseinfer::no_deadline), "drain");
    for (std::uint32_t r = 0; r < kv.sequences().rows(); ++r) {
      auto const row = static_cast<row_id>(r);
      if (!kv.sequences()[row].open()) { continue; }
      if (kv.sequences()[row].max_tokens > small_sizes::dense_tokens) { engine.look_at_host(row); }
      need(kv.close(row), "close");
    }
    look();
    need(kv.drain(pulseinfer::no_deadline), "drain");
    pulseinfer::memory_use const left = kv.memory();
    need(left.slot_bytes == 0 && left.host_bytes == 0 && left.digest_bytes == 0, "memory is left behind");
    need(backend.counts().freed_under_copy == 0, "memory went back under a copy");
  }

  scripted_backend& backend;
  scripted_backend::stream_ref stream;
  manager_type kv;
  pattern_engine<scripted_backend, manager_type> engine;

  /// Which sealed blocks a row reads in a layer. As given: two others in each step, so that all of them are recalled.
  std::function<std::vector<block_id>(row_id, pulseinfer::layer_id, std::uint32_t sealed, std::uint32_t position)>
    choice = [](row_id, pulseinfer::layer_id layer, std::uint32_t sealed, std::uint32_t position) {
      auto const first = static_cast<std::uint32_t>((2 * position + to_index(layer)) % sealed);
      return std::vector<block_id>{static_cast<block_id>(first), static_cast<block_id>((first + 1) % sealed)};
    };

 private:
  void import(pulseinfer::layer_id layer, pulseinfer::row_list rows)
  {
    pulseinfer::kv_geometry const& g = kv.geometry();
    for (row_id const row : rows) {
      pulseinfer::row_mode const mode = kv.mode_of(row);
      bool const selects =
        mode == pulseinfer::row_mode::sparse_offloaded || mode == pulseinfer::row_mode::sparse_resident;
      if (!selects) { continue; }
      auto const& state = engine.row(row);
      auto const blocks = static_cast<std::uint32_t>(pulseinfer::blocks_of(state.begin + state.count, g.block_tokens));
      std::vector<block_id> const ids = choice(row, layer, state.begin / g.block_tokens, state.begin);
      for (std::uint32_t group = 0; group < g.head_groups; ++group) {
        need(
          kv.selector().import_selection(layer, pulseinfer::lane_of(row, group, g.head_groups), ids, blocks),
          "import_selection");
      }
    }
  }
};

}  // namespace pulseinfer_test
