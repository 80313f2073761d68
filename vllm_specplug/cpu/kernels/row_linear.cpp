// Linear layers over few or many rows.  Each weight is read from memory once for all rows of a chunk, in blocks of outputs
// that lie in memory as the sums lie in registers; what is read next is fetched while the rows are computed.
// row_linear.py documents the arguments.
//
// Weights can be stored in 16 bits beside float32 rows.  All sums are float32, over the inputs in their order: a row's
// result does not depend on the other rows.  CPUs that multiply pairs of bfloat16 add two inputs at once (gemm_bf16_avx512.h),
// those with AMX 32 (gemm_bf16_amx.h).

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

#include "operators.h"
#include "gemm_bf16_avx512.h"
#include "gemm_bf16_amx.h"
#include "vectors.h"

namespace {

// A block of outputs is two vectors wide.  The sums of a tile take 24 of the 32 registers of AVX-512, 12 of the 16 of AVX2.
constexpr int kBlock = 2 * kLanes, kTileRows = kLanes == 16 ? 12 : 6;
// Up to so many rows take two blocks at once: the sums of more, beside the weights, need more registers than there are.
constexpr int kRowsOfTwo = kLanes == 16 ? 3 : 2;
// What comes next is fetched once in so many inputs: a fetch at each input takes time from the products.
constexpr int64_t kFetchEvery = 8;
// Rows are computed in chunks, whose inputs stay in the second cache where they are short; inputs in panels, whose
// weights do.
constexpr int64_t kChunkBytes = 256 << 10, kLeastChunk = 48, kMostChunk = 192, kPanel = 2048;

// Whether products of bfloat16 weights are computed in tiles.
inline bool in_tiles(c10::ScalarType rows, int64_t size) {
#ifdef SPECPLUG_TILES
  return (rows == at::kBFloat16 || rows == at::kFloat) && size > 0 && size % kStepInputs == 0 && has_tiles();
#else
  return false;
#endif
}

// Whether bfloat16 weights are stored in pairs of inputs.
inline bool in_pairs(c10::ScalarType rows, int64_t size) {
#ifdef SPECPLUG_PAIRS
  return (rows == at::kBFloat16 && size % 2 == 0) || in_tiles(rows, size);
#else
  return false;
#endif
}

// The type in memory: bfloat16 is read as its bits.
template <typename T>
using Stored = std::conditional_t<std::is_same_v<T, c10::BFloat16>, uint16_t, T>;

// Where an output of a block is stored: with single bfloat16, a 32-bit word has one output of each vector.
template <typename T>
constexpr int place(int output) {
  return std::is_same_v<T, c10::BFloat16> ? output % kLanes * 2 + output / kLanes : output;
}
inline void load_block(const uint16_t* p, Vec (&weights)[2]) {
  const VecUint words = load<VecUint>(p);
  weights[0] = (Vec)(words << 16);
  weights[1] = (Vec)(words & splat(0xffff0000u));
}
template <typename T>
inline void load_block(const T* p, Vec (&weights)[2]) {
  weights[0] = widen(p);
  weights[1] = widen(p + kLanes);
}

// Adds x @ w.T of `count` of `size` inputs to sums[ROWS][BLOCKS * kBlock], and fetches `step` bytes of `ahead` per input.
template <int ROWS, int BLOCKS, typename T>
void multiply_tile(const float* x, const T* w, int64_t size, int64_t count, const char* ahead, int64_t step, float* sums) {
  Vec totals[ROWS][BLOCKS][2];
  std::memcpy(totals, sums, sizeof(totals));
  const auto add = [&](int64_t k) {
    Vec weights[BLOCKS][2];
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; ++b) load_block(w + (b * size + k) * kBlock, weights[b]);
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m) {
      const Vec value = splat(x[m * size + k]);
#pragma GCC unroll 8
      for (int b = 0; b < BLOCKS; ++b) {
        totals[m][b][0] = accumulate(totals[m][b][0], value, weights[b][0]);
        totals[m][b][1] = accumulate(totals[m][b][1], value, weights[b][1]);
      }
    }
  };
  int64_t k = 0;
  for (; k + kFetchEvery <= count; k += kFetchEvery) {
    if (ahead)
      for (int64_t at = 0; at < kFetchEvery * step; at += 64) __builtin_prefetch(ahead + k * step + at, 0, 2);
#pragma GCC unroll 4
    for (int i = 0; i < kFetchEvery; ++i) add(k + i);
  }
  for (; k < count; ++k) add(k);
  std::memcpy(sums, totals, sizeof(totals));
}

template <int ROWS, int BLOCKS, typename T>
void multiply_rows(int64_t rows, const float* x, const T* w, int64_t size, int64_t count, const char* ahead,
                   int64_t step, float* sums) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) return multiply_tile<ROWS, BLOCKS>(x, w, size, count, ahead, step, sums);
    multiply_rows<ROWS - 1, BLOCKS>(rows, x, w, size, count, ahead, step, sums);
  }
}

// A product: `weight` is [blocks][size][kBlock], `out` [rows][outputs]; `bias` may be null.
template <typename T, typename O>
struct Product {
  const float* x;
  int64_t rows, size;
  const T* weight;
  const Stored<O>* bias;
  int64_t outputs;
  O* out;

  // Computes the rows from `first` on of some blocks, in tiles of nearly equal height.  Each tile fetches its share of
  // the blocks that come next: the first would otherwise fetch them all, and memory would be idle during the others.
  template <int MOST_ROWS, int BLOCKS>
  void multiply_blocks(int64_t first, int64_t count, int64_t block, bool is_last) const {
    constexpr int64_t width = BLOCKS * kBlock;
    alignas(64) float sums[(MOST_ROWS < kTileRows ? MOST_ROWS : kMostChunk) * width];
    std::fill_n(sums, count * width, 0.0f);
    const T* w = weight + block * kBlock * size;
    const int64_t tiles = (count + MOST_ROWS - 1) / MOST_ROWS;
    const int64_t share = width * size * sizeof(T) / tiles, step = (share + size - 1) / size;
    const char* ahead = is_last || count == 1 ? nullptr : reinterpret_cast<const char*>(w + width * size);
    const int64_t written = std::min(width, outputs - block * kBlock);
    for (int64_t begin = 0; begin < size; begin += kPanel) {
      for (int64_t tile = 0, row = 0; tile < tiles; ++tile) {
        const int64_t height = (count - row + tiles - tile - 1) / (tiles - tile);
        multiply_rows<MOST_ROWS, BLOCKS>(height, x + (first + row) * size + begin, w + begin * kBlock, size,
                                         std::min(kPanel, size - begin),
                                         ahead ? ahead + tile * share + begin * step : nullptr, step,
                                         sums + row * width);
        row += height;
      }
    }
    for (int64_t row = 0; row < count; ++row)
      finish(sums + row * width, (first + row) * outputs + block * kBlock, block * kBlock, written);
  }

  void finish(float* sums, int64_t at, int64_t output, int64_t count) const {
    if (bias)
      for (int64_t n = 0; n < count; ++n) sums[n] += to_float(bias[output + n]);
    for (int64_t n = 0; n < count; ++n) out[at + n] = static_cast<O>(sums[n]);
  }

  // Fewer rows take more blocks at once, so that enough sums are independent of each other.
  void multiply_chunk(int64_t first, int64_t count, int64_t block, int64_t stop) const {
    int64_t together = count == 1 ? 4 : count <= kRowsOfTwo ? 2 : 1;
    for (; block < stop; block += together) {
      while (block + together > stop) together /= 2;
      const bool is_last = block + 2 * together > stop;
      if (together == 4)
        multiply_blocks<1, 4>(first, count, block, is_last);
      else if (together == 2)
        multiply_blocks<kRowsOfTwo, 2>(first, count, block, is_last);
      else
        multiply_blocks<kTileRows, 1>(first, count, block, is_last);
    }
  }

  void multiply_listed(const std::vector<int64_t>& blocks) const {
    at::parallel_for(0, blocks.size(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) multiply_chunk(0, rows, blocks[i], blocks[i] + 1);
    });
  }

  void multiply() const {
    const int64_t fitting = kChunkBytes / (4 * std::max<int64_t>(size, 1));
    const int64_t chunk = std::clamp(fitting / kTileRows * kTileRows, kLeastChunk, kMostChunk);
    at::parallel_for(0, (outputs + kBlock - 1) / kBlock, 1, [&](int64_t begin, int64_t end) {
      for (int64_t first = 0; first < rows; first += chunk)
        multiply_chunk(first, std::min(chunk, rows - first), begin, end);
    });
  }
};

// `blocks`: those to compute, in a chunk of rows; null: all.
template <typename T, typename O>
void multiply(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& codes,
              const std::optional<at::Tensor>& bias, at::Tensor& output, const std::vector<int64_t>* blocks) {
  const auto* values = static_cast<const Stored<O>*>(x.const_data_ptr());
  const auto* added = bias ? static_cast<const Stored<O>*>(bias->const_data_ptr()) : nullptr;
  const int64_t size = x.size(-1), outputs = output.size(-1), rows = outputs ? output.numel() / outputs : 0;
  auto* out = static_cast<O*>(output.mutable_data_ptr());
  const void* stored = weight.const_data_ptr();
#ifdef SPECPLUG_PAIRS
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    if (in_pairs(x.scalar_type(), size)) {
      std::optional<Codes> read;
      if (codes) read.emplace(codes->const_data_ptr<int32_t>(), weight.size(0));
#ifdef SPECPLUG_TILES
      if (!blocks && in_tiles(x.scalar_type(), size))
        return TileProduct<O>{size, stored, read, added, outputs}.multiply(x.const_data_ptr<O>(), rows, out);
#endif
      if constexpr (std::is_same_v<O, c10::BFloat16>) {
        const PairProduct product{size / 2, stored, read, added, outputs};
        const auto* words = reinterpret_cast<const uint32_t*>(values);
        return blocks ? product.multiply_listed(words, rows, *blocks, out) : product.multiply(words, rows, out);
      }
    }
  }
#endif
  const auto multiply_floats = [&](const float* inputs) {
    const Product<Stored<T>, O> product{inputs, rows, size, static_cast<const Stored<T>*>(stored), added, outputs, out};
    blocks ? product.multiply_listed(*blocks) : product.multiply();
  };
  if constexpr (std::is_same_v<O, float>) {
    multiply_floats(values);
  } else {
    const at::Tensor wide = x.new_empty({x.numel()}, at::kFloat);
    float* to = wide.mutable_data_ptr<float>();
    for (int64_t i = 0; i < x.numel(); ++i) to[i] = to_float(values[i]);
    multiply_floats(to);
  }
}

void multiply_typed(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& codes,
                    const std::optional<at::Tensor>& bias, at::Tensor& output, const std::vector<int64_t>* blocks) {
  const auto stored = codes ? at::kBFloat16 : weight.scalar_type(), dtype = x.scalar_type();
  if (dtype == at::kBFloat16)
    multiply<c10::BFloat16, c10::BFloat16>(x, weight, codes, bias, output, blocks);
  else if (dtype == at::kHalf)
    multiply<Half, Half>(x, weight, codes, bias, output, blocks);
  else if (stored == at::kBFloat16)
    multiply<c10::BFloat16, float>(x, weight, codes, bias, output, blocks);
  else if (stored == at::kHalf)
    multiply<Half, float>(x, weight, codes, bias, output, blocks);
  else
    multiply<float, float>(x, weight, codes, bias, output, blocks);
}

} // namespace

at::Tensor specplug::row_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& codes,
                      const std::optional<at::Tensor>& bias, int64_t outputs, const std::optional<at::Tensor>& handle,
                      int64_t max_rows) {
  const int64_t size = weight.size(1);
  const auto stored = codes ? at::kBFloat16 : weight.scalar_type(), dtype = x.scalar_type();
  TORCH_CHECK(x.size(-1) == size && (dtype == stored || dtype == at::kFloat), "row_linear: x must be [..., ", size,
              "] of the weights' type or float32");
  TORCH_CHECK(!bias || (bias->is_contiguous() && bias->scalar_type() == dtype && bias->numel() == outputs),
              "row_linear: the bias must be contiguous, one number of x's type per output");
  auto sizes = x.sizes().vec();
  sizes.back() = outputs;
  at::Tensor output = x.new_empty(sizes);
  const at::Tensor contiguous = x.contiguous();
  if (handle && x.numel() > max_rows * size) {
    onednn_product(output.view({-1, outputs}), contiguous.view({-1, size}), bias, *handle);
  } else {
    multiply_typed(contiguous, weight, codes, bias, output, nullptr);
  }
  return output;
}

at::Tensor specplug::head_linear(const at::Tensor& x, at::TensorList weights, int64_t outputs) {
  const int64_t heads = weights.size();
  TORCH_CHECK(x.dim() == 3 && x.size(1) == heads, "head_linear: x must be [rows, ", heads, ", inputs]");
  const at::Tensor by_head = x.transpose(0, 1).contiguous(), output = x.new_empty({heads, x.size(0), outputs});
  std::vector<at::Tensor> from, to;
  for (int64_t head = 0; head < heads; ++head) {
    TORCH_CHECK(weights[head].size(1) == x.size(2), "head_linear: weights must take ", x.size(2), " inputs");
    from.push_back(by_head[head]), to.push_back(output[head]);
  }
  at::parallel_for(0, heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head)
      multiply_typed(from[head], weights[head], std::nullopt, std::nullopt, to[head], nullptr);
  });
  return output.transpose(0, 1);
}

at::Tensor specplug::row_linear_blocks(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& codes,
                                       int64_t outputs, const std::vector<int64_t>& blocks) {
  at::Tensor output = x.new_full({x.size(0), outputs}, -std::numeric_limits<float>::infinity());
  multiply_typed(x, weight, codes, std::nullopt, output, &blocks);
  return output;
}

namespace {

// PAIRED: the weights of two inputs lie side by side.
template <typename T, bool PAIRED = false>
void pack(const at::Tensor& weight, const at::Tensor& packed) {
  constexpr int64_t side = PAIRED ? 2 : 1;
  const int64_t outputs = weight.size(0), size = weight.size(1);
  const T* from = weight.const_data_ptr<T>();
  T* to = packed.mutable_data_ptr<T>();
  at::parallel_for(0, packed.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block)
      for (int n = 0; n < kBlock; ++n) {
        const int64_t output = block * kBlock + n, at = PAIRED ? n : place<T>(n);
        for (int64_t k = 0; k < size; ++k)
          to[((block * size + k - k % side) * kBlock) + at * side + k % side] =
              output < outputs ? from[output * size + k] : T(0.0f);
      }
  });
}

} // namespace

std::vector<int64_t> specplug::row_linear_shape(const at::Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2, "row_linear: weights must be a matrix");
  return {(weight.size(0) + kBlock - 1) / kBlock, weight.size(1), kBlock};
}

void specplug::row_linear_pack(const at::Tensor& weight, at::Tensor packed, at::ScalarType rows) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "row_linear: weights must be a contiguous matrix");
  TORCH_CHECK(packed.is_contiguous() && packed.scalar_type() == weight.scalar_type() &&
                  packed.sizes() == at::IntArrayRef(row_linear_shape(weight)),
              "row_linear: `packed` must be contiguous, of the weights' type and of the shape that row_linear_shape tells");
  switch (weight.scalar_type()) {
    case at::kFloat: pack<float>(weight, packed); break;
    case at::kBFloat16:
      in_pairs(rows, weight.size(1)) ? pack<c10::BFloat16, true>(weight, packed) : pack<c10::BFloat16>(weight, packed);
      break;
    case at::kHalf: pack<Half>(weight, packed); break;
    default: TORCH_CHECK(false, "row_linear: weights must be float32, bfloat16 or float16");
  }
}

bool specplug::row_linear_in_tiles(const at::Tensor& weight, at::ScalarType rows) {
  return weight.dim() == 2 && weight.scalar_type() == at::kBFloat16 && in_tiles(rows, weight.size(1));
}

at::Tensor specplug::row_linear_codes(const at::Tensor& weight, at::ScalarType rows) {
  std::vector<int32_t> numbers;
#ifdef SPECPLUG_PAIRS
  if (weight.scalar_type() == at::kBFloat16 && in_pairs(rows, weight.size(1)) && weight.is_contiguous())
    numbers = make_codes(static_cast<const uint16_t*>(weight.const_data_ptr()), weight.size(0), weight.size(1));
#endif
  at::Tensor codes = weight.new_empty({static_cast<int64_t>(numbers.size())}, at::kInt);
  std::copy(numbers.begin(), numbers.end(), codes.mutable_data_ptr<int32_t>());
  return codes;
}

void specplug::row_linear_pack_coded(const at::Tensor& weight, at::Tensor packed, const at::Tensor& codes) {
#ifdef SPECPLUG_PAIRS
  const int64_t outputs = weight.size(0), size = weight.size(1), blocks = (outputs + kBlock - 1) / kBlock;
  const int64_t block_bytes = size / 2 * kCodedPairBytes;
  TORCH_CHECK(packed.is_contiguous() && packed.scalar_type() == at::kByte && packed.numel() == blocks * block_bytes,
              "row_linear: `packed` must be contiguous, uint8 [blocks, inputs, 48]");
  const Codes read(codes.const_data_ptr<int32_t>(), blocks);
  const auto* from = static_cast<const uint16_t*>(weight.const_data_ptr());
  auto* to = packed.mutable_data_ptr<uint8_t>();
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) code_block(from, outputs, size, read, block, to + block * block_bytes);
  });
#endif
}
