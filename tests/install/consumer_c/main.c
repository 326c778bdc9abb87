// A stranger's engine in C: two prefill ranks and a decode rank in one process, over loopback.
#define _POSIX_C_SOURCE 200809L
#include <poll.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvshard/kvshard.h"

enum { RANKS = 2, LAYERS = 3, BUFFERS = 2 * LAYERS, PAGE_SIZE = 4, HEADS = 2, HEAD_BYTES = 16 };
enum { PAGE_BYTES = PAGE_SIZE * HEADS * HEAD_BYTES, POOL_PAGES = 32, PAGES = 13, WAIT_MS = 20000 };

static kvshard_error error;

#define CHECK(condition)                                                                    \
  do {                                                                                      \
    if (!(condition)) {                                                                     \
      fprintf(stderr, "consumer_c: line %d: %s; last error %s: %s\n", __LINE__, #condition, \
              kvshard_code_name(error.code), error.message);                                \
      exit(1);                                                                              \
    }                                                                                       \
  } while (0)
#define OK(call) CHECK((call) == KVSHARD_OK)

typedef struct {
  unsigned char bytes[BUFFERS][POOL_PAGES * PAGE_BYTES];
  void* buffers[BUFFERS];
  kvshard_buffer_group group;
  kvshard_pool pool;
} engine_pool;

static engine_pool prefill_pools[RANKS], decode_pool;

static void describe(engine_pool* pool, uint32_t part, uint32_t parts) {
  memset(pool->bytes, 0xc5, sizeof pool->bytes);
  for (int b = 0; b < BUFFERS; ++b) pool->buffers[b] = pool->bytes[b];
  pool->group = (kvshard_buffer_group){.size = sizeof pool->group,
                                       .element_type = KVSHARD_F32,
                                       .layers = LAYERS,
                                       .heads = HEADS,
                                       .head_bytes = HEAD_BYTES,
                                       .page_size = PAGE_SIZE,
                                       .page_count = POOL_PAGES,
                                       .parts = parts,
                                       .part = part};
  pool->pool = (kvshard_pool){.size = sizeof pool->pool,
                              .group_count = 1,
                              .groups = &pool->group,
                              .model_id = "strange",
                              .rank = part,
                              .ranks = parts,
                              .buffers = pool->buffers,
                              .buffer_count = BUFFERS};
}

static unsigned char content(uint32_t position, int buffer, int i) {
  return (unsigned char)(position * 31 + (uint32_t)buffer * 7 + (uint32_t)i * 3 + 1);
}

static void wait_readable(int fd) {
  struct pollfd at = {.fd = fd, .events = POLLIN};
  CHECK(poll(&at, 1, WAIT_MS) == 1);
}

static atomic_int lines;  // of any thread
static void count_line(void* context, int32_t level, const char* line, size_t bytes) {
  (void)level, (void)line, (void)bytes;
  ++*(atomic_int*)context;
}

static void refuse_bad_input(kvshard_prefill_rank* rank, const kvshard_prefill_options* good) {
  kvshard_prefill_rank* made = NULL;
  kvshard_prefill_options bad = *good;
  bad.size = 0;
  CHECK(kvshard_prefill_create(&bad, &made, &error) == KVSHARD_INVALID_ARGUMENT);
  CHECK(strstr(error.message, "kvshard_prefill_options has size 0") && made == NULL);

  bad = *good;
  bad.shard_rank = 7;
  CHECK(kvshard_prefill_create(&bad, &made, &error) == KVSHARD_INVALID_ARGUMENT);
  CHECK(strstr(error.message, "shard_rank 7 is not below shard_size 2") && made == NULL);
  CHECK(kvshard_prefill_create(&bad, &made, NULL) == KVSHARD_INVALID_ARGUMENT);

  engine_pool* pool = malloc(sizeof *pool);
  CHECK(pool != NULL);
  describe(pool, 0, RANKS);
  bad = *good;
  bad.pool = &pool->pool;
  pool->pool.buffer_count = BUFFERS - 1;
  CHECK(kvshard_prefill_create(&bad, &made, &error) == KVSHARD_INVALID_ARGUMENT);
  CHECK(strstr(error.message, "buffer_count 5, but the groups have 6 buffers"));
  pool->pool.buffer_count = BUFFERS;
  pool->group.element_type = 257;  // 1 in eight bits
  CHECK(kvshard_prefill_create(&bad, &made, &error) == KVSHARD_INVALID_ARGUMENT);
  CHECK(strstr(error.message, "element_type 257"));
  free(pool);

  CHECK(kvshard_prefill_open(NULL, 1, 1, &error) == KVSHARD_INVALID_ARGUMENT);
  CHECK(strstr(error.message, "rank is null"));
  const kvshard_chunk nothing = {.size = sizeof nothing, .page_count = 3};
  CHECK(kvshard_prefill_publish(rank, 1, &nothing, &error) == KVSHARD_INVALID_ARGUMENT);
  CHECK(strstr(error.message, "pages is null, its count 3"));
  kvshard_registry* registry = NULL;
  CHECK(kvshard_registry_create("nowhere", &registry, &error) == KVSHARD_INVALID_ARGUMENT);
  CHECK(registry == NULL && error.message[0] != '\0');
}

int main(void) {
  CHECK(strncmp(kvshard_version(), "0.1.", 4) == 0);
  kvshard_set_log_hook(count_line, &lines);
  kvshard_set_log_level(KVSHARD_LOG_DEBUG);

  // A request's pages, and who pulls them.
  kvshard_allocator* allocator = NULL;
  OK(kvshard_allocator_create(RANKS, PAGE_SIZE, POOL_PAGES - 1, KVSHARD_LAST_FREED_FIRST,
                              &allocator, &error));
  OK(kvshard_allocator_admit(allocator, PAGES, &error));
  CHECK(kvshard_allocator_charge_pages(allocator, PAGES) == PAGES + RANKS);
  CHECK(kvshard_allocator_admit(allocator, 1000, &error) == KVSHARD_RESOURCE_EXHAUSTED);
  uint32_t pages[PAGES], base = 99;
  OK(kvshard_allocator_draw_chain(allocator, pages, PAGES - 3, &base, &error));
  OK(kvshard_allocator_extend(allocator, base, PAGES - 3, pages + PAGES - 3, 3, &error));
  CHECK(kvshard_allocator_used_pages(allocator) == PAGES);
  for (uint32_t p = 0; p < PAGES; ++p) CHECK(pages[p] % RANKS == (base + p) % RANKS);

  kvshard_pool prefill[RANKS];
  for (uint32_t r = 0; r < RANKS; ++r) {
    describe(&prefill_pools[r], r, RANKS);
    prefill[r] = prefill_pools[r].pool;
  }
  describe(&decode_pool, 0, 1);
  uint32_t pullers[RANKS] = {0, 0};
  OK(kvshard_count_pullers(prefill, RANKS, &decode_pool.pool, 1, pullers, &error));
  CHECK(pullers[0] == 1 && pullers[1] == 1);

  // Both sides, which find each other by a registry.
  const kvshard_backend backend = {.size = sizeof backend,
                                   .transport = KVSHARD_TRANSPORT_LOOPBACK,
                                   .memory = KVSHARD_MEMORY_HOST};
  kvshard_registry_server* server = NULL;
  OK(kvshard_registry_server_start(NULL, 0, &server, &error));
  kvshard_registry* registry = NULL;
  OK(kvshard_registry_create(kvshard_registry_server_address(server), &registry, &error));
  kvshard_prefill_rank* ranks[RANKS] = {NULL, NULL};
  kvshard_announcement* announcements[RANKS] = {NULL, NULL};
  kvshard_prefill_options options = {.size = sizeof options,
                                     .shard_size = RANKS,
                                     .backend = &backend,
                                     .group = "strangers",
                                     .epoch = 5,
                                     .checksum = 1};
  for (uint32_t r = 0; r < RANKS; ++r) {
    options.shard_rank = r;
    options.pool = &prefill_pools[r].pool;
    OK(kvshard_prefill_create(&options, &ranks[r], &error));
    OK(kvshard_announce(registry, ranks[r], WAIT_MS, &announcements[r], &error));
    OK(kvshard_announcement_status(announcements[r], &error));
  }
  refuse_bad_input(ranks[0], &options);

  kvshard_group_member members[RANKS];
  memset(members, 0, sizeof members);
  members[0].size = sizeof members[0];
  kvshard_group_spec spec = {
      .size = sizeof spec, .name = "strangers", .members = members, .member_capacity = 1};
  CHECK(kvshard_wait_for_group(registry, WAIT_MS, &spec, &error) == KVSHARD_RESOURCE_EXHAUSTED);
  CHECK(spec.member_count == RANKS);
  spec.member_capacity = RANKS;
  OK(kvshard_wait_for_group(registry, WAIT_MS, &spec, &error));
  CHECK(spec.member_count == RANKS && spec.epoch == 5);
  kvshard_group_member self = {.size = sizeof self};
  OK(kvshard_prefill_member(ranks[1], &self, &error));
  for (uint32_t m = 0; m < RANKS; ++m) {
    CHECK(members[m].size == sizeof self);
    if (members[m].shard_rank == 1) {
      CHECK(members[m].port == self.port && strcmp(members[m].host, self.host) == 0);
      CHECK(members[m].incarnation == self.incarnation && self.incarnation != 0);
    }
  }

  const kvshard_decode_options decode_options = {
      .size = sizeof decode_options, .pool = &decode_pool.pool, .backend = &backend};
  kvshard_decode_rank* decode = NULL;
  OK(kvshard_decode_create(&decode_options, &decode, &error));
  uint64_t group = 0;
  OK(kvshard_decode_connect(decode, &spec, WAIT_MS, &group, &error));
  kvshard_path_report path = {.size = sizeof path};
  OK(kvshard_decode_path(decode, group, 1, &path, &error));
  CHECK(path.path == KVSHARD_PATH_LOOPBACK);
  CHECK(kvshard_decode_path(decode, group, 9, &path, &error) == KVSHARD_INVALID_ARGUMENT);

  // The request: filled, published by both, pulled, compared.
  const uint64_t room = 77;
  for (uint32_t p = 0; p < PAGES; ++p)
    for (int b = 0; b < BUFFERS; ++b)
      for (int i = 0; i < PAGE_BYTES; ++i)
        prefill_pools[pages[p] % RANKS].bytes[b][pages[p] / RANKS * PAGE_BYTES + (uint32_t)i] =
            content(p, b, i);
  const kvshard_chunk chunk = {.size = sizeof chunk,
                               .pages = pages,
                               .page_count = PAGES,
                               .last = 1,
                               .side_data = "first token 42",
                               .side_data_bytes = 14};
  for (uint32_t r = 0; r < RANKS; ++r) {
    OK(kvshard_prefill_open(ranks[r], room, pullers[r], &error));
    OK(kvshard_prefill_publish(ranks[r], room, &chunk, &error));
  }
  uint32_t to[PAGES];
  for (uint32_t p = 0; p < PAGES; ++p) to[p] = 1 + p * 5 % (POOL_PAGES - 1);
  const kvshard_pull_pages table = {.size = sizeof table, .pages = to, .page_count = PAGES};
  const kvshard_pull_request request = {
      .size = sizeof request, .table_count = 1, .group = group, .room = room, .tables = &table};
  uint64_t pull = 0;
  OK(kvshard_decode_pull(decode, &request, &pull, &error));
  wait_readable(kvshard_decode_event_fd(decode));

  kvshard_source_timing sources[RANKS];
  memset(sources, 0, sizeof sources);
  sources[0].size = sizeof sources[0];
  kvshard_side_data side[RANKS];
  memset(side, 0, sizeof side);
  side[0].size = sizeof side[0];
  char side_bytes[64];
  kvshard_pull_event event = {.size = sizeof event,
                              .sources = sources,
                              .source_capacity = RANKS,
                              .side_data = side,
                              .side_data_capacity = RANKS,
                              .side_bytes = side_bytes,
                              .side_bytes_capacity = 5};
  bool found = true;
  CHECK(kvshard_decode_poll(decode, &event, &found, &error) == KVSHARD_RESOURCE_EXHAUSTED);
  CHECK(!found && event.side_bytes_count == 28);  // kept: the arrays are too short
  event.side_bytes_capacity = sizeof side_bytes;
  OK(kvshard_decode_poll(decode, &event, &found, &error));
  CHECK(found && event.code == KVSHARD_OK && event.pull == pull && event.room == room);
  CHECK(event.bytes == (uint64_t)PAGES * BUFFERS * PAGE_BYTES);
  CHECK(event.source_count == RANKS && sources[1].shard_rank == 1 && sources[1].bytes > 0);
  CHECK(sources[0].bytes + sources[1].bytes == event.bytes);
  CHECK(sources[0].scatter_ns > 0 && sources[0].scatter_ns <= event.total_ns);
  CHECK(sources[0].landing_ns < event.total_ns);
  CHECK(event.connect_ns > 0 && event.commit_ns > 0 &&
        event.connect_ns + event.commit_ns <= event.total_ns);
  CHECK(event.side_data_count == RANKS && side[1].offset == 14 && side[1].bytes == 14);
  CHECK(memcmp(side_bytes, "first token 42first token 42", 28) == 0);
  unsigned char written[POOL_PAGES] = {0};
  for (uint32_t p = 0; p < PAGES; ++p) {
    written[to[p]] = 1;
    for (int b = 0; b < BUFFERS; ++b)
      for (int i = 0; i < PAGE_BYTES; ++i)
        CHECK(decode_pool.bytes[b][to[p] * PAGE_BYTES + (uint32_t)i] == content(p, b, i));
  }
  for (uint32_t page = 0; page < POOL_PAGES; ++page)
    for (int i = 0; !written[page] && i < PAGE_BYTES; ++i)
      CHECK(decode_pool.bytes[0][page * PAGE_BYTES + (uint32_t)i] == 0xc5);
  char line[256];
  OK(kvshard_summarize(&event, line, sizeof line, &error));
  CHECK(strstr(line, "room 77: ok") && strstr(line, "from 2 ranks") &&
        strstr(line, "slowest rank"));
  OK(kvshard_decode_poll(decode, &event, &found, &error));
  CHECK(!found);

  for (uint32_t r = 0; r < RANKS; ++r) {
    kvshard_room_event ended = {.size = sizeof ended};
    wait_readable(kvshard_prefill_event_fd(ranks[r]));
    OK(kvshard_prefill_poll(ranks[r], &ended, &found, &error));
    CHECK(found && ended.room == room && ended.code == KVSHARD_OK);
    kvshard_prefill_stats stats = {.size = sizeof stats};
    OK(kvshard_prefill_get_stats(ranks[r], &stats, &error));
    CHECK(stats.rooms_done == 1 && stats.pulls_committed == 1 && stats.rooms == 0);
  }
  OK(kvshard_allocator_free(allocator, pages, PAGES, &error));
  CHECK(kvshard_allocator_free(allocator, pages, PAGES, &error) == KVSHARD_INVALID_ARGUMENT);
  CHECK(kvshard_allocator_admissible_pages(allocator) == (POOL_PAGES - 1) * RANKS);
  CHECK(kvshard_allocator_free_pages(allocator, 1) == POOL_PAGES - 1);

  // A room that is given up, and a pull that is.
  uint64_t other = 0;
  kvshard_pull_request next = request;
  next.room = 78;
  OK(kvshard_prefill_open(ranks[0], 78, 1, &error));
  OK(kvshard_decode_pull(decode, &next, &pull, &error));
  kvshard_prefill_stats now = {.size = sizeof now};
  while (now.pulls_started < 2) {  // until the pull is there: later it would find no room
    sched_yield();
    OK(kvshard_prefill_get_stats(ranks[0], &now, &error));
  }
  OK(kvshard_prefill_abort(ranks[0], 78, "the user left", &error));
  wait_readable(kvshard_decode_event_fd(decode));
  OK(kvshard_decode_poll(decode, &event, &found, &error));
  CHECK(found && event.pull == pull && event.code == KVSHARD_CANCELLED);
  CHECK(strstr(event.message, "the user left"));
  next.room = 79;
  OK(kvshard_decode_pull(decode, &next, &other, &error));
  OK(kvshard_decode_cancel(decode, other, &error));
  wait_readable(kvshard_decode_event_fd(decode));
  OK(kvshard_decode_poll(decode, &event, &found, &error));
  CHECK(found && event.pull == other && event.code == KVSHARD_CANCELLED);
  const kvshard_pull_pages twice[2] = {table, table};
  next.tables = twice;
  next.table_count = 2;
  CHECK(kvshard_decode_pull(decode, &next, &pull, &error) == KVSHARD_INVALID_ARGUMENT);
  kvshard_decode_stats stats = {.size = sizeof stats};
  OK(kvshard_decode_get_stats(decode, &stats, &error));
  CHECK(stats.pulls_started == 3 && stats.pulls_done == 1 && stats.pulls == 0);

  OK(kvshard_decode_disconnect(decode, group, &error));
  OK(kvshard_decode_close(decode, &error));
  kvshard_decode_destroy(decode);
  kvshard_registry_destroy(registry);  // announcements keep what they need
  for (uint32_t r = 0; r < RANKS; ++r) {
    kvshard_announcement_destroy(announcements[r]);
    OK(kvshard_prefill_close(ranks[r], &error));
    kvshard_prefill_destroy(ranks[r]);
  }
  kvshard_registry_server_destroy(server);
  kvshard_allocator_destroy(allocator);
  CHECK(lines > 0);
  puts("consumer_c: ok");
  return 0;
}
