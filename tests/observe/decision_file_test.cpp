#include <pulseinfer/observe/decision_file.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

using namespace pulseinfer;

namespace {

std::string refusal(std::string const& text)
{
  std::istringstream in{text};
  try {
    static_cast<void>(read_decisions(in));
  } catch (argument_error const& e) {
    return e.what();
  }
  return {};
}

}  // namespace

TEST_SUITE("observe")
{
  TEST_CASE("decisions come back from a file as they were written")
  {
    decision_log log{10, 10, 2};
    std::vector<row_id> const rows{row_id{3}, row_id{0}};
    std::vector<std::uint32_t> const slots{7, 40};
    log.add({.kind = record_kind::keep, .keeps = true});
    log.add({.kind = record_kind::admit, .said = admission::queued});
    log.add({.kind = record_kind::balance, .promote = row_id{5}});
    log.add_spread({.kind = record_kind::balance, .spread = true, .demote = row_id{1}}, slots);
    log.add({.kind = record_kind::run, .enqueue_wait = true, .layer = layer_id{2}}, rows);
    log.add({.kind = record_kind::end_step});
    std::ostringstream out;
    write_decisions(out, log);
    CHECK(
      out.str() == "pulseinfer decisions 1\nkeep 1\nadmit queued\nbalance -1 5\nbalance 1 -1 7 40\nrun 2 1 3 0\nend\n");
    std::istringstream in{out.str()};
    decision_log const read = read_decisions(in);
    CHECK(read == log);
    CHECK(read.complete());
  }

  TEST_CASE("a log that is full says that it is incomplete")
  {
    decision_log log{2, 1};
    std::vector<row_id> const rows{row_id{3}, row_id{0}};
    log.add({.layer = layer_id{0}}, rows);
    CHECK_FALSE(log.complete());
    CHECK(log.entries().empty());
    decision_log few{2, 1, 1};
    few.add_spread({.kind = record_kind::balance, .spread = true}, std::vector<std::uint32_t>{7, 40});
    CHECK_FALSE(few.complete());
    CHECK(few.entries().empty());
  }

  TEST_CASE("a decision file that is no such file is refused with its line")
  {
    CHECK(refusal("") == "invalid_argument: decision file, line 1: '' where 'pulseinfer decisions 1' begins the file");
    std::string const header = "pulseinfer decisions 1\n";
    CHECK(
      refusal(header + "end\nrun x 0 1\n") ==
      "invalid_argument: decision file, line 3: 'run x 0 1' names no layer and wait");
    CHECK(refusal(header + "run 1 0\n") == "invalid_argument: decision file, line 2: a run of no rows");
    CHECK(refusal(header + "run 1 0 1 b\n").find("line 2") != std::string::npos);
    CHECK(refusal(header + "run 1 2 1\n").find("line 2") != std::string::npos);
    CHECK(refusal(header + "run 1 0 -4\n") == "invalid_argument: decision file, line 2: row -4");
    CHECK(refusal(header + "admit perhaps\n") == "invalid_argument: decision file, line 2: 'perhaps' is no admission");
    CHECK(refusal(header + "keep 2\n") == "invalid_argument: decision file, line 2: 'keep 2' says neither 0 nor 1");
    CHECK(
      refusal(header + "balance 1\n") ==
      "invalid_argument: decision file, line 2: 'balance 1' names no two rows, or -1");
    CHECK(refusal(header + "balance 1 -1 7 x\n").find("slots that are no number") != std::string::npos);
    CHECK(refusal(header + "jump\n") == "invalid_argument: decision file, line 2: 'jump' is no decision");
  }
}
