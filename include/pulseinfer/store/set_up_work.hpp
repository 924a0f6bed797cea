#pragma once

/// Runs work at set-up to its end, on a stream of its own.

#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/detail/handles.hpp>
#include <pulseinfer/error.hpp>

#include <string>

namespace pulseinfer {

/// Calls `enqueue(stream)` and returns once what it enqueued is complete. Where anything is refused or fails, nothing of it is
/// under way any more when the exception leaves: what the work names may be freed.
/// @param what begins the exception's text   @param enqueue returns a status
/// @throws resource_error where a call is refused or the work fails; what `enqueue` throws
template <class B, class Enqueue>
void set_up_work(B& backend, std::string const& what, Enqueue&& enqueue)
{
  detail::owned_event<B> const ended{backend};
  // Goes first, and runs out what it holds: no wait that could be refused stands between the work and its memory.
  detail::owned_stream<B> const stream{backend, stream_priority::normal};
  auto const require = [&](status result, char const* call) {
    if (result != status::ok) { throw resource_error{what + ": " + call + ": " + name_of(result)}; }
  };
  typename B::event_ref const event = ended.get();
  require(enqueue(stream.get()), "enqueue");
  require(backend.record(stream.get(), event), "record");
  require(backend.wait_any({&event, 1}, no_deadline), "wait");
  // The wait ends for failed work as for done work.
  require(backend.done(event) == event_state::done ? status::ok : status::transfer_failed, "run");
}

}  // namespace pulseinfer
