#pragma once

#include <fmt/format.h>

#include <string_view>
#include <utility>

#include "kvshard/result.hpp"

namespace kvshard {

inline Error in_context(std::string_view context, Error error) {
  error.message = fmt::format("{}: {}", context, error.message);
  return error;
}

}  // namespace kvshard
