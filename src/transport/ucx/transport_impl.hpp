#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "kvshard/transport.hpp"
#include "transport/ucx/endpoint.hpp"
#include "transport/ucx/handles.hpp"
#include "transport/ucx/memory.hpp"
#include "transport/ucx/owner.hpp"

namespace kvshard::ucx {

/// One context and one worker, the owner's side, and the pool of fetches of all endpoints.
///
/// UCX callbacks only take notes. progress() runs UCX, then acts on the notes, then calls
/// listeners, so that a listener may fetch, close, connect and destroy endpoints.
class UcxTransport final : public Transport {
 public:
  static Result<std::unique_ptr<UcxTransport>> create(const TransportOptions& options);
  ~UcxTransport() override;
  UcxTransport(const UcxTransport&) = delete;
  UcxTransport& operator=(const UcxTransport&) = delete;

  [[nodiscard]] std::string_view kind() const noexcept override { return "ucx"; }
  [[nodiscard]] std::span<const std::byte> address() const noexcept override { return address_; }
  Result<std::unique_ptr<RegisteredMemory>> register_memory(std::span<std::byte> bytes,
                                                            MemoryKind kind) override;
  Status serve(const RegisteredMemory& memory) override;
  Result<std::unique_ptr<Endpoint>> connect(std::span<const std::byte> address,
                                            std::span<const std::byte> packed,
                                            EndpointListener& listener) override;
  std::size_t progress() noexcept override;
  [[nodiscard]] int wake_fd() const noexcept override { return wake_fd_; }
  bool arm() noexcept override;

  [[nodiscard]] const TransportOptions& options() const noexcept { return options_; }
  /// The registration that `local` lies in; null when there is none.
  [[nodiscard]] const UcxMemory* memory_of(std::span<const std::byte> local) const noexcept;
  void forget(UcxMemory& memory) noexcept;

  [[nodiscard]] ucp_worker_h worker() const noexcept { return worker_.get(); }
  Fetch& take_fetch(UcxEndpoint& endpoint, std::span<std::byte> local, TransferListener& listener);
  /// The listener of a decided fetch that UCX has let go of runs in progress().
  void finished(Fetch& fetch) { finished_.push_back(&fetch); }
  template <typename Visit>
  void for_each_awaiting(const UcxEndpoint& endpoint, Visit visit) {
    for (auto& fetch : fetches_)
      if (fetch.awaiting && fetch.endpoint == &endpoint) visit(fetch);
  }
  void add(UcxEndpoint& endpoint) { endpoints_.push_back(&endpoint); }
  void remove(UcxEndpoint& endpoint, std::unique_ptr<Connection> connection);

 private:
  UcxTransport(const TransportOptions& options, UcpContext context, UcpWorker worker);

  Status set_handlers();
  template <Message message>
  static ucs_status_t receive(void* self, const void* header, std::size_t header_bytes, void* data,
                              std::size_t data_bytes, const ucp_am_recv_param_t* param);
  Fetch* awaiting_fetch(std::uint64_t id) noexcept;
  std::size_t report_failures();
  std::size_t deliver();
  void drain_owner() noexcept;
  void use_device() noexcept;

  TransportOptions options_;
  UcpContext context_;
  UcpWorker worker_;
  Owner owner_;
  std::vector<std::byte> address_;
  int wake_fd_{-1};
  std::vector<UcxMemory*> memories_;
  std::vector<UcxEndpoint*> endpoints_;
  bool failure_noted_{false};
  std::deque<Fetch> fetches_;  // stable addresses, reused through free_
  std::vector<Fetch*> free_;
  std::vector<Fetch*> finished_;
  std::vector<Fetch*> delivering_;
  std::uint32_t next_number_;
  std::uint64_t next_path_;
  std::thread::id device_set_on_;
};

}  // namespace kvshard::ucx
