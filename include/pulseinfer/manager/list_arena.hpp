#pragma once

/// Row lists at addresses that the device reads, for as long as the work that names them may run.

#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/store/slab.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/row_list.hpp>

#include <cstdint>

namespace pulseinfer {

/// Bump memory in four parts, one per step: a part is used again four steps later, by when the staging ring has seen the
/// device past the step that used it.
template <class B>
class list_arena {
 public:
  static constexpr std::uint32_t parts = 4;

  list_arena(B& backend, std::uint64_t ids_per_step)
    : ids_{ids_per_step}, memory_{backend, memory_space::pinned, parts * ids_per_step * sizeof(row_id)}
  {}

  void next_step() noexcept
  {
    part_ = (part_ + 1) % parts;
    used_ = 0;
  }

  /// Room for `count` ids; nullptr where the step's part is used up.
  [[nodiscard]] row_id* take(std::uint64_t count) noexcept
  {
    if (used_ + count > ids_) { return nullptr; }
    row_id* const list = memory_.template as<row_id>() + part_ * ids_ + used_;
    used_ += count;
    return list;
  }

 private:
  std::uint64_t ids_;
  slab<B> memory_;
  std::uint32_t part_ = 0;
  std::uint64_t used_ = 0;
};

}  // namespace pulseinfer
