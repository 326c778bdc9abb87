#pragma once

#include <cstdint>
#include <istream>
#include <string>
#include <vector>

#include "kvshard/result.hpp"

namespace kvshard::bench {

/// Tokens of one block of a recorded trace: requests with equal ids there share that prefix.
inline constexpr std::uint32_t kBlockTokens = 512;

struct TraceRequest {
  std::uint64_t timestamp_ms{0};
  std::uint32_t input_tokens{0};
  std::uint32_t output_tokens{0};
  std::vector<std::uint32_t> blocks;  ///< of the prompt; the last one may be partial
};

/// Reads one JSON object a line: timestamp, input_length, output_length, hash_ids. `limit` requests at
/// most; 0: all. Empty lines are skipped.
/// Errors: invalid_argument naming the line, the field, and what is wrong with it.
Result<std::vector<TraceRequest>> read_trace(std::istream& lines, std::size_t limit);
Result<std::vector<TraceRequest>> read_trace_file(const std::string& path, std::size_t limit);

}  // namespace kvshard::bench
