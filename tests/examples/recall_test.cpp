#include "tiny_llm/recall.hpp"

#include <gtest/gtest.h>

#include <map>
#include <set>

namespace tiny_llm {
namespace {

using kvshard::ErrorCode;

constexpr std::uint32_t kKeys = 64;
constexpr Config kConfig{.vocab = 2 * kKeys + 1, .max_tokens = 200, .recall_keys = kKeys};

TEST(RecallTest, AnswersFollowTheListedPairs) {
  for (const std::uint32_t pairs : {1U, 2U, 7U, kKeys}) {
    const auto prompt = make_recall_prompt(kConfig, pairs, pairs, /*seed=*/pairs);
    ASSERT_TRUE(prompt) << prompt.error().message;
    ASSERT_EQ(prompt->tokens.size(), 2 * pairs + 2);
    EXPECT_EQ(prompt->tokens.front(), 2 * kKeys);
    std::map<Token, Token> listed;
    for (std::size_t i = 1; i < 2 * pairs; i += 2)
      listed[prompt->tokens[i] + kKeys] = prompt->tokens[i + 1];
    EXPECT_EQ(listed.size(), pairs) << "each key once";

    Token now = prompt->tokens.back();
    for (const Token answer : prompt->answers) {
      ASSERT_TRUE(listed.contains(now));
      EXPECT_EQ(answer, listed[now]);
      now = answer;
    }
    EXPECT_EQ(std::set<Token>(prompt->answers.begin(), prompt->answers.end()).size(), pairs)
        << "one cycle, so every pair is needed";
    EXPECT_EQ(count_right(*prompt, prompt->answers), pairs);
  }
}

TEST(RecallTest, CountsWrongAndMissingTokens) {
  const RecallPrompt prompt{.tokens = {}, .answers = {70, 71, 72}};
  EXPECT_EQ(count_right(prompt, std::vector<Token>{70, 72, 72}), 2U);
  EXPECT_EQ(count_right(prompt, std::vector<Token>{70}), 1U);
}

TEST(RecallTest, DependsOnTheSeedAlone) {
  const auto first = make_recall_prompt(kConfig, 9, 4, 5);
  EXPECT_EQ(make_recall_prompt(kConfig, 9, 4, 5)->tokens, first->tokens);
  EXPECT_NE(make_recall_prompt(kConfig, 9, 4, 6)->tokens, first->tokens);
}

TEST(RecallTest, RefusesWhatDoesNotFit) {
  const auto code = [](const Config& config, std::uint32_t pairs, std::size_t answers) {
    const auto result = make_recall_prompt(config, pairs, answers, 1);
    return result ? ErrorCode{} : result.error().code;
  };
  EXPECT_EQ(code(kConfig, 0, 1), ErrorCode::invalid_argument);
  EXPECT_EQ(code(kConfig, kKeys + 1, 1), ErrorCode::invalid_argument);
  EXPECT_EQ(code(kConfig, kKeys, 71), ErrorCode::invalid_argument);
  EXPECT_EQ(code(kConfig, kKeys, ~std::size_t{0}), ErrorCode::invalid_argument);
  EXPECT_EQ(code(kConfig, kKeys, 70), ErrorCode{});
  EXPECT_EQ(code(Config{.vocab = 512, .max_tokens = 512}, 4, 1), ErrorCode::invalid_argument);
}

}  // namespace
}  // namespace tiny_llm
