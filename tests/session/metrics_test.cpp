// What ranks measure of themselves, and the traces that they write.
#include <gtest/gtest.h>

#include <fmt/format.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <thread>

#include "kvshard/metrics.hpp"
#include "kvshard/tracer.hpp"
#include "session/recorder.hpp"
#include "session/trace_track.hpp"
#include "support/cluster.hpp"

namespace kvshard::test {
namespace {

constexpr std::uint32_t kShards = 3;

ClusterOptions three_shards() {
  ClusterOptions made;
  made.shard_size = kShards;
  return made;
}

PrefillMetrics metrics_of(PrefillDriver& driver) {
  return static_cast<LocalPrefill&>(driver).rank().metrics();  // over loopback they all are
}

std::uint64_t count(const StageTimes& times, Stage stage) {
  return at(times, stage).count();
}

TEST(DurationHistogramTest, BucketsMeetAndCoverEverything) {
  std::uint64_t begin = 0;
  for (std::size_t i = 0; i + 1 < DurationHistogram::kBuckets; ++i) {
    const std::uint64_t end = DurationHistogram::upper_bound_ns(i);
    ASSERT_LT(begin, end);
    EXPECT_EQ(DurationHistogram::bucket(begin), i);
    EXPECT_EQ(DurationHistogram::bucket(end - 1), i);
    if (begin > 0) {
      EXPECT_LE(end - begin, begin / 4 + 1) << i;  // a quarter
    }
    begin = end;
  }
  EXPECT_GT(begin, 100'000'000'000U);
  EXPECT_EQ(DurationHistogram::bucket(begin), DurationHistogram::kBuckets - 1);
  EXPECT_EQ(DurationHistogram::bucket(~std::uint64_t{0}), DurationHistogram::kBuckets - 1);
}

TEST(DurationHistogramTest, QuantilesAreWithinAnEighthOfTheTruth) {
  DurationHistogram histogram;
  EXPECT_EQ(histogram.quantile(0.5).count(), 0);
  for (std::uint64_t us = 1; us <= 1'000; ++us) {
    ++histogram.counts[DurationHistogram::bucket(us * 1'000)];
  }
  for (const double q : {0.01, 0.5, 0.9, 0.99, 1.0}) {
    const double truth = q * 1e6;
    EXPECT_NEAR(static_cast<double>(histogram.quantile(q).count()), truth, truth / 8) << q;
  }
}

TEST(MetricsTest, CountEveryStageOfPullsThatEndWell) {
  Cluster cluster{three_shards()};
  const GroupId group = cluster.connect();
  constexpr std::uint64_t kPulls = 5, kPages = 7;
  for (std::uint64_t room = 1; room <= kPulls; ++room)
    cluster.run_request(group, RoomId{room}, kPages);
  const DecodeMetrics decode = cluster.decode->metrics();
  for (const Stage stage : {Stage::queue, Stage::connect, Stage::commit, Stage::pull, Stage::skew})
    EXPECT_EQ(count(decode.stages, stage), kPulls) << to_string(stage);
  EXPECT_EQ(count(decode.stages, Stage::wait), kPulls * kShards);
  for (const Stage stage : {Stage::landing, Stage::wire, Stage::scatter})
    EXPECT_EQ(count(decode.stages, stage), decode.stats.pieces) << to_string(stage);
  for (const Stage stage : {Stage::room, Stage::slot, Stage::gather, Stage::exposed, Stage::lease})
    EXPECT_EQ(count(decode.stages, stage), 0U) << to_string(stage);
  EXPECT_GE(at(decode.stages, Stage::pull).sum_ns, at(decode.stages, Stage::commit).sum_ns);
  EXPECT_EQ(decode.pulls[0], kPulls);
  const std::uint64_t rows = cluster.pool->pool().geometry.groups[0].layers *
                             cluster.pool->pool().geometry.groups[0].buffers_per_layer;
  EXPECT_EQ(decode.fragments, kPulls * kPages * rows);
  EXPECT_EQ(decode.sessions[static_cast<std::size_t>(TransferPath::loopback)], kShards);
  EXPECT_EQ(decode.bytes[static_cast<std::size_t>(TransferPath::loopback)], decode.stats.bytes);
  EXPECT_EQ(decode.landing_bytes, 0U);
  EXPECT_TRUE(decode.refused.empty());

  ASSERT_EQ(decode.sources.size(), kShards);
  std::uint64_t bytes = 0, slowest = 0;
  for (std::uint32_t rank = 0; rank < kShards; ++rank) {
    const SourceMetrics& source = decode.sources[rank];
    EXPECT_EQ(source.shard_rank, rank);
    EXPECT_EQ(source.group, "kvshard");
    EXPECT_TRUE(source.connected);
    EXPECT_EQ(source.path.path, TransferPath::loopback);
    EXPECT_EQ(source.wait.count(), kPulls);
    EXPECT_EQ(source.wire.count(), source.pieces);
    bytes += source.bytes;
    slowest += source.slowest;
  }
  EXPECT_EQ(bytes, decode.stats.bytes);
  EXPECT_EQ(slowest, kPulls);

  std::uint64_t fragments = 0;
  for (auto& driver : cluster.prefills) {
    const PrefillMetrics prefill = metrics_of(*driver);
    for (const Stage stage : {Stage::slot, Stage::gather, Stage::exposed})
      EXPECT_EQ(count(prefill.stages, stage), prefill.stats.pieces_sent) << to_string(stage);
    EXPECT_EQ(count(prefill.stages, Stage::lease), kPulls);
    EXPECT_EQ(prefill.pulls[0], kPulls);
    EXPECT_EQ(prefill.rooms[0], kPulls);
    EXPECT_EQ(prefill.peers_connected, 1U);
    fragments += prefill.fragments;
  }
  EXPECT_EQ(fragments, decode.fragments);
}

// A mapped piece is one copy, from page to page: all of it is `wire`, and nothing is gathered or scattered.
TEST(MetricsTest, AMappedPieceIsOnTheWireAllTheTime) {
  ClusterOptions options = three_shards();
  options.decode.mapped = Mapped::always;
  Cluster cluster{options};
  cluster.run_request(cluster.connect(), RoomId{1}, 7);
  const DecodeMetrics decode = cluster.decode->metrics();
  EXPECT_EQ(count(decode.stages, Stage::wire), decode.stats.pieces);
  EXPECT_EQ(count(decode.stages, Stage::scatter), 0U);
  EXPECT_EQ(decode.sessions[static_cast<std::size_t>(TransferPath::mapped)], kShards);
  EXPECT_EQ(decode.bytes[static_cast<std::size_t>(TransferPath::mapped)], decode.stats.bytes);
  EXPECT_EQ(decode.not_mapped, 0U);
  for (auto& driver : cluster.prefills) {
    const PrefillMetrics prefill = metrics_of(*driver);
    EXPECT_EQ(count(prefill.stages, Stage::gather), 0U);
    EXPECT_EQ(count(prefill.stages, Stage::exposed), prefill.stats.pieces_sent);
  }
}

TEST(MetricsTest, CountEndsByCodeAndWaitsForRooms) {
  Cluster cluster{three_shards()};
  const GroupId group = cluster.connect();
  const auto to = cluster.destinations(4);
  const auto pull = cluster.decode->pull({.group = group, .room = RoomId{1}, .pages = to});
  ASSERT_TRUE(pull.ok());
  for (auto& prefill : cluster.prefills) {
    while (prefill->stats().pulls_waiting == 0) std::this_thread::yield();
  }
  cluster.open(RoomId{1});
  for (auto& prefill : cluster.prefills) {
    while (metrics_of(*prefill).stats.leases == 0) std::this_thread::yield();
  }
  ASSERT_TRUE(cluster.prefills[0]->abort(RoomId{1}, "no").ok());  // the others hear it from decode
  const auto event = cluster.next_event();
  ASSERT_TRUE(event.ok());
  EXPECT_FALSE(event->status.ok());
  const DecodeMetrics decode = cluster.decode->metrics();
  EXPECT_EQ(decode.pulls[static_cast<std::size_t>(ErrorCode::cancelled)], 1U);
  EXPECT_EQ(count(decode.stages, Stage::pull), 0U);  // times of what went well only
  for (auto& prefill : cluster.prefills) {
    ASSERT_TRUE(prefill->next_event().ok());
    const PrefillMetrics metrics = metrics_of(*prefill);
    EXPECT_EQ(count(metrics.stages, Stage::room), 1U);
    EXPECT_EQ(metrics.pulls[static_cast<std::size_t>(ErrorCode::cancelled)], 1U);
    EXPECT_EQ(metrics.rooms[static_cast<std::size_t>(ErrorCode::cancelled)], 1U);
  }
}

TEST(MetricsTest, NameTheFieldThatPeersWereRefusedFor) {
  Cluster cluster{three_shards()};
  GroupSpec spec = cluster.spec();
  spec.epoch = 7;
  EXPECT_FALSE(cluster.decode->connect(spec, std::chrono::seconds{20}).ok());
  std::uint64_t epoch = 0;
  for (auto& prefill : cluster.prefills) {
    for (const RefusedCount& refused : metrics_of(*prefill).refused) {
      EXPECT_EQ(refused.field, "epoch");
      epoch += refused.count;
    }
  }
  EXPECT_GT(epoch, 0U);  // the first that refuses is enough for connect() to end
}

TEST(MetricsTest, RefusalsCountByFieldWhereThereIsOneAndStayFew) {
  Recorder recorder{true, nullptr, "decode", SteadyClock::instance()};
  const auto refuse = [&](ErrorCode code, const char* message, bool handshake) {
    recorder.refuse(Error{code, message}, handshake);
  };
  const ErrorCode unlike = ErrorCode::failed_precondition;
  refuse(unlike, "geometry differs: kv.page_size is 64 on prefill and 48 on decode", true);
  refuse(unlike, "geometry differs: kv.page_size is 16 on prefill and 24 on decode", true);
  refuse(unlike, "transport: decode wants ucx, prefill has loopback", true);
  refuse(unlike, "lane 0 of group kv has layers [0, 4)", true);
  refuse(unlike, "epoch: of a message that is no handshake", false);
  refuse(ErrorCode::data_loss, "bad: bytes", true);
  for (int i = 0; i < 100; ++i) refuse(unlike, fmt::format("field{}: no", i).c_str(), true);
  std::map<std::string, std::uint64_t> counts;
  for (const RefusedCount& refused : recorder.refused()) counts[refused.field] = refused.count;
  EXPECT_EQ(counts["kv.page_size"], 2U);
  EXPECT_EQ(counts["transport"], 1U);
  EXPECT_EQ(counts["failed_precondition"], 2U);
  EXPECT_EQ(counts["data_loss"], 1U);
  EXPECT_EQ(counts["other"], 72U);  // of the hundred, 28 had a place of their own
  EXPECT_EQ(counts.size(), 33U);
}

TEST(MetricsTest, AreZeroWhenOff) {
  ClusterOptions options = three_shards();
  options.prefill.metrics = options.decode.metrics = false;
  Cluster cluster{options};
  cluster.run_request(cluster.connect(), RoomId{1}, 7);
  for (const DurationHistogram& times : cluster.decode->metrics().stages)
    EXPECT_EQ(times.count(), 0U);
  for (auto& prefill : cluster.prefills) {
    for (const DurationHistogram& times : metrics_of(*prefill).stages) EXPECT_EQ(times.count(), 0U);
  }
}

TEST(MetricsTest, TheOldestLeaseIsTold) {
  ManualClock clock;
  ClusterOptions options = three_shards();
  options.clock = &clock;
  Cluster cluster{options};
  const GroupId group = cluster.connect();
  const auto pages = cluster.chain(3);
  cluster.open(RoomId{1});
  const auto to = cluster.destinations(3);
  ASSERT_TRUE(cluster.decode->pull({.group = group, .room = RoomId{1}, .pages = to}).ok());
  for (auto& prefill : cluster.prefills) {
    while (prefill->stats().leases == 0) std::this_thread::yield();
  }
  clock.advance(std::chrono::milliseconds{700});
  for (auto& prefill : cluster.prefills) {
    while (metrics_of(*prefill).oldest_lease < std::chrono::milliseconds{700})
      std::this_thread::yield();
  }
  cluster.publish({.room = RoomId{1}, .pages = pages, .last = true});
  const auto event = cluster.next_event();
  ASSERT_TRUE(event.ok());
  EXPECT_TRUE(event->status.ok());
}

// The line that an operator reads.
TEST(SummaryTest, NamesPathSlowestRankAndWhatTookItsTime) {
  using std::chrono::milliseconds;
  PullEvent event{.room = RoomId{17}, .bytes = 30'000'000, .total = milliseconds{10}};
  event.path = TransferPath::get;
  event.sources = {{.shard_rank = 0,
                    .pieces = 1,
                    .first_ready = milliseconds{1},
                    .landed = milliseconds{3},
                    .wire = milliseconds{2}},
                   {.shard_rank = 1,
                    .pieces = 1,
                    .first_ready = milliseconds{7},
                    .landed = milliseconds{9},
                    .wire = milliseconds{2}}};
  const std::string late = summarize(event);
  EXPECT_NE(late.find("room 17: ok, 30000000 bytes by get from 2 ranks in 10.000 ms (3 GB/s)"),
            std::string::npos)
      << late;
  EXPECT_NE(late.find("slowest rank 1: landed after 9.000 ms, most of it wait for its first piece "
                      "7.000 ms"),
            std::string::npos)
      << late;
  event.sources[1].landing = milliseconds{8};
  EXPECT_NE(summarize(event).find("most of it wait for landing slots 8.000 ms"), std::string::npos);
  event.commit = milliseconds{9};
  EXPECT_NE(summarize(event).find("most of it commit 9.000 ms"), std::string::npos);
}

// ---- traces ----------------------------------------------------------------------------------------

class TracerTest : public ::testing::Test {
 protected:
  ~TracerTest() override { std::filesystem::remove(path); }
  nlohmann::json written(const Tracer& tracer) {
    const Status status = tracer.write(path);
    EXPECT_TRUE(status.ok()) << (status ? "" : status.error().message);
    return nlohmann::json::parse(std::ifstream{path});
  }
  const std::string path{std::filesystem::temp_directory_path() /
                         fmt::format("kvshard_trace_{}.json", ::getpid())};
};

TEST_F(TracerTest, HoldsEverySpanOfBothSidesInLanesThatDoNotOverlap) {
  const auto tracer = Tracer::create({.process = R"(a "test")"}).value();
  ClusterOptions options = three_shards();
  options.prefill.tracer = options.decode.tracer = tracer;
  Cluster cluster{options};
  const GroupId group = cluster.connect();
  for (std::uint64_t room = 1; room <= 4; ++room) cluster.run_request(group, RoomId{room}, 7);
  const DecodeMetrics decode = cluster.decode->metrics();
  const auto json = written(*tracer);
  EXPECT_EQ(json["otherData"]["version"], 1);
  EXPECT_EQ(json["otherData"]["overwritten"], 0);
  std::map<std::string, std::uint64_t> spans;
  std::map<std::uint64_t, std::vector<std::pair<double, double>>> lanes;
  std::map<std::string, std::set<std::string>> ranks_of_room;
  std::map<std::string, std::set<std::pair<std::uint64_t, std::string>>> leases;  // by stage
  std::uint64_t wire_bytes = 0;
  std::string open;
  for (const auto& event : json["traceEvents"]) {
    const std::string phase = event["ph"], name = event["name"];
    if (phase == "M") {
      if (name == "process_name") {
        EXPECT_EQ(event["args"]["name"], "a test");
      }
      continue;
    }
    if (phase == "b") {
      open = event["id2"]["local"];
    } else if (phase == "e") {
      EXPECT_EQ(event["id2"]["local"], open);
      continue;
    }
    ++spans[name];
    ranks_of_room[event["args"]["room"]].insert(event["args"]["rank"]);
    leases[name].emplace(event["args"]["source"], event["args"]["lease"]);
    if (phase != "X") continue;
    const double begin = event["ts"], end = begin + event["dur"].get<double>();
    lanes[event["tid"]].emplace_back(begin, end);
    if (name == "wire") wire_bytes += event["args"]["bytes"].get<std::uint64_t>();
  }
  for (const Stage stage : {Stage::queue, Stage::connect, Stage::wait, Stage::wire, Stage::scatter,
                            Stage::commit, Stage::pull, Stage::skew}) {
    EXPECT_EQ(spans[std::string{to_string(stage)}], count(decode.stages, stage))
        << to_string(stage);
  }
  EXPECT_EQ(spans["gather"], decode.stats.pieces);
  EXPECT_EQ(spans["exposed"], decode.stats.pieces);
  EXPECT_EQ(spans["lease"], 4 * kShards);
  EXPECT_EQ(leases["lease"].size(), 4 * kShards);
  for (const char* const stage : {"wait", "wire", "scatter", "gather", "exposed"})
    EXPECT_EQ(leases[stage], leases["lease"]) << stage;
  EXPECT_EQ(wire_bytes, decode.stats.bytes);
  ASSERT_EQ(ranks_of_room.size(), 4U);
  for (const auto& [room, ranks] : ranks_of_room) EXPECT_EQ(ranks.size(), kShards + 1) << room;
  for (auto& [lane, times] : lanes) {
    std::ranges::sort(times);
    for (std::size_t i = 1; i < times.size(); ++i)  // a slot does one thing at a time
      EXPECT_LE(times[i - 1].second, times[i].first + 0.002) << lane;
  }
}

TEST_F(TracerTest, AllRanksTraceTheSameRooms) {
  const auto tracer = Tracer::create({.one_in = 3}).value();
  ClusterOptions options = three_shards();
  options.prefill.tracer = options.decode.tracer = tracer;
  Cluster cluster{options};
  const GroupId group = cluster.connect();
  for (std::uint64_t room = 1; room <= 7; ++room) cluster.run_request(group, RoomId{room}, 4);
  std::map<std::string, std::set<std::string>> ranks_of_room;
  const auto json = written(*tracer);
  for (const auto& event : json["traceEvents"]) {
    if (event.contains("args") && event["args"].contains("room"))
      ranks_of_room[event["args"]["room"]].insert(event["args"]["rank"]);
  }
  ASSERT_EQ(ranks_of_room.size(), 2U);
  EXPECT_EQ(ranks_of_room["3"].size(), kShards + 1);
  EXPECT_EQ(ranks_of_room["6"].size(), kShards + 1);
}

TEST_F(TracerTest, KeepsTheLastSpansAndTellsHowManyGaveWay) {
  const auto tracer = Tracer::create({.spans_per_rank = 4}).value();
  const auto track = tracer->track("decode");
  for (std::uint64_t i = 0; i < 10; ++i)
    track->add({.stage = Stage::wire, .room = RoomId{1}, .piece = i});
  const auto json = written(*tracer);
  EXPECT_EQ(json["otherData"]["overwritten"], 6);
  std::vector<std::uint64_t> pieces;
  for (const auto& event : json["traceEvents"]) {
    if (event["ph"] == "X") pieces.push_back(event["args"]["piece"]);
  }
  EXPECT_EQ(pieces, (std::vector<std::uint64_t>{6, 7, 8, 9}));
}

TEST_F(TracerTest, RefusesWhatCannotWork) {
  EXPECT_EQ(Tracer::create({.one_in = 0}).error().message,
            "one_in 0 and spans_per_rank 65536 must not be 0");
  const auto tracer = Tracer::create().value();
  const Status status = tracer->write("/proc/no such place/trace.json");
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::unavailable);
  EXPECT_NE(status.error().message.find("/proc/no such place"), std::string::npos);
}

}  // namespace
}  // namespace kvshard::test
