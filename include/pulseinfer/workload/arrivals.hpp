#pragma once

/// When requests come, and how long they are.

#include <pulseinfer/detail/printable.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/workload/fixed_point.hpp>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <istream>
#include <string>
#include <string_view>
#include <vector>

namespace pulseinfer {

struct request_arrival {
  nanoseconds at{0};
  std::uint32_t prompt_tokens = 0;
  std::uint32_t output_tokens = 0;

  friend bool operator==(request_arrival const&, request_arrival const&) = default;
};

/// Log-normal lengths, cut to [least, most].
struct length_model {
  std::uint32_t median = 1024;
  double deviation = 0.0;  ///< of the logarithm; 0: all have the median
  std::uint32_t least = 1;
  std::uint32_t most = 0x7FFFFFFFU;
};

enum class arrival_pattern : std::uint8_t {
  constant,  ///< equal times between requests
  poisson    ///< independent requests: exponential times between them
};

/// A rate, and times at which it is higher.
struct arrival_options {
  arrival_pattern pattern = arrival_pattern::poisson;
  double requests_per_s = 1.0;
  double burst_factor = 1.0;  ///< of the rate, while a burst lasts
  nanoseconds first_burst{0};
  nanoseconds burst_length{0};  ///< 0: no bursts
  nanoseconds burst_period{0};  ///< from burst to burst; 0: one burst only
  length_model prompt = {};
  length_model output = {.median = 256};
  std::uint64_t seed = 1;
};

namespace workload_detail {

[[nodiscard]] inline std::uint32_t length(length_model const& model, std::uint64_t bits)
{
  fixed const exponent = multiply(to_fixed(model.deviation), normal(bits));
  std::uint64_t drawn = model.median;
  if (exponent <= 0) {
    drawn = (drawn * exponential(exponent) + (1ULL << 31U)) >> 32U;
  } else if (std::uint64_t const part = exponential(-exponent) >> 4U; part > 0) {
    drawn = std::min<std::uint64_t>((drawn << 28U) / part, 0x7FFFFFFFU);
  } else {
    drawn = 0x7FFFFFFFU;
  }
  return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(drawn, model.least, model.most));
}

[[nodiscard]] inline bool in_burst(arrival_options const& options, std::int64_t now)
{
  if (options.burst_length.count() == 0 || now < options.first_burst.count()) { return false; }
  std::int64_t since = now - options.first_burst.count();
  if (options.burst_period.count() > 0) { since %= options.burst_period.count(); }
  return since < options.burst_length.count();
}

}  // namespace workload_detail

/// Requests that come before `end`, in their order.
/// @throws configuration_error where a rate or a length is not positive
[[nodiscard]] inline std::vector<request_arrival> make_arrivals(arrival_options const& options, nanoseconds end)
{
  using namespace workload_detail;
  auto const positive = [](double value, char const* name) {
    if (!(value > 0.0)) {
      throw configuration_error{std::string{"arrivals: "} + name + " is " + std::to_string(value)};
    }
  };
  positive(options.requests_per_s, "requests_per_s");
  positive(options.burst_factor, "burst_factor");
  positive(options.prompt.median, "prompt.median");
  positive(options.output.median, "output.median");
  std::vector<request_arrival> requests;
  // The rate is that of the moment: a gap is drawn in units of 2^-16 of the mean one, and used up at the rate of each tick.
  auto const gap_at = [&](std::int64_t now) {
    double const rate = options.requests_per_s * (in_burst(options, now) ? options.burst_factor : 1.0);
    return std::max<std::int64_t>(static_cast<std::int64_t>(1e9 / rate), 1);
  };
  std::int64_t now = 0;
  for (std::uint64_t number = 0;; ++number) {
    fixed left = fixed_one;
    if (options.pattern == arrival_pattern::poisson) {
      left = -logarithm((bits_of({options.seed, 11, number}) >> 33U) + 1, std::uint64_t{1} << 31U);
    }
    // In ticks of a hundredth of a gap, so that a burst begins and ends when it should.
    while (left > 0) {
      std::int64_t const gap = gap_at(now);
      fixed const part = std::min<fixed>(left, fixed_one / 100);
      now += std::max<std::int64_t>(gap / fixed_one * part + gap % fixed_one * part / fixed_one, 1);
      left -= part;
    }
    if (now >= end.count()) { return requests; }
    requests.push_back(
      {.at = nanoseconds{now},
       .prompt_tokens = length(options.prompt, bits_of({options.seed, 12, number})),
       .output_tokens = length(options.output, bits_of({options.seed, 13, number}))});
  }
}

/// Reads a recorded load: a line `arrival_s,prompt_tokens,output_tokens` for each request, in any order, the first line a
/// header of those names or a request; empty lines and such that begin with # are passed over.
/// @return in the order of arrival   @throws argument_error naming the line and what is wrong with it
[[nodiscard]] inline std::vector<request_arrival> read_arrivals(std::istream& in)
{
  std::vector<request_arrival> requests;
  std::string line;
  std::size_t number = 1;
  for (; std::getline(in, line); ++number) {
    if (!line.empty() && line.back() == '\r') { line.pop_back(); }
    if (line.empty() || line.front() == '#' || (number == 1 && line == "arrival_s,prompt_tokens,output_tokens")) {
      continue;
    }
    auto const refuse = [&](std::string const& what) {
      throw argument_error{
        status::invalid_argument,
        "arrivals, line " + std::to_string(number) + ", '" + detail::printable(line.substr(0, 60)) + "': " + what};
    };
    char const* at = line.data();
    char const* const end = line.data() + line.size();
    auto const field = [&](auto& value, char const* name) {
      auto const [next, error] = std::from_chars(at, end, value);
      if (error != std::errc{}) { refuse(std::string{"no number for "} + name); }
      at = next;
    };
    auto const comma = [&] {
      if (at == end || *at != ',') { refuse("three numbers with commas between them are wanted"); }
      ++at;
    };
    double seconds = 0.0;
    request_arrival request;
    field(seconds, "arrival_s");
    comma();
    field(request.prompt_tokens, "prompt_tokens");
    comma();
    field(request.output_tokens, "output_tokens");
    if (at != end) { refuse("more than three numbers"); }
    if (!(seconds >= 0.0 && seconds < 9e9)) { refuse("an arrival before 0 s or after 9e9 s"); }
    if (request.prompt_tokens == 0 && request.output_tokens == 0) { refuse("a request of no tokens"); }
    request.at = nanoseconds{static_cast<std::int64_t>(seconds * 1e9 + 0.5)};
    requests.push_back(request);
  }
  if (in.bad() || (number == 1 && !in.eof())) {
    throw argument_error{
      status::invalid_argument, "arrivals, line " + std::to_string(number) + ": the file cannot be read"};
  }
  std::ranges::stable_sort(requests, {}, &request_arrival::at);
  return requests;
}

}  // namespace pulseinfer
