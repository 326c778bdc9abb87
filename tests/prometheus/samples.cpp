#include "prometheus/samples.hpp"

#include <gtest/gtest.h>
#include <prometheus/text_serializer.h>

#include <sstream>

namespace kvshard::test {
namespace {

// 1 in the first class, `count` - 1 in the one from 1,048,576 ns on, and a sum of `count` ms.
DurationHistogram histogram(std::uint64_t count) {
  DurationHistogram made;
  made.counts[0] = 1;
  made.counts[DurationHistogram::bucket(1U << 20)] = count - 1;
  made.sum_ns = count * 1'000'000;
  return made;
}

template <typename Counts>
Counts from(std::uint64_t first) {
  Counts made;
  for (auto& each : made) each = first++;
  return made;
}

}  // namespace

PrefillMetrics prefill_metrics() {
  PrefillMetrics made{
      .group = "a/b", .shard_rank = 1, .shard_size = 901, .stats = {}, .refused = {}};
  made.stats = {.rooms_opened = 101,
                .rooms_done = 102,
                .rooms_failed = 103,
                .pulls_started = 104,
                .pulls_committed = 105,
                .pulls_failed = 106,
                .pieces_sent = 107,
                .bytes_sent = 108,
                .late_reads = 109,
                .stale_commits = 110,
                .late_messages = 111,
                .peers_refused = 112,
                .peers_lost = 113,
                .handshakes_ended = 114,
                .rooms = 115,
                .leases = 116,
                .pulls_waiting = 117,
                .slots_in_use = 118,
                .peers = 119};
  for (std::size_t i = 0; i < kStages; ++i) made.stages[i] = histogram(200 + i);
  made.pulls = from<EndCounts>(300);
  made.rooms = from<EndCounts>(400);
  made.fragments = 902;
  made.peers_connected = 903;
  made.oldest_lease = std::chrono::milliseconds{904'500};
  made.slots = 905;
  made.refused = {{"kv.page_size", 906}, {"epoch", 907}};
  return made;
}

DecodeMetrics decode_metrics() {
  DecodeMetrics made;
  made.stats = {.pulls_started = 101,
                .pulls_done = 102,
                .pulls_failed = 103,
                .pulls_cancelled = 104,
                .pieces = 105,
                .bytes = 106,
                .stale = 107,
                .late_messages = 108,
                .peers_lost = 109,
                .reconnects = 110,
                .pulls = 111,
                .landing_in_use = 112,
                .quarantined = 113,
                .peers = 114};
  for (std::size_t i = 0; i < kStages; ++i) made.stages[i] = histogram(200 + i);
  made.pulls = from<EndCounts>(300);
  made.fragments = 901;
  made.sessions = from<PathCounts>(400);
  made.bytes = from<PathCounts>(500);
  made.not_mapped = 902;
  made.emulated = 903;
  made.landing_bytes = 904;
  made.landing_slots = 905;
  made.refused = {{"epoch", 906}};
  made.sources.push_back({.group = "g",
                          .epoch = 907,
                          .shard_rank = 3,
                          .connected = true,
                          .path = {.path = TransferPath::am,
                                   .get_native = true,
                                   .get_gigabytes_per_s = 1.5,
                                   .am_gigabytes_per_s = 2.5,
                                   .reason = "because"},
                          .pieces = 908,
                          .bytes = 909,
                          .slowest = 910,
                          .wait = histogram(911),
                          .wire = histogram(912)});
  return made;
}

Samples parse(const std::string& text) {
  Samples samples;
  std::istringstream in{text};
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with('#')) continue;
    const std::size_t space = line.rfind(' ');
    const bool fresh = samples.emplace(line.substr(0, space), std::stod(line.substr(space))).second;
    EXPECT_TRUE(fresh) << "twice: " << line;
  }
  return samples;
}

Samples samples_of(Families families) {
  std::ostringstream out;
  prometheus::TextSerializer{}.Serialize(out, families.take());
  return parse(out.str());
}

}  // namespace kvshard::test
