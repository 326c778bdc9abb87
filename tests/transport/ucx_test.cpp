#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <utility>

#include "base/unique_fd.hpp"
#include "support/transport_conformance.hpp"
#include "transport/bytes.hpp"
#include "transport/envelope.hpp"
#include "transport/ucx/lanes.hpp"
#include "transport/ucx/memory.hpp"

extern char** environ;  // NOLINT: POSIX asks for this declaration

namespace kvshard::testing {
namespace {

constexpr TransportOptions options_for(TransferPath path) {
  return {.kind = TransportOptions::Kind::ucx, .path = path};
}
constexpr std::array kPaths{TransferPath::get, TransferPath::am};

INSTANTIATE_TEST_SUITE_P(Ucx, TransportConformance,
                         ::testing::Values(options_for(TransferPath::get),
                                           options_for(TransferPath::am),
                                           options_for(TransferPath::automatic)),
                         [](const auto& test) { return std::string{to_string(test.param.path)}; });

constexpr std::size_t kOwnerBytes = 32U << 20;
constexpr int kOwnerOutput = 3;  // the descriptor on which an owner process hands out its address

bool write_all(int fd, const void* data, std::size_t size) {
  const auto* at = static_cast<const char*>(data);
  while (size > 0) {
    const auto written = ::write(fd, at, size);
    if (written <= 0) return false;
    at += written;
    size -= static_cast<std::size_t>(written);
  }
  return true;
}
bool read_all(int fd, void* data, std::size_t size) {
  auto* at = static_cast<char*>(data);
  while (size > 0) {
    const auto got = ::read(fd, at, size);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    at += got;
    size -= static_cast<std::size_t>(got);
  }
  return true;
}

// Not a test: the body of the process that OwnerProcess starts, until it is killed or its parent goes.
TEST(UcxOwner, DISABLED_Process) {
  TransportRank owner{options_for(TransferPath::automatic), kOwnerBytes, 42};
  owner.serve();
  for (const auto part :
       {owner.transport().address(), std::span<const std::byte>{owner.memory().packed()}}) {
    const auto size = static_cast<std::uint32_t>(part.size());
    ASSERT_TRUE(write_all(kOwnerOutput, &size, sizeof size));
    ASSERT_TRUE(write_all(kOwnerOutput, part.data(), part.size()));
  }
  while (::getppid() != 1)
    if (owner.transport().progress() == 0) (void)wait_for_activity(owner.transport(), 200ms);
}

/// This program again, as an owner in a process of its own.
class OwnerProcess {
 public:
  OwnerProcess() {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) return;
    const UniqueFd out{ends[0]};
    UniqueFd in{ends[1]};
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, in.get(), kOwnerOutput);
    std::string program{"/proc/self/exe"};
    std::string filter{"--gtest_filter=UcxOwner.DISABLED_Process"};
    std::string also{"--gtest_also_run_disabled_tests"};
    const std::array<char*, 4> arguments{program.data(), filter.data(), also.data(), nullptr};
    if (::posix_spawn(&pid_, program.c_str(), &actions, nullptr, arguments.data(), environ) != 0)
      pid_ = -1;
    posix_spawn_file_actions_destroy(&actions);
    in.reset();
    for (auto* part : {&address_, &packed_}) {
      std::uint32_t size = 0;
      if (!read_all(out.get(), &size, sizeof size) || size > (1U << 20)) return;
      part->resize(size);
      if (!read_all(out.get(), part->data(), size)) return;
    }
    ready_ = true;
  }
  ~OwnerProcess() {
    if (pid_ > 0) kill_now();
  }
  OwnerProcess(const OwnerProcess&) = delete;
  OwnerProcess& operator=(const OwnerProcess&) = delete;

  [[nodiscard]] bool ready() const { return ready_; }
  void signal(int number) const { ::kill(pid_, number); }
  void kill_now() {
    signal(SIGKILL);
    int status = 0;
    ::waitpid(std::exchange(pid_, -1), &status, 0);
  }
  std::unique_ptr<Endpoint> connect(TransportRank& decode, EndpointListener& listener) const {
    auto made = decode.transport().connect(address_, packed_, listener);
    return made ? std::move(*made) : nullptr;
  }

 private:
  pid_t pid_{-1};
  bool ready_{false};
  std::vector<std::byte> address_;
  std::vector<std::byte> packed_;
};

class UcxProcessTest : public ::testing::TestWithParam<TransferPath> {
 protected:
  static constexpr std::size_t kFetches = 16;
  static constexpr std::size_t kSize = 2U << 20;

  std::unique_ptr<Endpoint> open(const OwnerProcess& owner, HeardFailure& failure) {
    auto endpoint = owner.connect(decode_, failure);
    if (endpoint == nullptr) return nullptr;
    HeardTransfer probed;
    EXPECT_TRUE(endpoint->probe(decode_.bytes(), probed));
    EXPECT_TRUE(pump({&decode_}, [&] { return probed.done(); }));
    EXPECT_TRUE(probed.last) << probed.last.error().message;
    return endpoint;
  }
  void fetch_all(Endpoint& endpoint) {
    heard_.clear();
    heard_.resize(kFetches);
    for (std::size_t i = 0; i < kFetches; ++i)
      ASSERT_TRUE(endpoint.fetch(i * kSize, decode_.bytes().subspan(i * kSize, kSize), heard_[i]));
  }
  void expect_exact_or_failed(ErrorCode code) {
    for (std::size_t i = 0; i < kFetches; ++i) {
      EXPECT_EQ(heard_[i].calls, 1);
      if (!heard_[i].last) {
        EXPECT_EQ(heard_[i].last.error().code, code) << heard_[i].last.error().message;
        continue;
      }
      for (std::size_t at = i * kSize; at < (i + 1) * kSize; at += 4093)
        ASSERT_EQ(decode_.bytes()[at], pattern(42, at));
    }
  }

  TransportRank decode_{options_for(GetParam()), kOwnerBytes};
  std::deque<HeardTransfer> heard_;
};

INSTANTIATE_TEST_SUITE_P(Ucx, UcxProcessTest, ::testing::ValuesIn(kPaths),
                         [](const auto& test) { return std::string{to_string(test.param)}; });

TEST_P(UcxProcessTest,
       KilledOwnerFailsItsFetchesAndANewOneServes) {  // acceptance 33, 35: the transport's part
  for (const std::size_t done_before : {0U, 1U, 4U, 12U}) {
    OwnerProcess owner;
    ASSERT_TRUE(owner.ready());
    HeardFailure failure;
    const auto endpoint = open(owner, failure);
    ASSERT_NE(endpoint, nullptr);
    fetch_all(*endpoint);
    ASSERT_TRUE(pump({&decode_}, [&] { return endpoint->in_flight() <= kFetches - done_before; }));
    owner.kill_now();
    EXPECT_TRUE(pump(
        {&decode_}, [&] { return endpoint->in_flight() == 0 && failure.calls == 1; }, 10s))
        << endpoint->in_flight() << " in flight, failures: " << failure.calls;
    expect_exact_or_failed(ErrorCode::unavailable);
    endpoint->close();
    EXPECT_TRUE(pump({&decode_}, [&] { return endpoint->closed(); }));
  }
}

TEST_P(UcxProcessTest, OwnerKilledWhileIdleIsReported) {
  OwnerProcess owner;
  ASSERT_TRUE(owner.ready());
  HeardFailure failure;
  const auto endpoint = open(owner, failure);
  ASSERT_NE(endpoint, nullptr);
  owner.kill_now();
  EXPECT_TRUE(pump(
      {&decode_}, [&] { return failure.calls == 1; }, 10s));
  endpoint->close();
  EXPECT_TRUE(pump({&decode_}, [&] { return endpoint->closed(); }));
}

TEST_P(UcxProcessTest, ClosingAwayFromAStoppedOwnerEnds) {  // acceptance 34, the transport's part
  OwnerProcess owner;
  ASSERT_TRUE(owner.ready());
  HeardFailure failure;
  const auto endpoint = open(owner, failure);
  ASSERT_NE(endpoint, nullptr);
  fetch_all(*endpoint);
  ASSERT_TRUE(pump({&decode_}, [&] { return endpoint->in_flight() < kFetches; }));
  owner.signal(SIGSTOP);
  endpoint->close();
  EXPECT_TRUE(pump(
      {&decode_}, [&] { return endpoint->closed(); }, 10s))
      << endpoint->in_flight();
  expect_exact_or_failed(ErrorCode::cancelled);

  owner.signal(SIGCONT);
  const auto again = open(owner, failure);
  ASSERT_NE(again, nullptr);
  fetch_all(*again);
  ASSERT_TRUE(pump({&decode_}, [&] { return again->in_flight() == 0; }));
  for (auto& one : heard_) EXPECT_TRUE(one.last) << one.last.error().message;
  expect_exact_or_failed(ErrorCode::cancelled);
  again->close();
  EXPECT_TRUE(pump({&decode_}, [&] { return again->closed(); }));
  EXPECT_EQ(failure.calls, 0);
}

TEST_P(UcxProcessTest, OwnerKilledBeforeTheConnectionStandsIsReported) {
  OwnerProcess owner;
  ASSERT_TRUE(owner.ready());
  owner.kill_now();
  HeardFailure failure;
  HeardTransfer probed;
  const auto endpoint = owner.connect(decode_, failure);
  if (endpoint == nullptr) return;  // refused at once is as good
  if (!endpoint->probe(decode_.bytes(), probed)) probed.calls = 1;
  EXPECT_TRUE(pump(
      {&decode_}, [&] { return probed.done() && endpoint->in_flight() == 0; }, 10s));
  EXPECT_LE(failure.calls, 1);
  endpoint->close();
  EXPECT_TRUE(pump({&decode_}, [&] { return endpoint->closed(); }));
}

TEST(UcxTransportTest, RefusesAnEmulatedPathWhenAskedTo) {  // acceptance 48
  auto options = options_for(TransferPath::automatic);
  options.require_native = true;
  TransportRank owner{options, 4096, 1};
  TransportRank decode{options, 4096};
  owner.serve();
  HeardFailure failure;
  HeardTransfer probed;
  const auto endpoint = decode.connect(owner, failure);
  ASSERT_TRUE(endpoint->probe(decode.bytes(), probed));
  ASSERT_TRUE(pump({&decode, &owner}, [&] { return probed.done(); }));
  ASSERT_FALSE(probed.last) << endpoint->path().reason;
  EXPECT_EQ(probed.last.error().code, ErrorCode::unsupported);
  EXPECT_NE(probed.last.error().message.find("get is emulated over tcp"), std::string::npos)
      << probed.last.error().message;
  endpoint->close();
  EXPECT_TRUE(pump({&decode, &owner}, [&] { return endpoint->closed(); }));
}

TEST(UcxTransportTest, OwnerRefusesWhatItDoesNotServe) {  // acceptance 44, the transport's part
  const auto options = options_for(TransferPath::am);
  TransportRank owner{options, 4096, 1};
  TransportRank decode{options, 8192};
  HeardFailure failure;
  HeardTransfer early;
  const auto endpoint = decode.connect(owner, failure);
  ASSERT_TRUE(endpoint->probe(decode.bytes(), early));
  ASSERT_TRUE(pump({&decode, &owner}, [&] { return early.done(); }));
  EXPECT_EQ(early.last.error().code, ErrorCode::unavailable) << early.last.error().message;

  // A peer that believes in more memory than there is: it has another rank's packed bytes.
  TransportRank larger{options, 8192, 2};
  owner.serve();
  auto lying =
      decode.transport().connect(owner.transport().address(), larger.memory().packed(), failure);
  ASSERT_TRUE(lying) << lying.error().message;
  HeardTransfer probed;
  ASSERT_TRUE((*lying)->probe(decode.bytes().first(64), probed));
  ASSERT_TRUE(pump({&decode, &owner}, [&] { return probed.done(); }));
  ASSERT_TRUE(probed.last) << probed.last.error().message;
  HeardTransfer beyond;
  ASSERT_TRUE((*lying)->fetch(4000, decode.bytes().first(97), beyond));
  ASSERT_TRUE(pump({&decode, &owner}, [&] { return beyond.done(); }));
  EXPECT_EQ(beyond.last.error().code, ErrorCode::invalid_argument);
  EXPECT_EQ(beyond.last.error().message, "fetch of 97 bytes at 4000: the owner serves 4096 bytes");
  for (auto* one : {endpoint.get(), lying->get()}) {
    one->close();
    EXPECT_TRUE(pump({&decode, &owner}, [&] { return one->closed(); }));
  }
}

TEST(UcxTransportTest, TakesALandingInRegisteredMemoryOnly) {
  const auto options = options_for(TransferPath::am);
  TransportRank owner{options, 4096, 1};
  TransportRank decode{options, 4096};
  owner.serve();
  HeardFailure failure;
  HeardTransfer heard;
  const auto endpoint = decode.connect(owner, failure);
  std::vector<std::byte> elsewhere(4096);
  EXPECT_EQ(endpoint->probe(elsewhere, heard).error().code, ErrorCode::invalid_argument);
  EXPECT_EQ(endpoint->in_flight(), 0U);
  endpoint->close();
  EXPECT_TRUE(pump({&decode, &owner}, [&] { return endpoint->closed(); }));
}

// acceptance 42: sealed, and wrong all the same.
TEST(UcxMemoryTest, RefusesWhatCannotBe) {
  const auto unpack = [](std::uint64_t address, std::uint64_t bytes, std::uint32_t kind) {
    transport::ByteWriter out;
    out.u64(address).u64(bytes).u32(kind).raw(std::vector<std::byte>(8));
    return ucx::unpack_memory(transport::seal(transport::EnvelopeKind::ucx_memory, out.bytes()));
  };
  for (const std::uint32_t kind : {0U, 1U}) {
    const auto memory = unpack(4096, 64, kind);
    ASSERT_TRUE(memory.ok());
    EXPECT_EQ(memory->kind, kind == 1 ? MemoryKind::cuda : MemoryKind::host);
  }
  EXPECT_EQ(unpack(4096, 64, 2).error().message,
            "peer's memory is of kind 2, known are 0 (host) and 1 (cuda)");
  EXPECT_EQ(unpack(~std::uint64_t{0} - 7, 64, 0).error().code, ErrorCode::invalid_argument);
}

TEST(UcxLanesTest, ReadsTheTransportsOfEveryVersion) {
  // UCX 1.13.1, then 1.18.1 and 1.22.0 with a second lane.
  EXPECT_EQ(
      ucx::parse_transports(
          "#\n# UCP endpoint \n#\n#               peer: <no debug data>\n"
          "#                 lane[0]:  1:tcp/lo.0 md[0]                -> md[0]/tcp/sysdev[255] am "
          "am_bw#0 keepalive wireup\n#\n#                 am_send: 0..<egr/short>..8185\n"),
      std::vector<std::string>{"tcp"});
  EXPECT_EQ(
      ucx::parse_transports(
          "#                 lane[0]:  1:rc_mlx5/mlx5_0:1.0 md[4]  -> md[4]/ib/sysdev[2] seg 8256 "
          "rma_bw#0\n"
          "#                 lane[1]:  7:cuda_ipc/cuda.0 md[2]  -> md[2]/cuda_ipc/sysdev[1] seg 1\n"
          "#                 lane[2]:  1:rc_mlx5/mlx5_1:1.0 md[5]  -> md[5]/ib/sysdev[3] seg "
          "8256\n"),
      (std::vector<std::string>{"rc_mlx5", "cuda_ipc"}));
  EXPECT_TRUE(ucx::parse_transports("").empty());
  EXPECT_TRUE(
      ucx::parse_transports("lane[\nlane[0]\nlane[0]:\nlane[0]: 1\nlane[0]: 1:tcp").empty());
}

TEST(UcxLanesTest, KnowsWhatReadsNatively) {
  constexpr auto kHost = MemoryKind::host;
  constexpr auto kCuda = MemoryKind::cuda;
  for (const MemoryKind from : {kHost, kCuda})
    for (const MemoryKind to : {kHost, kCuda}) {
      for (const auto* name : {"rc_verbs", "rc_mlx5", "dc_mlx5", "srd"})
        EXPECT_TRUE(ucx::reads_natively(name, from, to)) << name;
      for (const auto* name : {"tcp", "ud_verbs", "ud_mlx5", "rcx", "cuda_copy", "", "sysv"})
        EXPECT_FALSE(ucx::reads_natively(name, from, to)) << name;
      EXPECT_EQ(ucx::reads_natively("cuda_ipc", from, to), from == kCuda && to == kCuda);
      EXPECT_EQ(ucx::reads_natively("cma", from, to), from == kHost && to == kHost);
    }
}

}  // namespace
}  // namespace kvshard::testing
