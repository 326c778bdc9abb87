#include <fmt/format.h>
#include <linux/capability.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "doctor/facts.hpp"

namespace kvshard::doctor {
namespace {

namespace fs = std::filesystem;

std::string first_line(const fs::path& path) {
  std::ifstream file{path};
  std::string line;
  std::getline(file, line);
  return line;
}

// The value of "key: value" in a file of such lines.
std::string field(const fs::path& path, std::string_view key) {
  std::ifstream file{path};
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(key)) continue;
    const auto at = line.find_first_not_of(" \t", key.size());
    return at == line.npos ? "" : line.substr(at);
  }
  return "";
}

std::vector<fs::path> entries(const fs::path& directory) {
  std::error_code error;
  std::vector<fs::path> found;
  for (fs::directory_iterator each{directory, error}; !error && each != fs::directory_iterator{};
       each.increment(error))
    found.push_back(each->path());
  std::ranges::sort(found);
  return found;
}

// Quotas are of cgroup version 2: the strictest from this process's group up to the root.
double usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  double cpus = 1;
  if (::sched_getaffinity(0, sizeof set, &set) == 0) cpus = CPU_COUNT(&set);
  const fs::path root{"/sys/fs/cgroup"};
  fs::path group = root / fs::path{field("/proc/self/cgroup", "0::/")};
  for (;; group = group.parent_path()) {
    double quota = 0, period = 0;  // "max 100000" is none
    const std::string limit = first_line(group / "cpu.max");
    if (std::sscanf(limit.c_str(), "%lf %lf", &quota, &period) == 2 && period > 0)
      cpus = std::min(cpus, quota / period);
    if (group == root || !group.has_relative_path()) return cpus;
  }
}

std::uint64_t soft_limit(__rlimit_resource resource) {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0) return 0;
  return limit.rlim_cur == RLIM_INFINITY ? UINT64_MAX : limit.rlim_cur;
}

bool capable(unsigned capability) {
  std::uint64_t effective = 0;
  const std::string text = field("/proc/self/status", "CapEff:");
  return std::sscanf(text.c_str(), "%lx", &effective) == 1 && (effective >> capability & 1) != 0;
}

// The first user namespace maps every id to itself.
bool in_user_namespace() {
  std::uint64_t inside = 0, outside = 0, count = 0;
  const std::string map = first_line("/proc/self/uid_map");
  return std::sscanf(map.c_str(), "%lu %lu %lu", &inside, &outside, &count) == 3 &&
         (inside != 0 || outside != 0 || count != UINT32_MAX);
}

std::vector<RdmaPort> rdma_ports() {
  std::vector<RdmaPort> found;
  for (const fs::path& device : entries("/sys/class/infiniband")) {
    for (const fs::path& port : entries(device / "ports")) {
      std::string state = first_line(port / "state");  // "4: ACTIVE"
      if (const auto colon = state.find(": "); colon != state.npos) state.erase(0, colon + 2);
      found.push_back({.name = device.filename().string() + ":" + port.filename().string(),
                       .state = state,
                       .link = first_line(port / "link_layer"),
                       .rate = first_line(port / "rate")});
    }
  }
  return found;
}

}  // namespace

HostFacts host_facts() {
  HostFacts facts;
  facts.cpus = usable_cpus();
  facts.memlock = soft_limit(RLIMIT_MEMLOCK);
  facts.may_lock = capable(CAP_IPC_LOCK) && !in_user_namespace();
  facts.may_trace = capable(CAP_SYS_PTRACE);
  facts.ptrace_scope = first_line("/proc/sys/kernel/yama/ptrace_scope");
  facts.open_files = soft_limit(RLIMIT_NOFILE);
  struct statvfs shm {};
  if (::statvfs("/dev/shm", &shm) == 0) facts.shm_free = std::uint64_t{shm.f_bavail} * shm.f_frsize;
  facts.nvidia_driver = field("/proc/driver/nvidia/version", "NVRM version:");
  facts.peermem = fs::exists("/sys/module/nvidia_peermem") || fs::exists("/sys/module/nv_peer_mem");
  facts.rdma = rdma_ports();
  for (char** each = environ; *each != nullptr; ++each) {
    const std::string_view variable{*each};
    const auto equals = variable.find('=');
    if (variable.starts_with("UCX_") && equals != variable.npos)
      facts.environment.emplace(variable.substr(0, equals), variable.substr(equals + 1));
  }
  return facts;
}

}  // namespace kvshard::doctor
