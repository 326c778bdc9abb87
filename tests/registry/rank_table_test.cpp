#include "registry/rank_table.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "registry/rank_json.hpp"

namespace kvshard {
namespace {

using namespace std::chrono_literals;

constexpr TimePoint kStart{};

RankAnnouncement make_rank(std::uint32_t rank, std::uint32_t size, std::uint64_t epoch = 1) {
  return {.group = "g",
          .epoch = epoch,
          .shard_rank = rank,
          .shard_size = size,
          .incarnation = 100 + rank,
          .host = "10.0.0.1",
          .port = static_cast<std::uint16_t>(5000 + rank),
          .geometry_fields = {{"kv.layers", "32"}, {"model_id", "m"}}};
}

bool holds(const Error& error, std::initializer_list<const char*> words) {
  return std::ranges::all_of(
      words, [&](const char* word) { return error.message.find(word) != std::string::npos; });
}

TEST(RankTableTest, DropsARankThatDoesNotRenew) {
  RankTable table{10s};
  ASSERT_TRUE(table.announce(make_rank(0, 2), kStart));
  ASSERT_TRUE(table.announce(make_rank(1, 2), kStart));
  ASSERT_TRUE(table.renew(make_rank(1, 2), kStart + 9s));
  const auto left = table.list("g", kStart + 10s);
  ASSERT_EQ(left.size(), 1U);
  EXPECT_EQ(left[0].rank, make_rank(1, 2));
  EXPECT_EQ(left[0].age, 1s);
}

TEST(RankTableTest, ARestartedRankReplacesItsPredecessorForGood) {
  RankTable table{10s};
  const auto old = make_rank(0, 1);
  auto fresh = old;
  fresh.incarnation = 7;
  fresh.port = 6000;
  ASSERT_TRUE(table.announce(old, kStart));
  ASSERT_TRUE(table.announce(fresh, kStart));
  const Status renewed = table.renew(old, kStart);
  ASSERT_FALSE(renewed);
  EXPECT_EQ(renewed.error().code, ErrorCode::failed_precondition);
  table.withdraw(old, kStart);
  ASSERT_EQ(table.list("g", kStart).size(), 1U);
  EXPECT_EQ(table.list("g", kStart)[0].rank, fresh);
  table.withdraw(fresh, kStart);
  EXPECT_TRUE(table.list("g", kStart).empty());
}

TEST(RankTableTest, RefusesARankThatDoesNotFitItsGroupNamingFieldAndValues) {
  RankTable table{10s};
  ASSERT_TRUE(table.announce(make_rank(0, 2), kStart));
  auto other = make_rank(1, 2);
  other.geometry_fields = {{"model_id", "m"}, {"kv.layers", "31"}};
  const Status layers = table.announce(other, kStart);
  ASSERT_FALSE(layers);
  EXPECT_EQ(layers.error().code, ErrorCode::failed_precondition);
  EXPECT_TRUE(holds(layers.error(), {"kv.layers", "'32'", "'31'", "rank 0", "rank 1"}))
      << layers.error().message;

  other.geometry_fields = {{"model_id", "m"}};
  const Status absent = table.announce(other, kStart);
  ASSERT_FALSE(absent);
  EXPECT_TRUE(holds(absent.error(), {"kv.layers", "'32'", "absent"})) << absent.error().message;

  const Status size = table.announce(make_rank(1, 4), kStart);
  ASSERT_FALSE(size);
  EXPECT_TRUE(holds(size.error(), {"shard_size", "2", "4"})) << size.error().message;

  EXPECT_TRUE(table.announce(make_rank(1, 4, 2), kStart)) << "another epoch is another launch";
  other.geometry_fields = {{"model_id", "m"}, {"kv.layers", "32"}};
  EXPECT_TRUE(table.announce(other, kStart)) << "the order of fields does not matter";
}

TEST(RankTableTest, IsBoundedInRanksAndBytes) {
  RankTable table{10s};
  auto rank = make_rank(0, 1);
  rank.geometry_fields = {{"blob", std::string(kMaxGeometryBytes - 4, 'x')}};
  Status added;
  std::uint64_t listed = 0;
  for (rank.epoch = 1; added; ++rank.epoch) {
    ASSERT_LE(rank.epoch, kMaxListedRanks + 1);
    added = table.announce(rank, kStart);
    if (added) ++listed;
  }
  EXPECT_EQ(added.error().code, ErrorCode::resource_exhausted);
  EXPECT_EQ(listed, kMaxListedGeometryBytes / kMaxGeometryBytes);
  rank.epoch = 1;
  EXPECT_TRUE(table.renew(rank, kStart)) << "those inside stay inside";
}

TEST(SelectGroupTest, TheNewestWholeEpochWins) {
  const auto found = select_group("g", {make_rank(0, 2, 5), make_rank(1, 2, 6), make_rank(1, 2, 5),
                                        make_rank(0, 2, 4), make_rank(1, 2, 4)});
  ASSERT_TRUE(found) << found.error().message;
  EXPECT_EQ(found.value().epoch, 5U);
  ASSERT_EQ(found.value().members.size(), 2U);
  EXPECT_EQ(found.value().members[1], (GroupMember{1, "10.0.0.1", 5001, 101}));
  EXPECT_TRUE(validate(found.value()));
}

// acceptance 45: half a group, two epochs
TEST(SelectGroupTest, SaysWhichRanksOfWhichEpochsAreMissing) {
  const auto found =
      select_group("g", {make_rank(0, 4, 7), make_rank(2, 4, 7), make_rank(1, 2, 6)});
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().code, ErrorCode::unavailable);
  EXPECT_EQ(found.error().message,
            "epoch 7 has 2 of 4 ranks, missing 1, 3; epoch 6 has 1 of 2 ranks, missing 0");
}

TEST(SelectGroupTest, ContradictionsAreRefusedUnlessAnEpochIsWhole) {
  auto odd = make_rank(1, 2, 7);
  odd.geometry_fields[1].second = "other";
  const auto refused = select_group("g", {make_rank(0, 2, 7), odd});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::failed_precondition);
  EXPECT_TRUE(holds(refused.error(), {"model_id", "'m'", "'other'", "epoch 7"}))
      << refused.error().message;
  EXPECT_TRUE(select_group("g", {make_rank(0, 2, 7), odd, make_rank(0, 1, 3)}));
}

TEST(RankJsonTest, ARankComesBackAsItWent) {
  auto rank = make_rank(3, 8, ~std::uint64_t{0});
  rank.geometry_fields.emplace_back("note", "\"quotes\" \\ \n \xc3\xa9");
  const auto back = decode_rank(encode_rank(rank));
  ASSERT_TRUE(back) << back.error().message;
  EXPECT_EQ(back.value(), rank);
}

TEST(RankJsonTest, ARankThatNamesNoShardingIsAGroupOfOne) {
  const auto rank = decode_rank(R"({"group":"g","epoch":1,"incarnation":5,"host":"h","port":80})");
  ASSERT_TRUE(rank) << rank.error().message;
  EXPECT_EQ(rank.value().shard_rank, 0U);
  EXPECT_EQ(rank.value().shard_size, 1U);
}

TEST(RankJsonTest, WhatAPeerSendsIsCheckedBeforeUse) {
  struct Case {
    const char* body;
    const char* reason;
  };
  for (const auto& [body, reason] : std::initializer_list<Case>{
           {"", "no JSON object"},
           {"[]", "no JSON object"},
           {R"({"group":1})", "group"},
           {R"({"group":"a b","epoch":1,"incarnation":5,"host":"h","port":80})", "group name"},
           {R"({"group":"g","incarnation":5,"host":"h","port":80})", "epoch"},
           {R"({"group":"g","epoch":0,"incarnation":5,"host":"h","port":80})", "epoch"},
           {R"({"group":"g","epoch":-1,"incarnation":5,"host":"h","port":80})", "epoch"},
           {R"({"group":"g","epoch":1e3,"incarnation":5,"host":"h","port":80})", "epoch"},
           {R"({"group":"g","epoch":99999999999999999999,"incarnation":5,"host":"h","port":80})",
            "epoch"},
           {R"({"group":"g","epoch":1,"incarnation":0,"host":"h","port":80})", "incarnation"},
           {R"({"group":"g","epoch":1,"incarnation":5,"host":"h","port":65616})", "port"},
           {R"({"group":"g","epoch":1,"incarnation":5,"host":"h","port":0})", "port"},
           {R"({"group":"g","epoch":1,"incarnation":5,"host":"h\r\nX: y","port":80})", "host"},
           {R"({"group":"g","epoch":1,"incarnation":5,"host":"h","port":80,"shard_size":0})",
            "shard_size"},
           {R"({"group":"g","epoch":1,"incarnation":5,"host":"h","port":80,"shard_size":1025})",
            "shard_size"},
           {R"({"group":"g","epoch":1,"incarnation":5,"host":"h","port":80,"shard_rank":1})",
            "shard_rank"},
           {R"({"group":"g","epoch":1,"incarnation":5,"host":"h","port":80,"geometry":[]})",
            "geometry"},
           {R"({"group":"g","epoch":1,"incarnation":5,"host":"h","port":80,"geometry":{"a":1}})",
            "geometry"},
           {R"({"group":"g","epoch":1,"incarnation":5,"host":"h","port":80,"geometry":{"":"x"}})",
            "geometry"}}) {
    const auto rank = decode_rank(body);
    ASSERT_FALSE(rank) << body;
    EXPECT_EQ(rank.error().code, ErrorCode::invalid_argument) << body;
    EXPECT_TRUE(holds(rank.error(), {reason})) << body << " -> " << rank.error().message;
  }
  EXPECT_FALSE(decode_rank(std::string(200'000, '[')));
  EXPECT_FALSE(decode_rank(R"({"a":)" + std::string(200'000, '[')));
}

TEST(RankJsonTest, NoDamageToABodyDoesMoreThanBeRefused) {
  const std::string body = encode_rank(make_rank(1, 2));
  for (std::size_t at = 0; at < body.size(); ++at) {
    EXPECT_FALSE(decode_rank(std::string_view{body}.substr(0, at)));
    for (int bit = 0; bit < 8; ++bit) {
      std::string damaged = body;
      damaged[at] = static_cast<char>(damaged[at] ^ (1 << bit));
      if (const auto rank = decode_rank(damaged)) {
        EXPECT_TRUE(validate(rank.value()));
      }
    }
  }
}

TEST(RankJsonTest, AListIsRefusedWhenItContradictsItselfOrTheQuestion) {
  const auto list = [](std::initializer_list<RankAnnouncement> ranks) {
    std::vector<ListedRank> listed;
    for (const auto& rank : ranks) listed.push_back({rank, 5ms});
    return encode_ranks(listed);
  };
  const auto good = decode_ranks(list({make_rank(0, 2), make_rank(1, 2)}), "g");
  ASSERT_TRUE(good) << good.error().message;
  EXPECT_EQ(good.value()[1], make_rank(1, 2));
  for (const auto& [body, group] : std::initializer_list<std::pair<std::string, const char*>>{
           {list({make_rank(0, 2), make_rank(0, 2)}), "g"},
           {list({make_rank(0, 2)}), "h"},
           {"{}", "g"},
           {R"({"ranks":{}})", "g"},
           {R"({"ranks":[3]})", "g"},
           {"<html>", "g"}}) {
    const auto refused = decode_ranks(body, group);
    ASSERT_FALSE(refused) << body;
    EXPECT_EQ(refused.error().code, ErrorCode::unavailable) << body;
  }
}

TEST(RankJsonTest, ARefusalKeepsItsCodeAndItsTextIsMadeHarmless) {
  const auto error = decode_error(encode_error({ErrorCode::failed_precondition, "why\nnot"}));
  EXPECT_EQ(error.code, ErrorCode::failed_precondition);
  EXPECT_EQ(error.message, "why?not");
  EXPECT_EQ(decode_error("garbage").code, ErrorCode::unavailable);
  EXPECT_EQ(decode_error(R"({"error":{"code":"internal","message":"x"}})").code,
            ErrorCode::unavailable);
  EXPECT_EQ(decode_error(encode_error({ErrorCode::invalid_argument, std::string(9999, 'x')}))
                .message.size(),
            1024U);
}

TEST(GroupSpecTest, AGroupWrittenByHandIsCheckedWhole) {
  const GroupSpec good{"g", 0, {{1, "b", 2, 0}, {0, "a", 1, 0}}};
  EXPECT_TRUE(validate(good));
  const auto broken = [&](const std::function<void(GroupSpec&)>& change) {
    GroupSpec group = good;
    change(group);
    const Status status = validate(group);
    return !status && status.error().code == ErrorCode::invalid_argument;
  };
  EXPECT_TRUE(broken([](GroupSpec& g) { g.name.clear(); }));
  EXPECT_TRUE(broken([](GroupSpec& g) { g.members.clear(); }));
  EXPECT_TRUE(broken([](GroupSpec& g) { g.members.pop_back(); }));
  EXPECT_TRUE(broken([](GroupSpec& g) { g.members[0].shard_rank = 0; }));
  EXPECT_TRUE(broken([](GroupSpec& g) { g.members[0].shard_rank = 2; }));
  EXPECT_TRUE(broken([](GroupSpec& g) { g.members[0].port = 0; }));
  EXPECT_TRUE(broken([](GroupSpec& g) { g.members[0].host = "a b"; }));
}

}  // namespace
}  // namespace kvshard
