#include "session/cuda_prefill.hpp"

#include <fcntl.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <exception>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "copy/cuda/cuda_handles.hpp"
#include "session/cuda_reshard_cases.hpp"
#include "support/prefill_driver.hpp"

namespace kvshard::test {

Result<std::unique_ptr<Transport>> make_cuda_transport(Via via) {
  auto made = make_transport({.kind = TransportOptions::Kind::ucx,
                              .path = via == Via::get  ? TransferPath::get
                                      : via == Via::am ? TransferPath::am
                                                       : TransferPath::automatic,
                              .cuda_device = 0});
  if (via == Via::mapped && !made && made.error().code == ErrorCode::unsupported)
    return make_transport({.kind = TransportOptions::Kind::loopback});
  return made;
}

// Both go over the socket as they are: the two ends are one program.
struct CudaPrefill::Order {
  enum class Verb : std::uint32_t { open, abort, fill, publish, publish_request, room_end, stats };

  Verb verb{};
  RoomId room{};
  std::uint32_t pullers{1};
  std::uint32_t first{0};
  Content content{};
  std::chrono::milliseconds delay{0};
  bool last{true};
  std::uint32_t page_count{0};
  std::array<LogicalPage, 1024> pages{};
};

struct CudaPrefill::Answer {
  bool ok{true};
  bool late{false};
  ErrorCode code{};
  char message[400]{};
  std::uint16_t port{0};
  std::uint64_t incarnation{0};
  PrefillStats stats{};

  static Answer of(const Status& status) {
    Answer made;
    if (status) return made;
    made.ok = false;
    made.code = status.error().code;
    (void)std::snprintf(made.message, sizeof made.message, "%s", status.error().message.c_str());
    return made;
  }
  [[nodiscard]] Status status() const {
    if (ok) return {};
    return Error{code, message};
  }
};

// The rank, in its own process.
class CudaPrefill::Server {
 public:
  explicit Server(const CudaPrefillSetup& setup) : setup_{setup} {
    Geometry geometry;
    if (setup.reshard_case >= 0) {
      case_ = reshard_cases().at(static_cast<std::size_t>(setup.reshard_case));
      geometry = case_->prefill.at(setup.rank);
    } else {
      geometry = by_page(small_geometry(setup.page_count), setup.rank, setup.ranks);
    }
    layout_ = PageLayout::create(setup.ranks, geometry.groups[0].page_size).value();
    pool_.emplace(geometry, setup.memory);
    cudaStream_t stream = nullptr;
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    stream_ = CudaStream{stream};
    if (case_) fill_request();

    PrefillOptions options;
    options.epoch = setup.epoch;
    options.shard_rank = setup.rank;
    options.shard_size = setup.ranks;
    options.pool = pool_->pool();
    options.slot_payload_bytes = 4096;  // several pieces
    options.mapped_piece_bytes = 4096;
    auto transport = make_cuda_transport(setup.via);
    if (!transport) throw std::runtime_error{transport.error().message};
    auto engine = make_copy_engine({.memory = MemoryKind::cuda});
    if (!engine) throw std::runtime_error{engine.error().message};
    auto rank = PrefillRank::create(std::move(options), std::move(transport).value(),
                                    std::move(engine).value());
    if (!rank) throw std::runtime_error{rank.error().message};
    rank_ = std::move(rank).value();
  }

  [[nodiscard]] Answer member() const {
    const GroupMember member = rank_->member();
    Answer made;
    made.port = member.port;
    made.incarnation = member.incarnation;
    return made;
  }

  Answer run(const Order& order) {
    switch (order.verb) {
      case Order::Verb::open:
        return Answer::of(rank_->open(order.room, order.pullers));
      case Order::Verb::abort:
        return Answer::of(rank_->abort(order.room, "the test gave it up"));
      case Order::Verb::fill:
        write(order);
        must(cudaStreamSynchronize(stream_.get()));
        return {};
      case Order::Verb::publish:
        return publish(order);
      case Order::Verb::publish_request:
        return Answer::of(publish_request(order));
      case Order::Verb::room_end:
        return room_end();
      case Order::Verb::stats:
        break;
    }
    Answer made;
    made.stats = rank_->stats();
    return made;
  }

 private:
  static std::span<const LogicalPage> pages_of(const Order& order) {
    return std::span{order.pages}.first(order.page_count);
  }

  // Of a cyclic chain a rank has every ranks-th position.
  void write(const Order& order) {
    if (order.delay.count() > 0) must(launch_delay(order.delay, stream_.get()));
    const auto pages = pages_of(order);
    std::vector<LocalPage> own;
    std::uint32_t first = 0;
    for (std::uint32_t i = 0; i < pages.size(); ++i) {
      const Placement place = layout_->place(pages[i]);
      if (place.rank != setup_.rank) continue;
      if (own.empty()) first = order.first + i;
      own.push_back(place.page);
    }
    for (std::uint32_t at = 0; at < own.size(); at += kMaxPagesAtOnce) {
      const std::size_t count = std::min<std::size_t>(kMaxPagesAtOnce, own.size() - at);
      must(launch_fill(pool_->select(std::span{own}.subspan(at, count), first + at * setup_.ranks,
                                     setup_.ranks, order.content),
                       stream_.get()));
    }
  }

  Answer publish(const Order& order) {
    write(order);
    cudaEvent_t made = nullptr;
    must(cudaEventCreateWithFlags(&made, cudaEventDisableTiming));
    events_.emplace(order.room, CudaEvent{made});
    must(cudaEventRecord(made, stream_.get()));
    Answer answer = Answer::of(rank_->publish(order.room, {.pages = pages_of(order),
                                                           .first_position = order.first,
                                                           .ready = made,
                                                           .last = order.last}));
    answer.late = cudaEventQuery(made) == cudaErrorNotReady;
    return answer;
  }

  void fill_request() {
    ModelPool image{case_->prefill[setup_.rank]};
    const ReshardPages pages = ReshardPages::of_prefill(*case_);
    image.fill(kReshardRequest, {pages.table}, {pages.tokens});
    pool_->upload(image.pool());
  }

  Status publish_request(const Order& order) {
    if (Status opened = rank_->open(order.room, order.pullers); !opened) return opened;
    const ReshardPages request = ReshardPages::of_prefill(*case_);
    const std::span<const LogicalPage> pages{request.table.pages};
    const std::size_t cut = pages.size() / 3;
    if (Status published = rank_->publish(order.room, {.pages = pages.first(cut)}); !published)
      return published;
    return rank_->publish(order.room, {.pages = pages.subspan(cut),
                                       .first_position = static_cast<std::uint32_t>(cut),
                                       .last = true});
  }

  Answer room_end() {
    const auto event = wait_for_event(*rank_, 20);
    if (!event) return Answer::of(event.error());
    events_.erase(event->room);  // borrowed until now
    return Answer::of(event->status);
  }

  CudaPrefillSetup setup_;
  std::optional<ReshardCase> case_;
  std::optional<PageLayout> layout_;
  std::optional<CudaPool> pool_;
  CudaStream stream_;
  std::multimap<RoomId, CudaEvent> events_;
  std::unique_ptr<PrefillRank> rank_;
};

int run_cuda_prefill(int socket) try {
  (void)::prctl(PR_SET_PDEATHSIG, SIGKILL);
  CudaPrefillSetup setup;
  if (::recv(socket, &setup, sizeof setup, 0) != sizeof setup) return 1;
  CudaPrefill::Server server{setup};
  CudaPrefill::Answer answer = server.member();
  for (CudaPrefill::Order order;;) {
    if (::send(socket, &answer, sizeof answer, MSG_NOSIGNAL) != sizeof answer) return 1;
    if (::recv(socket, &order, sizeof order, 0) != sizeof order) return 0;
    answer = server.run(order);
  }
} catch (const std::exception& failure) {
  (void)std::fprintf(stderr, "prefill rank: %s\n", failure.what());
  return 1;
}

CudaPrefill::CudaPrefill(const CudaPrefillSetup& setup) : setup_{setup} {
  int ends[2] = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) != 0) throw std::runtime_error{"no socket"};
  socket_ = UniqueFd{ends[0]};
  const UniqueFd theirs{ends[1]};
  (void)::fcntl(ends[0], F_SETFD, FD_CLOEXEC);
  std::string program = "/proc/self/exe";
  std::string flag = kPrefillFlag;
  std::string fd = std::to_string(theirs.get());
  char* const arguments[] = {program.data(), flag.data(), fd.data(), nullptr};
  if (::posix_spawn(&pid_, program.c_str(), nullptr, nullptr, arguments, environ) != 0)
    throw std::runtime_error{"no process"};
  (void)::send(socket_.get(), &setup_, sizeof setup_, MSG_NOSIGNAL);
}

CudaPrefill::~CudaPrefill() {
  socket_.reset();  // it closes its rank and leaves
  if (pid_ > 0) (void)::waitpid(pid_, nullptr, 0);
}

void CudaPrefill::kill() {
  (void)::kill(pid_, SIGKILL);
  (void)::waitpid(std::exchange(pid_, -1), nullptr, 0);
}

CudaPrefill::Answer CudaPrefill::hear() {
  Answer answer;
  pollfd readable{.fd = socket_.get(), .events = POLLIN, .revents = 0};
  if (::poll(&readable, 1, 60'000) == 1 &&
      ::recv(socket_.get(), &answer, sizeof answer, 0) == sizeof answer)
    return answer;
  return Answer::of(Error{ErrorCode::internal, "the prefill process gave up, or hangs"});
}

CudaPrefill::Answer CudaPrefill::call(const Order& order) {
  (void)::send(socket_.get(), &order, sizeof order, MSG_NOSIGNAL);
  return hear();
}

Result<GroupMember> CudaPrefill::member() {
  const Answer answer = hear();
  if (!answer.ok) return answer.status().error();
  return GroupMember{.shard_rank = setup_.rank,
                     .host = "127.0.0.1",
                     .port = answer.port,
                     .incarnation = answer.incarnation};
}

Status CudaPrefill::open(RoomId room, std::uint32_t pullers) {
  return call({.verb = Order::Verb::open, .room = room, .pullers = pullers}).status();
}

Status CudaPrefill::abort(RoomId room) {
  return call({.verb = Order::Verb::abort, .room = room}).status();
}

CudaPrefill::Order CudaPrefill::order_of(const Chunk& chunk) {
  Order order{.room = chunk.room,
              .first = chunk.first,
              .content = chunk.content,
              .delay = chunk.delay,
              .last = chunk.last,
              .page_count = static_cast<std::uint32_t>(chunk.pages.size())};
  if (chunk.pages.size() > order.pages.size()) throw std::length_error{"too many pages at once"};
  std::ranges::copy(chunk.pages, order.pages.begin());
  return order;
}

Status CudaPrefill::fill(const Chunk& chunk) {
  Order order = order_of(chunk);
  order.verb = Order::Verb::fill;
  return call(order).status();
}

Result<bool> CudaPrefill::publish(const Chunk& chunk) {
  Order order = order_of(chunk);
  order.verb = Order::Verb::publish;
  const Answer answer = call(order);
  if (!answer.ok) return answer.status().error();
  return answer.late;
}

Status CudaPrefill::publish_request(RoomId room, std::uint32_t pullers) {
  return call({.verb = Order::Verb::publish_request, .room = room, .pullers = pullers}).status();
}

Status CudaPrefill::room_end() {
  return call({.verb = Order::Verb::room_end}).status();
}

PrefillStats CudaPrefill::stats() {
  return call({.verb = Order::Verb::stats}).stats;
}

}  // namespace kvshard::test
