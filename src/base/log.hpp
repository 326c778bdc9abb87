#pragma once

#include <fmt/format.h>

#include <string_view>

#include "kvshard/log.hpp"

// The private logger. Return an error or log it, not both: we log where no caller is left. Lines are
// lower case, the event first, then facts. Never KV bytes, tokens or rkeys.
namespace kvshard::log {

[[nodiscard]] bool enabled(LogLevel level) noexcept;
void write(LogLevel level, std::string_view line) noexcept;

template <typename... Args>
void line(LogLevel level, fmt::format_string<Args...> format, Args&&... args) {
  if (enabled(level)) write(level, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void debug(fmt::format_string<Args...> format, Args&&... args) {
  line(LogLevel::debug, format, std::forward<Args>(args)...);
}
template <typename... Args>
void info(fmt::format_string<Args...> format, Args&&... args) {
  line(LogLevel::info, format, std::forward<Args>(args)...);
}
template <typename... Args>
void warning(fmt::format_string<Args...> format, Args&&... args) {
  line(LogLevel::warning, format, std::forward<Args>(args)...);
}
template <typename... Args>
void error(fmt::format_string<Args...> format, Args&&... args) {
  line(LogLevel::error, format, std::forward<Args>(args)...);
}

}  // namespace kvshard::log
