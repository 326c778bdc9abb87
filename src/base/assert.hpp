#pragma once

#include <cassert>

/// For what only our own bug can cause; off in release builds. Anything a caller, peer, clock or device
/// can cause is an Error instead.
#define KVSHARD_ASSERT(condition) assert(condition)
