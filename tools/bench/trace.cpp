#include "bench/trace.hpp"

#include <fmt/format.h>

#include <fstream>
#include <limits>

#include <nlohmann/json.hpp>

#include "base/try.hpp"

namespace kvshard::bench {
namespace {

using Json = nlohmann::json;

Error bad(std::size_t line, std::string_view field, std::string_view why) {
  return {ErrorCode::invalid_argument, fmt::format("line {}: {}: {}", line, field, why)};
}

Result<std::uint64_t> number(const Json& value, std::size_t line, std::string_view field,
                             std::uint64_t most) {
  if (!value.is_number_unsigned()) return bad(line, field, "not a whole number from 0 up");
  const auto read = value.get<std::uint64_t>();
  if (read > most) return bad(line, field, fmt::format("{} is above {}", read, most));
  return read;
}

Result<TraceRequest> parse(const std::string& text, std::size_t line) {
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_object()) return bad(line, "request", "not a JSON object");
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint32_t>::max();
  const auto field = [&](const char* name, std::uint64_t most) -> Result<std::uint64_t> {
    const auto at = json.find(name);
    if (at == json.end()) return bad(line, name, "missing");
    return number(*at, line, name, most);
  };
  TraceRequest request;
  KVSHARD_TRY(request.timestamp_ms, field("timestamp", std::numeric_limits<std::uint64_t>::max()));
  KVSHARD_TRY(const std::uint64_t input, field("input_length", 1U << 26));
  KVSHARD_TRY(const std::uint64_t output, field("output_length", kMost));
  if (input == 0) return bad(line, "input_length", "0");
  request.input_tokens = static_cast<std::uint32_t>(input);
  request.output_tokens = static_cast<std::uint32_t>(output);
  const auto ids = json.find("hash_ids");
  if (ids == json.end()) return bad(line, "hash_ids", "missing");
  const std::size_t blocks = (input + kBlockTokens - 1) / kBlockTokens;
  if (!ids->is_array() || ids->size() != blocks)
    return bad(line, "hash_ids",
               fmt::format("{} ids, but an input_length of {} has {} blocks",
                           ids->is_array() ? ids->size() : 0, input, blocks));
  for (const Json& id : *ids) {
    KVSHARD_TRY(const std::uint64_t block, number(id, line, "hash_ids", kMost));
    request.blocks.push_back(static_cast<std::uint32_t>(block));
  }
  return request;
}

}  // namespace

Result<std::vector<TraceRequest>> read_trace(std::istream& lines, std::size_t limit) {
  std::vector<TraceRequest> requests;
  std::size_t number = 0;
  for (std::string line; (limit == 0 || requests.size() < limit) && std::getline(lines, line);) {
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    KVSHARD_TRY(auto request, parse(line, number));
    requests.push_back(std::move(request));
  }
  if (requests.empty()) return Error{ErrorCode::invalid_argument, "the trace holds no request"};
  return requests;
}

Result<std::vector<TraceRequest>> read_trace_file(const std::string& path, std::size_t limit) {
  std::ifstream file{path};
  if (!file) return Error{ErrorCode::invalid_argument, fmt::format("{} cannot be read", path)};
  return read_trace(file, limit);
}

}  // namespace kvshard::bench
