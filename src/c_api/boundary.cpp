#include "c_api/boundary.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace kvshard::c_api {
namespace {

constexpr std::uint32_t kSmallestStruct = 8;
constexpr std::uint32_t kLargestStruct = 4096;  // what is larger was never a struct's size

}  // namespace

void copy_text(std::string_view text, char* to, std::size_t capacity) noexcept {
  if (capacity == 0) return;
  std::size_t bytes = std::min(text.size(), capacity - 1);
  const auto continues = [](char c) { return (static_cast<unsigned char>(c) & 0xc0U) == 0x80U; };
  if (bytes < text.size())
    while (bytes > 0 && continues(text[bytes])) --bytes;
  std::copy_n(text.data(), bytes, to);
  to[bytes] = '\0';
}

int32_t report(ErrorCode code, std::string_view message, kvshard_error* error) noexcept {
  if (error != nullptr) {
    error->code = static_cast<int32_t>(code);
    copy_text(message, error->message, sizeof error->message);
  }
  return static_cast<int32_t>(code);
}

int32_t report(const Status& status, kvshard_error* error) noexcept {
  if (status) return report(ErrorCode{}, {}, error);
  return report(status.error().code, status.error().message, error);
}

Status required(const void* pointer, const char* name) {
  if (pointer != nullptr) return {};
  return Error{ErrorCode::invalid_argument, fmt::format("{} is null", name)};
}

Status required_array(const void* pointer, std::uint64_t count, const char* name) {
  if (pointer != nullptr || count == 0) return {};
  return Error{ErrorCode::invalid_argument, fmt::format("{} is null, its count {}", name, count)};
}

Status check_size(std::uint32_t size, const char* name) {
  if (size >= kSmallestStruct && size <= kLargestStruct) return {};
  return Error{ErrorCode::invalid_argument,
               fmt::format("{} has size {}: set it to the struct's sizeof", name, size)};
}

Status check_tail(const void* given, std::size_t ours, std::uint32_t size, const char* name) {
  const auto* const bytes = static_cast<const unsigned char*>(given);
  for (std::size_t i = ours; i < size; ++i) {
    if (bytes[i] != 0) {
      return Error{
          ErrorCode::invalid_argument,
          fmt::format("{} of size {} sets a field at offset {}; this version knows {} bytes", name,
                      size, i, ours)};
    }
  }
  return {};
}

Result<std::uint16_t> to_port(std::uint32_t port) {
  if (port <= 0xffff) return static_cast<std::uint16_t>(port);
  return Error{ErrorCode::invalid_argument, fmt::format("port {} is above 65535", port)};
}

}  // namespace kvshard::c_api
