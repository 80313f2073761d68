// The types of numbers in memory; bfloat16 is read as its bits.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>

#include "vectors.h"

namespace {

template <typename T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline Half from_float<Half>(float x) {
  return x;
}
template <>
inline uint16_t from_float<uint16_t>(float x) {
  return c10::BFloat16(x).x;
}

// Calls `visit(T{})` with the type in memory.
template <typename Visit>
void with_type(at::ScalarType dtype, const Visit& visit) {
  switch (dtype) {
    case at::kFloat: return visit(float{});
    case at::kBFloat16: return visit(uint16_t{});
    case at::kHalf: return visit(Half{});
    default: TORCH_CHECK(false, "tensors must be float32, bfloat16 or float16, not ", dtype);
  }
}

template <typename T>
T* data(const at::Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

} // namespace
