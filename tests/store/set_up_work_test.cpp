#include <pulseinfer/backend/host_function.hpp>
#include <pulseinfer/backend/scripted/scripted_backend.hpp>
#include <pulseinfer/store/set_up_copy.hpp>
#include <pulseinfer/store/set_up_work.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <stdexcept>
#include <string>

using namespace pulseinfer;

namespace {

/// The text of the resource_error that a call ends with; empty without one.
template <class Call>
std::string refusal_of(Call call)
{
  try {
    call();
  } catch (resource_error const& problem) {
    return problem.what();
  }
  return {};
}

}  // namespace

TEST_SUITE("store")
{
  TEST_CASE("set-up work is complete when the call returns, and leaves no handles behind")
  {
    scripted_backend backend;
    int ran = 0;
    auto const count = [&ran] { ++ran; };
    set_up_work(backend, "counting", [&](scripted_backend::stream_ref stream) {
      return backend.launch(stream, host_function{count});
    });
    CHECK(ran == 1);
    CHECK(backend.live_streams() == 0);
    CHECK(backend.live_events() == 0);
  }

  TEST_CASE("set-up work that was enqueued has ended when a later call is refused")
  {
    int ran = 0;
    auto const count = [&ran] { ++ran; };
    bool throws = false;
    script how;
    SUBCASE("a launch behind it") { how.rules = {{.call = script_call::launch, .first = 1}}; }
    SUBCASE("the record") { how.rules = {{.call = script_call::record}}; }
    SUBCASE("an exception of the caller's") { throws = true; }
    scripted_backend backend{how};
    auto const enqueue = [&](scripted_backend::stream_ref stream) {
      status const first = backend.launch(stream, host_function{count});
      if (throws) { throw std::runtime_error{"the caller's"}; }
      return first == status::ok ? backend.launch(stream, host_function{count}) : first;
    };
    if (throws) {
      CHECK_THROWS_AS(set_up_work(backend, "counting", enqueue), std::runtime_error);
    } else {
      CHECK(refusal_of([&] { set_up_work(backend, "counting", enqueue); }).find("counting") != std::string::npos);
    }
    CHECK(ran >= 1);
    CHECK(backend.pending_tasks() == 0);
    CHECK(backend.live_streams() == 0);
    CHECK(backend.live_events() == 0);
  }

  TEST_CASE("a set-up copy that fails on its way throws with its size")
  {
    scripted_backend backend{script{.rules = {{.effect = script_effect::fail, .call = script_call::copy}}}};
    std::array<std::byte, 24> source{}, target{};
    std::string const text = refusal_of([&] { set_up_copy(backend, target.data(), source.data(), source.size()); });
    CHECK(text.find("24 B") != std::string::npos);
  }
}
