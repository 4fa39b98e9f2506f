// Python bindings of the quantiser and of the packer of 4-bit formats. Checks types, shapes and sizes;
// computes with the interpreter released.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/arrays.h"
#include "kernels/experts.h"
#include "kernels/pack_grouped.h"
#include "kernels/quantise.h"
#include "kernels/weight_format.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace duck {
namespace {

struct Weights {
  const float* data;
  size_t rows, columns;
};

Weights checked_weights(const AnyArray& weights) {
  if (weights.ndim() != 2) fail("weights", "shape " + shape_of(weights), "shape [rows, columns]");
  const size_t rows = weights.shape(0), columns = weights.shape(1);
  return {checked<float>("weights", weights, "float32", {rows, columns}), rows, columns};
}

size_t count_not_finite(const float* values, size_t size) {
  size_t count = 0;
  for (size_t i = 0; i < size; ++i) count += !(std::abs(values[i]) <= 3.4028234663852886e38f);
  return count;
}

void refuse_not_finite(size_t count) {
  if (count != 0) fail("weights", std::to_string(count) + " values that are not finite", "none");
}

nb::tuple as_tuple(const RoundingSums& sums) {
  return nb::make_tuple(sums.squared_error, sums.squared_source, static_cast<double>(sums.max_relative),
                        sums.flushed);
}

nb::tuple py_quantise_int8_blocks(const AnyArray& array) {
  const Weights weights = checked_weights(array);
  auto codes = new_array<uint8_t>({weights.rows, weights.columns});
  auto scales =
      new_array<float>({ceil_div(weights.rows, kScaleBlock), ceil_div(weights.columns, kScaleBlock)});
  RoundingSums sums;
  size_t not_finite = 0;
  {
    nb::gil_scoped_release release;
    not_finite = count_not_finite(weights.data, weights.rows * weights.columns);
    if (not_finite == 0) {
      sums = quantise_int8_blocks(weights.data, weights.rows, weights.columns, codes.data(), scales.data());
    }
  }
  refuse_not_finite(not_finite);
  return nb::make_tuple(codes, scales, as_tuple(sums));
}

nb::tuple py_quantise_int4_groups(const AnyArray& array, int64_t group_size, const std::string& scale_type,
                                  const nb::object& importance, const std::string& isa_name) {
  const Weights weights = checked_weights(array);
  if (group_size < 1 || group_size > static_cast<int64_t>(kMostGroup)) {
    fail("group_size", std::to_string(group_size), "1 to " + std::to_string(kMostGroup));
  }
  if (scale_type != "f16" && scale_type != "bf16") fail("scale_type", "'" + scale_type + "'", "f16 or bf16");
  AnyArray factors;
  const float* importance_data = nullptr;
  if (!importance.is_none()) {
    if (!nb::try_cast(importance, factors, false)) fail("importance", "something else", "an array, or None");
    importance_data = checked<float>("importance", factors, "float32", {weights.columns});
    for (size_t i = 0; i < weights.columns; ++i) {
      if (!(importance_data[i] > 0.0f && importance_data[i] <= 1e6f)) {
        fail("importance", std::to_string(importance_data[i]), "numbers above 0, at most 1e6");
      }
    }
  }
  const Isa isa = isa_name == "auto" ? select_isa() : parse_isa("isa", isa_name);
  auto codes = new_array<uint8_t>({weights.rows, weights.columns});
  auto words = new_array<uint16_t>({weights.rows, ceil_div(weights.columns, group_size)});
  RoundingSums sums;
  size_t not_finite = 0;
  {
    nb::gil_scoped_release release;
    not_finite = count_not_finite(weights.data, weights.rows * weights.columns);
    if (not_finite == 0) {
      sums = quantise_int4_groups(
          {weights.data, importance_data, weights.rows, weights.columns, static_cast<size_t>(group_size),
           scale_type == "bf16", codes.data(), words.data()},
          isa);
    }
  }
  refuse_not_finite(not_finite);
  return nb::make_tuple(codes, words, as_tuple(sums));
}

nb::object py_pack_grouped_units(const std::vector<AnyArray>& codes, const std::vector<AnyArray>& words,
                                 const std::vector<nb::object>& zeros, const std::vector<size_t>& group_sizes,
                                 const std::string& format_name) {
  const WeightFormat format = parse_format(format_name);
  if (!is_grouped(format)) fail("format", format_name, "int4, another format of groups, or mxfp4");
  for (size_t size : {codes.size(), words.size(), zeros.size(), group_sizes.size()}) {
    if (size != 3) fail("matrices", std::to_string(size), "3: gate, up and down");
  }
  if (codes[0].ndim() != 2 || codes[0].shape(0) == 0 || codes[0].shape(1) == 0) {
    fail("gate", "shape " + shape_of(codes[0]), "shape [I, H] with both at least 1");
  }
  GroupedExpert expert;
  const size_t intermediate = expert.intermediate_size = codes[0].shape(0);
  const size_t hidden = expert.hidden_size = codes[0].shape(1);
  GroupedMatrix* matrices[3] = {&expert.gate, &expert.up, &expert.down};
  const char* names[3] = {"gate", "up", "down"};
  AnyArray zero_arrays[3];
  for (size_t i = 0; i < 3; ++i) {
    const size_t rows = i == 2 ? hidden : intermediate, columns = i == 2 ? intermediate : hidden;
    const size_t multiple = i == 2 ? kStripeChannels : kRecordRows, size = group_sizes[i];
    if (size == 0 || (size % multiple != 0 && size < columns)) {
      fail(names[i], "groups of " + std::to_string(size), "a multiple of " + std::to_string(multiple));
    }
    GroupedMatrix& matrix = *matrices[i];
    const std::vector<size_t> groups = {rows, ceil_div(columns, size)};
    matrix.codes = checked<uint8_t>(names[i], codes[i], "uint8", {rows, columns});
    matrix.scale_words = checked<uint16_t>(names[i], words[i], "uint16", groups);
    matrix.group_size = size;
    if (zeros[i].is_none()) continue;
    if (!has_zero_points(format)) fail(names[i], "zero points", "none for " + format_name);
    if (!nb::try_cast(zeros[i], zero_arrays[i], false)) fail(names[i], "something else", "an array, or None");
    matrix.zeros = checked<uint8_t>(names[i], zero_arrays[i], "uint8", groups);
  }
  auto units = new_array<uint8_t>({ceil_div(intermediate, kStripeChannels), unit_bytes(format, hidden)});
  {
    nb::gil_scoped_release release;
    pack_grouped_units(expert, format, units.data());
  }
  return nb::cast(units);
}

}  // namespace

void bind_grouped(nb::module_& m) {
  m.def("quantise_int8_blocks", &py_quantise_int8_blocks, "weights"_a.noconvert(),
        nb::sig("def quantise_int8_blocks(weights: numpy.typing.NDArray[numpy.float32]) -> "
                "tuple[numpy.typing.NDArray[numpy.uint8], numpy.typing.NDArray[numpy.float32], "
                "tuple[float, float, float, int]]"),
        "Quantises f32 weights to bytes q + 128 with one scale, amax / 127, per 128x128 block.\n\n"
        "Shapes:\n    weights: [R, C] f32\n"
        "    result: ([R, C] uint8, [ceil(R/128), ceil(C/128)] f32, sums: squared error, squared source,\n"
        "        largest error over its block's largest weight, weights that became 0)\n\n"
        "Raises:\n    ValueError: a weight is not finite (with their count).\n\n"
        "Reference:\n    duckllm.weights.rounding, byte for byte");
  m.def(
      "quantise_int4_groups", &py_quantise_int4_groups, "weights"_a.noconvert(), "group_size"_a,
      "scale_type"_a = "f16", "importance"_a = nb::none(), "isa"_a = "auto",
      nb::sig("def quantise_int4_groups(weights: numpy.typing.NDArray[numpy.float32], group_size: int, "
              "scale_type: str = 'f16', importance: numpy.typing.NDArray[numpy.float32] | None = None, "
              "isa: str = 'auto') -> tuple[numpy.typing.NDArray[numpy.uint8], "
              "numpy.typing.NDArray[numpy.uint16], tuple[float, float, float, int]]"),
      "Quantises f32 weights to codes q + 8 with a 16-bit scale per group along the columns, searched for\n"
      "the least squared error, weighted by the importance of columns; csrc/kernels/quantise.h says how.\n\n"
      "Shapes:\n    weights: [R, C] f32; importance: [C] f32\n"
      "    result: ([R, C] uint8, [R, ceil(C/group_size)] uint16, sums as of quantise_int8_blocks)\n\n"
      "Raises:\n    ValueError: a weight is not finite (with their count), or an argument is out of "
      "range.\n\n"
      "Reference:\n    duckllm.weights.rounding, byte for byte");
  m.def("pack_grouped_units", &py_pack_grouped_units, "codes"_a, "scale_words"_a, "zeros"_a, "group_sizes"_a,
        "format"_a,
        nb::sig("def pack_grouped_units(codes: list[numpy.typing.NDArray[numpy.uint8]], "
                "scale_words: list[numpy.typing.NDArray[numpy.uint16]], "
                "zeros: list[numpy.typing.NDArray[numpy.uint8] | None], group_sizes: list[int], "
                "format: str) -> numpy.typing.NDArray[numpy.uint8]"),
        "Packs one expert of 4-bit codes, its gate, up and down, into units of a format of groups.\n\n"
        "Shapes:\n"
        "    codes: [I, H], [I, H], [H, I] uint8, 0 to 15; scale_words, zeros: [rows, groups]\n"
        "    result: [ceil(I/16), unit_bytes(H, format, 'group')] uint8\n\n"
        "Raises:\n    ValueError: a wrong shape, type or size of groups, or zero points that the format has "
        "not.\n\n"
        "Reference:\n    duckllm.weights.grouped, byte for byte");
}

}  // namespace duck
