#include "tiny_llm/model.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include "tiny_llm/math.hpp"

namespace tiny_llm {
namespace {

using kvshard::Error;
using kvshard::ErrorCode;
using kvshard::Result;

// Tokens computed together. Only speed depends on it: a block's weights are read once for all of them.
constexpr std::size_t kBlockTokens = 32;

/// Where one query head finds its keys and values: floats [offset, offset + width) of the rows of a buffer.
struct Slice {
  std::size_t buffer;
  std::size_t offset;
  std::size_t width;
};

/// Calls visit(position, floats) for the slice of each of the first `tokens` rows, in order.
template <typename Visit>
void for_each_row(const KvCache& cache, const Slice& slice, std::size_t tokens, Visit&& visit) {
  const std::size_t row_floats = cache.shape().row_floats();
  for (std::size_t position = 0; position < tokens;) {
    const auto rows = cache.load(slice.buffer, position);
    const std::size_t end = std::min(tokens, position + rows.size() / row_floats);
    for (std::size_t offset = slice.offset; position < end; ++position, offset += row_floats) {
      visit(position, rows.subspan(offset, slice.width));
    }
  }
}

/// One head of one token: out = sum of values, weighted by softmax(scale * query . keys).
void attend(std::span<float> out, std::span<const float> query, float scale, const KvCache& cache,
            const Slice& keys, const Slice& values, std::span<float> scores) {
  for_each_row(cache, keys, scores.size(), [&](std::size_t position, std::span<const float> key) {
    scores[position] = dot(query, key) * scale;
  });
  softmax(scores);
  std::ranges::fill(out, 0.0F);
  for_each_row(cache, values, scores.size(),
               [&](std::size_t position, std::span<const float> value) {
                 add_scaled(out, scores[position], value);
               });
}

/// The activations of one block of tokens on their way through the layers.
class Block {
 public:
  Block(const Config& config, std::span<const float> cos, std::span<const float> sin,
        std::size_t tokens, std::size_t first_position, KvCache& cache)
      : c_{config},
        cos_{cos},
        sin_{sin},
        tokens_{tokens},
        first_{first_position},
        cache_{cache},
        x_(tokens * config.dim),
        normed_(tokens * config.dim),
        delta_(tokens * config.dim),
        query_(tokens * config.heads * (config.head_dim + config.rope_dim)),
        attended_(tokens * config.heads * config.head_dim),
        scores_(first_position + tokens),
        gate_(tokens * config.hidden),
        up_(tokens * config.hidden) {}

  void embed(std::span<const Token> tokens, std::span<const float> embedding) {
    for (std::size_t t = 0; t < tokens_; ++t) {
      std::ranges::copy(embedding.subspan(std::size_t{tokens[t]} * c_.dim, c_.dim),
                        row(x_, t).begin());
    }
  }

  void run(const Layer& layer, std::size_t index) {
    rms_norm(normed_, x_, layer.attention_norm);
    matmul(query_, normed_, layer.query, tokens_);
    const std::size_t buffer = index * cache_.shape().buffers_per_layer;
    if (c_.attention == Attention::grouped) {
      grouped_attention(layer, buffer);
    } else {
      latent_attention(layer, buffer);
    }
    matmul(delta_, attended_, layer.output, tokens_);
    add(x_, delta_);

    rms_norm(normed_, x_, layer.feed_norm);
    matmul(gate_, normed_, layer.gate, tokens_);
    matmul(up_, normed_, layer.up, tokens_);
    swiglu(gate_, up_);
    matmul(delta_, gate_, layer.out, tokens_);
    add(x_, delta_);
  }

  [[nodiscard]] std::vector<float> last_logits(const Weights& weights) {
    std::vector<float> last(c_.dim);
    std::vector<float> logits(c_.vocab);
    rms_norm(last, row(x_, tokens_ - 1), weights.final_norm);
    matmul(logits, last, weights.classifier, 1);
    return logits;
  }

 private:
  /// Row t of a [tokens][...] matrix.
  [[nodiscard]] std::span<float> row(std::vector<float>& matrix, std::size_t t) const {
    const std::size_t width = matrix.size() / tokens_;
    return std::span{matrix}.subspan(t * width, width);
  }

  void rotate_at(std::span<float> x, std::size_t t) const {
    const std::size_t pairs = x.size() / 2;
    rotate(x, cos_.subspan((first_ + t) * pairs, pairs), sin_.subspan((first_ + t) * pairs, pairs));
  }

  /// Groups of query heads share a KV head.
  void grouped_attention(const Layer& layer, std::size_t buffer) {
    const std::size_t head_dim = c_.head_dim;
    std::vector<float> keys(tokens_ * c_.kv_heads * head_dim);
    std::vector<float> values(keys.size());
    matmul(keys, normed_, layer.key, tokens_);
    matmul(values, normed_, layer.value, tokens_);
    for (std::size_t t = 0; t < tokens_; ++t) {
      const auto key = row(keys, t);
      for (std::size_t h = 0; h < c_.kv_heads; ++h)
        rotate_at(key.subspan(h * head_dim, head_dim), t);
      cache_.store(buffer, first_ + t, key);
      cache_.store(buffer + 1, first_ + t, row(values, t));
    }

    const float scale = 1.0F / std::sqrt(static_cast<float>(head_dim));
    const std::size_t group = c_.heads / c_.kv_heads;
    for (std::size_t t = 0; t < tokens_; ++t) {
      for (std::size_t h = 0; h < c_.heads; ++h) {
        const auto query = row(query_, t).subspan(h * head_dim, head_dim);
        rotate_at(query, t);
        const std::size_t offset = h / group * head_dim;
        attend(row(attended_, t).subspan(h * head_dim, head_dim), query, scale, cache_,
               {buffer, offset, head_dim}, {buffer + 1, offset, head_dim}, seen_by(t));
      }
    }
  }

  /// A cached row is a latent and a rotary key, the same for all heads. A head's keys and values are
  /// up_key * latent and latent * up_value; instead of expanding each row, the query is taken into the space of
  /// latents (query * up_key), attends there, and the result is expanded once.
  void latent_attention(const Layer& layer, std::size_t buffer) {
    const std::size_t head_dim = c_.head_dim;
    const std::size_t latent_dim = c_.latent_dim;
    const std::size_t row_floats = latent_dim + c_.rope_dim;
    std::vector<float> rows(tokens_ * row_floats);
    std::vector<float> latent(latent_dim);
    matmul(rows, normed_, layer.down, tokens_);
    for (std::size_t t = 0; t < tokens_; ++t) {
      const auto cached = row(rows, t);
      rms_norm(latent, cached.first(latent_dim), layer.latent_norm);
      std::ranges::copy(latent, cached.begin());
      rotate_at(cached.subspan(latent_dim), t);
      cache_.store(buffer, first_ + t, cached);
    }

    const float scale = 1.0F / std::sqrt(static_cast<float>(head_dim + c_.rope_dim));
    const std::size_t up_floats = head_dim * latent_dim;
    std::vector<float> query(row_floats);
    for (std::size_t t = 0; t < tokens_; ++t) {
      for (std::size_t h = 0; h < c_.heads; ++h) {
        const auto given =
            row(query_, t).subspan(h * (head_dim + c_.rope_dim), head_dim + c_.rope_dim);
        matmul(std::span{query}.first(latent_dim), given.first(head_dim),
               std::span{layer.up_key}.subspan(h * up_floats, up_floats), 1);
        const auto rotary = std::span{query}.subspan(latent_dim);
        std::ranges::copy(given.subspan(head_dim), rotary.begin());
        rotate_at(rotary, t);
        attend(latent, query, scale, cache_, {buffer, 0, row_floats}, {buffer, 0, latent_dim},
               seen_by(t));
        matmul(row(attended_, t).subspan(h * head_dim, head_dim), latent,
               std::span{layer.up_value}.subspan(h * up_floats, up_floats), 1);
      }
    }
  }

  /// Room for one score per position that token t sees: its own and all before.
  [[nodiscard]] std::span<float> seen_by(std::size_t t) {
    return std::span{scores_}.first(first_ + t + 1);
  }

  const Config& c_;
  std::span<const float> cos_, sin_;
  std::size_t tokens_;
  std::size_t first_;
  KvCache& cache_;
  std::vector<float> x_, normed_, delta_;  // [tokens][dim]
  std::vector<float> query_;               // [tokens][heads * (head_dim + rope_dim)]
  std::vector<float> attended_;            // [tokens][heads * head_dim]
  std::vector<float> scores_;              // [positions]
  std::vector<float> gate_, up_;           // [tokens][hidden]
};

}  // namespace

Result<Model> Model::load(const std::filesystem::path& path) {
  auto checkpoint = load_checkpoint(path);
  if (!checkpoint) return checkpoint.error();
  return Model{std::move(checkpoint).value()};
}

Model::Model(Checkpoint checkpoint)
    : checkpoint_{std::move(checkpoint)},
      rotated_dim_{config().attention == Attention::grouped ? config().head_dim
                                                            : config().rope_dim} {
  const std::size_t pairs = rotated_dim_ / 2;
  cos_.reserve(config().max_tokens * pairs);
  sin_.reserve(config().max_tokens * pairs);
  for (std::size_t position = 0; position < config().max_tokens; ++position) {
    for (std::size_t i = 0; i < pairs; ++i) {
      const double exponent = -2.0 * static_cast<double>(i) / static_cast<double>(rotated_dim_);
      const double angle = static_cast<double>(position) * std::pow(config().rope_theta, exponent);
      cos_.push_back(static_cast<float>(std::cos(angle)));
      sin_.push_back(static_cast<float>(std::sin(angle)));
    }
  }
}

Result<std::vector<float>> Model::forward(std::span<const Token> tokens, std::size_t first_position,
                                          KvCache& cache) const {
  const Config& c = config();
  if (tokens.empty()) return Error{ErrorCode::invalid_argument, "no tokens to run"};
  if (const auto bad = std::ranges::find_if(tokens, [&](Token token) { return token >= c.vocab; });
      bad != tokens.end()) {
    return Error{ErrorCode::invalid_argument, "token " + std::to_string(*bad) + " is not in [0, " +
                                                  std::to_string(c.vocab) + ")"};
  }
  if (cache.shape() != c.kv_shape()) {
    return Error{ErrorCode::invalid_argument,
                 "a cache of " + std::to_string(cache.shape().buffers()) + " buffers of " +
                     std::to_string(cache.shape().row_floats()) +
                     " floats a token, the model has " + std::to_string(c.kv_shape().buffers()) +
                     " of " + std::to_string(c.kv_shape().row_floats())};
  }
  if (first_position > c.max_tokens || tokens.size() > c.max_tokens - first_position) {
    return Error{ErrorCode::invalid_argument,
                 std::to_string(tokens.size()) + " tokens from position " +
                     std::to_string(first_position) + " pass the model's " +
                     std::to_string(c.max_tokens)};
  }
  const std::size_t end = first_position + tokens.size();
  if (end > cache.capacity_tokens()) {
    return Error{ErrorCode::resource_exhausted, std::to_string(end) +
                                                    " tokens, the cache has room for " +
                                                    std::to_string(cache.capacity_tokens())};
  }
  for (;;) {
    const auto head = tokens.first(std::min(tokens.size(), kBlockTokens));
    Block block{c, cos_, sin_, head.size(), first_position, cache};
    block.embed(head, checkpoint_.weights.embedding);
    for (std::size_t i = 0; i < c.layers; ++i) block.run(checkpoint_.weights.layers[i], i);
    tokens = tokens.subspan(head.size());
    first_position += head.size();
    if (tokens.empty()) return block.last_logits(checkpoint_.weights);
  }
}

}  // namespace tiny_llm
