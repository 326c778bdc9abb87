#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <deque>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "base/mutex.hpp"
#include "base/unique_fd.hpp"
#include "kvshard/result.hpp"

namespace kvshard {

/// Terminal events on their way from the progress thread to whoever polls, with an eventfd that is
/// readable while there are any.
///
/// Threads: thread-safe.
template <typename Event>
class EventQueue {
 public:
  /// To be called once, before anything else.
  Status open() {
    fd_ = UniqueFd{::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
    if (!fd_)
      return Error{ErrorCode::resource_exhausted, fmt::format("eventfd: {}", std::strerror(errno))};
    return {};
  }

  void push(Event event) {
    const MutexLock lock{mutex_};
    events_.push_back(std::move(event));
    if (events_.size() == 1) signal();
  }

  std::size_t poll(std::span<Event> out) {
    const MutexLock lock{mutex_};
    const std::size_t count = std::min(out.size(), events_.size());
    std::move(events_.begin(), events_.begin() + static_cast<std::ptrdiff_t>(count), out.begin());
    events_.erase(events_.begin(), events_.begin() + static_cast<std::ptrdiff_t>(count));
    if (count > 0 && events_.empty()) clear();
    return count;
  }

  [[nodiscard]] int fd() const noexcept { return fd_.get(); }

 private:
  // An eventfd never blocks a small write before 2^64 - 1; a failure could only be our own bug.
  void signal() noexcept {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(fd_.get(), &one, sizeof one);
  }
  void clear() noexcept {
    std::uint64_t count = 0;
    [[maybe_unused]] const auto read = ::read(fd_.get(), &count, sizeof count);
  }

  Mutex mutex_;
  std::deque<Event> events_ KVSHARD_GUARDED_BY(mutex_);
  UniqueFd fd_;
};

}  // namespace kvshard
