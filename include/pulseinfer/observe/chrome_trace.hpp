#pragma once

/// Writes timelines in the Chrome trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

#include <pulseinfer/backend/observation.hpp>
#include <pulseinfer/backend/trace_record.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/step_sample.hpp>

#include <cstdint>
#include <cstdio>
#include <ostream>
#include <span>
#include <string>
#include <string_view>

namespace pulseinfer {

/// One JSON document on a stream, from construction to finish(). Times are those of the records' clock; streams are threads of one
/// process, and steps have a row of their own above them. Errors are the stream's: look at out.good() at the end.
class chrome_trace {
 public:
  explicit chrome_trace(std::ostream& out, std::string_view process = "pulseinfer") : out_{out}
  {
    out_ << R"({"displayTimeUnit":"ns","traceEvents":[)";
    meta("process_name", 0, process);
  }

  chrome_trace(chrome_trace const&) = delete;
  chrome_trace& operator=(chrome_trace const&) = delete;

  ~chrome_trace()
  {
    // A stream that throws on failure must not end the program here; who wants to know calls finish().
    try {
      finish();
    } catch (...) {}
  }

  /// The row of trace_record::stream.
  void name_stream(std::uint32_t stream, std::string_view name)
  {
    meta("thread_name", row_of(stream), name);
    meta_sort(row_of(stream), stream + 1);
  }

  /// Left out when it has not run to its end.
  void add(trace_record const& record)
  {
    if (record.seen.begin < nanoseconds{0} || record.seen.end < record.seen.begin) { return; }
    operation_cost const& cost = record.seen.cost;
    complete(record.name, row_of(record.stream), record.seen.begin, record.seen.end);
    out_ << R"(,"args":{"bytes":)" << digits(cost.device_bytes + cost.link_bytes);
    if (cost.link_bytes > 0) {
      out_ << R"(,"link_bytes":)" << digits(cost.link_bytes) << R"(,"link_runs":)" << digits(cost.link_runs)
           << R"(,"to_host":)" << (cost.to_host ? "true" : "false");
    }
    if (cost.flops > 0) { out_ << R"(,"flops":)" << digits(cost.flops); }
    out_ << "}}";
  }

  void add(std::span<trace_record const> records)
  {
    for (trace_record const& record : records) { add(record); }
  }

  /// A step on the row of steps, and its recalled bytes and rows as counters.
  void add(step_sample const& sample)
  {
    if (!steps_named_) {
      meta("thread_name", steps_row, "steps");
      meta_sort(steps_row, 0);
      steps_named_ = true;
    }
    complete("step " + std::to_string(sample.step), steps_row, sample.begin, sample.end);
    out_ << R"(,"args":{"rows":)" << digits(sample.rows) << R"(,"late_rows":)" << digits(sample.late_rows)
         << R"(,"visits":)" << digits(sample.visits) << R"(,"waits":)" << digits(sample.waits)
         << R"(,"selected_blocks":)" << digits(sample.selected_blocks) << R"(,"recalled_blocks":)"
         << digits(sample.recalled_blocks) << R"(,"recalled_bytes":)" << digits(sample.recalled_bytes)
         << R"(,"written_bytes":)" << digits(sample.written_bytes) << R"(,"failed_transfers":)"
         << digits(sample.failed_transfers) << R"(,"stalled_us":)" << micros(sample.stalled) << "}}";
    counter("recalled bytes", sample.begin, sample.recalled_bytes);
    counter("rows", sample.begin, sample.rows);
  }

  /// Ends the document; nothing can be added after it. Again: nothing.
  void finish()
  {
    if (finished_) { return; }
    finished_ = true;
    out_ << "\n]}\n";
    out_.flush();
  }

 private:
  static constexpr std::uint32_t steps_row = 1;

  [[nodiscard]] static std::uint32_t row_of(std::uint32_t stream) { return stream + 2; }

  /// Numbers go out as text, so that the stream's locale and flags change nothing.
  [[nodiscard]] static std::string digits(std::uint64_t value) { return std::to_string(value); }

  /// Microseconds with three decimals: the format's unit.
  [[nodiscard]] static std::string micros(nanoseconds time)
  {
    auto const count = static_cast<long long>(time.count());
    auto const magnitude = count < 0 ? -count : count;
    char text[32];
    std::snprintf(text, sizeof(text), "%s%lld.%03lld", count < 0 ? "-" : "", magnitude / 1000, magnitude % 1000);
    return text;
  }

  [[nodiscard]] static std::string quoted(std::string_view text)
  {
    static constexpr char hex[] = "0123456789abcdef";
    std::string result{'"'};
    for (char const c : text) {
      auto const code = static_cast<unsigned char>(c);
      if (c == '"' || c == '\\') {
        result += '\\';
        result += c;
      } else if (code < 0x20) {
        result += "\\u00";
        result += hex[code >> 4U];
        result += hex[code & 0xFU];
      } else {
        result += c;
      }
    }
    return result + '"';
  }

  void begin_event()
  {
    out_ << (any_ ? ",\n" : "\n");
    any_ = true;
  }

  void meta(std::string_view kind, std::uint32_t row, std::string_view name)
  {
    begin_event();
    out_ << R"({"ph":"M","pid":1,"tid":)" << digits(row) << R"(,"name":)" << quoted(kind) << R"(,"args":{"name":)"
         << quoted(name) << "}}";
  }

  void meta_sort(std::uint32_t row, std::uint32_t place)
  {
    begin_event();
    out_ << R"({"ph":"M","pid":1,"tid":)" << digits(row) << R"(,"name":"thread_sort_index","args":{"sort_index":)"
         << digits(place) << "}}";
  }

  void complete(std::string_view name, std::uint32_t row, nanoseconds begin, nanoseconds end)
  {
    begin_event();
    out_ << R"({"ph":"X","pid":1,"tid":)" << digits(row) << R"(,"name":)" << quoted(name) << R"(,"ts":)"
         << micros(begin) << R"(,"dur":)" << micros(end - begin);
  }

  void counter(std::string_view name, nanoseconds time, std::uint64_t value)
  {
    begin_event();
    out_ << R"({"ph":"C","pid":1,"name":)" << quoted(name) << R"(,"ts":)" << micros(time) << R"(,"args":{"value":)"
         << digits(value) << "}}";
  }

  std::ostream& out_;
  bool any_ = false;
  bool steps_named_ = false;
  bool finished_ = false;
};

/// One document with the records of `backend`, a `traced<B>`. @pre no work is in flight
template <class Traced>
void write_chrome_trace(std::ostream& out, Traced const& backend, std::span<step_sample const> steps = {})
{
  chrome_trace trace{out};
  std::uint32_t stream = 0;
  for (std::string const& name : backend.stream_names()) { trace.name_stream(stream++, name); }
  for (step_sample const& sample : steps) { trace.add(sample); }
  trace.add(backend.records());
  trace.finish();
}

}  // namespace pulseinfer
