#include "transport/envelope.hpp"

#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "transport/bytes.hpp"

namespace kvshard::transport {
namespace {

const std::array<std::byte, 5> kPayload{std::byte{1}, std::byte{2}, std::byte{3}, std::byte{4},
                                        std::byte{5}};

TEST(EnvelopeTest, GivesBackThePayload) {
  const auto sealed = seal(EnvelopeKind::ucx_address, kPayload);
  EXPECT_EQ(sealed.size(), kEnvelopeHeaderBytes + kPayload.size());
  const auto payload = unseal(EnvelopeKind::ucx_address, sealed);
  ASSERT_TRUE(payload) << payload.error().message;
  EXPECT_TRUE(std::equal(payload->begin(), payload->end(), kPayload.begin(), kPayload.end()));
  EXPECT_TRUE(unseal(EnvelopeKind::ucx_address, seal(EnvelopeKind::ucx_address, {})));
}

TEST(EnvelopeTest, NamesTheKindThatDiffers) {
  const auto sealed = seal(EnvelopeKind::ucx_memory, kPayload);
  const auto payload = unseal(EnvelopeKind::ucx_address, sealed);
  ASSERT_FALSE(payload);
  EXPECT_EQ(payload.error().code, ErrorCode::invalid_argument);
  EXPECT_EQ(payload.error().message, "peer's transport bytes: kind is 0x4, want 0x3");
}

TEST(EnvelopeTest, FindsEveryChangedByteAndEveryCut) {
  const auto sealed = seal(EnvelopeKind::ucx_address, kPayload);
  for (std::size_t size = 0; size < sealed.size(); ++size)
    EXPECT_FALSE(unseal(EnvelopeKind::ucx_address, std::span{sealed}.first(size))) << size;
  for (std::size_t at = 0; at < sealed.size(); ++at) {
    for (int change = 1; change < 256; ++change) {
      auto damaged = sealed;
      damaged[at] ^= static_cast<std::byte>(change);
      EXPECT_FALSE(unseal(EnvelopeKind::ucx_address, damaged)) << at << ' ' << change;
    }
  }
}

TEST(EnvelopeTest, ReadingPastTheEndIsSeenOnce) {
  ByteReader in{std::span{kPayload}};
  EXPECT_EQ(in.u32(), 0x04030201U);
  EXPECT_TRUE(in.ok());
  EXPECT_EQ(in.u64(), 0U);
  EXPECT_FALSE(in.ok());
  EXPECT_EQ(in.u32(), 0U);
  EXPECT_FALSE(in.ok());
}

}  // namespace
}  // namespace kvshard::transport
