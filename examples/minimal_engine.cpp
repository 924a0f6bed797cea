// A whole host engine on a made-up model: one sequence through the loop over visits, and with tickets in its own loop.

#include <pulseinfer/admission/fixed_admission.hpp>
#include <pulseinfer/backend/cpu/cpu_backend.hpp>
#include <pulseinfer/manager/offload_manager.hpp>
#include <pulseinfer/operation/merge_partials.hpp>
#include <pulseinfer/operation/paged_attention.hpp>
#include <pulseinfer/scheduler/interruptible_scheduler.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>
#include <pulseinfer/transfer/gather_scatter_engine.hpp>

#include <cmath>
#include <cstdio>
#include <vector>

using namespace pulseinfer;
using tensor = std::vector<float>;
constexpr std::uint32_t head_count = 4, dim = 16, prompt = 300, length = 480;
void check(status s) { s == status::ok ? void() : throw error{s, "a call of the engine"}; }

struct tiny_engine {
  cpu_backend backend = cpu_backend{};
  cpu_backend::stream_ref stream = backend.create_stream(stream_priority::normal);
  tensor hidden = tensor(head_count * dim), out = hidden, rest = hidden, lse = hidden, rest_lse = hidden;
  std::uint32_t position = 0;
  tensor_view view(tensor& t) { return contiguous_tensor(t.data(), dtype::float32, 1, head_count, dim); }
  tensor_view embed()  // a text that comes again after 97 tokens
  {
    float const angle = 0.065F * static_cast<float>(position++);
    for (float i = 0.0F; float& h : hidden) { h = std::sin(i + angle * (1.0F + std::fmod(i, 8.0F))), ++i; }
    return view(hidden);
  }
  void attend(block_table const& table, row_list rows)  // enqueues; what has landed is merged into the hits
  {
    bool const landed = table.which == part::landed;
    tensor &to = landed ? rest : out, &sum = landed ? rest_lse : lse;
    check(backend.launch(stream, paged_attention{table, rows, view(hidden), view(to), sum.data()}));
    merge_partials const merge{rows, table.info, view(out), lse.data(), view(rest), rest_lse.data()};
    if (landed) { check(backend.launch(stream, merge)); }
  }
  void feed_forward()
  {
    check(backend.synchronize(stream));
    for (std::size_t i = 0; i < hidden.size(); ++i) { hidden[i] = 0.5F * (hidden[i] + out[i]); }
  }
};

// [readme-begin]
using kv_manager =
  offload_manager<cpu_backend, solo_head_selector<>, gather_scatter_engine, interruptible_scheduler<>, fixed_admission>;
kv_manager make_manager(tiny_engine& engine, solo_head_selector<> const& selector)
{
  kv_geometry const geometry{.layers = 4, .query_heads = head_count, .kv_heads = head_count, .head_dim = dim};
  manager_options const options{.max_tokens = length, .quota_tokens = selector.budget_tokens + 64};
  return kv_manager{engine.backend, engine.stream, geometry, options, selector};
}

void step_by_visits(kv_manager& kv, tiny_engine& engine, row_id row)
{
  check(kv.begin_step(std::vector{step_row{row}}));  // lengths, leases, write-backs: all that the host knows
  tensor_view const keys = engine.embed(), values = keys, queries = keys;  // this model projects nothing
  check(kv.enter(kv.first_layer(), kv.rows(), keys, values, queries));     // append, select, resolve, recall
  for (visit const& v : kv.step()) {  // ++ is the interrupt point: whoever is ready comes next
    engine.attend(v.table, v.rows);   // all that is selected, or what is resident and later what has landed
    if (v.part == part::hits) { continue; }
    engine.feed_forward();
    if (!v.last) { check(kv.enter(v.next, v.rows, keys, values, queries)); }
  }
  check(kv.commit(std::vector{commit_row{row}}));  // full blocks go to the host
}
// [readme-end]
void step_by_tickets(kv_manager& kv, tiny_engine& engine, row_id row)
{
  check(kv.begin_step(std::vector{step_row{row}}));
  tensor_view const keys = engine.embed(), values = keys, queries = keys;
  ticket recall;
  block_table table;
  for (layer_id const layer : {layer_id{0}, layer_id{1}, layer_id{2}, layer_id{3}}) {
    check(kv.append(layer, kv.rows(), keys, values));
    check(kv.begin_recall(layer, kv.rows(), queries, engine.stream, recall, recall_lists::whole));
    check(kv.wait_on(recall, engine.stream));  // or ask kv.landed(recall), and run others meanwhile
    check(kv.table(recall, part::whole, table));
    engine.attend(table, kv.rows());
    engine.feed_forward();
  }
  check(kv.commit(std::vector{commit_row{row}}));
}

double mean_difference(tensor const& one, tensor const& other, double sum = 0.0)
{
  for (std::size_t i = 0; i < other.size(); ++i) { sum += std::fabs(one[i] - other[i]); }
  return sum / (length * 64);
}

tensor run(char const* name, solo_head_selector<> const& selector, auto step, tensor const& dense = {})
{
  tiny_engine engine;
  kv_manager kv = make_manager(engine, selector);
  row_id row{};
  check(kv.open({prompt, length}, row) == admission::admitted ? status::ok : status::capacity_exceeded);
  tensor outputs;
  double recalled = 0.0;
  for (; engine.position < length; recalled += static_cast<double>(kv.finish_sample().recalled_bytes) / 1024) {
    step(kv, engine, row);
    outputs.insert(outputs.end(), engine.hidden.begin(), engine.hidden.end());
  }
  double const slots = static_cast<double>(kv.memory().slot_bytes) / 1024, gap = mean_difference(outputs, dense);
  std::printf("%-20s %4.0f KiB recalled, %4.0f KiB of slots, off by %.1e\n", name, recalled, slots, gap);
  return outputs;
}

int main()
{
  tensor const dense = run("all blocks resident", {.budget_tokens = length}, step_by_visits);
  tensor const covered = run("a covering budget", {.budget_tokens = length, .dense_tokens = 0}, step_by_visits, dense);
  tensor const visits = run("192 tokens, visits", {.budget_tokens = 192}, step_by_visits, dense);
  tensor const tickets = run("192 tokens, tickets", {.budget_tokens = 192}, step_by_tickets, dense);
  return covered == dense && mean_difference(visits, tickets) < 1e-5 ? 0 : 1;
}
