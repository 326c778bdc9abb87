#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>

#include "kvshard/result.hpp"

namespace kvshard::tools {

/// "12.3 ms" and the like; decimal units.
inline std::string human_time(std::int64_t ns) {
  const auto value = static_cast<double>(ns);
  if (ns < 1'000'000) return fmt::format("{:.1f} us", value / 1e3);
  if (ns < 1'000'000'000) return fmt::format("{:.2f} ms", value / 1e6);
  return fmt::format("{:.2f} s", value / 1e9);
}
inline std::string human_bytes(std::uint64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (bytes < 1'000'000) return fmt::format("{:.1f} kB", value / 1e3);
  if (bytes < 1'000'000'000) return fmt::format("{:.1f} MB", value / 1e6);
  return fmt::format("{:.2f} GB", value / 1e9);
}
/// As GB/s.
inline double gigabytes_per_s(std::uint64_t bytes, std::int64_t ns) {
  return static_cast<double>(bytes) / static_cast<double>(std::max<std::int64_t>(ns, 1));
}

/// Writes to a file, or to stdout for "-".
inline Status write_text(const std::string& path, const std::string& text) {
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

}  // namespace kvshard::tools
