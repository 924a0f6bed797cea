#include <doctest/doctest.h>
#include <support/manager/rig.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

constexpr std::uint32_t row_count = 6, length = 112;

rig_options options_of()
{
  return {
    .geometry = {.layers = 3, .query_heads = 4, .kv_heads = 2, .head_dim = 4, .block_tokens = 4},
    .manager = {.max_rows = row_count, .max_tokens = length, .max_prefill_tokens = 16, .quota_tokens = 32},
    .cpu = {.mode = cpu_mode::threaded},
    .per_row = 16};
}

solo_head_selector<> const six_blocks{.budget_tokens = 24, .sink_tokens = 4, .recent_tokens = 4, .dense_tokens = 24};

}  // namespace

TEST_SUITE("manager")
{
  TEST_CASE_TEMPLATE(
    "law 11: other threads close rows at any moment of the loop; the rows end, and the others read their own bytes",
    Manager, lockstep_manager, hits_manager, fragment_manager)
  {
    rig<Manager> r{options_of(), six_blocks};
    // A row whose sequence somebody may end: who takes the flag is the one who does.
    std::array<std::atomic<bool>, row_count> alive{};
    std::atomic<bool> stop = false;
    std::atomic<std::uint32_t> closed_elsewhere = 0, refused = 0;
    struct joined {
      std::atomic<bool>& stop;
      std::vector<std::thread> threads = {};
      ~joined() { end(); }
      void end()
      {
        stop = true;
        for (std::thread& thread : threads) {
          if (thread.joinable()) { thread.join(); }
        }
      }
    } closers{stop};
    for (std::uint32_t c = 0; c < 2; ++c) {
      closers.threads.emplace_back([&, c] {
        std::mt19937_64 random{c};
        while (!stop.load()) {
          std::size_t const row = random() % row_count;
          if (random() % 64 == 0 && alive[row].exchange(false)) {
            bool const ok = r.kv.close(static_cast<row_id>(row)) == status::ok;
            // Nobody else may end it a second time, whatever has come of the first.
            (ok ? closed_elsewhere : refused).fetch_add(1);
          }
          std::this_thread::yield();
        }
      });
    }
    std::vector<std::uint32_t> prompts(row_count, 0);
    std::uint64_t sequences = 0;
    std::mt19937_64 random{9};
    for (std::uint32_t step = 0; step < 400 || closed_elsewhere.load() < 20; ++step) {
      REQUIRE(step < 100000);
      row_id row{};
      auto const prompt = static_cast<std::uint32_t>(1 + random() % (length / 2));
      if (r.kv.open({.prompt_tokens = prompt, .max_tokens = length}, row) == admission::admitted) {
        // Of a sequence that ended in a step, work may be enqueued that reads the engine's tokens.
        REQUIRE(r.backend.synchronize(r.stream) == status::ok);
        r.engine.assign(row, ++sequences);
        prompts[to_index(row)] = prompt;
        REQUIRE_FALSE(alive[to_index(row)].exchange(true));
      }
      std::vector<step_row> batch;
      for (std::uint32_t i = 0; i < row_count; ++i) {
        row = static_cast<row_id>(i);
        if (!r.kv.sequences()[row].open() || r.kv.row_status(row) == status::aborted) { continue; }
        std::uint32_t const now = r.kv.tokens_of(row);
        std::uint32_t const left = prompts[i] > now ? prompts[i] - now : 0;
        std::uint32_t const count = std::min(left == 0 ? 1U : std::min(left, 16U), length - now);
        if (count != 0) {
          batch.push_back({.row = row, .tokens = count});
        } else if (alive[i].exchange(false)) {
          REQUIRE(r.kv.close(row) == status::ok);
        }
      }
      status const stepped = r.engine.step(batch);
      // A row may have ended since it was looked at.
      REQUIRE((stepped == status::ok || stepped == status::invalid_state));
      REQUIRE(r.engine.fault() == "");
      REQUIRE(r.kv.audit() == "");
    }
    closers.end();
    CHECK(refused.load() == 0);
    REQUIRE(r.kv.drain(no_deadline) == status::ok);
    for (std::uint32_t i = 0; i < row_count; ++i) {
      CHECK(r.kv.sequences()[static_cast<row_id>(i)].open() == alive[i].load());
    }
    r.close_all();
  }

  TEST_CASE_TEMPLATE(
    "law 11: other threads abort tickets while the loop goes on, those of another generation included", Manager,
    lockstep_manager, fragment_manager)
  {
    rig<Manager> r{options_of(), six_blocks};
    row_id const row = r.open(1, 40, length);
    r.engine.prefill(row, 40, 16);
    std::atomic<std::uint64_t> latest = 0;
    std::atomic<bool> stop = false;
    std::atomic<std::uint32_t> given_up = 0;
    std::thread other{[&] {
      while (!stop.load()) {
        std::uint64_t const word = latest.load();
        ticket const t{
          .index = static_cast<std::uint32_t>(word), .generation = static_cast<std::uint32_t>(word >> 32U)};
        if (r.kv.abort(t) == status::ok) { given_up.fetch_add(1); }
        CHECK(r.kv.abort({.index = t.index, .generation = t.generation + 1000}) == status::stale_ticket);
        std::this_thread::yield();
      }
    }};
    for (std::uint32_t step = 0; step < 60; ++step) {
      step_row const one{.row = row};
      REQUIRE(r.engine.begin({&one, 1}) == status::ok);
      for (std::uint32_t l = 0; l < 3; ++l) {
        auto const layer = static_cast<layer_id>(l);
        REQUIRE(r.backend.synchronize(r.stream) == status::ok);
        r.engine.fill(layer, r.kv.rows());
        REQUIRE(r.kv.append(layer, r.kv.rows(), r.engine.key_view(), r.engine.value_view()) == status::ok);
        ticket t;
        REQUIRE(r.kv.begin_recall(layer, r.kv.rows(), r.engine.query_view(), r.stream, t) == status::ok);
        latest = std::uint64_t{t.generation} << 32U | t.index;
        REQUIRE(r.kv.wait_on(t, r.stream) == status::ok);
        status const said = r.kv.status_of(t);
        CHECK((said == status::ok || said == status::busy || said == status::aborted));
      }
      REQUIRE(r.backend.synchronize(r.stream) == status::ok);
      commit_row const kept{.row = row};
      REQUIRE(r.kv.commit({&kept, 1}) == status::ok);
      r.engine.row(row).in_step = false;
    }
    stop = true;
    other.join();
    CHECK(given_up.load() > 0);
    CHECK(r.kv.abort({.index = 0, .generation = 0}) == status::stale_ticket);
    CHECK(r.kv.abort({.index = 1U << 30U, .generation = 1}) == status::stale_ticket);
    r.close_all();
  }
}
