// Logits of which only those are computed that may be a row's largest.  greedy_head.py documents the arguments.
//
// A product of 8-bit numbers tells each logit up to an error that has a bound: for a weight w and inputs x, rounded to v and
// y, |w x - v y| <= |w - v| |x| + |v| |x - y|.  Blocks of outputs that may hold a row's largest logit are few, and row_linear
// computes them.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "gemm_int8.h"
#include "operators.h"
#include "types.h"
#include "vectors.h"

namespace {

#ifdef SPECPLUG_BYTES

constexpr int kMostRows = 64;
// Bounds hold for inputs of such norms: no number overflows, and those that are rounded to 0 do not matter.
constexpr float kLeastNorm = 1e-9f, kMostNorm = 1e9f;
// Larger logits may be infinite in float16.
constexpr float kMostLogit = 3e4f;

// Of a block, by output: the factor of the rounded weights, the norm of the weights' rounding errors, and the norm of the
// rounded weights.
struct Bounds {
  float scale[kByteOutputs], error[kByteOutputs], norm[kByteOutputs];
};

// size: a multiple of 8.
inline double norm(const float* x, int64_t size) {
  typedef float Floats __attribute__((vector_size(32)));
  typedef double Doubles __attribute__((vector_size(64)));
  Doubles sums{};
  for (int64_t i = 0; i < size; i += 8) {
    const Doubles values = __builtin_convertvector(load<Floats>(x + i), Doubles);
    sums += values * values;
  }
  double sum = 0;
  for (int lane = 0; lane < 8; ++lane) sum += sums[lane];
  return std::sqrt(sum);
}

// What float32 sums of `size` products, and the sums here, may differ by from exact ones, in parts of both norms' product.
inline double slack(int64_t size) { return (size + 16) * 0x1p-23; }

struct RoundedRows {
  // x [rows][size]; `rows` is at most kMostRows.
  template <typename T>
  RoundedRows(const T* x, int64_t rows, int64_t size) : bytes(rows * size) {
    std::vector<float> row(size);
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t i = 0; i < size; i += kLanes) store(row.data() + i, widen(x + m * size + i));
      norms[m] = norm(row.data(), size);
      is_usual &= kLeastNorm < norms[m] && norms[m] < kMostNorm;
      if (!is_usual) return;
      rotate_inputs(row.data(), size);
      int8_t* const rounded = bytes.data() + m * size;
      scales[m] = round_to_bytes(row.data(), size, rounded);
      errors[m] = norm(row.data(), size) * (1 + 1e-3);
      middles[m] = middle_of(rounded, size);
    }
  }
  std::vector<int8_t> bytes;
  float scales[kMostRows], norms[kMostRows], errors[kMostRows];
  int32_t middles[kMostRows]; // what the weights' middle adds to the sums
  bool is_usual = true; // else nothing is said about the logits
};

// The largest lower and upper bound of a block's logits, [ROWS].
template <int ROWS>
void bound_block(const RoundedRows& x, int64_t first, int64_t size, const uint8_t* weight, const Bounds& bounds, float* lower,
                 float* upper) {
  VecInt sums[ROWS][2];
  multiply_bytes<ROWS>(x.bytes.data() + first * size, size, size, weight, sums);
  for (int m = 0; m < ROWS; ++m) {
    const int64_t row = first + m;
    Vec lowest = splat(-std::numeric_limits<float>::infinity()), highest = lowest;
    for (int side = 0; side < 2; ++side) {
      const VecInt sum = sums[m][side] - x.middles[row];
      const Vec logits = __builtin_convertvector(sum, Vec) * (load<Vec>(bounds.scale + side * kLanes) * x.scales[row]);
      const Vec error = load<Vec>(bounds.error + side * kLanes) * x.norms[row] +
                        load<Vec>(bounds.norm + side * kLanes) * x.errors[row];
      lowest = max(lowest, logits - error);
      highest = max(highest, logits + error);
    }
    lower[m] = max_lanes(lowest)[0];
    upper[m] = max_lanes(highest)[0];
  }
}

// Returns the blocks that may hold a row's largest logit.
std::vector<int64_t> find_blocks(const RoundedRows& x, int64_t rows, int64_t size, const uint8_t* weight,
                                 const Bounds* bounds, int64_t blocks) {
  std::vector<float> lower(blocks * rows), upper(blocks * rows);
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block)
      visit_tiles(rows, [&](int64_t first, auto count) {
        bound_block<count>(x, first, size, weight + block * kByteOutputs * size, bounds[block],
                           lower.data() + block * rows + first, upper.data() + block * rows + first);
      });
  });
  // Logits that are rounded to the same number tie: `least` may tie with the largest one.
  std::vector<float> least(rows, -std::numeric_limits<float>::infinity());
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t m = 0; m < rows; ++m) least[m] = std::max(least[m], lower[block * rows + m]);
  for (float& value : least)
    value = value > kMostLogit ? -std::numeric_limits<float>::infinity() : value - std::abs(value) * 0x1p-6f - 0x1p-24f;
  std::vector<int64_t> found;
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t m = 0; m < rows; ++m)
      if (upper[block * rows + m] >= least[m]) {
        found.push_back(block);
        break;
      }
  return found;
}

template <typename T>
void pack(const at::Tensor& weight, int64_t count, const at::Tensor& packed, const at::Tensor& bounds) {
  const int64_t size = weight.size(1);
  const T* from = data<T>(weight);
  at::parallel_for(0, packed.size(0), 1, [&](int64_t begin, int64_t end) {
    std::vector<float> row(size);
    std::vector<int8_t> rounded(size);
    for (int64_t block = begin; block < end; ++block) {
      Bounds& found = data<Bounds>(bounds)[block];
      uint8_t* const to = data<uint8_t>(packed) + block * kByteOutputs * size;
      for (int n = 0; n < kByteOutputs; ++n) {
        const int64_t output = std::min(block * kByteOutputs + n, count - 1); // the last one fills its block
        for (int64_t i = 0; i < size; ++i) row[i] = to_float(from[output * size + i]);
        const double whole = norm(row.data(), size);
        rotate_inputs(row.data(), size);
        found.scale[n] = round_to_bytes(row.data(), size, rounded.data());
        const double error = norm(row.data(), size);
        found.error[n] = error * (1 + 1e-3) + whole * slack(size);
        found.norm[n] = (whole + error) * (1 + 1e-3);
        pack_bytes(rounded.data(), size, n, to);
      }
    }
  });
}

#endif

} // namespace

std::vector<int64_t> specplug::greedy_head_shape(int64_t count, int64_t size) {
#ifdef SPECPLUG_BYTES
  if (count > 0 && size > 0 && size % kRotated == 0 && size <= 1 << 16) return {(count + kByteOutputs - 1) / kByteOutputs, 3 * kByteOutputs};
#endif
  return {};
}

void specplug::greedy_head_pack(const at::Tensor& weight, int64_t count, const at::Tensor& packed, const at::Tensor& bounds) {
#ifdef SPECPLUG_BYTES
  const int64_t blocks = (count + kByteOutputs - 1) / kByteOutputs, size = weight.size(1);
  TORCH_CHECK(weight.is_contiguous() && count <= weight.size(0) && packed.is_contiguous() && bounds.is_contiguous() &&
                  packed.scalar_type() == at::kByte && packed.numel() == blocks * kByteOutputs * size &&
                  bounds.scalar_type() == at::kFloat && bounds.numel() == blocks * 3 * kByteOutputs,
              "greedy_head: the tensors must be contiguous and of the shapes that greedy_head_shape tells");
  with_type(weight.scalar_type(), [&](auto type) { pack<decltype(type)>(weight, count, packed, bounds); });
#endif
}

at::Tensor specplug::greedy_head(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& codes, int64_t outputs,
                       const at::Tensor& packed, const at::Tensor& bounds) {
#ifdef SPECPLUG_BYTES
  const int64_t rows = x.size(0), size = x.size(1), blocks = packed.size(0);
  TORCH_CHECK(x.dim() == 2 && rows <= kMostRows && size == weight.size(1) && packed.numel() == blocks * kByteOutputs * size,
              "greedy_head: x must be [num_rows, ", weight.size(1), "] of at most ", kMostRows, " rows");
  const at::Tensor inputs = x.contiguous();
  std::vector<int64_t> found;
  bool is_usual = true;
  with_type(x.scalar_type(), [&](auto type) {
    const RoundedRows rounded(data<decltype(type)>(inputs), rows, size);
    is_usual = rounded.is_usual;
    if (is_usual) found = find_blocks(rounded, rows, size, data<uint8_t>(packed), data<Bounds>(bounds), blocks);
  });
  if (!is_usual) return specplug::row_linear(x, weight, codes, std::nullopt, outputs, std::nullopt, 0);
  return specplug::row_linear_blocks(inputs, weight, codes, outputs, found);
#else
  TORCH_CHECK(false, "greedy_head: this CPU does not multiply 8-bit numbers");
#endif
}
