#pragma once

/// A stream of the backend, or one that the host engine lends.

#include <pulseinfer/backend/handle_table.hpp>

#include <cuda_runtime_api.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// Trivially copyable, owns nothing. What cuda_backend::create_stream returns is known to the backend and refused once it has been
/// destroyed; what is made from a foreign stream is taken as it is and must outlive its use. A default one names no stream.
struct cuda_stream_ref {
  static constexpr std::uint32_t no_index = handle_ref<void>::no_index;

  cudaStream_t stream = nullptr;
  std::uint32_t index = no_index;
  std::uint32_t generation = 0;
  bool foreign = false;

  cuda_stream_ref() = default;
  cuda_stream_ref(cudaStream_t lent) noexcept : stream{lent}, foreign{true} {}
  cuda_stream_ref(std::nullptr_t) = delete;  // say cudaStreamLegacy or cudaStreamPerThread

  /// From ::cuda::stream_ref and what else gives a cudaStream_t by get().
  template <class Stream>
    requires requires(Stream const& lent) {
      { lent.get() } -> std::same_as<cudaStream_t>;
    }
  cuda_stream_ref(Stream const& lent) noexcept : cuda_stream_ref{lent.get()}
  {}
  /// From owners and views of other libraries that convert to a cudaStream_t.
  template <class Stream>
    requires std::is_class_v<Stream> && std::is_convertible_v<Stream const&, cudaStream_t> &&
    (!requires(Stream const& lent) { lent.get(); })
  cuda_stream_ref(Stream const& lent) noexcept : cuda_stream_ref{static_cast<cudaStream_t>(lent)}
  {}

  cuda_stream_ref(cudaStream_t made, std::uint32_t at, std::uint32_t number) noexcept
    : stream{made}, index{at}, generation{number}
  {}

  /// The legacy default stream, which waits for all others and which batched copies don't take.
  [[nodiscard]] bool is_legacy_default() const noexcept { return stream == nullptr || stream == cudaStreamLegacy; }

  friend bool operator==(cuda_stream_ref const&, cuda_stream_ref const&) = default;
};

static_assert(std::is_trivially_copyable_v<cuda_stream_ref>);

}  // namespace pulseinfer
