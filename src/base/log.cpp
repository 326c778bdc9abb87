#include "base/log.hpp"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <mutex>

namespace kvshard {
namespace {

struct Hook {
  LogHook call{nullptr};
  void* context{nullptr};
};

std::atomic<LogLevel> threshold{LogLevel::warning};
std::mutex hook_mutex;
Hook hook;  // guarded by hook_mutex

spdlog::level::level_enum spdlog_level(LogLevel level) noexcept {
  switch (level) {
    case LogLevel::debug:
      return spdlog::level::debug;
    case LogLevel::info:
      return spdlog::level::info;
    case LogLevel::warning:
      return spdlog::level::warn;
    case LogLevel::error:
      return spdlog::level::err;
    case LogLevel::off:
      break;
  }
  return spdlog::level::off;
}

// Outside spdlog's registry: an engine that uses spdlog too never meets this logger. Never destroyed,
// so that a line from a late thread finds it alive.
spdlog::logger& default_logger() {
  static spdlog::logger* const logger = [] {
    auto* made = new spdlog::logger("kvshard", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_level(spdlog::level::trace);
    made->set_pattern("%Y-%m-%dT%H:%M:%S.%e %l kvshard: %v");
    return made;
  }();
  return *logger;
}

}  // namespace

void set_log_hook(LogHook call, void* context) noexcept {
  const std::scoped_lock lock{hook_mutex};
  hook = Hook{call, context};
}

void set_log_level(LogLevel level) noexcept {
  threshold.store(level, std::memory_order_relaxed);
}

namespace log {

bool enabled(LogLevel level) noexcept {
  return level >= threshold.load(std::memory_order_relaxed);
}

void write(LogLevel level, std::string_view line) noexcept {
  Hook current;
  {
    const std::scoped_lock lock{hook_mutex};
    current = hook;
  }
  if (current.call != nullptr) {
    current.call(current.context, level, line);
    return;
  }
  default_logger().log(spdlog_level(level), "{}", line);
}

}  // namespace log
}  // namespace kvshard
