#pragma once

/// The loop over visits: a range whose ++ is the interrupt point.

#include <pulseinfer/view/visit.hpp>

#include <cstddef>
#include <iterator>

namespace pulseinfer {

/// What `offload_manager::step` returns. `++` hands the next visit out: whoever is ready comes next. Nothing of the loop
/// lives in it; leaving it early parks the rest.
template <class Manager>
class step_loop {
 public:
  class iterator {
   public:
    using iterator_concept = std::input_iterator_tag;
    using value_type = visit;
    using difference_type = std::ptrdiff_t;

    explicit iterator(Manager& manager) noexcept : manager_{&manager}, ended_{!manager.next_visit(visit_)} {}

    [[nodiscard]] visit const& operator*() const noexcept { return visit_; }
    iterator& operator++() noexcept
    {
      ended_ = !manager_->next_visit(visit_);
      return *this;
    }
    void operator++(int) noexcept { ++*this; }
    [[nodiscard]] friend bool operator==(iterator const& it, std::default_sentinel_t) noexcept { return it.ended_; }

   private:
    Manager* manager_;
    visit visit_{};
    bool ended_;
  };

  explicit step_loop(Manager& manager) noexcept : manager_{&manager} {}

  [[nodiscard]] iterator begin() const noexcept { return iterator{*manager_}; }
  [[nodiscard]] std::default_sentinel_t end() const noexcept { return {}; }

 private:
  Manager* manager_;
};

}  // namespace pulseinfer
