#pragma once

#include <cstdint>
#include <string>

namespace tiny_llm {

using Token = std::uint32_t;

/// What a model caches for each token.
enum class Attention : std::uint8_t {
  grouped = 1,  ///< keys and values of a few KV heads, each shared by a group of query heads (GQA)
  latent =
      2,  ///< one latent vector that all heads expand, and one rotary key that they share (MLA)
};

/// The shape of the KV cache: one row of floats for each token in each buffer.
///
/// Buffers are layer-major: buffer `layer * buffers_per_layer` holds keys (or latents), the next one values.
struct KvShape {
  std::uint32_t layers{0};
  std::uint32_t buffers_per_layer{2};  ///< 2: keys and values; 1: latent
  std::uint32_t heads{0};              ///< KV heads in a row; 1 for latent
  std::uint32_t head_floats{0};

  [[nodiscard]] constexpr std::uint32_t buffers() const noexcept {
    return layers * buffers_per_layer;
  }
  [[nodiscard]] constexpr std::uint32_t row_floats() const noexcept { return heads * head_floats; }
  friend bool operator==(const KvShape&, const KvShape&) = default;
};

/// The hyperparameters of a model. Read from a checkpoint, and trusted once they were.
struct Config {
  Attention attention{Attention::grouped};
  std::uint32_t dim{0};     ///< width of the residual stream
  std::uint32_t hidden{0};  ///< width inside the feed-forward part
  std::uint32_t layers{0};
  std::uint32_t heads{0};     ///< query heads
  std::uint32_t kv_heads{0};  ///< divides heads; 1 for latent
  std::uint32_t head_dim{
      0};  ///< of a head's values, and of its keys without the rotary part of latent
  std::uint32_t latent_dim{0};  ///< latent only
  std::uint32_t rope_dim{0};    ///< latent only: width of the shared rotary key; even
  std::uint32_t vocab{0};
  std::uint32_t max_tokens{0};  ///< positions are [0, max_tokens)
  std::uint32_t rope_theta{10'000};
  std::uint32_t recall_keys{
      0};  ///< keys of the task that it was trained on (recall.hpp); 0 when another

  /// What one of `ranks` tensor parallel ranks caches: its share of the KV heads, or the whole latent.
  [[nodiscard]] constexpr KvShape kv_shape(std::uint32_t ranks = 1) const noexcept {
    return attention == Attention::grouped ? KvShape{.layers = layers,
                                                     .buffers_per_layer = 2,
                                                     .heads = kv_heads / ranks,
                                                     .head_floats = head_dim}
                                           : KvShape{.layers = layers,
                                                     .buffers_per_layer = 1,
                                                     .heads = 1,
                                                     .head_floats = latent_dim + rope_dim};
  }
};

}  // namespace tiny_llm
