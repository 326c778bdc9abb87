#include "transport/ucx/context.hpp"

#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "base/log.hpp"
#include "base/try.hpp"

namespace kvshard::ucx {
namespace {

// An option's name without the variable's prefix UCX_, and for some without a second one.
struct Setting {
  const char* name;
  const char* value;
  const char* second_prefix{""};
};

bool has_rdma_devices() {
  std::error_code error;
  const std::filesystem::directory_iterator devices{"/sys/class/infiniband", error};
  return !error && devices != std::filesystem::directory_iterator{};
}

// Only what this machine and this UCX know: for an option that no transport took, UCX itself prints
// a warning, and 1.13 takes any name.
std::vector<Setting> settings_for(const TransportOptions& options) {
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  ucp_get_version(&major, &minor, &release);
  // A peer that hangs shows on our control connection; this finds one whose host vanished.
  std::vector<Setting> settings{{"KEEPALIVE_INTERVAL", "1s"}};
  if (major > 1 || minor >= 16) settings.push_back({"MAX_RMA_RAILS", "2"});
  // Without it a get from GPU memory on the same host is emulated, though cuda_ipc could do it.
  if (options.cuda_device >= 0) settings.push_back({"CUDA_IPC_ENABLE_GET_ZCOPY", "on"});
  if (has_rdma_devices()) {
    // UCX 1.13 looks these up in each transport's own table: it knows RC_RETRY_COUNT, and takes no
    // notice of RC_VERBS_RETRY_COUNT, though both are variables.
    // The default of 7 retries means for ever on Soft-RoCE: a dead peer would never be reported.
    settings.push_back({"RC_RETRY_COUNT", "6"});
    settings.push_back({"RC_TIMEOUT", "250ms"});
    // Keepalive of rc goes over ud; its default of 30 s comes on top of the interval. Not much shorter: a
    // peer that only answers late while a connection is made trips an assertion of UCX 1.13.
    settings.push_back({"UD_TIMEOUT", "10s"});
    // UCX before 1.19 misreads the IP version of RoCE packets, except from mlx5, and drops them
    // all.
    if (major == 1 && minor < 19) settings.push_back({"UD_ETH_DGID_CHECK", "n"});
    // Its cache of registrations would leave memory that we withdrew readable by old rkeys. Costs a
    // registration for each get; later versions use the one that we made (see memory.hpp).
    if (major == 1 && minor < 16) settings.push_back({"REG_METHODS", "direct", "IB_"});
  }
  return settings;
}

// All transports' flavours of an option ("UCX_RC_TIMEOUT", "UCX_RC_VERBS_TIMEOUT") count as this one.
bool user_set(const Setting& setting) {
  const std::string name = fmt::format("UCX_{}{}", setting.second_prefix, setting.name);
  const auto flavour_at = name.find('_', std::string_view{"UCX_"}.size()) + 1;
  for (const auto* const flavour : {"", "VERBS_", "MLX5_"}) {
    if (std::getenv(std::string{name}.insert(flavour_at, flavour).c_str()) != nullptr) return true;
  }
  return false;
}

struct ConfigDeleter {
  void operator()(ucp_config_t* config) const noexcept { ucp_config_release(config); }
};

}  // namespace

Result<UcpContext> create_context(const TransportOptions& options) {
  ucp_config_t* raw_config = nullptr;
  if (const auto status = ucp_config_read(nullptr, nullptr, &raw_config); status != UCS_OK)
    return ucx_error("ucp_config_read", status);
  const std::unique_ptr<ucp_config_t, ConfigDeleter> config{raw_config};
  for (const auto& setting : settings_for(options)) {
    if (user_set(setting)) continue;
    const auto status = ucp_config_modify(config.get(), setting.name, setting.value);
    if (status != UCS_OK)
      log::debug("ucx option not set: {}={}: {}", setting.name, setting.value,
                 ucs_status_string(status));
  }

  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
  params.features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  params.name = "kvshard";
  ucp_context_h context = nullptr;
  if (const auto status = ucp_init(&params, config.get(), &context); status != UCS_OK)
    return ucx_error("ucp_init", status);
  return UcpContext{context};
}

Result<UcpWorker> create_worker(ucp_context_h context) {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  ucp_worker_h worker = nullptr;
  if (const auto status = ucp_worker_create(context, &params, &worker); status != UCS_OK)
    return ucx_error("ucp_worker_create", status);
  return UcpWorker{worker};
}

}  // namespace kvshard::ucx
