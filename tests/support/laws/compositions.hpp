#pragma once

/// The managers whose orders are proven, over the scripted backend: each instantiated once, in a source file of its own.

#include "../manager/late_scheduler.hpp"
#include "../pattern_engine.hpp"
#include "../synthetic_engine.hpp"
#include <pulseinfer/admission/fixed_admission.hpp>
#include <pulseinfer/backend/scripted/scripted_backend.hpp>
#include <pulseinfer/manager/offload_manager.hpp>
#include <pulseinfer/scheduler/interruptible_scheduler.hpp>
#include <pulseinfer/scheduler/lockstep_scheduler.hpp>
#include <pulseinfer/selector/external_selector.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>
#include <pulseinfer/transfer/fragment_copy_engine.hpp>
#include <pulseinfer/transfer/gather_scatter_engine.hpp>

namespace pulseinfer_test {

using pulseinfer::scripted_backend;

/// The device plans, whoever is ready runs, hits first; the test may end steps.
using device_planned = pulseinfer::offload_manager<
  scripted_backend, pulseinfer::external_selector, pulseinfer::gather_scatter_engine, late_scheduler,
  pulseinfer::fixed_admission>;
/// The host plans and copies each fragment by itself.
using host_planned = pulseinfer::offload_manager<
  scripted_backend, pulseinfer::external_selector, pulseinfer::fragment_copy_engine,
  pulseinfer::interruptible_scheduler<pulseinfer::visit_order::whole>, pulseinfer::fixed_admission>;
/// The stream waits for every recall, the host for none.
using in_lockstep = pulseinfer::offload_manager<
  scripted_backend, pulseinfer::external_selector, pulseinfer::gather_scatter_engine,
  pulseinfer::lockstep_scheduler<pulseinfer::visit_order::whole>, pulseinfer::fixed_admission>;
/// Scores choose, and every row attends its whole selection at once: outputs are the same to the bit, whatever the timing.
using scored = pulseinfer::offload_manager<
  scripted_backend, pulseinfer::solo_head_selector<>, pulseinfer::gather_scatter_engine,
  pulseinfer::interruptible_scheduler<pulseinfer::visit_order::whole>, pulseinfer::fixed_admission>;

}  // namespace pulseinfer_test

namespace pulseinfer {

extern template class offload_manager<
  scripted_backend, external_selector, gather_scatter_engine, pulseinfer_test::late_scheduler, fixed_admission>;
extern template class offload_manager<
  scripted_backend, external_selector, fragment_copy_engine, interruptible_scheduler<visit_order::whole>,
  fixed_admission>;
extern template class offload_manager<
  scripted_backend, external_selector, gather_scatter_engine, lockstep_scheduler<visit_order::whole>, fixed_admission>;
extern template class offload_manager<
  scripted_backend, solo_head_selector<>, gather_scatter_engine, interruptible_scheduler<visit_order::whole>,
  fixed_admission>;

}  // namespace pulseinfer

namespace pulseinfer_test {

extern template class pattern_engine<scripted_backend, device_planned>;
extern template class pattern_engine<scripted_backend, host_planned>;
extern template class pattern_engine<scripted_backend, in_lockstep>;
extern template class synthetic_engine<scripted_backend, scored>;

}  // namespace pulseinfer_test
