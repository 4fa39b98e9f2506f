#include "wire/datagram.h"

#include <cstring>

#include "wire/bytes.h"
#include "wire/frame.h"

namespace duck::wire {
namespace {

constexpr uint32_t kDatagramMagic = 0x4d435544;  // the bytes "DUCM"
constexpr size_t kTagAt = 32;                    // what is before it and the fragment are what it is of

}  // namespace

void encode_datagram_header(const MulticastSession& session, const DatagramHeader& header,
                            const uint8_t* fragment, uint8_t* out) {
  const uint32_t bytes = fragment_size(header.frame_bytes, session.fragment_bytes, header.index);
  put<uint32_t>(out, kDatagramMagic);
  put<uint16_t>(out + 4, kProtocolVersion);
  put<uint16_t>(out + 6, static_cast<uint16_t>(bytes));
  put<uint64_t>(out + 8, session.session);
  put<uint64_t>(out + 16, header.sequence);
  put<uint32_t>(out + 24, header.frame_bytes);
  put<uint32_t>(out + 28, header.index);
  put<uint64_t>(out + kTagAt, siphash(session.key, out, kTagAt, fragment, bytes));
}

std::optional<DatagramHeader> decode_datagram(const MulticastSession& session, const uint8_t* in,
                                              size_t bytes) {
  if (bytes < kDatagramHeaderBytes || get<uint32_t>(in) != kDatagramMagic) return std::nullopt;
  if (get<uint16_t>(in + 4) != kProtocolVersion || get<uint64_t>(in + 8) != session.session) {
    return std::nullopt;
  }
  const DatagramHeader header{get<uint64_t>(in + 16), get<uint32_t>(in + 24), get<uint32_t>(in + 28)};
  const size_t fragment_bytes = bytes - kDatagramHeaderBytes;
  if (get<uint16_t>(in + 6) != fragment_bytes || header.sequence == 0) return std::nullopt;
  if (header.index >= fragment_count(header.frame_bytes, session.fragment_bytes)) return std::nullopt;
  if (fragment_size(header.frame_bytes, session.fragment_bytes, header.index) != fragment_bytes) {
    return std::nullopt;
  }
  const uint64_t tag = siphash(session.key, in, kTagAt, in + kDatagramHeaderBytes, fragment_bytes);
  if (get<uint64_t>(in + kTagAt) != tag) return std::nullopt;
  return header;
}

}  // namespace duck::wire
