#pragma once

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "base/unique_fd.hpp"

namespace kvshard::test {

/// A process that forks others on demand. It is made before this process has threads and has none itself,
/// so that its children start clean at any time.
class Zygote {
 public:
  /// Runs in each child: `socket` leads to whoever asked, `request` is what it asked for.
  using ChildMain = std::function<void(int socket, const std::string& request)>;

  explicit Zygote(ChildMain child_main) {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) std::abort();
    socket_ = UniqueFd{ends[0]};
    UniqueFd theirs{ends[1]};
    pid_ = ::fork();
    if (pid_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    socket_.reset();
    serve(theirs.get(), child_main);
    ::_exit(0);
  }
  ~Zygote() {
    socket_.reset();
    ::waitpid(pid_, nullptr, 0);
  }
  Zygote(const Zygote&) = delete;
  Zygote& operator=(const Zygote&) = delete;

  struct Child {
    pid_t pid;
    UniqueFd socket;
  };
  Child spawn(const std::string& request) {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) std::abort();
    UniqueFd ours{ends[0]};
    const UniqueFd theirs{ends[1]};
    iovec text{.iov_base = const_cast<char*>(request.data()), .iov_len = request.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))]{};
    msghdr message{};
    message.msg_iov = &text;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    const int fd = theirs.get();
    std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
    pid_t pid = -1;
    if (::sendmsg(socket_.get(), &message, MSG_NOSIGNAL) < 0 ||
        ::recv(socket_.get(), &pid, sizeof pid, 0) != sizeof pid)
      std::abort();
    return {pid, std::move(ours)};
  }

 private:
  static void serve(int socket, const ChildMain& child_main) {
    ::signal(SIGCHLD, SIG_IGN);  // the kernel reaps
    for (;;) {
      char text[8192];
      iovec where{.iov_base = text, .iov_len = sizeof text};
      alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))]{};
      msghdr message{};
      message.msg_iov = &where;
      message.msg_iovlen = 1;
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      const auto got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
      if (got <= 0) return;
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
      const UniqueFd theirs{fd};
      const pid_t pid = ::fork();
      if (pid == 0) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        ::signal(SIGCHLD, SIG_DFL);
        ::close(socket);
        child_main(fd, std::string{text, static_cast<std::size_t>(got)});
        ::_exit(0);
      }
      (void)::send(socket, &pid, sizeof pid, MSG_NOSIGNAL);
    }
  }

  pid_t pid_{-1};
  UniqueFd socket_;
};

/// The next message of a child, or nothing when it is gone or silent for `limit`.
inline std::optional<std::string> hear(int socket,
                                       std::chrono::milliseconds limit = std::chrono::seconds{20}) {
  pollfd fd{.fd = socket, .events = POLLIN, .revents = 0};
  if (::poll(&fd, 1, static_cast<int>(limit.count())) != 1) return std::nullopt;
  char text[8192];
  const auto got = ::recv(socket, text, sizeof text, 0);
  if (got <= 0) return std::nullopt;
  return std::string{text, static_cast<std::size_t>(got)};
}

inline void say(int socket, const std::string& text) {
  (void)::send(socket, text.data(), text.size(), MSG_NOSIGNAL);
}

}  // namespace kvshard::test
