#include "compositions.hpp"

template class pulseinfer::offload_manager<
  pulseinfer::scripted_backend, pulseinfer::external_selector, pulseinfer::gather_scatter_engine,
  pulseinfer_test::late_scheduler, pulseinfer::fixed_admission>;
template class pulseinfer_test::pattern_engine<pulseinfer::scripted_backend, pulseinfer_test::device_planned>;
