#include <doctest/doctest.h>
#include <support/allocations.hpp>
#include <support/manager/mixed_batch.hpp>

#include <cstdint>
#include <span>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

template <class Manager>
constexpr bool step_path_is_noexcept()
{
  return requires(
    Manager& kv, std::span<step_row const> rows, std::span<commit_row const> kept, row_list list, tensor_view tensor,
    typename Manager::stream_ref stream, ticket given, visit v, block_table table) {
    requires noexcept(kv.begin_step(rows));
    requires noexcept(kv.enter(layer_id{0}, list, tensor, tensor, tensor));
    requires noexcept(kv.append(layer_id{0}, list, tensor, tensor));
    requires noexcept(kv.step());
    requires noexcept(kv.step().begin());
    requires noexcept(++kv.step().begin());
    requires noexcept(kv.warm_up(layer_id{0}, list, tensor));
    requires noexcept(kv.begin_recall(layer_id{0}, list, tensor, stream, given));
    requires noexcept(kv.landed(given));
    requires noexcept(kv.status_of(given));
    requires noexcept(kv.wait_on(given, stream));
    requires noexcept(kv.abort(given));
    requires noexcept(kv.table(given, part::whole, table));
    requires noexcept(kv.stream_blocks(layer_id{0}, row_id{0}));
    requires noexcept(kv.stream_blocks(layer_id{0}, row_id{0}).begin());
    requires noexcept(++kv.stream_blocks(layer_id{0}, row_id{0}).begin());
    requires noexcept(kv.stream_blocks(layer_id{0}, row_id{0}).status());
    requires noexcept(kv.commit(kept));
  };
}

}  // namespace

TEST_SUITE("manager")
{
  TEST_CASE_TEMPLATE(
    "law 7: a hundred steps of a mixed batch allocate nothing and cannot throw", Manager, lockstep_manager,
    hits_manager, fragment_manager)
  {
    static_assert(step_path_is_noexcept<Manager>());
    for (cpu_mode const mode : {cpu_mode::manual, cpu_mode::threaded}) {
      rig<Manager> r{mixed_batch::options({.mode = mode}), mixed_batch::selector()};
      mixed_batch batch{r};
      std::uint64_t const before = allocations();
      CHECK(before > 0);  // they are counted
      status worst = status::ok;
      for (std::uint32_t step = 0; step < mixed_batch::steps; ++step) {
        status const begun = batch.step(r, step);
        if (begun != status::ok) { worst = begun; }
      }
      CHECK(allocations() == before);
      CHECK(worst == status::ok);
      CHECK(r.engine.fault() == "");
      CHECK(r.kv.mode_of(batch.ids[0]) == row_mode::sparse_offloaded);
      CHECK(r.kv.mode_of(batch.ids[3]) == row_mode::dense_resident);
      r.close_all();
    }
  }

  TEST_CASE_TEMPLATE(
    "law 7: prompts that stream in allocate nothing, and neither does turning sparse behind them", Manager,
    lockstep_manager, hits_manager, fragment_manager)
  {
    for (cpu_mode const mode : {cpu_mode::manual, cpu_mode::threaded}) {
      rig_options options = mixed_batch::options({.mode = mode});
      options.manager.stream_tokens = 10;
      rig<Manager> r{options, mixed_batch::selector()};
      std::vector<row_id> rows;
      for (std::uint32_t i = 0; i < 3; ++i) { rows.push_back(r.open(i + 1, 60 + 25 * i, 150, i != 1)); }
      std::vector<step_row> batch;
      batch.reserve(rows.size());
      std::uint64_t const before = allocations();
      status worst = status::ok;
      for (std::uint32_t step = 0; step < 40; ++step) {
        batch.clear();
        for (std::uint32_t i = 0; i < 3; ++i) {
          std::uint32_t const now = r.kv.tokens_of(rows[i]), prompt = 60 + 25 * i;
          batch.push_back({.row = rows[i], .tokens = now < prompt ? std::min(8U, prompt - now) : 1});
        }
        status const begun = r.engine.step(std::span<step_row const>{batch});
        if (begun != status::ok) { worst = begun; }
      }
      CHECK(allocations() == before);
      CHECK(worst == status::ok);
      CHECK(r.engine.fault() == "");
      CHECK(r.engine.parts > 100);
      for (row_id const row : rows) { CHECK(r.kv.mode_of(row) == row_mode::sparse_offloaded); }
      r.close_all();
    }
  }

  TEST_CASE("law 7: opening, closing, tickets and polling allocate nothing either")
  {
    rig<fragment_manager> r{mixed_batch::options({.mode = cpu_mode::manual}), mixed_batch::selector()};
    row_id const row = r.open(1, 40, 100);
    r.engine.prefill(row, 40, 8);
    r.step({{.row = row}});
    std::uint64_t const before = allocations();
    bool sound = true;
    for (int i = 0; i < 20; ++i) {
      row_id other{};
      sound = sound && r.kv.open({.prompt_tokens = 10, .max_tokens = 100}, other) == admission::admitted;
      step_row const step{.row = row};
      sound = sound && r.kv.begin_step({&step, 1}) == status::ok;
      ticket given;
      for (std::uint32_t l = 0; l < 3; ++l) {
        auto const layer = static_cast<layer_id>(l);
        sound = sound && r.kv.append(layer, r.kv.rows(), r.engine.key_view(), r.engine.value_view()) == status::ok;
        sound = sound && r.kv.begin_recall(layer, r.kv.rows(), r.engine.query_view(), r.stream, given) == status::ok;
        sound = sound && r.kv.wait_on(given, r.stream) == status::ok;
        block_table table;
        sound = sound && r.kv.table(given, part::whole, table) == status::ok;
        sound = sound && r.backend.synchronize(r.stream) == status::ok;
        sound = sound && r.kv.status_of(given) == status::ok && r.kv.landed(given).test(0);
      }
      commit_row const kept{.row = row, .accepted = 1};
      sound = sound && r.kv.commit({&kept, 1}) == status::ok;
      r.kv.poll();
      r.kv.finish_sample();
      sound = sound && r.kv.close(other) == status::ok;
    }
    CHECK(allocations() == before);
    CHECK(sound);
  }
}
