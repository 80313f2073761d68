// Logits of which only those are computed that may be a row's largest.  greedy_head.py documents the arguments.
//
// A product of 8-bit numbers tells each logit up to an error that has a bound: for a weight w and inputs x, rounded to v and
// y, |w x - v y| <= |w - v| |x| + |v| |x - y|.  Blocks of outputs that may hold a row's largest logit are few, and row_linear
// computes them.  Weights and inputs are rotated first, 64 inputs by a Hadamard matrix: that changes no product, and it
// spreads large numbers, which would make rounding coarse.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "operators.h"
#include "types.h"
#include "vectors.h"

namespace {

#if defined(__AVX512F__) && defined(__AVX512VNNI__)

constexpr int kBlock = 2 * kLanes, kRotated = 64, kMostRows = 64, kTileRows = 10;
constexpr int kInputs = 4; // of a word
constexpr int kMiddle = 128; // weights are stored as unsigned numbers
// Bounds hold for inputs of such norms: no number overflows, and those that are rounded to 0 do not matter.
constexpr float kLeastNorm = 1e-9f, kMostNorm = 1e9f;
// Larger logits may be infinite in float16.
constexpr float kMostLogit = 3e4f;
// How far ahead weights are fetched for up to `kNearRows` rows, and for more.
constexpr int kNearRows = 3;
constexpr int64_t kNearBytes = 3 << 10, kFarBytes = 8 << 10;

// Of a block, by output: the factor of the rounded weights, the norm of the weights' rounding errors, and the norm of the
// rounded weights.
struct Bounds {
  float scale[kBlock], error[kBlock], norm[kBlock];
};

// Multiplies x by a Hadamard matrix of 64 rows, 64 numbers at a time.
inline void rotate_inputs(float* x, int64_t size) {
  for (int64_t first = 0; first < size; first += kRotated)
    for (int half = 1; half < kRotated; half *= 2)
      for (int i = 0; i < kRotated; ++i)
        if (!(i & half)) {
          float &a = x[first + i], &b = x[first + i + half];
          const float sum = a + b, difference = a - b;
          a = sum;
          b = difference;
        }
  for (int64_t i = 0; i < size; ++i) x[i] *= 0.125f;
}

inline double norm(const float* x, int64_t size) {
  double sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += static_cast<double>(x[i]) * x[i];
  return std::sqrt(sum);
}

// Rounds x to 8 bits, `rounded`, which times the factor returned are near x; x becomes what they differ by.
inline float round_to_bytes(float* x, int64_t size, int8_t* rounded) {
  float largest = 0;
  for (int64_t i = 0; i < size; ++i) largest = std::max(largest, std::abs(x[i]));
  const float scale = largest / 127, inverse = scale > 0 ? 1 / scale : 0;
  for (int64_t i = 0; i < size; ++i) {
    rounded[i] = static_cast<int8_t>(std::clamp(std::nearbyint(x[i] * inverse), -127.0f, 127.0f));
    x[i] -= scale * rounded[i];
  }
  return scale;
}

// What float32 sums of `size` products, and the sums here, may differ by from exact ones, in parts of both norms' product.
inline double slack(int64_t size) { return (size + 16) * 0x1p-23; }

struct RoundedRows {
  // x [rows][size]; `rows` is at most kMostRows.
  template <typename T>
  RoundedRows(const T* x, int64_t rows, int64_t size) : bytes(rows * size) {
    std::vector<float> row(size);
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t i = 0; i < size; ++i) row[i] = to_float(x[m * size + i]);
      norms[m] = norm(row.data(), size);
      is_usual &= kLeastNorm < norms[m] && norms[m] < kMostNorm;
      if (!is_usual) return;
      rotate_inputs(row.data(), size);
      int8_t* const rounded = bytes.data() + m * size;
      scales[m] = round_to_bytes(row.data(), size, rounded);
      errors[m] = norm(row.data(), size) * (1 + 1e-3);
      middles[m] = 0;
      for (int64_t i = 0; i < size; ++i) middles[m] += kMiddle * rounded[i];
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
  const auto* inputs = reinterpret_cast<const int32_t*>(x.bytes.data() + first * size);
  const int64_t words = size / kInputs, distance = ROWS <= kNearRows ? kNearBytes : kFarBytes;
  __m512i sums[ROWS][2]{};
  for (int64_t k = 0; k < words; ++k) {
    __builtin_prefetch(weight + k * 128 + distance, 0, 2);
    __builtin_prefetch(weight + k * 128 + distance + 64, 0, 2);
    const __m512i low = _mm512_loadu_si512(weight + k * 128), high = _mm512_loadu_si512(weight + k * 128 + 64);
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m) {
      const __m512i word = _mm512_set1_epi32(inputs[m * words + k]);
      sums[m][0] = _mm512_dpbusd_epi32(sums[m][0], low, word);
      sums[m][1] = _mm512_dpbusd_epi32(sums[m][1], high, word);
    }
  }
  for (int m = 0; m < ROWS; ++m) {
    const int64_t row = first + m;
    Vec lowest = splat(-std::numeric_limits<float>::infinity()), highest = lowest;
    for (int side = 0; side < 2; ++side) {
      const VecInt sum = (VecInt)sums[m][side] - x.middles[row];
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

template <int ROWS>
void bound_rows(int64_t rows, const RoundedRows& x, int64_t first, int64_t size, const uint8_t* weight, const Bounds& bounds,
                float* lower, float* upper) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) return bound_block<ROWS>(x, first, size, weight, bounds, lower, upper);
    bound_rows<ROWS - 1>(rows, x, first, size, weight, bounds, lower, upper);
  }
}

// Returns the blocks that may hold a row's largest logit.
std::vector<int64_t> find_blocks(const RoundedRows& x, int64_t rows, int64_t size, const uint8_t* weight,
                                 const Bounds* bounds, int64_t blocks) {
  std::vector<float> lower(blocks * rows), upper(blocks * rows);
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block)
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t first = tile * rows / tiles, count = (tile + 1) * rows / tiles - first;
        bound_rows<kTileRows>(count, x, first, size, weight + block * kBlock * size, bounds[block],
                              lower.data() + block * rows + first, upper.data() + block * rows + first);
      }
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
      uint8_t* const to = data<uint8_t>(packed) + block * kBlock * size;
      for (int n = 0; n < kBlock; ++n) {
        const int64_t output = std::min(block * kBlock + n, count - 1); // the last one fills its block
        for (int64_t i = 0; i < size; ++i) row[i] = to_float(from[output * size + i]);
        const double whole = norm(row.data(), size);
        rotate_inputs(row.data(), size);
        found.scale[n] = round_to_bytes(row.data(), size, rounded.data());
        const double error = norm(row.data(), size);
        found.error[n] = error * (1 + 1e-3) + whole * slack(size);
        found.norm[n] = (whole + error) * (1 + 1e-3);
        for (int64_t i = 0; i < size; ++i)
          to[(i / kInputs * kBlock + n) * kInputs + i % kInputs] = static_cast<uint8_t>(rounded[i] + kMiddle);
      }
    }
  });
}

#endif

// Returns the number of blocks, and of floats of a block's bounds; none if this CPU or this size cannot do it.
std::vector<int64_t> greedy_head_shape(int64_t count, int64_t size) {
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
  if (count > 0 && size > 0 && size % kRotated == 0 && size <= 1 << 16) return {(count + kBlock - 1) / kBlock, 3 * kBlock};
#endif
  return {};
}

void greedy_head_pack(const at::Tensor& weight, int64_t count, const at::Tensor& packed, const at::Tensor& bounds) {
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
  const int64_t blocks = (count + kBlock - 1) / kBlock, size = weight.size(1);
  TORCH_CHECK(weight.is_contiguous() && count <= weight.size(0) && packed.is_contiguous() && bounds.is_contiguous() &&
                  packed.scalar_type() == at::kByte && packed.numel() == blocks * kBlock * size &&
                  bounds.scalar_type() == at::kFloat && bounds.numel() == blocks * 3 * kBlock,
              "greedy_head: the tensors must be contiguous and of the shapes that greedy_head_shape tells");
  with_type(weight.scalar_type(), [&](auto type) { pack<decltype(type)>(weight, count, packed, bounds); });
#endif
}

at::Tensor greedy_head(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& codes, int64_t outputs,
                       const at::Tensor& packed, const at::Tensor& bounds) {
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
  const int64_t rows = x.size(0), size = x.size(1), blocks = packed.size(0);
  TORCH_CHECK(x.dim() == 2 && rows <= kMostRows && size == weight.size(1) && packed.numel() == blocks * kBlock * size,
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
  TORCH_CHECK(false, "greedy_head: this CPU lacks AVX-512 VNNI");
#endif
}

} // namespace

TORCH_LIBRARY_FRAGMENT(SPECPLUG_NAMESPACE, m) {
  m.def("greedy_head_shape(int count, int size) -> int[]", &greedy_head_shape);
  m.def("greedy_head_pack(Tensor weight, int count, Tensor(a!) packed, Tensor(b!) bounds) -> ()", &greedy_head_pack);
  m.def("greedy_head(Tensor x, Tensor weight, Tensor? codes, int outputs, Tensor packed, Tensor bounds) -> Tensor",
        &greedy_head);
}
