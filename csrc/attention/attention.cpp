// Attention: its parts put together, and the products of heads.
#include "attention/attention.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "attention/attend_impl.h"
#include "attention/select_impl.h"
#include "attention/workspace.h"
#include "kernels/denormals.h"

namespace duck::attention {
namespace {

constexpr uint32_t kProductRows = 48;  // of an item of multiply_heads

}  // namespace

struct Attention::Impl {
  Impl(Isa isa, ThreadPool& pool) : shared(isa, pool), attend(shared), select(shared) {}

  Shared shared;
  Attend attend;
  Select select;

  void multiply_heads(const HeadProduct& product) {
    const uint32_t num_blocks = blocks_of(product.num_rows, kProductRows);
    const size_t matrix = static_cast<size_t>(product.inputs) * padded(product.outputs);
    shared.items.reset(static_cast<uint64_t>(product.num_heads) * num_blocks);
    const uint64_t products = static_cast<uint64_t>(product.num_rows) * product.num_heads * matrix;
    shared.run(products, [&](int thread) {
      const DenormalsOn denormals;
      for (uint64_t item; (item = shared.items.take(thread)) != WorkRanges::kNone;) {
        const auto head = static_cast<uint32_t>(item / num_blocks);
        const uint32_t row = static_cast<uint32_t>(item % num_blocks) * kProductRows;
        const uint32_t count = std::min(kProductRows, product.num_rows - row);
        float* panel = shared.workspaces[thread].panel.of(panel_size(count, product.inputs));
        for (uint32_t i = 0; i < count; ++i) {
          fill_panel(product.x + (row + i) * product.x_row + head * product.x_head, product.inputs, count, i,
                     1.0f, panel);
        }
        shared.table.multiply(panel, count, product.inputs, product.w + head * matrix, product.outputs,
                              product.y + row * product.y_row + head * product.y_head, product.y_row);
      }
    });
  }
};

Attention::Attention(Isa isa, ThreadPool& pool) : impl_(std::make_unique<Impl>(isa, pool)) {
  if (!isa_available(isa)) {
    throw std::invalid_argument(std::string("isa: got ") + isa_name(isa) +
                                ", expected one that this machine can run");
  }
}

Attention::~Attention() = default;

void Attention::attend(const StepContexts& step, const AttendShape& shape, const float* q, Rows keys,
                       Rows values, Selection selection, float* out) {
  const Shared::Use use(impl_->shared, "Attention.attend");
  impl_->attend.run(step, {shape, q, keys, values, selection, out});
}

void Attention::select(const StepContexts& step, uint32_t num_heads, uint32_t dim, const float* q,
                       const float* w, Rows keys, uint32_t topk, int32_t* out) {
  const Shared::Use use(impl_->shared, "Attention.select");
  impl_->select.run(step, num_heads, dim, q, w, keys, topk, out);
}

void Attention::multiply_heads(const HeadProduct& product) {
  const Shared::Use use(impl_->shared, "Attention.multiply_heads");
  impl_->multiply_heads(product);
}

const AttentionTable& attention_table(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return avx2::kTable;
    case Isa::kAvx512:
      return avx512::kTable;
    case Isa::kScalar:
      break;
  }
  return scalar::kTable;
}

}  // namespace duck::attention
