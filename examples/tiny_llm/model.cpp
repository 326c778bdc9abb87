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
using kvshard::Status;

// Positions computed together. Only speed depends on it: weights are read once for all of them, and ranks that
// share them exchange rows once for each layer.
constexpr std::size_t kRoundTokens = 128;

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

/// The positions [first, end), and which of them are computed here.
struct Round {
  Round(std::size_t first_position, std::size_t end_position, const KvCache& cache)
      : first{first_position}, end{end_position} {
    for (std::size_t position = first; position < end; ++position) {
      if (cache.runs(position)) own.push_back(position);
    }
  }
  std::size_t first, end;
  std::vector<std::size_t> own;
};

/// The activations of a round's own tokens, perhaps none, on their way through the layers.
class Block {
 public:
  Block(const Config& config, Peers* peers, std::span<const float> cos, std::span<const float> sin,
        const Round& round, KvCache& cache)
      : c_{config},
        peers_{peers},
        heads_{config.heads / (peers == nullptr ? 1 : peers->size())},
        cos_{cos},
        sin_{sin},
        round_{round},
        tokens_{round.own.size()},
        cache_{cache},
        x_(tokens_ * config.dim),
        normed_(tokens_ * config.dim),
        delta_(tokens_ * config.dim),
        query_(tokens_ * heads_ * (config.head_dim + config.rope_dim)),
        attended_(tokens_ * heads_ * config.head_dim),
        scores_(round.end) {}

  /// `tokens` are those of the round, [first, end).
  void embed(std::span<const Token> tokens, std::span<const float> embedding) {
    for (std::size_t t = 0; t < tokens_; ++t) {
      const std::size_t token = tokens[round_.own[t] - round_.first];
      std::ranges::copy(embedding.subspan(token * c_.dim, c_.dim), row(x_, t).begin());
    }
  }

  Status run(const Layer& layer, std::size_t index) {
    rms_norm(normed_, x_, layer.attention_norm);
    matmul(query_, normed_, layer.query, tokens_);
    const std::size_t buffer = index * cache_.shape().buffers_per_layer;
    if (Status status = c_.attention == Attention::grouped ? grouped_attention(layer, buffer)
                                                           : latent_attention(layer, buffer);
        !status) {
      return status;
    }
    const auto attended = of_all_ranks(attended_, std::size_t{c_.heads} * c_.head_dim);
    if (!attended) return attended.error();
    matmul(delta_, *attended, layer.output, tokens_);
    add(x_, delta_);

    rms_norm(normed_, x_, layer.feed_norm);
    std::vector<float> gate(tokens_ * (layer.gate.size() / c_.dim));
    std::vector<float> up(gate.size());
    matmul(gate, normed_, layer.gate, tokens_);
    matmul(up, normed_, layer.up, tokens_);
    swiglu(gate, up);
    const auto hidden = of_all_ranks(gate, c_.hidden);
    if (!hidden) return hidden.error();
    matmul(delta_, *hidden, layer.out, tokens_);
    add(x_, delta_);
    return {};
  }

  /// Of the last position; empty when a peer runs it.
  [[nodiscard]] std::vector<float> last_logits(const Weights& weights) {
    if (tokens_ == 0 || round_.own.back() + 1 != round_.end) return {};
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
    const std::size_t at = round_.own[t] * pairs;
    rotate(x, cos_.subspan(at, pairs), sin_.subspan(at, pairs));
  }

  /// [tokens][width] out of each rank's columns of it.
  [[nodiscard]] Result<std::vector<float>> of_all_ranks(std::span<const float> own,
                                                        std::size_t width) const {
    if (peers_ == nullptr) return std::vector<float>{own.begin(), own.end()};
    const auto gathered = peers_->all_gather(own);
    if (!gathered) return gathered.error();
    if (gathered->size() != tokens_ * width) {
      return Error{ErrorCode::internal, "the ranks gathered " + std::to_string(gathered->size()) +
                                            " floats, not " + std::to_string(tokens_ * width)};
    }
    std::vector<float> whole(tokens_ * width);
    const std::size_t columns = width / peers_->size();
    auto from = gathered->begin();
    for (std::size_t first = 0; first < width; first += columns) {
      for (std::size_t t = 0; t < tokens_; ++t, from += static_cast<std::ptrdiff_t>(columns))
        std::copy_n(from, columns, row(whole, t).subspan(first).begin());
    }
    return whole;
  }

  /// Groups of query heads share a KV head.
  Status grouped_attention(const Layer& layer, std::size_t buffer) {
    const std::size_t head_dim = c_.head_dim;
    const std::size_t kv_heads = cache_.shape().heads;
    std::vector<float> keys(tokens_ * kv_heads * head_dim);
    std::vector<float> values(keys.size());
    matmul(keys, normed_, layer.key, tokens_);
    matmul(values, normed_, layer.value, tokens_);
    for (std::size_t t = 0; t < tokens_; ++t) {
      const auto key = row(keys, t);
      for (std::size_t h = 0; h < kv_heads; ++h) rotate_at(key.subspan(h * head_dim, head_dim), t);
      cache_.store(buffer, round_.own[t], key);
      cache_.store(buffer + 1, round_.own[t], row(values, t));
    }
    for (const std::size_t stored : {buffer, buffer + 1}) {
      if (Status status = cache_.exchange(stored, round_.first, round_.end); !status) return status;
    }

    const float scale = 1.0F / std::sqrt(static_cast<float>(head_dim));
    const std::size_t group = heads_ / kv_heads;
    for (std::size_t t = 0; t < tokens_; ++t) {
      for (std::size_t h = 0; h < heads_; ++h) {
        const auto query = row(query_, t).subspan(h * head_dim, head_dim);
        rotate_at(query, t);
        const std::size_t offset = h / group * head_dim;
        attend(row(attended_, t).subspan(h * head_dim, head_dim), query, scale, cache_,
               {buffer, offset, head_dim}, {buffer + 1, offset, head_dim}, seen_by(t));
      }
    }
    return {};
  }

  /// A cached row is a latent and a rotary key, the same for all heads. A head's keys and values are
  /// up_key * latent and latent * up_value; instead of expanding each row, the query is taken into the space of
  /// latents (query * up_key), attends there, and the result is expanded once.
  Status latent_attention(const Layer& layer, std::size_t buffer) {
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
      cache_.store(buffer, round_.own[t], cached);
    }
    if (Status status = cache_.exchange(buffer, round_.first, round_.end); !status) return status;

    const float scale = 1.0F / std::sqrt(static_cast<float>(head_dim + c_.rope_dim));
    const std::size_t up_floats = head_dim * latent_dim;
    std::vector<float> query(row_floats);
    for (std::size_t t = 0; t < tokens_; ++t) {
      for (std::size_t h = 0; h < heads_; ++h) {
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
    return {};
  }

  /// Room for one score per position that token t sees: its own and all before.
  [[nodiscard]] std::span<float> seen_by(std::size_t t) {
    return std::span{scores_}.first(round_.own[t] + 1);
  }

  const Config& c_;
  Peers* peers_;
  std::size_t heads_;  // query heads of this rank
  std::span<const float> cos_, sin_;
  const Round& round_;
  std::size_t tokens_;  // of the round, those that are run here
  KvCache& cache_;
  std::vector<float> x_, normed_, delta_;  // [tokens][dim]
  std::vector<float> query_;               // [tokens][own heads * (head_dim + rope_dim)]
  std::vector<float> attended_;            // [tokens][own heads * head_dim]
  std::vector<float> scores_;              // [positions]
};

/// Keeps a rank's share of the columns of a [rows][columns] matrix.
void keep_columns(std::vector<float>& matrix, std::size_t rows, const Peers& peers) {
  const std::size_t own = matrix.size() / rows / peers.size();
  std::vector<float> kept;
  kept.reserve(rows * own);
  for (std::size_t row = 0; row < rows; ++row) {
    const auto columns = std::span{matrix}.subspan((row * peers.size() + peers.rank()) * own, own);
    kept.insert(kept.end(), columns.begin(), columns.end());
  }
  matrix = std::move(kept);
}

/// What of a layer a tensor parallel rank needs.
void keep_share(Layer& layer, std::size_t dim, const Peers& peers) {
  for (auto matrix : {&Layer::query, &Layer::key, &Layer::value, &Layer::gate, &Layer::up})
    keep_columns(layer.*matrix, dim, peers);
  for (auto matrix : {&Layer::up_key, &Layer::up_value})  // head after head
    keep_columns(layer.*matrix, 1, peers);
}

}  // namespace

Result<Model> Model::load(const std::filesystem::path& path, Peers* peers) {
  auto checkpoint = load_checkpoint(path);
  if (!checkpoint) return checkpoint.error();
  if (peers != nullptr) {
    const Config& c = checkpoint->config;
    const bool latent = c.attention == Attention::latent;
    const std::uint32_t heads = latent ? c.heads : c.kv_heads;
    if (heads % peers->size() != 0 || c.hidden % peers->size() != 0) {
      return Error{ErrorCode::invalid_argument,
                   std::to_string(peers->size()) + " ranks do not divide " + std::to_string(heads) +
                       (latent ? "" : " KV") + " heads and a hidden width of " +
                       std::to_string(c.hidden)};
    }
    for (Layer& layer : checkpoint->weights.layers) keep_share(layer, c.dim, *peers);
  }
  return Model{std::move(checkpoint).value(), peers};
}

Model::Model(Checkpoint checkpoint, Peers* peers)
    : checkpoint_{std::move(checkpoint)},
      peers_{peers},
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
  if (cache.shape() != kv_shape()) {
    return Error{ErrorCode::invalid_argument,
                 "a cache of " + std::to_string(cache.shape().buffers()) + " buffers of " +
                     std::to_string(cache.shape().row_floats()) +
                     " floats a token, the model has " + std::to_string(kv_shape().buffers()) +
                     " of " + std::to_string(kv_shape().row_floats())};
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
    const auto head = tokens.first(std::min(tokens.size(), kRoundTokens));
    const Round round{first_position, first_position + head.size(), cache};
    Block block{c, peers_, cos_, sin_, round, cache};
    block.embed(head, checkpoint_.weights.embedding);
    for (std::size_t i = 0; i < c.layers; ++i) {
      if (Status status = block.run(checkpoint_.weights.layers[i], i); !status)
        return status.error();
    }
    tokens = tokens.subspan(head.size());
    first_position += head.size();
    if (tokens.empty()) return block.last_logits(checkpoint_.weights);
  }
}

}  // namespace tiny_llm
