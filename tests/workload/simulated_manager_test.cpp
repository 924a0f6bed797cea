// The manager of all backends on simulated time with blocks: random requests, failures and ends; and what comes in the
// background, held against its plan by counts.

#include <pulseinfer/admission/fixed_admission.hpp>
#include <pulseinfer/backend/sim/sim_backend.hpp>
#include <pulseinfer/manager/offload_manager.hpp>
#include <pulseinfer/operation/gather_blocks.hpp>
#include <pulseinfer/scheduler/interruptible_scheduler.hpp>
#include <pulseinfer/scheduler/recorded_scheduler.hpp>
#include <pulseinfer/scheduler/replay_scheduler.hpp>
#include <pulseinfer/transfer/gather_scatter_engine.hpp>
#include <pulseinfer/workload/block_generator.hpp>
#include <pulseinfer/workload/counted_workload.hpp>
#include <pulseinfer/workload/miss_generator.hpp>
#include <pulseinfer/workload/timed_engine.hpp>

#include <doctest/doctest.h>
#include <rapidcheck.h>
#include <support/drawn_selector.hpp>
#include <support/pattern_engine.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <iostream>
#include <string>
#include <type_traits>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;
using namespace std::chrono_literals;

namespace {

/// Refuses some gathers.
class refusing_backend : public sim_backend {
 public:
  using sim_backend::sim_backend;

  std::uint32_t one_in = 0;  ///< 0: none
  std::uint64_t seed = 0;
  std::uint64_t refused = 0;

  template <operation Op>
  status launch(stream_ref stream, Op const& op, observation* observed = nullptr) noexcept
  {
    if constexpr (std::is_same_v<Op, gather_blocks>) {
      if (one_in != 0 && mixed({seed, ++gathers_}) % one_in == 0) {
        ++refused;
        return status::transfer_failed;
      }
    }
    return sim_backend::launch(stream, op, observed);
  }

 private:
  std::uint64_t gathers_ = 0;
};

static_assert(observed_backend<refusing_backend>);

constexpr std::uint32_t layer_count = 3, block_tokens = 4, budget = 6, chunk = 16, most_tokens = 160;

struct setting {
  std::uint32_t rows = 3;
  std::uint32_t one_in = 0;  ///< gathers, of which one is refused
  bool ends = true;          ///< loops are left early, and sequences end in mid-step
  bool hurries = true;  ///< opens while copies fly, gives tickets up: what comes of that follows how long copies take
  float deferred_share = 0.0F;
  float near_share = 0.0F;
  nanoseconds late_after = nanoseconds::max();
  double link = 2e8;
  std::uint64_t seed = 0;
};

std::string name_of(setting const& s)
{
  return "rows " + std::to_string(s.rows) + ", one_in " + std::to_string(s.one_in) + (s.ends ? ", ends" : "") +
    ", deferred_share " + std::to_string(s.deferred_share) + ", near_share " + std::to_string(s.near_share) +
    ", late_after " + std::to_string(s.late_after.count()) + ", link " + std::to_string(s.link) + ", seed " +
    std::to_string(s.seed);
}

struct seen_visit {
  layer_id layer = none<layer_id>;
  part which = part::whole;
  std::vector<row_id> rows = {};

  friend bool operator==(seen_visit const&, seen_visit const&) = default;
};

/// Serves requests, and knows what must come of them. What is wrong is kept as a sentence.
template <class Scheduler>
class server {
 public:
  using manager = offload_manager<refusing_backend, drawn_selector, gather_scatter_engine, Scheduler, fixed_admission>;

  server(setting const& s, Scheduler const& scheduler)
    : setting_{s},
      backend_{machine_of(s)},
      stream_{backend_.create_stream()},
      kv_{
        backend_,
        stream_,
        {.layers = layer_count, .query_heads = 1, .kv_heads = 1, .head_dim = 64, .block_tokens = block_tokens},
        {.max_rows = s.rows,
         .max_tokens = most_tokens,
         .max_prefill_tokens = chunk,
         .quota_tokens = (budget + 6) * block_tokens,
         .deferred_share = s.deferred_share,
         .near_share = s.near_share},
        {.budget_tokens = budget * block_tokens},
        {},
        scheduler},
      rows_(s.rows),
      queries_(std::size_t{s.rows} * chunk * 64)
  {
    backend_.one_in = s.one_in;
    backend_.seed = s.seed;
  }

  server(server&&) = delete;

  bool run(std::uint64_t number)
  {
    if (!fault.empty()) { return false; }
    bits_ = mixed({setting_.seed, ++operations_, number});
    std::uint32_t const what = draw(16);
    if (what < 3) {
      open();
    } else if (what < 13) {
      step();
    } else if (what == 13) {
      end(static_cast<row_id>(draw(setting_.rows)));
    } else if (what == 14) {
      kv_.poll();
    } else {
      nanoseconds const limit = backend_.now() + draw(2000) * 1us;
      status const drained = kv_.drain(setting_.hurries ? limit : no_deadline);
      if (drained != status::ok && drained != status::drain_timeout) { wrong("drain", drained); }
    }
    if (std::string const text = kv_.audit(); !text.empty()) { wrong("audit: " + text); }
    return fault.empty();
  }

  /// Ends everything. @return whether nothing is left
  bool finish()
  {
    if (!fault.empty()) { return false; }
    if (status const drained = kv_.drain(no_deadline); drained != status::ok) { wrong("drain", drained); }
    for (std::uint32_t r = 0; r < setting_.rows; ++r) { end(static_cast<row_id>(r)); }
    if (status const drained = kv_.drain(no_deadline); drained != status::ok) { wrong("drain", drained); }
    if (!kv_.in_flight().idle()) { wrong("work is in flight after a drain"); }
    memory_use const use = kv_.memory();
    if (use.slot_bytes + use.host_bytes + use.digest_bytes != 0) { wrong("memory is in use after the last end"); }
    if (std::string const text = kv_.audit(); !text.empty()) { wrong("audit: " + text); }
    return fault.empty();
  }

  std::string fault;
  std::vector<seen_visit> visits;
  std::uint64_t sampled = 0, failed = 0, late = 0, given_up = 0, ended = 0, aborted = 0, deferred = 0, brought = 0;

  [[nodiscard]] std::uint64_t refused() const { return backend_.refused; }

 private:
  struct request {
    bool runs = false;
    std::uint32_t prompt = 0;
    std::uint32_t length = 0;
    std::uint32_t tokens = 0;   ///< committed
    std::uint32_t appends = 0;  ///< of the step that it is in; 0: it is in none
    std::uint32_t late = 0;     ///< bit i: late i steps ago
    std::vector<std::vector<block_id>> chosen = std::vector<std::vector<block_id>>(layer_count);
  };

  [[nodiscard]] static sim_options machine_of(setting const& s)
  {
    sim_options machine;
    machine.kernels = {
      .per_operation = 1us, .per_run = 0ns, .to_device_bytes_per_s = s.link, .to_host_bytes_per_s = 1e9};
    return machine;
  }

  std::uint32_t draw(std::uint64_t below) noexcept
  {
    bits_ = mixed({bits_, 1});
    return static_cast<std::uint32_t>((bits_ >> 20U) % below);
  }

  void wrong(std::string const& what)
  {
    if (fault.empty()) { fault = "operation " + std::to_string(operations_) + ": " + what; }
  }
  void wrong(std::string const& call, status said) { wrong(call + " said " + pulseinfer::name_of(said)); }
  [[nodiscard]] request& of(row_id row) { return rows_[to_index(row)]; }
  [[nodiscard]] std::string named(row_id row) { return "row " + std::to_string(to_index(row)); }

  void open()
  {
    if (!setting_.hurries && kv_.drain(no_deadline) != status::ok) { wrong("a drain is refused"); }
    request r{.runs = true};
    r.prompt = 1 + draw(100);
    r.length = r.prompt + 1 + draw(most_tokens - r.prompt);
    row_id row = none<row_id>;
    if (kv_.open({.prompt_tokens = r.prompt, .max_tokens = r.length}, row) != admission::admitted) { return; }
    if (of(row).runs) { wrong(named(row) + " was given out twice"); }
    of(row) = r;
  }

  void end(row_id row)
  {
    if (!of(row).runs) { return; }
    if (status const closed = kv_.close(row); closed != status::ok) { wrong("close", closed); }
    of(row) = {};
    ++ended;
  }

  void step()
  {
    std::vector<step_row> named_rows;
    for (std::uint32_t r = 0; r < setting_.rows; ++r) {
      auto const row = static_cast<row_id>(r);
      request& q = of(row);
      if (!q.runs || q.appends != 0 || draw(8) == 0) { continue; }
      if (q.tokens == q.length) {
        end(row);
        continue;
      }
      std::uint32_t const left = q.prompt > q.tokens ? q.prompt - q.tokens : 0;
      named_rows.push_back(
        {.row = row, .tokens = left == 0 ? 1 : std::min(left, 1 + draw(chunk)), .token_offset = r * chunk});
    }
    status const begun = kv_.begin_step(named_rows);
    if (begun == status::transfer_failed && setting_.one_in != 0) {
      // A row cannot go on: which one, its status says.
      for (step_row const& r : named_rows) {
        if (kv_.row_status(r.row) == status::transfer_failed) { end(r.row); }
      }
      return;
    }
    if (begun != status::ok) { return wrong("begin_step", begun); }
    for (step_row const& r : named_rows) {
      of(r.row).appends = r.tokens;
      if (kv_.tokens_of(r.row) != of(r.row).tokens) { wrong(named(r.row) + " has lost tokens"); }
    }
    for (request& q : rows_) { q.late <<= 1U; }
    bool const in_full = !setting_.ends || draw(4) != 0;
    std::uint32_t left = in_full ? ~0U : draw(2 * layer_count);
    if (kv_.rows().count != 0) {
      if (setting_.hurries && draw(8) == 0) { give_up(); }
      enter(kv_.first_layer(), kv_.rows());
    }
    std::uint32_t handed = 0;
    if (left != 0) {
      for (visit const& v : kv_.step()) {
        take(v);
        if (--left == 0 || !fault.empty()) { break; }
        // Every row has two visits of a layer at most, and one more for each try.
        if (++handed > setting_.rows * layer_count * 6) { return wrong("the loop does not end"); }
        if (setting_.ends && draw(60) == 0) { end_another(v); }
      }
    }
    commit(in_full);
    step_sample const& sample = kv_.finish_sample();
    deferred += sample.deferred_blocks;
    brought += sample.background_blocks;
    if (sample.most_skipped_share > static_cast<double>(setting_.deferred_share) + 0x1p-32) {
      wrong("more was skipped than may be");
    }
  }

  /// A recall that nobody waits for.
  void give_up()
  {
    choose(kv_.first_layer(), kv_.rows());
    ticket given;
    status const started = kv_.begin_recall(kv_.first_layer(), kv_.rows(), queries(), stream_, given);
    if (started == status::busy || (started == status::transfer_failed && setting_.one_in != 0)) { return; }
    if (started != status::ok) { return wrong("begin_recall", started); }
    if (status const done = kv_.abort(given); done != status::ok) { wrong("abort", done); }
    // The next draw may come once the selection has run.
    if (status const ran = backend_.synchronize(stream_); ran != status::ok) { wrong("synchronize", ran); }
    ++aborted;
  }

  /// Ends a sequence whose row the engine does not have in hand.
  void end_another(visit const& v)
  {
    auto const row = static_cast<row_id>(draw(setting_.rows));
    if (std::ranges::find(v.rows, row) == v.rows.end()) { end(row); }
  }

  void take(visit const& v)
  {
    visits.push_back({.layer = v.layer, .which = v.part, .rows = {v.rows.begin(), v.rows.end()}});
    for (row_id const row : v.rows) {
      if (of(row).appends == 0) { wrong(named(row) + " has a visit and is in no step"); }
    }
    auto const work = [] {};
    if (status const ran = backend_.launch(stream_, host_function{work}); ran != status::ok) { wrong("launch", ran); }
    if (v.part != part::hits && !v.last) { enter(v.next, v.rows); }
  }

  void commit(bool in_full)
  {
    std::vector<commit_row> rows;
    for (std::uint32_t r = 0; r < setting_.rows; ++r) {
      auto const row = static_cast<row_id>(r);
      request& q = of(row);
      if (q.appends == 0) { continue; }
      bool const is_late = kv_.is_late(row);
      // Steps that the test left early say nothing of starvation.
      q.late |= is_late && in_full ? 1U : 0U;
      if (is_late && in_full && (q.late & 0xFEU) != 0) { wrong(named(row) + " is late twice in eight steps"); }
      late += is_late && in_full ? 1U : 0U;
      if (!is_late) { rows.push_back({.row = row, .accepted = q.appends}); }
    }
    if (status const kept = kv_.commit(rows); kept != status::ok) { return wrong("commit", kept); }
    for (commit_row const& r : rows) {
      request& q = of(r.row);
      std::uint32_t const now = kv_.tokens_of(r.row);
      if (now == q.tokens + q.appends) {
        ++sampled;
      } else if (now != q.tokens || setting_.one_in == 0 || kv_.row_status(r.row) != status::transfer_failed) {
        wrong(
          named(r.row) + " has " + std::to_string(now) + " tokens after " + std::to_string(q.tokens) + " and " +
          std::to_string(q.appends) + ", status " + pulseinfer::name_of(kv_.row_status(r.row)));
      } else {
        ++failed;
      }
      q.tokens = now;
      q.appends = 0;
    }
  }

  void enter(layer_id layer, row_list rows)
  {
    choose(layer, rows);
    status const entered = kv_.enter(layer, rows, tensor_view{}, tensor_view{}, queries());
    if (entered != status::ok) { wrong("enter", entered); }
  }

  /// What each row that selects reads: what it read before, but for some blocks.
  void choose(layer_id layer, row_list rows)
  {
    for (row_id const row : rows) {
      if (kv_.mode_of(row) != row_mode::sparse_offloaded) { continue; }
      request& q = of(row);
      auto const blocks = static_cast<std::uint32_t>(blocks_of(q.tokens + q.appends, block_tokens));
      std::uint32_t const sealed = q.tokens / block_tokens;
      std::vector<block_id>& chosen = q.chosen[to_index(layer)];
      // Drawn from the row and where it stands: the same whatever other rows do.
      std::uint64_t bits = mixed({setting_.seed, to_index(row), to_index(layer), q.tokens, 7});
      auto const next = [&](std::uint64_t below) { return (bits = mixed({bits, 2})) / 7 % below; };
      std::erase_if(chosen, [&](block_id) { return next(4) == 0; });
      while (chosen.size() + 1 < std::min(budget, sealed + 1)) {
        auto const block = static_cast<block_id>(next(sealed));
        if (std::ranges::find(chosen, block) == chosen.end()) { chosen.push_back(block); }
      }
      std::ranges::fill(kv_.selector().votes(layer, row), 0.0F);
      for (float& share : kv_.selector().shares(layer, row)) { share = static_cast<float>(next(1000)) * 1e-4F; }
      for (float& vote : kv_.selector().votes(layer, row)) { vote = static_cast<float>(next(100)) * 0.01F; }
      for (block_id const block : chosen) { kv_.selector().votes(layer, row)[to_index(block)] = 2.0F; }
      status const told = kv_.selector().import_selection(layer, lane_of(row, 0, 1), chosen, blocks);
      if (told != status::ok) { wrong("import_selection", told); }
    }
  }

  [[nodiscard]] tensor_view queries()
  {
    return contiguous_tensor(queries_.data(), dtype::float32, setting_.rows * chunk, 1, 64);
  }

  setting setting_;
  refusing_backend backend_;
  refusing_backend::stream_ref stream_;
  manager kv_;
  std::vector<request> rows_;
  std::vector<float> queries_;
  std::uint64_t bits_ = 0;
  std::uint64_t operations_ = 0;
};

using recorded = recorded_scheduler<interruptible_scheduler<>>;
using replayed = recorded_scheduler<replay_scheduler<>>;

/// As rc::check, with as many cases as are wanted.
template <class Property>
bool check_cases(int cases, Property property)
{
  rc::detail::TestParams params = rc::detail::configuration().testParams;
  params.maxSuccess = cases;
  params.maxSize = 120;
  params.disableShrinking = true;  // the numbers of a run are few, and each says what was drawn from it
  auto const result = rc::detail::checkTestable(property, rc::detail::TestMetadata{}, params);
  if (!result.template is<rc::detail::SuccessResult>()) { rc::detail::printResultMessage(result, std::cerr); }
  return result.template is<rc::detail::SuccessResult>();
}

setting any_setting()
{
  setting s;
  s.rows = *rc::gen::inRange(1U, 5U);
  s.one_in = *rc::gen::element(0U, 6U, 40U);
  s.ends = *rc::gen::arbitrary<bool>();
  s.deferred_share = *rc::gen::element(0.0F, 0.02F, 0.2F);
  s.near_share = *rc::gen::element(0.0F, 0.25F, 1.0F);
  s.late_after = *rc::gen::element(nanoseconds::max(), nanoseconds{5us}, nanoseconds{40us});
  s.link = *rc::gen::element(3e7, 2e8, 1e10);
  s.seed = *rc::gen::inRange(0U, 10000U);
  return s;
}

/// What both fidelities say of the steps that count.
struct background_figures {
  double demanded = 0.0, early = 0.0, deferred = 0.0, skipped = 0.0;
};

constexpr std::uint32_t plan_rows = 3, plan_layers = 4, plan_budget = 16, prompt_blocks = 200, plan_steps = 90,
                        settled = 40;

workload_options plan_load()
{
  return {
    .layers = plan_layers, .rows = plan_rows, .budget_blocks = plan_budget, .misses = {.mean_logit = -1.5}, .seed = 11};
}

/// The simulated plan, with time enough for all that may move between two layers.
background_figures planned(foresight_options const& options)
{
  miss_generator generator{plan_load()};
  counted_workload workload{generator, options};
  workload_totals before;
  for (std::uint32_t step = 0; step < plan_steps; ++step) {
    if (step == settled) { before = workload.totals(); }
    for (std::uint32_t r = 0; r < plan_rows; ++r) { workload.begin_step(static_cast<row_id>(r)); }
    for (std::uint32_t l = 0; l < plan_layers; ++l) {
      for (std::uint32_t r = 0; r < plan_rows; ++r) {
        static_cast<void>(workload.plan(static_cast<row_id>(r), static_cast<layer_id>(l)));
        static_cast<void>(workload.attend(static_cast<row_id>(r), static_cast<layer_id>(l), part::whole));
      }
      for (background_source::piece piece; workload.next(piece);) { workload.done(piece.name); }
    }
  }
  workload_totals const sums = difference(workload.totals(), before);
  return {
    .demanded = static_cast<double>(sums.demanded),
    .early = static_cast<double>(sums.prefetched),
    .deferred = static_cast<double>(sums.deferred),
    .skipped = sums.skipped_share};
}

/// The same workload block by block in the manager, with a link that is fast.
background_figures managed(foresight_options const& options)
{
  // What each row selects in each step, its newcomers, and which of the next step's stand below the cut.
  struct drawn {
    std::vector<block_id> selected;
    std::vector<std::pair<block_id, newcomer>> fresh;
  };
  miss_generator generator{plan_load()};
  std::uint32_t const lease = 3 * (plan_budget + 1);
  // What is new was not selected for longer than slots remember, in whatever order they are given up.
  block_generator blocks{generator, prompt_blocks, lease + plan_budget};
  std::vector<drawn> all(std::size_t{plan_steps + 1} * plan_layers * plan_rows);
  auto const at = [&](std::uint32_t step, std::uint64_t layer, std::uint64_t row) -> drawn& {
    return all[(step * plan_layers + layer) * plan_rows + row];
  };
  for (std::uint32_t step = 0; step <= plan_steps; ++step) {
    generator.next_step();
    for (std::uint32_t l = 0; l < plan_layers; ++l) {
      for (std::uint32_t r = 0; r < plan_rows; ++r) {
        auto const row = static_cast<row_id>(r);
        auto const layer = static_cast<layer_id>(l);
        auto const list = blocks.select(row, layer);
        drawn& d = at(step, l, r);
        d.selected.assign(list.begin(), list.end());
        std::vector<newcomer> found(plan_budget);
        std::uint32_t const count = step == 0 ? 0 : generator.newcomers(row, layer, found);
        std::uint32_t i = 0;
        for (block_id const block : d.selected) {
          if (i == count) { break; }
          if (!std::ranges::binary_search(at(step - 1, l, r).selected, block)) {
            d.fresh.emplace_back(block, found[i++]);
          }
        }
      }
    }
  }

  sim_options machine;
  machine.kernels = {.per_operation = 1us, .per_run = 0ns, .to_device_bytes_per_s = 1e11, .to_host_bytes_per_s = 1e15};
  machine.compute = {.per_launch = 0ns, .device_bytes_per_s = 1e18, .flops_per_s = 1e18};
  refusing_backend backend{machine};
  auto const stream = backend.create_stream();
  constexpr std::uint32_t max_tokens = (prompt_blocks + plan_steps) * block_tokens;
  using manager = server<recorded_scheduler<interruptible_scheduler<>>>::manager;
  manager kv{
    backend,
    stream,
    {.layers = plan_layers, .query_heads = 1, .kv_heads = 1, .head_dim = 64, .block_tokens = block_tokens},
    {.max_rows = plan_rows,
     .max_tokens = max_tokens,
     .max_prefill_tokens = 64,
     .quota_tokens = (lease + 3) * block_tokens,
     .slots = 20'000,
     .deferred_share = static_cast<float>(options.deferred_share),
     .near_share = static_cast<float>(options.near_share),
     .background_bytes = 1U << 20U},
    {.budget_tokens = (plan_budget + 1) * block_tokens}};
  auto shares = [](row_id, layer_id, part) { return 0.0; };
  timed_engine<refusing_backend, manager, decltype(shares)> engine{
    backend, stream, kv, plan_rows, {.pass = {.per_pass = 40us, .per_row = 3us}}, shares};
  std::uint32_t step = 0;
  engine.before_enter = [&](layer_id layer, row_list list) {
    for (row_id const row : list) {
      if (kv.mode_of(row) != row_mode::sparse_offloaded) { continue; }
      drawn const& d = at(step, to_index(layer), to_index(row));
      std::span<float> const votes = kv.selector().votes(layer, row);
      std::span<float> const of_blocks = kv.selector().shares(layer, row);
      std::ranges::fill(votes, 0.0F);
      std::ranges::fill(of_blocks, 0.01F);
      for (auto const& [block, known] : d.fresh) { of_blocks[to_index(block)] = static_cast<float>(known.share); }
      for (auto const& [block, known] : at(step + 1, to_index(layer), to_index(row)).fresh) {
        votes[to_index(block)] = known.near ? 1.0F : -1.0F;
      }
      for (block_id const block : d.selected) { votes[to_index(block)] = 2.0F; }
      auto const count = static_cast<std::uint32_t>(blocks_of(kv.tokens_of(row) + 1, block_tokens));
      REQUIRE(kv.selector().import_selection(layer, lane_of(row, 0, 1), d.selected, count) == status::ok);
    }
  };
  std::vector<row_id> rows(plan_rows, none<row_id>);
  for (row_id& row : rows) {
    std::uint32_t const prompt = prompt_blocks * block_tokens;
    REQUIRE(kv.open({.prompt_tokens = prompt, .max_tokens = max_tokens}, row) == admission::admitted);
    for (std::uint32_t done = 0; done < prompt; done += std::min(64U, prompt - done)) {
      REQUIRE(engine.append(row, std::min(64U, prompt - done)) == status::ok);
    }
  }
  background_figures figures;
  for (; step < plan_steps; ++step) {
    REQUIRE(engine.step(rows, [](row_id) {}, [] {}) == status::ok);
    REQUIRE(backend.synchronize(stream) == status::ok);
    step_sample const& sample = kv.finish_sample();
    if (step < settled) { continue; }
    figures.demanded += static_cast<double>(sample.recalled_blocks);
    figures.early += static_cast<double>(sample.background_hits);
    figures.deferred += static_cast<double>(sample.deferred_blocks);
    figures.skipped += sample.skipped_share;
  }
  CHECK(kv.audit() == "");
  return figures;
}

}  // namespace

TEST_SUITE("workload")
{
  TEST_CASE("deferral: the manager leaves for later, and skips, what the simulated plan does")
  {
    foresight_options const options{.deferred_share = 0.002};
    background_figures const plan = planned(options), blocks = managed(options);
    CHECK(plan.deferred > 500);
    CHECK(plan.demanded > 100);
    CHECK(blocks.deferred == doctest::Approx(plan.deferred).epsilon(0.02));
    CHECK(blocks.skipped == doctest::Approx(plan.skipped).epsilon(0.02));
    CHECK(blocks.demanded == doctest::Approx(plan.demanded).epsilon(0.02));
  }

  TEST_CASE("blocks below the cut: as many come before they are selected as in the simulated plan")
  {
    foresight_options const options{.near_share = 0.25};
    background_figures const plan = planned(options), blocks = managed(options);
    CHECK(plan.early > 300);
    // What came for nothing may be of use some steps later, which the plan does not count.
    CHECK(blocks.early == doctest::Approx(plan.early).epsilon(0.05));
    CHECK(blocks.demanded == doctest::Approx(plan.demanded).epsilon(0.02));
    CHECK(blocks.deferred == 0.0);
  }

  TEST_CASE("laws 4, 9 and 10: random requests, failures and ends break no book, starve no row, and always drain")
  {
    std::uint64_t sampled = 0, failed = 0, late = 0, ended = 0, aborted = 0, refused = 0, deferred = 0, brought = 0;
    bool const held = check_cases(600, [&](std::vector<std::uint64_t> const& numbers) {
      setting const s = any_setting();
      server<recorded> one{s, {.scheduler = {.late_after = s.late_after}}};
      for (std::uint64_t const number : numbers) {
        if (!one.run(number)) { break; }
      }
      if (!one.finish()) { RC_FAIL(name_of(s) + ": " + one.fault); }
      sampled += one.sampled;
      failed += one.failed;
      late += one.late;
      ended += one.ended;
      aborted += one.aborted;
      refused += one.refused();
      deferred += one.deferred;
      brought += one.brought;
    });
    CHECK(held);
    MESSAGE(
      sampled, " rows sampled, ", failed, " failed, ", late, " late, ", ended, " sequences ended, ", aborted,
      " tickets given up, ", refused, " gathers refused, ", deferred, " blocks deferred, ", brought,
      " brought unasked");
    CHECK(sampled > 5000);
    CHECK(failed > 20);
    CHECK(late > 50);
    CHECK(ended > 500);
    CHECK(aborted > 200);
    CHECK(deferred > 1000);
    CHECK(brought > 1000);
  }

  TEST_CASE("law 8: a decision record of random serving replays to the same visits, and the same record")
  {
    std::uint64_t parked = 0;
    bool const held = check_cases(150, [&](std::vector<std::uint64_t> const& numbers) {
      setting s = any_setting();
      // What fails and what may be left for later follows what has arrived when: only the decisions are replayed.
      s.one_in = 0;
      s.deferred_share = 0.0F;
      s.ends = false;
      s.hurries = false;
      decision_log log{100'000, 400'000}, again{100'000, 400'000};
      server<recorded> first{s, {.scheduler = {.late_after = s.late_after}, .log = &log}};
      server<replayed> second{s, {.scheduler = {.log = &log}, .log = &again}};
      for (std::uint64_t const number : numbers) {
        bool const ran = first.run(number);
        if (!ran || !second.run(number)) { RC_FAIL(name_of(s) + ": " + first.fault + second.fault); }
      }
      RC_ASSERT(log.complete());
      RC_ASSERT(first.visits == second.visits);
      RC_ASSERT(log == again);
      RC_ASSERT(first.finish() && second.finish());
      for (seen_visit const& v : first.visits) { parked += v.which == part::landed ? 1U : 0U; }
    });
    CHECK(held);
    CHECK(parked > 1000);
  }
}
