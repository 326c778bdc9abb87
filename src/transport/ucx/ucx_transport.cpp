#include "transport/ucx/ucx_transport.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>

#include "base/assert.hpp"
#include "base/log.hpp"
#include "base/try.hpp"
#include "transport/envelope.hpp"
#include "transport/ucx/context.hpp"
#include "transport/ucx/cuda_device.hpp"
#include "transport/ucx/transport_impl.hpp"

namespace kvshard::ucx {
namespace {

using namespace std::chrono_literals;
using transport::EnvelopeKind;

/// Longest that a destructor waits for UCX to let go of memory.
constexpr auto kDrainLimit = 2s;

std::uint64_t random_number() {
  std::random_device device;
  return (std::uint64_t{device()} << 32) | device();
}

}  // namespace

Result<std::unique_ptr<UcxTransport>> UcxTransport::create(const TransportOptions& options) {
  if (options.path == TransferPath::loopback || options.path == TransferPath::mapped)
    return Error{
        ErrorCode::invalid_argument,
        fmt::format("path {} was asked for, but the transport is ucx", to_string(options.path))};
  // The calling thread is the engine's: its current device is put back.
  KVSHARD_TRY(const DeviceGuard device, DeviceGuard::enter(options.cuda_device));
  KVSHARD_TRY(auto context, create_context(options));
  KVSHARD_TRY(auto worker, create_worker(context.get()));
  std::unique_ptr<UcxTransport> made{
      new UcxTransport{options, std::move(context), std::move(worker)}};

  ucp_address_t* address = nullptr;
  std::size_t address_bytes = 0;
  auto* const raw_worker = made->worker_.get();
  if (const auto status = ucp_worker_get_address(raw_worker, &address, &address_bytes);
      status != UCS_OK)
    return ucx_error("ucp_worker_get_address", status);
  const auto release = [raw_worker](ucp_address_t* owned) {
    ucp_worker_release_address(raw_worker, owned);
  };
  const std::unique_ptr<ucp_address_t, decltype(release)> owned{address, release};
  if (address_bytes > transport::kMaxEnvelopePayloadBytes)
    return Error{ErrorCode::internal,
                 fmt::format("ucx worker address of {} bytes, at most {}", address_bytes,
                             transport::kMaxEnvelopePayloadBytes)};
  made->address_ = transport::seal(EnvelopeKind::ucx_address,
                                   {reinterpret_cast<const std::byte*>(address), address_bytes});
  if (const auto status = ucp_worker_get_efd(raw_worker, &made->wake_fd_); status != UCS_OK)
    return ucx_error("ucp_worker_get_efd", status);
  KVSHARD_TRY(made->set_handlers());
  return made;
}

UcxTransport::UcxTransport(const TransportOptions& options, UcpContext context, UcpWorker worker)
    : options_{options},
      context_{std::move(context)},
      worker_{std::move(worker)},
      owner_{worker_.get()},
      // From random starts, so that no peer knows the ids of another's fetches and paths.
      next_number_{static_cast<std::uint32_t>(random_number())},
      next_path_{random_number()} {}

UcxTransport::~UcxTransport() {
  KVSHARD_ASSERT(endpoints_.empty() && memories_.empty());
  owner_.close();
  drain_owner();
}

void UcxTransport::drain_owner() noexcept {
  const auto limit = std::chrono::steady_clock::now() + kDrainLimit;
  while (!owner_.idle()) {
    if (std::chrono::steady_clock::now() > limit) {
      log::error("ucx still reads served memory {} ms after closing",
                 std::chrono::duration_cast<std::chrono::milliseconds>(kDrainLimit).count());
      return;
    }
    ucp_worker_progress(worker_.get());
    owner_.progress();
  }
}

Status UcxTransport::set_handlers() {
  const auto set = [this](Message message, ucp_am_recv_callback_t callback) -> Status {
    ucp_am_handler_param_t param{};
    param.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                       UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    param.id = static_cast<unsigned>(message);
    param.flags = UCP_AM_FLAG_WHOLE_MSG;
    param.cb = callback;
    param.arg = this;
    if (const auto status = ucp_worker_set_am_recv_handler(worker_.get(), &param); status != UCS_OK)
      return ucx_error("ucp_worker_set_am_recv_handler", status);
    return {};
  };
  KVSHARD_TRY(set(Message::hello, &receive<Message::hello>));
  KVSHARD_TRY(set(Message::request, &receive<Message::request>));
  KVSHARD_TRY(set(Message::answer, &receive<Message::answer>));
  KVSHARD_TRY(set(Message::refusal, &receive<Message::refusal>));
  KVSHARD_TRY(set(Message::welcome, &receive<Message::welcome>));
  return set(Message::bye, &receive<Message::bye>);
}

template <Message message>
ucs_status_t UcxTransport::receive(void* self, const void* header, std::size_t header_bytes,
                                   void* data, std::size_t data_bytes,
                                   const ucp_am_recv_param_t* param) {
  auto& ours = *static_cast<UcxTransport*>(self);
  const bool rendezvous = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  MessageHeader fields;
  if (header_bytes != sizeof fields) return UCS_OK;  // dropped: no message of ours
  std::memcpy(&fields, header, sizeof fields);
  if constexpr (message == Message::welcome) {
    ours.owner_.settle(fields.path);
    for (auto* const endpoint : ours.endpoints_)
      if (endpoint->connection_->path() == fields.path) endpoint->connection_->settle();
    return UCS_OK;
  } else if constexpr (message == Message::answer || message == Message::refusal) {
    // An unknown fetch was given up meanwhile. UCX drops the data and tells the sender.
    auto* const fetch = ours.awaiting_fetch(fields.fetch);
    if (fetch == nullptr) return UCS_OK;
    if constexpr (message == Message::refusal) {
      fetch->endpoint->refused(*fetch, fields);
      return UCS_OK;
    } else {
      return fetch->endpoint->answered(*fetch, data_bytes, data, rendezvous);
    }
  } else {
    // The address of a hello comes eagerly, and data of no other message is looked at.
    if (rendezvous ||
        data_bytes > transport::kEnvelopeHeaderBytes + transport::kMaxEnvelopePayloadBytes)
      return UCS_OK;
    ours.owner_.received(message, fields, {static_cast<const std::byte*>(data), data_bytes});
    return UCS_OK;
  }
}

Result<std::unique_ptr<RegisteredMemory>> UcxTransport::register_memory(std::span<std::byte> bytes,
                                                                        MemoryKind kind) {
  KVSHARD_TRY(const DeviceGuard device, DeviceGuard::enter(options_.cuda_device));
  KVSHARD_TRY(auto handle, map_memory(context_.get(), bytes, kind));
  KVSHARD_TRY(auto packed, pack_memory(context_.get(), handle.get(), bytes, kind));
  auto memory =
      std::make_unique<UcxMemory>(*this, std::move(handle), bytes, kind, std::move(packed));
  memories_.push_back(memory.get());
  return memory;
}

UcxMemory::~UcxMemory() {
  transport_.forget(*this);
}

void UcxTransport::forget(UcxMemory& memory) noexcept {
  std::erase(memories_, &memory);
  if (owner_.served().handle != memory.handle()) return;
  owner_.withdraw();
  drain_owner();
}

Status UcxTransport::serve(const RegisteredMemory& memory) {
  const auto* const ours = dynamic_cast<const UcxMemory*>(&memory);
  if (ours == nullptr || &ours->transport() != this)
    return Error{ErrorCode::invalid_argument, "the memory was registered with another transport"};
  owner_.serve({.bytes = ours->bytes(), .handle = ours->handle(), .kind = ours->kind()});
  return {};
}

const UcxMemory* UcxTransport::memory_of(std::span<const std::byte> local) const noexcept {
  const auto found = std::find_if(memories_.begin(), memories_.end(),
                                  [&](const UcxMemory* memory) { return memory->contains(local); });
  return found == memories_.end() ? nullptr : *found;
}

Result<std::unique_ptr<Endpoint>> UcxTransport::connect(std::span<const std::byte> address,
                                                        std::span<const std::byte> packed,
                                                        EndpointListener& listener) {
  KVSHARD_TRY(const auto worker_address, transport::unseal(EnvelopeKind::ucx_address, address));
  KVSHARD_TRY(const auto remote, unpack_memory(packed));
  KVSHARD_TRY(auto connection, Connection::open(worker_.get(), worker_address, failure_noted_));
  ucp_rkey_h rkey = nullptr;
  const auto status = ucp_ep_rkey_unpack(connection->handle(), remote.rkey.data(), &rkey);
  if (status != UCS_OK) {
    owner_.retire(std::move(connection));
    return ucx_error("ucp_ep_rkey_unpack", status);
  }
  return std::make_unique<UcxEndpoint>(*this, std::move(connection), UcpRkey{rkey}, remote,
                                       next_path_++, listener);
}

void UcxTransport::remove(UcxEndpoint& endpoint, std::unique_ptr<Connection> connection) {
  std::erase(endpoints_, &endpoint);
  if (!connection->idle()) owner_.retire(std::move(connection));
}

Fetch& UcxTransport::take_fetch(UcxEndpoint& endpoint, std::span<std::byte> local,
                                TransferListener& listener) {
  if (free_.empty()) {
    auto& added = fetches_.emplace_back();
    added.id = fetches_.size() - 1;
    free_.push_back(&added);
  }
  auto& fetch = *free_.back();
  free_.pop_back();
  const auto index = static_cast<std::uint32_t>(fetch.id);
  fetch = Fetch{.id = (std::uint64_t{next_number_++} << 32) | index,
                .endpoint = &endpoint,
                .listener = &listener,
                .local = local,
                .request = {},
                .status = {}};
  return fetch;
}

Fetch* UcxTransport::awaiting_fetch(std::uint64_t id) noexcept {
  const auto index = static_cast<std::uint32_t>(id);
  if (index >= fetches_.size()) return nullptr;
  auto& fetch = fetches_[index];
  return fetch.awaiting && fetch.id == id ? &fetch : nullptr;
}

std::size_t UcxTransport::progress() noexcept {
  use_device();
  std::size_t events = ucp_worker_progress(worker_.get());
  events += owner_.progress();
  for (auto* const endpoint : endpoints_) endpoint->connection_->progress_close();
  if (std::exchange(failure_noted_, false)) events += report_failures();
  events += deliver();
  return events;
}

std::size_t UcxTransport::report_failures() {
  std::size_t events = 0;
  const auto seen = endpoints_;  // a listener may connect, or destroy endpoints
  for (auto* const endpoint : seen) {
    if (std::find(endpoints_.begin(), endpoints_.end(), endpoint) == endpoints_.end()) continue;
    if (!endpoint->broken()) continue;
    endpoint->fail();
    ++events;
  }
  return events;
}

std::size_t UcxTransport::deliver() {
  // Only what is there now: a listener that fetches again must not keep us here.
  std::swap(finished_, delivering_);
  for (auto* const fetch : delivering_) {
    auto& endpoint = *fetch->endpoint;
    auto& listener = *fetch->listener;
    auto status = std::move(fetch->status);
    free_.push_back(fetch);  // first, so that the listener's next fetch finds it
    endpoint.deliver(listener, std::move(status));
  }
  const auto events = delivering_.size();
  delivering_.clear();
  return events;
}

bool UcxTransport::arm() noexcept {
  if (!finished_.empty() || failure_noted_ || owner_.has_work()) return false;
  if (ucp_worker_arm(worker_.get()) != UCS_OK) return false;
  // Once more: on verbs devices arming tells of the next completion only, so one that came between
  // the last progress and the arming would be slept through.
  return ucp_worker_progress(worker_.get()) == 0;
}

void UcxTransport::use_device() noexcept {
  if (options_.cuda_device < 0) return;
  const auto self = std::this_thread::get_id();
  if (device_set_on_ == self) return;
  set_device(options_.cuda_device);
  device_set_on_ = self;
}

Result<std::unique_ptr<Transport>> make_transport(const TransportOptions& options) {
  KVSHARD_TRY(auto made, UcxTransport::create(options));
  return made;
}

}  // namespace kvshard::ucx
