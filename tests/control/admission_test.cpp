#include "control/admission.hpp"

#include <gtest/gtest.h>

#include <string>

namespace kvshard {
namespace {

using namespace std::chrono_literals;

constexpr TimePoint kStart{};

TEST(AdmissionTest, TheOldestHandshakeEndsForANewOne) {
  Admission admission{{.max_handshakes = 3, .max_handshakes_per_address = 2}};
  EXPECT_EQ(admission.arrive(1, "a", kStart), std::nullopt);
  EXPECT_EQ(admission.arrive(2, "b", kStart), std::nullopt);
  EXPECT_EQ(admission.arrive(3, "b", kStart), std::nullopt);
  EXPECT_EQ(admission.arrive(4, "b", kStart), 2U);  // of that address, although 1 is older
  admission.leave(2);
  EXPECT_EQ(admission.handshakes(), 3U);
  EXPECT_EQ(admission.arrive(5, "c", kStart), 1U);  // of all
  admission.leave(1);
  EXPECT_EQ(admission.handshakes(), 3U);
}

// One address floods; an honest handshake from another is never the one that ends.
TEST(AdmissionTest, AFloodFromOneAddressEndsOnlyItsOwn) {
  Admission admission{{.max_handshakes = 64, .max_handshakes_per_address = 8}};
  EXPECT_EQ(admission.arrive(1, "honest", kStart), std::nullopt);
  for (Admission::Id id = 2; id < 10'000; ++id) {
    const auto ends = admission.arrive(id, "flood", kStart);
    ASSERT_NE(ends, 1U);
    if (ends) admission.leave(*ends);
    ASSERT_LE(admission.handshakes(), 9U);
  }
  EXPECT_TRUE(admission.establish(1));
  EXPECT_EQ(admission.established(), 1U);
}

TEST(AdmissionTest, RefusesPeersBeyondTheLimitsNamingThem) {
  Admission admission{{.max_peers = 3, .max_peers_per_address = 2}};
  for (Admission::Id id = 1; id <= 3; ++id) {
    EXPECT_EQ(admission.arrive(id, "a", kStart), std::nullopt);
  }
  EXPECT_TRUE(admission.establish(1));
  EXPECT_TRUE(admission.establish(1));  // again, without effect
  EXPECT_TRUE(admission.establish(2));
  const Status third = admission.establish(3);
  ASSERT_FALSE(third);
  EXPECT_EQ(third.error().code, ErrorCode::resource_exhausted);
  EXPECT_EQ(third.error().message, "2 peers are connected from a, max_peers_per_address is 2");
  admission.leave(3);
  (void)admission.arrive(4, "b", kStart);
  EXPECT_TRUE(admission.establish(4));
  (void)admission.arrive(5, "c", kStart);
  EXPECT_EQ(admission.establish(5).error().message, "3 peers are connected, max_peers is 3");
  admission.leave(1);
  EXPECT_TRUE(admission.establish(5));
}

TEST(AdmissionTest, NamesHandshakesThatTakeTooLong) {
  Admission admission{{.handshake_timeout = 100ms}};
  (void)admission.arrive(1, "a", kStart);
  (void)admission.arrive(2, "a", kStart + 50ms);
  EXPECT_EQ(admission.overdue(kStart + 100ms), std::nullopt);
  EXPECT_EQ(admission.overdue(kStart + 101ms), 1U);
  EXPECT_TRUE(admission.establish(1));  // it just made it
  EXPECT_EQ(admission.overdue(kStart + 101ms), std::nullopt);
  EXPECT_EQ(admission.overdue(kStart + 151ms), 2U);
  admission.leave(2);
  admission.leave(2);
  EXPECT_EQ(admission.overdue(kStart + 1h), std::nullopt);
}

}  // namespace
}  // namespace kvshard
