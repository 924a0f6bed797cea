#pragma once

/// The backends of the contract suite that run on the host.

#include "backend/backend_contract.hpp"
#include <pulseinfer/backend/checked.hpp>
#include <pulseinfer/backend/cpu/cpu_backend.hpp>
#include <pulseinfer/backend/host_function.hpp>
#include <pulseinfer/backend/scripted/scripted_backend.hpp>
#include <pulseinfer/backend/sim/sim_backend.hpp>
#include <pulseinfer/backend/traced.hpp>

#include <doctest/doctest.h>

#include <condition_variable>
#include <mutex>

namespace pulseinfer_test {

using namespace pulseinfer;

/// Closed until it is opened.
class gate {
 public:
  void close()
  {
    std::unique_lock lock{mutex_};
    open_ = false;
  }
  void open()
  {
    std::unique_lock lock{mutex_};
    open_ = true;
    condition_.notify_all();
  }
  void pass()
  {
    std::unique_lock lock{mutex_};
    condition_.wait(lock, [&] { return open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable condition_;
  bool open_ = false;
};

[[nodiscard]] inline cpu_options contract_options(cpu_mode mode)
{
  return {
    .mode = mode,
    .max_streams = contract_sizes::streams,
    .max_events = contract_sizes::events,
    .queue_depth = contract_sizes::queue_depth,
    .max_copy_runs = contract_sizes::copy_runs,
    .max_scratch_bytes = contract_sizes::scratch_bytes,
    .memory = {contract_sizes::memory_bytes, contract_sizes::memory_bytes}};
}

/// Work that takes `held_for` on a virtual clock.
struct charged_operation : archetype::operation {
  static constexpr char const* name = "charged";
  nanoseconds takes = held_for;

  [[nodiscard]] launch_shape shape() const { return {.items = 1}; }
  [[nodiscard]] operation_cost cost() const { return {.device_bytes = static_cast<std::uint64_t>(takes.count())}; }
};

template <template <class> class Wrapped>
struct cpu_threaded_with {
  static constexpr bool has_held_work_pending = true;
  static constexpr bool moves_bytes = true;

  // The gate outlives the backend, whose end waits for work that may stand at it.
  gate held;
  Wrapped<cpu_backend> made{contract_options(cpu_mode::threaded)};

  ~cpu_threaded_with() { held.open(); }

  auto& backend() { return made; }
  template <class Stream>
  void hold(Stream stream)
  {
    held.close();
    REQUIRE(made.launch(stream, host_function{[this] { held.pass(); }}) == status::ok);
  }
  void release() { held.open(); }
};

template <template <class> class Wrapped>
struct cpu_manual_with {
  static constexpr bool has_held_work_pending = false;
  static constexpr bool moves_bytes = true;

  Wrapped<cpu_backend> made{contract_options(cpu_mode::manual)};

  auto& backend() { return made; }
  template <class Stream>
  void hold(Stream stream)
  {
    // 40 tasks of 1 us each lie before anything that is enqueued later.
    for (int i = 0; i < 40; ++i) { REQUIRE(made.launch(stream, charged_operation{}) == status::ok); }
  }
  void release() {}
};

template <class B>
using plain = B;

using cpu_threaded = cpu_threaded_with<plain>;
using cpu_manual = cpu_manual_with<plain>;

[[nodiscard]] inline sim_options contract_sim_options()
{
  return {
    .max_streams = contract_sizes::streams,
    .max_events = contract_sizes::events,
    .queue_depth = contract_sizes::queue_depth,
    .max_copy_runs = contract_sizes::copy_runs,
    .max_scratch_bytes = contract_sizes::scratch_bytes,
    .memory = {contract_sizes::memory_bytes, contract_sizes::memory_bytes},
    .move_data = true,
    .compute = {nanoseconds{10}, 1e9, 1e9}};  // one byte a nanosecond
}

template <template <class> class Wrapped>
struct sim_with {
  static constexpr bool has_held_work_pending = true;
  static constexpr bool moves_bytes = true;

  Wrapped<sim_backend> made{contract_sim_options()};

  auto& backend() { return made; }
  template <class Stream>
  void hold(Stream stream)
  {
    REQUIRE(made.launch(stream, charged_operation{}) == status::ok);
  }
  void release() {}
};

using sim = sim_with<plain>;

[[nodiscard]] inline script contract_script(order_kind order, copy_mode copies, progress runs)
{
  return {
    .order = order,
    .seed = 5,
    .runs = runs,
    .copies = copies,
    .rules = {{.effect = script_effect::delay, .name = charged_operation::name, .delay = held_for}},
    .task_time = nanoseconds{1},
    .max_streams = contract_sizes::streams,
    .max_events = contract_sizes::events,
    .queue_depth = contract_sizes::queue_depth,
    .max_copy_runs = contract_sizes::copy_runs,
    .max_scratch_bytes = contract_sizes::scratch_bytes,
    .memory = {contract_sizes::memory_bytes, contract_sizes::memory_bytes}};
}

template <
  order_kind Order, copy_mode Copies, progress Runs = progress::at_waits, template <class> class Wrapped = plain>
struct scripted_with {
  static constexpr bool has_held_work_pending = true;
  static constexpr bool moves_bytes = true;

  Wrapped<scripted_backend> made{contract_script(Order, Copies, Runs)};

  auto& backend() { return made; }
  template <class Stream>
  void hold(Stream stream)
  {
    REQUIRE(made.launch(stream, charged_operation{}) == status::ok);
  }
  void release() {}
};

template <class B>
using traced_and_checked = traced<checked<B>>;

}  // namespace pulseinfer_test
