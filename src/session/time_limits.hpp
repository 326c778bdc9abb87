#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <initializer_list>
#include <string_view>
#include <utility>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "kvshard/result.hpp"

namespace kvshard {

/// Longer waits are cut to this, so that a deadline never overflows the clock.
inline constexpr std::chrono::milliseconds kLongestWait = std::chrono::hours{24 * 365};

[[nodiscard]] constexpr std::chrono::milliseconds bounded(std::chrono::milliseconds wait) noexcept {
  return std::clamp(wait, std::chrono::milliseconds{0}, kLongestWait);
}

struct NamedTime {
  std::string_view name;
  std::chrono::milliseconds value;
};

/// Whether a rank's times make sense: each in [1 ms, kLongestWait], and a peer is heard of before it is
/// taken for lost. Errors: invalid_argument naming the option and its value.
inline Status check_times(std::initializer_list<NamedTime> times,
                          std::chrono::milliseconds heartbeat,
                          std::chrono::milliseconds peer_timeout) {
  for (const NamedTime& time : times) {
    if (time.value.count() < 1 || time.value > kLongestWait) {
      return Error{ErrorCode::invalid_argument,
                   fmt::format("{} is {} ms, must be from 1 to {}", time.name, time.value.count(),
                               kLongestWait.count())};
    }
  }
  if (heartbeat >= peer_timeout) {
    return Error{ErrorCode::invalid_argument,
                 fmt::format("heartbeat {} ms must be below peer_timeout {} ms", heartbeat.count(),
                             peer_timeout.count())};
  }
  return {};
}

/// Errors: invalid_argument for less than 0 or more than kLongestWait.
inline Status check_busy_poll(std::chrono::microseconds busy_poll) {
  if (busy_poll.count() >= 0 && busy_poll <= kLongestWait) return {};
  return Error{ErrorCode::invalid_argument,
               fmt::format("busy_poll is {} us, must be from 0 to {}", busy_poll.count(),
                           std::chrono::microseconds{kLongestWait}.count())};
}

/// How long a rank did not look at its peers before `time`, when that is longer than its heartbeat; else 0. Its process
/// was stopped, or its machine stood still, and the peers perhaps with it: nobody is judged by that time.
inline Duration pause_before(TimePoint time, TimePoint& swept, std::chrono::milliseconds heartbeat,
                             std::string_view rank) {
  const Duration pause = time - std::exchange(swept, time);
  if (pause <= heartbeat) return Duration{0};
  log::warning(
      "this {} rank did not run for {} ms, its heartbeat is {} ms; its peers are not judged by "
      "that time",
      rank, std::chrono::duration_cast<std::chrono::milliseconds>(pause).count(),
      heartbeat.count());
  return pause;
}

}  // namespace kvshard
