// The wire format: the only place where frames become bytes and bytes become frames. docs/wire-format.md is
// the same in words. Called by the transport (host), the step loop (worker) and, through bind.cpp, by the
// Python code of the control phase; knows neither sockets nor experts. Everything is little-endian, byte by
// byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/experts.h"

namespace duck::wire {

inline constexpr uint32_t kMagic = 0x4b435544;  // the bytes "DUCK"
inline constexpr uint16_t kProtocolVersion = 4;
inline constexpr size_t kFrameHeaderBytes = 24;
inline constexpr size_t kStepRequestHeaderBytes = 16;
inline constexpr size_t kStepReplyHeaderBytes = 40;
inline constexpr size_t kNonceBytes = 32;
inline constexpr size_t kErrorCodeBytes = 4;
inline constexpr size_t kMaxErrorTextBytes = 4092;
inline constexpr size_t kShardHeaderBytes = 16;
inline constexpr size_t kMaxShardPieceBytes = 1u << 20;  // of a shard, in one frame
inline constexpr size_t kMaxPingBytes = 1u << 20;
inline constexpr size_t kStepSentBytes = 4;
inline constexpr size_t kStepMissingHeadBytes = 8;
inline constexpr size_t kMissingRangeBytes = 8;
inline constexpr size_t kMaxMissingRanges = 511;  // so that the payload is at most 4096 bytes
inline constexpr size_t kStepPartHeadBytes = 4;

enum class FrameType : uint16_t {
  kAuthOpen = 1,       // host: whether it has a token, and its nonce
  kAuthChallenge = 2,  // worker: the same
  kAuthProof = 3,      // both, host first: HMAC-SHA256
  kHello = 4,          // both, host first: JSON
  kPrepare = 5,        // host: the plan, JSON
  kReady = 6,          // worker: weights are mapped and verified, JSON
  kError = 7,          // why the sender is about to close
  kStepRequest = 8,    // host
  kStepReply = 9,      // worker
  kClose = 10,         // host: the session is over
  kFetch = 11,         // worker: which shards of its plan it lacks, JSON
  kShard = 12,         // host: a piece of one of them
  kPing = 13,          // both, host first, between HELLO and PREPARE: echoed as it is
  kStepSent = 14,      // host: a step's request went out as datagrams
  kStepMissing = 15,   // worker: which fragments of it did not come
  kStepPart = 16,      // host: some of them
  kStepOver = 17,      // host: nobody waits for that step any more
};

enum class ErrorCode : uint32_t {
  kProtocol = 1,
  kVersion = 2,
  kAuthentication = 3,
  kBusy = 4,
  kPlan = 5,
  kModelNotFound = 6,
  kCheckpoint = 7,
  kWeightFormat = 8,
  kWeightHash = 9,
  kTimeout = 10,
  kInternal = 11,
  kDiskSpace = 12,
};

// Bytes that do not follow the format: code is kProtocol or kVersion.
class WireError : public std::runtime_error {
 public:
  WireError(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

struct FrameHeader {
  FrameType type = FrameType::kError;
  uint32_t payload_bytes = 0;
  uint64_t sequence = 0;
};

// The smallest and largest payload that a frame of this type may announce; equal where the size is fixed.
struct PayloadLimits {
  uint32_t min_bytes = 0;
  uint32_t max_bytes = 0;
};
PayloadLimits payload_limits(FrameType type);
const char* frame_type_name(FrameType type);

void encode_frame_header(const FrameHeader& header, uint8_t* out);
// Throws WireError: wrong magic, another version, an unknown type, a payload outside the type's limits.
FrameHeader decode_frame_header(const uint8_t* in);

// What a step request says before topk_ids [T, K] i32, topk_weights [T, K] f32 and x [T, H].
struct StepRequestHeader {
  uint32_t layer = 0;
  uint32_t num_tokens = 0;
  uint16_t top_k = 0;
  uint16_t lane = 0;
  ActivationType x_type = ActivationType::kF32;
  ActivationType reply_type = ActivationType::kF32;
};
void encode_step_request_header(const StepRequestHeader& header, uint8_t* out);
StepRequestHeader decode_step_request_header(const uint8_t* in);  // throws WireError

// What a step reply says before the partial sums y [T, H].
struct StepReplyHeader {
  uint32_t layer = 0;
  uint32_t num_tokens = 0;
  uint32_t compute_us = 0;
  uint16_t lane = 0;
  ActivationType reply_type = ActivationType::kF32;
  uint8_t status = 0;  // 0: y follows; no other value is defined
  // The worker's monotonic clock, nanoseconds from a moment of its own.
  uint64_t idle_since_ns = 0;  // it had handed its last answer over, or begun its session
  uint64_t started_ns = 0;     // it had the whole request, and began to compute
  uint64_t finished_ns = 0;    // it had the sums
};
void encode_step_reply_header(const StepReplyHeader& header, uint8_t* out);
StepReplyHeader decode_step_reply_header(const uint8_t* in);  // throws WireError

inline size_t activation_bytes(ActivationType type) { return type == ActivationType::kF32 ? 4 : 2; }
// Whole payloads, header included.
uint64_t step_request_bytes(const StepRequestHeader& header, uint32_t hidden_size);
uint64_t step_reply_bytes(const StepReplyHeader& header, uint32_t hidden_size);

// A complete error frame; text beyond kMaxErrorTextBytes is cut.
std::vector<uint8_t> encode_error_frame(ErrorCode code, std::string_view text);
struct ErrorPayload {
  uint32_t code = 0;  // as sent: may be one that this version does not know
  std::string text;
};
ErrorPayload decode_error_payload(const uint8_t* in, size_t bytes);  // throws WireError

struct AuthPayload {
  bool has_token = false;
  uint8_t nonce[kNonceBytes] = {};
};
inline constexpr size_t kAuthPayloadBytes = 4 + kNonceBytes;
void encode_auth_payload(const AuthPayload& payload, uint8_t* out);
AuthPayload decode_auth_payload(const uint8_t* in);  // throws WireError

// What a SHARD frame says before its piece of a shard, the units of one stripe of every expert of a layer.
struct ShardHeader {
  uint32_t layer = 0;
  uint32_t stripe = 0;  // of the whole expert
  uint64_t offset = 0;  // of the piece, in bytes
};
void encode_shard_header(const ShardHeader& header, uint8_t* out);
ShardHeader decode_shard_header(const uint8_t* in);

// STEP_SENT: the bytes of the STEP_REQUEST frame that went out as datagrams.
void encode_step_sent(uint32_t frame_bytes, uint8_t* out);
uint32_t decode_step_sent(const uint8_t* in);

// STEP_MISSING: what of a step's fragments did not come.
struct FragmentRange {
  uint32_t first = 0;
  uint32_t count = 0;
};
struct StepMissing {
  uint32_t received = 0;              // fragments that came as datagrams
  std::vector<FragmentRange> ranges;  // 1 to kMaxMissingRanges, ascending, apart
};
std::vector<uint8_t> encode_step_missing_frame(uint64_t sequence, const StepMissing& missing);
// Throws WireError; `num_fragments` is of the step.
StepMissing decode_step_missing(const uint8_t* in, size_t bytes, uint32_t num_fragments);

// STEP_PART: the index of its first fragment, before the bytes of that and those that follow it.
void encode_step_part_head(uint32_t first_fragment, uint8_t* out);
uint32_t decode_step_part_head(const uint8_t* in);

// Rows on the wire: f32 as they are, or bf16 rounded to nearest-even (a NaN stays a NaN).
void encode_bf16(const float* values, size_t count, uint8_t* out);
void decode_bf16(const uint8_t* in, size_t count, float* values);

}  // namespace duck::wire
