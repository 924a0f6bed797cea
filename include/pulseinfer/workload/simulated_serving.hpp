#pragma once

/// Serves requests that come and end on a counts_backend, under the very manager of the other backends and any admission policy.

#include <pulseinfer/backend/sim/counts_backend.hpp>
#include <pulseinfer/concepts/admission_policy.hpp>
#include <pulseinfer/concepts/layer_scheduler.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/manager/offload_manager.hpp>
#include <pulseinfer/transfer/gather_scatter_engine.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/workload/arrivals.hpp>
#include <pulseinfer/workload/counted_workload.hpp>
#include <pulseinfer/workload/miss_generator.hpp>
#include <pulseinfer/workload/simulated_decode.hpp>
#include <pulseinfer/workload/timed_engine.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace pulseinfer {

/// A load and the machine that serves it. Prompts are computed elsewhere: one comes in within a step of its own that takes the
/// device no time, is written back as any other, and its row decodes `join_steps` steps later.
struct serving_options {
  decode_options decode = {};                  ///< workload.rows: most rows at once; steps and foresight are not used
  std::vector<request_arrival> requests = {};  ///< in the order of their arrival
  nanoseconds end{std::chrono::hours{1}};      ///< nothing begins after it
  std::uint32_t max_steps = 0xFFFFFFFFU;
  std::uint32_t join_steps = 0;
  std::uint32_t quota_blocks = 0;      ///< of a lane; 0: three budgets
  std::uint32_t max_quota_blocks = 0;  ///< as manager_options::max_quota_tokens
  /// As sequence_options. With it, or with max_quota_blocks, blocks' bytes exist: let small blocks stand for large ones, on links
  /// that are as much slower.
  bool place_freely = false;
  std::uint64_t slots = 0;           ///< as in manager_options
  std::uint64_t host_blocks = 0;     ///< likewise
  std::uint32_t digest_extents = 0;  ///< likewise
  std::uint64_t digest_bytes = 0;    ///< of a block's digest in a layer
  /// What is added to the logit of a request's misses, by its number, where requests are not alike.
  std::function<double(std::uint64_t)> extra_logit = {};
};

struct served_step {
  nanoseconds end{0};
  nanoseconds time{0};          ///< since the step before ended, or since the first request of an idle system came
  std::uint32_t rows = 0;       ///< that were sampled
  std::uint32_t strangers = 0;  ///< of them, those with an extra logit
  std::uint32_t offloaded = 0;  ///< of them, those that recall
  std::uint32_t waiting = 0;    ///< requests that stand in the queue
  std::uint64_t recalled_blocks = 0;
  std::uint32_t limit = 0;  ///< rows that the policy would let run, where it says so; else 0
};

struct serving_result {
  std::vector<served_step> steps = {};
  std::vector<nanoseconds> waits = {};  ///< of each request that began, from its arrival
  std::uint64_t tokens = 0;
  std::uint64_t finished = 0;
  std::uint64_t rejected = 0;
  std::uint64_t visits = 0;  ///< of a row at a layer
  std::uint64_t thrash_steps = 0;
  std::uint64_t launches = 0;  ///< visits that were launched
  std::uint64_t recalled_blocks = 0;
  std::uint32_t most_rows = 0;
  std::string refusal = {};  ///< what the manager said of a request that waited while the most rows ran

  /// Tokens a second of the steps that ended in [from, to).
  [[nodiscard]] double tokens_per_second(nanoseconds from, nanoseconds to) const
  {
    double tokens_in = 0.0, time = 0.0;
    for (served_step const& s : steps) {
      if (s.end < from || s.end >= to) { continue; }
      tokens_in += s.rows;
      time += static_cast<double>(s.time.count()) * 1e-9;
    }
    return time > 0.0 ? tokens_in / time : 0.0;
  }

  /// Share of the tokens of steps that ended in [from, to) that took longer than `target`.
  [[nodiscard]] double missed_share(nanoseconds target, nanoseconds from, nanoseconds to) const
  {
    double all = 0.0, missed = 0.0;
    for (served_step const& s : steps) {
      if (s.end < from || s.end >= to) { continue; }
      all += s.rows;
      missed += s.time > target ? s.rows : 0.0;
    }
    return all > 0.0 ? missed / all : 0.0;
  }
};

/// @throws configuration_error; error where the manager refuses a step
template <layer_scheduler Scheduler, admission_policy Admission>
[[nodiscard]] serving_result simulate_serving(
  serving_options const& options, Scheduler const& scheduler, Admission const& admits)
{
  using manager = offload_manager<counts_backend, counted_selector, gather_scatter_engine, Scheduler, Admission>;
  decode_options const& decode = options.decode;
  std::uint32_t const rows = decode.workload.rows;
  std::uint32_t const budget = decode.workload.budget_blocks;
  constexpr std::uint32_t block_tokens = 16;
  auto const check = [](status s, char const* call) {
    if (s != status::ok) { throw error{s, call}; }
  };
  miss_generator generator{decode.workload};
  counted_workload workload{generator, {}};
  auto shares = [&workload](row_id row, layer_id layer, part which) { return workload.attend(row, layer, which); };

  // What a promotion reads of the device's books must move, and with it the blocks that it brings.
  bool const balances = options.place_freely || options.max_quota_blocks != 0;
  sim_options machine = decode.machine;
  machine.move_data = balances;
  machine.queue_depth = std::max(machine.queue_depth, 4096U + 4 * rows * decode.workload.layers);
  counts_backend backend{machine, decode.counts, workload};
  auto const stream = backend.create_stream();
  kv_geometry const geometry{
    .layers = decode.workload.layers,
    .query_heads = 1,
    .kv_heads = 1,
    .head_dim = static_cast<std::uint32_t>(decode.block_bytes / (4 * block_tokens)),
    .block_tokens = block_tokens};
  std::uint32_t longest = 1, longest_prompt = 1;
  for (request_arrival const& r : options.requests) {
    longest = std::max(longest, std::max(r.prompt_tokens, 1U) + r.output_tokens);
    longest_prompt = std::max(longest_prompt, r.prompt_tokens);
  }
  manager_options const sizes{
    .max_rows = rows,
    .max_tokens = longest,
    .max_prefill_tokens = longest_prompt,
    .quota_tokens = (options.quota_blocks == 0 ? 3 * budget : options.quota_blocks) * block_tokens,
    .max_quota_tokens = options.max_quota_blocks * block_tokens,
    .slots = options.slots,
    .host_blocks = options.host_blocks,
    .digest_extents = options.digest_extents,
    .recalls = std::min(2 * rows + 16, 64U)};

  struct running_request {
    row_id row = none<row_id>;
    std::uint64_t number = 0;
    std::uint32_t left = 0;
    std::uint64_t joins = 0;  // in this step
  };
  serving_result result;
  nanoseconds ended_at{-1};
  nanoseconds* const ended_place = &ended_at;
  {
    manager kv{
      backend,
      stream,
      geometry,
      sizes,
      counted_selector{budget, options.digest_bytes},
      gather_scatter_engine{.rows_per_landing = decode.rows_per_landing},
      scheduler,
      admits};
    engine_cost cost = decode.engine;
    cost.pass.per_pass -= decode.counts.select_chain;
    timed_engine<counts_backend, manager, decltype(shares)> engine{backend, stream, kv, rows, cost, shares};
    std::deque<std::uint64_t> queue;
    std::vector<running_request> running;
    std::vector<row_id> list;
    std::uint64_t next = 0;
    std::size_t refused_at = 0;
    nanoseconds last_end{0};
    auto const stranger = [&](std::uint64_t number) { return options.extra_logit ? options.extra_logit(number) : 0.0; };
    auto const options_of = [&](std::uint64_t number) {
      request_arrival const& r = options.requests[number];
      std::uint32_t const prompt = std::max(r.prompt_tokens, 1U);
      return sequence_options{
        .prompt_tokens = prompt, .max_tokens = prompt + r.output_tokens, .place_freely = options.place_freely};
    };
    // A row's misses follow the slots that it has.
    auto const follow_slots = [&](row_id row) {
      if (!balances) { return; }
      workload.set_resident(row, kv.mode_of(row) == row_mode::sparse_resident);
      for (std::uint32_t l = 0; l < decode.workload.layers; ++l) {
        auto const layer = static_cast<layer_id>(l);
        std::uint32_t const slots = kv.leased_slots(row, layer);
        if (slots != 0) { generator.set_hot(row, layer, static_cast<double>(slots) / budget); }
      }
    };
    auto const* const follow = &follow_slots;
    auto const let_in = [&](std::uint64_t number) {
      request_arrival const& r = options.requests[number];
      std::uint32_t const prompt = std::max(r.prompt_tokens, 1U);
      sequence_options const wanted = options_of(number);
      row_id row = none<row_id>;
      admission const said = kv.open(wanted, row);
      if (said == admission::queued && running.size() >= refused_at) {
        refused_at = running.size();
        result.refusal = kv.explain_refusal(wanted);
      }
      if (said != admission::admitted) { return said; }
      generator.begin_request(row, number, stranger(number));
      engine.set_cost({});
      check(engine.append(row, prompt), "simulate_serving: a prompt");
      engine.set_cost(cost);
      running.push_back({row, number, r.output_tokens, result.steps.size() + options.join_steps});
      result.waits.push_back(backend.now() - r.at);
      return said;
    };
    while (result.steps.size() < options.max_steps && backend.now() < options.end) {
      while (next < options.requests.size() && options.requests[next].at <= backend.now()) { queue.push_back(next++); }
      if (balances) {
        sequence_options const first = queue.empty() ? sequence_options{} : options_of(queue.front());
        check(kv.balance(queue.empty() ? nullptr : &first), "simulate_serving: balance");
      }
      while (!queue.empty()) {
        admission const said = let_in(queue.front());
        if (said == admission::queued) { break; }
        result.rejected += said == admission::rejected ? 1U : 0U;
        queue.pop_front();
      }
      if (running.empty()) {
        if (next == options.requests.size()) { break; }
        if (options.requests[next].at > backend.now()) { backend.advance(options.requests[next].at - backend.now()); }
        check(backend.synchronize(stream), "simulate_serving: the end of a burst");
        last_end = backend.now();
        continue;
      }
      list.clear();
      std::uint32_t strangers = 0;
      for (running_request& r : running) {
        // Nothing else to do: it need not wait for its turn.
        if (r.joins > result.steps.size() && !(list.empty() && &r == &running.back())) { continue; }
        r.joins = 0;
        list.push_back(r.row);
        strangers += stranger(r.number) != 0.0 ? 1U : 0U;
      }
      check(
        engine.step(
          list,
          [&workload, follow](row_id row) {
            (*follow)(row);
            workload.begin_step(row);
          },
          [&backend, ended_place] { *ended_place = backend.now(); }),
        "simulate_serving: a step");
      // Sampling reads what the step computed: the host is behind its end when the next one begins.
      check(backend.synchronize(stream), "simulate_serving: a step's end");
      step_sample const& sample = kv.finish_sample();
      result.steps.push_back(
        {.end = ended_at,
         .time = ended_at - last_end,
         .rows = static_cast<std::uint32_t>(list.size()),
         .strangers = strangers,
         .offloaded = sample.offloaded_rows,
         .waiting = static_cast<std::uint32_t>(queue.size()),
         .recalled_blocks = sample.recalled_blocks});
      if constexpr (requires { kv.admission_policy_state().limit(); }) {
        result.steps.back().limit = kv.admission_policy_state().limit();
      }
      last_end = ended_at;
      result.tokens += list.size();
      result.visits += list.size() * decode.workload.layers;
      result.thrash_steps += sample.thrash_steps;
      result.launches += sample.visits;
      result.recalled_blocks += sample.recalled_blocks;
      result.most_rows = std::max(result.most_rows, static_cast<std::uint32_t>(list.size()));
      std::erase_if(running, [&](running_request& r) {
        if (r.joins != 0 || kv.is_late(r.row) || --r.left != 0) { return false; }
        check(kv.close(r.row), "simulate_serving: a request's end");
        ++result.finished;
        return true;
      });
    }
    check(backend.synchronize(stream), "simulate_serving: the end");
  }
  return result;
}

}  // namespace pulseinfer
