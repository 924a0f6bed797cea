#pragma once

/// Fills memory at set-up, when nothing else uses it yet.

#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/store/set_up_work.hpp>
#include <pulseinfer/view/copy_list.hpp>

#include <cstddef>
#include <cstdint>
#include <string>

namespace pulseinfer {

/// Copies `bytes` from pinned to device memory and returns once they are there.
/// @throws resource_error where the backend refuses or the copy fails
template <class B>
void set_up_copy(B& backend, std::byte* target, std::byte const* source, std::uint64_t bytes)
{
  static_assert(copier<B> && event_source<B>, "a set-up copy needs a backend that copies and has events");
  if (bytes == 0) { return; }
  copy_run const run{.target = target, .source = source, .bytes = bytes};
  set_up_work(backend, "copy of " + std::to_string(bytes) + " B at set-up", [&](typename B::stream_ref stream) {
    return backend.copy(stream, {.runs = &run, .count = 1, .direction = copy_direction::host_to_device});
  });
}

}  // namespace pulseinfer
