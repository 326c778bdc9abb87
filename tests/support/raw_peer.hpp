#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/unique_fd.hpp"

// A peer that speaks bytes, so that tests can say what no well-behaved one would.
namespace kvshard::testing {

inline sockaddr_in loopback(std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

class RawPeer {
 public:
  explicit RawPeer(UniqueFd fd) : fd_{std::move(fd)} {}
  static RawPeer connect(std::uint16_t port) {
    UniqueFd fd{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    const sockaddr_in address = loopback(port);
    if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
      fd.reset();
    return RawPeer{std::move(fd)};
  }

  /// False once the other side has closed.
  bool send(std::string_view bytes) const {
    while (!bytes.empty()) {
      const auto sent = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return false;
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    }
    return true;
  }
  void finish_sending() const { ::shutdown(fd_.get(), SHUT_WR); }

  /// Everything up to the end of the connection, or to ten silent seconds.
  [[nodiscard]] std::string receive_all() const {
    std::string all;
    std::array<char, 4096> buffer{};
    pollfd fd{fd_.get(), POLLIN, 0};
    while (::poll(&fd, 1, 10'000) == 1) {
      const auto got = ::recv(fd_.get(), buffer.data(), buffer.size(), 0);
      if (got <= 0) break;
      all.append(buffer.data(), static_cast<std::size_t>(got));
    }
    return all;
  }

 private:
  UniqueFd fd_;
};

class RawListener {
 public:
  RawListener() : fd_{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)} {
    sockaddr_in address = loopback(0);
    socklen_t size = sizeof address;
    if (::bind(fd_.get(), reinterpret_cast<const sockaddr*>(&address), size) == 0 &&
        ::listen(fd_.get(), 8) == 0 &&
        ::getsockname(fd_.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0)
      port_ = ntohs(address.sin_port);
  }
  [[nodiscard]] std::uint16_t port() const { return port_; }
  [[nodiscard]] RawPeer accept() const {
    return RawPeer{UniqueFd{::accept(fd_.get(), nullptr, nullptr)}};
  }

 private:
  UniqueFd fd_;
  std::uint16_t port_{0};
};

}  // namespace kvshard::testing
