// kvshard-doctor: what stands in the way of pulls on this host, or between two hosts, and what to set.
#include <fmt/format.h>
#include <poll.h>
#include <sys/signalfd.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <string>

#include "base/try.hpp"
#include "doctor/judge.hpp"
#include "doctor/pull.hpp"
#include "kvshard/kvshard.h"
#include "kvshard/log.hpp"
#include "support/process.hpp"

namespace kvshard::doctor {
namespace {

using namespace std::chrono_literals;
using tools::Channel;
using tools::Json;

constexpr auto kFactsLimit = 30s;  // a driver may take ten to start
constexpr auto kPullLimit = 60s;

// ---- the child's side ----------------------------------------------------------------------------

// What UCX or a driver may hang or die in runs here: one task, one answer.
int run_child() {
  Channel channel{UniqueFd{3}};
  ::dup2(2, 1);                  // UCX logs to standard output, which is the report's
  set_log_level(LogLevel::off);  // the answer says it
  const auto task = channel.receive();
  if (!task) return 1;
  const Json& is = *task;
  const SecurityOptions security{is.value("secret_file", ""), is.value("no_secret", false)};
  if (is["do"] == "ucx") return channel.send(ucx_facts()) ? 0 : 1;
  if (is["do"] == "cuda") return channel.send(cuda_facts()) ? 0 : 1;
  if (is["do"] == "pull") {
    const Pulled pulled = pull({.from = {is["host"], is["port"]},
                                .from_memory = is["from"],
                                .to_memory = is["to"],
                                .mapped = is["mapped"],
                                .cuda_device = is["cuda_device"]},
                               security);
    return channel.send({{"measure", pulled.measure}, {"hello", pulled.hello}}) ? 0 : 1;
  }
  const auto served = Served::start({is["host"], is["port"]}, security, is["facts"].get<Facts>());
  if (!served) {
    (void)channel.send({{"failed", served.error().message}});
    return 1;
  }
  if (!channel.send({{"port", served->port()}})) return 1;
  (void)channel.receive();  // until the parent is done with us
  return 0;
}

// ---- the parent's side ---------------------------------------------------------------------------

class Child {
 public:
  Child() : process_{{std::filesystem::read_symlink("/proc/self/exe").string(), "child"}} {}

  Result<Json> ask(const Json& task, std::chrono::milliseconds limit) {
    if (process_.channel().send(task)) {
      pollfd answer{.fd = fd(), .events = POLLIN, .revents = 0};
      if (::poll(&answer, 1, static_cast<int>(limit.count())) != 1)
        return Error{ErrorCode::deadline_exceeded,
                     fmt::format("no answer within {} s", limit.count() / 1000)};
      if (auto got = process_.channel().receive()) {
        if (got->contains("failed"))
          return Error{ErrorCode::unavailable, (*got)["failed"].get<std::string>()};
        return *std::move(got);
      }
    }
    return Error{ErrorCode::unavailable, "the process died; what it said is on standard error"};
  }
  [[nodiscard]] int fd() { return process_.channel().fd(); }

 private:
  tools::RankProcess process_;
};

Facts gather() {
  Facts facts{.kvshard = kvshard_version(), .host = host_facts(), .ucx = {}, .cuda = {}};
  Child ucx, cuda;
  if (const auto told = ucx.ask({{"do", "ucx"}}, kFactsLimit))
    facts.ucx = told->get<UcxFacts>();
  else
    facts.ucx = {.built = true, .error = told.error().message};
  if (const auto told = cuda.ask({{"do", "cuda"}}, kFactsLimit))
    facts.cuda = told->get<CudaFacts>();
  else
    facts.cuda = {.built = true, .error = told.error().message};
  return facts;
}

struct Options {
  std::string address;  // of the peer, or to listen on
  SecurityOptions security;
  bool json{false};
};

Result<Address> parse_address(const std::string& text) {
  const auto colon = text.rfind(':');
  Address address{text.substr(0, colon), 0};
  if (address.host.starts_with('[') && address.host.ends_with(']'))
    address.host = address.host.substr(1, address.host.size() - 2);
  const char* const end = text.data() + text.size();
  if (colon != text.npos && !address.host.empty()) {
    const auto [at, error] = std::from_chars(text.data() + colon + 1, end, address.port);
    if (error == std::errc{} && at == end) return address;
  }
  return Error{ErrorCode::invalid_argument, fmt::format("\"{}\" is not ADDRESS:PORT", text)};
}

Json serve_task(const Address& at, const SecurityOptions& security, const Facts& facts) {
  return {{"do", "serve"},
          {"host", at.host},
          {"port", at.port},
          {"facts", facts},
          {"secret_file", security.secret_file},
          {"no_secret", security.allow_unauthenticated_network}};
}

struct Report {
  Facts ours, peer;
  std::vector<Measure> measures;
  std::vector<Finding> findings;

  // Every pull that both sides have the memory for.
  void measure(const Address& at, const SecurityOptions& security, bool local) {
    const auto pulled = [&](const std::string& from, const std::string& to, std::uint16_t port,
                            bool mapped) {
      Measure measure{.from = from, .to = to, .mapped = mapped};
      Hello hello;
      const int last_gpu = std::max(static_cast<int>(ours.cuda.gpus.size()) - 1, 0);
      Child child;
      const auto told = child.ask({{"do", "pull"},
                                   {"host", at.host},
                                   {"port", port},
                                   {"from", from},
                                   {"to", to},
                                   {"mapped", mapped},
                                   {"cuda_device", last_gpu},
                                   {"secret_file", security.secret_file},
                                   {"no_secret", security.allow_unauthenticated_network}},
                                  kPullLimit);
      if (told) {
        measure = (*told)["measure"].get<Measure>();
        hello = (*told)["hello"].get<Hello>();
      } else {
        measure.error = told.error().message;
      }
      measure.local = local;
      add(measure);
      return hello;
    };
    const Hello hello = pulled("host", "host", at.port, false);
    if (!measures.back().error.empty()) return;  // nothing else would go well
    peer = hello.facts;
    findings.push_back(
        {"round_trip",
         Severity::ok,
         fmt::format("{:.0f} us between the ranks' threads, on the control connection",
                     measures.back().round_trip_us),
         {}});
    const bool gpu = !ours.cuda.gpus.empty();
    if (gpu) pulled("host", "cuda", at.port, false);
    if (!hello.cuda_error.empty())
      add({.from = "cuda", .to = "host", .local = local, .error = hello.cuda_error});
    if (hello.cuda_port == 0) return;
    pulled("cuda", "host", hello.cuda_port, false);
    if (!gpu) return;
    pulled("cuda", "cuda", hello.cuda_port, false);
    if (local) pulled("cuda", "cuda", hello.cuda_port, true);
  }

  void add(const Measure& measure) {
    measures.push_back(measure);
    findings.push_back(judge(measure, ours, measure.local ? ours : peer));
  }

  void print(bool as_json) const {
    if (as_json) {
      Json out{{"status", to_string(worst(findings))}, {"facts", ours}, {"measures", measures}};
      if (!peer.kvshard.empty()) out["peer"] = peer;
      for (const Finding& each : findings)
        out["findings"].push_back({{"check", each.check},
                                   {"status", to_string(each.severity)},
                                   {"found", each.found},
                                   {"advice", each.advice}});
      fmt::print("{}\n", out.dump(-1, ' ', false, Json::error_handler_t::replace));
      return;
    }
    for (const Finding& each : findings) {
      fmt::print("{:<8} {:<18} {}\n", to_string(each.severity), each.check, printable(each.found));
      if (!each.advice.empty()) fmt::print("{:<8} {:<18} > {}\n", "", "", printable(each.advice));
    }
  }

 private:
  // A peer's words do not reach the terminal as commands.
  static std::string printable(std::string text) {
    std::ranges::replace_if(
        text, [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }, ' ');
    return text;
  }
};

int finish(const Report& report, bool json) {
  report.print(json);
  const Severity severity = worst(report.findings);
  return severity == Severity::problem ? 2 : severity == Severity::warning ? 1 : 0;
}

int fail(const Error& error) {
  fmt::print(stderr, "kvshard-doctor: {}\n", error.message);
  return 2;
}

int check_host(const Options& options) {
  Report report;
  report.ours = gather();
  report.findings = judge(report.ours);
  if (report.ours.ucx.built) {
    Child server;
    const auto served = server.ask(serve_task({"127.0.0.1", 0}, {}, report.ours), kPullLimit);
    if (served)
      report.measure({"127.0.0.1", (*served)["port"]}, {}, true);
    else
      report.add({.from = "host", .to = "host", .error = served.error().message});
  }
  report.peer = {};
  return finish(report, options.json);
}

int check_pair(const Options& options) {
  const auto address = parse_address(options.address);
  if (!address) return fail(address.error());
  Report report;
  report.ours = gather();
  report.measure(*address, options.security, false);
  if (!report.peer.kvshard.empty()) {
    // First what each host is, then what they are together.
    std::vector<Finding> all;
    const auto take = [&](std::vector<Finding> findings, const char* side) {
      for (Finding& each : findings)
        all.push_back({side + each.check, each.severity, each.found, each.advice});
    };
    take(judge(report.ours), "here.");
    take(judge(report.peer), "there.");
    take(judge_pair(report.ours, report.peer), "");
    take(std::move(report.findings), "");
    report.findings = std::move(all);
  } else {
    const auto ours = judge(report.ours);
    report.findings.insert(report.findings.begin(), ours.begin(), ours.end());
  }
  return finish(report, options.json);
}

// Until SIGINT or SIGTERM.
int serve(const Options& options) {
  const auto address = parse_address(options.address);
  if (!address) return fail(address.error());
  const Facts facts = gather();
  Child child;
  const auto served = child.ask(serve_task(*address, options.security, facts), kPullLimit);
  if (!served) return fail(served.error());
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  sigprocmask(SIG_BLOCK, &signals, nullptr);
  const UniqueFd signalled{::signalfd(-1, &signals, SFD_CLOEXEC)};
  fmt::print("kvshard-doctor: listening on {}:{}\n",
             options.address.substr(0, options.address.rfind(':')),
             (*served)["port"].get<std::uint16_t>());
  std::fflush(stdout);
  pollfd fds[]{{.fd = signalled.get(), .events = POLLIN, .revents = 0},
               {.fd = child.fd(), .events = POLLIN, .revents = 0}};
  while (::poll(fds, 2, -1) < 0) {
  }
  return fds[0].revents != 0 ? 0 : fail({ErrorCode::unavailable, "the serving process died"});
}

int main(int argc, char** argv) {
  Options options;
  CLI::App app{
      "Checks this host, or a pair of hosts, for what slows or stops pulls, and says what to set.\n"
      "Exits with 0 when all is well, 1 on warnings, 2 on problems."};
  app.require_subcommand(0, 1);
  app.add_flag("--json", options.json, "one JSON object instead of lines");
  const auto secured = [&](CLI::App& command) {
    auto* const secret = command.add_option("--secret-file", options.security.secret_file,
                                            "the secret that both hosts share: docs/security.md");
    command
        .add_flag("--no-secret", options.security.allow_unauthenticated_network,
                  "do without, beyond loopback: anyone may pull the test pages")
        ->excludes(secret);
  };
  options.address = "127.0.0.1:0";
  CLI::App& serving = *app.add_subcommand("serve", "lets another host's `pair` pull from this one");
  serving.add_option("--listen", options.address, "IP address and port; port 0 takes a free one")
      ->capture_default_str();
  secured(serving);
  CLI::App& pairing =
      *app.add_subcommand("pair", "pulls from a host where `kvshard-doctor serve` runs");
  pairing.add_option("address", options.address, "ADDRESS:PORT that it printed")->required();
  pairing.add_flag("--json", options.json, "one JSON object instead of lines");
  secured(pairing);
  const CLI::App* const child = app.add_subcommand("child", "")->group("");
  CLI11_PARSE(app, argc, argv);
  if (*child) return run_child();
  return serving.parsed()   ? serve(options)
         : pairing.parsed() ? check_pair(options)
                            : check_host(options);
}

}  // namespace
}  // namespace kvshard::doctor

int main(int argc, char** argv) {
  return kvshard::doctor::main(argc, argv);
}
