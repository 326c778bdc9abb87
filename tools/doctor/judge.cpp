#include "doctor/judge.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <set>
#include <sstream>
#include <tuple>

#include "kvshard/copy_engine.hpp"
#include "kvshard/prefill_rank.hpp"

namespace kvshard::doctor {
namespace {

using Strings = std::vector<std::string>;

constexpr double kMiB = 1 << 20;
/// UCX takes between 4 and 8 MiB of /dev/shm for a worker, however it is used.
constexpr std::uint64_t kShmBytesOfARank = 8U << 20;
/// Seen on a prefill rank over TCP: the control connection, and what UCX opens.
constexpr std::uint64_t kFilesOfAPeer = 3;

// "1.13.1" or "1.13"; zeros if it is neither.
std::tuple<unsigned, unsigned, unsigned> version_of(const std::string& text) {
  unsigned major = 0, minor = 0, release = 0;
  (void)std::sscanf(text.c_str(), "%u.%u.%u", &major, &minor, &release);
  return {major, minor, release};
}

std::string join(const Strings& words) {
  return words.empty() ? "none" : fmt::format("{}", fmt::join(words, ", "));
}

// "tcp/eth0": what stands before the slash, and behind.
std::string transport_of(const std::string& device) {
  return device.substr(0, device.find('/'));
}
std::string name_of(const std::string& device) {
  const auto slash = device.find('/');
  return slash == device.npos ? device : device.substr(slash + 1);
}

// Those that tell when a peer is gone, which a rank asks for. UCX 1.13 to 1.22 do so over a network
// only, and connect no two processes over the others.
bool is_network(const std::string& device) {
  static constexpr std::array kPrefixes{"tcp", "rc", "dc", "ud", "srd", "gga"};
  const std::string transport = transport_of(device);
  return std::ranges::any_of(kPrefixes, [&](const char* prefix) {
    return transport == prefix || transport.starts_with(std::string{prefix} + "_");
  });
}

bool has_device(const Strings& devices, const std::string& name) {
  return std::ranges::any_of(devices,
                             [&](const std::string& each) { return name_of(each) == name; });
}

const std::string* find_variable(const HostFacts& host, const std::string& name) {
  const auto found = host.environment.find(name);
  return found == host.environment.end() ? nullptr : &found->second;
}
bool is_on(const std::string* value) {
  return value != nullptr && std::set<std::string>{"y", "Y", "yes", "on", "1"}.contains(*value);
}
bool is_off(const std::string* value) {
  return value != nullptr && std::set<std::string>{"n", "N", "no", "off", "0"}.contains(*value);
}

Strings active_rdma(const HostFacts& host) {
  Strings names;
  for (const RdmaPort& port : host.rdma)
    if (port.state == "ACTIVE") names.push_back(port.name);
  return names;
}

class Judge {
 public:
  explicit Judge(const Facts& facts) : host_{facts.host}, ucx_{facts.ucx}, cuda_{facts.cuda} {
    add("kvshard", Severity::ok,
        fmt::format("version {}, {} UCX, {} CUDA", facts.kvshard, ucx_.built ? "with" : "without",
                    cuda_.built ? "with" : "without"));
    ucx();
    environment();
    devices();
    rdma();
    cuda();
    gpudirect();
    limits();
  }
  std::vector<Finding> findings;

 private:
  void add(const char* check, Severity severity, std::string found, std::string advice = {}) {
    findings.push_back({check, severity, std::move(found), std::move(advice)});
  }

  void ucx() {
    if (!ucx_.built)
      return add("ucx", Severity::problem, "this kvshard was built without UCX",
                 "build it where UCX's headers are: package libucx-dev, or ucx_DIR for CMake");
    if (!ucx_.error.empty())
      add("ucx", Severity::problem, ucx_.error,
          "unset UCX_* variables, UCX_TLS first; UCX says more on standard error");
    if (ucx_.version.empty()) return;  // its process died
    const auto version = version_of(ucx_.version);
    const bool gpus = !cuda_.gpus.empty();
    const std::string runs = fmt::format("{} runs, headers {}", ucx_.version, ucx_.headers);
    bool fine = ucx_.error.empty();
    const auto complain = [&](Severity severity, const std::string& what, const char* advice) {
      fine = false;
      add("ucx", severity, fmt::format("{}; {}", runs, what), advice);
    };
    if (version < version_of(ucx_.headers))
      complain(Severity::problem, "older than the headers",
               "put the UCX that kvshard was built with first in LD_LIBRARY_PATH");
    if (gpus && !ucx_.cuda_memory)
      complain(
          Severity::problem, fmt::format("no CUDA memory, of components {}", join(ucx_.components)),
          "install a UCX built --with-cuda, all its files, and put it first in LD_LIBRARY_PATH; "
          "UCX_TLS must not leave out cuda");
    if (gpus && version < std::tuple{1U, 16U, 0U})
      complain(Severity::warning, "a get of GPU memory is emulated before 1.16",
               "install UCX 1.16 or newer, built --with-cuda");
    if (gpus && version == std::tuple{1U, 22U, 0U})
      complain(
          Severity::warning,
          "closing one endpoint unmaps GPU memory that others may be reading (openucx/ucx#11744)",
          "install UCX 1.22.1 or newer, or 1.21; until then UCX_TLS=^cuda_ipc is safe and slow");
    if (version < std::tuple{1U, 14U, 0U} && is_on(find_variable(host_, "UCX_PROTO_ENABLE")))
      complain(Severity::problem, "its new protocols (UCX_PROTO_ENABLE) are not finished",
               "unset UCX_PROTO_ENABLE");
    if (fine)
      add("ucx", Severity::ok, fmt::format("{}, components {}", runs, join(ucx_.components)));
  }

  void environment() {
    Strings set;
    for (const auto& [name, value] : host_.environment) set.push_back(name + "=" + value);
    if (!cuda_.gpus.empty() && is_off(find_variable(host_, "UCX_CUDA_IPC_ENABLE_GET_ZCOPY")))
      return add(
          "ucx.settings", Severity::warning,
          "UCX_CUDA_IPC_ENABLE_GET_ZCOPY is off: a get of GPU memory on one host is emulated",
          "unset UCX_CUDA_IPC_ENABLE_GET_ZCOPY; kvshard turns it on");
    if (set.empty())
      return add("ucx.settings", Severity::ok, "no UCX_* variable is set; kvshard sets its own");
    add("ucx.settings", Severity::note, join(set),
        "unset what you do not need: it wins over what kvshard sets (docs/rdma.md)");
  }

  void devices() {
    if (ucx_.all_devices.empty()) return;
    if (const std::string* wanted = find_variable(host_, "UCX_NET_DEVICES")) {
      Strings missing, known;
      std::istringstream names{*wanted};
      for (std::string name; std::getline(names, name, ',');)
        if (name != "all" && name.find_first_of("^*?") == name.npos &&
            !has_device(ucx_.all_devices, name))
          missing.push_back(name);
      for (const std::string& device : ucx_.all_devices)
        if (is_network(device)) known.push_back(device);
      if (!missing.empty())
        add("ucx.devices", Severity::problem,
            fmt::format("UCX_NET_DEVICES names {}, which UCX does not have", join(missing)),
            fmt::format("set UCX_NET_DEVICES to names behind the slash of: {}", join(known)));
    }
    if (!ucx_.error.empty()) return;
    Strings used;
    std::set<std::string> interfaces;
    for (const std::string& device : ucx_.devices) {
      if (!is_network(device)) continue;
      used.push_back(device);
      if (transport_of(device) == "tcp" && name_of(device) != "lo")
        interfaces.insert(name_of(device));
    }
    if (used.empty())
      return add("ucx.devices", Severity::problem,
                 fmt::format("no network among {}: ranks cannot connect, not even on one host",
                             join(ucx_.devices)),
                 "add tcp to UCX_TLS, or unset UCX_TLS and UCX_NET_DEVICES");
    if (std::ranges::all_of(used, [](const std::string& each) { return name_of(each) == "lo"; }))
      return add(
          "ucx.devices", Severity::note,
          fmt::format("{} only: no other host can be reached", join(used)),
          "for several hosts, bring a network interface up and have UCX_NET_DEVICES allow it");
    if (interfaces.size() > 1 && find_variable(host_, "UCX_NET_DEVICES") == nullptr)
      return add("ucx.devices", Severity::note,
                 fmt::format("{}: UCX may take any, and listens on all", join(used)),
                 fmt::format("set UCX_NET_DEVICES to those of the ranks' isolated network, of: {}",
                             fmt::join(interfaces, ",")));
    add("ucx.devices", Severity::ok, join(used));
  }

  void rdma() {
    if (host_.rdma.empty())
      return add("rdma", Severity::ok, "no RDMA device: between hosts bytes go over TCP");
    Strings down, unknown, unused, fine;
    for (const RdmaPort& port : host_.rdma) {
      const std::string text =
          fmt::format("{} ({}, {}, {})", port.name, port.link, port.rate, port.state);
      if (port.state != "ACTIVE")
        down.push_back(text);
      else if (!ucx_.all_devices.empty() && !has_device(ucx_.all_devices, port.name))
        unknown.push_back(text);
      else if (!ucx_.devices.empty() && !has_device(ucx_.devices, port.name))
        unused.push_back(text);
      else
        fine.push_back(text);
    }
    if (!down.empty())
      add("rdma", Severity::warning, fmt::format("not active: {}", join(down)),
          "bring the link up: cable and switch, and on InfiniBand a subnet manager; "
          "`ip link set ... up` for Ethernet");
    if (!unknown.empty())
      add("rdma", Severity::warning, fmt::format("UCX does not see {}", join(unknown)),
          "install a UCX built --with-verbs and the device's provider (ibverbs-providers); "
          "give a container /dev/infiniband");
    if (!unused.empty())
      add("rdma", Severity::warning, fmt::format("UCX is told not to use {}", join(unused)),
          "unset UCX_TLS, or add rc to it; have UCX_NET_DEVICES name the device");
    if (!fine.empty()) add("rdma", Severity::ok, join(fine));
  }

  void cuda() {
    if (!cuda_.built) {
      if (host_.nvidia_driver.empty()) return;
      return add("cuda", Severity::warning,
                 fmt::format("a GPU driver is loaded ({}), but this kvshard has no CUDA",
                             host_.nvidia_driver),
                 "build it where nvcc is, with -DKVSHARD_ENABLE_CUDA=ON");
    }
    if (!cuda_.error.empty() && !host_.nvidia_driver.empty())
      return add("cuda", Severity::problem,
                 fmt::format("{} (driver {}, knows CUDA {}; built with {})", cuda_.error,
                             host_.nvidia_driver, cuda_.driver.empty() ? "none" : cuda_.driver,
                             cuda_.runtime),
                 "update the driver to one that knows the CUDA that kvshard was built with; give a "
                 "container the GPUs (--gpus all); look at CUDA_VISIBLE_DEVICES");
    if (cuda_.gpus.empty()) return add("cuda", Severity::ok, "no GPU");
    Strings names, apart;
    for (std::uint32_t i = 0; i < cuda_.gpus.size(); ++i) {
      const Gpu& gpu = cuda_.gpus[i];
      names.push_back(fmt::format("{} {} (compute {})", i, gpu.name, gpu.capability));
      for (std::uint32_t j = 0; j < cuda_.gpus.size(); ++j)
        if (i != j && std::ranges::find(gpu.peers, j) == gpu.peers.end())
          apart.push_back(fmt::format("{} from {}", j, i));
    }
    add("cuda", Severity::ok,
        fmt::format("{}; driver knows CUDA {}, built with {}", join(names), cuda_.driver,
                    cuda_.runtime));
    if (!cuda_.ipc_error.empty())
      add("cuda.ipc", Severity::warning,
          fmt::format("a cudaMalloc pool cannot be exported: {}", cuda_.ipc_error),
          "GPU pages go through slots and host memory: look for what forbids CUDA IPC here, as "
          "confidential computing does");
    else
      add("cuda.ipc", Severity::ok, "a cudaMalloc pool can be exported");
    if (!apart.empty())
      add("cuda.peers", Severity::warning, fmt::format("not reachable: GPU {}", join(apart)),
          "put ranks that pull from each other on GPUs that reach each other (`nvidia-smi "
          "topo -p2p r`); without NVLink turn ACS off in the PCIe bridges");
    else if (cuda_.gpus.size() > 1)
      add("cuda.peers", Severity::ok, "every GPU reaches every other");
  }

  void gpudirect() {
    const Strings active = active_rdma(host_);
    if (cuda_.gpus.empty() || active.empty()) return;
    const bool open = host_.nvidia_driver.find("Open Kernel Module") != std::string::npos;
    if (host_.peermem || open)
      return add("gpudirect", Severity::ok,
                 host_.peermem ? "nvidia_peermem is loaded" : "open kernel modules: by dmabuf");
    add("gpudirect", Severity::warning,
        fmt::format(
            "{} cannot read GPU memory: nvidia_peermem is not loaded, and the driver is not of "
            "the open kernel modules",
            join(active)),
        "modprobe nvidia_peermem; or install the open kernel modules, on Linux 5.12 or newer");
  }

  void limits() {
    const PrefillOptions defaults;
    const std::uint64_t slot = slot_bytes_for(defaults.slot_payload_bytes);
    const std::uint64_t staging = defaults.slots * slot;
    if (host_.may_lock || host_.memlock == UINT64_MAX)
      add("memlock", Severity::ok, "no limit");
    else if (active_rdma(host_).empty())
      add("memlock", Severity::ok,
          fmt::format("{:.1f} MiB: of no matter without RDMA",
                      static_cast<double>(host_.memlock) / kMiB));
    else if (host_.memlock < 2 * staging)
      add("memlock", Severity::problem,
          fmt::format(
              "{:.1f} MiB may be locked; RDMA locks {:.0f} MiB for a rank's {} slots, and UCX "
              "some of its own",
              static_cast<double>(host_.memlock) / kMiB, static_cast<double>(staging) / kMiB,
              defaults.slots),
          "ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1");
    else
      add("memlock", Severity::ok,
          fmt::format("{:.1f} MiB: for {} slots of 4 MiB, less what UCX locks itself",
                      static_cast<double>(host_.memlock) / kMiB, host_.memlock / slot));

    const bool traces = host_.ptrace_scope.empty() || host_.ptrace_scope == "0" ||
                        host_.ptrace_scope == "1" || (host_.ptrace_scope == "2" && host_.may_trace);
    if (traces)
      add("ptrace", Severity::ok,
          host_.ptrace_scope.empty() ? "not limited: no Yama"
                                     : fmt::format("not limited: scope {}", host_.ptrace_scope));
    else
      add("ptrace", Severity::note,
          fmt::format("scope {}: UCX's CMA is off, which kvshard has no use for",
                      host_.ptrace_scope),
          "nothing for kvshard; other programs with UCX want sysctl kernel.yama.ptrace_scope=1");

    const std::uint64_t files = 64 + kFilesOfAPeer * defaults.limits.max_peers;
    if (host_.open_files < files)
      add("open_files", Severity::note,
          fmt::format("{}: enough for about {} peers of a rank, of {} that it would take",
                      host_.open_files,
                      host_.open_files < 64 ? 0 : (host_.open_files - 64) / kFilesOfAPeer,
                      defaults.limits.max_peers),
          fmt::format("ulimit -n {}; systemd: LimitNOFILE={}", files, files));
    else
      add("open_files", Severity::ok, fmt::format("{}", host_.open_files));

    const std::uint64_t ranks = host_.shm_free / kShmBytesOfARank;
    const bool uses_shm = has_transport("posix");
    const std::string shm =
        fmt::format("{:.1f} MiB free in /dev/shm", static_cast<double>(host_.shm_free) / kMiB);
    if (uses_shm && ranks == 0)
      add("shm", Severity::problem, fmt::format("{}: UCX takes up to 8 MiB for a rank", shm),
          "docker: --shm-size=1g; mount -o remount,size=1g /dev/shm; or UCX_TLS=^posix");
    else if (uses_shm && ranks < 16)
      add("shm", Severity::note, fmt::format("{}: enough for {} ranks", shm, ranks),
          "for more ranks on this host, docker: --shm-size=1g; mount -o remount,size=1g /dev/shm");
    else
      add("shm", Severity::ok, shm);

    const std::string cpus = fmt::format("{:.3g} may be used", host_.cpus);
    if (host_.cpus < 2)
      add("cpus", Severity::warning,
          fmt::format("{}: a rank's progress thread and the engine take turns", cpus),
          "two for each rank: docker --cpus, the cgroup's cpu.max, taskset");
    else
      add("cpus", Severity::ok, cpus);
  }

  [[nodiscard]] bool has_transport(const char* name) const {
    return std::ranges::any_of(ucx_.devices,
                               [&](const std::string& each) { return transport_of(each) == name; });
  }

  const HostFacts& host_;
  const UcxFacts& ucx_;
  const CudaFacts& cuda_;
};

}  // namespace

std::string_view to_string(Severity severity) noexcept {
  constexpr std::array<std::string_view, 4> kNames{"ok", "note", "warning", "problem"};
  return kNames[static_cast<std::size_t>(severity)];
}

std::vector<Finding> judge(const Facts& facts) {
  return Judge{facts}.findings;
}

std::vector<Finding> judge_pair(const Facts& ours, const Facts& peer) {
  std::vector<Finding> findings;
  const auto compare = [&](const char* check, Severity severity, const std::string& mine,
                           const std::string& its, const char* advice) {
    if (mine == its)
      findings.push_back({check, Severity::ok, fmt::format("both {}", mine), {}});
    else
      findings.push_back({check, severity, fmt::format("here {}, there {}", mine, its), advice});
  };
  const auto value = [](const Facts& of, const char* name) {
    const std::string* set = find_variable(of.host, name);
    return set == nullptr ? std::string{} : fmt::format(" {}={}", name, *set);
  };
  const auto settings = [&](const Facts& of) {
    const std::string set = value(of, "UCX_TLS") + value(of, "UCX_PROTO_ENABLE");
    return set.empty() ? std::string{"UCX's own"} : set.substr(1);
  };
  const auto rdma = [](const Facts& of) {
    const bool used = std::ranges::any_of(active_rdma(of.host), [&](const std::string& name) {
      return has_device(of.ucx.devices, name);
    });
    return std::string{used ? "with RDMA" : "without RDMA"};
  };
  compare("pair.kvshard", Severity::warning, ours.kvshard, peer.kvshard,
          "install one version of kvshard on both hosts");
  compare("pair.ucx", Severity::warning, ours.ucx.version, peer.ucx.version,
          "install one version of UCX on both hosts; look at LD_LIBRARY_PATH");
  compare("pair.settings", Severity::warning, settings(ours), settings(peer),
          "give UCX_TLS and UCX_PROTO_ENABLE one value on both hosts, or unset them");
  compare("pair.rdma", Severity::warning, rdma(ours), rdma(peer),
          "see the findings \"rdma\" and \"ucx.devices\" of the host without");
  return findings;
}

Finding judge(const Measure& measure, const Facts& ours, const Facts& peer) {
  Finding finding{
      fmt::format("{}.{}-{}", measure.mapped ? "mapped" : "pull", measure.from, measure.to),
      Severity::ok,
      measure.error,
      {}};
  if (!measure.error.empty()) {
    if (measure.mapped) {
      finding.severity = Severity::warning;
      finding.advice =
          "until \"cuda\" findings are mended GPU pages go through slots; both "
          "processes must be in one IPC and PID namespace (docker: --ipc=host --pid=host)";
    } else {
      finding.severity = Severity::problem;
      finding.advice =
          measure.local
              ? "mend the findings above first; UCX says more with UCX_LOG_LEVEL=info"
              : "give both hosts one --secret-file; let through the control port and UCX's ports; "
                "set UCX_NET_DEVICES on both to a network that they share";
    }
    return finding;
  }
  finding.found =
      fmt::format("{:.2f} GB/s, every byte right; {}", measure.gigabytes_per_s, measure.reason);
  const bool gpus = measure.from == "cuda" && measure.to == "cuda";
  if (measure.path != "am") return finding;
  const bool rdma = !active_rdma(ours.host).empty() && !active_rdma(peer.host).empty();
  if (measure.local && gpus) {
    finding.severity = Severity::warning;
    finding.advice =
        "slots cross host memory: have UCX 1.16 or newer with cuda_ipc, not left out of "
        "UCX_TLS, and both processes in one IPC namespace";
  } else if (!measure.local && rdma) {
    finding.severity = Severity::warning;
    finding.advice =
        measure.from == "cuda" || measure.to == "cuda"
            ? "RDMA does not read GPU memory here: see \"gpudirect\" and \"rdma\" of both hosts"
            : "there is RDMA, but no get by it: see \"rdma\" and \"ucx.devices\" of both hosts";
  }
  return finding;
}

Severity worst(const std::vector<Finding>& findings) noexcept {
  Severity found = Severity::ok;
  for (const Finding& each : findings) found = std::max(found, each.severity);
  return found;
}

}  // namespace kvshard::doctor
