#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvshard/export.hpp"
#include "kvshard/result.hpp"
#include "kvshard/types.hpp"

namespace kvshard {

/// How a transport moves a slot.
enum class TransferPath : std::uint8_t {
  automatic = 0,  ///< let the probe at connect choose
  get = 1,        ///< the decode rank reads the slot by RDMA (or cuda_ipc); the owner does nothing
  am = 2,         ///< the owner sends it by active-message rendezvous
  loopback = 3,   ///< memcpy within one process
  mapped = 4,     ///< no transport: decode copies from prefill's own pages (DecodeOptions::mapped)
};

KVSHARD_EXPORT std::string_view to_string(TransferPath path) noexcept;

/// What the probe at connect found, for the one line that an operator reads.
struct PathReport {
  TransferPath path{TransferPath::automatic};
  bool get_native{false};         ///< false: a get would be emulated in software
  double get_gigabytes_per_s{0};  ///< measured on the probe's bytes; 0 when that path was not tried
  double am_gigabytes_per_s{0};
  std::string reason;  ///< why this path, in one sentence with its numbers
};

/// A span of memory that a transport may move bytes to or from; deregistered by the destructor.
///
/// Owns:    the registration, not the memory, which must outlive it.
/// Threads: worker-bound.
class KVSHARD_EXPORT RegisteredMemory {
 public:
  virtual ~RegisteredMemory() = default;
  [[nodiscard]] virtual std::span<std::byte> bytes() const noexcept = 0;
  /// What a peer needs to fetch from it (address, packed rkey): opaque bytes for Endpoint::open().
  [[nodiscard]] virtual std::span<const std::byte> packed() const noexcept = 0;
};

/// Hears the end of a fetch or a probe; borrowed until the call, which happens once, on the progress
/// thread, after the last touch of the fetch's memory.
class TransferListener {
 public:
  virtual void transfer_done(Status status) noexcept = 0;

 protected:
  ~TransferListener() = default;
};

/// Hears, at most once, that an endpoint's peer is gone. Fetches in flight end with their own errors.
class EndpointListener {
 public:
  virtual void endpoint_failed(Error error) noexcept = 0;

 protected:
  ~EndpointListener() = default;
};

/// A decode rank's way to one prefill rank's registered memory.
///
/// Owns:    its part of the connection, and the unpacked rkey.
/// Threads: worker-bound.
class KVSHARD_EXPORT Endpoint {
 public:
  /// Destroying an endpoint requires in_flight() == 0; call close() and progress first.
  virtual ~Endpoint() = default;

  /// Measures the paths on up to `local.size()` bytes from the start of the peer's memory, and chooses.
  /// Until it ends well, fetch() must not be called. `listener` hears unsupported when the options
  /// refuse what was found.
  virtual Status probe(std::span<std::byte> local, TransferListener& listener) = 0;
  /// After a probe.
  [[nodiscard]] virtual const PathReport& path() const noexcept = 0;

  /// Reads the peer's bytes [offset, offset + local.size()) into `local`, which lies in memory
  /// registered with the same transport. On success every byte is there and visible to this thread.
  /// Success does not say that the owner did not change them meanwhile: COMMIT does.
  /// Errors: out of the peer's range is invalid_argument, at once; then `listener` is not called.
  virtual Status fetch(std::uint64_t offset, std::span<std::byte> local,
                       TransferListener& listener) = 0;

  /// Fetches and probes started and not ended.
  [[nodiscard]] virtual std::size_t in_flight() const noexcept = 0;
  /// Starts tearing down: fetches in flight end with `cancelled` as the transport lets go of their
  /// memory. May be called twice. The endpoint may be destroyed when closed() is true.
  virtual void close() noexcept = 0;
  [[nodiscard]] virtual bool closed() const noexcept = 0;
};

/// Moves slots from a prefill rank's staging memory to a decode rank's.
///
/// One per rank. Decode fetches; the owner only keeps its memory registered and calls progress().
/// Owns:    worker, context, registrations' handles.
/// Threads: worker-bound, except address() and kind(), which do not change.
/// Errors:  see each call; nothing throws, nothing waits.
/// Source:  docs/architecture.md, "Transports".
class KVSHARD_EXPORT Transport {
 public:
  virtual ~Transport() = default;

  /// A name for reports and for HELLO: both sides must use the same. "ucx", "loopback".
  [[nodiscard]] virtual std::string_view kind() const noexcept = 0;
  /// What connect() on another rank needs to reach this one: opaque bytes.
  [[nodiscard]] virtual std::span<const std::byte> address() const noexcept = 0;
  /// Registers staging memory: once, at start.
  virtual Result<std::unique_ptr<RegisteredMemory>> register_memory(std::span<std::byte> bytes,
                                                                    MemoryKind kind) = 0;
  /// Lets peers fetch from `memory` (one per transport). Needed by paths on which the owner takes part.
  virtual Status serve(const RegisteredMemory& memory) = 0;
  /// A way to the rank with `address`, whose served memory is `packed`. Does not wait: a peer that is
  /// not there shows as endpoint_failed() or as failed fetches. Opaque bytes from a peer are checked
  /// before use: data_loss or invalid_argument names what was wrong. `listener` outlives the endpoint.
  virtual Result<std::unique_ptr<Endpoint>> connect(std::span<const std::byte> address,
                                                    std::span<const std::byte> packed,
                                                    EndpointListener& listener) = 0;
  /// Runs callbacks; returns how much happened, 0 when idle.
  virtual std::size_t progress() noexcept = 0;
  /// Readable when progress() may have something to do, once arm() has said true. -1: progress() must
  /// be polled while anything is in flight.
  [[nodiscard]] virtual int wake_fd() const noexcept = 0;
  /// Prepares wake_fd() for a wait. False: something happened meanwhile, call progress() instead.
  virtual bool arm() noexcept = 0;
};

struct TransportOptions {
  enum class Kind : std::uint8_t { ucx, loopback };

  Kind kind{Kind::ucx};
  TransferPath path{TransferPath::automatic};  ///< forces get or am; automatic probes
  bool require_native{false};  ///< refuse, at connect, a path that is emulated or staged
  int cuda_device{-1};         ///< device current on the progress thread; -1: none
};

/// The transport for `options.kind`; unsupported where this build has none.
KVSHARD_EXPORT Result<std::unique_ptr<Transport>> make_transport(const TransportOptions& options);

}  // namespace kvshard
