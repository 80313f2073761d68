// Linear layers with weights and inputs rounded to 8 bits.  byte_linear.py documents the arguments and is the reference.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "gemm_int8.h"
#include "operators.h"
#include "types.h"

namespace {

#ifdef SPECPLUG_BYTES

int64_t padded(int64_t size) { return (size + kRotated - 1) / kRotated * kRotated; }

// Rotates and rounds numbers of an output or of a row, in parts of `size` numbers each.
class Rounding {
 public:
  explicit Rounding(int64_t size) : size_(size), numbers_(padded(size)) {}
  // Writes padded(size) numbers; returns their factor.
  template <typename T>
  float operator()(const T* from, int8_t* rounded) {
    for (int64_t i = 0; i < size_; ++i) numbers_[i] = to_float(from[i]);
    std::fill(numbers_.begin() + size_, numbers_.end(), 0.0f);
    rotate_inputs(numbers_.data(), numbers_.size());
    return round_to_bytes(numbers_.data(), numbers_.size(), rounded);
  }

 private:
  int64_t size_;
  std::vector<float> numbers_;
};

template <typename T>
void pack(const at::Tensor& weight, const at::Tensor& packed, const at::Tensor& scales) {
  const int64_t outputs = weight.size(0), inputs = weight.size(1), parts = scales.size(1), size = inputs / parts;
  at::parallel_for(0, packed.size(0), 1, [&](int64_t begin, int64_t end) {
    Rounding round(size);
    std::vector<int8_t> rounded(padded(size));
    for (int64_t block = begin; block < end; ++block)
      for (int64_t part = 0; part < parts; ++part)
        for (int n = 0; n < kByteOutputs; ++n) {
          const int64_t at = block * parts + part, output = std::min(block * kByteOutputs + n, outputs - 1);
          data<float>(scales)[at * kByteOutputs + n] = round(data<T>(weight) + output * inputs + part * size, rounded.data());
          pack_bytes(rounded.data(), padded(size), n, data<uint8_t>(packed) + at * kByteOutputs * padded(size));
        }
  });
}

template <typename T>
inline void write(Vec values, int64_t count, T* to) {
  for (int64_t lane = 0; lane < count; ++lane) to[lane] = from_float<T>(values[lane]);
}
#ifdef __AVX512F__
inline void write(Vec values, int64_t count, float* to) { _mm512_mask_storeu_ps(to, (1u << count) - 1, (__m512)values); }
#endif
#ifdef __AVX512BF16__
inline void write(Vec values, int64_t count, uint16_t* to) {
  _mm256_mask_storeu_epi16(to, (1u << count) - 1, (__m256i)_mm512_cvtneps_pbh((__m512)values));
}
#endif

template <typename T>
void multiply(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scales, const T* bias, const at::Tensor& out) {
  const int64_t rows = x.size(0), inputs = x.size(1), parts = scales.size(1), size = inputs / parts, stride = padded(size);
  std::vector<int8_t> rounded(rows * parts * stride);
  std::vector<float> factors(rows * parts);
  std::vector<int32_t> middles(rows * parts);
  Rounding round(size);
  for (int64_t at = 0; at < rows * parts; ++at) {
    int8_t* const to = rounded.data() + at * stride;
    factors[at] = round(data<T>(x) + at * size, to);
    middles[at] = middle_of(to, stride);
  }
  const int64_t outputs = out.size(1);
  at::parallel_for(0, packed.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block)
      visit_tiles(rows, [&](int64_t first, auto count) {
        Vec totals[count][2]{};
        for (int64_t part = 0; part < parts; ++part) {
          VecInt sums[count][2];
          const int64_t at = block * parts + part;
          const float* scale = data<float>(scales) + at * kByteOutputs;
          multiply_bytes<count>(rounded.data() + (first * parts + part) * stride, parts * stride, stride,
                                data<uint8_t>(packed) + at * kByteOutputs * stride, sums);
          for (int m = 0; m < count; ++m) {
            const int64_t row = (first + m) * parts + part;
            for (int side = 0; side < 2; ++side)
              totals[m][side] += __builtin_convertvector(sums[m][side] - middles[row], Vec) *
                                 (load<Vec>(scale + side * kLanes) * factors[row]);
          }
        }
        for (int side = 0; side < 2; ++side) {
          const int64_t output = block * kByteOutputs + side * kLanes, written = std::min<int64_t>(outputs - output, kLanes);
          if (written <= 0) continue;
          Vec added{};
          if (bias)
            for (int64_t lane = 0; lane < written; ++lane) added[lane] = to_float(bias[output + lane]);
          for (int m = 0; m < count; ++m)
            write(totals[m][side] + added, written, data<T>(out) + (first + m) * outputs + output);
        }
      });
  });
}

#endif

} // namespace

std::vector<std::vector<int64_t>> specplug::byte_linear_shapes(int64_t outputs, int64_t inputs, int64_t parts) {
#ifdef SPECPLUG_BYTES
  const int64_t blocks = (outputs + kByteOutputs - 1) / kByteOutputs;
  if (outputs > 0 && parts > 0 && inputs % parts == 0 && inputs <= 1 << 16)
    return {{blocks, parts, padded(inputs / parts), kByteOutputs}, {blocks, parts, kByteOutputs}};
#endif
  return {};
}

void specplug::byte_linear_pack(const at::Tensor& weight, const at::Tensor& packed, const at::Tensor& scales) {
#ifdef SPECPLUG_BYTES
  const auto shapes = byte_linear_shapes(weight.size(0), weight.size(1), scales.size(1));
  TORCH_CHECK(weight.is_contiguous() && packed.is_contiguous() && scales.is_contiguous() && !shapes.empty() &&
                  packed.scalar_type() == at::kByte && packed.sizes() == shapes[0] &&
                  scales.scalar_type() == at::kFloat && scales.sizes() == shapes[1],
              "byte_linear: the tensors must be contiguous and of the shapes that byte_linear_shapes tells");
  with_type(weight.scalar_type(), [&](auto type) { pack<decltype(type)>(weight, packed, scales); });
#endif
}

at::Tensor specplug::byte_linear(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scales,
                                 const std::optional<at::Tensor>& bias, int64_t outputs) {
#ifdef SPECPLUG_BYTES
  const auto shapes = byte_linear_shapes(outputs, x.size(-1), scales.size(1));
  TORCH_CHECK(x.dim() == 2 && !shapes.empty() && packed.sizes() == shapes[0] && scales.sizes() == shapes[1] &&
                  (!bias || (bias->scalar_type() == x.scalar_type() && bias->is_contiguous() && bias->numel() == outputs)),
              "byte_linear: x must be [num_rows, inputs] of these weights, bias [outputs] of its type");
  const at::Tensor inputs = x.contiguous(), out = x.new_empty({x.size(0), outputs});
  with_type(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    multiply<T>(inputs, packed, scales, bias ? data<T>(*bias) : nullptr, out);
  });
  return out;
#else
  TORCH_CHECK(false, "byte_linear: this CPU does not multiply 8-bit numbers");
#endif
}
