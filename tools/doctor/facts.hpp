#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace kvshard::doctor {

/// A port of an RDMA device, in sysfs's words.
struct RdmaPort {
  std::string name{};   ///< "mlx5_0:1", as UCX calls it
  std::string state{};  ///< "ACTIVE", "DOWN", ...
  std::string link{};   ///< "InfiniBand" or "Ethernet"
  std::string rate{};   ///< "400 Gb/sec (4X NDR)"
};

/// What the kernel says of this host and of the limits of this process.
struct HostFacts {
  double cpus{0};            ///< that this process may use: affinity, and the quotas of its cgroups
  std::uint64_t memlock{0};  ///< bytes that it may lock; UINT64_MAX: any
  bool may_lock{false};      ///< CAP_IPC_LOCK where the kernel asks for it: not in a user namespace
  bool may_trace{false};     ///< CAP_SYS_PTRACE
  std::string ptrace_scope{};   ///< of Yama; empty without it
  std::uint64_t open_files{0};  ///< soft limit
  std::uint64_t shm_free{0};    ///< bytes in /dev/shm
  std::string nvidia_driver{};  ///< its version line; empty: not loaded
  bool peermem{false};          ///< nvidia_peermem is loaded
  std::vector<RdmaPort> rdma{};
  std::map<std::string, std::string> environment{};  ///< UCX_* variables
};

/// What UCX says of itself, under the user's variables.
struct UcxFacts {
  bool built{false};                      ///< this program has it
  std::string error{};                    ///< why there is no more
  std::string version{};                  ///< the library that runs
  std::string headers{};                  ///< what this program was compiled with
  std::vector<std::string> components{};  ///< that it was built with: "tcp", "ib", "cuda_ipc", ...
  std::vector<std::string> devices{};  ///< that a worker uses: "tcp/eth0", "rc_mlx5/mlx5_0:1", ...
  std::vector<std::string> all_devices{};  ///< likewise if UCX_TLS and UCX_NET_DEVICES were not set
  bool cuda_memory{false};
};

struct Gpu {
  std::string name{};
  std::string capability{};            ///< "9.0"
  std::vector<std::uint32_t> peers{};  ///< GPUs whose memory it can reach
};

struct CudaFacts {
  bool built{false};
  std::string error{};    ///< why there is no more
  std::string driver{};   ///< newest CUDA that it knows: "13.0"
  std::string runtime{};  ///< that this program was linked with
  std::vector<Gpu> gpus{};
  std::string ipc_error{};  ///< why a cudaMalloc pool cannot be exported
};

struct Facts {
  std::string kvshard{};  ///< version
  HostFacts host{};
  UcxFacts ucx{};
  CudaFacts cuda{};
};

/// A pull between two processes, from and to memory of these kinds: "host", "cuda".
struct Measure {
  std::string from{}, to{};
  bool local{true};           ///< both on this host
  bool mapped{false};         ///< straight from the peer's pages, not through slots
  std::string error{};        ///< why there is no more; every byte was right if empty
  std::string path{};         ///< "get", "am", "mapped"
  std::string reason{};       ///< the probe's
  double gigabytes_per_s{0};  ///< of the fastest whole pull, gather and scatter included
  double round_trip_us{0};    ///< between the two ranks' threads, on the control connection
};

// What a peer of another version does not say keeps its default.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(RdmaPort, name, state, link, rate)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(HostFacts, cpus, memlock, may_lock, may_trace,
                                                ptrace_scope, open_files, shm_free, nvidia_driver,
                                                peermem, rdma, environment)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(UcxFacts, built, error, version, headers,
                                                components, devices, all_devices, cuda_memory)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Gpu, name, capability, peers)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(CudaFacts, built, error, driver, runtime, gpus,
                                                ipc_error)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Facts, kvshard, host, ucx, cuda)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Measure, from, to, local, mapped, error, path,
                                                reason, gigabytes_per_s, round_trip_us)

/// Reads /proc and /sys and asks the kernel; cannot hang or fail.
HostFacts host_facts();
/// These load drivers, which may: call them in a process of their own.
UcxFacts ucx_facts();
CudaFacts cuda_facts();

}  // namespace kvshard::doctor
