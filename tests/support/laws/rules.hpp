#pragma once

/// Rules for scripts by what they mean for a manager.

#include "small_rig.hpp"
#include <pulseinfer/backend/scripted/script.hpp>

#include <cstdint>
#include <string>

namespace pulseinfer_test {

using streams = streams_of_manager;

/// Nothing is left out.
inline pulseinfer::script_rule nothing() { return {.count = 0}; }

/// The stream does not wait for events of the other stream.
inline pulseinfer::script_rule without_wait(std::uint32_t stream, std::uint32_t recorded_on)
{
  return {
    .effect = pulseinfer::script_effect::drop,
    .call = pulseinfer::script_call::wait,
    .where = [=](pulseinfer::script_task const& t) { return t.stream == stream && t.recorded_on == recorded_on; }};
}

/// The host takes what it asks about on a stream for complete.
inline pulseinfer::script_rule without_asking(std::uint32_t stream)
{
  return {
    .effect = pulseinfer::script_effect::hurry,
    .call = pulseinfer::script_call::done,
    .where = [=](pulseinfer::script_task const& t) { return t.recorded_on == stream; }};
}

/// The `first`-th and the following `count - 1` copies of a kind meet their end. The kinds: "gather_blocks", "copy to device",
/// "copy to host".
inline pulseinfer::script_rule copies_that(
  pulseinfer::script_effect effect, std::string const& kind, std::uint64_t first, std::uint64_t count = 1)
{
  bool const launched = kind == "gather_blocks";
  return {
    .effect = effect,
    .call = launched ? pulseinfer::script_call::launch : pulseinfer::script_call::copy,
    .name = kind,
    .first = first,
    .count = count};
}

}  // namespace pulseinfer_test
