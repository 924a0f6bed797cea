#include "support/mutated_text.hpp"
#include <pulseinfer/workload/arrivals.hpp>

#include <doctest/doctest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

using namespace pulseinfer;
using namespace std::chrono_literals;

TEST_SUITE("workload")
{
  TEST_CASE("constant arrivals are equally far apart, Poisson ones as much as an exponential distribution says")
  {
    auto const constant =
      make_arrivals({.pattern = arrival_pattern::constant, .requests_per_s = 4.0, .output = {.median = 50}}, 100s);
    CHECK(constant.size() == doctest::Approx(400).epsilon(0.01));
    for (std::size_t i = 1; i < constant.size(); ++i) {
      CHECK((constant[i].at - constant[i - 1].at).count() == doctest::Approx(250e6).epsilon(1e-3));
      CHECK(constant[i].prompt_tokens == 1024);
      CHECK(constant[i].output_tokens == 50);
    }
    auto const poisson = make_arrivals({.requests_per_s = 20.0}, 1000s);
    CHECK(poisson.size() == doctest::Approx(20000).epsilon(0.03));
    double squares = 0.0, longer = 0.0;
    for (std::size_t i = 1; i < poisson.size(); ++i) {
      double const gap = std::chrono::duration<double>(poisson[i].at - poisson[i - 1].at).count() * 20.0;
      squares += (gap - 1.0) * (gap - 1.0);
      longer += gap > 2.0 ? 1.0 : 0.0;
    }
    CHECK(squares / static_cast<double>(poisson.size()) == doctest::Approx(1.0).epsilon(0.05));
    CHECK(longer / static_cast<double>(poisson.size()) == doctest::Approx(std::exp(-2.0)).epsilon(0.05));
  }

  TEST_CASE("a burst brings its factor of requests while it lasts, and comes again after its period")
  {
    arrival_options const options{
      .requests_per_s = 10.0, .burst_factor = 5.0, .first_burst = 100s, .burst_length = 60s, .burst_period = 400s};
    auto const requests = make_arrivals(options, 800s);
    auto const between = [&](nanoseconds from, nanoseconds to) {
      auto const inside = [&](request_arrival const& r) { return r.at >= from && r.at < to; };
      return static_cast<double>(std::ranges::count_if(requests, inside));
    };
    CHECK(between(0s, 100s) == doctest::Approx(1000).epsilon(0.1));
    CHECK(between(100s, 160s) == doctest::Approx(3000).epsilon(0.06));
    CHECK(between(160s, 500s) == doctest::Approx(3400).epsilon(0.06));
    CHECK(between(500s, 560s) == doctest::Approx(3000).epsilon(0.06));
    CHECK(between(560s, 800s) == doctest::Approx(2400).epsilon(0.08));
    CHECK(requests == make_arrivals(options, 800s));
  }

  TEST_CASE("lengths are log-normal between their limits")
  {
    auto const requests = make_arrivals(
      {.requests_per_s = 100.0, .prompt = {.median = 8000, .deviation = 1.0, .least = 1000, .most = 64000}}, 200s);
    std::vector<std::uint32_t> lengths;
    for (request_arrival const& r : requests) { lengths.push_back(r.prompt_tokens); }
    std::ranges::sort(lengths);
    auto const at = [&](double share) {
      return static_cast<double>(lengths[static_cast<std::size_t>(share * static_cast<double>(lengths.size()))]);
    };
    CHECK(at(0.5) == doctest::Approx(8000).epsilon(0.04));
    CHECK(at(0.8413) == doctest::Approx(8000 * std::exp(1.0)).epsilon(0.05));
    CHECK(at(0.1587) == doctest::Approx(8000 * std::exp(-1.0)).epsilon(0.05));
    CHECK(lengths.front() == 1000);
    CHECK(lengths.back() == 64000);
  }

  TEST_CASE("a recorded load is read in the order of arrival, and what is no request is refused with its line")
  {
    std::istringstream file{"arrival_s,prompt_tokens,output_tokens\n# from a log\n1.5,100,20\r\n\n0.25,7,0\n"};
    auto const requests = read_arrivals(file);
    REQUIRE(requests.size() == 2);
    CHECK(requests[0] == request_arrival{250ms, 7, 0});
    CHECK(requests[1] == request_arrival{1500ms, 100, 20});
    auto const refused = [](char const* text, char const* message) {
      std::istringstream in{text};
      CHECK_THROWS_WITH_AS(read_arrivals(in), message, argument_error);
    };
    refused("1,2,3\n1,x,3\n", "invalid_argument: arrivals, line 2, '1,x,3': no number for prompt_tokens");
    refused(
      "1;2;3\n", "invalid_argument: arrivals, line 1, '1;2;3': three numbers with commas between them are wanted");
    refused("1,2,3,4\n", "invalid_argument: arrivals, line 1, '1,2,3,4': more than three numbers");
    refused("-1,2,3\n", "invalid_argument: arrivals, line 1, '-1,2,3': an arrival before 0 s or after 9e9 s");
    refused("1,-2,3\n", "invalid_argument: arrivals, line 1, '1,-2,3': no number for prompt_tokens");
    refused("1,0,0\n", "invalid_argument: arrivals, line 1, '1,0,0': a request of no tokens");
    refused("1,2,3\n1,\x01,3\n", "invalid_argument: arrivals, line 2, '1,?,3': no number for prompt_tokens");
    std::ifstream missing{"/no-such-folder/arrivals.csv"};
    CHECK_THROWS_WITH_AS(
      static_cast<void>(read_arrivals(missing)), "invalid_argument: arrivals, line 1: the file cannot be read",
      argument_error);
  }

  TEST_CASE("a recorded load with anything wrong in it is read as what it says, or refused by a line that it has")
  {
    CHECK(rc::check([] {
      std::string whole = *rc::gen::inRange(0, 2) == 0 ? "arrival_s,prompt_tokens,output_tokens\n" : "";
      std::vector<request_arrival> wanted;
      std::int64_t at = 0;
      for (auto count = *rc::gen::inRange(0, 6); count > 0; --count) {
        at += *rc::gen::inRange(0, 5000);
        wanted.push_back({std::chrono::milliseconds{at}, *rc::gen::inRange(1U, 9000U), *rc::gen::inRange(0U, 9000U)});
        std::string const thousandths = std::to_string(1000 + at % 1000).substr(1);
        whole += std::to_string(at / 1000) + "." + thousandths + "," + std::to_string(wanted.back().prompt_tokens) +
          "," + std::to_string(wanted.back().output_tokens) + "\n";
      }
      std::istringstream right{whole};
      RC_ASSERT(read_arrivals(right) == wanted);

      std::mt19937_64 random{*rc::gen::arbitrary<std::uint64_t>()};
      for (int change = 0; change < 20; ++change) {
        std::string const text = pulseinfer_test::mutated(whole, random);
        std::istringstream in{text};
        try {
          auto const found = read_arrivals(in);
          RC_ASSERT(std::ranges::is_sorted(found, {}, &request_arrival::at));
          for (request_arrival const& request : found) {
            RC_ASSERT(request.at >= 0ns);
            RC_ASSERT(request.prompt_tokens + std::uint64_t{request.output_tokens} > 0);
          }
        } catch (argument_error const& refusal) {
          RC_ASSERT(pulseinfer_test::names_a_line(refusal.what(), "arrivals", text));
        }
      }
    }));
  }

  TEST_CASE("loads without a rate or a length are refused")
  {
    CHECK_THROWS_AS(make_arrivals({.requests_per_s = 0.0}, 1s), configuration_error);
    CHECK_THROWS_AS(make_arrivals({.burst_factor = -1.0}, 1s), configuration_error);
    CHECK_THROWS_AS(make_arrivals({.prompt = {.median = 0}}, 1s), configuration_error);
  }
}
