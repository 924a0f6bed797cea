#pragma once

/// Where the time of a step goes: what the compute stream does between marks, and what the host does.

#include "../on_gpu.cuh"
#include <pulseinfer/backend/cuda/cuda_backend.cuh>

#include <cuda_runtime_api.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace pulseinfer_bench {

enum class host_stage : std::uint8_t { begin, enter, next, model, commit, count };

/// Sums of microseconds since `clear`. Marks on the stream are events, which cost time of their own: they are set in steps whose
/// duration does not count.
class stage_clock {
 public:
  using device_sums = std::map<std::string, double>;
  using host_sums = std::array<double, static_cast<std::size_t>(host_stage::count)>;

  explicit stage_clock(cudaStream_t stream) : stream_{stream} {}
  stage_clock(stage_clock&&) = delete;
  ~stage_clock()
  {
    for (cudaEvent_t const event : events_) { static_cast<void>(cudaEventDestroy(event)); }
  }

  void clear(bool marks_device)
  {
    marks_device_ = marks_device;
    device_.clear();
    host_ = {};
  }
  /// What the stream was given since the last mark is `stage`. The first mark of a step begins the count.
  void mark(char const* stage)
  {
    if (!marks_device_) { return; }
    if (marked_.size() == events_.size()) { require(cudaEventCreate(&events_.emplace_back()), "cudaEventCreate"); }
    require(cudaEventRecord(events_[marked_.size()], stream_), "cudaEventRecord");
    marked_.push_back(stage);
  }
  /// @pre the stream has run
  void end_step()
  {
    for (std::size_t i = 1; i < marked_.size(); ++i) {
      float milliseconds = 0.0F;
      require(cudaEventElapsedTime(&milliseconds, events_[i - 1], events_[i]), "cudaEventElapsedTime");
      device_[marked_[i]] += 1e3 * static_cast<double>(milliseconds);
    }
    marked_.clear();
  }
  /// Runs `work` on the host's account of `stage`.
  template <class Work>
  decltype(auto) on_host(host_stage stage, Work work)
  {
    struct span {
      double& sum;
      std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
      ~span() { sum += std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count(); }
    } const timed{host_[static_cast<std::size_t>(stage)]};
    return work();
  }

  [[nodiscard]] device_sums const& device() const { return device_; }
  [[nodiscard]] host_sums const& host() const { return host_; }

 private:
  cudaStream_t stream_;
  bool marks_device_ = false;
  std::vector<cudaEvent_t> events_;
  std::vector<char const*> marked_;
  device_sums device_;
  host_sums host_ = {};
};

/// A backend that marks each operation on the clock's stream, while it has a clock.
class marking_backend : public pulseinfer::cuda_backend {
 public:
  template <class Op>
  pulseinfer::status launch(stream_ref stream, Op const& op) noexcept
  {
    pulseinfer::status const result = cuda_backend::launch(stream, op);
    if (clock != nullptr && stream.stream == marked) { clock->mark(Op::name); }
    return result;
  }

  stage_clock* clock = nullptr;
  cudaStream_t marked = nullptr;
};

}  // namespace pulseinfer_bench
