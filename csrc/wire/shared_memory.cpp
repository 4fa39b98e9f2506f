#include "wire/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

namespace duck::wire {

// Positions count bytes since the start and never go back. The byte at position p lies at offset
// (p - base) % kRingBytes; the writer moves base while the ring is empty, so that small messages use the same
// few pages again and again.
struct SharedMemory::Ring {
  alignas(64) std::atomic<uint64_t> written;  // the writer's
  std::atomic<uint64_t> base;
  alignas(64) std::atomic<uint64_t> read;           // the reader's
  alignas(64) std::atomic<uint32_t> reader_sleeps;  // 1: whoever writes rings the reader's bell
  alignas(64) std::atomic<uint32_t> writer_sleeps;  // 1: whoever reads rings the writer's
};

struct SharedMemory::Layout {
  Ring to_worker;
  Ring to_host;
};

namespace {

constexpr size_t kMask = SharedMemory::kRingBytes - 1;
static_assert((SharedMemory::kRingBytes & kMask) == 0);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

}  // namespace

SharedMemory::SharedMemory(End end, int memory_fd, int my_bell_fd, int their_bell_fd) {
  static_assert(sizeof(Layout) <= kHeadBytes);
  struct stat status{};
  const int seals = ::fcntl(memory_fd, F_GET_SEALS);
  if (::fstat(memory_fd, &status) != 0 || seals < 0) {
    throw std::system_error(errno, std::generic_category(), "shared memory");
  }
  if (static_cast<size_t>(status.st_size) < kBytes || (seals & F_SEAL_SHRINK) == 0) {
    throw std::invalid_argument("shared memory: got " + std::to_string(status.st_size) + " bytes, expected " +
                                std::to_string(kBytes) + ", sealed against shrinking");
  }
  my_bell_ = ::fcntl(my_bell_fd, F_DUPFD_CLOEXEC, 0);
  their_bell_ = ::fcntl(their_bell_fd, F_DUPFD_CLOEXEC, 0);
  void* mapped = my_bell_ < 0 || their_bell_ < 0
                     ? MAP_FAILED
                     : ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory_fd, 0);
  if (mapped == MAP_FAILED) {
    const int error = errno;
    ::close(my_bell_);
    ::close(their_bell_);
    throw std::system_error(error, std::generic_category(), "shared memory");
  }
  layout_ = static_cast<Layout*>(mapped);
  in_ = end == End::kHost ? &layout_->to_host : &layout_->to_worker;
  out_ = end == End::kHost ? &layout_->to_worker : &layout_->to_host;
}

SharedMemory::~SharedMemory() {
  ::munmap(layout_, kBytes);
  ::close(my_bell_);
  ::close(their_bell_);
}

void SharedMemory::reset() {
  new (&layout_->to_worker) Ring();
  new (&layout_->to_host) Ring();
}

uint8_t* SharedMemory::bytes_of(const Ring& ring) const {
  uint8_t* start = reinterpret_cast<uint8_t*>(layout_) + kHeadBytes;
  return &ring == &layout_->to_worker ? start : start + kRingBytes;
}

IoResult SharedMemory::receive(uint8_t* out, size_t bytes) {
  const uint64_t read = in_->read.load(std::memory_order_relaxed);
  const uint64_t there = in_->written.load(std::memory_order_acquire) - read;
  if (there == 0) return {IoState::kWouldWait, 0, 0};
  if (there > kRingBytes) return {IoState::kFailed, 0, EPROTO};
  const size_t count = std::min<uint64_t>(there, bytes);
  const size_t offset = (read - in_->base.load(std::memory_order_relaxed)) & kMask;
  const size_t before_end = std::min(count, kRingBytes - offset);
  const uint8_t* ring = bytes_of(*in_);
  std::memcpy(out, ring + offset, before_end);
  std::memcpy(out + before_end, ring, count - before_end);
  in_->read.store(read + count, std::memory_order_seq_cst);
  if (in_->writer_sleeps.load(std::memory_order_seq_cst) != 0) ring_bell();
  return {IoState::kDone, count, 0};
}

IoResult SharedMemory::send(const TwoParts& message, size_t sent_bytes) {
  const uint64_t written = out_->written.load(std::memory_order_relaxed);
  const uint64_t there = written - out_->read.load(std::memory_order_acquire);
  if (there > kRingBytes) return {IoState::kFailed, 0, EPROTO};
  if (there == kRingBytes) return {IoState::kWouldWait, 0, 0};
  if (there == 0) out_->base.store(written, std::memory_order_relaxed);
  const uint64_t base = out_->base.load(std::memory_order_relaxed);
  uint8_t* ring = bytes_of(*out_);
  uint64_t position = written;
  uint64_t room = kRingBytes - there;
  const auto put = [&](const uint8_t* part, size_t part_bytes) {
    const size_t count = std::min<uint64_t>(room, part_bytes);
    const size_t offset = (position - base) & kMask;
    const size_t before_end = std::min(count, kRingBytes - offset);
    std::memcpy(ring + offset, part, before_end);
    std::memcpy(ring, part + before_end, count - before_end);
    position += count;
    room -= count;
  };
  const size_t skip = sent_bytes > message.first_bytes ? sent_bytes - message.first_bytes : 0;
  if (sent_bytes < message.first_bytes) put(message.first + sent_bytes, message.first_bytes - sent_bytes);
  if (message.second_bytes > skip) put(message.second + skip, message.second_bytes - skip);
  out_->written.store(position, std::memory_order_seq_cst);
  if (out_->reader_sleeps.load(std::memory_order_seq_cst) != 0) ring_bell();
  return {IoState::kDone, static_cast<size_t>(position - written), 0};
}

// Whoever sleeps says so first and looks afterwards; whoever writes looks for sleepers after it has written.
// Both in one order that all see, so that one of them sees the other.
bool SharedMemory::announce_sleep(bool to_receive, bool to_send) {
  bool ready = false;
  if (to_receive) {
    in_->reader_sleeps.store(1, std::memory_order_seq_cst);
    ready |= in_->written.load(std::memory_order_seq_cst) != in_->read.load(std::memory_order_relaxed);
  }
  if (to_send) {
    out_->writer_sleeps.store(1, std::memory_order_seq_cst);
    const uint64_t read = out_->read.load(std::memory_order_seq_cst);
    ready |= out_->written.load(std::memory_order_relaxed) - read != kRingBytes;
  }
  return ready;
}

void SharedMemory::end_sleep(bool bell_rang) {
  in_->reader_sleeps.store(0, std::memory_order_relaxed);
  out_->writer_sleeps.store(0, std::memory_order_relaxed);
  uint64_t rings = 0;
  while (bell_rang && ::read(my_bell_, &rings, sizeof(rings)) < 0 && errno == EINTR) {
  }
}

void SharedMemory::ring_bell() const {
  const uint64_t once = 1;
  while (::write(their_bell_, &once, sizeof(once)) < 0 && errno == EINTR) {
  }
}

}  // namespace duck::wire
