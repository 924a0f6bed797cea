#pragma once

/// Fewer, longer copies: runs whose sources and targets follow one another become one.

#include <pulseinfer/view/copy_list.hpp>

#include <cstdint>
#include <span>

namespace pulseinfer {

struct merge_result {
  std::size_t taken = 0;    ///< runs read
  std::size_t written = 0;  ///< runs written
};

/// Merges consecutive runs of `runs` into `merged`, until either is used up. Empty runs vanish. The order stays, so the
/// written runs move the same bytes as those taken, in the same order.
[[nodiscard]] constexpr merge_result merge_runs(std::span<copy_run const> runs, std::span<copy_run> merged) noexcept
{
  merge_result done;
  for (; done.taken < runs.size(); ++done.taken) {
    copy_run const& run = runs[done.taken];
    if (run.bytes == 0) { continue; }
    if (done.written > 0) {
      copy_run& last = merged[done.written - 1];
      if (last.target + last.bytes == run.target && last.source + last.bytes == run.source) {
        last.bytes += run.bytes;
        continue;
      }
    }
    if (done.written == merged.size()) { break; }
    merged[done.written++] = run;
  }
  return done;
}

}  // namespace pulseinfer
