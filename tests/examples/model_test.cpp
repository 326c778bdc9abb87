#include "tiny_llm/model.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "kvshard/geometry.hpp"
#include "tiny_llm/generate.hpp"
#include "tiny_llm/kv.hpp"
#include "tiny_llm/recall.hpp"

namespace tiny_llm {
namespace {

using kvshard::ErrorCode;
using kvshard::LocalPage;
using kvshard::LogicalPage;
using kvshard::PageLayout;

constexpr std::uint32_t kPageSize = 16;

/// Ranks that are threads of this process.
class ThreadPeers {
 public:
  explicit ThreadPeers(std::uint32_t size)
      : barrier_{static_cast<std::ptrdiff_t>(size)}, parts_(size) {}

  /// Runs work(peers) as each of the ranks, and waits for all.
  template <typename Work>
  void run(const Work& work) {
    std::vector<std::jthread> threads;
    for (std::uint32_t rank = 0; rank < parts_.size(); ++rank) {
      threads.emplace_back([this, rank, &work] {
        Member member{*this, rank};
        work(member);
      });
    }
  }

 private:
  class Member final : public Peers {
   public:
    Member(ThreadPeers& all, std::uint32_t rank) : all_{all}, rank_{rank} {}
    [[nodiscard]] std::uint32_t rank() const noexcept override { return rank_; }
    [[nodiscard]] std::uint32_t size() const noexcept override {
      return static_cast<std::uint32_t>(all_.parts_.size());
    }
    kvshard::Result<std::vector<float>> all_gather(std::span<const float> own) override {
      all_.parts_[rank_].assign(own.begin(), own.end());
      all_.barrier_.arrive_and_wait();
      std::vector<float> gathered;
      for (const auto& part : all_.parts_)
        gathered.insert(gathered.end(), part.begin(), part.end());
      all_.barrier_.arrive_and_wait();
      return gathered;
    }

   private:
    ThreadPeers& all_;
    std::uint32_t rank_;
  };

  std::barrier<> barrier_;
  std::vector<std::vector<float>> parts_;
};

/// For what is checked before anything is gathered.
class NamedPeers final : public Peers {
 public:
  NamedPeers(std::uint32_t rank, std::uint32_t size) : rank_{rank}, size_{size} {}
  [[nodiscard]] std::uint32_t rank() const noexcept override { return rank_; }
  [[nodiscard]] std::uint32_t size() const noexcept override { return size_; }
  kvshard::Result<std::vector<float>> all_gather(std::span<const float>) override {
    return kvshard::Error{ErrorCode::unavailable, "nobody is there"};
  }

 private:
  std::uint32_t rank_, size_;
};

Model load(const std::filesystem::path& path, Peers* peers = nullptr) {
  auto model = Model::load(path, peers);
  if (!model) throw std::runtime_error{model.error().message};  // fails the test that asked
  return std::move(model).value();
}

std::filesystem::path trained_path(const std::string& name) {
  return std::filesystem::path{TINY_LLM_MODELS_DIR} / (name + ".bin");
}

Model trained(const std::string& name) {
  return load(trained_path(name));
}

std::optional<std::filesystem::path> stories() {
  const char* shared = std::getenv("KVSHARD_SHARED_DIR");
  if (shared == nullptr) return std::nullopt;
  const auto path = std::filesystem::path{shared} / "models" / "stories260K.bin";
  return std::filesystem::exists(path) ? std::optional{path} : std::nullopt;
}

std::size_t pages_for(std::size_t tokens) {
  return (tokens + kPageSize - 1) / kPageSize;
}

KvPool make_pool(const KvShape& shape, std::size_t page_count) {
  auto pool = KvPool::create(shape, kPageSize, static_cast<std::uint32_t>(page_count));
  EXPECT_TRUE(pool);
  return std::move(pool).value();
}

/// Local pages 1..count in random order, as a busy pool would hand them out.
std::vector<LocalPage> scattered_pages(std::size_t count, std::uint64_t seed) {
  std::vector<LocalPage> pages;
  for (std::uint32_t page = 1; page <= count; ++page) pages.push_back(LocalPage{page});
  std::shuffle(pages.begin(), pages.end(), std::mt19937_64{seed});
  return pages;
}

/// Prefill in chunks, then greedy decoding. The first logits are those after the prompt.
Generated serve(const Model& model, KvCache& cache, std::span<const Token> prompt,
                std::size_t count, std::size_t chunk_tokens) {
  std::vector<float> logits;
  for (std::size_t at = 0; at < prompt.size(); at += chunk_tokens) {
    auto result =
        model.forward(prompt.subspan(at, std::min(chunk_tokens, prompt.size() - at)), at, cache);
    EXPECT_TRUE(result) << result.error().message;
    logits = std::move(result).value();
  }
  auto generated = generate_greedy(model, cache, prompt.size(), logits, count);
  EXPECT_TRUE(generated) << generated.error().message;
  return std::move(generated).value();
}

/// What is computed when one pool holds every page.
Generated serve_unsplit(const Model& model, std::span<const Token> prompt, std::size_t count) {
  const std::size_t pages = pages_for(prompt.size() + count);
  KvPool pool = make_pool(model.kv_shape(), pages + 1);
  auto cache = PagedKv::create(pool, scattered_pages(pages, 3));
  EXPECT_TRUE(cache);
  return serve(model, *cache, prompt, count, prompt.size());
}

/// N context parallel prefill ranks and T tensor parallel decode ranks as threads; copying stands in for the
/// network.
class SplitServing {
 public:
  SplitServing(const std::filesystem::path& path, std::span<const Token> prompt,
               std::uint32_t shard_size, std::size_t count, std::uint32_t decode_ranks = 1)
      : path_{path},
        shape_{load(path).config().kv_shape()},
        prompt_{prompt},
        layout_{PageLayout::create(shard_size, kPageSize).value()},
        count_{count} {
    // A cyclic chain that does not start at rank 0, on local pages 1, 2, ...
    const std::uint32_t base = shard_size - 1;
    const std::size_t pages = pages_for(prompt.size());
    for (std::uint32_t i = 0; i < pages; ++i) {
      const std::uint32_t place = base + i;
      chain_.push_back(LogicalPage{shard_size + place});
    }
    for (std::uint32_t rank = 0; rank < shard_size; ++rank)
      ranks_.push_back(make_pool(shape_, pages / shard_size + 3));
    decode_pages_ = scattered_pages(pages_for(prompt.size() + count), 11);
    const KvShape share = load(path).config().kv_shape(decode_ranks);
    for (std::uint32_t rank = 0; rank < decode_ranks; ++rank)
      decode_.push_back(make_pool(share, decode_pages_.size() + 1));
  }

  /// In ragged chunks; each rank runs the tokens of its own pages.
  void prefill() {
    const Model model = load(path_);
    constexpr std::size_t kChunk = 157;
    ThreadPeers{layout_.shard_size()}.run([&](Peers& peers) {
      auto cache = ShardedPrefillKv::create(ranks_[peers.rank()], layout_, peers, chain_);
      ASSERT_TRUE(cache) << cache.error().message;
      for (std::size_t at = 0; at < prompt_.size(); at += kChunk) {
        const auto chunk = prompt_.subspan(at, std::min(kChunk, prompt_.size() - at));
        auto result = model.forward(chunk, at, *cache);
        ASSERT_TRUE(result) << result.error().message;
        const std::size_t last = at + chunk.size() - 1;
        EXPECT_EQ(result->empty(), !cache->runs(last)) << "rank " << peers.rank();
        if (last + 1 == prompt_.size() && cache->runs(last))
          first_logits_ = std::move(result).value();
      }
    });
  }

  /// To each decode rank, its heads.
  void move_pages() {
    for (std::size_t i = 0; i < chain_.size(); ++i) {
      const auto from = layout_.place(chain_[i]);
      for (std::size_t buffer = 0; buffer < shape_.buffers(); ++buffer) {
        const auto page = ranks_[from.rank].page(buffer, from.page);
        for (std::uint32_t rank = 0; rank < decode_.size(); ++rank) {
          const std::size_t own = decode_[rank].shape().row_floats();
          const std::size_t first = rank * own % shape_.row_floats();
          for (std::size_t t = 0; t < kPageSize; ++t) {
            std::ranges::copy(page.subspan(t * shape_.row_floats() + first, own),
                              decode_page(buffer, i, rank).subspan(t * own).begin());
          }
        }
      }
    }
  }

  /// What decode rank 0 says; all say the same.
  Generated decode() {
    std::vector<Generated> said(decode_.size());
    ThreadPeers{static_cast<std::uint32_t>(decode_.size())}.run([&](Peers& peers) {
      const Model model = load(path_, &peers);
      auto cache = PagedKv::create(decode_[peers.rank()], decode_pages_);
      ASSERT_TRUE(cache);
      auto generated = generate_greedy(model, *cache, prompt_.size(), first_logits_, count_);
      ASSERT_TRUE(generated) << generated.error().message;
      said[peers.rank()] = std::move(generated).value();
    });
    for (const Generated& each : said) EXPECT_TRUE(each.identical(said[0]));
    return said[0];
  }

  [[nodiscard]] std::size_t positions() const { return chain_.size(); }
  std::span<float> decode_page(std::size_t buffer, std::size_t position, std::uint32_t rank = 0) {
    return decode_[rank].page(buffer, decode_pages_[position]);
  }
  /// Tokens of the chain's pages that a rank's pool holds, as floats that are not NaN in buffer 0.
  std::size_t stored_tokens(std::uint32_t rank) const {
    std::size_t floats = 0;
    for (std::uint32_t page = 0; page < ranks_[rank].page_count(); ++page) {
      floats += static_cast<std::size_t>(std::ranges::count_if(
          ranks_[rank].page(0, LocalPage{page}), [](float x) { return !std::isnan(x); }));
    }
    return floats / shape_.row_floats();
  }

 private:
  std::filesystem::path path_;
  KvShape shape_;
  std::span<const Token> prompt_;
  PageLayout layout_;
  std::size_t count_;
  std::vector<LogicalPage> chain_;
  std::vector<KvPool> ranks_;
  std::vector<LocalPage> decode_pages_;
  std::vector<KvPool> decode_;
  std::vector<float> first_logits_;
};

class TrainedModelTest : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(, TrainedModelTest, testing::Values("grouped", "latent"),
                         [](const auto& suite) { return suite.param; });

TEST_P(TrainedModelTest, RecallsPairsFromFullLengthPrompts) {
  const Model model = trained(GetParam());
  constexpr std::size_t kAnswers = 48;
  std::size_t right = 0;
  std::size_t asked = 0;
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    const auto prompt =
        make_recall_prompt(model.config(), model.config().recall_keys, kAnswers, seed);
    ASSERT_TRUE(prompt) << prompt.error().message;
    right += count_right(*prompt, serve_unsplit(model, prompt->tokens, kAnswers).tokens);
    asked += kAnswers;
  }
  EXPECT_GE(static_cast<double>(right), 0.99 * static_cast<double>(asked))
      << right << " of " << asked;
}

TEST_P(TrainedModelTest, RecallsPairsFromShorterPrompts) {
  const Model model = trained(GetParam());
  for (const std::uint32_t pairs : {8U, 40U, 150U}) {
    const auto prompt = make_recall_prompt(model.config(), pairs, pairs, pairs);
    ASSERT_TRUE(prompt) << prompt.error().message;
    const auto right = count_right(*prompt, serve_unsplit(model, prompt->tokens, pairs).tokens);
    EXPECT_GE(static_cast<double>(right), 0.99 * pairs) << pairs << " pairs";
  }
}

TEST_P(TrainedModelTest, NeitherPagesNorChunksChangeABit) {
  const Model model = trained(GetParam());
  const auto prompt = make_recall_prompt(model.config(), 60, 20, 1);
  ASSERT_TRUE(prompt) << prompt.error().message;
  ContiguousKv contiguous{model.config().kv_shape(), prompt->tokens.size() + 20};
  const Generated expected = serve(model, contiguous, prompt->tokens, 20, prompt->tokens.size());
  EXPECT_TRUE(serve_unsplit(model, prompt->tokens, 20).identical(expected));
  for (const std::size_t chunk : {1U, 5U, 16U, 33U, 64U}) {
    ContiguousKv cache{model.config().kv_shape(), prompt->tokens.size() + 20};
    EXPECT_TRUE(serve(model, cache, prompt->tokens, 20, chunk).identical(expected))
        << "chunks of " << chunk;
  }
}

// acceptance 11, 12 and 46, without the network: full-length prompts, greedy decoding, logits and tokens.
TEST_P(TrainedModelTest, SplitOverShardsEqualsUnsplit) {
  const Model model = trained(GetParam());
  const auto prompt = make_recall_prompt(model.config(), model.config().recall_keys, 24, 100);
  ASSERT_TRUE(prompt) << prompt.error().message;
  const Generated expected = serve_unsplit(model, prompt->tokens, 24);
  for (const auto& [shard_size, decode_ranks] :
       {std::pair{1U, 1U}, {2U, 1U}, {4U, 1U}, {1U, 2U}, {2U, 2U}, {4U, 4U}}) {
    SplitServing split{trained_path(GetParam()), prompt->tokens, shard_size, 24, decode_ranks};
    split.prefill();
    split.move_pages();
    EXPECT_TRUE(split.decode().identical(expected))
        << "N = " << shard_size << ", T = " << decode_ranks;
    std::size_t stored = 0;
    for (std::uint32_t rank = 0; rank < shard_size; ++rank) {
      EXPECT_LE(split.stored_tokens(rank), (split.positions() / shard_size + 1) * kPageSize)
          << "rank " << rank;
      stored += split.stored_tokens(rank);
    }
    EXPECT_EQ(stored, prompt->tokens.size()) << "each token on one rank, N = " << shard_size;
  }
}

// What an end-to-end check relies on: no page of the prompt can be lost or damaged unseen.
TEST_P(TrainedModelTest, OneDamagedPageIsSeen) {
  const Model model = trained(GetParam());
  const auto prompt = make_recall_prompt(model.config(), 40, 40, 4);
  ASSERT_TRUE(prompt) << prompt.error().message;
  const Generated expected = serve_unsplit(model, prompt->tokens, 40);
  ASSERT_EQ(count_right(*prompt, expected.tokens), 40U);
  SplitServing split{trained_path(GetParam()), prompt->tokens, 2, 40};
  split.prefill();
  for (std::size_t position = 0; position < split.positions(); ++position) {
    split.move_pages();
    ASSERT_TRUE(split.decode().identical(expected));
    for (std::size_t buffer = 0; buffer < model.config().kv_shape().buffers(); ++buffer) {
      std::ranges::fill(split.decode_page(buffer, position), 0.0F);
    }
    const Generated damaged = split.decode();
    EXPECT_FALSE(damaged.identical(expected)) << "zeros at position " << position;
    if (position + 1 < split.positions()) {
      EXPECT_LT(count_right(*prompt, damaged.tokens), 40U)
          << "the pairs at position " << position << " were needed";
    }
  }
  // Two pages of different ranks in each other's place: the bytes are all there, and wrong.
  split.move_pages();
  for (std::size_t buffer = 0; buffer < model.config().kv_shape().buffers(); ++buffer) {
    std::ranges::swap_ranges(split.decode_page(buffer, 0), split.decode_page(buffer, 1));
  }
  EXPECT_FALSE(split.decode().identical(expected));
  // The sign bit of one value.
  split.move_pages();
  float& value = split.decode_page(0, 2)[5];
  value = -value;
  EXPECT_FALSE(split.decode().identical(expected));
}

TEST_P(TrainedModelTest, APageThatNeverArrivedSpoilsTheLogits) {
  const Model model = trained(GetParam());
  const auto prompt = make_recall_prompt(model.config(), 20, 4, 4);
  ASSERT_TRUE(prompt) << prompt.error().message;
  SplitServing split{trained_path(GetParam()), prompt->tokens, 2, 4};
  split.prefill();
  const Generated nothing_moved = split.decode();
  const auto later = std::span{nothing_moved.logits}.subspan(model.config().vocab);
  EXPECT_TRUE(std::ranges::all_of(later, [](float x) { return std::isnan(x); }));
}

TEST_P(TrainedModelTest, ForwardRefusesWhatItCannotRun) {
  const Model model = trained(GetParam());
  const Config& c = model.config();
  ContiguousKv cache{c.kv_shape(), 8};
  const auto code = [&](std::vector<Token> tokens, std::size_t first, KvCache& where) {
    const auto result = model.forward(tokens, first, where);
    return result ? ErrorCode{} : result.error().code;
  };
  EXPECT_EQ(code({}, 0, cache), ErrorCode::invalid_argument);
  EXPECT_EQ(code({c.vocab}, 0, cache), ErrorCode::invalid_argument);
  EXPECT_EQ(code({0}, 8, cache), ErrorCode::resource_exhausted);
  EXPECT_EQ(code({0, 1}, 7, cache), ErrorCode::resource_exhausted);
  EXPECT_EQ(code({0}, 7, cache), ErrorCode{});
  EXPECT_EQ(code({0}, ~std::size_t{0}, cache), ErrorCode::invalid_argument);
  ContiguousKv large{c.kv_shape(), c.max_tokens + 1};
  EXPECT_EQ(code({0}, c.max_tokens, large), ErrorCode::invalid_argument);
  EXPECT_EQ(code({0}, c.max_tokens - 1, large), ErrorCode{});
  KvShape other = c.kv_shape();
  other.layers += 1;
  ContiguousKv wrong{other, 8};
  EXPECT_EQ(code({0}, 0, wrong), ErrorCode::invalid_argument);
}

// A head slice that is not the rank's own has the right shape and sound numbers, and must be seen.
TEST(TensorParallelTest, HeadsOfAnotherRankAreSeen) {
  const std::filesystem::path path = trained_path("grouped");
  const Model model = load(path);
  const auto prompt = make_recall_prompt(model.config(), 40, 8, 4);
  ASSERT_TRUE(prompt) << prompt.error().message;
  const Generated expected = serve_unsplit(model, prompt->tokens, 8);
  SplitServing split{path, prompt->tokens, 2, 8, 2};
  split.prefill();
  split.move_pages();
  ASSERT_TRUE(split.decode().identical(expected));
  split.move_pages();
  std::ranges::swap_ranges(split.decode_page(0, 1, 0), split.decode_page(0, 1, 1));
  EXPECT_FALSE(split.decode().identical(expected));
}

TEST_P(TrainedModelTest, RefusesRanksThatDoNotDivideIt) {
  NamedPeers three{0, 3};
  const auto model = Model::load(trained_path(GetParam()), &three);
  ASSERT_FALSE(model);
  EXPECT_EQ(model.error().code, ErrorCode::invalid_argument);
  EXPECT_NE(model.error().message.find("3 ranks do not divide 4"), std::string::npos)
      << model.error().message;
}

TEST_P(TrainedModelTest, APeerThatIsGoneEndsTheCall) {
  NamedPeers peers{1, 2};
  const Model model = load(trained_path(GetParam()), &peers);
  ContiguousKv cache{model.kv_shape(), 4};
  const auto decoded = model.forward(std::vector<Token>{0}, 0, cache);
  ASSERT_FALSE(decoded);
  EXPECT_EQ(decoded.error().code, ErrorCode::unavailable);

  const Model whole = trained(GetParam());
  KvPool pool = make_pool(whole.kv_shape(), 3);
  const PageLayout layout = PageLayout::create(2, kPageSize).value();
  auto sharded = ShardedPrefillKv::create(pool, layout, peers, {LogicalPage{2}, LogicalPage{3}});
  ASSERT_TRUE(sharded) << sharded.error().message;
  const auto prefilled = whole.forward(std::vector<Token>{0, 1}, 0, *sharded);
  ASSERT_FALSE(prefilled);
  EXPECT_EQ(prefilled.error().code, ErrorCode::unavailable);
}

TEST_P(TrainedModelTest, DescribesItsPoolToKvshard) {
  const Model model = trained(GetParam());
  KvPool pool = make_pool(model.kv_shape(), 5);
  const kvshard::Pool described = pool.describe(model.id());
  const auto status = kvshard::validate(described);
  ASSERT_TRUE(status) << status.error().message;
  const kvshard::BufferGroup& group = described.geometry.groups[0];
  EXPECT_EQ(described.geometry.model_id, model.id());
  EXPECT_EQ(group.page_bytes(), pool.page_floats() * sizeof(float));
  ASSERT_EQ(described.buffers[0].size(), pool.shape().buffers());
  for (std::size_t buffer = 0; buffer < pool.shape().buffers(); ++buffer) {
    EXPECT_EQ(described.buffers[0][buffer] + 3 * group.page_bytes(),
              reinterpret_cast<std::byte*>(pool.page(buffer, LocalPage{3}).data()));
  }
}

TEST(KvTest, RefusesPagesThatARequestCannotHave) {
  auto pool = KvPool::create({.layers = 1, .heads = 1, .head_floats = 4}, kPageSize, 4);
  ASSERT_TRUE(pool);
  EXPECT_TRUE(PagedKv::create(*pool, {LocalPage{1}, LocalPage{3}}));
  EXPECT_FALSE(PagedKv::create(*pool, {LocalPage{1}, LocalPage{0}})) << "padding";
  EXPECT_FALSE(PagedKv::create(*pool, {LocalPage{4}})) << "beyond the pool";
  const PageLayout layout = PageLayout::create(2, kPageSize).value();
  NamedPeers peers{1, 2};
  const auto sharded = [&](std::vector<LogicalPage> pages) {
    return ShardedPrefillKv::create(*pool, layout, peers, std::move(pages)).ok();
  };
  EXPECT_TRUE(sharded({LogicalPage{2}, LogicalPage{7}}));
  EXPECT_FALSE(sharded({LogicalPage{1}})) << "padding";
  EXPECT_FALSE(sharded({LogicalPage{8}})) << "beyond the pool";
  NamedPeers three{1, 3};
  EXPECT_FALSE(ShardedPrefillKv::create(*pool, layout, three, {LogicalPage{2}}));
  NamedPeers beyond{2, 2};
  EXPECT_FALSE(ShardedPrefillKv::create(*pool, layout, beyond, {LogicalPage{2}}));
  const PageLayout pages_of_32 = PageLayout::create(2, 32).value();
  EXPECT_FALSE(ShardedPrefillKv::create(*pool, pages_of_32, peers, {LogicalPage{2}}));
}

TEST(KvTest, RefusesPoolsThatCannotBe) {
  const KvShape shape{.layers = 1, .heads = 1, .head_floats = 4};
  EXPECT_FALSE(KvPool::create(shape, 0, 4));
  EXPECT_FALSE(KvPool::create(shape, 16, 0));
  EXPECT_FALSE(KvPool::create({}, 16, 4));
  EXPECT_FALSE(KvPool::create(shape, ~0U, ~0U));
  EXPECT_FALSE(KvPool::create({.layers = ~0U >> 1, .heads = ~0U, .head_floats = 1}, ~0U, ~0U));
}

// acceptance 46, without the network, with a model that others trained.
TEST(StoriesTest, SplitOverShardsEqualsUnsplit) {
  const auto path = stories();
  if (!path) GTEST_SKIP() << "no models/stories260K.bin in KVSHARD_SHARED_DIR";
  const Model model = load(*path);
  EXPECT_EQ(model.config().kv_shape(), (KvShape{5, 2, 4, 8}));
  EXPECT_EQ(model.config().vocab, 512U);

  // Its own story, from the token that begins one, is the prompt of the split run.
  constexpr Token kBegin = 1;
  const Generated story = serve_unsplit(model, std::vector{kBegin}, 200);
  // As a separate double-precision implementation of the same formulas says them.
  const std::vector<Token> opening{461, 461, 401, 401, 401, 461, 378, 455};
  EXPECT_TRUE(std::ranges::equal(std::span{story.tokens}.first(opening.size()), opening));
  std::vector<Token> prompt{kBegin};
  prompt.insert(prompt.end(), story.tokens.begin(), story.tokens.end());
  const Generated expected = serve_unsplit(model, prompt, 40);
  for (const std::uint32_t shard_size : {1U, 2U, 4U}) {
    SplitServing split{*path, prompt, shard_size, 40, shard_size};
    split.prefill();
    split.move_pages();
    EXPECT_TRUE(split.decode().identical(expected)) << "N = T = " << shard_size;
  }
}

}  // namespace
}  // namespace tiny_llm
