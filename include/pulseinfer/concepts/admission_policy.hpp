#pragma once

/// Decides between steps how much runs. Meanings: docs/concepts.md#admission-policy.

#include <pulseinfer/view/balance.hpp>
#include <pulseinfer/view/step_sample.hpp>

#include <concepts>
#include <cstdint>
#include <span>
#include <string>

namespace pulseinfer {

template <class A>
concept admission_observes = requires(A& self, step_sample const& sample) {
  { self.observe(sample) } noexcept;
};

template <class A>
concept admission_decides = requires(A& self, demand const& request, capacity const& free) {
  { self.admit(request, free) } noexcept -> std::same_as<admission>;
};

template <class A>
concept admission_policy = admission_observes<A> && admission_decides<A>;

/// A policy that may also say which rows offload and how many slots each layer has.
template <class A>
concept balancing_admission = admission_policy<A> &&
  requires(A& self, demand const& request, capacity const& free, balance_question const& asked,
           std::span<std::uint32_t> slots) {
    { self.keeps_resident(request, free) } noexcept -> std::same_as<bool>;
    { self.plan(asked, slots) } noexcept -> std::same_as<balance_answer>;
  };

/// A policy that says in words, with its numbers, why it would hold a request back now though memory for it is free; empty where it
/// would not. What it says completes "is held back: ".
template <class A>
concept explaining_admission =
  admission_policy<A> && requires(A const& self, demand const& request, capacity const& free) {
    { self.explain(request, free) } -> std::same_as<std::string>;
  };

/// One sentence for each requirement that `A` misses.
template <class A>
consteval bool explain_admission_policy()
{
  static_assert(admission_observes<A>, "an admission policy must take step samples in observe(sample), noexcept");
  static_assert(admission_decides<A>, "an admission policy must return admission, noexcept, from admit(request, free)");
  return admission_policy<A>;
}

}  // namespace pulseinfer
