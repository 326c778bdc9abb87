#include "trace/summary.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <span>
#include <tuple>
#include <utility>

namespace kvshard::trace {
namespace {

using Spans = std::span<const Span* const>;

/// Intervals of time, none of which touch, in order.
class Intervals {
 public:
  Intervals() = default;
  explicit Intervals(std::vector<std::pair<std::int64_t, std::int64_t>> any) {
    std::ranges::sort(any);
    for (const auto& [begin, end] : any) {
      if (united_.empty() || begin > united_.back().second) {
        united_.emplace_back(begin, end);
      } else {
        united_.back().second = std::max(united_.back().second, end);
      }
    }
  }
  [[nodiscard]] double length() const {
    double sum = 0;
    for (const auto& [begin, end] : united_) sum += static_cast<double>(end - begin);
    return sum;
  }
  [[nodiscard]] double common(const Intervals& other) const {
    double sum = 0;
    for (auto a = united_.begin(), b = other.united_.begin();
         a != united_.end() && b != other.united_.end();) {
      sum += static_cast<double>(
          std::max<std::int64_t>(0, std::min(a->second, b->second) - std::max(a->first, b->first)));
      ++(a->second < b->second ? a : b);
    }
    return sum;
  }

 private:
  std::vector<std::pair<std::int64_t, std::int64_t>> united_;
};

template <typename Which>
Intervals intervals(Spans spans, Which which) {
  std::vector<std::pair<std::int64_t, std::int64_t>> all;
  for (const Span* span : spans)
    if (which(*span)) all.emplace_back(span->begin_ns, span->end_ns);
  return Intervals{std::move(all)};
}

bool is(const Span& span, Stage stage) {
  return span.stage == stage;
}

// The first of these that runs is what a pull's time is spent on.
constexpr std::array kPrecedence{Stage::commit,  Stage::wire,   Stage::scatter, Stage::landing,
                                 Stage::exposed, Stage::gather, Stage::slot,    Stage::queue,
                                 Stage::connect, Stage::room};

// Nanoseconds that `pull` spent on each stage.
Shares time_spent(const Span& pull, Spans spans, std::optional<std::uint32_t> source) {
  std::vector<std::tuple<std::int64_t, Stage, int>> edges;
  const auto add = [&](Stage stage, std::int64_t begin, std::int64_t end) {
    begin = std::max(begin, pull.begin_ns);
    end = std::min(end, pull.end_ns);
    if (begin >= end) return;
    edges.emplace_back(begin, stage, 1);
    edges.emplace_back(end, stage, -1);
  };
  for (const Span* span : spans) {
    const bool of_source = of_a_piece(span->stage) || on_prefill(span->stage);
    if (of_source && source && span->source != *source) continue;
    add(span->stage, span->begin_ns, span->end_ns);
    if (is(*span, Stage::wire))
      add(Stage::landing, span->begin_ns - span->waited_ns, span->begin_ns);
    if (is(*span, Stage::gather))
      add(Stage::slot, span->begin_ns - span->waited_ns, span->begin_ns);
  }
  edges.emplace_back(pull.end_ns, Stage::pull, 0);
  std::ranges::sort(edges);
  Shares spent;
  PerStage<int> running;
  std::int64_t before = pull.begin_ns;
  for (const auto& [time, stage, change] : edges) {
    const auto* const first =
        std::ranges::find_if(kPrecedence, [&](Stage each) { return running[each] > 0; });
    const Stage on = first == kPrecedence.end() ? Stage::wait : *first;
    spent[on] += static_cast<double>(time - before);
    running[stage] += change;
    before = time;
  }
  return spent;
}

class Summarizer {
 public:
  Summarizer(const Trace& trace, std::optional<std::uint64_t> room) : trace_{trace} {
    for (const Span& span : trace.spans)
      if (!room || span.room == *room) spans_.push_back(&span);
    std::ranges::sort(spans_, [](const Span* a, const Span* b) {
      return std::tie(a->room, a->pull, a->begin_ns) < std::tie(b->room, b->pull, b->begin_ns);
    });
  }

  Summary summarize() {
    summary_.processes = trace_.processes.size();
    summary_.overwritten = trace_.overwritten;
    if (spans_.empty()) return std::move(summary_);
    add_stages();
    add_pulls();
    add_sources();
    add_lanes();
    return std::move(summary_);
  }

 private:
  void add_stages() {
    PerStage<std::vector<std::int64_t>> times;
    std::set<std::uint64_t> rooms;
    std::int64_t begin = INT64_MAX, end = 0;
    for (const Span* span : spans_) {
      times[span->stage].push_back(span->ns());
      if (is(*span, Stage::wire)) times[Stage::landing].push_back(span->waited_ns);
      if (is(*span, Stage::gather)) times[Stage::slot].push_back(span->waited_ns);
      if (is(*span, Stage::wire)) summary_.bytes += span->bytes;
      rooms.insert(span->room);
      begin = std::min(begin, span->begin_ns);
      end = std::max(end, span->end_ns);
    }
    for (const Stage stage : kAllStages)
      summary_.stages[stage] = Times::of(std::move(times[stage]));
    summary_.on_wire_ns =
        intervals(spans_, [](const Span& span) { return is(span, Stage::wire); }).length();
    summary_.rooms = rooms.size();
    summary_.span_ns = end - begin;
  }

  void add_pulls() {
    double all_ns = 0, on_wire = 0, overlapped = 0, wire = 0;
    for (auto first = spans_.cbegin(); first != spans_.cend();) {
      const auto last = std::find_if(first, spans_.cend(), [&](const Span* span) {
        return span->room != (*first)->room || span->pull != (*first)->pull;
      });
      const Spans group{first, last};
      first = last;
      for (const Span* pull : group) {
        if (!is(*pull, Stage::pull)) continue;
        // Decode ranks pull the same room each under a number of its own, which may be the same; a
        // prefill rank has a lease for each.
        std::vector<const Span*> own;
        std::set<std::pair<std::uint32_t, std::uint64_t>> leases;
        for (const Span* span : group)
          if (span->rank == pull->rank) leases.emplace(span->source, span->lease);
        std::ranges::copy_if(group, std::back_inserter(own), [&](const Span* span) {
          if (!on_prefill(span->stage)) return span->rank == pull->rank;
          return span->lease == 0 || leases.contains({span->source, span->lease});
        });
        add_pull(*pull, own);
        all_ns += static_cast<double>(pull->ns());
        const auto wires = intervals(own, [](const Span& s) { return is(s, Stage::wire); });
        const auto copies = intervals(
            own, [](const Span& s) { return is(s, Stage::gather) || is(s, Stage::scatter); });
        on_wire += wires.length();
        overlapped += wires.common(copies);
        for (const Span* span : own)
          if (is(*span, Stage::wire)) wire += static_cast<double>(span->ns());
      }
    }
    for (double& share : summary_.spent.all) share /= std::max(all_ns, 1.0);
    if (on_wire > 0) {
      summary_.overlap = overlapped / on_wire;
      summary_.pieces_on_wire = wire / on_wire;
    }
    std::ranges::stable_sort(summary_.slowest, std::ranges::greater{}, &PullSummary::ns);
    if (summary_.slowest.size() > Summary::kSlowest) summary_.slowest.resize(Summary::kSlowest);
  }

  void add_pull(const Span& pull, Spans own) {
    ++summary_.pulls;
    std::map<std::uint32_t, std::int64_t> done;  // by source
    PullSummary row{.rank = full_name(trace_, pull.rank),
                    .room = pull.room,
                    .pull = pull.pull,
                    .ns = pull.ns(),
                    .slowest = {}};
    for (const Span* span : own) {
      if (!is(*span, Stage::wire) && !is(*span, Stage::scatter)) continue;
      std::int64_t& end = done[span->source];
      end = std::max(end, span->end_ns);
      if (is(*span, Stage::wire)) row.bytes += span->bytes;
    }
    const auto slowest =
        std::ranges::max_element(done, {}, [](const auto& each) { return each.second; });
    if (slowest != done.end()) row.slowest = slowest->first;
    row.spent = time_spent(pull, own, row.slowest);
    for (const Stage stage : kAllStages) summary_.spent[stage] += row.spent[stage];
    if (row.slowest) {
      SourceSummary& source = sources_[*row.slowest];
      source.slowest += done.size() > 1 ? 1 : 0;
      source.waited_for_ns += row.spent[Stage::wait];
    }
    for (double& share : row.spent.all) share /= std::max(static_cast<double>(row.ns), 1.0);
    // Keeps the list short while there are more to come.
    summary_.slowest.push_back(std::move(row));
    if (summary_.slowest.size() < 64) return;
    std::ranges::stable_sort(summary_.slowest, std::ranges::greater{}, &PullSummary::ns);
    summary_.slowest.resize(Summary::kSlowest);
  }

  void add_sources() {
    std::map<std::uint32_t, std::vector<const Span*>> wires, waits;
    for (const Span* span : spans_) {
      if (is(*span, Stage::wire)) wires[span->source].push_back(span);
      if (is(*span, Stage::wait)) waits[span->source].push_back(span);
    }
    const auto times = [](Spans spans) {
      std::vector<std::int64_t> ns;
      for (const Span* span : spans) ns.push_back(span->ns());
      return Times::of(std::move(ns));
    };
    for (const auto& [rank, spans] : waits) sources_[rank].wait = times(spans);
    for (const auto& [rank, spans] : wires) {
      SourceSummary& source = sources_[rank];
      source.wire = times(spans);
      source.pieces = spans.size();
      for (const Span* span : spans) source.bytes += span->bytes;
      source.on_wire_ns = intervals(spans, [](const Span&) { return true; }).length();
    }
    for (auto& [rank, source] : sources_) {
      source.rank = rank;
      summary_.sources.push_back(source);
    }
  }

  void add_lanes() {
    Intervals pulls = intervals(spans_, [](const Span& span) { return is(span, Stage::pull); });
    if (pulls.length() == 0) pulls = intervals(spans_, [](const Span&) { return true; });
    std::map<std::pair<std::size_t, std::size_t>, std::vector<const Span*>> lanes;  // rank and lane
    for (const Span* span : spans_)
      if (of_a_piece(span->stage)) lanes[{span->rank, span->lane}].push_back(span);
    std::map<RankOrder, RankSummary> ranks;
    for (const auto& [rank_and_lane, spans] : lanes) {
      RankSummary& rank = ranks[order_of(trace_, *spans[0])];
      LaneSummary lane{.name = trace_.lanes[rank_and_lane.second].name};
      for (const Stage stage : {Stage::gather, Stage::exposed, Stage::wire, Stage::scatter}) {
        const auto busy = intervals(spans, [&](const Span& span) { return is(span, stage); });
        const double share = busy.common(pulls) / std::max(pulls.length(), 1.0);
        lane.busy[stage] = share;
        rank.busy[stage] += share;
      }
      rank.lanes.push_back(std::move(lane));
    }
    for (auto& [order, rank] : ranks) {
      rank.name = full_name(trace_, order.rank);
      for (double& share : rank.busy.all) share /= static_cast<double>(rank.lanes.size());
      summary_.ranks.push_back(std::move(rank));
    }
  }

  const Trace& trace_;
  std::vector<const Span*> spans_;  // by room and pull
  std::map<std::uint32_t, SourceSummary> sources_;
  Summary summary_;
};

}  // namespace

Times Times::of(std::vector<std::int64_t> ns) {
  if (ns.empty()) return {};
  std::ranges::sort(ns);
  const auto quantile = [&](double share) {
    const auto rank = static_cast<std::size_t>(std::ceil(share * static_cast<double>(ns.size())));
    return ns[rank - 1];
  };
  Times times{
      .count = ns.size(), .p50_ns = quantile(0.50), .p99_ns = quantile(0.99), .max_ns = ns.back()};
  for (const std::int64_t each : ns) times.total_ns += static_cast<double>(each);
  return times;
}

Summary summarize(const Trace& trace, std::optional<std::uint64_t> room) {
  return Summarizer{trace, room}.summarize();
}

}  // namespace kvshard::trace
