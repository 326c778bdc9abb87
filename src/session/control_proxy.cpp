#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <list>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/unique_fd.hpp"
#include "kvshard/fault_injection.hpp"
#include "wire/codec.hpp"

namespace kvshard {
namespace {

using Clock = std::chrono::steady_clock;

// One direction of a connection: whole frames go in, and out as they were or as the test wants them.
struct Stream {
  std::vector<std::byte> in;       // the frame that has begun
  std::vector<std::byte> out;      // to be written
  std::vector<std::byte> behind;   // a reordered frame, waits for the next
  Clock::time_point not_before{};  // nothing is written until then
};

struct Link {
  UniqueFd ends[2];   // 0: decode, 1: prefill
  Stream streams[2];  // streams[i] leaves ends[i]
};

}  // namespace

class ControlProxy::Impl {
 public:
  Impl(UniqueFd listener, UniqueFd wake, sockaddr_in target, Decide decide)
      : listener_{std::move(listener)},
        wake_{std::move(wake)},
        target_{target},
        decide_{std::move(decide)} {}
  ~Impl() {
    thread_.request_stop();
    wake();
    if (thread_.joinable()) thread_.join();
  }

  void start() {
    thread_ = std::jthread{[this](std::stop_token stop) {
      while (!stop.stop_requested()) turn();
    }};
  }
  [[nodiscard]] std::uint16_t port() const noexcept {
    sockaddr_in bound{};
    socklen_t size = sizeof bound;
    (void)::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&bound), &size);
    return ntohs(bound.sin_port);
  }
  void set_silent(bool silent) noexcept {
    silent_ = silent;
    wake();
  }
  void cut() noexcept {
    cut_ = true;
    wake();
  }

 private:
  void wake() noexcept {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof one);
  }

  void turn() {
    if (cut_.exchange(false)) links_.clear();
    const bool silent = silent_;
    const auto now = Clock::now();
    int timeout = -1;
    std::vector<pollfd> fds{{.fd = wake_.get(), .events = POLLIN, .revents = 0}};
    if (!silent) {
      fds.push_back({.fd = listener_.get(), .events = POLLIN, .revents = 0});
      for (Link& link : links_) {
        for (int i = 0; i < 2; ++i) {
          short events = POLLIN;
          if (!link.streams[i].out.empty()) {
            if (link.streams[i].not_before <= now)
              events = POLLIN | POLLOUT;
            else
              timeout = static_cast<int>(kDelay.count());
          }
          fds.push_back({.fd = link.ends[i].get(), .events = events, .revents = 0});
        }
      }
    }
    if (::poll(fds.data(), fds.size(), timeout) < 0) return;
    std::uint64_t drained = 0;
    if (fds[0].revents != 0) [[maybe_unused]]
      const auto got = ::read(wake_.get(), &drained, sizeof drained);
    if (silent || silent_ || cut_) return;
    std::size_t at = 2;
    for (auto link = links_.begin(); link != links_.end(); at += 2) {
      const bool open = serve(*link, fds[at].revents, 0) && serve(*link, fds[at + 1].revents, 1);
      link = open ? std::next(link) : links_.erase(link);
    }
    if (fds[1].revents != 0) accept();
  }

  void accept() {
    UniqueFd decode{::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)};
    if (!decode) return;
    UniqueFd prefill{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    if (!prefill ||
        ::connect(prefill.get(), reinterpret_cast<sockaddr*>(&target_), sizeof target_) != 0)
      return;  // decode sees its connection close
    const int on = 1;
    for (const int fd : {decode.get(), prefill.get()})
      (void)::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    Link& link = links_.emplace_back();
    link.ends[0] = std::move(decode);
    link.ends[1] = std::move(prefill);
  }

  // False when the link is over.
  bool serve(Link& link, short ready, int end) {
    Stream& writes = link.streams[end];
    if (!writes.out.empty() && writes.not_before <= Clock::now() &&
        !write_out(link.ends[end].get(), writes))
      return false;
    if ((ready & (POLLIN | POLLHUP | POLLERR)) == 0) return true;
    Stream& to = link.streams[1 - end];
    std::byte buffer[65536];
    const auto got = ::recv(link.ends[end].get(), buffer, sizeof buffer, MSG_DONTWAIT);
    if (got < 0) return errno == EAGAIN || errno == EINTR;
    if (got == 0) {
      (void)write_out(link.ends[1 - end].get(), to);  // a goodbye passes before the close
      return false;
    }
    to.in.insert(to.in.end(), buffer, buffer + got);
    while (to.in.size() >= wire::kFrameHeaderBytes) {
      const auto header = wire::decode_header(std::span{to.in}.first<wire::kFrameHeaderBytes>());
      if (!header) return false;
      const std::size_t bytes = wire::kFrameHeaderBytes + header->payload_bytes;
      if (to.in.size() < bytes) break;
      const std::vector<std::byte> frame{to.in.begin(),
                                         to.in.begin() + static_cast<std::ptrdiff_t>(bytes)};
      to.in.erase(to.in.begin(), to.in.begin() + static_cast<std::ptrdiff_t>(bytes));
      if (!forward(to, frame,
                   {.to_prefill = end == 0,
                    .type = static_cast<std::uint8_t>(header->type),
                    .bytes = bytes,
                    .number = frames_++}))
        return false;
    }
    return write_out(link.ends[1 - end].get(), to);
  }

  bool forward(Stream& to, const std::vector<std::byte>& frame, const ProxiedFrame& what) {
    const FrameFate fate = decide_ ? decide_(what) : FrameFate::pass;
    if (fate == FrameFate::cut) return false;
    if (fate == FrameFate::drop) return true;
    if (fate == FrameFate::reorder && to.behind.empty()) {
      to.behind = frame;
      return true;
    }
    if (fate == FrameFate::delay) to.not_before = Clock::now() + kDelay;
    to.out.insert(to.out.end(), frame.begin(), frame.end());
    if (fate == FrameFate::duplicate) to.out.insert(to.out.end(), frame.begin(), frame.end());
    to.out.insert(to.out.end(), to.behind.begin(), to.behind.end());
    to.behind.clear();
    return true;
  }

  static bool write_out(int fd, Stream& stream) {
    if (stream.not_before > Clock::now()) return true;
    while (!stream.out.empty()) {
      const auto sent =
          ::send(fd, stream.out.data(), stream.out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0) return errno == EAGAIN || errno == EINTR;
      stream.out.erase(stream.out.begin(), stream.out.begin() + sent);
    }
    return true;
  }

  UniqueFd listener_, wake_;
  sockaddr_in target_;
  Decide decide_;
  std::list<Link> links_;
  std::uint64_t frames_{0};
  std::atomic<bool> silent_{false}, cut_{false};
  std::jthread thread_;
};

Result<std::unique_ptr<ControlProxy>> ControlProxy::create(const std::string& host,
                                                           std::uint16_t port, Decide decide) {
  sockaddr_in target{};
  target.sin_family = AF_INET;
  target.sin_port = htons(port);
  if (::inet_pton(AF_INET, host.c_str(), &target.sin_addr) != 1)
    return Error{ErrorCode::invalid_argument, fmt::format("{} is no IPv4 address", host)};
  UniqueFd listener{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)};
  UniqueFd wake{::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
  sockaddr_in own{};
  own.sin_family = AF_INET;
  own.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (!listener || !wake ||
      ::bind(listener.get(), reinterpret_cast<sockaddr*>(&own), sizeof own) != 0 ||
      ::listen(listener.get(), 64) != 0)
    return Error{ErrorCode::resource_exhausted,
                 fmt::format("proxy socket: {}", std::strerror(errno))};
  auto impl =
      std::make_unique<Impl>(std::move(listener), std::move(wake), target, std::move(decide));
  impl->start();
  return std::unique_ptr<ControlProxy>{new ControlProxy{std::move(impl)}};
}

ControlProxy::ControlProxy(std::unique_ptr<Impl> impl) noexcept : impl_{std::move(impl)} {}
ControlProxy::~ControlProxy() = default;
std::uint16_t ControlProxy::port() const noexcept {
  return impl_->port();
}
void ControlProxy::set_silent(bool silent) noexcept {
  impl_->set_silent(silent);
}
void ControlProxy::cut() noexcept {
  impl_->cut();
}

}  // namespace kvshard
