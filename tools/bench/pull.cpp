#include "bench/pull.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <vector>

#include "base/try.hpp"
#include "bench/roles.hpp"
#include "bench/workload.hpp"
#include "kvshard/plan.hpp"
#include "support/process.hpp"
#include "trace/trace.hpp"

namespace kvshard::bench {
namespace {

using tools::RankProcess;

/// What one baseline did in all rounds.
struct Baseline {
  Baseline(std::string its_name, std::string is_what)
      : name{std::move(its_name)}, what{std::move(is_what)} {}

  std::string name, what;
  Samples times;
  std::uint64_t bytes{0}, operations{0}, all_operations{0}, operation_bytes{0};
};

/// What one prefill rank did, over all pulls.
struct Source {
  Samples first_ready, landed, wire;
  std::uint64_t bytes{0};
};

class Run {
 public:
  /// Ranks write a trace each when this object goes: `trace_files` has their names then.
  Run(const PullConfig& config, std::string trace, std::vector<std::string>& trace_files)
      : config_{config}, trace_{std::move(trace)}, trace_files_{trace_files} {}

  Result<Json> run() {
    KVSHARD_TRY(const auto workload, Workload::create(config_));
    KVSHARD_TRY(start(workload));
    KVSHARD_TRY(pull_once(false));
    KVSHARD_TRY(const auto checks, ask_all(decode_, {{"op", "check"}}));
    for (const Json& check : checks)
      if (check.contains("wrong"))
        return Error{ErrorCode::data_loss, check["wrong"].get<std::string>()};
    if (config_.baselines) {
      baselines_.emplace_back("bare", "bare UCX, slot by slot");
      baselines_.emplace_back("memcpy", "one copy of the same bytes in memory");
      if (config_.page_operations > 0)
        baselines_.emplace_back("pages", "one UCX get for each page and buffer");
    }
    for (std::uint32_t round = 0; round < config_.warmup + config_.repeat; ++round) {
      const bool timed = round >= config_.warmup;
      KVSHARD_TRY(pull_once(timed));
      for (Baseline& baseline : baselines_) KVSHARD_TRY(baseline_once(baseline, timed));
    }
    return report();
  }

 private:
  Status start(const Workload& workload) {
    KVSHARD_TRY(const auto pullers, count_pullers(workload.prefill(), workload.decode()));
    const std::string self = std::filesystem::read_symlink("/proc/self/exe");
    for (std::uint32_t rank = 0; rank < config_.prefill_ranks(); ++rank) {
      prefill_.emplace_back(std::vector{self, std::string{"prefill-rank"}});
      KVSHARD_TRY(send(prefill_.back(), {{"config", config_},
                                         {"rank", rank},
                                         {"trace", trace_file("prefill", rank)},
                                         {"pullers", pullers[rank]},
                                         {"decode_ranks", config_.decode_tp}}));
    }
    Json ports = Json::array();
    std::vector<Json> remotes(config_.decode_tp, Json::array());
    for (RankProcess& rank : prefill_) {
      KVSHARD_TRY(const Json ready, receive(rank));
      ports.push_back(ready["port"]);
      for (std::uint32_t d = 0; config_.baselines && d < config_.decode_tp; ++d)
        remotes[d].push_back(ready["remotes"][d]);
    }
    for (std::uint32_t rank = 0; rank < config_.decode_tp; ++rank) {
      decode_.emplace_back(std::vector{self, std::string{"decode-rank"}});
      KVSHARD_TRY(send(decode_.back(), {{"config", config_},
                                        {"rank", rank},
                                        {"trace", trace_file("decode", rank)},
                                        {"ports", ports},
                                        {"remotes", remotes[rank]}}));
    }
    // Rendezvous and emulated gets need the sender while connections are made, too.
    if (config_.baselines) KVSHARD_TRY(ask_all(prefill_, {{"op", "baseline"}}));
    for (RankProcess& rank : decode_) {
      KVSHARD_TRY(const Json ready, receive(rank));
      if (paths_.empty()) paths_ = ready["paths"];
    }
    return {};
  }

  std::string trace_file(const char* role, std::uint32_t rank) {
    if (trace_.empty()) return "";
    return trace_files_.emplace_back(fmt::format("{}.{}{}", trace_, role, rank));
  }

  Status pull_once(bool timed) {
    const std::uint64_t room = next_room_;
    next_room_ += config_.concurrency;
    KVSHARD_TRY(ask_all(prefill_, {{"op", "publish"}, {"first_room", room}}));
    KVSHARD_TRY(const auto answers, ask_all(decode_, {{"op", "pull"}, {"first_room", room}}));
    if (!timed) return {};
    bytes_ = total(answers, "bytes");
    times_.add(duration(answers));
    for (const Json& answer : answers) {
      for (const Json& pull : answer["pulls"]) {
        pull_times_.add(pull["total_ns"].get<std::int64_t>());
        ++path_pulls_[pull["path"].get<std::string>()];
        for (const Json& from : pull["sources"]) {
          if (from["bytes"] == 0) continue;
          Source& source = sources_[from["rank"].get<std::uint32_t>()];
          source.first_ready.add(from["first_ready_ns"].get<std::int64_t>());
          source.landed.add(from["landed_ns"].get<std::int64_t>());
          source.wire.add(from["wire_ns"].get<std::int64_t>());
          source.bytes = from["bytes"].get<std::uint64_t>();
        }
      }
    }
    return {};
  }

  Status baseline_once(Baseline& baseline, bool timed) {
    if (baseline.name != "memcpy") KVSHARD_TRY(ask_all(prefill_, {{"op", "baseline"}}));
    KVSHARD_TRY(const auto answers, ask_all(decode_, {{"op", baseline.name}}));
    if (!timed) return {};
    baseline.times.add(duration(answers));
    baseline.bytes = total(answers, "bytes");
    baseline.operations = total(answers, "operations");
    if (answers[0].contains("all_operations")) {
      baseline.all_operations = total(answers, "all_operations");
      baseline.operation_bytes = answers[0]["operation_bytes"].get<std::uint64_t>();
    }
    return {};
  }

  [[nodiscard]] Json report() const {
    const std::int64_t ours = times_.p50();
    Json result{{"bench", "pull"},
                {"params", config_},
                {"bytes", bytes_},
                {"iterations", times_.size()},
                {"p50_ns", ours},
                {"p99_ns", times_.p99()},
                {"bytes_per_second", rate(bytes_, ours)},
                {"request_p50_ns", pull_times_.p50()},
                {"request_p99_ns", pull_times_.p99()},
                {"verified", true},
                {"paths", paths_},
                {"env", environment(config_.device(true, 0))}};
    for (const auto& [path, pulls] : path_pulls_) result["pulls_by_path"][path] = pulls;
    for (const Baseline& baseline : baselines_) {
      const std::int64_t p50 = baseline.times.p50();
      const double per_second = rate(baseline.bytes, p50);
      Json& to = result["baselines"][baseline.name];
      to = {{"what", baseline.what},
            {"bytes", baseline.bytes},
            {"operations", baseline.operations},
            {"p50_ns", p50},
            {"bytes_per_second", per_second},
            {"ratio", rate(bytes_, ours) / per_second}};
      if (baseline.all_operations > 0) {
        to["all_operations"] = baseline.all_operations;
        to["operation_bytes"] = baseline.operation_bytes;
        to["extrapolated"] = baseline.operations < baseline.all_operations;
      }
    }
    if (!baselines_.empty()) {
      result["baseline"] = baselines_[0].what;
      result["ratio"] = result["baselines"][baselines_[0].name]["ratio"];
    }
    Json& sources = result["sources"] = Json::array();
    for (const auto& [rank, source] : sources_)
      sources.push_back({{"rank", rank},
                         {"bytes", source.bytes},
                         {"first_ready_p50_ns", source.first_ready.p50()},
                         {"landed_p50_ns", source.landed.p50()},
                         {"wire_p50_ns", source.wire.p50()}});
    result["limit"] = limit();
    return result;
  }

  // From where the slowest rank's time went.
  [[nodiscard]] std::string limit() const {
    const auto slowest = std::ranges::max_element(
        sources_, {}, [](const auto& each) { return each.second.landed.p50(); });
    if (slowest == sources_.end()) return "nothing moved";
    const Source& source = slowest->second;
    const auto landed = static_cast<double>(source.landed.p50());
    const auto wire = static_cast<double>(source.wire.p50());
    const double in_flight = wire / landed;
    const auto slots = static_cast<double>(std::min(config_.window, config_.slots));
    if (wire <= 0) return "the copy: no slot and no wire on this path";
    if (source.bytes <= config_.slot_bytes)
      return fmt::format(
          "the request: it is a single slot, of which {} on the wire; nothing overlaps",
          human_time(source.wire.p50()));
    if (static_cast<double>(source.first_ready.p50()) > 0.4 * landed)
      return fmt::format("the start: {} of {} pass before the first slot is ready",
                         human_time(source.first_ready.p50()), human_time(source.landed.p50()));
    if (config_.concurrency == 1 && in_flight >= 0.75 * slots)
      return fmt::format("the wire: {:.1f} of {:.0f} slots are on it all the time", in_flight,
                         slots);
    if (config_.concurrency > 1 && in_flight >= 0.75)
      return fmt::format("the wire: a pull has {:.1f} slots on it all the time", in_flight);
    return fmt::format(
        "the copies: {:.1f} of {:.0f} slots are on the wire, the others wait for gather or scatter",
        in_flight, slots);
  }

  static double rate(std::uint64_t bytes, std::int64_t ns) {
    return 1e9 * gigabytes_per_s(bytes, ns);
  }
  static std::uint64_t total(const std::vector<Json>& answers, const char* field) {
    std::uint64_t sum = 0;
    for (const Json& answer : answers) sum += answer[field].get<std::uint64_t>();
    return sum;
  }
  // From the first decode rank's start to the last one's end.
  static std::int64_t duration(const std::vector<Json>& answers) {
    std::int64_t begin = INT64_MAX, end = 0;
    for (const Json& answer : answers) {
      begin = std::min(begin, answer["begin_ns"].get<std::int64_t>());
      end = std::max(end, answer["end_ns"].get<std::int64_t>());
    }
    return end - begin;
  }

  static Status send(RankProcess& rank, const Json& message) {
    if (rank.channel().send(message)) return {};
    return Error{ErrorCode::unavailable, "a rank process died"};
  }
  static Result<Json> receive(RankProcess& rank) {
    auto message = rank.channel().receive();
    if (!message) return Error{ErrorCode::unavailable, "a rank process died"};
    if (message->contains("failed"))
      return Error{ErrorCode::unavailable,
                   fmt::format("a rank failed: {}", (*message)["failed"].get<std::string>())};
    return *std::move(message);
  }
  static Result<std::vector<Json>> ask_all(std::vector<RankProcess>& ranks, const Json& message) {
    for (RankProcess& rank : ranks) KVSHARD_TRY(send(rank, message));
    std::vector<Json> answers;
    for (RankProcess& rank : ranks) {
      KVSHARD_TRY(auto answer, receive(rank));
      answers.push_back(std::move(answer));
    }
    return answers;
  }

  PullConfig config_;
  std::string trace_;
  std::vector<std::string>& trace_files_;
  std::vector<RankProcess> prefill_, decode_;  // decode ranks leave first
  Json paths_ = Json::array();
  std::uint64_t next_room_{1};
  std::uint64_t bytes_{0};
  Samples times_, pull_times_;
  std::map<std::string, std::uint64_t> path_pulls_;
  std::map<std::uint32_t, Source> sources_;
  std::vector<Baseline> baselines_;
};

}  // namespace

Result<Json> measure_pull(const PullConfig& config, const std::string& trace) {
  std::vector<std::string> trace_files;
  auto result = Run{config, trace, trace_files}.run();  // and its ranks have left
  if (result && !trace.empty()) KVSHARD_TRY(trace::merge_files(trace_files, trace));
  return result;
}

std::string pull_verdict(const Json& result) {
  const auto config = result["params"].get<PullConfig>();
  const auto p50 = result["p50_ns"].get<std::int64_t>();
  const auto bytes = result["bytes"].get<std::uint64_t>();
  std::string text = fmt::format(
      "{}, {} request(s) of {} tokens, pages of {} tokens, {} memory: {} -> {} ranks\n"
      "  moved     {} in {} (p99 {}), {:.2f} GB/s; every byte verified\n"
      "  request   p50 {}, p99 {} from PULL to completion\n",
      config.model, config.concurrency, config.tokens, config.page_size, config.memory,
      config.prefill_ranks(), config.decode_tp, human_bytes(bytes), human_time(p50),
      human_time(result["p99_ns"].get<std::int64_t>()), gigabytes_per_s(bytes, p50),
      human_time(result["request_p50_ns"].get<std::int64_t>()),
      human_time(result["request_p99_ns"].get<std::int64_t>()));
  for (const auto& [path, pulls] : result["pulls_by_path"].items())
    text += fmt::format("  path      {}, {} pulls: {}\n", path, pulls.get<std::uint64_t>(),
                        result["paths"][0]["reason"].get<std::string>());
  if (result.contains("baselines")) {
    for (const auto& [name, baseline] : result["baselines"].items()) {
      text += fmt::format("  ratio     {:.3g} to {} ({:.2f} GB/s)", baseline["ratio"].get<double>(),
                          baseline["what"].get<std::string>(),
                          baseline["bytes_per_second"].get<double>() / 1e9);
      if (baseline.value("extrapolated", false))
        text += fmt::format(", extrapolated from {} of {} operations",
                            baseline["operations"].get<std::uint64_t>(),
                            baseline["all_operations"].get<std::uint64_t>());
      text += "\n";
    }
  }
  const Json& sources = result["sources"];
  if (!sources.empty()) {
    const auto landed = [](const Json& source) {
      return source["landed_p50_ns"].get<std::int64_t>();
    };
    const auto [first, last] = std::ranges::minmax_element(sources, {}, landed);
    text += fmt::format("  slowest   prefill rank {}: last byte after {}",
                        (*last)["rank"].get<std::uint32_t>(), human_time(landed(*last)));
    if (sources.size() > 1)
      text += fmt::format(", {:.0f} % after the first rank's",
                          100.0 * static_cast<double>(landed(*last) - landed(*first)) /
                              static_cast<double>(std::max<std::int64_t>(landed(*first), 1)));
    text += "\n";
  }
  return text + fmt::format("  limit     {}\n", result["limit"].get<std::string>());
}

}  // namespace kvshard::bench
