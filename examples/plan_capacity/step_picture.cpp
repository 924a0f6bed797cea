#include "step_picture.hpp"

#include <pulseinfer/workload/simulated_decode.hpp>

#include <algorithm>
#include <cmath>

namespace plan_capacity {

step_timeline simulate_step(setting const& s, operating_point const& p)
{
  using namespace pulseinfer;
  constexpr std::uint32_t block_tokens = 16, most_rows = 128;
  std::uint32_t const rows = std::clamp(p.rows, 1U, most_rows);
  double const weight = static_cast<double>(p.rows) / rows;  // of a simulated row
  auto const time = [](double seconds) { return nanoseconds{std::max<std::int64_t>(std::llround(seconds * 1e9), 1)}; };
  // What one row more adds to a step's computing is its part; the rest is the passes'.
  operating_point const fewer =
    p.offloaded > 0 ? point(s, p.rows - p.offloaded, p.offloaded - 1, true) : point(s, p.rows - 1, 0, true);
  double const row = std::max(p.compute - fewer.compute, 0.0) / s.model.layers;
  double const pass = std::max(p.compute / s.model.layers - row * p.rows, 1e-6);

  decode_options o;
  double const block = double{s.cache_bytes} * s.model.cache_elements() * block_tokens;
  // Of blocks: what the link takes for one is the same, however many bytes stand for it.
  o.block_bytes =
    4 * block_tokens * std::max<std::uint64_t>(static_cast<std::uint64_t>(block / (4.0 * block_tokens)), 1);
  double const rate = s.gpu.link_bytes_per_second * static_cast<double>(o.block_bytes) / (block * weight);
  std::uint32_t const budget = std::max(s.budget_tokens / block_tokens, 1U);
  double const missed = p.recall * rate / (static_cast<double>(o.block_bytes) * rows * budget * s.model.layers);
  o.workload = {.layers = s.model.layers, .rows = rows, .budget_blocks = budget};
  double const share = std::clamp(missed, 1e-6, 0.9);
  // The logit of a mean is a little above the mean of logits; 8 % is the default's mean.
  o.workload.misses.mean_logit += std::log(share / (1.0 - share)) - std::log(0.08 / 0.92);
  o.engine = {
    .pass = {.per_pass = time(pass), .per_row = time(row * weight)}, .hits_launch = std::chrono::microseconds{2}};
  o.machine.compute.per_launch = nanoseconds{0};
  o.machine.kernels.per_run = nanoseconds{0};
  o.machine.kernels.to_device_bytes_per_s = rate;
  o.machine.control = h200_control;
  o.rows_per_landing = std::max(1U, rows / 8);
  o.steps = 3;
  o.warm_steps = 2;
  o.timeline = true;
  decode_result const r = simulate_decode(o, make_interruptible(o));

  step_timeline t{.rows = rows};
  nanoseconds end{0};
  for (visit_record const& v : r.timeline) { end = std::max(end, v.seen.end); }
  nanoseconds const begin = end - r.steps.back();
  t.step = static_cast<double>(r.steps.back().count()) * 1e-9;
  auto const add = [&](std::vector<busy_span>& to, observation const& seen, bool hits) {
    if (seen.end <= begin || seen.end <= seen.begin) { return; }
    auto const at = [&](nanoseconds when) {
      return static_cast<double>((std::max(when, begin) - begin).count()) * 1e-9;
    };
    to.push_back({at(seen.begin), at(seen.end), hits});
  };
  for (visit_record const& v : r.timeline) { add(t.gpu, v.seen, v.part == part::hits); }
  for (observation const& g : r.gathers) {
    if (g.cost.link_bytes != 0) { add(t.link, g, false); }
  }
  return t;
}

void draw_step(std::ostream& out, step_timeline const& t, char const* title, double top)
{
  constexpr double left = 70, right = 690, lane = 26;
  auto const x = [&](double seconds) { return left + (right - left) * seconds / t.step; };
  auto const bars = [&](std::vector<busy_span> const& spans, char const* name, double y, char const* colour) {
    out << "<text x=\"64\" y=\"" << y + 17 << "\" text-anchor=\"end\">" << name << "</text><rect x=\"" << left
        << "\" y=\"" << y << "\" width=\"" << right - left << "\" height=\"" << lane << "\" fill=\"#f2f2f2\"/>\n";
    for (busy_span const& s : spans) {
      out << "<rect x=\"" << x(s.begin) << "\" y=\"" << y << "\" width=\"" << std::max(x(s.end) - x(s.begin), 0.2)
          << "\" height=\"" << lane << "\" fill=\"" << (s.hits ? "#98df8a" : colour) << "\"/>\n";
    }
  };
  out << "<text x=\"" << left << "\" y=\"" << top + 14 << "\" font-size=\"14\">" << title << "</text>\n";
  bars(t.gpu, "GPU", top + 24, "#2ca02c");
  bars(t.link, "link", top + 24 + lane + 6, "#d62728");
  double const axis = top + 24 + 2 * lane + 24;
  out << "<text x=\"" << left << "\" y=\"" << axis << "\">0 ms</text><text x=\"" << right << "\" y=\"" << axis
      << "\" text-anchor=\"end\">" << std::round(t.step * 1e5) / 100.0 << " ms</text><text x=\"380\" y=\"" << axis
      << "\" text-anchor=\"middle\">pale: attention of resident blocks while others travel</text>\n";
}

}  // namespace plan_capacity
