#pragma once

/// The managers that the tests use, each instantiated once, in a source file of its own, with the engine that drives it.

#include "../pattern_engine.hpp"
#include "../synthetic_engine.hpp"
#include "late_scheduler.hpp"
#include <pulseinfer/admission/fixed_admission.hpp>
#include <pulseinfer/backend/checked.hpp>
#include <pulseinfer/backend/cpu/cpu_backend.hpp>
#include <pulseinfer/manager/offload_manager.hpp>
#include <pulseinfer/scheduler/interruptible_scheduler.hpp>
#include <pulseinfer/scheduler/lockstep_scheduler.hpp>
#include <pulseinfer/selector/external_selector.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>
#include <pulseinfer/transfer/fragment_copy_engine.hpp>
#include <pulseinfer/transfer/gather_scatter_engine.hpp>

namespace pulseinfer_test {

using pulseinfer::cpu_backend;
using pulseinfer::external_selector;
using pulseinfer::fixed_admission;
using pulseinfer::fragment_copy_engine;
using pulseinfer::gather_scatter_engine;
using pulseinfer::interruptible_scheduler;
using pulseinfer::lockstep_scheduler;
using pulseinfer::offload_manager;
using pulseinfer::solo_head_selector;
using pulseinfer::visit_order;

/// The least that can be composed: all rows together, each visit after its recall.
using lockstep_manager = offload_manager<
  cpu_backend, solo_head_selector<>, gather_scatter_engine, lockstep_scheduler<visit_order::whole>, fixed_admission>;
/// What the library is for: hits first, whoever is ready next.
using hits_manager = offload_manager<
  cpu_backend, solo_head_selector<>, gather_scatter_engine, interruptible_scheduler<visit_order::hits_first>,
  fixed_admission>;
/// The baseline engine, which plans on the host.
using fragment_manager = offload_manager<
  cpu_backend, solo_head_selector<>, fragment_copy_engine, interruptible_scheduler<visit_order::whole>,
  fixed_admission>;
/// The test chooses the blocks and when a step ends.
using chosen_manager =
  offload_manager<cpu_backend, external_selector, gather_scatter_engine, late_scheduler, fixed_admission>;

/// Every copy is held against the memory that there is; what nobody has written reads as NaN.
using checked_backend = pulseinfer::checked<cpu_backend>;
using checked_manager = offload_manager<
  checked_backend, solo_head_selector<>, gather_scatter_engine, interruptible_scheduler<visit_order::hits_first>,
  fixed_admission>;

}  // namespace pulseinfer_test

namespace pulseinfer {

extern template class offload_manager<
  cpu_backend, solo_head_selector<>, gather_scatter_engine, lockstep_scheduler<visit_order::whole>, fixed_admission>;
extern template class offload_manager<
  cpu_backend, solo_head_selector<>, gather_scatter_engine, interruptible_scheduler<visit_order::hits_first>,
  fixed_admission>;
extern template class offload_manager<
  cpu_backend, solo_head_selector<>, fragment_copy_engine, interruptible_scheduler<visit_order::whole>,
  fixed_admission>;
extern template class offload_manager<
  cpu_backend, external_selector, gather_scatter_engine, pulseinfer_test::late_scheduler, fixed_admission>;
extern template class offload_manager<
  checked<cpu_backend>, solo_head_selector<>, gather_scatter_engine, interruptible_scheduler<visit_order::hits_first>,
  fixed_admission>;

}  // namespace pulseinfer

namespace pulseinfer_test {

extern template class pattern_engine<cpu_backend, lockstep_manager>;
extern template class pattern_engine<cpu_backend, hits_manager>;
extern template class pattern_engine<cpu_backend, fragment_manager>;
extern template class pattern_engine<cpu_backend, chosen_manager>;
extern template class pattern_engine<checked_backend, checked_manager>;
extern template class synthetic_engine<cpu_backend, lockstep_manager>;
extern template class synthetic_engine<cpu_backend, hits_manager>;
extern template class synthetic_engine<cpu_backend, fragment_manager>;

}  // namespace pulseinfer_test
