#pragma once

#include <chrono>
#include <memory>
#include <ostream>
#include <stdexcept>
#include <string>

#include "kvshard/registry.hpp"
#include "support/etcd_cluster.hpp"

// The registries that there are, as tests start and lose them.
namespace kvshard::testing {

/// A registry that a test can lose and get back at its address.
class RegistryService {
 public:
  virtual ~RegistryService() = default;
  /// For make_registry().
  [[nodiscard]] virtual std::string address() const = 0;
  virtual std::unique_ptr<Registry> connect() = 0;
  virtual void kill() = 0;
  virtual void start_again() = 0;
};

struct RegistryKind {
  std::string name;
  /// None where it cannot be had; then the tests are skipped.
  std::unique_ptr<RegistryService> (*start)(std::chrono::seconds time_to_live);
};
inline void PrintTo(const RegistryKind& kind, std::ostream* out) {
  *out << kind.name;
}

class HttpService final : public RegistryService {
 public:
  explicit HttpService(std::chrono::seconds time_to_live) : time_to_live_{time_to_live} {
    for (int attempt = 0; attempt < 5 && !server_; ++attempt) {
      port_ = free_port();
      server_ = start();
    }
    if (!server_) throw std::runtime_error("no port for a registry");
  }
  [[nodiscard]] std::string address() const override { return "http://" + host_and_port(); }
  std::unique_ptr<Registry> connect() override {
    return make_http_registry(host_and_port()).value();
  }
  void kill() override { server_.reset(); }
  void start_again() override {
    server_ = start();
    if (!server_) throw std::runtime_error("the registry's port was taken");
  }

 private:
  [[nodiscard]] std::string host_and_port() const { return fmt::format("127.0.0.1:{}", port_); }
  [[nodiscard]] std::unique_ptr<RegistryServer> start() const {
    auto server = RegistryServer::start({.port = port_, .time_to_live = time_to_live_});
    return server ? std::move(server).value() : nullptr;
  }

  const std::chrono::seconds time_to_live_;
  std::uint16_t port_{0};
  std::unique_ptr<RegistryServer> server_;
};

class EtcdService final : public RegistryService {
 public:
  explicit EtcdService(std::chrono::seconds time_to_live) : time_to_live_{time_to_live} {}
  [[nodiscard]] std::string address() const override { return "etcd://" + cluster_.endpoints(); }
  std::unique_ptr<Registry> connect() override {
    return make_etcd_registry(cluster_.endpoints(), {.time_to_live = time_to_live_}).value();
  }
  void kill() override { cluster_.kill(); }
  void start_again() override { cluster_.start_again(); }

 private:
  const std::chrono::seconds time_to_live_;
  EtcdCluster cluster_;
};

inline std::unique_ptr<RegistryService> start_http(std::chrono::seconds time_to_live) {
  return std::make_unique<HttpService>(time_to_live);
}
inline std::unique_ptr<RegistryService> start_etcd(std::chrono::seconds time_to_live) {
  if (!etcd_is_installed()) return nullptr;
  return std::make_unique<EtcdService>(time_to_live);
}

/// For INSTANTIATE_TEST_SUITE_P, with registry_name().
inline const auto kRegistries =
    ::testing::Values(RegistryKind{"http", start_http}, RegistryKind{"etcd", start_etcd});
inline std::string registry_name(const ::testing::TestParamInfo<RegistryKind>& kind) {
  return kind.param.name;
}

}  // namespace kvshard::testing
