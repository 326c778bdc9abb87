#include "registry/etcd_json.hpp"

#include <fmt/format.h>

#include <charconv>

#include "base/try.hpp"
#include "registry/json_text.hpp"
#include "registry/rank_json.hpp"

namespace kvshard::etcd {
namespace {

using nlohmann::json;
using std::chrono::seconds;

constexpr std::string_view kBase64 =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
constexpr std::size_t kMaxErrorTextBytes = 256;
// More would overflow in milliseconds, and is no time to live that anybody granted.
constexpr std::int64_t kMaxTimeToLive = 9'000'000'000;

Error wrong(std::string_view what) {
  return Error{ErrorCode::unavailable, fmt::format("its answer: {}", what)};
}

Result<json> parse(std::string_view body) {
  auto object = parse_object(body);
  if (!object) return wrong(object.error().message);
  return object;
}

// A 64-bit number: text, as a rule. Absent is 0.
Result<std::int64_t> number(const json& object, const char* name) {
  const auto found = object.find(name);
  if (found == object.end()) return 0;
  if (!found->is_string() && !found->is_number())
    return wrong(fmt::format("{} is no number", name));
  const std::string text = found->is_string() ? found->get<std::string>() : found->dump();
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size())
    return wrong(fmt::format("{} is no 64-bit number", name));
  return value;
}

Result<std::string> bytes(const json& object, const char* name) {
  const auto found = object.find(name);
  if (found == object.end()) return std::string{};
  if (!found->is_string()) return wrong(fmt::format("{} is no text", name));
  return from_base64(found->get_ref<const std::string&>());
}

// The member `name`, or an empty object.
const json& member(const json& object, const char* name) {
  static const json kNone = json::object();
  const auto found = object.find(name);
  return found != object.end() && found->is_object() ? *found : kNone;
}

Result<seconds> time_to_live(const json& object) {
  KVSHARD_TRY(const std::int64_t ttl, number(object, "TTL"));
  if (ttl < 0 || ttl > kMaxTimeToLive) return wrong(fmt::format("a TTL of {} s", ttl));
  return seconds{ttl};
}

Result<Entry> decode_key_value(const json& object) {
  if (!object.is_object()) return wrong("a key that is no JSON object");
  Entry entry;
  KVSHARD_TRY(entry.key, bytes(object, "key"));
  KVSHARD_TRY(entry.value, bytes(object, "value"));
  KVSHARD_TRY(entry.mod_revision, number(object, "mod_revision"));
  KVSHARD_TRY(entry.lease, number(object, "lease"));
  return entry;
}

json to_json(const KeyRange& keys) {
  json object{{"key", to_base64(keys.first)}};
  if (!keys.end.empty()) object["range_end"] = to_base64(keys.end);
  return object;
}

// Never copies what a peer nested, since that recurses.
Error failure(const json& object, std::string_view otherwise) {
  constexpr std::int64_t kResourceExhausted = 8;  // gRPC's number
  const auto message = object.find("message");
  if (message == object.end() || !message->is_string()) return wrong(otherwise);
  const bool full = number(object, "code").value_or(0) == kResourceExhausted ||
                    number(object, "grpc_code").value_or(0) == kResourceExhausted;
  return Error{full ? ErrorCode::resource_exhausted : ErrorCode::unavailable,
               printable(message->get_ref<const std::string&>(), kMaxErrorTextBytes)};
}

void append(std::string& list, const json& item) {
  list += (list.empty() ? "" : ",") + dump(item);
}

}  // namespace

std::string to_base64(std::string_view bytes) {
  std::string text;
  text.reserve((bytes.size() + 2) / 3 * 4);
  for (std::size_t at = 0; at < bytes.size(); at += 3) {
    const std::string_view group = bytes.substr(at, 3);
    std::uint32_t bits = 0;
    for (std::size_t i = 0; i < 3; ++i)
      bits = bits << 8 | (i < group.size() ? static_cast<unsigned char>(group[i]) : 0U);
    for (std::size_t i = 0; i < 4; ++i)
      text += i <= group.size() ? kBase64[bits >> (18 - 6 * i) & 63U] : '=';
  }
  return text;
}

Result<std::string> from_base64(std::string_view text) {
  const auto bad = [] { return wrong("a key or value that is no base64"); };
  if (text.size() % 4 != 0) return bad();
  std::string bytes;
  bytes.reserve(text.size() / 4 * 3);
  for (; !text.empty(); text.remove_prefix(4)) {
    std::string_view group = text.substr(0, 4);
    if (text.size() == 4) {  // only the last may be padded
      if (group.ends_with('=')) group.remove_suffix(1);
      if (group.ends_with('=')) group.remove_suffix(1);
    }
    std::uint32_t bits = 0;
    for (std::size_t i = 0; i < 4; ++i) {
      const auto digit = i < group.size() ? kBase64.find(group[i]) : 0;
      if (digit == std::string_view::npos) return bad();
      bits = bits << 6 | static_cast<std::uint32_t>(digit);
    }
    for (std::size_t i = 0; i + 1 < group.size(); ++i)
      bytes += static_cast<char>(bits >> (16 - 8 * i) & 0xffU);
  }
  return bytes;
}

std::string rank_key(std::string_view prefix, const RankAnnouncement& rank) {
  return fmt::format("{}{}@{}/{}", prefix, rank.group, rank.epoch, rank.shard_rank);
}

KeyRange group_keys(std::string_view prefix, std::string_view group) {
  return {fmt::format("{}{}@", prefix, group), fmt::format("{}{}{:c}", prefix, group, '@' + 1)};
}

std::vector<KeyRange> sibling_keys(std::string_view prefix, const RankAnnouncement& rank) {
  const std::string epoch = fmt::format("{}{}@{}", prefix, rank.group, rank.epoch);
  const std::string own = rank_key(prefix, rank);
  // The first key after `own` is `own` and a zero byte.
  return {{epoch + '/', own}, {own + '\0', fmt::format("{}{:c}", epoch, '/' + 1)}};
}

Result<RankAnnouncement> decode_entry(std::string_view prefix, const Entry& entry) {
  auto rank = decode_rank(entry.value);
  const auto at_key = [&](std::string_view what) {
    return Error{ErrorCode::unavailable,
                 fmt::format("key '{}': {}", printable(entry.key, 256), what)};
  };
  if (!rank) return at_key(rank.error().message);
  if (const auto key = rank_key(prefix, rank.value()); key != entry.key)
    return at_key(fmt::format("holds the rank of '{}'", key));
  return rank;
}

Txn& Txn::when(const KeyRange& keys, std::int64_t mod_revision) {
  json condition = to_json(keys);
  condition["target"] = "MOD";
  condition["result"] = "EQUAL";
  condition["mod_revision"] = std::to_string(mod_revision);
  append(conditions_, condition);
  return *this;
}

Txn& Txn::read(const KeyRange& keys, std::int64_t limit) {
  json range = to_json(keys);
  range["limit"] = std::to_string(limit);
  append(operations_, {{"request_range", std::move(range)}});
  return *this;
}

Txn& Txn::put(std::string_view key, std::string_view value, std::int64_t lease) {
  append(
      operations_,
      {{"request_put",
        {{"key", to_base64(key)}, {"value", to_base64(value)}, {"lease", std::to_string(lease)}}}});
  return *this;
}

Txn& Txn::erase(std::string_view key) {
  append(operations_, {{"request_delete_range", {{"key", to_base64(key)}}}});
  return *this;
}

std::string Txn::body() const {
  return fmt::format(R"({{"compare":[{}],"success":[{}]}})", conditions_, operations_);
}

Result<TxnAnswer> decode_txn(std::string_view body) {
  KVSHARD_TRY(const json object, parse(body));
  // Every answer of etcd has a header; without one this is somebody else's JSON.
  if (!object.contains("header")) return wrong("no header");
  TxnAnswer answer;
  if (const auto succeeded = object.find("succeeded"); succeeded != object.end()) {
    if (!succeeded->is_boolean()) return wrong("succeeded is neither true nor false");
    answer.succeeded = succeeded->get<bool>();
  }
  const auto responses = object.find("responses");
  if (responses == object.end()) return answer;
  if (!responses->is_array()) return wrong("responses is no list");
  for (const json& response : *responses) {
    if (!response.is_object()) return wrong("a response that is no JSON object");
    const json& range = member(response, "response_range");
    const auto key_values = range.find("kvs");
    if (key_values == range.end()) continue;
    if (!key_values->is_array()) return wrong("kvs is no list");
    for (const json& item : *key_values) {
      KVSHARD_TRY(Entry entry, decode_key_value(item));
      answer.entries.push_back(std::move(entry));
    }
  }
  return answer;
}

std::string encode_grant(seconds time_to_live) {
  return fmt::format(R"({{"TTL":"{}"}})", time_to_live.count());
}

Result<Lease> decode_grant(std::string_view body) {
  KVSHARD_TRY(const json object, parse(body));
  Lease lease;
  KVSHARD_TRY(lease.id, number(object, "ID"));
  KVSHARD_TRY(lease.time_to_live, time_to_live(object));
  if (lease.id == 0 || lease.time_to_live == seconds{0}) return wrong("no lease was granted");
  return lease;
}

std::string encode_keep_alive(std::int64_t lease) {
  return fmt::format(R"({{"ID":"{}"}})", lease);
}

Result<std::chrono::milliseconds> decode_keep_alive(std::string_view body) {
  KVSHARD_TRY(const json object, parse(body));
  if (object.contains("error")) return failure(member(object, "error"), "an error without words");
  if (!object.contains("result")) return wrong("neither a result nor an error");
  KVSHARD_TRY(const seconds left, time_to_live(member(object, "result")));
  return left;
}

Error decode_failure(int status, std::string_view body) {
  const auto object = parse_object(body);
  const auto otherwise = fmt::format("HTTP status {}", status);
  return object ? failure(object.value(), otherwise) : wrong(otherwise);
}

}  // namespace kvshard::etcd
