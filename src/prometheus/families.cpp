#include "prometheus/families.hpp"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <tuple>
#include <utility>

namespace kvshard {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricType;

double seconds(std::uint64_t ns) noexcept {
  return static_cast<double>(ns) / 1e9;
}

// Upper bounds at every doubling, from 1.024 us to 68.7 s: a quarter of the classes that were counted,
// since each is a series for every stage of every rank.
ClientMetric::Histogram octaves(const DurationHistogram& from) {
  ClientMetric::Histogram to;
  for (std::size_t i = 0; i < DurationHistogram::kBuckets; ++i) {
    to.sample_count += from.counts[i];
    const bool last = i + 1 == DurationHistogram::kBuckets;
    if (i % 4 == 0 || last)
      to.bucket.push_back({to.sample_count, last ? std::numeric_limits<double>::infinity()
                                                 : seconds(DurationHistogram::upper_bound_ns(i))});
  }
  to.sample_sum = seconds(from.sum_ns);
  return to;
}

// The samples of one rank: names that begin with `prefix`, and its labels before those of each sample.
class Rank {
 public:
  Rank(Families& families, std::string prefix, Labels labels)
      : families_{families}, prefix_{std::move(prefix)}, labels_{std::move(labels)} {}

  void counter(std::string_view name, std::string_view help, std::uint64_t value,
               const Labels& labels = {}) {
    ClientMetric sample;
    sample.counter.value = static_cast<double>(value);
    add(name, help, MetricType::Counter, labels, std::move(sample));
  }
  void gauge(std::string_view name, std::string_view help, double value,
             const Labels& labels = {}) {
    ClientMetric sample;
    sample.gauge.value = value;
    add(name, help, MetricType::Gauge, labels, std::move(sample));
  }
  void gauge(std::string_view name, std::string_view help, std::uint64_t value,
             const Labels& labels = {}) {
    gauge(name, help, static_cast<double>(value), labels);
  }
  void histogram(std::string_view name, std::string_view help, const DurationHistogram& durations,
                 const Labels& labels) {
    ClientMetric sample;
    sample.histogram = octaves(durations);
    add(name, help, MetricType::Histogram, labels, std::move(sample));
  }
  // Count and sum alone.
  void summary(std::string_view name, std::string_view help, const DurationHistogram& durations,
               const Labels& labels) {
    ClientMetric sample;
    sample.summary.sample_count = durations.count();
    sample.summary.sample_sum = seconds(durations.sum_ns);
    add(name, help, MetricType::Summary, labels, std::move(sample));
  }

  void stages(const StageTimes& times, Stage first, Stage last) {
    for (auto i = static_cast<std::size_t>(first); i <= static_cast<std::size_t>(last); ++i)
      histogram("stage_seconds", "How long each stage took", times[i],
                {{"stage", std::string{to_string(static_cast<Stage>(i))}}});
  }
  void ends(std::string_view name, std::string_view help, const EndCounts& counts) {
    for (std::size_t i = 0; i < counts.size(); ++i)
      counter(name, help, counts[i],
              {{"code", i == 0 ? "ok" : std::string{to_string(static_cast<ErrorCode>(i))}}});
  }
  // Of the paths that there are: `automatic` is a wish.
  void paths(std::string_view name, std::string_view help, const PathCounts& counts) {
    for (std::size_t i = 1; i < counts.size(); ++i)
      counter(name, help, counts[i],
              {{"path", std::string{to_string(static_cast<TransferPath>(i))}}});
  }
  void refused(const std::vector<RefusedCount>& counts) {
    std::map<std::string, std::uint64_t> by_field;  // names of peers may differ in other bytes
    for (const auto& [field, count] : counts) by_field[printable(field)] += count;
    for (const auto& [field, count] : by_field)
      counter("refused_total", "Peers refused, by what did not fit", count, {{"field", field}});
  }

 private:
  void add(std::string_view name, std::string_view help, MetricType type, const Labels& labels,
           ClientMetric sample) {
    Labels all = labels_;
    all.insert(all.end(), labels.begin(), labels.end());
    families_.add(prefix_ + std::string{name}, help, type, all, std::move(sample));
  }

  Families& families_;
  const std::string prefix_;
  const Labels labels_;
};

// A group may be connected twice under one name and epoch, with other members; its ranks then have the
// same labels, and are one.
std::vector<SourceMetrics> merged(std::vector<SourceMetrics> sources) {
  const auto labels = [](const SourceMetrics& source) {
    return std::tie(source.group, source.epoch, source.shard_rank);
  };
  const auto add = [](DurationHistogram& to, const DurationHistogram& from) {
    for (std::size_t i = 0; i < to.counts.size(); ++i) to.counts[i] += from.counts[i];
    to.sum_ns += from.sum_ns;
  };
  std::vector<SourceMetrics> different;
  for (SourceMetrics& source : sources) {
    const auto same = std::ranges::find(different, labels(source), labels);
    if (same == different.end()) {
      different.push_back(std::move(source));
      continue;
    }
    if (source.connected) same->path = std::move(source.path);
    same->connected |= source.connected;
    same->pieces += source.pieces;
    same->bytes += source.bytes;
    same->slowest += source.slowest;
    add(same->wait, source.wait);
    add(same->wire, source.wire);
  }
  return different;
}

// In what follows, each struct is taken apart by a structured binding: with another field in it, it does
// not compile until the field is exported here.

void append(Rank& rank, const PrefillStats& stats) {
  const auto& [rooms_opened, rooms_done, rooms_failed, pulls_started, pulls_committed, pulls_failed,
               pieces_sent, bytes_sent, late_reads, stale_commits, late_messages, peers_refused,
               peers_lost, handshakes_ended, rooms, leases, pulls_waiting, slots_in_use, peers] =
      stats;
  rank.counter("rooms_opened_total", "Rooms opened", rooms_opened);
  rank.counter("rooms_ended_total", "Rooms ended", rooms_done, {{"outcome", "done"}});
  rank.counter("rooms_ended_total", "Rooms ended", rooms_failed, {{"outcome", "failed"}});
  rank.counter("pulls_started_total", "Pulls that peers started", pulls_started);
  rank.counter("pulls_ended_total", "Pulls ended", pulls_committed, {{"outcome", "committed"}});
  rank.counter("pulls_ended_total", "Pulls ended", pulls_failed, {{"outcome", "failed"}});
  rank.counter("pieces_total", "Pieces sent", pieces_sent);
  rank.counter("bytes_total", "KV bytes sent", bytes_sent);
  rank.counter("late_reads_total", "Slots taken back from pullers that had not released them",
               late_reads);
  rank.counter("stale_commits_total", "Commits refused since the bytes had not stayed valid",
               stale_commits);
  rank.counter("late_messages_total", "Messages about pulls that had ended", late_messages);
  rank.counter("peers_refused_total", "Peers refused", peers_refused);
  rank.counter("peers_lost_total", "Peers lost", peers_lost);
  rank.counter("handshakes_ended_total", "Handshakes that took too long or gave way to newer ones",
               handshakes_ended);
  rank.gauge("rooms_open", "Rooms now", rooms);
  rank.gauge("leases", "Leases now", leases);
  rank.gauge("pulls_waiting", "Pulls that wait for their room to be opened", pulls_waiting);
  rank.gauge("slots_in_use", "Staging slots in use", slots_in_use);
  rank.gauge("peers", "Peers, with those in a handshake", peers);
}

void append(Rank& rank, const DecodeStats& stats) {
  const auto& [pulls_started, pulls_done, pulls_failed, pulls_cancelled, pieces, bytes, stale,
               late_messages, peers_lost, reconnects, pulls, landing_in_use, quarantined, peers] =
      stats;
  rank.counter("pulls_started_total", "Pulls started", pulls_started);
  rank.counter("pulls_ended_total", "Pulls ended", pulls_done, {{"outcome", "done"}});
  rank.counter("pulls_ended_total", "Pulls ended", pulls_failed, {{"outcome", "failed"}});
  rank.counter("pulls_ended_total", "Pulls ended", pulls_cancelled, {{"outcome", "cancelled"}});
  rank.counter("pieces_total", "Pieces landed", pieces);
  rank.counter("bytes_total", "KV bytes landed", bytes);
  rank.counter("stale_pulls_total", "Pulls that failed since a rank's bytes had not stayed valid",
               stale);
  rank.counter("late_messages_total", "Messages about pulls that had ended", late_messages);
  rank.counter("peers_lost_total", "Prefill ranks lost", peers_lost);
  rank.counter("reconnects_total", "Sessions made anew after a loss", reconnects);
  rank.gauge("pulls_in_flight", "Pulls now", pulls);
  rank.gauge("landing_slots_in_use", "Landing slots in use", landing_in_use);
  rank.gauge("landing_slots_quarantined", "Landing slots that a hung fetch may still write to",
             quarantined);
  rank.gauge("peers", "Prefill ranks with a session", peers);
}

void append(Rank& rank, const SourceMetrics& source) {
  const auto& [group, epoch, shard_rank, connected, report, pieces, bytes, slowest, wait, wire] =
      source;
  const auto& [path, get_native, get_gigabytes_per_s, am_gigabytes_per_s, reason] = report;
  const Labels labels{{"group", group},
                      {"epoch", std::to_string(epoch)},
                      {"shard_rank", std::to_string(shard_rank)}};
  const auto with = [&labels](Labels more) {
    more.insert(more.begin(), labels.begin(), labels.end());
    return more;
  };
  rank.gauge("source_connected", "Whether there is a session with this rank", connected ? 1.0 : 0.0,
             labels);
  rank.gauge("source_path_info", "How this rank's bytes travel in its last session, and why", 1.0,
             with({{"path", std::string{to_string(path)}},
                   {"get_native", get_native ? "true" : "false"},
                   {"reason", reason}}));
  constexpr std::string_view kProbe = "What the probe at connect measured; 0: not tried";
  rank.gauge("source_probe_bytes_per_second", kProbe, get_gigabytes_per_s * 1e9,
             with({{"path", "get"}}));
  rank.gauge("source_probe_bytes_per_second", kProbe, am_gigabytes_per_s * 1e9,
             with({{"path", "am"}}));
  rank.counter("source_pieces_total", "Pieces landed from this rank", pieces, labels);
  rank.counter("source_bytes_total", "KV bytes landed from this rank", bytes, labels);
  rank.counter("source_slowest_total", "Pulls of several ranks in which this one was done last",
               slowest, labels);
  rank.summary("source_wait_seconds", "Pulls waited for this rank's first piece", wait, labels);
  rank.summary("source_wire_seconds", "Fetches of this rank's pieces", wire, labels);
}

}  // namespace

std::string printable(std::string text) {
  for (char& c : text) {
    if (c < ' ' || c > '~') c = '?';
  }
  return text;
}

void Families::add(const std::string& name, std::string_view help, MetricType type,
                   const Labels& labels, ClientMetric sample) {
  sample.label = common_;
  sample.label.insert(sample.label.end(), labels.begin(), labels.end());
  for (auto& label : sample.label) label.value = printable(std::move(label.value));
  prometheus::MetricFamily& family = families_[name];
  family.name = name;
  family.help = help;
  family.type = type;
  family.metric.push_back(std::move(sample));
}

std::vector<prometheus::MetricFamily> Families::take() {
  std::vector<prometheus::MetricFamily> all;
  for (auto& [name, family] : families_) all.push_back(std::move(family));
  families_.clear();
  return all;
}

void append(Families& families, const PrefillMetrics& metrics) {
  const auto& [group, shard_rank, shard_size, stats, stages, pulls, rooms, fragments,
               peers_connected, oldest_lease, slots, refused] = metrics;
  Rank rank{
      families, "kvshard_prefill_", {{"group", group}, {"shard_rank", std::to_string(shard_rank)}}};
  append(rank, stats);
  static_assert(static_cast<std::size_t>(Stage::lease) + 1 == kStages);
  rank.stages(stages, Stage::room, Stage::lease);
  rank.ends("pulls_total", "Pulls by how they ended", pulls);
  rank.ends("rooms_total", "Rooms by how they ended", rooms);
  rank.counter("fragments_total", "Contiguous pieces of memory read", fragments);
  rank.gauge("shard_size", "Ranks of the group", std::uint64_t{shard_size});
  rank.gauge("peers_connected", "Peers past their handshake", peers_connected);
  rank.gauge("oldest_lease_seconds", "Age of the oldest lease",
             std::chrono::duration<double>{oldest_lease}.count());
  rank.gauge("slots", "Staging slots", std::uint64_t{slots});
  rank.refused(refused);
}

void append(Families& families, const DecodeMetrics& metrics, const std::string& name) {
  const auto& [stats, stages, pulls, fragments, sessions, bytes, not_mapped, emulated,
               landing_bytes, landing_slots, refused, sources] = metrics;
  Rank rank{families, "kvshard_decode_", {{"decode_rank", name}}};
  append(rank, stats);
  static_assert(static_cast<std::size_t>(Stage::skew) + 1 == static_cast<std::size_t>(Stage::room));
  rank.stages(stages, Stage::queue, Stage::skew);
  rank.ends("pulls_total", "Pulls by how they ended", pulls);
  rank.counter("fragments_total", "Contiguous pieces of memory written", fragments);
  rank.paths("path_sessions_total", "Sessions made, by path", sessions);
  rank.paths("path_bytes_total", "KV bytes landed, by path", bytes);
  constexpr std::string_view kFallback = "Sessions whose bytes take a slower way than was hoped";
  rank.counter("fallback_sessions_total", kFallback, not_mapped, {{"fallback", "not_mapped"}});
  rank.counter("fallback_sessions_total", kFallback, emulated, {{"fallback", "emulated"}});
  rank.gauge("landing_bytes", "KV bytes in landing slots", landing_bytes);
  rank.gauge("landing_slots", "Landing slots", std::uint64_t{landing_slots});
  rank.refused(refused);
  for (const SourceMetrics& source : merged(sources)) append(rank, source);
}

}  // namespace kvshard
