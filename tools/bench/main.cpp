// kvshard-bench: how fast pages move here, and why. `pull` measures whole pulls between processes, `sweep`
// looks for the best staging, `replay` runs a recorded request trace.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "bench/config.hpp"
#include "bench/pull.hpp"
#include "bench/replay.hpp"
#include "bench/report.hpp"
#include "bench/roles.hpp"
#include "bench/sweep.hpp"
#include "bench/trace.hpp"

namespace kvshard::bench {
namespace {

int fail(const Error& error) {
  fmt::print(stderr, "kvshard-bench: {}: {}\n", to_string(error.code), error.message);
  return 1;
}

void add_pull_options(CLI::App& app, PullConfig& config) {
  std::vector<std::string> models;
  for (const ModelShape& model : model_shapes()) models.emplace_back(model.name);
  app.add_option("--model", config.model, "whose KV cache")
      ->check(CLI::IsMember(models))
      ->capture_default_str();
  app.add_option("--layers", config.layers, "so many layers of it; 0: all")
      ->check(CLI::Range(0, 1024));
  app.add_option("--page-size", config.page_size, "tokens in a page")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("--tokens", config.tokens, "tokens of a request")
      ->check(CLI::Range(1, 1 << 22))
      ->capture_default_str();
  app.add_option("--fragmentation", config.fragmentation, "share of pages that lie scattered")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  app.add_option("--prefill-tp", config.prefill_tp, "prefill ranks that share heads, of each shard")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--decode-tp", config.decode_tp, "decode ranks, which share heads")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--chunk-tokens", config.chunk_tokens, "published at once; 0: all")
      ->check(CLI::Range(0, 1 << 22))
      ->capture_default_str();
  app.add_option("--concurrency", config.concurrency, "requests pulled at once")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--path", config.path, "how bytes travel")
      ->check(CLI::IsMember({"auto", "get", "am", "mapped"}))
      ->capture_default_str();
  app.add_option("--memory", config.memory, "where pages and slots lie")
      ->check(CLI::IsMember({"host", "cuda"}))
      ->capture_default_str();
  app.add_option("--devices", config.devices, "GPUs that ranks are spread over")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--repeat", config.repeat, "timed rounds")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--warmup", config.warmup, "rounds before that")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  app.add_flag("!--no-baselines", config.baselines, "ours only");
}

class PullCommand {
 public:
  explicit PullCommand(CLI::App& app)
      : app_{*app.add_subcommand("pull", "whole pulls between rank processes, beside baselines")} {
    add_pull_options(app_, config_);
    app_.add_option("--prefill", prefill_, "page shards; several: one measure for each")
        ->delimiter(',')
        ->check(CLI::Range(1, 64))
        ->capture_default_str();
    app_.add_option("--slot-bytes", config_.slot_bytes, "KV bytes of a staging slot")
        ->transform(CLI::AsSizeValue(false))
        ->capture_default_str();
    app_.add_option("--slots", config_.slots, "staging slots for each peer")
        ->check(CLI::Range(1, 256))
        ->capture_default_str();
    app_.add_option("--window", config_.window, "slots that one pull may hold on each rank")
        ->check(CLI::Range(1, 256))
        ->capture_default_str();
    app_.add_option("--mapped-piece-bytes", config_.mapped_piece_bytes,
                    "KV bytes that a decode rank which maps the pool copies at once")
        ->transform(CLI::AsSizeValue(false));
    app_.add_option("--busy-poll-us", config_.busy_poll_us,
                    "how long ranks, and the engine that waits for a pull, poll before they sleep")
        ->capture_default_str();
    app_.add_option("--page-operations", config_.page_operations,
                    "single-page gets to time as a baseline, at most; 0: none")
        ->capture_default_str();
    app_.add_flag("--one-page", one_page_, "requests of one page: latency from PULL to completion");
    app_.add_option("--trace", trace_, "where a trace of all ranks goes; for one --prefill");
    app_.add_option("--json", json_, "where results go, one line each; -: stdout")
        ->capture_default_str();
  }

  [[nodiscard]] bool asked() const { return app_.parsed(); }

  int run() {
    if (one_page_) {
      config_.tokens = config_.page_size;
      if (app_.count("--repeat") == 0) config_.repeat = 1000;
    }
    if (!trace_.empty() && prefill_.size() > 1)
      return fail({ErrorCode::invalid_argument, "--trace takes one measure: one --prefill"});
    std::string lines;
    for (const std::uint32_t shards : prefill_) {
      config_.prefill = shards;
      const auto result = measure_pull(config_, trace_);
      if (!result) return fail(result.error());
      fmt::print(stderr, "{}", pull_verdict(*result));
      lines += result->dump() + "\n";
    }
    const Status written = write_text(json_, lines);
    return written ? 0 : fail(written.error());
  }

 private:
  CLI::App& app_;
  PullConfig config_;
  std::vector<std::uint32_t> prefill_{1};
  bool one_page_{false};
  std::string json_{"-"}, trace_;
};

class SweepCommand {
 public:
  explicit SweepCommand(CLI::App& app)
      : app_{*app.add_subcommand("sweep", "looks for the slots that suit a pull")} {
    config_.pull.repeat = 10;
    config_.pull.page_operations = 0;
    add_pull_options(app_, config_.pull);
    app_.add_option("--prefill", config_.pull.prefill, "page shards")
        ->check(CLI::Range(1, 64))
        ->capture_default_str();
    app_.add_option("--slot-bytes", config_.slot_bytes, "slot sizes to try, KV bytes")
        ->delimiter(',')
        ->transform(CLI::AsSizeValue(false));
    app_.add_option("--slots", config_.slots, "slot counts to try")
        ->delimiter(',')
        ->check(CLI::Range(1, 256));
    app_.add_option("--window", config_.windows, "windows to try")
        ->delimiter(',')
        ->check(CLI::Range(1, 256));
    app_.add_option("--json", json_, "where the result goes; -: stdout")->capture_default_str();
    app_.add_option("--svg", svg_, "where a picture of it goes");
  }

  [[nodiscard]] bool asked() const { return app_.parsed(); }

  int run() {
    const auto sweep = run_sweep(config_);
    if (!sweep) return fail(sweep.error());
    fmt::print(stderr, "{}", sweep_verdict(*sweep));
    Status written = write_text(json_, sweep->dump() + "\n");
    if (written && !svg_.empty()) written = write_text(svg_, sweep_svg(*sweep));
    return written ? 0 : fail(written.error());
  }

 private:
  CLI::App& app_;
  SweepConfig config_;
  std::string json_{"-"}, svg_;
};

class ReplayCommand {
 public:
  explicit ReplayCommand(CLI::App& app)
      : app_{*app.add_subcommand(
            "replay", "a recorded trace through allocator, prefix cache and transfers")} {
    app_.add_option("trace", config_.trace, "JSON lines, one request each")
        ->required()
        ->check(CLI::ExistingFile);
    app_.add_option("--limit", limit_, "so many requests of it; 0: all");
    app_.add_option("--prefill", config_.shards, "page shards")
        ->check(CLI::Range(2, 64))
        ->capture_default_str();
    app_.add_option("--pool-tokens", config_.pool_tokens, "that a whole group can cache")
        ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1} << 36))
        ->capture_default_str();
    app_.add_option("--page-size", config_.page_size, "tokens in a page; divides 512")
        ->check(CLI::Range(1, 512))
        ->capture_default_str();
    app_.add_option("--in-flight", config_.in_flight, "requests that run at once")
        ->check(CLI::Range(1, 4096))
        ->capture_default_str();
    app_.add_option("--layers", config_.layers, "of the small model")
        ->check(CLI::Range(1, 1024))
        ->capture_default_str();
    app_.add_option("--head-bytes", config_.head_bytes,
                    "of a token in one of a layer's two buffers")
        ->check(CLI::Range(8, 1 << 16))
        ->capture_default_str();
    app_.add_option("--slot-bytes", config_.slot_bytes, "KV bytes of a staging slot")
        ->transform(CLI::AsSizeValue(false))
        ->capture_default_str();
    app_.add_option("--transport", transport_, "how slots travel")
        ->check(CLI::IsMember({"loopback", "ucx"}))
        ->capture_default_str();
    app_.add_option("--json", json_, "where the result goes; -: stdout")->capture_default_str();
    app_.add_option("--svg", svg_, "where a picture of pool use goes");
  }

  [[nodiscard]] bool asked() const { return app_.parsed(); }

  int run() {
    if (transport_ == "ucx") config_.transport = TransportOptions::Kind::ucx;
    const auto trace = read_trace_file(config_.trace, limit_);
    if (!trace) return fail(trace.error());
    config_.trace = std::filesystem::path{config_.trace}.filename();
    const auto replay = replay_trace(config_, *trace);
    if (!replay) return fail(replay.error());
    fmt::print(stderr, "{}", replay_verdict(*replay));
    Status written = write_text(json_, replay->dump() + "\n");
    if (written && !svg_.empty()) written = write_text(svg_, replay_svg(*replay));
    return written ? 0 : fail(written.error());
  }

 private:
  CLI::App& app_;
  ReplayConfig config_;
  std::size_t limit_{0};
  std::string transport_{"loopback"};
  std::string json_{"-"}, svg_;
};

int main(int argc, char** argv) {
  CLI::App app{"How fast KV pages move here, and why."};
  app.require_subcommand(1);
  PullCommand pull{app};
  SweepCommand sweep{app};
  ReplayCommand replay{app};
  const CLI::App* const prefill_rank = app.add_subcommand("prefill-rank", "")->group("");
  const CLI::App* const decode_rank = app.add_subcommand("decode-rank", "")->group("");
  CLI11_PARSE(app, argc, argv);
  if (*prefill_rank || *decode_rank) {
    Channel channel{UniqueFd{3}};
    return *prefill_rank ? run_prefill(channel) : run_decode(channel);
  }
  return pull.asked() ? pull.run() : sweep.asked() ? sweep.run() : replay.run();
}

}  // namespace
}  // namespace kvshard::bench

int main(int argc, char** argv) {
  return kvshard::bench::main(argc, argv);
}
