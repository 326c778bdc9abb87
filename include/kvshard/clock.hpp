#pragma once

#include <atomic>
#include <chrono>

#include "kvshard/export.hpp"

namespace kvshard {

using TimePoint = std::chrono::steady_clock::time_point;
using Duration = std::chrono::nanoseconds;

/// Where time comes from, so that tests can move it.
/// Threads: thread-safe.
class KVSHARD_EXPORT Clock {
 public:
  virtual ~Clock() = default;
  [[nodiscard]] virtual TimePoint now() const noexcept = 0;
};

/// Time that moves only when a test says so. A rank looks at its clock at least four times a heartbeat of
/// real time, so it sees a move that late; a short heartbeat makes it soon.
/// Threads: thread-safe.
class ManualClock final : public Clock {
 public:
  [[nodiscard]] TimePoint now() const noexcept override {
    return TimePoint{Duration{since_epoch_.load(std::memory_order_acquire)}};
  }
  void advance(Duration by) noexcept {
    since_epoch_.fetch_add(by.count(), std::memory_order_acq_rel);
  }

 private:
  std::atomic<Duration::rep> since_epoch_{Duration{std::chrono::hours{1}}.count()};
};

}  // namespace kvshard
