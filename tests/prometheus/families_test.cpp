// What a rank says of itself, as samples.
#include "prometheus/families.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <vector>

#include "prometheus/samples.hpp"

namespace kvshard::test {
namespace {

// Expects samples one by one, and then that there were no others.
class Expected {
 public:
  Expected(Samples samples, std::string prefix, std::string labels)
      : samples_{std::move(samples)}, prefix_{std::move(prefix)}, labels_{std::move(labels)} {}
  ~Expected() {
    for (const auto& [name, value] : samples_) ADD_FAILURE() << "not expected: " << name;
  }
  Expected(const Expected&) = delete;
  Expected& operator=(const Expected&) = delete;

  void sample(const std::string& name, const std::string& labels, double value) {
    const auto found =
        samples_.find(prefix_ + name + '{' + labels_ + (labels.empty() ? "" : ',' + labels) + '}');
    ASSERT_NE(found, samples_.end()) << name << ' ' << labels;
    EXPECT_EQ(found->second, value) << name << ' ' << labels;
    samples_.erase(found);
  }
  void ends(const std::string& name, double first) {
    for (const char* code :
         {"ok", "invalid_argument", "failed_precondition", "resource_exhausted", "unavailable",
          "deadline_exceeded", "cancelled", "data_loss", "unsupported", "internal"})
      sample(name, std::string{"code=\""} + code + '"', first++);
  }
  // As samples.cpp fills them.
  void stages(std::vector<const char*> names, std::uint64_t first) {
    for (const std::string stage : names) {
      const std::string label = "stage=\"" + stage + '"';
      const auto count = static_cast<double>(first++);
      for (int octave = 0; octave < 27; ++octave) {
        std::ostringstream bound;
        bound.precision(16);
        bound << std::ldexp(1024, octave) / 1e9;
        sample("stage_seconds_bucket", label + ",le=\"" + bound.str() + '"',
               octave <= 10 ? 1 : count);  // up to 1.048576 ms only the first
      }
      sample("stage_seconds_bucket", label + ",le=\"+Inf\"", count);
      sample("stage_seconds_count", label, count);
      sample("stage_seconds_sum", label, count / 1e3);
    }
  }

 private:
  Samples samples_;
  const std::string prefix_, labels_;
};

TEST(FamiliesTest, SayEverythingOfAPrefillRank) {
  Families families{{{"site", "x"}}};
  append(families, prefill_metrics());
  Expected expect{samples_of(std::move(families)), "kvshard_prefill_",
                  R"(site="x",group="a/b",shard_rank="1")"};
  expect.sample("rooms_opened_total", "", 101);
  expect.sample("rooms_ended_total", R"(outcome="done")", 102);
  expect.sample("rooms_ended_total", R"(outcome="failed")", 103);
  expect.sample("pulls_started_total", "", 104);
  expect.sample("pulls_ended_total", R"(outcome="committed")", 105);
  expect.sample("pulls_ended_total", R"(outcome="failed")", 106);
  expect.sample("pieces_total", "", 107);
  expect.sample("bytes_total", "", 108);
  expect.sample("late_reads_total", "", 109);
  expect.sample("stale_commits_total", "", 110);
  expect.sample("late_messages_total", "", 111);
  expect.sample("peers_refused_total", "", 112);
  expect.sample("peers_lost_total", "", 113);
  expect.sample("handshakes_ended_total", "", 114);
  expect.sample("rooms_open", "", 115);
  expect.sample("leases", "", 116);
  expect.sample("pulls_waiting", "", 117);
  expect.sample("slots_in_use", "", 118);
  expect.sample("peers", "", 119);
  expect.stages({"room", "slot", "gather", "exposed", "lease"}, 209);
  expect.ends("pulls_total", 300);
  expect.ends("rooms_total", 400);
  expect.sample("shard_size", "", 901);
  expect.sample("fragments_total", "", 902);
  expect.sample("peers_connected", "", 903);
  expect.sample("oldest_lease_seconds", "", 904.5);
  expect.sample("slots", "", 905);
  expect.sample("refused_total", R"(field="kv.page_size")", 906);
  expect.sample("refused_total", R"(field="epoch")", 907);
}

TEST(FamiliesTest, SayEverythingOfADecodeRank) {
  Families families{{}};
  append(families, decode_metrics(), "d");
  Expected expect{samples_of(std::move(families)), "kvshard_decode_", R"(decode_rank="d")"};
  expect.sample("pulls_started_total", "", 101);
  expect.sample("pulls_ended_total", R"(outcome="done")", 102);
  expect.sample("pulls_ended_total", R"(outcome="failed")", 103);
  expect.sample("pulls_ended_total", R"(outcome="cancelled")", 104);
  expect.sample("pieces_total", "", 105);
  expect.sample("bytes_total", "", 106);
  expect.sample("stale_pulls_total", "", 107);
  expect.sample("late_messages_total", "", 108);
  expect.sample("peers_lost_total", "", 109);
  expect.sample("reconnects_total", "", 110);
  expect.sample("pulls_in_flight", "", 111);
  expect.sample("landing_slots_in_use", "", 112);
  expect.sample("landing_slots_quarantined", "", 113);
  expect.sample("peers", "", 114);
  expect.stages(
      {"queue", "connect", "wait", "landing", "wire", "scatter", "commit", "pull", "skew"}, 200);
  expect.ends("pulls_total", 300);
  double sessions = 401;  // the first of each is of `automatic`
  double bytes = 501;
  for (const char* path : {"get", "am", "loopback", "mapped"}) {
    expect.sample("path_sessions_total", std::string{"path=\""} + path + '"', sessions++);
    expect.sample("path_bytes_total", std::string{"path=\""} + path + '"', bytes++);
  }
  expect.sample("fragments_total", "", 901);
  expect.sample("fallback_sessions_total", R"(fallback="not_mapped")", 902);
  expect.sample("fallback_sessions_total", R"(fallback="emulated")", 903);
  expect.sample("landing_bytes", "", 904);
  expect.sample("landing_slots", "", 905);
  expect.sample("refused_total", R"(field="epoch")", 906);
  const std::string source = R"(group="g",epoch="907",shard_rank="3")";
  expect.sample("source_connected", source, 1);
  expect.sample("source_path_info", source + R"(,path="am",get_native="true",reason="because")", 1);
  expect.sample("source_probe_bytes_per_second", source + R"(,path="get")", 1.5e9);
  expect.sample("source_probe_bytes_per_second", source + R"(,path="am")", 2.5e9);
  expect.sample("source_pieces_total", source, 908);
  expect.sample("source_bytes_total", source, 909);
  expect.sample("source_slowest_total", source, 910);
  expect.sample("source_wait_seconds_count", source, 911);
  expect.sample("source_wait_seconds_sum", source, 0.911);
  expect.sample("source_wire_seconds_count", source, 912);
  expect.sample("source_wire_seconds_sum", source, 0.912);
}

TEST(FamiliesTest, DescribeAMetricOnceForAllRanks) {
  Families families{{}};
  append(families, decode_metrics(), "0");
  append(families, decode_metrics(), "1");
  for (const prometheus::MetricFamily& family : families.take())
    EXPECT_EQ(family.metric.size() % 2, 0U) << family.name;
}

TEST(FamiliesTest, CountADurationBelowTheEndOfItsOctave) {
  const std::array<std::uint64_t, 6> durations{1'023, 1'024,          2'047,
                                               2'048, 68'719'476'735, ~std::uint64_t{0}};
  DecodeMetrics metrics;
  for (const std::uint64_t ns : durations)
    ++metrics.stages[static_cast<std::size_t>(Stage::pull)].counts[DurationHistogram::bucket(ns)];
  Families families{{}};
  append(families, metrics, "d");
  const Samples samples = samples_of(std::move(families));
  const auto below = [&samples](const std::string& bound) {
    return samples.at(R"(kvshard_decode_stage_seconds_bucket{decode_rank="d",stage="pull",le=")" +
                      bound + "\"}");
  };
  EXPECT_EQ(below("1.024e-06"), 1);
  EXPECT_EQ(below("2.048e-06"), 3);
  EXPECT_EQ(below("4.096e-06"), 4);
  EXPECT_EQ(below("34.359738368"), 4);
  EXPECT_EQ(below("68.719476736"), 5);
  EXPECT_EQ(below("+Inf"), 6);
}

TEST(FamiliesTest, KeepHostileNamesInTheirPlace) {
  PrefillMetrics metrics = prefill_metrics();
  metrics.group = "a\"b\\c\n\x80";
  metrics.refused = {{"kv\x80", 1}, {"kv\x81", 2}};
  Families families{{}};
  append(families, metrics);
  const Samples samples = samples_of(std::move(families));
  EXPECT_EQ(samples.at(R"(kvshard_prefill_slots{group="a\"b\\c??",shard_rank="1"})"), 905);
  EXPECT_EQ(
      samples.at(R"(kvshard_prefill_refused_total{group="a\"b\\c??",shard_rank="1",field="kv?"})"),
      3);
}

TEST(FamiliesTest, TakeSourcesOfTheSameNameAsOne) {
  DecodeMetrics metrics = decode_metrics();
  SourceMetrics other = metrics.sources[0];
  other.connected = false;
  other.path = {};
  other.bytes = 1;
  metrics.sources.push_back(other);  // same labels
  other.epoch = 908;
  metrics.sources.push_back(other);
  Families families{{}};
  append(families, metrics, "d");
  const Samples samples = samples_of(std::move(families));  // fails for one that is there twice
  const auto of = [&samples](const std::string& name, const std::string& epoch) {
    return samples.at("kvshard_decode_source_" + name + R"({decode_rank="d",group="g",epoch=")" +
                      epoch + R"(",shard_rank="3"})");
  };
  EXPECT_EQ(of("bytes_total", "907"), 910);
  EXPECT_EQ(of("wire_seconds_count", "907"), 2 * 912);
  EXPECT_EQ(of("connected", "907"), 1);
  EXPECT_EQ(of("bytes_total", "908"), 1);
  EXPECT_EQ(of("connected", "908"), 0);
  EXPECT_EQ(
      samples.count(R"(kvshard_decode_source_path_info{decode_rank="d",group="g",epoch="907",)"
                    R"(shard_rank="3",path="am",get_native="true",reason="because"})"),
      1U);
}

}  // namespace
}  // namespace kvshard::test
