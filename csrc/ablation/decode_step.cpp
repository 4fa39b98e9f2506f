#include "ablation/decode_step.h"

#include <algorithm>

namespace duck::ablation {

DecodeStep::DecodeStep(uint32_t hidden_size, uint32_t num_stripes, uint32_t max_experts, Isa isa,
                       ThreadPool& pool)
    : hidden_size_(hidden_size),
      num_stripes_(num_stripes),
      num_records_(hidden_size / kRecordRows),
      num_parts_(ceil_div(num_records_, kPartRecords)),
      table_(kernel_table(isa)),
      production_(table_.formats[static_cast<int>(WeightFormat::kFp9)]),
      pool_(pool),
      scaled_x_(hidden_size),
      activations_(static_cast<size_t>(max_experts) * num_stripes * kStripeChannels),
      partial_dots_(static_cast<size_t>(max_experts) * num_stripes * num_parts_ * kDotFloats),
      parts_left_(static_cast<size_t>(max_experts) * num_stripes),
      items_(pool.num_threads()),
      work_([this](int thread) { work(thread); }) {}

Unit DecodeStep::unit(size_t index, uint32_t stripe) const {
  const size_t size = unit_bytes(WeightFormat::kFp9, hidden_size_);
  return Unit(layer_.base + experts_[index].first * layer_.expert_bytes + stripe * size, WeightFormat::kFp9,
              hidden_size_);
}

Unit DecodeStep::unit_after(size_t index, uint32_t stripe) const {
  if (stripe + 1 < num_stripes_) return unit(index, stripe + 1);
  return index + 1 < experts_.size() ? unit(index + 1, 0) : unit(index, stripe);
}

void DecodeStep::run(const Variant& variant, const Layer& layer, const int32_t* ids, const float* weights,
                     uint32_t num_experts, const float* x, float* y) {
  variant_ = &variant;
  dots2_ = variant.dots2 != nullptr ? variant.dots2 : production_.dots2;
  down_ = variant.down != nullptr ? variant.down : production_.down;
  prefetch_bytes_ = variant.prefetch_bytes >= 0 ? variant.prefetch_bytes : production_prefetch_bytes_;
  layer_ = layer;
  experts_.clear();
  for (uint32_t k = 0; k < num_experts; ++k) experts_.emplace_back(ids[k], weights[k]);
  std::sort(experts_.begin(), experts_.end());
  x_ = x;
  if (variant.scale_x) {
    for (uint32_t i = 0; i < hidden_size_; ++i) scaled_x_.data()[i] = x[i] * prescale(WeightFormat::kFp9);
    x_ = scaled_x_.data();
  }
  y_ = y;
  const size_t num_units = static_cast<size_t>(num_experts) * num_stripes_;
  for (size_t i = 0; i < num_units; ++i) parts_left_[i].store(num_parts_, std::memory_order_relaxed);
  items_.reset(num_units * num_parts_);
  pool_.run(work_);
}

void DecodeStep::work(int thread) {
  for (uint64_t item; (item = items_.take(thread)) != WorkRanges::kNone;) gate_up_part(item);
  pool_.barrier();
  run_down(thread);
}

void DecodeStep::gate_up_part(uint64_t item) {
  const uint32_t part = item % num_parts_;
  const uint64_t index = item / num_parts_;
  const uint32_t stripe = index % num_stripes_;
  const size_t expert = index / num_stripes_;
  const Unit at = unit(expert, stripe);
  if (variant_->prefetch_expert && part == 0 && stripe == 0) {
    const uint8_t* payload = layer_.base + experts_[expert].first * layer_.expert_bytes;
    const size_t bytes = num_stripes_ * unit_bytes(WeightFormat::kFp9, hidden_size_);
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(payload + i);
  }
  Stream stream;
  stream.prefetch_bytes = prefetch_bytes_;
  stream.records = at.gate_up;
  stream.scales[0] = at.gate_scales;
  stream.scales[1] = at.up_scales;
  stream.first_record = part * kPartRecords;
  stream.end_record = std::min(num_records_, stream.first_record + kPartRecords);
  stream.next = part + 1 < num_parts_ ? at.gate_up + static_cast<size_t>(stream.end_record) * 2 *
                                                         record_bytes(WeightFormat::kFp9)
                                      : unit_after(expert, stripe).gate_up;
  float* unit_dots = partial_dots_.data() + index * num_parts_ * kDotFloats;
  dots2_(stream, &x_, 1, unit_dots + part * kDotFloats);
  if (parts_left_[index].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  float dots[kDotFloats] = {};
  for (uint32_t i = 0; i < num_parts_; ++i) {
    for (uint32_t lane = 0; lane < kDotFloats; ++lane) dots[lane] += unit_dots[i * kDotFloats + lane];
  }
  table_.activate(dots, experts_[expert].second, prescale(WeightFormat::kFp9), kStripeChannels,
                  activations_.data() + index * kStripeChannels);
}

void DecodeStep::run_down(int thread) {
  // Whole scale blocks a thread, so that a block of outputs is never cut.
  const uint32_t blocks = num_records_ / kRecordsPerBlock;
  const uint32_t first = blocks * thread / pool_.num_threads() * kRecordsPerBlock;
  const uint32_t end = blocks * (thread + 1) / pool_.num_threads() * kRecordsPerBlock;
  std::fill(y_ + static_cast<size_t>(first) * kRecordRows, y_ + static_cast<size_t>(end) * kRecordRows, 0.0f);
  const uint32_t step = variant_->down_records != 0 ? variant_->down_records : end - first;
  for (size_t expert = 0; expert < experts_.size(); ++expert) {
    for (uint32_t record = first; record < end; record += step) {
      for (uint32_t stripe = 0; stripe < num_stripes_; ++stripe) {
        const Unit at = unit(expert, stripe);
        const float* activations = activations_.data() + (expert * num_stripes_ + stripe) * kStripeChannels;
        down_(at.down, at.down_scales, &activations, &y_, 1, record, std::min(end, record + step),
              unit_after(expert, stripe).down, prefetch_bytes_);
      }
    }
  }
}

}  // namespace duck::ablation
