// The Python module duckllm._native. Each part of csrc binds itself in its own bind.cpp; this file only
// calls them, so that a part is added by adding a file.
#include <nanobind/nanobind.h>

namespace duck {
void bind_kernels(nanobind::module_& m);
void bind_linear(nanobind::module_& m);
void bind_grouped(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_rowwise(nanobind::module_& m);
void bind_wire(nanobind::module_& m);
void bind_transport(nanobind::module_& m);
void bind_exchange(nanobind::module_& m);
void bind_worker(nanobind::module_& m);
void bind_simulate(nanobind::module_& m);
void bind_weights(nanobind::module_& m);
void bind_bench(nanobind::module_& m);
}  // namespace duck

NB_MODULE(_native, m) {
  // A model that a script keeps to its end is no leak worth a page of text on stderr.
  nanobind::set_leak_warnings(false);
  m.doc() =
      "Native parts of duck-llm: kernels of experts and dense layers, attention, row-wise operations, wire "
      "format, transport, the worker's step loop and a stand-in below it, and the loops that measure a "
      "machine's ceilings.";
  duck::bind_kernels(m);
  duck::bind_linear(m);
  duck::bind_grouped(m);
  duck::bind_attention(m);
  duck::bind_rowwise(m);
  duck::bind_wire(m);
  duck::bind_transport(m);
  duck::bind_exchange(m);
  duck::bind_worker(m);
  duck::bind_simulate(m);
  duck::bind_weights(m);
  duck::bind_bench(m);
}
