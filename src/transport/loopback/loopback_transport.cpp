#include "transport/loopback/loopback_transport.hpp"

#include <fmt/format.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <system_error>

#include "base/assert.hpp"
#include "base/mutex.hpp"
#include "base/try.hpp"
#include "base/unique_fd.hpp"
#include "transport/bytes.hpp"
#include "transport/envelope.hpp"

namespace kvshard::loopback {
namespace {

using transport::ByteReader;
using transport::ByteWriter;
using transport::EnvelopeKind;

/// Wakes the thread that waits for one transport.
class Wakeup {
 public:
  static Result<std::shared_ptr<Wakeup>> create() {
    UniqueFd fd{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
    if (!fd)
      return Error{ErrorCode::resource_exhausted,
                   fmt::format("eventfd: {}", std::generic_category().message(errno))};
    return std::make_shared<Wakeup>(std::move(fd));
  }
  explicit Wakeup(UniqueFd fd) noexcept : fd_{std::move(fd)} {}

  void set() noexcept {
    set_.store(true, std::memory_order_release);  // pairs with the acquire in take()
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written =
        ::write(fd_.get(), &one, sizeof one);  // full means readable
  }
  /// Whether set() was called since the last take().
  bool take() noexcept {
    // The plain load first: progress() asks each turn, and a system call there would be felt.
    if (!set_.load(std::memory_order_relaxed)) return false;
    std::uint64_t count = 0;
    [[maybe_unused]] const auto read = ::read(fd_.get(), &count, sizeof count);
    return set_.exchange(false, std::memory_order_acquire);  // pairs with the release in set()
  }
  [[nodiscard]] bool is_set() const noexcept { return set_.load(std::memory_order_relaxed); }
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }

 private:
  UniqueFd fd_;
  std::atomic<bool> set_{false};
};

// A remote read: the owner may refill its memory meanwhile, as it may under RDMA, and only COMMIT tells.
// So the thread sanitizer, which cannot see RDMA either, must not look.
#if defined(__SANITIZE_THREAD__)
__attribute__((no_sanitize("thread"))) void read_remote(std::span<std::byte> into,
                                                        const std::byte* from) {
  const volatile std::byte* const source = from;  // a loop that stays one: memcpy is instrumented
  for (std::size_t i = 0; i < into.size(); ++i) into[i] = source[i];
}
#else
void read_remote(std::span<std::byte> into, const std::byte* from) {
  if (!into.empty()) std::memcpy(into.data(), from, into.size());
}
#endif

/// The part of a transport that others reach from their threads. Outlives the transport.
class Rank {
 public:
  /// Copies out of the served memory; false when that is gone.
  bool read(std::uint64_t memory_id, std::uint64_t offset, std::span<std::byte> into) {
    const std::shared_lock lock{mutex_};
    if (!alive_ || memory_id != served_id_) return false;
    // The peer said how much there is; what it served decides.
    if (offset > served_.size() || into.size() > served_.size() - offset) return false;
    read_remote(into, served_.data() + offset);
    return true;
  }
  [[nodiscard]] bool alive() const {
    const std::shared_lock lock{mutex_};
    return alive_;
  }
  void serve(std::uint64_t memory_id, std::span<const std::byte> bytes) {
    const std::unique_lock lock{mutex_};
    served_id_ = memory_id;
    served_ = bytes;
  }
  void withdraw(std::uint64_t memory_id) {
    const std::unique_lock lock{mutex_};
    if (served_id_ == memory_id) served_id_ = 0;
  }
  /// `watcher` is woken when the rank dies.
  void watch(std::weak_ptr<Wakeup> watcher) {
    const std::unique_lock lock{mutex_};
    std::erase_if(watchers_, [&](const auto& old) {
      return old.expired() || (!old.owner_before(watcher) && !watcher.owner_before(old));
    });
    watchers_.push_back(std::move(watcher));
  }
  void die() {
    const std::unique_lock lock{mutex_};
    alive_ = false;
    for (const auto& watcher : watchers_)
      if (const auto wakeup = watcher.lock()) wakeup->set();
    watchers_.clear();
  }

 private:
  mutable std::shared_mutex
      mutex_;  // shared by readers, so that fetches from one owner run at once
  bool alive_{true};
  std::uint64_t served_id_{0};  // 0: nothing is served
  std::span<const std::byte> served_;
  std::vector<std::weak_ptr<Wakeup>> watchers_;
};

/// Every living rank of this process, by the id in its address.
class Directory {
 public:
  static Directory& instance() {
    static auto* const directory = new Directory;  // never destroyed: a rank may outlive statics
    return *directory;
  }
  std::uint64_t add(std::shared_ptr<Rank> rank) {
    const MutexLock lock{mutex_};
    ranks_.emplace(++last_id_, std::move(rank));
    return last_id_;
  }
  void remove(std::uint64_t id) {
    const MutexLock lock{mutex_};
    ranks_.erase(id);
  }
  std::shared_ptr<Rank> find(std::uint64_t id) {
    const MutexLock lock{mutex_};
    const auto found = ranks_.find(id);
    return found == ranks_.end() ? nullptr : found->second;
  }

 private:
  Mutex mutex_;
  std::map<std::uint64_t, std::shared_ptr<Rank>> ranks_ KVSHARD_GUARDED_BY(mutex_);
  std::uint64_t last_id_ KVSHARD_GUARDED_BY(mutex_){0};
};

class Memory final : public RegisteredMemory {
 public:
  Memory(std::shared_ptr<Rank> rank, std::uint64_t rank_id, std::uint64_t id,
         std::span<std::byte> bytes)
      : rank_{std::move(rank)}, id_{id}, bytes_{bytes} {
    ByteWriter out;
    out.u64(rank_id).u64(id).u64(bytes.size());
    packed_ = transport::seal(EnvelopeKind::loopback_memory, out.bytes());
  }
  ~Memory() override { rank_->withdraw(id_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  [[nodiscard]] std::span<std::byte> bytes() const noexcept override { return bytes_; }
  [[nodiscard]] std::span<const std::byte> packed() const noexcept override { return packed_; }
  [[nodiscard]] std::uint64_t id() const noexcept { return id_; }
  [[nodiscard]] bool of(const Rank& rank) const noexcept { return rank_.get() == &rank; }

 private:
  std::shared_ptr<Rank> rank_;
  std::uint64_t id_;
  std::span<std::byte> bytes_;
  std::vector<std::byte> packed_;
};

class LoopbackEndpoint;

class LoopbackTransport final : public Transport {
 public:
  LoopbackTransport(const TransportOptions& options, std::shared_ptr<Wakeup> wakeup)
      : options_{options},
        wakeup_{std::move(wakeup)},
        rank_{std::make_shared<Rank>()},
        id_{Directory::instance().add(rank_)} {
    ByteWriter out;
    out.u64(id_);
    address_ = transport::seal(EnvelopeKind::loopback_address, out.bytes());
  }
  ~LoopbackTransport() override {
    KVSHARD_ASSERT(endpoints_.empty());
    Directory::instance().remove(id_);
    rank_->die();
  }
  LoopbackTransport(const LoopbackTransport&) = delete;
  LoopbackTransport& operator=(const LoopbackTransport&) = delete;

  [[nodiscard]] std::string_view kind() const noexcept override { return "loopback"; }
  [[nodiscard]] std::span<const std::byte> address() const noexcept override { return address_; }
  Result<std::unique_ptr<RegisteredMemory>> register_memory(std::span<std::byte> bytes,
                                                            MemoryKind kind) override;
  Status serve(const RegisteredMemory& memory) override;
  Result<std::unique_ptr<Endpoint>> connect(std::span<const std::byte> address,
                                            std::span<const std::byte> packed,
                                            EndpointListener& listener) override;
  std::size_t progress() noexcept override;
  [[nodiscard]] int wake_fd() const noexcept override { return wakeup_->fd(); }
  bool arm() noexcept override { return operations_.empty() && !wakeup_->is_set(); }

 private:
  friend class LoopbackEndpoint;

  struct Operation {
    LoopbackEndpoint* endpoint;
    std::uint64_t offset;
    std::span<std::byte> local;
    TransferListener* listener;
    bool probe;
  };

  std::size_t report_dead_peers();

  TransportOptions options_;
  std::shared_ptr<Wakeup> wakeup_;
  std::shared_ptr<Rank> rank_;
  std::uint64_t id_;
  std::uint64_t last_memory_id_{0};
  std::vector<std::byte> address_;
  std::vector<LoopbackEndpoint*> endpoints_;
  std::deque<Operation> operations_;
};

class LoopbackEndpoint final : public Endpoint {
 public:
  LoopbackEndpoint(LoopbackTransport& transport, std::shared_ptr<Rank> peer,
                   std::uint64_t memory_id, std::uint64_t memory_bytes, EndpointListener& listener)
      : transport_{transport},
        peer_{std::move(peer)},
        memory_id_{memory_id},
        memory_bytes_{memory_bytes},
        listener_{listener} {
    transport_.endpoints_.push_back(this);
  }
  ~LoopbackEndpoint() override {
    KVSHARD_ASSERT(in_flight_ == 0);
    std::erase(transport_.endpoints_, this);
  }
  LoopbackEndpoint(const LoopbackEndpoint&) = delete;
  LoopbackEndpoint& operator=(const LoopbackEndpoint&) = delete;

  Status probe(std::span<std::byte> local, TransferListener& listener) override {
    const auto path = transport_.options_.path;
    if (path != TransferPath::automatic && path != TransferPath::loopback)
      return Error{
          ErrorCode::unsupported,
          fmt::format("path {} was asked for, but the transport is loopback", to_string(path))};
    const auto bytes = std::min<std::uint64_t>({local.size(), memory_bytes_, kProbeBytes});
    return submit(0, local.first(bytes), listener, true);
  }
  [[nodiscard]] const PathReport& path() const noexcept override { return report_; }

  Status fetch(std::uint64_t offset, std::span<std::byte> local,
               TransferListener& listener) override {
    if (offset > memory_bytes_ || local.size() > memory_bytes_ - offset)
      return Error{ErrorCode::invalid_argument,
                   fmt::format("fetch of {} bytes at {} from a peer's memory of {} bytes",
                               local.size(), offset, memory_bytes_)};
    if (report_.path == TransferPath::automatic)
      return Error{ErrorCode::failed_precondition,
                   "no path was chosen: probe() has not ended well"};
    return submit(offset, local, listener, false);
  }

  [[nodiscard]] std::size_t in_flight() const noexcept override { return in_flight_; }
  void close() noexcept override { closing_ = true; }
  [[nodiscard]] bool closed() const noexcept override { return closing_ && in_flight_ == 0; }

 private:
  friend class LoopbackTransport;
  static constexpr std::uint64_t kProbeBytes = 1U << 20;

  Status submit(std::uint64_t offset, std::span<std::byte> local, TransferListener& listener,
                bool probe) {
    if (closing_) return Error{ErrorCode::failed_precondition, "the endpoint is closing"};
    if (failed_) return Error{ErrorCode::unavailable, "the peer's transport is gone"};
    transport_.operations_.push_back({this, offset, local, &listener, probe});
    ++in_flight_;
    return {};
  }

  Status run(const LoopbackTransport::Operation& operation) {
    if (closing_) return Error{ErrorCode::cancelled, "the endpoint was closed"};
    const auto start = std::chrono::steady_clock::now();
    if (!peer_->read(memory_id_, operation.offset, operation.local))
      return Error{ErrorCode::unavailable, "the peer's memory is not served, or no longer"};
    if (operation.probe) {
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      report_ =
          PathReport{.path = TransferPath::loopback,
                     .get_native = true,
                     .get_gigabytes_per_s = 1e-9 * static_cast<double>(operation.local.size()) /
                                            std::max(took.count(), 1e-9),
                     .reason = {}};
      report_.reason = fmt::format("memcpy within one process, {:.2f} GB/s over {} bytes",
                                   report_.get_gigabytes_per_s, operation.local.size());
    }
    return {};
  }

  LoopbackTransport& transport_;
  std::shared_ptr<Rank> peer_;
  std::uint64_t memory_id_;
  std::uint64_t memory_bytes_;
  EndpointListener& listener_;
  PathReport report_;
  std::size_t in_flight_{0};
  bool closing_{false};
  bool failed_{false};
};

Result<std::unique_ptr<RegisteredMemory>> LoopbackTransport::register_memory(
    std::span<std::byte> bytes, MemoryKind kind) {
  if (kind != MemoryKind::host)
    return Error{ErrorCode::unsupported, "loopback moves host memory only"};
  return std::make_unique<Memory>(rank_, id_, ++last_memory_id_, bytes);
}

Status LoopbackTransport::serve(const RegisteredMemory& memory) {
  const auto* ours = dynamic_cast<const Memory*>(&memory);
  if (ours == nullptr || !ours->of(*rank_))
    return Error{ErrorCode::invalid_argument, "the memory was registered with another transport"};
  rank_->serve(ours->id(), ours->bytes());
  return {};
}

Result<std::unique_ptr<Endpoint>> LoopbackTransport::connect(std::span<const std::byte> address,
                                                             std::span<const std::byte> packed,
                                                             EndpointListener& listener) {
  KVSHARD_TRY(const auto address_payload,
              transport::unseal(EnvelopeKind::loopback_address, address));
  KVSHARD_TRY(const auto memory_payload, transport::unseal(EnvelopeKind::loopback_memory, packed));
  ByteReader address_in{address_payload};
  ByteReader memory_in{memory_payload};
  const auto rank_id = address_in.u64();
  const auto memory_rank_id = memory_in.u64();
  const auto memory_id = memory_in.u64();
  const auto memory_bytes = memory_in.u64();
  if (!address_in.ok() || !memory_in.ok())
    return Error{ErrorCode::data_loss,
                 fmt::format("loopback address of {} bytes, memory of {}: too short",
                             address_payload.size(), memory_payload.size())};
  if (rank_id != memory_rank_id)
    return Error{ErrorCode::invalid_argument,
                 fmt::format("address is of rank {}, memory of rank {}", rank_id, memory_rank_id)};
  auto peer = Directory::instance().find(rank_id);
  if (peer == nullptr)
    return Error{ErrorCode::unavailable,
                 fmt::format("no loopback rank {} in this process", rank_id)};
  auto endpoint =
      std::make_unique<LoopbackEndpoint>(*this, peer, memory_id, memory_bytes, listener);
  peer->watch(wakeup_);
  if (!peer->alive()) wakeup_->set();  // it died between find() and watch()
  return endpoint;
}

std::size_t LoopbackTransport::progress() noexcept {
  std::size_t events = 0;
  // Only what was there at the start: listeners that fetch again must not keep us here.
  for (std::size_t left = operations_.size(); left > 0; --left) {
    const Operation operation = operations_.front();
    operations_.pop_front();
    auto status = operation.endpoint->run(operation);
    --operation.endpoint->in_flight_;  // first, so that the listener may destroy a closed endpoint
    operation.listener->transfer_done(std::move(status));
    ++events;
  }
  if (wakeup_->take()) events += report_dead_peers();
  return events;
}

std::size_t LoopbackTransport::report_dead_peers() {
  std::size_t events = 0;
  const auto seen = endpoints_;  // a listener may connect, or destroy endpoints
  for (auto* endpoint : seen) {
    if (std::find(endpoints_.begin(), endpoints_.end(), endpoint) == endpoints_.end()) continue;
    if (endpoint->failed_ || endpoint->closing_ || endpoint->peer_->alive()) continue;
    endpoint->failed_ = true;
    endpoint->listener_.endpoint_failed(
        Error{ErrorCode::unavailable, "the peer's transport was destroyed"});
    ++events;
  }
  return events;
}

}  // namespace

Result<std::unique_ptr<Transport>> make_transport(const TransportOptions& options) {
  KVSHARD_TRY(auto wakeup, Wakeup::create());
  return std::make_unique<LoopbackTransport>(options, std::move(wakeup));
}

}  // namespace kvshard::loopback
