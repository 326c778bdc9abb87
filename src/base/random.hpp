#pragma once

#include <cstdint>
#include <random>

namespace kvshard {

/// 64 random bits that tell one process's life from another's; never 0.
inline std::uint64_t random_id() {
  std::random_device device;
  return (std::uint64_t{device()} << 32 | device()) | 1;
}

}  // namespace kvshard
