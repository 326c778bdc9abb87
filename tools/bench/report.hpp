#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "kvshard/result.hpp"
#include "support/text.hpp"

namespace kvshard::bench {

using Json = nlohmann::json;
using tools::gigabytes_per_s;
using tools::human_bytes;
using tools::human_time;
using tools::write_text;

/// Times of one thing, in nanoseconds.
class Samples {
 public:
  void add(std::int64_t ns) { ns_.push_back(ns); }
  [[nodiscard]] std::size_t size() const { return ns_.size(); }
  /// The smallest sample that at least `share` of all do not exceed. Requires a sample.
  [[nodiscard]] std::int64_t quantile(double share) const;
  [[nodiscard]] std::int64_t p50() const { return quantile(0.50); }
  [[nodiscard]] std::int64_t p99() const { return quantile(0.99); }

 private:
  std::vector<std::int64_t> ns_;
};

/// commit, compiler, CUDA, UCX, GPU, CPU.
Json environment(int device);

}  // namespace kvshard::bench
