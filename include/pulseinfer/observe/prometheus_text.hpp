#pragma once

/// Counters as Prometheus exposition text.

#include <pulseinfer/observe/counters.hpp>

#include <cstdint>
#include <ostream>
#include <string>
#include <string_view>

namespace pulseinfer {

namespace detail {

inline void write_metric(
  std::ostream& out, std::string_view name, std::string_view type, std::string_view help, std::string_view labels,
  double value)
{
  out << "# HELP pulseinfer_" << name << ' ' << help << "\n# TYPE pulseinfer_" << name << ' ' << type << "\npulseinfer_"
      << name << labels << ' ' << value << '\n';
}

/// A label's value with backslash, quote and line feed escaped, as the format asks.
[[nodiscard]] inline std::string escape_label(std::string_view value)
{
  std::string escaped;
  for (char const c : value) {
    switch (c) {
      case '\\': escaped += "\\\\"; break;
      case '"': escaped += "\\\""; break;
      case '\n': escaped += "\\n"; break;
      default: escaped += c;
    }
  }
  return escaped;
}

}  // namespace detail

/// Writes every counter as a metric `pulseinfer_<name>`, times in seconds.
/// @param instance value of the label `instance_name`; no label where empty
inline void write_prometheus(std::ostream& out, counters const& c, std::string_view instance = {})
{
  std::string const labels =
    instance.empty() ? std::string{} : "{instance_name=\"" + detail::escape_label(instance) + "\"}";
  auto const precision = out.precision(17);
  auto const counter = [&](std::string_view name, std::string_view help, double value) {
    detail::write_metric(out, name, "counter", help, labels, value);
  };
  auto const gauge = [&](std::string_view name, std::string_view help, double value) {
    detail::write_metric(out, name, "gauge", help, labels, value);
  };
  auto const number = [](std::uint64_t value) { return static_cast<double>(value); };
  auto const seconds = [](nanoseconds value) { return static_cast<double>(value.count()) * 1e-9; };
  counter("steps_total", "Decode steps.", number(c.steps));
  counter("rows_total", "Rows over all steps.", number(c.rows));
  counter("late_rows_total", "Rows that were late at the end of a step.", number(c.late_rows));
  counter("visits_total", "Visits.", number(c.visits));
  counter("waits_total", "Times that the loop slept with nothing ready.", number(c.waits));
  counter("selected_blocks_total", "Blocks that selections named.", number(c.selected_blocks));
  counter("recalled_blocks_total", "Blocks brought from the host.", number(c.recalled_blocks));
  counter("recalled_bytes_total", "Bytes brought from the host.", number(c.recalled_bytes));
  counter("background_blocks_total", "Blocks brought ahead of need.", number(c.background_blocks));
  counter("background_hits_total", "Blocks brought ahead of need that were selected later.", number(c.background_hits));
  counter(
    "wasted_bytes_total", "Bytes brought ahead of need and replaced before their block was selected.",
    number(c.wasted_bytes));
  counter(
    "deferred_blocks_total", "Missing blocks that attention went without and that came later.",
    number(c.deferred_blocks));
  gauge(
    "skipped_share", "Mean share of the softmax mass that a row went without in a layer for that.",
    c.mean_skipped_share());
  gauge("peak_skipped_share", "Largest of those shares.", c.most_skipped_share);
  counter("written_bytes_total", "Bytes written back to the host.", number(c.written_bytes));
  counter("failed_transfers_total", "Recalls of a row that failed.", number(c.failed_transfers));
  counter("step_seconds_total", "Time in steps.", seconds(c.time));
  counter("stalled_seconds_total", "Time slept with nothing ready.", seconds(c.stalled));
  gauge("peak_recalled_bytes", "Most bytes recalled in one step.", number(c.peak_recalled_bytes));
  gauge("peak_rows", "Most rows of one step.", number(c.peak_rows));
  gauge("hit_rate", "Share of selected blocks that were resident.", c.hit_rate());
  out.precision(precision);
}

}  // namespace pulseinfer
