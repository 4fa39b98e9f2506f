// The Python module duckllm._ablation: times and results of the variants. Checks shapes; computes with the
// interpreter released.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <stdexcept>
#include <string>

#include "ablation/decode_step.h"
#include "ablation/tile_step.h"
#include "threads/on_core.h"
#include "threads/thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace duck::ablation {
namespace {

using Units = nb::ndarray<const uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Weights = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutRows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutUnits = nb::ndarray<uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

void expect(bool right, const std::string& field, size_t got, const std::string& expected) {
  if (!right) throw std::invalid_argument(field + ": got " + std::to_string(got) + ", expected " + expected);
}

Isa known_isa(const std::string& name) { return name == "auto" ? select_isa() : parse_isa("isa", name); }

class PyAblation {
 public:
  PyAblation(uint32_t hidden_size, uint32_t num_stripes, uint32_t max_experts, uint32_t max_rows,
             int num_threads, int spin_us, const std::string& isa)
      : hidden_size_(hidden_size),
        num_stripes_(num_stripes),
        max_experts_(max_experts),
        max_rows_(max_rows),
        isa_(known_isa(isa)),
        pool_(num_threads, spin_us, true),
        variants_(ablation::variants(isa_)),
        tile_variants_(ablation::tile_variants(isa_)),
        decode_(checked_hidden(hidden_size), num_stripes, max_experts, isa_, pool_),
        tile_(hidden_size, num_stripes, max_experts, max_rows, isa_, pool_) {}

  std::string isa() const { return isa_name(isa_); }

  nb::list variants() const {
    nb::list list;
    for (const Variant& variant : variants_) {
      list.append(nb::make_tuple(variant.name, variant.question, static_cast<int>(variant.layout),
                                 variant.same_bits, variant.base));
    }
    return list;
  }

  std::vector<int> tile_rows() const {
    std::vector<int> rows;
    for (const TileVariant& variant : tile_variants_) rows.push_back(variant.tile_rows);
    return rows;
  }

  std::vector<double> decode(size_t variant, const Units& units, const Rows& x, const Ids& ids,
                             const Weights& weights, const OutRows& out) {
    expect(variant < variants_.size(), "variant", variant, "below " + std::to_string(variants_.size()));
    expect(x.shape(0) == 1, "x", x.shape(0), "1 row");
    check(units, x, ids, weights, out);
    return timed(ids, [&](const int32_t* step_ids) {
      decode_.run(variants_[variant], layer(units), step_ids, weights.data(), ids.shape(1), x.data(),
                  out.data());
    });
  }

  std::vector<double> tiles(size_t variant, uint32_t chunk_rows, const Units& units, const Rows& x,
                            const Ids& ids, const Weights& weights, const OutRows& out) {
    expect(variant < tile_variants_.size(), "variant", variant,
           "below " + std::to_string(tile_variants_.size()));
    expect(x.shape(0) >= 1 && x.shape(0) <= max_rows_, "x", x.shape(0),
           "1 to " + std::to_string(max_rows_) + " rows");
    expect(chunk_rows >= 1 && chunk_rows <= max_rows_, "chunk_rows", chunk_rows,
           "1 to " + std::to_string(max_rows_));
    check(units, x, ids, weights, out);
    return timed(ids, [&](const int32_t* step_ids) {
      tile_.run(tile_variants_[variant], chunk_rows, layer(units), step_ids, weights.data(), ids.shape(1),
                x.data(), x.shape(0), out.data());
    });
  }

 private:
  static uint32_t checked_hidden(uint32_t hidden_size) {
    expect(hidden_size != 0 && hidden_size % kScaleBlock == 0, "hidden_size", hidden_size,
           "a multiple of 128");
    return hidden_size;
  }

  void check(const Units& units, const Rows& x, const Ids& ids, const Weights& weights,
             const OutRows& out) const {
    const size_t bytes = unit_bytes(WeightFormat::kFp9, hidden_size_);
    expect(units.shape(1) == num_stripes_, "units", units.shape(1),
           std::to_string(num_stripes_) + " stripes");
    expect(units.shape(2) == bytes, "units", units.shape(2), std::to_string(bytes) + " bytes a unit");
    expect(x.shape(1) == hidden_size_, "x", x.shape(1), std::to_string(hidden_size_) + " values a row");
    expect(out.shape(0) == x.shape(0) && out.shape(1) == hidden_size_, "out", out.shape(0), "the shape of x");
    expect(ids.shape(1) >= 1 && ids.shape(1) <= max_experts_, "topk_ids", ids.shape(1),
           "1 to " + std::to_string(max_experts_) + " experts");
    expect(weights.shape(0) == ids.shape(1), "topk_weights", weights.shape(0), "one of each expert");
    for (size_t i = 0; i < ids.size(); ++i) {
      const auto id = static_cast<size_t>(ids.data()[i]);
      expect(id < units.shape(0), "topk_ids", id, "below " + std::to_string(units.shape(0)));
    }
  }

  Layer layer(const Units& units) const { return {units.data(), units.shape(1) * units.shape(2)}; }

  template <class Run>
  static std::vector<double> timed(const Ids& ids, const Run& run) {
    std::vector<double> seconds(ids.shape(0));
    nb::gil_scoped_release release;
    const OnCore on_core(0);
    for (size_t step = 0; step < seconds.size(); ++step) {
      const auto start = std::chrono::steady_clock::now();
      run(ids.data() + step * ids.shape(1));
      seconds[step] = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
    return seconds;
  }

  const uint32_t hidden_size_, num_stripes_, max_experts_, max_rows_;
  const Isa isa_;
  ThreadPool pool_;
  const std::vector<Variant> variants_;
  const std::vector<TileVariant> tile_variants_;
  DecodeStep decode_;
  TileStep tile_;
};

void py_convert_layout(const Units& units, int layout, size_t hidden_size, const OutUnits& out) {
  expect(layout >= 0 && layout < kNumLayouts, "layout", layout, "0 to 3");
  expect(units.shape(2) == unit_bytes(WeightFormat::kFp9, hidden_size), "units", units.shape(2),
         "the bytes of a unit");
  expect(out.shape(0) == units.shape(0) && out.shape(1) == units.shape(1) && out.shape(2) == units.shape(2),
         "out", out.shape(0), "the shape of units");
  nb::gil_scoped_release release;
  convert_layout(units.data(), static_cast<Layout>(layout), hidden_size, units.shape(0) * units.shape(1),
                 out.data());
}

}  // namespace
}  // namespace duck::ablation

NB_MODULE(_ablation, m) {
  using duck::ablation::PyAblation;
  m.doc() = "Variants of the fp9 expert kernels, to be measured beside production's: not shipped.";
  m.def("convert_layout", &duck::ablation::py_convert_layout, "units"_a.noconvert(), "layout"_a,
        "hidden_size"_a, "out"_a.noconvert());
  nb::class_<PyAblation>(m, "Ablation")
      .def(nb::init<uint32_t, uint32_t, uint32_t, uint32_t, int, int, const std::string&>(), "hidden_size"_a,
           "num_stripes"_a, "max_experts"_a, "max_rows"_a, "num_threads"_a, "spin_us"_a, "isa"_a = "auto")
      .def_prop_ro("isa", &PyAblation::isa)
      .def("variants", &PyAblation::variants)
      .def("tile_rows", &PyAblation::tile_rows)
      .def("decode", &PyAblation::decode, "variant"_a, "units"_a.noconvert(), "x"_a.noconvert(),
           "topk_ids"_a.noconvert(), "topk_weights"_a.noconvert(), "out"_a.noconvert())
      .def("tiles", &PyAblation::tiles, "variant"_a, "chunk_rows"_a, "units"_a.noconvert(), "x"_a.noconvert(),
           "topk_ids"_a.noconvert(), "topk_weights"_a.noconvert(), "out"_a.noconvert());
}
