#include "wire/socket_io.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <system_error>

namespace duck::wire {
namespace {

// Of Linux 6.16 and later; older headers lack the names, and older kernels refuse the numbers.
constexpr int kTcpRtoMinUs = 45;
constexpr int kTcpDelackMaxUs = 46;
// A lost packet stalls a token for the least time to retransmit, 200 ms as kernels come. An acknowledgement
// must not wait for as long as that; the kernel rounds each up to its ticks, 1 to 10 ms.
constexpr int kRtoMinUs = 5000;
constexpr int kDelackMaxUs = 1000;
// Kernels come with cubic or bbr. Without loss they take the same time; with one packet in a thousand lost
// and four workers a step took 526 us on average with cubic and 676 with bbr (a relay of 2.5 Gbit/s and 50 us
// each way, retransmission after 1 ms; Xeon, 2 vCPU, 2026-11).
constexpr char kCongestion[] = "cubic";

// Of a recv() or recvmsg() that is called again after a signal.
template <typename Call>
IoResult received(Call call) {
  for (;;) {
    const ssize_t got = call();
    if (got > 0) return {IoState::kDone, static_cast<size_t>(got), 0};
    if (got == 0) return {IoState::kEnded, 0, 0};
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return {IoState::kWouldWait, 0, 0};
    return {IoState::kFailed, 0, errno};
  }
}

}  // namespace

IoResult receive_some(int fd, uint8_t* out, size_t bytes) {
  return received([&] { return ::recv(fd, out, bytes, MSG_DONTWAIT); });
}

IoResult receive_some(int fd, const TwoRooms& rooms) {
  iovec parts[2] = {{rooms.first, rooms.first_bytes}, {rooms.second, rooms.second_bytes}};
  msghdr header{};
  header.msg_iov = parts;
  header.msg_iovlen = 2;
  return received([&] { return ::recvmsg(fd, &header, MSG_DONTWAIT); });
}

IoResult send_some(int fd, const TwoParts& message, size_t sent_bytes) {
  iovec parts[2];
  int count = 0;
  if (sent_bytes < message.first_bytes) {
    parts[count++] = {const_cast<uint8_t*>(message.first + sent_bytes), message.first_bytes - sent_bytes};
    if (message.second_bytes > 0)
      parts[count++] = {const_cast<uint8_t*>(message.second), message.second_bytes};
  } else {
    const size_t skip = sent_bytes - message.first_bytes;
    parts[count++] = {const_cast<uint8_t*>(message.second + skip), message.second_bytes - skip};
  }
  msghdr header{};
  header.msg_iov = parts;
  header.msg_iovlen = static_cast<size_t>(count);
  for (;;) {
    const ssize_t sent = ::sendmsg(fd, &header, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) return {IoState::kDone, static_cast<size_t>(sent), 0};
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return {IoState::kWouldWait, 0, 0};
    return {IoState::kFailed, 0, errno};
  }
}

int poll_timeout_ms(Deadline deadline) {
  if (deadline == kNever) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, INT_MAX));
}

bool wait_for(int fd, Direction direction, Deadline deadline) {
  for (;;) {
    pollfd entry{fd, static_cast<short>(direction == Direction::kRead ? POLLIN : POLLOUT), 0};
    const int ready = ::poll(&entry, 1, poll_timeout_ms(deadline));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return true;  // the next read or write reports it
    if (deadline != kNever && Clock::now() >= deadline) return false;
  }
}

void set_connection_options(int fd) {
  const auto set = [fd](int level, int option, int value) {
    ::setsockopt(fd, level, option, &value, sizeof(value));
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 5);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set(IPPROTO_TCP, TCP_KEEPCNT, 5);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, 60'000);
  set(IPPROTO_TCP, kTcpRtoMinUs, kRtoMinUs);
  set(IPPROTO_TCP, kTcpDelackMaxUs, kDelackMaxUs);
  ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, kCongestion, sizeof(kCongestion) - 1);
}

std::string describe_connection(int fd) {
  char congestion[16] = {};  // TCP_CA_NAME_MAX
  socklen_t bytes = sizeof(congestion);
  if (::getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, congestion, &bytes) != 0) return "no TCP";
  int rto_us = 0;
  bytes = sizeof(rto_us);
  std::string text = "TCP, " + std::string(congestion, ::strnlen(congestion, sizeof(congestion)));
  if (text.substr(5) != kCongestion) text += " (" + std::string(kCongestion) + " could not be set)";
  if (::getsockopt(fd, IPPROTO_TCP, kTcpRtoMinUs, &rto_us, &bytes) == 0) {
    return text + ", retransmits after " + std::to_string(rto_us / 1000) + " ms at the least";
  }
  return text + ", the least time to retransmit as its route has it (this kernel lets no socket set it)";
}

std::string error_text(int error) { return std::generic_category().message(error); }

}  // namespace duck::wire
