// The rings that a host and a worker share: every byte in order, whatever is full, empty or asleep; an end
// after the last byte; and nothing read outside the memory, whatever the other end writes into its head.
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tests/check.h"
#include "wire/shared_memory.h"
#include "wire/stream.h"

using namespace duck;
using namespace duck::wire;

namespace {

struct Pair {
  explicit Pair(bool sealed = true) {
    memory = ::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(::ftruncate(memory, SharedMemory::kBytes) == 0);
    if (sealed) CHECK(::fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    for (int& bell : bells) bell = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
  }
  ~Pair() {
    for (const int fd : {memory, bells[0], bells[1], sockets[0], sockets[1]}) ::close(fd);
  }
  std::shared_ptr<SharedMemory> end(int which) {
    const auto side = which == 0 ? SharedMemory::End::kHost : SharedMemory::End::kWorker;
    return std::make_shared<SharedMemory>(side, memory, bells[which], bells[1 - which]);
  }
  Stream stream(int which) { return Stream(sockets[which], end(which)); }

  int memory = -1;
  int bells[2] = {-1, -1};
  int sockets[2] = {-1, -1};
};

uint8_t byte_at(uint64_t position) { return static_cast<uint8_t>(position * 2654435761u >> 13); }

// Sends so many bytes in messages of up to `most`, and takes as many, as a transport does.
void exchange(Stream stream, uint64_t total, size_t most, uint32_t seed) {
  std::minstd_rand random(seed);
  std::vector<uint8_t> out;
  std::vector<uint8_t> in(most);
  uint64_t sent = 0;
  uint64_t received = 0;
  size_t sent_of_message = 0;
  while (sent < total || received < total) {
    bool moved = false;
    if (sent < total) {
      if (out.empty()) {
        out.resize(std::min<uint64_t>(1 + random() % most, total - sent));
        for (size_t i = 0; i < out.size(); ++i) out[i] = byte_at(sent + i);
      }
      const size_t cut = random() % (out.size() + 1);
      const IoResult result =
          stream.send({out.data(), cut, out.data() + cut, out.size() - cut}, sent_of_message);
      moved |= result.state == IoState::kDone;
      sent_of_message += result.bytes;
      if (sent_of_message == out.size()) {
        sent += out.size();
        sent_of_message = 0;
        out.clear();
      }
    }
    const size_t first = random() % most;
    const IoResult result = stream.receive({in.data(), first + 1, in.data() + first + 1, most - first - 1});
    if (result.state == IoState::kDone) {
      moved = true;
      bool right = true;
      for (size_t i = 0; i < result.bytes; ++i) right &= in[i] == byte_at(received + i);
      CHECK(right);
      received += result.bytes;
    }
    if (moved) continue;
    pollfd entries[Stream::kPollEntries];
    bool ready = stream.announce_sleep(true, sent < total, entries);
    if (!ready) CHECK(::poll(entries, Stream::kPollEntries, 20'000) != 0);
    stream.end_sleep(entries);
  }
}

void both_ways(uint64_t total, size_t most) {
  Pair pair;
  std::thread worker(exchange, pair.stream(1), total, most, 1);
  exchange(pair.stream(0), total, most, 2);
  worker.join();
}

void an_end_comes_after_the_last_byte() {
  Pair pair;
  Stream host = pair.stream(0);
  const uint8_t last[3] = {1, 2, 3};
  CHECK(pair.end(1)->send({last, 3, nullptr, 0}, 0).bytes == 3);
  ::shutdown(pair.sockets[1], SHUT_RDWR);
  CHECK(host.wait(Direction::kRead, deadline_after_ms(20'000)));
  uint8_t got[8];
  CHECK(host.receive(got, 8).bytes == 3 && got[2] == 3);
  CHECK(host.receive(got, 8).state == IoState::kWouldWait);
  CHECK(host.wait(Direction::kRead, deadline_after_ms(20'000)));
  CHECK(host.receive(got, 8).state == IoState::kEnded);
  CHECK(host.send({last, 3, nullptr, 0}, 0).state == IoState::kFailed);
}

void a_full_ring_has_no_room() {
  Pair pair;
  const std::vector<uint8_t> much(SharedMemory::kRingBytes + 5, 7);
  Stream host = pair.stream(0);
  CHECK(host.send({much.data(), much.size(), nullptr, 0}, 0).bytes == SharedMemory::kRingBytes);
  CHECK(host.send({much.data(), 1, nullptr, 0}, 0).state == IoState::kWouldWait);
  CHECK(!host.wait(Direction::kWrite, deadline_after_ms(1)));
  // What there is to receive does not end a wait for room.
  const uint8_t one = 1;
  CHECK(pair.end(1)->send({&one, 1, nullptr, 0}, 0).bytes == 1);
  CHECK(!host.wait(Direction::kWrite, deadline_after_ms(1)));
  pair.end(1)->reset();
  uint8_t byte = 0;
  CHECK(host.receive(&byte, 1).state == IoState::kWouldWait);
  CHECK(host.send({much.data(), 1, nullptr, 0}, 0).bytes == 1);
}

void positions_that_make_no_sense() {
  Pair pair;
  auto* head = static_cast<uint8_t*>(
      ::mmap(nullptr, SharedMemory::kHeadBytes, PROT_READ | PROT_WRITE, MAP_SHARED, pair.memory, 0));
  Stream host = pair.stream(0);
  std::minstd_rand random(3);
  std::vector<uint8_t> room(SharedMemory::kRingBytes);
  for (int round = 0; round < 300; ++round) {
    for (size_t i = 0; i < SharedMemory::kHeadBytes; ++i)
      head[i] = round % 2 ? static_cast<uint8_t>(random()) : 0;
    const uint64_t few = random() % 4;
    if (round % 2 == 0) std::memcpy(head + 256 * (round / 2 % 2) + 64 * (round / 4 % 2), &few, 8);
    const IoResult in = host.receive(room.data(), 1000);
    CHECK(in.state != IoState::kDone || in.bytes <= 1000);
    const IoResult out = host.send({room.data(), 1000, nullptr, 0}, 0);
    CHECK(out.state != IoState::kDone || out.bytes <= 1000);
    if (round % 2) CHECK(in.state == IoState::kFailed && in.error == EPROTO);
  }
  ::munmap(head, SharedMemory::kHeadBytes);
}

void memory_that_may_shrink_is_refused() {
  Pair pair(false);
  bool refused = false;
  try {
    pair.end(0);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
}

}  // namespace

int main() {
  both_ways(uint64_t{1} << 21, 700);
  both_ways(uint64_t{1} << 26, size_t{1} << 22);
  both_ways(uint64_t{3} << 26, size_t{1} << 25);  // messages larger than a ring
  an_end_comes_after_the_last_byte();
  a_full_ring_has_no_room();
  positions_that_make_no_sense();
  memory_that_may_shrink_is_refused();
  return duck::test::report();
}
