#pragma once

/// How failures are told: exceptions at set-up, a status in the step path.

#include <cstdint>
#include <stdexcept>
#include <string>

namespace pulseinfer {

/// Result of a call on the step path. No call that returns it throws or allocates.
enum class [[nodiscard]] status : std::uint8_t {
  ok,
  busy,                 ///< A bounded resource (ring, lease, flight) is taken for now; the call changed nothing.
  capacity_exceeded,    ///< The request can never fit the configured sizes.
  invalid_argument,     ///< A value the contract excludes; nothing changed.
  invalid_state,        ///< The call does not fit the object's state; nothing changed.
  out_of_range,         ///< An id or position outside its range; nothing changed.
  transfer_failed,      ///< A copy was refused or failed after its last try.
  stale_ticket,         ///< The ticket's place in the ring has been given to a later recall.
  aborted,              ///< The sequence was aborted or closed meanwhile.
  stalled,              ///< No slot could be freed for this row in time.
  resource_exhausted,   ///< A backend handle (event, stream, queue place) is not to be had.
  capture_unsupported,  ///< Not possible while the stream is being captured.
  drain_timeout,        ///< Work was still flying at the deadline.
  device_lost           ///< The device reported an error that outlives the call; host copies stay readable.
};

[[nodiscard]] constexpr char const* name_of(status value)
{
  switch (value) {
    case status::ok: return "ok";
    case status::busy: return "busy";
    case status::capacity_exceeded: return "capacity_exceeded";
    case status::invalid_argument: return "invalid_argument";
    case status::invalid_state: return "invalid_state";
    case status::out_of_range: return "out_of_range";
    case status::transfer_failed: return "transfer_failed";
    case status::stale_ticket: return "stale_ticket";
    case status::aborted: return "aborted";
    case status::stalled: return "stalled";
    case status::resource_exhausted: return "resource_exhausted";
    case status::capture_unsupported: return "capture_unsupported";
    case status::drain_timeout: return "drain_timeout";
    case status::device_lost: return "device_lost";
  }
  return "unknown";
}

/// Base of every exception the library throws. The text begins with the status' name and carries the numbers.
class error : public std::runtime_error {
 public:
  error(status code, std::string const& text)
    : std::runtime_error{std::string{name_of(code)} + ": " + text}, code_{code}
  {}

  [[nodiscard]] status code() const noexcept { return code_; }

 private:
  status code_;
};

/// A configuration that cannot work, found at construction.
class configuration_error : public error {
 public:
  explicit configuration_error(std::string const& text) : error{status::invalid_argument, text} {}
};

/// A precondition on arguments of a set-up call.
class argument_error : public error {
 public:
  using error::error;
};

/// Memory or a backend handle that could not be had at construction.
class resource_error : public error {
 public:
  explicit resource_error(std::string const& text) : error{status::resource_exhausted, text} {}
};

/// Copies that were still flying when a wait ended.
class transfer_error : public error {
 public:
  using error::error;
};

}  // namespace pulseinfer
