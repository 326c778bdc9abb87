#pragma once

#include <chrono>

namespace kvshard {

using TimePoint = std::chrono::steady_clock::time_point;
using Duration = std::chrono::nanoseconds;

/// Where time comes from, so that tests can move it.
/// Threads: thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  [[nodiscard]] virtual TimePoint now() const noexcept = 0;
};

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
