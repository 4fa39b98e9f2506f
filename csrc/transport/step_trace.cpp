#include "transport/step_trace.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <string_view>

namespace duck {
namespace {

constexpr int32_t kMaxExperts = 1 << 16;  // ids beyond are a worker's to refuse, and not noted
// In place of a number of workers: step.sequence's place was taken at step.submitted_ns; or EngineMoments
// follow.
constexpr uint32_t kReplaced = UINT32_MAX, kEngine = UINT32_MAX - 1;
// Bytes of text that a byte of records becomes, about.
constexpr size_t kTextPerRecord = 7;
// Process ids in the file: the host's, and the first worker's.
constexpr uint64_t kHostPid = 1, kFirstWorkerPid = 2;

struct ExpertRows {
  uint32_t expert = 0;
  uint32_t rows = 0;
};

// One record: this, then WorkerMoments [num_workers], then ExpertRows [num_experts].
struct Head {
  StepMoments step;
  uint32_t num_workers = 0;  // or kReplaced, or kEngine
  uint32_t num_experts = 0;
  bool has_rows = false;  // some expert was chosen more than once
};

// Writes events one behind the other. Room is made once for each, so that what is written is not checked
// piece by piece.
class Events {
 public:
  Events(uint64_t origin_ns, size_t likely_bytes) : origin_ns_(origin_ns), out_(likely_bytes, '\0') {}

  // Up to its arguments: {"name":...,"args":{"step":1,"layer":2
  void begin(std::string_view name, uint64_t pid, uint64_t lane, uint64_t from_ns, uint64_t to_ns,
             const StepMoments& step) {
    event(name, pid, lane + 1, from_ns, to_ns);
    text("\"step\":");
    number(step.sequence);
    text(",\"layer\":");
    number(step.layer);
  }

  // Up to its arguments: {"name":...,"args":{
  void event(std::string_view name, uint64_t pid, uint64_t tid, uint64_t from_ns, uint64_t to_ns) {
    make_room(kEventBytes);
    text(",\n{\"name\":\"");
    text(name);
    text("\",\"ph\":\"X\",\"pid\":");
    number(pid);
    text(",\"tid\":");
    number(tid);
    text(",\"ts\":");
    microseconds(from_ns - std::min(from_ns, origin_ns_));
    text(",\"dur\":");
    microseconds(to_ns - std::min(from_ns, to_ns));
    text(",\"args\":{");
  }

  void argument(std::string_view name, uint64_t value) {
    text(",\"");
    text(name);
    text("\":");
    number(value);
  }

  template <typename Value>
  void list(std::string_view name, const uint8_t* rows, size_t count, Value value) {
    make_room(kEventBytes + count * kNumberBytes);
    text(",\"");
    text(name);
    text("\":[");
    for (size_t i = 0; i < count; ++i) {
      ExpertRows each;
      std::memcpy(&each, rows + i * sizeof(each), sizeof(each));
      if (i > 0) text(",");
      number(value(each));
    }
    text("]");
  }

  void end() { text("}}"); }

  void engine(const EngineMoments& step) {
    event("step", kHostPid, 0, step.start_ns, step.end_ns);
    text("\"prompt_tokens\":");
    number(step.num_prompt_tokens);
    argument("decode_tokens", step.num_decode_tokens);
    argument("new_tokens", step.num_new_tokens);
    text(",\"parts_us\":[");
    for (size_t i = 0; i < step.parts_ns.size(); ++i) {
      if (i > 0) text(",");
      microseconds(step.parts_ns[i]);
    }
    text("]");
    end();
  }

  void replaced(uint64_t worker, uint64_t at_ns) {
    make_room(kEventBytes);
    text(",\n{\"name\":\"replaced\",\"ph\":\"i\",\"s\":\"p\",\"pid\":");
    number(kFirstWorkerPid + worker);
    text(",\"tid\":1,\"ts\":");
    microseconds(at_ns - std::min(at_ns, origin_ns_));
    text("}");
  }

  std::string take() {
    out_.resize(used_bytes_);
    return std::move(out_);
  }

 private:
  static constexpr size_t kNumberBytes = 21;   // a number and a comma
  static constexpr size_t kEventBytes = 1024;  // an event without its lists

  void make_room(size_t bytes) {
    if (out_.size() - used_bytes_ < bytes) out_.resize(2 * out_.size() + bytes);
  }

  void text(std::string_view words) {
    std::memcpy(out_.data() + used_bytes_, words.data(), words.size());
    used_bytes_ += words.size();
  }

  void number(uint64_t value) {
    char* const at = out_.data() + used_bytes_;
    used_bytes_ += static_cast<size_t>(std::to_chars(at, at + kNumberBytes, value).ptr - at);
  }

  void microseconds(uint64_t ns) {
    number(ns / 1000);
    const uint64_t rest = ns % 1000;
    const char digits[4] = {'.', static_cast<char>('0' + rest / 100), static_cast<char>('0' + rest / 10 % 10),
                            static_cast<char>('0' + rest % 10)};
    text({digits, sizeof(digits)});
  }

  const uint64_t origin_ns_;
  std::string out_;
  size_t used_bytes_ = 0;
};

void write_step(Events& events, const Head& head, const uint8_t* workers, const uint8_t* experts) {
  const StepMoments& step = head.step;
  events.begin("dispatch", kHostPid, step.lane, step.submitted_ns, step.dispatched_ns, step);
  events.argument("tokens", step.num_tokens);
  events.list("experts", experts, head.num_experts, [](const ExpertRows& each) { return each.expert; });
  if (head.has_rows) {
    events.list("rows", experts, head.num_experts, [](const ExpertRows& each) { return each.rows; });
  }
  events.end();
  uint64_t last_ns = step.waited_ns;
  for (uint32_t worker = 0; worker < head.num_workers; ++worker) {
    WorkerMoments at;
    std::memcpy(&at, workers + worker * sizeof(at), sizeof(at));
    last_ns = std::max(last_ns, at.taken_ns);
    if (at.error_ns < 0) continue;
    const uint64_t pid = kFirstWorkerPid + worker;
    const auto phase = [&](std::string_view name, uint64_t from_ns, uint64_t to_ns) {
      events.begin(name, pid, step.lane, from_ns, to_ns, step);
    };
    if (at.free_ns > step.submitted_ns) {
      phase("queue", step.submitted_ns, at.free_ns);
      events.end();
    }
    phase("wire", at.free_ns, at.started_ns);
    events.end();
    phase("compute", at.started_ns, at.finished_ns);
    events.argument("error_ns", static_cast<uint64_t>(at.error_ns));
    events.end();
    phase("reply", at.finished_ns, at.taken_ns);
    events.end();
  }
  events.begin("wait", kHostPid, step.lane, step.waited_ns, last_ns, step);
  events.end();
  events.begin("combine", kHostPid, step.lane, last_ns, step.summed_ns, step);
  events.end();
}

}  // namespace

StepTrace::StepTrace(size_t capacity_bytes) : capacity_bytes_(capacity_bytes) {
  records_.reserve(capacity_bytes);
  drained_.reserve(capacity_bytes);
}

template <typename T>
void StepTrace::put(const T& value) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(&value);
  records_.insert(records_.end(), bytes, bytes + sizeof(value));
}

void StepTrace::record(const StepMoments& step, const std::vector<WorkerMoments>& workers,
                       const int32_t* topk_ids, size_t num_ids) {
  const std::lock_guard lock(mutex_);
  experts_.clear();
  for (size_t i = 0; i < num_ids; ++i) {
    const int32_t id = topk_ids[i];
    if (id < 0 || id >= kMaxExperts) continue;
    const auto expert = static_cast<uint32_t>(id);
    if (counts_.size() <= expert) counts_.resize(expert + 1);
    if (counts_[expert]++ == 0) experts_.push_back(expert);
  }
  std::sort(experts_.begin(), experts_.end());
  Head head{step, static_cast<uint32_t>(workers.size()), static_cast<uint32_t>(experts_.size()), false};
  for (const uint32_t expert : experts_) head.has_rows |= counts_[expert] > 1;
  const size_t bytes =
      sizeof(head) + workers.size() * sizeof(WorkerMoments) + experts_.size() * sizeof(ExpertRows);
  const bool fits = records_.size() + bytes <= capacity_bytes_;
  num_dropped_ += !fits;
  if (fits) {
    put(head);
    for (WorkerMoments at : workers) {
      // Estimates of another machine's clock: they may be a little before or behind what they lie between.
      at.taken_ns = std::max(at.taken_ns, step.submitted_ns);
      at.free_ns = std::clamp(at.free_ns, step.submitted_ns, at.taken_ns);
      at.started_ns = std::clamp(at.started_ns, at.free_ns, at.taken_ns);
      at.finished_ns = std::clamp(at.finished_ns, at.started_ns, at.taken_ns);
      put(at);
    }
    for (const uint32_t expert : experts_) put(ExpertRows{expert, counts_[expert]});
  }
  for (const uint32_t expert : experts_) counts_[expert] = 0;
}

void StepTrace::record_replaced(size_t worker, uint64_t at_ns) {
  const std::lock_guard lock(mutex_);
  if (records_.size() + sizeof(Head) > capacity_bytes_) return;
  Head head;
  head.step.sequence = worker;
  head.step.submitted_ns = at_ns;
  head.num_workers = kReplaced;
  put(head);
}

size_t StepTrace::record_engine(const EngineMoments& step) {
  const std::lock_guard lock(mutex_);
  const bool fits = records_.size() + sizeof(Head) + sizeof(step) <= capacity_bytes_;
  num_dropped_ += !fits;
  if (fits) {
    Head head;
    head.num_workers = kEngine;
    put(head);
    put(step);
  }
  return records_.size();
}

size_t StepTrace::pending_bytes() const {
  const std::lock_guard lock(mutex_);
  return records_.size();
}

uint64_t StepTrace::num_dropped() const {
  const std::lock_guard lock(mutex_);
  return num_dropped_;
}

std::string StepTrace::drain(uint64_t origin_ns) {
  {
    const std::lock_guard lock(mutex_);
    std::swap(records_, drained_);
    records_.clear();
  }
  Events events(origin_ns, drained_.size() * kTextPerRecord);
  const uint8_t* at = drained_.data();
  const uint8_t* const end = at + drained_.size();
  while (at < end) {
    Head head;
    std::memcpy(&head, at, sizeof(head));
    at += sizeof(head);
    if (head.num_workers == kReplaced) {
      events.replaced(head.step.sequence, head.step.submitted_ns);
      continue;
    }
    if (head.num_workers == kEngine) {
      EngineMoments step;
      std::memcpy(&step, at, sizeof(step));
      at += sizeof(step);
      events.engine(step);
      continue;
    }
    const uint8_t* experts = at + head.num_workers * sizeof(WorkerMoments);
    write_step(events, head, at, experts);
    at = experts + head.num_experts * sizeof(ExpertRows);
  }
  return events.take();
}

}  // namespace duck
