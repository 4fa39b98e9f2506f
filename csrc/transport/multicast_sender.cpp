#include "transport/multicast_sender.h"

#include <netinet/in.h>
#include <netinet/udp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "wire/socket_io.h"

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif

namespace duck {
namespace {

constexpr uint32_t kMaxBatch = 64;              // segments that every kernel with UDP_SEGMENT takes at once
constexpr uint32_t kMaxSegmentsBytes = 65'000;  // of one call; IPv4's headers must find room too

}  // namespace

MulticastSender::MulticastSender(int fd, const wire::MulticastSession& session, std::string group)
    : fd_(fd), session_(session), group_(std::move(group)) {
  const int bytes = static_cast<int>(wire::kDatagramHeaderBytes + session.fragment_bytes);
  gso_ = ::setsockopt(fd_, SOL_UDP, UDP_SEGMENT, &bytes, sizeof(bytes)) == 0;
}

MulticastSender::~MulticastSender() { ::close(fd_); }

bool MulticastSender::send(uint64_t sequence, const uint8_t* frame, uint32_t frame_bytes, uint32_t& next) {
  const uint32_t count = wire::fragment_count(frame_bytes, session_.fragment_bytes);
  const uint32_t datagram_bytes = wire::kDatagramHeaderBytes + session_.fragment_bytes;
  std::array<std::array<uint8_t, wire::kDatagramHeaderBytes>, kMaxBatch> heads;
  std::array<iovec, 2 * kMaxBatch> parts;
  while (next < count) {
    const uint32_t batch = std::min(
        {count - next, kMaxBatch, gso_ ? std::max(1u, kMaxSegmentsBytes / datagram_bytes) : kMaxBatch});
    for (uint32_t i = 0; i < batch; ++i) {
      const uint32_t index = next + i;
      const uint8_t* fragment = frame + size_t{index} * session_.fragment_bytes;
      wire::encode_datagram_header(session_, {sequence, frame_bytes, index}, fragment, heads[i].data());
      parts[2 * i] = {heads[i].data(), wire::kDatagramHeaderBytes};
      parts[2 * i + 1] = {const_cast<uint8_t*>(fragment),
                          wire::fragment_size(frame_bytes, session_.fragment_bytes, index)};
    }
    int sent = 0;  // datagrams
    if (gso_) {
      msghdr message{};
      message.msg_iov = parts.data();
      message.msg_iovlen = 2 * batch;
      sent = ::sendmsg(fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 ? -1 : static_cast<int>(batch);
    } else {
      std::array<mmsghdr, kMaxBatch> messages{};
      for (uint32_t i = 0; i < batch; ++i) {
        messages[i].msg_hdr.msg_iov = &parts[2 * i];
        messages[i].msg_hdr.msg_iovlen = 2;
      }
      sent = ::sendmmsg(fd_, messages.data(), batch, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    if (sent > 0) {
      next += static_cast<uint32_t>(sent);
      num_datagrams_ += static_cast<uint64_t>(sent);
      continue;
    }
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return false;
    if (gso_ && (errno == EIO || errno == EINVAL)) {  // the interface cannot cut them up
      const int off = 0;
      ::setsockopt(fd_, SOL_UDP, UDP_SEGMENT, &off, sizeof(off));
      gso_ = false;
      continue;
    }
    error_ = errno;
    next = count;
  }
  return true;
}

std::string MulticastSender::describe() const {
  std::string text = "requests by multicast to " + group_ + ", datagrams of " +
                     std::to_string(wire::kDatagramHeaderBytes + session_.fragment_bytes) +
                     " bytes handed over by " + (gso_ ? "UDP GSO" : "sendmmsg");
  if (error_ != 0) text += " (the last error: " + wire::error_text(error_) + ")";
  return text;
}

}  // namespace duck
