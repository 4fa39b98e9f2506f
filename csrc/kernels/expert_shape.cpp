// Which shapes and formats of Experts make sense.
#include <stdexcept>
#include <string>
#include <utility>

#include "kernels/experts.h"
#include "kernels/kernel_table.h"
#include "kernels/weight_format.h"

namespace duck {

void fail_shape(const std::string& field, uint64_t got, const std::string& expected) {
  throw std::invalid_argument(field + ": got " + std::to_string(got) + ", expected " + expected);
}

Prefill parse_prefill(const std::string& name) {
  if (name == "f32") return Prefill::kF32;
  if (name == "bf16") return Prefill::kBf16;
  throw std::invalid_argument("prefill: got '" + name + "', expected 'f32' or 'bf16'");
}

Activations parse_activations(const std::string& name) {
  if (name == "int8") return Activations::kInt8;
  if (name == "f32") return Activations::kF32;
  throw std::invalid_argument("activations: got '" + name + "', expected 'int8' or 'f32'");
}

WeightFormat parse_format(const std::string& name) {
  if (name == "fp9") return WeightFormat::kFp9;
  if (name == "fp8") return WeightFormat::kFp8;
  if (name == "fp8-normal") return WeightFormat::kFp8Normal;
  if (name == "int8") return WeightFormat::kInt8;
  if (name == "int4") return WeightFormat::kInt4;
  if (name == "int4-bf16") return WeightFormat::kInt4Bf16;
  if (name == "int4-zero") return WeightFormat::kInt4Zero;
  if (name == "int4-zero-bf16") return WeightFormat::kInt4ZeroBf16;
  if (name == "mxfp4") return WeightFormat::kMxfp4;
  throw std::invalid_argument(
      "format: got '" + name +
      "', expected fp9, fp8, int8, int4, int4-bf16, int4-zero, int4-zero-bf16 or mxfp4");
}

ScaleLayout parse_scale_layout(const std::string& name) {
  if (name == "block") return ScaleLayout::kBlock;
  if (name == "channel") return ScaleLayout::kChannel;
  if (name == "group") return ScaleLayout::kGroup;
  throw std::invalid_argument("scale_layout: got '" + name + "', expected block, channel or group");
}

ExpertShape checked_shape(const ExpertShape& shape, uint32_t max_tokens) {
  constexpr uint32_t kMost = 1u << 24;  // far above any model; keeps every product below within 64 bits
  for (auto [field, value] :
       {std::pair{"hidden_size", shape.hidden_size}, std::pair{"intermediate_size", shape.intermediate_size},
        std::pair{"num_experts", shape.num_experts}, std::pair{"top_k", shape.top_k},
        std::pair{"num_stripes", shape.num_stripes}, std::pair{"max_tokens", max_tokens}}) {
    if (value == 0) fail_shape(field, value, "at least 1");
    if (value > kMost) fail_shape(field, value, "at most " + std::to_string(kMost));
  }
  const uint64_t stripes = ceil_div(shape.intermediate_size, kStripeChannels);
  const uint64_t end = static_cast<uint64_t>(shape.first_stripe) + shape.num_stripes;
  if (end > stripes) {
    fail_shape("first_stripe + num_stripes", end,
               "at most " + std::to_string(stripes) + ", the stripes of intermediate_size " +
                   std::to_string(shape.intermediate_size));
  }
  return shape;
}

}  // namespace duck
