#include "control/event_loop.hpp"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <limits>
#include <system_error>
#include <utility>

#include "base/assert.hpp"

namespace kvshard {
namespace {

constexpr int kEventsPerTurn = 64;

Error epoll_error(const char* call, int fd, int error) {
  const bool exhausted = error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOSPC;
  return Error{exhausted ? ErrorCode::resource_exhausted : ErrorCode::internal,
               fmt::format("{} of fd {}: {}", call, fd, std::generic_category().message(error))};
}

// epoll counts milliseconds. Rounded up: a timer's turn must not come before the timer is due.
int to_epoll_timeout(Duration wait) noexcept {
  constexpr Duration::rep kLongest = 24 * 3600 * 1000;  // wakes an idle loop once a day
  const auto milliseconds = std::chrono::ceil<std::chrono::milliseconds>(wait).count();
  return static_cast<int>(std::clamp<Duration::rep>(milliseconds, 0, kLongest));
}

}  // namespace

Result<std::unique_ptr<EventLoop>> EventLoop::create(const Clock& clock, Duration spin) {
  UniqueFd epoll{::epoll_create1(EPOLL_CLOEXEC)};
  if (!epoll) return epoll_error("epoll_create1", -1, errno);
  UniqueFd wake{::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
  if (!wake) return epoll_error("eventfd", -1, errno);
  std::unique_ptr<EventLoop> loop{new EventLoop{clock, spin, std::move(epoll), std::move(wake)}};
  if (Status status = loop->control(EPOLL_CTL_ADD, loop->wake_.get(), EPOLLIN, 0); !status)
    return std::move(status).error();
  return loop;
}

EventLoop::~EventLoop() {
  // A task may own what unregisters itself here; it has to find the loop alive.
  std::vector<Task> posted;
  {
    const MutexLock lock{mutex_};
    stopped_ = true;
    posted.swap(posted_);
  }
  posted.clear();
  while (!timers_.empty()) {
    const auto timer = timers_.extract(timers_.begin());
    timer_times_.erase(timer.key().second);
  }
}

void EventLoop::post(Task task) {
  const MutexLock lock{mutex_};
  if (stopped_) return;  // `task` is the caller's to destroy, after the lock is gone
  posted_.push_back(std::move(task));
  has_posted_.store(true, std::memory_order_relaxed);
  if (sleeping_) end_sleep();
}

void EventLoop::wake() {
  const MutexLock lock{mutex_};
  woken_ = true;
  if (sleeping_) end_sleep();
}

void EventLoop::end_sleep() {
  sleeping_ = false;  // one write is enough to get the loop up
  const std::uint64_t one = 1;
  // Fails only when the counter is full, and then the descriptor is readable anyway.
  [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof one);
}

bool EventLoop::begin_sleep() {
  const MutexLock lock{mutex_};
  sleeping_ = posted_.empty() && !woken_;
  return sleeping_;
}

void EventLoop::run(std::stop_token stop) {
  {
    const MutexLock lock{mutex_};
    stopped_ = false;
  }
  {
    const std::stop_callback on_stop{stop, [this] { wake(); }};
    while (!stop.stop_requested()) run_once(Duration::max());
  }
  {
    const MutexLock lock{mutex_};
    stopped_ = true;
    taken_.swap(posted_);
    has_posted_.store(false, std::memory_order_relaxed);
  }
  run_taken();
  run_turn_end();
}

bool EventLoop::run_once(Duration max_wait) {
  // The spin bounds processor time, so it is measured in real time.
  const auto start = std::chrono::steady_clock::now();
  Duration sleep{0};
  for (;;) {
    if (turn(sleep) != 0) return true;
    const Duration waited = std::chrono::steady_clock::now() - start;
    {
      const MutexLock lock{mutex_};
      if (std::exchange(woken_, false)) return false;
    }
    if (waited >= max_wait) return false;
    sleep = waited < spin() ? Duration{0} : max_wait - waited;
  }
}

std::size_t EventLoop::turn(Duration max_sleep) {
  now_ = clock_.now();
  std::erase(pollers_, nullptr);
  std::size_t happened = run_posted() + run_pollers() + run_timers();
  if (happened != 0) max_sleep = Duration{0};
  happened += run_fds(max_sleep);
  return happened + run_turn_end();
}

std::size_t EventLoop::run_posted() {
  // A post that this misses is found by begin_sleep(), under the lock.
  if (!has_posted_.load(std::memory_order_relaxed)) return 0;
  {
    const MutexLock lock{mutex_};
    taken_.swap(posted_);  // two vectors that change places allocate nothing once warm
    has_posted_.store(false, std::memory_order_relaxed);
  }
  return run_taken();
}

std::size_t EventLoop::run_taken() {
  for (Task& task : taken_) std::exchange(task, nullptr)();
  const std::size_t count = taken_.size();
  taken_.clear();
  return count;
}

std::size_t EventLoop::run_pollers() noexcept {
  std::size_t happened = 0;
  for (std::size_t i = 0; i < pollers_.size(); ++i) {  // a poller may add another
    if (pollers_[i] != nullptr) happened += pollers_[i]->progress();
  }
  return happened;
}

std::size_t EventLoop::run_timers() {
  std::size_t happened = 0;
  // Timers that the tasks set wait for the next turn, so that this ends.
  const TimerId first_new = next_timer_;
  for (auto timer = timers_.begin(); timer != timers_.end() && timer->first.first <= now_;) {
    if (timer->first.second >= first_new) {
      ++timer;
      continue;
    }
    const auto due = timers_.extract(timer);
    timer_times_.erase(due.key().second);
    due.mapped()();
    ++happened;
    timer = timers_.begin();
  }
  return happened;
}

std::size_t EventLoop::run_fds(Duration max_sleep) {
  if (max_sleep > Duration{0}) {
    if (!timers_.empty())
      max_sleep = std::min(max_sleep, timers_.begin()->first.first - clock_.now());
    if (max_sleep <= Duration{0} || !pollers_may_sleep() || !begin_sleep()) max_sleep = Duration{0};
  }
  std::array<epoll_event, kEventsPerTurn> events;
  const int count =
      ::epoll_wait(epoll_.get(), events.data(), kEventsPerTurn, to_epoll_timeout(max_sleep));
  if (max_sleep > Duration{0}) {
    const MutexLock lock{mutex_};
    sleeping_ = false;
  }
  if (count > 0 && max_sleep > Duration{0}) now_ = clock_.now();

  std::size_t happened = 0;
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[static_cast<std::size_t>(i)];
    const auto fd = static_cast<int>(event.data.u64 & 0xffffffffU);
    const auto generation = static_cast<std::uint32_t>(event.data.u64 >> 32);
    if (generation == 0) {  // it ended the sleep; what it stands for is found by the next turn
      std::uint64_t drained = 0;
      if (fd == wake_.get()) [[maybe_unused]]
        const auto read = ::read(fd, &drained, sizeof drained);
      continue;
    }
    // An earlier handler of this turn may have unwatched the descriptor, even watched a new one
    // with its number.
    const auto watch = watches_.find(fd);
    if (watch == watches_.end() || watch->second.generation != generation) continue;
    watch->second.handler->fd_ready(event.events);
    ++happened;
  }
  return happened;
}

std::size_t EventLoop::run_turn_end() noexcept {
  std::size_t happened = 0;
  for (std::size_t i = 0; i < turn_end_.size(); ++i) {  // a handler may register another
    if (turn_end_[i] == nullptr) continue;
    std::exchange(turn_end_[i], nullptr)->turn_end();
    ++happened;
  }
  turn_end_.clear();
  return happened;
}

void EventLoop::cancel_turn_end(TurnEndHandler& handler) noexcept {
  std::ranges::replace(turn_end_, &handler, nullptr);
}

Duration EventLoop::spin() const noexcept {
  Duration longest = spin_;
  for (const Poller* const poller : pollers_)
    if (poller != nullptr) longest = std::max(longest, poller->spin());
  return longest;
}

bool EventLoop::pollers_may_sleep() noexcept {
  return std::ranges::all_of(pollers_, [](Poller* poller) {
    return poller == nullptr || (poller->wake_fd() < 0 ? !poller->busy() : poller->arm());
  });
}

EventLoop::TimerId EventLoop::at(TimePoint when, Task task) {
  const TimerId id = next_timer_++;
  timers_.emplace(TimerKey{when, id}, std::move(task));
  timer_times_.emplace(id, when);
  return id;
}

void EventLoop::cancel(TimerId id) noexcept {
  const auto time = timer_times_.find(id);
  if (time == timer_times_.end()) return;
  // Destroyed last: the task may own something that cancels timers too.
  const auto timer = timers_.extract(TimerKey{time->second, id});
  timer_times_.erase(time);
}

Status EventLoop::control(int operation, int fd, std::uint32_t epoll_events,
                          std::uint32_t generation) noexcept {
  epoll_event event{};
  event.events = epoll_events;
  event.data.u64 = std::uint64_t{generation} << 32 | static_cast<std::uint32_t>(fd);
  if (::epoll_ctl(epoll_.get(), operation, fd, &event) == 0) return {};
  return epoll_error("epoll_ctl", fd, errno);
}

Status EventLoop::watch(int fd, std::uint32_t epoll_events, FdHandler& handler) {
  const std::uint32_t generation = next_generation_;
  if (Status status = control(EPOLL_CTL_ADD, fd, epoll_events, generation); !status) return status;
  next_generation_ = generation == std::numeric_limits<std::uint32_t>::max() ? 1 : generation + 1;
  watches_[fd] = Watch{&handler, generation};
  return {};
}

Status EventLoop::rewatch(int fd, std::uint32_t epoll_events, FdHandler& handler) {
  const auto watch = watches_.find(fd);
  if (watch == watches_.end())
    return Error{ErrorCode::internal, fmt::format("rewatch of fd {}, which is not watched", fd)};
  watch->second.handler = &handler;
  return control(EPOLL_CTL_MOD, fd, epoll_events, watch->second.generation);
}

void EventLoop::unwatch(int fd) noexcept {
  if (watches_.erase(fd) == 0) return;
  [[maybe_unused]] const Status status = control(EPOLL_CTL_DEL, fd, 0, 0);
  KVSHARD_ASSERT(status.ok());
}

Status EventLoop::add_poller(Poller& poller) {
  if (poller.wake_fd() >= 0) {
    if (Status status = control(EPOLL_CTL_ADD, poller.wake_fd(), EPOLLIN, 0); !status)
      return status;
  }
  pollers_.push_back(&poller);
  return {};
}

void EventLoop::remove_poller(Poller& poller) noexcept {
  const auto found = std::ranges::find(pollers_, &poller);
  if (found == pollers_.end()) return;
  *found = nullptr;
  if (poller.wake_fd() >= 0) (void)control(EPOLL_CTL_DEL, poller.wake_fd(), 0, 0);
}

}  // namespace kvshard
