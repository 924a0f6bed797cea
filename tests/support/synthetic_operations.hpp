#pragma once

/// The synthetic engine's own work as operations, so that it runs on any backend.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/row_info.hpp>
#include <pulseinfer/view/row_list.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace pulseinfer_test {

/// The new tokens of some rows, an item each. Their places in the tensors are row_info::token_offset + i.
struct new_tokens {
  pulseinfer::row_list rows = {};
  pulseinfer::row_info const* info = nullptr;  // [max_rows], device memory
  std::uint32_t most = 1;                      ///< no row has more; known to the host

  [[nodiscard]] pulseinfer::launch_shape shape() const
  {
    return {.items = std::uint64_t{rows.count} * most, .group_threads = 32};
  }

  /// @return false where the item's row has fewer tokens
  [[nodiscard]] PULSEINFER_HOST_DEVICE bool find(std::uint64_t item, std::uint64_t& place) const
  {
    pulseinfer::row_info const state = info[to_index(rows[item / most])];
    auto const token = static_cast<std::int32_t>(item % most);
    place = static_cast<std::uint64_t>(state.token_offset + token);
    return token < state.new_tokens;
  }
};

/// What tokens feed into the first layer.
struct take_inputs {
  static constexpr char const* name = "take_inputs";
  static constexpr pulseinfer::operation_kind kind = pulseinfer::operation_kind::data;

  new_tokens tokens = {};
  float const* inputs = nullptr;  // [tokens, width]
  float* hidden = nullptr;        // [tokens, width], written
  std::uint32_t width = 0;

  [[nodiscard]] pulseinfer::launch_shape shape() const { return tokens.shape(); }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] pulseinfer::operation_cost cost() const { return {.device_bytes = shape().items * width * 8}; }

  template <pulseinfer::thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, pulseinfer::scratch_ref) const
  {
    std::uint64_t place = 0;
    if (!tokens.find(item, place)) { return; }
    for (std::uint32_t i = group.thread_rank(); i < width; i += group.size()) {
      hidden[place * width + i] = inputs[place * width + i];
    }
  }
};

/// target = matrix * source, or target = tanh(target + matrix * source).
struct project_tokens {
  static constexpr char const* name = "project_tokens";
  static constexpr pulseinfer::operation_kind kind = pulseinfer::operation_kind::data;

  new_tokens tokens = {};
  float const* matrix = nullptr;  // [outputs, inputs]
  float const* source = nullptr;  // [tokens, inputs]
  float* target = nullptr;        // [tokens, outputs]
  std::uint32_t inputs = 0;
  std::uint32_t outputs = 0;
  bool adds = false;

  [[nodiscard]] pulseinfer::launch_shape shape() const { return tokens.shape(); }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] pulseinfer::operation_cost cost() const
  {
    return {.device_bytes = std::uint64_t{4} * inputs * outputs, .flops = shape().items * 2 * inputs * outputs};
  }

  template <pulseinfer::thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, pulseinfer::scratch_ref) const
  {
    std::uint64_t place = 0;
    if (!tokens.find(item, place)) { return; }
    for (std::uint32_t i = group.thread_rank(); i < outputs; i += group.size()) {
      float sum = 0.0F;
      for (std::uint32_t j = 0; j < inputs; ++j) { sum += matrix[i * inputs + j] * source[place * inputs + j]; }
      float& out = target[place * outputs + i];
      out = adds ? std::tanh(out + sum) : sum;
    }
  }
};

static_assert(pulseinfer::operation<take_inputs> && pulseinfer::operation<project_tokens>);

}  // namespace pulseinfer_test
