#include <pulseinfer/backend/cpu/cpu_backend.hpp>
#include <pulseinfer/backend/host_function.hpp>
#include <pulseinfer/backend/traced.hpp>
#include <pulseinfer/observe/chrome_trace.hpp>

#include <doctest/doctest.h>

#include <cctype>
#include <cstddef>
#include <iomanip>
#include <locale>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

TEST_SUITE_BEGIN("observe");

using namespace pulseinfer;

namespace {

/// Whether `text` is one JSON value and nothing else: a reader that takes exactly the grammar, and no more.
class json_reader {
 public:
  explicit json_reader(std::string text) : text_{std::move(text)} {}

  bool reads_whole()
  {
    bool const sound = value();
    space();
    return sound && at_ == text_.size();
  }

  /// How many objects there were in arrays.
  int objects = 0;

 private:
  void space()
  {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) { ++at_; }
  }
  bool take(char c)
  {
    space();
    if (at_ >= text_.size() || text_[at_] != c) { return false; }
    ++at_;
    return true;
  }
  bool word(std::string const& text)
  {
    if (text_.compare(at_, text.size(), text) != 0) { return false; }
    at_ += text.size();
    return true;
  }
  bool string()
  {
    if (!take('"')) { return false; }
    while (at_ < text_.size() && text_[at_] != '"') {
      if (static_cast<unsigned char>(text_[at_]) < 0x20) { return false; }
      if (text_[at_] == '\\') {
        ++at_;
        if (text_[at_] == 'u') {
          at_ += 4;
        } else if (std::string{"\"\\/bfnrt"}.find(text_[at_]) == std::string::npos) {
          return false;
        }
      }
      ++at_;
    }
    return at_++ < text_.size();
  }
  bool number()
  {
    std::size_t const begin = at_;
    if (text_[at_] == '-') { ++at_; }
    while (at_ < text_.size() && (std::isdigit(static_cast<unsigned char>(text_[at_])) != 0 || text_[at_] == '.')) {
      ++at_;
    }
    return at_ > begin;
  }
  bool value()
  {
    space();
    if (at_ >= text_.size()) { return false; }
    if (take('{')) {
      if (take('}')) { return true; }
      do {
        if (!string() || !take(':') || !value()) { return false; }
      } while (take(','));
      return take('}');
    }
    if (take('[')) {
      if (take(']')) { return true; }
      do {
        if (!value()) { return false; }
        ++objects;
      } while (take(','));
      return take(']');
    }
    if (text_[at_] == '"') { return string(); }
    return word("true") || word("false") || number();
  }

  std::string text_;
  std::size_t at_ = 0;
};

[[nodiscard]] trace_record record_of(
  char const* name, std::uint32_t stream, nanoseconds begin, nanoseconds end, operation_cost cost = {})
{
  return {name, stream, {begin, end, cost}};
}

}  // namespace

TEST_CASE("chrome_trace writes streams as threads, tasks as complete events, bytes as arguments")
{
  std::ostringstream out;
  {
    chrome_trace trace{out};
    trace.name_stream(0, "compute");
    trace.add(
      record_of("attend", 0, nanoseconds{1234567}, nanoseconds{1234567 + 5008}, {.device_bytes = 77, .flops = 5}));
    trace.add(record_of(
      "recall", 1, nanoseconds{5}, nanoseconds{5},
      {.device_bytes = 1, .link_bytes = 65536, .link_runs = 4, .to_host = true}));
  }
  CHECK(out.str() == R"({"displayTimeUnit":"ns","traceEvents":[
{"ph":"M","pid":1,"tid":0,"name":"process_name","args":{"name":"pulseinfer"}},
{"ph":"M","pid":1,"tid":2,"name":"thread_name","args":{"name":"compute"}},
{"ph":"M","pid":1,"tid":2,"name":"thread_sort_index","args":{"sort_index":1}},
{"ph":"X","pid":1,"tid":2,"name":"attend","ts":1234.567,"dur":5.008,"args":{"bytes":77,"flops":5}},
{"ph":"X","pid":1,"tid":3,"name":"recall","ts":0.005,"dur":0.000,"args":{"bytes":65537,"link_bytes":65536,"link_runs":4,"to_host":true}}
]}
)");
}

TEST_CASE("chrome_trace leaves out what has not run to its end")
{
  std::ostringstream out;
  chrome_trace trace{out};
  std::vector<trace_record> const records{
    record_of("never", 0, observation::never, observation::never),
    record_of("begun", 0, nanoseconds{10}, observation::never),
    record_of("whole", 0, nanoseconds{10}, nanoseconds{20})};
  trace.add(records);
  trace.finish();
  CHECK(out.str().find("never") == std::string::npos);
  CHECK(out.str().find("begun") == std::string::npos);
  CHECK(out.str().find("whole") != std::string::npos);
  CHECK(json_reader{out.str()}.reads_whole());
}

TEST_CASE("chrome_trace writes sound JSON whatever names, flags and locales are")
{
  struct grouped : std::numpunct<char> {
    char do_thousands_sep() const override { return '\''; }
    std::string do_grouping() const override { return "\3"; }
  };
  std::ostringstream out;
  out.imbue(std::locale{std::locale{}, new grouped});
  out << std::hex << std::showbase << std::showpos << std::setfill('x') << std::setw(12);
  out << "";
  {
    chrome_trace trace{out, "a \"quoted\" \\ name\n\t\x01 \xC3\xA9"};
    trace.name_stream(1000000, "");
    trace.add(record_of("\"", 123456, nanoseconds{123456789012345}, nanoseconds{123456789999999}));
    trace.finish();
    trace.finish();
  }
  std::string text = out.str();
  text.erase(0, text.find('{'));  // what the width above was for
  CHECK(json_reader{text}.reads_whole());
  CHECK(text.find("\"ts\":123456789012.345,\"dur\":987.654") != std::string::npos);
  CHECK(text.find("\"tid\":123458") != std::string::npos);
  CHECK(text.find("a \\\"quoted\\\" \\\\ name\\u000a\\u0009\\u0001 \xC3\xA9") != std::string::npos);
}

TEST_CASE("chrome_trace of no events is sound JSON")
{
  std::ostringstream out;
  {
    chrome_trace trace{out};
  }
  json_reader reader{out.str()};
  CHECK(reader.reads_whole());
  CHECK(reader.objects == 1);
}

TEST_CASE("chrome_trace shows steps on their own row with counters")
{
  std::ostringstream out;
  chrome_trace trace{out};
  for (std::uint64_t step = 3; step < 5; ++step) {
    step_sample sample;
    sample.step = step;
    sample.rows = 8;
    sample.recalled_bytes = 1000 * step;
    sample.begin = nanoseconds{1000 * step};
    sample.end = nanoseconds{1000 * step + 500};
    sample.stalled = nanoseconds{250};
    trace.add(sample);
  }
  trace.finish();
  json_reader reader{out.str()};
  CHECK(reader.reads_whole());
  CHECK(reader.objects == 1 + 2 + 2 * 3);  // process; the row's name and place; step and two counters each
  CHECK(out.str().find(R"("name":"step 4","ts":4.000,"dur":0.500,"args":{"rows":8,)") != std::string::npos);
  CHECK(out.str().find(R"("stalled_us":0.250}})") != std::string::npos);
  CHECK(
    out.str().find(R"({"ph":"C","pid":1,"name":"recalled bytes","ts":3.000,"args":{"value":3000}})") !=
    std::string::npos);
}

TEST_CASE("write_chrome_trace shows what a traced backend ran")
{
  traced<cpu_backend> backend{cpu_options{.mode = cpu_mode::manual}};
  auto const compute = backend.create_stream("compute"), transfer = backend.create_stream("transfer");
  for (int i = 0; i < 3; ++i) {
    REQUIRE(backend.launch(compute, named_host_function<"attend">([] {})) == status::ok);
    REQUIRE(backend.launch(transfer, named_host_function<"recall">([] {})) == status::ok);
  }
  REQUIRE(backend.synchronize() == status::ok);
  std::ostringstream out;
  write_chrome_trace(out, backend);
  json_reader reader{out.str()};
  CHECK(reader.reads_whole());
  CHECK(reader.objects == 1 + 2 * 2 + 6);
  CHECK(out.str().find(R"("tid":3,"name":"thread_name","args":{"name":"transfer"})") != std::string::npos);
  CHECK(out.str().find(R"("tid":3,"name":"recall","ts":1.000,"dur":1.000)") != std::string::npos);
}

TEST_SUITE_END();
