#pragma once

#include <atomic>

#include "base/clock.hpp"

namespace kvshard {

/// Time that moves only when a test says so. A loop that already sleeps does not see it: call
/// EventLoop::wake() after advance().
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
  std::atomic<Duration::rep> since_epoch_{std::chrono::nanoseconds{std::chrono::hours{1}}.count()};
};

}  // namespace kvshard
