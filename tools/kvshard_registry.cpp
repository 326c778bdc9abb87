#include <CLI/CLI.hpp>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <string>

#include "kvshard/registry.hpp"

// Serves a registry until SIGINT or SIGTERM.
int main(int argc, char** argv) {
  kvshard::RegistryServerOptions options;
  std::int64_t time_to_live_ms = options.time_to_live.count();
  CLI::App app{
      "kvshard-registry: where prefill ranks announce themselves and decode ranks find them"};
  app.add_option("--host", options.host, "IP address to listen on; 0.0.0.0 for all")
      ->capture_default_str();
  app.add_option("--port", options.port, "port; 0 takes a free one")->capture_default_str();
  app.add_option("--ttl-ms", time_to_live_ms, "a rank that does not renew for so long is dropped")
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  options.time_to_live = std::chrono::milliseconds{time_to_live_ms};

  // Blocked before the server starts its thread, which inherits the mask: sigwait() alone takes
  // them.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);

  auto server = kvshard::RegistryServer::start(options);
  if (!server) {
    std::fprintf(stderr, "kvshard-registry: %s\n", server.error().message.c_str());
    return 1;
  }
  std::printf("kvshard-registry: listening on %s\n", server.value()->address().c_str());
  std::fflush(stdout);
  int signal = 0;
  sigwait(&signals, &signal);
  return 0;
}
