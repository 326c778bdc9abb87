#pragma once

#include <utility>

#include "kvshard/result.hpp"

// KVSHARD_TRY(expression)              returns the error from the enclosing function, or goes on
// KVSHARD_TRY(const auto x, expression)  the same, and declares x from the value
#define KVSHARD_TRY_CONCAT_(a, b) a##b
#define KVSHARD_TRY_CONCAT(a, b) KVSHARD_TRY_CONCAT_(a, b)
#define KVSHARD_TRY_NAME KVSHARD_TRY_CONCAT(kvshard_try_, __LINE__)
#define KVSHARD_TRY_1(expression)                              \
  if (auto KVSHARD_TRY_NAME = (expression); !KVSHARD_TRY_NAME) \
  return std::move(KVSHARD_TRY_NAME).error()
#define KVSHARD_TRY_2(declaration, expression)                       \
  auto KVSHARD_TRY_NAME = (expression);                              \
  if (!KVSHARD_TRY_NAME) return std::move(KVSHARD_TRY_NAME).error(); \
  declaration = std::move(KVSHARD_TRY_NAME).value()
#define KVSHARD_TRY_PICK(a, b, macro, ...) macro
#define KVSHARD_TRY(...) KVSHARD_TRY_PICK(__VA_ARGS__, KVSHARD_TRY_2, KVSHARD_TRY_1, )(__VA_ARGS__)
