#include "registry/etcd_json.hpp"

#include <gtest/gtest.h>

#include "registry/rank_json.hpp"

namespace kvshard::etcd {
namespace {

using namespace std::chrono_literals;

RankAnnouncement make_rank(std::uint32_t shard_rank = 3) {
  return {.group = "g",
          .epoch = 7,
          .shard_rank = shard_rank,
          .shard_size = 16,
          .incarnation = 5,
          .host = "h",
          .port = 1,
          .geometry_fields = {}};
}

bool within(const KeyRange& keys, const std::string& key) {
  return keys.first <= key && key < keys.end;
}

// RFC 4648, section 10
TEST(EtcdBase64Test, IsTheStandards) {
  for (const auto& [bytes, text] :
       std::vector<std::pair<std::string, std::string>>{{"", ""},
                                                        {"f", "Zg=="},
                                                        {"fo", "Zm8="},
                                                        {"foo", "Zm9v"},
                                                        {"foob", "Zm9vYg=="},
                                                        {"fooba", "Zm9vYmE="},
                                                        {"foobar", "Zm9vYmFy"},
                                                        {"\xfb\xff\xfe", "+//+"}}) {
    EXPECT_EQ(to_base64(bytes), text);
    const auto back = from_base64(text);
    ASSERT_TRUE(back) << text;
    EXPECT_EQ(back.value(), bytes);
  }
  std::string all;
  for (int i = 0; i < 256; ++i) all += static_cast<char>(i);
  EXPECT_EQ(from_base64(to_base64(all)).value(), all);
}

TEST(EtcdBase64Test, RefusesWhatIsNone) {
  for (const char* text : {"Z", "Zg", "Zg=", "Z===", "====", "Zg==Zg==", "Zm9=v", "Zm9v\n", "Zm_v"})
    EXPECT_FALSE(from_base64(text)) << text;
}

TEST(EtcdKeyTest, SiblingsAreAllRanksOfTheEpochButOneself) {
  const auto before_and_after = sibling_keys("/p/", make_rank());
  const auto is_sibling = [&](const std::string& key) {
    return within(before_and_after[0], key) || within(before_and_after[1], key);
  };
  EXPECT_EQ(rank_key("/p/", make_rank()), "/p/g@7/3");
  for (std::uint32_t shard_rank = 0; shard_rank < 40; ++shard_rank)
    EXPECT_EQ(is_sibling(rank_key("/p/", make_rank(shard_rank))), shard_rank != 3) << shard_rank;
  for (const char* key :
       {"/p/g@70/0", "/p/g@6/0", "/p/g@8/0", "/p/g/x@7/0", "/p/gg@7/0", "/q/g@7/0"})
    EXPECT_FALSE(is_sibling(key)) << key;
}

TEST(EtcdKeyTest, AGroupsKeysAreItsOwn) {
  const auto keys = group_keys("/p/", "g");
  EXPECT_TRUE(within(keys, "/p/g@1/0"));
  EXPECT_TRUE(within(keys, "/p/g@18446744073709551615/1023"));
  for (const char* key : {"/p/g/x@1/0", "/p/gA@1/0", "/p/g", "/p/g.@1/0", "/q/g@1/0"})
    EXPECT_FALSE(within(keys, key)) << key;
}

TEST(EtcdEntryTest, HoldsTheRankThatItsKeySays) {
  EXPECT_EQ(decode_entry("/p/", {"/p/g@7/3", encode_rank(make_rank())}).value(), make_rank());
  for (const Entry& entry :
       {Entry{"/p/g@7/4", encode_rank(make_rank())}, Entry{"/p/g@7/3", "{}"},
        Entry{"/q/g@7/3", encode_rank(make_rank())}, Entry{"/p/g@7/3", "\xff garbage"}}) {
    const auto rank = decode_entry("/p/", entry);
    ASSERT_FALSE(rank);
    EXPECT_EQ(rank.error().code, ErrorCode::unavailable);
    EXPECT_NE(rank.error().message.find(entry.key), std::string::npos) << rank.error().message;
  }
}

TEST(EtcdTxnTest, SaysWhatItDoesAsEtcdReadsIt) {
  EXPECT_EQ(
      Txn{}
          .when({"a", {}}, 9)
          .when({"b", "c"}, 0)
          .put("a", "v", 77)
          .read({"b", "c"}, 1)
          .erase("d")
          .body(),
      R"({"compare":[)"
      R"({"key":"YQ==","mod_revision":"9","result":"EQUAL","target":"MOD"},)"
      R"({"key":"Yg==","mod_revision":"0","range_end":"Yw==","result":"EQUAL","target":"MOD"}],)"
      R"("success":[)"
      R"({"request_put":{"key":"YQ==","lease":"77","value":"dg=="}},)"
      R"({"request_range":{"key":"Yg==","limit":"1","range_end":"Yw=="}},)"
      R"({"request_delete_range":{"key":"ZA=="}}]})");
}

// As etcd 3.4 wrote it.
TEST(EtcdTxnTest, ReadsAnAnswer) {
  const auto answer = decode_txn(
      R"({"header":{"cluster_id":"324952591200643719","revision":"2","raft_term":"2"},"succeeded":true,)"
      R"("responses":[{"response_put":{"header":{"revision":"2"}}},{"response_range":{"header":)"
      R"({"revision":"2"},"kvs":[{"key":"YQ==","create_revision":"2","mod_revision":"2",)"
      R"("version":"1","value":"Yg==","lease":"2324035760662608902"}],"count":"1"}}]})");
  ASSERT_TRUE(answer) << answer.error().message;
  EXPECT_TRUE(answer.value().succeeded);
  ASSERT_EQ(answer.value().entries.size(), 1U);
  EXPECT_EQ(answer.value().entries[0].key, "a");
  EXPECT_EQ(answer.value().entries[0].value, "b");
  EXPECT_EQ(answer.value().entries[0].mod_revision, 2);
  EXPECT_EQ(answer.value().entries[0].lease, 2324035760662608902);
  EXPECT_FALSE(decode_txn(R"({"header":{}})").value().succeeded);
}

// acceptance 45: garbage
TEST(EtcdAnswerTest, NonsenseIsUnavailable) {
  for (
      const char* body :
      {"", "garbage", "[]", "{}", R"({"ranks":[]})", R"({"header":{},"succeeded":1})",
       R"({"header":{},"responses":{}})", R"({"header":{},"responses":[1]})",
       R"({"header":{},"responses":[{"response_range":{"kvs":{}}}]})",
       R"({"header":{},"responses":[{"response_range":{"kvs":[1]}}]})",
       R"({"header":{},"responses":[{"response_range":{"kvs":[{"key":"!"}]}}]})",
       R"({"header":{},"responses":[{"response_range":{"kvs":[{"key":1}]}}]})",
       R"({"header":{},"responses":[{"response_range":{"kvs":[{"lease":"x"}]}}]})",
       R"({"header":{},"responses":[{"response_range":{"kvs":[{"lease":1e30}]}}]})",
       R"({"header":{},"responses":[{"response_range":{"kvs":[{"lease":"9223372036854775808"}]}}]})"}) {
    const auto answer = decode_txn(body);
    ASSERT_FALSE(answer) << body;
    EXPECT_EQ(answer.error().code, ErrorCode::unavailable) << body;
  }
  for (const char* body : {"", "{}", R"({"ID":"5"})", R"({"TTL":"5"})", R"({"ID":"5","TTL":"-1"})",
                           R"({"ID":"5","TTL":"9223372036854775807"})", R"({"ID":[],"TTL":"5"})"})
    EXPECT_EQ(decode_grant(body).error().code, ErrorCode::unavailable) << body;
  for (const char* body : {"", "{}", R"({"result":{"TTL":"x"}})", R"({"error":{"message":"m"}})",
                           R"({"error":"text"})", R"({"result":{"TTL":"9223372036854775807"}})"})
    EXPECT_EQ(decode_keep_alive(body).error().code, ErrorCode::unavailable) << body;
}

// What copies or prints JSON recurses, and would run out of stack.
TEST(EtcdAnswerTest, DeepNestingIsNonsenseLikeAnyOther) {
  const std::string deep = std::string(100'000, '[') + std::string(100'000, ']');
  for (const char* before :
       {R"({"TTL":)", R"({"error":)", R"({"header":)", R"({"responses":)", R"({"message":)"}) {
    const std::string body = before + deep + "}";
    EXPECT_FALSE(decode_grant(body)) << before;
    EXPECT_FALSE(decode_keep_alive(body)) << before;
    EXPECT_EQ(decode_failure(500, body).code, ErrorCode::unavailable) << before;
    const auto txn = decode_txn(body);
    EXPECT_TRUE(!txn || txn.value().entries.empty()) << before;
  }
  EXPECT_FALSE(decode_keep_alive(R"({"error":{"message":"m","code":)" + deep + "}}"));
}

TEST(EtcdAnswerTest, LeasesAreReadAsTextOrNumber) {
  const auto lease = decode_grant(R"({"header":{},"ID":"2324035760662608902","TTL":"2"})");
  ASSERT_TRUE(lease);
  EXPECT_EQ(lease.value().id, 2324035760662608902);
  EXPECT_EQ(lease.value().time_to_live, 2s);
  EXPECT_EQ(decode_grant(R"({"ID":7,"TTL":10})").value().time_to_live, 10s);
  EXPECT_EQ(decode_keep_alive(R"({"result":{"ID":"7","TTL":"5"}})").value(), 5s);
  EXPECT_EQ(decode_keep_alive("{\"result\":{\"ID\":\"7\"}}\n").value(), 0s);
}

TEST(EtcdAnswerTest, AFailureIsInEtcdsWords) {
  const auto lost = decode_failure(
      404, R"({"error":"x","message":"etcdserver: requested lease not found","code":5})");
  EXPECT_EQ(lost.code, ErrorCode::unavailable);
  EXPECT_EQ(lost.message, "etcdserver: requested lease not found");
  EXPECT_EQ(decode_failure(429, R"({"message":"no space","code":8})").code,
            ErrorCode::resource_exhausted);
  EXPECT_EQ(
      decode_keep_alive(R"({"error":{"grpc_code":8,"message":"too many requests"}})").error().code,
      ErrorCode::resource_exhausted);
  const auto page = decode_failure(502, "<html>bad gateway</html>");
  EXPECT_EQ(page.code, ErrorCode::unavailable);
  EXPECT_NE(page.message.find("502"), std::string::npos);
  EXPECT_EQ(decode_failure(500, R"({"message":7})").code, ErrorCode::unavailable);
}

}  // namespace
}  // namespace kvshard::etcd
