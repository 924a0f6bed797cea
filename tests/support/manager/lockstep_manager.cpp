#include "compositions.hpp"

template class pulseinfer::offload_manager<
  pulseinfer::cpu_backend, pulseinfer::solo_head_selector<>, pulseinfer::gather_scatter_engine,
  pulseinfer::lockstep_scheduler<pulseinfer::visit_order::whole>, pulseinfer::fixed_admission>;
template class pulseinfer_test::pattern_engine<pulseinfer::cpu_backend, pulseinfer_test::lockstep_manager>;
template class pulseinfer_test::synthetic_engine<pulseinfer::cpu_backend, pulseinfer_test::lockstep_manager>;
