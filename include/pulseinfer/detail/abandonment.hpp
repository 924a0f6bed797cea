#pragma once

/// Lets an owner end while its device still works on what it owns.

#include <cstdint>

namespace pulseinfer::detail {

/// From `begin` to the end of its life, owners of memory and handles that end on this thread leave them to the device: freeing
/// memory under a copy is worse than losing it. Declared before its fellow members, so that it ends after them.
class abandonment {
 public:
  abandonment() = default;
  abandonment(abandonment&&) = delete;
  ~abandonment()
  {
    if (begun_) { --depth_; }
  }

  void begin() noexcept
  {
    begun_ = true;
    ++depth_;
  }
  [[nodiscard]] static bool under_way() noexcept { return depth_ != 0; }

 private:
  static inline thread_local std::uint32_t depth_ = 0;
  bool begun_ = false;
};

}  // namespace pulseinfer::detail
