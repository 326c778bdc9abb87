#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvshard/export.hpp"
#include "kvshard/result.hpp"

namespace kvshard {

/// Element types of a KV cache. Only compared, never converted. The values travel on the wire.
enum class ElementType : std::uint8_t {
  f32 = 1,
  f16 = 2,
  bf16 = 3,
  f8_e4m3 = 4,
  f8_e5m2 = 5,
  i8 = 6,
  u8 = 7
};

/// Which index runs slower within a page: tokens ([token][head]) or heads ([head][token]).
enum class PageOrder : std::uint8_t { token_major = 1, head_major = 2 };

KVSHARD_EXPORT std::string_view to_string(ElementType type) noexcept;
KVSHARD_EXPORT std::string_view to_string(PageOrder order) noexcept;

/// Buffers that share one page shape, and how a rank's share of them is cut out of the model's: main KV,
/// indexer keys, a draft model's KV, a window, a recurrent state. Latent KV (MLA) is one head in one
/// buffer per layer. A state kept in one slot per request is a group of page_size 1 and one page.
///
/// Groups of the same `table` are indexed by the same page ids; their page_size, parts, part and
/// interleave are equal. All ranks of a side list the same groups in the same order; one that holds
/// nothing of a group (another pipeline stage does) has 0 layers.
///
/// Tokens: with `parts` > 1 the rank holds one part of them: by page (interleave 0 or page_size; which
/// page is told by its id, l % parts), or in stripes of `interleave` tokens, of which this rank has
/// those with t / interleave % parts == part, packed in its pages.
/// Heads:   [first_head, first_head + heads) of all_heads(). Ranks that hold the same are replicas.
/// Layers:  [first_layer, first_layer + layers) of all_layers().
/// Units:   sizes and strides in bytes; page_size in tokens. A stride of 0 means packed in `order`.
struct BufferGroup {
  std::string name{"kv"};
  std::uint32_t layers{0};             ///< that this rank holds
  std::uint32_t buffers_per_layer{2};  ///< 2: K and V; 1: latent, or K and V interleaved
  ElementType element_type{ElementType::bf16};
  std::uint32_t heads{0};       ///< KV heads that this rank holds
  std::uint32_t head_bytes{0};  ///< one token's row of one head in one buffer
  PageOrder order{PageOrder::token_major};
  std::uint32_t page_size{0};
  std::uint64_t token_stride{0};
  std::uint64_t head_stride{0};
  std::uint64_t page_stride{0};
  std::uint32_t page_count{0};  ///< physical pages of this rank, padding page 0 included
  std::uint32_t table{0};
  std::uint32_t parts{1}, part{0};
  std::uint32_t interleave{0};
  std::uint32_t first_head{0}, total_heads{0};    ///< total 0: this rank holds all
  std::uint32_t first_layer{0}, total_layers{0};  ///< total 0: this rank holds all

  [[nodiscard]] constexpr std::uint32_t all_heads() const noexcept {
    return total_heads != 0 ? total_heads : heads;
  }
  [[nodiscard]] constexpr std::uint32_t all_layers() const noexcept {
    return total_layers != 0 ? total_layers : layers;
  }
  /// Tokens that follow each other in one part.
  [[nodiscard]] constexpr std::uint32_t stripe() const noexcept {
    return interleave != 0 && parts > 1 ? interleave : page_size;
  }
  /// Tokens of the request that one page number stands for: by page, the page; interleaved, that page
  /// of all parts.
  [[nodiscard]] constexpr std::uint64_t page_span() const noexcept {
    return stripe() == page_size ? page_size : std::uint64_t{page_size} * parts;
  }
  [[nodiscard]] constexpr std::uint32_t buffers() const noexcept {
    return layers * buffers_per_layer;
  }
  /// Which stripes modulo `parts` the rank holds of a request whose first page is on part `base`: by
  /// page, the position of its first page there; interleaved, its part, whatever the base.
  [[nodiscard]] constexpr std::uint32_t phase(std::uint32_t base) const noexcept {
    return stripe() == page_size ? (part + parts - base % parts) % parts : part;
  }
  /// Payload bytes of one page in one buffer.
  [[nodiscard]] constexpr std::uint64_t page_bytes() const noexcept {
    return std::uint64_t{page_size} * heads * head_bytes;
  }
  friend bool operator==(const BufferGroup&, const BufferGroup&) = default;
};

/// What one rank's pool looks like, as declared to its peers; nothing is inferred from shapes.
struct Geometry {
  std::string model_id;  ///< any string; both sides must use the same
  std::vector<BufferGroup> groups;
  std::uint32_t rank{0};   ///< this rank's number among its side's; decides which copy serves it
  std::uint32_t ranks{1};  ///< of its side

  friend bool operator==(const Geometry&, const Geometry&) = default;
};

/// A rank's pool: its geometry, and where its buffers start.
///
/// Shapes:  buffers[g] has groups[g].buffers() pointers, layer-major: layer 0's buffers, then layer 1's.
///          Page p of a buffer starts at p * page_stride.
/// Owns:    nothing; the engine's memory must outlive the rank that was given the pool.
struct Pool {
  Geometry geometry;
  std::vector<std::vector<std::byte*>> buffers;
};

/// Limits of what a geometry may declare; a peer that exceeds one is refused.
inline constexpr std::uint32_t kMaxBufferGroups = 16;
inline constexpr std::uint32_t kMaxBuffers = 4096;
inline constexpr std::size_t kMaxNameBytes = 256;

/// Whether a geometry describes a possible pool. Errors: invalid_argument naming group, field and value.
KVSHARD_EXPORT Status validate(const Geometry& geometry);
/// Also checks that `buffers` fits the geometry and holds no null.
KVSHARD_EXPORT Status validate(const Pool& pool);

/// Whether pages move from a prefill pool to a decode pool: everything that gives bytes their meaning is
/// equal, and one side's token pattern is made of the other's (TokenMap). Which heads, layers and tokens a
/// rank holds, strides, order and page counts may differ.
/// Errors: failed_precondition naming the first field that does not fit, with both values; invalid_argument
///         as validate().
KVSHARD_EXPORT Status check_compatible(const Geometry& prefill, const Geometry& decode);

/// What all ranks of a side have in common, as (name, value) text, for a registry and for people: totals and
/// how tokens are cut, not which share this rank has. Group fields are named "<group name>.<field>".
KVSHARD_EXPORT std::vector<std::pair<std::string, std::string>> describe(const Geometry& geometry);

}  // namespace kvshard
