#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "trace/trace.hpp"

namespace kvshard::trace {

/// Times of one thing.
struct Times {
  std::uint64_t count{0};
  std::int64_t p50_ns{0}, p99_ns{0}, max_ns{0};
  double total_ns{0};

  static Times of(std::vector<std::int64_t> ns);
};

/// Shares of time, 0 to 1.
using Shares = PerStage<double>;

struct SourceSummary {
  std::uint32_t rank{0};
  std::uint64_t pieces{0}, bytes{0};
  Times wire, wait;
  double on_wire_ns{0};      ///< during which a piece of it was
  std::uint64_t slowest{0};  ///< pulls of several ranks that it was the last of
  double waited_for_ns{0};   ///< of pulls that it was the last of
};
struct LaneSummary {
  std::string name;
  Shares busy{};  ///< of the time in which there was a pull
};
struct RankSummary {
  std::string name;
  Shares busy{};  ///< mean of its lanes
  std::vector<LaneSummary> lanes;
};
struct PullSummary {
  std::string rank;
  std::uint64_t room{0}, pull{0}, bytes{0};
  std::int64_t ns{0};
  std::optional<std::uint32_t>
      slowest;  ///< the source whose last byte came last; none without bytes
  Shares spent{};
};

struct Summary {
  std::size_t processes{0}, rooms{0}, pulls{0};
  std::uint64_t bytes{0}, overwritten{0};
  std::int64_t span_ns{0};
  PerStage<Times> stages;
  Shares spent{};            ///< of the pulls' time, all together 1; see summarize()
  double overlap{0};         ///< of wire time: the share with a gather or scatter of the same pull
  double pieces_on_wire{0};  ///< mean, of a pull that has one there
  double on_wire_ns{0};      ///< during which any piece was
  std::vector<SourceSummary> sources;  ///< by rank
  std::vector<RankSummary> ranks;      ///< that have lanes; prefill first
  std::vector<PullSummary> slowest;    ///< pulls, at most `kSlowest`
  static constexpr std::size_t kSlowest = 5;
};

/// What the spans of all rooms, or of `room` only, come to.
///
/// Each moment of a pull is spent on one stage: on `commit` once the last byte has landed; before, of what happens to the pieces of its slowest source, on
/// that nearest to the pages (scatter behind wire, since the wire is what should be busy), else on a stage of the request; on
/// `wait` when there is nothing of either, since then prefill has no piece to send yet.
/// Cost: O(n log n) in the number of spans.
Summary summarize(const Trace& trace, std::optional<std::uint64_t> room = {});

/// Which stage decided, and what to change.
std::string verdict(const Summary& summary);

std::string to_text(const Summary& summary);
nlohmann::json to_json(const Summary& summary);

}  // namespace kvshard::trace
