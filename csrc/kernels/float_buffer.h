// Scratch memory of the kernels: sized once, aligned to cache lines.
#pragma once

#include <algorithm>
#include <cstddef>
#include <new>

namespace duck {

// 64-byte aligned zeroed numbers.
template <class Number>
class AlignedBuffer {
 public:
  explicit AlignedBuffer(size_t size)
      : data_(static_cast<Number*>(::operator new(std::max<size_t>(size, 1) * sizeof(Number), kAlignment))) {
    std::fill_n(data_, size, Number{});
  }
  ~AlignedBuffer() { ::operator delete(data_, kAlignment); }
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;
  Number* data() { return data_; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  Number* data_;
};

using FloatBuffer = AlignedBuffer<float>;

}  // namespace duck
