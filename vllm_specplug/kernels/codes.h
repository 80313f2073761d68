// bfloat16 weights in 12 bits, without loss.  The exponents of a matrix's weights are close to each other.  A weight has its
// lower byte, fraction and lowest bit of the exponent, and 4 bits for its upper byte: the sign, and one of 8 numbers that
// the upper bits of the exponent may be.  Weights with another upper byte stand in a list.
#pragma once

#include "blocks.h"

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

// Six bytes hold four weights: the four lower bytes, then 4 bits for each upper one.  This is where an expanded byte is
// read: the byte of the first 32 weights of a pair of inputs, of the second ones, and the first bit in its eight bytes.
struct ExpandedBytes {
  alignas(64) uint8_t first[64]{}, second[64]{}, bit[64]{};
};
constexpr ExpandedBytes kExpandedBytes = [] {
  ExpandedBytes bytes;
  for (int i = 0; i < 64; ++i) {
    const int weight = i % 8 / 2;
    bytes.first[i] = i / 8 * 6 + i % 8 % 6;
    bytes.second[i] = bytes.first[i] + 16; // its 48 bytes are read with the 16 before them
    bytes.bit[i] = i % 2 ? 32 + 4 * weight : 8 * weight;
  }
  return bytes;
}();

// Expands the weights of a pair of inputs, two vectors of 32.
class Expander {
 public:
  explicit Expander(const Codes& codes)
      : first_(_mm512_load_si512(kExpandedBytes.first)),
        second_(_mm512_load_si512(kExpandedBytes.second)),
        bit_(_mm512_load_si512(kExpandedBytes.bit)) {
    alignas(16) uint8_t uppers[2 * kCodes];
    for (int code = 0; code < kCodes; ++code) {
      uppers[code] = codes.exponents[code];
      uppers[code | 1 << kSignBit] = codes.exponents[code] | 0x80;
    }
    uppers_ = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(uppers)));
  }
  void expand(const uint8_t* coded, __m512i& first, __m512i& second) const {
    first = widened(_mm512_permutexvar_epi8(first_, _mm512_loadu_si512(coded)));
    second = widened(_mm512_permutexvar_epi8(second_, _mm512_loadu_si512(coded + 32)));
  }

 private:
  // The upper bytes are looked up by 6 bits, of which 4 matter: the table stands there four times.
  __m512i widened(__m512i sixes) const {
    const __m512i words = _mm512_multishift_epi64_epi8(bit_, sixes);
    return _mm512_mask_permutexvar_epi8(words, 0xaaaaaaaaaaaaaaaa, words, uppers_);
  }

  __m512i first_, second_, bit_, uppers_;
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

// Returns the numbers of `Codes`, as many for all matrices of a shape; none if too many weights would stand in the lists.
inline std::vector<int32_t> make_codes(const uint16_t* weight, int64_t outputs, int64_t size) {
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
    uint8_t* six = coded + place / 4 * 6;
    const int number = place % 4, upper = code[upper_exponent(bits)] | bits >> 15 << kSignBit;
    six[number] = static_cast<uint8_t>(bits);
    six[4 + number / 2] |= upper << number % 2 * 4;
  });
}

} // namespace

#endif
