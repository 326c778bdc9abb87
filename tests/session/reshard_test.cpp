// Any prefill to any decode, through real ranks: over the loopback transport, and over UCX between processes.

#include <gtest/gtest.h>

#include <set>

#include "kvshard/plan.hpp"

#include "support/cluster.hpp"
#include "support/model_pools.hpp"

namespace kvshard::test {
namespace {

struct Case {
  std::string name;
  std::vector<Geometry> prefill, decode;
  std::uint64_t tokens{0};              // of table 0
  std::uint64_t held{0};                // tokens that decode has already
  std::vector<std::uint64_t> others{};  // tokens of tables 1, 2, ...
  std::uint64_t window{0};              // of table 1: only its last so many pages are kept
};

void PrintTo(const Case& each, std::ostream* out) {
  *out << each.name;
}

BufferGroup gqa(std::uint32_t page_size = 16, std::uint32_t heads = 8) {
  return {.name = "kv",
          .layers = 4,
          .buffers_per_layer = 2,
          .element_type = ElementType::bf16,
          .heads = heads,
          .head_bytes = 8,
          .page_size = page_size,
          .page_count = 40};
}
BufferGroup mla(std::uint32_t page_size = 16) {
  return {.name = "latent",
          .layers = 3,
          .buffers_per_layer = 1,
          .element_type = ElementType::bf16,
          .heads = 1,
          .head_bytes = 24,
          .page_size = page_size,
          .page_count = 40};
}

// The ways to cut a side's group over `count` ranks.
using Cut = std::function<BufferGroup(BufferGroup, std::uint32_t rank, std::uint32_t count)>;

BufferGroup by_head(BufferGroup group, std::uint32_t rank, std::uint32_t count) {
  const std::uint32_t heads = group.heads;
  group.total_heads = heads;
  group.heads = std::max(1U, heads / count);
  group.first_head = rank * heads / count;  // fewer heads than ranks: neighbours are replicas
  return group;
}
BufferGroup by_layer(BufferGroup group, std::uint32_t rank, std::uint32_t count) {
  const std::uint32_t layers = group.layers;  // uneven: the first stage has what is left over
  const std::uint32_t each = layers / count, more = layers - each * count;
  group.total_layers = layers;
  group.layers = each + (rank == 0 ? more : 0);
  group.first_layer = rank * each + (rank == 0 ? 0 : more);
  return group;
}
BufferGroup by_pages(BufferGroup group, std::uint32_t rank, std::uint32_t count) {
  group.parts = count;
  group.part = rank;
  return group;
}
Cut by_tokens(std::uint32_t interleave) {
  return [interleave](BufferGroup group, std::uint32_t rank, std::uint32_t count) {
    group = by_pages(std::move(group), rank, count);
    group.interleave = interleave;
    return group;
  };
}
BufferGroup replicated(BufferGroup group, std::uint32_t, std::uint32_t) {
  return group;
}
// Both cuts at once: `outer` over count_outer, and in each the ranks of `inner`.
std::vector<Geometry> ranks(const BufferGroup& group, const Cut& outer, std::uint32_t count_outer,
                            const Cut& inner = replicated, std::uint32_t count_inner = 1) {
  std::vector<Geometry> made;
  for (std::uint32_t o = 0; o < count_outer; ++o) {
    for (std::uint32_t i = 0; i < count_inner; ++i) {
      made.push_back({.model_id = "model",
                      .groups = {inner(outer(group, o, count_outer), i, count_inner)},
                      .rank = o * count_inner + i,
                      .ranks = count_outer * count_inner});
    }
  }
  return made;
}
BufferGroup head_major(BufferGroup group) {
  group.order = PageOrder::head_major;
  return group;
}
BufferGroup with_gaps(BufferGroup group) {
  group.token_stride = std::uint64_t{group.heads} * (group.head_bytes + 8) + 16;
  group.head_stride = group.head_bytes + 8;
  group.page_stride = group.token_stride * group.page_size + 64;
  return group;
}
// A second group beside the first, cut in its own way.
std::vector<Geometry> beside(std::vector<Geometry> geometries, const BufferGroup& group,
                             const Cut& cut) {
  const auto count = static_cast<std::uint32_t>(geometries.size());
  for (std::uint32_t rank = 0; rank < count; ++rank)
    geometries[rank].groups.push_back(cut(group, rank, count));
  return geometries;
}

// A request of a case, as each process computes it from the same seeds.
struct Request {
  Request(const std::vector<Geometry>& side, const Case& which, std::uint64_t seed) {
    for (const BufferGroup& group : side.front().groups) {
      if (group.table < tables.size()) continue;
      const std::uint64_t length = group.table == 0 ? which.tokens : which.others[group.table - 1];
      spans.push_back(group.page_span());
      tables.push_back(TablePages::draw(group, (length + spans.back() - 1) / spans.back(),
                                        seed * 31 + group.table));
      tokens.push_back(tables.back().pages.size() * spans.back());
    }
  }
  std::vector<TablePages> tables;
  std::vector<std::uint64_t> spans;   // tokens that a position stands for
  std::vector<std::uint64_t> tokens;  // in whole pages
};

constexpr std::uint64_t kRequest = 77;
constexpr RoomId kRoom{5};

/// A prefill rank with its part of the request.
class Source {
 public:
  Source(const Case& which, std::uint32_t rank, TransportOptions::Kind transport,
         std::uint32_t pullers)
      : request_{which.prefill, which, 1}, pool_{which.prefill[rank]}, pullers_{pullers} {
    pool_.fill(kRequest, request_.tables, request_.tokens);
    PrefillOptions options;
    options.shard_rank = rank;
    options.shard_size = static_cast<std::uint32_t>(which.prefill.size());
    options.pool = pool_.pool();
    options.slot_payload_bytes = 4096;  // several pieces
    options.slots = 4;
    options.mapped_piece_bytes = 4096;
    auto made = PrefillRank::create(std::move(options), make_transport({.kind = transport}).value(),
                                    make_copy_engine({}).value());
    EXPECT_TRUE(made.ok()) << (made ? "" : made.error().message);
    rank_ = std::move(made).value();
    window_ = which.window;
  }
  GroupMember member() { return rank_->member(); }
  /// Ragged chunks, of each table in turn.
  Status publish() {
    if (pullers_ == 0) return {};
    if (Status opened = rank_->open(kRoom, pullers_); !opened) return opened;
    for (std::uint32_t t = 0; t < request_.tables.size(); ++t) {
      const std::span<const LogicalPage> pages{request_.tables[t].pages};
      const std::size_t begin =
          t == 1 && window_ > 0 && window_ < pages.size() ? pages.size() - window_ : 0;
      const std::size_t cut = begin + (pages.size() - begin) / 3;
      for (const auto& [first, end] : {std::pair{begin, cut}, std::pair{cut, pages.size()}}) {
        const Chunk chunk{
            .pages = pages.subspan(first, end - first),
            .first_position = static_cast<std::uint32_t>(first),
            .table = t,
            .last = t + 1 == request_.tables.size() && end == pages.size() && first == cut};
        if (Status published = rank_->publish(kRoom, chunk); !published) return published;
      }
    }
    return {};
  }
  /// Ok once every puller has committed.
  Status end() {
    if (pullers_ == 0) return {};
    const auto event = wait_for_event(*rank_, 20);
    if (!event) return event.error();
    return event->status;
  }

 private:
  Request request_;
  ModelPool pool_;
  std::uint32_t pullers_;
  std::uint64_t window_{0};
  std::unique_ptr<PrefillRank> rank_;
};

/// A Source in a child process, which publishes when told and says how it ended.
class ChildSource {
 public:
  ChildSource(const Case& which, std::uint32_t rank, std::uint32_t pullers) {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) std::abort();
    socket_ = UniqueFd{ends[0]};
    const UniqueFd child{ends[1]};
    pid_ = ::fork();
    if (pid_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    {
      Source source{which, rank, TransportOptions::Kind::ucx, pullers};
      const GroupMember member = source.member();
      (void)::send(child.get(), &member.port, sizeof member.port, MSG_NOSIGNAL);
      char told = 0;
      const bool go = ::recv(child.get(), &told, 1, 0) == 1;
      const char good = go && source.publish() && source.end() ? 1 : 0;
      (void)::send(child.get(), &good, 1, MSG_NOSIGNAL);
      (void)::recv(child.get(), &told, 1, 0);
    }
    ::_exit(0);
  }
  ~ChildSource() {
    (void)::send(socket_.get(), "q", 1, MSG_NOSIGNAL);
    ::waitpid(pid_, nullptr, 0);
  }
  std::uint16_t port() {
    std::uint16_t port = 0;
    (void)::recv(socket_.get(), &port, sizeof port, 0);
    return port;
  }
  void publish() { (void)::send(socket_.get(), "p", 1, MSG_NOSIGNAL); }
  bool ended_well() {
    char good = 0;
    return ::recv(socket_.get(), &good, 1, 0) == 1 && good == 1;
  }

 private:
  pid_t pid_{-1};
  UniqueFd socket_;
};

/// What a decode rank's request for one table is.
PullPages destinations(const Geometry& geometry, const Request& request, std::uint32_t table,
                       std::uint64_t held, std::vector<LocalPage>& own) {
  const auto group = std::ranges::find(geometry.groups, table, &BufferGroup::table);
  const bool by_page = group->stripe() == group->page_size;
  const std::vector<LogicalPage>& pages = request.tables[table].pages;
  const auto first = static_cast<std::uint32_t>(
      std::min<std::uint64_t>(held / request.spans[table], pages.size()));
  for (std::size_t p = first; p < pages.size(); ++p) {
    if (!by_page) {
      own.push_back(LocalPage{index(pages[p])});
    } else if (index(pages[p]) % group->parts == group->part) {
      own.push_back(LocalPage{index(pages[p]) / group->parts});
    }
  }
  return {.table = table,
          .pages = own,
          .first_position = first,
          .skip_tokens =
              static_cast<std::uint32_t>(first == pages.size() ? 0 : held % request.spans[table]),
          .end_position = static_cast<std::uint32_t>(pages.size()),
          .base = request.tables[table].base};
}

enum class How { loopback, mapped, processes };

void run(const Case& which, How how) {
  const bool processes = how == How::processes;
  const auto pullers = count_pullers(which.prefill, which.decode);
  ASSERT_TRUE(pullers.ok()) << pullers.error().message;
  GroupSpec spec{.name = "kvshard", .epoch = 1, .members = {}};
  std::vector<std::unique_ptr<Source>> sources;
  std::vector<std::unique_ptr<ChildSource>> children;
  for (std::uint32_t rank = 0; rank < which.prefill.size(); ++rank) {
    if (processes) {
      children.push_back(std::make_unique<ChildSource>(which, rank, (*pullers)[rank]));
      spec.members.push_back(
          {.shard_rank = rank, .host = "127.0.0.1", .port = children.back()->port()});
    } else {
      sources.push_back(std::make_unique<Source>(which, rank, TransportOptions::Kind::loopback,
                                                 (*pullers)[rank]));
      spec.members.push_back(sources.back()->member());
    }
  }

  const Request request{which.decode, which, 2};
  const Request published{which.prefill, which, 1};
  std::vector<std::uint64_t> first, end;
  for (std::uint32_t t = 0; t < request.tables.size(); ++t) {
    end.push_back(std::min(request.tokens[t], published.tokens[t]));
    first.push_back(t == 0 ? which.held
                    : t == 1 && which.window > 0
                        ? (request.tables[1].pages.size() - which.window) * request.spans[1]
                        : 0);
  }
  std::vector<std::unique_ptr<ModelPool>> pools;
  std::vector<std::unique_ptr<DecodeRank>> ranks;
  std::uint64_t owed = 0, landed = 0;
  for (const Geometry& geometry : which.decode) {
    pools.push_back(std::make_unique<ModelPool>(geometry));
    DecodeOptions options;
    options.pool = pools.back()->pool();
    options.landing_payload_bytes = 4096;
    options.mapped = how == How::mapped ? Mapped::always : Mapped::never;
    const auto kind = processes ? TransportOptions::Kind::ucx : TransportOptions::Kind::loopback;
    auto made = DecodeRank::create(options, make_transport({.kind = kind}).value(),
                                   make_copy_engine({}).value());
    ASSERT_TRUE(made.ok()) << made.error().message;
    ranks.push_back(std::move(made).value());
    const auto group = ranks.back()->connect(spec, std::chrono::seconds{20});
    ASSERT_TRUE(group.ok()) << group.error().message;
    std::vector<std::vector<LocalPage>> own(request.tables.size());
    std::vector<PullPages> tables;
    for (std::uint32_t t = 0; t < request.tables.size(); ++t)
      tables.push_back(destinations(geometry, request, t, first[t], own[t]));
    const auto pull = ranks.back()->pull({.group = *group,
                                          .room = kRoom,
                                          .pages = tables[0].pages,
                                          .first_position = tables[0].first_position,
                                          .skip_tokens = tables[0].skip_tokens,
                                          .end_position = tables[0].end_position,
                                          .base = tables[0].base,
                                          .more_tables = std::span{tables}.subspan(1)});
    ASSERT_TRUE(pull.ok()) << pull.error().message;
  }
  for (auto& source : sources) {
    const Status status = source->publish();
    ASSERT_TRUE(status.ok()) << status.error().message;
  }
  for (auto& child : children) child->publish();
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    SCOPED_TRACE("decode rank " + std::to_string(rank));
    const auto event = Cluster::next_event(*ranks[rank]);
    ASSERT_TRUE(event.ok()) << event.error().message;
    ASSERT_TRUE(event->status.ok()) << event->status.error().message;
    EXPECT_TRUE(pools[rank]->holds(kRequest, request.tables, first, end));
    landed += event->bytes;
    for (const BufferGroup& group : which.decode[rank].groups) {
      std::uint64_t tokens = 0;  // the rank's own of those that were missing
      const std::uint32_t phase = group.phase(request.tables[group.table].base);
      for (std::uint64_t t = first[group.table]; t < end[group.table]; ++t)
        tokens += t / group.stripe() % group.parts == phase ? 1 : 0;
      owed += tokens * group.buffers() * group.heads * group.head_bytes;
    }
  }
  EXPECT_EQ(landed, owed);
  for (auto& source : sources) {
    const Status status = source->end();
    EXPECT_TRUE(status.ok()) << status.error().message;
  }
  for (auto& child : children) EXPECT_TRUE(child->ended_well());
}

std::vector<Case> cases() {
  std::vector<Case> made;
  const auto add = [&](std::string name, std::vector<Geometry> prefill,
                       std::vector<Geometry> decode, std::uint64_t tokens = 16 * 9,
                       std::uint64_t held = 0) {
    made.push_back({std::move(name), std::move(prefill), std::move(decode), tokens, held});
  };
  // acceptance 11: also 4 heads on 8 ranks
  for (const std::uint32_t heads : {8U, 4U})
    for (const auto& [p, d] : {std::pair{1U, 4U}, {4U, 1U}, {2U, 8U}, {8U, 2U}, {4U, 4U}, {8U, 8U}})
      add("Heads" + std::to_string(heads) + "Tp" + std::to_string(p) + "To" + std::to_string(d),
          ranks(gqa(16, heads), by_head, p), ranks(gqa(16, heads), by_head, d));
  // acceptance 12
  for (const std::uint32_t d : {1U, 2U, 4U})
    add("LatentFourShardsToTp" + std::to_string(d), ranks(mla(), by_pages, 4),
        ranks(mla(), replicated, d));
  // acceptance 13
  for (const std::uint32_t m : {1U, 2U, 4U, 8U, 3U})
    add("EightShardsTo" + std::to_string(m), ranks(mla(), by_pages, 8), ranks(mla(), by_pages, m),
        16 * 27);
  add("ThreeShardsToTwo", ranks(mla(), by_pages, 3), ranks(mla(), by_pages, 2), 16 * 20, 16 * 4);
  // acceptance 14
  add("Page16To64", ranks(mla(16), by_pages, 2), ranks(mla(64), replicated, 1), 200, 64);
  add("Page64To16", ranks(mla(64), by_pages, 2), ranks(mla(16), by_pages, 2), 200, 16 * 3);
  // acceptance 15
  add("TokenMajorToHeadMajor", ranks(gqa(), by_head, 2), ranks(head_major(gqa()), by_head, 4));
  add("HeadMajorToTokenMajor", ranks(head_major(gqa()), replicated, 1), ranks(gqa(), by_head, 2));
  // acceptance 16
  for (const std::uint32_t n : {2U, 8U})
    for (const std::uint32_t interleave : {1U, 8U, 64U}) {
      const std::string name = std::to_string(n) + "By" + std::to_string(interleave);
      add("Interleave" + name + "ToOne", ranks(mla(64), by_tokens(interleave), n),
          ranks(mla(64), replicated, 1), 64 * 20);
      add("OneToInterleave" + name, ranks(gqa(64), replicated, 1),
          ranks(gqa(64), by_tokens(interleave), n), 64 * 16, 64 * n);
    }
  add("ShardsToInterleave", ranks(mla(64), by_pages, 4), ranks(mla(64), by_tokens(1), 2), 64 * 9);
  // acceptance 17
  add("TwoStagesToOne", ranks(gqa(), by_layer, 2, by_head, 2), ranks(gqa(), by_head, 2));
  add("OneToThreeUnevenStages", ranks(gqa(), by_pages, 2), ranks(gqa(), by_layer, 3));
  // acceptance 18
  BufferGroup indexer = mla();
  indexer.name = "indexer";
  indexer.head_bytes = 10;
  indexer.table = 1;
  Case mixed{"ShardedAndReplicated", beside(ranks(mla(), by_pages, 4), indexer, replicated),
             beside(ranks(mla(), replicated, 2), indexer, replicated), 16 * 10};
  mixed.others = {16 * 10};
  made.push_back(mixed);
  BufferGroup state{.name = "state",
                    .layers = 2,
                    .buffers_per_layer = 1,
                    .element_type = ElementType::f32,
                    .heads = 4,
                    .head_bytes = 40,
                    .page_size = 1,
                    .page_count = 8,
                    .table = 1};
  Case slot{"OneStateSlotPerRequest", beside(ranks(gqa(), by_head, 2), state, by_head),
            beside(ranks(gqa(), by_head, 4), state, by_head), 16 * 5};
  slot.others = {1};
  made.push_back(slot);
  BufferGroup window = gqa();
  window.name = "window";
  window.table = 1;
  Case last{"WindowOfTheLastPages", beside(ranks(gqa(), by_pages, 2), window, by_pages),
            beside(ranks(gqa(), replicated, 1), window, replicated), 16 * 12};
  last.others = {16 * 12};
  last.window = 3;
  made.push_back(last);
  // acceptance 20
  add("StridesWithGaps", ranks(with_gaps(gqa()), by_pages, 2), ranks(gqa(), replicated, 1));
  add("IntoStridesWithGaps", ranks(gqa(), by_pages, 2), ranks(with_gaps(gqa()), replicated, 1));
  // acceptance 4: a prefix that ends anywhere
  for (const std::uint64_t held : {1U, 15U, 16U, 37U, 100U})
    add("PrefixOf" + std::to_string(held), ranks(gqa(), by_pages, 4), ranks(gqa(), by_head, 2),
        16 * 9, held);
  for (const std::uint64_t held : {3U, 64U, 130U})
    add("InterleavedPrefixOf" + std::to_string(held), ranks(mla(64), by_tokens(8), 2),
        ranks(mla(64), replicated, 1), 64 * 6, held);
  // context parallel prefill of a grouped-query model to tensor parallel decode
  add("HeadSlicesOverPageShards", ranks(gqa(), by_pages, 4), ranks(gqa(), by_head, 2), 16 * 11);
  return made;
}

class ReshardTest : public ::testing::TestWithParam<Case> {};

TEST_P(ReshardTest, EachByteArrivesOnce) {
  run(GetParam(), How::loopback);
}
TEST_P(ReshardTest, EachByteArrivesOnceFromPagesThatAreMapped) {
  run(GetParam(), How::mapped);
}
INSTANTIATE_TEST_SUITE_P(, ReshardTest, ::testing::ValuesIn(cases()),
                         [](const auto& each) { return each.param.name; });

// A dozen of them between processes.
class ReshardUcxTest : public ::testing::TestWithParam<Case> {};

TEST_P(ReshardUcxTest, EachByteArrivesOnce) {
  run(GetParam(), How::processes);
}
std::vector<Case> chosen() {
  const std::set<std::string> names{"Heads8Tp1To4",
                                    "Heads4Tp8To2",
                                    "LatentFourShardsToTp2",
                                    "EightShardsTo3",
                                    "Page16To64",
                                    "Page64To16",
                                    "TokenMajorToHeadMajor",
                                    "Interleave8By1ToOne",
                                    "OneToThreeUnevenStages",
                                    "ShardedAndReplicated",
                                    "OneStateSlotPerRequest",
                                    "HeadSlicesOverPageShards",
                                    "InterleavedPrefixOf130"};
  auto all = cases();
  std::erase_if(all, [&](const Case& each) { return !names.contains(each.name); });
  return all;
}
INSTANTIATE_TEST_SUITE_P(, ReshardUcxTest, ::testing::ValuesIn(chosen()),
                         [](const auto& each) { return each.param.name; });

// acceptance 14, 19: refused at connect, naming the field and both values, before any byte moves.
TEST(ReshardRefusalTest, WhatCannotBeDoneIsRefusedAtConnect) {
  struct Refusal {
    std::vector<Geometry> prefill, decode;
    std::vector<std::string> words;
  };
  BufferGroup other_type = gqa();
  other_type.element_type = ElementType::f16;
  BufferGroup longer = gqa();
  longer.layers = 5;
  std::vector<Geometry> half = ranks(gqa(), by_head, 2);
  half.resize(1);
  const Refusal refusals[] = {
      {ranks(gqa(64), by_pages, 2), ranks(gqa(48), replicated, 1), {"page_size", "64", "48"}},
      {ranks(gqa(), by_pages, 2),
       ranks(other_type, replicated, 1),
       {"element_type", "bf16", "f16"}},
      {ranks(gqa(), by_pages, 2), ranks(longer, replicated, 1), {"layers", "4", "5"}},
      {half, ranks(gqa(), replicated, 1), {"heads", "4", "8"}},
  };
  for (const Refusal& refusal : refusals) {
    std::vector<std::unique_ptr<ModelPool>> pools;
    std::vector<std::unique_ptr<PrefillRank>> prefills;
    GroupSpec spec{.name = "kvshard", .epoch = 1, .members = {}};
    for (std::uint32_t rank = 0; rank < refusal.prefill.size(); ++rank) {
      pools.push_back(std::make_unique<ModelPool>(refusal.prefill[rank]));
      PrefillOptions options;
      options.shard_rank = rank;
      options.shard_size = static_cast<std::uint32_t>(refusal.prefill.size());
      options.pool = pools.back()->pool();
      prefills.push_back(
          PrefillRank::create(std::move(options),
                              make_transport({.kind = TransportOptions::Kind::loopback}).value(),
                              make_copy_engine({}).value())
              .value());
      spec.members.push_back(prefills.back()->member());
    }
    ModelPool pool{refusal.decode[0]};
    DecodeOptions options;
    options.pool = pool.pool();
    const auto decode = DecodeRank::create(
        options, make_transport({.kind = TransportOptions::Kind::loopback}).value(),
        make_copy_engine({}).value());
    const auto group = (*decode)->connect(spec, std::chrono::seconds{20});
    ASSERT_FALSE(group.ok());
    EXPECT_EQ(group.error().code, ErrorCode::failed_precondition) << group.error().message;
    for (const std::string& word : refusal.words)
      EXPECT_NE(group.error().message.find(word), std::string::npos)
          << word << " in: " << group.error().message;
  }
}

}  // namespace
}  // namespace kvshard::test
