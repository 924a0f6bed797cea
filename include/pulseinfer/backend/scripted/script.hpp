#pragma once

/// What a scripted backend is to do: in which order tasks run, how copies move their bytes, and which calls fail or are late.

#include <pulseinfer/backend/memory_ledger.hpp>
#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/copy_list.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

namespace pulseinfer {

enum class script_call : std::uint8_t { launch, copy, record, wait, done, create_event, create_stream, allocate };

/// A call as a rule sees it. Fields that do not belong to the call hold their defaults.
struct script_task {
  script_call call = script_call::launch;
  char const* name = "";          ///< launch: the operation's; copy: "copy to device", "copy to host", "copy on device"
  std::uint32_t stream = 0;       ///< index of the stream
  std::uint32_t recorded_on = 0;  ///< wait, done: index of the stream on which the event was recorded
  copy_list runs = {};            ///< copy
  memory_space space = memory_space::device;  ///< allocate
  std::size_t bytes = 0;                      ///< allocate
};

enum class script_effect : std::uint8_t {
  refuse,  ///< the call returns `code`, or throws resource_error where it has no status, and changes nothing
  fail,    ///< launch, copy: does nothing when its turn comes; see scripted_backend
  lose,    ///< launch, copy: as `fail`, and the device is lost from then on
  swallow,  ///< launch, copy: does nothing when its turn comes, and counts as done. Test-only: what goes wrong unnoticed?
  delay,    ///< launch, copy: completes `delay` after its stream came to it
  drop,     ///< wait: returns ok and orders nothing. Test-only: what goes wrong without the wait?
  hurry     ///< done: says done, pending or failed as the event may be. Test-only: what goes wrong where nobody asks?
};

/// Delay of a task that completes when release() is called, or never.
inline constexpr nanoseconds never = nanoseconds::max();

struct script_rule {
  static constexpr std::uint64_t unlimited = std::numeric_limits<std::uint64_t>::max();

  script_effect effect = script_effect::refuse;
  script_call call = script_call::launch;
  std::string name = {};                               ///< names to which it applies; empty: all
  std::function<bool(script_task const&)> where = {};  ///< further condition; empty: none
  std::uint64_t first = 0;                   ///< of the calls that fit so far, counted from 0: from this one on
  std::uint64_t count = unlimited;           ///< how many of them
  double probability = 1.0;                  ///< of each; drawn in the order of the calls from `fault_seed`
  status code = status::resource_exhausted;  ///< refuse
  nanoseconds delay{0};                      ///< delay
};

/// `late_read`: a copy reads and writes its bytes when it completes. `early_write`: it does so as soon as its stream comes to
/// it, at submission where the stream is idle, and completes later.
enum class copy_mode : std::uint8_t { late_read, early_write };

/// `enqueued`: the runnable task that was enqueued first. `seeded`: drawn. `given`: choices[i] at the i-th choice, then as
/// enqueued.
enum class order_kind : std::uint8_t { enqueued, seeded, given };

/// When tasks may run beside waits, synchronize and destroy_stream, where they have to.
enum class progress : std::uint8_t {
  at_waits,     ///< never: the device is as late as it can be
  at_polls,     ///< also before each `done`
  at_all_calls  ///< also before each launch, copy, record, wait and `done`
};

struct script {
  order_kind order = order_kind::enqueued;
  std::uint64_t seed = 1;
  std::vector<std::uint32_t> choices = {};
  progress runs = progress::at_waits;
  copy_mode copies = copy_mode::late_read;
  std::vector<script_rule> rules = {};
  std::uint64_t fault_seed = 1;
  nanoseconds task_time = std::chrono::microseconds{1};  ///< what each task adds to now()
  bool keep_history = false;

  std::uint32_t max_streams = 16;
  std::uint32_t max_events = 1024;
  std::uint32_t queue_depth = 4096;
  std::uint32_t max_copy_runs = 65536;  ///< of one call
  std::size_t max_scratch_bytes = std::size_t{1} << 20U;
  memory_limits memory = {};
};

/// One choice that was made: `taken` of `ways`. Ways 0 .. are the runnable tasks in the order of enqueuing; where the device
/// need not run at all, way 0 is that it does not.
struct choice {
  std::uint32_t taken = 0;
  std::uint32_t ways = 1;
};

/// The choices as text, "0 2 1": script::choices reads it back by choices_from.
[[nodiscard]] inline std::string text_of(std::vector<choice> const& choices)
{
  std::string text;
  for (choice const& c : choices) { text += (text.empty() ? "" : " ") + std::to_string(c.taken); }
  return text;
}

/// @throws argument_error for a text that is not numbers and spaces
[[nodiscard]] inline std::vector<std::uint32_t> choices_from(std::string const& text)
{
  std::vector<std::uint32_t> choices;
  bool open = false;
  for (char const c : text) {
    if (c == ' ') {
      open = false;
      continue;
    }
    if (c < '0' || c > '9') {
      throw argument_error{status::invalid_argument, "choices \"" + text + "\" are not numbers and spaces"};
    }
    if (!open) { choices.push_back(0); }
    open = true;
    choices.back() = choices.back() * 10 + static_cast<std::uint32_t>(c - '0');
  }
  return choices;
}

/// What a scripted backend has seen so far.
struct script_counts {
  std::uint64_t launches = 0;            ///< accepted, with something to do
  std::uint64_t copies = 0;              ///< likewise
  std::uint64_t copied_bytes = 0;        ///< of the copies that were accepted
  std::uint64_t completed = 0;           ///< launches and copies that did their work
  std::uint64_t failed = 0;              ///< by `fail` or `lose`
  std::uint64_t swallowed = 0;           ///< by `swallow`
  std::uint64_t skipped = 0;             ///< behind a failed one
  std::uint64_t refused = 0;             ///< calls, by `refuse`
  std::uint64_t dropped_waits = 0;       ///< by `drop`
  std::uint64_t hurried = 0;             ///< answers by `hurry` that were not true
  std::uint64_t orphan_completions = 0;  ///< records that were reached when their event had been destroyed
  std::uint64_t freed_under_copy = 0;    ///< copies that had yet to complete when memory that they name went back
  std::uint64_t events_created = 0;
  std::uint64_t live_events_peak = 0;
};

}  // namespace pulseinfer
