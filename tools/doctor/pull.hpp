#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "doctor/facts.hpp"
#include "kvshard/prefill_rank.hpp"
#include "kvshard/result.hpp"
#include "kvshard/security.hpp"

namespace kvshard::doctor {

/// Where a served host is: its rank with pages in host memory.
struct Address {
  std::string host{};  ///< an IP address
  std::uint16_t port{0};
};

/// Prefill ranks that any number of decode ranks can pull the same pages from: one with pages in host
/// memory, and one on GPU 0, where there is one. Each pull brings `Hello` as its side data.
class Served {
 public:
  static Result<Served> start(const Address& listen, const SecurityOptions& security,
                              const Facts& facts);
  [[nodiscard]] std::uint16_t port() const;

 private:
  struct Rank;
  std::vector<std::shared_ptr<Rank>> ranks_;
};

/// What a served host says of itself.
struct Hello {
  Facts facts{};
  std::uint16_t cuda_port{0};  ///< of its rank with GPU pages; 0: none
  std::string cuda_error{};    ///< why there is none, though it has a GPU
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Hello, facts, cuda_port, cuda_error)

/// One pull to measure.
struct PullTask {
  Address from{};
  std::string from_memory{}, to_memory{};  ///< "host", "cuda"
  bool mapped{false};
  int cuda_device{0};  ///< of the pages it goes to
};

struct Pulled {
  Measure measure;
  Hello hello;
};

/// Pulls, compares every byte, and times it. Within a minute, unless UCX or a driver hangs.
Pulled pull(const PullTask& task, const SecurityOptions& security);

}  // namespace kvshard::doctor
