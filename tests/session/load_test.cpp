// What ranks cost: nothing while nothing happens, and the same for a request however many others wait.
#include <gtest/gtest.h>

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <ctime>

#include "support/cluster.hpp"
#include "support/room_fleet.hpp"

namespace kvshard::test {
namespace {

// What sanitizers cost is not ours; what is exact stays exact under them.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kTimesCount = false;
#else
constexpr bool kTimesCount = true;
#endif

class IdleTest : public ::testing::TestWithParam<Where> {
 protected:
  static ClusterOptions options() {
    ClusterOptions made;
    made.where = GetParam();
    return made;
  }
};

INSTANTIATE_TEST_SUITE_P(Over, IdleTest, ::testing::Values(Where::loopback, Where::ucx_threads),
                         [](const auto& param) { return to_string(param.param); });

std::int64_t process_cpu_ns() {
  timespec time{};
  (void)::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return time.tv_sec * std::int64_t{1'000'000'000} + time.tv_nsec;
}

// What else the machine does makes our share dearer, never cheaper: the least of a few windows is what counts. Each
// is longer than anything that ranks do now and then.
TEST_P(IdleTest, ConnectedRanksUseNoProcessor) {
  constexpr double kShare = 0.005;
  constexpr int kWindows = kTimesCount ? 5 : 1;
  Cluster cluster{options()};
  cluster.run_request(cluster.connect(), RoomId{1}, 5);
  pollfd nothing{.fd = cluster.decode->event_fd(), .events = POLLIN, .revents = 0};
  double least = 1;
  for (int window = 0; window < kWindows && least >= kShare; ++window) {
    const auto start = std::chrono::steady_clock::now();
    const std::int64_t cpu = process_cpu_ns();
    ASSERT_EQ(::poll(&nothing, 1, 2'000), 0);  // an event that must not come
    const double used = static_cast<double>(process_cpu_ns() - cpu);
    const double passed = static_cast<double>((std::chrono::steady_clock::now() - start).count());
    least = std::min(least, used / passed);
  }
  RecordProperty("percent_of_a_core", fmt::format("{:.3f}", 100 * least));
  if (kTimesCount) {
    EXPECT_LT(least, kShare) << "two prefill ranks and a decode rank";
  }
  cluster.expect_idle();
}

// 1,000 rooms are pulled and wait; the same few at a time are published. run_waiting() compares every byte,
// and check that nothing is held at the end.
TEST(ManyRoomsTest, ARequestCostsNoMoreWhileManyWait) {
  const auto cost = [](std::uint32_t rooms) {
    const auto fleet = bench::RoomFleet::create(
        {.groups = 1, .shard_size = 16, .decode_ranks = 1, .rooms = rooms});
    EXPECT_TRUE(fleet.ok()) << (fleet ? "" : fleet.error().message);
    if (!fleet) return 0.0;
    const auto made = bench::run_waiting(**fleet, 8, 50, kTimesCount ? 300 : 50);
    EXPECT_TRUE(made.ok()) << (made ? "" : made.error().message);
    return made ? made->cpu_ns : 0.0;
  };
  const double few = cost(16);
  const double many = cost(kTimesCount ? 1'000 : 200);
  RecordProperty("ratio", fmt::format("{:.2f}", many / few));
  if (kTimesCount) {
    EXPECT_LT(many, 2 * few) << "of processor time; linear would be 60 times";
  }
}

}  // namespace
}  // namespace kvshard::test
