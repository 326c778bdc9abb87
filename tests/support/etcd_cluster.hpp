#pragma once

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "base/unique_fd.hpp"
#include "registry/http.hpp"
#include "support/raw_peer.hpp"
#include "support/temporary_folder.hpp"

namespace kvshard::testing {

inline bool etcd_is_installed() {
  const char* const path = std::getenv("PATH");
  std::istringstream folders{path == nullptr ? "" : path};
  for (std::string folder; std::getline(folders, folder, ':');)
    if (::access((folder + "/etcd").c_str(), X_OK) == 0) return true;
  return false;
}

/// A port that was free a moment ago. Outside the range from which the kernel takes ports (32768 and
/// up), so that nobody gets it while a service that had it is dead for a while.
inline std::uint16_t free_port() {
  std::random_device random;
  std::uniform_int_distribution<int> ports{12'000, 32'000};
  while (true) {
    const auto port = static_cast<std::uint16_t>(ports(random));
    const UniqueFd fd{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    const sockaddr_in address = loopback(port);
    if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0)
      return port;
  }
}

/// One etcd process. It dies with the thread that started it.
class EtcdProcess {
 public:
  EtcdProcess(std::vector<std::string> arguments, const std::filesystem::path& log) {
    std::vector<char*> argv;
    for (auto& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    const UniqueFd output{::open(log.c_str(), O_CREAT | O_APPEND | O_WRONLY | O_CLOEXEC, 0600)};
    const pid_t parent = ::getpid();
    pid_ = ::fork();
    if (pid_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(1);  // it died before that
    ::dup2(output.get(), STDOUT_FILENO);
    ::dup2(output.get(), STDERR_FILENO);
    ::execvp(argv[0], argv.data());
    ::_exit(127);
  }
  ~EtcdProcess() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  EtcdProcess(EtcdProcess&& other) noexcept : pid_{std::exchange(other.pid_, -1)} {}
  EtcdProcess& operator=(EtcdProcess&& other) noexcept {
    std::swap(pid_, other.pid_);
    return *this;
  }
  EtcdProcess(const EtcdProcess&) = delete;
  EtcdProcess& operator=(const EtcdProcess&) = delete;

  /// False also when it never ran.
  bool runs() {
    if (pid_ > 0 && ::waitpid(pid_, nullptr, WNOHANG) == pid_) pid_ = -1;
    return pid_ > 0;
  }

 private:
  pid_t pid_{-1};
};

/// A real etcd of one or three members, on loopback, in a temporary folder that goes with it.
class EtcdCluster {
 public:
  explicit EtcdCluster(std::size_t members = 1) {
    for (int attempt = 0; attempt < 5; ++attempt) {
      members_.clear();
      for (std::size_t i = 0; i < members; ++i) members_.push_back({free_port(), free_port(), {}});
      for (std::size_t i = 0; i < members; ++i) start(i, "new");
      bool ready = true;
      for (std::size_t i = 0; i < members; ++i) ready = ready && becomes_ready(i);
      if (ready) return;
      // Somebody else took a port between our look and etcd's.
      for (std::size_t i = 0; i < members; ++i) kill(i);
      wipe();
    }
    throw std::runtime_error("etcd does not start: " + read_log());
  }
  EtcdCluster(const EtcdCluster&) = delete;
  EtcdCluster& operator=(const EtcdCluster&) = delete;

  [[nodiscard]] http::Address address(std::size_t member = 0) const {
    return {"127.0.0.1", members_[member].client_port};
  }
  /// "host:port,host:port"
  [[nodiscard]] std::string endpoints() const {
    std::string all;
    for (std::size_t i = 0; i < members_.size(); ++i)
      all += (i == 0 ? "" : ",") + http::to_string(address(i));
    return all;
  }

  void kill(std::size_t member = 0) { members_[member].process.reset(); }
  void start_again(std::size_t member = 0) {
    start(member, "existing");
    if (!becomes_ready(member)) throw std::runtime_error("etcd does not come back: " + read_log());
  }
  /// All that a killed cluster of one knew.
  void forget() {
    wipe();
    start(0, "new");
    if (!becomes_ready(0)) throw std::runtime_error("etcd does not come back: " + read_log());
  }

  /// One exchange past the registry's client.
  [[nodiscard]] std::string ask(std::string_view target, std::string body) const {
    using namespace std::chrono_literals;
    auto response = http::fetch(address(), {"POST", std::string{target}, std::move(body)},
                                SteadyClock::instance().now() + 30s, {});
    EXPECT_TRUE(response) << response.error().message;
    return response ? response.value().body : std::string{};
  }

 private:
  struct Member {
    std::uint16_t client_port;
    std::uint16_t peer_port;
    std::optional<EtcdProcess> process;
  };

  void start(std::size_t index, std::string_view state) {
    const auto url = [](std::uint16_t port) { return fmt::format("http://127.0.0.1:{}", port); };
    std::string all;
    for (std::size_t i = 0; i < members_.size(); ++i)
      all += fmt::format("{}m{}={}", i == 0 ? "" : ",", i, url(members_[i].peer_port));
    Member& member = members_[index];
    // Alone it need not wait for others to be elected, and so can grant leases of one second, the
    // shortest being 1.5 election timeouts.
    const bool alone = members_.size() == 1;
    member.process.emplace(
        std::vector<std::string>{"etcd",
                                 "--name",
                                 fmt::format("m{}", index),
                                 "--data-dir",
                                 (folder_.path() / fmt::format("m{}", index)).string(),
                                 "--listen-client-urls",
                                 url(member.client_port),
                                 "--advertise-client-urls",
                                 url(member.client_port),
                                 "--listen-peer-urls",
                                 url(member.peer_port),
                                 "--initial-advertise-peer-urls",
                                 url(member.peer_port),
                                 "--initial-cluster",
                                 all,
                                 "--initial-cluster-state",
                                 std::string{state},
                                 "--heartbeat-interval",
                                 alone ? "10" : "100",
                                 "--election-timeout",
                                 alone ? "100" : "1000",
                                 "--unsafe-no-fsync",
                                 "--log-level",
                                 "error",
                                 "--log-outputs",
                                 "stderr"},
        folder_.path() / "log");
  }

  bool becomes_ready(std::size_t index) {
    using namespace std::chrono_literals;
    const TimePoint deadline = SteadyClock::instance().now() + 60s;
    while (members_[index].process->runs() && SteadyClock::instance().now() < deadline) {
      const auto health = http::fetch(address(index), {"GET", "/health", {}},
                                      SteadyClock::instance().now() + 5s, {});
      if (health && health.value().body.find("true") != std::string::npos) return true;
      ::poll(nullptr, 0, 5);
    }
    return false;
  }

  void wipe() {
    for (std::size_t i = 0; i < members_.size(); ++i)
      std::filesystem::remove_all(folder_.path() / fmt::format("m{}", i));
  }
  [[nodiscard]] std::string read_log() const {
    std::ostringstream text;
    text << std::ifstream{folder_.path() / "log"}.rdbuf();
    return text.str();
  }

  test::TemporaryFolder folder_{"etcd"};  // goes last, after who writes to it
  std::vector<Member> members_;
};

}  // namespace kvshard::testing
