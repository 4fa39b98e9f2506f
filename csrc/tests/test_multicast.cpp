// Requests by multicast: tags and datagrams, what a worker makes of loss, duplicates, disorder and hostile
// bytes, and a whole flock behind a lossy relay. Datagrams go over socket pairs, so no network is needed.
// Meant to run under the sanitizers too.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "tests/check.h"
#include "tests/step_worker.h"
#include "transport/transport.h"
#include "wire/datagram.h"
#include "wire/frame.h"
#include "worker/multicast_receiver.h"

using namespace duck;

namespace {

using test::kHidden;
using test::kLayer;
using test::kMaxTokens;
using test::kTopK;
using test::random_step;
using test::Step;
using test::Worker;

using Bytes = std::vector<uint8_t>;

wire::MulticastSession make_session(uint32_t fragment_bytes) {
  wire::MulticastSession session;
  session.session = 0x1122334455667788;
  session.fragment_bytes = fragment_bytes;
  for (size_t i = 0; i < wire::kSipKeyBytes; ++i) session.key.bytes[i] = static_cast<uint8_t>(i);
  return session;
}

// Of the authors' own test vectors: key 00 01 .. 0f, message 00 01 .. of 0, 8 and 15 bytes.
void tags_are_siphash() {
  const wire::SipKey key = make_session(64).key;
  Bytes message(15);
  for (size_t i = 0; i < message.size(); ++i) message[i] = static_cast<uint8_t>(i);
  CHECK(wire::siphash(key, message.data(), 0, message.data(), 0) == 0x726fdb47dd0e0e31);
  CHECK(wire::siphash(key, message.data(), 8, message.data(), 0) == 0x93f5f5799a932462);
  CHECK(wire::siphash(key, message.data(), 0, message.data(), 8) == 0x93f5f5799a932462);
  CHECK(wire::siphash(key, message.data(), 8, message.data() + 8, 7) == 0xa129ca6149be45e5);
}

Bytes datagram(const wire::MulticastSession& session, uint64_t sequence, const Bytes& frame, uint32_t index) {
  const auto frame_bytes = static_cast<uint32_t>(frame.size());
  const uint32_t bytes = wire::fragment_size(frame_bytes, session.fragment_bytes, index);
  const uint8_t* fragment = frame.data() + size_t{index} * session.fragment_bytes;
  Bytes out(wire::kDatagramHeaderBytes + bytes);
  wire::encode_datagram_header(session, {sequence, frame_bytes, index}, fragment, out.data());
  std::memcpy(out.data() + wire::kDatagramHeaderBytes, fragment, bytes);
  return out;
}

void only_the_sessions_own_datagrams_are_taken() {
  const wire::MulticastSession session = make_session(64);
  const Bytes frame = random_step(1, 1).frame(5);
  const uint32_t last = wire::fragment_count(static_cast<uint32_t>(frame.size()), 64) - 1;
  const Bytes good = datagram(session, 5, frame, last);
  const auto header = wire::decode_datagram(session, good.data(), good.size());
  CHECK(header && header->sequence == 5 && header->frame_bytes == frame.size() && header->index == last);
  for (size_t bit = 0; bit < 8 * good.size(); ++bit) {
    Bytes bad = good;
    bad[bit / 8] ^= static_cast<uint8_t>(1 << (bit % 8));
    CHECK(!wire::decode_datagram(session, bad.data(), bad.size()));
  }
  for (size_t bytes = 0; bytes < good.size(); ++bytes) {
    CHECK(!wire::decode_datagram(session, good.data(), bytes));
  }
  Bytes longer = good;
  longer.push_back(0);
  CHECK(!wire::decode_datagram(session, longer.data(), longer.size()));
  wire::MulticastSession other = session;
  other.key.bytes[15] ^= 1;
  CHECK(!wire::decode_datagram(other, good.data(), good.size()));
  other = session;
  ++other.session;
  CHECK(!wire::decode_datagram(other, good.data(), good.size()));
}

// A receiver, and the end of its socket that datagrams are written to.
struct Ear {
  explicit Ear(const wire::MulticastSession& its_session) : session(its_session) {
    int pair[2];
    CHECK(::socketpair(AF_UNIX, SOCK_DGRAM, 0, pair) == 0);
    fd = pair[0];
    receiver = std::make_shared<MulticastReceiver>(pair[1], session);
    receiver->set_limit(1 << 20);
  }
  ~Ear() { ::close(fd); }

  void hear(const Bytes& bytes) {
    CHECK(::send(fd, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
    receiver->receive();
  }
  void hear(uint64_t sequence, const Bytes& frame, uint32_t index) {
    hear(datagram(session, sequence, frame, index));
  }
  // The ranges of the question that is due, empty where none is.
  std::vector<std::pair<uint32_t, uint32_t>> asked(uint64_t sequence, const Bytes& frame, uint32_t received,
                                                   wire::Deadline now) {
    std::vector<std::pair<uint32_t, uint32_t>> ranges;
    const auto question = receiver->due(now);
    if (!question) return ranges;
    const wire::FrameHeader header = wire::decode_frame_header(question->data());
    CHECK(header.type == wire::FrameType::kStepMissing && header.sequence == sequence);
    const wire::StepMissing missing = wire::decode_step_missing(
        question->data() + wire::kFrameHeaderBytes, header.payload_bytes,
        wire::fragment_count(static_cast<uint32_t>(frame.size()), session.fragment_bytes));
    CHECK(missing.received == received);
    for (const auto& range : missing.ranges) ranges.emplace_back(range.first, range.count);
    return ranges;
  }
  bool has(uint64_t sequence, const Bytes& frame) {
    const auto whole = receiver->whole();
    return whole && whole->sequence == sequence &&
           Bytes(whole->frame, whole->frame + whole->frame_bytes) == frame;
  }

  const wire::MulticastSession session;
  std::shared_ptr<MulticastReceiver> receiver;
  int fd = -1;
};

using Ranges = std::vector<std::pair<uint32_t, uint32_t>>;

Bytes some_frame(size_t bytes, uint32_t seed) {
  std::minstd_rand random(seed + 1);
  Bytes frame(bytes);
  for (uint8_t& byte : frame) byte = static_cast<uint8_t>(random());
  return frame;
}

void gaps_are_asked_for_once() {
  Ear ear(make_session(64));
  const Bytes frame = some_frame(64 * 6 + 10, 1);
  for (const uint32_t index : {5u, 0u, 0u, 3u}) ear.hear(7, frame, index);
  const wire::Deadline now = wire::Clock::now();
  CHECK(ear.asked(7, frame, 3, now + 1000 * MulticastReceiver::kQuiet).empty());  // more may be on the way
  CHECK(ear.receiver->next_due() == wire::kNever);
  ear.hear(7, frame, 6);  // the last one
  CHECK((ear.asked(7, frame, 4, wire::Clock::now()) == Ranges{{1, 2}, {4, 1}}));
  CHECK(ear.asked(7, frame, 4, wire::kNever).empty());
  CHECK(ear.receiver->next_due() == wire::kNever);
  ear.hear(7, frame, 1);  // late, and in time
  ear.receiver->put_part(7, 1, frame.data() + 64, 128);
  CHECK(!ear.receiver->whole());
  ear.hear(7, frame, 2);  // late: had by now
  ear.hear(7, frame, 4);  // late, and in time
  CHECK(ear.has(7, frame));
  ear.receiver->over(7);
  CHECK(!ear.receiver->whole() && ear.receiver->is_over(7) && !ear.receiver->is_over(6));
  ear.hear(7, frame, 0);
  const auto& counts = ear.receiver->counts();
  CHECK(counts.taken == 6 && counts.surplus == 3 && counts.asked == 3 && counts.steps == 1);
  CHECK(counts.refused == 0);
}

void a_step_that_never_came_is_asked_for_when_it_is_announced() {
  Ear ear(make_session(64));
  const Bytes frame = some_frame(200, 2);
  ear.receiver->announce(9, 200);
  CHECK(ear.asked(9, frame, 0, wire::Clock::now() - MulticastReceiver::kQuiet).empty());
  CHECK((ear.asked(9, frame, 0, wire::kNever) == Ranges{{0, 4}}));
  ear.receiver->announce(9, 200);
  CHECK(!ear.receiver->due(wire::kNever));
  ear.receiver->over(9);
  ear.receiver->announce(9, 200);
  CHECK(!ear.receiver->due(wire::kNever));
  for (const uint32_t bytes : {0u, 39u, (1u << 20) + 1}) {
    try {
      ear.receiver->announce(10, bytes);
      CHECK(!"refused");
    } catch (const wire::WireError&) {
    }
  }
}

// What came of it is as old as it is; more may be on the way for a while after the last.
void a_lost_tail_is_asked_for_when_the_step_is_announced() {
  Ear ear(make_session(64));
  const Bytes frame = some_frame(300, 10);
  const wire::Deadline start = wire::Clock::now();
  ear.hear(1, frame, 0);
  ear.receiver->announce(1, 300);
  CHECK(ear.receiver->next_due() >= start + MulticastReceiver::kQuiet);
  CHECK(ear.receiver->next_due() <= wire::Clock::now() + MulticastReceiver::kQuiet);
  std::this_thread::sleep_for(2 * MulticastReceiver::kQuiet);
  ear.hear(1, frame, 1);
  CHECK(ear.receiver->next_due() > start + 2 * MulticastReceiver::kQuiet);
  CHECK((ear.asked(1, frame, 2, ear.receiver->next_due()) == Ranges{{2, 3}}));
}

// A later step's datagram says that nothing more comes of an earlier one.
void a_lost_tail_is_noticed_by_the_next_step() {
  Ear ear(make_session(64));
  const Bytes frame = some_frame(200, 3);
  ear.hear(1, frame, 0);
  CHECK(ear.receiver->next_due() == wire::kNever);
  ear.hear(2, frame, 0);
  CHECK((ear.asked(1, frame, 1, wire::Clock::now()) == Ranges{{1, 3}}));
}

void more_steps_than_there_is_room_for() {
  Ear ear(make_session(64));
  const Bytes frame = some_frame(200, 4);
  for (uint64_t sequence = 1; sequence <= MulticastReceiver::kMaxSteps; ++sequence)
    ear.hear(sequence, frame, 0);
  CHECK(ear.receiver->due(wire::kNever));
  ear.hear(100, frame, 0);
  CHECK(ear.receiver->counts().surplus == 1);
  ear.receiver->announce(100, 200);
  CHECK(ear.receiver->next_due() <= wire::Clock::now());
  CHECK((ear.asked(100, frame, 4, wire::Clock::now()) == Ranges{{0, 4}}));
  ear.receiver->over(3);
  for (uint32_t index = 0; index < 4; ++index) ear.hear(100, frame, index);
  CHECK(ear.has(100, frame));
}

void steps_of_long_ago_are_dropped() {
  Ear ear(make_session(64));
  const Bytes frame = some_frame(100, 5);
  ear.receiver->over(1000);
  ear.hear(936, frame, 0);
  CHECK(ear.receiver->counts().surplus == 1);
  ear.hear(937, frame, 0);
  CHECK(ear.receiver->counts().taken == 1);
  CHECK(!ear.receiver->is_over(936) && !ear.receiver->is_over(999));
}

void a_question_names_at_most_so_many_ranges_and_misses_nothing() {
  Ear ear(make_session(64));
  const Bytes frame = some_frame(64 * 2000, 6);
  for (uint32_t index = 1; index < 2000; index += 2) ear.hear(1, frame, index);  // to the last
  const Ranges ranges = ear.asked(1, frame, 1000, wire::kNever);
  CHECK(ranges.size() == wire::kMaxMissingRanges);
  std::vector<int> named(2000);
  for (const auto& [first, count] : ranges) {
    for (uint32_t index = first; index < first + count; ++index) ++named[index];
  }
  for (uint32_t index = 0; index < 2000; index += 2) CHECK(named[index] == 1);
  for (const auto& [first, count] : ranges) {
    ear.receiver->put_part(1, first, frame.data() + size_t{64} * first,
                           std::min<size_t>(size_t{64} * count, frame.size() - size_t{64} * first));
  }
  CHECK(ear.has(1, frame));
}

void parts_that_fit_nothing_are_refused() {
  Ear ear(make_session(64));
  const Bytes frame = some_frame(200, 7);
  ear.receiver->put_part(1, 0, frame.data(), 1);  // of no step: nobody's
  ear.hear(1, frame, 0);
  for (const auto& [first, bytes] : {std::pair<uint32_t, size_t>{1, 63}, {3, 64}, {4, 1}, {UINT32_MAX, 64}}) {
    try {
      ear.receiver->put_part(1, first, frame.data(), bytes);
      CHECK(!"refused");
    } catch (const wire::WireError&) {
    }
  }
  ear.receiver->put_part(1, 1, frame.data() + 64, 136);
  CHECK(ear.has(1, frame));
}

void hostile_datagrams_change_nothing() {
  Ear ear(make_session(64));
  const Bytes frame = some_frame(200, 8);
  std::minstd_rand random(9);
  uint64_t sent = 0;
  for (uint32_t index = 0; index < 4; ++index) {
    const Bytes good = datagram(ear.session, 1, frame, index);
    for (int attack = 0; attack < 500; ++attack, ++sent) {
      Bytes bad = good;
      if (attack % 3 == 0) {
        bad.resize(random() % 300);
        for (uint8_t& byte : bad) byte = static_cast<uint8_t>(random());
      } else if (attack % 3 == 1) {
        bad.resize(random() % good.size());
      } else {
        bad[random() % bad.size()] ^= static_cast<uint8_t>(1 + random() % 255);
      }
      ear.hear(bad);
    }
    CHECK(!ear.receiver->whole());
    ear.hear(good);
  }
  CHECK(ear.has(1, frame));
  CHECK(ear.receiver->counts().refused == sent && ear.receiver->counts().taken == 4);
}

// What a relay does to each worker's datagrams.
struct Weather {
  double drop = 0, repeat = 0, hold = 0;  // of 1
};

// Workers whose datagrams go through a relay that loses, repeats and delays them, each worker's on its own.
class Flock {
 public:
  Flock(std::vector<Weather> weather, uint32_t fragment_bytes, uint32_t seed)
      : weather_(std::move(weather)), session_(make_session(fragment_bytes)), dropped(weather_.size()) {
    int pair[2];
    CHECK(::socketpair(AF_UNIX, SOCK_DGRAM, 0, pair) == 0);
    relay_fd_ = pair[1];
    std::vector<Transport::Peer> peers;
    for (size_t i = 0; i < weather_.size(); ++i) {
      workers.push_back(std::make_unique<Worker>());
      ears_.push_back(std::make_unique<Ear>(session_));
      workers[i]->start(ears_[i]->receiver);
      peers.push_back({workers[i]->fd, nullptr, 1 << 20});
      held_.emplace_back();
    }
    TransportConfig config;
    config.hidden_size = kHidden;
    config.top_k = kTopK;
    config.max_step_tokens = kMaxTokens;
    transport = std::make_unique<Transport>(peers, config,
                                            std::make_unique<MulticastSender>(pair[0], session_, "a relay"));
    relay_ = std::thread([this, seed] { relay(seed); });
  }
  ~Flock() {
    transport->close();
    transport.reset();
    for (auto& worker : workers) worker->join();
    ::shutdown(relay_fd_, SHUT_RDWR);  // the end of the other alone wakes nobody
    relay_.join();
    ::close(relay_fd_);
  }

  uint64_t submit(const Step& step) {
    return transport->submit(kLayer, 0, step.tokens, kTopK, step.x.data(), step.ids.data(),
                             step.weights.data());
  }

  // Whether a step's sum is that of its workers, in their order.
  bool is_right(uint64_t ticket, const Step& step) {
    std::vector<float> sum(step.x.size());
    CHECK(transport->wait(ticket, sum.data()));
    const std::vector<float> one = oracle_.expected(step);
    std::vector<float> expected = one;
    for (size_t worker = 1; worker < workers.size(); ++worker) {
      for (size_t i = 0; i < one.size(); ++i) expected[i] += one[i];
    }
    return sum == expected;
  }

  // As it was lost: another worker in its place, with an ear of its own.
  void replace(size_t worker) {
    ::shutdown(workers[worker]->fd, SHUT_RDWR);
    workers[worker]->join();
    auto next = std::make_unique<Worker>();
    auto ear = std::make_unique<Ear>(session_);
    next->start(ear->receiver);
    const Transport::Peer peer{next->fd, nullptr, 1 << 20};
    workers[worker] = std::move(next);
    {
      const std::lock_guard lock(ears_mutex_);
      ears_[worker] = std::move(ear);
    }
    transport->replace(worker, peer);
  }

  std::vector<std::unique_ptr<Worker>> workers;
  std::unique_ptr<Transport> transport;

 private:
  void relay(uint32_t seed) {
    std::minstd_rand random(seed + 1);
    const auto chance = [&random](double of_1) { return random() % 10000 < 10000 * of_1; };
    uint8_t bytes[70000];
    for (ssize_t got = 0; (got = ::recv(relay_fd_, bytes, sizeof(bytes), 0)) > 0;) {
      const std::lock_guard lock(ears_mutex_);
      for (size_t worker = 0; worker < ears_.size(); ++worker) {
        const Bytes data(bytes, bytes + got);
        if (chance(weather_[worker].drop)) {
          ++dropped[worker];
          continue;
        }
        std::deque<Bytes>& held = held_[worker];
        held.push_back(data);
        if (chance(weather_[worker].repeat)) held.push_back(data);
        if (held.size() < 4 && chance(weather_[worker].hold)) continue;
        if (weather_[worker].hold > 0) std::reverse(held.begin(), held.end());
        for (; !held.empty(); held.pop_front()) pass_on(worker, held.front());
      }
    }
  }

  // A worker that is full loses it, as on a network.
  void pass_on(size_t worker, const Bytes& data) {
    pollfd entry{ears_[worker]->fd, POLLOUT, 0};
    ::poll(&entry, 1, 100);
    if (::send(ears_[worker]->fd, data.data(), data.size(), MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
      ++dropped[worker];
  }

  const std::vector<Weather> weather_;
  const wire::MulticastSession session_;
  Worker oracle_;
  std::mutex ears_mutex_;
  std::vector<std::unique_ptr<Ear>> ears_;
  std::vector<std::deque<Bytes>> held_;
  int relay_fd_ = -1;
  std::thread relay_;

 public:
  std::vector<std::atomic<uint64_t>> dropped;
};

void steps_through_weather(std::vector<Weather> weather, uint32_t fragment_bytes, uint32_t seed) {
  const size_t count = weather.size();
  Flock flock(std::move(weather), fragment_bytes, seed);
  for (uint32_t round = 0; round < 60; ++round) {
    std::vector<Step> steps;
    std::vector<uint64_t> tickets;
    for (uint32_t lane = 0; lane <= round % 3; ++lane) {
      steps.push_back(random_step(1 + (7 * round + lane) % kMaxTokens, 100 * seed + round));
      tickets.push_back(flock.submit(steps.back()));
    }
    for (size_t i = steps.size(); i-- > 0;) CHECK(flock.is_right(tickets[i], steps[i]));
  }
  const Transport::MulticastCounts counts = flock.transport->multicast_counts();
  CHECK(counts.num_datagrams > 120);
  uint64_t lost = 0;
  for (size_t worker = 0; worker < count; ++worker) {
    CHECK(counts.is_reached[worker]);
    CHECK(counts.num_asked[worker] >= flock.dropped[worker]);
    lost += flock.dropped[worker];
  }
  CHECK((lost > 30) == (count > 1));
  CHECK(flock.transport->take_unreached().empty());
}

void a_worker_out_of_reach() {
  Flock flock({{0, 0, 0}, {1, 0, 0}}, 200, 3);
  for (uint32_t round = 0; round < 12; ++round) {
    const Step step = random_step(2, round);
    CHECK(flock.is_right(flock.submit(step), step));
  }
  CHECK((flock.transport->take_unreached() == std::vector<size_t>{1}));
  CHECK(flock.transport->take_unreached().empty());
  const Transport::MulticastCounts counts = flock.transport->multicast_counts();
  CHECK((counts.is_reached == std::vector<uint8_t>{1, 0}));
  const Bytes frame = random_step(2, 0).frame(1);
  CHECK(counts.num_asked[1] == 8 * wire::fragment_count(static_cast<uint32_t>(frame.size()), 200));
  CHECK(flock.transport->describe()[0].find("by multicast") != std::string::npos);
  CHECK(flock.transport->describe()[1].find("by multicast") == std::string::npos);
}

void steps_that_are_given_up_leave_nothing() {
  Flock flock({{0.5, 0, 0}, {0.3, 0.2, 0.2}}, 100, 4);
  for (uint32_t round = 0; round < 30; ++round) {
    for (uint32_t step = 0; step < 3; ++step) flock.submit(random_step(1 + step, 10 * round + step));
    flock.transport->give_up();
    const Step step = random_step(4, 1000 + round);
    CHECK(flock.is_right(flock.submit(step), step));
  }
}

void a_lost_worker_is_replaced_in_flight() {
  Flock flock({{0.1, 0, 0}, {0.1, 0, 0}, {0.1, 0, 0}}, 100, 5);
  for (uint32_t round = 0; round < 15; ++round) {
    const Step first = random_step(3, 10 * round), second = random_step(6, 10 * round + 1);
    const uint64_t tickets[2] = {flock.submit(first), flock.submit(second)};
    flock.replace(round % 3);
    CHECK(flock.is_right(tickets[1], second));
    CHECK(flock.is_right(tickets[0], first));
  }
}

// Those beyond what a worker puts together at a time come over its connection.
void many_steps_in_flight() {
  Flock flock({{0.5, 0, 0}, {0, 0, 0.5}}, 100, 6);
  std::vector<Step> steps;
  std::vector<uint64_t> tickets;
  for (uint32_t i = 0; i < 5 * MulticastReceiver::kMaxSteps; ++i) {
    steps.push_back(random_step(1 + i % kMaxTokens, i));
    tickets.push_back(flock.submit(steps.back()));
  }
  for (size_t i = steps.size(); i-- > 0;) CHECK(flock.is_right(tickets[i], steps[i]));
}

// A step that came by multicast after it was asked for is answered once.
void a_request_that_comes_both_ways() {
  Worker worker;
  Ear ear(make_session(100));
  const Step step = random_step(3, 11);
  const Bytes frame = step.frame(100);
  worker.start(ear.receiver);
  const uint32_t count = wire::fragment_count(static_cast<uint32_t>(frame.size()), 100);
  for (uint32_t index = 0; index < count; ++index) {
    const Bytes data = datagram(ear.session, 100, frame, index);
    CHECK(::send(ear.fd, data.data(), data.size(), 0) > 0);
  }
  Bytes reply(wire::kFrameHeaderBytes + wire::kStepReplyHeaderBytes + 4 * step.x.size());
  CHECK(::recv(worker.fd, reply.data(), reply.size(), MSG_WAITALL) == static_cast<ssize_t>(reply.size()));
  const std::vector<float> expected = worker.expected(step);
  CHECK(std::memcmp(reply.data() + wire::kFrameHeaderBytes + wire::kStepReplyHeaderBytes, expected.data(),
                    4 * expected.size()) == 0);
  worker.send(frame);
  CHECK(worker.finish(true).empty());
  CHECK(worker.end().steps_served == 1);
}

// Our end of a transport's only worker, which speaks for itself.
struct FakeWorker {
  FakeWorker() {
    int pair[2], group[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    CHECK(::socketpair(AF_UNIX, SOCK_DGRAM, 0, group) == 0);
    TransportConfig config;
    config.hidden_size = kHidden;
    config.top_k = kTopK;
    config.max_step_tokens = kMaxTokens;
    const std::vector<Transport::Peer> peers = {{pair[0], nullptr, 1 << 20}};
    transport = std::make_unique<Transport>(
        peers, config, std::make_unique<MulticastSender>(group[0], make_session(100), "nobody"));
    fd = pair[1];
    group_fd = group[1];
  }
  ~FakeWorker() {
    ::close(fd);
    ::close(group_fd);
  }

  uint64_t submit() {
    const Step step = random_step(1, 1);
    return transport->submit(kLayer, 0, 1, kTopK, step.x.data(), step.ids.data(), step.weights.data());
  }
  void say(const Bytes& bytes) {
    CHECK(::send(fd, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  }
  wire::FrameHeader hear() {
    uint8_t head[wire::kFrameHeaderBytes] = {};
    CHECK(::recv(fd, head, sizeof(head), MSG_WAITALL) == sizeof(head));
    return wire::decode_frame_header(head);
  }

  std::unique_ptr<Transport> transport;
  int fd = -1;
  int group_fd = -1;
};

Bytes question(uint64_t sequence, uint32_t first, uint32_t count) {
  return wire::encode_step_missing_frame(sequence, {0, {{first, count}}});
}

// Whoever may have some of a step, or asks for it too late, hears that it is over.
void steps_that_are_over_are_said_to_be() {
  FakeWorker worker;
  CHECK(worker.submit() == 1);
  worker.transport->give_up();
  const uint64_t ticket = worker.submit();
  wire::FrameHeader heard = worker.hear();
  CHECK(heard.type == wire::FrameType::kStepOver && heard.sequence == 1);
  worker.say(question(1, 0, 1));
  std::vector<size_t> late;
  CHECK(worker.transport->wait_some(ticket, 50, late));
  CHECK(late == std::vector<size_t>{0});
  int overs = 0, announced = 0;
  for (int frame = 0; frame < 2; ++frame) {
    heard = worker.hear();
    overs += heard.type == wire::FrameType::kStepOver && heard.sequence == 1;
    if (heard.type != wire::FrameType::kStepSent) continue;
    announced += heard.sequence == ticket;
    uint8_t bytes[wire::kStepSentBytes];
    CHECK(::recv(worker.fd, bytes, sizeof(bytes), MSG_WAITALL) == sizeof(bytes));
    CHECK(wire::decode_step_sent(bytes) == random_step(1, 1).frame(1).size());
  }
  CHECK(overs == 1 && announced == 1);
}

// A worker that asks for what makes no sense is lost, with a reason.
void senseless_questions() {
  Bytes twice = question(1, 0, 1);
  twice.insert(twice.end(), twice.begin(), twice.end());
  for (const Bytes& asked :
       {question(2, 0, 1), question(0, 0, 1), question(1, 0, 99), question(1, 1, 0), twice}) {
    FakeWorker worker;
    const uint64_t ticket = worker.submit();
    worker.say(asked);
    std::vector<float> sum(kHidden);
    try {
      worker.transport->wait(ticket, sum.data());
      CHECK(!"lost");
    } catch (const TransportError& error) {
      CHECK(std::string(error.what()).find("malformed frame: ") != std::string::npos);
    }
  }
}

}  // namespace

int main() {
  tags_are_siphash();
  only_the_sessions_own_datagrams_are_taken();
  gaps_are_asked_for_once();
  a_step_that_never_came_is_asked_for_when_it_is_announced();
  a_lost_tail_is_asked_for_when_the_step_is_announced();
  a_lost_tail_is_noticed_by_the_next_step();
  more_steps_than_there_is_room_for();
  steps_of_long_ago_are_dropped();
  a_question_names_at_most_so_many_ranges_and_misses_nothing();
  parts_that_fit_nothing_are_refused();
  hostile_datagrams_change_nothing();
  steps_through_weather({{0, 0, 0}}, 100, 1);
  steps_through_weather({{0.1, 0, 0}, {0.02, 0.1, 0}, {0.05, 0.05, 0.3}, {0, 0, 0.5}}, 100, 2);
  a_worker_out_of_reach();
  steps_that_are_given_up_leave_nothing();
  a_lost_worker_is_replaced_in_flight();
  many_steps_in_flight();
  a_request_that_comes_both_ways();
  steps_that_are_over_are_said_to_be();
  senseless_questions();
  return duck::test::report();
}
