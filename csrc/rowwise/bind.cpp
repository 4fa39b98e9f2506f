// Python bindings of the row-wise operations: duckllm._native.{rms_norm, layer_norm, silu_mul,
// scale_by_sigmoid, route_by_sigmoid, route_by_softmax}.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <cstring>
#include <string>

#include "kernels/arrays.h"
#include "kernels/denormals.h"
#include "kernels/experts.h"
#include "rowwise/route.h"
#include "rowwise/row_kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace duck {
namespace {

// "auto" is asked for once: every table gives the same bits.
const RowKernels& chosen(const char* isa) {
  if (std::strcmp(isa, "auto") != 0) return row_kernels(parse_isa("isa", isa));
  static const RowKernels& fastest = row_kernels(select_isa());
  return fastest;
}

// The rows of an array [size], [T, size] or [T, heads, size] whose rows are contiguous.
struct RowView {
  const float* data;
  size_t size, outer, inner;
  int64_t outer_stride, inner_stride;
  std::vector<size_t> shape;

  explicit RowView(const AnyArray& x) {
    check_dtype<float>("x", x, "float32");
    const size_t ndim = x.ndim();
    if (ndim < 1 || ndim > 3 || x.shape(ndim - 1) == 0) {
      fail("x", "shape " + shape_of(x), "shape [size], [T, size] or [T, heads, size], size at least 1");
    }
    for (size_t i = 0; i < ndim; ++i) shape.push_back(x.shape(i));
    size = shape.back();
    if (x.size() != 0 && size > 1 && x.stride(ndim - 1) != 1)
      fail("x", "strides that skip elements", "contiguous rows");
    data = static_cast<const float*>(x.data());
    inner = ndim >= 2 ? x.shape(ndim - 2) : 1;
    inner_stride = ndim >= 2 ? x.stride(ndim - 2) : 0;
    outer = ndim == 3 ? x.shape(0) : 1;
    outer_stride = ndim == 3 ? x.stride(0) : 0;
  }

  // Calls function(row, place of the row in a contiguous array).
  template <class Function>
  void each(Function function) const {
    size_t place = 0;
    for (size_t i = 0; i < outer; ++i) {
      for (size_t j = 0; j < inner; ++j, place += size) {
        function(data + static_cast<int64_t>(i) * outer_stride + static_cast<int64_t>(j) * inner_stride,
                 place);
      }
    }
  }
};

double checked_eps(double eps) {
  if (!(eps >= 0.0) || std::isinf(eps)) fail("eps", std::to_string(eps), "a finite number of 0 or more");
  return eps;
}

nb::object py_rms_norm(const AnyArray& x, const AnyArray& weight, double eps, const char* isa) {
  const RowView rows(x);
  const float* weights = checked<float>("weight", weight, "float32", {rows.size});
  const RowKernels& kernels = chosen(isa);
  checked_eps(eps);
  auto y = new_array<float>(rows.shape);
  {
    nb::gil_scoped_release release;
    const DenormalsOn denormals;
    rows.each([&](const float* row, size_t place) {
      kernels.rms_norm(row, weights, rows.size, eps, y.data() + place);
    });
  }
  return nb::cast(y);
}

nb::object py_layer_norm(const AnyArray& x, const AnyArray& weight, const AnyArray& bias, double eps,
                         const char* isa) {
  const RowView rows(x);
  const float* weights = checked<float>("weight", weight, "float32", {rows.size});
  const float* biases = checked<float>("bias", bias, "float32", {rows.size});
  const RowKernels& kernels = chosen(isa);
  checked_eps(eps);
  auto y = new_array<float>(rows.shape);
  {
    nb::gil_scoped_release release;
    const DenormalsOn denormals;
    rows.each([&](const float* row, size_t place) {
      kernels.layer_norm(row, weights, biases, rows.size, eps, y.data() + place);
    });
  }
  return nb::cast(y);
}

nb::object py_silu_mul(const AnyArray& gate_up, const char* isa) {
  if (gate_up.ndim() != 2 || gate_up.shape(1) % 2 != 0) {
    fail("gate_up", "shape " + shape_of(gate_up), "shape [T, 2 I]");
  }
  const size_t num_rows = gate_up.shape(0), size = gate_up.shape(1) / 2;
  const float* values = checked<float>("gate_up", gate_up, "float32", {num_rows, 2 * size});
  const RowKernels& kernels = chosen(isa);
  auto y = new_array<float>({num_rows, size});
  {
    nb::gil_scoped_release release;
    const DenormalsOn denormals;
    for (size_t row = 0; row < num_rows; ++row) {
      const float* gate = values + row * 2 * size;
      kernels.silu_mul(gate, gate + size, size, y.data() + row * size);
    }
  }
  return nb::cast(y);
}

void py_scale_by_sigmoid(const nb::object& values, const AnyArray& logits, const char* isa) {
  nb::ndarray<nb::device::cpu> array;
  if (!nb::try_cast(values, array, false)) fail("values", "something else", "a writable array");
  if (array.ndim() != 2) fail("values", "shape " + shape_of(array), "shape [T, H]");
  const size_t num_rows = array.shape(0), size = array.shape(1);
  float* rows = const_cast<float*>(checked<float>("values", array, "float32", {num_rows, size}));
  const float* gates = checked<float>("logits", logits, "float32", {num_rows, 1});
  const RowKernels& kernels = chosen(isa);
  nb::gil_scoped_release release;
  const DenormalsOn denormals;
  for (size_t row = 0; row < num_rows; ++row) {
    float factor;
    kernels.sigmoid(gates + row, 1, &factor);
    kernels.scale(rows + row * size, size, factor);
  }
}

uint32_t in_range(const char* field, int64_t value, int64_t most) {
  if (value < 1 || value > most) fail(field, std::to_string(value), "1 to " + std::to_string(most));
  return static_cast<uint32_t>(value);
}

nb::object py_route(Routing routing, const AnyArray& logits, const AnyArray* bias, int64_t top_k,
                    const char* isa) {
  constexpr size_t kMostExperts = 1 << 20;
  if (logits.ndim() != 2 || logits.shape(1) < 1 || logits.shape(1) > kMostExperts) {
    fail("logits", "shape " + shape_of(logits), "shape [T, E]");
  }
  const size_t num_rows = logits.shape(0), num_experts = logits.shape(1);
  const float* values = checked<float>("logits", logits, "float32", {num_rows, num_experts});
  const float* biases = bias ? checked<float>("correction_bias", *bias, "float32", {num_experts}) : nullptr;
  routing.num_experts = static_cast<uint32_t>(num_experts);
  routing.top_k = in_range("top_k", top_k, static_cast<int64_t>(num_experts));
  if (num_experts % routing.num_groups != 0) {
    fail("num_groups", std::to_string(routing.num_groups), "a divisor of " + std::to_string(num_experts));
  }
  const RowKernels& kernels = chosen(isa);
  auto ids = new_array<int32_t>({num_rows, routing.top_k});
  auto weights = new_array<float>({num_rows, routing.top_k});
  {
    nb::gil_scoped_release release;
    const DenormalsOn denormals;
    route(kernels, routing, values, biases, num_rows, ids.data(), weights.data());
  }
  return nb::make_tuple(ids, weights);
}

nb::object py_route_by_sigmoid(const AnyArray& logits, const AnyArray& correction_bias, int64_t top_k,
                               int64_t num_groups, int64_t topk_group, bool normalize, float scaling_factor,
                               const char* isa) {
  Routing routing;
  routing.num_groups = in_range("num_groups", num_groups, INT32_MAX);
  routing.topk_group = in_range("topk_group", topk_group, num_groups);
  routing.normalize = normalize;
  routing.scaling_factor = scaling_factor;
  return py_route(routing, logits, &correction_bias, top_k, isa);
}

nb::object py_route_by_softmax(const AnyArray& logits, int64_t top_k, bool normalize, const char* isa) {
  Routing routing;
  routing.scores = Scores::kSoftmax;
  routing.normalize = normalize;
  return py_route(routing, logits, nullptr, top_k, isa);
}

}  // namespace

void bind_rowwise(nb::module_& m) {
  constexpr const char* kNorm =
      "Raises:\n    ValueError: a wrong shape or type, rows that are not contiguous, or an eps below 0.\n\n"
      "Threading:\n    Releases the interpreter.\n\n"
      "Reference:\n    tests/rowwise, float64, with the bound of csrc/rowwise/row_kernels.h";
  m.def("rms_norm", &py_rms_norm, "x"_a.noconvert(), "weight"_a.noconvert(), "eps"_a, "isa"_a = "auto",
        nb::sig("def rms_norm(x: numpy.typing.NDArray[numpy.float32], "
                "weight: numpy.typing.NDArray[numpy.float32], eps: float, isa: str = 'auto') -> "
                "numpy.typing.NDArray[numpy.float32]"),
        (std::string("x / sqrt(mean(x^2) + eps) * weight over the last dimension.\n\n"
                     "Shapes:\n    x: [size], [T, size] or [T, heads, size] f32, rows of any distance\n"
                     "    weight: [size] f32; result: of x, contiguous\n\n") +
         kNorm)
            .c_str());
  m.def("layer_norm", &py_layer_norm, "x"_a.noconvert(), "weight"_a.noconvert(), "bias"_a.noconvert(),
        "eps"_a, "isa"_a = "auto",
        nb::sig("def layer_norm(x: numpy.typing.NDArray[numpy.float32], "
                "weight: numpy.typing.NDArray[numpy.float32], bias: numpy.typing.NDArray[numpy.float32], "
                "eps: float, isa: str = 'auto') -> numpy.typing.NDArray[numpy.float32]"),
        (std::string("(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last dimension.\n\n"
                     "Shapes:\n    x: [size], [T, size] or [T, heads, size] f32, rows of any distance\n"
                     "    weight, bias: [size] f32; result: of x, contiguous\n\n") +
         kNorm)
            .c_str());
  m.def("silu_mul", &py_silu_mul, "gate_up"_a.noconvert(), "isa"_a = "auto",
        nb::sig("def silu_mul(gate_up: numpy.typing.NDArray[numpy.float32], isa: str = 'auto') -> "
                "numpy.typing.NDArray[numpy.float32]"),
        "silu(gate) * up, the two side by side.\n\n"
        "Shapes:\n    gate_up: [T, 2 I] f32; result: [T, I] f32\n\n"
        "Raises:\n    ValueError: a wrong shape or type.\n\n"
        "Threading:\n    Releases the interpreter.\n\n"
        "Reference:\n    tests/rowwise, float64, with the bound of csrc/rowwise/row_kernels.h");
  m.def("scale_by_sigmoid", &py_scale_by_sigmoid, "values"_a, "logits"_a.noconvert(), "isa"_a = "auto",
        nb::sig("def scale_by_sigmoid(values: numpy.typing.NDArray[numpy.float32], "
                "logits: numpy.typing.NDArray[numpy.float32], isa: str = 'auto') -> None"),
        "Multiplies each row of values by the sigmoid of its logit, in place.\n\n"
        "Shapes:\n    values: [T, H] f32; logits: [T, 1] f32\n\n"
        "Raises:\n    ValueError: a wrong shape or type; values are then untouched.\n\n"
        "Threading:\n    Releases the interpreter.");
  constexpr const char* kRoute =
      "Shapes:\n    logits: [T, E] f32; topk_ids: [T, K] int32; topk_weights: [T, K] f32\n\n"
      "Raises:\n    ValueError: a wrong shape or type, or a number out of range.\n\n"
      "Threading:\n    Releases the interpreter.\n\n"
      "Reference:\n    tests/moe/test_router.py and tests/rowwise have scalar twins";
  m.def(
      "route_by_sigmoid", &py_route_by_sigmoid, "logits"_a.noconvert(), "correction_bias"_a.noconvert(),
      "top_k"_a, "num_groups"_a, "topk_group"_a, "normalize"_a, "scaling_factor"_a, "isa"_a = "auto",
      nb::sig("def route_by_sigmoid(logits: numpy.typing.NDArray[numpy.float32], "
              "correction_bias: numpy.typing.NDArray[numpy.float32], top_k: int, num_groups: int, "
              "topk_group: int, normalize: bool, scaling_factor: float, isa: str = 'auto') -> "
              "tuple[numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.float32]]"),
      (std::string("topk_ids and topk_weights by sigmoid scores, as csrc/rowwise/route.h says.\n\n") + kRoute)
          .c_str());
  m.def("route_by_softmax", &py_route_by_softmax, "logits"_a.noconvert(), "top_k"_a, "normalize"_a,
        "isa"_a = "auto",
        nb::sig("def route_by_softmax(logits: numpy.typing.NDArray[numpy.float32], top_k: int, "
                "normalize: bool, isa: str = 'auto') -> "
                "tuple[numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.float32]]"),
        (std::string("topk_ids and topk_weights by a softmax over all experts.\n\n") + kRoute).c_str());
}

}  // namespace duck
