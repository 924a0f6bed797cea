#pragma once

/// The whole library without CUDA, in the order of data flow. In a .cu file the backends that run on the host stay out: they
/// bring threads, and are included by name where they are wanted.

// clang-format off
#include <pulseinfer/config.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/numeric.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/version.hpp>

#include <pulseinfer/layout/block_layout.hpp>
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/layout/plane.hpp>

#include <pulseinfer/view/balance.hpp>
#include <pulseinfer/view/checksums.hpp>
#include <pulseinfer/view/copy_list.hpp>
#include <pulseinfer/view/decision.hpp>
#include <pulseinfer/view/decision_record.hpp>
#include <pulseinfer/view/failure_record.hpp>
#include <pulseinfer/view/foresight.hpp>
#include <pulseinfer/view/mailbox.hpp>
#include <pulseinfer/view/pool.hpp>
#include <pulseinfer/view/recall_plan.hpp>
#include <pulseinfer/view/residency.hpp>
#include <pulseinfer/view/row_info.hpp>
#include <pulseinfer/view/row_list.hpp>
#include <pulseinfer/view/selection.hpp>
#include <pulseinfer/view/step_sample.hpp>
#include <pulseinfer/view/stream_box.hpp>
#include <pulseinfer/view/stream_part.hpp>
#include <pulseinfer/view/table.hpp>
#include <pulseinfer/view/tensor_view.hpp>
#include <pulseinfer/view/ticket.hpp>
#include <pulseinfer/view/visit.hpp>

#include <pulseinfer/concepts/admission_policy.hpp>
#include <pulseinfer/concepts/archetypes.hpp>
#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/concepts/host_types.hpp>
#include <pulseinfer/concepts/layer_scheduler.hpp>
#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/concepts/replacement.hpp>
#include <pulseinfer/concepts/selector.hpp>
#include <pulseinfer/concepts/thread_group.hpp>
#include <pulseinfer/concepts/transfer_engine.hpp>

#include <pulseinfer/device/atomic.hpp>
#include <pulseinfer/device/attention.hpp>
#include <pulseinfer/device/block_bounds.hpp>
#include <pulseinfer/device/block_score.hpp>
#include <pulseinfer/device/certificate.hpp>
#include <pulseinfer/device/checksum.hpp>
#include <pulseinfer/device/copy_bytes.hpp>
#include <pulseinfer/device/cuboid_mean.hpp>
#include <pulseinfer/device/digest_pieces.hpp>
#include <pulseinfer/device/digest_values.hpp>
#include <pulseinfer/device/exponential.hpp>
#include <pulseinfer/device/group.hpp>
#include <pulseinfer/device/kept_blocks.hpp>
#include <pulseinfer/device/key_range.hpp>
#include <pulseinfer/device/land.hpp>
#include <pulseinfer/device/lanes.hpp>
#include <pulseinfer/device/log_mass.hpp>
#include <pulseinfer/device/logarithm.hpp>
#include <pulseinfer/device/mean_key.hpp>
#include <pulseinfer/device/merge.hpp>
#include <pulseinfer/device/min_max.hpp>
#include <pulseinfer/device/reduce.hpp>
#include <pulseinfer/device/remember_selection.hpp>
#include <pulseinfer/device/share.hpp>
#include <pulseinfer/device/sort.hpp>
#include <pulseinfer/device/top_k.hpp>
#include <pulseinfer/device/top_p.hpp>
#include <pulseinfer/device/vote.hpp>
#include <pulseinfer/device/widen.hpp>

#include <pulseinfer/operation/append_tokens.hpp>
#include <pulseinfer/operation/certify_skipped.hpp>
#include <pulseinfer/operation/checksum_blocks.hpp>
#include <pulseinfer/operation/choose_blocks.hpp>
#include <pulseinfer/operation/combine_shares.hpp>
#include <pulseinfer/operation/defer_blocks.hpp>
#include <pulseinfer/operation/exchange_slots.hpp>
#include <pulseinfer/operation/export_append_slots.hpp>
#include <pulseinfer/operation/export_table.hpp>
#include <pulseinfer/operation/fill_words.hpp>
#include <pulseinfer/operation/forget_blocks.hpp>
#include <pulseinfer/operation/gather_blocks.hpp>
#include <pulseinfer/operation/install_lease.hpp>
#include <pulseinfer/operation/join_entries.hpp>
#include <pulseinfer/operation/keep_selection.hpp>
#include <pulseinfer/operation/land_rows.hpp>
#include <pulseinfer/operation/land_stream.hpp>
#include <pulseinfer/operation/lane_slots.hpp>
#include <pulseinfer/operation/list_stream.hpp>
#include <pulseinfer/operation/list_wanted_blocks.hpp>
#include <pulseinfer/operation/merge_partials.hpp>
#include <pulseinfer/operation/move_runs.hpp>
#include <pulseinfer/operation/order_entries.hpp>
#include <pulseinfer/operation/paged_attention.hpp>
#include <pulseinfer/operation/patch_words.hpp>
#include <pulseinfer/operation/plan_recall.hpp>
#include <pulseinfer/operation/post_plan.hpp>
#include <pulseinfer/operation/reset_row.hpp>
#include <pulseinfer/operation/resolve_background.hpp>
#include <pulseinfer/operation/resolve_blocks.hpp>
#include <pulseinfer/operation/score_blocks.hpp>
#include <pulseinfer/operation/score_table.hpp>
#include <pulseinfer/operation/select_imported.hpp>
#include <pulseinfer/operation/select_top_k.hpp>
#include <pulseinfer/operation/select_top_p.hpp>
#include <pulseinfer/operation/select_window.hpp>
#include <pulseinfer/operation/share_blocks.hpp>
#include <pulseinfer/operation/update_digests.hpp>
#include <pulseinfer/operation/vote_blocks.hpp>
#include <pulseinfer/operation/want_near_blocks.hpp>

#include <pulseinfer/backend/checked.hpp>
#include <pulseinfer/backend/growing_memory.hpp>
#include <pulseinfer/backend/handle_table.hpp>
#include <pulseinfer/backend/host_function.hpp>
#include <pulseinfer/backend/host_memory.hpp>
#include <pulseinfer/backend/memory_ledger.hpp>
#include <pulseinfer/backend/observation.hpp>
#include <pulseinfer/backend/pinned_pages.hpp>
#include <pulseinfer/backend/reserved_pages.hpp>
#include <pulseinfer/backend/stored_operation.hpp>
#include <pulseinfer/backend/task_queue.hpp>
#include <pulseinfer/backend/trace_record.hpp>
#include <pulseinfer/backend/traced.hpp>

#if !defined(__CUDACC__)
#  include <pulseinfer/backend/cpu/cpu_backend.hpp>
#  include <pulseinfer/backend/cpu/options.hpp>
#  include <pulseinfer/backend/sim/compute_model.hpp>
#  include <pulseinfer/backend/sim/control_cost.hpp>
#  include <pulseinfer/backend/sim/counts_backend.hpp>
#  include <pulseinfer/backend/sim/link_model.hpp>
#  include <pulseinfer/backend/sim/machine.hpp>
#  include <pulseinfer/backend/sim/options.hpp>
#  include <pulseinfer/backend/sim/sim_backend.hpp>
#  include <pulseinfer/backend/scripted/script.hpp>
#  include <pulseinfer/backend/scripted/scripted_backend.hpp>
#endif

#include <pulseinfer/store/block_book.hpp>
#include <pulseinfer/store/device_table.hpp>
#include <pulseinfer/store/digest_store.hpp>
#include <pulseinfer/store/free_list.hpp>
#include <pulseinfer/store/growing_slab.hpp>
#include <pulseinfer/store/host_store.hpp>
#include <pulseinfer/store/set_up_copy.hpp>
#include <pulseinfer/store/set_up_work.hpp>
#include <pulseinfer/store/slab.hpp>
#include <pulseinfer/store/slot_pool.hpp>

#include <pulseinfer/sequence/saved_sequence.hpp>
#include <pulseinfer/sequence/sequence_book.hpp>

#include <pulseinfer/replacement/lru.hpp>

#include <pulseinfer/residency/device_books.hpp>
#include <pulseinfer/residency/lease_book.hpp>
#include <pulseinfer/residency/staging_ring.hpp>

#include <pulseinfer/selector/block_digest.hpp>
#include <pulseinfer/selector/calibrated_heads.hpp>
#include <pulseinfer/selector/calibration.hpp>
#include <pulseinfer/selector/cuboid_mean.hpp>
#include <pulseinfer/selector/designated_head.hpp>
#include <pulseinfer/selector/external_selector.hpp>
#include <pulseinfer/selector/few_heads.hpp>
#include <pulseinfer/selector/fixed_tokens.hpp>
#include <pulseinfer/selector/head_calibrator.hpp>
#include <pulseinfer/selector/head_choice.hpp>
#include <pulseinfer/selector/log_mass.hpp>
#include <pulseinfer/selector/max_share.hpp>
#include <pulseinfer/selector/mean_key.hpp>
#include <pulseinfer/selector/min_max.hpp>
#include <pulseinfer/selector/resolved_budget.hpp>
#include <pulseinfer/selector/selector_among.hpp>
#include <pulseinfer/selector/soft_vote.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>
#include <pulseinfer/selector/split.hpp>
#include <pulseinfer/selector/top_p.hpp>

#include <pulseinfer/transfer/batch_copy_engine.hpp>
#include <pulseinfer/transfer/block_fragments.hpp>
#include <pulseinfer/transfer/fragment_copy_engine.hpp>
#include <pulseinfer/transfer/gather_scatter_engine.hpp>
#include <pulseinfer/transfer/measure_gather.hpp>
#include <pulseinfer/transfer/measure_moves.hpp>
#include <pulseinfer/transfer/run_merge.hpp>

#include <pulseinfer/scheduler/cohort_planner.hpp>
#include <pulseinfer/scheduler/decode_profile.hpp>
#include <pulseinfer/scheduler/interruptible_scheduler.hpp>
#include <pulseinfer/scheduler/link_rate.hpp>
#include <pulseinfer/scheduler/lockstep_scheduler.hpp>
#include <pulseinfer/scheduler/recorded_scheduler.hpp>
#include <pulseinfer/scheduler/replay_scheduler.hpp>
#include <pulseinfer/scheduler/static_cohorts_scheduler.hpp>
#include <pulseinfer/scheduler/visit_order.hpp>

#include <pulseinfer/admission/adaptive_admission.hpp>
#include <pulseinfer/admission/fixed_admission.hpp>
#include <pulseinfer/admission/recorded_admission.hpp>
#include <pulseinfer/admission/step_history.hpp>
#include <pulseinfer/admission/working_set_admission.hpp>

#include <pulseinfer/manager/background_filler.hpp>
#include <pulseinfer/manager/block_keeper.hpp>
#include <pulseinfer/manager/block_stream.hpp>
#include <pulseinfer/manager/captured_step.hpp>
#include <pulseinfer/manager/captured_visit.hpp>
#include <pulseinfer/manager/change_staging.hpp>
#include <pulseinfer/manager/list_arena.hpp>
#include <pulseinfer/manager/offload_manager.hpp>
#include <pulseinfer/manager/options.hpp>
#include <pulseinfer/manager/recall_driver.hpp>
#include <pulseinfer/manager/recall_ring.hpp>
#include <pulseinfer/manager/row_balancer.hpp>
#include <pulseinfer/manager/row_runtime.hpp>
#include <pulseinfer/manager/sequence_mover.hpp>
#include <pulseinfer/manager/slot_budget.hpp>
#include <pulseinfer/manager/step_loop.hpp>
#include <pulseinfer/manager/step_meter.hpp>
#include <pulseinfer/manager/stream_driver.hpp>
#include <pulseinfer/manager/tensor_shapes.hpp>
#include <pulseinfer/manager/visit_queue.hpp>
#include <pulseinfer/manager/write_back_queue.hpp>

#include <pulseinfer/workload/arrivals.hpp>
#include <pulseinfer/workload/block_generator.hpp>
#include <pulseinfer/workload/fixed_point.hpp>
#include <pulseinfer/workload/miss_generator.hpp>
#include <pulseinfer/workload/preset.hpp>

#if !defined(__CUDACC__)
#  include <pulseinfer/workload/counted_workload.hpp>
#  include <pulseinfer/workload/simulated_decode.hpp>
#  include <pulseinfer/workload/simulated_serving.hpp>
#  include <pulseinfer/workload/timed_engine.hpp>
#endif

#include <pulseinfer/observe/chrome_trace.hpp>
#include <pulseinfer/observe/counters.hpp>
#include <pulseinfer/observe/decision_file.hpp>
#include <pulseinfer/observe/prometheus_text.hpp>
#include <pulseinfer/observe/selection_trace.hpp>
// clang-format on
