#include <pulseinfer/device/kept_blocks.hpp>

#include <doctest/doctest.h>

#include <cstdint>

using pulseinfer::row_info;
using pulseinfer::device::keep_blocks;
using pulseinfer::device::kept_blocks;

TEST_SUITE("device")
{
  TEST_CASE("keep_blocks keeps sinks, recent and open blocks and leaves the rest of the budget to votes")
  {
    // 100 blocks of 16, the last one with 5 tokens: block 99 is open.
    kept_blocks const kept = keep_blocks(row_info{.tokens = 99 * 16 + 5, .new_tokens = 1}, 16, 20, 2, 3);
    CHECK(kept.blocks == 100);
    CHECK(kept.open == 99);
    CHECK(kept.head == 2);
    CHECK(kept.tail == 96);
    CHECK(kept.chosen == 14);
  }

  TEST_CASE("keep_blocks counts as open what the step's tokens touch, also where they fill it, and what is partial")
  {
    CHECK(keep_blocks(row_info{.tokens = 160, .new_tokens = 1}, 16, 4, 0, 0).open == 9);
    CHECK(keep_blocks(row_info{.tokens = 161, .new_tokens = 2}, 16, 4, 0, 0).open == 9);
    CHECK(keep_blocks(row_info{.tokens = 161, .new_tokens = 1}, 16, 4, 0, 0).open == 10);
    CHECK(keep_blocks(row_info{.tokens = 160, .new_tokens = 0}, 16, 4, 0, 0).open == 10);
    CHECK(keep_blocks(row_info{.tokens = 163, .new_tokens = 0}, 16, 4, 0, 0).open == 10);
    CHECK(keep_blocks(row_info{.tokens = 163, .new_tokens = 0}, 16, 4, 0, 0).tail == 10);
    CHECK(keep_blocks(row_info{.tokens = 160, .new_tokens = 0}, 16, 4, 0, 0).tail == 10);
  }

  TEST_CASE("keep_blocks never exceeds a budget: open blocks come before recent ones, these before sinks")
  {
    for (std::int32_t tokens = 0; tokens < 200; tokens += 7) {
      for (std::int32_t fresh = 0; fresh <= tokens && fresh < 40; fresh += 3) {
        for (std::uint32_t budget = 1; budget < 12; ++budget) {
          for (std::uint32_t sinks = 0; sinks < 5; ++sinks) {
            for (std::uint32_t recent = 0; recent < 5; ++recent) {
              row_info const row{.tokens = tokens, .new_tokens = fresh};
              kept_blocks const kept = keep_blocks(row, 8, budget, sinks, recent);
              std::uint32_t const selected = kept.head + kept.chosen + kept.blocks - kept.tail;
              bool const all = kept.blocks <= budget;
              bool sound = selected == (all ? kept.blocks : budget) && (all || kept.head + kept.chosen <= kept.tail);
              if (!all) {
                std::uint32_t const open = kept.blocks - kept.open;
                if (open <= budget) { sound = sound && kept.tail <= kept.open; }
                if (open + recent + sinks <= budget && kept.open >= recent + sinks) {
                  sound = sound && kept.head == sinks && kept.tail == kept.open - recent;
                }
                // Sinks only where all recent blocks are in.
                if (kept.head != 0) {
                  sound = sound && kept.open - kept.tail >= (recent < kept.open ? recent : kept.open);
                }
              }
              if (!sound) {
                CAPTURE(tokens);
                CAPTURE(fresh);
                CAPTURE(budget);
                CAPTURE(sinks);
                CAPTURE(recent);
                CHECK(sound);
              }
            }
          }
        }
      }
    }
  }
}
