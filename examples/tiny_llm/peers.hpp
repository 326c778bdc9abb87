#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvshard/result.hpp"

namespace tiny_llm {

/// The ranks that compute a request together.
///
/// They only hand each other finished floats: rows of other tokens, outputs of other heads. No sum is
/// split between ranks, since partial sums would round in another order, and a split run must give the
/// bits of the unsplit one.
class Peers {
 public:
  virtual ~Peers() = default;

  [[nodiscard]] virtual std::uint32_t rank() const noexcept = 0;
  [[nodiscard]] virtual std::uint32_t size() const noexcept = 0;
  /// The `own` of every rank, by rank. All ranks make the same calls in the same order, and wait for each
  /// other in them; lengths may differ.
  /// Errors: unavailable when a peer is gone.
  virtual kvshard::Result<std::vector<float>> all_gather(std::span<const float> own) = 0;

 protected:
  Peers() = default;
  Peers(const Peers&) = default;
  Peers(Peers&&) = default;
  Peers& operator=(const Peers&) = default;
  Peers& operator=(Peers&&) = default;
};

}  // namespace tiny_llm
