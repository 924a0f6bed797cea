#include <doctest/doctest.h>
#include <rapidcheck.h>
#include <support/manager/sequence_machine.hpp>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

/// As rc::check, with as many cases as are wanted.
template <class Property>
bool check_cases(int cases, Property property)
{
  rc::detail::TestParams params = rc::detail::configuration().testParams;
  params.maxSuccess = std::max(params.maxSuccess, cases);
  params.maxSize = 300;  // operations of the longest case
  auto const result = rc::detail::checkTestable(property, rc::detail::TestMetadata{}, params);
  if (!result.template is<rc::detail::SuccessResult>()) { rc::detail::printResultMessage(result, std::cerr); }
  return result.template is<rc::detail::SuccessResult>();
}

template <class Manager>
void live_randomly()
{
  bool const held = check_cases(200, [](std::vector<std::uint64_t> const& numbers) {
    std::uint32_t const rows = *rc::gen::inRange(1U, 5U);
    machine_setting s{
      .rows = rows,
      .block_tokens = *rc::gen::element(1U, 2U, 3U, 4U, 8U),
      .head_groups = *rc::gen::element(1U, 2U),
      .step_tokens = *rc::gen::inRange(1U, 6U),
      .depth = *rc::gen::inRange(0U, 4U),
      .spare_slots = *rc::gen::inRange(0U, 3U),
      .saved = *rc::gen::inRange(1U, 5U),
      .recalls = *rc::gen::element(0U, 1U, 2U),
      .stream_blocks = *rc::gen::element(0U, 1U, 2U, 5U, 40U),
      .mixed_layers = *rc::gen::arbitrary<bool>(),
      .warm_up = *rc::gen::arbitrary<bool>(),
      .deferred_share = *rc::gen::element(0.0F, 0.05F, 0.5F),
      .near_share = *rc::gen::element(0.0F, 0.0F, 0.5F),
      .seed = *rc::gen::inRange(0U, 1000U)};
    if (*rc::gen::arbitrary<bool>()) { s.host_blocks = 16 + *rc::gen::inRange(0U, 48U); }
    if (s.recalls != 0) { s.recalls += rows; }
    if (*rc::gen::arbitrary<bool>()) { s.low_slots = *rc::gen::inRange(1U, 200U); }
    if (*rc::gen::arbitrary<bool>()) { s.slots = *rc::gen::inRange(400U, 1000U); }
    sequence_machine<Manager> machine{s};
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      if (!machine.run(numbers[i])) {
        RC_FAIL(name_of(s) + ": operation " + std::to_string(i) + " " + machine.fault());
      }
    }
    if (!machine.finish()) { RC_FAIL(name_of(s) + ": at the end " + machine.fault()); }
  });
  CHECK(held);
}

}  // namespace

TEST_SUITE("manager")
{
  TEST_CASE_TEMPLATE(
    "laws 1, 4 and 12: whatever becomes of sequences, each reads its own bytes and every block has one owner", Manager,
    hits_manager, chosen_manager, checked_manager, fragment_manager)
  {
    live_randomly<Manager>();
  }

  TEST_CASE("random operations reach what they are for")
  {
    sequence_machine<chosen_manager> machine{
      {.step_tokens = 3, .depth = 1, .host_blocks = 60, .slots = 250, .low_slots = 100, .stream_blocks = 2, .seed = 1}};
    for (std::uint64_t number = 0; number < 6000; ++number) { REQUIRE_MESSAGE(machine.run(number), machine.fault()); }
    REQUIRE_MESSAGE(machine.finish(), machine.fault());
    for (std::uint32_t a = 0; a <= static_cast<std::uint32_t>(machine_action::promote); ++a) {
      auto const action = static_cast<machine_action>(a);
      CAPTURE(name_of(action));
      CHECK(machine.went_well(action) > 30);
      CHECK(machine.went_well(action) <= machine.drawn(action));
    }
    CHECK(machine.recalled_blocks() > 1000);
    CHECK(machine.late_rows() > 10);
    CHECK(machine.streamed_parts() > 1000);
    CHECK(machine.left_streams() > 30);
  }

  TEST_CASE("a byte that is not the sequence's own is found")
  {
    sequence_machine<hits_manager> machine{{.step_tokens = 2}};
    std::uint64_t number = 0;
    while (machine.manager().store().counts().held < 20) { REQUIRE(machine.run(number++)); }
    REQUIRE(machine.manager().drain(no_deadline) == status::ok);
    REQUIRE(machine.backend().synchronize() == status::ok);
    for (std::uint32_t b = 0; b < machine.manager().store().blocks(); ++b) {
      *machine.manager().store().ref().address(layer_id{1}, 0, static_cast<host_block_id>(b)) ^= std::byte{0x40};
    }
    bool sound = true;
    for (int i = 0; i < 400 && sound; ++i) { sound = machine.run(number++); }
    CHECK_FALSE(sound);
    CHECK(machine.fault().find("layer 1") != std::string::npos);
  }
}
