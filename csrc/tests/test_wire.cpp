// The codec: what is encoded is decoded again, and no bytes whatever are read beyond what is there.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>

#include "tests/check.h"
#include "wire/bf16_rows.h"
#include "wire/frame.h"

using namespace duck;
using namespace duck::wire;

namespace {

void round_trips() {
  uint8_t bytes[kFrameHeaderBytes];
  encode_frame_header({FrameType::kHello, 77, 0x8000000000000001u}, bytes);
  const FrameHeader header = decode_frame_header(bytes);
  CHECK(header.type == FrameType::kHello && header.payload_bytes == 77);
  CHECK(header.sequence == 0x8000000000000001u);

  uint8_t step[kStepRequestHeaderBytes];
  encode_step_request_header(
      {0xfffffffe, 0xfffffffd, 0xfffc, 0xfffb, ActivationType::kBf16, ActivationType::kF32}, step);
  const StepRequestHeader request = decode_step_request_header(step);
  CHECK(request.layer == 0xfffffffe && request.num_tokens == 0xfffffffd && request.top_k == 0xfffc);
  CHECK(request.lane == 0xfffb && request.x_type == ActivationType::kBf16);
  CHECK(request.reply_type == ActivationType::kF32);
  // The largest numbers must not overflow on their way to a length.
  CHECK(step_request_bytes(request, 0xffffffff) ==
        16 + 0xfffffffdull * 0xfffc * 8 + 0xfffffffdull * 0xffffffff * 2);

  StepReplyHeader reply;
  reply.num_tokens = 3;
  reply.idle_since_ns = 0xfffffffffffffffa;
  reply.started_ns = 0xfffffffffffffff9;
  reply.finished_ns = 0xfffffffffffffff8;
  reply.reply_type = ActivationType::kBf16;
  uint8_t coded[kStepReplyHeaderBytes];
  encode_step_reply_header(reply, coded);
  const StepReplyHeader again = decode_step_reply_header(coded);
  CHECK(again.idle_since_ns == 0xfffffffffffffffa && again.started_ns == 0xfffffffffffffff9);
  CHECK(again.finished_ns == 0xfffffffffffffff8);
  CHECK(step_reply_bytes(reply, 5) == 40 + 3 * 5 * 2);
}

// Allocated to the byte, so that AddressSanitizer sees a read beyond the end.
template <size_t kBytes, typename Decode>
void decode_random(Decode decode, const uint8_t* good) {
  std::minstd_rand random(kBytes);
  for (int i = 0; i < 20000; ++i) {
    const auto bytes = std::make_unique<uint8_t[]>(kBytes);
    std::memcpy(bytes.get(), good, kBytes);
    for (uint32_t flips = random() % 5; flips > 0; --flips) {
      bytes[random() % kBytes] = static_cast<uint8_t>(random());
    }
    try {
      decode(bytes.get());
    } catch (const WireError&) {
    }
  }
}

void any_bytes() {
  uint8_t header[kFrameHeaderBytes];
  encode_frame_header({FrameType::kPrepare, 100, 1}, header);
  decode_random<kFrameHeaderBytes>(
      [](const uint8_t* bytes) {
        const FrameHeader decoded = decode_frame_header(bytes);
        CHECK(decoded.payload_bytes <= payload_limits(decoded.type).max_bytes);
      },
      header);
  const uint8_t step[kStepReplyHeaderBytes] = {};
  decode_random<kStepRequestHeaderBytes>([](const uint8_t* bytes) { decode_step_request_header(bytes); },
                                         step);
  decode_random<kStepReplyHeaderBytes>([](const uint8_t* bytes) { decode_step_reply_header(bytes); }, step);
  const uint8_t auth[kAuthPayloadBytes] = {};
  decode_random<kAuthPayloadBytes>([](const uint8_t* bytes) { decode_auth_payload(bytes); }, auth);
}

void nearest_bf16() {
  std::minstd_rand random(1);
  for (int i = 0; i < 200000; ++i) {
    const uint32_t bits = static_cast<uint32_t>(random()) * 2654435761u;
    float value = 0;
    std::memcpy(&value, &bits, 4);
    uint8_t encoded[2];
    float decoded = 0;
    encode_bf16(&value, 1, encoded);
    decode_bf16(encoded, 1, &decoded);
    CHECK(std::isnan(value) == std::isnan(decoded));
    CHECK(std::signbit(value) == std::signbit(decoded));
    if (!std::isfinite(value)) {
      CHECK(std::isnan(value) || value == decoded);
      continue;
    }
    // Half of bf16's last place, which for subnormals is 2^-133.
    const int exponent = value == 0 ? -126 : std::max(std::ilogb(value), -126);
    const double half = std::ldexp(1.0, exponent - 8);
    CHECK(std::isinf(decoded) ? std::abs(value) >= 3.3961775e38f : std::abs(double{decoded} - value) <= half);
  }
}

void every_isa_rounds_alike() {
  std::minstd_rand random(2);
  for (size_t count : {1, 7, 64, 1001}) {
    std::vector<float> values(count);
    for (float& value : values) {
      const uint32_t bits = static_cast<uint32_t>(random()) * 2654435761u;
      std::memcpy(&value, &bits, 4);
    }
    std::vector<uint8_t> expected(2 * count);
    std::vector<float> back(count);
    bf16_rows(Isa::kScalar).encode(values.data(), count, expected.data());
    bf16_rows(Isa::kScalar).decode(expected.data(), count, back.data());
    for (const Isa isa : available_isas()) {
      std::vector<uint8_t> got(2 * count + 1);
      std::vector<float> decoded(count);
      bf16_rows(isa).encode(values.data(), count, got.data() + 1);  // where an odd address comes from
      bf16_rows(isa).decode(got.data() + 1, count, decoded.data());
      CHECK(std::memcmp(got.data() + 1, expected.data(), 2 * count) == 0);
      CHECK(std::memcmp(decoded.data(), back.data(), 4 * count) == 0);
    }
  }
}

}  // namespace

int main() {
  round_trips();
  any_bytes();
  nearest_bf16();
  every_isa_rounds_alike();
  return duck::test::report();
}
