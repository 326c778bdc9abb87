#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "bench/config.hpp"
#include "bench/pool.hpp"
#include "kvshard/geometry.hpp"
#include "kvshard/page_layout.hpp"
#include "kvshard/result.hpp"

namespace kvshard::bench {

/// Who holds what in a pull measure. Every process makes the same from one configuration.
///
/// `concurrency` requests of equal length, whose pages lie in a row on each rank, but for a share of
/// `fragmentation` that is shuffled among itself.
class Workload {
 public:
  /// Errors: invalid_argument for an unknown model and for sizes that do not fit.
  static Result<Workload> create(const PullConfig& config);

  [[nodiscard]] std::uint32_t requests() const { return config_.concurrency; }
  [[nodiscard]] std::uint32_t pages() const { return pages_; }  ///< of a request
  [[nodiscard]] const PageLayout& layout() const { return layout_; }
  [[nodiscard]] const std::vector<Geometry>& prefill() const { return prefill_; }
  [[nodiscard]] const std::vector<Geometry>& decode() const { return decode_; }
  /// KV bytes that one decode rank pulls for all requests together.
  [[nodiscard]] std::uint64_t bytes_per_decode_rank() const;
  /// Contiguous bytes of one page in one buffer that go from one rank to another: the operation of a
  /// transfer page by page.
  [[nodiscard]] std::uint64_t fragment_bytes() const;

  /// A request's pages by position, on the prefill and the decode side.
  [[nodiscard]] std::span<const LogicalPage> source(std::uint32_t request) const {
    return std::span{source_}.subspan(std::size_t{request} * pages_, pages_);
  }
  [[nodiscard]] std::span<const LocalPage> destination(std::uint32_t request) const {
    return std::span{destination_}.subspan(std::size_t{request} * pages_, pages_);
  }
  /// What a rank's pool holds before, and has to hold after, all pulls.
  [[nodiscard]] std::vector<PageContent> prefill_content(std::uint32_t rank) const;
  [[nodiscard]] std::vector<PageContent> decode_content() const;

 private:
  Workload(const PullConfig& config, const PageLayout& layout) : config_{config}, layout_{layout} {}

  PullConfig config_;
  PageLayout layout_;
  std::uint32_t pages_{0};
  std::vector<Geometry> prefill_, decode_;
  std::vector<LogicalPage> source_;
  std::vector<LocalPage> destination_;
};

}  // namespace kvshard::bench
