#include "kvshard/result.hpp"

#include <gtest/gtest.h>

#include <memory>

#include "base/try.hpp"

namespace kvshard {
namespace {

Result<int> half(int value) {
  if (value % 2 != 0) return Error{ErrorCode::invalid_argument, "odd"};
  return value / 2;
}
Result<int> quarter(int value) {
  KVSHARD_TRY(const int once, half(value));
  KVSHARD_TRY(half(once));
  return half(once);
}

TEST(ResultTest, TryUnwrapsAValueAndReturnsAnError) {
  EXPECT_EQ(*quarter(8), 2);
  ASSERT_FALSE(quarter(6));
  EXPECT_EQ(quarter(6).error().code, ErrorCode::invalid_argument);
  EXPECT_EQ(quarter(5).error().message, "odd");
}

TEST(ResultDeathTest, TheValueOfAnErrorIsItsMessageAndTheEnd) {
  EXPECT_DEATH(quarter(5).value(), "value\\(\\) of an error: invalid_argument: odd");
  EXPECT_DEATH(Status{half(3).error()}.value(), "value\\(\\) of an error: invalid_argument: odd");
}

TEST(ResultTest, ConvertsAPointerToABase) {
  struct Base {
    virtual ~Base() = default;
  };
  struct Derived final : Base {};
  const Result<std::unique_ptr<Base>> made = std::make_unique<Derived>();
  EXPECT_TRUE(made.ok());
}

TEST(ResultTest, NamesEveryCode) {
  EXPECT_EQ(to_string(ErrorCode::data_loss), "data_loss");
  EXPECT_EQ(to_string(static_cast<ErrorCode>(200)), "unknown");
}

}  // namespace
}  // namespace kvshard
