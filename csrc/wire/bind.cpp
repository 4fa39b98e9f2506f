// Python names of the wire codec, for the control phase and its tests.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "wire/datagram.h"
#include "wire/frame.h"
#include "wire/shared_memory.h"

namespace nb = nanobind;

namespace duck {
namespace {

using namespace wire;

const uint8_t* checked(const nb::bytes& data, size_t expected_bytes, const char* what) {
  if (data.size() != expected_bytes) {
    throw WireError(ErrorCode::kProtocol, std::string(what) + " bytes: got " + std::to_string(data.size()) +
                                              ", expected " + std::to_string(expected_bytes));
  }
  return reinterpret_cast<const uint8_t*>(data.c_str());
}

PyObject* wire_error_type = nullptr;

void bind_multicast(nb::module_& m) {
  m.attr("DATAGRAM_HEADER_BYTES") = kDatagramHeaderBytes;
  m.attr("MULTICAST_KEY_BYTES") = kSipKeyBytes;
  m.attr("MIN_FRAGMENT_BYTES") = kMinFragmentBytes;
  m.attr("MAX_FRAGMENT_BYTES") = kMaxFragmentBytes;
  nb::class_<MulticastSession>(m, "MulticastSession",
                               "What both ends know of the datagrams of step requests by multicast.")
      .def(
          "__init__",
          [](MulticastSession* self, uint64_t session, const nb::bytes& key, uint32_t fragment_bytes) {
            new (self) MulticastSession{session, {}, fragment_bytes};
            std::memcpy(self->key.bytes, checked(key, kSipKeyBytes, "multicast key"), kSipKeyBytes);
            if (fragment_bytes < kMinFragmentBytes || fragment_bytes > kMaxFragmentBytes) {
              throw std::invalid_argument("fragment_bytes: got " + std::to_string(fragment_bytes) +
                                          ", expected " + std::to_string(kMinFragmentBytes) + " to " +
                                          std::to_string(kMaxFragmentBytes));
            }
          },
          nb::arg("session"), nb::arg("key"), nb::arg("fragment_bytes"))
      .def(
          "encode_datagram",
          [](const MulticastSession& self, uint64_t sequence, const nb::bytes& frame, uint32_t index) {
            const auto frame_bytes = static_cast<uint32_t>(frame.size());
            if (index >= fragment_count(frame_bytes, self.fragment_bytes)) {
              throw std::invalid_argument("index: got " + std::to_string(index) +
                                          ", expected a fragment of the frame");
            }
            const auto* fragment =
                reinterpret_cast<const uint8_t*>(frame.c_str()) + size_t{index} * self.fragment_bytes;
            std::vector<uint8_t> out(kDatagramHeaderBytes +
                                     fragment_size(frame_bytes, self.fragment_bytes, index));
            encode_datagram_header(self, {sequence, frame_bytes, index}, fragment, out.data());
            std::memcpy(out.data() + kDatagramHeaderBytes, fragment, out.size() - kDatagramHeaderBytes);
            return nb::bytes(reinterpret_cast<const char*>(out.data()), out.size());
          },
          nb::arg("sequence"), nb::arg("frame"), nb::arg("index"),
          "A whole datagram: its header and one fragment of the frame.")
      .def(
          "decode_datagram",
          [](const MulticastSession& self, const nb::bytes& data) {
            std::optional<std::tuple<uint64_t, uint32_t, uint32_t>> found;
            const auto header =
                decode_datagram(self, reinterpret_cast<const uint8_t*>(data.c_str()), data.size());
            if (header) found = {header->sequence, header->frame_bytes, header->index};
            return found;
          },
          nb::arg("data"), "(sequence, frame_bytes, index), or None for what is not of this session.");
  m.def(
      "encode_step_missing",
      [](uint64_t sequence, uint32_t received, const std::vector<std::pair<uint32_t, uint32_t>>& ranges) {
        StepMissing missing{received, {}};
        for (const auto& [first, count] : ranges) missing.ranges.push_back({first, count});
        const std::vector<uint8_t> frame = encode_step_missing_frame(sequence, missing);
        return nb::bytes(reinterpret_cast<const char*>(frame.data()), frame.size());
      },
      nb::arg("sequence"), nb::arg("received"), nb::arg("ranges"),
      "A whole STEP_MISSING frame; ranges are (first fragment, count).");
  m.def(
      "decode_step_missing",
      [](const nb::bytes& data, uint32_t num_fragments) {
        const StepMissing missing =
            decode_step_missing(reinterpret_cast<const uint8_t*>(data.c_str()), data.size(), num_fragments);
        std::vector<std::pair<uint32_t, uint32_t>> ranges;
        for (const FragmentRange& range : missing.ranges) ranges.emplace_back(range.first, range.count);
        return std::pair(missing.received, ranges);
      },
      nb::arg("data"), nb::arg("num_fragments"), "(received, ranges) of a payload; raises WireError.");
}

}  // namespace

void bind_wire(nb::module_& m) {
  m.attr("PROTOCOL_VERSION") = kProtocolVersion;
  m.attr("FRAME_HEADER_BYTES") = kFrameHeaderBytes;
  m.attr("STEP_REQUEST_HEADER_BYTES") = kStepRequestHeaderBytes;
  m.attr("STEP_REPLY_HEADER_BYTES") = kStepReplyHeaderBytes;
  m.attr("NONCE_BYTES") = kNonceBytes;
  m.attr("SHARD_HEADER_BYTES") = kShardHeaderBytes;
  m.attr("MAX_SHARD_PIECE_BYTES") = kMaxShardPieceBytes;
  m.attr("MAX_PING_BYTES") = kMaxPingBytes;

  nb::enum_<FrameType>(m, "FrameType", "Types of frames, see docs/wire-format.md.")
      .value("AUTH_OPEN", FrameType::kAuthOpen)
      .value("AUTH_CHALLENGE", FrameType::kAuthChallenge)
      .value("AUTH_PROOF", FrameType::kAuthProof)
      .value("HELLO", FrameType::kHello)
      .value("PREPARE", FrameType::kPrepare)
      .value("READY", FrameType::kReady)
      .value("ERROR", FrameType::kError)
      .value("STEP_REQUEST", FrameType::kStepRequest)
      .value("STEP_REPLY", FrameType::kStepReply)
      .value("CLOSE", FrameType::kClose)
      .value("FETCH", FrameType::kFetch)
      .value("SHARD", FrameType::kShard)
      .value("PING", FrameType::kPing)
      .value("STEP_SENT", FrameType::kStepSent)
      .value("STEP_MISSING", FrameType::kStepMissing)
      .value("STEP_PART", FrameType::kStepPart)
      .value("STEP_OVER", FrameType::kStepOver);
  nb::enum_<ErrorCode>(m, "ErrorCode", "What an ERROR frame is about.")
      .value("PROTOCOL", ErrorCode::kProtocol)
      .value("VERSION", ErrorCode::kVersion)
      .value("AUTHENTICATION", ErrorCode::kAuthentication)
      .value("BUSY", ErrorCode::kBusy)
      .value("PLAN", ErrorCode::kPlan)
      .value("MODEL_NOT_FOUND", ErrorCode::kModelNotFound)
      .value("CHECKPOINT", ErrorCode::kCheckpoint)
      .value("WEIGHT_FORMAT", ErrorCode::kWeightFormat)
      .value("WEIGHT_HASH", ErrorCode::kWeightHash)
      .value("TIMEOUT", ErrorCode::kTimeout)
      .value("INTERNAL", ErrorCode::kInternal)
      .value("DISK_SPACE", ErrorCode::kDiskSpace);

  // WireError.args == (ErrorCode, sentence).
  wire_error_type = PyErr_NewExceptionWithDoc(
      "duckllm._native.WireError",
      "Bytes that do not follow the wire format; args are the ErrorCode and a sentence.", PyExc_ValueError,
      nullptr);
  m.attr("WireError") = nb::handle(wire_error_type);
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const WireError& error) {
      PyErr_SetObject(wire_error_type, nb::make_tuple(error.code(), error.what()).ptr());
    }
  });

  m.def(
      "payload_limits",
      [](FrameType type) {
        const PayloadLimits limits = payload_limits(type);
        return std::tuple(limits.min_bytes, limits.max_bytes);
      },
      nb::arg("type"), "The smallest and largest payload of a frame type, bytes.");
  m.def(
      "encode_frame_header",
      [](FrameType type, uint32_t payload_bytes, uint64_t sequence) {
        uint8_t out[kFrameHeaderBytes];
        encode_frame_header({type, payload_bytes, sequence}, out);
        return nb::bytes(reinterpret_cast<const char*>(out), sizeof(out));
      },
      nb::arg("type"), nb::arg("payload_bytes"), nb::arg("sequence") = 0, "The 24 bytes before a payload.");
  m.def(
      "decode_frame_header",
      [](const nb::bytes& data) {
        const FrameHeader header = decode_frame_header(checked(data, kFrameHeaderBytes, "frame header"));
        return std::tuple(header.type, header.payload_bytes, header.sequence);
      },
      nb::arg("data"), "(type, payload_bytes, sequence); raises WireError.");
  m.def(
      "encode_step_request_header",
      [](uint32_t layer, uint32_t num_tokens, uint16_t top_k, uint16_t lane, bool x_bf16, bool reply_bf16) {
        uint8_t out[kStepRequestHeaderBytes];
        encode_step_request_header({layer, num_tokens, top_k, lane, static_cast<ActivationType>(x_bf16),
                                    static_cast<ActivationType>(reply_bf16)},
                                   out);
        return nb::bytes(reinterpret_cast<const char*>(out), sizeof(out));
      },
      nb::arg("layer"), nb::arg("num_tokens"), nb::arg("top_k"), nb::arg("lane") = 0,
      nb::arg("x_bf16") = false, nb::arg("reply_bf16") = false,
      "The first 16 payload bytes of a STEP_REQUEST.");
  m.def(
      "decode_step_reply_header",
      [](const nb::bytes& data) {
        const StepReplyHeader header =
            decode_step_reply_header(checked(data, kStepReplyHeaderBytes, "step reply header"));
        return std::tuple(header.layer, header.num_tokens, header.compute_us, header.lane,
                          header.reply_type == ActivationType::kBf16);
      },
      nb::arg("data"), "(layer, num_tokens, compute_us, lane, reply_bf16); raises WireError.");
  m.def(
      "encode_step_reply_header",
      [](uint32_t layer, uint32_t num_tokens, uint32_t compute_us, uint16_t lane, bool reply_bf16,
         uint64_t idle_since_ns, uint64_t started_ns, uint64_t finished_ns) {
        uint8_t out[kStepReplyHeaderBytes];
        encode_step_reply_header(
            {layer, num_tokens, compute_us, lane, static_cast<ActivationType>(reply_bf16), 0, idle_since_ns,
             started_ns, finished_ns},
            out);
        return nb::bytes(reinterpret_cast<const char*>(out), sizeof(out));
      },
      nb::arg("layer"), nb::arg("num_tokens"), nb::arg("compute_us") = 0, nb::arg("lane") = 0,
      nb::arg("reply_bf16") = false, nb::arg("idle_since_ns") = 0, nb::arg("started_ns") = 0,
      nb::arg("finished_ns") = 0, "The first 40 payload bytes of a STEP_REPLY.");
  m.def(
      "decode_step_reply_times",
      [](const nb::bytes& data) {
        const StepReplyHeader header =
            decode_step_reply_header(checked(data, kStepReplyHeaderBytes, "step reply header"));
        return std::tuple(header.idle_since_ns, header.started_ns, header.finished_ns);
      },
      nb::arg("data"), "(idle_since_ns, started_ns, finished_ns) of the worker's clock; raises WireError.");
  m.def(
      "encode_error_frame",
      [](ErrorCode code, const std::string& text) {
        const std::vector<uint8_t> frame = encode_error_frame(code, text);
        return nb::bytes(reinterpret_cast<const char*>(frame.data()), frame.size());
      },
      nb::arg("code"), nb::arg("text"), "A whole ERROR frame, header included.");
  m.def(
      "decode_error_payload",
      [](const nb::bytes& data) {
        const ErrorPayload payload =
            decode_error_payload(reinterpret_cast<const uint8_t*>(data.c_str()), data.size());
        return std::tuple(payload.code, nb::bytes(payload.text.data(), payload.text.size()));
      },
      nb::arg("data"), "(code as a number, text as UTF-8 bytes); raises WireError.");
  m.def(
      "encode_shard_header",
      [](uint32_t layer, uint32_t stripe, uint64_t offset) {
        uint8_t out[kShardHeaderBytes];
        encode_shard_header({layer, stripe, offset}, out);
        return nb::bytes(reinterpret_cast<const char*>(out), sizeof(out));
      },
      nb::arg("layer"), nb::arg("stripe"), nb::arg("offset"), "The first 16 payload bytes of a SHARD.");
  m.def(
      "decode_shard_header",
      [](const nb::bytes& data) {
        const ShardHeader header = decode_shard_header(checked(data, kShardHeaderBytes, "shard header"));
        return std::tuple(header.layer, header.stripe, header.offset);
      },
      nb::arg("data"), "(layer, stripe, offset); raises WireError.");
  m.def(
      "encode_auth_payload",
      [](bool has_token, const nb::bytes& nonce) {
        AuthPayload payload;
        payload.has_token = has_token;
        std::memcpy(payload.nonce, checked(nonce, kNonceBytes, "nonce"), kNonceBytes);
        uint8_t out[kAuthPayloadBytes];
        encode_auth_payload(payload, out);
        return nb::bytes(reinterpret_cast<const char*>(out), sizeof(out));
      },
      nb::arg("has_token"), nb::arg("nonce"), "The payload of AUTH_OPEN and AUTH_CHALLENGE.");
  m.def(
      "decode_auth_payload",
      [](const nb::bytes& data) {
        const AuthPayload payload =
            decode_auth_payload(checked(data, kAuthPayloadBytes, "authentication payload"));
        return std::tuple(payload.has_token,
                          nb::bytes(reinterpret_cast<const char*>(payload.nonce), kNonceBytes));
      },
      nb::arg("data"), "(has_token, nonce); raises WireError.");
  m.def("set_connection_options", &set_connection_options, nb::arg("socket"),
        "Sets what steps need of a TCP connection, as far as this kernel lets it.");
  m.def("describe_connection", &describe_connection, nb::arg("socket"),
        "What of that is active, and what could not be set, in words.");
  bind_multicast(m);
  m.attr("SHARED_MEMORY_BYTES") = SharedMemory::kBytes;
  nb::class_<SharedMemory>(m, "SharedMemory",
                           "One end of the memory that a host and a worker on its machine share.")
      .def(
          "__init__",
          [](SharedMemory* self, bool is_host, int memory_fd, int my_bell_fd, int their_bell_fd) {
            new (self) SharedMemory(is_host ? SharedMemory::End::kHost : SharedMemory::End::kWorker,
                                    memory_fd, my_bell_fd, their_bell_fd);
          },
          nb::kw_only(), nb::arg("is_host"), nb::arg("memory_fd"), nb::arg("my_bell_fd"),
          nb::arg("their_bell_fd"),
          "Maps a memfd of SHARED_MEMORY_BYTES, sealed against shrinking; the bells are eventfds, of which "
          "copies are kept. RuntimeError where it cannot be mapped, ValueError where it does not fit.")
      .def("reset", &SharedMemory::reset, "Empties it. Only while neither end uses it.");
}

}  // namespace duck
