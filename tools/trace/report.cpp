#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "support/text.hpp"
#include "trace/summary.hpp"

namespace kvshard::trace {
namespace {

using Json = nlohmann::json;
using tools::gigabytes_per_s;
using tools::human_bytes;
using tools::human_time;

std::string percent(double share) {
  return fmt::format("{:.0f} %", 100 * share);
}
double on_wire_gigabytes_per_s(const SourceSummary& source) {
  return gigabytes_per_s(source.bytes, std::llround(source.on_wire_ns));
}

// By how much each stage counts, the largest first.
auto by_share(const Shares& shares) {
  auto stages = kAllStages;
  std::ranges::stable_sort(stages, std::ranges::greater{},
                           [&](Stage stage) { return shares[stage]; });
  return stages;
}

std::string about_wait(const Summary& summary) {
  const auto late = std::ranges::max_element(summary.sources, {}, &SourceSummary::waited_for_ns);
  if (late == summary.sources.end()) return "no prefill rank sent anything";
  std::int64_t others_ns = 0;
  for (const SourceSummary& source : summary.sources)
    if (&source != &*late) others_ns = std::max(others_ns, source.wait.p50_ns);
  const std::string piece = fmt::format("first piece {} after PULL", human_time(late->wait.p50_ns));
  if (summary.sources.size() > 1 && late->wait.p50_ns > others_ns + others_ns / 4)
    return fmt::format("prefill rank {} is late ({}, the others' within {}): look at that rank",
                       late->rank, piece, human_time(others_ns));
  return fmt::format(
      "prefill has nothing to send yet ({}): it computes, or is asked early. Publish smaller "
      "chunks, sooner",
      piece);
}

// Of the stages of pieces that follow each other on the way: whether more of them could run at once.
std::string about_turns(const Summary& summary) {
  const double wire = summary.stages[Stage::wire].total_ns;
  const double copies =
      summary.stages[Stage::gather].total_ns + summary.stages[Stage::scatter].total_ns;
  if (copies < 0.2 * wire || summary.overlap >= 0.5) return "";
  std::string text =
      fmt::format("; wire and copies take turns (overlap {:.2f}): ", summary.overlap);
  if (summary.stages[Stage::landing].total_ns > 0.2 * wire)
    return text + "more landing_slots, since pieces wait for them";
  if (summary.stages[Stage::slot].total_ns > 0.2 * wire)
    return text + "more staging slots on prefill ranks, since pieces wait for them";
  return text + "a larger window, or smaller slots";
}

std::string about_wire(const Summary& summary) {
  std::string text = fmt::format("{:.2f} GB/s with {:.1f} pieces on it at once",
                                 gigabytes_per_s(summary.bytes, std::llround(summary.on_wire_ns)),
                                 summary.pieces_on_wire);
  const SourceSummary *slow = nullptr, *fast = nullptr;
  for (const SourceSummary& source : summary.sources) {
    const double rate = on_wire_gigabytes_per_s(source);
    if (source.pieces == 0) continue;
    if (slow == nullptr || rate < on_wire_gigabytes_per_s(*slow)) slow = &source;
    if (fast == nullptr || rate > on_wire_gigabytes_per_s(*fast)) fast = &source;
  }
  if (slow != fast && on_wire_gigabytes_per_s(*fast) > 1.5 * on_wire_gigabytes_per_s(*slow))
    text += fmt::format("; prefill rank {} sends {:.2f} GB/s, rank {} sends {:.2f}", slow->rank,
                        on_wire_gigabytes_per_s(*slow), fast->rank, on_wire_gigabytes_per_s(*fast));
  return text + about_turns(summary);
}

std::string advice(const Summary& summary, Stage stage) {
  switch (stage) {
    case Stage::queue:
      return "the decode rank's progress thread is busy: fewer pulls at once, or a core of its own";
    case Stage::connect:
      return "sessions are made on the way: connect() groups before the first pull";
    case Stage::wait:
      return about_wait(summary);
    case Stage::landing:
      return "pieces wait for landing slots: more landing_slots, or larger ones";
    case Stage::wire:
      return about_wire(summary);
    case Stage::scatter:
      return "copies into pages: larger pages or a less scattered pool" + about_turns(summary);
    case Stage::commit:
      return "prefill ranks answer COMMIT late: their progress threads are busy";
    case Stage::room:
      return "rooms are opened after they are asked for: open() before the decode rank hears of "
             "them";
    case Stage::slot:
      return "pieces wait for staging slots on prefill ranks: more slots, or larger ones";
    case Stage::gather:
      return "copies out of pages, or their chunk's event: larger pages or a less scattered pool" +
             about_turns(summary);
    case Stage::exposed:
      return "pieces are ready, and fetched late: a larger window, or larger slots";
    default:
      return "";  // pull, skew and lease contain the others, and have no time of their own
  }
}

Json to_json(const Times& times) {
  return {{"count", times.count},
          {"p50_ns", times.p50_ns},
          {"p99_ns", times.p99_ns},
          {"max_ns", times.max_ns},
          {"total_ns", times.total_ns}};
}
Json to_json(const Shares& shares) {
  Json json = Json::object();
  for (const Stage stage : kAllStages)
    if (shares[stage] > 0) json[std::string{to_string(stage)}] = shares[stage];
  return json;
}

std::string stage_table(const Summary& summary) {
  std::string text = fmt::format("{:<8}{:>9}{:>12}{:>12}{:>12}{:>12}{:>12}\n", "stage", "count",
                                 "p50", "p99", "max", "total", "pulls' time");
  for (const Stage stage : kAllStages) {
    const Times& times = summary.stages[stage];
    if (times.count == 0) continue;
    text += fmt::format(
        "{:<8}{:>9}{:>12}{:>12}{:>12}{:>12}{:>12}\n", to_string(stage), times.count,
        human_time(times.p50_ns), human_time(times.p99_ns), human_time(times.max_ns),
        human_time(std::llround(times.total_ns)),
        summary.spent[stage] > 0 ? fmt::format("{:.1f} %", 100 * summary.spent[stage]) : "");
  }
  return text;
}

std::string source_table(const Summary& summary) {
  std::string text =
      fmt::format("\n{:<8}{:>9}{:>12}{:>12}{:>12}{:>12}{:>12}{:>12}{:>9}\n", "source", "pieces",
                  "bytes", "wire p50", "p99", "GB/s on it", "wait p50", "p99", "slowest");
  for (const SourceSummary& source : summary.sources)
    text +=
        fmt::format("{:<8}{:>9}{:>12}{:>12}{:>12}{:>12.2f}{:>12}{:>12}{:>9}\n", source.rank,
                    source.pieces, human_bytes(source.bytes), human_time(source.wire.p50_ns),
                    human_time(source.wire.p99_ns), on_wire_gigabytes_per_s(source),
                    human_time(source.wait.p50_ns), human_time(source.wait.p99_ns), source.slowest);
  return text;
}

std::string lane_table(const Summary& summary) {
  std::string text = "\nslots, by what they do while there is a pull\n";
  for (const RankSummary& rank : summary.ranks) {
    text += fmt::format("{:<16}{:>3} lanes:", rank.name, rank.lanes.size());
    double idle = 1;
    for (const Stage stage : {Stage::gather, Stage::exposed, Stage::wire, Stage::scatter}) {
      const double busy = rank.busy[stage];
      idle -= busy;
      if (busy > 0) text += fmt::format("  {} {}", to_string(stage), percent(busy));
    }
    text += fmt::format("  free {}\n", percent(std::max(idle, 0.0)));
  }
  return text;
}

std::string pull_table(const Summary& summary) {
  std::string text = "\nslowest pulls\n";
  for (const PullSummary& pull : summary.slowest) {
    text += fmt::format("room {}, pull {} of {}: {}, {}", pull.room, pull.pull, pull.rank,
                        human_time(pull.ns), human_bytes(pull.bytes));
    if (pull.slowest) text += fmt::format(", prefill rank {} last", *pull.slowest);
    text += ":";
    for (const Stage stage : by_share(pull.spent))
      if (pull.spent[stage] >= 0.005)
        text += fmt::format(" {} {}", to_string(stage), percent(pull.spent[stage]));
    text += "\n";
  }
  return text;
}

}  // namespace

std::string verdict(const Summary& summary) {
  if (summary.pulls == 0) return "no pull here: give the decode ranks' files, too";
  const Stage stage = by_share(summary.spent)[0];
  return fmt::format("{} decides, {} of the pulls' time: {}", to_string(stage),
                     percent(summary.spent[stage]), advice(summary, stage));
}

std::string to_text(const Summary& summary) {
  std::string text = fmt::format("{} processes, {} rooms, {} pulls within {}, {}\n",
                                 summary.processes, summary.rooms, summary.pulls,
                                 human_time(summary.span_ns), human_bytes(summary.bytes));
  if (summary.overwritten > 0)
    text += fmt::format(
        "{} spans had to give way to newer ones: of the oldest pulls there is a part only\n",
        summary.overwritten);
  text += "\n" + stage_table(summary);
  if (!summary.sources.empty()) text += source_table(summary);
  if (!summary.ranks.empty()) text += lane_table(summary);
  if (summary.bytes > 0)
    text += fmt::format(
        "\noverlap  {:.2f} of the time on the wire, other pieces of the pull are gathered or "
        "scattered\n",
        summary.overlap);
  text += fmt::format("verdict  {}\n", verdict(summary));
  if (!summary.slowest.empty()) text += pull_table(summary);
  return text;
}

nlohmann::json to_json(const Summary& summary) {
  Json json{{"processes", summary.processes},   {"rooms", summary.rooms},
            {"pulls", summary.pulls},           {"bytes", summary.bytes},
            {"span_ns", summary.span_ns},       {"overwritten", summary.overwritten},
            {"overlap", summary.overlap},       {"pieces_on_wire", summary.pieces_on_wire},
            {"on_wire_ns", summary.on_wire_ns}, {"share_of_pulls", to_json(summary.spent)},
            {"verdict", verdict(summary)},      {"stages", Json::object()},
            {"sources", Json::array()},         {"ranks", Json::array()},
            {"slowest", Json::array()}};
  for (const Stage stage : kAllStages)
    if (summary.stages[stage].count > 0)
      json["stages"][std::string{to_string(stage)}] = to_json(summary.stages[stage]);
  for (const SourceSummary& source : summary.sources)
    json["sources"].push_back({{"rank", source.rank},
                               {"pieces", source.pieces},
                               {"bytes", source.bytes},
                               {"wire", to_json(source.wire)},
                               {"wait", to_json(source.wait)},
                               {"on_wire_ns", source.on_wire_ns},
                               {"gigabytes_per_s", on_wire_gigabytes_per_s(source)},
                               {"slowest", source.slowest},
                               {"waited_for_ns", source.waited_for_ns}});
  for (const RankSummary& rank : summary.ranks) {
    Json lanes = Json::array();
    for (const LaneSummary& lane : rank.lanes)
      lanes.push_back({{"name", lane.name}, {"busy", to_json(lane.busy)}});
    json["ranks"].push_back(
        {{"name", rank.name}, {"busy", to_json(rank.busy)}, {"lanes", std::move(lanes)}});
  }
  for (const PullSummary& pull : summary.slowest) {
    json["slowest"].push_back({{"rank", pull.rank},
                               {"room", std::to_string(pull.room)},
                               {"pull", std::to_string(pull.pull)},
                               {"ns", pull.ns},
                               {"bytes", pull.bytes},
                               {"share", to_json(pull.spent)}});
    if (pull.slowest) json["slowest"].back()["slowest_source"] = *pull.slowest;
  }
  return json;
}

}  // namespace kvshard::trace
