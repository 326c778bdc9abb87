#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <string>
#include <vector>

#include "base/unique_fd.hpp"
#include "kvshard/registry.hpp"

extern char** environ;

namespace kvshard {
namespace {

using namespace std::chrono_literals;

struct Process {
  pid_t pid{-1};
  UniqueFd output;

  std::string read_line() const {
    std::string line;
    for (char c = 0; ::read(output.get(), &c, 1) == 1 && c != '\n';) line += c;
    return line;
  }
  int wait() const {
    int status = -1;
    ::waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
};

Process spawn(std::initializer_list<const char*> arguments) {
  std::array<int, 2> ends{-1, -1};
  EXPECT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
  Process process{-1, UniqueFd{ends[0]}};
  const UniqueFd writing{ends[1]};
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, writing.get(), STDOUT_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, writing.get(), STDERR_FILENO);
  std::vector<char*> argv{const_cast<char*>(KVSHARD_REGISTRY_TOOL)};
  for (const char* argument : arguments) argv.push_back(const_cast<char*>(argument));
  argv.push_back(nullptr);
  EXPECT_EQ(::posix_spawn(&process.pid, argv[0], &actions, nullptr, argv.data(), environ), 0);
  ::posix_spawn_file_actions_destroy(&actions);
  return process;
}

TEST(RegistryToolTest, PrintsItsAddressServesAndEndsOnASignal) {
  const Process tool = spawn({"--port", "0"});
  const std::string line = tool.read_line();
  const std::string before = "kvshard-registry: listening on ";
  ASSERT_TRUE(line.starts_with(before)) << line;
  {
    const auto registry = make_http_registry(line.substr(before.size())).value();
    const RankAnnouncement rank{.group = "g",
                                .epoch = 1,
                                .incarnation = 5,
                                .host = "127.0.0.1",
                                .port = 80,
                                .geometry_fields = {}};
    const auto announcement = Announcement::start(*registry, rank, 10s);
    ASSERT_TRUE(announcement) << announcement.error().message;
    EXPECT_TRUE(wait_for_group(*registry, "g", 10s));
  }
  ASSERT_EQ(::kill(tool.pid, SIGTERM), 0);
  EXPECT_EQ(tool.wait(), 0);
}

TEST(RegistryToolTest, SaysWhatIsWrongWithItsOptions) {
  const Process tool = spawn({"--host", "nowhere at all"});
  const std::string line = tool.read_line();
  EXPECT_NE(line.find("nowhere at all"), std::string::npos) << line;
  EXPECT_EQ(tool.wait(), 1);
}

}  // namespace
}  // namespace kvshard
