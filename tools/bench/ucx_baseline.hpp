#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvshard/result.hpp"

namespace kvshard::bench {

/// The least that moves a slot over UCX: a bare active-message rendezvous of the same bytes between the
/// same two processes. No request, no memory check, no path choice, no listener: `count` sends, and the
/// receiver posts each into the next part of its memory.
///
/// The receiver says how many it wants by one small message a batch, so that both sides agree when a
/// batch starts; within it nothing but rendezvous is on the way.
///
/// Owns:    a context, worker, endpoint and registration of its own, beside the library's.
/// Threads: thread-compatible; progress both ends.
class UcxBaseline {
 public:
  /// Sends from, or receives into, `memory`, host memory that outlives this.
  static Result<std::unique_ptr<UcxBaseline>> create(std::span<std::byte> memory);
  ~UcxBaseline();
  UcxBaseline(const UcxBaseline&) = delete;
  UcxBaseline& operator=(const UcxBaseline&) = delete;

  /// The worker address, for the receiver's connect().
  [[nodiscard]] std::span<const std::byte> address() const noexcept;
  /// Receiver: connects to the sender with `address`.
  Status connect(std::span<const std::byte> address);
  /// Receiver: asks for `count` messages of `bytes` each, `depth` at a time. They land one after
  /// another, at most `depth` of them apart, from the start of memory.
  Status start(std::uint64_t count, std::uint64_t bytes, std::uint64_t depth);
  /// Receiver: messages that have landed whole since start().
  [[nodiscard]] std::uint64_t landed() const noexcept;
  std::size_t progress() noexcept;

 private:
  UcxBaseline();
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvshard::bench
