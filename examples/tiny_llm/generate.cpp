#include "tiny_llm/generate.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace tiny_llm {

bool Generated::identical(const Generated& other) const noexcept {
  return tokens == other.tokens && logits.size() == other.logits.size() &&
         (logits.empty() ||
          std::memcmp(logits.data(), other.logits.data(), logits.size() * sizeof(float)) == 0);
}

Token argmax(std::span<const float> logits) {
  return static_cast<Token>(std::ranges::max_element(logits) - logits.begin());
}

kvshard::Result<Generated> generate_greedy(const Model& model, KvCache& cache, std::size_t position,
                                           std::span<const float> logits, std::size_t count) {
  Generated result;
  std::vector<float> now{logits.begin(), logits.end()};
  while (result.tokens.size() < count) {
    const Token token = argmax(now);
    result.tokens.push_back(token);
    result.logits.insert(result.logits.end(), now.begin(), now.end());
    if (result.tokens.size() == count) break;
    auto next = model.forward({&token, 1}, position++, cache);
    if (!next) return next.error();
    now = std::move(next).value();
  }
  return result;
}

}  // namespace tiny_llm
