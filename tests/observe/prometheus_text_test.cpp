#include <pulseinfer/observe/prometheus_text.hpp>

#include <doctest/doctest.h>

#include <sstream>
#include <string>

using namespace pulseinfer;

TEST_SUITE("observe")
{
  TEST_CASE("Prometheus text holds a help line, a type and a value for each counter, times in seconds")
  {
    counters c;
    c.add(step_sample{
      .rows = 3, .selected_blocks = 8, .recalled_blocks = 2, .recalled_bytes = (std::uint64_t{1} << 53U) + 2});
    c.stalled = nanoseconds{1'500'000'000};
    std::ostringstream out;
    write_prometheus(out, c, "a\"b\\c\nd");
    std::string const text = out.str();
    CHECK(text.find("# TYPE pulseinfer_steps_total counter\n") != std::string::npos);
    CHECK(text.find("pulseinfer_rows_total{instance_name=\"a\\\"b\\\\c\\nd\"} 3\n") != std::string::npos);
    CHECK(
      text.find("pulseinfer_recalled_bytes_total{instance_name=\"a\\\"b\\\\c\\nd\"} 9007199254740994\n") !=
      std::string::npos);
    CHECK(text.find("stalled_seconds_total{instance_name=\"a\\\"b\\\\c\\nd\"} 1.5\n") != std::string::npos);
    CHECK(text.find("pulseinfer_hit_rate{instance_name=\"a\\\"b\\\\c\\nd\"} 0.75\n") != std::string::npos);
    CHECK(text.back() == '\n');
  }

  TEST_CASE("Prometheus text has no label where no instance is named")
  {
    std::ostringstream out;
    write_prometheus(out, counters{});
    CHECK(out.str().find("pulseinfer_steps_total 0\n") != std::string::npos);
    CHECK(out.str().find('{') == std::string::npos);
  }
}
