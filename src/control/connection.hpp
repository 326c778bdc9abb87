#pragma once

#include <sys/socket.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.hpp"
#include "base/unique_fd.hpp"
#include "control/event_loop.hpp"
#include "control/handshake.hpp"
#include "kvshard/result.hpp"
#include "wire/codec.hpp"

namespace kvshard {

/// An IPv4 or IPv6 address and port. A value.
class SocketAddress {
 public:
  /// `host` is numeric, or "localhost" (127.0.0.1). Names are not resolved: that can block.
  /// Errors: invalid_argument naming the host.
  static Result<SocketAddress> parse(std::string_view host, std::uint16_t port);
  /// Where `fd` is bound, and where it is connected to.
  static Result<SocketAddress> local(int fd);
  static Result<SocketAddress> remote(int fd);

  [[nodiscard]] const sockaddr* data() const noexcept {
    return reinterpret_cast<const sockaddr*>(&storage_);
  }
  [[nodiscard]] socklen_t size() const noexcept { return size_; }
  [[nodiscard]] int family() const noexcept { return storage_.ss_family; }
  [[nodiscard]] std::uint16_t port() const noexcept;
  [[nodiscard]] bool is_loopback() const noexcept;
  /// Without the port: "127.0.0.1", "::1".
  [[nodiscard]] std::string host() const;
  /// "127.0.0.1:4711", "[::1]:4711"; the family's name for others.
  [[nodiscard]] std::string to_string() const;

 private:
  sockaddr_storage storage_{};
  socklen_t size_{0};
};

struct ConnectionLimits {
  std::size_t max_frame_bytes{wire::kMaxFrameBytes};  ///< header included
  std::size_t max_queued_bytes{8U << 20};             ///< not yet taken by the socket
};

/// Hears what a connection does. Any call may close or destroy the connection.
class ConnectionListener {
 public:
  /// A connect() succeeded, or with secrets: both sides have proved themselves. After an adopt()
  /// without secrets it is not called.
  virtual void connection_open() noexcept = 0;
  /// A whole frame came. `payload` is borrowed until the call returns or the connection is
  /// destroyed.
  virtual void connection_frame(wire::MessageType type,
                                std::span<const std::byte> payload) noexcept = 0;
  /// Once, last, and not after close(): end of stream, reset, bad frame header, queue overflow,
  /// connect failure or timeout. Frames that came before are delivered first.
  virtual void connection_closed(Error error) noexcept = 0;

 protected:
  ~ConnectionListener() = default;
};

/// A framed, non-blocking TCP connection.
///
/// With secrets the sides prove themselves first: the listener hears connection_open() after that, and
/// before it only BYE can be sent. Every frame then carries a MAC; the listener sees none of it. A side
/// with secrets and one without refuse each other.
///
/// Messages sent within one turn of the loop leave in one write at its end, or earlier when they
/// add up. Owns:    the socket. The loop and the listener are borrowed until the connection is
/// destroyed. Threads: loop-thread only. Errors:  connect() and adopt() give resource_exhausted
/// when the process has no descriptors left; what
///          happens later goes to connection_closed(), never from within a call on the connection.
class Connection final : EventLoop::FdHandler, EventLoop::TurnEndHandler {
 public:
  /// Does not wait. The listener hears connection_open(), or connection_closed() with `unavailable`
  /// or, at `deadline`, `deadline_exceeded`. Messages sent before it opens are queued.
  static Result<std::unique_ptr<Connection>> connect(EventLoop& loop, const SocketAddress& address,
                                                     TimePoint deadline,
                                                     ConnectionListener& listener,
                                                     ConnectionLimits limits = {},
                                                     std::shared_ptr<Secrets> secrets = nullptr);
  /// Takes a connected socket, as accepted by a Listener. How long a handshake may take is the caller's
  /// to say: see Admission.
  static Result<std::unique_ptr<Connection>> adopt(EventLoop& loop, UniqueFd socket,
                                                   ConnectionListener& listener,
                                                   ConnectionLimits limits = {},
                                                   std::shared_ptr<Secrets> secrets = nullptr);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  /// Queues a message.
  /// Errors: invalid_argument when it is beyond the wire's limits (nothing is queued); unavailable
  /// when the connection is closed; failed_precondition while the sides prove themselves, but for BYE;
  /// resource_exhausted when the queue would exceed its limit,
  /// because the peer does not read: the connection then closes, and connection_closed() follows at
  /// the end of the turn.
  template <wire::Message M>
  Status send(const M& message) {
    auto bytes = wire::frame_bytes(message);
    if (!bytes) return std::move(bytes).error();
    if (Status ready = begin_frame(wire::type_of<M>, *bytes); !ready) return ready;
    const std::size_t frame = out_.size();
    wire::encode(message, out_);
    return queued(frame);
  }

  /// When a byte last came; at first, when the connection was made.
  [[nodiscard]] TimePoint last_received() const noexcept { return last_received_; }
  /// Does not count `pause`, in which nobody here could have read, as the peer's silence.
  void excuse(Duration pause) noexcept {
    last_received_ = std::min(last_received_ + pause, loop_.now());
  }
  [[nodiscard]] std::size_t queued_bytes() const noexcept { return out_.size() - out_begin_; }
  [[nodiscard]] bool closed() const noexcept { return !socket_ || failure_.has_value(); }
  [[nodiscard]] const std::string& peer() const noexcept { return peer_; }

  /// Writes of the queue what the socket takes without blocking, then closes. For BYE.
  void flush_and_close() noexcept;
  /// Idempotent. The listener hears nothing more.
  void close() noexcept;

 private:
  Connection(EventLoop& loop, UniqueFd socket, ConnectionListener& listener,
             ConnectionLimits limits, std::string peer, Handshake::Side side,
             std::shared_ptr<Secrets> secrets);

  void fd_ready(std::uint32_t epoll_events) noexcept override;
  void turn_end() noexcept override;

  Status begin_frame(wire::MessageType type, std::size_t bytes);
  Status queued(std::size_t frame);
  void write_early();
  void fail_later(Error error);
  void fail(Error error) noexcept;
  void refuse(Error error) noexcept;
  [[nodiscard]] bool finish_connect() noexcept;
  [[nodiscard]] bool receive() noexcept;
  [[nodiscard]] bool deliver_frames() noexcept;
  [[nodiscard]] bool deliver(wire::MessageType type, std::span<const std::byte> frame) noexcept;
  [[nodiscard]] bool shake_hands(wire::MessageType type, std::span<const std::byte> frame) noexcept;
  [[nodiscard]] bool opened() noexcept;
  void make_input_space();
  Status write_queue() noexcept;
  void flush() noexcept;
  void run_at_turn_end();
  Status update_events() noexcept;
  template <class Call>
  [[nodiscard]] bool still_open_after(Call&& call) noexcept;

  EventLoop& loop_;
  ConnectionListener& listener_;
  ConnectionLimits limits_;
  std::string peer_;
  UniqueFd socket_;
  bool connecting_{false};
  bool turn_end_registered_{false};
  std::uint32_t events_{0};
  EventLoop::TimerId connect_timer_{0};
  TimePoint last_received_;
  std::optional<Handshake> handshake_;           // until both sides have proved themselves
  std::optional<FrameMac> sending_, receiving_;  // after that
  std::optional<Error> failure_;                 // waits for the turn's end to be told
  bool* destroyed_{nullptr};                     // set while a listener call is on the stack
  std::vector<std::byte> in_;  // bytes [in_begin_, in_end_) have come and are not yet delivered
  std::size_t in_begin_{0};
  std::size_t in_end_{0};
  std::size_t frame_bytes_{wire::kFrameHeaderBytes};  // of the frame at in_begin_, as far as known
  std::vector<std::byte> out_;  // bytes from out_begin_ on are not yet written
  std::size_t out_begin_{0};
};

/// Accepts TCP connections.
///
/// When the process has no descriptors left it logs, at a bounded rate, and tries again after a
/// while. Owns:    the listening socket. Threads: loop-thread only.
class Listener final : EventLoop::FdHandler {
 public:
  using OnAccept = std::function<void(UniqueFd socket, std::string peer)>;

  /// Port 0 lets the system choose. `on_accept` may destroy the Listener.
  /// Errors: unavailable when the address cannot be bound; resource_exhausted without descriptors.
  static Result<std::unique_ptr<Listener>> create(EventLoop& loop, const SocketAddress& bind,
                                                  OnAccept on_accept);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  [[nodiscard]] std::uint16_t port() const noexcept { return port_; }

 private:
  Listener(EventLoop& loop, UniqueFd socket, std::uint16_t port, OnAccept on_accept);

  void fd_ready(std::uint32_t epoll_events) noexcept override;
  void back_off(int error) noexcept;

  EventLoop& loop_;
  UniqueFd socket_;
  std::uint16_t port_;
  std::shared_ptr<const OnAccept> on_accept_;
  EventLoop::TimerId retry_timer_{0};
  TimePoint next_log_{};
  std::uint64_t failures_{0};  // since the last line in the log
  bool* destroyed_{nullptr};   // set while on_accept is on the stack
};

}  // namespace kvshard
