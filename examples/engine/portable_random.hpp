/// Random numbers that are the same on every machine: the distributions of the standard library differ between its
/// implementations, its generators don't.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

namespace host_engine {

class portable_random {
 public:
  explicit portable_random(std::uint64_t seed) : generator_{seed} {}

  /// Uniform with mean 0 and this standard deviation.
  [[nodiscard]] float spread(float deviation)
  {
    auto const unit = static_cast<float>(generator_() >> 40) * 0x1p-24F;
    return deviation * std::sqrt(3.0F) * (2.0F * unit - 1.0F);
  }

  /// Uniform in [0, count).
  [[nodiscard]] std::uint32_t below(std::uint32_t count)
  {
    return static_cast<std::uint32_t>((generator_() >> 32) * count >> 32);
  }

  /// 0 to count - 1 in any order.
  [[nodiscard]] std::vector<std::uint32_t> order(std::uint32_t count)
  {
    std::vector<std::uint32_t> numbers(count);
    for (std::uint32_t at = 0; at < count; ++at) {
      numbers[at] = at;
      std::swap(numbers[at], numbers[below(at + 1)]);
    }
    return numbers;
  }

 private:
  std::mt19937_64 generator_;
};

}  // namespace host_engine
