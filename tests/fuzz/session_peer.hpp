#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <span>
#include <utility>
#include <vector>

#include "base/unique_fd.hpp"
#include "kvshard/geometry.hpp"
#include "kvshard/log.hpp"
#include "kvshard/registry.hpp"
#include "wire/codec.hpp"

// What the fuzzers of whole sessions share: an input that is read field by field, and a peer that says
// what the input wants.
namespace kvshard::fuzz {

inline void require(bool holds) {
  if (!holds) std::abort();
}

/// Calls `turn` until `done()`. A machine under load hands a loopback packet on a little later, so what must
/// come is waited for; that it does not come within ten seconds of our own processor time is a finding.
template <class Turn, class Done>
void until(Turn turn, Done done) {
  const std::clock_t limit = std::clock() + 10 * CLOCKS_PER_SEC;
  while (!done()) {
    require(std::clock() < limit);
    turn();
  }
}

/// Reads numbers off the input; zeros when it is used up.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : left_{std::as_bytes(std::span{data, size})} {}
  [[nodiscard]] bool empty() const { return left_.empty(); }
  template <class T = std::uint8_t>
  T number() {
    T value{};
    const std::size_t size = std::min(sizeof value, left_.size());
    if (size > 0) std::memcpy(&value, left_.data(), size);  // the data of nothing may be null
    left_ = left_.subspan(size);
    return value;
  }
  /// Mostly `likely`, else anything.
  template <class T>
  T near(T likely) {
    switch (number() % 8) {
      case 0:
        return number<T>();
      case 1:
        return static_cast<T>(likely + 1);
      case 2:
        return static_cast<T>(likely - 1);
      default:
        return likely;
    }
  }
  std::vector<std::byte> bytes(std::size_t size) {
    const auto taken = left_.first(std::min(size, left_.size()));
    left_ = left_.subspan(taken.size());
    return {taken.begin(), taken.end()};
  }

 private:
  std::span<const std::byte> left_;
};

/// One control connection, never blocking.
class Peer {
 public:
  explicit Peer(UniqueFd socket) : socket_{std::move(socket)} {
    const int at_once = 1;  // else a message waits 40 ms for the other side's acknowledgement
    (void)::setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &at_once, sizeof at_once);
  }
  /// Connected to `member`.
  explicit Peer(const GroupMember& member)
      : Peer{UniqueFd{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)}} {
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(member.port);
    (void)::inet_pton(AF_INET, member.host.c_str(), &to.sin_addr);
    // libFuzzer's alarm interrupts a call; the connection is made meanwhile.
    while (::connect(socket_.get(), reinterpret_cast<sockaddr*>(&to), sizeof to) != 0 &&
           errno != EISCONN)
      require(errno == EINTR || errno == EALREADY);
    // Closed with a reset, so that millions of runs do not use up the ports.
    const linger now{.l_onoff = 1, .l_linger = 0};
    (void)::setsockopt(socket_.get(), SOL_SOCKET, SO_LINGER, &now, sizeof now);
  }

  template <wire::Message M>
  void send(const M& message) {
    if (!wire::frame_bytes(message)) return;
    last_.clear();
    wire::encode(message, last_);
    send_bytes(last_);
  }
  void send_frame(std::uint8_t type, std::span<const std::byte> payload) {
    last_.assign(wire::kFrameHeaderBytes, std::byte{0});
    last_[0] = static_cast<std::byte>(payload.size());
    last_[1] = static_cast<std::byte>(payload.size() >> 8);
    last_[4] = static_cast<std::byte>(type);
    last_.insert(last_.end(), payload.begin(), payload.end());
    send_bytes(last_);
  }
  void send_again() { send_bytes(last_); }
  void send_bytes(std::span<const std::byte> bytes) {
    (void)::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  /// Calls `call` with the type and payload of each frame that has come.
  template <class Call>
  void receive(Call call) {
    std::byte buffer[16384];
    for (;;) {
      const auto got = ::recv(socket_.get(), buffer, sizeof buffer, MSG_DONTWAIT);
      if (got <= 0) break;
      in_.insert(in_.end(), buffer, buffer + got);
    }
    std::size_t at = 0;
    while (in_.size() - at >= wire::kFrameHeaderBytes) {
      const auto rest = std::span{in_}.subspan(at);
      const auto header = wire::decode_header(rest.first<wire::kFrameHeaderBytes>());
      require(header.ok());  // what a rank says is always well formed
      const std::size_t bytes = wire::kFrameHeaderBytes + header->payload_bytes;
      if (rest.size() < bytes) break;
      call(header->type, rest.subspan(wire::kFrameHeaderBytes, header->payload_bytes));
      at += bytes;
    }
    in_.erase(in_.begin(), in_.begin() + static_cast<std::ptrdiff_t>(at));
  }

 private:
  UniqueFd socket_;
  std::vector<std::byte> last_, in_;
};

inline constexpr std::uint64_t kPageBytes = 4ULL * 2 * 16;

inline Geometry geometry(std::uint32_t pages) {
  return {.model_id = "fuzz",
          .groups = {{.name = "kv",
                      .layers = 1,
                      .buffers_per_layer = 1,
                      .element_type = ElementType::f32,
                      .heads = 2,
                      .head_bytes = 16,
                      .page_size = 4,
                      .page_count = pages}}};
}

inline void silence_log() {
  set_log_hook([](void*, LogLevel, std::string_view) noexcept {}, nullptr);
}

}  // namespace kvshard::fuzz
