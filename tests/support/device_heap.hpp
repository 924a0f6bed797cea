#pragma once

/// A heap that host and device reach by the same addresses: scenes of vectors that CPU tests use run on a GPU as they are.
/// Include it in one source of a program; it replaces the program's operator new.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <sys/mman.h>
#include <vector>

namespace pulseinfer_test {

/// Memory from `begin()` on, given out in ascending order while a device_heap_scope lives and never given back before the
/// last one ends. The program must make [begin(), begin() + size) readable by the device.
class device_heap {
 public:
  static constexpr std::size_t size = std::size_t{64} << 20U;

  static std::byte* begin()
  {
    static std::byte* const memory = [] {
      void* const mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (mapped == MAP_FAILED) { std::abort(); }
      return static_cast<std::byte*>(mapped);
    }();
    return memory;
  }
  static std::size_t used() { return used_; }
  static bool holds(void const* pointer)
  {
    auto const* const at = static_cast<std::byte const*>(pointer);
    return at >= begin() && at < begin() + size;
  }

  static void* take(std::size_t bytes, std::size_t alignment)
  {
    std::size_t const at = (used_ + alignment - 1) / alignment * alignment;
    if (at + bytes > size) { std::abort(); }
    used_ = at + bytes;
    return begin() + at;
  }

  // Compilers may take it that operator new reads and writes nothing that the program sees.
  static inline bool volatile active = false;
  static inline std::size_t volatile used_ = 0;
};

/// While it lives, `new` takes from the device heap; `paused` turns that off and on again.
struct device_heap_scope {
  device_heap_scope() { device_heap::active = true; }
  ~device_heap_scope()
  {
    device_heap::active = false;
    device_heap::used_ = 0;
  }
  device_heap_scope(device_heap_scope&&) = delete;
};
struct device_heap_pause {
  device_heap_pause() { device_heap::active = false; }
  ~device_heap_pause() { device_heap::active = true; }
  device_heap_pause(device_heap_pause&&) = delete;
};

}  // namespace pulseinfer_test

namespace pulseinfer_test {

inline void* take_memory(std::size_t bytes, std::size_t alignment)
{
  if (device_heap::active) { return device_heap::take(bytes, alignment); }
  std::size_t const whole = (bytes + alignment) / alignment * alignment;
  void* const memory = std::aligned_alloc(alignment, whole);
  if (memory == nullptr) { std::abort(); }
  return memory;
}

inline void give_memory_back(void* pointer) noexcept
{
  if (!device_heap::holds(pointer)) { std::free(pointer); }
}

}  // namespace pulseinfer_test

#if !defined(__CUDA_ARCH__)  // nvcc would compile them for the device too
void* operator new(std::size_t bytes) { return pulseinfer_test::take_memory(bytes, 16); }
void* operator new[](std::size_t bytes) { return pulseinfer_test::take_memory(bytes, 16); }
void* operator new(std::size_t bytes, std::align_val_t alignment)
{
  return pulseinfer_test::take_memory(bytes, std::max(std::size_t{16}, static_cast<std::size_t>(alignment)));
}
void operator delete(void* pointer) noexcept { pulseinfer_test::give_memory_back(pointer); }
void operator delete[](void* pointer) noexcept { pulseinfer_test::give_memory_back(pointer); }
void operator delete(void* pointer, std::size_t) noexcept { pulseinfer_test::give_memory_back(pointer); }
void operator delete[](void* pointer, std::size_t) noexcept { pulseinfer_test::give_memory_back(pointer); }
void operator delete(void* pointer, std::align_val_t) noexcept { pulseinfer_test::give_memory_back(pointer); }
void operator delete(void* pointer, std::size_t, std::align_val_t) noexcept
{
  pulseinfer_test::give_memory_back(pointer);
}
#endif
