#pragma once

#include <chrono>

#include "kvshard/clock.hpp"

namespace kvshard {

/// The machine's monotonic clock.
class SteadyClock final : public Clock {
 public:
  [[nodiscard]] TimePoint now() const noexcept override { return std::chrono::steady_clock::now(); }
  static const SteadyClock& instance() noexcept {
    static const SteadyClock clock;
    return clock;
  }
};

}  // namespace kvshard
