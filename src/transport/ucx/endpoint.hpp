#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>

#include "kvshard/transport.hpp"
#include "transport/ucx/connection.hpp"
#include "transport/ucx/memory.hpp"

namespace kvshard::ucx {

class UcxEndpoint;
class UcxTransport;

/// One fetch, or one round of a probe. Pooled by the transport, at an address that stays.
struct Fetch {
  std::uint64_t id{
      0};  ///< index in the pool, and above it a number that a late answer does not repeat
  UcxEndpoint* endpoint{nullptr};
  TransferListener* listener{nullptr};
  std::span<std::byte> local;
  const UcxMemory* memory{nullptr};  ///< that `local` lies in
  MessageHeader request;             ///< am: UCX reads it until the request is sent
  unsigned held{0};      ///< UCX operations under way, which may touch `local` or `request`
  bool awaiting{false};  ///< am: no answer has come
  bool decided{false};   ///< `status` is final
  Status status;
};

/// A decode rank's way to an owner: fetches by ucp_get_nbx(), or by a request that the owner
/// answers.
class UcxEndpoint final : public Endpoint, private TransferListener {
 public:
  UcxEndpoint(UcxTransport& transport, std::unique_ptr<Connection> connection, UcpRkey rkey,
              const RemoteMemory& remote, std::uint64_t path, EndpointListener& listener);
  ~UcxEndpoint() override;
  UcxEndpoint(const UcxEndpoint&) = delete;
  UcxEndpoint& operator=(const UcxEndpoint&) = delete;

  Status probe(std::span<std::byte> local, TransferListener& listener) override;
  [[nodiscard]] const PathReport& path() const noexcept override { return report_; }
  Status fetch(std::uint64_t offset, std::span<std::byte> local,
               TransferListener& listener) override;
  [[nodiscard]] std::size_t in_flight() const noexcept override { return in_flight_; }
  void close() noexcept override;
  [[nodiscard]] bool closed() const noexcept override {
    return closing_ && in_flight_ == 0 && connection_->idle();
  }

 private:
  friend class UcxTransport;

  /// What a probe is at: for each path to measure, short rounds that set up, then timed ones.
  struct Probe {
    std::span<std::byte> local;
    TransferListener* listener{nullptr};
    std::array<TransferPath, 2> paths{};
    std::size_t path_count{0};
    std::size_t path{0};
    std::size_t round{0};
    std::chrono::steady_clock::time_point timed_since{};  // of this path
    std::chrono::steady_clock::time_point round_started{};
    double gigabytes_per_s{0};  // the best round of this path
  };

  // Called by the transport outside UCX callbacks.
  [[nodiscard]] bool broken() const noexcept {
    return !failed_ && !closing_ && connection_->failure() != UCS_OK;
  }
  void fail();
  void deliver(TransferListener& listener, Status status);
  // Called by the transport inside UCX callbacks.
  ucs_status_t answered(Fetch& fetch, std::size_t bytes, void* data, bool rendezvous);
  void refused(Fetch& fetch, const MessageHeader& refusal);

  [[nodiscard]] Status usable() const;
  Status start(TransferPath path, std::uint64_t offset, std::span<std::byte> local,
               TransferListener& listener);
  void start_get(Fetch& fetch, std::uint64_t offset);
  void start_am(Fetch& fetch, std::uint64_t offset);
  void hold(Fetch& fetch) noexcept;
  void release(Fetch& fetch);
  void decide(Fetch& fetch, Status status);
  void decide(Fetch& fetch, ucs_status_t status);
  void give_up_waiting();

  void transfer_done(Status status) noexcept override;  // a round of the probe ended
  void next_round();
  void end_probe(Status status);
  Status choose_path();

  UcxTransport& transport_;
  std::unique_ptr<Connection> connection_;
  UcpRkey rkey_;
  std::uint64_t remote_address_;
  std::uint64_t remote_bytes_;
  MemoryKind remote_kind_;
  EndpointListener& listener_;
  Probe probe_;
  PathReport report_;
  std::size_t in_flight_{0};
  bool closing_{false};
  bool failed_{false};
};

}  // namespace kvshard::ucx
