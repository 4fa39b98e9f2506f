// Python bindings of the kernels: duckllm._native.{Experts, select_isa, ...}. Checks types, shapes and sizes;
// computes with the interpreter released.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "kernels/arrays.h"
#include "kernels/bf16_tiles.h"
#include "kernels/experts.h"
#include "kernels/integer_kernels.h"
#include "kernels/pack.h"
#include "kernels/weight_format.h"
#include "threads/on_core.h"
#include "threads/thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace duck {
namespace {

// Experts with a thread pool of its own.
class PyExperts {
 public:
  PyExperts(int64_t hidden_size, int64_t intermediate_size, int64_t num_experts, int64_t top_k,
            int64_t first_stripe, int64_t num_stripes, int64_t max_tokens, int num_threads, int spin_us,
            const std::string& isa, const std::string& format, bool pin_threads, const std::string& prefill,
            const std::string& scale_layout, const std::string& activations)
      : shape_{as_u32("hidden_size", hidden_size),   as_u32("intermediate_size", intermediate_size),
               as_u32("num_experts", num_experts),   as_u32("top_k", top_k),
               as_u32("first_stripe", first_stripe), as_u32("num_stripes", num_stripes)},
        format_(parse_format(format)),
        scale_layout_(parse_scale_layout(scale_layout)),
        pin_threads_(pin_threads),
        pool_(num_threads, spin_us, pin_threads),
        experts_(shape_, as_u32("max_tokens", max_tokens),
                 isa == "auto" ? select_isa() : parse_isa("isa", isa), pool_, parse_prefill(prefill),
                 parse_activations(activations)) {}

  nb::object run(const AnyArray& units, const AnyArray& x, const AnyArray& topk_ids,
                 const AnyArray& topk_weights, int64_t units_first_stripe, nb::object out,
                 const std::optional<std::string>& format, const std::optional<std::string>& scale_layout) {
    const LayerUnits layer =
        layer_units(units, as_u32("units_first_stripe", units_first_stripe), format, scale_layout);
    if (x.ndim() != 2)
      fail("x", "shape " + shape_of(x), "shape [T, " + std::to_string(shape_.hidden_size) + "]");
    const size_t tokens = x.shape(0);
    StepRows rows = step_rows(topk_ids, tokens);
    if (x.dtype() == nb::dtype<float>()) {
      rows.x = checked<float>("x", x, "float32", {tokens, shape_.hidden_size});
    } else {
      rows.x = checked<uint16_t>("x", x, "float32, or bfloat16 as uint16", {tokens, shape_.hidden_size});
      rows.x_type = ActivationType::kBf16;
    }
    rows.topk_weights = checked<float>("topk_weights", topk_weights, "float32", {tokens, rows.top_k});

    if (out.is_none()) out = nb::cast(new_array<float>({tokens, shape_.hidden_size}));
    const auto result = writable_array(out);
    float* y = const_cast<float*>(checked<float>("out", result, "float32", {tokens, shape_.hidden_size}));
    {
      nb::gil_scoped_release release;
      const std::optional<OnCore> on_core = keep_on_core();
      experts_.run(layer, rows, y);
    }
    return out;
  }

  uint64_t read_units(const AnyArray& units, const AnyArray& topk_ids, int64_t units_first_stripe,
                      const std::optional<std::string>& format,
                      const std::optional<std::string>& scale_layout) {
    const LayerUnits layer =
        layer_units(units, as_u32("units_first_stripe", units_first_stripe), format, scale_layout);
    const StepRows rows = step_rows(topk_ids, topk_ids.ndim() == 2 ? topk_ids.shape(0) : 0);
    nb::gil_scoped_release release;
    const std::optional<OnCore> on_core = keep_on_core();
    return experts_.read_units(layer, rows);
  }

  std::vector<double> time_steps(const AnyArray& units, const AnyArray& x, const AnyArray& topk_ids,
                                 const AnyArray& topk_weights, const nb::object& out, bool compute) {
    const LayerUnits layer = layer_units(units, 0, std::nullopt, std::nullopt);
    if (topk_ids.ndim() != 3) fail("topk_ids", "shape " + shape_of(topk_ids), "shape [N, T, K]");
    const size_t steps = topk_ids.shape(0), tokens = topk_ids.shape(1), top_k = topk_ids.shape(2);
    const auto* ids = checked<int32_t>("topk_ids", topk_ids, "int32", {steps, tokens, top_k});
    StepRows rows;
    rows.num_tokens = as_u32("num_tokens", static_cast<int64_t>(tokens));
    rows.top_k = as_u32("top_k", static_cast<int64_t>(top_k));
    rows.x = checked<float>("x", x, "float32", {tokens, shape_.hidden_size});
    rows.topk_weights = checked<float>("topk_weights", topk_weights, "float32", {tokens, top_k});
    const auto result = writable_array(out);
    float* y = const_cast<float*>(checked<float>("out", result, "float32", {tokens, shape_.hidden_size}));
    std::vector<double> seconds(steps);
    nb::gil_scoped_release release;
    const std::optional<OnCore> on_core = keep_on_core();
    for (size_t step = 0; step < steps; ++step) {
      rows.topk_ids = ids + step * tokens * top_k;
      const auto start = std::chrono::steady_clock::now();
      if (compute) {
        experts_.run(layer, rows, y);
      } else {
        experts_.read_units(layer, rows);
      }
      seconds[step] = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
    return seconds;
  }

  std::string isa() const { return isa_name(experts_.isa()); }
  std::string prefill() const { return experts_.prefill(); }
  std::string integer() const { return experts_.integer(); }
  int num_threads() const { return pool_.num_threads(); }

 private:
  // With pinned threads the caller, thread 0, stays on the first core while it computes.
  std::optional<OnCore> keep_on_core() const {
    return pin_threads_ ? std::optional<OnCore>(std::in_place, 0) : std::nullopt;
  }

  static StepRows step_rows(const AnyArray& topk_ids, size_t tokens) {
    if (topk_ids.ndim() != 2) fail("topk_ids", "shape " + shape_of(topk_ids), "shape [T, K]");
    StepRows rows;
    rows.num_tokens = as_u32("num_tokens", static_cast<int64_t>(tokens));
    rows.top_k = as_u32("top_k", static_cast<int64_t>(topk_ids.shape(1)));
    rows.topk_ids = checked<int32_t>("topk_ids", topk_ids, "int32", {tokens, topk_ids.shape(1)});
    return rows;
  }

  // The constructor's format and layout where none are given.
  LayerUnits layer_units(const AnyArray& units, uint32_t units_first_stripe,
                         const std::optional<std::string>& format_name,
                         const std::optional<std::string>& layout_name) const {
    const WeightFormat format = format_name ? parse_format(*format_name) : format_;
    const ScaleLayout layout = layout_name ? parse_scale_layout(*layout_name) : scale_layout_;
    const size_t bytes = unit_bytes(format, shape_.hidden_size, layout);
    check_dtype<uint8_t>("units", units, "uint8");
    const std::string expected =
        "shape [" + std::to_string(shape_.num_experts) + ", stripes, " + std::to_string(bytes) + "]";
    if (units.ndim() != 3 || units.shape(0) != shape_.num_experts || units.shape(2) != bytes) {
      fail("units", "shape " + shape_of(units), expected);
    }
    if (units.stride(2) != 1 || (units.shape(1) > 1 && units.stride(1) < 0) ||
        (units.shape(0) > 1 && units.stride(0) < 0)) {
      fail("units", "strides that skip elements", "each unit contiguous");
    }
    const size_t units_end = static_cast<size_t>(units_first_stripe) + units.shape(1);
    const size_t slice_end = static_cast<size_t>(shape_.first_stripe) + shape_.num_stripes;
    if (shape_.first_stripe < units_first_stripe || slice_end > units_end) {
      fail("units",
           "stripes " + std::to_string(units_first_stripe) + " to " + std::to_string(units_end) +
               " (exclusive)",
           "at least " + std::to_string(shape_.first_stripe) + " to " + std::to_string(slice_end));
    }
    const auto* base = static_cast<const uint8_t*>(units.data());
    const auto stripe_stride = static_cast<size_t>(units.stride(1));
    return {base + (shape_.first_stripe - units_first_stripe) * stripe_stride,
            static_cast<size_t>(units.stride(0)), stripe_stride, format, layout};
  }

  const ExpertShape shape_;
  const WeightFormat format_;
  const ScaleLayout scale_layout_;
  const bool pin_threads_;
  ThreadPool pool_;
  Experts experts_;
};

size_t py_count_nan_e4m3(const AnyArray& bytes) {
  check_dtype<uint8_t>("bytes", bytes, "uint8");
  check_contiguous("bytes", bytes);
  const auto* data = static_cast<const uint8_t*>(bytes.data());
  const size_t size = bytes.size();
  nb::gil_scoped_release release;
  return count_nan_e4m3(data, size);
}

nb::object py_pack_expert_units(const AnyArray& gate, const AnyArray& up, const AnyArray& down,
                                const AnyArray& gate_scale, const AnyArray& up_scale,
                                const AnyArray& down_scale, nb::object out, const std::string& format_name,
                                const std::string& scale_layout) {
  const WeightFormat format = parse_format(format_name);
  if (is_grouped(format)) fail("format", format_name, "fp9, fp8 or int8");
  if (gate.ndim() != 2 || gate.shape(0) == 0 || gate.shape(1) == 0) {
    fail("gate", "shape " + shape_of(gate), "shape [I, H] with both at least 1");
  }
  E4m3Expert expert;
  const size_t intermediate = expert.intermediate_size = gate.shape(0);
  const size_t hidden = expert.hidden_size = gate.shape(1);
  expert.scale_layout = parse_scale_layout(scale_layout);
  const bool by_channel = expert.scale_layout == ScaleLayout::kChannel;
  const size_t channel_blocks = ceil_div(intermediate, kScaleBlock),
               hidden_blocks = ceil_div(hidden, kScaleBlock);
  const std::vector<size_t> gate_up_shape =
      by_channel ? std::vector<size_t>{intermediate, 1} : std::vector<size_t>{channel_blocks, hidden_blocks};
  const std::vector<size_t> down_shape =
      by_channel ? std::vector<size_t>{hidden, 1} : std::vector<size_t>{hidden_blocks, channel_blocks};
  expert.gate = checked<uint8_t>("gate", gate, "uint8", {intermediate, hidden});
  expert.up = checked<uint8_t>("up", up, "uint8", {intermediate, hidden});
  expert.down = checked<uint8_t>("down", down, "uint8", {hidden, intermediate});
  expert.gate_scale = checked<float>("gate_scale", gate_scale, "float32", gate_up_shape);
  expert.up_scale = checked<float>("up_scale", up_scale, "float32", gate_up_shape);
  expert.down_scale = checked<float>("down_scale", down_scale, "float32", down_shape);

  const size_t num_stripes = ceil_div(intermediate, kStripeChannels);
  const std::vector<size_t> shape = {num_stripes, unit_bytes(format, hidden, expert.scale_layout)};
  if (out.is_none()) out = nb::cast(new_array<uint8_t>(shape));
  const auto result = writable_array(out);
  auto* units = const_cast<uint8_t*>(checked<uint8_t>("out", result, "uint8", shape));
  const bool is_int8 = format == WeightFormat::kInt8;
  const char* nan_field = nullptr;
  size_t nan_count = 0;
  {
    nb::gil_scoped_release release;
    for (auto [field, bytes] : {std::pair{"gate", expert.gate}, {"up", expert.up}, {"down", expert.down}}) {
      nan_count = is_int8 ? static_cast<size_t>(std::count(bytes, bytes + intermediate * hidden, 0))
                          : count_nan_e4m3(bytes, intermediate * hidden);
      if (nan_count != 0) {
        nan_field = field;
        break;
      }
    }
    if (nan_field == nullptr) pack_expert_units(expert, format, units);
  }
  if (nan_field != nullptr) {
    fail(nan_field, std::to_string(nan_count) + (is_int8 ? " bytes 0 (-128)" : " NaN bytes (0x7f, 0xff)"),
         "none");
  }
  return out;
}

nb::tuple py_quantize_e4m3_blocks(const AnyArray& weights) {
  if (weights.ndim() != 2) fail("weights", "shape " + shape_of(weights), "shape [rows, columns]");
  const size_t rows = weights.shape(0), columns = weights.shape(1);
  const float* data = checked<float>("weights", weights, "float32", {rows, columns});
  auto bytes = new_array<uint8_t>({rows, columns});
  auto scales = new_array<float>({ceil_div(rows, kScaleBlock), ceil_div(columns, kScaleBlock)});
  size_t not_finite = 0;
  {
    nb::gil_scoped_release release;
    for (size_t i = 0; i < rows * columns; ++i) not_finite += !(std::abs(data[i]) <= 3.4028234663852886e38f);
    if (not_finite == 0) quantize_e4m3_blocks(data, rows, columns, bytes.data(), scales.data());
  }
  if (not_finite != 0) fail("weights", std::to_string(not_finite) + " values that are not finite", "none");
  return nb::make_tuple(bytes, scales);
}

}  // namespace

void bind_kernels(nb::module_& m) {
  m.def(
      "select_isa", [] { return std::string(isa_name(select_isa())); },
      "Name of the instruction set that the kernels use: the best that this machine can run, or the one "
      "that\n"
      "DUCK_FORCE_ISA names.\n\nRaises:\n    ValueError: DUCK_FORCE_ISA names none, or one that this machine "
      "lacks.");
  m.def(
      "available_isas",
      [] {
        std::vector<std::string> names;
        for (Isa isa : available_isas()) names.emplace_back(isa_name(isa));
        return names;
      },
      "Names of the instruction sets that this machine can run, from the slowest to the best.");
  m.def("available_bf16", &available_bf16,
        "Names of the bf16 multipliers that prefill='bf16' can use here, avx512_bf16 and amx_bf16, from the\n"
        "slowest to the best.");
  m.def(
      "select_bf16",
      [](const std::string& isa) { return std::string(select_bf16(parse_isa("isa", isa)).name); }, "isa"_a,
      "Name of the bf16 multipliers that prefill='bf16' uses with an instruction set: the best, or those "
      "that\n"
      "DUCK_FORCE_BF16 names.\n\nRaises:\n    ValueError: there are none, another ISA than avx512, or the "
      "variable names none that is there.");
  m.def(
      "available_integer", [](const std::string& isa) { return available_integer(parse_isa("isa", isa)); },
      "isa"_a,
      "Names of the integer multipliers that go with an instruction set here, from the slowest to the best:\n"
      "scalar, avx2, avx_vnni, avx512_vnni_256, avx512_vnni, amx_int8. DUCK_FORCE_INTEGER names one to use.");
  m.def(
      "unit_bytes",
      [](int64_t hidden_size, const std::string& format, const std::string& scale_layout) {
        return unit_bytes(parse_format(format), as_u32("hidden_size", hidden_size),
                          parse_scale_layout(scale_layout));
      },
      "hidden_size"_a, "format"_a = "fp9", "scale_layout"_a = "block",
      "Bytes of one unit (expert, stripe) in a format, scales by block, channel or group.\n\n"
      "Raises:\n    ValueError: another format or layout, or a size out of range.");
  m.def("count_nan_e4m3", &py_count_nan_e4m3, "bytes"_a.noconvert(),
        nb::sig("def count_nan_e4m3(bytes: numpy.typing.NDArray[numpy.uint8]) -> int"),
        "How many of the bytes are e4m3 NaN (0x7f, 0xff).\n\nShapes:\n    bytes: any, uint8, contiguous");
  m.def(
      "pack_expert_units", &py_pack_expert_units, "gate"_a.noconvert(), "up"_a.noconvert(),
      "down"_a.noconvert(), "gate_scale"_a.noconvert(), "up_scale"_a.noconvert(), "down_scale"_a.noconvert(),
      "out"_a = nb::none(), "format"_a = "fp9", "scale_layout"_a = "block",
      nb::sig(
          "def pack_expert_units(gate: numpy.typing.NDArray[numpy.uint8], "
          "up: numpy.typing.NDArray[numpy.uint8], down: numpy.typing.NDArray[numpy.uint8], "
          "gate_scale: numpy.typing.NDArray[numpy.float32], up_scale: numpy.typing.NDArray[numpy.float32], "
          "down_scale: numpy.typing.NDArray[numpy.float32], "
          "out: numpy.typing.NDArray[numpy.uint8] | None = None, format: str = 'fp9', "
          "scale_layout: str = 'block') -> numpy.typing.NDArray[numpy.uint8]"),
      "Packs one e4m3 expert into units of the format fp9 or fp8, or one of int8 codes into int8 ones, "
      "scales\n"
      "by block or channel.\n\n"
      "Shapes:\n"
      "    gate, up: [I, H] uint8; down: [H, I] uint8\n"
      "    gate_scale, up_scale: [ceil(I/128), ceil(H/128)] f32; down_scale: [ceil(H/128), ceil(I/128)] f32\n"
      "        in the layout channel gate_scale, up_scale: [I, 1] f32; down_scale: [H, 1] f32\n"
      "    out, result: [ceil(I/16), unit_bytes(H, format, scale_layout)] uint8\n\n"
      "Raises:\n    ValueError: a wrong shape or type, or NaN bytes (with their count); in int8 bytes 0.\n\n"
      "Reference:\n    duckllm.weights.units, byte for byte");
  m.def("quantize_e4m3_blocks", &py_quantize_e4m3_blocks, "weights"_a.noconvert(),
        nb::sig("def quantize_e4m3_blocks(weights: numpy.typing.NDArray[numpy.float32]) -> "
                "tuple[numpy.typing.NDArray[numpy.uint8], numpy.typing.NDArray[numpy.float32]]"),
        "Quantises f32 weights to e4m3 with one scale, amax / 448, per 128x128 block.\n\n"
        "Shapes:\n    weights: [R, C] f32; result: ([R, C] uint8, [ceil(R/128), ceil(C/128)] f32)\n\n"
        "Raises:\n    ValueError: a weight is not finite (with their count).\n\n"
        "Reference:\n    duckllm.weights.e4m3, byte for byte");

  nb::class_<PyExperts>(
      m, "Experts",
      "The routed-expert function of one slice of stripes, with its threads and scratch memory.\n\n"
      "One run at a time. csrc/kernels/experts.h states the order of summation, the error bound and\n"
      "the valid ranges; a row's result depends neither on the other rows nor on the threads. With\n"
      "pin_threads each thread stays on a core of its own, the caller's while it computes. With prefill\n"
      "bf16, experts of more than 8 rows of a step take x and activations rounded to bf16; experts.h states\n"
      "the error, and that a row's result then also depends on whether its expert has more than 8 rows.\n"
      "Weights in int8, int4 or mxfp4 are multiplied with x and activations rounded to bytes by groups, or\n"
      "with activations='f32' as they are, which is slow and there to judge the rounding.\n\n"
      "Raises:\n    ValueError: sizes or names that make no sense; bf16 where the CPU or the ISA lacks it.")
      .def(nb::init<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int, int,
                    const std::string&, const std::string&, bool, const std::string&, const std::string&,
                    const std::string&>(),
           "hidden_size"_a, "intermediate_size"_a, "num_experts"_a, "top_k"_a, "first_stripe"_a,
           "num_stripes"_a, "max_tokens"_a, "num_threads"_a, "spin_us"_a, "isa"_a = "auto",
           "format"_a = "fp9", "pin_threads"_a = false, "prefill"_a = "f32", "scale_layout"_a = "block",
           "activations"_a = "int8")
      .def("run", &PyExperts::run, "units"_a.noconvert(), "x"_a.noconvert(), "topk_ids"_a.noconvert(),
           "topk_weights"_a.noconvert(), "units_first_stripe"_a = 0, "out"_a = nb::none(),
           "format"_a = nb::none(), "scale_layout"_a = nb::none(),
           nb::sig("def run(self, units: numpy.typing.NDArray[numpy.uint8], "
                   "x: numpy.typing.NDArray[numpy.float32] | numpy.typing.NDArray[numpy.uint16], "
                   "topk_ids: numpy.typing.NDArray[numpy.int32], topk_weights: "
                   "numpy.typing.NDArray[numpy.float32], "
                   "units_first_stripe: int = 0, out: numpy.typing.NDArray[numpy.float32] | None = None, "
                   "format: str | None = None, scale_layout: str | None = None) -> "
                   "numpy.typing.NDArray[numpy.float32]"),
           "The weighted sum of the rows' experts, restricted to the slice: partial sums [T, H] f32.\n\n"
           "Shapes:\n"
           "    units: [E, any, unit_bytes(H, format, scale_layout)] uint8, the stripes from "
           "units_first_stripe on; may be "
           "a "
           "memory map\n"
           "    x: [T, H] f32, or bf16 as uint16; topk_ids: [T, K] int32; topk_weights: [T, K] f32\n"
           "    out, result: [T, H] f32\n\n"
           "format, scale_layout: of these units, where they are not the constructor's.\n\n"
           "Raises:\n    ValueError: a wrong shape or type, T over max_tokens, K over top_k, an id outside "
           "0..E-1;\n"
           "        out is then untouched.\n\n"
           "Threading:\n    Releases the interpreter; one run at a time per object, and in the process that "
           "made\n"
           "    it: others are refused with RuntimeError.\n\n"
           "Reference:\n    tests/kernels/expert_reference.py, float64, with the bound of experts.h")
      .def("read_units", &PyExperts::read_units, "units"_a.noconvert(), "topk_ids"_a.noconvert(),
           "units_first_stripe"_a = 0, "format"_a = nb::none(), "scale_layout"_a = nb::none(),
           nb::sig("def read_units(self, units: numpy.typing.NDArray[numpy.uint8], "
                   "topk_ids: numpy.typing.NDArray[numpy.int32], units_first_stripe: int = 0, "
                   "format: str | None = None, scale_layout: str | None = None) -> int"),
           "Reads the units that run would read for these ids, each once, on the same threads, and computes\n"
           "nothing: the ceiling to measure run against. The exclusive or of their 64-bit words.")
      .def(
          "time_steps", &PyExperts::time_steps, "units"_a.noconvert(), "x"_a.noconvert(),
          "topk_ids"_a.noconvert(), "topk_weights"_a.noconvert(), "out"_a, "compute"_a = true,
          nb::sig("def time_steps(self, units: numpy.typing.NDArray[numpy.uint8], "
                  "x: numpy.typing.NDArray[numpy.float32], topk_ids: numpy.typing.NDArray[numpy.int32], "
                  "topk_weights: numpy.typing.NDArray[numpy.float32], "
                  "out: numpy.typing.NDArray[numpy.float32], compute: bool = True) -> list[float]"),
          "Runs one step after another, as run does or, without compute, as read_units does: the seconds of\n"
          "each.\n\n"
          "Shapes:\n"
          "    units: [E, S, unit_bytes(H, format, scale_layout)] uint8, from stripe 0 on; x: [T, H] f32\n"
          "    topk_ids: [N, T, K] int32, a step each; topk_weights: [T, K] f32\n"
          "    out: [T, H] f32, the last step's sums\n\n"
          "Raises:\n    ValueError: as run does.")
      .def_prop_ro("isa", &PyExperts::isa)
      .def_prop_ro("prefill", &PyExperts::prefill,
                   "f32, or the name of the bf16 multipliers: available_bf16().")
      .def_prop_ro("integer", &PyExperts::integer,
                   "Name of the multipliers of int8, int4 and mxfp4: of available_integer().")
      .def_prop_ro("num_threads", &PyExperts::num_threads);
}

}  // namespace duck
