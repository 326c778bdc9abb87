#include <poll.h>

#include <array>
#include <memory>
#include <optional>

#include "copy/slot_format.hpp"
#include "fuzz/session_peer.hpp"
#include "kvshard/clock.hpp"
#include "kvshard/decode_rank.hpp"
#include "session/progress_thread.hpp"

// libFuzzer's entry for a whole decode rank. The input plays the prefill rank, its staging memory, and the
// engine. Afterwards each pull has ended once, pages that no pull named are as they were, nothing is held any
// more, and a prefill rank that behaves can be pulled from.
namespace kvshard::fuzz {
namespace {

using namespace std::chrono_literals;
using wire::MessageType;

constexpr std::uint32_t kPages =
    11;  // 1 to 8 for the input's pulls, two each; 9 and 10 for the last one
constexpr std::uint32_t kSlots = 2;
constexpr std::uint32_t kPullPages = 2;
constexpr std::byte kCanary{0xc5};

std::byte content(std::uint64_t unit, std::size_t i) {
  return static_cast<std::byte>(unit * 31 + i * 7 + 3);
}

class World {
 public:
  explicit World(Input& in) : in_{in} {
    transport_ = make_transport({.kind = TransportOptions::Kind::loopback}).value();
    staging_memory_ = make_staging_memory(MemoryKind::host, -1, kSlots * stride()).value();
    staging_ = transport_->register_memory(staging_memory_->bytes(), MemoryKind::host).value();
    require(transport_->serve(*staging_).ok());

    listener_ = UniqueFd{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)};
    sockaddr_in own{};
    own.sin_family = AF_INET;
    own.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof own;
    require(::bind(listener_.get(), reinterpret_cast<sockaddr*>(&own), size) == 0 &&
            ::listen(listener_.get(), 8) == 0 &&
            ::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&own), &size) == 0);
    spec_ = {.name = "kvshard",
             .epoch = 1,
             .members = {{.shard_rank = 0, .host = "127.0.0.1", .port = ntohs(own.sin_port)}}};

    pool_.assign(kPages * kPageBytes, kCanary);
    DecodeOptions options;
    options.pool = {geometry(kPages), {{pool_.data()}}};
    options.landing_payload_bytes = kPageBytes;
    options.landing_slots = 2;
    options.heartbeat = 100ms;
    options.peer_timeout = options.fetch_timeout = 1s;
    options.reconnect_min = options.reconnect_max = 10ms;
    auto made = DecodeRank::create(
        options, make_transport({.kind = TransportOptions::Kind::loopback}).value(),
        make_copy_engine({}).value(), &clock_);
    require(made.ok());
    rank_ = std::move(*made);
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  void play() {
    auto group = rank_->connect(spec_, 1s);
    behaves_ = true;  // WELCOME, from here on
    if (!group) group = rank_->connect(spec_, 1s);
    require(group.ok());
    for (int op = 0; op < 64 && !in_.empty(); ++op) {
      step(*group);
      serve();
      turns_.turn();
      hear();
    }
    peer_.reset();
    rank_->disconnect(*group);
    wait([&] { return ended_ == started_ && idle(); });
    for (std::size_t i = 0; i < kPageBytes; ++i) {
      require(pool_[i] == kCanary);  // padding
      for (std::size_t page = 1 + kPullPages * started_; page < kPages; ++page)
        require(pool_[page * kPageBytes + i] == kCanary);
    }
    pull_well();
    rank_->close();
  }

 private:
  static constexpr std::uint64_t stride() { return (slot_bytes_for(kPageBytes) + 63) / 64 * 64; }

  template <class Done>
  void wait(Done done) {
    until(
        [&] {
          serve();
          turns_.turn();
          hear();
        },
        done);
  }
  void hear() {
    std::array<PullEvent, 4> events;
    for (std::size_t got; (got = rank_->poll(events)) > 0;) {
      ended_ += got;
      last_ok_ = events[got - 1].status.ok();
    }
  }
  bool idle() {
    const DecodeStats stats = rank_->stats();
    return stats.pulls + stats.landing_in_use + stats.quarantined == 0 &&
           stats.pulls_started == stats.pulls_done + stats.pulls_failed + stats.pulls_cancelled;
  }

  // The prefill rank's part of a turn: what even a hostile one does.
  void serve() {
    (void)transport_->progress();
    // Asked first: an accept makes a file even when it finds nobody, which took a twelfth of each run.
    for (pollfd arrived{listener_.get(), POLLIN, 0}; ::poll(&arrived, 1, 0) > 0;) {
      UniqueFd fd{::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)};
      if (!fd) break;
      const linger now{.l_onoff = 1, .l_linger = 0};
      (void)::setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &now, sizeof now);
      peer_.emplace(std::move(fd));
    }
    if (!peer_) return;
    peer_->receive([&](MessageType type, std::span<const std::byte> payload) {
      if (type == MessageType::hello) welcome();
      if (type == MessageType::pull) pulls_.push_back({wire::decode<wire::Pull>(payload)->pull});
      if (type == MessageType::release && serves_) ++released_;
      if (type == MessageType::commit && serves_)
        peer_->send(wire::Verdict{wire::decode<wire::Commit>(payload)->pull, true, {}});
    });
  }
  void welcome() {
    const auto address = transport_->address();
    const auto packed = staging_->packed();
    wire::Welcome welcome{.incarnation = 1,
                          .epoch = 1,
                          .shard_rank = 0,
                          .shard_size = 1,
                          .geometry = geometry(kPages),
                          .transport_address = {address.begin(), address.end()},
                          .staging = {packed.begin(), packed.end()},
                          .pool = {},
                          .slot_count = kSlots,
                          .slot_stride = stride(),
                          .heartbeat_ms = 100};
    if (!behaves_ && in_.number() % 4 == 1) {
      auto& group = welcome.geometry.groups[0];
      welcome.epoch = in_.near(welcome.epoch);
      group.page_count = in_.near(group.page_count);
      group.heads = in_.near(group.heads);
      welcome.slot_count = in_.near(welcome.slot_count);
      welcome.slot_stride = in_.near(welcome.slot_stride);
      welcome.heartbeat_ms = in_.near(welcome.heartbeat_ms);
      auto& spoiled = in_.number() % 2 == 0 ? welcome.staging : welcome.transport_address;
      if (in_.number() % 2 == 0) spoiled[in_.number() % spoiled.size()] ^= std::byte{in_.number()};
      if (in_.number() % 8 == 1) welcome.pool = in_.bytes(in_.number());
    }
    peer_->send(welcome);
  }

  struct Served {
    std::uint64_t pull{0};
    std::uint64_t pieces{0};
  };
  // The next piece of a pull, in its slot.
  wire::Ready next_piece(Served& served) {
    const std::uint64_t unit = served.pieces++;
    const std::uint32_t slot = static_cast<std::uint32_t>(generation_ % kSlots);
    std::byte* const memory = staging_memory_->bytes().data() + slot * stride();
    const SlotStamp stamp{.lease = served.pull + 100,
                          .generation = ++generation_,
                          .chunk = unit,
                          .payload_bytes = kPageBytes};
    for (std::size_t i = 0; i < kPageBytes; ++i) memory[kSlotHeaderBytes + i] = content(unit, i);
    write_marks(memory, stamp, 0);
    return {.pull = served.pull,
            .lease = stamp.lease,
            .piece = unit,
            .slot = slot,
            .generation = stamp.generation,
            .payload_bytes = kPageBytes,
            .first_buffer = 0,
            .buffer_count = 1,
            .first_unit = unit,
            .unit_count = 1};
  }
  static wire::Ready last_ready(const Served& served) {
    return {.pull = served.pull,
            .lease = served.pull + 100,
            .piece = served.pieces,
            .last = true,
            .tables = {{.table = 0, .end_token = 4 * kPullPages}}};
  }

  Result<PullId> pull(GroupId group, RoomId room, std::uint32_t first_page) {
    const LocalPage pages[kPullPages] = {LocalPage{first_page}, LocalPage{first_page + 1}};
    return rank_->pull({.group = group, .room = room, .pages = pages, .deadline = 3s});
  }

  void step(GroupId group) {
    const std::uint8_t op = in_.number();
    const std::uint8_t small = in_.number();
    switch (op % 18) {  // the engine, time, and the staging memory
      case 0:
      case 1:
        if (started_ == 4) return;
        require(
            pull(group, RoomId{small}, 1 + kPullPages * static_cast<std::uint32_t>(started_)).ok());
        ++started_;
        return;
      case 2:
        return rank_->cancel(PullId{1U + small % 4U});
      case 3:
        return clock_.advance(std::chrono::milliseconds{small * 8});
      case 4:
        staging_memory_->bytes()[small * 7U % staging_memory_->bytes().size()] ^=
            std::byte{in_.number()};
        return;
      case 5:
        return peer_.reset();
      default:
        break;
    }
    if (!peer_) return;
    Served nothing{.pull = in_.number() % 8U};
    Served& served = pulls_.empty() ? nothing : pulls_[small % pulls_.size()];
    switch (op % 18) {
      case 6:
      case 7:
      case 8:
        return peer_->send(next_piece(served));
      case 9: {
        wire::Ready ready = next_piece(served);
        ready.lease = in_.near(ready.lease);
        ready.piece = in_.near(ready.piece);
        ready.slot = in_.near(ready.slot);
        ready.generation = in_.near(ready.generation);
        ready.payload_bytes = in_.near(ready.payload_bytes);
        ready.first_buffer = in_.near(ready.first_buffer);
        ready.buffer_count = in_.near(ready.buffer_count);
        ready.base = in_.near(ready.base);
        ready.first_unit = in_.near(ready.first_unit);
        ready.unit_count = in_.near(ready.unit_count);
        ready.partial = in_.number() % 8 == 1;
        ready.checksum = in_.number() % 8 == 1;
        if (in_.number() % 8 == 1) ready.pages = {LocalPage{in_.number()}};
        return peer_->send(ready);
      }
      case 10:
      case 11:
        return peer_->send(last_ready(served));
      case 12: {
        wire::Ready ready = last_ready(served);
        ready.piece = in_.near(ready.piece);
        ready.tables[0].base = in_.near(ready.tables[0].base);
        ready.tables[0].end_token = in_.near(ready.tables[0].end_token);
        if (in_.number() % 4 == 1) ready.tables.clear();
        ready.side_data = in_.bytes(in_.number() % 16);
        return peer_->send(ready);
      }
      case 13:
        return peer_->send(wire::Verdict{served.pull, in_.number() % 2 == 0, "fuzz"});
      case 14:
        return peer_->send(wire::Abort{served.pull, {ErrorCode::cancelled, "fuzz"}});
      case 15:
        return peer_->send_frame(in_.number() % 16, in_.bytes(in_.number()));
      case 16:
        return peer_->send_again();
      default:
        if (small % 4 == 0) return peer_->send(wire::Bye{{ErrorCode::unavailable, "fuzz"}});
        if (small % 4 == 1) return peer_->send(wire::Ping{small});
        return peer_->send_bytes(in_.bytes(in_.number()));
    }
  }

  void pull_well() {
    pulls_.clear();
    const auto group = rank_->connect(spec_, 1s);
    require(group.ok());
    const std::uint64_t ended = ended_;
    require(pull(*group, RoomId{1'000}, 9).ok());
    wait([&] { return pulls_.size() == 1; });
    serves_ = true;
    for (std::uint64_t i = 0; i < kPullPages; ++i) {
      wait([&] { return released_ == i; });
      peer_->send(next_piece(pulls_[0]));
    }
    peer_->send(last_ready(pulls_[0]));
    wait([&] { return ended_ == ended + 1; });
    require(last_ok_);
    for (std::uint32_t page = 0; page < kPullPages; ++page) {
      for (std::size_t i = 0; i < kPageBytes; ++i)
        require(pool_[(9 + page) * kPageBytes + i] == content(page, i));
    }
    rank_->disconnect(*group);
    wait([&] { return idle(); });
  }

  Input& in_;
  ManualClock clock_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<StagingMemory> staging_memory_;
  std::unique_ptr<RegisteredMemory> staging_;
  UniqueFd listener_;
  GroupSpec spec_;
  std::optional<Peer> peer_;
  std::vector<Served> pulls_;  // as PULL named them
  std::uint64_t generation_{0};
  bool behaves_{false}, serves_{false}, last_ok_{false};
  std::uint64_t started_{0}, ended_{0}, released_{0};
  ManualTurns turns_{[this] { serve(); }};
  std::vector<std::byte> pool_;
  std::unique_ptr<DecodeRank> rank_;
};

}  // namespace
}  // namespace kvshard::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  kvshard::fuzz::silence_log();
  kvshard::fuzz::Input in{data, size};
  kvshard::fuzz::World world{in};
  world.play();
  return 0;
}
