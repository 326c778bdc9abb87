#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kvshard/copy_engine.hpp"
#include "kvshard/export.hpp"
#include "kvshard/geometry.hpp"
#include "kvshard/result.hpp"
#include "kvshard/types.hpp"

namespace kvshard {

enum class Side : std::uint8_t { prefill, decode };

/// What one prefill rank gives one decode rank of one buffer group: a rectangle of layers and heads, as
/// the model numbers them. Which tokens follows from the two ranks' parts.
struct Lane {
  std::uint32_t group{0};  ///< index in Geometry::groups, the same on all ranks
  std::uint32_t first_layer{0}, layers{0};
  std::uint32_t first_head{0}, heads{0};

  friend bool operator==(const Lane&, const Lane&) = default;
};

/// Who gives what to one decode rank: result[p] is what prefill[p] gives, empty when it gives nothing.
///
/// Every (layer, head, token) that the decode rank holds comes from exactly one prefill rank. Where
/// several hold the same, the decode rank's number among those that want it picks one, so that all
/// sources are used alike: docs/geometry.md, "The plan". A rank that interleaves tokens is not asked
/// where the stripes of both sides have none in common.
/// Errors: failed_precondition naming the field and both values where two geometries do not fit, and
///         the group, layers, heads and part that no prefill rank holds; invalid_argument as validate().
KVSHARD_EXPORT Result<std::vector<std::vector<Lane>>> assign_lanes(
    std::span<const Geometry> prefill, const Geometry& decode);

/// How many of the decode ranks pull from each prefill rank: what its engine passes to
/// PrefillRank::open(). Errors: as assign_lanes().
KVSHARD_EXPORT Result<std::vector<std::uint32_t>> count_pullers(std::span<const Geometry> prefill,
                                                                std::span<const Geometry> decode);

/// The units of one table between two ranks, for given phases, numbered 0, 1, ... in token order.
///
/// A rank that holds one of `parts` parts of the tokens has a phase: it holds token t when
/// t / interleave % parts == phase, as its (t / (interleave * parts)) * interleave + t % interleave-th
/// token. Interleaved ranks have their part as phase. By page (interleave == page_size) the phase is
/// the position of the first page that the rank owns, (part - base) mod parts for a chain of rotation
/// base `base`.
///
/// A unit is `runs` runs of `run_tokens` tokens that lie in one page on both sides, at constant strides.
///
/// Owns:    a small vector: the units of one period of the two token patterns.
/// Threads: thread-compatible.
class KVSHARD_EXPORT UnitList {
 public:
  /// Where a unit lies. Pages are counted among those that the rank holds of the request, from 0.
  struct Place {
    std::uint64_t prefill_page{0};
    std::uint32_t prefill_token{0};  ///< of the unit's first token, within the page
    std::uint64_t decode_page{0};
    std::uint32_t decode_token{0};
    std::uint64_t first_token{0};  ///< within the request

    friend bool operator==(const Place&, const Place&) = default;
  };
  [[nodiscard]] Place operator[](std::uint64_t unit) const noexcept;
  /// No unit exists: the two ranks share no tokens.
  [[nodiscard]] bool empty() const noexcept { return period_.empty(); }

  [[nodiscard]] std::uint32_t unit_tokens() const noexcept { return runs_ * run_tokens_; }

  /// What of the tokens [first_token, end_token) the units cover: whole units [first, end), and of unit
  /// first - 1 the tokens from number `skip` on, when it has tokens on both sides of first_token.
  /// Requires that end_token splits no unit: it ends a page, or a stripe of pages, on both sides.
  struct Range {
    std::uint64_t first{0}, end{0};
    std::optional<std::uint32_t> skip{};
  };
  [[nodiscard]] Range range(std::uint64_t first_token, std::uint64_t end_token) const noexcept;
  /// The first unit in the prefill rank's page `page` or a later one.
  [[nodiscard]] std::uint64_t first_in_prefill_page(std::uint64_t page) const noexcept;

  /// Writes where units [first, first + out.size()) start in a buffer of `side`, in bytes.
  /// `pages` are that rank's pages of the request from number first_page on.
  /// Cost: a few nanoseconds a unit; allocates nothing.
  void offsets(Side side, std::uint64_t first, std::span<const LocalPage> pages,
               std::uint64_t first_page, std::uint64_t page_stride, std::uint64_t token_stride,
               std::span<std::uint64_t> out) const noexcept;
  /// The same for single tokens of one unit: tokens [skip, skip + out.size()) of unit `unit`.
  void token_offsets(Side side, std::uint64_t unit, std::uint32_t skip,
                     std::span<const LocalPage> pages, std::uint64_t first_page,
                     std::uint64_t page_stride, std::uint64_t token_stride,
                     std::span<std::uint64_t> out) const noexcept;

 private:
  friend class TokenMap;
  [[nodiscard]] std::uint64_t units_before(std::uint64_t token) const noexcept;

  std::vector<Place> period_;
  std::uint64_t period_tokens_{0}, prefill_pages_{0}, decode_pages_{0};  // of one period
  std::uint32_t runs_{1}, run_tokens_{1};
  std::uint64_t run_stride_{0};                                 // tokens, within the request
  std::uint32_t prefill_run_stride_{0}, decode_run_stride_{0};  // tokens, within the page
};

/// How the tokens of a prefill table map to those of a decode table, whatever the phases.
///
/// Source: docs/geometry.md, "Units".
class KVSHARD_EXPORT TokenMap {
 public:
  /// Requires groups that passed validate().
  /// Errors: failed_precondition naming page_size, parts or interleave and both values, when neither
  ///         side's token pattern is made of the other's, or both repeat too late to be kept.
  static Result<TokenMap> create(const BufferGroup& prefill, const BufferGroup& decode);

  [[nodiscard]] std::uint32_t runs() const noexcept { return runs_; }
  [[nodiscard]] std::uint32_t run_tokens() const noexcept { return run_tokens_; }
  [[nodiscard]] std::uint32_t unit_tokens() const noexcept { return runs_ * run_tokens_; }
  /// Tokens from one run of a unit to the next, in a page of that side.
  [[nodiscard]] std::uint32_t run_stride(Side side) const noexcept {
    return side == Side::prefill ? prefill_.run_stride : decode_.run_stride;
  }
  /// The same map with single runs as units, for pools whose strides need it.
  [[nodiscard]] TokenMap by_run() const;

  /// Requires phases below the sides' parts.
  [[nodiscard]] UnitList units(std::uint32_t prefill_phase, std::uint32_t decode_phase) const;

 private:
  // How one side cuts its tokens; run_stride as run_stride() says.
  struct Pattern {
    std::uint32_t page_size{1}, parts{1}, stripe{1}, run_stride{1};
  };
  [[nodiscard]] UnitList::Place place(std::uint64_t token) const noexcept;
  void find_runs();

  Pattern prefill_, decode_;
  std::uint64_t period_tokens_{1};
  std::uint32_t runs_{1}, run_tokens_{1};
  std::uint64_t run_stride_{1};  // tokens, within the request
};

/// How bytes move from one prefill rank to one decode rank: the lanes between them, their buffers
/// numbered table by table, lane by lane and layer by layer. Both sides make the same plan from the
/// two geometries and the lanes, and so mean the same by a buffer number and a unit number.
///
/// In a slot, a range of buffers and units lies buffer by buffer, and in each unit by unit. Within a
/// unit rows are in [token][head] order, or in [head][token] order where both sides keep it so.
///
/// Owns:    copies of what it needs of the geometries.
/// Threads: thread-compatible.
/// Errors:  create() gives failed_precondition as check_compatible(), and invalid_argument when a lane
///          leaves what both ranks hold, or holds what another one does.
/// Cost:    made once at connect; per request only units() allocates, once per table.
/// Source:  docs/geometry.md, "The plan".
class KVSHARD_EXPORT TransferPlan {
 public:
  static Result<TransferPlan> create(const Geometry& prefill, const Geometry& decode,
                                     std::span<const Lane> lanes);

  /// Groups that share page ids. Only tables that a lane belongs to, in ascending order.
  struct Table {
    std::uint32_t number{0};
    std::uint32_t first_buffer{0}, buffer_count{0};
    TokenMap tokens;
  };
  [[nodiscard]] std::span<const Table> tables() const noexcept { return tables_; }
  [[nodiscard]] const Table* find_table(std::uint32_t number) const noexcept;

  /// One side of a lane: how a unit, or a single token of it, lies in a buffer of that pool.
  struct LaneSide {
    std::uint32_t first_pool_buffer{0};  ///< of the group's, for the lane's first buffer
    std::uint64_t offset{0};             ///< of the lane's first head, bytes
    std::uint64_t page_stride{0}, token_stride{0};
    FragmentShape unit, token;
  };
  struct LaneBuffers {
    Lane lane;
    std::uint32_t first_buffer{0}, buffer_count{0};
    LaneSide prefill, decode;

    [[nodiscard]] const LaneSide& side(Side which) const noexcept {
      return which == Side::prefill ? prefill : decode;
    }
  };
  [[nodiscard]] std::span<const LaneBuffers> lanes() const noexcept { return lanes_; }

  [[nodiscard]] std::uint32_t buffers() const noexcept {
    return static_cast<std::uint32_t>(unit_bytes_.size() - 1);
  }
  /// Payload bytes of one unit, or of one token, in the buffers [first, first + count).
  [[nodiscard]] std::uint64_t unit_bytes(std::uint32_t first, std::uint32_t count) const noexcept {
    return unit_bytes_[first + count] - unit_bytes_[first];
  }
  [[nodiscard]] std::uint64_t token_bytes(std::uint32_t first, std::uint32_t count) const noexcept {
    return token_bytes_[first + count] - token_bytes_[first];
  }
  /// The buffers of the model's layers [first, first + count) in a table, as ranges (first, count).
  [[nodiscard]] std::vector<std::pair<std::uint32_t, std::uint32_t>> layer_ranges(
      const Table& table, std::uint32_t first, std::uint32_t count) const;

 private:
  TransferPlan() = default;
  void add_lane(const Geometry& prefill, const Geometry& decode, const Lane& lane,
                const TokenMap& tokens);

  std::vector<Table> tables_;
  std::vector<LaneBuffers> lanes_;
  std::vector<std::uint64_t> unit_bytes_, token_bytes_;  // prefix sums by buffer
};

}  // namespace kvshard
