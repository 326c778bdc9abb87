#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "kvshard/types.hpp"
#include "transport/ucx/connection.hpp"

namespace kvshard::ucx {

/// The memory that peers may fetch from.
struct ServedMemory {
  std::span<std::byte> bytes;
  ucp_mem_h handle{nullptr};
  MemoryKind kind{MemoryKind::host};
};

/// The owner's part of the am path: answers requests with the bytes of its served memory.
///
/// A requester's first message carries its worker address, and the owner opens an endpoint to it:
/// the way back. UCX pairs that with the endpoint that the requester opened, so it is one
/// connection. The reply endpoint that UCX would offer instead cannot be given an error handler nor
/// be closed, so each dead peer would leave one behind, and an error line in the log.
///
/// Messages are only noted inside UCX callbacks and acted on in progress().
/// Threads: worker-bound.
class Owner {
 public:
  explicit Owner(ucp_worker_h worker) noexcept : worker_{worker} {}
  ~Owner();
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;

  void serve(const ServedMemory& memory) noexcept { served_ = memory; }
  [[nodiscard]] const ServedMemory& served() const noexcept { return served_; }
  /// Serves nothing from here on, and closes the ways back on which UCX still reads the memory. It
  /// has let go once idle().
  void withdraw() noexcept;
  void close() noexcept;
  /// A decode rank's connection that was retired has settled.
  void settle(std::uint64_t path) noexcept;
  /// Closes a connection and keeps it until UCX has let go of it.
  void retire(std::unique_ptr<Connection> connection);

  /// Inside a UCX callback; what is wrong is dropped, for nobody is there to be told.
  void received(Message message, const MessageHeader& header, std::span<const std::byte> data);
  std::size_t progress();
  [[nodiscard]] bool has_work() const noexcept { return !inbox_.empty() || failure_noted_; }
  /// UCX runs no answer, and no closing.
  [[nodiscard]] bool idle() const noexcept { return answering_ == 0 && closing_.empty(); }

 private:
  struct Received {
    Message message;
    MessageHeader header;
    std::vector<std::byte> address;  // of a hello
  };
  struct Answer {
    Owner* owner{nullptr};
    Connection* connection{nullptr};
    MessageHeader header;  // UCX reads it until the message is sent
  };
  using Paths = std::unordered_map<std::uint64_t, std::unique_ptr<Connection>>;

  void open_path(const Received& hello);
  void answer(const MessageHeader& request);
  void refuse(Connection& connection, std::uint64_t fetch, Refusal reason);
  void send(Connection& connection, Message message, const MessageHeader& header,
            std::span<const std::byte> data);
  Paths::iterator close_path(Paths::iterator path);

  ucp_worker_h worker_;
  ServedMemory served_;
  bool failure_noted_{false};
  Paths paths_;
  std::vector<std::unique_ptr<Connection>> closing_;
  std::deque<Received> inbox_;
  std::deque<Answer> answers_;  // stable addresses, reused through free_
  std::vector<Answer*> free_;
  std::size_t answering_{0};
};

}  // namespace kvshard::ucx
