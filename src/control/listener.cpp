#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "base/log.hpp"
#include "base/try.hpp"
#include "control/connection.hpp"

namespace kvshard {
namespace {

using namespace std::chrono_literals;

constexpr int kBacklog = 1024;
constexpr int kAcceptsPerTurn = 64;  // so that a storm leaves the loop time for others
constexpr Duration kRetryDelay = 100ms;
constexpr Duration kLogInterval = 10s;

}  // namespace

Result<std::unique_ptr<Listener>> Listener::create(EventLoop& loop, const SocketAddress& bind,
                                                   OnAccept on_accept) {
  const auto failed = [&](const char* call) {
    const int error = errno;
    const bool exhausted =
        error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
    return Error{exhausted ? ErrorCode::resource_exhausted : ErrorCode::unavailable,
                 fmt::format("listen on {}: {}: {}", bind.to_string(), call,
                             std::generic_category().message(error))};
  };
  UniqueFd socket{::socket(bind.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)};
  if (!socket) return failed("socket");
  const int on =
      1;  // a restarted rank takes its old port although connections of the old one linger
  if (::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0)
    return failed("setsockopt");
  if (::bind(socket.get(), bind.data(), bind.size()) != 0) return failed("bind");
  if (::listen(socket.get(), kBacklog) != 0) return failed("listen");
  KVSHARD_TRY(const SocketAddress local, SocketAddress::local(socket.get()));
  std::unique_ptr<Listener> listener{
      new Listener{loop, std::move(socket), local.port(), std::move(on_accept)}};
  KVSHARD_TRY(loop.watch(listener->socket_.get(), EPOLLIN, *listener));
  return listener;
}

Listener::Listener(EventLoop& loop, UniqueFd socket, std::uint16_t port, OnAccept on_accept)
    : loop_{loop},
      socket_{std::move(socket)},
      port_{port},
      on_accept_{std::make_shared<const OnAccept>(std::move(on_accept))} {}

Listener::~Listener() {
  loop_.cancel(retry_timer_);
  loop_.unwatch(socket_.get());
  if (destroyed_ != nullptr) *destroyed_ = true;
}

void Listener::fd_ready(std::uint32_t) noexcept {
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    UniqueFd socket{::accept4(socket_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC)};
    if (!socket) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno != EAGAIN) back_off(errno);
      return;
    }
    const auto peer = SocketAddress::remote(socket.get());
    if (!peer) continue;  // it has gone already

    const auto on_accept = on_accept_;  // the call may destroy this listener
    bool destroyed = false;
    destroyed_ = &destroyed;
    (*on_accept)(std::move(socket), peer->to_string());
    if (destroyed) return;
    destroyed_ = nullptr;
  }
}

void Listener::back_off(int error) noexcept {
  ++failures_;
  if (loop_.now() >= next_log_) {
    log::warning("accept failed: port {}: {}, {} failures since the last line", port_,
                 std::generic_category().message(error), failures_);
    failures_ = 0;
    next_log_ = loop_.now() + kLogInterval;
  }
  // The connection stays in the backlog, and the socket readable: without a pause the loop would
  // spin.
  (void)loop_.rewatch(socket_.get(), 0, *this);
  retry_timer_ = loop_.at(loop_.now() + kRetryDelay,
                          [this] { (void)loop_.rewatch(socket_.get(), EPOLLIN, *this); });
}

}  // namespace kvshard
