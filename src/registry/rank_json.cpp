#include "registry/rank_json.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <limits>
#include <map>
#include <set>

#include "base/try.hpp"
#include "registry/json_text.hpp"

namespace kvshard {
namespace {

using nlohmann::json;
using namespace std::chrono_literals;

constexpr std::size_t kMaxErrorTextBytes = 1024;

Error invalid(std::string message) {
  return Error{ErrorCode::invalid_argument, std::move(message)};
}

bool only(std::string_view text, std::string_view punctuation) {
  return std::ranges::all_of(text, [punctuation](unsigned char c) {
    return c < 0x80 && (std::isalnum(c) != 0 ||
                        punctuation.find(static_cast<char>(c)) != std::string_view::npos);
  });
}

Status check_host(std::string_view host, std::uint16_t port) {
  if (host.empty() || host.size() > kMaxHostBytes || !only(host, "._-:%"))
    return invalid(fmt::format("host '{}' is neither a name nor an IP address", printable(host)));
  if (port == 0) return invalid("port is 0");
  return {};
}

// A whole number of `object`, or `absent` when it is not there.
template <typename Number>
Result<Number> number(const json& object, const char* name,
                      std::optional<Number> absent = std::nullopt) {
  const auto found = object.find(name);
  if (found == object.end()) {
    if (absent) return *absent;
    return invalid(fmt::format("{} is missing", name));
  }
  if (!found->is_number_unsigned() ||
      found->get<std::uint64_t>() > std::numeric_limits<Number>::max())
    return invalid(
        fmt::format("{} is not a whole number up to {}", name, std::numeric_limits<Number>::max()));
  return found->get<Number>();
}

Result<std::string> text(const json& object, const char* name) {
  const auto found = object.find(name);
  if (found == object.end() || !found->is_string())
    return invalid(fmt::format("{} is missing or no text", name));
  return found->get<std::string>();
}

json to_json(const RankAnnouncement& rank) {
  json geometry = json::object();
  for (const auto& [name, value] : rank.geometry_fields) geometry[name] = value;
  return {{"group", rank.group},
          {"epoch", rank.epoch},
          {"shard_rank", rank.shard_rank},
          {"shard_size", rank.shard_size},
          {"incarnation", rank.incarnation},
          {"host", rank.host},
          {"port", rank.port},
          {"geometry", std::move(geometry)}};
}

Result<RankAnnouncement> from_json(const json& object) {
  if (!object.is_object()) return invalid("a rank is no JSON object");
  RankAnnouncement rank;
  KVSHARD_TRY(rank.group, text(object, "group"));
  KVSHARD_TRY(rank.epoch, number<std::uint64_t>(object, "epoch"));
  KVSHARD_TRY(rank.shard_rank, number<std::uint32_t>(object, "shard_rank", 0));
  KVSHARD_TRY(rank.shard_size, number<std::uint32_t>(object, "shard_size", 1));
  KVSHARD_TRY(rank.incarnation, number<std::uint64_t>(object, "incarnation"));
  KVSHARD_TRY(rank.host, text(object, "host"));
  KVSHARD_TRY(rank.port, number<std::uint16_t>(object, "port"));
  if (const auto geometry = object.find("geometry"); geometry != object.end()) {
    if (!geometry->is_object()) return invalid("geometry is no JSON object");
    for (const auto& [name, value] : geometry->items()) {
      if (!value.is_string())
        return invalid(fmt::format("geometry field '{}' is no text", printable(name)));
      rank.geometry_fields.emplace_back(name, value.get<std::string>());
    }
  }
  KVSHARD_TRY(validate(rank));
  return rank;
}

// Two fields' values where the sorted lists part; "absent" for a field that one of them lacks.
struct Difference {
  std::string name, a, b;
};
std::optional<Difference> first_difference(const RankAnnouncement& a, const RankAnnouncement& b) {
  if (a.shard_size != b.shard_size)
    return Difference{"shard_size", std::to_string(a.shard_size), std::to_string(b.shard_size)};
  std::map<std::string_view, std::array<const std::string*, 2>> fields;
  for (const auto& [name, value] : a.geometry_fields) fields[name][0] = &value;
  for (const auto& [name, value] : b.geometry_fields) fields[name][1] = &value;
  const auto show = [](const std::string* value) {
    return value == nullptr ? std::string{"absent"} : fmt::format("'{}'", printable(*value, 256));
  };
  for (const auto& [name, values] : fields) {
    if (values[0] != nullptr && values[1] != nullptr && *values[0] == *values[1]) continue;
    return Difference{printable(name), show(values[0]), show(values[1])};
  }
  return std::nullopt;
}

}  // namespace

Status check_name(std::string_view what, std::string_view name) {
  if (name.empty() || name.size() > kMaxGroupNameBytes || !only(name, "._-:/"))
    return invalid(fmt::format("{} '{}': 1 to {} letters, digits or . _ - : / are needed", what,
                               printable(name), kMaxGroupNameBytes));
  return {};
}

Status validate(const GroupSpec& group) {
  KVSHARD_TRY(check_name("group name", group.name));
  if (group.members.empty() || group.members.size() > kMaxShardSize)
    return invalid(fmt::format("group '{}' has {} members, 1 to {} are possible", group.name,
                               group.members.size(), kMaxShardSize));
  std::vector<bool> seen(group.members.size());
  for (const GroupMember& member : group.members) {
    if (member.shard_rank >= seen.size())
      return invalid(fmt::format("group '{}': shard rank {} in a group of {}", group.name,
                                 member.shard_rank, seen.size()));
    if (seen[member.shard_rank])
      return invalid(fmt::format("group '{}': shard rank {} twice", group.name, member.shard_rank));
    seen[member.shard_rank] = true;
    if (Status host = check_host(member.host, member.port); !host)
      return invalid(fmt::format("group '{}', shard rank {}: {}", group.name, member.shard_rank,
                                 host.error().message));
  }
  return {};
}

Status validate(const RankAnnouncement& rank) {
  KVSHARD_TRY(check_name("group name", rank.group));
  if (rank.epoch == 0) return invalid("epoch is 0");
  if (rank.shard_size == 0 || rank.shard_size > kMaxShardSize)
    return invalid(
        fmt::format("shard_size is {}, 1 to {} are possible", rank.shard_size, kMaxShardSize));
  if (rank.shard_rank >= rank.shard_size)
    return invalid(
        fmt::format("shard_rank is {} in a group of {}", rank.shard_rank, rank.shard_size));
  if (rank.incarnation == 0) return invalid("incarnation is 0");
  KVSHARD_TRY(check_host(rank.host, rank.port));
  std::size_t bytes = 0;
  std::set<std::string_view> names;
  for (const auto& [name, value] : rank.geometry_fields) {
    bytes += name.size() + value.size();
    if (name.empty() || !names.insert(name).second)
      return invalid(
          fmt::format("geometry field '{}' has no name or comes twice", printable(name)));
  }
  if (bytes > kMaxGeometryBytes || names.size() > kMaxGeometryFields)
    return invalid(fmt::format("{} geometry fields of {} bytes, {} and {} are possible",
                               names.size(), bytes, kMaxGeometryFields, kMaxGeometryBytes));
  return {};
}

std::string encode_rank(const RankAnnouncement& rank) {
  return dump(to_json(rank));
}

Result<RankAnnouncement> decode_rank(std::string_view body) {
  KVSHARD_TRY(const json object, parse_object(body));
  return from_json(object);
}

std::string encode_ranks(const std::vector<ListedRank>& ranks) {
  json list = json::array();
  for (const ListedRank& listed : ranks) {
    json object = to_json(listed.rank);
    object["age_ms"] = listed.age.count();
    list.push_back(std::move(object));
  }
  return dump({{"ranks", std::move(list)}});
}

Result<std::vector<RankAnnouncement>> decode_ranks(std::string_view body, std::string_view group) {
  const auto wrong = [](std::string_view what) {
    return Error{ErrorCode::unavailable, fmt::format("its list of ranks: {}", what)};
  };
  auto object = parse_object(body);
  if (!object) return wrong(object.error().message);
  const auto list = object.value().find("ranks");
  if (list == object.value().end() || !list->is_array())
    return wrong("'ranks' is missing or no list");
  std::vector<RankAnnouncement> ranks;
  for (const json& item : *list) {
    auto rank = from_json(item);
    if (!rank) return wrong(rank.error().message);
    ranks.push_back(std::move(rank).value());
  }
  KVSHARD_TRY(check_listing(ranks, group));
  return ranks;
}

Status check_listing(const std::vector<RankAnnouncement>& ranks, std::string_view group) {
  std::set<std::pair<std::uint64_t, std::uint32_t>> seen;
  for (const RankAnnouncement& rank : ranks) {
    if (rank.group != group)
      return Error{ErrorCode::unavailable,
                   fmt::format("its list of ranks: of group '{}', not '{}'", rank.group, group)};
    if (!seen.emplace(rank.epoch, rank.shard_rank).second)
      return Error{
          ErrorCode::unavailable,
          fmt::format("its list of ranks: rank {} of epoch {} twice", rank.shard_rank, rank.epoch)};
  }
  return {};
}

std::string encode_time_to_live(std::chrono::milliseconds time_to_live) {
  return dump({{"time_to_live_ms", time_to_live.count()}});
}

Result<std::chrono::milliseconds> decode_time_to_live(std::string_view body) {
  auto object = parse_object(body);
  auto value = object ? number<std::uint32_t>(object.value(), "time_to_live_ms")
                      : Result<std::uint32_t>{object.error()};
  if (value && value.value() > 0) return std::chrono::milliseconds{value.value()};
  return Error{
      ErrorCode::unavailable,
      fmt::format("its answer: {}", value ? "time_to_live_ms is 0" : value.error().message)};
}

std::string encode_error(const Error& error) {
  return dump({{"error", {{"code", to_string(error.code)}, {"message", error.message}}}});
}

Error decode_error(std::string_view body) {
  Error error{ErrorCode::unavailable, "its refusal gives no reason"};
  const auto object = parse_object(body);
  if (!object || !object.value().contains("error") || !object.value()["error"].is_object())
    return error;
  const json& fields = object.value()["error"];
  const auto code = text(fields, "code");
  const auto message = text(fields, "message");
  if (!code || !message) return error;
  for (const auto known :
       {ErrorCode::invalid_argument, ErrorCode::failed_precondition, ErrorCode::resource_exhausted})
    if (code.value() == to_string(known)) error.code = known;
  error.message = printable(message.value(), kMaxErrorTextBytes);
  return error;
}

Status check_same_group(const RankAnnouncement& a, const RankAnnouncement& b) {
  const auto difference = first_difference(a, b);
  if (!difference) return {};
  return Error{
      ErrorCode::failed_precondition,
      fmt::format("group '{}' epoch {}: {} is {} on rank {} and {} on rank {}", a.group, a.epoch,
                  difference->name, difference->a, a.shard_rank, difference->b, b.shard_rank)};
}

Error displaced(const RankAnnouncement& rank, std::uint64_t by) {
  return Error{ErrorCode::failed_precondition,
               fmt::format("group '{}' epoch {}: rank {} is now incarnation {:x}, not {:x}",
                           rank.group, rank.epoch, rank.shard_rank, by, rank.incarnation)};
}

}  // namespace kvshard
