#include "kvshard/geometry.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <limits>
#include <tuple>
#include <utility>

#include "base/try.hpp"
#include "kvshard/plan.hpp"
#include "layout/strides.hpp"

namespace kvshard {
namespace {

Strides packed_strides(const BufferGroup& group) noexcept {
  const std::uint64_t head_bytes = group.head_bytes;
  if (group.order == PageOrder::head_major)
    return {head_bytes, group.page_size * head_bytes, group.page_bytes()};
  return {group.heads * head_bytes, head_bytes, group.page_bytes()};
}

Error invalid(std::string message) {
  return Error{ErrorCode::invalid_argument, "geometry: " + std::move(message)};
}

/// No two bytes of a buffer may fall together, and all must have an offset below 2^63.
Status check_strides(const BufferGroup& group) {
  struct Dimension {
    const char* name;
    std::uint64_t count;
    std::uint64_t stride;
  };
  const auto [token, head, page] = strides(group);
  if (group.heads > 1 && group.page_size > 1 &&
      (group.order == PageOrder::token_major) != (token > head))
    return invalid(fmt::format("group {}: order is {}, but token_stride is {} and head_stride {}",
                               group.name, to_string(group.order), token, head));
  std::array dimensions{Dimension{"token_stride", group.page_size, token},
                        Dimension{"head_stride", group.heads, head},
                        Dimension{"page_stride", group.page_count, page}};
  std::ranges::sort(dimensions, {}, &Dimension::stride);
  std::uint64_t extent = group.head_bytes;
  for (const auto& [name, count, stride] : dimensions) {
    if (count == 1) continue;  // then the stride is never used
    if (stride < extent)
      return invalid(fmt::format("group {}: {} is {}, but what it steps over takes {} bytes",
                                 group.name, name, stride, extent));
    if (stride > (std::numeric_limits<std::int64_t>::max() - extent) / (count - 1))
      return invalid(fmt::format("group {}: {} {} over {} steps does not fit a 63-bit offset",
                                 group.name, name, stride, count));
    extent += stride * (count - 1);
  }
  return {};
}

Status check_name(const char* field, std::string_view name) {
  if (name.size() <= kMaxNameBytes) return {};
  return invalid(
      fmt::format("{} has {} bytes, at most {} allowed", field, name.size(), kMaxNameBytes));
}

/// What this rank holds must be a part of the whole.
Status check_share(const BufferGroup& group) {
  for (const auto& [field, first, count, all] :
       {std::tuple{"head", group.first_head, group.heads, group.all_heads()},
        {"layer", group.first_layer, group.layers, group.all_layers()}}) {
    if (first > all || count > all - first)
      return invalid(fmt::format("group {}: first_{} {} and {}s {} leave the {} of total_{}s",
                                 group.name, field, first, field, count, all, field));
  }
  if (group.part >= group.parts)
    return invalid(fmt::format("group {}: part {} is not below parts {}", group.name, group.part,
                               group.parts));
  if (group.page_size % group.stripe() != 0)
    return invalid(fmt::format("group {}: interleave {} does not divide page_size {}", group.name,
                               group.interleave, group.page_size));
  return {};
}

Status check_group(const BufferGroup& group) {
  KVSHARD_TRY(check_name("group name", group.name));
  const auto plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-';
  };
  if (group.name.empty() || !std::ranges::all_of(group.name, plain))
    return invalid(
        fmt::format("group name \"{}\" is not made of letters, digits, _ and -", group.name));
  if (group.layers == 0 && group.total_layers == 0)
    return invalid(fmt::format("group {}: layers is 0", group.name));
  for (const auto& [field, value] : {std::pair{"buffers_per_layer", group.buffers_per_layer},
                                     {"heads", group.heads},
                                     {"head_bytes", group.head_bytes},
                                     {"page_size", group.page_size},
                                     {"page_count", group.page_count},
                                     {"parts", group.parts}}) {
    if (value == 0) return invalid(fmt::format("group {}: {} is 0", group.name, field));
  }
  if (group.buffers_per_layer > 2)
    return invalid(fmt::format("group {}: buffers_per_layer is {}, at most 2 allowed", group.name,
                               group.buffers_per_layer));
  if (to_string(group.element_type) == "unknown")
    return invalid(fmt::format("group {}: element_type {} is not known", group.name,
                               static_cast<unsigned>(group.element_type)));
  if (to_string(group.order) == "unknown")
    return invalid(fmt::format("group {}: order {} is not known", group.name,
                               static_cast<unsigned>(group.order)));
  const std::uint64_t token_bytes = std::uint64_t{group.heads} * group.head_bytes;
  if (token_bytes > std::numeric_limits<std::int64_t>::max() / group.page_size)
    return invalid(
        fmt::format("group {}: page_size {} x heads {} x head_bytes {} is above 2^63 bytes",
                    group.name, group.page_size, group.heads, group.head_bytes));
  KVSHARD_TRY(check_share(group));
  return check_strides(group);
}

/// Groups that share page ids must agree on what a page id means.
Status check_table(const BufferGroup& first, const BufferGroup& second) {
  if (first.table != second.table) return {};
  for (const auto& [field, a, b] : {std::tuple{"page_size", first.page_size, second.page_size},
                                    {"parts", first.parts, second.parts},
                                    {"part", first.part, second.part},
                                    {"interleave", first.stripe(), second.stripe()}}) {
    if (a != b)
      return invalid(fmt::format("groups {} and {} share table {}, but {} is {} and {}", first.name,
                                 second.name, first.table, field, a, b));
  }
  return {};
}

/// The fields of a geometry that two ranks compare: what gives bytes their meaning, and with
/// `own_side` also how a side cuts its tokens.
std::vector<std::pair<std::string, std::string>> fields(const Geometry& geometry, bool own_side) {
  std::vector<std::string_view> names;
  for (const BufferGroup& group : geometry.groups) names.push_back(group.name);
  std::vector<std::pair<std::string, std::string>> result{
      {"model_id", geometry.model_id},
      {"groups", fmt::format("{} ({})", names.size(), fmt::join(names, ", "))}};
  for (const BufferGroup& group : geometry.groups) {
    const auto add = [&](std::string_view field, const auto& value) {
      result.emplace_back(fmt::format("{}.{}", group.name, field), fmt::format("{}", value));
    };
    add("layers", group.all_layers());
    add("buffers_per_layer", group.buffers_per_layer);
    add("element_type", to_string(group.element_type));
    add("heads", group.all_heads());
    add("head_bytes", group.head_bytes);
    add("table", group.table);
    if (!own_side) continue;
    add("page_size", group.page_size);
    add("parts", group.parts);
    add("interleave", group.stripe());
  }
  return result;
}

}  // namespace

Strides strides(const BufferGroup& group) noexcept {
  const auto [token, head, page] = packed_strides(group);
  return {group.token_stride != 0 ? group.token_stride : token,
          group.head_stride != 0 ? group.head_stride : head,
          group.page_stride != 0 ? group.page_stride : page};
}

std::string_view to_string(ElementType type) noexcept {
  switch (type) {
    case ElementType::f32:
      return "f32";
    case ElementType::f16:
      return "f16";
    case ElementType::bf16:
      return "bf16";
    case ElementType::f8_e4m3:
      return "f8_e4m3";
    case ElementType::f8_e5m2:
      return "f8_e5m2";
    case ElementType::i8:
      return "i8";
    case ElementType::u8:
      return "u8";
  }
  return "unknown";
}

std::string_view to_string(PageOrder order) noexcept {
  switch (order) {
    case PageOrder::token_major:
      return "token_major";
    case PageOrder::head_major:
      return "head_major";
  }
  return "unknown";
}

Status validate(const Geometry& geometry) {
  KVSHARD_TRY(check_name("model_id", geometry.model_id));
  if (geometry.groups.empty() || geometry.groups.size() > kMaxBufferGroups)
    return invalid(
        fmt::format("{} groups, 1 to {} allowed", geometry.groups.size(), kMaxBufferGroups));
  if (geometry.rank >= geometry.ranks)
    return invalid(fmt::format("rank {} is not below ranks {}", geometry.rank, geometry.ranks));
  std::uint64_t buffers = 0;
  for (std::size_t g = 0; g < geometry.groups.size(); ++g) {
    const BufferGroup& group = geometry.groups[g];
    KVSHARD_TRY(check_group(group));
    for (std::size_t other = 0; other < g; ++other) {
      if (geometry.groups[other].name == group.name)
        return invalid(fmt::format("groups {} and {} are both named {}", other, g, group.name));
      KVSHARD_TRY(check_table(geometry.groups[other], group));
    }
    buffers += std::uint64_t{group.layers} * group.buffers_per_layer;
    if (buffers > kMaxBuffers)
      return invalid(
          fmt::format("group {}: layers is {}, which makes {} buffers, at most {} allowed",
                      group.name, group.layers, buffers, kMaxBuffers));
  }
  return {};
}

Status validate(const Pool& pool) {
  const auto& groups = pool.geometry.groups;
  KVSHARD_TRY(validate(pool.geometry));
  if (pool.buffers.size() != groups.size())
    return Error{ErrorCode::invalid_argument,
                 fmt::format("pool: buffers of {} groups, the geometry has {}", pool.buffers.size(),
                             groups.size())};
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto& buffers = pool.buffers[g];
    if (buffers.size() != groups[g].buffers())
      return Error{ErrorCode::invalid_argument,
                   fmt::format("pool: group {} has {} buffers, {} layers x {} need {}",
                               groups[g].name, buffers.size(), groups[g].layers,
                               groups[g].buffers_per_layer, groups[g].buffers())};
    const auto null = std::ranges::find(buffers, nullptr);
    if (null != buffers.end())
      return Error{ErrorCode::invalid_argument,
                   fmt::format("pool: buffer {} of group {} is null", null - buffers.begin(),
                               groups[g].name)};
  }
  return {};
}

std::vector<std::pair<std::string, std::string>> describe(const Geometry& geometry) {
  return fields(geometry, true);
}

Status check_compatible(const Geometry& prefill, const Geometry& decode) {
  KVSHARD_TRY(validate(prefill));
  KVSHARD_TRY(validate(decode));
  const auto ours = fields(prefill, false);
  const auto theirs = fields(decode, false);
  // "groups" holds the count, so lists of unequal length differ before either ends.
  const auto [a, b] = std::ranges::mismatch(ours, theirs);
  if (a != ours.end())
    return Error{ErrorCode::failed_precondition,
                 fmt::format("geometry differs: {} is {} on prefill and {} on decode", a->first,
                             a->second, b->second)};
  for (std::size_t g = 0; g < prefill.groups.size(); ++g)
    KVSHARD_TRY(TokenMap::create(prefill.groups[g], decode.groups[g]));
  return {};
}

}  // namespace kvshard
