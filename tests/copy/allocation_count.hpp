#pragma once

#include <cstddef>

namespace kvshard::test {

/// How often operator new ran on the calling thread. Linking allocation_count.cpp replaces operator
/// new.
std::size_t allocation_count() noexcept;

}  // namespace kvshard::test
