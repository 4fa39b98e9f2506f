// Experts: one step in two phases with one barrier between them.
//
// Phase 1 spreads the units (expert, stripe) of the experts that the step's rows use over the threads, taken
// from a shared counter: gate, up and SiLU give each (row, expert) pair the unit's 16 activations. Phase 2
// gives each thread its own range of outputs, which it sums over all pairs in a fixed order (experts.h); so
// no two threads add to one output, and the number of threads never shows in a result. run() allocates
// nothing.
#include "kernels/experts.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <vector>

#include "kernels/fp9.h"
#include "kernels/kernel_table.h"
#include "threads/thread_pool.h"

namespace duck {
namespace {

constexpr size_t kReadPrefetchBytes = 2048;

[[noreturn]] void fail(const std::string& field, uint64_t got, const std::string& expected) {
  throw std::invalid_argument(field + ": got " + std::to_string(got) + ", expected " + expected);
}

void check_positive(const char* field, uint32_t value) {
  if (value == 0) fail(field, value, "at least 1");
}

ExpertShape checked(const ExpertShape& shape, uint32_t max_tokens) {
  check_positive("hidden_size", shape.hidden_size);
  check_positive("intermediate_size", shape.intermediate_size);
  check_positive("num_experts", shape.num_experts);
  check_positive("top_k", shape.top_k);
  check_positive("num_stripes", shape.num_stripes);
  check_positive("max_tokens", max_tokens);
  constexpr uint32_t kMost = 1u << 24;  // far above any model; keeps every product below within 64 bits
  for (auto [field, value] :
       {std::pair{"hidden_size", shape.hidden_size}, std::pair{"intermediate_size", shape.intermediate_size},
        std::pair{"num_experts", shape.num_experts}, std::pair{"top_k", shape.top_k},
        std::pair{"max_tokens", max_tokens}}) {
    if (value > kMost) fail(field, value, "at most " + std::to_string(kMost));
  }
  const uint64_t stripes = ceil_div(shape.intermediate_size, kStripeChannels);
  const uint64_t end = static_cast<uint64_t>(shape.first_stripe) + shape.num_stripes;
  if (end > stripes) {
    fail("first_stripe + num_stripes", end,
         "at most " + std::to_string(stripes) + ", the stripes of intermediate_size " +
             std::to_string(shape.intermediate_size));
  }
  return shape;
}

// 64-byte aligned zeroed floats.
class FloatBuffer {
 public:
  explicit FloatBuffer(size_t size)
      : data_(static_cast<float*>(::operator new(std::max<size_t>(size, 1) * sizeof(float), kAlignment))) {
    std::fill_n(data_, size, 0.0f);
  }
  ~FloatBuffer() { ::operator delete(data_, kAlignment); }
  FloatBuffer(const FloatBuffer&) = delete;
  FloatBuffer& operator=(const FloatBuffer&) = delete;
  float* data() { return data_; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  float* data_;
};

Unit unit_at(const uint8_t* bytes, size_t hidden_size) {
  const size_t blocks = ceil_div(hidden_size, kScaleBlock);
  const size_t records = padded_hidden(hidden_size) / kRecordRows;
  const uint8_t* gate_up = bytes + unit_scale_bytes(hidden_size);
  return {bytes,
          bytes + 4 * blocks,
          bytes + 8 * blocks,
          gate_up,
          gate_up + 2 * records * kRecordBytes,
          static_cast<uint32_t>(records)};
}

}  // namespace

struct Experts::Impl {
  Impl(const ExpertShape& shape_, uint32_t max_tokens_, Isa isa, ThreadPool& pool_)
      : shape(checked(shape_, max_tokens_)),
        max_tokens(max_tokens_),
        table(kernel_table(isa)),
        pool(pool_),
        row_floats(padded_hidden(shape.hidden_size)),
        pair_floats(static_cast<size_t>(shape.num_stripes) * kStripeChannels),
        x(max_tokens * row_floats),
        y(max_tokens * row_floats),
        activations(max_pairs() * pair_floats),
        expert_begin(shape.num_experts + 1),
        pair_x(max_pairs()),
        pair_y(max_pairs()),
        pair_activations(max_pairs()),
        pair_weights(max_pairs()),
        work([this](int thread) { work_on(thread); }),
        read_work([this](int) { run_read(); }) {
    active.reserve(std::min<size_t>(max_pairs(), shape.num_experts));
    for (size_t pair = 0; pair < max_pairs(); ++pair) {
      pair_activations[pair] = activations.data() + pair * pair_floats;
    }
  }

  size_t max_pairs() const { return static_cast<size_t>(max_tokens) * shape.top_k; }

  const ExpertShape shape;
  const uint32_t max_tokens;
  const KernelTable& table;
  ThreadPool& pool;
  const size_t row_floats;   // H'
  const size_t pair_floats;  // S * 16

  FloatBuffer x;            // [T, H'] x * 2^64
  FloatBuffer y;            // [T, H'] sums of phase 2
  FloatBuffer activations;  // [T * K, S * 16], in the order of the pairs below

  // The pairs sorted by expert, those of one expert in (row, k) order: expert e has [begin[e], begin[e + 1]).
  std::vector<uint32_t> expert_begin;
  std::vector<const float*> pair_x;
  std::vector<float*> pair_y;
  std::vector<float*> pair_activations;
  std::vector<float> pair_weights;
  std::vector<uint32_t> active;  // experts with at least one pair, ascending

  // The step that run() has published.
  LayerUnits layer;
  uint32_t num_tokens = 0;
  float* output = nullptr;
  std::atomic<uint64_t> next_unit{0};
  std::atomic<uint64_t> read_words{0};
  const std::function<void(int)> work;
  const std::function<void(int)> read_work;

  void check(const StepRows& rows) const;
  void find_active(const StepRows& rows);
  void sort_pairs(const StepRows& rows);
  void scale_x(const StepRows& rows);
  void work_on(int thread);
  void run_gate_up();
  void run_down(int thread);
  void run_read();

  PairRows pairs_of(uint32_t expert) const {
    const uint32_t begin = expert_begin[expert];
    return {expert_begin[expert + 1] - begin, pair_x.data() + begin, pair_weights.data() + begin,
            pair_activations.data() + begin, pair_y.data() + begin};
  }
  Unit unit(uint32_t expert, uint32_t stripe) const {
    return unit_at(layer.base + expert * layer.expert_stride_bytes + stripe * unit_bytes(shape.hidden_size),
                   shape.hidden_size);
  }
};

void Experts::Impl::check(const StepRows& rows) const {
  if (rows.num_tokens > max_tokens)
    fail("num_tokens", rows.num_tokens, "at most " + std::to_string(max_tokens));
  if (rows.top_k == 0 || rows.top_k > shape.top_k) {
    fail("top_k", rows.top_k, "1 to " + std::to_string(shape.top_k));
  }
  for (size_t pair = 0; pair < static_cast<size_t>(rows.num_tokens) * rows.top_k; ++pair) {
    const int32_t id = rows.topk_ids[pair];
    if (id >= 0 && static_cast<uint32_t>(id) < shape.num_experts) continue;
    throw std::invalid_argument("topk_ids[" + std::to_string(pair / rows.top_k) + ", " +
                                std::to_string(pair % rows.top_k) + "]: got " + std::to_string(id) +
                                ", expected 0 to " + std::to_string(shape.num_experts - 1));
  }
}

// Finds the experts that the ids name, and in expert_begin[e] the number of pairs up to and including expert
// e.
void Experts::Impl::find_active(const StepRows& rows) {
  std::fill(expert_begin.begin(), expert_begin.end(), 0);
  const size_t num_pairs = static_cast<size_t>(rows.num_tokens) * rows.top_k;
  for (size_t pair = 0; pair < num_pairs; ++pair) ++expert_begin[rows.topk_ids[pair]];
  active.clear();
  uint32_t end = 0;
  for (uint32_t expert = 0; expert < shape.num_experts; ++expert) {
    if (expert_begin[expert] != 0) active.push_back(expert);
    end += expert_begin[expert];
    expert_begin[expert] = end;
  }
  expert_begin[shape.num_experts] = end;
}

// A counting sort. The pairs are placed from the last backwards, so those of an expert stay in (row, k) order
// and expert_begin ends up at their beginnings.
void Experts::Impl::sort_pairs(const StepRows& rows) {
  find_active(rows);
  for (size_t pair = static_cast<size_t>(rows.num_tokens) * rows.top_k; pair-- > 0;) {
    const uint32_t place = --expert_begin[rows.topk_ids[pair]];
    const size_t row = pair / rows.top_k;
    pair_x[place] = x.data() + row * row_floats;
    pair_y[place] = y.data() + row * row_floats;
    pair_weights[place] = rows.topk_weights[pair];
  }
}

void Experts::Impl::scale_x(const StepRows& rows) {
  const uint8_t* bytes = static_cast<const uint8_t*>(rows.x);
  const size_t hidden = shape.hidden_size;
  for (uint32_t row = 0; row < rows.num_tokens; ++row) {
    float* out = x.data() + row * row_floats;  // beyond H it stays zero
    if (rows.x_type == ActivationType::kF32) {
      std::memcpy(out, bytes + row * hidden * 4, hidden * 4);
      for (size_t i = 0; i < hidden; ++i) out[i] *= kActivationPrescale;
    } else {
      for (size_t i = 0; i < hidden; ++i) {
        uint16_t upper;
        std::memcpy(&upper, bytes + (row * hidden + i) * 2, 2);
        const uint32_t bits = static_cast<uint32_t>(upper) << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        out[i] = value * kActivationPrescale;
      }
    }
  }
}

void Experts::Impl::work_on(int thread) {
  run_gate_up();
  pool.barrier();
  run_down(thread);
}

void Experts::Impl::run_gate_up() {
  const uint64_t num_units = static_cast<uint64_t>(active.size()) * shape.num_stripes;
  for (;;) {
    const uint64_t index = next_unit.fetch_add(1, std::memory_order_relaxed);
    if (index >= num_units) return;
    const uint32_t expert = active[index / shape.num_stripes];
    const uint32_t stripe = static_cast<uint32_t>(index % shape.num_stripes);
    const uint32_t first_channel = (shape.first_stripe + stripe) * kStripeChannels;
    table.gate_up(unit(expert, stripe), pairs_of(expert), stripe * kStripeChannels,
                  std::min<uint32_t>(kStripeChannels, shape.intermediate_size - first_channel));
  }
}

void Experts::Impl::run_down(int thread) {
  const size_t num_records = row_floats / kRecordRows;
  const uint32_t first = static_cast<uint32_t>(num_records * thread / pool.num_threads());
  const uint32_t end = static_cast<uint32_t>(num_records * (thread + 1) / pool.num_threads());
  if (first == end) return;
  const size_t first_output = static_cast<size_t>(first) * kRecordRows;
  const size_t end_output = static_cast<size_t>(end) * kRecordRows;
  for (uint32_t row = 0; row < num_tokens; ++row) {
    std::fill(y.data() + row * row_floats + first_output, y.data() + row * row_floats + end_output, 0.0f);
  }
  for (uint32_t expert : active) {
    for (uint32_t stripe = 0; stripe < shape.num_stripes; ++stripe) {
      table.down(unit(expert, stripe), pairs_of(expert), stripe * kStripeChannels, first, end);
    }
  }
  const size_t hidden = shape.hidden_size;
  const size_t num_outputs = std::min(end_output, hidden) - first_output;
  for (uint32_t row = 0; row < num_tokens; ++row) {
    std::memcpy(output + row * hidden + first_output, y.data() + row * row_floats + first_output,
                num_outputs * sizeof(float));
  }
}

void Experts::Impl::run_read() {
  const uint64_t num_units = static_cast<uint64_t>(active.size()) * shape.num_stripes;
  const size_t size = unit_bytes(shape.hidden_size);
  uint64_t words = 0;
  for (;;) {
    const uint64_t index = next_unit.fetch_add(1, std::memory_order_relaxed);
    if (index >= num_units) break;
    const uint8_t* bytes = layer.base + active[index / shape.num_stripes] * layer.expert_stride_bytes +
                           index % shape.num_stripes * size;
    uint64_t parts[8] = {};
    for (size_t line = 0; line < size; line += sizeof(parts)) {
      __builtin_prefetch(bytes + line + kReadPrefetchBytes);
      uint64_t loaded[8];
      std::memcpy(loaded, bytes + line, sizeof(loaded));
      for (int i = 0; i < 8; ++i) parts[i] ^= loaded[i];
    }
    for (uint64_t part : parts) words ^= part;
  }
  read_words.fetch_xor(words, std::memory_order_relaxed);
}

Experts::Experts(const ExpertShape& shape, uint32_t max_tokens, Isa isa, ThreadPool& pool)
    : impl_(std::make_unique<Impl>(shape, max_tokens, isa, pool)) {
  if (!isa_available(isa)) {
    throw std::invalid_argument(std::string("isa: got ") + isa_name(isa) +
                                ", expected one that this machine can run");
  }
}

Experts::~Experts() = default;

void Experts::run(const LayerUnits& layer, const StepRows& rows, float* y) {
  impl_->check(rows);
  if (rows.num_tokens == 0) return;
  impl_->sort_pairs(rows);
  impl_->scale_x(rows);
  impl_->layer = layer;
  impl_->num_tokens = rows.num_tokens;
  impl_->output = y;
  impl_->next_unit.store(0, std::memory_order_relaxed);
  impl_->pool.run(impl_->work);
}

uint64_t Experts::read_units(const LayerUnits& layer, const StepRows& rows) {
  impl_->check(rows);
  impl_->find_active(rows);
  impl_->layer = layer;
  impl_->next_unit.store(0, std::memory_order_relaxed);
  impl_->read_words.store(0, std::memory_order_relaxed);
  impl_->pool.run(impl_->read_work);
  return impl_->read_words.load(std::memory_order_relaxed);
}

const ExpertShape& Experts::shape() const { return impl_->shape; }

Isa Experts::isa() const { return impl_->table.isa; }

}  // namespace duck
