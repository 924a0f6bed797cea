#include "compositions.hpp"

template class pulseinfer::offload_manager<
  pulseinfer::scripted_backend, pulseinfer::solo_head_selector<>, pulseinfer::gather_scatter_engine,
  pulseinfer::interruptible_scheduler<pulseinfer::visit_order::whole>, pulseinfer::fixed_admission>;
template class pulseinfer_test::synthetic_engine<pulseinfer::scripted_backend, pulseinfer_test::scored>;
