// The exchange against threads that play the GPU: lanes of their own pace, padding, aborts, flags that are
// old or come late, and workers that go away. Meant to run under the sanitizers too.
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tests/check.h"
#include "tests/step_worker.h"
#include "transport/exchange.h"

using namespace duck;
using duck::test::kHidden;
using duck::test::kLayer;
using duck::test::kMaxTokens;
using duck::test::kTopK;
using duck::test::random_step;
using duck::test::Step;
using duck::test::Worker;

namespace {

constexpr size_t kLanes = 2;
constexpr size_t kWords = Exchange::kLineWords;
constexpr float kPoison = -77.0f;

std::atomic_ref<uint32_t> word(uint32_t& at) { return std::atomic_ref<uint32_t>(at); }

void sleep_a_little() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }

struct alignas(64) Control {
  uint32_t words[Exchange::num_lines(kLanes) * kWords] = {};
};

// The memory that both sides see, and the GPU's side of it.
struct Gpu {
  Gpu() {
    for (auto& each : lanes) {
      each.x.assign(kMaxTokens * kHidden, NAN);
      each.ids.assign(kMaxTokens * kTopK, -1);
      each.weights.assign(kMaxTokens * kTopK, NAN);
      each.y.assign(kMaxTokens * kHidden, kPoison);
    }
  }

  std::vector<LaneMemory> memory() {
    std::vector<LaneMemory> all;
    for (auto& each : lanes) {
      all.push_back({kMaxTokens, kTopK, each.x.data(), each.ids.data(), each.weights.data(), each.y.data()});
    }
    return all;
  }

  uint32_t& request(size_t lane, size_t flag = 0) { return control.words[(1 + lane) * kWords + flag]; }
  uint32_t& reply(size_t lane, size_t copy = 0) {
    return control.words[(1 + kLanes + lane * Exchange::kReplyLines + copy) * kWords];
  }
  uint32_t& abort_word(size_t lane, size_t copy = 0) { return *(&reply(lane, copy) + 1); }
  uint32_t epoch() { return word(control.words[0]).load(); }

  void write(size_t lane, const Step& step) {
    std::copy(step.x.begin(), step.x.end(), lanes[lane].x.begin());
    std::copy(step.ids.begin(), step.ids.end(), lanes[lane].ids.begin());
    std::copy(step.weights.begin(), step.weights.end(), lanes[lane].weights.begin());
  }

  void publish(size_t lane, uint32_t number, uint32_t num_flags) {
    for (uint32_t flag = num_flags; flag-- > 0;) {
      word(request(lane, flag)).store(number, std::memory_order_release);
    }
  }

  // False where the abort word ended it. Any of the lines does.
  bool wait(size_t lane, uint32_t number) {
    const size_t copy = number % Exchange::kReplyLines;
    while (word(reply(lane, copy)).load(std::memory_order_acquire) != number) {
      if (word(abort_word(lane, copy)).load() != 0) return false;
      sleep_a_little();
    }
    return true;
  }

  // A graph: publishes the program's steps, collecting each lane's last one before. Gives each step's y, or
  // nothing where it was aborted.
  std::vector<std::vector<float>> replay(const Exchange::Program& program, const std::vector<Step>& steps) {
    std::vector<std::vector<float>> sums(program.size());
    std::optional<size_t> open[kLanes];
    const uint32_t first = epoch() + 1;
    const auto collect = [&](size_t lane) {
      if (!open[lane]) return;
      const size_t index = *open[lane];
      if (wait(lane, first + static_cast<uint32_t>(index))) {
        sums[index].assign(lanes[lane].y.begin(), lanes[lane].y.begin() + steps[index].tokens * kHidden);
        std::fill(lanes[lane].y.begin(), lanes[lane].y.end(), kPoison);
      }
      open[lane].reset();
    };
    for (size_t index = 0; index < program.size(); ++index) {
      const size_t lane = program[index].lane;
      collect(lane);
      write(lane, steps[index]);
      publish(lane, first + static_cast<uint32_t>(index), program[index].num_flags);
      open[lane] = index;
    }
    for (size_t lane = 0; lane < kLanes; ++lane) collect(lane);
    return sums;
  }

  struct Lane {
    std::vector<float> x, weights, y;
    std::vector<int32_t> ids;
  };
  Control control;
  Lane lanes[kLanes];
};

// A program of two lanes, lane 0 twice as often, and what it publishes.
struct Graph {
  explicit Graph(uint32_t length) {
    auto steps_of = std::make_shared<Exchange::Program>();
    for (uint32_t index = 0; index < length; ++index) {
      const auto lane = static_cast<uint16_t>(index % 3 == 1);
      const uint32_t rows = lane == 0 ? 4 : kMaxTokens;
      steps_of->push_back({kLayer, lane, rows, kTopK, 1 + index % 5});
      steps.push_back(random_step(rows, index));
    }
    program = steps_of;
  }

  std::shared_ptr<const Exchange::Program> program;
  std::vector<Step> steps;
};

Exchange make_exchange(Gpu& gpu, std::shared_ptr<LaneServer> server, int64_t gpu_timeout_ms = 20'000) {
  ExchangeConfig config;
  config.hidden_size = kHidden;
  config.spin_us = 20;
  config.gpu_timeout_ms = gpu_timeout_ms;
  return Exchange(gpu.control.words, gpu.memory(), config, std::move(server));
}

std::vector<float> first_rows(const std::vector<float>& rows, uint32_t count) {
  return {rows.begin(), rows.begin() + count * kHidden};
}

void an_echo_of_two_lanes() {
  Gpu gpu;
  Exchange exchange = make_exchange(gpu, std::make_shared<EchoServer>(30, false));
  const Graph graph(40);
  for (const uint32_t tokens : {kMaxTokens, 3u, 1u}) {
    exchange.start(graph.program, {tokens, 2});
    const auto sums = gpu.replay(*graph.program, graph.steps);
    CHECK(exchange.finish(20'000) == Exchange::Finished::kComplete);
    for (size_t index = 0; index < sums.size(); ++index) {
      const Step& step = graph.steps[index];
      const uint32_t counted = std::min(step.tokens, (*graph.program)[index].lane == 0 ? tokens : 2);
      CHECK(first_rows(sums[index], counted) == first_rows(step.x, counted));
      for (size_t i = counted * kHidden; i < sums[index].size(); ++i) CHECK(sums[index][i] == kPoison);
    }
  }
  CHECK(exchange.num_answered() == 120);
  Exchange zeros = make_exchange(gpu, std::make_shared<EchoServer>(0, true));
  zeros.start(graph.program, {kMaxTokens, 0});  // a lane of padding alone is answered, and not written
  const auto sums = gpu.replay(*graph.program, graph.steps);
  CHECK(zeros.finish(20'000) == Exchange::Finished::kComplete);
  for (size_t index = 0; index < sums.size(); ++index) {
    CHECK(sums[index] == std::vector<float>(graph.steps[index].x.size(),
                                            (*graph.program)[index].lane == 0 ? 0.0f : kPoison));
  }
}

// Keeps lane 0's steps until lane 1 has had as many answered as it is told to.
class UnevenServer : public EchoServer {
 public:
  explicit UnevenServer(int num_first) : EchoServer(0, false), num_first_(num_first) {}
  bool poll(const LaneStep& step) override {
    if (step.lane == 0 && num_others_ < num_first_) return false;
    num_others_ += step.lane;
    return EchoServer::poll(step);
  }
  void give_up() override { ++num_given_up; }

  int num_given_up = 0;

 private:
  const int num_first_;
  int num_others_ = 0;
};

void a_lane_that_waits_does_not_stop_the_other() {
  Gpu gpu;
  Exchange exchange = make_exchange(gpu, std::make_shared<UnevenServer>(3));
  Exchange::Program program = {{kLayer, 0, 1, kTopK, 1}};
  for (int step = 0; step < 3; ++step) program.push_back({kLayer, 1, 2, kTopK, 2});
  exchange.start(std::make_shared<Exchange::Program>(program), {1, 2});
  const uint32_t first = gpu.epoch() + 1;
  const Step mine = random_step(1, 1);
  gpu.write(0, mine);
  gpu.publish(0, first, 1);
  for (uint32_t index = 1; index < 4; ++index) {
    const Step theirs = random_step(2, index);
    gpu.write(1, theirs);
    gpu.publish(1, first + index, 2);
    CHECK(gpu.wait(1, first + index));
    CHECK(first_rows(gpu.lanes[1].y, 2) == theirs.x);
  }
  CHECK(gpu.wait(0, first));
  CHECK(first_rows(gpu.lanes[0].y, 1) == mine.x);
  CHECK(exchange.finish(20'000) == Exchange::Finished::kComplete);
}

std::string problem_of(Exchange& exchange) {
  try {
    exchange.finish(20'000);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "none";
}

void an_abort_frees_the_gpu_and_leaves_nothing() {
  Gpu gpu;
  const auto server = std::make_shared<UnevenServer>(1000);  // never answers lane 0
  Exchange exchange = make_exchange(gpu, server);
  const Graph graph(9);
  for (int again = 0; again < 3; ++again) {
    exchange.start(graph.program, {4, 4});
    std::vector<std::vector<float>> sums;
    std::thread replaying([&] { sums = gpu.replay(*graph.program, graph.steps); });
    CHECK(exchange.finish(5) == Exchange::Finished::kStalled);
    if (again == 1) {
      CHECK(exchange.finish(20'000, [] { return true; }) == Exchange::Finished::kInterrupted);
    } else {
      exchange.abort();
    }
    replaying.join();
    CHECK(server->num_given_up == again + 1);
    for (size_t index = 0; index < sums.size(); ++index) {
      CHECK(sums[index].empty() || (*graph.program)[index].lane == 1);
    }
    CHECK(problem_of(exchange) == "the program was aborted");
  }
}

void flags_of_another_run_are_not_taken() {
  Gpu gpu;
  Exchange exchange = make_exchange(gpu, std::make_shared<EchoServer>(0, false));
  const auto program = std::make_shared<Exchange::Program>(
      Exchange::Program{{kLayer, 0, 1, kTopK, 3}, {kLayer, 1, 1, kTopK, 1}});
  const Step step = random_step(1, 4);
  exchange.start(program, {1, 1});
  const uint32_t old = gpu.epoch();
  exchange.abort();
  gpu.write(0, step);
  gpu.publish(0, old + 1, 3);  // what comes late of an aborted run
  gpu.publish(1, old + 2, 1);
  exchange.start(program, {1, 1});
  const uint32_t number = gpu.epoch() + 1;
  CHECK(number != old + 1 && number != old + 2);
  CHECK(exchange.finish(10) == Exchange::Finished::kStalled);
  word(gpu.request(0, 0)).store(number);  // two of three programs
  word(gpu.request(0, 2)).store(number);
  gpu.publish(1, number, 1);  // the other lane's number
  CHECK(exchange.finish(10) == Exchange::Finished::kStalled);
  CHECK(exchange.num_answered() == 0);
  CHECK(gpu.lanes[0].y[0] == kPoison);
  word(gpu.request(0, 1)).store(number);
  CHECK(gpu.wait(0, number));
  CHECK(first_rows(gpu.lanes[0].y, 1) == step.x);
  gpu.write(1, step);
  gpu.publish(1, number + 1, 1);
  CHECK(exchange.finish(20'000) == Exchange::Finished::kComplete);
  CHECK(word(gpu.reply(1)).load() == number + 1);
}

void a_gpu_that_gives_up_or_says_nothing() {
  Gpu gpu;
  const Graph graph(6);
  {
    Exchange exchange = make_exchange(gpu, std::make_shared<UnevenServer>(1000));
    exchange.start(graph.program, {4, 4});
    word(gpu.abort_word(1)).store(Exchange::kTimedOutOnGpu);
    CHECK(problem_of(exchange) == "the GPU waited too long for the answer to a step");
    CHECK(word(gpu.abort_word(0)).load() == Exchange::kAbortedByHost);
  }
  {
    Exchange exchange = make_exchange(gpu, std::make_shared<EchoServer>(0, false), 20);
    exchange.start(graph.program, {4, 4});
    CHECK(problem_of(exchange) == "the GPU published no step within 20 ms");
    CHECK(word(gpu.abort_word(1)).load() == Exchange::kAbortedByHost);
  }
  Exchange exchange = make_exchange(gpu, std::make_shared<EchoServer>(0, false));
  exchange.start(graph.program, {4, 6});
  CHECK(word(gpu.abort_word(1)).load() == 0);
  const auto sums = gpu.replay(*graph.program, graph.steps);
  CHECK(exchange.finish(20'000) == Exchange::Finished::kComplete);
  for (size_t index = 0; index < sums.size(); ++index) CHECK(sums[index] == graph.steps[index].x);
}

std::vector<float> sum_of(std::vector<std::unique_ptr<Worker>>& workers, const Step& step) {
  std::vector<float> sum = workers[0]->expected(step);
  for (size_t worker = 1; worker < workers.size(); ++worker) {
    const std::vector<float> partial = workers[worker]->expected(step);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += partial[i];
  }
  return sum;
}

// Workers of which one leaves within a program: the program fails, and once another is in its place a
// repeated one gives the sums of all.
void workers_and_a_lost_one() {
  Gpu gpu;
  std::vector<std::unique_ptr<Worker>> workers;
  std::vector<Transport::Peer> peers;
  for (int worker = 0; worker < 2; ++worker) {
    workers.push_back(std::make_unique<Worker>());
    workers.back()->start();
    peers.push_back({workers.back()->fd});
  }
  TransportConfig config;
  config.hidden_size = kHidden;
  config.top_k = kTopK;
  config.max_step_tokens = kMaxTokens;
  auto transport = std::make_shared<Transport>(std::move(peers), config);
  const Graph graph(12);
  {
    Exchange exchange = make_exchange(gpu, std::make_shared<TransportServer>(transport));
    const auto run = [&] {
      exchange.start(graph.program, {4, kMaxTokens});
      const auto sums = gpu.replay(*graph.program, graph.steps);
      const std::string problem = problem_of(exchange);
      for (size_t index = 0; index < sums.size() && problem == "none"; ++index) {
        CHECK(sums[index] == sum_of(workers, graph.steps[index]));
      }
      return problem;
    };
    CHECK(run() == "none");
    ::shutdown(workers[1]->fd, SHUT_RDWR);
    CHECK(run() != "none");
    CHECK(transport->lost() == std::vector<size_t>{1});
    CHECK(transport->late().empty());  // nothing is in flight any more
    CHECK(run() != "none");
    workers[1]->join();
    workers[1] = std::make_unique<Worker>();
    workers[1]->start();
    transport->replace(1, {workers[1]->fd});
    CHECK(run() == "none");
    CHECK(run() == "none");
    CHECK(exchange.num_answered() >= 36);
  }
  transport->close();
  for (auto& worker : workers) worker->join();
}

// A worker that says nothing is named as late, and a program that waits for it ends when it is dropped.
void a_silent_worker() {
  Gpu gpu;
  int pair[2];
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
  Worker worker;
  worker.start();
  TransportConfig config;
  config.hidden_size = kHidden;
  config.top_k = kTopK;
  config.max_step_tokens = kMaxTokens;
  auto transport = std::make_shared<Transport>(std::vector<Transport::Peer>{{worker.fd}, {pair[0]}}, config);
  {
    Exchange exchange = make_exchange(gpu, std::make_shared<TransportServer>(transport));
    const Graph graph(2);
    exchange.start(graph.program, {4, 4});
    std::thread replaying([&] { gpu.replay(*graph.program, graph.steps); });
    do {
      CHECK(exchange.finish(20) == Exchange::Finished::kStalled);
    } while (exchange.late() != std::vector<size_t>{1});
    transport->drop(1, "it says nothing");
    bool is_lost = false;
    try {
      exchange.finish(20'000);
    } catch (const TransportError& error) {
      is_lost =
          error.worker() == 1 && error.layer() == kLayer && std::string(error.what()) == "it says nothing";
    }
    CHECK(is_lost);
    replaying.join();
  }
  transport->close();
  worker.join();
  ::close(pair[1]);
}

void experts_in_this_process() {
  Gpu gpu;
  Worker worker;  // not started: its units and experts
  const auto server =
      std::make_shared<ExpertsServer>(Worker::shape(), kMaxTokens, Isa::kScalar, Prefill::kF32, 2, 0,
                                      std::unordered_map<uint32_t, LayerUnits>{{kLayer, worker.units()}});
  Exchange exchange = make_exchange(gpu, server);
  const Graph graph(10);
  exchange.start(graph.program, {4, kMaxTokens});
  const auto sums = gpu.replay(*graph.program, graph.steps);
  CHECK(problem_of(exchange) == "none");
  for (size_t index = 0; index < sums.size(); ++index) {
    CHECK(sums[index] == worker.expected(graph.steps[index]));
  }
  const auto other = std::make_shared<Exchange::Program>(Exchange::Program{{kLayer + 1, 0, 1, kTopK, 1}});
  exchange.start(other, {1, 1});
  gpu.replay(*other, {random_step(1, 1)});
  CHECK(problem_of(exchange) == "layer: got 10, expected one with experts");
}

std::string refused(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing";
}

void what_does_not_fit_is_refused() {
  Gpu gpu;
  Exchange exchange = make_exchange(gpu, std::make_shared<EchoServer>(0, false));
  const auto start = [&](ProgramStep step, const std::vector<uint32_t>& num_tokens = {1, 1}) {
    return refused(
        [&] { exchange.start(std::make_shared<Exchange::Program>(Exchange::Program{step}), num_tokens); });
  };
  CHECK(start({kLayer, 2, 1, kTopK, 1}) == "step lane: got 2, expected 0 to 1");
  CHECK(start({kLayer, 0, kMaxTokens + 1, kTopK, 1}) == "step rows: got 7, expected 1 to 6");
  CHECK(start({kLayer, 0, 1, kTopK + 1, 1}) == "step top_k: got 3, expected 1 to 2");
  CHECK(start({kLayer, 0, 1, kTopK, 33}) == "step flags: got 33, expected 1 to 32");
  CHECK(start({kLayer, 0, 1, kTopK, 1}, {1}) == "num_tokens: got 1, expected 2 numbers, one a lane");
  CHECK(start({kLayer, 0, 1, kTopK, 1}) == "nothing");
  CHECK(start({kLayer, 0, 1, kTopK, 1}) == "exchange: got a program while another is under way");
  exchange.abort();
  CHECK(start({kLayer, 0, 1, kTopK, 1}) == "nothing");
  ExchangeConfig config;
  config.hidden_size = kHidden;
  CHECK(refused([&] {
          Exchange(gpu.control.words + 1, gpu.memory(), config, std::make_shared<EchoServer>(0, true));
        }) == "control: got 4, expected an address that is a multiple of 64");
}

}  // namespace

int main() {
  an_echo_of_two_lanes();
  a_lane_that_waits_does_not_stop_the_other();
  an_abort_frees_the_gpu_and_leaves_nothing();
  flags_of_another_run_are_not_taken();
  a_gpu_that_gives_up_or_says_nothing();
  workers_and_a_lost_one();
  a_silent_worker();
  experts_in_this_process();
  what_does_not_fit_is_refused();
  return duck::test::report();
}
