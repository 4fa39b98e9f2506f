// The worker's step loop for Python: weights stay memory-mapped arrays, the loop reads them in place.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <memory>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "kernels/experts.h"
#include "kernels/weight_format.h"
#include "threads/on_core.h"
#include "threads/thread_pool.h"
#include "worker/step_loop.h"

namespace nb = nanobind;

namespace duck {
namespace {

using UnitsArray = nb::ndarray<const uint8_t, nb::ndim<3>, nb::device::cpu>;

Isa parse_isa(const std::string& name) {
  if (name == "auto") return select_isa();
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    if (name == isa_name(isa)) return isa;
  }
  throw std::invalid_argument("isa: got '" + name + "', expected auto, scalar, avx2 or avx512");
}

// Refuses steps larger than a frame before the experts set memory aside for them.
int checked_threads(const ExpertShape& shape, const StepLoopLimits& limits, int num_threads) {
  max_request_frame_bytes(shape, limits.max_step_tokens);
  return num_threads;
}

// Experts, their threads and the step loop, with the mapped weights of every layer.
class StepServer {
 public:
  StepServer(const ExpertShape& shape, const StepLoopLimits& limits, int num_threads, bool pin_threads,
             const std::string& isa, const std::string& format, const std::string& prefill,
             const std::string& scale_layout)
      : format_(parse_format(format)),
        scale_layout_(parse_scale_layout(scale_layout)),
        pin_threads_(pin_threads),
        pool_(checked_threads(shape, limits, num_threads), limits.spin_us, pin_threads),
        experts_(shape, limits.max_step_tokens, parse_isa(isa), pool_, parse_prefill(prefill)),
        loop_(experts_, layers_, limits) {}

  void add_layer(uint32_t layer, UnitsArray units, const std::optional<std::string>& format_name,
                 const std::optional<std::string>& layout_name) {
    const WeightFormat format = format_name ? parse_format(*format_name) : format_;
    const ScaleLayout layout = layout_name ? parse_scale_layout(*layout_name) : scale_layout_;
    const ExpertShape& shape = experts_.shape();
    if (units.shape(0) != shape.num_experts || units.shape(1) != shape.num_stripes) {
      throw std::invalid_argument("units of layer " + std::to_string(layer) + ": got [" +
                                  std::to_string(units.shape(0)) + ", " + std::to_string(units.shape(1)) +
                                  "] experts and stripes, expected [" + std::to_string(shape.num_experts) +
                                  ", " + std::to_string(shape.num_stripes) + "]");
    }
    const size_t bytes = unit_bytes(format, shape.hidden_size, layout);
    if (units.shape(2) != bytes) {
      throw std::invalid_argument("unit bytes of layer " + std::to_string(layer) + ": got " +
                                  std::to_string(units.shape(2)) + ", expected " + std::to_string(bytes));
    }
    if (units.stride(2) != 1 || units.stride(1) < 0 || units.stride(0) < 0) {
      throw std::invalid_argument("units of layer " + std::to_string(layer) +
                                  ": got gaps between the bytes of a unit, expected none");
    }
    layers_[layer] = {units.data(), static_cast<size_t>(units.stride(0)),
                      static_cast<size_t>(units.stride(1)), format, layout};
    kept_.push_back(std::move(units));
  }

  std::tuple<std::string, std::string, uint64_t> serve(int fd, std::shared_ptr<wire::SharedMemory> memory,
                                                       std::shared_ptr<MulticastReceiver> multicast) {
    std::optional<OnCore> on_core;
    if (pin_threads_) on_core.emplace(0);
    const StepLoopEnd end = loop_.serve(fd, std::move(memory), std::move(multicast));
    return {end_reason_name(end.reason), end.message, end.steps_served};
  }

  std::string isa() const { return isa_name(experts_.isa()); }
  std::string prefill() const { return experts_.prefill(); }
  std::string integer() const { return experts_.integer(); }

 private:
  const WeightFormat format_;  // of layers that do not say theirs
  const ScaleLayout scale_layout_;
  const bool pin_threads_;
  std::unordered_map<uint32_t, LayerUnits> layers_;
  std::vector<UnitsArray> kept_;  // keeps the mapped arrays alive
  ThreadPool pool_;
  Experts experts_;
  StepLoop loop_;
};

}  // namespace

void bind_worker(nb::module_& m) {
  nb::class_<MulticastReceiver>(m, "MulticastReceiver",
                                "Takes step requests by multicast over a UDP socket that it owns.")
      .def(nb::init<int, const wire::MulticastSession&>(), nb::arg("fd"), nb::arg("session"))
      .def_prop_ro(
          "counts",
          [](const MulticastReceiver& self) {
            const MulticastReceiver::Counts& counts = self.counts();
            return std::tuple(counts.taken, counts.refused, counts.surplus, counts.asked, counts.steps);
          },
          "Datagrams taken, refused and had already, fragments asked for again, steps put together.");
  nb::class_<StepServer>(m, "StepServer", "The experts of a slice behind one connection at a time.")
      .def(
          "__init__",
          [](StepServer* self, uint32_t hidden_size, uint32_t intermediate_size, uint32_t num_experts,
             uint32_t top_k, uint32_t first_stripe, uint32_t num_stripes, uint32_t max_step_tokens,
             int num_threads, int spin_us, int64_t frame_timeout_ms, int64_t send_timeout_ms,
             const std::string& isa, const std::string& format, bool pin_threads, const std::string& prefill,
             const std::string& scale_layout) {
            const ExpertShape shape{hidden_size, intermediate_size, num_experts,
                                    top_k,       first_stripe,      num_stripes};
            new (self) StepServer(shape, {max_step_tokens, spin_us, frame_timeout_ms, send_timeout_ms},
                                  num_threads, pin_threads, isa, format, prefill, scale_layout);
          },
          nb::kw_only(), nb::arg("hidden_size"), nb::arg("intermediate_size"), nb::arg("num_experts"),
          nb::arg("top_k"), nb::arg("first_stripe"), nb::arg("num_stripes"), nb::arg("max_step_tokens"),
          nb::arg("num_threads"), nb::arg("spin_us") = 0, nb::arg("frame_timeout_ms") = 30'000,
          nb::arg("send_timeout_ms") = 60'000, nb::arg("isa") = "auto", nb::arg("format") = "fp9",
          nb::arg("pin_threads") = false, nb::arg("prefill") = "f32", nb::arg("scale_layout") = "block")
      .def("add_layer", &StepServer::add_layer, nb::arg("layer"), nb::arg("units").noconvert(),
           nb::arg("format") = nb::none(), nb::arg("scale_layout") = nb::none(),
           "Takes the slice's units [E, S, unit_bytes] u8 of a layer, each unit contiguous; kept "
           "alive, not copied.\nWithout a format of its own a layer has the constructor's.")
      .def("serve", &StepServer::serve, nb::arg("fd"), nb::arg("memory") = nb::none(),
           nb::arg("multicast") = nb::none(), nb::call_guard<nb::gil_scoped_release>(),
           "Serves steps until the connection ends: (reason, message, steps_served), where reason is closed, "
           "lost, "
           "malformed or timeout. Steps go through the memory if there is any, and may come by multicast. "
           "Does not close fd.")
      .def_prop_ro("isa", &StepServer::isa)
      .def_prop_ro("integer", &StepServer::integer, "Name of the multipliers of int8, int4 and mxfp4.")
      .def_prop_ro("prefill", &StepServer::prefill, "f32, or the name of the bf16 multipliers.");
}

}  // namespace duck
