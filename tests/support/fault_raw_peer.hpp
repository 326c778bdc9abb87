#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "base/unique_fd.hpp"
#include "control/handshake.hpp"
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
  /// Proves that it knows `secret`; every frame is sealed from then on.
  bool prove(std::string_view secret) {
    auto secrets = std::make_shared<Secrets>();
    secrets->push_back(HmacKey::create(std::as_bytes(std::span{secret})).value());
    Handshake handshake{Handshake::Side::decode, std::move(secrets)};
    std::vector<std::byte> out;
    for (bool done = !handshake.start(out); !done;) {
      if (!write(std::exchange(out, {}))) return false;
      const auto frame = read_frame();
      if (!frame) return false;
      const auto took = handshake.take(static_cast<wire::MessageType>((*frame)[4]), *frame, out);
      if (!took) return false;
      done = *took;
    }
    sending_ = handshake.take_sending();
    receiving_ = handshake.take_receiving();
    return true;
  }
  template <wire::Message M>
  bool send(const M& message) {
    std::vector<std::byte> bytes;
    wire::encode(message, bytes);
    if (sending_ && !sending_->seal(bytes, 0)) return false;
    return write(bytes);
  }
  /// The next frame but PINGs; nothing at the end of the stream or after ten seconds.
  std::optional<std::pair<wire::MessageType, std::vector<std::byte>>> receive() {
    for (;;) {
      const auto frame = read_frame();
      if (!frame) return std::nullopt;
      auto payload = std::span{*frame}.subspan(wire::kFrameHeaderBytes);
      if (receiving_) {
        const auto opened = receiving_->open(*frame);
        if (!opened) return std::nullopt;
        payload = *opened;
      }
      const auto type = static_cast<wire::MessageType>((*frame)[4]);
      if (type != wire::MessageType::ping)
        return std::pair{type, std::vector<std::byte>{payload.begin(), payload.end()}};
    }
  }

  bool connected{false};

 private:
  bool write(const std::vector<std::byte>& bytes) {
    return ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(bytes.size());
  }
  std::optional<std::vector<std::byte>> read_frame() {
    std::vector<std::byte> frame(wire::kFrameHeaderBytes);
    if (!read(frame.data(), frame.size())) return std::nullopt;
    const auto header = wire::decode_header(std::span{frame}.first<wire::kFrameHeaderBytes>());
    if (!header) return std::nullopt;
    frame.resize(wire::kFrameHeaderBytes + header->payload_bytes);
    if (!read(frame.data() + wire::kFrameHeaderBytes, header->payload_bytes)) return std::nullopt;
    return frame;
  }
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
  std::optional<FrameMac> sending_, receiving_;
};

}  // namespace kvshard::test
