#include "support/parallel_group.hpp"
#include <pulseinfer/device/group.hpp>
#include <pulseinfer/device/top_k.hpp>
#include <pulseinfer/device/vote.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

using pulseinfer::bfloat16;
using pulseinfer::block_id;
using pulseinfer::half;

namespace {

template <class Share>
std::vector<float> votes_of(std::vector<std::vector<float>> const& voters)
{
  auto const blocks = static_cast<std::uint32_t>(voters.front().size());
  std::uint32_t const pitch = blocks + 3;
  std::vector<Share> shares(voters.size() * pitch, Share(1e4F));
  for (std::size_t i = 0; i < voters.size(); ++i) {
    for (std::uint32_t b = 0; b < blocks; ++b) { shares[i * pitch + b] = Share(voters[i][b]); }
  }
  std::vector<float> votes(blocks, 0.0F);
  pulseinfer::device::vote(
    pulseinfer::device::solo_group{}, shares.data(), pitch, static_cast<std::uint32_t>(voters.size()), blocks,
    votes.data());
  return votes;
}

}  // namespace

TEST_SUITE("device")
{
  // lightonai/pylate#237: sums kept in bfloat16 change the order of results
  TEST_CASE("vote sums bfloat16 and half shares in float, so that small terms behind a large one count")
  {
    struct trial {
      std::uint32_t terms;
      float first, later, other;
    };
    for (trial const& t :
         {trial{32, 256.0F, 0.75F, 8.5F}, trial{9, 512.0F, 1.5F, 57.9F}, trial{71, 256.0F, 0.75F, 4.2F}}) {
      std::vector<std::vector<float>> voters(t.terms, std::vector<float>(12, 0.0F));
      double right_a = 0;
      double right_b = 0;
      for (std::uint32_t i = 0; i < t.terms; ++i) {
        voters[i][9] = i == 0 ? t.first : t.later;
        voters[i][2] = t.other;
        right_a += static_cast<double>(static_cast<float>(bfloat16{voters[i][9]}));
        right_b += static_cast<double>(static_cast<float>(bfloat16{t.other}));
      }
      REQUIRE(right_a > right_b);
      for (auto const& votes : {votes_of<bfloat16>(voters), votes_of<float>(voters)}) {
        CHECK(static_cast<double>(votes[9]) == doctest::Approx(right_a).epsilon(1e-6));
        std::uint32_t storage[pulseinfer::device::top_k_temp_words(1)];
        block_id best = pulseinfer::none<block_id>;
        CHECK(pulseinfer::device::top_k(pulseinfer::device::solo_group{}, votes.data(), 12, 1, 0, &best, storage) == 1);
        CHECK(best == block_id{9});
      }
      CHECK(static_cast<double>(votes_of<half>(voters)[9]) == doctest::Approx(right_a).epsilon(1e-6));
    }
  }

  TEST_CASE("vote adds to what is there, in the order of the voters, and leaves other blocks alone")
  {
    // In float, (1e8 + 1) - 1e8 is 0 and (1e8 - 1e8) + 1 is 1: the order shows.
    std::vector<float> const shares{1e8F, 5.0F, -1e8F, 6.0F, 1.0F, 7.0F};
    std::vector<float> votes{0.25F, 100.0F};
    pulseinfer::device::vote(pulseinfer::device::solo_group{}, shares.data(), 2, 3, 1, votes.data());
    CHECK(votes[0] == 1.0F);
    CHECK(votes[1] == 100.0F);
  }

  TEST_CASE("law 8: vote and favour_previous give the same bits for every size of the group")
  {
    std::mt19937 random{9};
    std::uniform_real_distribution<float> uniform;
    constexpr std::uint32_t blocks = 333;
    std::vector<float> shares(7 * blocks);
    for (float& share : shares) { share = uniform(random); }
    std::vector<std::uint32_t> previous(20);
    for (std::uint32_t& word : previous) { word = static_cast<std::uint32_t>(random()); }
    std::vector<float> right(blocks, 0.0F);
    auto const run = [&](auto const& group, std::vector<float>& votes) {
      pulseinfer::device::vote(group, shares.data(), blocks, 7, blocks, votes.data());
      pulseinfer::device::favour_previous(group, previous.data(), 96, blocks, 1.284F, votes.data());
    };
    run(pulseinfer::device::solo_group{}, right);
    for (std::uint32_t const threads : {2U, 5U, 12U}) {
      std::vector<float> votes(blocks, 0.0F);
      pulseinfer_test::run_group(threads, [&](pulseinfer_test::parallel_group const& group) { run(group, votes); });
      CHECK(votes == right);
    }
  }

  TEST_CASE("favour_previous multiplies exactly the blocks whose bit is set, from any first block on")
  {
    std::vector<std::uint32_t> previous(4, 0U);
    for (std::uint32_t const block : {0U, 31U, 32U, 70U, 127U}) { previous[block / 32] |= 1U << (block % 32); }
    for (std::uint32_t const begin : {0U, 1U, 32U, 60U}) {
      std::vector<float> votes(128 - begin, 2.0F);
      pulseinfer::device::favour_previous(
        pulseinfer::device::solo_group{}, previous.data(), begin, static_cast<std::uint32_t>(votes.size()), 1.5F,
        votes.data());
      for (std::uint32_t b = 0; b < votes.size(); ++b) {
        std::uint32_t const block = begin + b;
        bool const favoured = block == 0 || block == 31 || block == 32 || block == 70 || block == 127;
        CHECK(votes[b] == (favoured ? 3.0F : 2.0F));
      }
    }
  }
}
