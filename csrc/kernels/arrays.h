// Arrays that Python hands to the kernels, and how they are checked: used by the bind*.cpp files of this
// folder and of rowwise/. Every error is a ValueError that names the field, what was got and what was
// expected.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace duck {

namespace nb = nanobind;

using AnyArray = nb::ndarray<nb::ro, nb::device::cpu>;

inline std::string shape_text(const std::vector<size_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

template <class Array>
std::string shape_of(const Array& array) {
  std::vector<size_t> shape;
  for (size_t i = 0; i < array.ndim(); ++i) shape.push_back(array.shape(i));
  return shape_text(shape);
}

[[noreturn]] inline void fail(const std::string& field, const std::string& got, const std::string& expected) {
  throw nb::value_error((field + ": got " + got + ", expected " + expected).c_str());
}

template <class Array>
std::string type_of(const Array& array) {
  const nb::dlpack::dtype type = array.dtype();
  const char* kind = "other";
  if (type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Int)) kind = "int";
  if (type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::UInt)) kind = "uint";
  if (type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float)) kind = "float";
  if (type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat)) kind = "bfloat";
  return kind + std::to_string(type.bits);
}

template <class T, class Array>
void check_dtype(const char* field, const Array& array, const char* expected) {
  if (array.dtype() != nb::dtype<T>()) {
    fail(field, "elements of type " + type_of(array), expected);
  }
}

template <class Array>
void check_shape(const char* field, const Array& array, const std::vector<size_t>& shape) {
  bool same = array.ndim() == shape.size();
  for (size_t i = 0; same && i < shape.size(); ++i) same = array.shape(i) == shape[i];
  if (!same) fail(field, "shape " + shape_of(array), "shape " + shape_text(shape));
}

template <class Array>
void check_contiguous(const char* field, const Array& array) {
  if (array.size() == 0) return;
  int64_t stride = 1;
  for (size_t i = array.ndim(); i-- > 0;) {
    if (array.shape(i) > 1 && array.stride(i) != stride) {
      fail(field, "strides that skip elements", "a C-contiguous array");
    }
    stride *= static_cast<int64_t>(array.shape(i));
  }
}

// A C-contiguous array of that type and shape.
template <class T, class Array>
const T* checked(const char* field, const Array& array, const char* type, const std::vector<size_t>& shape) {
  check_dtype<T>(field, array, type);
  check_shape(field, array, shape);
  check_contiguous(field, array);
  return static_cast<const T*>(array.data());
}

inline nb::ndarray<nb::device::cpu> writable_array(const nb::object& out) {
  nb::ndarray<nb::device::cpu> array;
  if (!nb::try_cast(out, array, false)) fail("out", "something else", "a writable array");
  return array;
}

// Its elements are yet to be written.
template <class T>
nb::ndarray<nb::numpy, T> new_array(const std::vector<size_t>& shape) {
  size_t size = 1;
  for (size_t n : shape) size *= n;
  auto owned = std::make_unique_for_overwrite<T[]>(std::max<size_t>(size, 1));
  T* data = owned.get();
  nb::capsule owner(owned.release(), [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::ndarray<nb::numpy, T>(data, shape.size(), shape.data(), owner);
}

inline uint32_t as_u32(const char* field, int64_t value) {
  if (value < 0 || value > INT32_MAX) fail(field, std::to_string(value), "0 to " + std::to_string(INT32_MAX));
  return static_cast<uint32_t>(value);
}

}  // namespace duck
