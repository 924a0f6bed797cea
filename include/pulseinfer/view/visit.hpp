#pragma once

/// Some rows at one layer, run together: the unit of scheduling and of graph capture.

#include <pulseinfer/types.hpp>
#include <pulseinfer/view/row_list.hpp>
#include <pulseinfer/view/table.hpp>

#include <type_traits>

namespace pulseinfer {

struct visit {
  layer_id layer = none<layer_id>;
  layer_id next = none<layer_id>;  ///< the layer to enter after this one; none on the last
  row_list rows = {};
  block_table table = {};
  pulseinfer::part part = pulseinfer::part::whole;
  bool last = false;  ///< the model's last layer: sample these rows
};

static_assert(std::is_trivially_copyable_v<visit>);

}  // namespace pulseinfer
