#include "demo/socket_peers.hpp"

#include <sys/socket.h>
#include <sys/time.h>

#include <cstring>
#include <string>
#include <utility>

#include "base/try.hpp"
#include "base/unique_fd.hpp"

namespace demo {
namespace {

using namespace kvshard;
using tools::Channel;
using tools::Json;
using tools::RankProcess;

constexpr timeval kPatience{.tv_sec = 60, .tv_usec = 0};

/// A message of one byte that carries a file descriptor.
struct Parcel {
  char byte{0};
  iovec data{.iov_base = &byte, .iov_len = 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))]{};
  msghdr header{.msg_name = nullptr,
                .msg_namelen = 0,
                .msg_iov = &data,
                .msg_iovlen = 1,
                .msg_control = control,
                .msg_controllen = sizeof control,
                .msg_flags = 0};

  Parcel() = default;
  Parcel(const Parcel&) = delete;
  Parcel& operator=(const Parcel&) = delete;
};

Status send_fd(int socket, const UniqueFd& fd) {
  Parcel parcel;
  cmsghdr* const part = CMSG_FIRSTHDR(&parcel.header);
  part->cmsg_level = SOL_SOCKET;
  part->cmsg_type = SCM_RIGHTS;
  part->cmsg_len = CMSG_LEN(sizeof(int));
  const int number = fd.get();
  std::memcpy(CMSG_DATA(part), &number, sizeof number);
  if (::sendmsg(socket, &parcel.header, MSG_NOSIGNAL) == 1) return {};
  return Error{ErrorCode::unavailable, "a rank process died"};
}

Result<UniqueFd> receive_fd(int socket) {
  Parcel parcel;
  const bool came = ::recvmsg(socket, &parcel.header, MSG_CMSG_CLOEXEC) == 1;
  const cmsghdr* const part = came ? CMSG_FIRSTHDR(&parcel.header) : nullptr;
  if (part == nullptr || part->cmsg_type != SCM_RIGHTS)
    return Error{ErrorCode::unavailable, "no socket to a peer came"};
  int number = -1;
  std::memcpy(&number, CMSG_DATA(part), sizeof number);
  return UniqueFd{number};
}

}  // namespace

Status SocketPeers::connect(std::span<RankProcess> ranks) {
  // The lower of two ranks varies slowest, so that each rank gets its sockets by peer.
  for (std::size_t low = 0; low < ranks.size(); ++low) {
    for (std::size_t high = low + 1; high < ranks.size(); ++high) {
      int ends[2] = {-1, -1};
      if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
        return Error{ErrorCode::resource_exhausted, "no socket pair"};
      const UniqueFd for_low{ends[0]}, for_high{ends[1]};
      KVSHARD_TRY(send_fd(ranks[low].channel().fd(), for_low));
      KVSHARD_TRY(send_fd(ranks[high].channel().fd(), for_high));
    }
  }
  return {};
}

Result<SocketPeers> SocketPeers::accept(const Channel& channel, std::uint32_t rank,
                                        std::uint32_t size) {
  SocketPeers made{rank};
  for (std::uint32_t peer = 1; peer < size; ++peer) {
    KVSHARD_TRY(auto fd, receive_fd(channel.fd()));
    for (const int option : {SO_RCVTIMEO, SO_SNDTIMEO})
      (void)::setsockopt(fd.get(), SOL_SOCKET, option, &kPatience, sizeof kPatience);
    made.others_.emplace_back(std::move(fd));
  }
  return made;
}

Result<std::vector<float>> SocketPeers::all_gather(std::span<const float> own) {
  const auto bytes = std::as_bytes(own);
  const auto* const first = reinterpret_cast<const std::uint8_t*>(bytes.data());
  std::vector<float> gathered;
  const auto append = [&](const std::vector<std::uint8_t>& part) {
    const std::size_t at = gathered.size();
    gathered.resize(at + part.size() / sizeof(float));
    if (!part.empty()) std::memcpy(&gathered[at], part.data(), part.size());
  };
  // Each rank speaks in turn while all others listen, so none can be stuck with full buffers.
  for (std::uint32_t speaker = 0; speaker < size(); ++speaker) {
    if (speaker == rank_) {
      const Json message = Json::binary({first, first + bytes.size()});
      for (Channel& other : others_) {
        if (!other.send(message)) return Error{ErrorCode::unavailable, "a peer is gone"};
      }
      append(message.get_binary());
    } else {
      const auto message = others_[speaker < rank_ ? speaker : speaker - 1].receive();
      if (!message)
        return Error{ErrorCode::unavailable, "peer " + std::to_string(speaker) + " is gone"};
      append(message->get_binary());
    }
  }
  return gathered;
}

}  // namespace demo
