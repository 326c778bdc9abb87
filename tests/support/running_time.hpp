#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <deque>
#include <thread>

#include "base/clock.hpp"

namespace kvshard::test {

/// A stopwatch for what must happen within a second or so, on a machine that may stand still for longer: a
/// virtual machine whose host takes its processors. A thread on each processor wakes every few milliseconds;
/// where one did not, its processor did not run, and the longest such time is not counted.
class RunningTime {
 public:
  RunningTime() {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    (void)::sched_getaffinity(0, sizeof allowed, &allowed);
    for (std::size_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &allowed)) tickers_.emplace_back(cpu);
    }
  }

  void restart() {
    began_ = std::chrono::steady_clock::now();
    for (Ticker& ticker : tickers_) ticker.stood_still = 0;
  }
  [[nodiscard]] std::chrono::milliseconds elapsed() const {
    const auto now = std::chrono::steady_clock::now();
    Duration longest{0};
    for (const Ticker& ticker : tickers_) {
      const Duration since_tick = now - TimePoint{Duration{ticker.last}};
      longest = std::max(longest, Duration{ticker.stood_still} +
                                      (since_tick > kStandstill ? since_tick : Duration{0}));
    }
    return std::chrono::duration_cast<std::chrono::milliseconds>(now - began_ - longest);
  }

 private:
  static constexpr Duration kTick = std::chrono::milliseconds{5};
  static constexpr Duration kStandstill =
      std::chrono::milliseconds{100};  // more than a busy machine does

  struct Ticker {
    explicit Ticker(std::size_t cpu)
        : thread{[this, cpu](const std::stop_token& token) {
            cpu_set_t own;
            CPU_ZERO(&own);
            CPU_SET(cpu, &own);
            (void)::sched_setaffinity(0, sizeof own, &own);
            while (!token.stop_requested()) {
              std::this_thread::sleep_for(kTick);
              const TimePoint now = std::chrono::steady_clock::now();
              const Duration since = now - TimePoint{Duration{last.load()}};
              if (since > kStandstill) stood_still += since.count();
              last = now.time_since_epoch().count();
            }
          }} {}

    std::atomic<Duration::rep> last{std::chrono::steady_clock::now().time_since_epoch().count()};
    std::atomic<Duration::rep> stood_still{0};
    std::jthread thread;  // last: it uses the others
  };

  std::chrono::steady_clock::time_point began_{std::chrono::steady_clock::now()};
  std::deque<Ticker> tickers_;
};

}  // namespace kvshard::test
