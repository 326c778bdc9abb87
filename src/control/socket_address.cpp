#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>

#include "control/connection.hpp"

namespace kvshard {

Result<SocketAddress> SocketAddress::parse(std::string_view host, std::uint16_t port) {
  const std::string numeric{host == "localhost" ? "127.0.0.1" : host};
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;  // never asks a resolver
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (numeric.empty() || numeric.find('\0') != std::string::npos ||
      ::getaddrinfo(numeric.c_str(), std::to_string(port).c_str(), &hints, &found) != 0)
    return Error{ErrorCode::invalid_argument,
                 fmt::format("host \"{}\" is neither a numeric address nor localhost", host)};
  SocketAddress address;
  std::memcpy(&address.storage_, found->ai_addr, found->ai_addrlen);
  address.size_ = found->ai_addrlen;
  ::freeaddrinfo(found);
  return address;
}

Result<SocketAddress> SocketAddress::local(int fd) {
  SocketAddress address;
  address.size_ = sizeof address.storage_;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address.storage_), &address.size_) == 0)
    return address;
  return Error{ErrorCode::unavailable,
               fmt::format("getsockname of fd {}: {}", fd, std::generic_category().message(errno))};
}

Result<SocketAddress> SocketAddress::remote(int fd) {
  SocketAddress address;
  address.size_ = sizeof address.storage_;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&address.storage_), &address.size_) == 0)
    return address;
  return Error{ErrorCode::unavailable,
               fmt::format("getpeername of fd {}: {}", fd, std::generic_category().message(errno))};
}

std::uint16_t SocketAddress::port() const noexcept {
  // Both families keep the port at the same place; memcpy because storage_ is not a sockaddr_in.
  static_assert(offsetof(sockaddr_in, sin_port) == offsetof(sockaddr_in6, sin6_port));
  if (family() != AF_INET && family() != AF_INET6) return 0;
  sockaddr_in address;
  std::memcpy(&address, &storage_, sizeof address);
  return ntohs(address.sin_port);
}

bool SocketAddress::is_loopback() const noexcept {
  if (family() == AF_INET) {
    sockaddr_in address;
    std::memcpy(&address, &storage_, sizeof address);
    return ntohl(address.sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
  }
  if (family() != AF_INET6) return false;
  sockaddr_in6 address;
  std::memcpy(&address, &storage_, sizeof address);
  const in6_addr& ip = address.sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(&ip) || (IN6_IS_ADDR_V4MAPPED(&ip) && ip.s6_addr[12] == 127);
}

std::string SocketAddress::host() const {
  std::array<char, NI_MAXHOST> host{};
  if ((family() != AF_INET && family() != AF_INET6) ||
      ::getnameinfo(data(), size_, host.data(), host.size(), nullptr, 0, NI_NUMERICHOST) != 0)
    return fmt::format("address family {}", family());
  return host.data();
}

std::string SocketAddress::to_string() const {
  if (family() == AF_INET6) return fmt::format("[{}]:{}", host(), port());
  if (family() == AF_INET) return fmt::format("{}:{}", host(), port());
  return host();
}

}  // namespace kvshard
