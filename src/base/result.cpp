#include "kvshard/result.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>

namespace kvshard {

std::string_view to_string(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::invalid_argument:
      return "invalid_argument";
    case ErrorCode::failed_precondition:
      return "failed_precondition";
    case ErrorCode::resource_exhausted:
      return "resource_exhausted";
    case ErrorCode::unavailable:
      return "unavailable";
    case ErrorCode::deadline_exceeded:
      return "deadline_exceeded";
    case ErrorCode::cancelled:
      return "cancelled";
    case ErrorCode::data_loss:
      return "data_loss";
    case ErrorCode::unsupported:
      return "unsupported";
    case ErrorCode::internal:
      return "internal";
  }
  return "unknown";
}

namespace detail {

void no_value(const Error& error) noexcept {
  fmt::print(stderr, "kvshard: value() of an error: {}: {}\n", to_string(error.code),
             error.message);
  std::abort();
}

}  // namespace detail
}  // namespace kvshard
