// Weights in memory for Python: units re-encoded from one format to another, and put out of the caches.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "kernels/experts.h"
#include "kernels/recode.h"
#include "kernels/weight_format.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace duck {
namespace {

using UnitsArray = nb::ndarray<const uint8_t, nb::ndim<3>, nb::device::cpu>;
using WritableUnits = nb::ndarray<uint8_t, nb::ndim<3>, nb::device::cpu>;

template <class Array>
void check_units(const std::string& name, const Array& units, const std::string& format_name,
                 size_t hidden_size, ScaleLayout layout) {
  const WeightFormat format = parse_format(format_name);
  const size_t bytes = unit_bytes(format, hidden_size, layout);
  if (units.shape(2) != bytes) {
    throw std::invalid_argument(name + ": got units of " + std::to_string(units.shape(2)) +
                                " bytes, expected " + std::to_string(bytes) + " as " + format_name);
  }
  if (units.stride(2) != 1) {
    throw std::invalid_argument(name + ": got gaps between the bytes of a unit, expected none");
  }
}

template <class Array>
auto* unit_at(const Array& units, size_t expert, size_t stripe) {
  return units.data() + static_cast<int64_t>(expert) * units.stride(0) +
         static_cast<int64_t>(stripe) * units.stride(1);
}

void py_recode_units(const UnitsArray& units, const WritableUnits& out, uint32_t hidden_size,
                     const std::string& from, const std::string& to, const std::string& scale_layout) {
  const ScaleLayout layout = parse_scale_layout(scale_layout);
  check_units("units", units, from, hidden_size, layout);
  check_units("out", out, to, hidden_size, layout);
  if (units.shape(0) != out.shape(0) || units.shape(1) != out.shape(1)) {
    throw std::invalid_argument("out: got " + std::to_string(out.shape(0)) + " experts of " +
                                std::to_string(out.shape(1)) + " stripes, expected " +
                                std::to_string(units.shape(0)) + " of " + std::to_string(units.shape(1)));
  }
  const WeightFormat from_format = parse_format(from), to_format = parse_format(to);
  if (from_format != to_format && !(is_e4m3(from_format) && is_e4m3(to_format))) {
    throw std::invalid_argument("format: got " + from + " to " + to + ", expected fp9, fp8 or a copy");
  }
  size_t num_bad = 0;
  {
    nb::gil_scoped_release release;
    for (size_t expert = 0; expert < units.shape(0); ++expert) {
      for (size_t stripe = 0; stripe < units.shape(1); ++stripe) {
        num_bad += recode_unit(hidden_size, layout, from_format, unit_at(units, expert, stripe), to_format,
                               unit_at(out, expert, stripe))
                       ? 0
                       : 1;
      }
    }
  }
  if (num_bad != 0) {
    throw std::invalid_argument("units: got " + std::to_string(num_bad) +
                                " with bytes that no finite e4m3 value is stored as, expected none");
  }
}

void py_flush_from_caches(const UnitsArray& units) {
  if (units.stride(2) != 1) {
    throw std::invalid_argument("units: got gaps between the bytes of a unit, expected none");
  }
  nb::gil_scoped_release release;
  for (size_t expert = 0; expert < units.shape(0); ++expert) {
    for (size_t stripe = 0; stripe < units.shape(1); ++stripe) {
      flush_from_caches(unit_at(units, expert, stripe), units.shape(2));
    }
  }
}

}  // namespace

void bind_weights(nb::module_& m) {
  m.def("recode_units", &py_recode_units, "units"_a.noconvert(), "out"_a.noconvert(), "hidden_size"_a,
        "from_format"_a, "to_format"_a, "scale_layout"_a = "block",
        nb::sig("def recode_units(units: numpy.typing.NDArray[numpy.uint8], out: "
                "numpy.typing.NDArray[numpy.uint8], hidden_size: int, from_format: str, to_format: str, "
                "scale_layout: str = 'block') -> None"),
        "Writes units of one format in another, without loss and with the same scales.\n\n"
        "Shapes:\n"
        "    units: [E, S, unit_bytes(H, from_format, scale_layout)] uint8, each unit contiguous;\n"
        "        may be a memory map\n"
        "    out: [E, S, unit_bytes(H, to_format, scale_layout)] uint8, likewise; must not overlap\n\n"
        "Raises:\n    ValueError: a wrong shape or format, or bytes that no finite e4m3 value is stored "
        "as.\n\n"
        "Threading:\n    Releases the interpreter; threads may share out the experts.\n\n"
        "Reference:\n    duckllm.weights.units, byte for byte");
  m.def("flush_from_caches", &py_flush_from_caches, "units"_a.noconvert(),
        nb::sig("def flush_from_caches(units: numpy.typing.NDArray[numpy.uint8]) -> None"),
        "Makes units be in no cache of this machine, so that the next step reads them from memory.\n\n"
        "Shapes:\n    units: [E, S, bytes] uint8, each unit contiguous; may be a memory map");
}

}  // namespace duck
