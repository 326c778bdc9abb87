#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "base/clock.hpp"

namespace kvshard::log {

/// Lets through kBurst lines of a kind in each kWindow, so that peers cannot fill the log.
class Limit {
 public:
  static constexpr std::uint32_t kBurst = 10;
  static constexpr Duration kWindow = std::chrono::seconds{10};

  /// How many lines were held back since the last one that passed; none: this one is held back too.
  std::optional<std::uint64_t> pass(TimePoint now) noexcept {
    if (now - window_ >= kWindow) {
      window_ = now;
      passed_ = 0;
    }
    if (passed_ == kBurst) {
      ++held_back_;
      return std::nullopt;
    }
    ++passed_;
    return std::exchange(held_back_, 0);
  }

 private:
  TimePoint window_{};
  std::uint32_t passed_{0};
  std::uint64_t held_back_{0};
};

}  // namespace kvshard::log
