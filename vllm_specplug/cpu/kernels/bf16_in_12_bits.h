// bfloat16 weights in 12 bits, without loss.  The exponents of a matrix's weights are close to each other.  A weight has its
// lower byte, fraction and lowest bit of the exponent, and 4 bits for its upper byte: the sign, and one of 8 numbers that
// the upper bits of the exponent may be.  Weights with another upper byte stand in a list.
#pragma once

#include "packing.h"

#ifdef SPECPLUG_PAIRS

#include <ATen/Parallel.h>

#include <array>
#include <numeric>

namespace {

constexpr int kCodes = 8, kSignBit = 3, kCodedPairBytes = kPairWeights * 12 / 8;
// Most weights in the list.
constexpr int64_t longest_list(int64_t weights) { return weights / 256 + 64; }
constexpr int upper_exponent(uint16_t bits) { return bits >> 8 & 0x7f; }

// What expands the weights of a matrix: int32 of the upper exponents by code, of where each block's list begins (and ends),
// and of the lists: a weight's place in its expanded block and its bits, in the order of places.
struct Codes {
  Codes(const int32_t* numbers, int64_t blocks) : exponents(numbers), starts(numbers + kCodes), list(starts + blocks + 1) {}
  const int32_t *exponents, *starts, *list;
};

// Two pairs of inputs take three lines of 64 bytes, for four vectors of 32 weights: the lower bytes of the first pair, those
// of its two vectors in turn; those of the second pair; and words of four codes, which are from the upper bits down those of
// the first pair's second vector, its first one, the second pair's second vector, its first one.
constexpr int kGroupBytes = 2 * kCodedPairBytes, kCodeBytes = 128; // a group, and where its codes begin

// Expands the weights of a pair of inputs, two vectors of 32.
class Expander {
 public:
  explicit Expander(const Codes& codes) {
    alignas(16) uint8_t uppers[2 * kCodes];
    for (int code = 0; code < kCodes; ++code) {
      uppers[code] = codes.exponents[code];
      uppers[code | 1 << kSignBit] = codes.exponents[code] | 0x80;
    }
    uppers_ = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(uppers)));
  }
  // SECOND: the second pair of the group.
  template <bool SECOND>
  [[gnu::always_inline]] void expand(const uint8_t* group, __m512i& first, __m512i& second) const {
    const __m512i lower = _mm512_loadu_si512(group + SECOND * 64), codes = _mm512_loadu_si512(group + kCodeBytes);
    first = with_uppers(lower, SECOND ? _mm512_slli_epi16(codes, 8) : codes);
    second = with_uppers(_mm512_srli_epi16(lower, 8), SECOND ? _mm512_slli_epi16(codes, 4) : _mm512_srli_epi16(codes, 4));
  }

 private:
  // Replaces the upper byte of each word by the one that the upper byte of `codes` stands for.  It is looked up by 6 bits, of
  // which 4 matter: the table stands there four times.
  [[gnu::always_inline]] __m512i with_uppers(__m512i lower, __m512i codes) const {
    return _mm512_mask_permutexvar_epi8(lower, 0xaaaaaaaaaaaaaaaa, codes, uppers_);
  }

  __m512i uppers_;
};

// The weights of a block's list from `place` on, in the order of places.
struct ListedWeights {
  ListedWeights(const Codes& codes, int64_t block, int64_t place = 0)
      : next(codes.list + 2 * codes.starts[block]), end(codes.list + 2 * codes.starts[block + 1]) {
    while (next < end && next[0] < place) next += 2;
  }
  // Writes those of the next `count` weights, which begin at `place` of the block, to `expanded`.
  void write(int64_t place, int64_t count, uint16_t* expanded) {
    for (; next < end && next[0] < place + count; next += 2) expanded[next[0] - place] = static_cast<uint16_t>(next[1]);
  }
  const int32_t *next, *end;
};

// Calls `visit(place in the expanded block, bits)` for all weights of a block of [outputs][size], in order of places.
template <typename Visit>
void for_each_weight(const uint16_t* weight, int64_t outputs, int64_t size, int64_t block, const Visit& visit) {
  const uint16_t* first = weight + block * kBlockOutputs * size;
  for (int64_t k = 0; k < size; k += 2)
    for (int64_t n = 0; n < std::min<int64_t>(kBlockOutputs, outputs - block * kBlockOutputs); ++n)
      for (int64_t side = 0; side < 2; ++side) visit(k / 2 * kPairWeights + n * 2 + side, first[n * size + k + side]);
}

// Returns the numbers of `Codes`, as many for all matrices of a shape; none if too many weights would stand in the lists, or
// the inputs cannot be grouped.
inline std::vector<int32_t> make_codes(const uint16_t* weight, int64_t outputs, int64_t size) {
  if (size % 4) return {};
  std::array<int64_t, 128> counts{};
  for (int64_t i = 0; i < outputs * size; ++i) ++counts[upper_exponent(weight[i])];
  std::array<int32_t, 128> order;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return counts[a] > counts[b]; });
  std::array<bool, 128> is_coded{};
  for (int code = 0; code < kCodes; ++code) is_coded[order[code]] = true;
  const int64_t blocks = (outputs + kBlockOutputs - 1) / kBlockOutputs;
  std::vector<std::vector<int32_t>> lists(blocks);
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block)
      for_each_weight(weight, outputs, size, block, [&](int64_t place, uint16_t bits) {
        if (!is_coded[upper_exponent(bits)]) lists[block].insert(lists[block].end(), {static_cast<int32_t>(place), bits});
      });
  });
  std::vector<int32_t> numbers(order.begin(), order.begin() + kCodes), list;
  for (const auto& of_block : lists) {
    numbers.push_back(static_cast<int32_t>(list.size() / 2));
    list.insert(list.end(), of_block.begin(), of_block.end());
  }
  numbers.push_back(static_cast<int32_t>(list.size() / 2));
  if (static_cast<int64_t>(list.size() / 2) > longest_list(outputs * size)) return {};
  list.resize(2 * longest_list(outputs * size));
  numbers.insert(numbers.end(), list.begin(), list.end());
  return numbers;
}

// Writes a block in 12 bits; a listed weight gets code 0.
inline void code_block(const uint16_t* weight, int64_t outputs, int64_t size, const Codes& codes, int64_t block,
                       uint8_t* coded) {
  std::array<uint8_t, 128> code{};
  for (int i = kCodes - 1; i >= 0; --i) code[codes.exponents[i]] = i;
  std::fill_n(coded, size / 2 * kCodedPairBytes, 0);
  for_each_weight(weight, outputs, size, block, [&](int64_t place, uint16_t bits) {
    const int64_t pair = place / kPairWeights, word = place % kBlockOutputs;
    const bool is_second = place / kBlockOutputs % 2; // vector of the pair
    uint8_t* group = coded + pair / 2 * kGroupBytes;
    group[pair % 2 * 64 + 2 * word + is_second] = static_cast<uint8_t>(bits);
    const int upper = code[upper_exponent(bits)] | bits >> 15 << kSignBit;
    group[kCodeBytes + 2 * word + 1 - pair % 2] |= upper << 4 * is_second;
  });
}

} // namespace

#endif
