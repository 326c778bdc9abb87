#pragma once

/// Marks what a shared build of kvshard exports; all else is hidden.
#define KVSHARD_EXPORT __attribute__((visibility("default")))
