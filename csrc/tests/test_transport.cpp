// The transport against workers that are threads of this test: order of sums, large steps, calls from several
// threads, and workers that go away and are replaced. Meant to run under the sanitizers too.
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "tests/check.h"
#include "transport/transport.h"
#include "wire/frame.h"
#include "wire/socket_io.h"

using namespace duck;

namespace {

constexpr uint32_t kHidden = 33;
constexpr uint32_t kTopK = 2;

bool read_exactly(int fd, uint8_t* out, size_t bytes) {
  for (size_t got = 0; got < bytes;) {
    const ssize_t now = ::read(fd, out + got, bytes - got);
    if (now <= 0) return false;
    got += static_cast<size_t>(now);
  }
  return true;
}

bool write_exactly(int fd, const std::vector<uint8_t>& data) {
  for (size_t sent = 0; sent < data.size();) {
    const ssize_t now = ::send(fd, data.data() + sent, data.size() - sent, MSG_NOSIGNAL);
    if (now <= 0) return false;
    sent += static_cast<size_t>(now);
  }
  return true;
}

// Answers every step with (worker + 1) * x, until the connection ends or `steps` are answered.
void serve(int fd, int worker, int steps) {
  std::vector<uint8_t> payload;
  for (int step = 0; step < steps; ++step) {
    uint8_t head[wire::kFrameHeaderBytes];
    if (!read_exactly(fd, head, sizeof(head))) break;
    const wire::FrameHeader frame = wire::decode_frame_header(head);
    if (frame.type != wire::FrameType::kStepRequest) break;
    payload.resize(frame.payload_bytes);
    if (!read_exactly(fd, payload.data(), payload.size())) break;
    const wire::StepRequestHeader request = wire::decode_step_request_header(payload.data());
    wire::StepReplyHeader reply;
    reply.layer = request.layer;
    reply.lane = request.lane;
    reply.num_tokens = request.num_tokens;
    const size_t values = size_t{request.num_tokens} * kHidden;
    const auto* x = reinterpret_cast<const float*>(payload.data() + wire::kStepRequestHeaderBytes +
                                                   size_t{request.num_tokens} * request.top_k * 8);
    std::vector<uint8_t> out(wire::kFrameHeaderBytes + wire::kStepReplyHeaderBytes + 4 * values);
    const auto payload_bytes = static_cast<uint32_t>(wire::step_reply_bytes(reply, kHidden));
    wire::encode_frame_header({wire::FrameType::kStepReply, payload_bytes, frame.sequence}, out.data());
    wire::encode_step_reply_header(reply, out.data() + wire::kFrameHeaderBytes);
    auto* y = reinterpret_cast<float*>(out.data() + wire::kFrameHeaderBytes + wire::kStepReplyHeaderBytes);
    for (size_t i = 0; i < values; ++i) y[i] = static_cast<float>(worker + 1) * x[i];
    if (!write_exactly(fd, out)) break;
  }
  ::close(fd);
}

// A transport whose workers are threads.
struct Flock {
  explicit Flock(int count, uint32_t max_tokens, int steps = 1 << 30, int64_t timeout_ms = 20'000) {
    std::vector<Transport::Peer> ours;
    for (int worker = 0; worker < count; ++worker) {
      int pair[2];
      CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
      ours.push_back({pair[0]});
      threads.emplace_back(serve, pair[1], worker, steps);
    }
    TransportConfig config;
    config.hidden_size = kHidden;
    config.top_k = kTopK;
    config.max_step_tokens = max_tokens;
    config.step_timeout_ms = timeout_ms;
    transport = std::make_unique<Transport>(ours, config);
  }
  ~Flock() {
    transport.reset();
    for (std::thread& thread : threads) thread.join();
  }

  uint64_t submit(const std::vector<float>& x) {
    const auto tokens = static_cast<uint32_t>(x.size() / kHidden);
    const std::vector<int32_t> ids(tokens * kTopK, 1);
    const std::vector<float> weights(tokens * kTopK, 1.0f);
    return transport->submit(7, 0, tokens, kTopK, x.data(), ids.data(), weights.data());
  }

  std::unique_ptr<Transport> transport;
  std::vector<std::thread> threads;
};

std::vector<float> random_rows(uint32_t tokens, uint32_t seed) {
  std::minstd_rand random(seed + 1);
  std::vector<float> x(size_t{tokens} * kHidden);
  for (float& value : x) value = static_cast<float>(random() % 100000) / 1000.0f - 50.0f;
  return x;
}

std::vector<float> expected_sum(const std::vector<float>& x, int workers) {
  std::vector<float> sum = x;
  for (int worker = 1; worker < workers; ++worker) {
    for (size_t i = 0; i < x.size(); ++i) sum[i] += static_cast<float>(worker + 1) * x[i];
  }
  return sum;
}

void many_steps_in_flight(int workers, uint32_t tokens) {
  Flock flock(workers, tokens);
  std::vector<std::vector<float>> inputs;
  std::vector<uint64_t> tickets;
  for (uint32_t step = 0; step < 20; ++step) {
    inputs.push_back(random_rows(1 + (step * 7) % tokens, step));
    tickets.push_back(flock.submit(inputs.back()));
  }
  for (size_t step = tickets.size(); step-- > 0;) {
    std::vector<float> sum(inputs[step].size());
    flock.transport->wait(tickets[step], sum.data());
    CHECK(sum == expected_sum(inputs[step], workers));
  }
}

void calls_from_several_threads() {
  Flock flock(3, 4);
  std::atomic<bool> over{false};
  std::thread reader([&flock, &over] {  // of times, while steps are under way
    while (!over) {
      for (const LayerTimes& each : flock.transport->step_times()) CHECK(each.num_steps <= 200);
    }
  });
  std::vector<std::thread> callers;
  for (uint32_t caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&flock, caller] {
      for (uint32_t step = 0; step < 50; ++step) {
        const std::vector<float> x = random_rows(1 + step % 4, 1000 * caller + step);
        std::vector<float> sum(x.size());
        flock.transport->wait(flock.submit(x), sum.data());
        CHECK(sum == expected_sum(x, 3));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  over = true;
  reader.join();
  const std::vector<LayerTimes> times = flock.transport->step_times();
  CHECK(times.size() == 1);
  CHECK(times[0].layer == 7);
  CHECK(times[0].num_steps == 200);
  CHECK(times[0].compute_us.size() == 3);
}

int lost_worker(Transport& transport, uint64_t ticket, std::vector<float>& sum) {
  try {
    transport.wait(ticket, sum.data());
  } catch (const TransportError& error) {
    CHECK(error.layer() == 7u);
    return static_cast<int>(error.worker());
  }
  return -1;
}

// A new connection in a worker's place; its other end is served by a thread of the flock.
void put_in_place(Flock& flock, size_t worker, int steps = 1 << 30) {
  int pair[2];
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
  flock.threads.emplace_back(serve, pair[1], static_cast<int>(worker), steps);
  flock.transport->replace(worker, {pair[0]});
}

void a_worker_that_leaves() {
  Flock flock(2, 4, 3);
  const std::vector<float> x = random_rows(2, 1);
  std::vector<float> sum(x.size());
  for (int step = 0; step < 3; ++step) flock.transport->wait(flock.submit(x), sum.data());
  for (int again = 0; again < 3; ++again) {
    const int lost = lost_worker(*flock.transport, flock.submit(x), sum);
    CHECK(lost == 0 || lost == 1);
  }
  CHECK(!flock.transport->closed());
  flock.transport->give_up();
  for (const size_t worker : flock.transport->lost()) put_in_place(flock, worker);
  // Of the two, only the first to be missed may be known to be lost.
  for (int again = 0; again < 2; ++again) {
    const int lost = lost_worker(*flock.transport, flock.submit(x), sum);
    if (lost >= 0) put_in_place(flock, static_cast<size_t>(lost));
  }
  CHECK(flock.transport->wait(flock.submit(x), sum.data()));
  CHECK(sum == expected_sum(x, 2));
}

// Workers that serve a few steps each and are replaced while several steps of any size are in flight.
void replacements(int workers, uint32_t tokens) {
  Flock flock(workers, tokens, 3);
  std::vector<std::vector<float>> inputs;
  std::vector<uint64_t> tickets;
  int replaced = 0;
  for (uint32_t step = 0; step < 24; ++step) {
    inputs.push_back(random_rows(1 + (step * 7) % tokens, step));
    tickets.push_back(flock.submit(inputs.back()));
    if (step % 4 < 3) continue;
    for (size_t index = tickets.size(); index-- > tickets.size() - 4;) {
      std::vector<float> sum(inputs[index].size());
      for (int lost = 0; (lost = lost_worker(*flock.transport, tickets[index], sum)) >= 0; ++replaced) {
        put_in_place(flock, static_cast<size_t>(lost), 5);
      }
      CHECK(sum == expected_sum(inputs[index], workers));
    }
  }
  CHECK(replaced >= workers);
}

// What the old connection sent is used if it came before, and never after.
void late_answers() {
  Flock flock(2, 4);
  int pair[2];
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
  flock.transport->replace(1, {pair[0]});  // nobody serves it
  const std::vector<float> x = random_rows(1, 9);
  std::vector<float> sum(x.size());
  std::vector<size_t> late;
  for (const bool in_time : {true, false}) {
    const uint64_t ticket = flock.submit(x);
    CHECK(flock.transport->wait_some(ticket, 20, late));
    CHECK(late == std::vector<size_t>{1});
    std::vector<uint8_t> reply(wire::kFrameHeaderBytes + wire::kStepReplyHeaderBytes + 4 * x.size());
    wire::StepReplyHeader header;
    header.layer = 7;
    header.num_tokens = 1;
    const auto bytes = static_cast<uint32_t>(wire::step_reply_bytes(header, kHidden));
    wire::encode_frame_header({wire::FrameType::kStepReply, bytes, ticket}, reply.data());
    wire::encode_step_reply_header(header, reply.data() + wire::kFrameHeaderBytes);  // its sums are zeros
    if (in_time) CHECK(write_exactly(pair[1], reply));
    int next[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, next) == 0);
    if (in_time) {
      flock.transport->replace(1, {next[0]});
    } else {
      flock.threads.emplace_back(serve, next[1], 1, 1 << 30);
      flock.transport->replace(1, {next[0]});
      CHECK(!write_exactly(pair[1], reply));
    }
    CHECK(flock.transport->wait(ticket, sum.data()));
    CHECK(sum == (in_time ? x : expected_sum(x, 2)));
    ::close(pair[1]);
    pair[1] = next[1];
  }
}

void close_while_another_thread_submits() {
  Flock flock(2, 4);
  std::atomic<bool> started{false};
  std::thread caller([&] {
    const std::vector<float> x = random_rows(1, 1);
    std::vector<float> sum(x.size());
    try {
      for (;;) {
        flock.transport->wait(flock.submit(x), sum.data());
        started = true;
      }
    } catch (const TransportError&) {
    }
  });
  while (!started) std::this_thread::yield();
  flock.transport->close();
  caller.join();
}

}  // namespace

int main() {
  many_steps_in_flight(1, 3);
  many_steps_in_flight(3, 5000);  // larger than the socket buffers
  many_steps_in_flight(8, 40);
  calls_from_several_threads();
  a_worker_that_leaves();
  replacements(2, 4);
  replacements(3, 5000);
  late_answers();
  close_while_another_thread_submits();
  return duck::test::report();
}
