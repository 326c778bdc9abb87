// What metrics and traces cost a pull: the same pulls with neither, with metrics, and with both, in turns in one
// process. Prints one JSON object for each of the latter two.
//
//   e2e_overhead [--page-bytes 64] [--shards 1] [--transport loopback|ucx] [--rounds 200] [--pulls 200]
//
// The ranks have no threads here but are moved by the one that measures: where threads run, and how long they
// spin before they sleep, would be tens of times what is looked for.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "base/try.hpp"
#include "kvshard/tracer.hpp"
#include "session/progress_thread.hpp"
#include "support/room_fleet.hpp"

namespace kvshard::bench {
namespace {

struct Config {
  FleetOptions fleet{.shard_size = 1, .rooms = 1};
  std::string transport{"loopback"};
  std::uint32_t rounds{200};
  std::uint32_t pulls{200};
};

constexpr std::array<const char*, 3> kVariants{"off", "metrics", "metrics and traces"};

Status run(Config config) {
  if (config.transport == "ucx") config.fleet.transport.kind = TransportOptions::Kind::ucx;
  KVSHARD_TRY(const auto tracer, Tracer::create());
  std::array<std::unique_ptr<ManualTurns>, kVariants.size()> turns;  // outlive the ranks
  std::array<std::unique_ptr<RoomFleet>, kVariants.size()> fleets;
  for (std::size_t v = 0; v < fleets.size(); ++v) {
    turns[v] = std::make_unique<ManualTurns>([] {});
    FleetOptions options = config.fleet;
    options.turn = [&turn = *turns[v]] { (void)turn.turn(); };
    options.metrics = v > 0;
    options.tracer = v > 1 ? tracer : nullptr;
    KVSHARD_TRY(fleets[v], RoomFleet::create(options));
  }
  std::array<std::vector<double>, kVariants.size()> ratios;
  std::vector<double> off_ns;
  for (std::uint32_t round = 0; round < config.rounds; ++round) {
    std::array<double, kVariants.size()> cpu_ns{};
    for (std::size_t i = 0; i < fleets.size(); ++i) {
      const std::size_t v = (i + round) % fleets.size();  // nobody is always first
      KVSHARD_TRY(const RequestCost cost, run_at_once(*fleets[v], config.pulls));
      cpu_ns[v] = cost.cpu_ns;
    }
    off_ns.push_back(cpu_ns[0]);
    for (std::size_t v = 1; v < ratios.size(); ++v) ratios[v].push_back(cpu_ns[v] / cpu_ns[0]);
  }
  std::ranges::sort(off_ns);
  for (std::size_t v = 1; v < ratios.size(); ++v) {
    std::vector<double>& sorted = ratios[v];
    std::ranges::sort(sorted);
    // The median lies between these two in 95 of 100 such runs, whatever the ratios' distribution.
    const double half = static_cast<double>(sorted.size()) / 2;
    const double margin = 0.98 * std::sqrt(static_cast<double>(sorted.size()));
    const auto rank = [&](double at) {
      return sorted[static_cast<std::size_t>(
          std::clamp(at, 0.0, static_cast<double>(sorted.size() - 1)))];
    };
    fmt::print(
        "{{\"bench\":\"overhead\",\"params\":{{\"variant\":\"{}\",\"page_bytes\":{},"
        "\"shard_size\":{},\"transport\":\"{}\",\"pulls\":{}}},\"bytes\":{},"
        "\"iterations\":{},"
        "\"baseline\":{:.0f},\"ratio\":{:.4f},\"ratio_low\":{:.4f},\"ratio_high\":{:.4f},"
        "\"verified\":true}}\n",
        kVariants[v], config.fleet.page_bytes, config.fleet.shard_size, config.transport,
        config.pulls, fleets[v]->request_bytes(), config.rounds, off_ns[off_ns.size() / 2],
        rank(half), rank(half - margin), rank(half + margin));
  }
  return {};
}

}  // namespace
}  // namespace kvshard::bench

int main(int argc, char** argv) {
  kvshard::bench::Config config;
  CLI::App app{"What metrics and traces cost a pull"};
  app.add_option("--page-bytes", config.fleet.page_bytes, "One page a rank")
      ->check(CLI::Range(32U, 1U << 24));
  app.add_option("--shards", config.fleet.shard_size, "Prefill ranks")->check(CLI::Range(1U, 64U));
  app.add_option("--transport", config.transport, "loopback or ucx")
      ->check(CLI::IsMember({"loopback", "ucx"}));
  app.add_option("--rounds", config.rounds, "Times that the variants take turns")
      ->check(CLI::PositiveNumber);
  app.add_option("--pulls", config.pulls, "In each turn")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  const auto status = kvshard::bench::run(std::move(config));
  if (!status) fmt::print(stderr, "{}\n", status.error().message);
  return status ? 0 : 1;
}
