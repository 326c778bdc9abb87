#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "kvshard/metrics.hpp"
#include "kvshard/result.hpp"

namespace kvshard::trace {

/// What one trace file holds, or several of one host: see docs/tracing.md. Times are nanoseconds of the
/// host's monotonic clock.
struct Process {
  std::uint64_t pid{0};
  std::string name;
};
struct Rank {
  std::size_t process{0};  ///< index into Trace::processes
  std::string name;
};
struct Lane {
  std::size_t process{0};
  std::uint64_t tid{0};
  std::string name;
};
struct Span {
  Stage stage{};
  std::uint32_t source{0};       ///< the shard rank that the bytes come from
  std::size_t rank{0}, lane{0};  ///< indices into Trace
  std::uint64_t room{0}, pull{0};
  std::uint64_t lease{0};  ///< as the source numbers it; 0: none
  std::int64_t begin_ns{0}, end_ns{0};
  // Of a piece:
  std::uint64_t piece{0}, bytes{0};
  std::int64_t waited_ns{0};  ///< for its slot, before

  [[nodiscard]] std::int64_t ns() const { return end_ns - begin_ns; }
};
struct Trace {
  std::string boot_id;
  std::uint64_t overwritten{0};
  std::vector<Process> processes;
  std::vector<Rank> ranks;
  std::vector<Lane> lanes;
  std::vector<Span> spans;
};

/// One T for each stage.
template <typename T>
struct PerStage {
  std::array<T, kStages> all{};

  T& operator[](Stage stage) { return all[static_cast<std::size_t>(stage)]; }
  const T& operator[](Stage stage) const { return all[static_cast<std::size_t>(stage)]; }
};
inline constexpr std::array kAllStages{
    Stage::queue,   Stage::connect, Stage::wait,    Stage::landing, Stage::wire,
    Stage::scatter, Stage::commit,  Stage::pull,    Stage::skew,    Stage::room,
    Stage::slot,    Stage::gather,  Stage::exposed, Stage::lease};
static_assert(kAllStages.size() == kStages);

/// Stages of a piece, which stand in a slot's lane; the others are a request's.
inline bool of_a_piece(Stage stage) {
  return stage == Stage::gather || stage == Stage::exposed || stage == Stage::wire ||
         stage == Stage::scatter;
}
inline bool on_prefill(Stage stage) {
  return stage >= Stage::room;
}

/// The rank's name among those of all processes: "decode 1", "engine: prefill 0".
std::string full_name(const Trace& trace, std::size_t rank);

/// The order in which ranks are shown: prefill first, then by name, 2 before 10.
struct RankOrder {
  bool decode{false};
  std::size_t length{0};
  std::string name;
  std::size_t rank{0};

  bool operator<(const RankOrder& other) const {
    const auto key = [](const RankOrder& order) {
      return std::tie(order.decode, order.length, order.name, order.rank);
    };
    return key(*this) < key(other);
  }
};
/// Of the rank that `span` is on.
RankOrder order_of(const Trace& trace, const Span& span);

/// Errors: invalid_argument naming the event, counted from 0, the field, and what is wrong with it.
Result<Trace> parse_trace(std::string_view text);
/// As the library's Tracer writes it, but of all processes.
std::string write_trace(const Trace& trace);

/// Reads files and lays them side by side.
/// Errors: those of parse_trace(), naming the file; invalid_argument for what cannot be read, for files that
///         hold more than this program takes, and for files of different hosts or boots.
Result<Trace> read_traces(const std::vector<std::string>& files);

/// Makes one file of those that processes of ours wrote, and removes them.
Status merge_files(const std::vector<std::string>& files, const std::string& to);

}  // namespace kvshard::trace
