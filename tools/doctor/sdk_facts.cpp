#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <sstream>

#include "doctor/facts.hpp"
#ifdef KVSHARD_HAVE_UCX
#include <ucp/api/ucp.h>
#endif
#ifdef KVSHARD_HAVE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace kvshard::doctor {

#ifdef KVSHARD_HAVE_UCX

namespace {

struct ContextDeleter {
  void operator()(ucp_context_h context) const noexcept { ucp_cleanup(context); }
};
using Context = std::unique_ptr<ucp_context, ContextDeleter>;

// With the features that a rank asks for, which decide what UCX takes.
Context make_context(bool as_user_set, std::string& error) {
  ucp_config_t* config = nullptr;
  ucs_status_t status = ucp_config_read(nullptr, nullptr, &config);
  if (status == UCS_OK && !as_user_set) {
    (void)ucp_config_modify(config, "TLS", "all");
    (void)ucp_config_modify(config, "NET_DEVICES", "all");
  }
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  ucp_context_h context = nullptr;
  if (status == UCS_OK) status = ucp_init(&params, config, &context);
  if (config != nullptr) ucp_config_release(config);
  if (status == UCS_OK) return Context{context};
  error = fmt::format("ucp_init: {}", ucs_status_string(status));
  return {};
}

// UCP tells its components and devices in this text only:
//   "#     component 1  :  tcp" and "#      resource 0  :  md 0  dev 0  flags -- tcp/eth0"
void read_info(const Context& context, std::vector<std::string>* components,
               std::vector<std::string>& devices) {
  char* text = nullptr;
  std::size_t size = 0;
  std::FILE* const stream = ::open_memstream(&text, &size);
  if (stream == nullptr) return;
  ucp_context_print_info(context.get(), stream);
  std::fclose(stream);  // makes text and size final
  std::istringstream lines{std::string{text, size}};
  std::free(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words{line};
    std::string hash, kind, number, last;
    words >> hash >> kind >> number;
    for (std::string word; words >> word;) last = word;
    if (kind == "component" && components != nullptr) components->push_back(last);
    if (kind == "resource") devices.push_back(last);
  }
}

}  // namespace

UcxFacts ucx_facts() {
  UcxFacts facts{.built = true};
  unsigned major = 0, minor = 0, release = 0;
  ucp_get_version(&major, &minor, &release);
  facts.version = fmt::format("{}.{}.{}", major, minor, release);
  facts.headers = fmt::format("{}.{}", UCP_API_MAJOR, UCP_API_MINOR);
  std::string ignored;
  if (const Context all = make_context(false, ignored))
    read_info(all, &facts.components, facts.all_devices);
  const Context context = make_context(true, facts.error);
  if (!context) return facts;
  read_info(context, nullptr, facts.devices);
  ucp_context_attr_t attributes{};
  attributes.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
  if (ucp_context_query(context.get(), &attributes) == UCS_OK)
    facts.cuda_memory = (attributes.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA)) != 0;
  return facts;
}

#else

UcxFacts ucx_facts() {
  return {};
}

#endif

#ifdef KVSHARD_HAVE_CUDA

CudaFacts cuda_facts() {
  CudaFacts facts{.built = true};
  const auto name = [](int version) {
    return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
  };
  int driver = 0, runtime = 0, count = 0;
  if (cudaDriverGetVersion(&driver) == cudaSuccess && driver > 0) facts.driver = name(driver);
  if (cudaRuntimeGetVersion(&runtime) == cudaSuccess) facts.runtime = name(runtime);
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    facts.error = cudaGetErrorString(error);
    return facts;
  }
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) continue;
    Gpu gpu{.name = properties.name,
            .capability = fmt::format("{}.{}", properties.major, properties.minor),
            .peers = {}};
    for (int peer = 0; peer < count; ++peer) {
      int reachable = 0;
      if (peer != device && cudaDeviceCanAccessPeer(&reachable, device, peer) == cudaSuccess &&
          reachable != 0)
        gpu.peers.push_back(static_cast<std::uint32_t>(peer));
    }
    facts.gpus.push_back(std::move(gpu));
  }
  void* pool = nullptr;
  cudaIpcMemHandle_t handle{};
  cudaError_t error = cudaMalloc(&pool, std::size_t{2} << 20);
  if (error == cudaSuccess) error = cudaIpcGetMemHandle(&handle, pool);
  if (error != cudaSuccess) facts.ipc_error = cudaGetErrorString(error);
  (void)cudaFree(pool);
  return facts;
}

#else

CudaFacts cuda_facts() {
  return {};
}

#endif

}  // namespace kvshard::doctor
