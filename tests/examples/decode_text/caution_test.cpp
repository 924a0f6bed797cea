#include "decode_text/caution.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace {

using decode_text::cautions;
using list = std::vector<std::uint32_t>;

bool says(std::string const& text, char const* part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_SUITE_BEGIN("examples/decode_text");

TEST_CASE("a run of many tokens over contexts longer than the budget needs no caution")
{
  CHECK(cautions(list{4096}, 512, 1024).empty());
  CHECK(cautions(list{1025, 4096}, 256, 1024).empty());
}

TEST_CASE("a context that fits in the budget is said with its length")
{
  auto const found = cautions(list{300, 500}, 512, 1012);
  REQUIRE(found.size() == 1);
  CHECK(says(found[0], "at most 1012 tokens"));
  CHECK(says(found[0], "the budget of 1012"));
}

TEST_CASE("a context that outgrows the budget on the way is said with the number of tokens")
{
  // Predictions after 1000 .. 1024 tokens read everything; the other row is longer from its first one on.
  auto const found = cautions(list{1000, 1025}, 300, 1024);
  REQUIRE(found.size() == 1);
  CHECK(says(found[0], "for 25 of 600 tokens"));
  CHECK(says(found[0], "the budget of 1024"));
}

TEST_CASE("few decoded tokens are said with their number over all rows")
{
  auto const found = cautions(list{4096, 2048, 2048}, 170, 1024);
  REQUIRE(found.size() == 1);
  CHECK(says(found[0], "perplexity of 510 tokens"));
  CHECK(says(found[0], "512"));
  CHECK(cautions(list{4096, 2048, 2048}, 171, 1024).empty());
}

TEST_SUITE_END();
