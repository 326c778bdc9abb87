#pragma once

#include <sys/types.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>

#include "base/unique_fd.hpp"
#include "kvshard/prefill_rank.hpp"
#include "support/cuda_pool.hpp"

// Prefill ranks with pages in GPU memory, each in a process of its own: this program again, started with
// kPrefillFlag and a socket, since a process that has used CUDA cannot be forked.
namespace kvshard::test {

inline constexpr char kPrefillFlag[] = "--prefill-rank";

/// How the bytes travel.
enum class Via : std::uint32_t { mapped, get, am, automatic };

/// UCX; for mapped pages any other where this build has no UCX.
Result<std::unique_ptr<Transport>> make_cuda_transport(Via via);

struct CudaPrefillSetup {
  Via via{Via::mapped};
  std::int32_t reshard_case{-1};  // of reshard_cases(); -1: small_geometry() by page
  std::uint32_t rank{0}, ranks{1};
  std::uint32_t page_count{65};
  CudaPool::Memory memory{CudaPool::Memory::plain};
  std::uint64_t epoch{1};
};

class CudaPrefill {
 public:
  explicit CudaPrefill(const CudaPrefillSetup& setup);
  ~CudaPrefill();
  CudaPrefill(const CudaPrefill&) = delete;
  CudaPrefill& operator=(const CudaPrefill&) = delete;

  /// Waits until the rank serves.
  Result<GroupMember> member();
  Status open(RoomId room, std::uint32_t pullers = 1);
  Status abort(RoomId room);

  /// Positions from `first` on, which a kernel writes as `content`, `delay` after it was launched.
  struct Chunk {
    RoomId room{};
    std::span<const LogicalPage> pages;
    std::uint32_t first{0};
    Content content{};
    std::chrono::milliseconds delay{0};
    bool last{true};
  };
  /// Only writes the pages, and waits for that.
  Status fill(const Chunk& chunk);
  /// Publishes them before they are written. True: their event had not fired then.
  Result<bool> publish(const Chunk& chunk);
  /// Opens the reshard case's room, and publishes its request in ragged chunks.
  Status publish_request(RoomId room, std::uint32_t pullers);
  /// How the next room ended.
  Status room_end();
  PrefillStats stats();

  void kill();

 private:
  struct Order;
  struct Answer;
  class Server;
  friend int run_cuda_prefill(int socket);

  Answer call(const Order& order);
  Answer hear();
  static Order order_of(const Chunk& chunk);

  CudaPrefillSetup setup_;
  UniqueFd socket_;
  pid_t pid_{-1};
};

/// What the other process does, until its socket is closed.
int run_cuda_prefill(int socket);

}  // namespace kvshard::test
