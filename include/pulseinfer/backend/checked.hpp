#pragma once

/// A backend that watches over memory: poison, bounds and freed ranges.

#include <pulseinfer/backend/host_function.hpp>
#include <pulseinfer/backend/memory_ledger.hpp>
#include <pulseinfer/backend/observation.hpp>
#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/types.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <exception>
#include <iterator>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace pulseinfer {

/// Byte of memory that nobody has written since it was allocated or freed: NaN in every floating-point type of a KV cache, -1 in
/// every id.
inline constexpr std::byte poison_byte{0xFF};

struct check_options {
  std::uint64_t quarantine_bytes = std::uint64_t{64}
    << 20U;                           ///< freed memory that is kept, and watched, before it goes back
  std::uint32_t max_violations = 64;  ///< texts that are kept; all are counted
};

namespace detail {

/// Gives each item scratch that is poisoned anew.
template <operation Op>
struct poisoned_operation {
  static constexpr char const* name = Op::name;
  static constexpr operation_kind kind = Op::kind;
  static constexpr bool host_only = is_host_only<Op>;

  Op op;

  [[nodiscard]] launch_shape shape() const { return op.shape(); }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t threads) const { return op.scratch_bytes(threads); }
  [[nodiscard]] operation_cost cost() const { return op.cost(); }
  template <thread_group Group>
  void operator()(Group const& group, std::uint64_t item, scratch_ref scratch) const
  {
    for (std::size_t i = group.thread_rank(); i < scratch.bytes; i += group.size()) { scratch.data[i] = poison_byte; }
    group.sync();
    op(group, item, scratch);
  }
};

/// Backends whose device memory the host may fill and read say so.
template <class B>
inline constexpr bool host_reads_device_memory = requires { requires B::host_reads_device_memory; };

}  // namespace detail

/// Decorator of `B`. Fresh and freed memory is poisoned. Every run of a copy must lie in one live allocation of the space that the
/// direction names, or in memory that was lent; else `copy` returns out_of_range, enqueues nothing and leaves a sentence in
/// violations(). Freed memory goes back to `B` only when the quarantine is full or `B` has none left, and what was written to it
/// meanwhile is a violation. Freeing what is not allocated, or as another size or space, is a violation and frees nothing else.
///
/// Where the host can't read device memory, device memory is neither poisoned nor watched; bounds hold there too.
/// @thread_safety as `B`
template <class B>
class checked {
  static_assert(backend<B>, "checked decorates a backend");

 public:
  using stream_ref = typename B::stream_ref;
  using event_ref = typename B::event_ref;

  static constexpr bool host_reads_device_memory = detail::host_reads_device_memory<B>;
  static constexpr bool prefers_few_launches = pulseinfer::prefers_few_launches<B>;

  /// Arguments are those of `B`.
  template <class... Args>
    requires std::constructible_from<B, Args...>
  explicit checked(Args&&... args) : checked{check_options{}, std::forward<Args>(args)...}
  {}

  template <class... Args>
    requires std::constructible_from<B, Args...>
  explicit checked(check_options options, Args&&... args) : options_{options}, base_{std::forward<Args>(args)...}
  {
    texts_.reserve(options.max_violations);
  }

  checked(checked const&) = delete;
  checked& operator=(checked const&) = delete;

  ~checked()
  {
    // Copies that name freed memory may still fly.
    if constexpr (requires { base_.synchronize(); }) { static_cast<void>(base_.synchronize()); }
    while (!quarantine_.empty()) { release_oldest(); }
  }

  [[nodiscard]] stream_ref create_stream(stream_priority priority = stream_priority::normal)
  {
    return base_.create_stream(priority);
  }
  void destroy_stream(stream_ref stream) noexcept { base_.destroy_stream(stream); }

  template <operation Op>
  status launch(stream_ref stream, Op const& op) noexcept
  {
    if constexpr (host_reads_device_memory) {
      return base_.launch(stream, detail::poisoned_operation<Op>{op});
    } else {
      return base_.launch(stream, op);
    }
  }

  template <operation Op>
  status launch(stream_ref stream, Op const& op, observation* observed) noexcept
    requires observed_backend<B>
  {
    if constexpr (host_reads_device_memory) {
      return base_.launch(stream, detail::poisoned_operation<Op>{op}, observed);
    } else {
      return base_.launch(stream, op, observed);
    }
  }

  /// @status out_of_range, and a violation, when a run leaves the memory that it may name; else as `B`
  status copy(stream_ref stream, copy_list runs) noexcept
  {
    return lies_in_memory(runs) ? base_.copy(stream, runs) : status::out_of_range;
  }

  status copy(stream_ref stream, copy_list runs, observation* observed) noexcept
    requires observed_backend<B>
  {
    return lies_in_memory(runs) ? base_.copy(stream, runs, observed) : status::out_of_range;
  }

  [[nodiscard]] event_ref create_event() { return base_.create_event(); }
  void destroy_event(event_ref event) noexcept { base_.destroy_event(event); }
  status record(stream_ref stream, event_ref event) noexcept { return base_.record(stream, event); }
  status wait(stream_ref stream, event_ref event) noexcept { return base_.wait(stream, event); }
  [[nodiscard]] event_state done(event_ref event) noexcept { return base_.done(event); }
  status wait_any(std::span<event_ref const> events, nanoseconds deadline) noexcept
  {
    return base_.wait_any(events, deadline);
  }

  /// @return poisoned memory   @throws resource_error as `B`, once the quarantine is empty
  [[nodiscard]] void* allocate(memory_space space, std::size_t bytes)
  {
    std::unique_lock lock{mutex_};
    void* pointer = nullptr;
    try {
      pointer = base_.allocate(space, bytes);
    } catch (resource_error const&) {
      if (quarantine_.empty()) { throw; }
      while (!quarantine_.empty()) { release_oldest(); }
      pointer = base_.allocate(space, bytes);
    }
    if (pointer == nullptr) { return nullptr; }
    try {
      ranges_.insert_or_assign(address(pointer), range{bytes, space, state::live});
    } catch (...) {
      base_.deallocate(space, pointer, bytes);
      throw;
    }
    fill(space, pointer, bytes);
    return pointer;
  }

  void deallocate(memory_space space, void* pointer, std::size_t bytes) noexcept
  {
    if (pointer == nullptr) { return; }
    std::unique_lock lock{mutex_};
    auto const found = ranges_.find(address(pointer));
    if (found == ranges_.end() || found->second.is != state::live) {
      bool const twice = found != ranges_.end() && found->second.is == state::freed;
      note("deallocate: %p was %s", pointer, twice ? "freed before" : "not allocated here");
      return;
    }
    range& freed = found->second;
    if (freed.bytes != bytes || freed.space != space) {
      note(
        "deallocate: %p is %s memory of %zu B, freed as %s memory of %zu B", pointer, name_of(freed.space),
        static_cast<std::size_t>(freed.bytes), name_of(space), bytes);
    }
    fill(freed.space, pointer, freed.bytes);
    freed.is = state::freed;
    quarantined_bytes_ += freed.bytes;
    try {
      quarantine_.push_back(address(pointer));
    } catch (std::exception const&) {
      release(found);
    }
    while (quarantined_bytes_ > options_.quarantine_bytes && !quarantine_.empty()) { release_oldest(); }
  }

  [[nodiscard]] nanoseconds now() const noexcept { return base_.now(); }

  [[nodiscard]] bool is_capturing(stream_ref stream) const noexcept
    requires requires(B const& b, stream_ref s) { b.is_capturing(s); }
  {
    return base_.is_capturing(stream);
  }
  status synchronize(stream_ref stream) noexcept
    requires requires(B& b, stream_ref s) { b.synchronize(s); }
  {
    return base_.synchronize(stream);
  }
  status synchronize() noexcept
    requires requires(B& b) { b.synchronize(); }
  {
    return base_.synchronize();
  }

  /// Memory of the host engine that copies may name until it is taken back. Neither poisoned nor freed here.
  /// @throws argument_error when it overlaps memory that is known
  void lend(memory_space space, void const* pointer, std::size_t bytes)
  {
    std::unique_lock lock{mutex_};
    std::uintptr_t const begin = address(pointer);
    auto const next = ranges_.lower_bound(begin);
    bool const hits_next = next != ranges_.end() && next->first - begin < bytes;
    bool const hits_previous =
      next != ranges_.begin() && begin - std::prev(next)->first < std::prev(next)->second.bytes;
    if (hits_next || hits_previous) {
      char text[96];
      std::snprintf(text, sizeof(text), "lend: %p + %zu B overlaps memory that is known already", pointer, bytes);
      throw argument_error{status::invalid_argument, text};
    }
    ranges_.insert_or_assign(begin, range{bytes, space, state::lent});
  }

  void take_back(void const* pointer) noexcept
  {
    std::unique_lock lock{mutex_};
    auto const found = ranges_.find(address(pointer));
    if (found == ranges_.end() || found->second.is != state::lent) {
      note("take_back: %p was not lent", pointer);
      return;
    }
    ranges_.erase(found);
  }

  /// Poisons part of an allocation that its owner has freed for itself: a slot, a host block, the tail of a block. At once, not in
  /// stream order.
  /// @status out_of_range, and a violation, when it does not lie in live memory of `space`
  status poison(memory_space space, void* pointer, std::size_t bytes) noexcept
  {
    std::unique_lock lock{mutex_};
    if (!lies_in(space, pointer, bytes, "poison", 0, 1)) { return status::out_of_range; }
    fill(space, pointer, bytes);
    return status::ok;
  }

  /// Looks through the freed memory that is kept. @return violations so far
  std::uint64_t check() noexcept
  {
    std::unique_lock lock{mutex_};
    for (std::uintptr_t const begin : quarantine_) { watch(begin, ranges_.find(begin)->second); }
    return count_;
  }

  [[nodiscard]] std::uint64_t violation_count() const noexcept
  {
    std::unique_lock lock{mutex_};
    return count_;
  }

  /// The first max_violations sentences, oldest first.
  [[nodiscard]] std::vector<std::string> violations() const
  {
    std::unique_lock lock{mutex_};
    std::vector<std::string> result;
    for (sentence const& each : texts_) { result.emplace_back(each.text); }
    return result;
  }

  [[nodiscard]] B& base() noexcept { return base_; }
  [[nodiscard]] B const& base() const noexcept { return base_; }

 private:
  enum class state : std::uint8_t { live, lent, freed };

  struct range {
    std::uint64_t bytes = 0;
    memory_space space = memory_space::device;
    state is = state::live;
  };

  struct sentence {
    char text[224] = {};
  };

  using range_map = std::map<std::uintptr_t, range>;

  [[nodiscard]] static std::uintptr_t address(void const* pointer) noexcept
  {
    return reinterpret_cast<std::uintptr_t>(pointer);
  }

  [[nodiscard]] static bool readable(memory_space space) noexcept
  {
    return host_reads_device_memory || space == memory_space::pinned;
  }

  static void fill(memory_space space, void* pointer, std::uint64_t bytes) noexcept
  {
    if (readable(space)) { std::memset(pointer, std::to_integer<int>(poison_byte), bytes); }
  }

  // All below: under the lock, except lies_in_memory, which takes it.

  template <class... Args>
  void note(char const* format, Args... args) noexcept
  {
    ++count_;
    if (texts_.size() == texts_.capacity() || texts_.size() >= options_.max_violations) { return; }
    texts_.emplace_back();  // reserved at construction
    std::snprintf(texts_.back().text, sizeof(sentence::text), format, args...);
  }

  [[nodiscard]] bool lies_in_memory(copy_list runs) noexcept
  {
    if (runs.runs == nullptr) { return true; }  // the backend's to refuse
    memory_space const from =
      runs.direction == copy_direction::host_to_device ? memory_space::pinned : memory_space::device;
    memory_space const to =
      runs.direction == copy_direction::device_to_host ? memory_space::pinned : memory_space::device;
    std::unique_lock lock{mutex_};
    bool sound = true;
    for (std::uint32_t i = 0; i < runs.count; ++i) {
      copy_run const& run = runs.runs[i];
      if (run.bytes == 0 || run.source == nullptr || run.target == nullptr) { continue; }
      sound = lies_in(from, run.source, run.bytes, "copy source", i, runs.count) && sound;
      sound = lies_in(to, run.target, run.bytes, "copy target", i, runs.count) && sound;
    }
    return sound;
  }

  [[nodiscard]] bool lies_in(
    memory_space space, void const* pointer, std::uint64_t bytes, char const* what, std::uint32_t run,
    std::uint32_t runs) noexcept
  {
    std::uintptr_t const begin = address(pointer);
    auto const size = static_cast<std::size_t>(bytes);
    auto const after = ranges_.upper_bound(begin);
    if (after == ranges_.begin() || begin - std::prev(after)->first >= std::prev(after)->second.bytes) {
      note("%s, run %u of %u: %p + %zu B lies in no memory of this backend", what, run, runs, pointer, size);
      return false;
    }
    auto const& [start, memory] = *std::prev(after);
    std::uint64_t const offset = begin - start;
    if (memory.is == state::freed) {
      note(
        "%s, run %u of %u: %p + %zu B lies in memory that was freed (%p, %zu B)", what, run, runs, pointer, size,
        reinterpret_cast<void const*>(start), static_cast<std::size_t>(memory.bytes));
      return false;
    }
    if (memory.space != space) {
      note(
        "%s, run %u of %u: %p + %zu B is %s memory where %s memory is due", what, run, runs, pointer, size,
        name_of(memory.space), name_of(space));
      return false;
    }
    if (bytes > memory.bytes - offset) {
      note(
        "%s, run %u of %u: %zu B from byte %zu on pass the end of %s memory of %zu B", what, run, runs, size,
        static_cast<std::size_t>(offset), name_of(space), static_cast<std::size_t>(memory.bytes));
      return false;
    }
    return true;
  }

  /// A violation when a freed range was written.
  void watch(std::uintptr_t begin, range const& freed) noexcept
  {
    if (!readable(freed.space)) { return; }
    auto const* const bytes = reinterpret_cast<std::byte const*>(begin);
    for (std::uint64_t i = 0; i < freed.bytes; ++i) {
      if (bytes[i] == poison_byte) { continue; }
      note(
        "freed %s memory %p of %zu B was written at byte %zu", name_of(freed.space),
        reinterpret_cast<void const*>(begin), static_cast<std::size_t>(freed.bytes), static_cast<std::size_t>(i));
      fill(freed.space, reinterpret_cast<void*>(begin), freed.bytes);  // each write is told once
      return;
    }
  }

  void release(typename range_map::iterator freed) noexcept
  {
    auto const [begin, memory] = *freed;
    watch(begin, memory);
    ranges_.erase(freed);
    quarantined_bytes_ -= memory.bytes;
    base_.deallocate(memory.space, reinterpret_cast<void*>(begin), memory.bytes);
  }

  void release_oldest() noexcept
  {
    std::uintptr_t const begin = quarantine_.front();
    quarantine_.pop_front();
    release(ranges_.find(begin));
  }

  check_options options_;
  mutable std::mutex mutex_;
  range_map ranges_;                       // by address: live, lent, and freed ones that are kept
  std::deque<std::uintptr_t> quarantine_;  // oldest first
  std::uint64_t quarantined_bytes_ = 0;
  std::vector<sentence> texts_;  // [max_violations] reserved
  std::uint64_t count_ = 0;
  B base_;  // last: ends first, and with it all work that may name the memory above
};

}  // namespace pulseinfer
