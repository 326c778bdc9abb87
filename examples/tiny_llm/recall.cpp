#include "tiny_llm/recall.hpp"

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <utility>

namespace tiny_llm {
namespace {

using kvshard::Error;
using kvshard::ErrorCode;

// std::shuffle and the standard distributions differ between standard libraries; the engine does not.
template <typename T>
void shuffle(std::vector<T>& items, std::mt19937_64& random) {
  for (std::size_t left = items.size(); left > 1; --left)
    std::swap(items[left - 1], items[random() % left]);
}

}  // namespace

kvshard::Result<RecallPrompt> make_recall_prompt(const Config& config, std::uint32_t pairs,
                                                 std::size_t answers, std::uint64_t seed) {
  const std::uint32_t keys = config.recall_keys;
  if (keys == 0) return Error{ErrorCode::invalid_argument, "the model was not trained for recall"};
  if (pairs == 0 || pairs > keys) {
    return Error{ErrorCode::invalid_argument,
                 std::to_string(pairs) + " pairs are not in [1, " + std::to_string(keys) + "]"};
  }
  const std::size_t prompt_tokens = 2 * std::size_t{pairs} + 2;
  if (prompt_tokens > config.max_tokens || answers > config.max_tokens - prompt_tokens) {
    return Error{ErrorCode::invalid_argument,
                 std::to_string(prompt_tokens) + " prompt tokens and " + std::to_string(answers) +
                     " answers pass the model's " + std::to_string(config.max_tokens)};
  }
  std::mt19937_64 random{seed};
  std::vector<Token> cycle(keys);
  std::iota(cycle.begin(), cycle.end(), Token{0});
  shuffle(cycle, random);
  cycle.resize(pairs);
  const auto value_at = [&](std::size_t place) { return keys + cycle[place % pairs]; };

  std::vector<std::size_t> places(pairs);
  std::iota(places.begin(), places.end(), std::size_t{0});
  shuffle(places, random);

  RecallPrompt result;
  result.tokens.push_back(2 * keys);
  for (const std::size_t place : places) {
    result.tokens.push_back(cycle[place]);
    result.tokens.push_back(value_at(place + 1));
  }
  result.tokens.push_back(value_at(0));
  for (std::size_t i = 1; i <= answers; ++i) result.answers.push_back(value_at(i));
  return result;
}

std::size_t count_right(const RecallPrompt& prompt, std::span<const Token> decoded) {
  const std::size_t count = std::min(decoded.size(), prompt.answers.size());
  return std::transform_reduce(
      decoded.begin(), decoded.begin() + static_cast<std::ptrdiff_t>(count), prompt.answers.begin(),
      std::size_t{0}, std::plus<>{},
      [](Token said, Token wanted) { return std::size_t{said == wanted}; });
}

}  // namespace tiny_llm
