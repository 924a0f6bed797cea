#pragma once

/// Runs a small program in all legal orders of its tasks, or in some of them, and counts those that end wrong.

#include <pulseinfer/backend/scripted/scripted_backend.hpp>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#  define PULSEINFER_TEST_SANITIZED 1
#else
#  define PULSEINFER_TEST_SANITIZED 0
#endif

namespace pulseinfer_test {

/// Most orders of one exploration in a build with sanitizers, where an order costs ten times as much and what is looked for
/// is a fault of memory, which orders share. That all orders are right is for the plain build to show.
inline constexpr std::uint64_t sanitized_orders =
  PULSEINFER_TEST_SANITIZED != 0 ? 250 : std::numeric_limits<std::uint64_t>::max();

struct exploration {
  std::uint64_t orders = 0;
  std::uint64_t wrong = 0;
  bool complete = true;      ///< false: the bound on the orders came first
  bool cut = false;          ///< at sanitized_orders, which leaves `complete` as it is
  std::string fault = {};    ///< of the first order that went wrong
  std::string choices = {};  ///< of that order, as script::choices takes them by choices_from

  exploration& operator+=(exploration const& more)
  {
    orders += more.orders;
    complete = complete && more.complete;
    cut = cut || more.cut;
    if (wrong == 0) {
      fault = more.fault;
      choices = more.choices;
    }
    wrong += more.wrong;
    return *this;
  }

  [[nodiscard]] std::string text() const
  {
    std::string said =
      std::to_string(orders) + (complete && !cut ? " orders, " : " of the orders, ") + std::to_string(wrong) + " wrong";
    return wrong == 0 ? said : said + "; the first, \"" + choices + "\": " + fault;
  }
};

/// "20 orders, 0 wrong; without it 44 of 80".
inline std::string compared(exploration const& with, exploration const& without)
{
  return with.text() + "; without it " + std::to_string(without.wrong) + " of " + std::to_string(without.orders);
}

struct exploration_bounds {
  std::uint64_t orders = 20000;
  /// Most choices of an order that differ from the tasks' order of enqueuing.
  std::uint32_t deviations = std::numeric_limits<std::uint32_t>::max();
};

namespace explore_detail {

/// Runs the program once and counts what came out.
template <class Program>
std::vector<pulseinfer::choice> run_once(pulseinfer::script const& how, Program& program, exploration& seen)
{
  pulseinfer::scripted_backend backend{how};
  std::string fault;
  try {
    fault = program(backend);
  } catch (std::exception const& e) {
    fault = e.what();
  }
  ++seen.orders;
  if (!fault.empty()) {
    if (seen.wrong++ == 0) {
      seen.fault = fault;
      seen.choices = text_of(backend.choices());
    }
  }
  return backend.choices();
}

/// The next order, depth first: the last choice that has another way takes it. @return false: there is none
inline bool advance(
  std::vector<pulseinfer::choice> const& made, std::uint32_t deviations, std::vector<std::uint32_t>& next)
{
  std::uint32_t before = 0;  // deviations of the choices in front of the i-th
  for (pulseinfer::choice const& c : made) { before += c.taken == 0 ? 0U : 1U; }
  for (std::size_t i = made.size(); i-- > 0;) {
    before -= made[i].taken == 0 ? 0U : 1U;
    if (made[i].taken + 1 == made[i].ways || before >= deviations) { continue; }
    next.clear();
    for (std::size_t j = 0; j < i; ++j) { next.push_back(made[j].taken); }
    next.push_back(made[i].taken + 1);
    return true;
  }
  return false;
}

}  // namespace explore_detail

/// Runs `program` in every order that the script allows, each on a backend of its own.
/// @param program (scripted_backend&) -> std::string: what is wrong, empty where nothing is; exceptions count as wrong. What
///        it does but for the order must be the same in each run
template <class Program>
exploration explore_orders(pulseinfer::script how, Program program, exploration_bounds const& bounds = {})
{
  exploration seen;
  how.order = pulseinfer::order_kind::given;
  how.choices.clear();
  for (;;) {
    std::vector<pulseinfer::choice> const made = explore_detail::run_once(how, program, seen);
    if (!explore_detail::advance(made, bounds.deviations, how.choices)) { return seen; }
    if (seen.orders == bounds.orders) {
      seen.complete = false;
      return seen;
    }
    if (seen.orders == sanitized_orders) {
      seen.cut = true;
      return seen;
    }
  }
}

/// Runs `program` in `count` orders that are drawn.
template <class Program>
exploration draw_orders(pulseinfer::script how, Program program, std::uint64_t count, std::uint64_t seed = 1)
{
  exploration seen;
  how.order = pulseinfer::order_kind::seeded;
  seen.complete = false;
  for (std::uint64_t i = 0; i < count; ++i) {
    how.seed = seed + i;
    static_cast<void>(explore_detail::run_once(how, program, seen));
  }
  return seen;
}

}  // namespace pulseinfer_test
