#include "compositions.hpp"

template class pulseinfer::offload_manager<
  pulseinfer::cpu_backend, pulseinfer::solo_head_selector<>, pulseinfer::fragment_copy_engine,
  pulseinfer::interruptible_scheduler<pulseinfer::visit_order::whole>, pulseinfer::fixed_admission>;
template class pulseinfer_test::pattern_engine<pulseinfer::cpu_backend, pulseinfer_test::fragment_manager>;
template class pulseinfer_test::synthetic_engine<pulseinfer::cpu_backend, pulseinfer_test::fragment_manager>;
