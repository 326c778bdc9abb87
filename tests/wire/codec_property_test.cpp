#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <random>
#include <vector>

#include "wire/samples.hpp"

// Counts what this binary allocates, to see that no count in a message makes decode() allocate more than the
// message's own size allows.
namespace {
thread_local std::size_t allocated_bytes = 0;
}

// Not inlined, or gcc sees free() of what it knows to come from operator new.
[[gnu::noinline]] void* operator new(std::size_t size) {
  allocated_bytes += size;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc{};
}
[[gnu::noinline]] void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  allocated_bytes += size;
  return std::malloc(size);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace kvshard::wire {
namespace {

// A group takes at least 52 bytes on the wire and twice that in memory; an error's text is short.
constexpr std::size_t allocation_limit(std::size_t payload_bytes) {
  return 4 * payload_bytes + 4096;
}

// Decodes, and checks what must hold for any bytes at all. Returns whether they were a message.
template <Message M>
bool survives(std::span<const std::byte> payload) {
  const std::size_t before = allocated_bytes;
  const auto decoded = decode<M>(payload);
  EXPECT_LE(allocated_bytes - before, allocation_limit(payload.size()));
  if (!decoded) {
    EXPECT_TRUE(decoded.error().code == ErrorCode::invalid_argument ||
                decoded.error().code == ErrorCode::unsupported);
    EXPECT_FALSE(decoded.error().message.empty());
    return false;
  }
  // A valid message has one encoding only, so nothing in the bytes was overlooked.
  EXPECT_TRUE(std::ranges::equal(payload_of(frame_of(*decoded)), payload));
  return true;
}

// acceptance 42
TEST(CodecPropertyTest, RefusesEveryTruncation) {
  for_each_sample([]<class M>(const char* name, const M& message) {
    const auto frame = frame_of(message);
    const auto payload = payload_of(frame);
    for (std::size_t size = 0; size < payload.size(); ++size) {
      // A copy of its own, so that a sanitizer sees a read beyond the end.
      const std::vector<std::byte> cut{payload.begin(),
                                       payload.begin() + static_cast<std::ptrdiff_t>(size)};
      EXPECT_FALSE(survives<M>(cut)) << name << " cut to " << size << " bytes";
    }
    EXPECT_TRUE(survives<M>(payload)) << name;
  });
}

TEST(CodecPropertyTest, RefusesTrailingBytes) {
  for_each_sample([]<class M>(const char* name, const M& message) {
    auto frame = frame_of(message);
    frame.push_back(std::byte{0});
    EXPECT_FALSE(survives<M>(payload_of(frame))) << name;
  });
}

// acceptance 42
TEST(CodecPropertyTest, SurvivesEverySingleBitFlip) {
  for_each_sample([]<class M>(const char* name, const M& message) {
    const auto frame = frame_of(message);
    std::vector<std::byte> payload{payload_of(frame).begin(), payload_of(frame).end()};
    std::size_t accepted = 0;
    for (std::size_t bit = 0; bit < payload.size() * 8; ++bit) {
      payload[bit / 8] ^= std::byte{1} << (bit % 8);
      if (survives<M>(payload)) ++accepted;
      payload[bit / 8] ^= std::byte{1} << (bit % 8);
    }
    EXPECT_GT(accepted, 0U) << name;  // most numbers may be any number
  });
}

// acceptance 42
TEST(CodecPropertyTest, SurvivesRandomDamage) {
  constexpr std::uint64_t kSeed = 20240611;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937_64 random{kSeed};
  for_each_sample([&]<class M>(const char*, const M& message) {
    const auto frame = frame_of(message);
    for (int round = 0; round < 2000; ++round) {
      std::vector<std::byte> payload{payload_of(frame).begin(), payload_of(frame).end()};
      for (auto edits = 1 + random() % 8; edits > 0 && !payload.empty(); --edits) {
        const std::size_t at = random() % payload.size();
        switch (random() % 4) {
          case 0:
            payload[at] = static_cast<std::byte>(random());
            break;
          case 1:
            payload[at] = std::byte{0xff};
            break;
          case 2:
            payload.resize(at);
            break;
          default:
            payload.insert(payload.begin() + static_cast<std::ptrdiff_t>(at), 4, std::byte{0xff});
            break;
        }
      }
      survives<M>(payload);
    }
  });
}

TEST(CodecPropertyTest, RandomReadiesRoundTrip) {
  constexpr std::uint64_t kSeed = 20240612;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937_64 random{kSeed};
  for (int round = 0; round < 2000; ++round) {
    Ready ready{.pull = random(),
                .lease = random(),
                .piece = random(),
                .slot = static_cast<std::uint32_t>(random()),
                .generation = random(),
                .first_buffer = static_cast<std::uint32_t>(random() % (kMaxBuffers + 1)),
                .base = static_cast<std::uint32_t>(random()),
                .first_unit = random(),
                .partial = random() % 2 == 0,
                .last = random() % 2 == 0,
                .checksum = random() % 2 == 0};
    ready.buffer_count =
        static_cast<std::uint32_t>(random() % (kMaxBuffers + 1 - ready.first_buffer));
    if (ready.last) {
      ready.side_data.resize(random() % 300, static_cast<std::byte>(random()));
      ready.tables.resize(random() % kMaxBufferGroups);
      for (TableEnd& end : ready.tables)
        end = {static_cast<std::uint32_t>(random()), static_cast<std::uint32_t>(random()),
               random() >> 2};
    } else {
      ready.payload_bytes = random();
      ready.unit_count = static_cast<std::uint32_t>(random());
    }
    const auto frame = frame_of(ready);
    const auto decoded = decode<Ready>(payload_of(frame));
    ASSERT_TRUE(decoded) << decoded.error().message;
    EXPECT_EQ(decoded->tables, ready.tables);
    EXPECT_EQ(decoded->unit_count, ready.unit_count);
    EXPECT_EQ(decoded->side_data, ready.side_data);
    EXPECT_EQ(decoded->payload_bytes, ready.payload_bytes);
    EXPECT_EQ(frame_of(*decoded), frame);
  }
}

}  // namespace
}  // namespace kvshard::wire
