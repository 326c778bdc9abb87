#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "kvshard/result.hpp"
#include "tiny_llm/checkpoint.hpp"
#include "tiny_llm/config.hpp"
#include "tiny_llm/kv.hpp"
#include "tiny_llm/peers.hpp"

namespace tiny_llm {

/// A decoder-only transformer: RMSNorm, rotary positions, grouped or latent attention, SwiGLU.
///
/// Results are bitwise reproducible: they do not depend on how tokens are divided over calls, on where the
/// cache keeps its rows, nor on how many ranks share the work.
///
/// Given peers, the model is one rank of a tensor parallel group: it keeps the columns of query, key, value,
/// gate and up that belong to its share of the heads and of the hidden width, and its cache has only its KV
/// heads (latent KV is one head that all keep). The outputs of heads and of the hidden layer are gathered
/// and each rank multiplies all of them with the whole output matrices: see Peers for why nothing is summed.
///
/// A cache may run only some of the tokens (KvCache::runs()): context parallel prefill.
///
/// Owns:    its weights; not the peers, which must outlive it.
/// Threads: thread-safe once made: forward() is const, and a cache is used by one call at a time. With
///          peers, one call at a time.
/// Errors:  load() as load_checkpoint(), and invalid_argument for heads or a hidden width that the peers do not
///          divide. forward() gives what exchanges between ranks give; invalid_argument for a token outside the vocabulary, an empty call, a cache of
///          another shape, and positions beyond max_tokens; resource_exhausted when the cache has no room.
/// Cost:    about 2 FLOP per parameter and token, and attention over all earlier tokens.
class Model {
 public:
  static kvshard::Result<Model> load(const std::filesystem::path& path, Peers* peers = nullptr);

  /// Of the whole model, whatever this rank's share.
  [[nodiscard]] const Config& config() const noexcept { return checkpoint_.config; }
  /// Of this rank's caches.
  [[nodiscard]] KvShape kv_shape() const noexcept {
    return config().kv_shape(peers_ == nullptr ? 1 : peers_->size());
  }
  /// Equal for equal checkpoints: the model id of a kvshard geometry.
  [[nodiscard]] const std::string& id() const noexcept { return checkpoint_.id; }

  /// Runs `tokens` at positions first_position, +1, ..., stores their KV rows, and reads those of earlier
  /// positions. Returns the logits after the last token, [vocab]; none where a peer runs that one.
  [[nodiscard]] kvshard::Result<std::vector<float>> forward(std::span<const Token> tokens,
                                                            std::size_t first_position,
                                                            KvCache& cache) const;

 private:
  Model(Checkpoint checkpoint, Peers* peers);

  Checkpoint checkpoint_;
  Peers* peers_;
  std::size_t rotated_dim_;  // width of what is rotated: a grouped head, or the shared rotary key
  std::vector<float> cos_, sin_;  // [max_tokens][rotated_dim / 2]
};

}  // namespace tiny_llm
