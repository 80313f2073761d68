// Products of bfloat16 weights in the tiles of AMX: 16 rows by 16 outputs, over 32 inputs at once.
//
// float32 rows are split into three bfloat16 of 8 bits each, whose sum is the row: its products with a bfloat16 weight
// are exact, and all sums are float32.  (AMX takes numbers below 2^-126 for 0.)
#pragma once

#include <ATen/Parallel.h>

#include <optional>

#include "bf16_in_12_bits.h"

#if defined(__AMX_BF16__) && defined(SPECPLUG_PAIRS) && defined(__linux__)
#define SPECPLUG_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#ifdef SPECPLUG_TILES

// A tile has 16 rows of 64 bytes.  A step of a product takes 32 inputs; its weights, of a block of 32 outputs, lie in
// memory one step behind the other: 16 pairs of inputs, each of 32 outputs.
constexpr int kTile = 16, kStepInputs = 32, kTileNumbers = kTile * kStepInputs, kStepBytes = 2 * kTileNumbers * 2;
constexpr int kCodedStepBytes = kStepInputs / 2 * kCodedPairBytes;

// Asks Linux, once, to let this process use tiles.
inline bool has_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool is_granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return is_granted;
}

// The tiles of a thread, for as long as this lives.  A product of fewer than 16 rows takes less time: `height` is the
// number of rows of the tiles 0, 1 (sums) and 4 (rows), `second` that of the tiles 2, 3 (sums) and 5 (rows).
struct TilesInUse {
  explicit TilesInUse(int64_t height, int64_t second = kTile) {
    const auto rows = static_cast<uint8_t>(height), others = static_cast<uint8_t>(second);
    const struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16];
    } config{.rows = {rows, rows, others, others, rows, others, kTile, kTile}};
    _tile_loadconfig(&config);
  }
  ~TilesInUse() { _tile_release(); }
};

// Splits 16 numbers: the upper 8 bits of the fraction, the next 8, the last 8.
inline void split(__m512 x, __m512i (&parts)[3]) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  for (auto& part : parts) {
    part = _mm512_and_si512(_mm512_castps_si512(x), upper);
    x = _mm512_sub_ps(x, _mm512_castsi512_ps(part));
  }
}

// Rows as tiles: [row tiles][steps][planes][16][32].
template <typename O>
class TiledRows {
 public:
  static constexpr int kPlanes = std::is_same_v<O, float> ? 3 : 1;

  TiledRows(const O* x, int64_t rows, int64_t size)
      : steps(size / kStepInputs),
        row_tiles((rows + kTile - 1) / kTile),
        height(row_tiles == 1 ? rows : kTile),
        x_(x),
        rows_(rows),
        size_(size) {
    thread_local KeptMemory memory;
    tiles_ = memory.at_least(row_tiles * steps * kPlanes * kTileNumbers);
  }

  // Copies a tile of rows; to be called for each one.  Rows beyond the last one keep old numbers, which no row reads.
  void fill(int64_t row_tile) const {
    const int64_t first = row_tile * kTile, count = std::min<int64_t>(kTile, rows_ - first);
    for (int64_t row = 0; row < count; ++row)
      for (int64_t step = 0; step < steps; ++step)
        copy(x_ + (first + row) * size_ + step * kStepInputs, tile(row_tile, step) + row * kStepInputs);
  }

  uint16_t* tile(int64_t row_tile, int64_t step) const {
    return tiles_ + (row_tile * steps + step) * kPlanes * kTileNumbers;
  }

  // `height`: rows of a tile.
  const int64_t steps, row_tiles, height;

 private:
  static void copy(const O* from, uint16_t* to) {
    if constexpr (kPlanes == 1) {
      _mm512_store_si512(to, _mm512_loadu_si512(from));
    } else {
      __m512i lower[3], upper[3];
      split(_mm512_loadu_ps(from), lower);
      split(_mm512_loadu_ps(from + kTile), upper);
      for (int plane = 0; plane < kPlanes; ++plane) {
        __m256i* half = reinterpret_cast<__m256i*>(to + plane * kTileNumbers);
        _mm256_store_si256(half, _mm512_cvtepi32_epi16(_mm512_srli_epi32(lower[plane], 16)));
        _mm256_store_si256(half + 1, _mm512_cvtepi32_epi16(_mm512_srli_epi32(upper[plane], 16)));
      }
    }
  }

  const O* x_;
  int64_t rows_, size_;
  uint16_t* tiles_;
};

// A block as it lies in memory; see `multiply_tiles`.
struct PlainBlock {
  const uint16_t* weights;
  Ahead ahead;
  const uint16_t* step(int64_t step) const {
    ahead.fetch(step);
    return weights + step * (kStepBytes / 2);
  }
};

// A block in 12 bits that is expanded some steps before they are multiplied: so the CPU does both at once.
class CodedBlock {
 public:
  // `memory` has room for all steps if `is_whole`, else for `kSlots`, which are used in turn.
  CodedBlock(const uint8_t* coded, int64_t steps, const Codes& codes, int64_t block, const Ahead& ahead, uint16_t* memory,
             bool is_whole)
      : coded_(coded),
        memory_(memory),
        steps_(steps),
        mask_(is_whole ? ~int64_t{0} : kSlots - 1),
        ahead_(ahead),
        expander_(codes),
        listed_(codes, block) {
    for (int64_t step = 0; step < std::min(kLead, steps); ++step) expand(step);
  }

  const uint16_t* step(int64_t step) {
    if (step + kLead < steps_) expand(step + kLead);
    return slot(step);
  }

  // Steps that are expanded before the one that is multiplied; a power of two that is larger.
  static constexpr int64_t kLead = 2, kSlots = 4;

 private:
  uint16_t* slot(int64_t step) const { return memory_ + (step & mask_) * (kStepBytes / 2); }

  void expand(int64_t step) {
    ahead_.fetch(step);
    const uint8_t* coded = coded_ + step * kCodedStepBytes;
    uint16_t* const to = slot(step);
    for (int group = 0; group < kStepInputs / 4; ++group) {
      __m512i vectors[4];
      expander_.expand<false>(coded + group * kGroupBytes, vectors[0], vectors[1]);
      expander_.expand<true>(coded + group * kGroupBytes, vectors[2], vectors[3]);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) _mm512_store_si512(to + (4 * group + i) * (kPairWeights / 2), vectors[i]);
    }
    listed_.write(step * (kStepBytes / 2), kStepBytes / 2, to);
  }

  const uint8_t* coded_;
  uint16_t* memory_;
  int64_t steps_, mask_;
  Ahead ahead_;
  Expander expander_;
  ListedWeights listed_;
};

// Computes ROW_TILES (1 or 2) tiles of rows, from `first` on, of a block into sums[ROW_TILES * 16][32].  `weights.step`
// returns the weights of each step in turn.
template <int ROW_TILES, typename O, typename Weights>
void multiply_tiles(const TiledRows<O>& x, int64_t first, Weights weights, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (ROW_TILES == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t step = 0; step < x.steps; ++step) {
    const uint16_t* block = weights.step(step);
    _tile_loadd(6, block, 2 * 64);
    _tile_loadd(7, block + 32, 2 * 64);
#pragma GCC unroll 3
    for (int plane = 0; plane < TiledRows<O>::kPlanes; ++plane) {
      _tile_loadd(4, x.tile(first, step) + plane * kTileNumbers, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (ROW_TILES == 2) {
        _tile_loadd(5, x.tile(first + 1, step) + plane * kTileNumbers, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
  }
  _tile_stored(0, sums, 2 * 64);
  _tile_stored(1, sums + kTile, 2 * 64);
  if constexpr (ROW_TILES == 2) {
    _tile_stored(2, sums + kTile * 32, 2 * 64);
    _tile_stored(3, sums + kTile * 32 + kTile, 2 * 64);
  }
}

// A chunk of rows, which leaves room for the weights in the second cache.
constexpr int64_t kTiledBytes = 1 << 20;

// A product: `weight` is [blocks][size / 2][32][2], or expanded to it with `codes`; `bias` may be null.
template <typename O>
struct TileProduct {
  int64_t size;
  const void* weight;
  const std::optional<Codes>& codes;
  const std::conditional_t<std::is_same_v<O, float>, float, uint16_t>* bias;
  int64_t outputs;

  // Two tiles of rows at a time.  Each pass over the weights of a block fetches its share of the next one.
  void multiply_block(const TiledRows<O>& x, int64_t rows, int64_t block, bool is_last, uint16_t* expanded, O* out) const {
    const int step_bytes = codes ? kCodedStepBytes : kStepBytes;
    const auto* stored = static_cast<const char*>(weight) + block * x.steps * step_bytes;
    const void* next = is_last ? nullptr : stored + x.steps * step_bytes;
    const int passes = (x.row_tiles + 1) / 2;
    alignas(64) float sums[2 * kTile * kBlockOutputs];
    for (int pass = 0; pass < passes; ++pass) {
      const int64_t first = 2 * pass, done = first * kTile;
      const Ahead ahead(next, step_bytes, pass, passes);
      const auto multiply_pass = [&](const auto& weights) {
        if (first + 1 < x.row_tiles)
          multiply_tiles<2>(x, first, weights, sums);
        else
          multiply_tiles<1>(x, first, weights, sums);
      };
      if (codes && pass == 0)
        multiply_pass(CodedBlock(reinterpret_cast<const uint8_t*>(stored), x.steps, *codes, block, ahead, expanded,
                                 passes > 1));
      else
        multiply_pass(PlainBlock{codes ? expanded : reinterpret_cast<const uint16_t*>(stored), ahead});
      const int64_t output = block * kBlockOutputs, count = std::min<int64_t>(kBlockOutputs, outputs - output);
      for (int64_t row = 0; row < std::min<int64_t>(2 * kTile, rows - done); ++row)
        write_block<O>(sums + row * kBlockOutputs, bias ? bias + output : nullptr, count, out + (done + row) * outputs + output);
    }
  }

  void multiply(const O* x, int64_t rows, O* out) const {
    constexpr int64_t kSlotNumbers = CodedBlock::kSlots * kStepBytes / 2;
    constexpr int64_t kTileBytes = TiledRows<O>::kPlanes * kTileNumbers * 2;
    const int64_t fitting = kTiledBytes / (size / kStepInputs * kTileBytes);
    const int64_t chunk = std::max<int64_t>(fitting / 2, 1) * 2 * kTile;
    for (int64_t first = 0; first < rows; first += chunk) {
      const int64_t count = std::min(chunk, rows - first);
      const TiledRows<O> tiled(x + first * size, count, size);
      at::parallel_for(0, tiled.row_tiles, 4, [&](int64_t begin, int64_t end) {
        for (int64_t tile = begin; tile < end; ++tile) tiled.fill(tile);
      });
      at::parallel_for(0, (outputs + kBlockOutputs - 1) / kBlockOutputs, 1, [&](int64_t begin, int64_t end) {
        thread_local KeptMemory expanded;
        const TilesInUse tiles(tiled.height);
        uint16_t* memory = codes ? expanded.at_least(std::max(kBlockOutputs * size, kSlotNumbers)) : nullptr;
        for (int64_t block = begin; block < end; ++block)
          multiply_block(tiled, count, block, block + 1 == end, memory, out + first * outputs);
      });
    }
  }
};

#else

inline bool has_tiles() { return false; }

#endif

} // namespace
