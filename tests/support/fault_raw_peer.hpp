#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "base/unique_fd.hpp"
#include "kvshard/registry.hpp"
#include "wire/codec.hpp"

namespace kvshard::test {

/// A decode rank that a test plays by hand: a blocking control connection, as rude as need be.
class RawPeer {
 public:
  explicit RawPeer(const GroupMember& member)
      : socket_{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)} {
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(member.port);
    (void)::inet_pton(AF_INET, member.host.c_str(), &to.sin_addr);
    connected = ::connect(socket_.get(), reinterpret_cast<sockaddr*>(&to), sizeof to) == 0;
  }
  template <wire::Message M>
  bool send(const M& message) {
    std::vector<std::byte> bytes;
    wire::encode(message, bytes);
    return ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(bytes.size());
  }
  /// The next frame but PINGs; nothing at the end of the stream or after ten seconds.
  std::optional<std::pair<wire::MessageType, std::vector<std::byte>>> receive() {
    for (;;) {
      std::byte header[wire::kFrameHeaderBytes];
      if (!read(header, sizeof header)) return std::nullopt;
      const auto decoded =
          wire::decode_header(std::span<const std::byte, wire::kFrameHeaderBytes>{header});
      if (!decoded) return std::nullopt;
      std::vector<std::byte> payload(decoded->payload_bytes);
      if (!read(payload.data(), payload.size())) return std::nullopt;
      if (decoded->type != wire::MessageType::ping)
        return std::pair{decoded->type, std::move(payload)};
    }
  }

  bool connected{false};

 private:
  bool read(std::byte* to, std::size_t bytes) {
    while (bytes > 0) {
      pollfd fd{.fd = socket_.get(), .events = POLLIN, .revents = 0};
      if (::poll(&fd, 1, 10'000) != 1) return false;
      const auto got = ::recv(socket_.get(), to, bytes, 0);
      if (got <= 0) return false;
      to += got;
      bytes -= static_cast<std::size_t>(got);
    }
    return true;
  }

  UniqueFd socket_;
};

}  // namespace kvshard::test
