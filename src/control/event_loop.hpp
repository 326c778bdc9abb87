#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stop_token>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/mutex.hpp"
#include "base/unique_fd.hpp"
#include "kvshard/result.hpp"

namespace kvshard {

/// One thread's work: posted tasks, pollers, timers and file descriptors.
///
/// A turn runs them in that order, then the turn-end handlers. After activity the loop spins for
/// `spin`, or as long as a poller asks for, then arms all pollers and sleeps until a descriptor, a
/// post or the next timer: idle costs no CPU. A callback may destroy or unregister anything, itself
/// included: what was unregistered is not called again, also not in the same turn.
///
/// Owns:    posted tasks and timers' tasks. Handlers and pollers are borrowed until unregistered.
/// Threads: post() and wake() are thread-safe; all else belongs to the thread that runs the loop.
/// Before
///          that thread starts and after it was joined, any one thread may call.
/// Errors:  watch(), rewatch() and add_poller() give what epoll said; nothing else fails.
/// Cost:    timers are O(log n); post() makes a system call only when the loop sleeps.
class EventLoop {
 public:
  using Task = std::function<void()>;
  using TimerId = std::uint64_t;  ///< 0 is no timer

  /// Hears that a descriptor is ready: a set of EPOLL* bits.
  class FdHandler {
   public:
    virtual void fd_ready(std::uint32_t epoll_events) noexcept = 0;

   protected:
    ~FdHandler() = default;
  };

  /// Something that must be polled: a UCX worker, a copy engine.
  class Poller {
   public:
    virtual std::size_t progress() noexcept = 0;             ///< how much happened
    [[nodiscard]] virtual int wake_fd() const noexcept = 0;  ///< -1: polled while busy(). Constant.
    virtual bool arm() noexcept = 0;  ///< false: progress again instead of sleeping
    [[nodiscard]] virtual bool busy() const noexcept = 0;  ///< with wake_fd() == -1: must be polled
    /// How long to poll before a sleep, where what comes next comes sooner than a sleeper wakes.
    [[nodiscard]] virtual Duration spin() const noexcept { return Duration{0}; }

   protected:
    ~Poller() = default;
  };

  /// Runs once, at the end of the turn in which it was registered.
  class TurnEndHandler {
   public:
    virtual void turn_end() noexcept = 0;

   protected:
    ~TurnEndHandler() = default;
  };

  /// `clock` outlives the loop; it decides when timers fire. `spin` is how long the loop looks for more work
  /// before it sleeps: real time, whatever the clock is.
  static Result<std::unique_ptr<EventLoop>> create(const Clock& clock = SteadyClock::instance(),
                                                   Duration spin = std::chrono::microseconds{50});
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  /// Runs `task` on the loop's thread, in order of posting. Once run() has returned, tasks are
  /// dropped: destroyed without being run.
  void post(Task task);
  /// Makes run_once() return. For a clock that was moved while the loop sleeps.
  void wake();

  /// Turns until `stop` is requested, then runs what was posted before that and returns.
  void run(std::stop_token stop);
  /// One turn that finds something to do, or `max_wait` (real time) or a wake() without one.
  /// Returns whether anything happened. With 0 it never blocks.
  bool run_once(Duration max_wait);

  [[nodiscard]] const Clock& clock() const noexcept { return clock_; }
  /// The clock's time at the start of this turn.
  [[nodiscard]] TimePoint now() const noexcept { return now_; }

  /// Runs `task` once, in the first turn that starts at `when` or later; never inside this call.
  TimerId at(TimePoint when, Task task);
  /// Idempotent: a timer that ran, or 0, is ignored.
  void cancel(TimerId id) noexcept;

  /// Calls `handler` while any of `epoll_events` (level-triggered) holds. Call unwatch() before
  /// `fd` is closed.
  Status watch(int fd, std::uint32_t epoll_events, FdHandler& handler);
  Status rewatch(int fd, std::uint32_t epoll_events, FdHandler& handler);
  void unwatch(int fd) noexcept;

  Status add_poller(Poller& poller);
  void remove_poller(Poller& poller) noexcept;

  /// Register each handler at most once a turn.
  void at_turn_end(TurnEndHandler& handler) { turn_end_.push_back(&handler); }
  void cancel_turn_end(TurnEndHandler& handler) noexcept;

 private:
  struct Watch {
    FdHandler* handler{nullptr};
    std::uint32_t generation{0};
  };
  using TimerKey = std::pair<TimePoint, TimerId>;

  EventLoop(const Clock& clock, Duration spin, UniqueFd epoll, UniqueFd wake) noexcept
      : clock_{clock},
        spin_{spin},
        now_{clock.now()},
        epoll_{std::move(epoll)},
        wake_{std::move(wake)} {}

  std::size_t turn(Duration max_sleep);
  std::size_t run_posted();
  std::size_t run_taken();
  std::size_t run_pollers() noexcept;
  std::size_t run_timers();
  std::size_t run_fds(Duration max_sleep);
  std::size_t run_turn_end() noexcept;
  bool pollers_may_sleep() noexcept;
  [[nodiscard]] Duration spin() const noexcept;
  bool begin_sleep();
  void end_sleep() KVSHARD_REQUIRES(mutex_);
  Status control(int operation, int fd, std::uint32_t epoll_events,
                 std::uint32_t generation) noexcept;

  const Clock& clock_;
  const Duration spin_;
  TimePoint now_;
  UniqueFd epoll_;
  UniqueFd wake_;  // an eventfd; readable when a sleeping loop must get up

  Mutex mutex_;
  std::vector<Task> posted_ KVSHARD_GUARDED_BY(mutex_);
  bool sleeping_ KVSHARD_GUARDED_BY(mutex_){false};
  bool woken_ KVSHARD_GUARDED_BY(mutex_){false};
  bool stopped_ KVSHARD_GUARDED_BY(mutex_){false};
  // A hint that saves the lock in turns with nothing posted; the mutex orders the tasks themselves.
  std::atomic<bool> has_posted_{false};

  std::vector<Task> taken_;  // from posted_, being run

  std::map<TimerKey, Task> timers_;
  std::unordered_map<TimerId, TimePoint> timer_times_;
  TimerId next_timer_{1};

  std::unordered_map<int, Watch> watches_;
  std::uint32_t next_generation_{1};  // 0 marks descriptors that only end a sleep

  std::vector<Poller*> pollers_;           // null: removed, erased at the start of the next turn
  std::vector<TurnEndHandler*> turn_end_;  // null: cancelled
};

}  // namespace kvshard
