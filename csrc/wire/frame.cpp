#include "wire/frame.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "wire/bf16_rows.h"
#include "wire/bytes.h"

static_assert(std::endian::native == std::endian::little, "rows are sent from memory as they are");

namespace duck::wire {
namespace {

constexpr uint32_t kMaxStepPayloadBytes = 1u << 30;

[[noreturn]] void refuse(const std::string& field, uint64_t got, const std::string& expected) {
  throw WireError(ErrorCode::kProtocol, field + ": got " + std::to_string(got) + ", expected " + expected);
}

ActivationType activation_type(uint8_t value, const char* field) {
  if (value > 1) refuse(field, value, "0 (f32) or 1 (bf16)");
  return static_cast<ActivationType>(value);
}

}  // namespace

PayloadLimits payload_limits(FrameType type) {
  switch (type) {
    case FrameType::kAuthOpen:
    case FrameType::kAuthChallenge:
      return {kAuthPayloadBytes, kAuthPayloadBytes};
    case FrameType::kAuthProof:
      return {32, 32};
    case FrameType::kHello:
    case FrameType::kReady:
      return {2, 4096};
    case FrameType::kPrepare:
      return {2, 8u << 20};
    case FrameType::kError:
      return {kErrorCodeBytes, kErrorCodeBytes + kMaxErrorTextBytes};
    case FrameType::kStepRequest:
      return {kStepRequestHeaderBytes, kMaxStepPayloadBytes};
    case FrameType::kStepReply:
      return {kStepReplyHeaderBytes, kMaxStepPayloadBytes};
    case FrameType::kClose:
      return {0, 0};
    case FrameType::kFetch:
      return {2, 4u << 20};
    case FrameType::kShard:
      return {kShardHeaderBytes + 1, kShardHeaderBytes + kMaxShardPieceBytes};
    case FrameType::kPing:
      return {0, kMaxPingBytes};
    case FrameType::kStepSent:
      return {kStepSentBytes, kStepSentBytes};
    case FrameType::kStepMissing:
      return {kStepMissingHeadBytes + kMissingRangeBytes,
              kStepMissingHeadBytes + kMaxMissingRanges * kMissingRangeBytes};
    case FrameType::kStepPart:
      return {kStepPartHeadBytes + 1, kMaxStepPayloadBytes};
    case FrameType::kStepOver:
      return {0, 0};
  }
  throw WireError(ErrorCode::kProtocol, "frame type: got " + std::to_string(static_cast<uint32_t>(type)) +
                                            ", expected one of 1 to 17");
}

const char* frame_type_name(FrameType type) {
  switch (type) {
    case FrameType::kAuthOpen:
      return "AUTH_OPEN";
    case FrameType::kAuthChallenge:
      return "AUTH_CHALLENGE";
    case FrameType::kAuthProof:
      return "AUTH_PROOF";
    case FrameType::kHello:
      return "HELLO";
    case FrameType::kPrepare:
      return "PREPARE";
    case FrameType::kReady:
      return "READY";
    case FrameType::kError:
      return "ERROR";
    case FrameType::kStepRequest:
      return "STEP_REQUEST";
    case FrameType::kStepReply:
      return "STEP_REPLY";
    case FrameType::kClose:
      return "CLOSE";
    case FrameType::kFetch:
      return "FETCH";
    case FrameType::kShard:
      return "SHARD";
    case FrameType::kPing:
      return "PING";
    case FrameType::kStepSent:
      return "STEP_SENT";
    case FrameType::kStepMissing:
      return "STEP_MISSING";
    case FrameType::kStepPart:
      return "STEP_PART";
    case FrameType::kStepOver:
      return "STEP_OVER";
  }
  return "unknown";
}

void encode_frame_header(const FrameHeader& header, uint8_t* out) {
  put<uint32_t>(out, kMagic);
  put<uint16_t>(out + 4, kProtocolVersion);
  put<uint16_t>(out + 6, static_cast<uint16_t>(header.type));
  put<uint32_t>(out + 8, header.payload_bytes);
  put<uint32_t>(out + 12, 0);
  put<uint64_t>(out + 16, header.sequence);
}

FrameHeader decode_frame_header(const uint8_t* in) {
  if (get<uint32_t>(in) != kMagic) refuse("magic", get<uint32_t>(in), std::to_string(kMagic));
  const uint16_t version = get<uint16_t>(in + 4);
  if (version != kProtocolVersion) {
    throw WireError(ErrorCode::kVersion, "protocol version: got " + std::to_string(version) + ", expected " +
                                             std::to_string(kProtocolVersion));
  }
  FrameHeader header;
  header.type = static_cast<FrameType>(get<uint16_t>(in + 6));
  header.payload_bytes = get<uint32_t>(in + 8);
  header.sequence = get<uint64_t>(in + 16);
  const PayloadLimits limits = payload_limits(header.type);
  if (get<uint32_t>(in + 12) != 0) refuse("reserved bytes", get<uint32_t>(in + 12), "0");
  if (header.payload_bytes < limits.min_bytes || header.payload_bytes > limits.max_bytes) {
    refuse(std::string(frame_type_name(header.type)) + " payload bytes", header.payload_bytes,
           std::to_string(limits.min_bytes) + " to " + std::to_string(limits.max_bytes));
  }
  return header;
}

void encode_step_request_header(const StepRequestHeader& header, uint8_t* out) {
  put<uint32_t>(out, header.layer);
  put<uint32_t>(out + 4, header.num_tokens);
  put<uint16_t>(out + 8, header.top_k);
  put<uint16_t>(out + 10, header.lane);
  put<uint8_t>(out + 12, static_cast<uint8_t>(header.x_type));
  put<uint8_t>(out + 13, static_cast<uint8_t>(header.reply_type));
  put<uint16_t>(out + 14, 0);
}

StepRequestHeader decode_step_request_header(const uint8_t* in) {
  StepRequestHeader header;
  header.layer = get<uint32_t>(in);
  header.num_tokens = get<uint32_t>(in + 4);
  header.top_k = get<uint16_t>(in + 8);
  header.lane = get<uint16_t>(in + 10);
  header.x_type = activation_type(in[12], "x dtype");
  header.reply_type = activation_type(in[13], "reply dtype");
  if (get<uint16_t>(in + 14) != 0) refuse("reserved bytes", get<uint16_t>(in + 14), "0");
  return header;
}

void encode_step_reply_header(const StepReplyHeader& header, uint8_t* out) {
  put<uint32_t>(out, header.layer);
  put<uint32_t>(out + 4, header.num_tokens);
  put<uint32_t>(out + 8, header.compute_us);
  put<uint16_t>(out + 12, header.lane);
  put<uint8_t>(out + 14, static_cast<uint8_t>(header.reply_type));
  put<uint8_t>(out + 15, header.status);
  put<uint64_t>(out + 16, header.idle_since_ns);
  put<uint64_t>(out + 24, header.started_ns);
  put<uint64_t>(out + 32, header.finished_ns);
}

StepReplyHeader decode_step_reply_header(const uint8_t* in) {
  StepReplyHeader header;
  header.layer = get<uint32_t>(in);
  header.num_tokens = get<uint32_t>(in + 4);
  header.compute_us = get<uint32_t>(in + 8);
  header.lane = get<uint16_t>(in + 12);
  header.reply_type = activation_type(in[14], "reply dtype");
  header.status = in[15];
  header.idle_since_ns = get<uint64_t>(in + 16);
  header.started_ns = get<uint64_t>(in + 24);
  header.finished_ns = get<uint64_t>(in + 32);
  if (header.status != 0) refuse("step status", header.status, "0");
  return header;
}

uint64_t step_request_bytes(const StepRequestHeader& header, uint32_t hidden_size) {
  const uint64_t tokens = header.num_tokens;
  return kStepRequestHeaderBytes + tokens * header.top_k * 8 +
         tokens * hidden_size * activation_bytes(header.x_type);
}

uint64_t step_reply_bytes(const StepReplyHeader& header, uint32_t hidden_size) {
  return kStepReplyHeaderBytes +
         uint64_t{header.num_tokens} * hidden_size * activation_bytes(header.reply_type);
}

std::vector<uint8_t> encode_error_frame(ErrorCode code, std::string_view text) {
  size_t text_bytes = std::min(text.size(), kMaxErrorTextBytes);
  // A cut never splits a UTF-8 character.
  while (text_bytes > 0 && text_bytes < text.size() &&
         (static_cast<uint8_t>(text[text_bytes]) & 0xc0) == 0x80) {
    --text_bytes;
  }
  std::vector<uint8_t> frame(kFrameHeaderBytes + kErrorCodeBytes + text_bytes);
  encode_frame_header({FrameType::kError, static_cast<uint32_t>(kErrorCodeBytes + text_bytes), 0},
                      frame.data());
  put<uint32_t>(frame.data() + kFrameHeaderBytes, static_cast<uint32_t>(code));
  std::copy_n(text.data(), text_bytes, frame.data() + kFrameHeaderBytes + kErrorCodeBytes);
  return frame;
}

ErrorPayload decode_error_payload(const uint8_t* in, size_t bytes) {
  if (bytes < kErrorCodeBytes) refuse("ERROR payload bytes", bytes, "at least 4");
  return {get<uint32_t>(in),
          std::string(reinterpret_cast<const char*>(in) + kErrorCodeBytes, bytes - kErrorCodeBytes)};
}

void encode_auth_payload(const AuthPayload& payload, uint8_t* out) {
  put<uint32_t>(out, payload.has_token ? 1 : 0);
  std::memcpy(out + 4, payload.nonce, kNonceBytes);
}

AuthPayload decode_auth_payload(const uint8_t* in) {
  if (get<uint32_t>(in) > 1) refuse("token flag", get<uint32_t>(in), "0 or 1");
  AuthPayload payload;
  payload.has_token = get<uint32_t>(in) == 1;
  std::memcpy(payload.nonce, in + 4, kNonceBytes);
  return payload;
}

void encode_shard_header(const ShardHeader& header, uint8_t* out) {
  put<uint32_t>(out, header.layer);
  put<uint32_t>(out + 4, header.stripe);
  put<uint64_t>(out + 8, header.offset);
}

ShardHeader decode_shard_header(const uint8_t* in) {
  return {get<uint32_t>(in), get<uint32_t>(in + 4), get<uint64_t>(in + 8)};
}

void encode_step_sent(uint32_t frame_bytes, uint8_t* out) { put<uint32_t>(out, frame_bytes); }

uint32_t decode_step_sent(const uint8_t* in) { return get<uint32_t>(in); }

std::vector<uint8_t> encode_step_missing_frame(uint64_t sequence, const StepMissing& missing) {
  const size_t payload_bytes = kStepMissingHeadBytes + missing.ranges.size() * kMissingRangeBytes;
  std::vector<uint8_t> frame(kFrameHeaderBytes + payload_bytes);
  encode_frame_header({FrameType::kStepMissing, static_cast<uint32_t>(payload_bytes), sequence},
                      frame.data());
  uint8_t* out = frame.data() + kFrameHeaderBytes;
  put<uint32_t>(out, missing.received);
  put<uint32_t>(out + 4, 0);
  out += kStepMissingHeadBytes;
  for (const FragmentRange& range : missing.ranges) {
    put<uint32_t>(out, range.first);
    put<uint32_t>(out + 4, range.count);
    out += kMissingRangeBytes;
  }
  return frame;
}

StepMissing decode_step_missing(const uint8_t* in, size_t bytes, uint32_t num_fragments) {
  if (bytes < kStepMissingHeadBytes || (bytes - kStepMissingHeadBytes) % kMissingRangeBytes != 0) {
    refuse("STEP_MISSING payload bytes", bytes, "8 and 8 for each range");
  }
  if (get<uint32_t>(in + 4) != 0) refuse("reserved field", get<uint32_t>(in + 4), "0");
  StepMissing missing;
  missing.received = get<uint32_t>(in);
  uint64_t end = 0;
  for (size_t at = kStepMissingHeadBytes; at < bytes; at += kMissingRangeBytes) {
    const FragmentRange range{get<uint32_t>(in + at), get<uint32_t>(in + at + 4)};
    if (range.first < end || range.count == 0) refuse("missing fragments", range.first, "ascending ranges");
    end = uint64_t{range.first} + range.count;
    if (end > num_fragments) refuse("missing fragments", end, "at most " + std::to_string(num_fragments));
    missing.ranges.push_back(range);
  }
  return missing;
}

void encode_step_part_head(uint32_t first_fragment, uint8_t* out) { put<uint32_t>(out, first_fragment); }

uint32_t decode_step_part_head(const uint8_t* in) { return get<uint32_t>(in); }

namespace {

const Bf16Rows& rows() {
  static const Bf16Rows& fastest = bf16_rows(select_isa());
  return fastest;
}

}  // namespace

void encode_bf16(const float* values, size_t count, uint8_t* out) { rows().encode(values, count, out); }

void decode_bf16(const uint8_t* in, size_t count, float* values) { rows().decode(in, count, values); }

}  // namespace duck::wire
