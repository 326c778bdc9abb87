#include "registry/http.hpp"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <system_error>
#include <thread>
#include <vector>

#include "base/try.hpp"
#include "base/unique_fd.hpp"

namespace kvshard::http {
namespace {

using namespace std::chrono_literals;

std::string errno_text(int error) {
  return std::generic_category().message(error);
}

template <typename Number>
std::optional<Number> parse_number(std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

bool equal_ignoring_case(std::string_view a, std::string_view b) {
  return std::ranges::equal(
      a, b, [](unsigned char x, unsigned char y) { return std::tolower(x) == std::tolower(y); });
}

std::string_view trim(std::string_view text) {
  const auto first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

// Rounded up, so that a wait does not end just before its deadline and spin.
int poll_timeout(TimePoint deadline) {
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(deadline - SteadyClock::instance().now());
  return static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 60'000));
}

struct AddressList {
  addrinfo* first{nullptr};
  AddressList() = default;
  ~AddressList() {
    if (first != nullptr) ::freeaddrinfo(first);
  }
  AddressList(const AddressList&) = delete;
  AddressList& operator=(const AddressList&) = delete;
};

Status resolve(const Address& address, int flags, AddressList& list) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  const auto port = std::to_string(address.port);
  if (const int error = ::getaddrinfo(address.host.c_str(), port.c_str(), &hints, &list.first))
    return Error{ErrorCode::unavailable,
                 fmt::format("look up '{}': {}", address.host, ::gai_strerror(error))};
  return {};
}

Result<UniqueFd> make_event() {
  UniqueFd event{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  if (!event) return Error{ErrorCode::resource_exhausted, "eventfd: " + errno_text(errno)};
  return event;
}

void notify(const UniqueFd& event) noexcept {
  const std::uint64_t one = 1;
  // Fails only when the counter is full, and then it is readable anyway.
  [[maybe_unused]] const auto written = ::write(event.get(), &one, sizeof one);
}

// The client's side of one connection: every wait ends at the deadline or when `wake` is readable.
class Exchange {
 public:
  Exchange(const UniqueFd& wake, TimePoint deadline) noexcept : wake_{wake}, deadline_{deadline} {}

  Status connect(const addrinfo& target, TimePoint deadline) {
    fd_ = UniqueFd{::socket(target.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)};
    if (!fd_) return Error{ErrorCode::unavailable, "socket: " + errno_text(errno)};
    if (::connect(fd_.get(), target.ai_addr, target.ai_addrlen) == 0) return {};
    if (errno != EINPROGRESS) return Error{ErrorCode::unavailable, "connect: " + errno_text(errno)};
    KVSHARD_TRY(wait(POLLOUT, deadline));
    int error = 0;
    socklen_t size = sizeof error;
    ::getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) return Error{ErrorCode::unavailable, "connect: " + errno_text(error)};
    return {};
  }

  Status send(std::string_view bytes) {
    while (!bytes.empty()) {
      const auto sent = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent >= 0) {
        bytes.remove_prefix(static_cast<std::size_t>(sent));
      } else if (errno == EAGAIN) {
        KVSHARD_TRY(wait(POLLOUT, deadline_));
      } else if (errno != EINTR) {
        return Error{ErrorCode::unavailable, "send: " + errno_text(errno)};
      }
    }
    return {};
  }

  Status receive(MessageReader& reader) {
    std::array<char, 16384>
        buffer;  // NOLINT(cppcoreguidelines-pro-type-member-init): recv fills it
    while (true) {
      KVSHARD_TRY(wait(POLLIN, deadline_));
      const auto got = ::recv(fd_.get(), buffer.data(), buffer.size(), 0);
      if (got > 0) {
        auto whole = reader.feed({buffer.data(), static_cast<std::size_t>(got)});
        if (!whole) return Error{ErrorCode::unavailable, "its answer: " + whole.error().message};
        if (whole.value()) return {};
      } else if (got == 0) {
        if (reader.whole_at_end()) return {};
        return Error{ErrorCode::unavailable,
                     "it closed the connection before its answer was whole"};
      } else if (errno != EAGAIN && errno != EINTR) {
        return Error{ErrorCode::unavailable, "receive: " + errno_text(errno)};
      }
    }
  }

 private:
  Status wait(short events, TimePoint deadline) {
    std::array<pollfd, 2> fds{{{fd_.get(), events, 0}, {wake_.get(), POLLIN, 0}}};
    while (true) {
      const int ready = ::poll(fds.data(), fds.size(), poll_timeout(deadline));
      if (fds[1].revents != 0) return Error{ErrorCode::cancelled, "stopped by the caller"};
      // Checked also when something is ready: a peer that drips bytes must not move the deadline.
      if (SteadyClock::instance().now() >= deadline)
        return Error{ErrorCode::deadline_exceeded, "no answer in time"};
      if (ready > 0) return {};
      if (ready < 0 && errno != EINTR)
        return Error{ErrorCode::unavailable, "poll: " + errno_text(errno)};
    }
  }

  const UniqueFd& wake_;
  TimePoint deadline_;
  UniqueFd fd_;
};

Result<int> parse_status(std::string_view line) {
  std::optional<int> status;
  if (line.starts_with("HTTP/1.") && line.size() >= 12 && line[8] == ' ')
    status = parse_number<int>(line.substr(9, 3));
  if (!status || *status < 100)
    return Error{ErrorCode::unavailable, "its answer does not begin with an HTTP status line"};
  return *status;
}

std::string encode(const Response& response) {
  return fmt::format(
      "HTTP/1.1 {} {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n"
      "Cache-Control: no-store\r\n\r\n{}",
      response.status, response.status < 400 ? "OK" : "Refused", response.content_type,
      response.body.size(), response.body);
}

Response plain(int status, std::string_view text) {
  return {status, "text/plain; charset=utf-8", fmt::format("{}\n", text)};
}

}  // namespace

Result<Address> parse_address(std::string_view text) {
  const std::string_view whole = text;
  const auto bad = [whole] {
    return Error{ErrorCode::invalid_argument,
                 fmt::format("'{}' is no address: host:port or [IPv6]:port is needed", whole)};
  };
  if (text.starts_with("http://")) text.remove_prefix(7);
  if (text.ends_with('/')) text.remove_suffix(1);
  const auto colon = text.rfind(':');
  if (colon == std::string_view::npos) return bad();
  std::string_view host = text.substr(0, colon);
  const auto port = parse_number<std::uint16_t>(text.substr(colon + 1));
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    return bad();
  }
  const bool host_ok = !host.empty() && std::ranges::all_of(host, [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '.' || c == '-' || c == '_' || c == ':' || c == '%';
  });
  if (!host_ok || !port) return bad();
  return Address{std::string{host}, *port};
}

std::string to_string(const Address& address) {
  const bool v6 = address.host.find(':') != std::string::npos;
  return v6 ? fmt::format("[{}]:{}", address.host, address.port)
            : fmt::format("{}:{}", address.host, address.port);
}

Result<bool> MessageReader::feed(std::string_view bytes) {
  if (!head_done_) {
    const std::size_t searched = body_.size() < 3 ? 0 : body_.size() - 3;
    const std::size_t taken = std::min(bytes.size(), kMaxHeadBytes - body_.size());
    body_.append(bytes.substr(0, taken));
    const auto end = body_.find("\r\n\r\n", searched);
    if (end == std::string::npos) {
      if (body_.size() < kMaxHeadBytes) return false;
      return Error{ErrorCode::resource_exhausted,
                   fmt::format("more than {} header bytes", kMaxHeadBytes)};
    }
    const std::string head = std::exchange(body_, {});
    KVSHARD_TRY(parse_head(std::string_view{head}.substr(0, end)));
    head_done_ = true;
    KVSHARD_TRY(const bool whole, feed(std::string_view{head}.substr(end + 4)));
    return whole ? Result<bool>{true} : feed(bytes.substr(taken));
  }
  const std::size_t limit = kind_ == Kind::request ? kMaxRequestBodyBytes : kMaxResponseBodyBytes;
  const std::size_t missing = length_.value_or(limit) - body_.size();
  if (!length_ && bytes.size() > missing)
    return Error{ErrorCode::resource_exhausted, fmt::format("more than {} body bytes", limit)};
  body_.append(bytes.substr(0, missing));
  return length_ && body_.size() == *length_;
}

Status MessageReader::parse_head(std::string_view head) {
  const auto line_end = std::min(head.find("\r\n"), head.size());
  start_line_ = head.substr(0, line_end);
  for (head.remove_prefix(std::min(line_end + 2, head.size())); !head.empty();) {
    const auto end = std::min(head.find("\r\n"), head.size());
    const std::string_view line = head.substr(0, end);
    head.remove_prefix(std::min(end + 2, head.size()));
    const auto colon = line.find(':');
    if (colon == std::string_view::npos || colon == 0)
      return Error{ErrorCode::data_loss, "a header line without a name"};
    const std::string_view name = line.substr(0, colon);
    if (equal_ignoring_case(name, "transfer-encoding"))
      return Error{ErrorCode::data_loss, "Transfer-Encoding is not taken here"};
    if (!equal_ignoring_case(name, "content-length")) continue;
    const auto length = parse_number<std::size_t>(trim(line.substr(colon + 1)));
    if (!length || length_)
      return Error{ErrorCode::data_loss, "Content-Length is no number, or comes twice"};
    const std::size_t limit = kind_ == Kind::request ? kMaxRequestBodyBytes : kMaxResponseBodyBytes;
    if (*length > limit)
      return Error{ErrorCode::resource_exhausted,
                   fmt::format("a body of {} bytes, limit {}", *length, limit)};
    length_ = length;
  }
  if (!length_ && kind_ == Kind::request) length_ = 0;
  return {};
}

Result<Response> fetch(const Address& address, const Request& request, TimePoint deadline,
                       const std::stop_token& stop) {
  KVSHARD_TRY(const UniqueFd wake, make_event());
  const std::stop_callback on_stop{stop, [&wake] { notify(wake); }};
  AddressList targets;
  KVSHARD_TRY(resolve(address, 0, targets));
  std::int64_t left = 0;
  for (const addrinfo* target = targets.first; target != nullptr; target = target->ai_next) ++left;

  Exchange exchange{wake, deadline};
  Status connected = Error{ErrorCode::unavailable, "no address"};
  for (const addrinfo* target = targets.first; target != nullptr && !connected;
       target = target->ai_next, --left) {
    // An address that swallows packets must leave time for the next one.
    const auto now = SteadyClock::instance().now();
    connected = exchange.connect(*target, now + (deadline - now) / left);
    if (!connected && connected.error().code == ErrorCode::cancelled) break;
  }
  KVSHARD_TRY(std::move(connected));
  // HTTP/1.0: the answer then comes in one piece and ends with the connection.
  KVSHARD_TRY(exchange.send(fmt::format(
      "{} {} HTTP/1.0\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: "
      "{}\r\n\r\n{}",
      request.method, request.target, to_string(address), request.body.size(), request.body)));
  MessageReader reader{MessageReader::Kind::response};
  KVSHARD_TRY(exchange.receive(reader));
  KVSHARD_TRY(const int status, parse_status(reader.start_line()));
  return Response{status, {}, reader.take_body()};
}

class Server::Impl {
 public:
  Impl(Address address, UniqueFd listener, UniqueFd wake, Handler handler)
      : address_{std::move(address)},
        listener_{std::move(listener)},
        wake_{std::move(wake)},
        handler_{std::move(handler)},
        thread_{[this](const std::stop_token& stop) { run(stop); }} {}
  ~Impl() {
    thread_.request_stop();
    notify(wake_);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  [[nodiscard]] const Address& address() const noexcept { return address_; }

 private:
  struct Connection {
    enum class State : std::uint8_t { reading, writing, draining };

    UniqueFd fd;
    TimePoint deadline;
    State state{State::reading};
    MessageReader reader{MessageReader::Kind::request};
    std::string output;
    std::size_t sent{0};
  };

  void run(const std::stop_token& stop) {
    std::vector<pollfd> fds;
    while (!stop.stop_requested()) {
      const TimePoint now = SteadyClock::instance().now();
      std::erase_if(connections_,
                    [now](const Connection& c) { return !c.fd || c.deadline <= now; });
      // Not listened to while we are full or out of descriptors: the rest wait in the backlog.
      const bool listening = connections_.size() < kMaxConnections && now >= accept_after_;
      TimePoint next = listening ? now + 1min : std::max(accept_after_, now + 100ms);
      fds.assign({{wake_.get(), POLLIN, 0}, {listening ? listener_.get() : -1, POLLIN, 0}});
      for (const Connection& c : connections_) {
        fds.push_back({c.fd.get(),
                       c.state == Connection::State::writing ? short{POLLOUT} : short{POLLIN}, 0});
        next = std::min(next, c.deadline);
      }
      if (::poll(fds.data(), fds.size(), poll_timeout(next)) <= 0) continue;
      for (std::size_t i = 0; i < connections_.size(); ++i)
        if (fds[i + 2].revents != 0) serve(connections_[i]);
      if (fds[1].revents != 0) accept_all();
    }
  }

  void accept_all() {
    while (connections_.size() < kMaxConnections) {
      UniqueFd fd{::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)};
      const TimePoint now = SteadyClock::instance().now();
      if (fd) {
        connections_.push_back(
            {.fd = std::move(fd), .deadline = now + kExchangeTimeout, .output = {}});
      } else if (errno != EINTR && errno != ECONNABORTED) {
        // Out of descriptors the listener stays readable: look again later instead of spinning.
        if (errno != EAGAIN) accept_after_ = now + 100ms;
        return;
      }
    }
  }

  void serve(Connection& c) {
    if (c.state == Connection::State::reading) read(c);
    if (c.state == Connection::State::writing) write(c);
    if (c.state == Connection::State::draining) drain(c);
  }

  void read(Connection& c) {
    std::array<char, 16384>
        buffer;  // NOLINT(cppcoreguidelines-pro-type-member-init): recv fills it
    const auto got = ::recv(c.fd.get(), buffer.data(), buffer.size(), 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) return c.fd.reset();
    auto whole = c.reader.feed({buffer.data(), static_cast<std::size_t>(got)});
    if (whole && !whole.value()) return;
    c.output = encode(whole ? answer(c.reader) : refuse(whole.error()));
    c.state = Connection::State::writing;
  }

  [[nodiscard]] static Response refuse(const Error& error) {
    return plain(error.code == ErrorCode::resource_exhausted ? 413 : 400, error.message);
  }

  [[nodiscard]] Response answer(MessageReader& reader) const {
    const std::string_view line = reader.start_line();
    const auto first = line.find(' ');
    const auto second = line.find(' ', first == std::string_view::npos ? first : first + 1);
    if (second == std::string_view::npos || !line.substr(second).starts_with(" HTTP/1."))
      return plain(400, "this is no HTTP/1 request");
    return handler_(Request{std::string{line.substr(0, first)},
                            std::string{line.substr(first + 1, second - first - 1)},
                            reader.take_body()});
  }

  static void write(Connection& c) {
    const auto sent =
        ::send(c.fd.get(), c.output.data() + c.sent, c.output.size() - c.sent, MSG_NOSIGNAL);
    if (sent < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (sent < 0) return c.fd.reset();
    c.sent += static_cast<std::size_t>(sent);
    if (c.sent < c.output.size()) return;
    c.output = {};
    // Closing with unread input resets the connection, and the peer might lose the answer.
    ::shutdown(c.fd.get(), SHUT_WR);
    c.state = Connection::State::draining;
  }

  static void drain(Connection& c) {
    std::array<char, 16384>
        buffer;  // NOLINT(cppcoreguidelines-pro-type-member-init): recv fills it
    const auto got = ::recv(c.fd.get(), buffer.data(), buffer.size(), 0);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) c.fd.reset();
  }

  Address address_;
  UniqueFd listener_;
  UniqueFd wake_;
  Handler handler_;
  std::vector<Connection> connections_;  // the thread's own
  TimePoint accept_after_{};             // the thread's own
  std::jthread thread_;
};

Result<std::unique_ptr<Server>> Server::start(const Address& address, Handler handler) {
  AddressList targets;
  KVSHARD_TRY(resolve(address, AI_NUMERICHOST | AI_PASSIVE, targets));
  const addrinfo& target = *targets.first;
  UniqueFd listener{::socket(target.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)};
  const int on = 1;
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  if (!listener || ::setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
      ::bind(listener.get(), target.ai_addr, target.ai_addrlen) != 0 ||
      ::listen(listener.get(), 128) != 0 ||
      ::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&bound), &size) != 0)
    return Error{ErrorCode::unavailable,
                 fmt::format("listen on {}: {}", to_string(address), errno_text(errno))};
  const std::uint16_t port = bound.ss_family == AF_INET6
                                 ? reinterpret_cast<const sockaddr_in6&>(bound).sin6_port
                                 : reinterpret_cast<const sockaddr_in&>(bound).sin_port;
  KVSHARD_TRY(UniqueFd wake, make_event());
  return std::unique_ptr<Server>{
      new Server{std::make_unique<Impl>(Address{address.host, ntohs(port)}, std::move(listener),
                                        std::move(wake), std::move(handler))}};
}

Server::Server(std::unique_ptr<Impl> impl) noexcept : impl_{std::move(impl)} {}
Server::~Server() = default;
const Address& Server::address() const noexcept {
  return impl_->address();
}

}  // namespace kvshard::http
