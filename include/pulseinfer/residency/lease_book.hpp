#pragma once

/// The host's side of residency: which slots each lane has in each layer, and what is in those that the host fills.

#include <pulseinfer/config.hpp>
#include <pulseinfer/types.hpp>

#include <cstdint>
#include <vector>

namespace pulseinfer {

/// What the host knows of one ring place of a row; the same in all of the row's lanes and layers.
enum class ring_state : std::uint8_t {
  spare,       ///< empty: the row's next block may open in it
  open,        ///< holds an open block
  sealed,      ///< holds a sealed block without a host copy
  writing,     ///< its write-back flies
  written,     ///< holds a sealed block that the host has too
  exchanging,  ///< given to the lease; the slot that comes back for it is not known yet
};

struct ring_place {
  ring_state state = ring_state::spare;
  block_id block = none<block_id>;
  std::uint64_t serial = 0;  ///< exchanging: number of the staging place that carried the exchange
};

/// Slots by (layer, lane). Three lists: `placed` the slot of each block where the host fills all slots (rows and layers
/// that keep every block resident), `lease` the slots that the device fills, `ring` those that open blocks sit in.
/// Plain host state; nothing allocates after construction.
class lease_book {
 public:
  lease_book(
    std::uint32_t layers, std::uint32_t rows, std::uint32_t head_groups, std::uint32_t max_blocks,
    std::uint32_t max_lease, std::uint32_t ring)
    : lanes_{rows * head_groups},
      max_blocks_{max_blocks},
      max_lease_{max_lease},
      ring_{ring},
      placed_(std::uint64_t{layers} * lanes_ * max_blocks, none<slot_id>),
      lease_(std::uint64_t{layers} * lanes_ * max_lease, none<slot_id>),
      lease_count_(std::uint64_t{layers} * lanes_, 0),
      ring_slots_(std::uint64_t{layers} * lanes_ * ring, none<slot_id>),
      ring_places_(std::uint64_t{rows} * ring)
  {}

  [[nodiscard]] slot_id& placed(layer_id layer, lane_id lane, std::uint32_t block) noexcept
  {
    return placed_[index(layer, lane) * max_blocks_ + block];
  }
  /// [lease_count] slots of the lane's lease, in no order that means anything: exchanges swap members.
  [[nodiscard]] slot_id* lease(layer_id layer, lane_id lane) noexcept
  {
    return lease_.data() + index(layer, lane) * max_lease_;
  }
  [[nodiscard]] std::uint32_t& lease_count(layer_id layer, lane_id lane) noexcept
  {
    return lease_count_[index(layer, lane)];
  }
  [[nodiscard]] slot_id& ring_slot(layer_id layer, lane_id lane, std::uint32_t place) noexcept
  {
    return ring_slots_[index(layer, lane) * ring_ + place];
  }
  [[nodiscard]] ring_place& ring(row_id row, std::uint32_t place) noexcept
  {
    return ring_places_[to_index(row) * ring_ + place];
  }

  [[nodiscard]] std::uint32_t ring_size() const noexcept { return ring_; }
  [[nodiscard]] std::uint32_t max_lease() const noexcept { return max_lease_; }

  /// A spare place of the row's ring, or ring_size().
  [[nodiscard]] std::uint32_t find_ring(row_id row, ring_state state) noexcept
  {
    for (std::uint32_t i = 0; i < ring_; ++i) {
      if (ring(row, i).state == state) { return i; }
    }
    return ring_;
  }

 private:
  [[nodiscard]] std::uint64_t index(layer_id layer, lane_id lane) const noexcept
  {
    return to_index(layer) * lanes_ + to_index(lane);
  }

  std::uint64_t lanes_;
  std::uint32_t max_blocks_;
  std::uint32_t max_lease_;
  std::uint32_t ring_;
  std::vector<slot_id> placed_;
  std::vector<slot_id> lease_;
  std::vector<std::uint32_t> lease_count_;
  std::vector<slot_id> ring_slots_;
  std::vector<ring_place> ring_places_;
};

}  // namespace pulseinfer
