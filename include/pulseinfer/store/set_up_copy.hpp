#pragma once

/// Fills memory at set-up, when nothing else uses it yet.

#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/view/copy_list.hpp>

#include <cstddef>
#include <cstdint>
#include <string>

namespace pulseinfer {

/// Copies `bytes` from pinned to device memory and returns once they are there.
/// @throws resource_error where the backend refuses
template <class B>
void set_up_copy(B& backend, std::byte* target, std::byte const* source, std::uint64_t bytes)
{
  static_assert(copier<B> && event_source<B>, "a set-up copy needs a backend that copies and has events");
  if (bytes == 0) { return; }

  struct handles {
    explicit handles(B& owner) : backend{owner}, stream{owner.create_stream(stream_priority::normal)}
    {
      try {
        event = owner.create_event();
      } catch (...) {
        owner.destroy_stream(stream);
        throw;
      }
    }
    handles(handles&&) = delete;
    ~handles()
    {
      backend.destroy_event(event);
      backend.destroy_stream(stream);
    }
    B& backend;
    typename B::stream_ref stream;
    typename B::event_ref event{};
  } const used{backend};

  auto const require = [&](status result, char const* call) {
    if (result != status::ok) {
      throw resource_error{std::string{call} + " of " + std::to_string(bytes) + " B at set-up: " + name_of(result)};
    }
  };
  copy_run const run{.target = target, .source = source, .bytes = bytes};
  require(backend.copy(used.stream, {.runs = &run, .count = 1, .direction = copy_direction::host_to_device}), "copy");
  require(backend.record(used.stream, used.event), "record");
  require(backend.wait_any({&used.event, 1}, no_deadline), "wait");
}

}  // namespace pulseinfer
