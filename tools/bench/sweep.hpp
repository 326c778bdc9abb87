#pragma once

#include <string>
#include <vector>

#include "bench/config.hpp"
#include "bench/report.hpp"
#include "kvshard/result.hpp"

namespace kvshard::bench {

/// What to try for one pull: every slot size with every count and every window.
struct SweepConfig {
  PullConfig pull;
  std::vector<std::uint64_t> slot_bytes{256U << 10, 1U << 20, 4U << 20, 16U << 20};
  std::vector<std::uint32_t> slots{2, 3, 4, 8};
  std::vector<std::uint32_t> windows{2};
};

/// Measures all; {"bench": "sweep", "results": [pull results], "chosen": {...}, "env": ...}. Chosen is what
/// needs least staging memory among those within 3 % of the fastest.
Result<Json> run_sweep(const SweepConfig& config);

/// A table and the choice, for people.
std::string sweep_verdict(const Json& sweep);
/// GB/s over slot size, a line for each count and window.
std::string sweep_svg(const Json& sweep);

}  // namespace kvshard::bench
