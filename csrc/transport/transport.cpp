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

uint64_t clock_ns(Clock::time_point moment) {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(moment.time_since_epoch()).count());
}

}  // namespace

Transport::Transport(std::vector<Peer> peers, const TransportConfig& config,
                     std::unique_ptr<MulticastSender> multicast)
    : config_(config), multicast_(std::move(multicast)) {
  for (Peer& peer : peers) {
    links_.push_back(std::make_unique<Link>());
    connect(*links_.back(), std::move(peer));
  }
  entries_.resize(links_.size() * wire::Stream::kPollEntries + 1);
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

Transport::~Transport() {
  if (!made_.is_forked()) {
    close();
    return;
  }
  // The connections are still the other process's, and so may the mutex be.
  for (auto& link : links_) {
    if (link->fd >= 0) ::close(link->fd);
  }
}

void Transport::connect(Link& link, Peer peer) {
  link.fd = peer.fd;
  link.stream = wire::Stream(peer.fd, std::move(peer.memory));
  link.multicast_bytes = multicast_ == nullptr ? 0 : peer.multicast_bytes;
  link.heard_nothing = 0;
  link.clock.reset();
  wire::set_connection_options(peer.fd);
}

uint64_t Transport::submit(uint32_t layer, uint16_t lane, uint32_t num_tokens, uint32_t top_k, const float* x,
                           const int32_t* topk_ids, const float* topk_weights) {
  const std::lock_guard lock(mutex_);
  host_time_.begin();
  check_open();
  check_range("step tokens", num_tokens, config_.max_step_tokens);
  check_range("step top_k", top_k, config_.top_k);
  const std::shared_ptr<Step> step = new_step(layer, lane, num_tokens);
  step->top_k = top_k;

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
  step->request_bytes = kFrameHeaderBytes + payload_bytes;
  if (step->request.size() < step->request_bytes) step->request.resize(step->request_bytes);

  uint8_t* out = step->request.data();
  wire::encode_frame_header({FrameType::kStepRequest, static_cast<uint32_t>(payload_bytes), step->sequence},
                            out);
  wire::encode_step_request_header(header, out + kFrameHeaderBytes);
  std::memcpy(out + kRequestHeadBytes, topk_ids, list_bytes);
  std::memcpy(out + kRequestHeadBytes + list_bytes, topk_weights, list_bytes);
  if (config_.x_type == ActivationType::kBf16) {
    wire::encode_bf16(x, values, out + kRequestHeadBytes + 2 * list_bytes);
  } else {
    std::memcpy(out + kRequestHeadBytes + 2 * list_bytes, x, 4 * values);
  }
  host_time_.lap(HostTime::kPack);
  begin_multicast(step);
  for (size_t worker = 0; worker < links_.size(); ++worker) {
    if (!step->by_multicast[worker]) send_request(worker, step);
  }
  send_until(wire::deadline_after_ms(config_.submit_timeout_ms));
  if (trace_ != nullptr) step->dispatched = Clock::now();
  return step->sequence;
}

void Transport::send_request(size_t worker, const std::shared_ptr<Step>& step) {
  step->by_multicast[worker] = 0;
  Link& link = *links_[worker];
  if (link.fd >= 0) link.unsent.push_back({.step = step, .bytes = step->request_bytes});
}

// Sends what is unsent until the deadline. Where buffers are full, a worker may itself be waiting for us to
// take a reply, so both directions are served.
void Transport::send_until(Deadline until) {
  for (;;) {
    size_t unsent = send_multicast() ? 0 : 1;
    for (size_t worker = 0; worker < links_.size(); ++worker) {
      send_to(worker);
      unsent += !links_[worker]->unsent.empty();
    }
    host_time_.lap(HostTime::kSend);
    if (unsent == 0 || Clock::now() >= until) return;
    if (!sleep(nullptr, until)) continue;
    for (size_t worker = 0; worker < links_.size(); ++worker) {
      if (links_[worker]->woken) receive_from(worker, nullptr);
    }
    host_time_.lap(HostTime::kReceive);
  }
}

// Sleeps until something may have come from a worker that has not answered the step, or one that has not been
// sent everything takes more of it; `woken` says from whom. False when a signal came.
bool Transport::sleep(const Step* step, Deadline until) {
  bool ready = false;
  for (size_t worker = 0; worker < links_.size(); ++worker) {
    Link& link = *links_[worker];
    pollfd* entries = &entries_[worker * wire::Stream::kPollEntries];
    const bool unsent = !link.unsent.empty();
    link.woken = false;
    // Whoever gets steps by multicast may have a question at any time.
    const bool may_speak = step != nullptr && (!step->arrived[worker] || link.multicast_bytes > 0);
    if (link.fd >= 0 && (unsent || may_speak)) {
      link.woken = link.stream.announce_sleep(true, unsent, entries);
      ready |= link.woken;
    } else {
      entries[0] = entries[1] = {-1, 0, 0};
    }
  }
  entries_.back() = {unsent_multicast_.empty() ? -1 : multicast_->fd(), POLLOUT, 0};
  const int count = ready ? 0 : ::poll(entries_.data(), entries_.size(), wire::poll_timeout_ms(until));
  const bool signalled = count < 0 && errno == EINTR;
  for (size_t worker = 0; worker < links_.size(); ++worker) {
    pollfd* entries = &entries_[worker * wire::Stream::kPollEntries];
    if (entries[0].fd < 0) continue;
    if (count < 0) entries[0].revents = entries[1].revents = 0;
    links_[worker]->woken |= links_[worker]->stream.end_sleep(entries);
  }
  host_time_.lap(HostTime::kSleep);
  return !signalled;
}

// Sends a worker as much as it takes without waiting.
void Transport::send_to(size_t worker) {
  Link& link = *links_[worker];
  while (!link.unsent.empty()) {
    const wire::TwoParts message = link.unsent.front().parts();
    if (trace_ != nullptr && link.unsent.front().is_request() && link.sent_bytes == 0) {
      link.unsent.front().step->answers[worker].sent_from = Clock::now();
    }
    const IoResult result = link.stream.send(message, link.sent_bytes);
    if (result.state == IoState::kWouldWait) return;
    if (result.state == IoState::kFailed) {
      // A worker that refuses a step says why before it closes, and the send fails before that is read.
      receive_from(worker, nullptr);
      return lose(worker, "the connection failed: " + wire::error_text(result.error));
    }
    link.sent_bytes += result.bytes;
    if (link.sent_bytes < message.total_bytes()) continue;
    link.unsent.pop_front();
    link.sent_bytes = 0;
  }
}

bool Transport::wait(uint64_t ticket, float* sum, const std::function<bool()>& interrupted) {
  const std::lock_guard lock(mutex_);
  const std::shared_ptr<Step> step = find_or_throw(ticket);
  if (wait_until(*step, wire::kNever, interrupted) == Waited::kInterrupted) return false;
  take_sum(*step, sum);
  return true;
}

bool Transport::poll(uint64_t ticket, float* sum) {
  const std::lock_guard lock(mutex_);
  const std::shared_ptr<Step> step = find_or_throw(ticket);
  if (wait_until(*step, Clock::now(), nullptr) == Waited::kTimedOut) return false;
  take_sum(*step, sum);
  return true;
}

// Of a step that every worker has answered, which is over then.
void Transport::take_sum(const Step& step, float* sum) {
  const size_t values = size_t{step.num_tokens} * config_.hidden_size;
  std::memcpy(sum, step.partial_sums[0].data(), 4 * values);
  host_time_.lap(HostTime::kCombine);
  for (size_t worker = 0; worker < links_.size(); ++worker) {
    last_compute_us_[worker] = step.answers[worker].compute_us;
  }
  if (!step.sent_again) {
    times_.record(step.layer, step.num_tokens, step.submitted, step.waited_from, step.answers);
    if (trace_ != nullptr) trace_step(step);
  }
  forget(step.sequence);
}

// Of a step that was sent to each worker once, before it is forgotten.
void Transport::trace_step(const Step& step) {
  moments_.assign(links_.size(), {});
  const uint64_t submitted_ns = clock_ns(step.submitted);
  for (size_t worker = 0; worker < links_.size(); ++worker) {
    const StepTimes::Answer& answer = step.answers[worker];
    WorkerMoments& at = moments_[worker];
    at.taken_ns = clock_ns(answer.arrived);
    // By multicast a request leaves for everybody at once.
    const uint64_t sent_ns = std::max(submitted_ns, clock_ns(answer.sent_from));
    ClockOffset& clock = links_[worker]->clock;
    clock.add(sent_ns, answer.started_ns, answer.finished_ns, at.taken_ns);
    if (!clock.known()) continue;
    at.error_ns = clock.error_at(at.taken_ns);
    at.free_ns = std::max(sent_ns, clock.to_host(answer.idle_since_ns));
    at.started_ns = clock.to_host(answer.started_ns);
    at.finished_ns = clock.to_host(answer.finished_ns);
  }
  const StepMoments moments{step.sequence,
                            step.layer,
                            step.num_tokens,
                            step.lane,
                            submitted_ns,
                            std::max(submitted_ns, clock_ns(step.dispatched)),
                            clock_ns(step.waited_from),
                            clock_ns(Clock::now())};
  trace_->record(moments, moments_, reinterpret_cast<const int32_t*>(step.request.data() + kRequestHeadBytes),
                 size_t{step.num_tokens} * step.top_k);
}

void Transport::set_trace(std::shared_ptr<StepTrace> trace) {
  const std::lock_guard lock(mutex_);
  trace_ = std::move(trace);
}

std::vector<size_t> Transport::late() const {
  const std::lock_guard lock(mutex_);
  std::vector<size_t> late;
  for (size_t worker = 0; worker < links_.size(); ++worker) {
    const auto is_missing = [worker](const auto& step) { return step->arrived[worker] == 0; };
    if (std::any_of(in_flight_.begin(), in_flight_.end(), is_missing)) late.push_back(worker);
  }
  return late;
}

bool Transport::wait_some(uint64_t ticket, int64_t ms, std::vector<size_t>& late,
                          const std::function<bool()>& interrupted) {
  const std::lock_guard lock(mutex_);
  const std::shared_ptr<Step> step = find_or_throw(ticket);
  const Waited waited = wait_until(*step, wire::deadline_after_ms(ms), interrupted);
  late.clear();
  for (size_t worker = 0; worker < links_.size(); ++worker) {
    if (!step->arrived[worker]) late.push_back(worker);
  }
  return waited != Waited::kInterrupted;
}

Transport::Waited Transport::wait_until(Step& step, Deadline until,
                                        const std::function<bool()>& interrupted) {
  host_time_.begin();
  const Deadline start = Clock::now();
  if (step.deadline == wire::kNever) {
    step.deadline = start + std::chrono::milliseconds(config_.step_timeout_ms);
    step.waited_from = start;
  }
  const Deadline spin_until = start + std::chrono::microseconds(config_.spin_us);
  for (auto& link : links_) link->woken = false;
  // Out of a sleep it is known from whom something has come: to ask all others each time would be as many
  // calls as workers times replies.
  bool ask_all = true;
  for (;;) {
    send_multicast();
    const Deadline announce_at = announce_late_steps();
    size_t late = links_.size();
    size_t lost = links_.size();
    for (size_t worker = links_.size(); worker-- > 0;) {
      const Link& link = *links_[worker];
      if (!step.arrived[worker]) {
        if (ask_all || link.woken) receive_from(worker, &step);
      } else if (link.woken) {
        receive_from(worker, nullptr);
      }
      send_to(worker);
      if (!step.arrived[worker]) (link.fd >= 0 ? late : lost) = worker;
    }
    host_time_.lap(HostTime::kReceive);
    add_in_order(step);
    host_time_.lap(HostTime::kCombine);
    if (step.missing == 0) return Waited::kComplete;
    if (lost < links_.size()) throw TransportError(lost, step.layer, links_[lost]->lost_because);
    const Deadline now = Clock::now();
    if (now >= step.deadline) {
      lose(late, "no answer within " + std::to_string(config_.step_timeout_ms) + " ms");
      continue;
    }
    if (now >= until) return Waited::kTimedOut;
    if (now < spin_until) continue;
    ask_all = false;
    if (sleep(&step, std::min({until, step.deadline, announce_at})) || !interrupted || !interrupted())
      continue;
    forget(step.sequence);
    return Waited::kInterrupted;
  }
}

// Adds the sums of workers that have answered to the first one's, as far as none before them is missing.
void Transport::add_in_order(Step& step) const {
  for (; step.num_added < links_.size() && step.arrived[step.num_added]; ++step.num_added) {
    if (step.num_added == 0) continue;
    float* sum = step.partial_sums[0].data();
    const float* partial = step.partial_sums[step.num_added].data();
    const size_t values = size_t{step.num_tokens} * config_.hidden_size;
    for (size_t i = 0; i < values; ++i) sum[i] += partial[i];
  }
}

std::shared_ptr<Transport::Step> Transport::new_step(uint32_t layer, uint16_t lane, uint32_t num_tokens) {
  if (in_flight_.size() == kMaxTickets) forget(in_flight_.front()->sequence);
  std::shared_ptr<Step> step;
  if (spare_.empty()) {
    step = std::make_shared<Step>();
    step->partial_sums.resize(links_.size());
  } else {
    step = std::move(spare_.back());
    spare_.pop_back();
  }
  step->sequence = ++last_sequence_;
  step->layer = layer;
  step->lane = lane;
  step->num_tokens = num_tokens;
  step->deadline = wire::kNever;
  step->missing = links_.size();
  step->num_added = 0;
  step->arrived.assign(links_.size(), 0);
  step->answers.assign(links_.size(), {});
  step->submitted = Clock::now();
  step->sent_again = false;
  step->by_multicast.assign(links_.size(), 0);
  step->asked.assign(links_.size(), 0);
  step->next_datagram = 0;
  step->announce_at = wire::kNever;
  const size_t values = size_t{num_tokens} * config_.hidden_size;
  for (std::vector<float>& partial : step->partial_sums) {
    if (partial.size() < values) partial.resize(values);
  }
  in_flight_.push_back(step);
  return step;
}

std::shared_ptr<Transport::Step> Transport::find(uint64_t ticket) const {
  for (const auto& step : in_flight_) {
    if (step->sequence == ticket) return step;
  }
  return nullptr;
}

std::shared_ptr<Transport::Step> Transport::find_or_throw(uint64_t ticket) const {
  check_open();
  std::shared_ptr<Step> step = find(ticket);
  if (step == nullptr) {
    throw std::invalid_argument("ticket: got " + std::to_string(ticket) + ", expected one that is in flight");
  }
  return step;
}

void Transport::forget(uint64_t ticket) {
  const auto found = std::find_if(in_flight_.begin(), in_flight_.end(),
                                  [ticket](const auto& step) { return step->sequence == ticket; });
  const std::shared_ptr<Step> step = std::move(*found);
  in_flight_.erase(found);
  std::erase(unsent_multicast_, step);
  bool half_sent = false;
  for (size_t worker = 0; worker < links_.size(); ++worker) {
    auto& link = links_[worker];
    if (link->step == step.get()) {
      link->step = nullptr;  // the rest of that reply is dropped
      link->scratch.resize(std::max(link->scratch.size(), kDropChunkBytes));
    }
    const auto begin = link->unsent.begin() + (link->sent_bytes > 0 ? 1 : 0);
    half_sent |= link->sent_bytes > 0 && link->unsent.front().step == step;  // a frame that is begun must end
    link->unsent.erase(
        std::remove_if(begin, link->unsent.end(), [&](const Message& each) { return each.step == step; }),
        link->unsent.end());
    // A worker that has some of it, or has asked for it, is not to wait for the rest.
    if (step->awaited_by_multicast(worker) || (step->asked[worker] && !step->arrived[worker])) {
      say_over(worker, ticket);
    }
  }
  if (!half_sent) spare_.push_back(step);
}

void Transport::give_up() {
  const std::lock_guard lock(mutex_);
  while (!in_flight_.empty()) forget(in_flight_.back()->sequence);
}

std::vector<std::string> Transport::describe() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> words;
  for (const auto& link : links_) {
    words.push_back(link->fd < 0 ? "lost" : link->stream.describe());
    if (link->fd >= 0 && link->multicast_bytes > 0) words.back() += "; " + multicast_->describe();
  }
  return words;
}

uint32_t Transport::ticket_tokens(uint64_t ticket) const {
  const std::lock_guard lock(mutex_);
  return find_or_throw(ticket)->num_tokens;
}

std::vector<uint32_t> Transport::last_compute_us() const {
  const std::lock_guard lock(mutex_);
  return last_compute_us_;
}

void Transport::drop(size_t worker, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (worker < links_.size()) lose(worker, reason);
}

void Transport::look() {
  const std::lock_guard lock(mutex_);
  for (size_t worker = 0; worker < links_.size(); ++worker) {
    Link& link = *links_[worker];
    if (link.fd < 0) continue;
    link.stream.wait(wire::Direction::kRead, wire::Clock::now());  // which sees an end beside shared memory
    receive_from(worker, nullptr);
  }
}

std::vector<size_t> Transport::lost() const {
  const std::lock_guard lock(mutex_);
  std::vector<size_t> lost;
  for (size_t worker = 0; worker < links_.size(); ++worker) {
    if (links_[worker]->fd < 0) lost.push_back(worker);
  }
  return lost;
}

void Transport::replace(size_t worker, Peer peer) {
  const std::lock_guard lock(mutex_);
  if (closed_ || worker >= links_.size()) {
    ::close(peer.fd);
    check_open();
    throw std::invalid_argument("worker: got " + std::to_string(worker) + ", expected one below " +
                                std::to_string(links_.size()));
  }
  receive_from(worker, nullptr);
  lose(worker, "another took its place");
  Link& link = *links_[worker];
  connect(link, std::move(peer));
  if (trace_ != nullptr) trace_->record_replaced(worker, clock_ns(Clock::now()));
  for (const auto& step : in_flight_) {
    step->deadline = wire::kNever;
    step->sent_again = true;
    step->asked[worker] = 0;
    if (!step->arrived[worker]) send_request(worker, step);
  }
  send_to(worker);
}

void Transport::lose(size_t worker, const std::string& reason) {
  Link& link = *links_[worker];
  if (link.fd < 0) return;
  ::close(link.fd);
  link.fd = -1;
  link.stream = {};
  link.lost_because = reason;
  link.unsent.clear();
  link.sent_bytes = 0;
  link.next_frame();
  link.put_back(nullptr, 0);
}

void Transport::measure_host_time(bool on) {
  const std::lock_guard lock(mutex_);
  host_time_.measure(on);
}

std::array<HostTime::Spent, HostTime::kNumParts> Transport::host_time() const {
  const std::lock_guard lock(mutex_);
  return host_time_.spent();
}

void Transport::check_open() const {
  if (closed_) throw TransportError(0, std::nullopt, "the transport is closed");
}

void Transport::close() {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  uint8_t frame[kFrameHeaderBytes];
  wire::encode_frame_header({FrameType::kClose, 0, last_sequence_}, frame);
  for (auto& link : links_) {
    if (link->fd >= 0 && link->sent_bytes == 0) {
      link->stream.send({frame, sizeof(frame), nullptr, 0}, 0);
    }
  }
  close_sockets();
}

void Transport::close_sockets() {
  for (size_t worker = 0; worker < links_.size(); ++worker) lose(worker, "the transport is closed");
  in_flight_.clear();
  unsent_multicast_.clear();
  closed_ = true;
}

bool Transport::closed() const {
  const std::lock_guard lock(mutex_);
  return closed_;
}

}  // namespace duck
