#pragma once

/// Pinned memory of a backend that grows in place.

#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/detail/abandonment.hpp>
#include <pulseinfer/error.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>

namespace pulseinfer {

/// A backend that takes addresses at once and memory for them later. `add_pinned` may be called from any thread.
template <class B>
concept grows_pinned_memory =
  memory_source<B> && requires(B& backend, void* begin, std::size_t bytes, std::size_t threads) {
    { backend.reserve_pinned(bytes) } -> std::same_as<void*>;  // 2 MiB aligned; may throw resource_error
    {
      backend.add_pinned(begin, bytes, threads)
    } -> std::same_as<std::string>;  // empty, or why not; may throw resource_error
    { backend.release_pinned(begin) } noexcept;
  };

/// Bounds of what is added are multiples of this: pages that are registered belong to one registration.
inline constexpr std::uint64_t growth_grain_bytes = std::uint64_t{2} << 20U;

/// Owns a stretch of addresses and what memory it has. The backend must outlive it.
template <class B>
class growing_slab {
 public:
  growing_slab() = default;

  /// @throws configuration_error where the backend's memory does not grow; resource_error
  growing_slab(B& backend, std::uint64_t bytes) : backend_{&backend}
  {
    if (bytes == 0) { return; }
    if constexpr (grows_pinned_memory<B>) {
      data_ = static_cast<std::byte*>(backend.reserve_pinned(static_cast<std::size_t>(bytes)));
    } else {
      throw configuration_error{"a host store that grows, on a backend whose pinned memory does not"};
    }
  }
  growing_slab(growing_slab&&) = delete;
  ~growing_slab()
  {
    if constexpr (grows_pinned_memory<B>) {
      if (data_ != nullptr && !detail::abandonment::under_way()) { backend_->release_pinned(data_); }
    }
  }

  /// @param threads that make pages; 1: the calling one
  /// @return empty, or why the stretch has no memory there   @thread_safety any thread
  [[nodiscard]] std::string add(std::uint64_t offset, std::uint64_t bytes, std::size_t threads) noexcept
  {
    if constexpr (grows_pinned_memory<B>) {
      try {
        return backend_->add_pinned(data_ + offset, static_cast<std::size_t>(bytes), threads);
      } catch (resource_error const& refused) {
        return refused.what();
      }
    } else {
      return "this backend's memory does not grow";
    }
  }

  [[nodiscard]] std::byte* data() const noexcept { return data_; }

 private:
  B* backend_ = nullptr;
  std::byte* data_ = nullptr;
};

}  // namespace pulseinfer
