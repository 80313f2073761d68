// bfloat16 weights in 12 bits, without loss.  The exponents of a matrix's weights are close to each other: a weight has its
// sign, its fraction, and 4 bits for one of 16 exponents.  Weights with another exponent stand in a list.
#pragma once

#include "blocks.h"

#ifdef SPECPLUG_PAIRS

#include <ATen/Parallel.h>

#include <array>
#include <numeric>

namespace {

constexpr int kCodes = 16, kCodedPairBytes = kPairWeights * 12 / 8;
constexpr int kFractionBits = 7, kExponentMask = 0xff;
// Most weights in the list.
constexpr int64_t longest_list(int64_t weights) { return weights / 256 + 64; }
constexpr int exponent_of(uint16_t bits) { return bits >> kFractionBits & kExponentMask; }

// What expands the weights of a matrix: int32 of the lowest exponent, of where each block's list begins (and ends), and of
// the lists: a weight's place in its expanded block and its bits, in the order of places.
struct Codes {
  Codes(const int32_t* numbers, int64_t blocks) : lowest(numbers[0]), starts(numbers + 1), list(starts + blocks + 1) {}
  int32_t lowest;
  const int32_t *starts, *list;
};

// Six bytes hold four weights: the lower 8 bits of each one, then a nibble for each one.  Its three lower bits are the
// upper ones of the code; its highest bit is the sign of the weight before it, in a circle.  So the upper byte of a
// weight, apart from its exponent's upper bits, lies in 8 bits that follow each other.
constexpr int kSignShift = 7;

// Where an expanded byte is read: the byte of the first 32 weights of a pair of inputs, of the second ones, and the first
// bit in its eight bytes.
struct ExpandedBytes {
  alignas(64) uint8_t first[64]{}, second[64]{}, bit[64]{};
};
constexpr ExpandedBytes kExpandedBytes = [] {
  ExpandedBytes bytes;
  for (int i = 0; i < 64; ++i) {
    const int byte = i % 8, weight = byte / 2;
    bytes.first[i] = i / 8 * 6 + (byte < 6 ? byte : byte - 2); // the nibbles twice, for the circle
    bytes.second[i] = bytes.first[i] + 16; // its 48 bytes are read with the 16 before them
    bytes.bit[i] = byte % 2 ? 32 + 4 * weight : 8 * weight;
  }
  return bytes;
}();

// Expands the weights of a pair of inputs, two vectors of 32.
class Expander {
 public:
  explicit Expander(const Codes& codes)
      : first_(_mm512_load_si512(kExpandedBytes.first)),
        second_(_mm512_load_si512(kExpandedBytes.second)),
        bit_(_mm512_load_si512(kExpandedBytes.bit)),
        lowest_(_mm512_set1_epi16(codes.lowest << kFractionBits)) {}
  void expand(const uint8_t* coded, __m512i& first, __m512i& second) const {
    first = widened(_mm512_permutexvar_epi8(first_, _mm512_loadu_si512(coded)));
    second = widened(_mm512_permutexvar_epi8(second_, _mm512_loadu_si512(coded + 32)));
  }

 private:
  __m512i widened(__m512i sixes) const {
    const __m512i words = _mm512_multishift_epi64_epi8(bit_, sixes);
    return _mm512_add_epi16(_mm512_and_si512(words, _mm512_set1_epi16(static_cast<int16_t>(0x87ff))), lowest_);
  }

  __m512i first_, second_, bit_, lowest_;
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

// Returns the lowest of the 16 exponents, neighbours, that most weights have.
inline int32_t lowest_exponent(const uint16_t* weight, int64_t count) {
  std::array<int64_t, 257> below{}; // the weights with lower exponents
  for (int64_t i = 0; i < count; ++i) ++below[exponent_of(weight[i]) + 1];
  std::partial_sum(below.begin(), below.end(), below.begin());
  int32_t best = 0;
  for (int lowest = 1; lowest + kCodes <= 256; ++lowest)
    if (below[lowest + kCodes] - below[lowest] > below[best + kCodes] - below[best]) best = lowest;
  return best;
}

// Returns the numbers of `Codes`, as many for all matrices of a shape; none if too many weights would stand in the lists.
inline std::vector<int32_t> make_codes(const uint16_t* weight, int64_t outputs, int64_t size) {
  const int32_t lowest = lowest_exponent(weight, outputs * size);
  const int64_t blocks = (outputs + kBlockOutputs - 1) / kBlockOutputs;
  std::vector<std::vector<int32_t>> lists(blocks);
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block)
      for_each_weight(weight, outputs, size, block, [&](int64_t place, uint16_t bits) {
        const int code = exponent_of(bits) - lowest;
        if (code < 0 || code >= kCodes) lists[block].insert(lists[block].end(), {static_cast<int32_t>(place), bits});
      });
  });
  std::vector<int32_t> numbers{lowest}, list;
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

// Writes a block in 12 bits; a listed weight gets any code.
inline void code_block(const uint16_t* weight, int64_t outputs, int64_t size, const Codes& codes, int64_t block,
                       uint8_t* coded) {
  std::fill_n(coded, size / 2 * kCodedPairBytes, 0);
  for_each_weight(weight, outputs, size, block, [&](int64_t place, uint16_t bits) {
    uint8_t *six = coded + place / 4 * 6, *nibbles = six + 4;
    const int number = place % 4, code = (exponent_of(bits) - codes.lowest) & (kCodes - 1);
    const int upper = 4 * number, sign = (upper + kSignShift) % 16;
    six[number] = static_cast<uint8_t>((bits & 0x7f) | (code & 1) << kFractionBits);
    nibbles[upper / 8] |= code >> 1 << upper % 8;
    nibbles[sign / 8] |= bits >> 15 << sign % 8;
  });
}

} // namespace

#endif
