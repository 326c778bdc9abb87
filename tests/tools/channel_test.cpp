// The socket between a tool and its rank processes.
#include <gtest/gtest.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>

#include <atomic>
#include <csignal>
#include <optional>
#include <thread>
#include <utility>

#include "support/channel.hpp"

namespace kvshard::tools {
namespace {

std::pair<Channel, Channel> make_pair() {
  int ends[2] = {-1, -1};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  return {Channel{UniqueFd{ends[0]}}, Channel{UniqueFd{ends[1]}}};
}

TEST(ChannelTest, CarriesAMessageAndTellsThatTheOtherEndIsGone) {
  auto [here, there] = make_pair();
  ASSERT_TRUE(there.send({{"rank", 3}}));
  const auto message = here.receive();
  ASSERT_TRUE(message);
  EXPECT_EQ(*message, (Json{{"rank", 3}}));
  there = Channel{UniqueFd{}};
  EXPECT_FALSE(here.receive());
  EXPECT_FALSE(here.send(1));
}

// A signal as of a debugger, or of a process that is stopped and goes on: it ends a call that waits.
class InterruptTest : public ::testing::Test {
 protected:
  InterruptTest() {
    struct sigaction count {};
    count.sa_handler = [](int) { ++interrupts; };  // without SA_RESTART
    (void)::sigaction(SIGUSR1, &count, &before_);
  }
  ~InterruptTest() override { (void)::sigaction(SIGUSR1, &before_, nullptr); }

  static void interrupt(std::jthread& thread) {
    for (const int until = interrupts + 1'000; interrupts < until;) {
      ::pthread_kill(thread.native_handle(), SIGUSR1);
      std::this_thread::yield();
    }
  }

  static inline std::atomic<int> interrupts{0};

 private:
  struct sigaction before_ {};
};

TEST_F(InterruptTest, AReceiveGoesOn) {
  auto [here, there] = make_pair();
  std::atomic<bool> enough{false};
  std::optional<Json> received;
  std::jthread receiver{[&, &here = here] {
    received = here.receive();
    while (!enough) std::this_thread::yield();
  }};
  interrupt(receiver);
  EXPECT_TRUE(there.send(5));
  enough = true;
  receiver.join();
  EXPECT_EQ(received, Json(5));
}

TEST_F(InterruptTest, ASendGoesOn) {
  auto [here, there] = make_pair();
  std::atomic<bool> enough{false};
  bool sent = false;
  const Json large =
      Json::binary(std::vector<std::uint8_t>(4 << 20, 7));  // more than a socket holds
  std::jthread sender{[&, &there = there] {
    sent = there.send(large);
    there = Channel{UniqueFd{}};
    while (!enough) std::this_thread::yield();
  }};
  pollfd begun{.fd = here.fd(), .events = POLLIN, .revents = 0};
  EXPECT_EQ(::poll(&begun, 1, -1), 1);
  interrupt(sender);
  enough = true;
  EXPECT_EQ(here.receive(), large);
  sender.join();
  EXPECT_TRUE(sent);
}

}  // namespace
}  // namespace kvshard::tools
