#pragma once

/// What a layer scheduler sees and what it says: plain values, so that decisions can be recorded and replayed.

#include <pulseinfer/types.hpp>
#include <pulseinfer/view/table.hpp>

#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// Where a row of the step stands at its layer boundary.
enum class row_phase : std::uint8_t {
  selecting,  ///< its misses are not known yet
  in_flight,  ///< blocks travel
  ready       ///< every selected block is resident
};

struct scheduler_row {
  row_id row = none<row_id>;
  layer_id layer = none<layer_id>;
  row_phase phase = row_phase::selecting;
  bool attended_hits = false;  ///< its hits visit has been enqueued: what remains is the landed part
  bool must_finish = false;    ///< it was late within the last eight steps and may not be late again
  std::uint32_t misses = 0;    ///< blocks, once known
  std::uint64_t bytes = 0;     ///< bytes that travel, once known
  nanoseconds entered{0};      ///< when it entered this layer
};

static_assert(std::is_trivially_copyable_v<scheduler_row>);

/// What is known of the link at a decision.
struct link_state {
  std::uint64_t bytes_in_flight = 0;
  double bytes_per_second = 0.0;  ///< fitted rate; 0 while nothing has been measured
};

static_assert(std::is_trivially_copyable_v<link_state>);

enum class decision_kind : std::uint8_t {
  run,      ///< run the chosen rows of one layer
  wait,     ///< sleep until something lands
  end_step  ///< leave what is not finished as late rows
};

struct decision {
  decision_kind kind = decision_kind::wait;
  layer_id layer = none<layer_id>;
  std::uint32_t rows = 0;                  ///< chosen rows, written to the caller's array
  bool enqueue_wait = false;               ///< the rows' recalls may still fly: let the stream wait for them
  nanoseconds until = nanoseconds::max();  ///< wait: ask again then at the latest, though no recall may be complete
};

static_assert(std::is_trivially_copyable_v<decision>);

}  // namespace pulseinfer
