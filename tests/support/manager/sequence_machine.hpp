#pragma once

/// Sequences under random use: a manager, an engine that knows what every token should be, and a plain model of who there is.

#include "compositions.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <string>
#include <type_traits>
#include <vector>

namespace pulseinfer_test {

/// Sizes of a run. All are small, so that boundaries and shortages are met often.
struct machine_setting {
  std::uint32_t rows = 4;
  std::uint32_t block_tokens = 4;
  std::uint32_t blocks = 16;  ///< of the longest sequence
  std::uint32_t head_groups = 1;
  std::uint32_t step_tokens = 1;    ///< with drafts
  std::uint32_t depth = 2;          ///< of write-back
  std::uint32_t spare_slots = 0;    ///< above the floor of the quota
  std::uint32_t host_blocks = 0;    ///< 0: all that may be needed
  std::uint32_t saved = 0;          ///< saved sequences at once; 0: as many as rows
  std::uint32_t recalls = 0;        ///< places of the ring; 0: the default
  std::uint32_t slots = 0;          ///< 0: all rows decode, one prefills
  std::uint32_t low_slots = 0;      ///< rows that keep their blocks are written back below so many free ones
  std::uint32_t stream_blocks = 0;  ///< of one half of the slots that prompts stream through; 0: none do
  bool mixed_layers = false;        ///< selected, windowed, dense, selected; else three selected ones
  bool warm_up = false;
  float deferred_share = 0.0F;  ///< where the selector tells what it needs, likewise the next
  float near_share = 0.0F;
  std::uint64_t seed = 0;  ///< order of the streams
};

inline std::string name_of(machine_setting const& s)
{
  auto const number = [](std::uint64_t value) { return std::to_string(value); };
  return "rows " + number(s.rows) + ", block_tokens " + number(s.block_tokens) + ", blocks " + number(s.blocks) +
    ", head_groups " + number(s.head_groups) + ", step_tokens " + number(s.step_tokens) + ", depth " + number(s.depth) +
    ", spare_slots " + number(s.spare_slots) + ", host_blocks " + number(s.host_blocks) + ", saved " + number(s.saved) +
    ", recalls " + number(s.recalls) + ", slots " + number(s.slots) + ", low_slots " + number(s.low_slots) +
    ", stream_blocks " + number(s.stream_blocks) + (s.mixed_layers ? ", mixed layers" : "") +
    (s.warm_up ? ", warm_up" : "") + ", deferred_share " + std::to_string(s.deferred_share) + ", near_share " +
    std::to_string(s.near_share) + ", seed " + number(s.seed);
}

enum class machine_action : std::uint8_t {
  open,
  step,
  ticket_step,
  close,
  fork,
  truncate,
  preempt,
  resume,
  retain,
  adopt,
  release,
  demote,
  promote,
  run_some,
  poll,
  drain
};

inline char const* name_of(machine_action action)
{
  switch (action) {
    case machine_action::open: return "open";
    case machine_action::step: return "step";
    case machine_action::ticket_step: return "ticket_step";
    case machine_action::close: return "close";
    case machine_action::fork: return "fork";
    case machine_action::truncate: return "truncate";
    case machine_action::preempt: return "preempt";
    case machine_action::resume: return "resume";
    case machine_action::retain: return "retain";
    case machine_action::adopt: return "adopt";
    case machine_action::release: return "release";
    case machine_action::demote: return "demote";
    case machine_action::promote: return "promote";
    case machine_action::run_some: return "run_some";
    case machine_action::poll: return "poll";
    case machine_action::drain: return "drain";
  }
  return "unknown";
}

template <class Manager>
class sequence_machine;

/// Every operation is a number, and any number is an operation: `run` draws what to do from it. After each one the books are
/// recounted, every row has the tokens that the model says, and what attention saw was what the model says. Whatever is wrong
/// is kept as a sentence, and nothing runs after it.
template <class Backend, class Selector, class Transfer, class Scheduler>
class sequence_machine<offload_manager<Backend, Selector, Transfer, Scheduler, fixed_admission>> {
 public:
  using manager_type = offload_manager<Backend, Selector, Transfer, Scheduler, fixed_admission>;
  using engine_type = pattern_engine<Backend, manager_type>;

  static constexpr std::uint32_t chunk = 11;  ///< prompt tokens of a step, at most
  static constexpr std::uint32_t action_count = static_cast<std::uint32_t>(machine_action::drain) + 1;

  explicit sequence_machine(machine_setting const& setting)
    : setting_{setting},
      backend_{pulseinfer::cpu_options{.mode = pulseinfer::cpu_mode::manual, .seed = setting.seed}},
      stream_{backend_.create_stream(pulseinfer::stream_priority::normal)},
      kv_{backend_, stream_, geometry_of(setting), options_of(setting), selector_of(setting)},
      engine_{backend_, stream_, kv_, setting.rows, max_tokens(), std::max(chunk, setting.step_tokens)}
  {
    engine_.rows_differ = true;
    engine_.before_enter = [this](pulseinfer::layer_id layer, pulseinfer::row_list rows) { choose(layer, rows); };
  }

  sequence_machine(sequence_machine&&) = delete;

  /// @return whether all is well
  bool run(std::uint64_t number)
  {
    if (!fault_.empty()) { return false; }
    number_ = number;
    drawn_ = 0;
    // Steps are what everything else is about.
    struct weight {
      machine_action action;
      std::uint32_t times;
    };
    static constexpr weight weights[] = {
      {machine_action::step, 11},   {machine_action::ticket_step, 2}, {machine_action::open, 3},
      {machine_action::close, 1},   {machine_action::fork, 2},        {machine_action::truncate, 2},
      {machine_action::preempt, 1}, {machine_action::resume, 2},      {machine_action::retain, 1},
      {machine_action::adopt, 2},   {machine_action::release, 1},     {machine_action::demote, 1},
      {machine_action::promote, 1}, {machine_action::run_some, 2},    {machine_action::poll, 1},
      {machine_action::drain, 1}};
    std::uint32_t sum = 0;
    for (weight const& each : weights) { sum += each.times; }
    std::uint32_t left = below(sum);
    std::size_t place = 0;
    for (; left >= weights[place].times; ++place) { left -= weights[place].times; }
    machine_action const action = weights[place].action;
    ++done_[static_cast<std::size_t>(action)];
    switch (action) {
      case machine_action::open: open(); break;
      case machine_action::step: step(); break;
      case machine_action::ticket_step: ticket_step(); break;
      case machine_action::close: close(); break;
      case machine_action::fork: fork(); break;
      case machine_action::truncate: truncate(); break;
      case machine_action::preempt: save(true); break;
      case machine_action::resume: bring_back(true); break;
      case machine_action::retain: save(false); break;
      case machine_action::adopt: bring_back(false); break;
      case machine_action::release: release(); break;
      case machine_action::demote: demote(); break;
      case machine_action::promote: promote(); break;
      case machine_action::run_some: run_some(); break;
      case machine_action::poll: kv_.poll(); break;
      case machine_action::drain: drain(); break;
    }
    check();
    if (!fault_.empty()) { fault_ = std::string{"after "} + name_of(action) + ": " + fault_; }
    return fault_.empty();
  }

  /// Ends every sequence. All memory must be back then.
  bool finish()
  {
    if (!fault_.empty()) { return false; }
    while (!live_.empty()) { close(live_.size() - 1); }
    for (kept const& it : kept_) { require(kv_.release(it.id), "release"); }
    kept_.clear();
    drain();
    check();
    pulseinfer::memory_use memory = kv_.memory();
    memory.slot_bytes -= kv_.budget().stream_slots(kv_.geometry().head_groups) * kv_.layout().block_bytes;
    if (memory.slot_bytes != 0 || memory.host_bytes != 0 || memory.digest_bytes != 0 || kv_.store().reserved() != 0) {
      report(
        "leak: " + std::to_string(memory.slot_bytes) + " B of slots, " + std::to_string(memory.host_bytes) +
        " B of host blocks, " + std::to_string(memory.digest_bytes) + " B of digests, " +
        std::to_string(kv_.store().reserved()) + " host blocks reserved");
    }
    if constexpr (requires { backend_.violations(); }) {
      if (backend_.check() != 0) { report(backend_.violations().front()); }
    }
    return fault_.empty();
  }

  [[nodiscard]] std::string const& fault() const { return fault_; }
  [[nodiscard]] manager_type& manager() { return kv_; }
  [[nodiscard]] Backend& backend() { return backend_; }
  /// Times that an action was drawn, and that it did what it is for.
  [[nodiscard]] std::uint64_t drawn(machine_action action) const { return done_[static_cast<std::size_t>(action)]; }
  [[nodiscard]] std::uint64_t went_well(machine_action action) const { return well_[static_cast<std::size_t>(action)]; }
  [[nodiscard]] std::uint64_t recalled_blocks() const { return recalled_; }
  [[nodiscard]] std::uint64_t late_rows() const { return late_; }
  [[nodiscard]] std::uint64_t prefetches() const { return prefetched_; }
  /// Parts of streams that were gone through as a whole, and streams that were left.
  [[nodiscard]] std::uint64_t streamed_parts() const { return engine_.parts; }
  [[nodiscard]] std::uint64_t left_streams() const { return left_streams_; }

 private:
  struct live {
    pulseinfer::row_id row = pulseinfer::none<pulseinfer::row_id>;
    std::uint32_t prompt = 0;
    std::uint32_t most = 0;
    std::uint32_t tokens = 0;
  };
  struct kept {
    pulseinfer::saved_id id = {};
    typename engine_type::history history = {};
    std::uint32_t prompt = 0;
    std::uint32_t most = 0;
    std::uint32_t tokens = 0;
    bool preempted = false;
  };

  [[nodiscard]] std::uint32_t max_tokens() const { return setting_.blocks * setting_.block_tokens; }

  [[nodiscard]] static std::uint32_t open_blocks(machine_setting const& s)
  {
    return static_cast<std::uint32_t>(pulseinfer::window_blocks(s.step_tokens, s.block_tokens));
  }
  /// Sink, recent and open blocks, and two that scores choose.
  [[nodiscard]] static std::uint32_t budget_blocks(machine_setting const& s) { return 4 + open_blocks(s); }

  [[nodiscard]] static pulseinfer::kv_geometry geometry_of(machine_setting const& s)
  {
    using pulseinfer::layer_kind;
    pulseinfer::kv_geometry g{
      .layers = s.mixed_layers ? 4U : 3U,
      .query_heads = 4,
      .kv_heads = 2,
      .head_dim = 2,
      .block_tokens = s.block_tokens,
      .head_groups = s.head_groups,
      .extra_planes = {{.name = "scales", .bytes_per_token = 3, .bytes_per_block = 5}}};
    if (s.mixed_layers) {
      g.layer_groups = {
        {.first = 0, .count = 1, .kind = layer_kind::selected},
        {.first = 1,
         .count = 1,
         .kind = layer_kind::windowed,
         .window_tokens = 2 * s.block_tokens + 1,
         .sink_tokens = 2},
        {.first = 2, .count = 1, .kind = layer_kind::dense},
        {.first = 3, .count = 1, .kind = layer_kind::selected}};
    }
    return g;
  }
  static constexpr bool tells_scores = pulseinfer::selector_tells_scores<Selector, Backend>;

  [[nodiscard]] static pulseinfer::manager_options options_of(machine_setting const& s)
  {
    return {
      .max_rows = s.rows,
      .max_tokens = s.blocks * s.block_tokens,
      .max_step_tokens = s.step_tokens,
      .max_prefill_tokens = chunk,
      .quota_tokens = (budget_blocks(s) + open_blocks(s) - 1 + s.depth + s.spare_slots) * s.block_tokens,
      .write_back_depth = s.depth,
      .stream_tokens = s.stream_blocks * s.block_tokens,
      .warm_up_queries = 3,
      .slots = s.slots == 0 ? 0 : s.slots + 2 * s.stream_blocks * s.head_groups,
      .write_back_below = s.low_slots,
      .host_blocks = s.host_blocks,
      .deferred_share = tells_scores ? s.deferred_share : 0.0F,
      .near_share = tells_scores ? s.near_share : 0.0F,
      .recalls = s.recalls,
      .saved_sequences = s.saved};
  }
  [[nodiscard]] static Selector selector_of(machine_setting const& s)
  {
    return {
      .budget_tokens = budget_blocks(s) * s.block_tokens,
      .sink_tokens = s.block_tokens,
      .recent_tokens = s.block_tokens,
      .dense_tokens = budget_blocks(s) * s.block_tokens};
  }

  // -- what an operation draws from its number

  [[nodiscard]] std::uint32_t below(std::uint64_t n)
  {
    return n == 0 ? 0 : static_cast<std::uint32_t>(mixed({number_, ++drawn_, 41}) % n);
  }
  [[nodiscard]] bool one_in(std::uint32_t n) { return below(n) == 0; }

  void report(std::string const& text)
  {
    if (fault_.empty()) { fault_ = text; }
  }
  void require(pulseinfer::status said, char const* call) { require(said, pulseinfer::status::ok, call); }
  void require(pulseinfer::status said, pulseinfer::status right, char const* call)
  {
    if (said != right) { report(std::string{call} + " said " + name_of(said) + ", not " + name_of(right)); }
  }
  void well(machine_action action) { ++well_[static_cast<std::size_t>(action)]; }

  void check()
  {
    if (!engine_.fault().empty()) { report(engine_.fault()); }
    if (std::string const text = kv_.audit(); !text.empty()) { report("audit: " + text); }
    for (live const& it : live_) {
      if (kv_.tokens_of(it.row) != it.tokens) {
        report(
          "row " + std::to_string(to_number(it.row)) + " has " + std::to_string(kv_.tokens_of(it.row)) +
          " tokens, not " + std::to_string(it.tokens));
      }
    }
    if constexpr (requires { backend_.violations(); }) {
      if (backend_.violation_count() != 0) { report(backend_.violations().front()); }
    }
  }

  // -- sequences

  /// A sequence that begins in a row, after everything that looks at the row's last one.
  void begin_in(pulseinfer::row_id row, live const& it)
  {
    require(backend_.synchronize(stream_), "synchronize");
    for (live const& other : live_) {
      if (other.row == row) { report("row " + std::to_string(to_number(row)) + " was given out twice"); }
    }
    live_.push_back(it);
    live_.back().row = row;
  }

  [[nodiscard]] pulseinfer::sequence_options draw_request(std::uint32_t least)
  {
    std::uint32_t const room = max_tokens() - least + 1;
    std::uint32_t const most = least + std::max(below(room), below(room));
    bool const streams = setting_.stream_blocks != 0 && kv_.budget().offloads(most) && one_in(2);
    return {
      .prompt_tokens = below(most + 1),
      .max_tokens = std::max(most, 1U),
      .keep_resident = !streams && one_in(3),
      .stream_prompt = streams};
  }

  void open()
  {
    pulseinfer::sequence_options const request = draw_request(0);
    pulseinfer::row_id row{};
    if (kv_.open(request, row) != pulseinfer::admission::admitted) { return; }
    begin_in(row, {.prompt = request.prompt_tokens, .most = request.max_tokens});
    engine_.assign(row, ++sequences_);
    well(machine_action::open);
  }

  void close()
  {
    if (live_.empty()) { return; }
    auto const ended = std::ranges::find_if(live_, [](live const& it) { return it.tokens == it.most; });
    bool const at_end = ended != live_.end() && one_in(2);
    close(at_end ? static_cast<std::size_t>(ended - live_.begin()) : below(live_.size()));
    well(machine_action::close);
  }
  void close(std::size_t place)
  {
    pulseinfer::row_id const row = live_[place].row;
    require(kv_.close(row), "close");
    engine_.row(row).in_step = false;
    live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(place));
  }

  void fork()
  {
    if (live_.empty()) { return; }
    live const from = live_[below(live_.size())];
    bool const too_short = from.tokens > 1 && one_in(8);
    pulseinfer::sequence_options request = draw_request(too_short ? 1 : from.tokens);
    if (too_short) { request = {.prompt_tokens = 0, .max_tokens = from.tokens - 1}; }
    bool const late = kv_.is_late(from.row);
    pulseinfer::row_id row{};
    pulseinfer::admission const said = kv_.fork(from.row, request, row);
    if ((late || too_short) && said == pulseinfer::admission::admitted) {
      report("a fork was let in that cannot be made");
    }
    if (said != pulseinfer::admission::admitted) { return; }
    begin_in(row, {.prompt = request.prompt_tokens, .most = request.max_tokens, .tokens = from.tokens});
    engine_.assign(row, engine_.history_of(from.row));
    well(machine_action::fork);
  }

  void truncate()
  {
    if (live_.empty()) { return; }
    live& it = live_[below(live_.size())];
    std::uint32_t const back = one_in(3) ? below(it.tokens + 1) : std::min(it.tokens, below(3 * setting_.block_tokens));
    std::uint32_t const tokens = one_in(8) ? it.tokens + 1 + below(5) : it.tokens - back;
    bool const late = kv_.is_late(it.row);
    pulseinfer::status const said = kv_.truncate(it.row, tokens);
    if (late) {
      require(said, pulseinfer::status::invalid_state, "truncate of a late row");
    } else if (tokens > it.tokens) {
      require(said, pulseinfer::status::out_of_range, "truncate past the end");
    } else if (said == pulseinfer::status::ok) {
      it.tokens = tokens;
      well(machine_action::truncate);
    } else {
      bool const may_refuse =
        (said == pulseinfer::status::invalid_state && setting_.mixed_layers) || said == pulseinfer::status::busy;
      if (!may_refuse) { require(said, "truncate"); }
    }
  }

  void save(bool leaves)
  {
    if (live_.empty()) { return; }
    std::size_t const place = below(live_.size());
    live const it = live_[place];
    kept one{.history = engine_.history_of(it.row), .prompt = it.prompt, .most = it.most, .tokens = it.tokens};
    one.preempted = leaves;
    bool const late = kv_.is_late(it.row);
    pulseinfer::status const said = leaves ? kv_.preempt(it.row, one.id) : kv_.retain(it.row, one.id);
    if (late) { require(said, pulseinfer::status::invalid_state, "saving a late row"); }
    if (said != pulseinfer::status::ok) {
      bool const may_refuse = said == pulseinfer::status::busy || said == pulseinfer::status::capacity_exceeded ||
        (said == pulseinfer::status::invalid_state && (late || (!leaves && setting_.mixed_layers)));
      if (!may_refuse) { require(said, leaves ? "preempt" : "retain"); }
      return;
    }
    if (leaves) {
      live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(place));
    } else {
      one.tokens -= one.tokens % setting_.block_tokens;
    }
    kept_.push_back(one);
    well(leaves ? machine_action::preempt : machine_action::retain);
  }

  void bring_back(bool ends)
  {
    if (kept_.empty()) { return; }
    std::size_t const place = below(kept_.size());
    kept const from = kept_[place];
    pulseinfer::sequence_options request = draw_request(from.tokens);
    bool const too_short = !ends && from.tokens > 1 && one_in(8);
    if (too_short) { request = {.prompt_tokens = 0, .max_tokens = from.tokens - 1}; }
    if (ends) { request = {.prompt_tokens = from.prompt, .max_tokens = from.most}; }
    pulseinfer::row_id row{};
    pulseinfer::admission const said = ends ? kv_.resume(from.id, row) : kv_.adopt(from.id, request, row);
    if (too_short && said != pulseinfer::admission::rejected) { report("a request too short for its prefix got in"); }
    if (said != pulseinfer::admission::admitted) { return; }
    begin_in(row, {.prompt = request.prompt_tokens, .most = request.max_tokens, .tokens = from.tokens});
    engine_.assign(row, from.history);
    well(ends ? machine_action::resume : machine_action::adopt);
    if (!ends) { return; }
    kept_.erase(kept_.begin() + static_cast<std::ptrdiff_t>(place));
    require(kv_.release(from.id), pulseinfer::status::stale_ticket, "release of what was resumed");
  }

  void release()
  {
    if (kept_.empty()) { return; }
    std::size_t const place = below(kept_.size());
    pulseinfer::saved_id const id = kept_[place].id;
    require(kv_.release(id), "release");
    require(kv_.release(id), pulseinfer::status::stale_ticket, "a second release");
    kept_.erase(kept_.begin() + static_cast<std::ptrdiff_t>(place));
    well(machine_action::release);
  }

  void demote()
  {
    if (live_.empty()) { return; }
    live const& it = live_[below(live_.size())];
    pulseinfer::status const said = kv_.demote(it.row);
    if (kv_.is_late(it.row)) { require(said, pulseinfer::status::invalid_state, "demote of a late row"); }
    if (said == pulseinfer::status::ok) { well(machine_action::demote); }
    if (said != pulseinfer::status::ok && said != pulseinfer::status::invalid_state) { require(said, "demote"); }
  }

  void promote()
  {
    if (live_.empty()) { return; }
    live const& it = live_[below(live_.size())];
    pulseinfer::status const said = kv_.promote(it.row);
    if (kv_.is_late(it.row)) { require(said, pulseinfer::status::invalid_state, "promote of a late row"); }
    if (said == pulseinfer::status::ok) { well(machine_action::promote); }
    bool const may_refuse = said == pulseinfer::status::invalid_state || said == pulseinfer::status::capacity_exceeded;
    if (said != pulseinfer::status::ok && !may_refuse) { require(said, "promote"); }
  }

  // -- time

  void run_some()
  {
    for (std::uint32_t left = 1 + below(40); left > 0; --left) { static_cast<void>(tasks().run_one()); }
  }

  /// Waits for everything, looks at what the host has, and writes over what nobody owns.
  void drain()
  {
    require(kv_.drain(pulseinfer::no_deadline), "drain");
    require(backend_.synchronize(), "synchronize");
    for (live const& it : live_) { engine_.look_at_host(it.row, false); }
    pulseinfer::host_store_ref const host = kv_.store().ref();
    pulseinfer::kv_geometry const& g = kv_.geometry();
    for (std::uint32_t b = 0; b < host.blocks; ++b) {
      auto const block = static_cast<pulseinfer::host_block_id>(b);
      if (kv_.store().references(block) != 0 || kv_.store().pins(block) != 0) { continue; }
      for (std::uint32_t l = 0; l < g.layers; ++l) {
        for (std::uint32_t group = 0; group < g.head_groups; ++group) {
          poison(host.address(static_cast<pulseinfer::layer_id>(l), group, block));
        }
      }
    }
    pulseinfer::slot_pool_ref const pool = kv_.pool().ref();
    for (std::uint32_t s = 0; s < pool.slots; ++s) {
      auto const slot = static_cast<pulseinfer::slot_id>(s);
      if (kv_.pool().is_free(pulseinfer::layer_id{0}, slot)) { poison(pool.address(pulseinfer::layer_id{0}, slot)); }
    }
  }
  void poison(std::byte* block) { std::memset(block, 0xFF, kv_.layout().block_bytes); }

  [[nodiscard]] cpu_backend& tasks()
  {
    if constexpr (std::is_same_v<Backend, cpu_backend>) {
      return backend_;
    } else {
      return backend_.base();
    }
  }

  // -- steps

  /// Rows that are not in a step, some of them, with tokens as their prompts and lengths allow.
  [[nodiscard]] std::vector<pulseinfer::step_row> draw_rows()
  {
    std::vector<pulseinfer::step_row> rows;
    bool const all = one_in(2);
    for (live const& it : live_) {
      if (kv_.is_late(it.row) || it.tokens == it.most || (!all && one_in(3))) { continue; }
      bool const dense = kv_.mode_of(it.row) == pulseinfer::row_mode::dense_resident;
      std::uint32_t const left = dense && it.prompt > it.tokens ? it.prompt - it.tokens : 0;
      std::uint32_t const most =
        left == 0 ? setting_.step_tokens : std::min(std::max(left, setting_.step_tokens), engine_.per_row());
      std::uint32_t const count = std::min(one_in(2) ? most : 1 + below(most), it.most - it.tokens);
      rows.push_back({.row = it.row, .tokens = count});
      engine_.row(it.row).accept = one_in(3) ? below(count + 1) : count;
    }
    for (std::size_t i = rows.size(); i > 1; --i) { std::swap(rows[i - 1], rows[below(i)]); }
    return rows;
  }

  /// Rows of the list whose sequences have not been closed meanwhile. Valid until the step ends.
  [[nodiscard]] pulseinfer::row_list still_open(pulseinfer::row_list rows)
  {
    std::vector<pulseinfer::row_id>& list = lists_.emplace_back();
    for (pulseinfer::row_id const row : rows) {
      if (std::ranges::any_of(live_, [&](live const& it) { return it.row == row; })) { list.push_back(row); }
    }
    return {.ids = list.data(), .count = static_cast<std::uint32_t>(list.size())};
  }

  void disturb()
  {
    if (one_in(6)) { run_some(); }
    if (one_in(30)) { kv_.poll(); }
    if (!live_.empty() && one_in(60)) {
      ++closed_within_;
      close(below(live_.size()));
    }
  }

  void look(pulseinfer::visit const& v)
  {
    engine_type* const engine = &engine_;
    require(
      backend_.launch(stream_, pulseinfer::host_function{[engine, v, now = engine_.note()] { engine->look(v, now); }}),
      "launch");
  }

  /// A recall that was given up may fill slots of the lease for a while: a step that begins before its end could find too few.
  void end_given_up()
  {
    if (given_up_) { require(kv_.drain(pulseinfer::no_deadline), "drain"); }
    given_up_ = false;
  }

  void step()
  {
    if (live_.empty()) { return; }
    end_given_up();
    require(engine_.begin(draw_rows()), "begin_step");
    if (!fault_.empty()) { return; }
    if (kv_.rows().count != 0) { engine_.enter(kv_.first_layer(), still_open(kv_.rows())); }
    std::uint32_t left = one_in(5) ? below(8) : ~0U;
    if (left != 0) {
      for (pulseinfer::visit const& v : kv_.step()) {
        take(v);
        if (!engine_.fault().empty() || --left == 0) { break; }
      }
    }
    end_step();
    well(machine_action::step);
  }

  void take(pulseinfer::visit const& v)
  {
    look(v);
    if (v.part != pulseinfer::part::landed) {
      for (pulseinfer::row_id const row : v.rows) { stream(v.layer, row); }
    }
    disturb();
    if (v.part == pulseinfer::part::hits) { return; }
    pulseinfer::row_list const rows = still_open(v.rows);
    if (rows.count == 0) { return; }
    // A selector that only imports chooses nothing for dense rows.
    if (setting_.warm_up && !std::is_same_v<Selector, external_selector>) {
      require(kv_.warm_up(v.layer, rows, engine_.query_view()), "warm_up");
    }
    if (!v.last && one_in(3) && !std::is_same_v<Selector, external_selector>) { prefetch(v.next, rows); }
    if (v.last) {
      require(backend_.synchronize(stream_), "synchronize");
    } else {
      engine_.enter(v.next, rows);
    }
  }

  void prefetch(pulseinfer::layer_id layer, pulseinfer::row_list rows)
  {
    pulseinfer::status const said = kv_.prefetch(layer, rows, engine_.query_view());
    if (said != pulseinfer::status::busy) { require(said, "prefetch"); }
    prefetched_ += said == pulseinfer::status::ok ? 1 : 0;
  }

  /// Goes through the earlier blocks of a row whose prompt streams in, now and then not to their end.
  void stream(pulseinfer::layer_id layer, pulseinfer::row_id row)
  {
    bool const open = std::ranges::any_of(live_, [&](live const& it) { return it.row == row; });
    if (setting_.stream_blocks == 0 || !open) { return; }
    if (!one_in(5)) {
      engine_.take_stream(layer, row);
      return;
    }
    engine_type* const engine = &engine_;
    auto const now = engine_.note()[to_index(row)];
    std::uint32_t left = below(4);
    pulseinfer::block_stream<manager_type> earlier = kv_.stream_blocks(layer, row);
    for (pulseinfer::stream_part const& part : earlier) {
      require(
        backend_.launch(stream_, pulseinfer::host_function{[engine, part, now] { engine->look(part, now); }}),
        "launch");
      disturb();
      if (left-- == 0) {
        ++left_streams_;
        break;
      }
    }
    if (earlier.status() != pulseinfer::status::aborted) { require(earlier.status(), "stream_blocks"); }
  }

  void end_step()
  {
    require(backend_.synchronize(stream_), "synchronize");
    std::vector<pulseinfer::row_id> stepping;
    for (live const& it : live_) {
      if (engine_.row(it.row).in_step) { stepping.push_back(it.row); }
    }
    engine_.commit();
    for (live& it : live_) {
      bool const stepped = std::ranges::find(stepping, it.row) != stepping.end();
      auto const& state = engine_.row(it.row);
      if (kv_.row_status(it.row) != pulseinfer::status::ok) {
        report("row " + std::to_string(to_number(it.row)) + " failed: " + name_of(kv_.row_status(it.row)));
      }
      if (stepped && !kv_.is_late(it.row)) {
        it.tokens = state.begin + std::min(state.accept, state.count);
      } else if (stepped) {
        ++late_;
      }
    }
    recalled_ += kv_.finish_sample().recalled_blocks;
    lists_.clear();
  }

  /// A step of an engine with a loop of its own.
  void ticket_step()
  {
    using namespace pulseinfer;
    if (live_.empty()) { return; }
    end_given_up();
    std::vector<step_row> const drawn = draw_rows();
    if (drawn.empty()) { return; }
    require(engine_.begin(drawn), "begin_step");
    if (!fault_.empty()) { return; }
    row_list const all = kv_.rows();
    std::uint32_t const layers = kv_.geometry().layers;
    for (std::uint32_t l = 0; l < layers && fault_.empty(); ++l) {
      auto const layer = static_cast<layer_id>(l);
      row_list const rows = still_open(all);
      if (rows.count == 0) { break; }
      engine_type* const engine = &engine_;
      require(
        backend_.launch(
          stream_, host_function{[engine, layer, rows, now = engine_.note()] { engine->fill(layer, rows, now); }}),
        "launch");
      require(kv_.append(layer, rows, engine_.key_view(), engine_.value_view()), "append");
      for (row_id const row : rows) {
        if (setting_.stream_blocks != 0) { engine_.take_stream(layer, row); }
      }
      if (one_in(4)) {
        // Asked for, and given up.
        ticket given;
        choose(layer, rows);
        require(kv_.begin_recall(layer, rows, engine_.query_view(), stream_, given), "begin_recall");
        if (one_in(2)) { run_some(); }
        require(kv_.abort(given), "abort");
        require(kv_.status_of(given), status::aborted, "status of what was given up");
        given_up_ = true;
        if (one_in(3)) {  // nobody attends
          require(
            backend_.launch(stream_, host_function{[engine, layer, rows, now = engine_.note()] {
                              engine->write_extras(layer, rows, now);
                            }}),
            "launch");
          continue;
        }
        require(backend_.synchronize(stream_), "synchronize");
      }
      choose(layer, rows);
      std::uint32_t const cut = one_in(2) ? rows.count : below(rows.count + 1);
      for (row_list const part_of :
           {row_list{.ids = rows.ids, .count = cut}, row_list{.ids = rows.ids + cut, .count = rows.count - cut}}) {
        if (part_of.count == 0) { continue; }
        ticket given;
        recall_lists const lists = one_in(2) ? recall_lists::whole : recall_lists::hits_then_landed;
        require(kv_.begin_recall(layer, part_of, engine_.query_view(), stream_, given, lists), "begin_recall");
        visit v{.layer = layer, .rows = part_of, .part = part::hits, .last = l + 1 == layers};
        if (lists == recall_lists::hits_then_landed) {
          require(kv_.table(given, v.part, v.table), "table");
          look(v);
        }
        if (one_in(8)) { run_some(); }
        require(kv_.wait_on(given, stream_), "wait_on");
        v.part = lists == recall_lists::hits_then_landed ? part::landed : part::whole;
        require(kv_.table(given, v.part, v.table), "table");
        look(v);
        if (one_in(4)) {
          require(backend_.synchronize(stream_), "synchronize");
          require(kv_.status_of(given), "status of what was waited for");
          for (std::uint32_t i = 0; i < part_of.count; ++i) {
            if (!kv_.landed(given).test(i)) { report("a row that was waited for has not landed"); }
          }
        }
      }
      disturb();
    }
    end_step();
    well(machine_action::ticket_step);
  }

  /// Where the host engine chooses the blocks: any of a row's sealed ones, as many as the budget takes, the same ones within
  /// an operation. A step that chose others once more would need more slots than one step can pin.
  void choose(pulseinfer::layer_id layer, pulseinfer::row_list rows)
  {
    using namespace pulseinfer;
    if constexpr (std::is_same_v<Selector, external_selector>) {
      kv_geometry const& g = kv_.geometry();
      if (g.group_of(layer).kind != layer_kind::selected) { return; }
      for (row_id const row : rows) {
        row_mode const mode = kv_.mode_of(row);
        if (mode != row_mode::sparse_offloaded && mode != row_mode::sparse_resident) { continue; }
        auto const& state = engine_.row(row);
        auto const blocks = static_cast<std::uint32_t>(blocks_of(state.begin + state.count, g.block_tokens));
        std::uint32_t const most = kv_.selector().budget_blocks(layer) - kv_.budget().open_blocks;
        std::uint32_t const sealed = state.begin / g.block_tokens;
        for (std::uint32_t group = 0; group < g.head_groups; ++group) {
          std::vector<block_id> ids;
          for (std::uint32_t b = 0; b < sealed; ++b) { ids.push_back(static_cast<block_id>(b)); }
          for (std::size_t i = ids.size(); i > 1; --i) {
            std::swap(ids[i - 1], ids[mixed({number_, to_index(layer), to_index(row), group, i}) % i]);
          }
          if (ids.size() > most) { ids.resize(most); }
          require(
            kv_.selector().import_selection(layer, lane_of(row, group, g.head_groups), ids, blocks),
            "import_selection");
        }
      }
    }
  }

  machine_setting setting_;
  Backend backend_;
  typename Backend::stream_ref stream_;
  manager_type kv_;
  engine_type engine_;
  std::vector<live> live_;
  std::vector<kept> kept_;
  std::deque<std::vector<pulseinfer::row_id>> lists_;  // rows of the visits of a step
  std::string fault_;
  bool given_up_ = false;
  std::uint64_t number_ = 0;
  std::uint64_t drawn_ = 0;
  std::uint64_t sequences_ = 0;
  std::uint64_t recalled_ = 0;
  std::uint64_t late_ = 0;
  std::uint64_t prefetched_ = 0;
  std::uint64_t left_streams_ = 0;
  std::uint64_t closed_within_ = 0;
  std::uint64_t done_[action_count] = {};
  std::uint64_t well_[action_count] = {};
};

}  // namespace pulseinfer_test
