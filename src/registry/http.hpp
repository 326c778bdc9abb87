#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>

#include "base/clock.hpp"
#include "kvshard/result.hpp"

// As much of HTTP as a registry needs: one exchange per connection, both ends with a bound on time
// and bytes. A general library was tried first: its limits hold per read and not per request, so a
// peer that drips bytes holds a call, and even shutdown, for as long as it likes; it takes any
// number of header bytes; and it changes the process's SIGPIPE handling, which belongs to the
// engine.
namespace kvshard::http {

inline constexpr std::size_t kMaxHeadBytes = 8U << 10;
inline constexpr std::size_t kMaxRequestBodyBytes = 512U << 10;
inline constexpr std::size_t kMaxResponseBodyBytes = 64U << 20;
inline constexpr std::size_t kMaxConnections = 256;
/// What a server gives a connection, from accept to close.
inline constexpr std::chrono::seconds kExchangeTimeout{5};

struct Address {
  std::string host;
  std::uint16_t port{0};
};
/// Reads "host:port" or "[v6]:port", with "http://" before and "/" after it, or not.
Result<Address> parse_address(std::string_view text);
/// "host:port", with brackets round an IPv6 address.
std::string to_string(const Address& address);

struct Request {
  std::string method;
  std::string target;
  std::string body;
};

struct Response {
  int status{200};
  std::string content_type{"application/json"};
  std::string body;
};

/// Collects one message: a start line, headers, and a body of Content-Length bytes. Without that
/// header a request has no body, and a response's goes on to the end of the connection.
class MessageReader {
 public:
  enum class Kind : std::uint8_t { request, response };
  explicit MessageReader(Kind kind) noexcept : kind_{kind} {}

  /// True when the message is whole; what follows it is dropped. Nothing is kept beyond the limits.
  /// Errors: data_loss for what is no HTTP, resource_exhausted for what exceeds a limit.
  Result<bool> feed(std::string_view bytes);
  /// The peer sends no more: is it whole?
  [[nodiscard]] bool whole_at_end() const noexcept { return head_done_ && !length_; }

  [[nodiscard]] const std::string& start_line() const noexcept { return start_line_; }
  [[nodiscard]] std::string take_body() noexcept { return std::move(body_); }

 private:
  Status parse_head(std::string_view head);

  Kind kind_;
  bool head_done_{false};
  std::optional<std::size_t> length_;
  std::string start_line_;
  std::string body_;  // the head too, until it is whole
};

/// One exchange on a connection of its own. Ends by `deadline`, and soon after `stop`.
/// Errors: unavailable when there is no sane answer, deadline_exceeded, cancelled.
Result<Response> fetch(const Address& address, const Request& request, TimePoint deadline,
                       const std::stop_token& stop);

/// Answers requests on a thread of its own, one at a time. The destructor does not wait for peers.
class Server {
 public:
  using Handler = std::function<Response(const Request&)>;
  /// `handler` runs on the server's thread and must not block.
  static Result<std::unique_ptr<Server>> start(const Address& address, Handler handler);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  [[nodiscard]] const Address& address() const noexcept;

 private:
  class Impl;
  explicit Server(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvshard::http
