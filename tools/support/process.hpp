#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "support/channel.hpp"

namespace kvshard::tools {

/// A child process: told to end, and waited for, when this object goes. It also ends with its parent.
class Process {
 public:
  /// Runs `arguments` with file descriptor `child_fd` as its number 3; -1 for an empty object.
  Process() = default;
  Process(const std::vector<std::string>& arguments, UniqueFd child_fd) {
    std::vector<char*> argv;
    for (const std::string& argument : arguments)
      argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(nullptr);
    const pid_t parent = ::getpid();
    pid_ = ::fork();
    if (pid_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(127);
    if (child_fd.get() == 3) {
      ::fcntl(3, F_SETFD, 0);
    } else {
      ::dup2(child_fd.get(), 3);
    }
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  Process(Process&& other) noexcept : pid_{std::exchange(other.pid_, -1)} {}
  Process& operator=(Process&& other) noexcept {
    end(SIGTERM);
    pid_ = std::exchange(other.pid_, -1);
    return *this;
  }
  ~Process() { end(SIGTERM); }

  void end(int signal) noexcept {
    if (pid_ <= 0) return;
    ::kill(pid_, signal);
    wait();
  }
  /// Waits for it to end by itself, for five seconds at most.
  void leave() noexcept {
    if (pid_ <= 0) return;
    const UniqueFd handle{static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0))};
    pollfd fd{.fd = handle.get(), .events = POLLIN, .revents = 0};
    if (::poll(&fd, 1, 5'000) != 1) return end(SIGKILL);
    wait();
  }
  void wait() noexcept {
    if (pid_ > 0) ::waitpid(std::exchange(pid_, -1), nullptr, 0);
  }

 private:
  pid_t pid_{-1};
};

/// A rank process and the way to talk to it. When this goes, the child sees the end of its channel, says
/// goodbye to its peers and the registry, and leaves.
class RankProcess {
 public:
  explicit RankProcess(const std::vector<std::string>& arguments) {
    int ends[2] = {-1, -1};
    (void)::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends);
    channel_.emplace(UniqueFd{ends[0]});
    process_ = Process{arguments, UniqueFd{ends[1]}};
  }
  RankProcess(RankProcess&&) noexcept = default;
  RankProcess& operator=(RankProcess&&) noexcept = default;
  ~RankProcess() {
    channel_.reset();
    process_.leave();
  }

  [[nodiscard]] Channel& channel() noexcept { return *channel_; }

 private:
  std::optional<Channel> channel_;
  Process process_;
};

}  // namespace kvshard::tools
