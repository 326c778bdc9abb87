#include "transport/ucx/lanes.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <memory>

namespace kvshard::ucx {

std::vector<std::string> parse_transports(std::string_view endpoint_info) {
  // "#   lane[0]:  1:tcp/lo.0 md[0]  -> md[0]/tcp/sysdev[255] am am_bw#0 wireup"
  std::vector<std::string> found;
  while (!endpoint_info.empty()) {
    auto line = endpoint_info.substr(0, endpoint_info.find('\n'));
    endpoint_info.remove_prefix(std::min(line.size() + 1, endpoint_info.size()));
    const auto lane = line.find("lane[");
    const auto number = lane == line.npos ? line.npos : line.find("]:", lane);
    const auto colon = number == line.npos ? line.npos : line.find(':', number + 2);
    const auto slash = colon == line.npos ? line.npos : line.find('/', colon);
    if (slash == line.npos) continue;
    auto name = line.substr(colon + 1, slash - colon - 1);
    if (!name.empty() && std::find(found.begin(), found.end(), name) == found.end())
      found.emplace_back(name);
  }
  return found;
}

std::vector<std::string> transports_of(ucp_ep_h endpoint) {
  char* text = nullptr;
  std::size_t size = 0;
  std::FILE* const stream = ::open_memstream(&text, &size);
  if (stream == nullptr) return {};
  ucp_ep_print_info(endpoint, stream);
  std::fclose(stream);  // makes text and size final
  const std::unique_ptr<char, decltype(&std::free)> owned{text, &std::free};
  return parse_transports({text, size});
}

bool reads_natively(std::string_view transport, MemoryKind from, MemoryKind to) noexcept {
  constexpr std::array<std::string_view, 4> kNetworks{"rc", "dc", "gga", "srd"};
  constexpr std::array<std::string_view, 3> kBetweenGpus{"cuda_ipc", "rocm_ipc", "ze_ipc"};
  constexpr std::array<std::string_view, 3> kBetweenHosts{"cma", "knem", "xpmem"};
  // "rc_verbs" and "rc_mlx5" are flavours of "rc".
  const auto is = [&](std::string_view native) {
    return transport == native ||
           (transport.starts_with(native) && transport.substr(native.size()).starts_with('_'));
  };
  if (std::ranges::any_of(kNetworks, is)) return true;
  return from == to &&
         std::ranges::any_of(from == MemoryKind::cuda ? kBetweenGpus : kBetweenHosts, is);
}

}  // namespace kvshard::ucx
