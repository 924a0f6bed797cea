/// The kernels of every operation that the programs here launch are compiled once, in cuda_operations.cu: who includes this
/// compiles managers over a CUDA backend without them, in half the time.
#pragma once

#include <pulseinfer/backend/cuda/launch.cuh>
#include <pulseinfer/operation/append_tokens.hpp>
#include <pulseinfer/operation/checksum_blocks.hpp>
#include <pulseinfer/operation/defer_blocks.hpp>
#include <pulseinfer/operation/exchange_slots.hpp>
#include <pulseinfer/operation/fill_words.hpp>
#include <pulseinfer/operation/forget_blocks.hpp>
#include <pulseinfer/operation/gather_blocks.hpp>
#include <pulseinfer/operation/install_lease.hpp>
#include <pulseinfer/operation/keep_selection.hpp>
#include <pulseinfer/operation/land_rows.hpp>
#include <pulseinfer/operation/land_stream.hpp>
#include <pulseinfer/operation/list_stream.hpp>
#include <pulseinfer/operation/list_wanted_blocks.hpp>
#include <pulseinfer/operation/merge_partials.hpp>
#include <pulseinfer/operation/paged_attention.hpp>
#include <pulseinfer/operation/patch_words.hpp>
#include <pulseinfer/operation/plan_recall.hpp>
#include <pulseinfer/operation/post_plan.hpp>
#include <pulseinfer/operation/reset_row.hpp>
#include <pulseinfer/operation/resolve_background.hpp>
#include <pulseinfer/operation/resolve_blocks.hpp>
#include <pulseinfer/operation/score_blocks.hpp>
#include <pulseinfer/operation/select_top_k.hpp>
#include <pulseinfer/operation/select_window.hpp>
#include <pulseinfer/operation/share_blocks.hpp>
#include <pulseinfer/operation/update_digests.hpp>
#include <pulseinfer/operation/vote_blocks.hpp>
#include <pulseinfer/operation/want_near_blocks.hpp>
#include <pulseinfer/replacement/lru.hpp>

#ifndef DECODE_TEXT_OPERATION
#  define DECODE_TEXT_OPERATION(...)                                               \
    extern template cudaError_t pulseinfer::detail::launch_operation<__VA_ARGS__>( \
      __VA_ARGS__ const&, pulseinfer::detail::launch_plan const&, cudaStream_t) noexcept
#endif

DECODE_TEXT_OPERATION(pulseinfer::append_tokens);
DECODE_TEXT_OPERATION(pulseinfer::checksum_blocks);
DECODE_TEXT_OPERATION(pulseinfer::defer_blocks);
DECODE_TEXT_OPERATION(pulseinfer::exchange_slots<pulseinfer::lru>);
DECODE_TEXT_OPERATION(pulseinfer::fill_words);
DECODE_TEXT_OPERATION(pulseinfer::gather_blocks);
DECODE_TEXT_OPERATION(pulseinfer::install_lease);
DECODE_TEXT_OPERATION(pulseinfer::keep_selection);
DECODE_TEXT_OPERATION(pulseinfer::land_rows);
DECODE_TEXT_OPERATION(pulseinfer::land_stream);
DECODE_TEXT_OPERATION(pulseinfer::last_queries);
DECODE_TEXT_OPERATION(pulseinfer::list_stream);
DECODE_TEXT_OPERATION(pulseinfer::list_wanted_blocks);
DECODE_TEXT_OPERATION(pulseinfer::merge_partials);
DECODE_TEXT_OPERATION(pulseinfer::paged_attention);
DECODE_TEXT_OPERATION(pulseinfer::patch_words);
DECODE_TEXT_OPERATION(pulseinfer::plan_recall);
DECODE_TEXT_OPERATION(pulseinfer::post_plan);
DECODE_TEXT_OPERATION(pulseinfer::reset_row);
DECODE_TEXT_OPERATION(pulseinfer::resolve_background<pulseinfer::lru>);
DECODE_TEXT_OPERATION(pulseinfer::resolve_blocks<pulseinfer::lru>);
DECODE_TEXT_OPERATION(pulseinfer::score_blocks);
DECODE_TEXT_OPERATION(pulseinfer::select_top_k);
DECODE_TEXT_OPERATION(pulseinfer::select_window);
DECODE_TEXT_OPERATION(pulseinfer::share_blocks);
DECODE_TEXT_OPERATION(pulseinfer::update_digests);
DECODE_TEXT_OPERATION(pulseinfer::vote_blocks);
DECODE_TEXT_OPERATION(pulseinfer::want_near_blocks);
