#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.hpp"
#include "base/try.hpp"
#include "control/event_loop.hpp"
#include "kvshard/copy_engine.hpp"
#include "kvshard/transport.hpp"

namespace kvshard {

/// Ranks that are made while one of these lives, on its thread, have no thread of their own: they move when
/// turn() is called, or when the caller waits in one of their calls. So a run depends on its input only, and
/// a fuzzer can drive whole ranks. Outlives the ranks.
class ManualTurns {
 public:
  /// `between` runs before each turn of a wait: the peers' part.
  explicit ManualTurns(std::function<void()> between) : between_{std::move(between)} {
    current_ = this;
  }
  ~ManualTurns() { current_ = nullptr; }
  ManualTurns(const ManualTurns&) = delete;
  ManualTurns& operator=(const ManualTurns&) = delete;

  /// One turn of each rank's loop; whether anything happened.
  bool turn() {
    bool busy = false;
    for (EventLoop* const loop : loops_) busy = loop->run_once(Duration{0}) || busy;
    return busy;
  }
  [[nodiscard]] static ManualTurns* current() noexcept { return current_; }

 private:
  friend class ProgressThread;
  static inline thread_local ManualTurns* current_{nullptr};
  std::function<void()> between_;
  std::vector<EventLoop*> loops_;
};

/// A rank's one thread, with what only that thread may use: the event loop, transport and copy engine.
///
/// Threads: start() and stop() by the rank's owner; the rest on the thread itself, or before start().
class ProgressThread {
 public:
  static Result<std::unique_ptr<ProgressThread>> create(std::unique_ptr<Transport> transport,
                                                        std::unique_ptr<CopyEngine> engine,
                                                        const Clock& clock, Duration busy_poll) {
    KVSHARD_TRY(auto loop, EventLoop::create(clock, busy_poll));
    std::unique_ptr<ProgressThread> made{
        new ProgressThread{std::move(transport), std::move(engine), std::move(loop)}};
    KVSHARD_TRY(made->loop_->add_poller(made->transport_poller_));
    KVSHARD_TRY(made->loop_->add_poller(made->copy_poller_));
    return made;
  }

  ~ProgressThread() {
    stop();
    if (manual_ != nullptr) std::erase(manual_->loops_, loop_.get());
    loop_->remove_poller(copy_poller_);
    loop_->remove_poller(transport_poller_);
  }

  void start() {
    if (manual_ != nullptr) return manual_->loops_.push_back(loop_.get());
    thread_ = std::jthread{[this](std::stop_token token) { loop_->run(std::move(token)); }};
  }
  /// Runs what was posted, then ends the thread. May be called twice.
  void stop() noexcept {
    const MutexLock lock{stop_mutex_};
    if (!thread_.joinable()) return;
    thread_.request_stop();
    loop_->post([] {});  // wakes it
    thread_.join();
  }

  /// Waits for what the thread does: until `done()`, under `lock`, or until `until` passes, where there is one.
  /// Returns done().
  template <typename Lock, typename Done>
  bool wait(std::condition_variable_any& changed, Lock& lock,
            std::optional<std::chrono::steady_clock::time_point> until, Done done) {
    if (manual_ == nullptr) {
      if (until) return changed.wait_until(lock, *until, done);
      changed.wait(lock, done);
      return true;
    }
    for (int turns = 0; turns < kManualWait && !done(); ++turns) {
      lock.unlock();
      manual_->between_();
      manual_->turn();
      lock.lock();
    }
    return done();
  }

  [[nodiscard]] EventLoop& loop() noexcept { return *loop_; }
  [[nodiscard]] Transport& transport() noexcept { return *transport_; }
  [[nodiscard]] CopyEngine& engine() noexcept { return *engine_; }

 private:
  struct TransportPoller final : EventLoop::Poller {
    explicit TransportPoller(Transport& transport) noexcept : transport_{transport} {}
    std::size_t progress() noexcept override { return transport_.progress(); }
    [[nodiscard]] int wake_fd() const noexcept override { return transport_.wake_fd(); }
    bool arm() noexcept override { return transport_.arm(); }
    [[nodiscard]] bool busy() const noexcept override { return true; }
    Transport& transport_;
  };
  struct CopyPoller final : EventLoop::Poller {
    explicit CopyPoller(CopyEngine& engine) noexcept : engine_{engine} {}
    std::size_t progress() noexcept override {
      return engine_.in_flight() > 0 ? engine_.progress() : 0;
    }
    [[nodiscard]] int wake_fd() const noexcept override { return engine_.wake_fd(); }
    bool arm() noexcept override { return engine_.arm(); }
    [[nodiscard]] bool busy() const noexcept override { return engine_.in_flight() > 0; }
    [[nodiscard]] Duration spin() const noexcept override {
      return engine_.in_flight() > 0 ? kCopySpin : Duration{0};
    }
    CopyEngine& engine_;
  };

  ProgressThread(std::unique_ptr<Transport> transport, std::unique_ptr<CopyEngine> engine,
                 std::unique_ptr<EventLoop> loop) noexcept
      : transport_{std::move(transport)}, engine_{std::move(engine)}, loop_{std::move(loop)} {}

  // A GPU copies a large piece in half a millisecond; an interrupt and two threads that wake take a fifth of that.
  static constexpr Duration kCopySpin = std::chrono::milliseconds{2};
  static constexpr int kManualWait = 256;  // turns; nothing here takes as many

  ManualTurns* const manual_{ManualTurns::current()};
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<CopyEngine> engine_;
  std::unique_ptr<EventLoop> loop_;
  TransportPoller transport_poller_{*transport_};
  CopyPoller copy_poller_{*engine_};
  Mutex stop_mutex_;  // two threads may stop at once
  std::jthread thread_;
};

/// Counters that one thread writes and any thread may read: plain structs of uint64_t, accessed through
/// atomic_ref so that a snapshot is never torn within a number.
namespace counters {

inline void add(std::uint64_t& counter, std::uint64_t by = 1) noexcept {
  std::atomic_ref{counter}.fetch_add(by, std::memory_order_relaxed);
}
inline void subtract(std::uint64_t& counter, std::uint64_t by = 1) noexcept {
  std::atomic_ref{counter}.fetch_sub(by, std::memory_order_relaxed);
}

/// Of a counter that no other thread writes.
inline void add_alone(std::uint64_t& counter, std::uint64_t by = 1) noexcept {
  std::atomic_ref{counter}.store(std::atomic_ref{counter}.load(std::memory_order_relaxed) + by,
                                 std::memory_order_relaxed);
}

template <typename Stats>
Stats snapshot(Stats& stats) noexcept {
  static_assert(std::is_trivially_copyable_v<Stats> && sizeof(Stats) % sizeof(std::uint64_t) == 0);
  Stats copy;
  auto* const from = reinterpret_cast<std::uint64_t*>(&stats);
  auto* const to = reinterpret_cast<std::uint64_t*>(&copy);
  for (std::size_t i = 0; i < sizeof(Stats) / sizeof(std::uint64_t); ++i) {
    to[i] = std::atomic_ref{from[i]}.load(std::memory_order_relaxed);
  }
  return copy;
}

}  // namespace counters

}  // namespace kvshard
