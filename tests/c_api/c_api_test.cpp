// The C API's numbers are those of the C++ API, its structs may be older or newer than ours, and nothing
// that a caller passes is taken on trust. What the calls do is shown by tests/install/consumer_c.
#include <gtest/gtest.h>

#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "c_api/boundary.hpp"
#include "kvshard/decode_rank.hpp"
#include "kvshard/geometry.hpp"
#include "kvshard/log.hpp"
#include "kvshard/page_allocator.hpp"
#include "kvshard/transport.hpp"

namespace kvshard::c_api {
namespace {

template <typename Enum>
constexpr bool same(int value, Enum expected) {
  return value == static_cast<int>(expected);
}

static_assert(same(KVSHARD_INVALID_ARGUMENT, ErrorCode::invalid_argument) &&
              same(KVSHARD_FAILED_PRECONDITION, ErrorCode::failed_precondition) &&
              same(KVSHARD_RESOURCE_EXHAUSTED, ErrorCode::resource_exhausted) &&
              same(KVSHARD_UNAVAILABLE, ErrorCode::unavailable) &&
              same(KVSHARD_DEADLINE_EXCEEDED, ErrorCode::deadline_exceeded) &&
              same(KVSHARD_CANCELLED, ErrorCode::cancelled) &&
              same(KVSHARD_DATA_LOSS, ErrorCode::data_loss) &&
              same(KVSHARD_UNSUPPORTED, ErrorCode::unsupported) &&
              same(KVSHARD_INTERNAL, ErrorCode::internal));
static_assert(same(KVSHARD_LOG_DEBUG, LogLevel::debug) && same(KVSHARD_LOG_INFO, LogLevel::info) &&
              same(KVSHARD_LOG_WARNING, LogLevel::warning) &&
              same(KVSHARD_LOG_ERROR, LogLevel::error) && same(KVSHARD_LOG_OFF, LogLevel::off));
static_assert(same(KVSHARD_F32, ElementType::f32) && same(KVSHARD_F16, ElementType::f16) &&
              same(KVSHARD_BF16, ElementType::bf16) &&
              same(KVSHARD_F8_E4M3, ElementType::f8_e4m3) &&
              same(KVSHARD_F8_E5M2, ElementType::f8_e5m2) && same(KVSHARD_I8, ElementType::i8) &&
              same(KVSHARD_U8, ElementType::u8));
static_assert(same(KVSHARD_TOKEN_MAJOR, PageOrder::token_major) &&
              same(KVSHARD_HEAD_MAJOR, PageOrder::head_major));
static_assert(same(KVSHARD_MEMORY_HOST, MemoryKind::host) &&
              same(KVSHARD_MEMORY_CUDA, MemoryKind::cuda));
static_assert(same(KVSHARD_TRANSPORT_UCX, TransportOptions::Kind::ucx) &&
              same(KVSHARD_TRANSPORT_LOOPBACK, TransportOptions::Kind::loopback));
static_assert(same(KVSHARD_PATH_AUTOMATIC, TransferPath::automatic) &&
              same(KVSHARD_PATH_GET, TransferPath::get) &&
              same(KVSHARD_PATH_AM, TransferPath::am) &&
              same(KVSHARD_PATH_LOOPBACK, TransferPath::loopback) &&
              same(KVSHARD_PATH_MAPPED, TransferPath::mapped));
static_assert(same(KVSHARD_MAPPED_AUTOMATIC, Mapped::automatic) &&
              same(KVSHARD_MAPPED_NEVER, Mapped::never) &&
              same(KVSHARD_MAPPED_ALWAYS, Mapped::always));
static_assert(same(KVSHARD_LAST_FREED_FIRST, FreeOrder::last_freed_first) &&
              same(KVSHARD_ASCENDING, FreeOrder::ascending));

// No struct has padding: a field added in it would not change the size that tells versions apart.
template <typename... Structs>
constexpr bool tight = (std::has_unique_object_representations_v<Structs> && ...) &&
                       ((sizeof(Structs) % 8 == 0) && ...);
static_assert(
    tight<kvshard_buffer_group, kvshard_pool, kvshard_backend, kvshard_control_limits,
          kvshard_prefill_options, kvshard_chunk, kvshard_room_event, kvshard_prefill_stats,
          kvshard_group_member, kvshard_group_spec, kvshard_decode_options, kvshard_path_report,
          kvshard_pull_pages, kvshard_pull_request, kvshard_source_timing, kvshard_side_data,
          kvshard_pull_event, kvshard_decode_stats>);

TEST(CApiTest, NamesEveryCode) {
  EXPECT_STREQ(kvshard_code_name(KVSHARD_OK), "ok");
  for (int code = KVSHARD_INVALID_ARGUMENT; code <= KVSHARD_INTERNAL; ++code)
    EXPECT_EQ(kvshard_code_name(code), to_string(static_cast<ErrorCode>(code)));
  EXPECT_STREQ(kvshard_code_name(KVSHARD_INTERNAL + 1), "unknown");
  EXPECT_STREQ(kvshard_code_name(-1), "unknown");
  EXPECT_STREQ(kvshard_code_name(256 + KVSHARD_CANCELLED), "unknown");
}

TEST(CApiTest, AStructOfAnOlderVersionLacksFieldsThatAreThenZero) {
  kvshard_side_data given{.size = 16, .shard_rank = 3, .offset = 5, .bytes = 99};
  const auto ours = read(&given, "x");
  ASSERT_TRUE(ours.ok());
  EXPECT_EQ(ours->shard_rank, 3U);
  EXPECT_EQ(ours->offset, 5U);
  EXPECT_EQ(ours->bytes, 0U);
  write(kvshard_side_data{.size = 0, .shard_rank = 1, .offset = 2, .bytes = 3}, &given, 16);
  EXPECT_EQ(given.size, 16U);
  EXPECT_EQ(given.offset, 2U);
  EXPECT_EQ(given.bytes, 99U) << "written beyond the caller's struct";
}

TEST(CApiTest, AStructOfANewerVersionMayNotAskForWhatIsNotKnown) {
  struct {
    kvshard_side_data known;
    std::uint64_t added;
  } given{{.size = sizeof given, .shard_rank = 1, .offset = 0, .bytes = 0}, 0};
  EXPECT_TRUE(read(&given.known, "x").ok());
  given.added = 1;
  const auto refused = read(&given.known, "x");
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, ErrorCode::invalid_argument);
  EXPECT_NE(refused.error().message.find("sets a field at offset 24"), std::string::npos)
      << refused.error().message;
  write(kvshard_side_data{}, &given.known, given.known.size);
  EXPECT_EQ(given.added, 0U) << "what is not known is not filled";
}

TEST(CApiTest, RefusesSizesThatAreNone) {
  for (const std::uint32_t size : {0U, 7U, 4097U, 0xffff'ffffU}) {
    const kvshard_side_data given{.size = size, .shard_rank = 0, .offset = 0, .bytes = 0};
    EXPECT_FALSE(read(&given, "x").ok()) << size;
    EXPECT_FALSE(to_fill(&given, "x").ok()) << size;
  }
  kvshard_side_data array[2]{};
  array[0].size = sizeof array[0];
  EXPECT_FALSE(read_array(array, 2, "x").ok());
}

TEST(CApiTest, ReadsArraysByTheCallersStride) {
  struct Newer {
    kvshard_side_data known;
    std::uint64_t added;
  } given[2]{};
  given[0].known.size = given[1].known.size = sizeof(Newer);
  given[1].known.shard_rank = 7;
  const auto ours = read_array(&given[0].known, 2, "x");
  ASSERT_TRUE(ours.ok());
  EXPECT_EQ((*ours)[1].shard_rank, 7U);
}

TEST(CApiTest, CutsTextBetweenCharacters) {
  char to[6];
  copy_text("abcd\u00e9f", to, sizeof to);  // two bytes, of which one would fit
  EXPECT_STREQ(to, "abcd");
  copy_text("abcde", to, sizeof to);
  EXPECT_STREQ(to, "abcde");
}

TEST(CApiTest, NothingIsThrownFromIt) {
  kvshard_error error;
  EXPECT_EQ(guarded(&error, []() -> Status { throw std::bad_alloc{}; }),
            KVSHARD_RESOURCE_EXHAUSTED);
  EXPECT_STREQ(error.message, "out of memory");
  EXPECT_EQ(guarded(&error, []() -> Status { throw std::runtime_error{"why"}; }), KVSHARD_INTERNAL);
  EXPECT_STREQ(error.message, "why");
  EXPECT_EQ(guarded(&error, []() -> Status { throw 1; }), KVSHARD_INTERNAL);
  EXPECT_EQ(guarded(nullptr, []() -> Status { throw 1; }), KVSHARD_INTERNAL);
  EXPECT_EQ(guarded(&error, []() -> Status { return {}; }), KVSHARD_OK);
  EXPECT_EQ(error.code, KVSHARD_OK);
  EXPECT_STREQ(error.message, "");
}

TEST(CApiTest, AHugeCountIsAnErrorAndNotACrash) {
  kvshard_error error;
  kvshard_allocator* allocator = nullptr;
  ASSERT_EQ(kvshard_allocator_create(2, 4, 8, 0, &allocator, &error), KVSHARD_OK);
  std::uint32_t page = 0, base = 0;
  EXPECT_EQ(kvshard_allocator_draw_chain(allocator, &page, ~std::uint64_t{0}, &base, &error),
            KVSHARD_RESOURCE_EXHAUSTED);
  EXPECT_EQ(kvshard_allocator_free(allocator, &page, ~std::uint64_t{0}, &error),
            KVSHARD_INVALID_ARGUMENT);
  EXPECT_EQ(kvshard_allocator_create(0, 4, 8, 0, &allocator, &error), KVSHARD_INVALID_ARGUMENT);
  kvshard_allocator_destroy(allocator);
  kvshard_allocator_destroy(nullptr);
}

}  // namespace
}  // namespace kvshard::c_api
