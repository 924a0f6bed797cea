#include <doctest/doctest.h>
#include <support/manager/mixed_batch.hpp>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

/// What a refused call must not change.
struct state {
  std::vector<std::uint32_t> numbers;

  explicit state(lockstep_manager& kv)
  {
    for (std::uint32_t r = 0; r < kv.sequences().rows(); ++r) {
      sequence_state const& s = kv.sequences()[static_cast<row_id>(r)];
      numbers.insert(
        numbers.end(),
        {s.open() ? 1U : 0U, s.tokens, s.pending, s.sealed, kv.is_late(static_cast<row_id>(r)) ? 1U : 0U});
    }
    memory_use const m = kv.memory();
    for (std::uint64_t const bytes : {m.slot_bytes, m.digest_bytes, m.host_bytes}) {
      numbers.push_back(static_cast<std::uint32_t>(bytes));
    }
  }
  friend bool operator==(state const&, state const&) = default;
};

struct wrong_call {
  char const* what;
  status said;
  std::function<status()> call;
};

void check(lockstep_manager& kv, cpu_backend& backend, std::vector<wrong_call> const& table)
{
  for (wrong_call const& wrong : table) {
    CAPTURE(wrong.what);
    state const before{kv};
    std::uint64_t const queued = backend.queued_tasks();
    CHECK(wrong.call() == wrong.said);
    CHECK(state{kv} == before);
    CHECK(backend.queued_tasks() == queued);
    CHECK(kv.audit() == "");
  }
}

}  // namespace

TEST_SUITE("manager")
{
  TEST_CASE("each wrong call says what is wrong and changes nothing")
  {
    rig<lockstep_manager> r{mixed_batch::options({.mode = cpu_mode::manual}), mixed_batch::selector()};
    row_id const a = r.open(1, 40, 100), b = r.open(2, 4, 60), shut = r.open(3, 4, 60);
    r.engine.prefill(a, 40, 8);
    r.engine.prefill(b, 4, 8);
    r.step({{.row = a}, {.row = b}});
    REQUIRE(r.kv.close(shut) == status::ok);
    REQUIRE(r.kv.drain(no_deadline) == status::ok);
    auto const begin = [&](std::vector<step_row> rows) { return [&r, rows] { return r.kv.begin_step(rows); }; };
    auto const commit = [&](std::vector<commit_row> rows) { return [&r, rows] { return r.kv.commit(rows); }; };
    row_id const outside{6};

    // Between steps.
    check(
      r.kv, r.backend,
      {{"a row that is none", status::out_of_range, begin({{.row = none<row_id>}})},
       {"a row past the last", status::out_of_range, begin({{.row = a}, {.row = outside}})},
       {"more rows than there are", status::out_of_range, begin(std::vector<step_row>(7, step_row{.row = a}))},
       {"a row without a sequence", status::invalid_state, begin({{.row = a}, {.row = shut}})},
       {"a row named twice", status::invalid_state, begin({{.row = a}, {.row = b}, {.row = a}})},
       {"no tokens", status::invalid_argument, begin({{.row = a, .tokens = 0}})},
       {"more tokens than a decoding row appends", status::invalid_argument,
        begin({{.row = b}, {.row = a, .tokens = 2}})},
       {"commit of a row past the last", status::out_of_range, commit({{.row = a}, {.row = outside}})},
       {"close of a row that is none", status::out_of_range, [&] { return r.kv.close(none<row_id>); }},
       {"close of a row past the last", status::out_of_range, [&] { return r.kv.close(outside); }},
       {"close of a closed row", status::invalid_state, [&] { return r.kv.close(shut); }},
       {"entering without a step", status::invalid_state,
        [&] {
          row_list const rows{.ids = &a, .count = 1};
          return r.kv.enter(layer_id{0}, rows, r.engine.key_view(), r.engine.value_view(), r.engine.query_view());
        }},
       {"warming up without a step", status::invalid_state, [&] {
          row_list const rows{.ids = &a, .count = 1};
          return r.kv.warm_up(layer_id{0}, rows, r.engine.query_view());
        }}});

    // Within one.
    std::vector<step_row> const step{{.row = a, .token_offset = 0}, {.row = b, .token_offset = 8}};
    REQUIRE(r.kv.begin_step(step) == status::ok);
    REQUIRE(r.backend.synchronize(r.stream) == status::ok);
    tensor_view const keys = r.engine.key_view(), values = r.engine.value_view(), queries = r.engine.query_view();
    auto const with = [](tensor_view tensor, auto change) {
      change(tensor);
      return tensor;
    };
    auto const enter = [&](tensor_view k, tensor_view v, tensor_view q, layer_id layer = layer_id{0}) {
      return [&r, layer, k, v, q] { return r.kv.enter(layer, r.kv.rows(), k, v, q); };
    };
    row_list const just_shut{.ids = &shut, .count = 1}, just_outside{.ids = &outside, .count = 1};
    ticket given;
    std::vector<wrong_call> table{
      {"begin_step of rows in a step", status::invalid_state, begin({{.row = a}})},
      {"an unknown layer", status::out_of_range, enter(keys, values, queries, layer_id{3})},
      {"no layer", status::out_of_range, enter(keys, values, queries, none<layer_id>)},
      {"a layer that is not due", status::invalid_state, enter(keys, values, queries, layer_id{1})},
      {"a row without a sequence", status::invalid_state,
       [&] { return r.kv.enter(layer_id{0}, just_shut, keys, values, queries); }},
      {"a row past the last", status::out_of_range,
       [&] { return r.kv.enter(layer_id{0}, just_outside, keys, values, queries); }},
      {"warm_up of an unknown layer", status::out_of_range,
       [&] { return r.kv.warm_up(layer_id{9}, r.kv.rows(), queries); }},
      {"warm_up of a row past the last", status::out_of_range,
       [&] { return r.kv.warm_up(layer_id{0}, just_outside, queries); }},
      {"warm_up without queries", status::invalid_argument,
       [&] { return r.kv.warm_up(layer_id{0}, r.kv.rows(), tensor_view{}); }},
      {"begin_recall of an unknown layer", status::out_of_range,
       [&] { return r.kv.begin_recall(layer_id{-1}, r.kv.rows(), queries, r.stream, given); }},
      {"begin_recall of a row past the last", status::out_of_range,
       [&] { return r.kv.begin_recall(layer_id{0}, just_outside, queries, r.stream, given); }},
      {"begin_recall of a row without a sequence", status::invalid_state,
       [&] { return r.kv.begin_recall(layer_id{0}, just_shut, queries, r.stream, given); }},
      {"a ticket that never was", status::stale_ticket, [&] { return r.kv.status_of({.index = 3, .generation = 99}); }},
      {"no queries", status::invalid_argument, enter(keys, values, {})},
      {"keys alone", status::invalid_argument, enter(keys, {}, queries)},
      {"values alone", status::invalid_argument, enter({}, values, queries)}};
    auto const reshaped = [&](char const* what, auto change) {
      table.push_back({what, status::invalid_argument, enter(with(keys, change), values, queries)});
      table.push_back({what, status::invalid_argument, enter(keys, with(values, change), queries)});
      table.push_back({what, status::invalid_argument, enter(keys, values, with(queries, change))});
    };
    reshaped("one head more", [](tensor_view& t) { ++t.heads; });
    reshaped("one head less", [](tensor_view& t) { --t.heads; });
    reshaped("rows of another length", [](tensor_view& t) { t.dim *= 2; });
    reshaped("opaque bytes", [](tensor_view& t) { t.type = dtype::bytes; });
    reshaped("too few tokens for the last row", [](tensor_view& t) { t.tokens = 8; });
    check(r.kv, r.backend, table);
    CHECK_FALSE(r.kv.landed({.index = 0, .generation = 99}).test(0));

    // The step goes on as if nothing had been asked.
    for (step_row const& s : step) {
      auto& row = r.engine.row(s.row);
      row.begin = r.kv.tokens_of(s.row);
      row.count = 1;
      row.in_step = true;
      ++row.version[row.begin];
    }
    r.engine.enter(layer_id{0}, r.kv.rows());
    for (visit const& v : r.kv.step()) { r.engine.take(v); }
    check(
      r.kv, r.backend,
      {{"more accepted than appended", status::invalid_argument,
        commit({{.row = b, .accepted = 1}, {.row = a, .accepted = 2}})}});
    r.engine.commit();
    REQUIRE(r.engine.fault() == "");
    CHECK(r.kv.tokens_of(a) == 42);
    CHECK(r.kv.tokens_of(b) == 6);

    // A sequence at its end takes nothing more.
    while (r.kv.tokens_of(b) < 60) { r.step({{.row = b}}); }
    check(r.kv, r.backend, {{"past the sequence's end", status::capacity_exceeded, begin({{.row = a}, {.row = b}})}});
    r.close_all();
  }

  TEST_CASE("requests that no manager of this size can take are rejected, with the numbers")
  {
    rig<lockstep_manager> r{mixed_batch::options({.mode = cpu_mode::manual}), mixed_batch::selector()};
    for (sequence_options const request :
         {sequence_options{0, 0}, sequence_options{0, 201}, sequence_options{50, 49}, sequence_options{0, ~0U}}) {
      row_id row{};
      CHECK(r.kv.open(request, row) == admission::rejected);
      CHECK(is_none(row));
      CHECK(r.kv.explain_refusal(request).find("built for 1 to 200") != std::string::npos);
    }
    std::vector<row_id> rows;
    for (std::uint32_t i = 0; i < mixed_batch::rows; ++i) { rows.push_back(r.open(i, 4, 20)); }
    row_id row{};
    CHECK(r.kv.open({.prompt_tokens = 4, .max_tokens = 20}, row) == admission::queued);
    CHECK(r.kv.explain_refusal({.prompt_tokens = 4, .max_tokens = 20}).find("6 of 6 run") != std::string::npos);
    r.close_all();
  }
}
