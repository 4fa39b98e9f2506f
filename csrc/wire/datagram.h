// Datagrams of a multicast step request: the frame in fragments of equal size, each with a header and a tag
// that only the session's key makes. docs/wire-format.md is the same in words. Called by the transport's
// sender and the worker's receiver; knows no sockets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "wire/siphash.h"

namespace duck::wire {

inline constexpr size_t kDatagramHeaderBytes = 40;
inline constexpr uint32_t kMinFragmentBytes = 64;
inline constexpr uint32_t kMaxFragmentBytes = 65507 - kDatagramHeaderBytes;  // of UDP over IPv4

// What both ends know of a session's datagrams.
struct MulticastSession {
  uint64_t session = 0;  // random
  SipKey key;
  uint32_t fragment_bytes = 0;  // of every fragment but a frame's last
};

struct DatagramHeader {
  uint64_t sequence = 0;     // of the step, from 1
  uint32_t frame_bytes = 0;  // of the whole STEP_REQUEST frame
  uint32_t index = 0;        // of this fragment
};

// How many fragments a frame has, and how many bytes one of them.
inline uint32_t fragment_count(uint32_t frame_bytes, uint32_t fragment_bytes) {
  return static_cast<uint32_t>((uint64_t{frame_bytes} + fragment_bytes - 1) / fragment_bytes);
}
inline uint32_t fragment_size(uint32_t frame_bytes, uint32_t fragment_bytes, uint32_t index) {
  const uint64_t left = frame_bytes - uint64_t{index} * fragment_bytes;
  return left < fragment_bytes ? static_cast<uint32_t>(left) : fragment_bytes;
}

// Writes the 40 bytes before a fragment, whose bytes are `fragment`, fragment_size() of them.
void encode_datagram_header(const MulticastSession& session, const DatagramHeader& header,
                            const uint8_t* fragment, uint8_t* out);

// The header of a datagram of this session, tag and every length checked; nothing for any other bytes. The
// fragment follows it, fragment_size() bytes.
std::optional<DatagramHeader> decode_datagram(const MulticastSession& session, const uint8_t* in,
                                              size_t bytes);

}  // namespace duck::wire
