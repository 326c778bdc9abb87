#include "control/event_loop.hpp"

#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <array>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "support/manual_clock.hpp"

namespace kvshard {
namespace {

using namespace std::chrono_literals;

class EventLoopTest : public testing::Test {
 protected:
  ManualClock clock_;
  std::unique_ptr<EventLoop> loop_ = std::move(EventLoop::create(clock_)).value();
  std::string log_;  // what ran, in order

  EventLoop::Task note(char c) {
    return [this, c] { log_ += c; };
  }
  bool turn() { return loop_->run_once(0ns); }
};

struct Fd final : EventLoop::FdHandler {
  std::function<void(std::uint32_t)> on_ready;
  void fd_ready(std::uint32_t events) noexcept override { on_ready(events); }
};

struct Pair {
  UniqueFd a;
  UniqueFd b;
  Pair() {
    std::array<int, 2> fds{};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds.data()), 0);
    a = UniqueFd{fds[0]};
    b = UniqueFd{fds[1]};
  }
  void write_to_a() const { EXPECT_EQ(::write(b.get(), "x", 1), 1); }
};

TEST_F(EventLoopTest, RunsPostedTasksInOrder) {
  for (const char c : {'a', 'b', 'c'}) loop_->post(note(c));
  EXPECT_TRUE(turn());
  EXPECT_EQ(log_, "abc");
  EXPECT_FALSE(turn());
}

TEST_F(EventLoopTest, RunsATaskPostedByATaskInTheNextTurn) {
  loop_->post([this] {
    log_ += 'a';
    loop_->post(note('b'));
  });
  EXPECT_TRUE(turn());
  EXPECT_EQ(log_, "a");
  EXPECT_TRUE(turn());
  EXPECT_EQ(log_, "ab");
}

TEST_F(EventLoopTest, RunsTimersWhenTheClockSaysSo) {
  const TimePoint start = clock_.now();
  loop_->at(start + 2s, note('b'));
  loop_->at(start + 1s, note('a'));
  loop_->at(start + 2s, note('c'));  // the same time: in the order they were set
  loop_->at(start + 3s, note('d'));
  EXPECT_FALSE(turn());
  clock_.advance(999ms);
  EXPECT_FALSE(turn());
  clock_.advance(1ms);
  EXPECT_TRUE(turn());
  EXPECT_EQ(log_, "a");
  clock_.advance(1s);
  EXPECT_TRUE(turn());
  EXPECT_EQ(log_, "abc");
  EXPECT_EQ(loop_->now(), start + 2s);
}

TEST_F(EventLoopTest, RunsATimerThatIsDueAlreadyInALaterTurn) {
  loop_->at(clock_.now() - 1h, [this] {
    log_ += 'a';
    loop_->at(clock_.now(),
              note('b'));  // not in this turn, or a timer could keep the loop for ever
  });
  EXPECT_EQ(log_, "");
  EXPECT_TRUE(turn());
  EXPECT_EQ(log_, "a");
  EXPECT_TRUE(turn());
  EXPECT_EQ(log_, "ab");
}

TEST_F(EventLoopTest, DoesNotRunACancelledTimer) {
  const auto id = loop_->at(clock_.now(), note('a'));
  loop_->cancel(id);
  loop_->cancel(id);
  loop_->cancel(0);
  EXPECT_FALSE(turn());
}

TEST_F(EventLoopTest, ATimerCancelsAnotherThatIsDueInTheSameTurn) {
  EventLoop::TimerId first = 0;
  EventLoop::TimerId second = 0;
  first = loop_->at(clock_.now(), [&] {
    loop_->cancel(second);
    loop_->cancel(first);  // itself: it runs already
    log_ += 'a';
  });
  second = loop_->at(clock_.now(), note('b'));
  loop_->at(clock_.now(), note('c'));
  EXPECT_TRUE(turn());
  EXPECT_EQ(log_, "ac");
}

TEST_F(EventLoopTest, CallsAHandlerWhileItsDescriptorIsReady) {
  Pair pair;
  Fd fd;
  fd.on_ready = [this](std::uint32_t events) { log_ += (events & EPOLLIN) != 0 ? 'i' : 'o'; };
  ASSERT_TRUE(loop_->watch(pair.a.get(), EPOLLIN, fd));
  EXPECT_FALSE(turn());
  pair.write_to_a();
  EXPECT_TRUE(turn());
  EXPECT_TRUE(turn());  // level-triggered
  ASSERT_TRUE(loop_->rewatch(pair.a.get(), EPOLLOUT, fd));
  EXPECT_TRUE(turn());
  EXPECT_EQ(log_, "iio");
  loop_->unwatch(pair.a.get());
  loop_->unwatch(pair.a.get());
  EXPECT_FALSE(turn());
}

TEST_F(EventLoopTest, WatchingFailsAsAnError) {
  Fd fd;
  EXPECT_FALSE(loop_->watch(-1, EPOLLIN, fd));
  EXPECT_FALSE(loop_->rewatch(0, EPOLLIN, fd));
  Pair pair;
  ASSERT_TRUE(loop_->watch(pair.a.get(), EPOLLIN, fd));
  const Status twice = loop_->watch(pair.a.get(), EPOLLIN, fd);
  ASSERT_FALSE(twice);
  EXPECT_EQ(twice.error().code, ErrorCode::internal);
  loop_->unwatch(pair.a.get());
}

TEST_F(EventLoopTest, AnUnwatchedHandlerIsNotCalledAlsoInTheSameTurn) {
  // Each of two ready descriptors unwatches the other and destroys its handler: only one is called.
  Pair one, two;
  auto first = std::make_unique<Fd>();
  auto second = std::make_unique<Fd>();
  first->on_ready = [&](std::uint32_t) {
    log_ += 'x';
    loop_->unwatch(two.a.get());
    second.reset();
  };
  second->on_ready = [&](std::uint32_t) {
    log_ += 'x';
    loop_->unwatch(one.a.get());
    first.reset();
  };
  ASSERT_TRUE(loop_->watch(one.a.get(), EPOLLIN, *first));
  ASSERT_TRUE(loop_->watch(two.a.get(), EPOLLIN, *second));
  one.write_to_a();
  two.write_to_a();
  EXPECT_TRUE(turn());
  EXPECT_EQ(log_, "x");
  loop_->unwatch(one.a.get());
  loop_->unwatch(two.a.get());
}

TEST_F(EventLoopTest, AnEventOfAClosedDescriptorDoesNotReachTheNextWithItsNumber) {
  // Whichever of the two ready descriptors comes first replaces the other by a new one that is not ready,
  // under the same number.
  std::array<Pair, 2> pairs;
  Pair fresh;
  std::array<Fd, 2> handlers;
  Fd wrong;
  wrong.on_ready = [this](std::uint32_t) { log_ += '!'; };
  for (std::size_t i = 0; i < 2; ++i) {
    handlers[i].on_ready = [&, i](std::uint32_t) {
      log_ += 'x';
      const int other = pairs[1 - i].a.get();
      loop_->unwatch(other);
      ASSERT_EQ(::dup2(fresh.a.get(), other), other);
      ASSERT_TRUE(loop_->watch(other, EPOLLIN, wrong));
    };
    ASSERT_TRUE(loop_->watch(pairs[i].a.get(), EPOLLIN, handlers[i]));
    pairs[i].write_to_a();
  }
  EXPECT_TRUE(turn());
  EXPECT_EQ(log_, "x");
  for (const Pair& pair : pairs) loop_->unwatch(pair.a.get());
}

struct CountingPoller final : EventLoop::Poller {
  std::function<std::size_t()> on_progress = [] { return std::size_t{0}; };
  int fd{-1};
  int arms{0};
  int refuse_arms{0};
  bool is_busy{false};
  Duration spins{0};

  std::size_t progress() noexcept override { return on_progress(); }
  int wake_fd() const noexcept override { return fd; }
  bool arm() noexcept override {
    ++arms;
    return refuse_arms-- <= 0;
  }
  bool busy() const noexcept override { return is_busy; }
  Duration spin() const noexcept override { return spins; }
};

TEST_F(EventLoopTest, RunsPostedTasksThenPollersThenTimersThenDescriptorsThenTurnEnd) {
  struct End final : EventLoop::TurnEndHandler {
    std::string* log{nullptr};
    void turn_end() noexcept override { *log += 'e'; }
  } end;
  end.log = &log_;
  CountingPoller poller;
  poller.on_progress = [this] {
    log_ += 'b';
    return std::size_t{1};
  };
  Pair pair;
  Fd fd;
  fd.on_ready = [&](std::uint32_t) {
    log_ += 'd';
    loop_->at_turn_end(end);
  };
  ASSERT_TRUE(loop_->add_poller(poller));
  ASSERT_TRUE(loop_->watch(pair.a.get(), EPOLLIN, fd));
  pair.write_to_a();
  loop_->at(clock_.now(), note('c'));
  loop_->post(note('a'));
  EXPECT_TRUE(turn());
  EXPECT_EQ(log_, "abcde");
  loop_->unwatch(pair.a.get());
  loop_->remove_poller(poller);
  EXPECT_FALSE(turn());
}

TEST_F(EventLoopTest, ACancelledTurnEndHandlerIsNotCalled) {
  struct End final : EventLoop::TurnEndHandler {
    std::function<void()> call;
    void turn_end() noexcept override { call(); }
  };
  End first, second, third;
  first.call = [&] {
    log_ += 'a';
    loop_->cancel_turn_end(second);
    loop_->at_turn_end(third);  // joins this turn's end
  };
  second.call = note('b');
  third.call = note('c');
  loop_->at_turn_end(first);
  loop_->at_turn_end(second);
  EXPECT_TRUE(turn());
  EXPECT_EQ(log_, "ac");
  EXPECT_FALSE(turn());
}

TEST_F(EventLoopTest, APollerRemovesItselfAndAnother) {
  CountingPoller first, second, third;
  first.on_progress = [&] {
    log_ += 'a';
    loop_->remove_poller(first);
    loop_->remove_poller(second);
    return std::size_t{1};
  };
  second.on_progress = [&] {
    log_ += 'b';
    return std::size_t{1};
  };
  third.on_progress = [&] {
    log_ += 'c';
    return std::size_t{0};
  };
  for (auto* poller : {&first, &second, &third}) ASSERT_TRUE(loop_->add_poller(*poller));
  EXPECT_TRUE(turn());
  EXPECT_EQ(log_, "ac");
  EXPECT_FALSE(turn());
  EXPECT_EQ(log_, "acc");
}

TEST_F(EventLoopTest, ArmsAPollerBeforeItSleepsAndWakesByItsDescriptor) {
  const UniqueFd event{::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
  CountingPoller poller;
  poller.fd = event.get();
  poller.refuse_arms = 1;  // something came while it was being armed: progress again
  std::uint64_t got = 0;
  poller.on_progress = [&]() -> std::size_t {
    return ::read(event.get(), &got, sizeof got) == sizeof got ? 1 : 0;
  };
  ASSERT_TRUE(loop_->add_poller(poller));
  EXPECT_FALSE(loop_->run_once(1ms));  // sleeps, and nothing comes
  EXPECT_GE(poller.arms, 2);

  std::jthread waker{[&] {
    const std::uint64_t value = 7;
    EXPECT_EQ(::write(event.get(), &value, sizeof value), static_cast<ssize_t>(sizeof value));
  }};
  EXPECT_TRUE(loop_->run_once(1h));
  EXPECT_EQ(got, 7U);
  loop_->remove_poller(poller);
}

TEST_F(EventLoopTest, PollsABusyPollerThatHasNoDescriptor) {
  CountingPoller poller;
  poller.is_busy = true;
  int calls = 0;
  poller.on_progress = [&]() -> std::size_t { return ++calls == 10'000 ? 1 : 0; };
  ASSERT_TRUE(loop_->add_poller(poller));
  EXPECT_TRUE(loop_->run_once(1h));  // would sleep for an hour if it did not go on polling
  EXPECT_EQ(calls, 10'000);
  loop_->remove_poller(poller);
}

// `loop` turns until its poller has something, without a sleep between.
void expect_polls(EventLoop& loop, Duration poller_spins) {
  const UniqueFd event{::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
  CountingPoller poller;
  poller.fd = event.get();
  poller.spins = poller_spins;
  int calls = 0;
  poller.on_progress = [&]() -> std::size_t { return ++calls == 10'000 ? 1 : 0; };
  ASSERT_TRUE(loop.add_poller(poller));
  EXPECT_TRUE(loop.run_once(2h));
  EXPECT_EQ(calls, 10'000);
  EXPECT_EQ(poller.arms, 0);
  loop.remove_poller(poller);
}

TEST_F(EventLoopTest, PollsForAsLongAsAPollerAsks) {
  expect_polls(*loop_, 1h);
}

TEST_F(EventLoopTest, PollsForAsLongAsItWasMadeTo) {
  auto loop = std::move(EventLoop::create(clock_, 1h)).value();
  expect_polls(*loop, Duration{0});
}

TEST_F(EventLoopTest, WakesFromSleepForAPostAndForWake) {
  std::jthread poster{[&] { loop_->post(note('a')); }};
  EXPECT_TRUE(loop_->run_once(1h));
  EXPECT_EQ(log_, "a");
  std::jthread waker{[&] { loop_->wake(); }};
  EXPECT_FALSE(loop_->run_once(1h));
}

TEST_F(EventLoopTest, SleepsUntilTheNextTimerOfARealClock) {
  auto loop = std::move(EventLoop::create()).value();
  const TimePoint due = loop->clock().now() + 5ms;
  TimePoint ran{};
  loop->at(due, [&] { ran = loop->clock().now(); });
  while (ran == TimePoint{}) loop->run_once(1h);
  EXPECT_GE(ran, due);
}

TEST_F(EventLoopTest, IdleCostsNoProcessorTime) {
  auto loop = std::move(EventLoop::create()).value();
  const auto used = [] {
    rusage usage{};
    ::getrusage(RUSAGE_THREAD, &usage);
    return std::chrono::seconds{usage.ru_utime.tv_sec + usage.ru_stime.tv_sec} +
           std::chrono::microseconds{usage.ru_utime.tv_usec + usage.ru_stime.tv_usec};
  };
  const auto before = used();
  EXPECT_FALSE(loop->run_once(200ms));
  EXPECT_LT(used() - before, 50ms);
}

TEST_F(EventLoopTest, RunStopsAfterTheTasksPostedBefore) {
  int ran = 0;
  std::jthread thread{[&](std::stop_token stop) { loop_->run(std::move(stop)); }};
  for (int i = 0; i < 1000; ++i) loop_->post([&] { ++ran; });
  thread.request_stop();
  thread.join();
  EXPECT_EQ(ran, 1000);
}

TEST_F(EventLoopTest, DropsWhatIsPostedAfterItStopped) {
  const auto stop = std::make_unique<std::stop_source>();  // gcc 12 warns of one on the stack
  stop->request_stop();
  const auto token = std::make_shared<int>(0);
  loop_->post([this, token] {
    log_ += 'a';
    loop_->post([this, token] { log_ += 'b'; });  // after the stop
  });
  loop_->run(stop->get_token());
  EXPECT_EQ(log_, "a");
  loop_->post([token] {});
  EXPECT_EQ(token.use_count(), 1);
}

TEST_F(EventLoopTest, DestroysTasksThatNeverRan) {
  const auto token = std::make_shared<int>(0);
  struct Canceller {
    EventLoop* loop;
    EventLoop::TimerId id;
    ~Canceller() { loop->cancel(id); }
  };
  const auto other = loop_->at(clock_.now() + 1h, [token] {});
  loop_->at(clock_.now() + 2h, [token, c = std::make_shared<Canceller>(loop_.get(), other)] {});
  loop_->post([token, c = std::make_shared<Canceller>(loop_.get(), other)] {});
  loop_.reset();
  EXPECT_EQ(token.use_count(), 1);
}

TEST_F(EventLoopTest, TakesPostsFromManyThreads) {
  constexpr int kThreads = 4;
  constexpr int kPosts = 2000;
  std::vector<int> last(kThreads, -1);
  int ran = 0;
  std::vector<std::jthread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kPosts; ++i) {
        loop_->post([&, t, i] {
          EXPECT_EQ(last[static_cast<std::size_t>(t)], i - 1);  // each thread's in its own order
          last[static_cast<std::size_t>(t)] = i;
          ++ran;
        });
      }
    });
  }
  while (ran < kThreads * kPosts) loop_->run_once(1h);
  EXPECT_EQ(ran, kThreads * kPosts);
}

}  // namespace
}  // namespace kvshard
