#ifndef KVSHARD_KVSHARD_H
#define KVSHARD_KVSHARD_H

/* kvshard for engines in C, or in any language that calls C. The same objects as the C++ headers; what
 * they do is said there, next to the class that is named here.
 *
 * Structs:  the first field is `size`: set it to sizeof(the struct), and all else to zero first. Later
 *           versions add fields at the end. A field that is 0 takes the default of its C++ option, where
 *           0 is no value of its own. In an array of structs every element has the same size.
 * Borrowed: strings (zero-terminated, UTF-8) and arrays are read during the call and not kept. The
 *           memory of a pool is: it must outlive the rank's close().
 * Errors:   functions return KVSHARD_OK or an enum kvshard_code, and describe it in `error`, which may be
 *           null. What a call fills is untouched when it fails, but for counts that say what it needs.
 * Threads:  as the C++ classes. No call may run on a handle while, or after, its destroy does.
 * Memory:   a create is paired with a destroy, which takes null. Out of memory is
 *           KVSHARD_RESOURCE_EXHAUSTED. No exception leaves a function.
 * Source:   docs/packages.md. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifndef KVSHARD_EXPORT
#define KVSHARD_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- codes, versions, logs ------------------------------------------------------------------------ */

/* kvshard::ErrorCode: what the caller does next. */
enum kvshard_code {
  KVSHARD_OK = 0,
  KVSHARD_INVALID_ARGUMENT = 1,
  KVSHARD_FAILED_PRECONDITION = 2,
  KVSHARD_RESOURCE_EXHAUSTED = 3,
  KVSHARD_UNAVAILABLE = 4,
  KVSHARD_DEADLINE_EXCEEDED = 5,
  KVSHARD_CANCELLED = 6,
  KVSHARD_DATA_LOSS = 7,
  KVSHARD_UNSUPPORTED = 8,
  KVSHARD_INTERNAL = 9
};

#define KVSHARD_MESSAGE_BYTES 512

/* Filled by each call that is given one. It has no size and never grows. */
typedef struct kvshard_error {
  int32_t code;                        /* enum kvshard_code */
  char message[KVSHARD_MESSAGE_BYTES]; /* zero-terminated; what is longer is cut; empty when ok */
} kvshard_error;

/* The library's version, "0.1.0". */
KVSHARD_EXPORT const char* kvshard_version(void);
/* The code's name as in the C++ header, "ok" for 0, "unknown" for any other number. */
KVSHARD_EXPORT const char* kvshard_code_name(int32_t code);

/* kvshard::LogLevel */
enum kvshard_log_level {
  KVSHARD_LOG_DEBUG = 0,
  KVSHARD_LOG_INFO = 1,
  KVSHARD_LOG_WARNING = 2,
  KVSHARD_LOG_ERROR = 3,
  KVSHARD_LOG_OFF = 4
};
/* Takes one line of `bytes` bytes, not terminated. Any thread; must not block or call kvshard. */
typedef void (*kvshard_log_hook)(void* context, int32_t level, const char* line, size_t bytes);
/* Null: warnings and errors to stderr again. A line that is being delivered ends with the hook that it
 * began with: `context` stays alive while any object does. */
KVSHARD_EXPORT void kvshard_set_log_hook(kvshard_log_hook hook, void* context);
KVSHARD_EXPORT void kvshard_set_log_level(int32_t level); /* enum kvshard_log_level */

/* ---- pools ---------------------------------------------------------------------------------------- */

enum kvshard_element_type { /* kvshard::ElementType */
                            KVSHARD_F32 = 1,
                            KVSHARD_F16 = 2,
                            KVSHARD_BF16 = 3,
                            KVSHARD_F8_E4M3 = 4,
                            KVSHARD_F8_E5M2 = 5,
                            KVSHARD_I8 = 6,
                            KVSHARD_U8 = 7
};
enum kvshard_page_order {
  KVSHARD_TOKEN_MAJOR = 1,
  KVSHARD_HEAD_MAJOR = 2
};                                                                        /* kvshard::PageOrder */
enum kvshard_memory { KVSHARD_MEMORY_HOST = 1, KVSHARD_MEMORY_CUDA = 2 }; /* kvshard::MemoryKind */

/* kvshard::BufferGroup */
typedef struct kvshard_buffer_group {
  uint32_t size;
  int32_t element_type;       /* enum kvshard_element_type; 0: KVSHARD_BF16 */
  const char* name;           /* null: "kv" */
  int32_t order;              /* enum kvshard_page_order; 0: KVSHARD_TOKEN_MAJOR */
  uint32_t layers;            /* that this rank holds; may be 0 */
  uint32_t buffers_per_layer; /* 0: 2, K and V */
  uint32_t heads;             /* KV heads that this rank holds */
  uint32_t head_bytes;        /* one token's row of one head in one buffer, bytes */
  uint32_t page_size;         /* tokens */
  uint64_t token_stride;      /* bytes; 0: packed in `order` */
  uint64_t head_stride;       /* bytes; 0: packed */
  uint64_t page_stride;       /* bytes; 0: packed */
  uint32_t page_count;        /* physical pages of this rank, padding page 0 included */
  uint32_t table;             /* number of the page table; groups of one table share page ids */
  uint32_t parts;             /* that share the tokens; 0: 1 */
  uint32_t part;              /* this rank's, below parts */
  uint32_t interleave;        /* tokens that follow each other in a part; 0: by page */
  uint32_t first_head;        /* as the model numbers them */
  uint32_t total_heads;       /* of the model; 0: this rank holds all */
  uint32_t first_layer;       /* as the model numbers them */
  uint32_t total_layers;      /* of the model; 0: this rank holds all */
  uint32_t reserved;          /* 0 */
} kvshard_buffer_group;

/* kvshard::Pool, or with no buffers a kvshard::Geometry */
typedef struct kvshard_pool {
  uint32_t size;
  uint32_t group_count;
  const kvshard_buffer_group* groups;
  const char* model_id;  /* any string; both sides must use the same; null: "" */
  uint32_t rank;         /* this rank's number among its side's */
  uint32_t ranks;        /* of its side; 0: 1 */
  void* const* buffers;  /* group by group, layer by layer, then the layer's: K, V */
  uint64_t buffer_count; /* pointers: the sum of layers * buffers_per_layer */
} kvshard_pool;

/* How many of the decode ranks pull from each prefill rank, for kvshard_prefill_open(). Buffers are not
 * looked at. Fills pullers[prefill_count]. */
KVSHARD_EXPORT int32_t kvshard_count_pullers(const kvshard_pool* prefill, uint32_t prefill_count,
                                             const kvshard_pool* decode, uint32_t decode_count,
                                             uint32_t* pullers, kvshard_error* error);

/* ---- what carries the bytes ----------------------------------------------------------------------- */

enum kvshard_transport { KVSHARD_TRANSPORT_UCX = 0, KVSHARD_TRANSPORT_LOOPBACK = 1 };
enum kvshard_path { /* kvshard::TransferPath */
                    KVSHARD_PATH_AUTOMATIC = 0,
                    KVSHARD_PATH_GET = 1,
                    KVSHARD_PATH_AM = 2,
                    KVSHARD_PATH_LOOPBACK = 3,
                    KVSHARD_PATH_MAPPED = 4
};

/* kvshard::TransportOptions and kvshard::CopyEngineOptions */
typedef struct kvshard_backend {
  uint32_t size;
  int32_t transport;           /* enum kvshard_transport */
  int32_t path;                /* enum kvshard_path: automatic, get or am */
  uint32_t require_native;     /* not 0: refuse an emulated or staged path at connect */
  int32_t memory;              /* enum kvshard_memory, of the pool; 0: KVSHARD_MEMORY_HOST */
  int32_t cuda_device;         /* with KVSHARD_MEMORY_CUDA: of pool and slots */
  uint32_t host_threads;       /* that copy, with KVSHARD_MEMORY_HOST; 0: 1 */
  uint32_t cuda_max_sms;       /* multiprocessors used at most; 0: no cap */
  uint32_t cuda_high_priority; /* not 0: copy on a stream of the highest priority */
  uint32_t reserved;           /* 0 */
} kvshard_backend;

/* ---- the prefill side: kvshard::PrefillRank ------------------------------------------------------- */

/* kvshard::ControlLimits */
typedef struct kvshard_control_limits {
  uint32_t size;
  uint32_t max_peers;                  /* decode ranks with a session */
  uint32_t max_peers_per_address;      /* of those */
  uint32_t max_handshakes;             /* in flight */
  uint32_t max_handshakes_per_address; /* of those */
  uint32_t max_pulls_per_peer;         /* running and waiting together */
  uint32_t max_waiting_pulls;          /* of rooms that are not open yet, of all peers */
  uint32_t handshake_timeout_ms;       /* milliseconds */
  uint64_t max_queued_bytes;           /* to one peer that does not read, bytes */
} kvshard_control_limits;

/* kvshard::PrefillOptions. Every field but `pool` may be 0. */
typedef struct kvshard_prefill_options {
  uint32_t size;
  uint32_t shard_rank;  /* below shard_size */
  uint32_t shard_size;  /* ranks; 0: 1 */
  uint32_t listen_port; /* 0: any free one */
  const kvshard_pool* pool;
  const kvshard_backend* backend;       /* null: UCX, host memory */
  const kvshard_control_limits* limits; /* null: the defaults */
  const char* group;                    /* the group's name; null: "kvshard" */
  const char* listen_host;              /* an IP address; null: "127.0.0.1" */
  const char* secret_file;              /* null: no secret, and loopback addresses only */
  uint64_t epoch;                       /* one number per launch, the same on all ranks; 0: 1 */
  uint64_t slot_payload_bytes;          /* KV bytes that one staging slot holds */
  uint64_t mapped_piece_bytes;          /* KV bytes that a rank that maps the pool copies at once */
  uint32_t slots;                       /* staging slots */
  uint32_t max_rooms;                   /* rooms at once */
  uint32_t not_exported;                /* not 0: nobody on this host may map the pool */
  uint32_t checksum;                    /* not 0: sum each slot */
  uint32_t allow_unauthenticated_network; /* not 0: see kvshard::SecurityOptions */
  uint32_t lease_ms;                      /* milliseconds, as all that follow */
  uint32_t slot_timeout_ms;
  uint32_t pull_timeout_ms;
  uint32_t heartbeat_ms;
  uint32_t peer_timeout_ms;
  uint32_t busy_poll_us; /* microseconds that the thread polls before it sleeps */
  uint32_t reserved;     /* 0 */
} kvshard_prefill_options;

/* kvshard::Chunk */
typedef struct kvshard_chunk {
  uint32_t size;
  uint32_t first_position;  /* of pages[0], in pages of the request */
  const uint32_t* pages;    /* logical pages at first_position, + 1, ... */
  uint64_t page_count;      /* pages */
  uint32_t first_layer;     /* as the model numbers them */
  uint32_t layer_count;     /* layers; 0: all */
  uint32_t table;           /* whose page numbers these are */
  uint32_t last;            /* not 0: nothing follows, of any table */
  void* ready;              /* CUDA event, or null; borrowed until the room's event */
  const void* side_data;    /* with `last`, for the decode side */
  uint64_t side_data_bytes; /* bytes, 65536 at most */
} kvshard_chunk;

/* kvshard::RoomEvent */
typedef struct kvshard_room_event {
  uint32_t size;
  int32_t code; /* enum kvshard_code */
  uint64_t room;
  char message[KVSHARD_MESSAGE_BYTES]; /* of the code; empty when ok */
} kvshard_room_event;

/* kvshard::PrefillStats: counters since create, and gauges. */
typedef struct kvshard_prefill_stats {
  uint32_t size;
  uint32_t reserved;
  uint64_t rooms_opened, rooms_done, rooms_failed;            /* rooms */
  uint64_t pulls_started, pulls_committed, pulls_failed;      /* pulls */
  uint64_t pieces_sent;                                       /* pieces */
  uint64_t bytes_sent;                                        /* bytes */
  uint64_t late_reads;                                        /* slots taken back */
  uint64_t stale_commits, late_messages;                      /* messages */
  uint64_t peers_refused, peers_lost, handshakes_ended;       /* peers */
  uint64_t rooms, leases, pulls_waiting, slots_in_use, peers; /* gauges: there now */
} kvshard_prefill_stats;

/* kvshard::GroupMember */
typedef struct kvshard_group_member {
  uint32_t size;
  uint32_t shard_rank;
  uint64_t incarnation; /* the process that must answer there; 0: any */
  uint32_t port;
  uint32_t reserved; /* 0 */
  char host[256];    /* zero-terminated */
} kvshard_group_member;

typedef struct kvshard_prefill_rank kvshard_prefill_rank;

KVSHARD_EXPORT int32_t kvshard_prefill_create(const kvshard_prefill_options* options,
                                              kvshard_prefill_rank** rank, kvshard_error* error);
/* Closes it, too. */
KVSHARD_EXPORT void kvshard_prefill_destroy(kvshard_prefill_rank* rank);
/* Within about two seconds; afterwards the pool is not touched, and poll gives the last events. */
KVSHARD_EXPORT int32_t kvshard_prefill_close(kvshard_prefill_rank* rank, kvshard_error* error);
/* Where decode ranks connect. */
KVSHARD_EXPORT int32_t kvshard_prefill_member(const kvshard_prefill_rank* rank,
                                              kvshard_group_member* member, kvshard_error* error);
KVSHARD_EXPORT int32_t kvshard_prefill_open(kvshard_prefill_rank* rank, uint64_t room,
                                            uint32_t pullers, kvshard_error* error);
KVSHARD_EXPORT int32_t kvshard_prefill_publish(kvshard_prefill_rank* rank, uint64_t room,
                                               const kvshard_chunk* chunk, kvshard_error* error);
KVSHARD_EXPORT int32_t kvshard_prefill_abort(kvshard_prefill_rank* rank, uint64_t room,
                                             const char* reason, kvshard_error* error);
/* Sets `found`, and fills the event where a room has ended. Never waits. */
KVSHARD_EXPORT int32_t kvshard_prefill_poll(kvshard_prefill_rank* rank, kvshard_room_event* event,
                                            bool* found, kvshard_error* error);
/* Readable while poll has something; the rank's own; -1 without a rank. */
KVSHARD_EXPORT int kvshard_prefill_event_fd(const kvshard_prefill_rank* rank);
KVSHARD_EXPORT int32_t kvshard_prefill_get_stats(const kvshard_prefill_rank* rank,
                                                 kvshard_prefill_stats* stats,
                                                 kvshard_error* error);

/* ---- finding each other: kvshard::Registry -------------------------------------------------------- */

/* kvshard::GroupSpec. Given to a connect; filled by a wait, where `name` says which group. */
typedef struct kvshard_group_spec {
  uint32_t size;
  uint32_t member_count;
  const char* name;
  uint64_t epoch;                /* 0: any */
  kvshard_group_member* members; /* each shard rank once */
  uint32_t member_capacity;      /* members that fit, for a wait; their size is set by the caller */
  uint32_t reserved;             /* 0 */
} kvshard_group_spec;

typedef struct kvshard_registry kvshard_registry;
typedef struct kvshard_announcement kvshard_announcement;
typedef struct kvshard_registry_server kvshard_registry_server;

/* kvshard::make_registry(): "host:port", "http://host:port" or "etcd://a:2379,b:2379/prefix". */
KVSHARD_EXPORT int32_t kvshard_registry_create(const char* address, kvshard_registry** registry,
                                               kvshard_error* error);
/* Announcements keep what they need of it. */
KVSHARD_EXPORT void kvshard_registry_destroy(kvshard_registry* registry);
/* Returns when the rank is listed; it stays so until the announcement is destroyed. */
KVSHARD_EXPORT int32_t kvshard_announce(kvshard_registry* registry,
                                        const kvshard_prefill_rank* rank, uint32_t timeout_ms,
                                        kvshard_announcement** announcement, kvshard_error* error);
/* Ok after a renewal that went well, else why the last did not. */
KVSHARD_EXPORT int32_t kvshard_announcement_status(const kvshard_announcement* announcement,
                                                   kvshard_error* error);
/* Withdraws the rank; waits one second at most. */
KVSHARD_EXPORT void kvshard_announcement_destroy(kvshard_announcement* announcement);
/* Waits until the group group->name is whole, and fills epoch, members and member_count. With too few
 * members[] it is KVSHARD_RESOURCE_EXHAUSTED, and member_count says how many there are. */
KVSHARD_EXPORT int32_t kvshard_wait_for_group(kvshard_registry* registry, uint32_t timeout_ms,
                                              kvshard_group_spec* group, kvshard_error* error);

/* kvshard::RegistryServer on an IP address (null: "127.0.0.1") and port (0: any free one). */
KVSHARD_EXPORT int32_t kvshard_registry_server_start(const char* host, uint32_t port,
                                                     kvshard_registry_server** server,
                                                     kvshard_error* error);
/* "host:port", for kvshard_registry_create(); borrowed until destroy. Null without a server. */
KVSHARD_EXPORT const char* kvshard_registry_server_address(const kvshard_registry_server* server);
KVSHARD_EXPORT void kvshard_registry_server_destroy(kvshard_registry_server* server);

/* ---- the decode side: kvshard::DecodeRank --------------------------------------------------------- */

enum kvshard_mapped { /* kvshard::Mapped */
                      KVSHARD_MAPPED_AUTOMATIC = 0,
                      KVSHARD_MAPPED_NEVER = 1,
                      KVSHARD_MAPPED_ALWAYS = 2
};

/* kvshard::DecodeOptions. Every field but `pool` may be 0. */
typedef struct kvshard_decode_options {
  uint32_t size;
  int32_t mapped; /* enum kvshard_mapped */
  const kvshard_pool* pool;
  const kvshard_backend* backend;         /* null: UCX, host memory */
  const char* secret_file;                /* null: no secret, and loopback addresses only */
  uint64_t landing_payload_bytes;         /* KV bytes that one landing slot holds */
  uint32_t landing_slots;                 /* slots, shared by all pulls */
  uint32_t window;                        /* slots that one pull may hold on each prefill rank */
  uint32_t max_pulls;                     /* pulls at once */
  uint32_t allow_unauthenticated_network; /* not 0: see kvshard::SecurityOptions */
  uint32_t heartbeat_ms;                  /* milliseconds, as all that follow */
  uint32_t peer_timeout_ms;
  uint32_t fetch_timeout_ms;
  uint32_t reconnect_min_ms;
  uint32_t reconnect_max_ms;
  uint32_t busy_poll_us; /* microseconds that the thread polls before it sleeps */
} kvshard_decode_options;

/* kvshard::PathReport */
typedef struct kvshard_path_report {
  uint32_t size;
  int32_t path;                  /* enum kvshard_path */
  uint64_t get_bytes_per_second; /* measured by the probe; 0: not tried */
  uint64_t am_bytes_per_second;  /* likewise */
  uint32_t get_native;           /* 0: a get would be emulated in software */
  uint32_t reserved;
  char reason[KVSHARD_MESSAGE_BYTES]; /* why this path */
} kvshard_path_report;

/* kvshard::PullPages: where the pages of one table go. */
typedef struct kvshard_pull_pages {
  uint32_t size;
  uint32_t table;
  const uint32_t* pages;   /* this rank's own pages */
  uint64_t page_count;     /* pages */
  uint32_t first_position; /* what decode lacks starts here, in pages of the request */
  uint32_t skip_tokens;    /* and of that page, behind so many tokens */
  uint32_t end_position;   /* where the request ends, in pages; 0: behind the last of `pages` */
  uint32_t base;           /* part of the chain's position 0 */
} kvshard_pull_pages;

/* kvshard::PullRequest */
typedef struct kvshard_pull_request {
  uint32_t size;
  uint32_t table_count;
  uint64_t group; /* of kvshard_decode_connect() */
  uint64_t room;
  const kvshard_pull_pages* tables; /* each table once, in any order */
  void* after;                      /* CUDA event before which no page is written, or null */
  void* stream;                     /* CUDA stream that waits for the pull's end, or null */
  uint32_t deadline_ms;             /* milliseconds for the whole pull; 0: a minute */
  uint32_t reserved;                /* 0 */
} kvshard_pull_request;

/* kvshard::SourceTiming */
typedef struct kvshard_source_timing {
  uint32_t size;
  uint32_t shard_rank;
  uint64_t pieces;         /* pieces */
  uint64_t bytes;          /* bytes */
  uint64_t first_ready_ns; /* nanoseconds from pull to its first piece */
  uint64_t landed_ns;      /* nanoseconds from pull to its last byte in our pages */
  uint64_t wire_ns;        /* nanoseconds, summed over its fetches */
  uint64_t landing_ns;     /* nanoseconds its pieces waited for landing slots, summed */
  uint64_t scatter_ns;     /* nanoseconds, summed over its copies into pages */
} kvshard_source_timing;

/* One prefill rank's side data: side_bytes[offset, offset + bytes) of the event. */
typedef struct kvshard_side_data {
  uint32_t size;
  uint32_t shard_rank;
  uint64_t offset; /* bytes */
  uint64_t bytes;  /* bytes */
} kvshard_side_data;

/* kvshard::PullEvent. The caller sets size, the arrays (null: not wanted), their capacities, and the size
 * of their elements; poll fills the rest and leaves the arrays where they are. */
typedef struct kvshard_pull_event {
  uint32_t size;
  int32_t code; /* enum kvshard_code; ok: every byte is in its page and was valid to the end */
  uint64_t pull;
  uint64_t room;
  uint64_t bytes;                 /* bytes */
  uint64_t total_ns;              /* nanoseconds */
  kvshard_source_timing* sources; /* by shard rank */
  kvshard_side_data* side_data;   /* from each rank that sent some, by shard rank */
  void* side_bytes;
  uint64_t side_bytes_capacity; /* bytes */
  uint64_t side_bytes_count;    /* bytes that there are */
  uint32_t source_capacity;     /* elements */
  uint32_t source_count;        /* elements that there are */
  uint32_t side_data_capacity;  /* elements */
  uint32_t side_data_count;     /* elements that there are */
  int32_t path;                 /* enum kvshard_path */
  uint32_t reserved;
  char message[KVSHARD_MESSAGE_BYTES]; /* of the code; empty when ok */
  uint64_t connect_ns;                 /* nanoseconds before any rank was asked */
  uint64_t commit_ns;                  /* nanoseconds from the last byte to the last verdict */
} kvshard_pull_event;

/* kvshard::DecodeStats: counters since create, and gauges. */
typedef struct kvshard_decode_stats {
  uint32_t size;
  uint32_t reserved;
  uint64_t pulls_started, pulls_done, pulls_failed, pulls_cancelled; /* pulls */
  uint64_t pieces;                                                   /* pieces */
  uint64_t bytes;                                                    /* bytes */
  uint64_t stale;                                                    /* pulls */
  uint64_t late_messages;                                            /* messages */
  uint64_t peers_lost, reconnects;                                   /* sessions */
  uint64_t pulls, landing_in_use, quarantined, peers;                /* gauges: there now */
} kvshard_decode_stats;

typedef struct kvshard_decode_rank kvshard_decode_rank;

KVSHARD_EXPORT int32_t kvshard_decode_create(const kvshard_decode_options* options,
                                             kvshard_decode_rank** rank, kvshard_error* error);
/* Closes it, too. */
KVSHARD_EXPORT void kvshard_decode_destroy(kvshard_decode_rank* rank);
/* Within about two seconds; afterwards the pool is not touched, and poll gives the last events. */
KVSHARD_EXPORT int32_t kvshard_decode_close(kvshard_decode_rank* rank, kvshard_error* error);
/* The only call here that waits: to its time limit. Sets the group's number. */
KVSHARD_EXPORT int32_t kvshard_decode_connect(kvshard_decode_rank* rank,
                                              const kvshard_group_spec* spec, uint32_t timeout_ms,
                                              uint64_t* group, kvshard_error* error);
KVSHARD_EXPORT int32_t kvshard_decode_disconnect(kvshard_decode_rank* rank, uint64_t group,
                                                 kvshard_error* error);
KVSHARD_EXPORT int32_t kvshard_decode_path(const kvshard_decode_rank* rank, uint64_t group,
                                           uint32_t shard_rank, kvshard_path_report* report,
                                           kvshard_error* error);
/* Starts a pull and sets its number. Its one event comes later, whatever happens. */
KVSHARD_EXPORT int32_t kvshard_decode_pull(kvshard_decode_rank* rank,
                                           const kvshard_pull_request* request, uint64_t* pull,
                                           kvshard_error* error);
KVSHARD_EXPORT int32_t kvshard_decode_cancel(kvshard_decode_rank* rank, uint64_t pull,
                                             kvshard_error* error);
/* Sets `found`, and fills the event where a pull has ended. Never waits. Where one of its arrays is too
 * short it is KVSHARD_RESOURCE_EXHAUSTED: the counts say what is needed, and the event is kept for the
 * next call, which event_fd does not announce. */
KVSHARD_EXPORT int32_t kvshard_decode_poll(kvshard_decode_rank* rank, kvshard_pull_event* event,
                                           bool* found, kvshard_error* error);
/* Readable while poll has something; the rank's own; -1 without a rank. */
KVSHARD_EXPORT int kvshard_decode_event_fd(const kvshard_decode_rank* rank);
KVSHARD_EXPORT int32_t kvshard_decode_get_stats(const kvshard_decode_rank* rank,
                                                kvshard_decode_stats* stats, kvshard_error* error);
/* One line for an operator, of an event that poll filled, its sources included. Zero-terminated; cut at
 * `capacity` bytes. */
KVSHARD_EXPORT int32_t kvshard_summarize(const kvshard_pull_event* event, char* text,
                                         size_t capacity, kvshard_error* error);

/* ---- pages: kvshard::PageAllocator ---------------------------------------------------------------- */

enum kvshard_free_order { /* kvshard::FreeOrder */
                          KVSHARD_LAST_FREED_FIRST = 0,
                          KVSHARD_ASCENDING = 1
};

/* Used on one thread at a time. Pages are logical ones. A draw or a free takes all pages or none. */
typedef struct kvshard_allocator kvshard_allocator;

/* page_size in tokens; each of the shard_size ranks has pages_per_rank usable pages. */
KVSHARD_EXPORT int32_t kvshard_allocator_create(uint32_t shard_size, uint32_t page_size,
                                                uint32_t pages_per_rank, int32_t order,
                                                kvshard_allocator** allocator,
                                                kvshard_error* error);
KVSHARD_EXPORT void kvshard_allocator_destroy(kvshard_allocator* allocator);
/* Fills `pages` with a new chain, and sets its rotation base. */
KVSHARD_EXPORT int32_t kvshard_allocator_draw_chain(kvshard_allocator* allocator, uint32_t* pages,
                                                    uint64_t page_count, uint32_t* base,
                                                    kvshard_error* error);
/* Fills `pages` with the positions from first_position on of the chain with that base. */
KVSHARD_EXPORT int32_t kvshard_allocator_extend(kvshard_allocator* allocator, uint32_t base,
                                                uint32_t first_position, uint32_t* pages,
                                                uint64_t page_count, kvshard_error* error);
/* Frees consecutive pages of a chain. */
KVSHARD_EXPORT int32_t kvshard_allocator_free(kvshard_allocator* allocator, const uint32_t* pages,
                                              uint64_t page_count, kvshard_error* error);
/* Whether a request of `pages` pages can be promised now. */
KVSHARD_EXPORT int32_t kvshard_allocator_admit(const kvshard_allocator* allocator, uint64_t pages,
                                               kvshard_error* error);
/* Pages; all are 0 without an allocator. */
KVSHARD_EXPORT uint64_t kvshard_allocator_admissible_pages(const kvshard_allocator* allocator);
KVSHARD_EXPORT uint64_t kvshard_allocator_charge_pages(const kvshard_allocator* allocator,
                                                       uint64_t pages);
KVSHARD_EXPORT uint64_t kvshard_allocator_used_pages(const kvshard_allocator* allocator);
KVSHARD_EXPORT uint32_t kvshard_allocator_free_pages(const kvshard_allocator* allocator,
                                                     uint32_t shard_rank);

#ifdef __cplusplus
}
#endif

#endif
