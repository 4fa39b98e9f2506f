// Bytes as a stream of frames: whatever they are, they are decoded within their bounds or refused, and what
// is decoded is encoded to the same bytes again.
#include <cstring>
#include <memory>
#include <vector>

#include "fuzz/target.h"
#include "wire/frame.h"

using namespace duck::wire;

namespace {

// Allocated to the byte, so that AddressSanitizer sees a read beyond the end.
std::unique_ptr<uint8_t[]> exactly(const uint8_t* data, size_t size) {
  auto copy = std::make_unique<uint8_t[]>(size);
  std::memcpy(copy.get(), data, size);
  return copy;
}

void decode_step_headers(const uint8_t* payload, size_t size) {
  if (size < kStepRequestHeaderBytes) return;
  const auto bytes = exactly(payload, kStepRequestHeaderBytes);
  uint8_t again[kStepReplyHeaderBytes] = {};
  try {
    const StepRequestHeader request = decode_step_request_header(bytes.get());
    FUZZ_CHECK(step_request_bytes(request, 7168) >= kStepRequestHeaderBytes);
    encode_step_request_header(request, again);
    FUZZ_CHECK(std::memcmp(again, bytes.get(), kStepRequestHeaderBytes) == 0);
  } catch (const WireError&) {
  }
  encode_step_sent(decode_step_sent(bytes.get()), again);
  FUZZ_CHECK(std::memcmp(again, bytes.get(), kStepSentBytes) == 0);
  encode_step_part_head(decode_step_part_head(bytes.get()), again);
  FUZZ_CHECK(std::memcmp(again, bytes.get(), kStepPartHeadBytes) == 0);
  const ShardHeader shard = decode_shard_header(bytes.get());
  encode_shard_header(shard, again);
  FUZZ_CHECK(std::memcmp(again, bytes.get(), kShardHeaderBytes) == 0);
  if (size < kStepReplyHeaderBytes) return;
  const auto head = exactly(payload, kStepReplyHeaderBytes);
  try {
    const StepReplyHeader reply = decode_step_reply_header(head.get());
    FUZZ_CHECK(step_reply_bytes(reply, 7168) >= kStepReplyHeaderBytes);
    encode_step_reply_header(reply, again);
    FUZZ_CHECK(std::memcmp(again, head.get(), kStepReplyHeaderBytes) == 0);
  } catch (const WireError&) {
  }
}

void decode_payload(FrameType type, const uint8_t* payload, size_t size) {
  decode_step_headers(payload, size);
  const auto bytes = exactly(payload, size);
  if (type == FrameType::kError) {
    try {
      const ErrorPayload error = decode_error_payload(bytes.get(), size);
      FUZZ_CHECK(error.text.size() + kErrorCodeBytes == size);
    } catch (const WireError&) {
    }
  }
  if (type == FrameType::kStepMissing) {
    try {
      const StepMissing missing = decode_step_missing(bytes.get(), size, 1000);
      const std::vector<uint8_t> again = encode_step_missing_frame(1, missing);
      FUZZ_CHECK(again.size() == kFrameHeaderBytes + size);
      FUZZ_CHECK(std::memcmp(again.data() + kFrameHeaderBytes, bytes.get(), size) == 0);
      for (const FragmentRange& range : missing.ranges) FUZZ_CHECK(range.first + range.count <= 1000);
    } catch (const WireError&) {
    }
  }
  if (size == kAuthPayloadBytes) {
    try {
      const AuthPayload auth = decode_auth_payload(bytes.get());
      uint8_t again[kAuthPayloadBytes] = {};
      encode_auth_payload(auth, again);
      FUZZ_CHECK(std::memcmp(again, bytes.get(), kAuthPayloadBytes) == 0);
    } catch (const WireError&) {
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  while (size >= kFrameHeaderBytes) {
    const auto head = exactly(data, kFrameHeaderBytes);
    FrameHeader frame;
    try {
      frame = decode_frame_header(head.get());
    } catch (const WireError& error) {
      FUZZ_CHECK(error.code() == ErrorCode::kProtocol || error.code() == ErrorCode::kVersion);
      return 0;
    }
    const PayloadLimits limits = payload_limits(frame.type);
    FUZZ_CHECK(limits.min_bytes <= frame.payload_bytes && frame.payload_bytes <= limits.max_bytes);
    uint8_t again[kFrameHeaderBytes] = {};
    encode_frame_header(frame, again);
    FUZZ_CHECK(std::memcmp(again, head.get(), kFrameHeaderBytes) == 0);
    data += kFrameHeaderBytes;
    size -= kFrameHeaderBytes;
    const size_t payload = frame.payload_bytes < size ? frame.payload_bytes : size;
    decode_payload(frame.type, data, payload);
    data += payload;
    size -= payload;
  }
  return 0;
}
