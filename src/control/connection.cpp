#include "control/connection.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/try.hpp"

namespace kvshard {
namespace {

constexpr std::size_t kReadBytes = 64U << 10;
// A peer that floods us with small messages leaves the loop time for others after each read.
constexpr int kReadsPerTurn = 1;
constexpr int kReadsBeforeClose = 16;
constexpr std::size_t kWriteEarly = 64U
                                    << 10;  // a queue this long does not wait for the turn's end

std::string describe_error(int error) {
  return std::generic_category().message(error);
}

ErrorCode socket_error_code(int error) noexcept {
  const bool exhausted = error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
  return exhausted ? ErrorCode::resource_exhausted : ErrorCode::unavailable;
}

// Small messages must not wait for an acknowledgement. Other kinds of stream sockets have no such
// delay, and refuse the option.
void set_no_delay(int fd) noexcept {
  const int on = 1;
  (void)::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

// A connect to a free port of this host can pick that very port as its own, and then meets itself.
bool connected_to_itself(int fd) {
  const auto local = SocketAddress::local(fd);
  const auto remote = SocketAddress::remote(fd);
  return local && remote && local->size() == remote->size() &&
         std::memcmp(local->data(), remote->data(), local->size()) == 0;
}

}  // namespace

Connection::Connection(EventLoop& loop, UniqueFd socket, ConnectionListener& listener,
                       ConnectionLimits limits, std::string peer, Handshake::Side side,
                       std::shared_ptr<Secrets> secrets)
    : loop_{loop},
      listener_{listener},
      limits_{limits},
      peer_{std::move(peer)},
      socket_{std::move(socket)},
      last_received_{loop.now()} {
  if (secrets != nullptr) handshake_.emplace(side, std::move(secrets));
}

Connection::~Connection() {
  close();
  if (destroyed_ != nullptr) *destroyed_ = true;
}

Result<std::unique_ptr<Connection>> Connection::connect(
    EventLoop& loop, const SocketAddress& address, TimePoint deadline, ConnectionListener& listener,
    ConnectionLimits limits, std::shared_ptr<Secrets> secrets) {
  UniqueFd socket{::socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)};
  if (!socket)
    return Error{socket_error_code(errno), fmt::format("connect to {}: socket: {}",
                                                       address.to_string(), describe_error(errno))};
  set_no_delay(socket.get());
  const bool refused = ::connect(socket.get(), address.data(), address.size()) != 0 &&
                       errno != EINPROGRESS && errno != EINTR;
  const int error = errno;
  std::unique_ptr<Connection> made{new Connection{loop, std::move(socket), listener, limits,
                                                  address.to_string(), Handshake::Side::decode,
                                                  std::move(secrets)}};
  Connection& self = *made;
  self.connecting_ = true;
  if (refused) {
    self.fail_later({socket_error_code(error),
                     fmt::format("connect to {}: {}", self.peer_, describe_error(error))});
    return made;
  }
  self.events_ = EPOLLOUT;
  KVSHARD_TRY(loop.watch(self.socket_.get(), self.events_, self));
  const auto allowed = std::chrono::ceil<std::chrono::milliseconds>(deadline - loop.clock().now());
  self.connect_timer_ = loop.at(deadline, [&self, allowed] {
    self.fail({ErrorCode::deadline_exceeded,
               fmt::format("connect to {}: no answer within {} ms", self.peer_, allowed.count())});
  });
  return made;
}

Result<std::unique_ptr<Connection>> Connection::adopt(EventLoop& loop, UniqueFd socket,
                                                      ConnectionListener& listener,
                                                      ConnectionLimits limits,
                                                      std::shared_ptr<Secrets> secrets) {
  const auto remote = SocketAddress::remote(socket.get());
  if (!remote) return remote.error();
  const int flags = ::fcntl(socket.get(), F_GETFL);
  if (flags < 0 || ::fcntl(socket.get(), F_SETFL, flags | O_NONBLOCK) != 0)
    return Error{ErrorCode::internal,
                 fmt::format("fcntl of fd {}: {}", socket.get(), describe_error(errno))};
  set_no_delay(socket.get());
  std::unique_ptr<Connection> made{new Connection{loop, std::move(socket), listener, limits,
                                                  remote->to_string(), Handshake::Side::prefill,
                                                  std::move(secrets)}};
  made->events_ = EPOLLIN;
  KVSHARD_TRY(loop.watch(made->socket_.get(), made->events_, *made));
  return made;
}

void Connection::close() noexcept {
  if (!socket_) return;
  loop_.cancel(connect_timer_);
  loop_.cancel_turn_end(*this);
  loop_.unwatch(socket_.get());
  socket_.reset();
}

void Connection::flush_and_close() noexcept {
  if (!closed() && !connecting_) {
    (void)write_queue();
    // Bytes left unread would turn the close into a reset, which may overtake what was just
    // written.
    std::array<std::byte, 4096> unread;
    for (int i = 0; i<kReadsBeforeClose&& ::recv(socket_.get(), unread.data(), unread.size(), 0)> 0;
         ++i) {
    }
    (void)::shutdown(socket_.get(), SHUT_WR);
  }
  close();
}

void Connection::fail(Error error) noexcept {
  close();
  listener_.connection_closed(std::move(error));  // may destroy this
}

void Connection::fail_later(Error error) {
  failure_ = std::move(error);
  run_at_turn_end();
}

void Connection::run_at_turn_end() {
  if (turn_end_registered_) return;
  turn_end_registered_ = true;
  loop_.at_turn_end(*this);
}

template <class Call>
bool Connection::still_open_after(Call&& call) noexcept {
  bool destroyed = false;
  destroyed_ = &destroyed;
  call();
  if (destroyed) return false;
  destroyed_ = nullptr;
  return !closed();
}

// Says why, as far as the peer still listens, before it closes.
void Connection::refuse(Error error) noexcept {
  (void)send(wire::Bye{error});
  flush_and_close();
  error.message = fmt::format("from {}: {}", peer_, error.message);
  fail(std::move(error));
}

// Makes room for a frame of `bytes`, and for its MAC.
Status Connection::begin_frame(wire::MessageType type, std::size_t bytes) {
  if (closed())
    return Error{ErrorCode::unavailable, fmt::format("the connection to {} is closed", peer_)};
  if (handshake_ && type != wire::MessageType::bye) {
    return Error{ErrorCode::failed_precondition,
                 fmt::format("{} has not proved itself yet", peer_)};
  }
  if (sending_) bytes += FrameMac::kBytes;
  if (queued_bytes() + bytes > limits_.max_queued_bytes) {
    write_early();
    if (queued_bytes() + bytes > limits_.max_queued_bytes) {
      Error error{
          ErrorCode::resource_exhausted,
          fmt::format("{} does not read: {} bytes queued and {} to send, at most {} allowed", peer_,
                      queued_bytes(), bytes, limits_.max_queued_bytes)};
      fail_later(error);
      return error;
    }
  }
  if (out_begin_ > out_.size() / 2) {  // moves fewer bytes than were written since the last move
    out_.erase(out_.begin(), out_.begin() + static_cast<std::ptrdiff_t>(out_begin_));
    out_begin_ = 0;
  }
  return {};
}

Status Connection::queued(std::size_t frame) {
  if (sending_) {
    if (Status sealed = sending_->seal(out_, frame); !sealed) {
      out_.resize(frame);
      fail_later(sealed.error());
      return sealed;
    }
  }
  if (queued_bytes() >= kWriteEarly) write_early();
  run_at_turn_end();
  return {};
}

// A failure here comes up again at the turn's end, where the listener can be told.
void Connection::write_early() {
  if (!connecting_ && (events_ & EPOLLOUT) == 0) (void)write_queue();
}

Status Connection::write_queue() noexcept {
  while (queued_bytes() != 0) {
    const auto written =
        ::send(socket_.get(), out_.data() + out_begin_, queued_bytes(), MSG_NOSIGNAL);
    if (written < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN) return {};
      return Error{ErrorCode::unavailable,
                   fmt::format("write to {}: {}", peer_, describe_error(errno))};
    }
    out_begin_ += static_cast<std::size_t>(written);
  }
  out_.clear();
  out_begin_ = 0;
  return {};
}

void Connection::flush() noexcept {
  if (connecting_) return;
  Status status = write_queue();
  if (status) status = update_events();
  if (status) return;
  // The peer may have said why it closed; that comes before what our write met.
  if (receive()) fail(std::move(status).error());
}

Status Connection::update_events() noexcept {
  const std::uint32_t wanted = EPOLLIN | (queued_bytes() != 0 ? std::uint32_t{EPOLLOUT} : 0U);
  if (wanted == events_) return {};
  events_ = wanted;
  return loop_.rewatch(socket_.get(), events_, *this);
}

void Connection::turn_end() noexcept {
  turn_end_registered_ = false;
  if (failure_) return fail(std::move(*failure_));
  flush();
}

void Connection::fd_ready(std::uint32_t epoll_events) noexcept {
  if (failure_) return;  // told at the turn's end
  if (connecting_ && !finish_connect()) return;
  if ((epoll_events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0 && !receive()) return;
  if ((epoll_events & EPOLLOUT) != 0) flush();
}

bool Connection::finish_connect() noexcept {
  int error = 0;
  socklen_t size = sizeof error;
  if (::getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  if (error == 0 && connected_to_itself(socket_.get())) error = ECONNREFUSED;
  if (error != 0) {
    fail(
        {socket_error_code(error), fmt::format("connect to {}: {}", peer_, describe_error(error))});
    return false;
  }
  connecting_ = false;
  last_received_ = loop_.now();
  if (!handshake_) return opened();
  if (Status started = handshake_->start(out_); !started) {
    fail(std::move(started).error());
    return false;
  }
  return true;
}

bool Connection::opened() noexcept {
  loop_.cancel(connect_timer_);
  return still_open_after([this] { listener_.connection_open(); });
}

bool Connection::receive() noexcept {
  for (int i = 0; i < kReadsPerTurn; ++i) {
    make_input_space();
    const std::size_t space = in_.size() - in_end_;
    const auto got = ::recv(socket_.get(), in_.data() + in_end_, space, 0);
    if (got > 0) {
      last_received_ = loop_.now();
      in_end_ += static_cast<std::size_t>(got);
      if (!deliver_frames()) return false;
      if (static_cast<std::size_t>(got) < space) return true;
    } else if (got == 0) {
      fail({ErrorCode::unavailable,
            in_begin_ == in_end_ ? fmt::format("{} closed the connection", peer_)
                                 : fmt::format("{} closed the connection {} bytes into a frame",
                                               peer_, in_end_ - in_begin_)});
      return false;
    } else if (errno == EAGAIN) {
      return true;
    } else if (errno != EINTR) {
      fail({ErrorCode::unavailable, fmt::format("read from {}: {}", peer_, describe_error(errno))});
      return false;
    }
  }
  return true;
}

// Makes the rest of the frame that has begun fit behind in_end_, so that there is always space to
// read into.
void Connection::make_input_space() {
  if (in_begin_ == in_end_) in_begin_ = in_end_ = 0;
  // A peer that has not proved itself gets little memory.
  const std::size_t read_bytes = handshake_ ? ProtocolLimits::kHandshakeFrameBytes : kReadBytes;
  if (in_begin_ + frame_bytes_ <= in_.size() && in_.size() >= read_bytes) return;
  std::copy(in_.begin() + static_cast<std::ptrdiff_t>(in_begin_),
            in_.begin() + static_cast<std::ptrdiff_t>(in_end_), in_.begin());
  in_end_ -= in_begin_;
  in_begin_ = 0;
  if (const std::size_t size = std::max(frame_bytes_, read_bytes); in_.size() < size)
    in_.resize(size);
}

bool Connection::deliver_frames() noexcept {
  while (in_end_ - in_begin_ >= wire::kFrameHeaderBytes) {
    const std::span<const std::byte> come{in_.data() + in_begin_, in_end_ - in_begin_};
    const std::size_t limit =
        handshake_ ? std::min(ProtocolLimits::kHandshakeFrameBytes, limits_.max_frame_bytes)
                   : limits_.max_frame_bytes;
    auto header = wire::decode_header(come.first<wire::kFrameHeaderBytes>(), limit);
    if (!header) {
      fail({header.error().code, fmt::format("from {}: {}", peer_, header.error().message)});
      return false;
    }
    frame_bytes_ = wire::kFrameHeaderBytes + header->payload_bytes;
    if (come.size() < frame_bytes_) return true;
    const auto frame = come.first(frame_bytes_);
    in_begin_ += frame_bytes_;
    frame_bytes_ = wire::kFrameHeaderBytes;
    if (!(handshake_ ? shake_hands(header->type, frame) : deliver(header->type, frame)))
      return false;
  }
  return true;
}

bool Connection::deliver(wire::MessageType type, std::span<const std::byte> frame) noexcept {
  auto payload = frame.subspan(wire::kFrameHeaderBytes);
  if (receiving_) {
    auto opened = receiving_->open(frame);
    if (!opened) {
      refuse(std::move(opened).error());
      return false;
    }
    payload = *opened;
  } else if (type == wire::MessageType::authenticate) {
    refuse({ErrorCode::failed_precondition,
            "the decode rank requires a secret, and this prefill rank has none"});
    return false;
  }
  return still_open_after([&] { listener_.connection_frame(type, payload); });
}

bool Connection::shake_hands(wire::MessageType type, std::span<const std::byte> frame) noexcept {
  auto done = handshake_->take(type, frame, out_);
  if (!done) {
    if (type == wire::MessageType::bye) {
      fail(std::move(done).error());
    } else {
      refuse(std::move(done).error());
    }
    return false;
  }
  run_at_turn_end();
  if (!*done) return true;
  sending_ = handshake_->take_sending();
  receiving_ = handshake_->take_receiving();
  handshake_.reset();
  return opened();
}

}  // namespace kvshard
