#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvshard/result.hpp"
#include "kvshard/types.hpp"

namespace kvshard::bench {

/// The least that moves bytes over UCX: bare operations between the same two processes, on the same
/// kind of memory. No request, no memory check, no path choice, no listener.
///
/// Rendezvous: start() asks the sender for `count` messages, by one small message a batch, so that both
/// sides agree when a batch starts; within it nothing but rendezvous is on the way. The receiver posts
/// each into the next part of its slots. Get: each get() reads from the sender's slots or pool.
///
/// Owns:    a context, worker, endpoint and registrations of its own, beside the library's.
/// Threads: thread-compatible; progress both ends.
/// Errors:  unsupported in a build without UCX.
class UcxBaseline {
 public:
  enum class Region : std::uint8_t { slots, pool };
  /// What a receiver needs of a sender.
  struct Remote {
    std::vector<std::byte> address;  ///< of the worker
    struct Memory {
      std::vector<std::byte> key;
      std::uint64_t at{0};
    } slots, pool;
  };

  /// Works on `slots`, and for gets of single pages on `pool`: memory of that kind that outlives this.
  static Result<std::unique_ptr<UcxBaseline>> create(std::span<std::byte> slots,
                                                     std::span<std::byte> pool = {},
                                                     MemoryKind kind = MemoryKind::host);
  ~UcxBaseline();
  UcxBaseline(const UcxBaseline&) = delete;
  UcxBaseline& operator=(const UcxBaseline&) = delete;

  /// For the receiver's connect().
  [[nodiscard]] const Remote& remote() const noexcept;
  /// Receiver: connects to a sender.
  Status connect(const Remote& sender);
  /// Receiver: asks for `count` messages of `bytes` each, `depth` at a time. They land one after
  /// another, at most `depth` of them apart, from the start of the slots. Sets landed() to 0.
  Status start(std::uint64_t count, std::uint64_t bytes, std::uint64_t depth);
  /// Receiver: starts reading the sender's bytes from `offset` of a region into `local`, which lies in
  /// this side's slots or pool.
  Status get(Region from, std::uint64_t offset, std::span<std::byte> local);
  /// Receiver: messages and gets that have ended since create() or start().
  [[nodiscard]] std::uint64_t landed() const noexcept;
  /// The first failure of an operation.
  [[nodiscard]] Status status() const;
  std::size_t progress() noexcept;

 private:
  UcxBaseline();
  struct State;
  std::unique_ptr<State> state_;
};

/// UCX's version as it says it itself; "none" in a build without it.
std::string ucx_version();

}  // namespace kvshard::bench
