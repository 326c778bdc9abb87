#pragma once

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/unique_fd.hpp"
#include "kvshard/prefill_rank.hpp"
#include "support/patterned_pool.hpp"

namespace kvshard::test {

/// What a test asks of a prefill rank; the same for one in this process and one in a child.
struct PublishCall {
  RoomId room{};
  std::vector<LogicalPage> pages{};
  std::uint32_t first_position{0};
  std::uint32_t first_layer{0}, layer_count{0};
  bool last{false};
  std::string side_data{};
};

class PrefillDriver {
 public:
  virtual ~PrefillDriver() = default;
  virtual GroupMember member() = 0;
  /// Writes the pages that this rank owns as consecutive positions of `content`.
  virtual void fill(const std::vector<LogicalPage>& pages, std::uint32_t first_position,
                    const Content& content) = 0;
  virtual Status open(RoomId room, std::uint32_t pullers) = 0;
  virtual Status publish(const PublishCall& call) = 0;
  virtual Status abort(RoomId room, const std::string& reason) = 0;
  /// The next room's end, within `seconds`.
  virtual Result<RoomEvent> next_event(int seconds = 20) = 0;
  virtual PrefillStats stats() = 0;
};

inline Result<RoomEvent> wait_for_event(PrefillRank& rank, int seconds) {
  RoomEvent event;
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds{seconds};
  for (;;) {
    if (rank.poll({&event, 1}) == 1) return event;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        until - std::chrono::steady_clock::now());
    if (left.count() <= 0) return Error{ErrorCode::deadline_exceeded, "no room ended"};
    pollfd fd{.fd = rank.event_fd(), .events = POLLIN, .revents = 0};
    (void)::poll(&fd, 1, static_cast<int>(left.count()));
  }
}

struct PrefillSetup {
  PrefillOptions options;  // pool is filled in by the driver
  Geometry geometry;
  TransportOptions transport;
};

/// A rank in this process.
class LocalPrefill final : public PrefillDriver {
 public:
  explicit LocalPrefill(const PrefillSetup& setup, const Clock* clock = nullptr)
      : pool_{setup.geometry} {
    PrefillOptions options = setup.options;
    options.pool = pool_.pool();
    rank_ = PrefillRank::create(std::move(options), make_transport(setup.transport).value(),
                                make_copy_engine({}).value(), clock)
                .value();
    layout_ =
        PageLayout::create(setup.options.shard_size, setup.geometry.groups[0].page_size).value();
    shard_rank_ = setup.options.shard_rank;
  }

  GroupMember member() override { return rank_->member(); }
  void fill(const std::vector<LogicalPage>& pages, std::uint32_t first_position,
            const Content& content) override {
    for (std::uint32_t i = 0; i < pages.size(); ++i) {
      const Placement place = layout_->place(pages[i]);
      if (place.rank == shard_rank_) pool_.fill(place.page, first_position + i, content);
    }
  }
  Status open(RoomId room, std::uint32_t pullers) override { return rank_->open(room, pullers); }
  Status publish(const PublishCall& call) override {
    return rank_->publish(call.room, {.pages = call.pages,
                                      .first_position = call.first_position,
                                      .first_layer = call.first_layer,
                                      .layer_count = call.layer_count,
                                      .last = call.last,
                                      .side_data = std::as_bytes(std::span{call.side_data})});
  }
  Status abort(RoomId room, const std::string& reason) override {
    return rank_->abort(room, reason);
  }
  Result<RoomEvent> next_event(int seconds) override { return wait_for_event(*rank_, seconds); }
  PrefillStats stats() override { return rank_->stats(); }
  PrefillRank& rank() { return *rank_; }
  PatternedPool& pool() { return pool_; }

 private:
  PatternedPool pool_;
  std::optional<PageLayout> layout_;
  std::uint32_t shard_rank_{0};
  std::unique_ptr<PrefillRank> rank_;
};

/// A rank in a child process, driven over a socket. Make all children before this process has threads.
class ChildPrefill final : public PrefillDriver {
 public:
  explicit ChildPrefill(const PrefillSetup& setup) {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) std::abort();
    socket_ = UniqueFd{ends[0]};
    UniqueFd child{ends[1]};
    pid_ = ::fork();
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      socket_.reset();
      serve(setup, child.get());
      ::_exit(0);
    }
    child.reset();
    ask_member();
  }
  /// A rank that another process started and will reap; it runs serve() at the other end of `socket`.
  ChildPrefill(pid_t pid, UniqueFd socket) : pid_{pid}, socket_{std::move(socket)} { ask_member(); }
  ~ChildPrefill() override {
    // Later children hold copies of our end of the socket, so closing it would not be seen.
    (void)::send(socket_.get(), "quit", 4, MSG_NOSIGNAL);
    if (pid_ > 0) ::waitpid(pid_, nullptr, 0);
  }

  GroupMember member() override { return member_; }
  void fill(const std::vector<LogicalPage>& pages, std::uint32_t first_position,
            const Content& content) override {
    std::ostringstream text;
    text << "fill " << first_position << ' ' << content.request << ' ' << content.generation << ' '
         << list(pages);
    (void)call(text.str());
  }
  Status open(RoomId room, std::uint32_t pullers) override {
    return status(call("open " + std::to_string(index(room)) + ' ' + std::to_string(pullers)));
  }
  Status publish(const PublishCall& request) override {
    std::ostringstream text;
    text << "publish " << index(request.room) << ' ' << request.first_position << ' '
         << request.first_layer << ' ' << request.layer_count << ' ' << request.last << ' '
         << list(request.pages) << ' ' << request.side_data;
    return status(call(text.str()));
  }
  Status abort(RoomId room, const std::string& reason) override {
    return status(call("abort " + std::to_string(index(room)) + ' ' + reason));
  }
  Result<RoomEvent> next_event(int seconds) override {
    std::istringstream reply{call("event " + std::to_string(seconds))};
    std::uint64_t room = 0;
    int code = 0;
    std::string message;
    reply >> room >> code;
    std::getline(reply >> std::ws, message);
    if (code == 0) return RoomEvent{RoomId{room}, {}};
    const Error error{static_cast<ErrorCode>(code), message};
    if (room == 0) return error;
    return RoomEvent{RoomId{room}, error};
  }
  PrefillStats stats() override {
    std::istringstream reply{call("stats")};
    PrefillStats stats;
    auto* words = reinterpret_cast<std::uint64_t*>(&stats);
    for (std::size_t i = 0; i < sizeof stats / sizeof *words; ++i) reply >> words[i];
    return stats;
  }

  /// The child's side, until it is told to quit.
  static void serve(const PrefillSetup& setup, int socket) {
    LocalPrefill local{setup};
    std::vector<char> buffer(1U << 18);
    for (;;) {
      const auto got = ::recv(socket, buffer.data(), buffer.size(), 0);
      if (got <= 0) return;
      std::istringstream in{std::string{buffer.data(), static_cast<std::size_t>(got)}};
      std::string verb;
      in >> verb;
      std::ostringstream reply;
      if (verb == "quit") return;
      if (verb == "member") {
        const GroupMember member = local.member();
        reply << member.shard_rank << ' ' << member.host << ' ' << member.port << ' '
              << member.incarnation;
      } else if (verb == "fill") {
        std::uint32_t first = 0;
        Content content;
        in >> first >> content.request >> content.generation;
        local.fill(read_list(in), first, content);
        reply << "0";
      } else if (verb == "open") {
        std::uint64_t room = 0;
        std::uint32_t pullers = 0;
        in >> room >> pullers;
        reply << text_of(local.open(RoomId{room}, pullers));
      } else if (verb == "publish") {
        PublishCall call;
        std::uint64_t room = 0;
        in >> room >> call.first_position >> call.first_layer >> call.layer_count >> call.last;
        call.room = RoomId{room};
        call.pages = read_list(in);
        std::getline(in >> std::ws, call.side_data);
        reply << text_of(local.publish(call));
      } else if (verb == "abort") {
        std::uint64_t room = 0;
        std::string reason;
        in >> room;
        std::getline(in >> std::ws, reason);
        reply << text_of(local.abort(RoomId{room}, reason));
      } else if (verb == "event") {
        int seconds = 0;
        in >> seconds;
        const auto event = local.next_event(seconds);
        if (event) {
          reply << index(event->room) << ' ' << text_of(event->status);
        } else {
          reply << "0 " << text_of(event.error());
        }
      } else if (verb == "stats") {
        PrefillStats stats = local.stats();
        const auto* words = reinterpret_cast<const std::uint64_t*>(&stats);
        for (std::size_t i = 0; i < sizeof stats / sizeof *words; ++i) reply << words[i] << ' ';
      }
      const std::string text = reply.str();
      (void)::send(socket, text.data(), text.size(), MSG_NOSIGNAL);
    }
  }

  [[nodiscard]] pid_t pid() const { return pid_; }
  void kill(int signal) {
    ::kill(pid_, signal);
    if (signal == SIGKILL) {
      ::waitpid(pid_, nullptr, 0);
      pid_ = -1;
    }
  }

 private:
  void ask_member() {
    std::istringstream reply{call("member")};
    reply >> member_.shard_rank >> member_.host >> member_.port >> member_.incarnation;
  }
  static std::string list(const std::vector<LogicalPage>& pages) {
    std::ostringstream text;
    text << pages.size();
    for (const LogicalPage page : pages) text << ' ' << index(page);
    return text.str();
  }
  static std::vector<LogicalPage> read_list(std::istream& in) {
    std::size_t count = 0;
    in >> count;
    std::vector<LogicalPage> pages(count);
    for (LogicalPage& page : pages) {
      std::uint32_t number = 0;
      in >> number;
      page = LogicalPage{number};
    }
    return pages;
  }
  static std::string text_of(const Status& status) {
    return status ? "0"
                  : std::to_string(static_cast<int>(status.error().code)) + ' ' +
                        status.error().message;
  }
  static Status status(const std::string& reply) {
    std::istringstream in{reply};
    int code = 0;
    std::string message;
    in >> code;
    std::getline(in >> std::ws, message);
    if (code == 0) return {};
    return Error{static_cast<ErrorCode>(code), message};
  }

  std::string call(const std::string& request) {
    std::vector<char> reply(1U << 18);
    if (::send(socket_.get(), request.data(), request.size(), MSG_NOSIGNAL) < 0)
      return "4 child is gone";
    const auto got = ::recv(socket_.get(), reply.data(), reply.size(), 0);
    if (got <= 0) return "4 child is gone";
    return {reply.data(), static_cast<std::size_t>(got)};
  }

  pid_t pid_{-1};
  UniqueFd socket_;
  GroupMember member_;
};

}  // namespace kvshard::test
