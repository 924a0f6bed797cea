#pragma once

/// An operation made from a callable, so that a host engine's own work takes its place in a stream.

#include <pulseinfer/concepts/operation.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// The name of an operation as a template argument: host_function<..., "attend">.
template <std::size_t Size>
struct operation_name {
  char text[Size] = {};

  constexpr operation_name(char const (&literal)[Size])
  {
    for (std::size_t i = 0; i < Size; ++i) { text[i] = literal[i]; }
  }
};

/// Calls `function()` once, in stream order, on a thread of the backend. What it names by pointer or reference must live until
/// then. An exception that leaves `function` ends the program. `cost` is what a simulation charges; a simulation does not call
/// functions of kind `data` unless it moves data. For backends that run on the host.
template <class Function, operation_name Name = "host_function", operation_kind Kind = operation_kind::data>
struct host_function {
  static_assert(
    std::is_trivially_copyable_v<Function>, "a host function must be trivially copyable: it is kept by bytes");
  static_assert(std::is_invocable_v<Function const&>, "a host function must be callable without arguments while const");

  static constexpr char const* name = Name.text;
  static constexpr operation_kind kind = Kind;
  static constexpr bool host_only = true;

  Function function;
  operation_cost charged = {};

  [[nodiscard]] launch_shape shape() const { return {.items = 1, .group_threads = 1}; }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const { return charged; }
  template <thread_group Group>
  void operator()(Group const&, std::uint64_t, scratch_ref) const
  {
    function();
  }
};

template <class Function>
host_function(Function) -> host_function<Function>;

template <class Function>
host_function(Function, operation_cost) -> host_function<Function>;

/// host_function with a name of its own: `backend.launch(stream, named_host_function<"attend">([=] { ... }))`.
template <operation_name Name, operation_kind Kind = operation_kind::data, class Function>
[[nodiscard]] host_function<Function, Name, Kind> named_host_function(Function function, operation_cost cost = {})
{
  return {function, cost};
}

/// True for operations that only a host can call.
template <class Op>
inline constexpr bool is_host_only = requires { requires Op::host_only; };

}  // namespace pulseinfer
