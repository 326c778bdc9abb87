#include "bench/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <thread>

#include "bench/device.hpp"
#include "bench/ucx_baseline.hpp"

namespace kvshard::bench {
namespace {

std::string cpu_name() {
  std::ifstream file{"/proc/cpuinfo"};
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos)
      return fmt::format("{} x {}", std::thread::hardware_concurrency(), line.substr(colon + 2));
  }
  return "unknown";
}

}  // namespace

std::int64_t Samples::quantile(double share) const {
  std::vector<std::int64_t> sorted = ns_;
  std::ranges::sort(sorted);
  const auto rank = static_cast<std::size_t>(std::ceil(share * static_cast<double>(sorted.size())));
  return sorted[std::clamp<std::size_t>(rank, 1, sorted.size()) - 1];
}

Json environment(int device) {
  return {{"commit", KVSHARD_COMMIT}, {"compiler", __VERSION__}, {"build", KVSHARD_BUILD_TYPE},
          {"cuda", cuda_version()},   {"ucx", ucx_version()},    {"gpu", gpu_name(device)},
          {"cpu", cpu_name()}};
}

}  // namespace kvshard::bench
