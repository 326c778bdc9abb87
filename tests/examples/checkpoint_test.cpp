#include "tiny_llm/checkpoint.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <filesystem>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace tiny_llm {
namespace {

using kvshard::ErrorCode;

using Bytes = std::vector<std::byte>;

void append(Bytes& bytes, std::uint32_t word) {
  for (int shift = 0; shift < 32; shift += 8)
    bytes.push_back(static_cast<std::byte>(word >> shift));
}

void set_word(Bytes& bytes, std::size_t offset, std::uint32_t word) {
  for (std::size_t i = 0; i < 4; ++i) bytes[offset + i] = static_cast<std::byte>(word >> (8 * i));
}

/// Weights that tell their place: 0, 1, 2, ...
void append_weights(Bytes& bytes, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i)
    append(bytes, std::bit_cast<std::uint32_t>(static_cast<float>(i)));
}

Bytes ours(const std::vector<std::uint32_t>& header, std::size_t weights) {
  Bytes bytes;
  for (const char c : {'t', 'i', 'n', 'y', 'l', 'l', 'm', '\0'})
    bytes.push_back(static_cast<std::byte>(c));
  for (const std::uint32_t word : header) append(bytes, word);
  append_weights(bytes, weights);
  return bytes;
}

// version, attention, dim, hidden, layers, heads, kv_heads, head_dim, latent_dim, rope_dim, vocab, max_tokens,
// rope_theta, recall_keys
Bytes grouped() {
  constexpr std::size_t kLayer = 4 + 4 * 8 + 2 * 4 * 4 + 8 * 4 + 4 + 3 * 4 * 6;
  return ours({1, 1, 4, 6, 2, 4, 2, 2, 0, 0, 7, 16, 10'000, 3}, 7 * 4 + 2 * kLayer + 4);
}
Bytes latent() {
  constexpr std::size_t kLayer =
      4 + 4 * 2 * 5 + 4 * 7 + 5 + 2 * (3 * 5) * 2 + 6 * 4 + 4 + 3 * 4 * 6;
  return ours({1, 2, 4, 6, 2, 2, 1, 3, 5, 2, 9, 16, 10'000, 4}, 9 * 4 + 2 * kLayer + 4);
}
constexpr std::size_t kMagicBytes = 8;

constexpr std::size_t kLlama2Tables = 16 * 2;  // max_tokens * head_dim
Bytes llama2(bool own_classifier) {
  constexpr std::size_t kLayer = 4 + 4 * 4 * 2 + 2 * 4 * 2 + 4 + 3 * 4 * 6;
  Bytes bytes;
  for (const std::uint32_t word : {4U, 6U, 2U, 2U, 1U, own_classifier ? 0U - 5U : 5U, 16U})
    append(bytes, word);
  append_weights(bytes, 5 * 4 + 2 * kLayer + 4 + kLlama2Tables + (own_classifier ? 5 * 4 : 0));
  return bytes;
}

TEST(CheckpointTest, ReadsEachArrayFromItsPlace) {
  const auto result = parse_checkpoint(grouped());
  ASSERT_TRUE(result) << result.error().message;
  const Weights& w = result->weights;
  EXPECT_EQ(w.embedding.front(), 0.0F);
  EXPECT_EQ(w.layers[0].attention_norm.front(), 28.0F);
  EXPECT_EQ(w.layers[0].query.front(), 32.0F);
  EXPECT_EQ(w.layers[0].key.front(), 64.0F);
  EXPECT_EQ(w.layers[0].value.front(), 80.0F);
  EXPECT_EQ(w.layers[0].output.front(), 96.0F);
  EXPECT_EQ(w.layers[1].attention_norm.front(), 28.0F + 176.0F);
  EXPECT_EQ(w.final_norm.front(), 28.0F + 2 * 176.0F);
  EXPECT_EQ(w.classifier[1], w.embedding[4]) << "the classifier is the transposed embedding";
  EXPECT_TRUE(result->id.starts_with("tiny_llm/grouped/"));
  EXPECT_EQ(result->config.kv_shape(), (KvShape{2, 2, 2, 2}));
}

TEST(CheckpointTest, ReadsLatentAttention) {
  const auto result = parse_checkpoint(latent());
  ASSERT_TRUE(result) << result.error().message;
  const Layer& layer = result->weights.layers[0];
  EXPECT_EQ(layer.down.front(), 36.0F + 4 + 40);
  EXPECT_EQ(layer.up_key.size(), 2U * 3 * 5);
  EXPECT_EQ(layer.up_value.front(), 36.0F + 4 + 40 + 28 + 5 + 30);
  EXPECT_TRUE(layer.key.empty());
  EXPECT_EQ(result->config.kv_shape(), (KvShape{2, 1, 1, 7}));
}

TEST(CheckpointTest, ReadsLlama2) {
  const auto result = parse_checkpoint(llama2(false));
  ASSERT_TRUE(result) << result.error().message;
  const Weights& w = result->weights;
  // Arrays run over all layers, and matrices are [out][in]: element (in 0, out 1) is one row further on.
  EXPECT_EQ(w.layers[0].query[0], 20.0F + 2 * 4);
  EXPECT_EQ(w.layers[0].query[1], 20.0F + 2 * 4 + 4);
  EXPECT_EQ(w.layers[1].query[0], 20.0F + 2 * 4 + 16);
  const float feed = 20 + 2 * (4 + 16 + 8 + 8 + 16 + 4);
  EXPECT_EQ(w.layers[0].gate[0], feed);
  EXPECT_EQ(w.layers[0].out[0], feed + 2 * 24);
  EXPECT_EQ(w.layers[0].up[0], feed + 4 * 24);
  EXPECT_EQ(w.final_norm[0], feed + 6 * 24);
  EXPECT_EQ(w.classifier[0], 0.0F);

  const auto unshared = parse_checkpoint(llama2(true));
  ASSERT_TRUE(unshared) << unshared.error().message;
  EXPECT_EQ(unshared->config.vocab, 5U);
  EXPECT_EQ(unshared->weights.classifier[0], feed + 6 * 24 + 4 + static_cast<float>(kLlama2Tables));
}

TEST(CheckpointTest, EqualFilesHaveEqualIdsAndOthersDiffer) {
  Bytes bytes = grouped();
  const auto first = parse_checkpoint(bytes);
  EXPECT_EQ(parse_checkpoint(bytes)->id, first->id);
  bytes.back() ^= std::byte{1};
  EXPECT_NE(parse_checkpoint(bytes)->id, first->id);
}

TEST(CheckpointTest, RefusesEveryOtherSize) {
  for (const Bytes& whole : {grouped(), latent(), llama2(false), llama2(true)}) {
    ASSERT_TRUE(parse_checkpoint(whole));
    for (std::size_t size = 0; size < whole.size(); ++size) {
      const auto result = parse_checkpoint(std::span{whole}.first(size));
      ASSERT_FALSE(result) << size << " of " << whole.size() << " bytes";
      EXPECT_EQ(result.error().code, ErrorCode::invalid_argument);
    }
    Bytes longer = whole;
    longer.push_back(std::byte{0});
    const auto result = parse_checkpoint(longer);
    ASSERT_FALSE(result);
    EXPECT_NE(result.error().message.find(std::to_string(whole.size())), std::string::npos)
        << result.error().message;
  }
}

TEST(CheckpointTest, RefusesEachFieldByName) {
  struct Case {
    std::size_t word;
    std::uint32_t value;
    std::string named;
  };
  const Case cases[] = {
      {0, 2, "version 2"},         {1, 0, "attention is 0"},
      {1, 3, "attention is 3"},    {2, 0, "dim is 0"},
      {2, 1U << 31, "dim is"},     {3, 0, "hidden is 0"},
      {4, 0, "layers is 0"},       {4, ~0U, "layers is"},
      {5, 0, "heads is 0"},        {6, 0, "kv_heads is 0"},
      {6, 5, "kv_heads is 5"},     {6, 3, "kv_heads 3 does not divide heads 4"},
      {7, 0, "head_dim is 0"},     {7, 3, "width 3 is odd"},
      {8, 1, "latent_dim is 1"},   {9, 2, "rope_dim is 2"},
      {10, 0, "vocab is 0"},       {10, ~0U, "vocab is"},
      {11, 0, "max_tokens is 0"},  {11, ~0U, "max_tokens is"},
      {12, 0, "rope_theta is 0"},  {13, 4, "recall_keys 4 does not fit vocab 7"},
      {13, ~0U, "recall_keys is"},
  };
  for (const auto& [word, value, named] : cases) {
    Bytes bytes = grouped();
    set_word(bytes, kMagicBytes + 4 * word, value);
    const auto result = parse_checkpoint(bytes);
    ASSERT_FALSE(result) << named;
    EXPECT_NE(result.error().message.find(named), std::string::npos) << result.error().message;
  }
  for (const auto& [word, value, named] :
       {Case{6, 2, "kv_heads is 2"}, Case{8, 0, "latent_dim is 0"}, Case{9, 0, "rope_dim is 0"},
        Case{9, 3, "width 3 is odd"}}) {
    Bytes bytes = latent();
    set_word(bytes, kMagicBytes + 4 * word, value);
    const auto result = parse_checkpoint(bytes);
    ASSERT_FALSE(result) << named;
    EXPECT_NE(result.error().message.find(named), std::string::npos) << result.error().message;
  }
  for (const auto& [word, value, named] :
       {Case{0, 0, "dim is 0"}, Case{0, 5, "does not divide dim 5"}, Case{3, 0, "heads is 0"},
        Case{4, 0, "kv_heads is 0"}, Case{5, 0, "vocab is 0"}, Case{5, 1U << 31, "vocab is"},
        Case{6, ~0U, "max_tokens is"}}) {
    Bytes bytes = llama2(true);
    set_word(bytes, 4 * word, value);
    const auto result = parse_checkpoint(bytes);
    ASSERT_FALSE(result) << named;
    EXPECT_NE(result.error().message.find(named), std::string::npos) << result.error().message;
  }
}

// The sanitizer builds see what this would touch or allocate.
TEST(CheckpointTest, SurvivesRandomHeaders) {
  constexpr std::uint64_t kSeed = 7;
  std::mt19937_64 random{kSeed};
  for (const Bytes& whole : {grouped(), latent(), llama2(true)}) {
    for (int round = 0; round < 20'000; ++round) {
      Bytes bytes = whole;
      for (std::uint64_t flips = random() % 4 + 1; flips > 0; --flips) {
        bytes[random() % 64] ^= static_cast<std::byte>(1U << random() % 8);
      }
      const auto result = parse_checkpoint(bytes);
      if (result) {
        EXPECT_LE(result->weights.embedding.size() * sizeof(float), bytes.size());
      } else {
        EXPECT_EQ(result.error().code, ErrorCode::invalid_argument)
            << "seed " << kSeed << " round " << round;
      }
    }
  }
}

TEST(CheckpointTest, SaysWhichFileCannotBeRead) {
  const auto result = load_checkpoint(std::filesystem::path{TINY_LLM_MODELS_DIR} / "none.bin");
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code, ErrorCode::unavailable);
  EXPECT_NE(result.error().message.find("none.bin"), std::string::npos);
  EXPECT_FALSE(load_checkpoint(TINY_LLM_MODELS_DIR)) << "a directory";
}

}  // namespace
}  // namespace tiny_llm
