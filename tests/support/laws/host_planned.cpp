#include "compositions.hpp"

template class pulseinfer::offload_manager<
  pulseinfer::scripted_backend, pulseinfer::external_selector, pulseinfer::fragment_copy_engine,
  pulseinfer::interruptible_scheduler<pulseinfer::visit_order::whole>, pulseinfer::fixed_admission>;
template class pulseinfer_test::pattern_engine<pulseinfer::scripted_backend, pulseinfer_test::host_planned>;
