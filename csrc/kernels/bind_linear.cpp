// Python bindings of the dense linear layers: duckllm._native.{LinearRuntime, pack_linear, linear_bytes}.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <sys/mman.h>

#include <new>
#include <string>

#include "kernels/arrays.h"
#include "kernels/experts.h"
#include "kernels/linear.h"
#include "kernels/linear_pool.h"
#include "kernels/pack.h"
#include "kernels/pack_linear.h"
#include "kernels/weight_format.h"
#include "threads/thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace duck {
namespace {

WeightFormat parse_linear_format(const std::string& name) {
  if (name == "bf16") return WeightFormat::kBf16;
  if (name == "f32") return WeightFormat::kF32;
  if (name == "fp8" || name == "fp9" || name == "fp8-normal") return parse_format(name);
  fail("format", "'" + name + "'", "bf16, f32, fp8 or fp9");
}

uint32_t feature_count(const char* field, int64_t value) {
  constexpr int64_t kMost = 1 << 24;
  if (value < 1 || value > kMost) fail(field, std::to_string(value), "1 to " + std::to_string(kMost));
  return static_cast<uint32_t>(value);
}

// Aligned for the kernels, and on huge pages where it is large and the system gives them: a weight is read
// from end to end, and each small page on the way costs a look-up.
nb::ndarray<nb::numpy, uint8_t> new_weight(size_t size) {
  constexpr size_t kHugePage = 2 << 20;
  constexpr std::align_val_t kCacheLine{64}, kLarge{kHugePage};
  const bool large = size >= kHugePage;
  auto* data = static_cast<uint8_t*>(::operator new(size, large ? kLarge : kCacheLine));
  if (large) madvise(data, size, MADV_HUGEPAGE);  // advice: small pages do too
  nb::capsule owner(
      data, large ? [](void* p) noexcept { ::operator delete(p, kLarge); }
                  : [](void* p) noexcept { ::operator delete(p, kCacheLine); });
  return nb::ndarray<nb::numpy, uint8_t>(data, {size}, owner);
}

const void* checked_weight(const AnyArray& weight, WeightFormat format, const std::vector<size_t>& shape) {
  if (format == WeightFormat::kF32) return checked<float>("weight", weight, "float32", shape);
  if (format == WeightFormat::kBf16) return checked<uint16_t>("weight", weight, "bfloat16 as uint16", shape);
  return checked<uint8_t>("weight", weight, "e4m3 as uint8", shape);
}

nb::object py_pack_linear(const AnyArray& weight, const std::string& format_name) {
  const WeightFormat format = parse_linear_format(format_name);
  if (weight.ndim() != 2) fail("weight", "shape " + shape_of(weight), "shape [N, K]");
  const uint32_t out_features = feature_count("out_features", static_cast<int64_t>(weight.shape(0)));
  const uint32_t in_features = feature_count("in_features", static_cast<int64_t>(weight.shape(1)));
  const void* data = checked_weight(weight, format, {out_features, in_features});
  auto packed = new_weight(linear_bytes(out_features, in_features, format));
  size_t num_nan = 0;
  {
    nb::gil_scoped_release release;
    if (has_scales(format)) {
      num_nan =
          count_nan_e4m3(static_cast<const uint8_t*>(data), static_cast<size_t>(out_features) * in_features);
    }
    if (num_nan == 0) pack_linear(data, out_features, in_features, format, packed.data());
  }
  if (num_nan != 0) fail("weight", std::to_string(num_nan) + " NaN bytes (0x7f, 0xff)", "none");
  return nb::cast(packed);
}

// Linear with a thread pool of its own.
class PyLinearRuntime {
 public:
  PyLinearRuntime(int64_t max_rows, int64_t max_in_features, int num_threads, int spin_us,
                  const std::string& isa)
      : pool_(num_threads, spin_us),
        linear_(as_u32("max_rows", max_rows), as_u32("max_in_features", max_in_features),
                isa == "auto" ? select_isa() : parse_isa("isa", isa), pool_) {}

  nb::object run(const AnyArray& packed, const nb::object& scales, int64_t out_features, int64_t in_features,
                 const std::string& format, const AnyArray& x, nb::object out) {
    LinearWeight weight;
    weight.out_features = feature_count("out_features", out_features);
    weight.in_features = feature_count("in_features", in_features);
    weight.format = parse_linear_format(format);
    weight.records = checked<uint8_t>("packed", packed, "uint8",
                                      {linear_bytes(weight.out_features, weight.in_features, weight.format)});
    AnyArray scale_array;
    if (has_scales(weight.format)) {
      if (!nb::try_cast(scales, scale_array, false)) fail("scales", "something else", "a float32 array");
      weight.scales = checked<float>(
          "scales", scale_array, "float32",
          {ceil_div(weight.out_features, kScaleBlock), ceil_div(weight.in_features, kScaleBlock)});
    } else if (!scales.is_none()) {
      fail("scales", "an object", "None, as " + format + " has none");
    }
    if (x.ndim() != 2) {
      fail("x", "shape " + shape_of(x), "shape [T, " + std::to_string(weight.in_features) + "]");
    }
    const size_t num_rows = x.shape(0);
    LinearRows rows;
    rows.num_rows = as_u32("num_rows", static_cast<int64_t>(num_rows));
    if (x.dtype() == nb::dtype<float>()) {
      rows.x = checked<float>("x", x, "float32", {num_rows, weight.in_features});
    } else {
      rows.x = checked<uint16_t>("x", x, "float32, or bfloat16 as uint16", {num_rows, weight.in_features});
      rows.type = ActivationType::kBf16;
    }
    if (out.is_none()) out = nb::cast(new_array<float>({num_rows, weight.out_features}));
    const auto result = writable_array(out);
    float* y = const_cast<float*>(checked<float>("out", result, "float32", {num_rows, weight.out_features}));
    {
      nb::gil_scoped_release release;
      linear_.run(weight, rows, y);
    }
    return out;
  }

  std::string isa() const { return isa_name(linear_.isa()); }
  int num_threads() const { return pool_.num_threads(); }
  uint32_t max_in_features() const { return linear_.max_in_features(); }
  LinearPool shared() { return {pool_, linear_.isa()}; }

 private:
  ThreadPool pool_;
  Linear linear_;
};

}  // namespace

LinearPool linear_pool(nb::handle runtime) { return nb::cast<PyLinearRuntime&>(runtime).shared(); }

void bind_linear(nb::module_& m) {
  m.def(
      "linear_bytes",
      [](int64_t out_features, int64_t in_features, const std::string& format) {
        return linear_bytes(feature_count("out_features", out_features),
                            feature_count("in_features", in_features), parse_linear_format(format));
      },
      "out_features"_a, "in_features"_a, "format"_a,
      "Bytes of a packed weight [N, K] in the format bf16, f32, fp8 or fp9, its scales not counted.\n\n"
      "Raises:\n    ValueError: another format, or a size out of range.");
  m.def("pack_linear", &py_pack_linear, "weight"_a.noconvert(), "format"_a,
        nb::sig("def pack_linear(weight: numpy.typing.NDArray[numpy.uint8] | "
                "numpy.typing.NDArray[numpy.uint16] | numpy.typing.NDArray[numpy.float32], format: str) -> "
                "numpy.typing.NDArray[numpy.uint8]"),
        "Packs a dense weight for LinearRuntime.\n\n"
        "Shapes:\n"
        "    weight: [N, K], e4m3 as uint8 for fp8 and fp9, bfloat16 as uint16 for bf16, float32 for f32\n"
        "    result: [linear_bytes(N, K, format)] uint8\n\n"
        "Raises:\n    ValueError: a wrong shape or type, or NaN bytes of e4m3 (with their count).");

  nb::class_<PyLinearRuntime>(
      m, "LinearRuntime",
      "What dense linear layers share: threads and scratch memory.\n\n"
      "One run at a time. csrc/kernels/linear.h states the order of summation, the error bound and the\n"
      "valid ranges; a row's result depends neither on the other rows nor on the threads.\n\n"
      "max_rows: rows that the scratch memory holds; more of them are taken by turns.\n"
      "max_in_features: the largest in_features.")
      .def(nb::init<int64_t, int64_t, int, int, const std::string&>(), "max_rows"_a, "max_in_features"_a,
           "num_threads"_a, "spin_us"_a, "isa"_a = "auto")
      .def("run", &PyLinearRuntime::run, "packed"_a.noconvert(), "scales"_a.none(), "out_features"_a,
           "in_features"_a, "format"_a, "x"_a.noconvert(), "out"_a = nb::none(),
           nb::sig("def run(self, packed: numpy.typing.NDArray[numpy.uint8], "
                   "scales: numpy.typing.NDArray[numpy.float32] | None, out_features: int, in_features: int, "
                   "format: str, "
                   "x: numpy.typing.NDArray[numpy.float32] | numpy.typing.NDArray[numpy.uint16], "
                   "out: numpy.typing.NDArray[numpy.float32] | None = None) -> "
                   "numpy.typing.NDArray[numpy.float32]"),
           "y = x W^T, [T, N] f32.\n\n"
           "Shapes:\n"
           "    packed: of pack_linear; scales: [ceil(N/128), ceil(K/128)] f32, None for bf16 and f32\n"
           "    x: [T, K] f32, or bf16 as uint16; out, result: [T, N] f32\n\n"
           "Raises:\n    ValueError: a wrong shape or type, or K over max_in_features; out is then "
           "untouched.\n\n"
           "Threading:\n    Releases the interpreter; one run at a time per object, and in the process that "
           "made\n"
           "    it: others are refused with RuntimeError.\n\n"
           "Reference:\n    tests/linear/linear_reference.py, float64, with the bound of linear.h")
      .def_prop_ro("isa", &PyLinearRuntime::isa)
      .def_prop_ro("num_threads", &PyLinearRuntime::num_threads)
      .def_prop_ro("max_in_features", &PyLinearRuntime::max_in_features);
}

}  // namespace duck
