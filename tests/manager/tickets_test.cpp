#include <pulseinfer/admission/fixed_admission.hpp>
#include <pulseinfer/backend/cpu/cpu_backend.hpp>
#include <pulseinfer/manager/offload_manager.hpp>
#include <pulseinfer/scheduler/lockstep_scheduler.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>
#include <pulseinfer/transfer/gather_scatter_engine.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <random>
#include <vector>

using namespace pulseinfer;

namespace {

using kv_manager =
  offload_manager<cpu_backend, solo_head_selector<>, gather_scatter_engine, lockstep_scheduler<>, fixed_admission>;

/// One row of 40 tokens that has turned sparse, and tensors of random numbers.
struct sparse_row {
  std::vector<float> numbers = std::vector<float>(40 * 4 * 8);
  cpu_backend backend{{.mode = cpu_mode::manual}};
  cpu_backend::stream_ref stream = backend.create_stream(stream_priority::normal);
  kv_manager kv{
    backend, stream,
    kv_geometry{
      .layers = 3,
      .query_heads = 4,
      .kv_heads = 2,
      .head_dim = 8,
      .block_tokens = 4,
      .key_type = dtype::float32,
      .value_type = dtype::float32},
    manager_options{.max_rows = 2, .max_tokens = 80, .quota_tokens = 32},
    solo_head_selector<>{.budget_tokens = 24, .sink_tokens = 4, .recent_tokens = 4}};
  tensor_view queries = contiguous_tensor(numbers.data(), dtype::float32, 40, 4, 8);
  tensor_view keys = contiguous_tensor(numbers.data(), dtype::float32, 40, 2, 8);
  row_id row{};

  sparse_row()
  {
    std::mt19937 random{3};
    std::normal_distribution<float> normal{0.0F, 1.0F};
    for (float& x : numbers) { x = normal(random); }
    REQUIRE(kv.open({.prompt_tokens = 36, .max_tokens = 80}, row) == admission::admitted);
    step_by_append(36);
    for (int i = 0; i < 4; ++i) { step_by_append(1); }
    REQUIRE(kv.mode_of(row) == row_mode::sparse_offloaded);
  }

  void begin(std::uint32_t tokens = 1)
  {
    REQUIRE(kv.begin_step(std::vector{step_row{.row = row, .tokens = tokens}}) == status::ok);
  }
  status append(std::int32_t layer) { return kv.append(layer_id{layer}, kv.rows(), keys, keys); }
  status commit(std::uint32_t accepted) { return kv.commit(std::vector{commit_row{row, accepted}}); }
  void step_by_append(std::uint32_t tokens)
  {
    begin(tokens);
    for (std::int32_t layer = 0; layer < 3; ++layer) { REQUIRE(append(layer) == status::ok); }
    REQUIRE(commit(tokens) == status::ok);
  }
};

}  // namespace

TEST_SUITE("manager")
{
  TEST_CASE("rows that go through the layers by append are committed as those of the loop are")
  {
    sparse_row r;
    std::uint32_t const before = r.kv.tokens_of(r.row);
    r.begin();
    CHECK(r.append(0) == status::ok);
    CHECK(r.append(1) == status::ok);
    CHECK(r.commit(1) == status::ok);
    CHECK(r.kv.tokens_of(r.row) == before);  // a layer is missing: the row was passed over
    CHECK(r.append(2) == status::ok);
    CHECK(r.commit(1) == status::ok);
    CHECK(r.kv.tokens_of(r.row) == before + 1);
    CHECK(r.kv.step().begin() == r.kv.step().end());  // the loop has nothing to hand out
    REQUIRE(r.kv.drain(no_deadline) == status::ok);
    CHECK(r.kv.audit() == "");
  }

  TEST_CASE("append writes the keys where the ticket's table finds them")
  {
    sparse_row r;
    r.begin();
    std::uint32_t const place = r.kv.tokens_of(r.row) % 4;
    for (std::int32_t layer = 0; layer < 3; ++layer) {
      REQUIRE(r.append(layer) == status::ok);
      ticket t;
      REQUIRE(r.kv.begin_recall(layer_id{layer}, r.kv.rows(), r.queries, r.stream, t) == status::ok);
      CHECK(r.kv.status_of(t) == status::busy);  // manual mode: nothing has run
      CHECK(!r.kv.landed(t).test(0));
      REQUIRE(r.kv.wait_on(t, r.stream) == status::ok);
      REQUIRE(r.backend.synchronize() == status::ok);
      CHECK(r.kv.status_of(t) == status::ok);
      CHECK(r.kv.landed(t).test(0));
      block_table table;
      REQUIRE(r.kv.table(t, part::whole, table) == status::ok);
      lane_id const lane = lane_of(r.row, 0, 1);
      REQUIRE(table.counts[to_index(lane)] == 6);
      auto const* const open = table.block(lane, 5) + row_offset(table.layout.key(), 1, place);
      CHECK(*reinterpret_cast<float const*>(open) == r.numbers[8]);
    }
    CHECK(r.commit(1) == status::ok);
  }

  TEST_CASE("append refuses what does not fit and changes nothing")
  {
    sparse_row r;
    CHECK(r.append(0) == status::invalid_state);  // the rows of the step before stand in none
    r.begin();
    CHECK(r.append(1) == status::invalid_state);
    CHECK(r.append(-1) == status::out_of_range);
    CHECK(r.append(3) == status::out_of_range);
    CHECK(r.kv.append(layer_id{0}, r.kv.rows(), r.queries, r.queries) == status::invalid_argument);
    CHECK(r.kv.append(layer_id{0}, r.kv.rows(), r.keys, tensor_view{}) == status::invalid_argument);
    row_id const foreign{7};
    CHECK(r.kv.append(layer_id{0}, {.ids = &foreign, .count = 1}, r.keys, r.keys) == status::out_of_range);
    CHECK(r.append(0) == status::ok);
    CHECK(r.append(0) == status::invalid_state);
    CHECK(r.append(1) == status::ok);
    CHECK(r.append(2) == status::ok);
    CHECK(r.append(2) == status::invalid_state);
    CHECK(r.commit(1) == status::ok);
  }

  TEST_CASE("the loop takes rows over that have come by append, at the next layer")
  {
    sparse_row r;
    r.begin();
    REQUIRE(r.append(0) == status::ok);
    REQUIRE(r.kv.enter(layer_id{1}, r.kv.rows(), r.keys, r.keys, r.queries) == status::ok);
    std::vector<std::int32_t> layers;
    for (visit const& v : r.kv.step()) {
      layers.push_back(to_number(v.layer));
      if (!v.last) { REQUIRE(r.kv.enter(v.next, v.rows, r.keys, r.keys, r.queries) == status::ok); }
    }
    CHECK(layers == std::vector<std::int32_t>{1, 2});
    CHECK(r.commit(1) == status::ok);
    REQUIRE(r.kv.drain(no_deadline) == status::ok);
    CHECK(r.kv.audit() == "");
  }

  TEST_CASE("drain waits for what stands on the compute stream, since it names the manager's memory")
  {
    sparse_row r;
    r.begin();
    REQUIRE(r.append(0) == status::ok);
    CHECK(r.backend.queued_tasks() > 0);
    CHECK(r.kv.drain(no_deadline) == status::ok);
    CHECK(r.backend.queued_tasks() == 0);
  }

  TEST_CASE("a ticket whose place was given out again is stale, and one given up says so")
  {
    sparse_row r;
    r.begin();
    REQUIRE(r.append(0) == status::ok);
    ticket first;
    REQUIRE(r.kv.begin_recall(layer_id{0}, r.kv.rows(), r.queries, r.stream, first) == status::ok);
    REQUIRE(r.kv.abort(first) == status::ok);
    CHECK(r.kv.status_of(first) == status::aborted);
    ticket next = first;
    for (int i = 0; i < 40 && !(next.index == first.index && next.generation != first.generation); ++i) {
      REQUIRE(r.backend.synchronize() == status::ok);
      REQUIRE(r.kv.begin_recall(layer_id{0}, r.kv.rows(), r.queries, r.stream, next) == status::ok);
    }
    REQUIRE(next.index == first.index);
    CHECK(r.kv.status_of(first) == status::stale_ticket);
    CHECK(r.kv.wait_on(first, r.stream) == status::stale_ticket);
    CHECK(r.kv.abort(first) == status::stale_ticket);
    CHECK(!r.kv.landed(first).test(0));
    REQUIRE(r.backend.synchronize() == status::ok);
    CHECK(r.kv.status_of(next) == status::ok);
  }
}
