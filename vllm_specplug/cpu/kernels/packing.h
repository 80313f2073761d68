// What the products with AVX-512 share: blocks of outputs, memory, what is fetched ahead.
#pragma once

#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "vectors.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define SPECPLUG_PAIRS // of bfloat16 are multiplied

namespace {

// Outputs of a block; a pair of inputs has a word of two bfloat16 for each one.
constexpr int kBlockOutputs = 32, kPairWeights = 2 * kBlockOutputs, kPairBytes = 2 * kPairWeights;

// Memory that is kept from call to call: new pages would cost more than what is written to them.
class KeptMemory {
 public:
  // Aligned to a cache line.
  uint16_t* at_least(size_t count) {
    if (numbers_.size() < count + 32) numbers_.resize(count + 32);
    return reinterpret_cast<uint16_t*>((reinterpret_cast<uintptr_t>(numbers_.data()) + 63) / 64 * 64);
  }

 private:
  std::vector<uint16_t> numbers_;
};

// What is read next, to be fetched in several parts while it is waited for.
struct Ahead {
  // `at` may be null; a step reads `step_bytes` of it.
  Ahead(const void* at, int step_bytes, int part, int parts) : step_bytes_(step_bytes) {
    const int lines = (step_bytes + 63) / 64, share = (lines + parts - 1) / parts;
    at_ = static_cast<const char*>(at) + part * share * 64;
    lines_ = at ? std::clamp(lines - part * share, 0, share) : 0;
  }
  // MOST: a bound of the lines of a step; four are fetched without a loop.
  template <int MOST = 64>
  void fetch(int64_t step) const {
#pragma GCC unroll 4
    for (int line = 0; line < MOST && line < lines_; ++line)
      __builtin_prefetch(at_ + step * step_bytes_ + line * 64, 0, 2);
  }

 private:
  const char* at_;
  int step_bytes_, lines_;
};

// Adds the bias to 32 sums and writes the first `count`.  BIAS: float, or uint16_t for bfloat16.
template <typename O, typename BIAS>
void write_block(const float* sums, const BIAS* bias, int64_t count, O* out) {
  for (int64_t n = 0; n < count; n += 16) {
    const __mmask16 written = count - n < 16 ? (1 << (count - n)) - 1 : 0xffff;
    __m512 values = _mm512_load_ps(sums + n);
    if constexpr (std::is_same_v<O, float>) {
      if (bias) values = _mm512_add_ps(values, _mm512_maskz_loadu_ps(written, bias + n));
      _mm512_mask_storeu_ps(out + n, written, values);
    } else {
      if (bias) {
        const __m512i words = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(written, bias + n));
        values = _mm512_add_ps(values, _mm512_castsi512_ps(_mm512_slli_epi32(words, 16)));
      }
      _mm256_mask_storeu_epi16(out + n, written, (__m256i)_mm512_cvtneps_pbh(values));
    }
  }
}

} // namespace

#endif
