#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvshard/result.hpp"
#include "support/channel.hpp"
#include "support/process.hpp"
#include "tiny_llm/peers.hpp"

namespace demo {

/// The ranks of one side, which compute a request together: processes with a socket between each two.
///
/// Errors:  all_gather() gives unavailable when a peer is gone, or silent for a minute.
class SocketPeers final : public tiny_llm::Peers {
 public:
  /// In the parent: gives each process a socket to every other.
  static kvshard::Status connect(std::span<kvshard::tools::RankProcess> ranks);
  /// In a rank: takes them off `channel`, before any message.
  static kvshard::Result<SocketPeers> accept(const kvshard::tools::Channel& channel,
                                             std::uint32_t rank, std::uint32_t size);

  [[nodiscard]] std::uint32_t rank() const noexcept override { return rank_; }
  [[nodiscard]] std::uint32_t size() const noexcept override {
    return static_cast<std::uint32_t>(others_.size() + 1);
  }
  kvshard::Result<std::vector<float>> all_gather(std::span<const float> own) override;

 private:
  explicit SocketPeers(std::uint32_t rank) : rank_{rank} {}

  std::uint32_t rank_;
  std::vector<kvshard::tools::Channel> others_;  // by rank, without this one
};

}  // namespace demo
