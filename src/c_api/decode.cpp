#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.hpp"
#include "c_api/boundary.hpp"
#include "c_api/pools.hpp"
#include "kvshard/decode_rank.hpp"

using namespace kvshard;
using namespace kvshard::c_api;

struct kvshard_decode_rank {
  std::unique_ptr<DecodeRank> rank;
  Mutex mutex;
  std::optional<PullEvent> kept KVSHARD_GUARDED_BY(mutex);  // polled, and not yet taken
};

namespace {

Result<DecodeOptions> to_options(const kvshard_decode_options& from) {
  DecodeOptions made;
  KVSHARD_TRY(made.pool, to_pool(from.pool));
  set_option(made.landing_payload_bytes, from.landing_payload_bytes);
  set_option(made.landing_slots, from.landing_slots);
  set_option(made.window, from.window);
  KVSHARD_TRY(made.mapped, to_enum(from.mapped, Mapped::automatic, Mapped::always, "mapped"));
  set_option(made.heartbeat, from.heartbeat_ms);
  set_option(made.peer_timeout, from.peer_timeout_ms);
  set_option(made.fetch_timeout, from.fetch_timeout_ms);
  set_option(made.reconnect_min, from.reconnect_min_ms);
  set_option(made.reconnect_max, from.reconnect_max_ms);
  set_option(made.busy_poll, from.busy_poll_us);
  set_option(made.max_pulls, from.max_pulls);
  made.security.secret_file = text_or(from.secret_file, "");
  made.security.allow_unauthenticated_network = from.allow_unauthenticated_network != 0;
  return made;
}

std::uint64_t to_count(std::chrono::nanoseconds time) {
  return static_cast<std::uint64_t>(std::max<std::int64_t>(time.count(), 0));
}
std::chrono::nanoseconds to_time(std::uint64_t nanoseconds) {
  return std::chrono::nanoseconds{static_cast<std::int64_t>(nanoseconds)};
}
std::uint64_t to_bytes_per_second(double gigabytes_per_second) {
  return static_cast<std::uint64_t>(gigabytes_per_second * 1e9);
}

Status fits(std::uint64_t count, const void* array, std::uint64_t capacity, const char* name) {
  if (array == nullptr || count <= capacity) return {};
  return Error{ErrorCode::resource_exhausted,
               fmt::format("{} {}, its capacity is {}", name, count, capacity)};
}

/// Whether the elements of an array that is to be filled are structs of ours; gives their size.
template <typename T>
Result<std::uint32_t> stride_of(const T* array, std::uint32_t capacity, const char* name) {
  if (array == nullptr || capacity == 0) return 0U;
  KVSHARD_TRY(const T first, to_fill(array, name));
  return first.size;
}

/// Fills the caller's event and its arrays, or only the counts where an array is too short.
Status fill(const PullEvent& from, kvshard_pull_event to, kvshard_pull_event* caller) {
  KVSHARD_TRY(const std::uint32_t source_size,
              stride_of(to.sources, to.source_capacity, "kvshard_source_timing"));
  KVSHARD_TRY(const std::uint32_t side_size,
              stride_of(to.side_data, to.side_data_capacity, "kvshard_side_data"));
  to.source_count = static_cast<std::uint32_t>(from.sources.size());
  to.side_data_count = static_cast<std::uint32_t>(from.side_data.size());
  to.side_bytes_count = 0;
  for (const SideData& side : from.side_data) to.side_bytes_count += side.bytes.size();
  const auto all_fit = [&]() -> Status {
    KVSHARD_TRY(fits(to.source_count, to.sources, to.source_capacity, "source_count"));
    KVSHARD_TRY(fits(to.side_data_count, to.side_data, to.side_data_capacity, "side_data_count"));
    return fits(to.side_bytes_count, to.side_bytes, to.side_bytes_capacity, "side_bytes_count");
  };
  if (Status status = all_fit(); !status) {
    write(to, caller, to.size);
    return status;
  }

  for (std::size_t i = 0; to.sources != nullptr && i < from.sources.size(); ++i) {
    const SourceTiming& source = from.sources[i];
    write(kvshard_source_timing{.size = 0,
                                .shard_rank = source.shard_rank,
                                .pieces = source.pieces,
                                .bytes = source.bytes,
                                .first_ready_ns = to_count(source.first_ready),
                                .landed_ns = to_count(source.landed),
                                .wire_ns = to_count(source.wire),
                                .landing_ns = to_count(source.landing),
                                .scatter_ns = to_count(source.scatter)},
          element(to.sources, source_size, i), source_size);
  }
  std::uint64_t offset = 0;
  for (std::size_t i = 0; i < from.side_data.size(); ++i) {
    const SideData& side = from.side_data[i];
    if (to.side_data != nullptr) {
      write(kvshard_side_data{.size = 0,
                              .shard_rank = side.shard_rank,
                              .offset = offset,
                              .bytes = side.bytes.size()},
            element(to.side_data, side_size, i), side_size);
    }
    if (to.side_bytes != nullptr && !side.bytes.empty())
      std::memcpy(static_cast<std::byte*>(to.side_bytes) + offset, side.bytes.data(),
                  side.bytes.size());
    offset += side.bytes.size();
  }
  to.pull = static_cast<std::uint64_t>(from.pull);
  to.room = index(from.room);
  to.bytes = from.bytes;
  to.total_ns = to_count(from.total);
  to.connect_ns = to_count(from.connect);
  to.commit_ns = to_count(from.commit);
  to.path = static_cast<std::int32_t>(from.path);
  kvshard_error outcome{};
  to.code = report(from.status, &outcome);
  copy_text(outcome.message, to.message, sizeof to.message);
  write(to, caller, to.size);
  return {};
}

}  // namespace

int32_t kvshard_decode_create(const kvshard_decode_options* options, kvshard_decode_rank** rank,
                              kvshard_error* error) {
  return guarded(error, [&]() -> Status {
    KVSHARD_TRY(required(rank, "rank"));
    KVSHARD_TRY(const auto given, read(options, "kvshard_decode_options"));
    KVSHARD_TRY(DecodeOptions made, to_options(given));
    KVSHARD_TRY(Backend backend, make_backend(given.backend));
    auto handle = std::make_unique<kvshard_decode_rank>();
    KVSHARD_TRY(handle->rank, DecodeRank::create(std::move(made), std::move(backend.transport),
                                                 std::move(backend.engine)));
    *rank = handle.release();
    return {};
  });
}

void kvshard_decode_destroy(kvshard_decode_rank* rank) {
  delete rank;
}

int32_t kvshard_decode_close(kvshard_decode_rank* rank, kvshard_error* error) {
  return guarded(error, [&]() -> Status {
    KVSHARD_TRY(required(rank, "rank"));
    rank->rank->close();
    return {};
  });
}

int32_t kvshard_decode_connect(kvshard_decode_rank* rank, const kvshard_group_spec* spec,
                               uint32_t timeout_ms, uint64_t* group, kvshard_error* error) {
  return guarded(error, [&]() -> Status {
    KVSHARD_TRY(required(rank, "rank"));
    KVSHARD_TRY(required(group, "group"));
    KVSHARD_TRY(const GroupSpec to, to_group(spec));
    KVSHARD_TRY(const GroupId id, rank->rank->connect(to, std::chrono::milliseconds{timeout_ms}));
    *group = static_cast<std::uint64_t>(id);
    return {};
  });
}

int32_t kvshard_decode_disconnect(kvshard_decode_rank* rank, uint64_t group, kvshard_error* error) {
  return guarded(error, [&]() -> Status {
    KVSHARD_TRY(required(rank, "rank"));
    rank->rank->disconnect(GroupId{group});
    return {};
  });
}

int32_t kvshard_decode_path(const kvshard_decode_rank* rank, uint64_t group, uint32_t shard_rank,
                            kvshard_path_report* report, kvshard_error* error) {
  return guarded(error, [&]() -> Status {
    KVSHARD_TRY(required(rank, "rank"));
    KVSHARD_TRY(auto to, to_fill(report, "kvshard_path_report"));
    KVSHARD_TRY(const PathReport from, rank->rank->path(GroupId{group}, shard_rank));
    to.path = static_cast<std::int32_t>(from.path);
    to.get_bytes_per_second = to_bytes_per_second(from.get_gigabytes_per_s);
    to.am_bytes_per_second = to_bytes_per_second(from.am_gigabytes_per_s);
    to.get_native = from.get_native ? 1 : 0;
    copy_text(from.reason, to.reason, sizeof to.reason);
    write(to, report, to.size);
    return {};
  });
}

int32_t kvshard_decode_pull(kvshard_decode_rank* rank, const kvshard_pull_request* request,
                            uint64_t* pull, kvshard_error* error) {
  return guarded(error, [&]() -> Status {
    KVSHARD_TRY(required(rank, "rank"));
    KVSHARD_TRY(required(pull, "pull"));
    KVSHARD_TRY(const auto from, read(request, "kvshard_pull_request"));
    KVSHARD_TRY(const auto tables, read_array(from.tables, from.table_count, "kvshard_pull_pages"));
    std::vector<std::vector<LocalPage>> pages;  // what `more` and `made` look into
    std::vector<PullPages> more;
    PullRequest made{.group = GroupId{from.group},
                     .room = RoomId{from.room},
                     .pages = {},
                     .after = static_cast<EventHandle>(from.after),
                     .stream = static_cast<StreamHandle>(from.stream)};
    set_option(made.deadline, from.deadline_ms);
    bool first_table_given = false;
    for (const kvshard_pull_pages& table : tables) {
      KVSHARD_TRY(auto own, to_pages<LocalPage>(table.pages, table.page_count));
      pages.push_back(std::move(own));
      // A second table 0 goes the way of the others, to be refused there.
      if (table.table == 0 && !std::exchange(first_table_given, true)) {
        made.pages = pages.back();
        made.first_position = table.first_position;
        made.skip_tokens = table.skip_tokens;
        made.end_position = table.end_position;
        made.base = table.base;
      } else {
        more.push_back({.table = table.table,
                        .pages = pages.back(),
                        .first_position = table.first_position,
                        .skip_tokens = table.skip_tokens,
                        .end_position = table.end_position,
                        .base = table.base});
      }
    }
    made.more_tables = more;
    KVSHARD_TRY(const PullId id, rank->rank->pull(made));
    *pull = static_cast<std::uint64_t>(id);
    return {};
  });
}

int32_t kvshard_decode_cancel(kvshard_decode_rank* rank, uint64_t pull, kvshard_error* error) {
  return guarded(error, [&]() -> Status {
    KVSHARD_TRY(required(rank, "rank"));
    rank->rank->cancel(PullId{pull});
    return {};
  });
}

int32_t kvshard_decode_poll(kvshard_decode_rank* rank, kvshard_pull_event* event, bool* found,
                            kvshard_error* error) {
  return guarded(error, [&]() -> Status {
    KVSHARD_TRY(required(rank, "rank"));
    KVSHARD_TRY(required(found, "found"));
    KVSHARD_TRY(const auto to, to_fill(event, "kvshard_pull_event"));
    *found = false;
    const MutexLock lock{rank->mutex};
    if (!rank->kept) {
      PullEvent ended;
      if (rank->rank->poll({&ended, 1}) == 0) return {};
      rank->kept = std::move(ended);
    }
    KVSHARD_TRY(fill(*rank->kept, to, event));
    rank->kept.reset();
    *found = true;
    return {};
  });
}

int kvshard_decode_event_fd(const kvshard_decode_rank* rank) {
  return rank != nullptr ? rank->rank->event_fd() : -1;
}

int32_t kvshard_decode_get_stats(const kvshard_decode_rank* rank, kvshard_decode_stats* stats,
                                 kvshard_error* error) {
  return guarded(error, [&]() -> Status {
    KVSHARD_TRY(required(rank, "rank"));
    KVSHARD_TRY(auto to, to_fill(stats, "kvshard_decode_stats"));
    const DecodeStats from = rank->rank->stats();
    to.pulls_started = from.pulls_started;
    to.pulls_done = from.pulls_done;
    to.pulls_failed = from.pulls_failed;
    to.pulls_cancelled = from.pulls_cancelled;
    to.pieces = from.pieces;
    to.bytes = from.bytes;
    to.stale = from.stale;
    to.late_messages = from.late_messages;
    to.peers_lost = from.peers_lost;
    to.reconnects = from.reconnects;
    to.pulls = from.pulls;
    to.landing_in_use = from.landing_in_use;
    to.quarantined = from.quarantined;
    to.peers = from.peers;
    write(to, stats, to.size);
    return {};
  });
}

int32_t kvshard_summarize(const kvshard_pull_event* event, char* text, size_t capacity,
                          kvshard_error* error) {
  return guarded(error, [&]() -> Status {
    KVSHARD_TRY(required_array(text, capacity, "text"));
    KVSHARD_TRY(const auto from, to_fill(event, "kvshard_pull_event"));
    PullEvent made;
    made.room = RoomId{from.room};
    if (from.code != 0) {
      KVSHARD_TRY(const ErrorCode code,
                  to_enum(from.code, ErrorCode::invalid_argument, ErrorCode::internal, "code"));
      made.status =
          Error{code, std::string{from.message, strnlen(from.message, sizeof from.message)}};
    }
    made.bytes = from.bytes;
    made.total = to_time(from.total_ns);
    made.connect = to_time(from.connect_ns);
    made.commit = to_time(from.commit_ns);
    KVSHARD_TRY(made.path,
                to_enum(from.path, TransferPath::automatic, TransferPath::mapped, "path"));
    made.sources.resize(from.source_count);
    if (from.sources != nullptr) {
      KVSHARD_TRY(const auto sources,
                  read_array(from.sources, from.source_count, "kvshard_source_timing"));
      std::transform(sources.begin(), sources.end(), made.sources.begin(),
                     [](const kvshard_source_timing& source) {
                       return SourceTiming{.shard_rank = source.shard_rank,
                                           .pieces = source.pieces,
                                           .bytes = source.bytes,
                                           .first_ready = to_time(source.first_ready_ns),
                                           .landed = to_time(source.landed_ns),
                                           .landing = to_time(source.landing_ns),
                                           .wire = to_time(source.wire_ns),
                                           .scatter = to_time(source.scatter_ns)};
                     });
    }
    copy_text(summarize(made), text, capacity);
    return {};
  });
}
