#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

// The lease, slot and COMMIT protocol of docs/wire_format.md, small enough to walk every interleaving:
// two pulls of two rooms from one prefill rank with one slot, to a decode rank with one landing slot;
// slots expire, either side aborts at any moment, and the prefill rank may restart once.
//
// A slot has three cells, since a read that races a gather can see an old header, new payload and an old
// trailer. Gathers write header, payload, trailer; the network reads them in any order.
namespace kvshard::model {

/// What keeps the protocol right. Each can be taken away.
struct Guards {
  bool commit_asks_owner{true};    ///< success needs VALID from an owner whose lease still lives
  bool poison_before_reuse{true};  ///< a slot is taken back only together with its lease
  bool release_after_read{true};   ///< RELEASE leaves when the fetch has ended, not when it begins
  bool pages_stay_pinned{true};    ///< no timer frees pages under a live lease
  bool gather_keeps_slot{true};  ///< a slot whose lease ended is free only when its gather is over
  bool quarantine{true};     ///< a failed pull's landing slot is free only when its fetch is over
  bool session_bound{true};  ///< a connection's messages and pulls end with the process behind it
  bool monotone{true};       ///< a pull that failed stays failed, whatever comes late
  bool stamps{true};         ///< header and trailer are compared before pages are written
};

struct Message {
  enum Type : std::uint8_t { pull, release, commit, abort, ready, valid, stale, aborted, reset };
  std::uint8_t type{0}, who{0}, lease{0}, generation{0};
};

struct Queue {
  std::array<Message, 12> items{};
  std::uint8_t size{0};

  void push(Message message) { items.at(size++) = message; }
  Message pop() {
    const Message first = items[0];
    for (std::uint8_t i = 1; i < size; ++i) items[i - 1] = items[i];
    items[--size] = {};
    return first;
  }
};

enum Lease : std::uint8_t { none, live, gathering, exposed, delivered, ended };
enum Pull : std::uint8_t {
  idle,
  asked,
  announced,
  fetching,
  landed,
  committing,
  succeeded,
  failed
};
inline constexpr std::uint8_t kGarbage = 3;  // a payload cell: 1 and 2 are the two rooms' bytes

/// All bytes, so that two states are equal when their bytes are.
struct State {
  // The prefill rank.
  std::uint8_t incarnation{0}, next_lease{1};
  std::uint8_t lease[2]{}, lease_id[2]{}, pages_freed[2]{}, room_aborted[2]{};
  std::uint8_t slot_taken{0}, slot_owner{0}, slot_generation{0};
  std::uint8_t gather_step[2]{}, gather_generation[2]{}, gather_lease[2]{};  // 1..3: the next cell
  std::uint8_t slot[3]{};
  // The decode rank.
  std::uint8_t pull[2]{}, pull_incarnation[2]{}, want[2]{}, want_lease[2]{};
  std::uint8_t fetch_running[2]{}, fetch_mask[2]{}, got[2]{}, events[2]{};
  std::uint8_t landing_owner{0}, landing[3]{};
  Queue to_prefill, to_decode;

  [[nodiscard]] std::string key() const {
    return {reinterpret_cast<const char*>(this), sizeof *this};
  }
};
static_assert(std::has_unique_object_representations_v<State>);

class Explorer {
 public:
  explicit Explorer(Guards guards) : guards_{guards} {}

  /// The first broken law found, with the actions that lead to it; nothing when all states are right.
  std::optional<std::string> run() {
    struct Visit {
      State state;
      std::size_t from;
      const char* action;
    };
    std::vector<Visit> visits{{State{}, 0, "start"}};
    std::unordered_set<std::string> seen{State{}.key()};
    for (std::size_t at = 0; at < visits.size(); ++at) {
      next_.clear();
      const State state = visits[at].state;
      std::string broken = law(state);
      if (broken.empty()) {
        expand(state);
        if (next_.empty() && !at_rest(state)) broken = "stuck";
      }
      if (!broken.empty()) {
        std::string path;
        for (std::size_t i = at; i != 0; i = visits[i].from)
          path = std::string{visits[i].action} + "; " + path;
        return broken + " after " + path;
      }
      for (const auto& [next, action] : next_) {
        if (seen.insert(next.key()).second) visits.push_back({next, at, action});
      }
    }
    states_ = visits.size();
    return std::nullopt;
  }
  [[nodiscard]] std::size_t states() const { return states_; }

 private:
  static std::string law(const State& s) {
    for (std::uint8_t p = 0; p < 2; ++p) {
      if (s.events[p] > 1) return "two terminal events for one pull";
      if (s.pull[p] == succeeded && s.got[p] != p + 1) return "success with wrong bytes";
    }
    return {};
  }
  // Nothing is held by anyone.
  static bool at_rest(const State& s) {
    for (std::uint8_t p = 0; p < 2; ++p) {
      if (s.pull[p] < succeeded || s.fetch_running[p] || s.gather_step[p]) return false;
      if (s.lease[p] != none && s.lease[p] != ended) return false;
    }
    return s.slot_taken == 0 && s.landing_owner == 0;
  }

  void add(const State& state, const char* action) { next_.emplace_back(state, action); }
  static std::uint8_t stamp(std::uint8_t lease, std::uint8_t generation) {
    return static_cast<std::uint8_t>(lease * 16 + generation);
  }

  void expand(const State& s) {
    for (std::uint8_t p = 0; p < 2; ++p) {
      ask(s, p);
      fetch(s, p);
      commit(s, p);
      cancel(s, p);
      gather(s, p);
      expire(s, p);
      abort_room(s, p);
    }
    restart(s);
    if (s.to_prefill.size > 0) prefill_receives(s);
    if (s.to_decode.size > 0) decode_receives(s);
  }

  // ---- decode
  void ask(State s, std::uint8_t p) {
    if (s.pull[p] != idle) return;
    s.pull[p] = asked;
    s.pull_incarnation[p] = s.incarnation;
    s.to_prefill.push({Message::pull, p});
    add(s, "decode asks");
  }
  void fetch(State s, std::uint8_t p) {
    if (s.pull[p] == announced && s.landing_owner == 0) {
      s.pull[p] = fetching;
      s.landing_owner = static_cast<std::uint8_t>(p + 1);
      s.fetch_running[p] = 1;
      s.fetch_mask[p] = 0;
      if (!guards_.release_after_read)
        s.to_prefill.push({Message::release, p, s.want_lease[p], s.want[p]});
      return add(s, "fetch begins");
    }
    if (s.fetch_running[p] == 0) return;
    if (s.fetch_mask[p] != 7) {
      for (int cell = 0; cell < 3; ++cell) {
        if (s.fetch_mask[p] >> cell & 1) continue;
        State next = s;
        // An endpoint ends with the process behind it; what it reads then is anything.
        next.landing[cell] = s.pull_incarnation[p] == s.incarnation ? s.slot[cell] : kGarbage;
        next.fetch_mask[p] = static_cast<std::uint8_t>(s.fetch_mask[p] | 1 << cell);
        add(next, "fetch reads a cell");
      }
      return;
    }
    s.fetch_running[p] = 0;
    if (s.pull[p] == fetching) {
      const std::uint8_t wanted = stamp(s.want_lease[p], s.want[p]);
      if (guards_.release_after_read)
        s.to_prefill.push({Message::release, p, s.want_lease[p], s.want[p]});
      const bool stamped = s.landing[0] == wanted && s.landing[2] == wanted;
      s.got[p] = s.landing[1];
      s.landing_owner = 0;
      if (guards_.stamps && !stamped) {
        fail(s, p, true);
        return add(s, "stamp differs");
      }
      s.pull[p] = landed;
      return add(s, "fetch ends");
    }
    if (guards_.quarantine) s.landing_owner = 0;
    add(s, "late fetch ends");
  }
  // Later than the fetch: other ranks of the group may be slower.
  void commit(State s, std::uint8_t p) {
    if (s.pull[p] != landed) return;
    if (!guards_.commit_asks_owner) {
      s.pull[p] = succeeded;
      ++s.events[p];
    } else {
      s.pull[p] = committing;
      s.to_prefill.push({Message::commit, p, s.want_lease[p]});
    }
    add(s, "decode commits");
  }
  void fail(State& s, std::uint8_t p, bool tell) {
    if (s.fetch_running[p] && !guards_.quarantine) s.landing_owner = 0;
    s.pull[p] = failed;
    ++s.events[p];
    if (tell) s.to_prefill.push({Message::abort, p});
  }
  void cancel(State s, std::uint8_t p) {
    if (s.pull[p] == idle || s.pull[p] >= succeeded) return;
    fail(s, p, true);
    add(s, "decode cancels");
  }
  void decode_receives(State s) {
    const Message m = s.to_decode.pop();
    const std::uint8_t p = m.who;
    switch (m.type) {
      case Message::ready:
        if (s.pull[p] == asked) {
          s.pull[p] = announced;
          s.want[p] = m.generation;
          s.want_lease[p] = m.lease;
        }
        break;
      case Message::valid:
        if (s.pull[p] == committing || (!guards_.monotone && s.pull[p] == failed)) {
          s.pull[p] = succeeded;
          ++s.events[p];
        }
        break;
      case Message::stale:
      case Message::aborted:
        if (s.pull[p] < succeeded) fail(s, p, false);
        break;
      case Message::reset:
        for (std::uint8_t q = 0; q < 2; ++q) {
          if (s.pull[q] != idle && s.pull[q] < succeeded &&
              s.pull_incarnation[q] != s.incarnation) {
            if (guards_.session_bound) fail(s, q, false);
          }
        }
        break;
      default:
        break;
    }
    add(s, "decode receives");
  }

  // ---- prefill
  void end_lease(State& s, std::uint8_t p, bool tell) {
    if (s.slot_taken && s.slot_owner == p + 1) {
      s.slot_owner = 0;
      if (s.lease[p] == exposed || !guards_.gather_keeps_slot) s.slot_taken = 0;
    }
    s.lease[p] = ended;
    if (!s.gather_step[p]) s.pages_freed[p] = 1;
    if (tell) s.to_decode.push({Message::aborted, p});
  }
  static bool lives(const State& s, std::uint8_t p) {
    return s.lease[p] >= live && s.lease[p] <= delivered;
  }
  void prefill_receives(State s) {
    const Message m = s.to_prefill.pop();
    const std::uint8_t p = m.who;
    switch (m.type) {
      case Message::pull:
        if (s.lease[p] != none || s.room_aborted[p]) {
          s.to_decode.push({Message::aborted, p});
        } else {
          s.lease[p] = live;
          s.lease_id[p] = s.next_lease++;
        }
        break;
      case Message::release:
        if (s.lease[p] == exposed && s.slot_owner == p + 1 && s.slot_generation == m.generation) {
          s.slot_taken = s.slot_owner = 0;
          s.lease[p] = delivered;
        }
        break;
      case Message::commit: {
        // By the lease's number: a process that restarted counts from 1 again.
        std::uint8_t answer = Message::stale;
        for (std::uint8_t q = 0; q < 2; ++q) {
          if (s.lease_id[q] != m.lease || !lives(s, q)) continue;
          if (s.lease[q] == delivered) answer = Message::valid;
          end_lease(s, q, false);
        }
        s.to_decode.push({answer, p});
        break;
      }
      case Message::abort:
        if (lives(s, p)) end_lease(s, p, false);
        break;
      default:
        break;
    }
    add(s, "prefill receives");
  }
  void gather(State s, std::uint8_t p) {
    if (s.lease[p] == live && s.slot_taken == 0) {
      s.slot_taken = 1;
      s.slot_owner = static_cast<std::uint8_t>(p + 1);
      ++s.slot_generation;
      s.lease[p] = gathering;
      s.gather_step[p] = 1;
      s.gather_generation[p] = s.slot_generation;
      s.gather_lease[p] = s.lease_id[p];
      return add(s, "gather begins");
    }
    if (s.gather_step[p] == 0) return;
    const int cell = s.gather_step[p] - 1;
    s.slot[cell] = cell == 1 ? (s.pages_freed[p] ? kGarbage : static_cast<std::uint8_t>(p + 1))
                             : stamp(s.gather_lease[p], s.gather_generation[p]);
    if (++s.gather_step[p] <= 3) return add(s, "gather writes a cell");
    s.gather_step[p] = 0;
    if (s.lease[p] == gathering) {
      s.lease[p] = exposed;
      s.to_decode.push({Message::ready, p, s.lease_id[p], s.gather_generation[p]});
    } else {
      if (guards_.gather_keeps_slot) s.slot_taken = 0;
      s.pages_freed[p] = 1;
    }
    add(s, "gather ends");
  }
  void expire(const State& s, std::uint8_t p) {
    if (s.lease[p] == exposed) {
      State next = s;
      if (guards_.poison_before_reuse) {
        end_lease(next, p, true);
      } else {
        next.slot_taken = next.slot_owner = 0;
        next.lease[p] = delivered;
      }
      add(next, "slot expires");
    }
    if (!guards_.pages_stay_pinned && lives(s, p) && !s.pages_freed[p]) {
      State next = s;
      next.pages_freed[p] = 1;
      add(next, "a timer frees pages");
    }
  }
  void abort_room(State s, std::uint8_t p) {
    if (s.room_aborted[p] || s.lease[p] == ended) return;
    s.room_aborted[p] = 1;
    if (lives(s, p)) end_lease(s, p, true);
    add(s, "prefill aborts");
  }
  void restart(State s) {
    if (s.incarnation != 0) return;
    s.incarnation = 1;
    s.next_lease = 1;
    for (std::uint8_t p = 0; p < 2; ++p) {
      s.lease[p] = none;
      s.lease_id[p] = s.pages_freed[p] = s.room_aborted[p] = 0;
      s.gather_step[p] = s.gather_generation[p] = s.gather_lease[p] = 0;
    }
    s.slot_taken = s.slot_owner = s.slot_generation = 0;
    for (auto& cell : s.slot) cell = 0;
    s.to_decode = {};
    if (guards_.session_bound) s.to_prefill = {};
    s.to_decode.push({Message::reset});
    add(s, "prefill restarts");
  }

  Guards guards_;
  std::vector<std::pair<State, const char*>> next_;
  std::size_t states_{0};
};

}  // namespace kvshard::model
