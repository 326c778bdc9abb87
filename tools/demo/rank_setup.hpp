#pragma once

#include <fmt/format.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/try.hpp"
#include "demo/roles.hpp"
#include "kvshard/copy_engine.hpp"
#include "kvshard/decode_rank.hpp"
#include "kvshard/geometry.hpp"
#include "kvshard/transport.hpp"
#include "support/rank_trace.hpp"
#include "tiny_llm/kv.hpp"
#include "tiny_llm/model.hpp"

namespace demo {

/// The backends that both kinds of rank make from their options.
struct Backends {
  std::unique_ptr<kvshard::Transport> transport;
  std::unique_ptr<kvshard::CopyEngine> engine;
};

inline kvshard::Result<Backends> make_backends(const RoleOptions& options) {
  using namespace kvshard;
  const bool cuda = options.memory == "cuda";
  Backends made;
  KVSHARD_TRY(made.transport,
              make_transport({.kind = TransportOptions::Kind::ucx,
                              .path = options.path == "get"  ? TransferPath::get
                                      : options.path == "am" ? TransferPath::am
                                                             : TransferPath::automatic,
                              .cuda_device = cuda ? 0 : -1}));
  CopyEngineOptions copy;
  copy.memory = cuda ? MemoryKind::cuda : MemoryKind::host;
  KVSHARD_TRY(made.engine, make_copy_engine(copy));
  return made;
}

/// Whether decode copies straight from pages, as `--path` has it: "get" and "am" go through slots.
inline kvshard::Mapped mapped(const RoleOptions& options) {
  if (options.path == "auto") return kvshard::Mapped::automatic;
  return options.path == "mapped" ? kvshard::Mapped::always : kvshard::Mapped::never;
}

/// What the ranks of each side declare. Every rank can tell, and so who pulls from whom.
inline std::vector<kvshard::Geometry> prefill_geometries(const tiny_llm::Model& model,
                                                         const RoleOptions& options) {
  std::vector<kvshard::Geometry> ranks;
  for (std::uint32_t rank = 0; rank < options.shard_size; ++rank) {
    ranks.push_back(tiny_llm::kv_geometry(model.config().kv_shape(), options.page_size,
                                          options.pool_pages + 1, model.id()));
    ranks.back().rank = rank;
    ranks.back().ranks = options.shard_size;
    ranks.back().groups[0].parts = options.shard_size;  // every N-th page
    ranks.back().groups[0].part = rank;
  }
  return ranks;
}
inline std::vector<kvshard::Geometry> decode_geometries(const tiny_llm::Model& model,
                                                        const RoleOptions& options) {
  std::vector<kvshard::Geometry> ranks;
  for (std::uint32_t rank = 0; rank < options.decode_tp; ++rank) {
    ranks.push_back(tiny_llm::kv_geometry(model.config().kv_shape(options.decode_tp),
                                          options.page_size, options.pool_pages + 1, model.id()));
    ranks.back().rank = rank;
    ranks.back().ranks = options.decode_tp;
    kvshard::BufferGroup& group = ranks.back().groups[0];
    group.total_heads = model.config().kv_shape().heads;
    group.first_head =
        rank * group.heads % group.total_heads;  // the one head of latent KV: all have it
  }
  return ranks;
}

/// What a viewer of traces calls this process.
inline std::string trace_name(const RoleOptions& options, const char* side) {
  return fmt::format("{} {} (run {})", side, options.rank, options.epoch);
}

/// Tells the parent why this process cannot go on, and gives its exit code.
inline int give_up(Channel& channel, const std::string& why) {
  (void)channel.send({{"failed", why}});
  return 1;
}

}  // namespace demo
