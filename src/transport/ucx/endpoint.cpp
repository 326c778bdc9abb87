#include "transport/ucx/endpoint.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/assert.hpp"
#include "base/try.hpp"
#include "transport/ucx/lanes.hpp"
#include "transport/ucx/transport_impl.hpp"

namespace kvshard::ucx {
namespace {

using namespace std::chrono_literals;
using SteadyTime = std::chrono::steady_clock;

// A probe's short rounds connect and warm up; the timed ones end early on a slow path.
constexpr std::size_t kShortRounds = 2;
constexpr std::size_t kTimedRounds = 8;
constexpr std::size_t kShortBytes = 4U << 10;
constexpr std::size_t kTimedBytes = 1U << 20;
constexpr auto kTimedLimit = 20ms;
/// A native get moves bytes as fast as the rendezvous, which uses it; one that is emulated although the
/// transport could read (from GPU memory without GPUDirect) is far slower. A machine that was busy while one
/// of them was timed must not look like that.
constexpr double kNativeShare = 0.25;

}  // namespace

UcxEndpoint::UcxEndpoint(UcxTransport& transport, std::unique_ptr<Connection> connection,
                         UcpRkey rkey, const RemoteMemory& remote, std::uint64_t path,
                         EndpointListener& listener)
    : transport_{transport},
      connection_{std::move(connection)},
      rkey_{std::move(rkey)},
      remote_address_{remote.address},
      remote_bytes_{remote.bytes},
      remote_kind_{remote.kind},
      listener_{listener} {
  transport_.add(*this);
  connection_->send_note(Message::hello, path, transport_.address());
}

UcxEndpoint::~UcxEndpoint() {
  KVSHARD_ASSERT(in_flight_ == 0);
  transport_.remove(*this, std::move(connection_));
}

Status UcxEndpoint::usable() const {
  if (closing_) return Error{ErrorCode::failed_precondition, "the endpoint is closing"};
  if (failed_ || connection_->failure() != UCS_OK)
    return ucx_error("peer lost", connection_->failure());
  return {};
}

Status UcxEndpoint::fetch(std::uint64_t offset, std::span<std::byte> local,
                          TransferListener& listener) {
  if (offset > remote_bytes_ || local.size() > remote_bytes_ - offset)
    return Error{ErrorCode::invalid_argument,
                 fmt::format("fetch of {} bytes at {} from a peer's memory of {} bytes",
                             local.size(), offset, remote_bytes_)};
  if (report_.path == TransferPath::automatic)
    return Error{ErrorCode::failed_precondition, "no path was chosen: probe() has not ended well"};
  KVSHARD_TRY(start(report_.path, offset, local, listener));
  ++in_flight_;
  return {};
}

Status UcxEndpoint::start(TransferPath path, std::uint64_t offset, std::span<std::byte> local,
                          TransferListener& listener) {
  KVSHARD_TRY(usable());
  const auto* const memory = transport_.memory_of(local);
  if (memory == nullptr && !local.empty())
    return Error{ErrorCode::invalid_argument,
                 "the destination is not registered with this transport"};
  auto& fetch = transport_.take_fetch(*this, local, listener);
  fetch.memory = memory;
  if (local.empty())
    decide(fetch, UCS_OK);
  else if (path == TransferPath::get)
    start_get(fetch, offset);
  else
    start_am(fetch, offset);
  return {};
}

void UcxEndpoint::start_get(Fetch& fetch, std::uint64_t offset) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.user_data = &fetch;
  param.cb.send = [](void* request, ucs_status_t status, void* user_data) {
    auto& ended = *static_cast<Fetch*>(user_data);
    ucp_request_free(request);
    ended.endpoint->decide(ended, status);
    ended.endpoint->release(ended);
  };
  describe_memory(param, fetch.memory->handle(), fetch.memory->kind());
  hold(fetch);
  const auto request = ucp_get_nbx(connection_->handle(), fetch.local.data(), fetch.local.size(),
                                   remote_address_ + offset, rkey_.get(), &param);
  if (UCS_PTR_IS_PTR(request)) return;
  decide(fetch, UCS_PTR_STATUS(request));
  release(fetch);
}

void UcxEndpoint::start_am(Fetch& fetch, std::uint64_t offset) {
  fetch.request = {.path = connection_->path(),
                   .fetch = fetch.id,
                   .offset = offset,
                   .length = fetch.local.size()};
  fetch.awaiting = true;
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  param.user_data = &fetch;
  param.cb.send = [](void* request, ucs_status_t status, void* user_data) {
    auto& sent = *static_cast<Fetch*>(user_data);
    ucp_request_free(request);
    if (status != UCS_OK && sent.awaiting) sent.endpoint->decide(sent, status);
    sent.endpoint->release(sent);
  };
  hold(fetch);
  const auto request =
      ucp_am_send_nbx(connection_->handle(), static_cast<unsigned>(Message::request),
                      &fetch.request, sizeof fetch.request, nullptr, 0, &param);
  if (UCS_PTR_IS_PTR(request)) return;
  if (request != nullptr) decide(fetch, UCS_PTR_STATUS(request));
  release(fetch);
}

ucs_status_t UcxEndpoint::answered(Fetch& fetch, std::size_t bytes, void* data, bool rendezvous) {
  fetch.awaiting = false;
  if (!rendezvous || bytes != fetch.local.size()) {
    decide(fetch, Error{ErrorCode::data_loss,
                        fmt::format("the owner answered with {} bytes{} instead of {}", bytes,
                                    rendezvous ? "" : " sent eagerly", fetch.local.size())});
    return UCS_OK;
  }
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.user_data = &fetch;
  param.cb.recv_am = [](void* request, ucs_status_t status, std::size_t, void* user_data) {
    auto& ended = *static_cast<Fetch*>(user_data);
    ucp_request_free(request);
    ended.endpoint->decide(ended, status);
    ended.endpoint->release(ended);
  };
  describe_memory(param, fetch.memory->handle(), fetch.memory->kind());
  hold(fetch);
  const auto request = ucp_am_recv_data_nbx(transport_.worker(), data, fetch.local.data(),
                                            fetch.local.size(), &param);
  if (UCS_PTR_IS_PTR(request)) return UCS_INPROGRESS;
  decide(fetch, UCS_PTR_STATUS(request));
  release(fetch);
  return UCS_PTR_IS_ERR(request) ? UCS_OK : UCS_INPROGRESS;
}

void UcxEndpoint::refused(Fetch& fetch, const MessageHeader& refusal) {
  switch (static_cast<Refusal>(refusal.offset)) {
    case Refusal::not_served:
      decide(fetch,
             Error{ErrorCode::unavailable, "the owner does not serve its memory, or no longer"});
      return;
    case Refusal::out_of_range:
      decide(fetch, Error{ErrorCode::invalid_argument,
                          fmt::format("fetch of {} bytes at {}: the owner serves {} bytes",
                                      fetch.request.length, fetch.request.offset, refusal.length)});
      return;
    case Refusal::send_failed:
      decide(fetch, Error{ErrorCode::unavailable, "the owner could not send"});
      return;
  }
  decide(fetch, Error{ErrorCode::unavailable,
                      fmt::format("the owner refused with unknown code {}", refusal.offset)});
}

void UcxEndpoint::hold(Fetch& fetch) noexcept {
  ++fetch.held;
  connection_->begin();
}

void UcxEndpoint::release(Fetch& fetch) {
  connection_->end();
  if (--fetch.held == 0 && fetch.decided) transport_.finished(fetch);
}

void UcxEndpoint::decide(Fetch& fetch, Status status) {
  fetch.awaiting = false;
  if (fetch.decided) return;
  fetch.decided = true;
  fetch.status = std::move(status);
  if (fetch.held == 0) transport_.finished(fetch);
}

void UcxEndpoint::decide(Fetch& fetch, ucs_status_t status) {
  if (status == UCS_OK) return decide(fetch, Status{});
  // UCX cancels what is under way when we close, also after a failure: then the failure is the
  // reason.
  if (connection_->failure() != UCS_OK) status = connection_->failure();
  decide(fetch, ucx_error("fetch", status));
}

void UcxEndpoint::give_up_waiting() {
  transport_.for_each_awaiting(*this, [this](Fetch& fetch) { decide(fetch, UCS_ERR_CANCELED); });
}

void UcxEndpoint::deliver(TransferListener& listener, Status status) {
  if (closing_ && !failed_) status = Error{ErrorCode::cancelled, "the endpoint was closed"};
  if (&listener != this) --in_flight_;  // a probe counts once, not by its rounds
  listener.transfer_done(std::move(status));
}

void UcxEndpoint::fail() {
  failed_ = true;
  give_up_waiting();
  connection_->close();  // makes UCX let go of the rest
  listener_.endpoint_failed(ucx_error("peer lost", connection_->failure()));
}

void UcxEndpoint::close() noexcept {
  if (std::exchange(closing_, true)) return;
  give_up_waiting();
  if (!connection_->usable()) return connection_->close();
  connection_->send_note(Message::bye, connection_->path(), {});
  connection_->close();
}

Status UcxEndpoint::probe(std::span<std::byte> local, TransferListener& listener) {
  KVSHARD_TRY(usable());
  const auto bytes = std::min<std::uint64_t>({local.size(), remote_bytes_, kTimedBytes});
  if (bytes == 0) return Error{ErrorCode::invalid_argument, "no bytes to probe with"};
  if (probe_.listener != nullptr)
    return Error{ErrorCode::failed_precondition, "a probe is under way"};
  probe_ = Probe{.local = local.first(bytes), .listener = &listener};
  report_ = {};
  const auto forced = transport_.options().path;
  if (forced == TransferPath::automatic) {
    probe_.paths = {TransferPath::am, TransferPath::get};
    probe_.path_count = 2;
  } else {
    probe_.paths[0] = forced;
    probe_.path_count = 1;
  }
  probe_.round_started = SteadyTime::now();
  KVSHARD_TRY(start(probe_.paths[0], 0, local.first(std::min(bytes, kShortBytes)), *this));
  ++in_flight_;
  return {};
}

void UcxEndpoint::transfer_done(Status status) noexcept {
  if (!status) return end_probe(std::move(status));
  const auto now = SteadyTime::now();
  ++probe_.round;
  if (probe_.round <= kShortRounds) {
    probe_.timed_since = now;
  } else {
    const std::chrono::duration<double, std::nano> took = now - probe_.round_started;
    probe_.gigabytes_per_s =
        std::max(probe_.gigabytes_per_s, static_cast<double>(probe_.local.size()) / took.count());
    if (probe_.round == kShortRounds + kTimedRounds || now - probe_.timed_since > kTimedLimit) {
      auto& measured = probe_.paths[probe_.path] == TransferPath::get ? report_.get_gigabytes_per_s
                                                                      : report_.am_gigabytes_per_s;
      measured = probe_.gigabytes_per_s;
      probe_.gigabytes_per_s = 0;
      probe_.round = 0;
      if (++probe_.path == probe_.path_count) return end_probe(choose_path());
    }
  }
  next_round();
}

void UcxEndpoint::next_round() {
  const auto bytes = probe_.round < kShortRounds ? std::min(probe_.local.size(), kShortBytes)
                                                 : probe_.local.size();
  probe_.round_started = SteadyTime::now();
  if (auto status = start(probe_.paths[probe_.path], 0, probe_.local.first(bytes), *this); !status)
    end_probe(std::move(status));
}

void UcxEndpoint::end_probe(Status status) {
  auto& listener = *std::exchange(probe_.listener, nullptr);
  --in_flight_;
  listener.transfer_done(std::move(status));
}

Status UcxEndpoint::choose_path() {
  const auto transports = transports_of(connection_->handle());
  const MemoryKind local_kind = transport_.memory_of(probe_.local)->kind();
  const bool capable = std::ranges::any_of(transports, [&](std::string_view transport) {
    return reads_natively(transport, remote_kind_, local_kind);
  });
  const auto get = report_.get_gigabytes_per_s;
  const auto am = report_.am_gigabytes_per_s;
  const bool get_measured = get > 0;
  report_.get_native = capable && get_measured && get >= kNativeShare * am;
  const auto forced = transport_.options().path;
  report_.path = forced != TransferPath::automatic ? forced
                 : report_.get_native              ? TransferPath::get
                                                   : TransferPath::am;
  report_.reason =
      fmt::format("{}{}: get {}, am {}, {} bytes; {} over {}", to_string(report_.path),
                  forced != TransferPath::automatic ? " as configured" : "",
                  get_measured ? fmt::format("{:.2f} GB/s", get) : "not tried",
                  am > 0 ? fmt::format("{:.2f} GB/s", am) : "not tried", probe_.local.size(),
                  report_.get_native ? "get is native"
                  : !get_measured    ? "get was not measured"
                  : capable          ? "get is too slow to be native"
                                     : "get is emulated",
                  transports.empty() ? std::string{"unknown transports"}
                                     : fmt::format("{}", fmt::join(transports, ", ")));
  if (transport_.options().require_native &&
      !(report_.path == TransferPath::get && report_.get_native)) {
    const Error refused{ErrorCode::unsupported, fmt::format("no native path: {}", report_.reason)};
    report_.path = TransferPath::automatic;  // so that fetch() refuses
    return refused;
  }
  return {};
}

}  // namespace kvshard::ucx
