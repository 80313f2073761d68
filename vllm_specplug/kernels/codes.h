// bfloat16 weights in 12 bits, without loss.  The exponents of a matrix's weights are close to each other: a weight has 8
// bits for its sign and fraction, and 4 for one of the 16 most frequent exponents.  Weights with another exponent stand in
// a list.
#pragma once

#include "tiles.h"

#ifdef SPECPLUG_TILES

#include <array>
#include <numeric>

namespace {

// A group: the signs and fractions of two pairs of inputs (64 weights each), then their codes.
constexpr int kPairWeights = 64, kGroupBytes = 3 * 64, kGroups = kStepInputs / 4, kCodedStepBytes = kGroups * kGroupBytes;
constexpr int kCodes = 16;
// Most weights in the list.
constexpr int64_t longest_list(int64_t weights) { return weights / 256 + 64; }

// What expands the weights of a matrix: int32 of the exponents, of where each block's list begins (and ends), and of the
// lists: a weight's place in its expanded block and its bits, in the order of places.
struct Codes {
  explicit Codes(const int32_t* numbers, int64_t blocks) : exponents(numbers), starts(numbers + kCodes), list(starts + blocks + 1) {}
  const int32_t *exponents, *starts, *list;
};

// The byte of a weight (0 to 63 of its pair of inputs) in a vector whose lower and upper halves of 16 bytes are expanded
// to two vectors.
constexpr int coded_place(int weight) { return weight % 32 / 8 * 16 + weight / 32 * 8 + weight % 8; }

// A block that is expanded to the layout of tiles.h, some steps before they are multiplied: so the CPU does both at once.
class CodedBlock {
 public:
  // `memory` has room for all steps if `is_whole`, else for `kSlots`, which are used in turn.
  CodedBlock(const uint8_t* coded, int64_t steps, const Codes& codes, int64_t block, const Ahead& ahead, uint16_t* memory,
             bool is_whole)
      : coded_(coded),
        memory_(memory),
        list_(codes.list + 2 * codes.starts[block]),
        list_end_(codes.list + 2 * codes.starts[block + 1]),
        steps_(steps),
        mask_(is_whole ? ~int64_t{0} : kSlots - 1),
        ahead_(ahead) {
    alignas(16) uint8_t upper[kCodes], lower[kCodes];
    for (int i = 0; i < kCodes; ++i) {
      upper[i] = codes.exponents[i] >> 1;
      lower[i] = (codes.exponents[i] & 1) << 7;
    }
    uppers_ = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(upper)));
    lowers_ = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(lower)));
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
    const __m512i nibble = _mm512_set1_epi8(0x0f), sign = _mm512_set1_epi8(static_cast<char>(0x80));
    constexpr int kOnlyIn = 0xea, kOnlyOut = 0xae; // (a & mask) | b; (a & ~mask) | b, as tables of ternarylogic(mask, a, b)
    const uint8_t* coded = coded_ + step * kCodedStepBytes;
    uint16_t *const to = slot(step), *out = to;
    for (int group = 0; group < kGroups; ++group, coded += kGroupBytes) {
      for (int pair = 0; pair < 2; ++pair, out += kPairWeights) {
        const __m512i values = _mm512_load_si512(coded + pair * 64);
        const __m256i packed = _mm256_load_si256(reinterpret_cast<const __m256i*>(coded + 128) + pair);
        const __m512i words = _mm512_cvtepu8_epi16(packed);
        const __m512i code = _mm512_and_si512(_mm512_or_si512(words, _mm512_slli_epi16(words, 4)), nibble);
        const __m512i high = _mm512_ternarylogic_epi32(sign, values, _mm512_shuffle_epi8(uppers_, code), kOnlyIn);
        const __m512i low = _mm512_ternarylogic_epi32(sign, values, _mm512_shuffle_epi8(lowers_, code), kOnlyOut);
        _mm512_store_si512(out, _mm512_unpacklo_epi8(low, high));
        _mm512_store_si512(out + 32, _mm512_unpackhi_epi8(low, high));
      }
    }
    for (; list_ < list_end_ && list_[0] < (step + 1) * (kStepBytes / 2); list_ += 2)
      to[list_[0] - step * (kStepBytes / 2)] = static_cast<uint16_t>(list_[1]);
  }

  const uint8_t* coded_;
  uint16_t* memory_;
  const int32_t *list_, *list_end_;
  int64_t steps_, mask_;
  Ahead ahead_;
  __m512i uppers_, lowers_;
};

// Calls `visit(place in the expanded block, bits)` for all weights of a block of [outputs][size], in order of places.
template <typename Visit>
void for_each_weight(const uint16_t* weight, int64_t outputs, int64_t size, int64_t block, const Visit& visit) {
  const uint16_t* first = weight + block * 32 * size;
  for (int64_t k = 0; k < size; k += 2)
    for (int64_t n = 0; n < std::min<int64_t>(32, outputs - block * 32); ++n)
      for (int64_t side = 0; side < 2; ++side) visit(k / 2 * kPairWeights + n * 2 + side, first[n * size + k + side]);
}

constexpr int exponent_of(uint16_t bits) { return bits >> 7 & 0xff; }

// Returns the numbers of `Codes`, as many for all matrices of a shape; none if too many weights would stand in the lists.
inline std::vector<int32_t> make_codes(const uint16_t* weight, int64_t outputs, int64_t size) {
  std::array<int64_t, 256> counts{};
  for (int64_t i = 0; i < outputs * size; ++i) ++counts[exponent_of(weight[i])];
  std::array<int32_t, 256> order;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return counts[a] > counts[b]; });
  std::array<bool, 256> is_coded{};
  for (int i = 0; i < kCodes; ++i) is_coded[order[i]] = true;
  const int64_t blocks = (outputs + 31) / 32;
  std::vector<int32_t> numbers(order.begin(), order.begin() + kCodes), list;
  for (int64_t block = 0; block < blocks; ++block) {
    numbers.push_back(static_cast<int32_t>(list.size() / 2));
    for_each_weight(weight, outputs, size, block, [&](int64_t place, uint16_t bits) {
      if (!is_coded[exponent_of(bits)]) list.insert(list.end(), {static_cast<int32_t>(place), bits});
    });
    if (static_cast<int64_t>(list.size() / 2) > longest_list(outputs * size)) return {};
  }
  numbers.push_back(static_cast<int32_t>(list.size() / 2));
  list.resize(2 * longest_list(outputs * size));
  numbers.insert(numbers.end(), list.begin(), list.end());
  return numbers;
}

// Writes a block in 12 bits.
inline void code_block(const uint16_t* weight, int64_t outputs, int64_t size, const Codes& codes, int64_t block,
                       uint8_t* coded) {
  std::array<uint8_t, 256> code{};
  for (int i = kCodes - 1; i >= 0; --i) code[codes.exponents[i]] = i;
  std::fill_n(coded, size / kStepInputs * kCodedStepBytes, 0);
  for_each_weight(weight, outputs, size, block, [&](int64_t place, uint16_t bits) {
    const int64_t pair = place / kPairWeights, at = coded_place(place % kPairWeights);
    uint8_t* group = coded + pair / 2 * kGroupBytes;
    group[pair % 2 * 64 + at] = static_cast<uint8_t>(bits >> 8 & 0x80) | static_cast<uint8_t>(bits & 0x7f);
    group[128 + pair % 2 * 32 + at / 2] |= code[exponent_of(bits)] << at % 2 * 4;
  });
}

} // namespace

#endif
