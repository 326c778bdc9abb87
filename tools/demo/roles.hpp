#pragma once

#include <cstdint>
#include <string>

#include "support/channel.hpp"

namespace demo {

using kvshard::tools::Channel;
using kvshard::tools::Json;

/// What a rank process is told on its command line.
struct RoleOptions {
  std::string registry;  ///< host:port
  std::string group;
  std::uint64_t epoch{1};
  std::uint32_t rank{0};        ///< among the ranks of its side
  std::uint32_t shard_size{1};  ///< prefill ranks
  std::uint32_t decode_tp{1};   ///< decode ranks
  std::string model;            ///< a checkpoint
  std::uint32_t page_size{16};
  std::uint32_t pool_pages{64};  ///< usable pages of this rank
  std::uint32_t chunk_tokens{128};
  std::string memory{"host"};
  std::string path{"auto"};
  std::string trace;  ///< the file that this rank's trace goes to; empty: none
};

/// A prefill rank's process: owns a part of each prompt's pages, computes the tokens on them together with the
/// other ranks, and serves them. Messages in, after the sockets to its peers:
///   {"op": "prefill", "room", "prompt"}   draw pages, compute, publish chunk by chunk
///   {"op": "free", "room"}                give the pages back; sent to all ranks in one order
/// Messages out: {"ready": true}, {"released": room, "error"?}, {"failed": why}
int run_prefill(const RoleOptions& options, Channel& channel);

/// A decode rank's process: pulls its heads of a prompt's pages from every prefill rank, and decodes together
/// with the other decode ranks. Messages in, after the sockets to its peers, in one order to all ranks:
///   {"op": "decode", "room", "prompt_tokens", "count", "damage"}
/// Messages out: {"ready": true}, {"room", "tokens", "logits", ...} or {"room", "error"}, {"failed": why}
int run_decode(const RoleOptions& options, Channel& channel);

}  // namespace demo
