#pragma once

/// One piece of a backend's memory.

#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/detail/abandonment.hpp>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace pulseinfer {

/// Owns `bytes` of memory; its owner must not outlive the backend. Empty where `bytes` is 0.
template <class B>
class slab {
 public:
  static_assert(memory_source<B>, "a slab needs a backend that allocates");

  slab() = default;

  /// @throws resource_error from the backend
  slab(B& backend, memory_space space, std::uint64_t bytes) : backend_{&backend}, space_{space}, bytes_{bytes}
  {
    if (bytes != 0) { data_ = static_cast<std::byte*>(backend.allocate(space, static_cast<std::size_t>(bytes))); }
  }

  slab(slab&& other) noexcept
    : backend_{other.backend_},
      data_{std::exchange(other.data_, nullptr)},
      space_{other.space_},
      bytes_{std::exchange(other.bytes_, 0)}
  {}
  slab& operator=(slab&& other) noexcept
  {
    slab taken{std::move(other)};
    std::swap(backend_, taken.backend_);
    std::swap(data_, taken.data_);
    std::swap(space_, taken.space_);
    std::swap(bytes_, taken.bytes_);
    return *this;
  }
  ~slab()
  {
    if (data_ != nullptr && !detail::abandonment::under_way()) {
      backend_->deallocate(space_, data_, static_cast<std::size_t>(bytes_));
    }
  }

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

  /// The memory as an array of T, begun where the memory begins.
  template <class T>
  [[nodiscard]] T* as() const noexcept
  {
    return reinterpret_cast<T*>(data_);
  }

 private:
  B* backend_ = nullptr;
  std::byte* data_ = nullptr;
  memory_space space_ = memory_space::device;
  std::uint64_t bytes_ = 0;
};

}  // namespace pulseinfer
