// Python bindings of the ceilings: duckllm._native.CeilingLoops. Measures with the interpreter released.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "bench/ceilings.h"
#include "bench/loop_table.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace duck {
namespace {

using bench::CeilingLoops;
using bench::Passes;
using InBytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

uint32_t as_count(const char* field, int64_t value) {
  if (value < 0 || value > INT32_MAX) {
    throw std::invalid_argument(std::string(field) + ": got " + std::to_string(value) + ", expected 0 to " +
                                std::to_string(INT32_MAX));
  }
  return static_cast<uint32_t>(value);
}

Passes as_passes(int64_t passes, int64_t warm_passes) {
  return {as_count("passes", passes), as_count("warm_passes", warm_passes)};
}

std::vector<std::string> variants(const std::string& op) {
  if (op == "read") return {std::begin(bench::kReadNames), std::end(bench::kReadNames)};
  if (op == "fill" || op == "copy") return {std::begin(bench::kWriteNames), std::end(bench::kWriteNames)};
  throw std::invalid_argument("op: got '" + op + "', expected one of read, fill, copy");
}

}  // namespace

void bind_bench(nb::module_& m) {
  nb::class_<CeilingLoops>(
      m, "CeilingLoops",
      "Loops that only read, write, copy or multiply and add, timed on threads of their own: the ceilings\n"
      "that everything else is measured against. csrc/bench/ceilings.h says what is in a time.\n\n"
      "Shapes:\n"
      "    data, to, from_: [N] uint8, contiguous, aligned to 64 bytes, N a multiple of granule_bytes\n\n"
      "Units:\n    times in seconds; passes over the same memory, the warm ones before the clock starts\n\n"
      "Raises:\n    ValueError: an unknown variant or ISA, no pass, memory of another length or "
      "alignment.\n\n"
      "Threading:\n    Releases the interpreter; one call at a time per object.")
      .def(
          "__init__",
          [](CeilingLoops* self, int num_threads, const std::string& isa) {
            new (self) CeilingLoops(num_threads, isa == "auto" ? select_isa() : parse_isa("isa", isa));
          },
          "num_threads"_a, "isa"_a = "auto")
      .def_static("variants", &variants, "op"_a, "Names of the variants of ``read``, ``fill`` or ``copy``.")
      .def_prop_ro("num_threads", &CeilingLoops::num_threads)
      .def_prop_ro("isa", [](const CeilingLoops& self) { return std::string(isa_name(self.isa())); })
      .def_prop_ro("granule_bytes", &CeilingLoops::granule_bytes)
      .def_prop_ro("fma_lanes", &CeilingLoops::fma_lanes)
      .def_prop_ro("flop_per_step", &CeilingLoops::flop_per_step)
      .def(
          "randomise",
          [](CeilingLoops& self, const OutBytes& data, uint64_t seed) {
            nb::gil_scoped_release release;
            self.randomise(data.data(), data.size(), seed);
          },
          "data"_a.noconvert(), "seed"_a,
          nb::sig("def randomise(self, data: numpy.typing.NDArray[numpy.uint8], seed: int) -> None"),
          "Writes words that depend on their index and the seed; each thread touches its own part first.")
      .def(
          "read",
          [](CeilingLoops& self, const std::string& variant, const InBytes& data, int64_t passes,
             int64_t warm_passes) {
            const Passes counts = as_passes(passes, warm_passes);
            nb::gil_scoped_release release;
            const auto sample = self.read(variant, data.data(), data.size(), counts);
            return std::pair{sample.seconds, sample.checksum};
          },
          "variant"_a, "data"_a.noconvert(), "passes"_a = 1, "warm_passes"_a = 0,
          nb::sig("def read(self, variant: str, data: numpy.typing.NDArray[numpy.uint8], passes: int = 1, "
                  "warm_passes: int = 0) -> tuple[float, int]"),
          "Seconds, and the exclusive or of the 64-bit words.")
      .def(
          "fill",
          [](CeilingLoops& self, const std::string& variant, const OutBytes& data, int64_t value,
             int64_t passes, int64_t warm_passes) {
            const Passes counts = as_passes(passes, warm_passes);
            if (value < 0 || value > 255) {
              throw std::invalid_argument("value: got " + std::to_string(value) + ", expected 0 to 255");
            }
            nb::gil_scoped_release release;
            return self.fill(variant, data.data(), data.size(), static_cast<uint8_t>(value), counts).seconds;
          },
          "variant"_a, "data"_a.noconvert(), "value"_a, "passes"_a = 1, "warm_passes"_a = 0,
          nb::sig("def fill(self, variant: str, data: numpy.typing.NDArray[numpy.uint8], value: int, "
                  "passes: int = 1, warm_passes: int = 0) -> float"),
          "Seconds to write ``value`` to every byte.")
      .def(
          "copy",
          [](CeilingLoops& self, const std::string& variant, const OutBytes& to, const InBytes& from,
             int64_t passes, int64_t warm_passes) {
            const Passes counts = as_passes(passes, warm_passes);
            if (to.size() != from.size()) {
              throw std::invalid_argument("to: got " + std::to_string(to.size()) + " bytes, expected " +
                                          std::to_string(from.size()) + ", as many as from_ has");
            }
            nb::gil_scoped_release release;
            return self.copy(variant, to.data(), from.data(), to.size(), counts).seconds;
          },
          "variant"_a, "to"_a.noconvert(), "from_"_a.noconvert(), "passes"_a = 1, "warm_passes"_a = 0,
          nb::sig(
              "def copy(self, variant: str, to: numpy.typing.NDArray[numpy.uint8], "
              "from_: numpy.typing.NDArray[numpy.uint8], passes: int = 1, warm_passes: int = 0) -> float"),
          "Seconds to copy; the two must not overlap.")
      .def(
          "fma",
          [](CeilingLoops& self, int64_t steps) {
            const uint32_t count = as_count("steps", steps);
            nb::gil_scoped_release release;
            const auto sample = self.fma(count);
            return std::pair{sample.seconds, sample.sum};
          },
          "steps"_a,
          "Seconds for ``steps`` (at most 2^22) of flop_per_step f32 operations each, and the sum of the\n"
          "lanes of a thread: with n = fma_lanes exactly n * (n - 1) / 2 + n * steps.");
}

}  // namespace duck
