// Experts: one step in two phases with one barrier between them (a third before them when there are many
// rows).
//
// Phase 1 spreads gate and up over the threads: each (row, expert) pair gets the unit's 16 activations. With
// few rows the work is cut into parts of a unit, so that any number of threads share the bytes evenly; with
// many, into (expert, chunk of rows, unit), and a thread keeps the chunk's x in a panel of its own. Phase 2
// gives each thread its own range of outputs, which it sums over all pairs in a fixed order (experts.h); so
// no two threads add to one output, and the number of threads never shows in a result. run() allocates
// nothing. The formats of integers take the same course, with groups of bytes in place of f32
// (integer_steps.cpp).
#include "kernels/experts.h"

#include <cstring>
#include <stdexcept>

#include "kernels/denormals.h"
#include "kernels/experts_impl.h"
#include "kernels/scale_values.h"

namespace duck {

Experts::Impl::Impl(const ExpertShape& shape_, uint32_t max_tokens_, Isa isa, Prefill prefill,
                    Activations activations_, ThreadPool& pool_)
    : shape(checked_shape(shape_, max_tokens_)),
      max_tokens(max_tokens_),
      table(kernel_table(isa)),
      bf16(prefill == Prefill::kBf16 ? &select_bf16(isa) : nullptr),
      integers(select_integer(isa)),
      exact(activations_ == Activations::kF32),
      pool(pool_),
      row_floats(padded_hidden(shape.hidden_size)),
      pair_floats(static_cast<size_t>(shape.num_stripes) * kStripeChannels),
      num_records(row_floats / kRecordRows),
      num_parts(ceil_div(num_records, kPartRecords)),
      routing(shape.num_experts, max_tokens, shape.top_k),
      x(max_tokens * row_floats),
      y(max_tokens * row_floats),
      activations(static_cast<size_t>(max_tokens) * shape.top_k * pair_floats),
      partial_dots(static_cast<size_t>(std::min(max_tokens, kMaxDirectRows)) * shape.top_k *
                   shape.num_stripes * num_parts * kDotFloats),
      parts_left(std::min<size_t>(static_cast<size_t>(std::min(max_tokens, kMaxDirectRows)) * shape.top_k,
                                  shape.num_experts) *
                 shape.num_stripes),
      items(pool.num_threads()),
      work([this](int thread) { work_on(thread); }),
      read_work([this](int thread) { run_read(thread); }) {
  const size_t max_pairs = static_cast<size_t>(max_tokens) * shape.top_k;
  pair_x.resize(max_pairs);
  pair_y.resize(max_pairs);
  pair_groups.resize(max_pairs);
  for (size_t pair = 0; pair < max_pairs; ++pair) {
    pair_activations.push_back(activations.data() + pair * pair_floats);
    pair_stripes.push_back(reinterpret_cast<StripeGroup*>(activations.data()) + pair * shape.num_stripes);
  }
  first_item.reserve(std::min<size_t>(max_pairs, shape.num_experts) + 1);
  const size_t blocks = ceil_div(row_floats, kScaleBlock);
  const size_t panel_rows = max_tokens > kMaxDirectRows ? blocks * kChunkRows : 0;
  const bool has_tiles = integers.tiles != nullptr && !exact;
  const size_t panel_groups =
      has_tiles && max_tokens > kMaxDirectRows ? kChunkRows / kTileRows * num_records : 0;
  for (int thread = 0; thread < pool.num_threads(); ++thread) {
    workspaces.push_back(std::make_unique<Workspace>(panel_rows, bf16 != nullptr, panel_groups, exact));
  }
}

void Experts::Impl::check(const StepRows& step) const {
  if (step.num_tokens > max_tokens) {
    fail_shape("num_tokens", step.num_tokens, "at most " + std::to_string(max_tokens));
  }
  if (step.top_k == 0 || step.top_k > shape.top_k) {
    fail_shape("top_k", step.top_k, "1 to " + std::to_string(shape.top_k));
  }
  for (size_t pair = 0; pair < static_cast<size_t>(step.num_tokens) * step.top_k; ++pair) {
    const int32_t id = step.topk_ids[pair];
    if (id >= 0 && static_cast<uint32_t>(id) < shape.num_experts) continue;
    throw std::invalid_argument("topk_ids[" + std::to_string(pair / step.top_k) + ", " +
                                std::to_string(pair % step.top_k) + "]: got " + std::to_string(id) +
                                ", expected 0 to " + std::to_string(shape.num_experts - 1));
  }
}

void Experts::Impl::use(const LayerUnits& step_layer) {
  layer = step_layer;
  layer.format = kernel_format(step_layer.format);
  if (is_grouped(layer.format)) layer.scale_layout = ScaleLayout::kGroup;
  by_channel = layer.scale_layout == ScaleLayout::kChannel;
  x_factor = prescale(layer.format);
  integer = nullptr;
  tiles = nullptr;
  if (is_integer(layer.format) && !exact) {
    integer = &integers.formats[integer_index(layer.format, layer.scale_layout)];
    tiles = integers.tiles;
  } else {
    kernels = &table.formats[static_cast<int>(is_exact() ? WeightFormat::kF32 : layer.format)];
  }
}

void Experts::Impl::prepare(const StepRows& step) {
  rows = step;
  routing.sort(step);
  // Where H needs no padding the sums go straight to the caller.
  float* sums = row_floats == shape.hidden_size ? output : y.data();
  const size_t num_active = routing.active().size();
  const uint32_t num_pairs = routing.begin(shape.num_experts);
  for (uint32_t pair = 0; pair < num_pairs; ++pair) {
    pair_x[pair] = x.data() + routing.row(pair) * row_floats;
    pair_y[pair] = sums + routing.row(pair) * row_floats;
    pair_groups[pair] = reinterpret_cast<const HiddenGroup*>(x.data()) + routing.row(pair) * num_records;
  }
  if (few_rows()) {
    scale_x(0, 1);
    for (size_t i = 0; i < num_active * shape.num_stripes; ++i) {
      parts_left[i].store(num_parts, std::memory_order_relaxed);
    }
    items.reset(num_active * shape.num_stripes * num_parts);
    return;
  }
  first_item.assign(1, 0);
  for (uint32_t expert : routing.active()) {
    first_item.push_back(first_item.back() + static_cast<uint64_t>(num_chunks(expert)) * shape.num_stripes);
  }
  for (auto& workspace : workspaces) workspace->panel_of = UINT64_MAX;
  items.reset(first_item.back());
}

void Experts::Impl::work_on(int thread) {
  const DenormalsOn denormals;
  if (!few_rows()) {
    begin_tiles();
    scale_x(thread, pool.num_threads());
    pool.barrier();
  }
  for (uint64_t item; (item = items.take(thread)) != WorkRanges::kNone;) {
    if (few_rows()) {
      gate_up_part(*workspaces[thread], item);
    } else {
      gate_up_unit(*workspaces[thread], item);
    }
  }
  pool.barrier();
  run_down(thread);
  if (!few_rows()) end_tiles();
}

// A thread's tiles are set up for a step of many rows, and given up with its end: an idle thread keeps none.
void Experts::Impl::begin_tiles() const {
  if (is_integer(layer.format)) {
    if (tiles != nullptr) tiles->begin();
  } else if (bf16 != nullptr && bf16->begin != nullptr) {
    bf16->begin();
  }
}

void Experts::Impl::end_tiles() const {
  if (is_integer(layer.format)) {
    if (tiles != nullptr) tiles->end();
  } else if (bf16 != nullptr && bf16->end != nullptr) {
    bf16->end();
  }
}

void Experts::Impl::scale_x(int thread, int num_threads) {
  if (integer != nullptr) return round_x(thread, num_threads);
  for (size_t row = thread; row < rows.num_tokens; row += num_threads) {
    float* to = x.data() + row * row_floats;
    scale_values(rows.x_type, rows.x, row * shape.hidden_size, shape.hidden_size, x_factor, to);
    std::fill(to + shape.hidden_size, to + row_floats, 0.0f);  // a layer of integers may have written there
  }
}

void Experts::Impl::run_read(int thread) {
  constexpr size_t kPrefetchBytes = 2048;
  const size_t unit_size = unit_bytes(layer.format, shape.hidden_size, layer.scale_layout);
  uint64_t words = 0;
  for (uint64_t item; (item = items.take(thread)) != WorkRanges::kNone;) {
    const uint8_t* bytes = layer.base +
                           routing.active()[item / shape.num_stripes] * layer.expert_stride_bytes +
                           item % shape.num_stripes * layer.stripe_stride_bytes;
    uint64_t parts[8] = {};
    for (size_t line = 0; line < unit_size; line += sizeof(parts)) {
      __builtin_prefetch(bytes + line + kPrefetchBytes);
      uint64_t loaded[8];
      std::memcpy(loaded, bytes + line, sizeof(loaded));
      for (int i = 0; i < 8; ++i) parts[i] ^= loaded[i];
    }
    for (uint64_t part : parts) words ^= part;
  }
  read_words.fetch_xor(words, std::memory_order_relaxed);
}

Experts::Experts(const ExpertShape& shape, uint32_t max_tokens, Isa isa, ThreadPool& pool, Prefill prefill,
                 Activations activations)
    : impl_(std::make_unique<Impl>(shape, max_tokens, isa, prefill, activations, pool)) {
  if (!isa_available(isa)) {
    throw std::invalid_argument(std::string("isa: got ") + isa_name(isa) +
                                ", expected one that this machine can run");
  }
}

Experts::~Experts() = default;

static void check_format(WeightFormat format) {
  if (is_expert_format(format)) return;
  fail_shape("format", static_cast<uint64_t>(format), "one that experts come in");
}

void Experts::run(const LayerUnits& layer, const StepRows& rows, float* y) {
  impl_->check(rows);
  check_format(layer.format);
  if (rows.num_tokens == 0) return;
  ThreadPool::Claim claim(impl_->pool, "Experts.run");
  impl_->output = y;
  {
    const DenormalsOn denormals;
    impl_->use(layer);
    impl_->prepare(rows);
  }
  claim.run(impl_->work);
}

uint64_t Experts::read_units(const LayerUnits& layer, const StepRows& rows) {
  impl_->check(rows);
  check_format(layer.format);
  ThreadPool::Claim claim(impl_->pool, "Experts.run");
  impl_->routing.sort(rows);
  impl_->use(layer);
  impl_->items.reset(impl_->routing.active().size() * impl_->shape.num_stripes);
  impl_->read_words.store(0, std::memory_order_relaxed);
  claim.run(impl_->read_work);
  return impl_->read_words.load(std::memory_order_relaxed);
}

const ExpertShape& Experts::shape() const { return impl_->shape; }

Isa Experts::isa() const { return impl_->table.isa; }

const char* Experts::prefill() const { return impl_->bf16 != nullptr ? impl_->bf16->name : "f32"; }

const char* Experts::integer() const { return impl_->integers.name; }

}  // namespace duck
