// The exporter as a scraper sees it.
#include "kvshard/prometheus.hpp"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <thread>

#include "kvshard/metrics.hpp"
#include "prometheus/samples.hpp"
#include "registry/http.hpp"
#include "support/cluster.hpp"

namespace kvshard::test {
namespace {

using namespace std::chrono_literals;

std::unique_ptr<PrometheusExporter> exporter(const PrometheusOptions& options = {}) {
  auto made = PrometheusExporter::create(options);
  EXPECT_TRUE(made.ok()) << (made ? "" : made.error().message);
  return std::move(made).value();
}

Result<http::Response> get(std::uint16_t port, const std::string& target) {
  return http::fetch({"127.0.0.1", port}, {.method = "GET", .target = target, .body = {}},
                     SteadyClock::instance().now() + 20s, {});
}

std::string scrape(std::uint16_t port) {
  const auto response = get(port, "/metrics");
  EXPECT_TRUE(response.ok()) << (response ? "" : response.error().message);
  return response ? response->body : "";
}

ClusterOptions two_shards() {
  ClusterOptions made;
  made.shard_size = 2;
  return made;
}

// On one host over loopback all ranks are in this process.
PrefillRank& rank_of(PrefillDriver& driver) {
  return static_cast<LocalPrefill&>(driver).rank();
}

ErrorCode refusal(const PrometheusOptions& options) {
  const auto made = PrometheusExporter::create(options);
  return made ? ErrorCode::internal : made.error().code;
}

TEST(ExporterTest, RefusesWhatItCannotServe) {
  for (const char* address : {"127.0.0.1", ":1", "127.0.0.1:65536", "127.0.0.1:x", "a,b:1"})
    EXPECT_EQ(refusal({.address = address}), ErrorCode::invalid_argument) << address;
  const auto first = exporter();
  const std::string taken = "127.0.0.1:" + std::to_string(first->port());
  EXPECT_EQ(refusal({.address = taken}), ErrorCode::unavailable);
}

TEST(ExporterTest, RefusesLabelsThatAreNoneOrTaken) {
  for (const char* name : {"", "1a", "a-b", "__a", "le", "group"})
    EXPECT_EQ(refusal({.labels = {{name, "x"}}}), ErrorCode::invalid_argument) << name;
  EXPECT_EQ(refusal({.labels = {{"a", "x"}, {"a", "y"}}}), ErrorCode::invalid_argument);
}

TEST(ExporterTest, ServesNothingWithoutAnAddress) {
  const auto made = exporter({.address = ""});
  EXPECT_EQ(made->port(), 0);
  EXPECT_EQ(made->text(), "");
}

TEST(ExporterTest, AnswersOneQuestion) {
  const auto made = exporter();
  EXPECT_EQ(get(made->port(), "/metrics?name=x")->status, 200);
  EXPECT_EQ(get(made->port(), "/")->status, 404);
  EXPECT_EQ(
      http::fetch({"127.0.0.1", made->port()}, {.method = "POST", .target = "/metrics", .body = {}},
                  SteadyClock::instance().now() + 20s, {})
          ->status,
      405);
}

TEST(ExporterTest, ExportsARankAsLongAsItsHandleLives) {
  const Cluster cluster{two_shards()};
  auto made = exporter();
  auto handle = made->add(*cluster.decode, "d");
  ASSERT_TRUE(handle.ok());
  const std::string sample = R"(kvshard_decode_peers{decode_rank="d"})";
  EXPECT_EQ(parse(scrape(made->port())).count(sample), 1U);
  EXPECT_EQ(made->add(*cluster.decode, "d").error().code, ErrorCode::invalid_argument);
  {
    const std::optional<ExportedRank> ends{std::move(handle).value()};
    EXPECT_EQ(parse(scrape(made->port())).count(sample), 1U);
  }
  EXPECT_EQ(scrape(made->port()), "");
  const auto again = made->add(*cluster.decode, "d");
  ASSERT_TRUE(again.ok());
  made.reset();  // before the handle
}

TEST(ExporterTest, TellsWhatRanksDid) {
  Cluster cluster{two_shards()};
  const auto made = exporter({.labels = {{"site", "a"}}});
  const auto decode = made->add(*cluster.decode, "d");
  const auto prefill_0 = made->add(rank_of(*cluster.prefills[0]));
  const auto prefill_1 = made->add(rank_of(*cluster.prefills[1]));
  ASSERT_TRUE(decode.ok() && prefill_0.ok() && prefill_1.ok());

  const GroupId group = cluster.connect();
  cluster.run_request(group, RoomId{1}, 10);
  cluster.run_request(group, RoomId{2}, 10);
  const std::vector<LocalPage> pages = cluster.destinations(4);
  const auto pull = cluster.decode->pull({.group = group, .room = RoomId{3}, .pages = pages});
  ASSERT_TRUE(pull.ok());
  cluster.decode->cancel(*pull);
  ASSERT_TRUE(cluster.next_event().ok());

  const std::string text = scrape(made->port());
  const Samples samples = parse(text);
  const auto of = [&samples](const std::string& name, const std::string& labels) {
    const auto found = samples.find("kvshard_" + name + R"({site="a",)" + labels + '}');
    if (found == samples.end()) ADD_FAILURE() << "no " << name << ' ' << labels;
    return found == samples.end() ? -1 : found->second;
  };
  EXPECT_EQ(of("decode_pulls_started_total", R"(decode_rank="d")"), 3);
  EXPECT_EQ(of("decode_pulls_total", R"(decode_rank="d",code="ok")"), 2);
  EXPECT_EQ(of("decode_pulls_total", R"(decode_rank="d",code="cancelled")"), 1);
  EXPECT_EQ(of("decode_stage_seconds_count", R"(decode_rank="d",stage="pull")"), 2);
  const double bytes = of("decode_bytes_total", R"(decode_rank="d")");
  EXPECT_GT(bytes, 0);
  EXPECT_EQ(of("decode_path_bytes_total", R"(decode_rank="d",path="loopback")"), bytes);
  EXPECT_EQ(of("decode_peers", R"(decode_rank="d")"), 2);
  double from_sources = 0;
  double from_prefills = 0;
  double slowest = 0;
  for (const std::string rank : {"0", "1"}) {
    const std::string source =
        R"(decode_rank="d",group="kvshard",epoch="1",shard_rank=")" + rank + '"';
    const std::string prefill = R"(group="kvshard",shard_rank=")" + rank + '"';
    EXPECT_EQ(of("decode_source_connected", source), 1);
    from_sources += of("decode_source_bytes_total", source);
    slowest += of("decode_source_slowest_total", source);
    from_prefills += of("prefill_bytes_total", prefill);
    EXPECT_EQ(of("prefill_pulls_total", prefill + R"(,code="ok")"), 2);
    EXPECT_EQ(of("prefill_rooms_ended_total", prefill + R"(,outcome="done")"), 2);
    EXPECT_EQ(of("prefill_peers_connected", prefill), 1);
  }
  EXPECT_EQ(from_sources, bytes);
  EXPECT_EQ(from_prefills, bytes);
  EXPECT_EQ(slowest, 2);  // one of each pull that ended well
}

TEST(ExporterTest, IsScrapedWhileRanksWorkAndComeAndGo) {
  Cluster cluster{two_shards()};
  const auto made = exporter();
  const auto prefill = made->add(rank_of(*cluster.prefills[0]));
  ASSERT_TRUE(prefill.ok());
  const GroupId group = cluster.connect();
  std::string last;
  {
    std::jthread scraper{[&](const std::stop_token& stop) {
      while (!stop.stop_requested()) last = scrape(made->port());
    }};
    for (std::uint64_t room = 1; room <= 10; ++room) {
      const auto decode = made->add(*cluster.decode, "d");
      ASSERT_TRUE(decode.ok());
      cluster.run_request(group, RoomId{room}, 10);
    }
  }
  EXPECT_FALSE(parse(last).empty());
  EXPECT_EQ(parse(made->text())
                .at(R"(kvshard_prefill_pulls_total{group="kvshard",shard_rank="0",code="ok"})"),
            10);
}

}  // namespace
}  // namespace kvshard::test
