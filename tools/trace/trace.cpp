#include "trace/trace.hpp"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/try.hpp"
#include "support/text.hpp"

namespace kvshard::trace {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kMaxFileBytes = 1U << 30;
constexpr std::size_t kMaxSpans = 1U << 23;
constexpr double kMaxMicroseconds = 1e15;  // thirty years
constexpr std::uint64_t kMaxBytes = std::uint64_t{1}
                                    << 40;  // of a piece: a sum of all stays in 64 bits

// The fields of one JSON object, each checked when it is taken. `where` begins what is said about it.
class Fields {
 public:
  Fields(const Json& object, std::string where) : object_{object}, where_{std::move(where)} {}

  [[nodiscard]] Error bad(std::string_view name, std::string_view why) const {
    return {ErrorCode::invalid_argument, fmt::format("{}{}: {}", where_, name, why)};
  }
  [[nodiscard]] Result<Fields> object(const char* name) const {
    const auto at = object_.find(name);
    if (at == object_.end() || !at->is_object()) return bad(name, "not an object");
    return Fields{*at, fmt::format("{}{}.", where_, name)};
  }
  [[nodiscard]] Result<std::string> text(const char* name) const {
    const auto at = object_.find(name);
    if (at == object_.end() || !at->is_string()) return bad(name, "not a string");
    return at->get<std::string>();
  }
  [[nodiscard]] Result<std::uint64_t> whole(const char* name, std::uint64_t most) const {
    const auto at = object_.find(name);
    if (at == object_.end() || !at->is_number_unsigned())
      return bad(name, "not a whole number from 0 up");
    const auto value = at->get<std::uint64_t>();
    if (value > most) return bad(name, fmt::format("{} is above {}", value, most));
    return value;
  }
  [[nodiscard]] Result<std::uint64_t> decimal(const char* name) const {
    KVSHARD_TRY(const std::string digits, text(name));
    std::uint64_t value = 0;
    const char* const end = digits.data() + digits.size();
    const auto [at, error] = std::from_chars(digits.data(), end, value);
    if (error != std::errc{} || at != end)
      return bad(name, "not a decimal number of at most 64 bits");
    return value;
  }
  [[nodiscard]] Result<std::int64_t> nanoseconds(const char* name) const {
    const auto at = object_.find(name);
    if (at == object_.end() || !at->is_number()) return bad(name, "not a number");
    const auto us = at->get<double>();
    if (!(us >= 0 && us <= kMaxMicroseconds))
      return bad(name, fmt::format("{:g} us is not within 0 and {:g}", us, kMaxMicroseconds));
    return std::llround(us * 1e3);
  }

 private:
  const Json& object_;
  std::string where_;
};

// Takes the events as the parser comes by them, so that a large file is never a tree in memory.
class Parser {
 public:
  Result<Trace> parse(std::string_view text) {
    bool in_events = false, any = false;
    const auto take_events = [&](int depth, Json::parse_event_t event, Json& value) {
      if (depth == 1 && event == Json::parse_event_t::key)
        any |= in_events = value == "traceEvents";
      if (depth != 2 || event != Json::parse_event_t::object_end || !in_events) return true;
      if (status_) status_ = take(value);
      ++event_;
      return false;
    };
    const Json json = Json::parse(text, take_events, false);
    KVSHARD_TRY(status_);
    if (!json.is_object())
      return Error{ErrorCode::invalid_argument,
                   fmt::format("not a JSON object: wrong behind {} events", event_)};
    const Fields file{json, ""};
    if (!any || json["traceEvents"] != Json::array())
      return file.bad("traceEvents", "not an array of objects");
    if (begun_) return file.bad("traceEvents", "the last b has no e");
    KVSHARD_TRY(const Fields other, file.object("otherData"));
    KVSHARD_TRY(const std::uint64_t version, other.whole("version", UINT64_MAX));
    if (version != 1) return other.bad("version", fmt::format("{}, this program reads 1", version));
    KVSHARD_TRY(trace_.boot_id, other.text("boot_id"));
    KVSHARD_TRY(trace_.overwritten, other.whole("overwritten", std::uint64_t{1} << 60));
    return std::move(trace_);
  }

 private:
  Status take(const Json& json) {
    const Fields event{json, fmt::format("event {}: ", event_)};
    KVSHARD_TRY(const std::string phase, event.text("ph"));
    KVSHARD_TRY(const std::string name, event.text("name"));
    KVSHARD_TRY(const std::uint64_t pid, event.whole("pid", UINT32_MAX));
    KVSHARD_TRY(const std::uint64_t tid, event.whole("tid", UINT32_MAX));
    const std::size_t process = process_of(pid);
    if (begun_) return end(event, phase, name);
    if (phase == "M") {
      if (name != "process_name" && name != "thread_name") return {};  // for viewers only
      KVSHARD_TRY(const Fields args, event.object("args"));
      KVSHARD_TRY(const std::string value, args.text("name"));
      (name == "process_name" ? trace_.processes[process].name
                              : trace_.lanes[lane_of(process, tid)].name) = value;
      return {};
    }
    if (phase != "X" && phase != "b") return event.bad("ph", phase + " is not M, X, or b and e");
    Span span;
    KVSHARD_TRY(span.stage, stage_of(event, name));
    if (of_a_piece(span.stage) != (phase == "X"))
      return event.bad("ph", fmt::format("a {} is not an {}", name, phase));
    if (trace_.spans.size() == kMaxSpans)
      return event.bad("ph", fmt::format("more than {} spans", kMaxSpans));
    KVSHARD_TRY(span.begin_ns, event.nanoseconds("ts"));
    KVSHARD_TRY(const Fields args, event.object("args"));
    KVSHARD_TRY(const std::string rank, args.text("rank"));
    KVSHARD_TRY(span.room, args.decimal("room"));
    KVSHARD_TRY(span.pull, args.decimal("pull"));
    KVSHARD_TRY(const std::uint64_t source, args.whole("source", UINT32_MAX));
    span.source = static_cast<std::uint32_t>(source);
    KVSHARD_TRY(span.lease, args.decimal("lease"));
    span.rank = rank_of(process, rank);
    span.lane = lane_of(process, tid);
    if (phase == "b") {
      KVSHARD_TRY(begun_id_, id(event));
      begun_ = span;
      return {};
    }
    KVSHARD_TRY(const std::int64_t duration, event.nanoseconds("dur"));
    span.end_ns = span.begin_ns + duration;
    KVSHARD_TRY(span.piece, args.whole("piece", UINT64_MAX));
    KVSHARD_TRY(span.bytes, args.whole("bytes", kMaxBytes));
    KVSHARD_TRY(span.waited_ns, args.nanoseconds("waited_us"));
    trace_.spans.push_back(span);
    return {};
  }

  Status end(const Fields& event, const std::string& phase, const std::string& name) {
    if (phase != "e" || name != to_string(begun_->stage))
      return event.bad("ph", fmt::format("{} {} follows the b of a {}, whose e was to come", phase,
                                         name, to_string(begun_->stage)));
    KVSHARD_TRY(const std::string its_id, id(event));
    if (its_id != begun_id_) return event.bad("id2.local", "not that of its b: " + begun_id_);
    KVSHARD_TRY(begun_->end_ns, event.nanoseconds("ts"));
    if (begun_->end_ns < begun_->begin_ns) return event.bad("ts", "before that of its b");
    trace_.spans.push_back(*begun_);
    begun_.reset();
    return {};
  }

  static Result<std::string> id(const Fields& event) {
    KVSHARD_TRY(const Fields id, event.object("id2"));
    return id.text("local");
  }
  static Result<Stage> stage_of(const Fields& event, const std::string& name) {
    for (const Stage stage : kAllStages) {
      const bool recorded = stage != Stage::landing && stage != Stage::slot;  // those are waited_us
      if (recorded && name == to_string(stage)) return stage;
    }
    return event.bad("name", name + " is not a stage that has spans");
  }

  std::size_t process_of(std::uint64_t pid) {
    const auto [at, added] = processes_.try_emplace(pid, trace_.processes.size());
    if (added) trace_.processes.push_back({.pid = pid, .name = fmt::format("process {}", pid)});
    return at->second;
  }
  std::size_t rank_of(std::size_t process, const std::string& name) {
    const auto [at, added] = ranks_.try_emplace({process, name}, trace_.ranks.size());
    if (added) trace_.ranks.push_back({.process = process, .name = name});
    return at->second;
  }
  std::size_t lane_of(std::size_t process, std::uint64_t tid) {
    const auto [at, added] = lanes_.try_emplace({process, tid}, trace_.lanes.size());
    if (added)
      trace_.lanes.push_back({.process = process, .tid = tid, .name = fmt::format("lane {}", tid)});
    return at->second;
  }

  Trace trace_;
  Status status_;
  std::size_t event_{0};
  std::optional<Span> begun_;  // a b whose e comes next
  std::string begun_id_;
  std::map<std::uint64_t, std::size_t> processes_;
  std::map<std::pair<std::size_t, std::string>, std::size_t> ranks_;
  std::map<std::pair<std::size_t, std::uint64_t>, std::size_t> lanes_;
};

Result<std::string> read_file(const std::string& path) {
  std::ifstream file{path, std::ios::binary};
  std::error_code error;
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  if (!file || error)
    return Error{ErrorCode::invalid_argument, fmt::format("{} cannot be read", path)};
  if (size > kMaxFileBytes)
    return Error{ErrorCode::invalid_argument,
                 fmt::format("{} has {} bytes, of at most {}", path, size, kMaxFileBytes)};
  return std::string{std::istreambuf_iterator<char>{file}, {}};
}

Status append(Trace& to, Trace from) {
  if (to.spans.size() + from.spans.size() > kMaxSpans)
    return Error{ErrorCode::invalid_argument,
                 fmt::format("the files hold more than {} spans", kMaxSpans)};
  to.overwritten += from.overwritten;
  const std::size_t processes = to.processes.size();
  const std::size_t ranks = to.ranks.size();
  const std::size_t lanes = to.lanes.size();
  for (Process& process : from.processes) {
    // Containers of one host number their processes each for themselves.
    while (std::ranges::count(to.processes, process.pid, &Process::pid) > 0) ++process.pid;
    to.processes.push_back(std::move(process));
  }
  for (Rank& rank : from.ranks)
    to.ranks.push_back({rank.process + processes, std::move(rank.name)});
  for (Lane& lane : from.lanes)
    to.lanes.push_back({lane.process + processes, lane.tid, std::move(lane.name)});
  for (Span& span : from.spans) {
    span.rank += ranks;
    span.lane += lanes;
    to.spans.push_back(span);
  }
  return {};
}

std::string microseconds(std::int64_t ns) {
  return fmt::format("{}.{:03}", ns / 1000, ns % 1000);
}

}  // namespace

std::string full_name(const Trace& trace, std::size_t rank) {
  const std::string& name = trace.ranks[rank].name;
  const std::string& process = trace.processes[trace.ranks[rank].process].name;
  return process.find(name) != std::string::npos ? process : process + ": " + name;
}

RankOrder order_of(const Trace& trace, const Span& span) {
  const std::string name = full_name(trace, span.rank);
  return {
      .decode = !on_prefill(span.stage), .length = name.size(), .name = name, .rank = span.rank};
}

Result<Trace> parse_trace(std::string_view text) {
  return Parser{}.parse(text);
}

std::string write_trace(const Trace& trace) {
  std::string events;
  const auto add = [&](const std::string& event) {
    if (!events.empty()) events += ",\n";
    events += event;
  };
  const auto add_name = [&](const char* what, std::size_t process, std::uint64_t tid,
                            const std::string& name) {
    add(fmt::format(R"({{"ph":"M","name":"{}","pid":{},"tid":{},"args":{{"name":{}}}}})", what,
                    trace.processes[process].pid, tid, Json(name).dump()));
  };
  for (std::size_t i = 0; i < trace.processes.size(); ++i)
    add_name("process_name", i, 0, trace.processes[i].name);
  for (const Lane& lane : trace.lanes) add_name("thread_name", lane.process, lane.tid, lane.name);
  std::uint64_t requests = 0;
  for (const Span& span : trace.spans) {
    const Lane& lane = trace.lanes[span.lane];
    const std::string head = fmt::format(R"("name":"{}","pid":{},"tid":{},)", to_string(span.stage),
                                         trace.processes[lane.process].pid, lane.tid);
    const std::string args = fmt::format(
        R"("args":{{"rank":{},"room":"{}","pull":"{}","source":{},"lease":"{}")",
        Json(trace.ranks[span.rank].name).dump(), span.room, span.pull, span.source, span.lease);
    if (of_a_piece(span.stage)) {
      add(fmt::format(R"({{"ph":"X","cat":"piece",{}"ts":{},"dur":{},{},)"
                      R"("piece":{},"bytes":{},"waited_us":{}}}}})",
                      head, microseconds(span.begin_ns), microseconds(span.ns()), args, span.piece,
                      span.bytes, microseconds(span.waited_ns)));
      continue;
    }
    const std::string id = fmt::format(R"("id2":{{"local":"{:#x}"}})", ++requests);
    add(fmt::format(R"({{"ph":"b","cat":"request",{}"ts":{},{},{}}}}})", head,
                    microseconds(span.begin_ns), id, args));
    add(fmt::format(R"({{"ph":"e","cat":"request",{}"ts":{},{}}})", head, microseconds(span.end_ns),
                    id));
  }
  return fmt::format(
      R"({{"displayTimeUnit":"ns","otherData":{{"version":1,"boot_id":{},"overwritten":{}}},)"
      "\"traceEvents\":[\n{}\n]}}\n",
      Json(trace.boot_id).dump(), trace.overwritten, events);
}

Result<Trace> read_traces(const std::vector<std::string>& files) {
  std::optional<Trace> all;
  for (const std::string& file : files) {
    KVSHARD_TRY(const std::string text, read_file(file));
    auto trace = parse_trace(text);
    if (!trace)
      return Error{trace.error().code, fmt::format("{}: {}", file, trace.error().message)};
    if (all && trace->boot_id != all->boot_id)
      return Error{
          ErrorCode::invalid_argument,
          fmt::format("{} was written on boot {}, {} on boot {}: their clocks have nothing "
                      "in common",
                      files[0], all->boot_id, file, trace->boot_id)};
    if (!all) {
      all = *std::move(trace);
    } else {
      KVSHARD_TRY(append(*all, *std::move(trace)));
    }
  }
  return *std::move(all);
}

Status merge_files(const std::vector<std::string>& files, const std::string& to) {
  KVSHARD_TRY(const Trace trace, read_traces(files));
  KVSHARD_TRY(tools::write_text(to, write_trace(trace)));
  for (const std::string& file : files) std::filesystem::remove(file);
  return {};
}

}  // namespace kvshard::trace
