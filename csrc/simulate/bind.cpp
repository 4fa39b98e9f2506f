// Simulated workers for Python: the worker's step loop above a stand-in for its experts.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <memory>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "simulate/network.h"
#include "simulate/stand_in.h"
#include "worker/step_loop.h"

namespace nb = nanobind;

namespace duck {
namespace {

using simulate::Network;
using simulate::NodeModel;
using simulate::StandIn;

// As StepServer, without weights and without threads of its own.
class SimulatedServer {
 public:
  SimulatedServer(const ExpertShape& shape, const StepLoopLimits& limits, const std::vector<uint32_t>& layers,
                  const NodeModel& node, std::shared_ptr<Network> network, uint64_t request_row_bytes,
                  uint64_t reply_row_bytes)
      : stand_in_(shape, node, std::move(network), request_row_bytes, reply_row_bytes),
        loop_(stand_in_, layers_, limits) {
    for (const uint32_t layer : layers) layers_[layer] = {};
  }

  std::tuple<std::string, std::string, uint64_t> serve(int fd, std::shared_ptr<wire::SharedMemory> memory,
                                                       std::shared_ptr<MulticastReceiver> multicast) {
    const StepLoopEnd end = loop_.serve(fd, std::move(memory), std::move(multicast));
    return {end_reason_name(end.reason), end.message, end.steps_served};
  }

 private:
  std::unordered_map<uint32_t, LayerUnits> layers_;
  StandIn stand_in_;
  StepLoop loop_;
};

}  // namespace

void bind_simulate(nb::module_& m) {
  nb::class_<Network>(m, "SimulatedNetwork", "The host's port, which all simulated workers share.")
      .def(nb::init<double>(), nb::arg("host_bytes_per_us"), "0 bytes a microsecond: it takes no time.")
      .def(
          "submitted", [](Network& self, uint32_t step) { self.submitted(step, simulate::Clock::now()); },
          nb::arg("step"), "Says that the step of this number is handed over now.");
  nb::class_<SimulatedServer>(m, "SimulatedServer", "A stand-in for experts behind one connection at a time.")
      .def(
          "__init__",
          [](SimulatedServer* self, uint32_t hidden_size, uint32_t intermediate_size, uint32_t num_experts,
             uint32_t top_k, uint32_t first_stripe, uint32_t num_stripes, uint32_t max_step_tokens,
             const std::vector<uint32_t>& layers, std::shared_ptr<Network> network, double fixed_us,
             double expert_us, double row_us, double link_bytes_per_us, double delay_us,
             uint64_t request_row_bytes, uint64_t reply_row_bytes) {
            ExpertShape shape;
            shape.hidden_size = hidden_size;
            shape.intermediate_size = intermediate_size;
            shape.num_experts = num_experts;
            shape.top_k = top_k;
            shape.first_stripe = first_stripe;
            shape.num_stripes = num_stripes;
            StepLoopLimits limits;
            limits.max_step_tokens = max_step_tokens;
            new (self) SimulatedServer(checked_shape(shape, max_step_tokens), limits, layers,
                                       {fixed_us, expert_us, row_us, link_bytes_per_us, delay_us},
                                       std::move(network), request_row_bytes, reply_row_bytes);
          },
          nb::kw_only(), nb::arg("hidden_size"), nb::arg("intermediate_size"), nb::arg("num_experts"),
          nb::arg("top_k"), nb::arg("first_stripe"), nb::arg("num_stripes"), nb::arg("max_step_tokens"),
          nb::arg("layers"), nb::arg("network"), nb::arg("fixed_us"), nb::arg("expert_us"), nb::arg("row_us"),
          nb::arg("link_bytes_per_us"), nb::arg("delay_us"), nb::arg("request_row_bytes"),
          nb::arg("reply_row_bytes"))
      .def("serve", &SimulatedServer::serve, nb::arg("fd"), nb::arg("memory") = nb::none(),
           nb::arg("multicast") = nb::none(), nb::call_guard<nb::gil_scoped_release>(),
           "As StepServer.serve().");
}

}  // namespace duck
