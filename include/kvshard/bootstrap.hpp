#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kvshard/export.hpp"
#include "kvshard/page_layout.hpp"
#include "kvshard/result.hpp"

namespace kvshard {

/// One admission predicate of an engine, as data. It admits a prompt of L tokens when
///
///   round(L) + output_tokens + pages_per_rank * shard_size * page_size  <  available tokens
///
/// (<= unless strict), where available is PageAllocator::admissible_tokens().
struct AdmissionRule {
  std::string name;                  ///< for messages
  std::uint32_t output_tokens{0};    ///< tokens kept for new output
  std::uint32_t pages_per_rank{0};   ///< pages kept free on every rank
  bool round_prompt_to_page{false};  ///< the prompt counts in whole pages
  bool strict{false};                ///< what is needed must be less than what is there

  /// The pages must be there: L <= available. Always in force.
  static AdmissionRule physical() { return {"physical", 0, 0, false, false}; }
  /// L + 1 + N * ps < available.
  static AdmissionRule normal() { return {"normal", 1, 1, false, true}; }
  /// available - N * ps - ceil_page(L) - 1 > 1, for requests that decode to their token limit.
  static AdmissionRule ignore_eos() { return {"ignore_eos", 2, 1, true, true}; }
};

/// The longest prompt that an empty pool admits, and the rule that says so.
struct CapacityLimit {
  std::uint64_t tokens{0};
  std::string rule;
};

/// Says at intake whether a prompt can ever be admitted, and later whether it is admitted now.
///
/// Both answers come from the same predicates. So a prompt that passes intake is admitted at the
/// latest when the pool is empty, and the head of a first-come queue can never wait for ever. The
/// rules must be those by which the engine admits; call check_now() instead of writing them a
/// second time. A group of one rank is not sharded and keeps tokens_per_rank as its limit: only
/// `physical` is in force.
///
/// Units:   tokens.
/// Owns:    its copy of the rules.
/// Threads: thread-compatible.
/// Errors:  create() gives invalid_argument when the pool is empty or not a whole number of pages,
///          or when the rules admit no prompt at all.
/// Cost:    create() evaluates each rule about 64 times; the checks are O(rules) and allocate only
///          messages.
/// Source:  docs/page_interleave.md, "Capacity".
class KVSHARD_EXPORT CapacityCheck {
 public:
  /// `tokens_per_rank` is what one rank's usable pages hold. `rules` come beside `physical`.
  static Result<CapacityCheck> create(const PageLayout& layout, std::uint64_t tokens_per_rank,
                                      std::vector<AdmissionRule> rules);

  [[nodiscard]] const CapacityLimit& limit() const noexcept { return limit_; }
  /// The rules in force.
  [[nodiscard]] const std::vector<AdmissionRule>& rules() const noexcept { return rules_; }

  /// Errors: invalid_argument naming prompt, limit and rule when the prompt can never be admitted.
  [[nodiscard]] Status check_intake(std::uint64_t prompt_tokens) const;
  /// `available_tokens` is PageAllocator::admissible_tokens().
  /// Errors: as check_intake(); resource_exhausted naming prompt, available tokens and rule when it
  ///         is not admitted now.
  [[nodiscard]] Status check_now(std::uint64_t prompt_tokens, std::uint64_t available_tokens) const;

 private:
  CapacityCheck(const PageLayout& layout, std::vector<AdmissionRule> rules)
      : layout_{layout}, rules_{std::move(rules)} {}
  [[nodiscard]] bool admits(const AdmissionRule& rule, std::uint64_t prompt_tokens,
                            std::uint64_t available_tokens) const noexcept;

  PageLayout layout_;
  std::vector<AdmissionRule> rules_;
  CapacityLimit limit_;
};

}  // namespace kvshard
