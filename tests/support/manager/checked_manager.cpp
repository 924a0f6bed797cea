#include "compositions.hpp"

template class pulseinfer::offload_manager<
  pulseinfer::checked<pulseinfer::cpu_backend>, pulseinfer::solo_head_selector<>, pulseinfer::gather_scatter_engine,
  pulseinfer::interruptible_scheduler<pulseinfer::visit_order::hits_first>, pulseinfer::fixed_admission>;
template class pulseinfer_test::pattern_engine<pulseinfer_test::checked_backend, pulseinfer_test::checked_manager>;
