// Linear layers over few rows: a tree's.  Each weight is read from memory once, for all rows; a product that is tiled for
// many rows costs a fifth of a step per row instead.  row_linear.py documents the arguments.
//
// Weights stay as they are in the checkpoint, [outputs][inputs]; both operands are read along the inputs.  All sums are
// float32.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace {

// The register tile: 24 sums of the 32 registers of AVX-512, 12 of the 16 of AVX2.
constexpr int kTileRows = kLanes == 16 ? 6 : 4, kTileOutputs = kLanes == 16 ? 4 : 3;
constexpr int64_t kThreadOutputs = 8 * kTileOutputs; // a thread's unit of work

// Computes out[ROWS][OUTPUTS] = x @ w.T; reads `ahead`, the weights of the next outputs, into the cache.
template <int ROWS, int OUTPUTS, typename T>
void multiply_tile(const float* x, const T* w, const T* ahead, int64_t size, float* out, int64_t out_stride) {
  Vec sums[ROWS][OUTPUTS] = {};
  int64_t k = 0;
  for (; k + kLanes <= size; k += kLanes) {
    Vec weights[OUTPUTS];
#pragma GCC unroll 8
    for (int n = 0; n < OUTPUTS; ++n) {
      weights[n] = widen(w + n * size + k);
      if (ahead) __builtin_prefetch(ahead + n * size + k);
    }
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
      const Vec value = load<Vec>(x + m * size + k);
#pragma GCC unroll 8
      for (int n = 0; n < OUTPUTS; ++n) sums[m][n] += value * weights[n];
    }
  }
  for (int m = 0; m < ROWS; ++m)
    for (int n = 0; n < OUTPUTS; ++n) {
      float sum = sum_lanes(sums[m][n])[0];
      for (int64_t rest = k; rest < size; ++rest) sum += x[m * size + rest] * to_float(w[n * size + rest]);
      out[m * out_stride + n] = sum;
    }
}

template <int ROWS, int OUTPUTS, typename T>
void multiply_rows(int64_t rows, const float* x, const T* w, const T* ahead, int64_t size, float* out, int64_t stride) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) return multiply_tile<ROWS, OUTPUTS>(x, w, ahead, size, out, stride);
    multiply_rows<ROWS - 1, OUTPUTS>(rows, x, w, ahead, size, out, stride);
  }
}

// All rows, in tiles of nearly equal height; only the first one reads the weights from memory.
template <int OUTPUTS, typename T>
void multiply_outputs(const float* x, int64_t rows, const T* w, const T* ahead, int64_t size, float* out,
                      int64_t stride) {
  for (int64_t tiles = (rows + kTileRows - 1) / kTileRows, row = 0; tiles > 0; --tiles, ahead = nullptr) {
    const int64_t height = (rows - row + tiles - 1) / tiles;
    multiply_rows<kTileRows, OUTPUTS>(height, x + row * size, w, ahead, size, out + row * stride, stride);
    row += height;
  }
}

template <typename T>
void multiply(const float* x, int64_t rows, const T* weight, int64_t outputs, int64_t size, float* out) {
  at::parallel_for(0, (outputs + kThreadOutputs - 1) / kThreadOutputs, 1, [&](int64_t begin, int64_t end) {
    const int64_t stop = std::min(end * kThreadOutputs, outputs);
    int64_t n = begin * kThreadOutputs;
    for (; n + kTileOutputs <= stop; n += kTileOutputs) {
      const T* w = weight + n * size;
      const T* ahead = n + 2 * kTileOutputs <= outputs ? w + kTileOutputs * size : nullptr;
      multiply_outputs<kTileOutputs>(x, rows, w, ahead, size, out + n, outputs);
    }
    for (; n < stop; ++n)
      multiply_outputs<1>(x, rows, weight + n * size, static_cast<const T*>(nullptr), size, out + n, outputs);
  });
}

// The type in memory: bfloat16 is read as its bits.
template <typename T>
using Stored = std::conditional_t<std::is_same_v<T, c10::BFloat16>, uint16_t, T>;

template <typename T>
void few_rows(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::Tensor& output) {
  const int64_t rows = x.size(0), size = x.size(1), outputs = weight.size(0);
  const auto* inputs = static_cast<const Stored<T>*>(x.const_data_ptr());
  const auto* weights = static_cast<const Stored<T>*>(weight.const_data_ptr());
  T* out = static_cast<T*>(output.mutable_data_ptr());
  std::vector<float> wide_inputs, wide_outputs;
  const float* values;
  float* sums;
  if constexpr (std::is_same_v<T, float>) {
    values = inputs;
    sums = out;
  } else {
    wide_inputs.resize(rows * size);
    for (int64_t i = 0; i < rows * size; ++i) wide_inputs[i] = to_float(inputs[i]);
    wide_outputs.resize(rows * outputs);
    values = wide_inputs.data();
    sums = wide_outputs.data();
  }
  multiply(values, rows, weights, outputs, size, sums);
  if (bias) {
    const auto* added = static_cast<const Stored<T>*>(bias->const_data_ptr());
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t n = 0; n < outputs; ++n) sums[m * outputs + n] += to_float(added[n]);
  }
  if constexpr (!std::is_same_v<T, float>)
    for (int64_t i = 0; i < rows * outputs; ++i) out[i] = static_cast<T>(sums[i]);
}

at::Tensor make_output(const at::Tensor& x, const at::Tensor& weight) {
  auto sizes = x.sym_sizes().vec();
  sizes.back() = weight.sym_size(0);
  return at::empty_symint(sizes, x.options());
}

at::Tensor row_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                      const std::optional<at::Tensor>& handle, int64_t max_rows) {
  const int64_t size = weight.size(1);
  TORCH_CHECK(x.size(-1) == size && x.scalar_type() == weight.scalar_type(), "row_linear: x must be [..., ", size,
              "] of the weights' type");
  at::Tensor output = make_output(x, weight);
  const at::Tensor flat = x.reshape({-1, size}).contiguous();
  at::Tensor flat_output = output.view({-1, weight.size(0)});
  if (flat.size(0) <= max_rows) {
    TORCH_CHECK(weight.is_contiguous() && (!bias || (bias->is_contiguous() && bias->scalar_type() == x.scalar_type())),
                "row_linear: the weights must be contiguous, and the bias of their type");
    switch (x.scalar_type()) {
      case at::kFloat: few_rows<float>(flat, weight, bias, flat_output); return output;
      case at::kBFloat16: few_rows<c10::BFloat16>(flat, weight, bias, flat_output); return output;
      case at::kHalf: few_rows<Half>(flat, weight, bias, flat_output); return output;
      default: TORCH_CHECK(false, "row_linear: weights must be float32, bfloat16 or float16");
    }
  }
  if (!handle) return at::linear(x, weight, bias);
  static const auto product = c10::Dispatcher::singleton().findSchemaOrThrow("_C::onednn_mm", ""); // vLLM's
  c10::Stack stack{flat_output, flat, bias, *handle};
  product.callBoxed(stack);
  return output;
}

at::Tensor row_linear_meta(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>&,
                           const std::optional<at::Tensor>&, int64_t) {
  return make_output(x, weight);
}

} // namespace

TORCH_LIBRARY_FRAGMENT(SPECPLUG_NAMESPACE, m) {
  m.def("row_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? handle, int max_rows) -> Tensor");
  m.impl("row_linear", c10::DispatchKey::CPU, &row_linear);
  m.impl("row_linear", c10::DispatchKey::Meta, &row_linear_meta);
}
