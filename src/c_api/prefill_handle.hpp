#pragma once

#include <memory>

#include "kvshard/kvshard.h"
#include "kvshard/prefill_rank.hpp"

// Announcing a rank needs its handle, too.
struct kvshard_prefill_rank {
  std::unique_ptr<kvshard::PrefillRank> rank;
};
