#include "transport/transport.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/link.h"

namespace duck {
namespace {

using wire::Clock;
using wire::Deadline;
using wire::FrameType;
using wire::IoResult;
using wire::IoState;
using wire::kFrameHeaderBytes;
using wire::StepRequestHeader;

void check_range(const char* field, uint64_t got, uint64_t most) {
  if (got >= 1 && got <= most) return;
  throw std::invalid_argument(std::string(field) + ": got " + std::to_string(got) + ", expected 1 to " +
                              std::to_string(most));
}

}  // namespace

Transport::Transport(std::vector<int> sockets, const TransportConfig& config) : config_(config) {
  for (const int fd : sockets) {
    links_.push_back(std::make_unique<Link>());
    links_.back()->fd = fd;
    wire::set_connection_options(fd);
  }
  last_compute_us_.resize(links_.size());
  std::string problem;
  StepRequestHeader largest;
  largest.num_tokens = config.max_step_tokens;
  largest.top_k = static_cast<uint16_t>(std::min<uint32_t>(config.top_k, UINT16_MAX));
  if (links_.empty()) problem = "workers: got 0, expected at least 1";
  if (config.hidden_size < 1) problem = "hidden_size: got 0, expected at least 1";
  if (config.top_k < 1 || config.top_k > UINT16_MAX) problem = "top_k: got a value outside 1 to 65535";
  if (config.max_step_tokens < 1) problem = "max_step_tokens: got 0, expected at least 1";
  if (problem.empty() && wire::step_request_bytes(largest, config.hidden_size) >
                             wire::payload_limits(FrameType::kStepRequest).max_bytes) {
    problem =
        "max_step_tokens: got " + std::to_string(config.max_step_tokens) + ", expected steps under 1 GiB";
  }
  if (!problem.empty()) {
    close_sockets();
    throw std::invalid_argument(problem);
  }
}

Transport::~Transport() { close(); }

uint64_t Transport::submit(uint32_t layer, uint16_t lane, uint32_t num_tokens, uint32_t top_k, const float* x,
                           const int32_t* topk_ids, const float* topk_weights) {
  const std::lock_guard lock(mutex_);
  check_open(layer);
  check_range("step tokens", num_tokens, config_.max_step_tokens);
  check_range("step top_k", top_k, config_.top_k);
  Step& step = new_step(layer, lane, num_tokens);

  StepRequestHeader header;
  header.layer = layer;
  header.num_tokens = num_tokens;
  header.top_k = static_cast<uint16_t>(top_k);
  header.lane = lane;
  header.x_type = config_.x_type;
  header.reply_type = config_.reply_type;
  const uint64_t payload_bytes = wire::step_request_bytes(header, config_.hidden_size);
  const size_t list_bytes = size_t{num_tokens} * top_k * 4;
  const size_t values = size_t{num_tokens} * config_.hidden_size;
  const bool is_bf16 = config_.x_type == ActivationType::kBf16;
  const size_t encoded_bytes = kStepHeadBytes + 2 * list_bytes + (is_bf16 ? 2 * values : 0);
  if (request_.size() < encoded_bytes) request_.resize(encoded_bytes);

  uint8_t* out = request_.data();
  wire::encode_frame_header({FrameType::kStepRequest, static_cast<uint32_t>(payload_bytes), step.sequence},
                            out);
  wire::encode_step_request_header(header, out + kFrameHeaderBytes);
  std::memcpy(out + kStepHeadBytes, topk_ids, list_bytes);
  std::memcpy(out + kStepHeadBytes + list_bytes, topk_weights, list_bytes);
  wire::TwoParts message{out, encoded_bytes, nullptr, 0};
  if (is_bf16) {
    wire::encode_bf16(x, values, out + kStepHeadBytes + 2 * list_bytes);
  } else {
    message.second = reinterpret_cast<const uint8_t*>(x);  // f32 leaves from where it lies
    message.second_bytes = 4 * values;
  }
  send_to_all(message, layer);
  return step.sequence;
}

void Transport::send_to_all(const wire::TwoParts& message, uint32_t layer) {
  const size_t total_bytes = message.total_bytes();
  size_t unsent = links_.size();
  const auto send_to = [&](size_t worker) {
    Link& link = *links_[worker];
    while (link.sent_bytes < total_bytes) {
      const IoResult result = wire::send_some(link.fd, message, link.sent_bytes);
      if (result.state == IoState::kWouldWait) return;
      if (result.state == IoState::kFailed) fail_to_send(worker, layer, result.error);
      link.sent_bytes += result.bytes;
    }
    --unsent;
  };
  for (auto& link : links_) link->sent_bytes = 0;
  for (size_t worker = 0; worker < links_.size(); ++worker) send_to(worker);
  if (unsent == 0) return;

  // Some buffers are full. A worker may itself be waiting for us to take a reply, so both directions are
  // served.
  const Deadline deadline = wire::deadline_after_ms(config_.step_timeout_ms);
  std::vector<pollfd> entries(links_.size());
  while (unsent > 0) {
    size_t late = links_.size();
    for (size_t worker = links_.size(); worker-- > 0;) {
      const bool pending = links_[worker]->sent_bytes < total_bytes;
      entries[worker] = {pending ? links_[worker]->fd : -1, POLLIN | POLLOUT, 0};
      if (pending) late = worker;
    }
    const int ready = ::poll(entries.data(), entries.size(), wire::poll_timeout_ms(deadline));
    if (ready <= 0 && Clock::now() >= deadline) {
      fail(late, layer, "it did not take a step within " + std::to_string(config_.step_timeout_ms) + " ms");
    }
    for (size_t worker = 0; ready > 0 && worker < links_.size(); ++worker) {
      if (entries[worker].fd < 0) continue;
      if (entries[worker].revents & ~POLLOUT) receive_from(worker, layer, nullptr);
      if (entries[worker].revents & POLLOUT) send_to(worker);
    }
  }
}

bool Transport::wait(uint64_t ticket, float* sum, const std::function<bool()>& interrupted) {
  const std::lock_guard lock(mutex_);
  Step* step = find(ticket);
  check_open(step != nullptr ? std::optional(step->layer) : std::nullopt);
  if (step == nullptr) {
    throw std::invalid_argument("ticket: got " + std::to_string(ticket) + ", expected one that is in flight");
  }
  const Deadline deadline = wire::deadline_after_ms(config_.step_timeout_ms);
  const Deadline spin_until = Clock::now() + std::chrono::microseconds(config_.spin_us);
  std::vector<pollfd> entries(links_.size());
  for (;;) {
    size_t late = links_.size();
    for (size_t worker = links_.size(); worker-- > 0;) {
      if (!step->arrived[worker]) receive_from(worker, step->layer, step);
      entries[worker] = {step->arrived[worker] ? -1 : links_[worker]->fd, POLLIN, 0};
      if (!step->arrived[worker]) late = worker;
    }
    if (step->missing == 0) break;
    const Deadline now = Clock::now();
    if (now >= deadline) {
      fail(late, step->layer, "no answer within " + std::to_string(config_.step_timeout_ms) + " ms");
    }
    if (now < spin_until) continue;
    const int ready = ::poll(entries.data(), entries.size(), wire::poll_timeout_ms(deadline));
    if (ready < 0 && errno == EINTR && interrupted && interrupted()) {
      forget(ticket);
      return false;
    }
  }

  const size_t values = size_t{step->num_tokens} * config_.hidden_size;
  std::memcpy(sum, step->partial_sums[0].data(), 4 * values);
  for (size_t worker = 1; worker < links_.size(); ++worker) {
    const float* partial = step->partial_sums[worker].data();
    for (size_t i = 0; i < values; ++i) sum[i] += partial[i];
  }
  last_compute_us_ = step->compute_us;
  forget(ticket);
  return true;
}

Transport::Step& Transport::new_step(uint32_t layer, uint16_t lane, uint32_t num_tokens) {
  if (in_flight_.size() == kMaxTickets) forget(in_flight_.front()->sequence);
  std::unique_ptr<Step> step;
  if (spare_.empty()) {
    step = std::make_unique<Step>();
    step->partial_sums.resize(links_.size());
  } else {
    step = std::move(spare_.back());
    spare_.pop_back();
  }
  step->sequence = ++last_sequence_;
  step->layer = layer;
  step->lane = lane;
  step->num_tokens = num_tokens;
  step->missing = links_.size();
  step->arrived.assign(links_.size(), 0);
  step->compute_us.assign(links_.size(), 0);
  const size_t values = size_t{num_tokens} * config_.hidden_size;
  for (std::vector<float>& partial : step->partial_sums) {
    if (partial.size() < values) partial.resize(values);
  }
  in_flight_.push_back(std::move(step));
  return *in_flight_.back();
}

Transport::Step* Transport::find(uint64_t ticket) const {
  for (const auto& step : in_flight_) {
    if (step->sequence == ticket) return step.get();
  }
  return nullptr;
}

void Transport::forget(uint64_t ticket) {
  const auto found = std::find_if(in_flight_.begin(), in_flight_.end(),
                                  [ticket](const auto& step) { return step->sequence == ticket; });
  for (auto& link : links_) {
    if (link->step != found->get()) continue;
    link->step = nullptr;  // the rest of that reply is dropped
    link->scratch.resize(std::max(link->scratch.size(), kDropChunkBytes));
  }
  spare_.push_back(std::move(*found));
  in_flight_.erase(found);
}

uint32_t Transport::ticket_tokens(uint64_t ticket) const {
  const std::lock_guard lock(mutex_);
  const Step* step = find(ticket);
  check_open(step != nullptr ? std::optional(step->layer) : std::nullopt);
  if (step == nullptr) {
    throw std::invalid_argument("ticket: got " + std::to_string(ticket) + ", expected one that is in flight");
  }
  return step->num_tokens;
}

std::vector<uint32_t> Transport::last_compute_us() const {
  const std::lock_guard lock(mutex_);
  return last_compute_us_;
}

// A worker that refuses a step says why before it closes, and the send fails before that is read: read it
// first.
void Transport::fail_to_send(size_t worker, uint32_t layer, int error) {
  receive_from(worker, layer, nullptr);
  fail(worker, layer, "the connection failed: " + wire::error_text(error));
}

void Transport::fail(size_t worker, uint32_t layer, const std::string& reason) {
  closed_because_ = reason;
  lost_worker_ = worker;
  close_sockets();
  throw TransportError(worker, layer, reason);
}

void Transport::check_open(std::optional<uint32_t> layer) const {
  if (!closed_) return;
  const std::string why = closed_because_.empty() ? "the transport is closed"
                                                  : "the transport is closed since: " + closed_because_;
  throw TransportError(lost_worker_, layer, why);
}

void Transport::close() {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  uint8_t frame[kFrameHeaderBytes];
  wire::encode_frame_header({FrameType::kClose, 0, last_sequence_}, frame);
  for (auto& link : links_) wire::send_some(link->fd, {frame, sizeof(frame), nullptr, 0}, 0);
  close_sockets();
}

void Transport::close_sockets() {
  for (auto& link : links_) {
    if (link->fd >= 0) ::close(link->fd);
    link->fd = -1;
    link->next_frame();
  }
  in_flight_.clear();
  closed_ = true;
}

bool Transport::closed() const {
  const std::lock_guard lock(mutex_);
  return closed_;
}

}  // namespace duck
