#include "support/registry_conformance.hpp"

#include "registry/etcd_cluster.hpp"

namespace kvshard::testing {
namespace {

class HttpService final : public RegistryService {
 public:
  explicit HttpService(std::chrono::seconds time_to_live) : time_to_live_{time_to_live} {
    start_again();
  }
  [[nodiscard]] std::string address() const override { return "http://" + server_->address(); }
  std::unique_ptr<Registry> connect() override {
    return make_http_registry(server_->address()).value();
  }
  void kill() override {
    port_ = http::parse_address(server_->address()).value().port;
    server_.reset();
  }
  void start_again() override {
    server_ = RegistryServer::start({.port = port_, .time_to_live = time_to_live_}).value();
  }

 private:
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

std::unique_ptr<RegistryService> start_http(std::chrono::seconds time_to_live) {
  return std::make_unique<HttpService>(time_to_live);
}
std::unique_ptr<RegistryService> start_etcd(std::chrono::seconds time_to_live) {
  if (!etcd_is_installed()) return nullptr;
  return std::make_unique<EtcdService>(time_to_live);
}

const auto kRegistries =
    ::testing::Values(RegistryKind{"http", start_http}, RegistryKind{"etcd", start_etcd});
std::string name(const ::testing::TestParamInfo<RegistryKind>& kind) {
  return kind.param.name;
}
INSTANTIATE_TEST_SUITE_P(Registries, RegistryConformance, kRegistries, name);
INSTANTIATE_TEST_SUITE_P(Registries, RegistryExpiryConformance, kRegistries, name);

}  // namespace
}  // namespace kvshard::testing
