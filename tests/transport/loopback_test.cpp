#include <gtest/gtest.h>

#include "support/transport_conformance.hpp"

namespace kvshard::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Loopback, TransportConformance,
                         ::testing::Values(TransportOptions{
                             .kind = TransportOptions::Kind::loopback}),
                         [](const auto&) { return std::string{"loopback"}; });

const TransportOptions kLoopback{.kind = TransportOptions::Kind::loopback};

TEST(LoopbackTest, RefusesAPathOfUcxAndCudaMemory) {
  auto options = kLoopback;
  options.path = TransferPath::get;
  TransportRank owner{options, 64};
  TransportRank decode{options, 64};
  HeardFailure failure;
  HeardTransfer heard;
  const auto endpoint = decode.connect(owner, failure);
  EXPECT_EQ(endpoint->probe(decode.bytes(), heard).error().code, ErrorCode::unsupported);
  EXPECT_EQ(owner.transport().register_memory(owner.bytes(), MemoryKind::cuda).error().code,
            ErrorCode::unsupported);
}

TEST(LoopbackTest, MemoryThatIsNotServedIsUnavailable) {
  TransportRank owner{kLoopback, 64};
  TransportRank decode{kLoopback, 64};
  HeardFailure failure;
  HeardTransfer heard;
  const auto endpoint = decode.connect(owner, failure);
  ASSERT_TRUE(endpoint->probe(decode.bytes(), heard));
  ASSERT_TRUE(pump({&decode}, [&] { return heard.done(); }));
  EXPECT_EQ(heard.last.error().code, ErrorCode::unavailable);
  endpoint->close();
}

TEST(LoopbackTest, RanksOnManyThreadsComeAndGo) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 50;
  TransportRank stable{kLoopback, 4096, 1};
  stable.serve();
  std::vector<std::jthread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&stable, t] {
      for (int round = 0; round < kRounds; ++round) {
        TransportRank decode{kLoopback, 4096};
        TransportRank owner{kLoopback, 4096, static_cast<std::uint64_t>(t + 2)};
        owner.serve();
        HeardFailure failure;
        for (auto* peer : {&stable, &owner}) {
          const auto endpoint = decode.connect(*peer, failure);
          HeardTransfer heard;
          ASSERT_TRUE(endpoint->probe(decode.bytes(), heard));
          ASSERT_TRUE(pump({&decode}, [&] { return heard.done(); }));
          ASSERT_TRUE(heard.last) << heard.last.error().message;
          ASSERT_EQ(decode.bytes()[9], pattern(peer->seed(), 9));
          endpoint->close();
        }
      }
    });
  }
}

}  // namespace
}  // namespace kvshard::testing
