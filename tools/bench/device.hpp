#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "kvshard/result.hpp"
#include "kvshard/types.hpp"

namespace kvshard::bench {

/// Makes a GPU this thread's; nothing for a negative number. Errors: unsupported without CUDA.
Status use_device(int device);
/// Sets bytes, so that memory is there before it is timed; waits for the end.
Status fill_bytes(MemoryKind kind, void* at, int value, std::size_t bytes);
/// Copies between any two places and waits for the end.
Status copy_bytes(MemoryKind kind, void* to, const void* from, std::size_t bytes);
/// "none" in a build without CUDA.
std::string cuda_version();
std::string gpu_name(int device);

}  // namespace kvshard::bench
