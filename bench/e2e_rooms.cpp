// What a request costs while many others are in flight: 64 prefill ranks and a decode rank in one process,
// over the loopback transport. Prints one JSON object a mode and number of rooms.
//
//   e2e_rooms [--rooms 10,100,1000,10000] [--groups 1] [--shards 64] [--decode 1] [--requests 2000] ...
//
// Each measurement has a process of its own, so that its peak of memory is its own; repeats alternate.

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "base/try.hpp"
#include "support/room_fleet.hpp"

namespace kvshard::bench {
namespace {

enum class Mode : std::uint8_t { waiting, at_once };

struct Config {
  FleetOptions fleet;
  std::vector<std::uint32_t> rooms{10, 100, 1'000, 10'000};
  std::uint64_t requests{2'000};
  std::uint32_t active{8};
  std::uint32_t repeat{3};
};

// What a child tells its parent.
struct Measured {
  RequestCost cost;
  double peak_bytes{0};  // of a room: what memory grew by since the ranks were connected
};

double resident_bytes() {
  std::ifstream file{"/proc/self/statm"};
  double total = 0;
  double resident = 0;
  file >> total >> resident;
  return resident * static_cast<double>(::sysconf(_SC_PAGESIZE));
}

Result<Measured> measure(const Config& config, Mode mode, std::uint32_t rooms) {
  FleetOptions options = config.fleet;
  options.rooms = rooms;
  KVSHARD_TRY(const auto fleet, RoomFleet::create(options));
  const double before = resident_bytes();
  Measured measured;
  KVSHARD_TRY(measured.cost, mode == Mode::waiting
                                 ? run_waiting(*fleet, std::min(config.active, rooms / 2),
                                               config.requests / 4, config.requests)
                                 : run_at_once(*fleet, config.requests));
  rusage usage{};
  (void)::getrusage(RUSAGE_SELF, &usage);
  measured.peak_bytes = (static_cast<double>(usage.ru_maxrss) * 1024 - before) / rooms;
  return measured;
}

Result<Measured> measure_in_child(const Config& config, Mode mode, std::uint32_t rooms) {
  std::array<int, 2> ends{};
  if (::pipe(ends.data()) != 0) return Error{ErrorCode::resource_exhausted, "no pipe"};
  const pid_t child = ::fork();
  if (child < 0) return Error{ErrorCode::resource_exhausted, "no process"};
  if (child == 0) {
    const auto measured = measure(config, mode, rooms);
    if (!measured) {
      fmt::print(stderr, "{} rooms: {}\n", rooms, measured.error().message);
      std::_Exit(1);
    }
    const bool told = ::write(ends[1], &*measured, sizeof *measured) == sizeof *measured;
    std::_Exit(told ? 0 : 1);
  }
  ::close(ends[1]);
  Measured measured;
  const bool told = ::read(ends[0], &measured, sizeof measured) == sizeof measured;
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  if (told && status == 0) return measured;
  return Error{ErrorCode::internal, "a measurement failed"};
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

Status run(const Config& config) {
  for (const Mode mode : {Mode::waiting, Mode::at_once}) {
    std::vector<std::vector<Measured>> measured(config.rooms.size());
    for (std::uint32_t i = 0; i < config.repeat; ++i) {
      for (std::size_t r = 0; r < config.rooms.size(); ++r) {
        KVSHARD_TRY(measured[r].emplace_back(), measure_in_child(config, mode, config.rooms[r]));
      }
    }
    const auto of = [&](std::size_t r, auto&& field) {
      std::vector<double> values;
      for (const Measured& each : measured[r]) values.push_back(field(each));
      return median(values);
    };
    const auto cpu = [](const Measured& each) { return each.cost.cpu_ns; };
    for (std::size_t r = 0; r < config.rooms.size(); ++r) {
      fmt::print(
          "{{\"bench\":\"rooms\",\"params\":{{\"mode\":\"{}\",\"rooms\":{},\"groups\":{},"
          "\"shard_size\":{},\"decode_ranks\":{},\"active\":{}}},\"bytes\":{},\"iterations\":{},"
          "\"cpu_ns\":{:.0f},\"wall_ns\":{:.0f},\"peak_bytes_per_room\":{:.0f},"
          "\"baseline\":{:.0f},\"ratio\":{:.3f},\"verified\":true}}\n",
          mode == Mode::waiting ? "waiting" : "at_once", config.rooms[r], config.fleet.groups,
          config.fleet.shard_size, config.fleet.decode_ranks, config.active,
          config.fleet.shard_size * 64, config.repeat * config.requests, of(r, cpu),
          of(r, [](const Measured& each) { return each.cost.wall_ns; }),
          of(r, [](const Measured& each) { return each.peak_bytes; }), of(0, cpu),
          of(r, cpu) / of(0, cpu));
      std::fflush(stdout);
    }
  }
  return {};
}

}  // namespace
}  // namespace kvshard::bench

int main(int argc, char** argv) {
  kvshard::bench::Config config;
  CLI::App app{"What a request costs while many others are in flight"};
  app.add_option("--rooms", config.rooms, "In flight at once; the first is the baseline")
      ->delimiter(',')
      ->check(CLI::Range(2U, 16'000U));
  app.add_option("--groups", config.fleet.groups, "Prefill groups")->check(CLI::Range(1U, 1'024U));
  app.add_option("--shards", config.fleet.shard_size, "Ranks of a group")
      ->check(CLI::Range(1U, 1'024U));
  app.add_option("--decode", config.fleet.decode_ranks, "Decode ranks")->check(CLI::Range(1U, 64U));
  app.add_option("--active", config.active, "Whose chunks are there, while the others wait")
      ->check(CLI::PositiveNumber);
  app.add_option("--requests", config.requests, "Measured each time")->check(CLI::PositiveNumber);
  app.add_option("--repeat", config.repeat, "Measurements; the median counts")
      ->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  const auto status = kvshard::bench::run(config);
  if (!status) fmt::print(stderr, "{}\n", status.error().message);
  return status ? 0 : 1;
}
