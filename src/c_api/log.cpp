#include "kvshard/log.hpp"

#include <algorithm>

#include "base/mutex.hpp"
#include "kvshard/kvshard.h"
#include "kvshard/result.hpp"

using namespace kvshard;

namespace {

struct Hook {
  kvshard_log_hook call{nullptr};
  void* context{nullptr};
};

Mutex hook_mutex;
Hook hook KVSHARD_GUARDED_BY(hook_mutex);

void deliver(void*, LogLevel level, std::string_view line) noexcept {
  Hook current;
  {
    const MutexLock lock{hook_mutex};
    current = hook;
  }
  if (current.call != nullptr)
    current.call(current.context, static_cast<int32_t>(level), line.data(), line.size());
}

}  // namespace

const char* kvshard_version(void) {
  return KVSHARD_VERSION;
}

const char* kvshard_code_name(int32_t code) {
  if (code == KVSHARD_OK) return "ok";
  if (code < KVSHARD_OK || code > KVSHARD_INTERNAL) return "unknown";
  return to_string(static_cast<ErrorCode>(code)).data();  // a literal, and so terminated
}

void kvshard_set_log_hook(kvshard_log_hook call, void* context) {
  {
    const MutexLock lock{hook_mutex};
    hook = {call, context};
  }
  set_log_hook(call != nullptr ? deliver : nullptr, nullptr);
}

void kvshard_set_log_level(int32_t level) {
  set_log_level(
      static_cast<LogLevel>(std::clamp<int32_t>(level, KVSHARD_LOG_DEBUG, KVSHARD_LOG_OFF)));
}
