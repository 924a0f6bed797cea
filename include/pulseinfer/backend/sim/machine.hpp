#pragma once

/// A device and a link in virtual time: who holds them, at which rate they get on, and when the next of them is through.

#include <pulseinfer/backend/sim/link_model.hpp>
#include <pulseinfer/types.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace pulseinfer {

enum class sim_resource : std::uint8_t { device, to_device, to_host };

/// Work for the time in which nobody holds the link to the device.
class background_source {
 public:
  struct piece {
    nanoseconds duration{0};  ///< of the link, undisturbed
    std::uint64_t name = 0;
  };
  /// The next piece of work. @return false where there is none now
  virtual bool next(piece& given) noexcept = 0;
  /// The piece is through.
  virtual void done(std::uint64_t name) noexcept = 0;

 protected:
  ~background_source() = default;
};

namespace detail {

/// Each resource serves its holders one after another in the order in which they came. The rate of the one that is served
/// follows who else is served at the moment (link_sharing). Background pieces move while no holder wants the link to the
/// device, and stop when one comes.
class sim_machine {
 public:
  static constexpr std::uint32_t nobody = ~0U;

  sim_machine(std::uint32_t holders, link_sharing const& sharing) : sharing_{sharing}
  {
    for (server& s : servers_) { s.waiting.reserve(holders); }
  }

  void set_background(background_source* source) noexcept { background_ = source; }

  /// `holder` wants `work` (time at full rate) of a resource from `now` on. One want at a time for each holder.
  void request(nanoseconds now, sim_resource resource, std::uint32_t holder, mover by, nanoseconds work) noexcept
  {
    get_on(now);
    server& s = at(resource);
    s.waiting.push_back({holder, by, static_cast<double>(work.count()), now});
    if (s.waiting.size() == 1) { s.waiting.front().begin = now; }
    set_rates();
  }

  /// Starts a background piece where the link is free for it.
  void fill(nanoseconds now) noexcept
  {
    if (background_ == nullptr || piece_active_ || !at(sim_resource::to_device).waiting.empty()) { return; }
    background_source::piece given;
    if (!background_->next(given)) { return; }
    get_on(now);
    piece_ = given;
    piece_left_ = static_cast<double>(given.duration.count());
    piece_active_ = true;
    set_rates();
  }

  /// When the first of those that are served will be through; nanoseconds::max() where nobody is.
  [[nodiscard]] nanoseconds next_end() const noexcept { return next_end_; }

  /// Ends one that is through at `now`. @param begin when it was first served
  /// @return its holder; nobody where none is through (a background piece may have ended instead, then `more` is true)
  [[nodiscard]] std::uint32_t take_ended(nanoseconds now, nanoseconds& begin, bool& more) noexcept
  {
    more = false;
    if (next_end_ > now) { return nobody; }
    get_on(now);
    for (server& s : servers_) {
      if (s.waiting.empty() || s.waiting.front().left > almost_nothing) { continue; }
      std::uint32_t const holder = s.waiting.front().holder;
      begin = s.waiting.front().begin;
      s.waiting.erase(s.waiting.begin());
      if (!s.waiting.empty()) { s.waiting.front().begin = now; }
      set_rates();
      more = true;
      return holder;
    }
    if (moves_background() && piece_left_ <= almost_nothing) {
      piece_active_ = false;
      background_->done(piece_.name);
      set_rates();
      more = true;
    }
    return nobody;
  }

  /// Time that a resource was held until `now`, background pieces counted with the link.
  [[nodiscard]] nanoseconds busy(sim_resource resource) const noexcept { return at(resource).busy; }
  /// Time of the link that background pieces took.
  [[nodiscard]] nanoseconds background_busy() const noexcept { return background_busy_; }

 private:
  /// A part of a nanosecond: ends are rounded up to whole ones.
  static constexpr double almost_nothing = 1e-6;

  struct holder_work {
    std::uint32_t holder = 0;
    mover by = mover::kernel;
    double left = 0.0;
    nanoseconds begin{0};
  };
  struct server {
    std::vector<holder_work> waiting;  // the first is served
    double rate = 1.0;
    nanoseconds busy{0};
  };

  [[nodiscard]] server& at(sim_resource resource) noexcept { return servers_[static_cast<std::size_t>(resource)]; }
  [[nodiscard]] server const& at(sim_resource resource) const noexcept
  {
    return servers_[static_cast<std::size_t>(resource)];
  }
  [[nodiscard]] bool moves_background() const noexcept
  {
    return piece_active_ && at(sim_resource::to_device).waiting.empty();
  }

  void get_on(nanoseconds now) noexcept
  {
    nanoseconds const passed = now - since_;
    if (passed.count() <= 0) { return; }
    since_ = now;
    auto const time = static_cast<double>(passed.count());
    if (moves_background()) {
      piece_left_ -= at(sim_resource::to_device).rate * time;
      at(sim_resource::to_device).busy += passed;
      background_busy_ += passed;
    }
    for (server& s : servers_) {
      if (s.waiting.empty()) { continue; }
      s.waiting.front().left -= s.rate * time;
      s.busy += passed;
    }
  }

  void set_rates() noexcept
  {
    server& device = at(sim_resource::device);
    server& up = at(sim_resource::to_device);
    server& down = at(sim_resource::to_host);
    bool const up_busy = !up.waiting.empty() || piece_active_;
    auto const up_by = static_cast<std::size_t>(up.waiting.empty() ? mover::kernel : up.waiting.front().by);
    auto const down_by = static_cast<std::size_t>(down.waiting.empty() ? mover::kernel : down.waiting.front().by);
    device.rate = up_busy ? sharing_.compute_beside_link[up_by] : 1.0;
    up.rate = device.waiting.empty() ? 1.0 : sharing_.link_beside_compute[up_by];
    down.rate = 1.0;
    if (up_busy && !down.waiting.empty()) {
      up.rate = std::min(up.rate, sharing_.both_ways[up_by][down_by].to_device);
      down.rate = sharing_.both_ways[up_by][down_by].to_host;
    }
    next_end_ = nanoseconds::max();
    auto const ends = [&](double left, double rate) {
      double const time = left <= almost_nothing ? 0.0 : std::ceil(left / rate - almost_nothing);
      next_end_ = std::min(next_end_, since_ + nanoseconds{static_cast<std::int64_t>(time)});
    };
    for (server const& s : servers_) {
      if (!s.waiting.empty()) { ends(s.waiting.front().left, s.rate); }
    }
    if (moves_background()) { ends(piece_left_, up.rate); }
  }

  link_sharing sharing_;
  server servers_[3];
  background_source* background_ = nullptr;
  background_source::piece piece_ = {};
  bool piece_active_ = false;
  double piece_left_ = 0.0;
  nanoseconds background_busy_{0};
  nanoseconds since_{0};
  nanoseconds next_end_ = nanoseconds::max();
};

}  // namespace detail

}  // namespace pulseinfer
