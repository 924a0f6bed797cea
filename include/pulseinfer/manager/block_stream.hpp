#pragma once

/// The parts in which a row's earlier blocks come by, as a range.

#include <pulseinfer/error.hpp>
#include <pulseinfer/view/stream_part.hpp>

#include <cstddef>
#include <cstdint>
#include <iterator>

namespace pulseinfer {

/// What `offload_manager::stream_blocks` returns: an input range that is gone through once. Copies begin with the call that
/// returns it. `++` hands the next part out and starts a later one; it never waits for the device. Leaving early is fine: the
/// range ends with its life.
template <class Manager>
class block_stream {
 public:
  class iterator {
   public:
    using iterator_concept = std::input_iterator_tag;
    using value_type = stream_part;
    using difference_type = std::ptrdiff_t;

    explicit iterator(block_stream& stream) noexcept : stream_{&stream} {}

    [[nodiscard]] stream_part const& operator*() const noexcept { return stream_->part_; }
    iterator& operator++() noexcept
    {
      stream_->go_on();
      return *this;
    }
    void operator++(int) noexcept { ++*this; }
    [[nodiscard]] bool operator==(std::default_sentinel_t) const noexcept { return stream_->ended_; }

   private:
    block_stream* stream_;
  };

  /// @param serial of the stream that was begun; 0 where there is none   @param code why, or ok for an empty one
  block_stream(Manager& manager, std::uint64_t serial, pulseinfer::status code) noexcept
    : manager_{&manager}, serial_{serial}, code_{code}, ended_{serial == 0}
  {}

  block_stream(block_stream&&) = delete;
  ~block_stream()
  {
    if (!ended_) { manager_->end_stream(serial_); }
  }

  [[nodiscard]] iterator begin() noexcept
  {
    if (!started_ && !ended_) { go_on(); }
    started_ = true;
    return iterator{*this};
  }
  [[nodiscard]] std::default_sentinel_t end() const noexcept { return {}; }

  /// ok while it goes on, and where it came to its end. Else why there is no further part: what stream_blocks says;
  /// transfer_failed, device_lost or another refusal of the backend, which has failed the row; aborted: the row was closed,
  /// or its step has ended.
  [[nodiscard]] pulseinfer::status status() const noexcept { return code_; }

 private:
  void go_on() noexcept { ended_ = !manager_->next_part(serial_, part_, code_); }

  Manager* manager_;
  std::uint64_t serial_;
  pulseinfer::status code_;
  bool ended_;
  bool started_ = false;
  stream_part part_{};
};

}  // namespace pulseinfer
