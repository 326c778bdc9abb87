// kvshard-demo: prompts are computed by N prefill rank processes that share the pages and the work (context
// parallel), and decoded by T processes that share the heads (tensor parallel) and pull their slice of every
// page from whoever has it; the outcome is compared with an unsplit run of the same model, bit for bit.
#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <deque>
#include <filesystem>
#include <map>
#include <numeric>
#include <set>

#include "base/try.hpp"
#include "demo/roles.hpp"
#include "demo/socket_peers.hpp"
#include "kvshard/bootstrap.hpp"
#include "kvshard/page_allocator.hpp"
#include "support/process.hpp"
#include "tiny_llm/generate.hpp"
#include "tiny_llm/kv.hpp"
#include "tiny_llm/model.hpp"
#include "tiny_llm/recall.hpp"
#include "trace/trace.hpp"

namespace demo {
namespace {

using namespace kvshard;
using tools::Process;
using tools::RankProcess;

struct Options {
  std::vector<std::uint32_t> shard_sizes{1, 2, 4};
  std::vector<std::uint32_t> decode_tps{1, 2};
  std::vector<std::string> models;
  std::uint32_t prompts{8};
  std::uint32_t count{32};
  bool damage{false};
  std::string registry;  // empty: one of our own
  std::string trace;     // empty: none
  RoleOptions role;
};

struct Prompt {
  std::vector<tiny_llm::Token> tokens;
  std::vector<tiny_llm::Token> answers;  // empty when the model was not trained for recall
  tiny_llm::Generated unsplit;
};

struct Variant {
  std::string name;
  std::string model;
  std::vector<Prompt> prompts;
};

struct Row {
  std::string variant;
  std::uint32_t shard_size{0};
  std::uint32_t decode_tp{0};
  std::size_t prompts{0};
  std::string pages_per_rank;
  std::size_t answers{0}, right_unsplit{0}, right_split{0};
  std::size_t same_tokens{0}, same_logits{0};
  std::uint64_t bytes{0}, wire_ns{0};
  std::vector<double> first_token_ms;
  std::set<std::string> paths;
  std::string slowest;

  [[nodiscard]] bool good() const {
    return same_tokens == prompts && same_logits == prompts &&
           (answers == 0 ||
            (right_split == right_unsplit &&
             static_cast<double>(right_split) >= 0.99 * static_cast<double>(answers)));
  }
};

std::filesystem::path self() {
  return std::filesystem::read_symlink("/proc/self/exe");
}

// Decoding on one pool that holds everything: what the split runs must repeat.
Result<tiny_llm::Generated> decode_unsplit(const tiny_llm::Model& model,
                                           const std::vector<tiny_llm::Token>& prompt,
                                           std::size_t count, std::uint32_t page_size) {
  const std::size_t pages = (prompt.size() + count + page_size - 1) / page_size;
  KVSHARD_TRY(auto pool, tiny_llm::KvPool::create(model.config().kv_shape(), page_size,
                                                  static_cast<std::uint32_t>(pages + 1)));
  std::vector<LocalPage> table(pages);
  for (std::uint32_t i = 0; i < pages; ++i) table[i] = LocalPage{i + 1};
  KVSHARD_TRY(auto cache, tiny_llm::PagedKv::create(pool, table));
  KVSHARD_TRY(const auto logits, model.forward(prompt, 0, cache));
  return tiny_llm::generate_greedy(model, cache, prompt.size(), logits, count);
}

// Prompts of several lengths. A model that was not trained for recall gets arbitrary tokens: whatever it
// says, it must say the same split and unsplit.
Result<Variant> make_variant(const std::string& path, const Options& options) {
  KVSHARD_TRY(const auto model, tiny_llm::Model::load(path));
  const tiny_llm::Config& config = model.config();
  Variant variant{
      .name = config.attention == tiny_llm::Attention::latent ? "latent (MLA)" : "grouped (GQA)",
      .model = path,
      .prompts = {}};
  const std::size_t count = std::min<std::size_t>(options.count, config.max_tokens / 4);
  for (std::uint32_t i = 0; i < options.prompts; ++i) {
    Prompt prompt;
    if (config.recall_keys > 0) {
      const std::uint32_t pairs = config.recall_keys - config.recall_keys * (i % 4) / 8;
      KVSHARD_TRY(auto made, tiny_llm::make_recall_prompt(config, pairs, count, 1000 + i));
      prompt.tokens = std::move(made.tokens);
      prompt.answers = std::move(made.answers);
    } else {
      const std::size_t length = config.max_tokens - count - 1 - (i % 4) * config.max_tokens / 16;
      std::uint32_t state = 12345 + i;
      for (std::size_t t = 0; t < length; ++t) {
        state = state * 1664525U + 1013904223U;
        prompt.tokens.push_back((state >> 8) % config.vocab);
      }
    }
    KVSHARD_TRY(prompt.unsplit,
                decode_unsplit(model, prompt.tokens, count, options.role.page_size));
    variant.prompts.push_back(std::move(prompt));
  }
  return variant;
}

// Starts kvshard-registry, which lies beside this program, and reads its address off its first line.
Result<std::string> start_registry(Process& process) {
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC) != 0) return Error{ErrorCode::resource_exhausted, "no pipe"};
  const UniqueFd reading{ends[0]};
  UniqueFd writing{ends[1]};
  const std::string program = self().parent_path() / "kvshard-registry";
  // The shell only redirects its output.
  process = Process{{"/bin/sh", "-c", "exec \"$0\" --port 0 >&3", program}, std::move(writing)};
  std::string line;
  for (char c = 0; ::read(reading.get(), &c, 1) == 1 && c != '\n';) line += c;
  const std::size_t at = line.rfind(' ');
  if (at == std::string::npos)
    return Error{ErrorCode::unavailable, "kvshard-registry did not start: " + program};
  return line.substr(at + 1);
}

/// N prefill ranks and T decode ranks, and the scheduler that feeds them. With a trace, ranks write one
/// each when this object goes, and `trace_files` has their names.
class Run {
 public:
  Run(const Options& options, const Variant& variant, std::uint32_t shard_size,
      std::uint32_t decode_tp, const std::string& registry, std::uint64_t epoch,
      std::vector<std::string>& trace_files)
      : options_{options}, variant_{variant}, role_{options.role}, trace_files_{trace_files} {
    row_.variant = variant.name;
    row_.shard_size = shard_size;
    row_.decode_tp = decode_tp;
    row_.prompts = variant.prompts.size();
    role_.registry = registry;
    // A registry that is not our own may list the ranks of other runs.
    role_.group = fmt::format("demo-{}-{}", ::getpid(), epoch);
    role_.epoch = epoch;
    first_room_ = 1'000 * epoch;
    role_.model = variant.model;
    role_.shard_size = shard_size;
    role_.decode_tp = decode_tp;
  }
  Result<Row> run() {
    KVSHARD_TRY(const auto layout, PageLayout::create(row_.shard_size, options_.role.page_size));
    KVSHARD_TRY(auto allocator, PageAllocator::create(layout, options_.role.pool_pages));
    KVSHARD_TRY(const auto capacity,
                CapacityCheck::create(
                    layout, std::uint64_t{options_.role.pool_pages} * options_.role.page_size,
                    {AdmissionRule::normal()}));
    allocator_ = &allocator;
    for (const Prompt& prompt : variant_.prompts)
      KVSHARD_TRY(capacity.check_intake(prompt.tokens.size()));
    std::size_t longest = 0;
    for (const Prompt& prompt : variant_.prompts)
      longest = std::max<std::size_t>(longest, layout.pages_for(prompt.tokens.size()));
    row_.pages_per_rank =
        longest % row_.shard_size == 0
            ? std::to_string(longest / row_.shard_size)
            : fmt::format("{}-{}", longest / row_.shard_size, longest / row_.shard_size + 1);
    start_ranks();
    KVSHARD_TRY(SocketPeers::connect(std::span{ranks_}.first(row_.shard_size)));
    KVSHARD_TRY(SocketPeers::connect(std::span{ranks_}.subspan(row_.shard_size)));
    for (RankProcess& rank : ranks_) KVSHARD_TRY(await_ready(rank));

    std::uint64_t next = 0;
    while (finished_ < variant_.prompts.size()) {
      // First come, first served: the head waits until it fits, and intake said that it can.
      while (
          next < variant_.prompts.size() &&
          capacity.check_now(variant_.prompts[next].tokens.size(), allocator.admissible_tokens())) {
        KVSHARD_TRY(start(next++));
      }
      KVSHARD_TRY(handle_next_message());
    }
    return row_;
  }

 private:
  struct Room {
    std::vector<LogicalPage> pages;
    std::chrono::steady_clock::time_point started;
    std::size_t open_ends{0};  // ranks that have not let go of it
    bool same_tokens{true};    // on the decode ranks that have answered
    bool same_logits{true};
  };

  void start_ranks() {
    RoleOptions role = role_;
    const std::uint32_t shard_size = role.shard_size;
    for (std::uint32_t rank = 0; rank < shard_size + role.decode_tp; ++rank) {
      const bool decode = rank >= shard_size;
      role.rank = decode ? rank - shard_size : rank;
      std::uint64_t pool_pages = role.pool_pages;
      if (decode) {  // it holds every running request whole, and their new tokens
        pool_pages = std::uint64_t{role.pool_pages} * shard_size +
                     variant_.prompts.size() * (options_.count / role.page_size + 2);
      }
      ranks_.push_back(RankProcess({self(),         decode ? "decode" : "prefill",
                                    "--registry",   role.registry,
                                    "--group",      role.group,
                                    "--epoch",      std::to_string(role.epoch),
                                    "--rank",       std::to_string(role.rank),
                                    "--shard-size", std::to_string(shard_size),
                                    "--decode-tp",  std::to_string(role.decode_tp),
                                    "--model",      role.model,
                                    "--page-size",  std::to_string(role.page_size),
                                    "--pool-pages", std::to_string(pool_pages),
                                    "--chunk",      std::to_string(role.chunk_tokens),
                                    "--memory",     role.memory,
                                    "--path",       role.path,
                                    "--trace",      trace_file(decode, role.rank)}));
    }
  }

  std::string trace_file(bool decode, std::uint32_t rank) {
    if (options_.trace.empty()) return "";
    return trace_files_.emplace_back(fmt::format("{}.run{}.{}{}", options_.trace, role_.epoch,
                                                 decode ? "decode" : "prefill", rank));
  }

  Result<Json> receive(RankProcess& rank) {
    const auto message = rank.channel().receive();
    if (!message) return Error{ErrorCode::unavailable, "a rank process died"};
    if (message->contains("failed"))
      return Error{ErrorCode::unavailable,
                   "a rank failed: " + (*message)["failed"].get<std::string>()};
    return *message;
  }
  Status await_ready(RankProcess& rank) {
    KVSHARD_TRY(receive(rank));
    return {};
  }

  Status start(std::uint64_t id) {
    const Prompt& prompt = variant_.prompts[id];
    Room& room = rooms_[id];
    room.pages.resize(allocator_->layout().pages_for(prompt.tokens.size()));
    KVSHARD_TRY(allocator_->draw_chain(room.pages));
    room.started = std::chrono::steady_clock::now();
    room.open_ends = ranks_.size();
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      const bool decode = rank >= row_.shard_size;
      const bool damage = options_.damage && id == 0 && rank == row_.shard_size;
      const Json message =
          decode ? Json{{"op", "decode"},
                        {"room", first_room_ + id},
                        {"prompt_tokens", prompt.tokens.size()},
                        {"count", prompt.unsplit.tokens.size()},
                        {"damage", damage}}
                 : Json{{"op", "prefill"}, {"room", first_room_ + id}, {"prompt", prompt.tokens}};
      if (!ranks_[rank].channel().send(message))
        return Error{ErrorCode::unavailable, "a rank process died"};
    }
    return {};
  }

  Status handle_next_message() {
    std::vector<pollfd> fds;
    for (RankProcess& rank : ranks_)
      fds.push_back({.fd = rank.channel().fd(), .events = POLLIN, .revents = 0});
    if (::poll(fds.data(), fds.size(), 60'000) == 0)
      return Error{ErrorCode::deadline_exceeded, "no rank said anything for 60 s"};
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (fds[rank].revents == 0) continue;
      KVSHARD_TRY(const Json message, receive(ranks_[rank]));
      if (rank >= row_.shard_size) {
        KVSHARD_TRY(take_result(message, rank == row_.shard_size));
        KVSHARD_TRY(let_go(message["room"].get<std::uint64_t>() - first_room_));
      } else {
        KVSHARD_TRY(let_go(message["released"].get<std::uint64_t>() - first_room_));
      }
    }
    return {};
  }

  // Every decode rank has all logits; what is counted once is taken from the first.
  Status take_result(const Json& message, bool first) {
    if (message.contains("error"))
      return Error{ErrorCode::unavailable, message["error"].get<std::string>()};
    const auto id = message["room"].get<std::uint64_t>() - first_room_;
    const Prompt& prompt = variant_.prompts[id];
    tiny_llm::Generated split;
    split.tokens = message["tokens"].get<std::vector<tiny_llm::Token>>();
    const auto& bytes = message["logits"].get_binary();
    split.logits.resize(bytes.size() / sizeof(float));
    std::memcpy(split.logits.data(), bytes.data(), split.logits.size() * sizeof(float));
    Room& room = rooms_[id];
    room.same_tokens &= split.tokens == prompt.unsplit.tokens;
    room.same_logits &= split.identical(prompt.unsplit);
    row_.bytes += message["bytes"].get<std::uint64_t>();
    row_.wire_ns += message["wire_ns"].get<std::uint64_t>();
    row_.paths.insert(message["path"].get<std::string>());
    row_.slowest = message["summary"].get<std::string>();
    if (!first) return {};
    if (!prompt.answers.empty()) {
      const tiny_llm::RecallPrompt recall{prompt.tokens, prompt.answers};
      row_.answers += prompt.answers.size();
      row_.right_unsplit += tiny_llm::count_right(recall, prompt.unsplit.tokens);
      row_.right_split += tiny_llm::count_right(recall, split.tokens);
    }
    const std::chrono::steady_clock::time_point first_token{
        std::chrono::steady_clock::duration{message["first_token_ns"].get<std::int64_t>()}};
    row_.first_token_ms.push_back(
        std::chrono::duration<double, std::milli>{first_token - room.started}.count());
    return {};
  }

  // Once every rank is done with a room its pages go back, on all replicas of the allocator alike.
  Status let_go(std::uint64_t id) {
    Room& room = rooms_[id];
    if (--room.open_ends > 0) return {};
    row_.same_tokens += room.same_tokens ? 1 : 0;
    row_.same_logits += room.same_logits ? 1 : 0;
    KVSHARD_TRY(allocator_->free_chain(room.pages));
    for (std::size_t rank = 0; rank < row_.shard_size; ++rank) {
      if (!ranks_[rank].channel().send({{"op", "free"}, {"room", first_room_ + id}}))
        return Error{ErrorCode::unavailable, "a rank process died"};
    }
    rooms_.erase(id);
    ++finished_;
    std::printf("%s  %-13s N=%u T=%u: %zu of %zu prompts%s",
                ::isatty(STDOUT_FILENO) != 0 ? "\r" : "", row_.variant.c_str(), row_.shard_size,
                row_.decode_tp, finished_, row_.prompts,
                ::isatty(STDOUT_FILENO) != 0 && finished_ < row_.prompts ? "" : "\n");
    std::fflush(stdout);
    return {};
  }

  const Options& options_;
  const Variant& variant_;
  RoleOptions role_;
  std::vector<std::string>& trace_files_;
  Row row_;
  std::vector<RankProcess> ranks_;  // prefill ranks, then decode ranks
  PageAllocator* allocator_{nullptr};
  std::uint64_t first_room_{0};  // numbers of rooms differ from run to run, for the trace
  std::map<std::uint64_t, Room> rooms_;
  std::size_t finished_{0};
};

std::string percent(std::size_t right, std::size_t answers) {
  return answers == 0 ? "n/a"
                      : fmt::format("{:.2f} %", 100.0 * static_cast<double>(right) /
                                                    static_cast<double>(answers));
}

void print_table(const std::vector<Row>& rows) {
  std::printf("\n%-13s %2s %2s %8s %11s %10s %10s %8s %8s %9s %7s %9s %s\n", "variant", "N", "T",
              "prompts", "pages/rank", "unsplit", "split", "tokens", "logits", "moved", "GB/s",
              "first tok", "path");
  for (const Row& row : rows) {
    std::vector<double> times = row.first_token_ms;
    std::sort(times.begin(), times.end());
    const auto same = [&](std::size_t count) {
      return count == row.prompts ? std::string{"same"}
                                  : fmt::format("{} differ", row.prompts - count);
    };
    std::printf(
        "%-13s %2u %2u %8zu %11s %10s %10s %8s %8s %6.2f MB %7.2f %6.0f ms %s\n",
        row.variant.c_str(), row.shard_size, row.decode_tp, row.prompts, row.pages_per_rank.c_str(),
        percent(row.right_unsplit, row.answers).c_str(),
        percent(row.right_split, row.answers).c_str(), same(row.same_tokens).c_str(),
        same(row.same_logits).c_str(), static_cast<double>(row.bytes) / 1e6,
        row.wire_ns == 0 ? 0.0 : static_cast<double>(row.bytes) / static_cast<double>(row.wire_ns),
        times.empty() ? 0.0 : times[times.size() / 2],
        fmt::format("{}", fmt::join(row.paths, "+")).c_str());
  }
  std::printf(
      "\nN context parallel prefill ranks, each with its share of the pages; T tensor parallel "
      "decode ranks,\neach with its share of the KV heads (latent KV has one head, and each has "
      "it).\n"
      "unsplit, split: share of recall answers that are right. GB/s: bytes over the time of "
      "their fetches.\n"
      "first tok: median time from the request to its first token on the decode rank, queueing "
      "included.\n");
  for (const Row& row : rows)
    std::printf("last pull, %s N=%u T=%u: %s\n", row.variant.c_str(), row.shard_size, row.decode_tp,
                row.slowest.c_str());
}

int run_demo(const Options& options) {
  std::printf("kvshard-demo: %u prompts, page size %u tokens, chunks of %u tokens, %s memory\n",
              options.prompts, options.role.page_size, options.role.chunk_tokens,
              options.role.memory.c_str());
  Process registry_process;
  const auto registry = options.registry.empty() ? start_registry(registry_process)
                                                 : Result<std::string>{options.registry};
  if (!registry) {
    std::fprintf(stderr, "kvshard-demo: %s\n", registry.error().message.c_str());
    return 1;
  }
  std::printf("registry at %s\n", registry->c_str());
  std::vector<Row> rows;
  std::vector<std::string> trace_files;
  std::uint64_t epoch = 0;
  for (const std::string& model : options.models) {
    const auto variant = make_variant(model, options);
    if (!variant) {
      std::fprintf(stderr, "kvshard-demo: %s: %s\n", model.c_str(),
                   variant.error().message.c_str());
      return 1;
    }
    for (const std::uint32_t shard_size : options.shard_sizes) {
      for (const std::uint32_t decode_tp : options.decode_tps) {
        const auto row =
            Run{options, *variant, shard_size, decode_tp, *registry, ++epoch, trace_files}.run();
        if (!row) {
          std::fprintf(stderr, "\nkvshard-demo: %s N=%u T=%u: %s\n", variant->name.c_str(),
                       shard_size, decode_tp, row.error().message.c_str());
          return 1;
        }
        rows.push_back(*row);
      }
    }
  }
  print_table(rows);
  if (!options.trace.empty()) {
    if (const Status merged = trace::merge_files(trace_files, options.trace); !merged) {
      std::fprintf(stderr, "kvshard-demo: %s\n", merged.error().message.c_str());
      return 1;
    }
  }
  const bool good =
      std::all_of(rows.begin(), rows.end(), [](const Row& row) { return row.good(); });
  std::printf("%s\n", good ? "PASS: every split run repeats the unsplit one, bit for bit"
                           : "FAIL: a split run differs from the unsplit one");
  return good ? 0 : 1;
}

void add_role_options(CLI::App& app, RoleOptions& role) {
  app.add_option("--page-size", role.page_size, "tokens in a page")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("--pool-pages", role.pool_pages, "usable pages of each prefill rank")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--chunk", role.chunk_tokens, "tokens computed and published at once")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--memory", role.memory, "where pages lie")
      ->check(CLI::IsMember({"host", "cuda"}))
      ->capture_default_str();
  app.add_option("--path", role.path, "how bytes travel")
      ->check(CLI::IsMember({"auto", "get", "am", "mapped"}))
      ->capture_default_str();
}

void add_child_options(CLI::App& app, RoleOptions& role) {
  add_role_options(app, role);
  app.add_option("--registry", role.registry)->required();
  app.add_option("--group", role.group)->required();
  app.add_option("--epoch", role.epoch)->required();
  app.add_option("--rank", role.rank)->required();
  app.add_option("--shard-size", role.shard_size)->required();
  app.add_option("--decode-tp", role.decode_tp)->required();
  app.add_option("--model", role.model)->required();
  app.add_option("--trace", role.trace);
}

int main(int argc, char** argv) {
  Options options;
  CLI::App app{"A real small model decodes over N page shards, and must say what it says unsplit."};
  app.add_option("--shards", options.shard_sizes, "prefill ranks N, each with every N-th page")
      ->delimiter(',')
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--decode-tp", options.decode_tps,
                 "decode ranks T, each with its share of the heads; divides the model's")
      ->delimiter(',')
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--model", options.models,
                 "checkpoints (ours or llama2.c's); default: both trained variants")
      ->check(CLI::ExistingFile);
  app.add_option("--registry", options.registry,
                 "where ranks find each other: host:port, or etcd://a:1,b:2/prefix; default: a "
                 "kvshard-registry of the demo's own");
  app.add_option("--prompts", options.prompts, "prompts for each row")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--count", options.count, "tokens to decode for each prompt")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--trace", options.trace, "where a trace of all ranks goes: see kvshard-trace");
  app.add_flag("--damage", options.damage,
               "spoil one landed page of one prompt: the demo must then fail");
  add_role_options(app, options.role);
  CLI::App* const prefill = app.add_subcommand("prefill", "")->group("");
  CLI::App* const decode = app.add_subcommand("decode", "")->group("");
  RoleOptions role;
  add_child_options(*prefill, role);
  add_child_options(*decode, role);
  CLI11_PARSE(app, argc, argv);
  if (*prefill || *decode) {
    Channel channel{UniqueFd{3}};
    return *prefill ? run_prefill(role, channel) : run_decode(role, channel);
  }
  if (options.models.empty())
    options.models = {TINY_LLM_MODELS_DIR "/grouped.bin", TINY_LLM_MODELS_DIR "/latent.bin"};
  return run_demo(options);
}

}  // namespace
}  // namespace demo

int main(int argc, char** argv) {
  return demo::main(argc, argv);
}
