// Products of bfloat16 that add two inputs at once, with AVX-512.
#pragma once

#include <ATen/Parallel.h>

#include <optional>

#include "codes.h"

#ifdef SPECPLUG_PAIRS

namespace {

// The sums of 12 rows take 24 of the 32 registers.  Rows are computed in chunks, which stay in the second cache with the
// weights of a panel of pairs of inputs.
constexpr int kPairRows = 12;
constexpr int64_t kPairChunk = 192, kPairChunkBytes = 512 << 10, kPairPanel = 2048;
// Up to so many rows, the CPU's own fetching is faster than ours: weights of 16 bits, and of 12.
constexpr int kUnfetchedRows = 5, kUnfetchedCodedRows = 2;

// Weights of a block as they lie in memory.
struct PlainPairs {
  const uint16_t* weights;
  Ahead ahead;
  [[gnu::always_inline]] void pair(int64_t k, VecUint (&found)[2]) const {
    ahead.fetch<kPairBytes / 64>(k);
    found[0] = load<VecUint>(weights + k * kPairWeights);
    found[1] = load<VecUint>(weights + k * kPairWeights + kPairWeights / 2);
  }
};

// Weights of a block in 12 bits, from the pair `first` on.  KEEP: they are also written to `expanded`, where others read
// them; else it has room for one pair.
template <bool KEEP>
class CodedPairs {
 public:
  CodedPairs(const uint8_t* coded, const Codes& codes, int64_t block, int64_t first, uint16_t* expanded, const Ahead& ahead)
      : coded_(coded),
        expander_(codes),
        listed_(codes, block, first * kPairWeights),
        first_(first),
        expanded_(expanded),
        ahead_(ahead) {
    find_next();
  }
  [[gnu::always_inline]] void pair(int64_t k, VecUint (&found)[2]) {
    ahead_.fetch<kPairBytes / 64>(k);
    __m512i lower, upper;
    expander_.expand(coded_ + k * kCodedPairBytes, lower, upper);
    uint16_t* const to = expanded_ + (KEEP ? k * kPairWeights : 0);
    const bool is_listed = __builtin_expect(k == next_, false);
    if (KEEP || is_listed) {
      _mm512_store_si512(to, lower);
      _mm512_store_si512(to + kPairWeights / 2, upper);
    }
    if (is_listed) {
      listed_.write((first_ + k) * kPairWeights, kPairWeights, to);
      find_next();
      lower = _mm512_load_si512(to);
      upper = _mm512_load_si512(to + kPairWeights / 2);
    }
    found[0] = (VecUint)lower;
    found[1] = (VecUint)upper;
  }

 private:
  // The next pair of which a weight is listed.
  void find_next() { next_ = listed_.next < listed_.end ? listed_.next[0] / kPairWeights - first_ : -1; }

  const uint8_t* coded_;
  Expander expander_;
  ListedWeights listed_;
  int64_t first_, next_;
  uint16_t* expanded_;
  Ahead ahead_;
};

// Adds the products of `count` pairs of inputs, x[count][ROWS], to sums[ROWS][32].
template <int ROWS, typename Weights>
[[gnu::noinline]] void multiply_pairs(const uint32_t* x, Weights weights, int64_t count, float* sums) {
  Vec totals[ROWS][2];
  std::memcpy(totals, sums, sizeof(totals));
  for (int64_t k = 0; k < count; ++k, x += ROWS) {
    VecUint found[2];
    weights.pair(k, found);
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m) {
      const VecUint value = splat(x[m]);
      totals[m][0] = accumulate(totals[m][0], value, found[0]);
      totals[m][1] = accumulate(totals[m][1], value, found[1]);
    }
  }
  std::memcpy(sums, totals, sizeof(totals));
}

template <int ROWS, typename Weights>
void multiply_pairs_of(int64_t rows, const uint32_t* x, const Weights& weights, int64_t count, float* sums) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) return multiply_pairs<ROWS>(x, weights, count, sums);
    multiply_pairs_of<ROWS - 1>(rows, x, weights, count, sums);
  }
}

// A chunk of rows in tiles of nearly equal height, each [pairs][height].
class PairTiles {
 public:
  PairTiles(const uint32_t* x, int64_t rows, int64_t pairs)
      : tiles((rows + kPairRows - 1) / kPairRows), rows(rows), pairs_(pairs) {
    thread_local KeptMemory memory;
    auto* to = reinterpret_cast<uint32_t*>(memory.at_least(2 * rows * pairs));
    transposed_ = to;
    at::parallel_for(0, tiles, 4, [&](int64_t begin, int64_t end) {
      for (int64_t tile = begin; tile < end; ++tile)
        for (int64_t row = 0; row < height(tile); ++row)
          for (int64_t k = 0; k < pairs; ++k)
            to[first(tile) * pairs + k * height(tile) + row] = x[(first(tile) + row) * pairs + k];
    });
  }
  int64_t first(int64_t tile) const { return tile * rows / tiles; }
  int64_t height(int64_t tile) const { return first(tile + 1) - first(tile); }
  const uint32_t* at(int64_t tile, int64_t k) const { return transposed_ + first(tile) * pairs_ + k * height(tile); }

  const int64_t tiles, rows;

 private:
  const int64_t pairs_;
  const uint32_t* transposed_;
};

// A product: `weight` is [blocks][pairs][32][2], or expanded to it with `codes`; `bias` may be null.
struct PairProduct {
  int64_t pairs;
  const void* weight;
  const std::optional<Codes>& codes;
  const uint16_t* bias;
  int64_t outputs;

  // `expanded` has room for a panel.
  void multiply_block(const PairTiles& x, int64_t block, bool is_last, uint16_t* expanded, c10::BFloat16* out) const {
    alignas(64) float sums[kPairChunk * kBlockOutputs];
    std::fill_n(sums, x.rows * kBlockOutputs, 0.0f);
    const int pair_bytes = codes ? kCodedPairBytes : kPairBytes;
    const char* stored = static_cast<const char*>(weight) + block * pairs * pair_bytes;
    const bool fetches = !is_last && x.rows > (codes ? kUnfetchedCodedRows : kUnfetchedRows);
    const char* next = fetches ? stored + pairs * pair_bytes : nullptr;
    for (int64_t begin = 0; begin < pairs; begin += kPairPanel) {
      const int64_t count = std::min(kPairPanel, pairs - begin), at = begin * pair_bytes;
      for (int64_t tile = 0; tile < x.tiles; ++tile) {
        const Ahead ahead(next ? next + at : nullptr, pair_bytes, tile, x.tiles);
        const auto multiply = [&](const auto& weights) {
          multiply_pairs_of<kPairRows>(x.height(tile), x.at(tile, begin), weights, count,
                                       sums + x.first(tile) * kBlockOutputs);
        };
        const auto* coded = reinterpret_cast<const uint8_t*>(stored + at);
        if (codes && x.tiles == 1)
          multiply(CodedPairs<false>(coded, *codes, block, begin, expanded, ahead));
        else if (codes && tile == 0)
          multiply(CodedPairs<true>(coded, *codes, block, begin, expanded, ahead));
        else
          multiply(PlainPairs{codes ? expanded : reinterpret_cast<const uint16_t*>(stored + at), ahead});
      }
    }
    const int64_t output = block * kBlockOutputs, count = std::min<int64_t>(kBlockOutputs, outputs - output);
    for (int64_t row = 0; row < x.rows; ++row)
      write_block(sums + row * kBlockOutputs, bias ? bias + output : nullptr, count, out + row * outputs + output);
  }

  void multiply(const uint32_t* x, int64_t rows, c10::BFloat16* out) const {
    const int64_t fitting = kPairChunkBytes / (4 * std::max<int64_t>(pairs, 1));
    const int64_t chunk = std::clamp<int64_t>(fitting / kPairRows * kPairRows, 4 * kPairRows, kPairChunk);
    for (int64_t first = 0; first < rows; first += chunk) {
      const PairTiles tiled(x + first * pairs, std::min(chunk, rows - first), pairs);
      at::parallel_for(0, (outputs + kBlockOutputs - 1) / kBlockOutputs, 1, [&](int64_t begin, int64_t end) {
        thread_local KeptMemory expanded;
        uint16_t* memory = codes ? expanded.at_least(std::min(kPairPanel, pairs) * kPairWeights) : nullptr;
        for (int64_t block = begin; block < end; ++block)
          multiply_block(tiled, block, block + 1 == end, memory, out + first * outputs);
      });
    }
  }
};

} // namespace

#endif
