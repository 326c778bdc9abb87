#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kvshard/registry.hpp"

// As much of etcd's v3 HTTP/JSON gateway as a registry needs: requests and answers, no I/O. Keys
// and values travel as base64, 64-bit numbers as text; a field that is zero or empty is left out.
namespace kvshard::etcd {

std::string to_base64(std::string_view bytes);
/// Errors: unavailable, as etcd is wrong.
Result<std::string> from_base64(std::string_view text);

/// Keys from `first` up to `end`, which is left out; one key when `end` is empty.
struct KeyRange {
  std::string first;
  std::string end;
};

/// Where a rank stands: "<prefix><group>@<epoch>/<shard rank>". No name holds an '@', so one
/// group's keys never lie among another's.
std::string rank_key(std::string_view prefix, const RankAnnouncement& rank);
KeyRange group_keys(std::string_view prefix, std::string_view group);
/// The other ranks of its group and epoch: the keys before its own, and those after.
std::vector<KeyRange> sibling_keys(std::string_view prefix, const RankAnnouncement& rank);

/// A key and what etcd knows about it.
struct Entry {
  std::string key;
  std::string value;
  std::int64_t mod_revision{0};  ///< of its last change
  std::int64_t lease{0};         ///< 0: none
};
/// The rank that an entry holds. Errors: unavailable naming the key.
Result<RankAnnouncement> decode_entry(std::string_view prefix, const Entry& entry);

/// A transaction: if none of the conditions fails, all operations at once.
///
/// The only way in which we read and write: what was looked at is what is changed.
class Txn {
 public:
  /// All of `keys` were last changed at `mod_revision`; 0: there are none.
  Txn& when(const KeyRange& keys, std::int64_t mod_revision);
  Txn& read(const KeyRange& keys, std::int64_t limit = 0);  ///< limit 0: all of them
  Txn& put(std::string_view key, std::string_view value, std::int64_t lease);
  Txn& erase(std::string_view key);
  [[nodiscard]] std::string body() const;

 private:
  std::string conditions_;  // JSON, separated by commas
  std::string operations_;
};
struct TxnAnswer {
  bool succeeded{false};
  std::vector<Entry> entries;  ///< of all reads
};
/// Errors here and below: unavailable, as etcd is wrong.
Result<TxnAnswer> decode_txn(std::string_view body);

struct Lease {
  std::int64_t id{0};
  std::chrono::seconds time_to_live{0};
};
std::string encode_grant(std::chrono::seconds time_to_live);
Result<Lease> decode_grant(std::string_view body);

std::string encode_keep_alive(std::int64_t lease);
/// The time to live; 0 when there is no such lease.
Result<std::chrono::milliseconds> decode_keep_alive(std::string_view body);

/// An answer whose HTTP status is not 200: resource_exhausted when etcd is full or overloaded, else
/// unavailable, with etcd's own words.
Error decode_failure(int status, std::string_view body);

}  // namespace kvshard::etcd
