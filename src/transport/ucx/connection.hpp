#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "kvshard/result.hpp"
#include "transport/ucx/handles.hpp"

namespace kvshard::ucx {

/// The six active messages, and the one header that all of them have. Values travel between ranks.
enum class Message : unsigned {
  hello =
      1,  ///< decode -> owner, first: `path` names the way back, data is decode's sealed address
  request = 2,  ///< decode -> owner: send me [offset, offset + length) as `fetch`
  answer = 3,   ///< owner -> decode: data is `length` bytes for `fetch`, by rendezvous
  refusal =
      4,    ///< owner -> decode: no bytes for `fetch`; offset is a Refusal, length the served bytes
  bye = 5,  ///< decode -> owner: `path` is not needed any more
  welcome = 6,  ///< owner -> decode: `path` stands
};
enum class Refusal : std::uint64_t { not_served = 1, out_of_range = 2, send_failed = 3 };

/// Little-endian, like every machine that UCX and this library run on.
struct MessageHeader {
  std::uint64_t path{0};
  std::uint64_t fetch{0};
  std::uint64_t offset{0};
  std::uint64_t length{0};
};
static_assert(sizeof(MessageHeader) == 32);

/// One UCP endpoint in peer error mode, and the count of what UCX still runs on it.
///
/// Closing is by force: it does not wait for operations, which UCX then ends with an error, though not
/// at once. Memory is free only when idle() says so.
///
/// It does wait, for at most five seconds, until the connection has settled. UCX pairs the endpoints of two
/// workers by counting them on either side; one that is closed while it still connects is counted on one
/// side only, and all later pairs of these workers are then wrong: hangs and leaked sockets, seen on
/// 1.13.1.
///
/// Owns:    the endpoint. The destructor requires idle().
/// Threads: worker-bound. Never close inside a UCX callback.
class Connection {
 public:
  /// `failure_noted` is set to true by a failure, and must outlive the connection.
  static Result<std::unique_ptr<Connection>> open(ucp_worker_h worker,
                                                  std::span<const std::byte> worker_address,
                                                  bool& failure_noted);
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection();

  /// Null once close() was called.
  [[nodiscard]] ucp_ep_h handle() const noexcept { return endpoint_; }
  /// UCS_OK while it works.
  [[nodiscard]] ucs_status_t failure() const noexcept { return failure_; }
  [[nodiscard]] bool usable() const noexcept {
    return endpoint_ != nullptr && !closing_ && failure_ == UCS_OK;
  }
  /// Names the connection to its peer; 0 for the way back.
  [[nodiscard]] std::uint64_t path() const noexcept { return notes_[0].path; }
  /// The peer has paired its endpoint with this one.
  void settle() noexcept { settled_ = true; }

  /// Sends a hello or a bye, `data` being borrowed until idle(). A failure shows as the
  /// connection's.
  void send_note(Message message, std::uint64_t path, std::span<const std::byte> data) noexcept;

  /// Counts a UCX operation in and out.
  void begin() noexcept { ++outstanding_; }
  void end() noexcept { --outstanding_; }

  void close() noexcept;  ///< may be called twice
  /// Goes on with a closing that waits for the connection to settle.
  void progress_close() noexcept;
  void force_close() noexcept;
  /// Closed, and UCX has let go of everything.
  [[nodiscard]] bool idle() const noexcept { return endpoint_ == nullptr && outstanding_ == 0; }

 private:
  explicit Connection(bool& failure_noted) noexcept : failure_noted_{failure_noted} {}
  void fail(ucs_status_t status) noexcept;

  bool& failure_noted_;
  ucp_ep_h endpoint_{nullptr};
  ucs_status_t failure_{UCS_OK};
  bool settled_{false};
  bool closing_{false};
  std::chrono::steady_clock::time_point close_by_{};
  std::size_t outstanding_{0};
  std::array<MessageHeader, 2> notes_;  // of hello and bye; UCX reads them until they are sent
};

}  // namespace kvshard::ucx
