#include "kvshard/bootstrap.hpp"

#include <fmt/format.h>

#include <limits>

#include "base/try.hpp"

namespace kvshard {

Result<CapacityCheck> CapacityCheck::create(const PageLayout& layout, std::uint64_t tokens_per_rank,
                                            std::vector<AdmissionRule> rules) {
  if (tokens_per_rank == 0 || tokens_per_rank % layout.page_size() != 0)
    return Error{ErrorCode::invalid_argument,
                 fmt::format("{} tokens per rank are not a whole number of pages of {}",
                             tokens_per_rank, layout.page_size())};
  if (tokens_per_rank > std::numeric_limits<std::uint64_t>::max() / 2 / layout.shard_size())
    return Error{ErrorCode::invalid_argument,
                 fmt::format("{} tokens per rank times shard_size {} exceed 63 bits",
                             tokens_per_rank, layout.shard_size())};
  if (layout.shard_size() == 1) rules.clear();
  rules.insert(rules.begin(), AdmissionRule::physical());

  CapacityCheck check{layout, std::move(rules)};
  const auto empty_pool = tokens_per_rank * layout.shard_size();
  check.limit_ = {empty_pool, check.rules_[0].name};
  for (const auto& rule : check.rules_) {
    // The longest prompt that the predicate admits. A longer prompt never needs less, so it can be
    // bisected: the last length admitted (0 stands for none), the first refused.
    std::uint64_t admitted = 0;
    std::uint64_t refused = empty_pool + 1;
    while (refused - admitted > 1) {
      const auto middle = admitted + (refused - admitted) / 2;
      (check.admits(rule, middle, empty_pool) ? admitted : refused) = middle;
    }
    if (admitted < check.limit_.tokens) check.limit_ = {admitted, rule.name};
  }
  if (check.limit_.tokens == 0)
    return Error{ErrorCode::invalid_argument,
                 fmt::format("rule {} admits no prompt to a pool of {} tokens", check.limit_.rule,
                             empty_pool)};
  return check;
}

bool CapacityCheck::admits(const AdmissionRule& rule, std::uint64_t prompt_tokens,
                           std::uint64_t available_tokens) const noexcept {
  // Subtracts one need after the other from what is there, so that nothing wraps.
  auto left = available_tokens;
  const auto fits = [&left](std::uint64_t needed) {
    if (needed > left) return false;
    left -= needed;
    return true;
  };
  const auto pages = layout_.pages_for(prompt_tokens);
  if (rule.round_prompt_to_page && pages > available_tokens / layout_.page_size()) return false;
  const auto group_pages = std::uint64_t{rule.pages_per_rank};
  if (group_pages > available_tokens / layout_.group_page_tokens()) return false;
  return fits(rule.round_prompt_to_page ? pages * layout_.page_size() : prompt_tokens) &&
         fits(rule.output_tokens) && fits(group_pages * layout_.group_page_tokens()) &&
         fits(rule.strict ? 1 : 0);
}

Status CapacityCheck::check_intake(std::uint64_t prompt_tokens) const {
  if (prompt_tokens <= limit_.tokens) return {};
  return Error{
      ErrorCode::invalid_argument,
      fmt::format("a prompt of {} tokens can never be admitted: the limit is {} by rule {}",
                  prompt_tokens, limit_.tokens, limit_.rule)};
}

Status CapacityCheck::check_now(std::uint64_t prompt_tokens, std::uint64_t available_tokens) const {
  KVSHARD_TRY(check_intake(prompt_tokens));
  for (const auto& rule : rules_)
    if (!admits(rule, prompt_tokens, available_tokens))
      return Error{
          ErrorCode::resource_exhausted,
          fmt::format("a prompt of {} tokens is not admitted now: {} available, by rule {}",
                      prompt_tokens, available_tokens, rule.name)};
  return {};
}

}  // namespace kvshard
