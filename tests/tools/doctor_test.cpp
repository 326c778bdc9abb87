// kvshard-doctor: each line of advice by making its condition. What takes a GPU, RDMA or an unlike peer is
// judged from facts written down here; the rest is what the program says when run under that condition.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "base/unique_fd.hpp"
#include "doctor/judge.hpp"
#include "support/run_command.hpp"

namespace kvshard::doctor {

std::ostream& operator<<(std::ostream& out, const Finding& finding) {
  return out << to_string(finding.severity) << " " << finding.check << ": " << finding.found
             << " > " << finding.advice << "\n";
}

namespace {

using Json = nlohmann::json;

// ---- from facts ----------------------------------------------------------------------------------

// Two GPUs, RDMA, and nothing to complain of.
Facts healthy() {
  Facts facts;
  facts.kvshard = "0.1.0";
  facts.host = {.cpus = 64,
                .memlock = UINT64_MAX,
                .ptrace_scope = "1",
                .open_files = 1 << 20,
                .shm_free = std::uint64_t{32} << 30,
                .nvidia_driver = "NVIDIA UNIX Open Kernel Module for x86_64  580.159.04",
                .rdma = {{"mlx5_0:1", "ACTIVE", "InfiniBand", "400 Gb/sec (4X NDR)"}}};
  const std::vector<std::string> devices{"self/memory",  "tcp/lo",           "tcp/eth0",
                                         "posix/memory", "rc_mlx5/mlx5_0:1", "cuda_ipc/cuda"};
  facts.ucx = {.built = true,
               .version = "1.21.0",
               .headers = "1.13",
               .components = {"self", "tcp", "posix", "ib", "cuda_cpy", "cuda_ipc"},
               .devices = devices,
               .all_devices = devices,
               .cuda_memory = true};
  facts.cuda = {.built = true,
                .driver = "13.0",
                .runtime = "13.0",
                .gpus = {{"NVIDIA H200", "9.0", {1}}, {"NVIDIA H200", "9.0", {0}}}};
  return facts;
}

TEST(JudgeTest, AHealthyHostGetsNoAdvice) {
  for (const Finding& finding : judge(healthy())) {
    EXPECT_EQ(finding.severity, Severity::ok) << finding;
    EXPECT_EQ(finding.advice, "") << finding;
  }
}

void drop_device(std::vector<std::string>& devices, std::string_view name) {
  std::erase_if(devices, [&](const std::string& each) { return each.ends_with(name); });
}

struct Case {
  const char* name;
  std::function<void(Facts&)> change;
  const char* check;
  Severity severity;
  const char* found;
  const char* advice;
};
void PrintTo(const Case& each, std::ostream* out) {
  *out << each.name;
}

class AdviceTest : public ::testing::TestWithParam<Case> {};

// Exactly the one finding changes, or those of the same check.
TEST_P(AdviceTest, NamesWhatToSet) {
  Facts facts = healthy();
  GetParam().change(facts);
  bool seen = false;
  for (const Finding& finding : judge(facts)) {
    if (finding.check != GetParam().check) {
      EXPECT_EQ(finding.severity, Severity::ok) << finding;
      continue;
    }
    if (finding.found.find(GetParam().found) == std::string::npos) continue;
    seen = true;
    EXPECT_EQ(finding.severity, GetParam().severity) << finding;
    EXPECT_NE(finding.advice.find(GetParam().advice), std::string::npos) << finding;
  }
  EXPECT_TRUE(seen) << ::testing::PrintToString(judge(facts));
}

const Case kCases[]{
    {"NoUcx", [](Facts& f) { f.ucx = {}; }, "ucx", Severity::problem, "built without UCX",
     "libucx-dev"},
    {"UcxDied", [](Facts& f) { f.ucx = {.built = true, .error = "the process died"}; }, "ucx",
     Severity::problem, "the process died", "unset UCX_* variables"},
    {"OlderThanHeaders", [](Facts& f) { f.ucx.headers = "1.22"; }, "ucx", Severity::problem,
     "1.21.0 runs, headers 1.22; older", "LD_LIBRARY_PATH"},
    {"UcxWithoutCuda", [](Facts& f) { f.ucx.cuda_memory = false; }, "ucx", Severity::problem,
     "no CUDA memory", "--with-cuda"},
    {"EmulatedGpuGet", [](Facts& f) { f.ucx.version = "1.15.0"; }, "ucx", Severity::warning,
     "before 1.16", "install UCX 1.16 or newer"},
    {"CudaIpcCache", [](Facts& f) { f.ucx.version = "1.22.0"; }, "ucx", Severity::warning,
     "unmaps GPU memory", "1.22.1"},
    {"GetZcopyOff", [](Facts& f) { f.host.environment["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] = "n"; },
     "ucx.settings", Severity::warning, "emulated", "unset UCX_CUDA_IPC_ENABLE_GET_ZCOPY"},
    {"DriverTooOld",
     [](Facts& f) {
       f.cuda = {.built = true, .error = "CUDA driver version is insufficient", .runtime = "13.0"};
     },
     "cuda", Severity::problem, "insufficient", "update the driver"},
    {"NoCudaBuild", [](Facts& f) { f.cuda = {}; }, "cuda", Severity::warning, "has no CUDA",
     "-DKVSHARD_ENABLE_CUDA=ON"},
    {"NoIpc", [](Facts& f) { f.cuda.ipc_error = "operation not supported"; }, "cuda.ipc",
     Severity::warning, "operation not supported", "confidential computing"},
    {"NoPeerAccess", [](Facts& f) { f.cuda.gpus[1].peers = {}; }, "cuda.peers", Severity::warning,
     "GPU 0 from 1", "nvidia-smi topo"},
    {"NoGpuDirect", [](Facts& f) { f.host.nvidia_driver = "NVIDIA UNIX x86_64 Kernel Module"; },
     "gpudirect", Severity::warning, "mlx5_0:1 cannot read GPU memory", "modprobe nvidia_peermem"},
    {"RdmaDown",
     [](Facts& f) {
       f.host.rdma.push_back({"mlx5_1:1", "DOWN", "Ethernet", ""});
     },
     "rdma", Severity::warning, "not active: mlx5_1:1", "bring the link up"},
    {"RdmaUnknownToUcx",
     [](Facts& f) {
       drop_device(f.ucx.devices, "mlx5_0:1");
       drop_device(f.ucx.all_devices, "mlx5_0:1");
     },
     "rdma", Severity::warning, "does not see mlx5_0:1", "--with-verbs"},
    {"RdmaLeftOut", [](Facts& f) { drop_device(f.ucx.devices, "mlx5_0:1"); }, "rdma",
     Severity::warning, "told not to use mlx5_0:1", "unset UCX_TLS, or add rc"},
    {"Memlock", [](Facts& f) { f.host.memlock = 8U << 20; }, "memlock", Severity::problem,
     "8.0 MiB may be locked; RDMA locks 32 MiB for a rank's 8 slots", "LimitMEMLOCK=infinity"},
    {"SeveralInterfaces",
     [](Facts& f) {
       f.ucx.devices.emplace_back("tcp/docker0");
       f.ucx.all_devices.emplace_back("tcp/docker0");
     },
     "ucx.devices", Severity::note, "tcp/docker0", "of: docker0,eth0"},
};
INSTANTIATE_TEST_SUITE_P(Each, AdviceTest, ::testing::ValuesIn(kCases),
                         [](const auto& each) { return each.param.name; });

TEST(JudgeTest, WhatLiftsALimitIsSeen) {
  Facts facts = healthy();
  facts.host.memlock = 8U << 20;
  facts.host.may_lock = true;
  facts.host.ptrace_scope = "2";
  facts.host.may_trace = true;
  facts.host.nvidia_driver = "NVIDIA UNIX x86_64 Kernel Module";
  facts.host.peermem = true;
  EXPECT_EQ(worst(judge(facts)), Severity::ok);
}

const Finding& find(const std::vector<Finding>& findings, std::string_view check) {
  const auto found = std::ranges::find(findings, check, &Finding::check);
  EXPECT_NE(found, findings.end()) << check;
  return *found;
}

TEST(JudgeTest, UnlikeHostsAreNamedWithBothValues) {
  const Facts ours = healthy();
  EXPECT_EQ(worst(judge_pair(ours, ours)), Severity::ok);
  Facts peer = ours;
  peer.kvshard = "0.2.0";
  peer.ucx.version = "1.13.1";
  peer.host.environment["UCX_TLS"] = "tcp";
  drop_device(peer.ucx.devices, "mlx5_0:1");
  const auto findings = judge_pair(ours, peer);
  for (const Finding& each : findings) EXPECT_EQ(each.severity, Severity::warning) << each;
  EXPECT_EQ(find(findings, "pair.kvshard").found, "here 0.1.0, there 0.2.0");
  EXPECT_EQ(find(findings, "pair.ucx").found, "here 1.21.0, there 1.13.1");
  EXPECT_EQ(find(findings, "pair.settings").found, "here UCX's own, there UCX_TLS=tcp");
  EXPECT_EQ(find(findings, "pair.rdma").found, "here with RDMA, there without RDMA");
  EXPECT_NE(find(findings, "pair.kvshard").advice.find("one version of kvshard"),
            std::string::npos);
  EXPECT_NE(find(findings, "pair.ucx").advice.find("one version of UCX"), std::string::npos);
  EXPECT_NE(find(findings, "pair.settings").advice.find("UCX_TLS"), std::string::npos);
  EXPECT_NE(find(findings, "pair.rdma").advice.find("\"rdma\""), std::string::npos);
}

TEST(JudgeTest, AMeasureSaysWhyItIsSlow) {
  const Facts rdma = healthy();
  Facts plain = rdma;
  plain.host.rdma.clear();
  const auto judged = [](Measure measure, const Facts& ours, const Facts& peer) {
    return judge(measure, ours, peer);
  };
  const auto advises = [](const Finding& finding, Severity severity, const char* advice) {
    EXPECT_EQ(finding.severity, severity) << finding;
    EXPECT_NE(finding.advice.find(advice), std::string::npos) << finding;
  };
  const Measure get{.from = "cuda", .to = "cuda", .path = "get", .reason = "get is native"};
  EXPECT_EQ(judged(get, rdma, rdma).severity, Severity::ok);
  Measure am = get;
  am.path = "am";
  advises(judged(am, rdma, rdma), Severity::warning, "cuda_ipc");
  am.local = false;
  advises(judged(am, rdma, rdma), Severity::warning, "\"gpudirect\"");
  EXPECT_EQ(judged(am, rdma, plain).severity,
            Severity::ok);  // one has no RDMA: it cannot be better
  am.from = am.to = "host";
  advises(judged(am, rdma, rdma), Severity::warning, "no get by it");
  am.local = true;
  EXPECT_EQ(judged(am, rdma, rdma).severity, Severity::ok);  // processes of one host: TCP
  advises(judged({.from = "host", .to = "host", .error = "unreachable"}, rdma, rdma),
          Severity::problem, "UCX_LOG_LEVEL");
  advises(
      judged({.from = "host", .to = "host", .local = false, .error = "unreachable"}, rdma, rdma),
      Severity::problem, "UCX_NET_DEVICES on both");
  advises(judged({.from = "cuda", .to = "cuda", .mapped = true, .error = "no IPC"}, rdma, rdma),
          Severity::warning, "--ipc=host");
}

// ---- from the program ----------------------------------------------------------------------------

const std::string kDoctor = KVSHARD_DOCTOR_TOOL;

struct Outcome : test::Outcome {
  [[nodiscard]] Json finding(std::string_view check, std::string_view found = "") const {
    const Json report = Json::parse(output, nullptr, false);
    if (report.is_object())
      for (const Json& each : report["findings"])
        if (each["check"] == check &&
            each["found"].get<std::string>().find(found) != std::string::npos)
          return each;
    ADD_FAILURE() << "no " << check << " with \"" << found << "\" in " << output;
    return {{"status", "none"}, {"found", ""}, {"advice", ""}};
  }
};

Outcome run(const std::string& command) {
  return {test::run_command(command)};
}

Outcome run_doctor(const std::string& under = "") {
  return run(under + " " + kDoctor + " --json");
}

void expect(const Outcome& outcome, const char* check, const char* status, const char* found,
            const char* advice) {
  const Json finding = outcome.finding(check, found);
  EXPECT_EQ(finding["status"], status) << finding;
  EXPECT_NE(finding["advice"].get<std::string>().find(advice), std::string::npos) << finding;
}

TEST(DoctorTest, MeasuresThisHostBetweenTwoProcesses) {
  const Outcome doctor = run_doctor();
  ASSERT_NE(doctor.exit_code, 2) << doctor.output;
  expect(doctor, "pull.host-host", "ok", "every byte right; am: get", "");
  expect(doctor, "round_trip", "ok", " us between", "");
  const Json report = Json::parse(doctor.output);
  EXPECT_GT(report["measures"][0]["gigabytes_per_s"].get<double>(), 0);
  EXPECT_GT(report["measures"][0]["round_trip_us"].get<double>(), 0);
  EXPECT_EQ(report["facts"]["host"]["environment"]["UCX_TLS"], "tcp");
  const Outcome table = run(kDoctor);
  EXPECT_EQ(table.exit_code, doctor.exit_code);
  EXPECT_NE(table.output.find("ok       pull.host-host     "), std::string::npos) << table.output;
  EXPECT_NE(table.output.find("note     ucx.settings       UCX_MEM_EVENTS=n, UCX_TLS=tcp\n"),
            std::string::npos)
      << table.output;
  EXPECT_NE(table.output.find("> unset what you do not need"), std::string::npos) << table.output;
}

TEST(DoctorTest, ATransportThatIsNotThereIsAProblem) {
  const Outcome doctor = run_doctor("env UCX_TLS=nosuch");
  EXPECT_EQ(doctor.exit_code, 2);
  expect(doctor, "ucx", "problem", "ucp_init", "unset UCX_* variables, UCX_TLS first");
  expect(doctor, "pull.host-host", "problem", "ucp_init", "UCX_LOG_LEVEL=info");
}

TEST(DoctorTest, WithoutANetworkRanksCannotConnect) {
  const Outcome doctor = run_doctor("env UCX_TLS=self");
  EXPECT_EQ(doctor.exit_code, 2);
  expect(doctor, "ucx.devices", "problem", "no network among self/", "add tcp to UCX_TLS");
}

TEST(DoctorTest, ADeviceThatIsNotThereIsNamedWithThoseThatAre) {
  const Outcome doctor = run_doctor("env UCX_NET_DEVICES=lo,nosuch0");
  EXPECT_EQ(doctor.exit_code, 2);
  expect(doctor, "ucx.devices", "problem", "names nosuch0,", "tcp/lo");
  expect(doctor, "ucx.devices", "note", "tcp/lo only", "bring a network interface up");
}

TEST(DoctorTest, UnfinishedProtocolsAreAProblem) {
  const Outcome doctor = run_doctor("env UCX_PROTO_ENABLE=y");
  const auto version = Json::parse(doctor.output)["facts"]["ucx"]["version"].get<std::string>();
  if (!version.starts_with("1.13.")) GTEST_SKIP() << "they are finished in UCX " << version;
  EXPECT_EQ(doctor.exit_code, 2);
  expect(doctor, "ucx", "problem", "UCX_PROTO_ENABLE", "unset UCX_PROTO_ENABLE");
}

TEST(DoctorTest, FewOpenFilesAreFewPeers) {
  expect(run_doctor("prlimit --nofile=364"), "open_files", "note",
         "364: enough for about 100 peers", "ulimit -n 3136");
}

TEST(DoctorTest, OneCpuIsTooFew) {
  cpu_set_t set;
  CPU_ZERO(&set);
  ASSERT_EQ(::sched_getaffinity(0, sizeof set, &set), 0);
  int cpu = 0;
  while (!CPU_ISSET(cpu, &set)) ++cpu;
  const Outcome doctor = run_doctor("taskset -c " + std::to_string(cpu));
  EXPECT_EQ(doctor.exit_code, 1);
  expect(doctor, "cpus", "warning", "1 may be used", "taskset");
}

// What the kernel says is replaced in namespaces of our own.
class NamespaceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (run("unshare -Urmn true 2>&1").exit_code != 0)
      GTEST_SKIP() << "user namespaces are not allowed here";
  }
  static Outcome run_under(const std::string& namespaces, const std::string& script) {
    return run("unshare -Ur" + namespaces + " sh -ec '" + script + "; exec " + kDoctor +
               " --json'");
  }
};

TEST_F(NamespaceTest, AQuotaOfTheCgroupCounts) {
  const Outcome doctor = run_under(
      "m", "mount -t tmpfs t /sys/fs/cgroup; echo 150000 100000 > /sys/fs/cgroup/cpu.max");
  expect(doctor, "cpus", "warning", "1.5 may be used", "cpu.max");
}

TEST_F(NamespaceTest, LittleSharedMemoryIsFewRanks) {
  const Outcome some = run_under("m", "unset UCX_TLS; mount -t tmpfs -o size=30m t /dev/shm");
  expect(some, "shm", "note", "enough for 3 ranks", "--shm-size=1g");
  const Outcome none = run_under("m", "unset UCX_TLS; mount -t tmpfs -o size=64k t /dev/shm");
  EXPECT_EQ(none.exit_code, 2);
  expect(none, "shm", "problem", "0.1 MiB free", "UCX_TLS=^posix");
  expect(none, "pull.host-host", "problem", "ucp_worker_create", "mend the findings above");
  // As the advice says.
  const Outcome without =
      run_under("m", "export UCX_TLS=^posix; mount -t tmpfs -o size=64k t /dev/shm");
  expect(without, "shm", "ok", "0.1 MiB free", "");
  expect(without, "pull.host-host", "ok", "every byte right", "");
}

TEST_F(NamespaceTest, ARestrictedPtraceIsNoted) {
  const Outcome doctor =
      run_under("m",
                "boot=$(cat /proc/sys/kernel/random/boot_id); mount -t tmpfs t /proc/sys/kernel; "
                "mkdir /proc/sys/kernel/yama /proc/sys/kernel/random; "
                "echo $boot > /proc/sys/kernel/random/boot_id; "
                "echo 3 > /proc/sys/kernel/yama/ptrace_scope");
  expect(doctor, "ptrace", "note", "scope 3", "kernel.yama.ptrace_scope=1");
  expect(doctor, "pull.host-host", "ok", "every byte right", "");
}

TEST_F(NamespaceTest, ADriverThatKvshardCannotUseIsNamed) {
  const Outcome doctor = run_under(
      "m",
      "mount -t tmpfs t /proc/driver; mkdir /proc/driver/nvidia; "
      "echo NVRM version: NVIDIA UNIX Open Kernel Module 580.1 > /proc/driver/nvidia/version");
  const Json finding = doctor.finding("cuda", "NVIDIA UNIX Open Kernel Module 580.1");
  EXPECT_NE(finding["status"], "ok") << finding;  // a build with CUDA finds no device instead
  EXPECT_NE(finding["advice"], "") << finding;
}

TEST_F(NamespaceTest, RdmaNeedsALinkADriverAndLockedMemory) {
  const Outcome doctor = run_under(
      "m",
      "mount -t tmpfs t /mnt; mkdir /mnt/net; mount --bind /sys/class/net /mnt/net; "
      "mount -t tmpfs t /sys/class; mkdir /sys/class/net; mount --move /mnt/net /sys/class/net; "
      "for d in mlx5_0 mlx5_1; do mkdir -p /sys/class/infiniband/$d/ports/1; "
      "echo 4: ACTIVE > /sys/class/infiniband/$d/ports/1/state; "
      "echo Ethernet > /sys/class/infiniband/$d/ports/1/link_layer; done; "
      "echo 1: DOWN > /sys/class/infiniband/mlx5_1/ports/1/state; ulimit -l 8192");
  expect(doctor, "rdma", "warning", "not active: mlx5_1:1 (Ethernet", "bring the link up");
  expect(doctor, "rdma", "warning", "UCX does not see mlx5_0:1", "/dev/infiniband");
  expect(doctor, "memlock", "problem", "8.0 MiB may be locked", "ulimit -l unlimited");
}

TEST_F(NamespaceTest, TheInterfacesOfUcxAreListed) {
  expect(run_under("n", "ip link set lo up"), "ucx.devices", "note", "tcp/lo only",
         "bring a network interface up");
  const Outcome several = run_under(
      "mn",
      "mount -t sysfs s /sys; ip link set lo up; ip link add vA type veth peer name vB; ip link "
      "set vA up; "
      "ip link set vB up; ip addr add 10.77.0.1/24 dev vA; ip addr add 10.78.0.1/24 dev vB");
  expect(several, "ucx.devices", "note", "tcp/vA", "of: vA,vB");
}

// A host that serves, as a user starts it.
class Served {
 public:
  explicit Served(const std::string& options) {
    pipe_ = ::popen(("echo $$; exec " + options).c_str(), "r");
    char line[256] = "";
    if (std::fgets(line, sizeof line, pipe_) != nullptr) pid_ = std::atoi(line);
    if (std::fgets(line, sizeof line, pipe_) == nullptr) return;
    const std::string text{line};
    address_ = text.substr(text.rfind(' ') + 1);
    address_.pop_back();  // the newline
  }
  ~Served() {
    ::kill(pid_, SIGTERM);
    ::pclose(pipe_);
  }
  Served(const Served&) = delete;
  Served& operator=(const Served&) = delete;
  [[nodiscard]] const std::string& address() const { return address_; }

 private:
  std::FILE* pipe_;
  pid_t pid_{0};
  std::string address_;
};

TEST(DoctorTest, APairIsMeasuredAndCompared) {
  const Served peer{"env UCX_TLS=tcp,self " + kDoctor + " serve"};
  for (int i = 0; i < 2; ++i) {  // one serves any number
    const Outcome doctor = run(kDoctor + " pair --json " + peer.address());
    EXPECT_EQ(doctor.exit_code, 1) << doctor.output;
    expect(doctor, "pair.settings", "warning", "here UCX_TLS=tcp, there UCX_TLS=tcp,self",
           "one value");
    expect(doctor, "pair.kvshard", "ok", "both ", "");
    expect(doctor, "pair.ucx", "ok", "both ", "");
    expect(doctor, "there.ucx.settings", "note", "UCX_TLS=tcp,self", "unset");
    expect(doctor, "pull.host-host", "ok", "every byte right", "");
    expect(doctor, "round_trip", "ok", " us between", "");
  }
}

TEST(DoctorTest, APairWithAnotherSecretIsRefused) {
  const std::filesystem::path file = std::filesystem::path{::testing::TempDir()} /
                                     ("kvshard_doctor_" + std::to_string(::getpid()));
  const std::string secret = "never to be seen in any report";
  std::ofstream{file} << secret;
  std::filesystem::permissions(file, std::filesystem::perms::owner_read);
  const std::string with = " --secret-file " + file.string();
  const Served peer{kDoctor + " serve" + with};
  const Outcome right = run(kDoctor + " pair --json " + peer.address() + with + " 2>&1");
  expect(right, "pull.host-host", "ok", "every byte right", "");
  EXPECT_EQ(right.output.find(secret), std::string::npos);
  const Outcome wrong = run(kDoctor + " pair --json " + peer.address());
  EXPECT_EQ(wrong.exit_code, 2);
  expect(wrong, "pull.host-host", "problem", "secret", "--secret-file");
  std::filesystem::remove(file);
}

TEST(DoctorTest, AHostThatDoesNotAnswerIsNotWaitedFor) {
  const UniqueFd silent{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  ASSERT_EQ(::bind(silent.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(::listen(silent.get(), 8), 0);  // connections come, nobody takes them
  ASSERT_EQ(::getsockname(silent.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  const Outcome doctor =
      run(kDoctor + " pair --json 127.0.0.1:" + std::to_string(ntohs(address.sin_port)));
  EXPECT_EQ(doctor.exit_code, 2);
  expect(doctor, "pull.host-host", "problem", "not connected within",
         "let through the control port");
}

TEST(DoctorTest, WhatIsNoAddressIsRefused) {
  for (const char* text : {"nohost", "127.0.0.1:", "127.0.0.1:99999", ":1", "127.0.0.1:1x"})
    EXPECT_EQ(run(kDoctor + " pair " + text + " 2>/dev/null").exit_code, 2) << text;
  // Beyond loopback only with a secret, or with a word that there is none.
  EXPECT_EQ(run(kDoctor + " serve --listen 0.0.0.0:0 2>/dev/null").exit_code, 2);
}

}  // namespace
}  // namespace kvshard::doctor
