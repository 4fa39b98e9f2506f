// Python bindings of attention: duckllm._native.{StepContexts, Attention, pack_heads, select_topk}.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "attention/attention.h"
#include "attention/attention_table.h"
#include "attention/rotate.h"
#include "kernels/arrays.h"
#include "kernels/linear_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace duck {
namespace {

using attention::AttendShape;
using attention::Context;
using attention::Rows;
using attention::StepContexts;

std::string number(size_t value) { return std::to_string(value); }

// A f32 array whose last dimension lies side by side, of any distance between the others.
const float* side_by_side(const char* field, const AnyArray& array, size_t ndim) {
  check_dtype<float>(field, array, "float32");
  if (array.ndim() != ndim) fail(field, "shape " + shape_of(array), number(ndim) + " dimensions");
  if (array.shape(ndim - 1) > 1 && array.stride(ndim - 1) != 1) {
    fail(field, "strides that skip elements", "elements of the last dimension side by side");
  }
  return static_cast<const float*>(array.data());
}

// [num_slots, width], one row behind another.
Rows cache_rows(const char* field, const AnyArray& cache, const StepContexts& step, size_t width) {
  const float* data = side_by_side(field, cache, 2);
  if (cache.shape(0) < step.num_slots || cache.shape(1) != width) {
    fail(field, "shape " + shape_of(cache),
         "shape [at least " + number(step.num_slots) + ", " + number(width) + "]");
  }
  check_contiguous(field, cache);
  return {data, width};
}

StepContexts new_contexts(const AnyArray& rows, const AnyArray& pages) {
  constexpr size_t kFields = 4;  // start, num_tokens, first, page_tokens
  const int64_t* fields = checked<int64_t>("rows", rows, "int64", {rows.shape(0), kFields});
  const int32_t* numbers = checked<int32_t>("pages", pages, "int32", {pages.size()});
  StepContexts step;
  step.pages.assign(numbers, numbers + pages.size());
  size_t first_page = 0;
  for (size_t i = 0; i < rows.shape(0); ++i, fields += kFields) {
    Context context;
    context.first_row = step.num_rows;
    context.start = as_u32("start", fields[0]);
    context.num_rows = as_u32("num_tokens", fields[1]);
    context.first = as_u32("first", fields[2]);
    context.page_tokens = as_u32("page_tokens", fields[3]);
    if (context.num_rows == 0) fail("num_tokens", "0", "at least 1");
    if (context.page_tokens == 0) fail("page_tokens", "0", "at least 1");
    if (context.first > context.start) {
      fail("first", number(context.first),
           "at most " + number(context.start) + ", the first token's position");
    }
    const uint32_t stop = as_u32("stop", fields[0] + fields[1]);
    const size_t num_pages = (stop + context.page_tokens - 1) / context.page_tokens;
    if (first_page + num_pages > step.pages.size()) {
      fail("pages", number(step.pages.size()), "at least " + number(first_page + num_pages));
    }
    context.pages = step.pages.data() + first_page;
    for (uint32_t page = context.first / context.page_tokens; page < num_pages; ++page) {
      if (context.pages[page] < 0) fail("pages", std::to_string(context.pages[page]), "0 or more");
      const uint32_t last = std::min(stop, (page + 1) * context.page_tokens) - 1;
      step.num_slots = std::max(step.num_slots, context.slot(last) + 1);
    }
    first_page += num_pages;
    step.num_rows += context.num_rows;
    step.longest = std::max(step.longest, stop - context.first);
    step.contexts.push_back(context);
  }
  if (first_page != step.pages.size()) fail("pages", number(step.pages.size()), number(first_page));
  return step;
}

class PyAttention {
 public:
  explicit PyAttention(nb::handle runtime)
      : shared_(linear_pool(runtime)), attention_(shared_.isa, shared_.pool) {}

  void store(const StepContexts& step, const AnyArray& values, const AnyArray& cache) {
    const float* from = side_by_side("values", values, 2);
    check_shape("values", values, {step.num_rows, values.shape(1)});
    const Rows to = cache_rows("cache", cache, step, values.shape(1));
    const auto distance = values.stride(0);
    for (const Context& context : step.contexts) {
      for (uint32_t row = 0; row < context.num_rows; ++row) {
        std::memcpy(const_cast<float*>(to.data) + context.slot(context.start + row) * to.width,
                    from + (context.first_row + row) * distance, to.width * sizeof(float));
      }
    }
  }

  nb::object attend(const StepContexts& step, const AnyArray& q, const AnyArray& keys, const AnyArray& values,
                    int64_t num_kv_heads, int64_t value_dim, float scale, int64_t window,
                    const nb::object& selection) {
    if (q.ndim() != 3) fail("q", "shape " + shape_of(q), "shape [T, heads, D]");
    AttendShape shape;
    shape.num_heads = as_u32("num_heads", static_cast<int64_t>(q.shape(1)));
    shape.key_dim = as_u32("key_dim", static_cast<int64_t>(q.shape(2)));
    shape.num_kv_heads = as_u32("num_kv_heads", num_kv_heads);
    shape.value_dim = as_u32("value_dim", value_dim);
    shape.window = as_u32("window", window);
    shape.scale = scale;
    if (shape.num_kv_heads == 0 || shape.num_heads == 0 || shape.num_heads % shape.num_kv_heads != 0) {
      fail("num_kv_heads", std::to_string(num_kv_heads), "a divisor of " + number(shape.num_heads));
    }
    if (shape.key_dim == 0 || shape.value_dim == 0) fail("value_dim or key_dim", "0", "at least 1");
    const float* queries = checked<float>("q", q, "float32", {step.num_rows, shape.num_heads, shape.key_dim});
    const Rows key_rows =
        cache_rows("keys", keys, step, static_cast<size_t>(shape.num_kv_heads) * shape.key_dim);
    Rows value_rows = key_rows;
    if (values.data() == keys.data()) {  // of one latent the first numbers are the value
      if (shape.num_kv_heads != 1 || shape.value_dim > shape.key_dim) {
        fail("values", "the keys", "one kv head, and value_dim at most the keys'");
      }
    } else {
      value_rows =
          cache_rows("values", values, step, static_cast<size_t>(shape.num_kv_heads) * shape.value_dim);
    }
    attention::Selection chosen;
    AnyArray positions;
    if (!selection.is_none()) {
      if (!nb::try_cast(selection, positions, false) || positions.ndim() != 2 || positions.shape(1) == 0) {
        fail("selection", "something else", "an int32 array [T, topk]");
      }
      chosen.positions =
          checked<int32_t>("selection", positions, "int32", {step.num_rows, positions.shape(1)});
      chosen.topk = static_cast<uint32_t>(positions.shape(1));
      check_selection(step, chosen);
    }
    auto out = new_array<float>({step.num_rows, shape.num_heads, shape.value_dim});
    {
      nb::gil_scoped_release release;
      attention_.attend(step, shape, queries, key_rows, value_rows, chosen, out.data());
    }
    return nb::cast(out);
  }

  nb::object select(const StepContexts& step, const AnyArray& q, const AnyArray& weights,
                    const AnyArray& keys, int64_t topk) {
    if (q.ndim() != 3) fail("q", "shape " + shape_of(q), "shape [T, heads, D]");
    const uint32_t num_heads = as_u32("num_heads", static_cast<int64_t>(q.shape(1)));
    const uint32_t dim = as_u32("dim", static_cast<int64_t>(q.shape(2)));
    const uint32_t count = as_u32("topk", topk);
    if (count == 0) fail("topk", "0", "at least 1");
    const float* queries = checked<float>("q", q, "float32", {step.num_rows, num_heads, dim});
    const float* factors = checked<float>("weights", weights, "float32", {step.num_rows, num_heads});
    const Rows key_rows = cache_rows("keys", keys, step, dim);
    auto out = new_array<int32_t>({step.num_rows, count});
    {
      nb::gil_scoped_release release;
      attention_.select(step, num_heads, dim, queries, factors, key_rows, count, out.data());
    }
    return nb::cast(out);
  }

  void multiply_heads(const AnyArray& x, const AnyArray& w, int64_t outputs, const nb::object& out) {
    attention::Attention::HeadProduct product;
    product.x = side_by_side("x", x, 3);
    product.num_rows = static_cast<uint32_t>(x.shape(0));
    product.num_heads = static_cast<uint32_t>(x.shape(1));
    product.inputs = static_cast<uint32_t>(x.shape(2));
    product.outputs = as_u32("outputs", outputs);
    product.x_row = x.stride(0);
    product.x_head = x.stride(1);
    product.w = checked<float>("w", w, "float32",
                               {product.num_heads, attention::padded(product.outputs) / attention::kColumns,
                                product.inputs, attention::kColumns});
    const auto y = writable_array(out);
    check_dtype<float>("out", y, "float32");
    check_shape("out", y, {product.num_rows, product.num_heads, product.outputs});
    if (product.outputs > 1 && y.stride(2) != 1) {
      fail("out", "strides that skip elements", "elements of the last dimension side by side");
    }
    product.y = static_cast<float*>(y.data());
    product.y_row = y.stride(0);
    product.y_head = y.stride(1);
    nb::gil_scoped_release release;
    attention_.multiply_heads(product);
  }

 private:
  // Positions are read as they are: none may lie outside a context.
  static void check_selection(const StepContexts& step, const attention::Selection& selection) {
    for (const Context& context : step.contexts) {
      for (uint32_t row = 0; row < context.num_rows; ++row) {
        const int32_t* list =
            selection.positions + static_cast<size_t>(context.first_row + row) * selection.topk;
        if (list[0] < 0) continue;
        const auto [least, most] = std::minmax_element(list, list + selection.topk);
        if (*least < static_cast<int64_t>(context.first) ||
            *most > static_cast<int64_t>(context.start + row)) {
          fail("selection", "a position outside the row's context", "positions that the row may see");
        }
      }
    }
  }

  LinearPool shared_;
  attention::Attention attention_;
};

nb::object py_select_topk(const AnyArray& scores, int64_t topk) {
  if (scores.ndim() != 2) fail("scores", "shape " + shape_of(scores), "shape [T, S]");
  const size_t rows = scores.shape(0), size = scores.shape(1);
  const float* data = checked<float>("scores", scores, "float32", {rows, size});
  if (topk < 1 || static_cast<size_t>(topk) > size)
    fail("topk", std::to_string(topk), "1 to " + number(size));
  auto out = new_array<int32_t>({rows, static_cast<size_t>(topk)});
  for (size_t row = 0; row < rows; ++row) {
    attention::select_topk(data + row * size, 0, static_cast<uint32_t>(size), static_cast<uint32_t>(topk),
                           out.data() + row * topk);
  }
  return nb::cast(out);
}

void py_rotate(const AnyArray& x, const AnyArray& cos, const AnyArray& sin, bool interleaved,
               const nb::object& out) {
  if (x.ndim() < 2) fail("x", "shape " + shape_of(x), "shape [T, D] or [T, heads, D]");
  const size_t last = x.ndim() - 1, dim = x.shape(last);
  if (dim % 2 != 0) fail("x", "shape " + shape_of(x), "an even last dimension");
  attention::Rotation rotation;
  rotation.x = side_by_side("x", x, last == 1 ? 2 : 3);
  rotation.num_rows = static_cast<uint32_t>(x.shape(0));
  rotation.num_heads = last == 1 ? 1 : static_cast<uint32_t>(x.shape(1));
  rotation.pairs = static_cast<uint32_t>(dim / 2);
  rotation.cos = checked<float>("cos", cos, "float32", {rotation.num_rows, rotation.pairs});
  rotation.sin = checked<float>("sin", sin, "float32", {rotation.num_rows, rotation.pairs});
  rotation.interleaved = interleaved;
  const auto y = writable_array(out);
  check_dtype<float>("out", y, "float32");
  check_shape("out", y, std::vector<size_t>(x.shape_ptr(), x.shape_ptr() + x.ndim()));
  if (dim > 1 && y.stride(last) != 1) {
    fail("out", "strides that skip elements", "elements of the last dimension side by side");
  }
  rotation.x_row = x.stride(0);
  rotation.x_head = last == 1 ? 0 : x.stride(1);
  rotation.out = static_cast<float*>(y.data());
  rotation.out_row = y.stride(0);
  rotation.out_head = last == 1 ? 0 : y.stride(1);
  nb::gil_scoped_release release;
  attention::rotate(rotation);
}

#define DUCK_F32 "numpy.typing.NDArray[numpy.float32]"
#define DUCK_I32 "numpy.typing.NDArray[numpy.int32]"

void bind_calls(nb::class_<PyAttention>& attention) {
  attention
      .def("store", &PyAttention::store, "step"_a, "values"_a.noconvert(), "cache"_a.noconvert(),
           nb::sig("def store(self, step: StepContexts, values: " DUCK_F32 ", cache: " DUCK_F32 ") -> None"),
           "Puts the step's rows where their positions lie in the cache.\n\n"
           "Shapes:\n    values: [T, width]; cache: [slots, width]\n\n"
           "Raises:\n    ValueError: a wrong shape or type, or a page beyond the cache.")
      .def(
          "attend", &PyAttention::attend, "step"_a, "q"_a.noconvert(), "keys"_a.noconvert(),
          "values"_a.noconvert(), "num_kv_heads"_a, "value_dim"_a, "scale"_a, "window"_a,
          "selection"_a.none(),
          nb::sig("def attend(self, step: StepContexts, q: " DUCK_F32 ", keys: " DUCK_F32
                  ", values: " DUCK_F32 ", num_kv_heads: int, value_dim: int, scale: float, window: int, "
                  "selection: " DUCK_I32 " | None) -> " DUCK_F32),
          "Softmax attention of each row to its context, or to the positions that are selected for it.\n\n"
          "window: positions that a row attends to, itself included; 0 for all.\n\n"
          "Shapes:\n"
          "    q: [T, heads, D]; keys: [slots, kv_heads * D]; values: [slots, kv_heads * value_dim], or the\n"
          "    keys again: of one kv head, the first value_dim numbers\n"
          "    selection: [T, topk] of select; result: [T, heads, value_dim]\n\n"
          "Raises:\n    ValueError: a wrong shape or type, or a page or position outside.\n\n"
          "Threading:\n    Releases the interpreter; one computation at a time per LinearRuntime, and in "
          "the\n"
          "    process that made it: others are refused with RuntimeError.\n\n"
          "Reference:\n    tests/attention/attention_reference.py, float64, with the bound of attention.h")
      .def("select", &PyAttention::select, "step"_a, "q"_a.noconvert(), "weights"_a.noconvert(),
           "keys"_a.noconvert(), "topk"_a,
           nb::sig("def select(self, step: StepContexts, q: " DUCK_F32 ", weights: " DUCK_F32
                   ", keys: " DUCK_F32 ", topk: int) -> " DUCK_I32),
           "The positions of each row's topk best scores, sum over heads of weight * max(0, q . k), "
           "ascending;\n"
           "of equal scores the lowest positions. -1 comes first where a row sees no more than topk.\n\n"
           "Shapes:\n    q: [T, heads, D]; weights: [T, heads]; keys: [slots, D]; result: [T, topk]\n\n"
           "Raises:\n    ValueError: a wrong shape or type, or a page beyond the cache.\n\n"
           "Threading:\n    Releases the interpreter; one computation at a time per LinearRuntime, and in "
           "the\n"
           "    process that made it: others are refused with RuntimeError.")
      .def("multiply_heads", &PyAttention::multiply_heads, "x"_a.noconvert(), "w"_a.noconvert(), "outputs"_a,
           "out"_a,
           nb::sig("def multiply_heads(self, x: " DUCK_F32 ", w: " DUCK_F32 ", outputs: int, out: " DUCK_F32
                   ") -> None"),
           "out[t, h] = x[t, h] W[h]; the last dimension of x and out lies side by side, others anyhow.\n\n"
           "Shapes:\n"
           "    x: [T, heads, K]; w: [heads, ceil(N / 32), K, 32], zero beyond N; out: [T, heads, N]\n\n"
           "Raises:\n    ValueError: a wrong shape or type.\n\n"
           "Threading:\n    Releases the interpreter; one computation at a time per LinearRuntime, and in "
           "the\n"
           "    process that made it: others are refused with RuntimeError.");
}

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<StepContexts>(m, "StepContexts",
                           "The rows of a step by the contexts that they belong to, and where these lie.\n\n"
                           "Shapes:\n"
                           "    rows: [contexts, 4] int64: start, num_tokens, first, page_tokens\n"
                           "    pages: [all of their pages, up to the step's last token] int32\n\n"
                           "Raises:\n    ValueError: a number out of range, too few pages or too many.")
      .def(
          "__init__",
          [](StepContexts* self, const AnyArray& rows, const AnyArray& pages) {
            new (self) StepContexts(new_contexts(rows, pages));
          },
          "rows"_a.noconvert(), "pages"_a.noconvert(),
          nb::sig("def __init__(self, rows: numpy.typing.NDArray[numpy.int64], pages: " DUCK_I32 ") -> None"))
      .def_ro("num_rows", &StepContexts::num_rows)
      .def_ro("longest", &StepContexts::longest,
              "Positions that the longest context has, up to the last of the step.");

  nb::class_<PyAttention> attention(m, "Attention",
                                    "Attention over a paged cache, on the threads of a LinearRuntime.\n\n"
                                    "csrc/attention/attention.h states the order of operations and the error "
                                    "bound; a row's result depends\n"
                                    "neither on the other rows, nor on the threads, nor on where pages lie.");
  attention.def(nb::init<nb::handle>(), "runtime"_a, nb::keep_alive<1, 2>(),
                nb::sig("def __init__(self, runtime: LinearRuntime) -> None"));
  bind_calls(attention);

  m.def("rotate", &py_rotate, "x"_a.noconvert(), "cos"_a.noconvert(), "sin"_a.noconvert(), "interleaved"_a,
        "out"_a,
        nb::sig("def rotate(x: " DUCK_F32 ", cos: " DUCK_F32 ", sin: " DUCK_F32
                ", interleaved: bool, out: " DUCK_F32 ") -> None"),
        "Pairs of numbers turned: (a cos - b sin, b cos + a sin). Pairs are neighbours, or lie in the two\n"
        "halves; out has the first numbers of all pairs, then the second ones. out may be x.\n\n"
        "Shapes:\n    x, out: [T, D] or [T, heads, D], the last dimension side by side; cos, sin: [T, D / 2]"
        "\n\nRaises:\n    ValueError: a wrong shape or type.");
  m.def("select_topk", &py_select_topk, "scores"_a.noconvert(), "topk"_a,
        nb::sig("def select_topk(scores: " DUCK_F32 ", topk: int) -> " DUCK_I32),
        "The positions of the topk largest scores of each row, ascending; of equal ones the lowest.\n\n"
        "Shapes:\n    scores: [T, S]; result: [T, topk]\n\n"
        "Raises:\n    ValueError: a wrong shape or type, or topk not in 1 to S.");
}

}  // namespace duck
