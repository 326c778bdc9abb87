#include "bench/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
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

std::string human_time(std::int64_t ns) {
  const auto value = static_cast<double>(ns);
  if (ns < 1'000'000) return fmt::format("{:.1f} us", value / 1e3);
  if (ns < 1'000'000'000) return fmt::format("{:.2f} ms", value / 1e6);
  return fmt::format("{:.2f} s", value / 1e9);
}

std::string human_bytes(std::uint64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (bytes < 1'000'000) return fmt::format("{:.1f} kB", value / 1e3);
  if (bytes < 1'000'000'000) return fmt::format("{:.1f} MB", value / 1e6);
  return fmt::format("{:.2f} GB", value / 1e9);
}

double gigabytes_per_s(std::uint64_t bytes, std::int64_t ns) {
  return static_cast<double>(bytes) / static_cast<double>(std::max<std::int64_t>(ns, 1));
}

Status write_text(const std::string& path, const std::string& text) {
  if (path == "-") {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
    return {};
  }
  std::ofstream file{path, std::ios::binary};
  file << text;
  file.close();
  if (file) return {};
  return Error{ErrorCode::invalid_argument, fmt::format("{} cannot be written", path)};
}

}  // namespace kvshard::bench
