#pragma once

/// A small table that the host fills at set-up and that both sides read.

#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/store/set_up_copy.hpp>
#include <pulseinfer/store/slab.hpp>

#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// One copy in pinned memory, for the host, and one in device memory, so that no kernel waits a turn of the link for a word that
/// never changes. Where the host reads device memory they are the same.
template <class T, class B>
class device_table {
  static_assert(std::is_trivially_copyable_v<T>);
  static constexpr bool same = requires { requires B::host_reads_device_memory; };

 public:
  /// @throws resource_error
  device_table(B& backend, std::uint64_t count)
    : host_{backend, memory_space::pinned, count * sizeof(T)},
      device_{backend, memory_space::device, same ? 0 : count * sizeof(T)}
  {}

  /// Filled by the owner before `publish`.
  [[nodiscard]] T* host() const noexcept { return host_.template as<T>(); }
  [[nodiscard]] T* device() const noexcept { return same ? host() : device_.template as<T>(); }

  /// Copies the table to the device, to its end.   @throws resource_error
  void publish(B& backend)
  {
    if constexpr (!same) { set_up_copy(backend, device_.data(), host_.data(), host_.bytes()); }
  }

  [[nodiscard]] std::uint64_t host_bytes() const noexcept { return host_.bytes(); }

 private:
  slab<B> host_;
  slab<B> device_;  // empty where the host's copy is the device's
};

}  // namespace pulseinfer
