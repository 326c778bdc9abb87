#include <map>
#include <memory>
#include <optional>

#include "fuzz/session_peer.hpp"
#include "kvshard/clock.hpp"
#include "kvshard/prefill_rank.hpp"
#include "session/progress_thread.hpp"

// libFuzzer's entry for a whole prefill rank. The input plays up to three decode ranks and the engine: messages
// that are nearly right, twice, in any order, or plain bytes. Afterwards nothing is held any more, the pool is
// as it was, and a decode rank that behaves gets its pages.
namespace kvshard::fuzz {
namespace {

using namespace std::chrono_literals;
using wire::MessageType;

constexpr std::uint32_t kPages = 9;

struct Decode {
  explicit Decode(const GroupMember& member) : peer{member} {}

  Peer peer;
  std::vector<wire::Ready> readies;
  std::map<std::uint64_t, wire::PieceDigest> digests;  // by pull
  std::map<std::uint64_t, std::uint64_t> pieces;
  std::optional<bool> verdict;

  void listen() {
    peer.receive([&](MessageType type, std::span<const std::byte> payload) {
      if (type == MessageType::ready) {
        auto ready = wire::decode<wire::Ready>(payload);
        require(ready.ok());
        if (!ready->last) {
          digests[ready->pull].add(ready->piece, ready->slot, ready->generation,
                                   ready->payload_bytes);
          ++pieces[ready->pull];
        }
        readies.push_back(std::move(*ready));
      } else if (type == MessageType::verdict) {
        const auto said = wire::decode<wire::Verdict>(payload);
        require(said.ok());
        verdict = said->valid;
      }
    });
  }
  void commit(std::uint64_t pull) {
    peer.send(wire::Commit{pull, pieces[pull], digests[pull].value()});
  }
};

class World {
 public:
  World() {
    pool_.resize(kPages * kPageBytes);
    for (std::size_t i = 0; i < pool_.size(); ++i)
      pool_[i] = static_cast<std::byte>(i * 7 + i / 256);
    before_ = pool_;
    PrefillOptions options;
    options.pool = {geometry(kPages), {{pool_.data()}}};
    options.exported = false;
    options.slots = 2;
    options.slot_payload_bytes = kPageBytes;
    options.heartbeat = 100ms;
    options.peer_timeout = 1s;
    options.limits.handshake_timeout = 500ms;
    options.limits.max_pulls_per_peer = 6;
    options.limits.max_waiting_pulls = 8;
    options.limits.max_queued_bytes = 8U << 10;
    auto made = PrefillRank::create(
        options, make_transport({.kind = TransportOptions::Kind::loopback}).value(),
        make_copy_engine({}).value(), &clock_);
    require(made.ok());
    rank_ = std::move(*made);
  }

  void play(Input& in) {
    for (int op = 0; op < 64 && !in.empty(); ++op) {
      step(in);
      turns_.turn();
      for (Decode& decode : decodes_) decode.listen();
    }
  }

  void finish() {
    decodes_.clear();
    for (std::uint64_t room = 0; room < 4; ++room) (void)rank_->abort(RoomId{room}, "over");
    wait([&] {
      const PrefillStats stats = rank_->stats();
      return stats.peers + stats.leases + stats.slots_in_use + stats.pulls_waiting + stats.rooms ==
             0;
    });
    const PrefillStats stats = rank_->stats();
    require(stats.rooms_opened == stats.rooms_done + stats.rooms_failed);
    require(stats.pulls_started == stats.pulls_committed + stats.pulls_failed);
    serve_well();
    rank_->close();
    require(pool_ == before_);
  }

 private:
  template <class Done>
  void wait(Done done) {
    until(
        [&] {
          for (Decode& decode : decodes_) decode.listen();
          turns_.turn();
        },
        done);
  }

  void greet(Decode& decode, Input* in) {
    wire::Hello hello{.group = "kvshard",
                      .epoch = 1,
                      .shard_rank = 0,
                      .shard_size = 1,
                      .transport = "loopback",
                      .geometry = geometry(kPages),
                      .landing_payload_bytes = kPageBytes,
                      .heartbeat_ms = 100};
    wire::Assign assign{.lanes = {{.layers = 1, .heads = 2}}};
    if (in != nullptr) {
      auto& group = hello.geometry.groups[0];
      hello.version_max = in->near(hello.version_max);
      hello.epoch = in->near(hello.epoch);
      group.heads = in->near(group.heads);
      group.page_size = in->near(group.page_size);
      group.page_count = in->near(group.page_count);
      hello.landing_payload_bytes = in->near(hello.landing_payload_bytes);
      assign.lanes[0].layers = in->near(assign.lanes[0].layers);
      assign.lanes[0].heads = in->near(assign.lanes[0].heads);
      assign.mapped = in->number() % 16 == 1;
    }
    decode.peer.send(hello);
    decode.peer.send(assign);
  }

  static std::uint64_t tokens(Input& in) { return in.near(std::uint64_t{in.number()} % 4 * 4); }

  void step(Input& in) {
    const std::uint8_t op = in.number();
    const std::uint64_t small = in.number();
    const RoomId room{small / 8 % 4};
    switch (op % 20) {  // the engine, and time
      case 0:
        if (rank_->open(room, 1 + in.number() % 2).ok()) length_[room] = 0;
        return;
      case 1: {
        const LogicalPage pages[] = {LogicalPage{1 + in.number() % 4U}, LogicalPage{5},
                                     LogicalPage{6}};
        const std::uint32_t count = in.number() % 4;
        const bool last = in.number() % 2 == 0;
        if (rank_
                ->publish(room, {.pages = std::span{pages}.first(count),
                                 .first_position = length_[room],
                                 .last = last})
                .ok())
          length_[room] += count;
        return;
      }
      case 2:
        (void)rank_->abort(room, "the input says so");
        return;
      case 3:
        clock_.advance(std::chrono::milliseconds{in.number() * 8});
        return;
      case 4:
        if (decodes_.size() == 3) decodes_.erase(decodes_.begin());
        decodes_.emplace_back(rank_->member());
        if (small % 4 != 0) greet(decodes_.back(), small % 4 == 1 ? &in : nullptr);
        return;
      default:
        break;
    }
    if (decodes_.empty()) return;
    Decode& decode = decodes_[small % decodes_.size()];
    const std::uint64_t pull = in.number() % 4;
    const wire::Ready last = decode.readies.empty()
                                 ? wire::Ready{}
                                 : decode.readies[in.number() % decode.readies.size()];
    switch (op % 20) {
      case 5:
      case 6:
      case 7:
        return decode.peer.send(wire::Pull{.pull = pull,
                                           .room = room,
                                           .window = in.near(std::uint32_t{2}),
                                           .wait_ms = in.near(std::uint32_t{500}),
                                           .tables = {{.table = in.near(std::uint32_t{0}),
                                                       .phase = in.near(std::uint32_t{0}),
                                                       .first_token = tokens(in),
                                                       .end_token = tokens(in)}}});
      case 8:
      case 9:
        return decode.peer.send(wire::Release{last.pull, last.piece, last.slot, last.generation});
      case 10:
        return decode.peer.send(wire::Release{in.near(last.pull), in.near(last.piece),
                                              in.near(last.slot), in.near(last.generation)});
      case 11:
      case 12:
        return decode.commit(last.pull);
      case 13:
        return decode.peer.send(wire::Commit{in.near(last.pull), in.near(std::uint64_t{1}),
                                             in.number<std::uint64_t>()});
      case 14:
        return decode.peer.send(wire::Abort{pull, {ErrorCode::cancelled, "fuzz"}});
      case 15:
        return decode.peer.send(wire::Ping{pull});
      case 16:
        return decode.peer.send(wire::Bye{{ErrorCode::unavailable, "fuzz"}});
      case 17:
        return decode.peer.send_frame(static_cast<std::uint8_t>(pull * 4 + small % 4),
                                      in.bytes(in.number()));
      case 18:
        return decode.peer.send_again();
      default:
        return decode.peer.send_bytes(in.bytes(in.number()));
    }
  }

  // A request of two pages, as it should be.
  void serve_well() {
    const RoomId room{1'000};
    const LogicalPage pages[] = {LogicalPage{3}, LogicalPage{7}};
    require(rank_->open(room).ok());
    require(rank_->publish(room, {.pages = pages, .last = true}).ok());
    Decode& decode = decodes_.emplace_back(rank_->member());
    greet(decode, nullptr);
    decode.peer.send(
        wire::Pull{.pull = 1, .room = room, .window = 2, .tables = {{.end_token = 8}}});
    std::size_t released = 0;
    for (bool done = false; !done;) {
      wait([&] { return released < decode.readies.size(); });
      for (; released < decode.readies.size(); ++released) {
        const wire::Ready& ready = decode.readies[released];
        done = ready.last;
        if (!done)
          decode.peer.send(wire::Release{ready.pull, ready.piece, ready.slot, ready.generation});
      }
    }
    decode.commit(1);
    wait([&] { return decode.verdict.has_value(); });
    require(*decode.verdict);
    decodes_.clear();
    wait([&] { return rank_->stats().peers == 0; });
  }

  ManualClock clock_;
  ManualTurns turns_{[] {}};
  std::vector<std::byte> pool_, before_;
  std::unique_ptr<PrefillRank> rank_;
  std::vector<Decode> decodes_;
  std::map<RoomId, std::uint32_t> length_;
};

}  // namespace
}  // namespace kvshard::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  kvshard::fuzz::silence_log();
  kvshard::fuzz::Input in{data, size};
  kvshard::fuzz::World world;
  world.play(in);
  world.finish();
  return 0;
}
