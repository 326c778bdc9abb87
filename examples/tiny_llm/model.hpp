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

namespace tiny_llm {

/// A decoder-only transformer: RMSNorm, rotary positions, grouped or latent attention, SwiGLU.
///
/// Results are bitwise reproducible: they do not depend on how tokens are divided over calls, nor on where
/// the cache keeps its rows.
///
/// Owns:    its weights.
/// Threads: thread-safe once made: forward() is const, and a cache is used by one call at a time.
/// Errors:  forward() gives invalid_argument for a token outside the vocabulary, an empty call, a cache of
///          another shape, and positions beyond max_tokens; resource_exhausted when the cache has no room.
/// Cost:    about 2 FLOP per parameter and token, and attention over all earlier tokens.
class Model {
 public:
  static kvshard::Result<Model> load(const std::filesystem::path& path);
  explicit Model(Checkpoint checkpoint);

  [[nodiscard]] const Config& config() const noexcept { return checkpoint_.config; }
  /// Equal for equal checkpoints: the model id of a kvshard geometry.
  [[nodiscard]] const std::string& id() const noexcept { return checkpoint_.id; }

  /// Runs `tokens` at positions first_position, +1, ..., stores their KV rows, and reads those of earlier
  /// positions. Returns the logits after the last token, [vocab].
  [[nodiscard]] kvshard::Result<std::vector<float>> forward(std::span<const Token> tokens,
                                                            std::size_t first_position,
                                                            KvCache& cache) const;

 private:
  Checkpoint checkpoint_;
  std::size_t rotated_dim_;  // width of what is rotated: a grouped head, or the shared rotary key
  std::vector<float> cos_, sin_;  // [max_tokens][rotated_dim / 2]
};

}  // namespace tiny_llm
