// Products of bfloat16 that add two inputs at once, with AVX-512.
#pragma once

#include <ATen/Parallel.h>

#include <optional>

#include "bf16_in_12_bits.h"

#ifdef SPECPLUG_PAIRS

namespace {

// The sums of 12 rows take 24 of the 32 registers.  Rows are computed in chunks, which stay in the second cache with the
// weights of a panel of pairs of inputs.
constexpr int kPairRows = 12;
constexpr int64_t kPairChunk = 192, kPairChunkBytes = 512 << 10, kPairPanel = 2048;
// Up to so many rows, the CPU's own fetching is faster than ours: weights of 16 bits, and of 12.
constexpr int kUnfetchedRows = 5, kUnfetchedCodedRows = 2;
// How far ahead the weights of up to `kNearRows` rows are fetched, and of more.
constexpr int kNearRows = 3;
constexpr int64_t kNearBytes = 6 << 10, kFarBytes = 12 << 10;

// Weights of a block as they lie in memory.
struct PlainPairs {
  const uint16_t* weights;
  Ahead ahead;
  // Up to which pair of `count` pairs two at a time can be read by `pair`.
  int64_t stop(int64_t count) const { return count & ~int64_t{1}; }
  // SECOND: k is odd.
  template <bool SECOND>
  [[gnu::always_inline]] void pair(int64_t k, VecUint (&found)[2]) const {
    if (!SECOND) ahead.fetch<2 * kPairBytes / 64>(k / 2);
    found[0] = load<VecUint>(weights + k * kPairWeights);
    found[1] = load<VecUint>(weights + k * kPairWeights + kPairWeights / 2);
  }
  // Returns the two pairs where `stop` was, or the last one.
  const uint16_t* at_stop(int64_t k) const { return weights + k * kPairWeights; }
};

// Weights of a block in 12 bits, from the pair `first` on.  KEEP: they are also written to `expanded`, where others read
// them; else it has room for two pairs.  `stop` is where a weight of two pairs is listed.
template <bool KEEP>
class CodedPairs {
 public:
  CodedPairs(const uint8_t* coded, const Codes& codes, int64_t block, int64_t first, uint16_t* expanded, const Ahead& ahead)
      : coded_(coded),
        expander_(codes),
        listed_(codes, block, first * kPairWeights),
        first_(first),
        expanded_(expanded),
        ahead_(ahead) {}
  int64_t stop(int64_t count) const {
    return listed_.next < listed_.end ? std::min(count, (listed_.next[0] / kPairWeights - first_) & ~int64_t{1}) : count;
  }
  template <bool SECOND>
  [[gnu::always_inline]] void pair(int64_t k, VecUint (&found)[2]) const {
    if (!SECOND) ahead_.fetch<kGroupBytes / 64>(k / 2);
    __m512i lower, upper;
    expander_.expand<SECOND>(coded_ + k / 2 * kGroupBytes, lower, upper);
    if (KEEP) store_pair(expanded_ + k * kPairWeights, lower, upper);
    found[0] = (VecUint)lower;
    found[1] = (VecUint)upper;
  }
  const uint16_t* at_stop(int64_t k) {
    ahead_.fetch<kGroupBytes / 64>(k / 2);
    uint16_t* const to = expanded_ + (KEEP ? k * kPairWeights : 0);
    __m512i lower, upper;
    expander_.expand<false>(coded_ + k / 2 * kGroupBytes, lower, upper);
    store_pair(to, lower, upper);
    expander_.expand<true>(coded_ + k / 2 * kGroupBytes, lower, upper);
    store_pair(to + kPairWeights, lower, upper);
    listed_.write((first_ + k) * kPairWeights, 2 * kPairWeights, to);
    return to;
  }

 private:
  [[gnu::always_inline]] static void store_pair(uint16_t* to, __m512i lower, __m512i upper) {
    _mm512_store_si512(to, lower);
    _mm512_store_si512(to + kPairWeights / 2, upper);
  }

  const uint8_t* coded_;
  Expander expander_;
  ListedWeights listed_;
  int64_t first_;
  uint16_t* expanded_;
  Ahead ahead_;
};

// Adds the products of `count` pairs of inputs, x[count][ROWS], to sums[ROWS][32].
template <int ROWS, typename Weights>
[[gnu::noinline]] void multiply_pairs(const uint32_t* x, Weights weights, int64_t count, float* sums) {
  Vec totals[ROWS][2];
  std::memcpy(totals, sums, sizeof(totals));
  VecUint found[2];
  const auto add = [&](const uint32_t* inputs) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m) {
      const VecUint value = splat(inputs[m]);
      totals[m][0] = accumulate(totals[m][0], value, found[0]);
      totals[m][1] = accumulate(totals[m][1], value, found[1]);
    }
  };
  for (int64_t k = 0; k < count;) {
    for (const int64_t stop = weights.stop(count); k < stop; k += 2) {
      weights.template pair<false>(k, found);
      add(x + k * ROWS);
      weights.template pair<true>(k + 1, found);
      add(x + (k + 1) * ROWS);
    }
    if (k == count) break;
    const uint16_t* read = weights.at_stop(k);
    for (const int64_t stop = std::min(k + 2, count); k < stop; ++k, read += kPairWeights) {
      found[0] = load<VecUint>(read);
      found[1] = load<VecUint>(read + kPairWeights / 2);
      add(x + k * ROWS);
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

// Copies four rows, x[4][pairs], to the first four columns of to[pairs][stride].
inline void interleave(const uint32_t* x, int64_t pairs, int64_t stride, uint32_t* to) {
  int64_t k = 0;
  for (; k + 16 <= pairs; k += 16, to += 16 * stride) {
    __m512i rows[4];
    for (int row = 0; row < 4; ++row) rows[row] = _mm512_loadu_si512(x + row * pairs + k);
    const __m512i first = _mm512_unpacklo_epi32(rows[0], rows[1]), second = _mm512_unpackhi_epi32(rows[0], rows[1]);
    const __m512i third = _mm512_unpacklo_epi32(rows[2], rows[3]), fourth = _mm512_unpackhi_epi32(rows[2], rows[3]);
    // Quarter q of found[n]: pair 4 * q + n of the four rows.
    const __m512i found[4] = {_mm512_unpacklo_epi64(first, third), _mm512_unpackhi_epi64(first, third),
                              _mm512_unpacklo_epi64(second, fourth), _mm512_unpackhi_epi64(second, fourth)};
    for (int n = 0; n < 4; ++n) {
      const auto write = [&](int quarter, __m128i numbers) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + (4 * quarter + n) * stride), numbers);
      };
      write(0, _mm512_castsi512_si128(found[n]));
      write(1, _mm512_extracti32x4_epi32(found[n], 1));
      write(2, _mm512_extracti32x4_epi32(found[n], 2));
      write(3, _mm512_extracti32x4_epi32(found[n], 3));
    }
  }
  for (; k < pairs; ++k, to += stride)
    for (int row = 0; row < 4; ++row) to[row] = x[row * pairs + k];
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
      for (int64_t tile = begin; tile < end; ++tile) {
        const uint32_t* from = x + first(tile) * pairs;
        uint32_t* const tiled = to + first(tile) * pairs;
        const int64_t rows = height(tile);
        int64_t row = 0;
        for (; row + 4 <= rows; row += 4) interleave(from + row * pairs, pairs, rows, tiled + row);
        for (; row < rows; ++row)
          for (int64_t k = 0; k < pairs; ++k) tiled[k * rows + row] = from[row * pairs + k];
      }
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
    // One tile reads the weights once: what is fetched soon follows.  Several ones read a panel in turn, and fetch the
    // next block meanwhile.
    const bool fetches = x.rows > (codes ? kUnfetchedCodedRows : kUnfetchedRows) && (x.tiles == 1 || !is_last);
    const int64_t distance = x.tiles > 1 ? pairs * pair_bytes : x.rows <= kNearRows ? kNearBytes : kFarBytes;
    for (int64_t begin = 0; begin < pairs; begin += kPairPanel) {
      const int64_t count = std::min(kPairPanel, pairs - begin), at = begin * pair_bytes;
      for (int64_t tile = 0; tile < x.tiles; ++tile) {
        const Ahead ahead(fetches ? stored + at + distance : nullptr, 2 * pair_bytes, tile, x.tiles);
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

  void multiply_listed(const uint32_t* x, int64_t rows, const std::vector<int64_t>& blocks, c10::BFloat16* out) const {
    const PairTiles tiled(x, rows, pairs);
    at::parallel_for(0, blocks.size(), 1, [&](int64_t begin, int64_t end) {
      uint16_t* memory = room();
      for (int64_t i = begin; i < end; ++i) multiply_block(tiled, blocks[i], true, memory, out);
    });
  }

  void multiply(const uint32_t* x, int64_t rows, c10::BFloat16* out) const {
    const int64_t fitting = kPairChunkBytes / (4 * std::max<int64_t>(pairs, 1));
    const int64_t chunk = std::clamp<int64_t>(fitting / kPairRows * kPairRows, 4 * kPairRows, kPairChunk);
    for (int64_t first = 0; first < rows; first += chunk) {
      const PairTiles tiled(x + first * pairs, std::min(chunk, rows - first), pairs);
      at::parallel_for(0, (outputs + kBlockOutputs - 1) / kBlockOutputs, 1, [&](int64_t begin, int64_t end) {
        uint16_t* memory = room();
        for (int64_t block = begin; block < end; ++block)
          multiply_block(tiled, block, block + 1 == end, memory, out + first * outputs);
      });
    }
  }

 private:
  // Room for a panel that is expanded, of this thread.
  uint16_t* room() const {
    thread_local KeptMemory expanded;
    return codes ? expanded.at_least(std::min(kPairPanel, pairs) * kPairWeights) : nullptr;
  }
};

} // namespace

#endif
