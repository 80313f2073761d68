// Vectors of the CPU's width, and the arithmetic that the operators share.
#pragma once

#include <c10/util/Half.h>

#ifdef __AVX__
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

namespace {

#ifdef __AVX512F__
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
constexpr float kLog2E = 1.4426950408889634f;

using Half = c10::Half; // float16; bfloat16 is uint16_t here

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t VecInt __attribute__((vector_size(4 * kLanes)));
typedef uint32_t VecUint __attribute__((vector_size(4 * kLanes)));
typedef uint16_t VecHalf __attribute__((vector_size(2 * kLanes)));
typedef uint8_t VecByte __attribute__((vector_size(kLanes)));

// Numbers of the lanes; and those of the lower (upper) halves of two vectors, interleaved.
#ifdef __AVX512F__
constexpr VecInt kLane{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr VecInt kLower{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
#else
constexpr VecInt kLane{0, 1, 2, 3, 4, 5, 6, 7};
constexpr VecInt kLower{0, 8, 1, 9, 2, 10, 3, 11};
#endif
constexpr VecInt kUpper = kLower + kLanes / 2;

template <typename V, typename T>
inline V load(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}
template <typename V, typename T>
inline void store(T* p, V v) {
  std::memcpy(p, &v, sizeof(V));
}
inline Vec splat(float x) { return x - Vec{}; } // x - 0 is x; 0 + x would be computed, because of -0
inline Vec select(VecInt mask, Vec a, Vec b) { return mask ? a : b; }
// a > b ? a : b, so b if one is NaN; in one instruction.
#if defined(__AVX512F__)
inline Vec max(Vec a, Vec b) { return (Vec)_mm512_max_ps((__m512)a, (__m512)b); }
#elif defined(__AVX__)
inline Vec max(Vec a, Vec b) { return (Vec)_mm256_max_ps((__m256)a, (__m256)b); }
#else
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }
#endif
inline Vec widen(const uint16_t* p) { return (Vec)(__builtin_convertvector(load<VecHalf>(p), VecUint) << 16); }
inline Vec widen(const float* p) { return load<Vec>(p); }
// The numbers of bits of float16.
#if defined(__AVX512F__)
inline Vec widen_half(VecHalf bits) { return (Vec)_mm512_cvtph_ps((__m256i)bits); }
#elif defined(__F16C__)
inline Vec widen_half(VecHalf bits) { return (Vec)_mm256_cvtph_ps((__m128i)bits); }
#else
inline Vec widen_half(VecHalf bits) {
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = Half(bits[i], Half::from_bits());
  return v;
}
#endif
inline Vec widen(const Half* p) { return widen_half(load<VecHalf>(p)); }
inline float to_float(float x) { return x; }
inline float to_float(Half x) { return x; }
inline float to_float(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &word, sizeof(x));
  return x;
}
inline VecUint widen(const uint32_t* p) { return load<VecUint>(p); }
inline VecUint splat(uint32_t x) { return VecUint{} + x; }
// Returns sum + x * y, rounded once where the CPU can.  Where `sum` is a product too, a compiler may choose which of the
// two it rounds, and choose otherwise in another copy of a loop.
#if defined(__AVX512F__)
inline Vec accumulate(Vec sum, Vec x, Vec y) { return (Vec)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sum); }
#elif defined(__FMA__)
inline Vec accumulate(Vec sum, Vec x, Vec y) { return (Vec)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)sum); }
#else
inline Vec accumulate(Vec sum, Vec x, Vec y) { return sum + x * y; }
#endif

// For words of two bfloat16, neighbours in the head dimension: two exact products per lane.
#ifdef __AVX512BF16__
inline Vec accumulate(Vec sum, VecUint x, VecUint y) {
  return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
}
#else
inline Vec accumulate(Vec sum, VecUint x, VecUint y) {
  const VecUint upper = splat(0xffff0000u);
  return accumulate(accumulate(sum, (Vec)(x << 16), (Vec)(y << 16)), (Vec)(x & upper), (Vec)(y & upper));
}
#endif

inline int round_up(int n, int step) { return (n + step - 1) / step * step; }

// Rotates the lanes of v by `shift` (a power of 2).
template <int shift>
inline Vec rotate(Vec v) {
  return __builtin_shuffle(v, kLane ^ shift);
}
// Returns the maximum (sum) of all lanes, in every lane.
inline Vec max_lanes(Vec v) {
  if constexpr (kLanes == 16) v = max(v, rotate<8>(v));
  v = max(v, rotate<4>(v));
  v = max(v, rotate<2>(v));
  return max(v, rotate<1>(v));
}
inline Vec sum_lanes(Vec v) {
  if constexpr (kLanes == 16) v += rotate<8>(v);
  v += rotate<4>(v);
  v += rotate<2>(v);
  return v + rotate<1>(v);
}

// Computes 2^x for x <= 0, relative error about 2e-7; exactly 1 for 0, and exactly 0 below -127.
inline Vec exp2(Vec x) {
  const Vec magic = splat(12582912.0f); // 1.5 * 2^23: adding it rounds to an integer
  x = max(splat(-127.0f), x); // this order keeps NaN
  const Vec shifted = x + magic;
  const Vec f = x - (shifted - magic);
  Vec p = splat(1.3264728e-3f); // minimax on [-0.5, 0.5], exact at 0
  p = p * f + 9.671513e-3f;
  p = p * f + 5.5507336e-2f;
  p = p * f + 2.4022242e-1f;
  p = p * f + 6.9314700e-1f;
  p = p * f + 1.0f;
  return (Vec)((VecInt)p + ((VecInt)shifted << 23)); // the integer is added to the exponent
}

} // namespace
