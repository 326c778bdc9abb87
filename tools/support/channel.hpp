#pragma once

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <sys/socket.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "base/unique_fd.hpp"

namespace kvshard::tools {

using Json = nlohmann::json;

/// Messages between a tool and the rank processes that it starts: CBOR behind a 32-bit length, over a
/// socket pair. Both ends are ours, so what comes is trusted.
class Channel {
 public:
  explicit Channel(UniqueFd fd) : fd_{std::move(fd)} {}

  [[nodiscard]] int fd() const noexcept { return fd_.get(); }

  /// False when the other end is gone.
  bool send(const Json& message) {
    const std::vector<std::uint8_t> body = Json::to_cbor(message);
    const auto size = static_cast<std::uint32_t>(body.size());
    return write_all(&size, sizeof size) && write_all(body.data(), body.size());
  }
  /// Waits for the next message; nothing when the other end is gone.
  std::optional<Json> receive() {
    std::uint32_t size = 0;
    if (!read_all(&size, sizeof size)) return std::nullopt;
    std::vector<std::uint8_t> body(size);
    if (!read_all(body.data(), body.size())) return std::nullopt;
    return Json::from_cbor(body);
  }

 private:
  bool write_all(const void* data, std::size_t size) {
    const char* at = static_cast<const char*>(data);
    while (size > 0) {
      const auto written = ::send(fd_.get(), at, size, MSG_NOSIGNAL);
      if (written < 0 && errno == EINTR) continue;  // stopped and continued
      if (written <= 0) return false;
      at += written;
      size -= static_cast<std::size_t>(written);
    }
    return true;
  }
  bool read_all(void* data, std::size_t size) {
    char* at = static_cast<char*>(data);
    while (size > 0) {
      const auto got = ::read(fd_.get(), at, size);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return false;
      at += got;
      size -= static_cast<std::size_t>(got);
    }
    return true;
  }

  UniqueFd fd_;
};

}  // namespace kvshard::tools
