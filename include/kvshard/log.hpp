#pragma once

#include <cstdint>
#include <string_view>

#include "kvshard/export.hpp"

namespace kvshard {

enum class LogLevel : std::uint8_t { debug = 0, info = 1, warning = 2, error = 3, off = 4 };

/// Takes one finished line, without a newline. `context` is what was given to set_log_hook. Called from
/// any thread, the progress thread included: it must not block and must not call back into kvshard.
using LogHook = void (*)(void* context, LogLevel level, std::string_view line) noexcept;

/// Sends kvshard's lines to the engine's own log. A null hook restores the default, which writes
/// warnings and errors to stderr.
///
/// Threads: thread-safe; a line being delivered finishes with the hook it began with, so keep `context`
///          alive until set_log_hook has returned and no kvshard object is left.
KVSHARD_EXPORT void set_log_hook(LogHook hook, void* context) noexcept;

/// Drops lines below `level` before they are formatted. Default: warning.
/// Threads: thread-safe.
KVSHARD_EXPORT void set_log_level(LogLevel level) noexcept;

}  // namespace kvshard
