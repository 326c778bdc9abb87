#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "kvshard/result.hpp"

// JSON from and for peers that are not trusted.
namespace kvshard {

/// For messages: what a peer sent, without control characters and not longer than a line.
inline std::string printable(std::string_view text, std::size_t limit = 64) {
  std::string out{text.substr(0, limit)};
  std::ranges::replace_if(
      out, [](unsigned char c) { return c < 0x20 || c == 0x7f; }, '?');
  return out;
}

/// Errors: invalid_argument.
inline Result<nlohmann::json> parse_object(std::string_view body) {
  auto value = nlohmann::json::parse(body, nullptr, /*allow_exceptions=*/false);
  if (!value.is_object())
    return Error{ErrorCode::invalid_argument,
                 fmt::format("{} bytes that are no JSON object", body.size())};
  return value;
}

/// Never throws: a peer's text may be invalid UTF-8, and plain dump() would object.
inline std::string dump(const nlohmann::json& value) {
  return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace kvshard
