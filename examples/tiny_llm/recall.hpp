#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvshard/result.hpp"
#include "tiny_llm/config.hpp"

namespace tiny_llm {

/// A prompt that only a whole KV cache can answer.
///
/// Of M keys (tokens 0..M-1; the value of key k is token M + k; token 2M begins a prompt), `pairs` random ones
/// are put on a random cycle. The prompt lists `key, value of the next key` for each of them in random order,
/// and ends with the value of one. The answers follow the cycle from there, each by a pair that can stand
/// anywhere in the prompt.
struct RecallPrompt {
  std::vector<Token> tokens;   ///< 2 * pairs + 2
  std::vector<Token> answers;  ///< what greedy decoding must say
};

/// Makes the same prompt for the same arguments on every machine. Training used another generator, so no seed
/// is one that a model has seen.
/// Errors: invalid_argument unless the model was trained for recall, pairs is in [1, recall_keys], and the
///         prompt with its answers fits max_tokens.
kvshard::Result<RecallPrompt> make_recall_prompt(const Config& config, std::uint32_t pairs,
                                                 std::size_t answers, std::uint64_t seed);

/// Decoded tokens that are the answer at their place. After a mistake a chain goes on elsewhere, so what
/// follows mostly counts as wrong too.
std::size_t count_right(const RecallPrompt& prompt, std::span<const Token> decoded);

}  // namespace tiny_llm
