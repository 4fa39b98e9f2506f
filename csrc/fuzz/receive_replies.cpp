// Bytes as what two workers send to a host with steps in flight, to the second by multicast: each step comes
// out whole, or its worker is lost with a reason; nothing is read or written beyond what the steps hold. The
// first byte says how many of the bytes are the first worker's.
#include <sys/socket.h>
#include <unistd.h>

#include <cmath>
#include <memory>
#include <thread>
#include <vector>

#include "fuzz/target.h"
#include "transport/transport.h"

using namespace duck;

namespace {

constexpr uint32_t kHidden = 5, kTokens = 2, kTopK = 2;

// What a worker says, whatever it is asked.
void speak(int fd, const uint8_t* data, size_t size) {
  for (size_t at = 0; at < size;) {
    const ssize_t sent = ::send(fd, data + at, size - at, MSG_NOSIGNAL);
    if (sent <= 0) break;
    at += static_cast<size_t>(sent);
  }
  ::shutdown(fd, SHUT_WR);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const size_t first = (size - 1) * data[0] / 255;
  int ours[2], theirs[2];
  for (int worker = 0; worker < 2; ++worker) {
    int pair[2];
    FUZZ_CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    ours[worker] = pair[0];
    theirs[worker] = pair[1];
  }
  TransportConfig config;
  config.hidden_size = kHidden;
  config.top_k = kTopK;
  config.max_step_tokens = kTokens;
  config.step_timeout_ms = 10'000;
  int group[2];
  FUZZ_CHECK(::socketpair(AF_UNIX, SOCK_DGRAM, 0, group) == 0);
  wire::MulticastSession session;
  session.fragment_bytes = 64;
  Transport transport({Transport::Peer{ours[0]}, Transport::Peer{ours[1], nullptr, 4096}}, config,
                      std::make_unique<MulticastSender>(group[0], session, "nobody"));
  const float x[kTokens * kHidden] = {};
  const int32_t ids[kTokens * kTopK] = {};
  const float weights[kTokens * kTopK] = {};
  const uint64_t tickets[2] = {transport.submit(1, 0, kTokens, kTopK, x, ids, weights),
                               transport.submit(1, 1, 1, kTopK, x, ids, weights)};
  std::thread one([&] { speak(theirs[0], data + 1, first); });
  std::thread two([&] { speak(theirs[1], data + 1 + first, size - 1 - first); });
  one.join();
  two.join();
  for (const uint64_t ticket : tickets) {
    // Guarded to the byte.
    const std::vector<float> guard(kTokens * kHidden, 7.0f);
    std::vector<float> sum = guard;
    try {
      const size_t tokens = transport.ticket_tokens(ticket);
      if (transport.wait(ticket, sum.data())) {
        for (size_t i = tokens * kHidden; i < sum.size(); ++i) FUZZ_CHECK(sum[i] == 7.0f);
      }
    } catch (const TransportError& error) {
      FUZZ_CHECK(error.worker() < 2 && error.what()[0] != '\0');
      FUZZ_CHECK(sum == guard);
    } catch (const std::invalid_argument&) {
      FUZZ_CHECK(transport.closed());
    }
  }
  transport.close();
  ::close(theirs[0]);
  ::close(theirs[1]);
  ::close(group[1]);
  return 0;
}
