#include "kvshard/plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace kvshard {
namespace {

using Place = UnitList::Place;

// 8 heads of 2 bytes in pages of 16 tokens: rows of a token 16 bytes, pages 256.
BufferGroup group(std::uint32_t page_size = 16, std::uint32_t parts = 1,
                  std::uint32_t interleave = 0, std::uint32_t part = 0) {
  return {.name = "kv",
          .layers = 4,
          .buffers_per_layer = 2,
          .element_type = ElementType::bf16,
          .heads = 8,
          .head_bytes = 2,
          .page_size = page_size,
          .page_count = 100,
          .parts = parts,
          .part = part,
          .interleave = interleave};
}

Geometry geometry(BufferGroup only, std::uint32_t rank = 0, std::uint32_t ranks = 1) {
  return {.model_id = "tiny", .groups = {std::move(only)}, .rank = rank, .ranks = ranks};
}

TokenMap map(const BufferGroup& prefill, const BufferGroup& decode) {
  return TokenMap::create(prefill, decode).value();
}

std::vector<Place> first_units(const UnitList& list, std::uint64_t count) {
  std::vector<Place> units;
  for (std::uint64_t unit = 0; unit < count; ++unit) units.push_back(list[unit]);
  return units;
}

// --- Units ---

TEST(TokenMapTest, EqualPagesAreUnits) {
  const TokenMap tokens = map(group(16), group(16));
  EXPECT_EQ(tokens.runs(), 1U);
  EXPECT_EQ(tokens.unit_tokens(), 16U);
  EXPECT_EQ(first_units(tokens.units(0, 0), 3),
            (std::vector<Place>{{0, 0, 0, 0, 0}, {1, 0, 1, 0, 16}, {2, 0, 2, 0, 32}}));
}

// acceptance 14
TEST(TokenMapTest, TheSmallerPageIsTheUnit) {
  const TokenMap tokens = map(group(16), group(64));
  EXPECT_EQ(tokens.unit_tokens(), 16U);
  EXPECT_EQ(first_units(tokens.units(0, 0), 5), (std::vector<Place>{{0, 0, 0, 0, 0},
                                                                    {1, 0, 0, 16, 16},
                                                                    {2, 0, 0, 32, 32},
                                                                    {3, 0, 0, 48, 48},
                                                                    {4, 0, 1, 0, 64}}));
  EXPECT_EQ(first_units(map(group(64), group(16)).units(0, 0), 5),
            (std::vector<Place>{{0, 0, 0, 0, 0},
                                {0, 16, 1, 0, 16},
                                {0, 32, 2, 0, 32},
                                {0, 48, 3, 0, 48},
                                {1, 0, 4, 0, 64}}));
}

// acceptance 13
TEST(TokenMapTest, PagesGoFromAnyNumberOfPartsToAnyOther) {
  // Pages 0 2 4 6 8 10 ... to those that are 1 mod 3: 4, 10, 16, ...
  const TokenMap tokens = map(group(16, 2), group(16, 3));
  EXPECT_EQ(first_units(tokens.units(0, 1), 3),
            (std::vector<Place>{{2, 0, 1, 0, 64}, {5, 0, 3, 0, 160}, {8, 0, 5, 0, 256}}));
  EXPECT_TRUE(map(group(16, 2), group(16, 2)).units(0, 1).empty());
}

// acceptance 16
TEST(TokenMapTest, StripesOfAPageAreOneUnit) {
  // Two ranks keep 4 tokens in turns, in pages of 8; pages of 16 hold both.
  const TokenMap tokens = map(group(8, 2, 4), group(16));
  EXPECT_EQ(tokens.runs(), 2U);
  EXPECT_EQ(tokens.run_tokens(), 4U);
  EXPECT_EQ(tokens.run_stride(Side::prefill), 4U);
  EXPECT_EQ(tokens.run_stride(Side::decode), 8U);
  EXPECT_EQ(first_units(tokens.units(0, 0), 2),
            (std::vector<Place>{{0, 0, 0, 0, 0}, {1, 0, 1, 0, 16}}));
  EXPECT_EQ(first_units(tokens.units(1, 0), 2),
            (std::vector<Place>{{0, 0, 0, 4, 4}, {1, 0, 1, 4, 20}}));
  EXPECT_EQ(first_units(tokens.by_run().units(1, 0), 3),
            (std::vector<Place>{{0, 0, 0, 4, 4}, {0, 4, 0, 12, 12}, {1, 0, 1, 4, 20}}));
}

TEST(TokenMapTest, UnlikeNumbersOfStripesAreUnitsEach) {
  // Of three ranks' single tokens, a page of 4 holds one or two.
  const TokenMap tokens = map(group(4, 3, 1), group(4));
  EXPECT_EQ(tokens.unit_tokens(), 1U);
  EXPECT_EQ(
      first_units(tokens.units(0, 0), 5),
      (std::vector<Place>{
          {0, 0, 0, 0, 0}, {0, 1, 0, 3, 3}, {0, 2, 1, 2, 6}, {0, 3, 2, 1, 9}, {1, 0, 3, 0, 12}}));
}

std::string refusal(const BufferGroup& prefill, const BufferGroup& decode) {
  const auto tokens = TokenMap::create(prefill, decode);
  if (tokens) return {};
  EXPECT_EQ(tokens.error().code, ErrorCode::failed_precondition);
  return tokens.error().message;
}

// acceptance 14
TEST(TokenMapTest, RefusesPatternsThatAreNotMadeOfEachOther) {
  EXPECT_EQ(refusal(group(64), group(48)),
            "geometry differs: kv.page_size is 64 on prefill and 48 on decode: neither divides the "
            "other");
  EXPECT_EQ(refusal(group(36, 2, 12), group(64)),
            "geometry differs: kv.interleave is 12 on prefill and page_size 64 on decode: neither "
            "divides the other");
  EXPECT_EQ(refusal(group(48), group(64, 2, 8)), "");  // stripes of 8 fit both pages
  EXPECT_EQ(refusal(group(1, 65535), group(1, 65521)),
            "geometry differs: kv.page_size x parts is 1 x 65535 on prefill and 1 x 65521 on "
            "decode: in pieces of 1 tokens, they repeat after more than 65536 pieces");
  EXPECT_NE(refusal(group(0xffff'ffff, 0xffff'ffff), group(0xffff'ffff, 0xffff'fffe)), "");
}

TEST(UnitListTest, RangeCoversTokensFromAnyPrefixOn) {
  // Decode holds pages of 16; units of 2 runs of 4 tokens, that start at 4, 20, 36, ...
  const UnitList units = map(group(8, 2, 4), group(16)).units(1, 0);
  const auto range = [&](std::uint64_t first, std::uint64_t end) {
    const auto [begin, last, skip] = units.range(first, end);
    return std::tuple{begin, last, skip ? static_cast<int>(*skip) : -1};
  };
  EXPECT_EQ(range(0, 48), (std::tuple{0, 3, -1}));
  EXPECT_EQ(range(4, 48), (std::tuple{0, 3, -1}));
  EXPECT_EQ(range(5, 48), (std::tuple{1, 3, 1}));  // tokens 5, 6, 7 and 12 to 15 of unit 0
  EXPECT_EQ(range(8, 48), (std::tuple{1, 3, 4}));  // between its runs
  EXPECT_EQ(range(12, 48), (std::tuple{1, 3, 4}));
  EXPECT_EQ(range(15, 48), (std::tuple{1, 3, 7}));
  EXPECT_EQ(range(16, 48), (std::tuple{1, 3, -1}));
  EXPECT_EQ(range(30, 32), (std::tuple{2, 2, 6}));  // the end of a unit only
  EXPECT_EQ(range(32, 32), (std::tuple{2, 2, -1}));
  EXPECT_EQ(range(1'000'000'000'005, 1'000'000'000'016),
            (std::tuple{62'500'000'001, 62'500'000'001, 1}));
}

TEST(UnitListTest, FindsThePagesFirstUnit) {
  const UnitList units = map(group(64), group(16, 3)).units(0, 1);  // tokens 16, 64, 112, 160, ...
  EXPECT_EQ(units.first_in_prefill_page(0), 0U);
  EXPECT_EQ(units.first_in_prefill_page(1), 1U);
  EXPECT_EQ(units.first_in_prefill_page(2), 3U);
  EXPECT_EQ(units.first_in_prefill_page(3), 4U);  // 208
}

TEST(UnitListTest, WritesOffsets) {
  const UnitList units = map(group(8, 2, 4), group(16)).units(1, 0);
  const std::vector<LocalPage> pages{LocalPage{7}, LocalPage{3}};
  std::vector<std::uint64_t> out(2);
  units.offsets(Side::decode, 5, pages, 5, 1000, 10, out);
  EXPECT_EQ(out, (std::vector<std::uint64_t>{7040, 3040}));
  units.offsets(Side::prefill, 5, pages, 5, 1000, 10, out);
  EXPECT_EQ(out, (std::vector<std::uint64_t>{7000, 3000}));
  out.resize(3);
  units.token_offsets(Side::decode, 6, 3, pages, 5, 1000, 10, out);
  EXPECT_EQ(out, (std::vector<std::uint64_t>{3070, 3120, 3130}));
  units.token_offsets(Side::prefill, 6, 3, pages, 5, 1000, 10, out);
  EXPECT_EQ(out, (std::vector<std::uint64_t>{3030, 3040, 3050}));
}

// --- Who gives what ---

// Tensor parallel ranks of a model of `heads` KV heads.
std::vector<Geometry> tensor_parallel(std::uint32_t ranks, std::uint32_t heads) {
  std::vector<Geometry> side;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    BufferGroup share = group();
    share.total_heads = heads;
    share.heads = std::max(1U, heads / ranks);
    share.first_head = rank * heads / ranks;
    side.push_back(geometry(share, rank, ranks));
  }
  return side;
}

// Page-sharded ranks.
std::vector<Geometry> sharded(std::uint32_t parts, std::uint32_t interleave = 0) {
  std::vector<Geometry> side;
  for (std::uint32_t part = 0; part < parts; ++part)
    side.push_back(geometry(group(16, parts, interleave, part), part, parts));
  return side;
}

using Lanes = std::vector<std::vector<Lane>>;

Lanes lanes(std::span<const Geometry> prefill, const Geometry& decode) {
  const auto assigned = assign_lanes(prefill, decode);
  EXPECT_TRUE(assigned) << assigned.error().message;
  return assigned ? *assigned : Lanes{};
}

std::vector<std::uint32_t> pullers(std::span<const Geometry> prefill,
                                   std::span<const Geometry> decode) {
  const auto counted = count_pullers(prefill, decode);
  EXPECT_TRUE(counted) << counted.error().message;
  return counted ? *counted : std::vector<std::uint32_t>{};
}

// acceptance 11
TEST(AssignLanesTest, HeadsComeFromTheRanksThatHoldThem) {
  EXPECT_EQ(lanes(tensor_parallel(2, 8), tensor_parallel(1, 8)[0]),
            (Lanes{{{0, 0, 4, 0, 4}}, {{0, 0, 4, 4, 4}}}));
  EXPECT_EQ(lanes(tensor_parallel(2, 8), tensor_parallel(4, 8)[2]), (Lanes{{}, {{0, 0, 4, 4, 2}}}));
  EXPECT_EQ(pullers(tensor_parallel(2, 8), tensor_parallel(4, 8)),
            (std::vector<std::uint32_t>{2, 2}));
}

// acceptance 11
TEST(AssignLanesTest, CopiesOfAHeadServeEquallyMany) {
  using Counts = std::vector<std::uint32_t>;
  EXPECT_EQ(pullers(tensor_parallel(8, 4), tensor_parallel(8, 4)), Counts(8, 1));
  EXPECT_EQ(pullers(tensor_parallel(8, 4), tensor_parallel(16, 4)), Counts(8, 2));
  EXPECT_EQ(pullers(tensor_parallel(4, 4), tensor_parallel(8, 4)), Counts(4, 2));
  EXPECT_EQ(pullers(tensor_parallel(4, 1), tensor_parallel(2, 1)), (Counts{1, 0, 1, 0}));
  EXPECT_EQ(pullers(tensor_parallel(2, 1), tensor_parallel(4, 1)), (Counts{2, 2}));
  // Ranks that hold the same head have other tokens, or other layers, and share its copies too.
  auto decode = tensor_parallel(8, 4);
  for (Geometry& rank : decode) {
    rank.groups[0].parts = 2;
    rank.groups[0].part = rank.rank % 2;
    rank.groups[0].interleave = 1;
  }
  EXPECT_EQ(pullers(tensor_parallel(8, 4), decode), Counts(8, 1));
  decode = tensor_parallel(4, 2);
  for (Geometry& rank : decode) {
    rank.groups[0].parts = 2;
    rank.groups[0].part = rank.rank / 2;
    rank.groups[0].first_head = rank.rank % 2;
  }
  EXPECT_EQ(pullers(tensor_parallel(4, 2), decode), Counts(4, 1));
  auto stages = tensor_parallel(4, 1);
  for (Geometry& rank : stages) {
    rank.groups[0].layers = 2;
    rank.groups[0].first_layer = rank.rank / 2 * 2;
    rank.groups[0].total_layers = 4;
  }
  EXPECT_EQ(pullers(stages, stages), Counts(4, 1));
}

// acceptance 12
TEST(AssignLanesTest, EveryRankOfReplicatedHeadsPullsFromAllShards) {
  for (const std::uint32_t ranks : {1U, 2U, 4U}) {
    std::vector<Geometry> decode;
    for (std::uint32_t rank = 0; rank < ranks; ++rank)
      decode.push_back(geometry(group(), rank, ranks));
    EXPECT_EQ(pullers(sharded(4), decode), std::vector<std::uint32_t>(4, ranks));
    EXPECT_EQ(lanes(sharded(4), decode[0]), Lanes(4, {{0, 0, 4, 0, 8}}));
  }
}

TEST(AssignLanesTest, InterleavedRanksThatShareNoTokensDoNotTalk) {
  EXPECT_EQ(pullers(sharded(2, 4), sharded(4, 4)), (std::vector<std::uint32_t>{2, 2}));
  // By page, a chain may start at any rank.
  EXPECT_EQ(pullers(sharded(2), sharded(4)), (std::vector<std::uint32_t>{4, 4}));
  EXPECT_EQ(pullers(sharded(2, 4), sharded(4)), (std::vector<std::uint32_t>{4, 4}));
}

// acceptance 17
TEST(AssignLanesTest, LayersComeFromTheStageThatHoldsThem) {
  const auto stage = [](std::uint32_t first, std::uint32_t count) {
    BufferGroup share = group();
    share.first_layer = first;
    share.layers = count;
    share.total_layers = 5;
    return geometry(share);
  };
  const std::vector<Geometry> prefill{stage(0, 3), stage(3, 2)};
  EXPECT_EQ(lanes(prefill, stage(0, 5)), (Lanes{{{0, 0, 3, 0, 8}}, {{0, 3, 2, 0, 8}}}));
  EXPECT_EQ(lanes(prefill, stage(1, 3)), (Lanes{{{0, 1, 2, 0, 8}}, {{0, 3, 1, 0, 8}}}));
  EXPECT_EQ(lanes(prefill, stage(0, 0)), (Lanes{{}, {}}));
  EXPECT_EQ(lanes(std::vector{stage(0, 5)}, stage(2, 3)), (Lanes{{{0, 2, 3, 0, 8}}}));
}

TEST(AssignLanesTest, WhatOneRankGivesIsJoined) {
  // Two copies; one lacks some layers or heads.
  std::vector<Geometry> prefill{geometry(group()), geometry(group())};
  Geometry first = geometry(group(), 0, 2);
  Geometry second = geometry(group(), 1, 2);
  prefill[1].groups[0].layers = 1;
  prefill[1].groups[0].first_layer = 2;
  prefill[1].groups[0].total_layers = 4;
  EXPECT_EQ(lanes(prefill, first), (Lanes{{{0, 0, 4, 0, 8}}, {}}));
  EXPECT_EQ(lanes(prefill, second), (Lanes{{{0, 0, 2, 0, 8}, {0, 3, 1, 0, 8}}, {{0, 2, 1, 0, 8}}}));
  prefill[1] = geometry(group());
  prefill[1].groups[0].heads = 2;
  prefill[1].groups[0].first_head = 4;
  prefill[1].groups[0].total_heads = 8;
  EXPECT_EQ(lanes(prefill, first), (Lanes{{{0, 0, 4, 0, 8}}, {}}));
  EXPECT_EQ(lanes(prefill, second), (Lanes{{{0, 0, 4, 0, 4}, {0, 0, 4, 6, 2}}, {{0, 0, 4, 4, 2}}}));
}

std::string lanes_refusal(std::span<const Geometry> prefill, const Geometry& decode) {
  const auto assigned = assign_lanes(prefill, decode);
  if (assigned) return {};
  EXPECT_EQ(assigned.error().code, ErrorCode::failed_precondition);
  return assigned.error().message;
}

TEST(AssignLanesTest, RefusesWhatNobodyHoldsByName) {
  auto prefill = tensor_parallel(4, 8);
  prefill.erase(prefill.begin() + 1);
  EXPECT_EQ(lanes_refusal(prefill, tensor_parallel(1, 8)[0]),
            "group kv: no prefill rank holds layers [0, 4), heads [2, 4) of part 0 of 1");
  auto shards = sharded(3);
  shards.pop_back();
  EXPECT_EQ(lanes_refusal(shards, geometry(group())),
            "group kv: no prefill rank holds layers [0, 4), heads [0, 8) of part 2 of 3");
}

TEST(AssignLanesTest, RefusesRanksThatDoNotBelongTogether) {
  auto prefill = sharded(2);
  prefill[1].groups[0].parts = 3;
  EXPECT_EQ(lanes_refusal(prefill, geometry(group())),
            "geometry differs: kv.parts is 2 on prefill rank 0 and 3 on prefill rank 1");
  EXPECT_EQ(lanes_refusal(sharded(2), geometry(group(24))),
            "geometry differs: kv.page_size is 16 on prefill and 24 on decode: neither divides the "
            "other");
  EXPECT_EQ(assign_lanes({}, geometry(group())).error().code, ErrorCode::invalid_argument);
  EXPECT_EQ(assign_lanes(sharded(2), geometry(group(0))).error().code, ErrorCode::invalid_argument);
}

// --- The plan ---

TransferPlan plan(const BufferGroup& prefill, const BufferGroup& decode) {
  const auto from = geometry(prefill);
  const auto to = geometry(decode);
  const Lane lane{
      0, std::max(prefill.first_layer, decode.first_layer), std::min(prefill.layers, decode.layers),
      std::max(prefill.first_head, decode.first_head), std::min(prefill.heads, decode.heads)};
  return TransferPlan::create(from, to, {&lane, 1}).value();
}

BufferGroup ordered(PageOrder order, BufferGroup made) {
  made.order = order;
  return made;
}

TEST(TransferPlanTest, AWholePackedPageIsOneRow) {
  for (const PageOrder order : {PageOrder::token_major, PageOrder::head_major}) {
    const TransferPlan whole = plan(ordered(order, group()), ordered(order, group()));
    EXPECT_EQ(whole.lanes()[0].prefill.unit, (FragmentShape{.row_bytes = 256}));
    EXPECT_EQ(whole.lanes()[0].decode.unit, (FragmentShape{.row_bytes = 256}));
    EXPECT_EQ(whole.buffers(), 8U);
    EXPECT_EQ(whole.unit_bytes(3, 2), 512U);
    EXPECT_EQ(whole.token_bytes(0, 8), 128U);
  }
  // Stripes that are pages again on both sides.
  EXPECT_EQ(plan(group(16, 2, 4), group(16, 2, 4)).lanes()[0].prefill.unit,
            (FragmentShape{.row_bytes = 256}));
}

TEST(TransferPlanTest, AHeadSliceHasOneRowForEachToken) {
  BufferGroup slice = group();
  slice.heads = 2;
  slice.first_head = 4;
  slice.total_heads = 8;
  const TransferPlan token_major = plan(group(), slice);
  const auto& lane = token_major.lanes()[0];
  EXPECT_EQ(lane.prefill.offset, 8U);
  EXPECT_EQ(lane.prefill.unit, (FragmentShape{16, 16, 1, 0, 4}));
  EXPECT_EQ(lane.prefill.token, (FragmentShape{.row_bytes = 4}));
  EXPECT_EQ(lane.decode.offset, 0U);
  EXPECT_EQ(lane.decode.unit, (FragmentShape{.row_bytes = 64}));

  const TransferPlan head_major =
      plan(ordered(PageOrder::head_major, group()), ordered(PageOrder::head_major, slice));
  EXPECT_EQ(head_major.lanes()[0].prefill.offset, 128U);
  EXPECT_EQ(head_major.lanes()[0].prefill.unit, (FragmentShape{.row_bytes = 64}));
  EXPECT_EQ(head_major.lanes()[0].prefill.token, (FragmentShape{2, 32, 1, 0, 2}));
}

// acceptance 15
TEST(TransferPlanTest, UnlikeOrdersMeetInTokenOrder) {
  const TransferPlan mixed = plan(group(), ordered(PageOrder::head_major, group()));
  EXPECT_EQ(mixed.lanes()[0].prefill.unit, (FragmentShape{.row_bytes = 256}));
  EXPECT_EQ(mixed.lanes()[0].decode.unit, (FragmentShape{16, 2, 8, 32, 2}));
}

// acceptance 16
TEST(TransferPlanTest, StripesAreLevelsOfAShape) {
  // Tokens 0-3 and 8-11 of a page of 16 are a page of 8 on prefill.
  const TransferPlan striped = plan(group(8, 2, 4), group(16));
  EXPECT_EQ(striped.tables()[0].tokens.unit_tokens(), 8U);
  EXPECT_EQ(striped.lanes()[0].prefill.unit, (FragmentShape{.row_bytes = 128}));
  EXPECT_EQ(striped.lanes()[0].decode.unit, (FragmentShape{2, 128, 1, 0, 64}));
  // Runs, tokens and heads apart from each other are too many levels.
  const TransferPlan mixed = plan(group(8, 2, 4), ordered(PageOrder::head_major, group(16)));
  EXPECT_EQ(mixed.tables()[0].tokens.unit_tokens(), 4U);
  EXPECT_EQ(mixed.lanes()[0].prefill.unit, (FragmentShape{.row_bytes = 64}));
  EXPECT_EQ(mixed.lanes()[0].decode.unit, (FragmentShape{4, 2, 8, 32, 2}));
}

// acceptance 20
TEST(TransferPlanTest, StridesAreAsDeclared) {
  BufferGroup spaced = group();
  spaced.token_stride = 100;
  spaced.head_stride = 10;
  spaced.page_stride = 5000;
  const TransferPlan gaps = plan(spaced, group());
  EXPECT_EQ(gaps.lanes()[0].prefill.unit, (FragmentShape{16, 100, 8, 10, 2}));
  EXPECT_EQ(gaps.lanes()[0].prefill.token, (FragmentShape{8, 10, 1, 0, 2}));
  EXPECT_EQ(gaps.lanes()[0].prefill.page_stride, 5000U);
  EXPECT_EQ(gaps.lanes()[0].prefill.token_stride, 100U);
  EXPECT_EQ(gaps.lanes()[0].decode.page_stride, 256U);
  EXPECT_EQ(gaps.lanes()[0].decode.token_stride, 16U);
}

TEST(TransferPlanTest, BuffersAreNumberedTableByTableLaneByLane) {
  Geometry both = geometry(group());
  both.groups[0].table = 1;
  for (const char* name : {"idx", "draft"}) {
    both.groups.push_back(group());
    both.groups.back().name = name;
  }
  both.groups[2].buffers_per_layer = 1;
  both.groups[2].first_layer = 1;
  both.groups[2].total_layers = 5;
  const std::vector<Lane> given{{0, 0, 4, 0, 8}, {2, 2, 3, 0, 8}, {1, 1, 2, 0, 4}};
  const TransferPlan made = TransferPlan::create(both, both, given).value();
  ASSERT_EQ(made.tables().size(), 2U);
  EXPECT_EQ(made.find_table(0), &made.tables()[0]);
  EXPECT_EQ(made.find_table(1), &made.tables()[1]);
  EXPECT_EQ(made.find_table(2), nullptr);
  EXPECT_EQ(made.tables()[0].buffer_count, 7U);
  EXPECT_EQ(made.tables()[1].first_buffer, 7U);
  EXPECT_EQ(made.tables()[1].buffer_count, 8U);
  EXPECT_EQ(made.lanes()[0].lane, given[1]);
  EXPECT_EQ(made.lanes()[0].prefill.first_pool_buffer, 1U);
  EXPECT_EQ(made.lanes()[1].lane, given[2]);
  EXPECT_EQ(made.lanes()[1].first_buffer, 3U);
  EXPECT_EQ(made.lanes()[1].prefill.first_pool_buffer, 2U);

  using Ranges = std::vector<std::pair<std::uint32_t, std::uint32_t>>;
  EXPECT_EQ(made.layer_ranges(made.tables()[0], 0, 100), (Ranges{{0, 7}}));
  EXPECT_EQ(made.layer_ranges(made.tables()[0], 2, 1), (Ranges{{0, 1}, {5, 2}}));
  EXPECT_EQ(made.layer_ranges(made.tables()[0], 0, 2), (Ranges{{3, 2}}));
  EXPECT_EQ(made.layer_ranges(made.tables()[0], 5, 0xffff'ffff), (Ranges{}));
  EXPECT_EQ(made.layer_ranges(made.tables()[1], 1, 2), (Ranges{{9, 4}}));
}

TEST(TransferPlanTest, RefusesLanesThatLeaveWhatBothHold) {
  Geometry decode = geometry(group());
  decode.groups[0].heads = 4;
  decode.groups[0].total_heads = 8;
  const auto refused = [&](std::vector<Lane> given) {
    const auto made = TransferPlan::create(geometry(group()), decode, given);
    if (made) return std::string{};
    EXPECT_EQ(made.error().code, ErrorCode::invalid_argument);
    return made.error().message;
  };
  EXPECT_EQ(refused({{0, 0, 4, 0, 4}}), "");
  EXPECT_EQ(refused({{0, 0, 4, 0, 2}, {0, 0, 4, 2, 2}}), "");
  EXPECT_EQ(refused({{1, 0, 4, 0, 4}}), "lane 0 is of group 1, there are 1");
  EXPECT_EQ(refused({{0, 0, 4, 0, 5}}),
            "lane 0 of group kv has layers [0, 4), heads [0, 5), the decode rank holds layers [0, "
            "4), heads [0, 4)");
  EXPECT_EQ(refused({{0, 1, 4, 0, 1}}),
            "lane 0 of group kv has layers [1, 5), heads [0, 1), the prefill rank holds layers [0, "
            "4), heads [0, 8)");
  EXPECT_NE(refused({{0, 0xffff'ffff, 2, 0, 4}}), "");
  EXPECT_NE(refused({{0, 0, 4, 3, 0xffff'ffff}}), "");
  EXPECT_NE(refused({{0, 0, 0, 0, 4}}), "");
  EXPECT_EQ(
      refused({{0, 0, 2, 0, 4}, {0, 1, 2, 3, 1}}),
      "lanes 0 and 1 of group kv overlap: layers [0, 2), heads [0, 4) and layers [1, 3), heads "
      "[3, 4)");
}

}  // namespace
}  // namespace kvshard
