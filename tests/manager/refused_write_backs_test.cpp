#include <doctest/doctest.h>
#include <support/manager/rig.hpp>

#include <cstdint>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

/// A CPU backend that refuses copies to the host when told to.
class refusing_backend : public cpu_backend {
 public:
  using cpu_backend::cpu_backend;

  status copy(stream_ref stream, copy_list runs, observation* observed = nullptr) noexcept
  {
    if (runs.direction == copy_direction::device_to_host && to_refuse != 0) {
      --to_refuse;
      ++refused;
      return status::busy;
    }
    return cpu_backend::copy(stream, runs, observed);
  }

  std::uint32_t to_refuse = 0;  ///< calls that are still to be refused
  std::uint32_t refused = 0;
};

static_assert(backend<refusing_backend>);

using refused_manager = offload_manager<
  refusing_backend, solo_head_selector<>, gather_scatter_engine, lockstep_scheduler<visit_order::whole>,
  fixed_admission>;

rig_options options_of(std::uint64_t seed)
{
  return {
    .geometry = {.layers = 2, .query_heads = 2, .kv_heads = 1, .head_dim = 4, .block_tokens = 2},
    .manager = {.max_rows = 2, .max_tokens = 100, .max_prefill_tokens = 8, .quota_tokens = 16},
    .cpu = {.mode = cpu_mode::manual, .seed = seed},
    .per_row = 8};
}

solo_head_selector<> const six_blocks{.budget_tokens = 12, .sink_tokens = 2, .recent_tokens = 2, .dense_tokens = 12};

}  // namespace

TEST_SUITE("manager")
{
  // Report: vllm-project/vllm#49176
  TEST_CASE("law 10: a write-back that is refused once is tried again, and nothing behind it counts before")
  {
    for (std::uint64_t const seed : {0U, 1U, 2U, 3U, 4U, 5U}) {
      rig<refused_manager> r{options_of(seed), six_blocks};
      row_id const a = r.open(1, 20, 100), b = r.open(2, 9, 100);
      for (int step = 0; step < 70; ++step) {
        // Every few steps the next copy call is refused; often others are under way before and behind it.
        if (step % 4 == static_cast<int>(seed % 4)) { r.backend.to_refuse = 1; }
        std::vector<step_row> batch;
        for (row_id const row : {a, b}) {
          std::uint32_t const now = r.kv.tokens_of(row), prompt = row == a ? 20 : 9;
          batch.push_back({.row = row, .tokens = now < prompt ? std::min(3U, prompt - now) : 1});
        }
        REQUIRE(r.engine.step(std::span<step_row const>{batch}) == status::ok);
        REQUIRE(r.engine.fault() == "");
        REQUIRE(r.kv.audit() == "");
      }
      CHECK(r.backend.refused > 10);
      r.close_all();
    }
  }

  TEST_CASE("law 10: a row whose blocks cannot be written says so, keeps its tokens, and the others go on")
  {
    rig<refused_manager> r{options_of(0), six_blocks};
    row_id const a = r.open(1, 20, 100), b = r.open(2, 4, 12);
    r.engine.prefill(a, 20, 8);
    r.engine.prefill(b, 4, 4);
    for (int step = 0; step < 4; ++step) { r.step({{.row = a}}); }
    REQUIRE(r.kv.mode_of(a) == row_mode::sparse_offloaded);
    r.backend.to_refuse = ~0U;
    status begun = status::ok;
    std::uint32_t tokens = 0;
    for (int step = 0; step < 20 && begun == status::ok; ++step) {
      tokens = r.kv.tokens_of(a);
      begun = r.engine.step({{.row = b}, {.row = a}});
      if (r.kv.tokens_of(b) == 12) { break; }
    }
    CHECK(begun == status::transfer_failed);
    CHECK(r.kv.row_status(a) == status::transfer_failed);
    CHECK(r.kv.tokens_of(a) == tokens);
    for (row_id const row : {a, b}) {
      CHECK(r.kv.sequences()[row].pending == 0);
      CHECK_FALSE(r.kv.is_late(row));
    }
    CHECK(r.kv.audit() == "");
    CHECK(r.backend.refused < 20);  // two tries, not for ever
    CHECK(r.engine.step({{.row = a}}) == status::transfer_failed);
    // The step that could not begin has left nothing behind: row b is not stuck in a trial.
    r.step({{.row = b}});
    REQUIRE(r.kv.close(a) == status::ok);
    r.backend.to_refuse = 0;
    row_id const next = r.open(3, 20, 100);
    r.engine.prefill(next, 20, 8);
    for (int step = 0; step < 40; ++step) { r.step({{.row = next}}); }
    r.close_all();
  }
}
