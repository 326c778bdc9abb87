#pragma once

#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <string>

namespace kvshard::test {

struct Outcome {
  int exit_code{-1};  ///< 128 when a signal ended it
  std::string output;
};

/// Runs a shell command to its end. Its standard error goes where the test's goes, unless the command says otherwise.
inline Outcome run_command(const std::string& command) {
  Outcome outcome;
  std::FILE* const pipe = ::popen(command.c_str(), "r");
  std::array<char, 4096> buffer;
  for (std::size_t got = 0; (got = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;)
    outcome.output.append(buffer.data(), got);
  const int status = ::pclose(pipe);
  outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128;
  return outcome;
}

}  // namespace kvshard::test
