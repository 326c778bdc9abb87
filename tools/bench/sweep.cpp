#include "bench/sweep.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "base/try.hpp"
#include "bench/pull.hpp"
#include "bench/svg.hpp"

namespace kvshard::bench {
namespace {

constexpr double kCloseEnough = 0.97;

double speed(const Json& result) {
  return result["bytes_per_second"].get<double>() / 1e9;
}

std::string binary_size(double bytes) {
  return bytes >= 1 << 20 ? fmt::format("{:g} MiB", bytes / (1 << 20))
                          : fmt::format("{:g} KiB", bytes / (1 << 10));
}

}  // namespace

Result<Json> run_sweep(const SweepConfig& config) {
  Json results = Json::array();
  for (const std::uint32_t window : config.windows) {
    for (const std::uint32_t slots : config.slots) {
      if (window > slots) continue;  // could never be used
      for (const std::uint64_t bytes : config.slot_bytes) {
        PullConfig pull = config.pull;
        pull.slot_bytes = bytes;
        pull.slots = slots;
        pull.window = window;
        KVSHARD_TRY(auto result, measure_pull(pull));
        results.push_back(std::move(result));
      }
    }
  }
  if (results.empty())
    return Error{ErrorCode::invalid_argument, "every window is larger than every slot count"};
  double best = 0;
  for (const Json& result : results) best = std::max(best, speed(result));
  const Json* chosen = nullptr;
  const auto staging = [](const Json& result) {
    return result["params"]["slot_bytes"].get<std::uint64_t>() *
           result["params"]["slots"].get<std::uint64_t>();
  };
  for (const Json& result : results) {
    if (speed(result) < kCloseEnough * best) continue;
    if (chosen == nullptr || staging(result) < staging(*chosen)) chosen = &result;
  }
  Json sweep{{"bench", "sweep"}, {"env", results[0]["env"]}};
  sweep["chosen"] = {{"slot_bytes", (*chosen)["params"]["slot_bytes"]},
                     {"slots", (*chosen)["params"]["slots"]},
                     {"window", (*chosen)["params"]["window"]},
                     {"bytes_per_second", (*chosen)["bytes_per_second"]},
                     {"best_bytes_per_second", best * 1e9}};
  if (chosen->contains("ratio")) sweep["chosen"]["ratio"] = (*chosen)["ratio"];
  sweep["results"] = std::move(results);
  return sweep;
}

std::string sweep_verdict(const Json& sweep) {
  std::string text = fmt::format("{:>10} {:>6} {:>7} {:>9} {:>11} {:>12}\n", "slot", "slots",
                                 "window", "GB/s", "to bare UCX", "p99");
  for (const Json& result : sweep["results"]) {
    const auto pull = result["params"].get<PullConfig>();
    text += fmt::format(
        "{:>10} {:>6} {:>7} {:>9.2f} {:>11} {:>12}\n",
        binary_size(static_cast<double>(pull.slot_bytes)), pull.slots, pull.window, speed(result),
        result.contains("ratio") ? fmt::format("{:.2f}", result["ratio"].get<double>()) : "",
        human_time(result["p99_ns"].get<std::int64_t>()));
  }
  const Json& chosen = sweep["chosen"];
  return text + fmt::format(
                    "chosen: {} slots of {}, window {}: {:.2f} GB/s, the least staging within "
                    "3 % of the fastest ({:.2f} GB/s)\n",
                    chosen["slots"].get<std::uint32_t>(),
                    binary_size(chosen["slot_bytes"].get<double>()),
                    chosen["window"].get<std::uint32_t>(), speed(chosen),
                    chosen["best_bytes_per_second"].get<double>() / 1e9);
}

std::string sweep_svg(const Json& sweep) {
  std::map<std::pair<std::uint32_t, std::uint32_t>, Chart::Series> lines;
  std::vector<double> sizes;
  for (const Json& result : sweep["results"]) {
    const auto pull = result["params"].get<PullConfig>();
    Chart::Series& line = lines[{pull.window, pull.slots}];
    line.name = fmt::format("{} slots, window {}", pull.slots, pull.window);
    line.points.emplace_back(static_cast<double>(pull.slot_bytes), speed(result));
    sizes.push_back(static_cast<double>(pull.slot_bytes));
  }
  std::ranges::sort(sizes);
  sizes.erase(std::ranges::unique(sizes).begin(), sizes.end());
  const auto pull = sweep["results"][0]["params"].get<PullConfig>();
  Chart chart{.title = fmt::format("{}, {} tokens, {} to {} ranks, {} memory", pull.model,
                                   pull.tokens, pull.prefill_ranks(), pull.decode_tp, pull.memory),
              .x_label = "KV bytes of a slot",
              .y_label = "GB/s of whole pulls",
              .log_x = true,
              .x_ticks = std::move(sizes),
              .x_text = binary_size,
              .series = {}};
  for (auto& [key, line] : lines) {
    std::ranges::sort(line.points);
    chart.series.push_back(std::move(line));
  }
  return to_svg(chart);
}

}  // namespace kvshard::bench
