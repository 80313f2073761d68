// Products of 8-bit numbers: weights and inputs that are rounded, 64 inputs rotated together first.
//
// A Hadamard matrix rotates both sides.  That changes no product, and it spreads large numbers, which would make rounding
// coarse.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "vectors.h"

#if defined(__AVX512F__) ? defined(__AVX512VNNI__) : defined(__AVX2__)
#define SPECPLUG_BYTES // are multiplied

namespace {

// Outputs of a block; inputs of a word, and those that are rotated together.
constexpr int kByteOutputs = 2 * kLanes, kWordInputs = 4, kRotated = 64;
// How far ahead weights are fetched for up to `kNearRows` rows, and for more.
constexpr int kNearRows = 3;
constexpr int64_t kNearBytes = 3 << 10, kFarBytes = 8 << 10;

#ifdef __AVX512F__
// Rows of a tile: the sums take 20 of 32 registers.
constexpr int kByteRows = 10;
// Rounded weights are stored as unsigned numbers, with this in the place of 0.
constexpr int kMiddle = 128;

// The weights of some outputs, a word of each.
struct WeightWords {
  explicit WeightWords(const uint8_t* p) : words(_mm512_loadu_si512(p)) {}
  // Adds the products of each word and four inputs.
  VecInt add(VecInt sums, int32_t inputs) const {
    return (VecInt)_mm512_dpbusd_epi32((__m512i)sums, words, _mm512_set1_epi32(inputs));
  }
  __m512i words;
};
#else
constexpr int kByteRows = 6; // 12 of 16 registers
constexpr int kMiddle = 0;

// The instruction takes unsigned numbers on one side: the weights' signs go to the inputs.  No number is -128, so that the
// sum of two products fits into 16 bits.
struct WeightWords {
  explicit WeightWords(const uint8_t* p) : words(load<__m256i>(p)), unsigned_words(_mm256_abs_epi8(words)) {}
  VecInt add(VecInt sums, int32_t inputs) const {
    const __m256i pairs = _mm256_maddubs_epi16(unsigned_words, _mm256_sign_epi8(_mm256_set1_epi32(inputs), words));
    return sums + (VecInt)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
  __m256i words, unsigned_words;
};
#endif

// Adds and subtracts the lanes that differ in the bit `half` of their numbers.
template <int half>
inline Vec rotate_lanes(Vec v) {
  return rotate<half>(v) + ((kLane & half) == 0 ? v : -v);
}

// Multiplies x by a Hadamard matrix of 64 rows, 64 numbers at a time.
inline void rotate_inputs(float* x, int64_t size) {
  constexpr int count = kRotated / kLanes;
  for (int64_t first = 0; first < size; first += kRotated) {
    Vec v[count];
    for (int i = 0; i < count; ++i) {
      v[i] = rotate_lanes<4>(rotate_lanes<2>(rotate_lanes<1>(load<Vec>(x + first + i * kLanes))));
      if constexpr (kLanes == 16) v[i] = rotate_lanes<8>(v[i]);
    }
    for (int half = 1; half < count; half *= 2)
      for (int i = 0; i < count; ++i)
        if (!(i & half)) {
          const Vec sum = v[i] + v[i + half], difference = v[i] - v[i + half];
          v[i] = sum;
          v[i + half] = difference;
        }
    for (int i = 0; i < count; ++i) store(x + first + i * kLanes, v[i] * 0.125f);
  }
}

// Rounds x to 8 bits, `rounded`, which times the factor returned are near x; x becomes what they differ by.
// size: a multiple of 64.
inline float round_to_bytes(float* x, int64_t size, int8_t* rounded) {
  typedef int8_t VecSmall __attribute__((vector_size(kLanes)));
  Vec highest{};
  for (int64_t i = 0; i < size; i += kLanes) highest = max(highest, max(load<Vec>(x + i), -load<Vec>(x + i)));
  const float scale = max_lanes(highest)[0] / 127, inverse = scale > 1e-36f ? 1 / scale : 0;
  const Vec magic = splat(12582912.0f); // 1.5 * 2^23: adding it rounds to an integer
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec values = load<Vec>(x + i);
    const VecInt nearest = (VecInt)(values * inverse + magic) - (VecInt)magic;
    store(rounded + i, __builtin_convertvector(nearest, VecSmall));
    store(x + i, values - __builtin_convertvector(nearest, Vec) * scale);
  }
  return scale;
}

// What the middle of the weights adds to the sums of such inputs.
inline int32_t middle_of(const int8_t* rounded, int64_t size) {
  int32_t sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += rounded[i];
  return kMiddle * sum;
}

// Writes an output's rounded weights to its place `n` in a block.
inline void pack_bytes(const int8_t* rounded, int64_t size, int n, uint8_t* block) {
  for (int64_t i = 0; i < size; ++i)
    block[(i / kWordInputs * kByteOutputs + n) * kWordInputs + i % kWordInputs] = static_cast<uint8_t>(rounded[i] + kMiddle);
}

// A block's sums for a few rows of x; the next row is `stride` numbers behind.
template <int ROWS>
inline void multiply_bytes(const int8_t* x, int64_t stride, int64_t size, const uint8_t* weight, VecInt (&sums)[ROWS][2]) {
  const auto* inputs = reinterpret_cast<const int32_t*>(x);
  const int64_t distance = ROWS <= kNearRows ? kNearBytes : kFarBytes;
  constexpr int64_t step = sizeof(Vec);
  VecInt found[ROWS][2]{};
  for (int64_t k = 0; k < size / kWordInputs; ++k, weight += 2 * step) {
    for (int64_t at = 0; at < 2 * step; at += 64) __builtin_prefetch(weight + distance + at, 0, 2);
    const WeightWords low(weight), high(weight + step);
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m) {
      const int32_t word = inputs[m * (stride / kWordInputs) + k];
      found[m][0] = low.add(found[m][0], word);
      found[m][1] = high.add(found[m][1], word);
    }
  }
  std::memcpy(sums, found, sizeof(found));
}

// Calls `visit(first, std::integral_constant<int, count>{})` for tiles of at most kByteRows rows.
template <int COUNT = kByteRows, typename Visit>
inline void visit_rows(int64_t count, const Visit& visit) {
  if constexpr (COUNT > 0) {
    if (count == COUNT) return visit(std::integral_constant<int, COUNT>{});
    visit_rows<COUNT - 1>(count, visit);
  }
}
template <typename Visit>
inline void visit_tiles(int64_t rows, const Visit& visit) {
  const int64_t tiles = (rows + kByteRows - 1) / kByteRows;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t first = tile * rows / tiles;
    visit_rows((tile + 1) * rows / tiles - first, [&](auto count) { visit(first, count); });
  }
}

} // namespace

#endif
