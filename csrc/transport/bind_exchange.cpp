// The exchange with a GPU for Python: pinned memory as arrays, programs, and who serves them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unordered_map.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels/arrays.h"
#include "threads/fork_mark.h"
#include "transport/exchange.h"
#include "transport/py_transport.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace duck {
namespace {

template <typename T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
// x, topk_ids, topk_weights, y.
using LaneArrays = std::tuple<Matrix<float>, Matrix<int32_t>, Matrix<float>, Matrix<float>>;

bool interrupted() {
  const nb::gil_scoped_acquire acquire;
  return PyErr_CheckSignals() != 0;
}

// Experts in this process, with the arrays that hold their units.
class HeldExpertsServer : public ExpertsServer {
 public:
  HeldExpertsServer(const ExpertShape& shape, uint32_t max_tokens, Isa isa, Prefill prefill, int num_threads,
                    int spin_us, std::unordered_map<uint32_t, LayerUnits> layers, std::vector<AnyArray> held)
      : ExpertsServer(shape, max_tokens, isa, prefill, num_threads, spin_us, std::move(layers)),
        held_(std::move(held)) {}

 private:
  const std::vector<AnyArray> held_;
};

std::shared_ptr<LaneServer> experts_server(const std::unordered_map<uint32_t, AnyArray>& units,
                                           int64_t hidden_size, int64_t intermediate_size, int64_t top_k,
                                           int64_t max_tokens, int num_threads, int spin_us,
                                           const std::string& isa, const std::string& format,
                                           const std::string& prefill, const std::string& scale_layout,
                                           const std::unordered_map<uint32_t, std::string>& layer_formats) {
  if (units.empty()) fail("units", "no layers", "at least one");
  ExpertShape shape;
  shape.hidden_size = as_u32("hidden_size", hidden_size);
  shape.intermediate_size = as_u32("intermediate_size", intermediate_size);
  shape.top_k = as_u32("top_k", top_k);
  const ScaleLayout layout = parse_scale_layout(scale_layout);
  const AnyArray& first = units.begin()->second;
  if (first.ndim() != 3) fail("units", "shape " + shape_of(first), "shape [E, stripes, bytes]");
  shape.num_experts = as_u32("num_experts", static_cast<int64_t>(first.shape(0)));
  shape.num_stripes = as_u32("num_stripes", static_cast<int64_t>(first.shape(1)));
  std::unordered_map<uint32_t, LayerUnits> layers;
  std::vector<AnyArray> held;
  for (const auto& [layer, array] : units) {
    const auto own = layer_formats.find(layer);
    const WeightFormat its_format = parse_format(own == layer_formats.end() ? format : own->second);
    // Only fp9 and fp8 come in layouts of scales.
    const ScaleLayout its_layout = is_e4m3(its_format)      ? layout
                                   : is_grouped(its_format) ? ScaleLayout::kGroup
                                                            : ScaleLayout::kBlock;
    const size_t bytes = unit_bytes(its_format, shape.hidden_size, its_layout);
    check_dtype<uint8_t>("units", array, "uint8");
    check_shape("units", array, {first.shape(0), first.shape(1), bytes});
    if (array.stride(2) != 1 || array.stride(1) < 0 || array.stride(0) < 0) {
      fail("units", "strides that skip elements", "each unit contiguous");
    }
    layers[layer] = {static_cast<const uint8_t*>(array.data()), static_cast<size_t>(array.stride(0)),
                     static_cast<size_t>(array.stride(1)), its_format, its_layout};
    held.push_back(array);
  }
  return std::make_shared<HeldExpertsServer>(
      shape, as_u32("max_tokens", max_tokens), isa == "auto" ? select_isa() : parse_isa("isa", isa),
      parse_prefill(prefill), num_threads, spin_us, std::move(layers), std::move(held));
}

struct PyProgram {
  Exchange::Program steps;
};

// Its thread is not there in a process that was forked since: nobody could be waited for.
struct EndUnlessForked {
  ForkMark made;
  void operator()(Exchange* exchange) const {
    if (!made.is_forked()) delete exchange;
  }
};

class PyExchange {
 public:
  PyExchange(Matrix<int32_t> control, std::vector<LaneArrays> lanes, std::shared_ptr<LaneServer> server,
             int spin_us, int64_t gpu_timeout_ms)
      : control_(std::move(control)), lanes_(std::move(lanes)) {
    check_shape("control", control_, {Exchange::num_lines(lanes_.size()), Exchange::kLineWords});
    std::vector<LaneMemory> memories;
    ExchangeConfig config;
    config.spin_us = spin_us;
    config.gpu_timeout_ms = gpu_timeout_ms;
    for (auto& [x, topk_ids, topk_weights, y] : lanes_) {
      const size_t tokens = x.shape(0), top_k = topk_ids.shape(1);
      const size_t hidden_size = memories.empty() ? x.shape(1) : config.hidden_size;
      config.hidden_size = as_u32("hidden_size", static_cast<int64_t>(hidden_size));
      check_shape("x", x, {tokens, hidden_size});
      check_shape("y", y, {tokens, hidden_size});
      check_shape("topk_ids", topk_ids, {tokens, top_k});
      check_shape("topk_weights", topk_weights, {tokens, top_k});
      memories.push_back({as_u32("max_tokens", static_cast<int64_t>(tokens)),
                          as_u32("top_k", static_cast<int64_t>(top_k)), x.data(), topk_ids.data(),
                          topk_weights.data(), y.data()});
    }
    exchange_.reset(new Exchange(reinterpret_cast<uint32_t*>(control_.data()), std::move(memories), config,
                                 std::move(server)));
  }

  void start(const PyProgram& program, const std::vector<uint32_t>& num_tokens) {
    // A copy: what Python still adds to a program must not meet the thread.
    exchange_->start(std::make_shared<const Exchange::Program>(program.steps), num_tokens);
  }

  bool finish(int64_t stall_ms) {
    Exchange::Finished finished;
    {
      nb::gil_scoped_release release;
      finished = exchange_->finish(stall_ms, interrupted);
    }
    if (finished == Exchange::Finished::kInterrupted) throw nb::python_error();
    return finished == Exchange::Finished::kComplete;
  }

  Exchange& native() { return *exchange_; }

 private:
  Matrix<int32_t> control_;
  std::vector<LaneArrays> lanes_;
  std::unique_ptr<Exchange, EndUnlessForked> exchange_;  // behind the arrays, so that it ends before them
};

}  // namespace

void bind_exchange(nb::module_& m) {
  m.attr("EXCHANGE_LINE_WORDS") = static_cast<int>(Exchange::kLineWords);
  m.attr("EXCHANGE_REPLY_LINES") = static_cast<int>(Exchange::kReplyLines);
  m.attr("EXCHANGE_TIMED_OUT") = static_cast<int>(Exchange::kTimedOutOnGpu);

  nb::class_<PyProgram>(m, "Program", "The steps of a captured graph, in the order of publishing.")
      .def(nb::init<>())
      .def(
          "append",
          [](PyProgram& self, uint32_t layer, uint16_t lane, uint32_t num_rows, uint32_t top_k,
             uint32_t num_flags) { self.steps.push_back({layer, lane, num_rows, top_k, num_flags}); },
          "layer"_a, "lane"_a, "num_rows"_a, "top_k"_a, "num_flags"_a,
          "Adds a step: num_rows rows of top_k experts, published by num_flags programs.")
      .def(
          "steps",
          [](const PyProgram& self) {
            std::vector<std::tuple<uint32_t, uint16_t, uint32_t, uint32_t, uint32_t>> steps;
            for (const ProgramStep& each : self.steps) {
              steps.emplace_back(each.layer, each.lane, each.num_rows, each.top_k, each.num_flags);
            }
            return steps;
          },
          "(layer, lane, num_rows, top_k, num_flags) of each step.")
      .def("__len__", [](const PyProgram& self) { return self.steps.size(); });

  nb::class_<LaneServer>(m, "LaneServer", "Who computes the steps that an exchange takes from a GPU.");
  m.def(
      "transport_server",
      [](nb::object transport) -> std::shared_ptr<LaneServer> {
        return std::make_shared<TransportServer>(transport_of(transport));
      },
      "transport"_a, nb::sig("def transport_server(transport: Transport) -> LaneServer"),
      "The workers of a transport.");
  m.def(
      "experts_server", &experts_server, "units"_a, nb::kw_only(), "hidden_size"_a, "intermediate_size"_a,
      "top_k"_a, "max_tokens"_a, "num_threads"_a, "spin_us"_a, "isa"_a, "format"_a, "prefill"_a,
      "scale_layout"_a, "layer_formats"_a = std::unordered_map<uint32_t, std::string>(),
      nb::sig(
          "def experts_server(units: dict[int, numpy.typing.NDArray[numpy.uint8]], *, hidden_size: int, "
          "intermediate_size: int, top_k: int, max_tokens: int, num_threads: int, spin_us: int, isa: str, "
          "format: str, prefill: str, scale_layout: str, layer_formats: dict[int, str] = {}) -> LaneServer"),
      "Whole experts in this process, with threads of their own.\n\n"
      "Shapes:\n    units: [E, ceil(I/16), unit_bytes(H, format, scale_layout)] uint8 of each layer\n\n"
      "layer_formats: of the layers whose format is not `format`.\n\n"
      "Raises:\n    ValueError: sizes or names that make no sense.");
  m.def(
      "echo_server",
      [](int64_t delay_us, bool zeros) -> std::shared_ptr<LaneServer> {
        return std::make_shared<EchoServer>(delay_us, zeros);
      },
      nb::kw_only(), "delay_us"_a = 0, "zeros"_a = true,
      "Nobody: zeros, or the activations themselves, after a delay.");

  nb::class_<PyExchange>(
      m, "Exchange", "Serves the steps that a GPU publishes in pinned memory while a captured graph runs.")
      .def(nb::init<Matrix<int32_t>, std::vector<LaneArrays>, std::shared_ptr<LaneServer>, int, int64_t>(),
           "control"_a.noconvert(), "lanes"_a.noconvert(), "server"_a, nb::kw_only(), "spin_us"_a,
           "gpu_timeout_ms"_a,
           "control: [1 + (1 + EXCHANGE_REPLY_LINES) * lanes, EXCHANGE_LINE_WORDS] int32; lanes: x [M, H] "
           "f32, topk_ids [M, K] int32,\n"
           "topk_weights [M, K] f32, y [M, H] f32 of each.")
      .def("start", &PyExchange::start, "program"_a, "num_tokens"_a,
           "Begins to serve a program, whose graph is replayed next. num_tokens: of each lane.")
      .def("finish", &PyExchange::finish, "stall_ms"_a,
           "Waits for the program's end; False where nothing happened for stall_ms.")
      .def(
          "abort", [](PyExchange& self) { self.native().abort(); }, nb::call_guard<nb::gil_scoped_release>(),
          "Ends the program under way, if there is one, and frees the GPU from waiting.")
      .def(
          "late", [](PyExchange& self) { return self.native().late(); },
          nb::call_guard<nb::gil_scoped_release>(), "The workers that the program waits for.")
      .def_prop_ro(
          "num_answered", [](PyExchange& self) { return self.native().num_answered(); },
          "Steps answered since the exchange was made.");
}

}  // namespace duck
