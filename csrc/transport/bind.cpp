// The transport for Python: arrays in, arrays out, the GIL released while bytes move.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string_view>
#include <tuple>

#include "transport/py_transport.h"
#include "transport/step_trace.h"
#include "transport/transport.h"

namespace nb = nanobind;

namespace duck {
namespace {

template <typename T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

using Memory = std::shared_ptr<wire::SharedMemory>;  // none: the connection alone

PyObject* transport_error_type = nullptr;

void check_shape(const char* field, size_t got_rows, size_t got_columns, size_t rows, size_t columns) {
  if (got_rows == rows && got_columns == columns) return;
  throw std::invalid_argument(std::string(field) + ": got shape [" + std::to_string(got_rows) + ", " +
                              std::to_string(got_columns) + "], expected [" + std::to_string(rows) + ", " +
                              std::to_string(columns) + "]");
}

// Ctrl-C must not wait for a worker that is stuck.
bool interrupted() {
  const nb::gil_scoped_acquire acquire;
  return PyErr_CheckSignals() != 0;
}

class PyTransport {
 public:
  PyTransport(std::vector<Transport::Peer> peers, const TransportConfig& config,
              std::unique_ptr<MulticastSender> multicast)
      : config_(config),
        transport_(std::make_shared<Transport>(std::move(peers), config, std::move(multicast))) {}

  uint64_t submit(uint32_t layer, Matrix<const float> x, Matrix<const int32_t> topk_ids,
                  Matrix<const float> topk_weights, uint16_t lane) {
    const size_t tokens = x.shape(0);
    const size_t top_k = topk_ids.shape(1);
    check_shape("x", x.shape(0), x.shape(1), tokens, config_.hidden_size);
    check_shape("topk_ids", topk_ids.shape(0), topk_ids.shape(1), tokens, top_k);
    check_shape("topk_weights", topk_weights.shape(0), topk_weights.shape(1), tokens, top_k);
    nb::gil_scoped_release release;
    return transport_->submit(layer, lane, static_cast<uint32_t>(tokens), static_cast<uint32_t>(top_k),
                              x.data(), topk_ids.data(), topk_weights.data());
  }

  void wait(uint64_t ticket, Matrix<float> out) {
    bool complete = false;
    {
      nb::gil_scoped_release release;
      const uint32_t tokens = transport_->ticket_tokens(ticket);
      check_shape("out", out.shape(0), out.shape(1), tokens, config_.hidden_size);
      complete = transport_->wait(ticket, out.data(), interrupted);
    }
    if (!complete) throw nb::python_error();
  }

  std::vector<size_t> wait_some(uint64_t ticket, int64_t ms) {
    std::vector<size_t> late;
    bool uninterrupted = false;
    {
      nb::gil_scoped_release release;
      uninterrupted = transport_->wait_some(ticket, ms, late, interrupted);
    }
    if (!uninterrupted) throw nb::python_error();
    return late;
  }

  Transport& native() { return *transport_; }
  const std::shared_ptr<Transport>& shared() const { return transport_; }

 private:
  const TransportConfig config_;
  const std::shared_ptr<Transport> transport_;
};

}  // namespace

std::shared_ptr<Transport> transport_of(nb::handle object) {
  return nb::cast<const PyTransport&>(object).shared();
}

void bind_transport(nb::module_& m) {
  transport_error_type =
      PyErr_NewExceptionWithDoc("duckllm._native.TransportError",
                                "A worker is lost; args are its index, the layer (or None) and the reason.",
                                PyExc_RuntimeError, nullptr);
  m.attr("TransportError") = nb::handle(transport_error_type);
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const TransportError& error) {
      nb::object layer = error.layer() ? nb::cast(*error.layer()) : nb::none();
      // The reason may quote a worker, which may send any bytes.
      const std::string_view text = error.what();
      const auto reason =
          nb::steal(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
      PyErr_SetObject(transport_error_type, nb::make_tuple(error.worker(), layer, reason).ptr());
    }
  });

  nb::class_<LayerTimes>(m, "LayerTimes", "Means over a layer's last steps, one a worker, microseconds.")
      .def_ro("layer", &LayerTimes::layer)
      .def_ro("num_steps", &LayerTimes::num_steps)
      .def_ro("tokens", &LayerTimes::tokens)
      .def_ro("compute_us", &LayerTimes::compute_us)
      .def_ro("round_trip_us", &LayerTimes::round_trip_us)
      .def_ro("wait_us", &LayerTimes::wait_us);

  nb::class_<StepTrace>(m, "StepTrace", "Moments of steps, kept until they are drained as trace events.")
      .def(nb::init<size_t>(), nb::arg("capacity_bytes"))
      .def_prop_ro("pending_bytes", &StepTrace::pending_bytes, "Bytes of records that wait to be drained.")
      .def_prop_ro("capacity_bytes", &StepTrace::capacity_bytes, "Room for such bytes.")
      .def_prop_ro("num_dropped", &StepTrace::num_dropped, "Steps that there was no room for, so far.")
      .def(
          "record_engine",
          [](StepTrace& self, uint64_t end_ns, double seconds, uint64_t prompt_tokens, uint64_t decode_tokens,
             uint64_t new_tokens, double attention_s, double dense_s, double dispatch_s, double wait_s,
             double combine_s, double head_s, double sampling_s, double device_s, double draft_s) {
            const auto ns = [](double s) {
              return s > 0 ? static_cast<uint64_t>(std::min(s, 1e9) * 1e9) : uint64_t{0};
            };
            const uint64_t took_ns = std::min(ns(seconds), end_ns);
            return self.record_engine(
                {end_ns - took_ns,
                 end_ns,
                 prompt_tokens,
                 decode_tokens,
                 new_tokens,
                 {ns(attention_s), ns(dense_s), ns(dispatch_s), ns(wait_s), ns(combine_s), ns(head_s),
                  ns(sampling_s), ns(device_s), ns(draft_s)}});
          },
          nb::arg("end_ns"), nb::arg("seconds"), nb::arg("prompt_tokens"), nb::arg("decode_tokens"),
          nb::arg("new_tokens"), nb::arg("attention_s"), nb::arg("dense_s"), nb::arg("dispatch_s"),
          nb::arg("wait_s"), nb::arg("combine_s"), nb::arg("head_s"), nb::arg("sampling_s"),
          nb::arg("device_s"), nb::arg("draft_s"),
          "Notes a step of the engine and the seconds of its parts; bytes that wait to be drained then.")
      .def(
          "drain",
          [](StepTrace& self, uint64_t origin_ns) {
            std::string text;
            {
              nb::gil_scoped_release release;
              text = self.drain(origin_ns);
            }
            return nb::bytes(text.data(), text.size());
          },
          nb::arg("origin_ns"),
          "Trace events in JSON, each with a comma and a line break before it; microseconds from origin_ns "
          "on.");

  nb::class_<PyTransport>(m, "Transport", "Steps to every worker, partial sums back, added in worker order.")
      .def(
          "__init__",
          [](PyTransport* self, std::vector<int> sockets, std::vector<std::optional<Memory>> memories,
             uint32_t hidden_size, uint32_t top_k, uint32_t max_step_tokens, bool x_bf16, bool reply_bf16,
             int64_t step_timeout_ms, int64_t submit_timeout_ms, int spin_us, int multicast_socket,
             const std::optional<wire::MulticastSession>& multicast_session,
             const std::string& multicast_group, std::vector<size_t> multicast_bytes) {
            TransportConfig config;
            config.hidden_size = hidden_size;
            config.top_k = top_k;
            config.max_step_tokens = max_step_tokens;
            config.x_type = static_cast<ActivationType>(x_bf16);
            config.reply_type = static_cast<ActivationType>(reply_bf16);
            config.step_timeout_ms = step_timeout_ms;
            config.submit_timeout_ms = submit_timeout_ms;
            config.spin_us = spin_us;
            if (memories.empty()) memories.resize(sockets.size());
            check_shape("memories", memories.size(), 1, sockets.size(), 1);
            if (multicast_bytes.empty()) multicast_bytes.resize(sockets.size());
            check_shape("multicast_bytes", multicast_bytes.size(), 1, sockets.size(), 1);
            std::vector<Transport::Peer> peers;
            for (size_t worker = 0; worker < sockets.size(); ++worker) {
              peers.push_back({sockets[worker], memories[worker].value_or(nullptr), multicast_bytes[worker]});
            }
            std::unique_ptr<MulticastSender> multicast;
            if (multicast_session) {
              multicast =
                  std::make_unique<MulticastSender>(multicast_socket, *multicast_session, multicast_group);
            }
            new (self) PyTransport(std::move(peers), config, std::move(multicast));
          },
          nb::arg("sockets"), nb::kw_only(), nb::arg("memories") = std::vector<std::optional<Memory>>(),
          nb::arg("hidden_size"), nb::arg("top_k"), nb::arg("max_step_tokens"), nb::arg("x_bf16") = false,
          nb::arg("reply_bf16") = false, nb::arg("step_timeout_ms") = 30'000,
          nb::arg("submit_timeout_ms") = 400, nb::arg("spin_us") = 0, nb::arg("multicast_socket") = -1,
          nb::arg("multicast_session") = nb::none(), nb::arg("multicast_group") = "",
          nb::arg("multicast_bytes") = std::vector<size_t>())
      .def("submit", &PyTransport::submit, nb::arg("layer"), nb::arg("x").noconvert(),
           nb::arg("topk_ids").noconvert(), nb::arg("topk_weights").noconvert(), nb::arg("lane") = 0,
           "Sends x [T, H] f32, topk_ids [T, K] i32, topk_weights [T, K] f32 to every worker that is not "
           "lost; "
           "returns a ticket.")
      .def("wait", &PyTransport::wait, nb::arg("ticket"), nb::arg("out").noconvert(),
           "Writes the sum of the workers' replies into out [T, H] f32.")
      .def("wait_some", &PyTransport::wait_some, nb::arg("ticket"), nb::arg("ms"),
           "Waits for a step at most this long; the workers that have not answered it by then.")
      .def(
          "drop",
          [](PyTransport& self, size_t worker, const std::string& reason) {
            self.native().drop(worker, reason);
          },
          nb::arg("worker"), nb::arg("reason"), nb::call_guard<nb::gil_scoped_release>(),
          "Closes the connection of a worker that is known to be lost.")
      .def(
          "look", [](PyTransport& self) { self.native().look(); }, nb::call_guard<nb::gil_scoped_release>(),
          "Takes what has come while no step is waited for; who has closed its connection is lost.")
      .def(
          "lost", [](PyTransport& self) { return self.native().lost(); },
          nb::call_guard<nb::gil_scoped_release>(), "The workers that are lost, ascending.")
      .def(
          "replace",
          [](PyTransport& self, size_t worker, int socket, Memory memory, size_t multicast_bytes) {
            self.native().replace(worker, {socket, std::move(memory), multicast_bytes});
          },
          nb::arg("worker"), nb::arg("socket"), nb::arg("memory") = nb::none(),
          nb::arg("multicast_bytes") = 0, nb::call_guard<nb::gil_scoped_release>(),
          "Gives a worker's place to another connection, and sends it what is in flight.")
      .def(
          "describe", [](PyTransport& self) { return self.native().describe(); },
          nb::call_guard<nb::gil_scoped_release>(), "How each worker is spoken with, in words.")
      .def(
          "multicast_counts",
          [](PyTransport& self) {
            const Transport::MulticastCounts counts = self.native().multicast_counts();
            return std::tuple(counts.num_datagrams, counts.num_asked,
                              std::vector<bool>(counts.is_reached.begin(), counts.is_reached.end()));
          },
          nb::call_guard<nb::gil_scoped_release>(),
          "(datagrams sent, fragments that each worker asked for again, whether it is reached).")
      .def(
          "take_unreached", [](PyTransport& self) { return self.native().take_unreached(); },
          nb::call_guard<nb::gil_scoped_release>(),
          "Workers that multicast was found not to reach since the last call.")
      .def(
          "give_up", [](PyTransport& self) { self.native().give_up(); },
          nb::call_guard<nb::gil_scoped_release>(), "Gives every step in flight up.")
      .def(
          "ticket_tokens",
          [](PyTransport& self, uint64_t ticket) { return self.native().ticket_tokens(ticket); },
          nb::arg("ticket"), nb::call_guard<nb::gil_scoped_release>(), "T of a step in flight.")
      .def(
          "last_compute_us", [](PyTransport& self) { return self.native().last_compute_us(); },
          nb::call_guard<nb::gil_scoped_release>(),
          "Each worker's own time for the step last waited for, microseconds.")
      .def(
          "step_times", [](PyTransport& self) { return self.native().step_times(); },
          nb::call_guard<nb::gil_scoped_release>(),
          "Means over each layer's last steps; does not wait for a step that is under way.")
      .def(
          "measure_host_time", [](PyTransport& self, bool on) { self.native().measure_host_time(on); },
          nb::arg("on"), nb::call_guard<nb::gil_scoped_release>(),
          "Measures from now on what the host's own work costs, from zero; or stops to.")
      .def(
          "host_time",
          [](PyTransport& self) {
            std::vector<std::tuple<uint64_t, uint64_t, uint64_t>> parts;
            for (const HostTime::Spent& each : self.native().host_time()) {
              parts.emplace_back(each.cpu_ns, each.wall_ns, each.times);
            }
            return parts;
          },
          nb::call_guard<nb::gil_scoped_release>(),
          "(CPU ns, wall ns, times) of packing, sending, sleeping, receiving, combining since then.")
      .def(
          "set_trace",
          [](PyTransport& self, std::shared_ptr<StepTrace> trace) {
            self.native().set_trace(std::move(trace));
          },
          nb::arg("trace").none(), nb::call_guard<nb::gil_scoped_release>(),
          "Notes every step from now on; None ends it.")
      .def(
          "close", [](PyTransport& self) { self.native().close(); }, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro(
          "closed", [](PyTransport& self) { return self.native().closed(); },
          nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace duck
