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
    for (std::uint32_t r = 0; r < kv.sequences().rows(); ++r) {
      auto const row = static_cast<row_id>(r);
      numbers.insert(
        numbers.end(),
        {kv.tokens_of(row), static_cast<std::uint32_t>(kv.mode_of(row)),
         static_cast<std::uint32_t>(kv.row_status(row))});
    }
    memory_use const m = kv.memory();
    for (std::uint64_t const bytes : {m.slot_bytes, m.digest_bytes, m.host_bytes, m.book_bytes}) {
      numbers.push_back(static_cast<std::uint32_t>(bytes));
    }
    block_counts const host = kv.store().counts();
    numbers.insert(numbers.end(), {host.free, host.held, host.in_flight, kv.store().reserved(), kv.rows().count});
  }
  friend bool operator==(state const&, state const&) = default;
};

struct wrong_call {
  char const* what;
  status said;
  std::function<status()> call;
};

/// A request that is not let in.
struct wrong_request {
  char const* what;
  admission said;
  std::function<admission(row_id& row)> call;
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

void check(lockstep_manager& kv, cpu_backend& backend, std::vector<wrong_request> const& table)
{
  for (wrong_request const& wrong : table) {
    CAPTURE(wrong.what);
    state const before{kv};
    std::uint64_t const queued = backend.queued_tasks();
    row_id row{1};
    CHECK(wrong.call(row) == wrong.said);
    CHECK(is_none(row));
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
    reshaped("a first row inside an element", [](tensor_view& t) { t.data += 1; });
    reshaped("tokens that lie no whole elements apart", [](tensor_view& t) { t.token_stride += 2; });
    reshaped("heads that lie no whole elements apart", [](tensor_view& t) { t.head_stride += 3; });
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
    CHECK(r.kv.explain_refusal({}) == "asks for nothing: max_tokens is 0; the manager is built for 1 to 200");
    CHECK(r.kv.explain_refusal({0, 201}).starts_with("is too long: max_tokens is 201;"));
    CHECK(r.kv.explain_refusal({50, 49}).starts_with("has 50 prompt_tokens, which are more than its max_tokens, 49;"));
    CHECK(r.kv.explain_refusal({4, 20}).starts_with("lacks nothing: it needs a row (0 of 6 run)"));
    std::vector<row_id> rows;
    for (std::uint32_t i = 0; i < mixed_batch::rows; ++i) { rows.push_back(r.open(i, 4, 20)); }
    row_id row{};
    CHECK(r.kv.open({.prompt_tokens = 4, .max_tokens = 20}, row) == admission::queued);
    CHECK(r.kv.explain_refusal({.prompt_tokens = 4, .max_tokens = 20})
            .starts_with("lacks a row: it needs a row (6 of 6 run)"));
    r.close_all();
  }

  TEST_CASE("each wrong call about a sequence says what is wrong and changes nothing, between steps and within one")
  {
    rig<lockstep_manager> r{mixed_batch::options({.mode = cpu_mode::manual}), mixed_batch::selector()};
    row_id const sparse = r.open(1, 40, 100), dense = r.open(2, 4, 60), plain = r.open(3, 4, 20);
    row_id const shut = r.open(4, 4, 60), none_there = none<row_id>, outside{6};
    r.engine.prefill(sparse, 40, 8);
    r.engine.prefill(dense, 4, 8);
    r.engine.prefill(plain, 4, 8);
    r.step({{.row = sparse}, {.row = dense}, {.row = plain}});
    REQUIRE(r.kv.close(shut) == status::ok);
    saved_id kept, of_plain, gone;
    REQUIRE(r.kv.retain(sparse, kept) == status::ok);
    REQUIRE(r.kv.retain(plain, of_plain) == status::ok);
    REQUIRE(r.kv.retain(sparse, gone) == status::ok);
    REQUIRE(r.kv.release(gone) == status::ok);
    REQUIRE(r.kv.drain(no_deadline) == status::ok);
    REQUIRE(r.backend.synchronize() == status::ok);
    saved_id const far{.index = 1000, .generation = 1}, early{.index = kept.index, .generation = kept.generation - 1},
      late{.index = kept.index, .generation = kept.generation + 1};
    row_list const nobody = {};

    auto const saving = [&](row_id row, bool leaves) {
      return [&r, row, leaves] {
        saved_id const before{.index = 77, .generation = 78};
        saved_id saved = before;
        status const said = leaves ? r.kv.preempt(row, saved) : r.kv.retain(row, saved);
        CHECK(saved == before);
        return said;
      };
    };
    auto const cutting = [&](row_id row, std::uint32_t tokens) {
      return [&r, row, tokens] { return r.kv.truncate(row, tokens); };
    };
    auto const forking = [&](row_id from, sequence_options request) {
      return [&r, from, request](row_id& row) { return r.kv.fork(from, request, row); };
    };
    auto const adopting = [&](saved_id saved, sequence_options request) {
      return [&r, saved, request](row_id& row) { return r.kv.adopt(saved, request, row); };
    };
    auto const resuming = [&](saved_id saved) { return [&r, saved](row_id& row) { return r.kv.resume(saved, row); }; };

    std::vector<wrong_call> calls;
    for (bool const leaves : {true, false}) {
      calls.push_back({"saving a row that is none", status::out_of_range, saving(none_there, leaves)});
      calls.push_back({"saving a row past the last", status::out_of_range, saving(outside, leaves)});
      calls.push_back({"saving a row without a sequence", status::invalid_state, saving(shut, leaves)});
    }
    for (saved_id const id : {gone, far, early, late, saved_id{}}) {
      calls.push_back({"releasing what is stale", status::stale_ticket, [&r, id] { return r.kv.release(id); }});
    }
    auto const moving = [&](row_id row, bool back) {
      return [&r, row, back] { return back ? r.kv.promote(row) : r.kv.demote(row); };
    };
    for (bool const back : {false, true}) {
      calls.push_back({"moving a row that is none", status::out_of_range, moving(none_there, back)});
      calls.push_back({"moving a row past the last", status::out_of_range, moving(outside, back)});
      calls.push_back({"moving a row without a sequence", status::invalid_state, moving(shut, back)});
      calls.push_back({"moving a row that never offloads", status::invalid_state, moving(plain, back)});
    }
    calls.push_back({"demoting a row that offloads already", status::invalid_state, moving(sparse, false)});
    calls.push_back({"a prefetch for a row in no step", status::invalid_state, [&] {
                       row_list const one{.ids = &sparse, .count = 1};
                       return r.kv.prefetch(layer_id{0}, one, r.engine.query_view());
                     }});
    calls.push_back({"cutting a row that is none", status::out_of_range, cutting(none_there, 1)});
    calls.push_back({"cutting a row past the last", status::out_of_range, cutting(outside, 1)});
    calls.push_back({"cutting a row without a sequence", status::invalid_state, cutting(shut, 0)});
    calls.push_back({"cutting behind the end", status::out_of_range, cutting(sparse, 42)});
    calls.push_back({"cutting far behind the end", status::out_of_range, cutting(sparse, ~0U)});
    calls.push_back({"cutting at the end", status::ok, cutting(sparse, 41)});
    for (ticket const t : {ticket{.index = 0, .generation = 99}, ticket{.index = 1000, .generation = 1}, ticket{}}) {
      calls.push_back({"status of a stale ticket", status::stale_ticket, [&r, t] { return r.kv.status_of(t); }});
      calls.push_back({"waiting on one", status::stale_ticket, [&r, t] { return r.kv.wait_on(t, r.stream); }});
      calls.push_back({"giving one up", status::stale_ticket, [&r, t] { return r.kv.abort(t); }});
      calls.push_back({"what has landed of one", status::ok, [&r, t] {
                         CHECK(r.kv.landed(t).words[0] == 0);
                         return status::ok;
                       }});
    }
    calls.push_back({"committing a row that is in no step", status::ok, [&] {
                       commit_row const one{.row = sparse, .accepted = 1};
                       return r.kv.commit({&one, 1});
                     }});
    calls.push_back({"looking at rows that are none", status::ok, [&] {
                       for (row_id const row : {none_there, outside}) {
                         CHECK(r.kv.row_status(row) == status::out_of_range);
                         CHECK(r.kv.mode_of(row) == row_mode::idle);
                         CHECK(r.kv.tokens_of(row) == 0);
                         CHECK_FALSE(r.kv.is_late(row));
                       }
                       CHECK(r.kv.mode_of(shut) == row_mode::idle);
                       return r.kv.row_status(shut);
                     }});
    calls.push_back({"entering nobody", status::ok, [&] {
                       return r.kv.enter(
                         layer_id{0}, nobody, r.engine.key_view(), r.engine.value_view(), r.engine.query_view());
                     }});
    calls.push_back({"appending for a row in no step", status::invalid_state, [&] {
                       row_list const one{.ids = &sparse, .count = 1};
                       return r.kv.append(layer_id{0}, one, r.engine.key_view(), r.engine.value_view());
                     }});
    calls.push_back({"a recall of a row in no step", status::invalid_state, [&] {
                       ticket given;
                       row_list const one{.ids = &sparse, .count = 1};
                       return r.kv.begin_recall(layer_id{0}, one, r.engine.query_view(), r.stream, given);
                     }});
    check(r.kv, r.backend, calls);

    std::vector<wrong_request> requests;
    for (row_id const from : {none_there, outside, shut}) {
      requests.push_back({"a fork of no sequence", admission::rejected, forking(from, {4, 60})});
    }
    for (saved_id const id : {gone, far, early, late, saved_id{}}) {
      requests.push_back({"adopting what is stale", admission::rejected, adopting(id, {4, 60})});
      requests.push_back({"resuming what is stale", admission::rejected, resuming(id)});
    }
    // Nothing, more than the manager is built for, a prompt longer than all, shorter than what there is.
    for (sequence_options const request :
         {sequence_options{0, 0}, {0, 201}, {0, ~0U}, {81, 80}, {~0U, 80}, {4, 39}, {4, 1}}) {
      requests.push_back({"a fork that cannot be", admission::rejected, forking(sparse, request)});
      requests.push_back({"adopting into what cannot be", admission::rejected, adopting(kept, request)});
    }
    requests.push_back({"a fork that needs digests", admission::rejected, forking(plain, {4, 100})});
    requests.push_back({"adopting what has no digests", admission::rejected, adopting(of_plain, {4, 100})});
    check(r.kv, r.backend, requests);

    // Within a step nothing may be done to its rows.
    step_row const steps[] = {{.row = sparse, .token_offset = 0}, {.row = dense, .token_offset = 8}};
    REQUIRE(r.engine.begin(steps) == status::ok);
    REQUIRE(r.backend.synchronize() == status::ok);
    row_id const twice[] = {sparse, dense, sparse};
    row_list const doubled{.ids = twice, .count = 3};
    tensor_view const keys = r.engine.key_view(), values = r.engine.value_view(), queries = r.engine.query_view();
    ticket given;
    check(
      r.kv, r.backend,
      std::vector<wrong_call>{
        {"preempting a row in a step", status::invalid_state, saving(sparse, true)},
        {"retaining a row in a step", status::invalid_state, saving(sparse, false)},
        {"cutting a row in a step", status::invalid_state, cutting(sparse, 4)},
        {"beginning twice", status::invalid_state, [&] { return r.kv.begin_step({steps, 1}); }},
        {"entering a row twice", status::invalid_state,
         [&] { return r.kv.enter(layer_id{0}, doubled, keys, values, queries); }},
        {"appending for a row twice", status::invalid_state,
         [&] { return r.kv.append(layer_id{0}, doubled, keys, values); }},
        {"warming a row up twice", status::invalid_state, [&] { return r.kv.warm_up(layer_id{0}, doubled, queries); }},
        {"recalling for a row twice", status::invalid_state,
         [&] { return r.kv.begin_recall(layer_id{0}, doubled, queries, r.stream, given); }},
        {"recalling on a stream that is none", status::invalid_argument,
         [&] { return r.kv.begin_recall(layer_id{0}, r.kv.rows(), queries, cpu_backend::stream_ref{}, given); }},
        {"demoting a row in a step", status::invalid_state, moving(sparse, false)},
        {"promoting a row in a step", status::invalid_state, moving(sparse, true)},
        {"prefetching for a row twice", status::invalid_state,
         [&] { return r.kv.prefetch(layer_id{0}, doubled, queries); }},
        {"prefetching an unknown layer", status::out_of_range,
         [&] { return r.kv.prefetch(layer_id{3}, r.kv.rows(), queries); }},
        {"prefetching for a row past the last", status::out_of_range,
         [&] {
           row_list const one{.ids = &outside, .count = 1};
           return r.kv.prefetch(layer_id{0}, one, queries);
         }},
        {"prefetching for a row without a sequence", status::invalid_state,
         [&] {
           row_list const one{.ids = &shut, .count = 1};
           return r.kv.prefetch(layer_id{0}, one, queries);
         }},
        {"prefetching without queries", status::invalid_argument,
         [&] { return r.kv.prefetch(layer_id{0}, r.kv.rows(), tensor_view{}); }},
        {"committing before the last layer", status::ok, [&] {
           commit_row const one{.row = sparse, .accepted = 1};
           return r.kv.commit({&one, 1});
         }}});
    check(
      r.kv, r.backend,
      std::vector<wrong_request>{{"a fork of a row in a step", admission::rejected, forking(sparse, {4, 100})}});

    // The step goes on, and what was kept begins others.
    r.engine.enter(layer_id{0}, r.kv.rows());
    for (visit const& v : r.kv.step()) { r.engine.take(v); }
    r.engine.commit();
    REQUIRE(r.engine.fault() == "");
    CHECK(r.kv.tokens_of(sparse) == 42);
    CHECK(r.kv.tokens_of(dense) == 6);
    auto const history = r.engine.history_of(sparse);
    row_id fork{}, adopted{};
    REQUIRE(r.kv.fork(sparse, {4, 100}, fork) == admission::admitted);
    REQUIRE(r.kv.adopt(kept, {4, 100}, adopted) == admission::admitted);
    r.engine.assign(fork, history);
    r.engine.assign(adopted, history);
    for (int i = 0; i < 12; ++i) { r.step({{.row = sparse}, {.row = dense}, {.row = fork}, {.row = adopted}}); }
    CHECK(r.kv.release(kept) == status::ok);
    CHECK(r.kv.release(of_plain) == status::ok);
    r.close_all();
  }

  TEST_CASE("what has no place now waits, changes nothing, and gets in when something has ended")
  {
    rig_options options = mixed_batch::options({.mode = cpu_mode::manual});
    options.manager.max_rows = 2;
    options.manager.saved_sequences = 1;
    rig<lockstep_manager> r{options, mixed_batch::selector()};
    row_id const a = r.open(1, 40, 100), b = r.open(2, 4, 60);
    r.engine.prefill(a, 40, 8);
    r.engine.prefill(b, 4, 8);
    saved_id kept;
    REQUIRE(r.kv.retain(a, kept) == status::ok);
    REQUIRE(r.kv.drain(no_deadline) == status::ok);
    REQUIRE(r.backend.synchronize() == status::ok);
    check(
      r.kv, r.backend,
      std::vector<wrong_request>{
        {"a third row", admission::queued, [&](row_id& row) { return r.kv.open({4, 20}, row); }},
        {"a fork", admission::queued, [&](row_id& row) { return r.kv.fork(a, {4, 100}, row); }},
        {"an adoption", admission::queued, [&](row_id& row) { return r.kv.adopt(kept, {4, 100}, row); }},
        {"a resumption", admission::queued, [&](row_id& row) { return r.kv.resume(kept, row); }}});
    saved_id more;
    CHECK(r.kv.retain(b, more) == status::busy);
    CHECK(r.kv.preempt(b, more) == status::busy);
    CHECK(r.kv.audit() == "");
    CHECK(r.kv.tokens_of(b) == 4);
    auto const history = r.engine.history_of(a);
    REQUIRE(r.kv.close(b) == status::ok);
    row_id row{};
    REQUIRE(r.kv.resume(kept, row) == admission::admitted);
    r.engine.assign(row, history);
    CHECK(r.kv.retain(a, more) == status::ok);
    for (int i = 0; i < 8; ++i) { r.step({{.row = a}, {.row = row}}); }
    CHECK(r.kv.release(more) == status::ok);
    r.close_all();
  }

  TEST_CASE("a row that is closing, because its recall flies, takes no other call")
  {
    rig<lockstep_manager> r{mixed_batch::options({.mode = cpu_mode::manual}), mixed_batch::selector()};
    r.engine.query_persistence = 1;
    row_id const a = r.open(1, 80, 200);
    r.engine.prefill(a, 80, 8);
    std::uint32_t misses = 0;
    while (misses == 0) {
      r.step({{.row = a}});
      step_row const one{.row = a};
      REQUIRE(r.engine.begin({&one, 1}) == status::ok);
      r.engine.enter(layer_id{0}, r.kv.rows());
      while (r.backend.run_one(r.stream)) {}
      misses = r.kv.books().plan().misses[0] + r.kv.books().plan().misses[1];
      if (misses != 0) { break; }
      for (visit const& v : r.kv.step()) { r.engine.take(v); }
      r.engine.commit();
    }
    REQUIRE(r.kv.close(a) == status::ok);
    REQUIRE(r.kv.sequences()[a].open());
    row_list const rows{.ids = &a, .count = 1};
    saved_id saved;
    step_row const step{.row = a};
    tensor_view const keys = r.engine.key_view(), values = r.engine.value_view(), queries = r.engine.query_view();
    check(
      r.kv, r.backend,
      std::vector<wrong_call>{
        {"close", status::invalid_state, [&] { return r.kv.close(a); }},
        {"preempt", status::invalid_state, [&] { return r.kv.preempt(a, saved); }},
        {"retain", status::invalid_state, [&] { return r.kv.retain(a, saved); }},
        {"truncate", status::invalid_state, [&] { return r.kv.truncate(a, 1); }},
        {"demote", status::invalid_state, [&] { return r.kv.demote(a); }},
        {"promote", status::invalid_state, [&] { return r.kv.promote(a); }},
        {"prefetch", status::invalid_state, [&] { return r.kv.prefetch(layer_id{1}, rows, queries); }},
        {"begin_step", status::invalid_state, [&] { return r.kv.begin_step({&step, 1}); }},
        {"enter", status::invalid_state, [&] { return r.kv.enter(layer_id{1}, rows, keys, values, queries); }},
        {"append", status::invalid_state, [&] { return r.kv.append(layer_id{1}, rows, keys, values); }},
        {"warm_up", status::invalid_state, [&] { return r.kv.warm_up(layer_id{1}, rows, queries); }}});
    check(r.kv, r.backend, std::vector<wrong_request>{{"fork", admission::rejected, [&](row_id& row) {
                                                         return r.kv.fork(a, {4, 200}, row);
                                                       }}});
    REQUIRE(r.kv.drain(no_deadline) == status::ok);
    CHECK_FALSE(r.kv.sequences()[a].open());
    r.engine.row(a).in_step = false;
    row_id const b = r.open(2, 10, 60);
    r.engine.prefill(b, 10, 8);
    r.close_all();
  }

  TEST_CASE("each wrong option is refused at construction, with its numbers, and leaves nothing behind")
  {
    struct wrong_option {
      char const* text;
      std::function<void(manager_options&)> change;
    };
    std::byte memory[64] = {};
    std::vector<wrong_option> const table{
      {"0 rows", [](manager_options& o) { o.max_rows = 0; }},
      {"0 blocks", [](manager_options& o) { o.max_tokens = 0; }},
      {"a step of 0 tokens", [](manager_options& o) { o.max_step_tokens = 0; }},
      {"31 open blocks", [](manager_options& o) { o.max_step_tokens = 121; }},
      {"1073741825 open blocks", [](manager_options& o) { o.max_step_tokens = ~0U; }},
      {"max_prefill_tokens is 0", [](manager_options& o) { o.max_prefill_tokens = 0; }},
      {"hot cache has 1 slots, one step can pin 8", [](manager_options& o) { o.quota_tokens = 4; }},
      {"6442450938 blocks", [](manager_options& o) { o.quota_tokens = ~0U; }},
      {"hot cache has 8 slots, one step can pin 106", [](manager_options& o) { o.write_back_depth = 100; }},
      {"4294967296 blocks", [](manager_options& o) { o.write_back_depth = ~0U; }},
      {"warm_up_queries is 0", [](manager_options& o) { o.warm_up_queries = 0; }},
      {"3 slots; one row of 120 tokens needs 24", [](manager_options& o) { o.slots = 3; }},
      {"18446744073709551615 blocks", [](manager_options& o) { o.slots = ~std::uint64_t{0}; }},
      {"1 lent pools and 0 slots", [&](manager_options& o) { o.lent_slots = {memory}; }},
      {"2 lent pools for 3 layers",
       [&](manager_options& o) {
         o.lent_slots = {memory, memory};
         o.slots = 100;
       }},
      {"layer 0 has no pool",
       [](manager_options& o) {
         o.lent_slots = {nullptr};
         o.slots = 100;
       }},
      {"slot stride of 1 B is less than a block of 256 B", [](manager_options& o) { o.slot_stride = 1; }},
      {"x 18446744073709551600 B does not fit", [](manager_options& o) { o.slot_stride = ~std::uint64_t{0} - 15; }},
      {"3 host blocks; the shortest sequence that offloads, of 25 tokens, has 7",
       [](manager_options& o) { o.host_blocks = 3; }},
      {"8589934592 blocks", [](manager_options& o) { o.host_blocks = std::uint64_t{1} << 33U; }},
      {"out_of_host_memory: 47616 B for 62 host blocks exceed the limit of 1 B",
       [](manager_options& o) { o.host_limit_bytes = 1; }},
      {"max_tries is 0", [](manager_options& o) { o.max_tries = 0; }},
      {"max_tries is 256; 255 at most", [](manager_options& o) { o.max_tries = 256; }},
      {"4294967355 blocks", [](manager_options& o) { o.saved_sequences = ~0U; }},
      {"wait_limit is 0 ns", [](manager_options& o) { o.wait_limit = nanoseconds{0}; }},
      {"wait_limit is -5 ns", [](manager_options& o) { o.wait_limit = nanoseconds{-5}; }}};
    kv_geometry const geometry{.layers = 3, .query_heads = 4, .kv_heads = 2, .head_dim = 8, .block_tokens = 4};
    solo_head_selector<> const selector{.budget_tokens = 24, .sink_tokens = 4, .recent_tokens = 4, .dense_tokens = 24};
    manager_options const right{.max_rows = 2, .max_tokens = 120, .max_prefill_tokens = 8, .quota_tokens = 32};
    cpu_backend backend{{.mode = cpu_mode::manual}};
    auto const stream = backend.create_stream(stream_priority::normal);
    for (wrong_option const& wrong : table) {
      CAPTURE(wrong.text);
      manager_options options = right;
      wrong.change(options);
      std::string said = "nothing";
      try {
        lockstep_manager const kv{backend, stream, geometry, options, selector};
      } catch (error const& reason) {
        said = reason.what();
      }
      CAPTURE(said);
      CHECK(said.find(wrong.text) != std::string::npos);
      CHECK(backend.device_bytes() + backend.pinned_bytes() == 0);
      CHECK(backend.live_events() == 0);
      CHECK(backend.live_streams() == 1);
    }
    // What is only larger than it need be is taken as what it can be.
    manager_options generous = right;
    generous.max_prefill_tokens = ~0U;
    generous.max_total_tokens = ~0U;
    generous.warm_up_queries = ~0U;
    generous.max_tries = 255;
    lockstep_manager const kv{backend, stream, geometry, generous, selector};
    CHECK(kv.budget().max_prefill_tokens == 120);
  }
}
