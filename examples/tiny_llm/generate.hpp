#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "kvshard/result.hpp"
#include "tiny_llm/config.hpp"
#include "tiny_llm/kv.hpp"
#include "tiny_llm/model.hpp"

namespace tiny_llm {

/// What a model said, and from which logits.
struct Generated {
  std::vector<Token> tokens;
  std::vector<float> logits;  ///< [tokens][vocab]

  /// Bitwise for the logits, unlike ==, to which NaN is unequal and -0 equal to 0.
  [[nodiscard]] bool identical(const Generated& other) const noexcept;
};

/// The token with the largest logit; the lowest of equals. Logits must not be empty.
Token argmax(std::span<const float> logits);

/// Decodes `count` tokens greedily. The cache holds the rows of positions [0, position), and `logits` came
/// after the last of them: from Model::forward() over the prompt, here or on a prefill rank.
/// Errors: those of Model::forward(); the cache needs room for position + count - 1 tokens.
kvshard::Result<Generated> generate_greedy(const Model& model, KvCache& cache, std::size_t position,
                                           std::span<const float> logits, std::size_t count);

}  // namespace tiny_llm
