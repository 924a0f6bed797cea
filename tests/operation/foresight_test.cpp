#include <pulseinfer/operation/defer_blocks.hpp>
#include <pulseinfer/operation/list_wanted_blocks.hpp>
#include <pulseinfer/operation/resolve_background.hpp>
#include <pulseinfer/operation/want_near_blocks.hpp>
#include <pulseinfer/replacement/lru.hpp>

#include <doctest/doctest.h>
#include <support/lane_books.hpp>
#include <support/parallel_group.hpp>

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

constexpr layer_id layer{1};
constexpr std::uint32_t budget = 12, queries = 2, heads = 4;  // two heads of each of two lanes
using numbers = std::set<std::uint32_t>;

/// Two rows of two lanes over books in which some selected blocks miss.
struct scene {
  explicit scene(std::uint64_t seed)
    : books{{.layers = 2, .rows = 2, .head_groups = 2, .max_blocks = 70, .max_selected = budget, .max_lease = 10}},
      random{seed}
  {
    foresight.resize(4);
    planes.assign(2, std::vector<std::uint32_t>(2UL * 4 * 3, 0));
    votes.resize(4UL * 80);
    shares.resize(2UL * queries * heads * 80);
    for (float& vote : votes) { vote = static_cast<float>(draw(12)); }  // ties
    for (float& share : shares) { share = static_cast<float>(draw(64)) / 1024.0F; }
    for (std::uint32_t r = 0; r < 2; ++r) {
      std::int32_t const blocks = static_cast<std::int32_t>(20 + draw(50));
      books.info[r] = {.tokens = blocks * 4 - 1, .new_tokens = r == 0 ? 1 : 2};
      for (std::uint32_t b = 0; b < 70; ++b) {
        books.host_blocks[r * 70 + b] = draw(8) == 0 ? none<host_block_id> : static_cast<host_block_id>(100 * r + b);
      }
      for (std::uint32_t g = 0; g < 2; ++g) {
        auto const lane = static_cast<lane_id>(r * 2 + g);
        std::vector<std::int32_t> chosen;
        for (std::int32_t b = 0; b < blocks; ++b) { chosen.push_back(b); }
        std::shuffle(chosen.begin(), chosen.end(), random);
        std::int32_t const first = static_cast<std::int32_t>(16 * (r * 2 + g));
        books.give_lease(layer, lane, static_cast<std::uint32_t>(first), 10);
        for (std::int32_t i = 0; i < 6; ++i) {
          // Some of what is resident is selected, as the lists below overlap with these.
          books.place(layer, lane, chosen[static_cast<std::size_t>(i)], first + i, slot_state::clean, draw(4));
        }
        std::shuffle(chosen.begin(), chosen.begin() + 18, random);
        chosen.resize(budget - draw(3));
        std::ranges::sort(chosen);
        books.select(lane, chosen);
        for (int i = 0; i < 3; ++i) { set(0, lane, draw(static_cast<std::uint32_t>(blocks))); }
        for (int i = 0; i < 9; ++i) { set(1, lane, draw(static_cast<std::uint32_t>(blocks))); }
      }
    }
  }

  std::uint32_t draw(std::uint32_t below) { return static_cast<std::uint32_t>(random() % below); }
  void set(std::size_t plane, lane_id lane, std::uint32_t block)
  {
    planes[plane][(4 + to_index(lane)) * 3 + block / 32] |= 1U << (block % 32);
  }
  [[nodiscard]] numbers bits(std::size_t plane, lane_id lane) const
  {
    numbers result;
    for (std::uint32_t b = 0; b < 96; ++b) {
      if ((planes[plane][(4 + to_index(lane)) * 3 + b / 32] >> (b % 32) & 1U) != 0) { result.insert(b); }
    }
    return result;
  }
  [[nodiscard]] numbers selected(lane_id lane)
  {
    numbers result;
    block_id const* const ids = books.selection().ids_of(lane);
    for (std::uint32_t i = 0; i < budget; ++i) {
      bool const within = i < books.counts[to_index(lane)];
      CHECK(is_none(ids[i]) == !within);
      if (within && i > 0) { CHECK(to_number(ids[i]) > to_number(ids[i - 1])); }
      if (within) { result.insert(static_cast<std::uint32_t>(to_index(ids[i]))); }
    }
    return result;
  }
  [[nodiscard]] bool resident(lane_id lane, std::uint32_t block)
  {
    return !is_none(books.residency().slots_of_lane(layer, lane)[block]);
  }
  [[nodiscard]] foresight_ref foresight_books()
  {
    return {.owed = planes[0].data(), .wanted = planes[1].data(), .totals = foresight.data(), .lanes = 4, .words = 3};
  }
  [[nodiscard]] selection_scores scores() const
  {
    return {
      .votes = votes.data(),
      .shares = shares.data(),
      .vote_pitch = 80,
      .share_pitch = 80,
      .queries = queries,
      .heads = heads,
      .every_head = true,
      .budget_blocks = budget,
      .sink_blocks = 1,
      .recent_blocks = 2};
  }
  [[nodiscard]] row_list rows() const { return {.ids = both_rows, .count = 2}; }

  defer_blocks deferral(float most, bool wants_others)
  {
    return {
      .layer = layer,
      .rows = rows(),
      .info = books.info.data(),
      .selection = books.selection(),
      .scores = scores(),
      .residency = books.residency(),
      .foresight = foresight_books(),
      .head_groups = 2,
      .block_tokens = 4,
      .most_share = most,
      .wants_others = wants_others};
  }

  static constexpr row_id both_rows[] = {row_id{0}, row_id{1}};
  lane_books books;
  std::mt19937_64 random;
  std::vector<lane_foresight> foresight;
  std::vector<std::vector<std::uint32_t>> planes;  // owed, wanted: [layers, lanes, 3]
  std::vector<float> votes, shares;
};

/// The largest share that a head of the lane loses without these blocks.
float lost(scene const& s, std::uint32_t row, std::uint32_t group, std::vector<std::uint32_t> const& blocks)
{
  float most = 0.0F;
  for (std::uint32_t q = 0; q < static_cast<std::uint32_t>(s.books.info[row].new_tokens); ++q) {
    for (std::uint32_t h = group * 2; h < group * 2 + 2; ++h) {
      float sum = 0.0F;
      for (std::uint32_t const b : blocks) { sum += s.scores().shares_of(static_cast<row_id>(row), q, h)[b]; }
      most = std::max(most, sum);
    }
  }
  return most;
}

}  // namespace

TEST_SUITE("operation")
{
  TEST_CASE("defer_blocks takes out the least missing blocks, as many as no head minds, and none that is owed already")
  {
    std::uint64_t taken = 0, refused = 0;
    for (std::uint64_t seed = 1; seed <= 60; ++seed) {
      for (float const most : {0.0F, 0.05F, 0.1F, 1.0F}) {
        scene s{seed}, before{seed};
        bool const others = seed % 2 == 0;
        run_solo(s.deferral(most, others));
        for (std::uint32_t r = 0; r < 2; ++r) {
          for (std::uint32_t g = 0; g < 2; ++g) {
            auto const lane = static_cast<lane_id>(r * 2 + g);
            numbers const whole = before.selected(lane), owes = before.bits(0, lane);
            std::vector<std::pair<float, std::uint32_t>> missing;
            for (std::uint32_t const b : whole) {
              if (before.resident(lane, b) || owes.contains(b)) { continue; }
              missing.emplace_back(lost(before, r, g, {b}), b);  // alone: its largest share
            }
            std::ranges::sort(missing);
            std::vector<std::uint32_t> out;
            for (auto const& [share, block] : missing) {
              out.push_back(block);
              if (lost(before, r, g, out) > most) {
                out.pop_back();
                ++refused;
                break;
              }
            }
            numbers stay = whole;
            for (std::uint32_t const b : out) { stay.erase(b); }
            CHECK(s.selected(lane) == stay);
            numbers const deferred(out.begin(), out.end());
            CHECK(s.bits(0, lane) == deferred);
            numbers wanted = others ? before.bits(1, lane) : numbers{};
            wanted.insert(out.begin(), out.end());
            CHECK(s.bits(1, lane) == wanted);
            lane_foresight const& totals = s.foresight[to_index(lane)];
            CHECK(totals.plans == 1);
            CHECK(totals.deferred == out.size());
            double const share = lost(before, r, g, out);
            CHECK(static_cast<double>(totals.skipped) >= share * 4294967296.0);
            CHECK(static_cast<double>(totals.skipped) <= share * 4294967296.0 + 1.0);
            CHECK(totals.most_skipped == totals.skipped);
            taken += out.size();
          }
        }
      }
    }
    CHECK(taken > 500);
    CHECK(refused > 200);
  }

  TEST_CASE(
    "defer_blocks leaves rows alone that read all of their blocks, or have more queries than shares are kept of")
  {
    scene s{7};
    numbers const whole[] = {s.selected(lane_id{0}), s.selected(lane_id{2})};
    s.books.info[0].tokens = budget * 4;
    s.books.info[1].new_tokens = queries + 1;
    run_solo(s.deferral(1.0F, false));
    CHECK(s.selected(lane_id{0}) == whole[0]);
    CHECK(s.selected(lane_id{2}) == whole[1]);
    for (std::int32_t lane = 0; lane < 4; ++lane) {
      CHECK(s.bits(0, lane_id{lane}).empty());
      CHECK(s.bits(1, lane_id{lane}).empty());
      CHECK(s.foresight[static_cast<std::size_t>(lane)].plans == 0);
    }
  }

  TEST_CASE("a share that is no number keeps its block")
  {
    scene s{3};
    for (float& share : s.shares) { share = std::numeric_limits<float>::quiet_NaN(); }
    numbers const whole = s.selected(lane_id{1});
    run_solo(s.deferral(1.0F, false));
    CHECK(s.selected(lane_id{1}) == whole);
  }

  TEST_CASE("want_near_blocks names the next blocks by votes, ties to the lowest id")
  {
    for (std::uint64_t seed = 1; seed <= 60; ++seed) {
      for (std::uint32_t const near : {1U, 3U, 9U, 60U}) {
        scene s{seed};
        // The selection is the one that the votes ask for.
        for (std::uint32_t l = 0; l < 4; ++l) {
          auto const lane = static_cast<lane_id>(l);
          std::uint32_t const blocks = s.books.info[l / 2].blocks(4);
          std::uint32_t const open = (static_cast<std::uint32_t>(s.books.info[l / 2].tokens) -
                                      static_cast<std::uint32_t>(s.books.info[l / 2].new_tokens)) /
            4;
          std::vector<std::uint32_t> by_votes;
          numbers chosen{0};
          for (std::uint32_t b = open - 2; b < blocks; ++b) { chosen.insert(b); }
          for (std::uint32_t b = 1; b < open - 2; ++b) { by_votes.push_back(b); }
          std::ranges::stable_sort(
            by_votes, [&](std::uint32_t a, std::uint32_t b) { return s.votes[l * 80 + a] > s.votes[l * 80 + b]; });
          std::size_t const cut =
            budget - chosen.size() - seed % 2;  // or one less, as by a budget that follows the mass
          for (std::size_t i = 0; i < cut; ++i) { chosen.insert(by_votes[i]); }
          s.books.select(lane, std::vector<std::int32_t>(chosen.begin(), chosen.end()));
          numbers below;
          for (std::size_t i = cut; i < std::min(by_votes.size(), cut + near); ++i) { below.insert(by_votes[i]); }
          want_near_blocks const op{
            .layer = layer,
            .rows = {.ids = scene::both_rows + l / 2, .count = 1},
            .info = s.books.info.data(),
            .selection = s.books.selection(),
            .scores = s.scores(),
            .foresight = s.foresight_books(),
            .head_groups = 2,
            .block_tokens = 4,
            .near_blocks = near};
          run_solo(op);
          CHECK(s.bits(1, lane) == below);
        }
      }
    }
  }

  TEST_CASE("list_wanted_blocks lists what is owed first, none that is resident or has no copy, and tells what is left")
  {
    std::uint32_t left = 0;
    for (std::uint64_t seed = 1; seed <= 60; ++seed) {
      for (std::uint32_t const most : {0U, 1U, 4U, budget}) {
        scene s{seed}, before{seed};
        run_solo(list_wanted_blocks{
          .layer = layer,
          .rows = s.rows(),
          .listed = s.books.selection(),
          .foresight = s.foresight_books(),
          .residency = s.books.residency(),
          .host_blocks = s.books.host_blocks.data(),
          .head_groups = 2,
          .most_blocks = most});
        for (std::uint32_t l = 0; l < 4; ++l) {
          auto const lane = static_cast<lane_id>(l);
          numbers const owed = before.bits(0, lane);
          std::vector<std::uint32_t> comes;
          for (bool const owes : {true, false}) {
            for (std::uint32_t const b : before.bits(1, lane)) {
              bool const stored = !is_none(before.books.host_blocks[l / 2 * 70 + b]);
              if (owed.contains(b) == owes && stored && !before.resident(lane, b)) { comes.push_back(b); }
            }
          }
          std::size_t const listed = std::min<std::size_t>(most, comes.size());
          REQUIRE(s.books.counts[l] == listed);
          for (std::size_t i = 0; i < budget; ++i) {
            block_id const id = s.books.selection().ids_of(lane)[i];
            if (i < listed) {
              CHECK(to_index(id) == comes[i]);
            } else {
              CHECK(is_none(id));
            }
          }
          CHECK(s.bits(1, lane) == numbers(comes.begin() + static_cast<std::ptrdiff_t>(listed), comes.end()));
          CHECK(s.bits(0, lane) == owed);
          CHECK(s.foresight[l].left == comes.size() - listed);
          left += s.foresight[l].left;
        }
      }
    }
    CHECK(left > 100);
  }

  TEST_CASE("what comes in the background takes the slots that were used least recently, however many it might take")
  {
    lane_books books{{}};
    books.give_lease(layer, lane_id{0}, 0, 4);
    for (std::size_t b = 0; b < 16; ++b) { books.host_blocks[b] = static_cast<host_block_id>(b); }
    std::uint32_t const last_used[] = {8, 5, 7, 6};
    for (std::int32_t i = 0; i < 4; ++i) { books.place(layer, lane_id{0}, i, i, slot_state::clean, last_used[i]); }
    books.host_blocks[12] = none<host_block_id>;
    books.select(lane_id{0}, {0, 9, 10, 12});  // one is there, one is not stored
    books.step = 20;
    row_id const row{0};
    run_solo(resolve_background<lru>{
      .rows = {.ids = &row, .count = 1},
      .selection = books.selection(),
      .residency = books.residency(),
      .pool = books.pool(),
      .host_blocks = books.host_blocks.data(),
      .plan = books.plan(),
      .step = &books.step,
      .layer = layer,
      .most_misses = 4});
    slot_id const* const slot_of = books.residency().slots_of_lane(layer, lane_id{0});
    CHECK(slot_of[9] == slot_id{1});
    CHECK(slot_of[10] == slot_id{3});
    CHECK(slot_of[0] == slot_id{0});
    CHECK(slot_of[2] == slot_id{2});
    CHECK(is_none(slot_of[1]));
  }

  TEST_CASE("what was brought ahead of need counts once it is selected, or once its slot is taken")
  {
    lane_books books{{}};
    books.give_lease(layer, lane_id{0}, 0, 4);
    for (std::size_t b = 0; b < 16; ++b) { books.host_blocks[b] = static_cast<host_block_id>(b); }
    std::vector<lane_foresight> totals(2);
    row_id const row{0};
    lane_plan_ref plan = books.plan();
    plan.foresight = totals.data();
    auto const bring = [&](std::vector<std::int32_t> const& blocks) {
      books.select(lane_id{0}, blocks);
      run_solo(resolve_background<lru>{
        .rows = {.ids = &row, .count = 1},
        .selection = books.selection(),
        .residency = books.residency(),
        .pool = books.pool(),
        .host_blocks = books.host_blocks.data(),
        .plan = plan,
        .step = &books.step,
        .layer = layer,
        .most_misses = 4});
      for (slot_word& word : books.words) {
        word.state = word.block == none<block_id> ? word.state : slot_state::clean;
      }
    };
    auto const demand = [&](std::vector<std::int32_t> const& blocks) {
      books.select(lane_id{0}, blocks);
      run_solo(resolve_blocks<lru>{
        .rows = {.ids = &row, .count = 1},
        .selection = books.selection(),
        .residency = books.residency(),
        .pool = books.pool(),
        .host_blocks = books.host_blocks.data(),
        .plan = plan,
        .table = books.table(),
        .step = &books.step,
        .layer = layer});
      for (slot_word& word : books.words) {
        word.state = word.block == none<block_id> ? word.state : slot_state::clean;
      }
    };
    books.step = 10;
    bring({3, 5, 7});
    CHECK(totals[0].used + totals[0].wasted == 0);
    books.step = 11;
    demand({2, 3});  // a slot is empty
    CHECK(totals[0].used == 1);
    CHECK(totals[0].wasted == 0);
    demand({3, 5});
    CHECK(totals[0].used == 2);
    books.step = 20;
    demand({1, 2, 3, 4});  // 5 and 7 leave, and 7 was never asked for
    CHECK(totals[0].used == 2);
    CHECK(totals[0].wasted == 1);
    books.step = 30;
    bring({8, 9});
    books.step = 40;
    bring({10, 11, 12, 13});
    CHECK(totals[0].wasted == 3);
    CHECK(totals[1].used + totals[1].wasted == 0);
  }

  TEST_CASE("any number of threads finds the same")
  {
    for (std::uint64_t seed = 1; seed <= 3; ++seed) {
      for (std::uint32_t const threads : {2U, 5U}) {
        scene one{seed}, many{seed};
        auto const equal = [&] {
          CHECK(one.books.ids == many.books.ids);
          CHECK(one.books.counts == many.books.counts);
          CHECK(one.planes == many.planes);
          for (std::size_t l = 0; l < 4; ++l) {
            CHECK(one.foresight[l].skipped == many.foresight[l].skipped);
            CHECK(one.foresight[l].deferred == many.foresight[l].deferred);
            CHECK(one.foresight[l].left == many.foresight[l].left);
          }
        };
        auto const near = [](scene& s) {
          return want_near_blocks{
            .layer = layer,
            .rows = s.rows(),
            .info = s.books.info.data(),
            .selection = s.books.selection(),
            .scores = s.scores(),
            .foresight = s.foresight_books(),
            .head_groups = 2,
            .block_tokens = 4,
            .near_blocks = 5};
        };
        auto const list = [](scene& s) {
          return list_wanted_blocks{
            .layer = layer,
            .rows = s.rows(),
            .listed = s.books.selection(),
            .foresight = s.foresight_books(),
            .residency = s.books.residency(),
            .host_blocks = s.books.host_blocks.data(),
            .head_groups = 2,
            .most_blocks = 3};
        };
        run_solo(near(one));
        run_parallel(near(many), threads);
        equal();
        run_solo(one.deferral(0.1F, true));
        run_parallel(many.deferral(0.1F, true), threads);
        equal();
        run_solo(list(one));
        run_parallel(list(many), threads);
        equal();
      }
    }
  }
}
