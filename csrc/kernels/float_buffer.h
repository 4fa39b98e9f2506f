// Scratch memory of the kernels: sized once, aligned to cache lines.
#pragma once

#include <algorithm>
#include <cstddef>
#include <new>

namespace duck {

// 64-byte aligned zeroed floats.
class FloatBuffer {
 public:
  explicit FloatBuffer(size_t size)
      : data_(static_cast<float*>(::operator new(std::max<size_t>(size, 1) * sizeof(float), kAlignment))) {
    std::fill_n(data_, size, 0.0f);
  }
  ~FloatBuffer() { ::operator delete(data_, kAlignment); }
  FloatBuffer(const FloatBuffer&) = delete;
  FloatBuffer& operator=(const FloatBuffer&) = delete;
  float* data() { return data_; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  float* data_;
};

}  // namespace duck
