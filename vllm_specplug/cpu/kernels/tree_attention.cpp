// Tree attention on a CPU: attention over the cached context, with an arbitrary mask on the tree_len keys after it; or
// causal attention, of the context's last tokens to those before them.
//
// The context is read from vLLM's packed pages, in place for float32.  Other pages are unpacked chunk by chunk into a
// scratch that stays in the L1/L2 cache: keys as words of two bfloat16 or, from float16, as float32; values as float32.
// Pages of 8 bits are unpacked likewise, to the type of the queries, which has all their numbers.
// All arithmetic is float32.  tree_attention.py documents the arguments; tree_attention_reference defines the result.
// write_rows writes into the pages.
//
// The bits of a row's output depend only on its query and on its visible keys and values in the order of their positions:
// not on where a key is stored (pages or tree rows), nor on other rows.  So every sum takes the keys by position: chunks
// begin at multiples of kChunk, scores lie where their positions say, and a hidden key adds an exact 0 (unless its value
// is infinite: 0 * infinity is NaN).
//
// Names: a *row* is a pair of query token and query head of the KV head's group; a *unit* is (request, KV head, tile of
// rows), the work item of a thread; a *chunk* is kChunk positions, whose cached keys are in *segments* of one page each.
// A tree key's position depends on the row: the context's length plus the number of visible tree keys before it.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

#include "gemm_bf16_amx.h"
#include "operators.h"
#include "vectors.h"

namespace {

// Vectors of the register tile in a row of kRows: 24 accumulators of the 32 registers of AVX-512, 12 of the 16 of AVX2.
constexpr int kTileVecs = kLanes == 16 ? 4 : 2;
constexpr int kRows = 6;         // rows of the register tile
constexpr int kMostRows = 16;    // of a tile of AMX
constexpr int kGroup = 16;       // keys (values) of a group of the amx layout
constexpr int kAlignment = 64;   // of a thread's buffers, in bytes
constexpr int kChunk = 128;      // keys per step of the online softmax
constexpr int kSkipped = 32;     // keys that are skipped at once
constexpr int kMaxTileRows = 96; // most rows per unit
constexpr int kInPlaceRows = 12; // units with more rows read values of 16 bits from a float32 copy

// Computes tanh(x), relative error about 2e-7: a rational minimax on [-7.9, 7.9] (Eigen's), where it reaches 1 - 2^-24.
inline Vec tanh(Vec x) {
  x = max(splat(-7.90531110763549805f), -max(splat(-7.90531110763549805f), -x));
  const Vec square = x * x;
  Vec p = splat(-2.76076847742355e-16f);
  p = p * square + 2.00018790482477e-13f;
  p = p * square - 8.60467152213735e-11f;
  p = p * square + 5.12229709037114e-08f;
  p = p * square + 1.48572235717979e-05f;
  p = p * square + 6.37261928875436e-04f;
  p = p * square + 4.89352455891786e-03f;
  Vec q = splat(1.19825839466702e-06f);
  q = q * square + 1.18534705686654e-04f;
  q = q * square + 2.26843463243900e-03f;
  q = q * square + 4.89352518554385e-03f;
  return x * p / q;
}

// Computes c[ROWS][N] = (c * row_scale) + a[ROWS][k] @ b[k][N] of N = kLanes * VECS columns; without row_scale c is
// overwritten.  If a and b hold words (see accumulate), k counts words.
template <int ROWS, int VECS, typename A, typename B>
inline void multiply_tile(const A* a, int64_t lda, const B* b, int64_t ldb, int k, float* c, int64_t ldc,
                          const float* row_scale) {
  Vec acc[ROWS][VECS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v)
      acc[r][v] = row_scale ? load<Vec>(c + r * ldc + v * kLanes) * row_scale[r] : Vec{};
  for (int p = 0; p < k; ++p, b += ldb) {
    decltype(widen(b)) row[VECS];
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v) row[v] = widen(b + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const auto x = splat(a[r * lda + p]);
#pragma GCC unroll 4
      for (int v = 0; v < VECS; ++v) acc[r][v] = accumulate(acc[r][v], x, row[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v) store(c + r * ldc + v * kLanes, acc[r][v]);
}

template <int ROWS, typename A, typename B>
inline void multiply_rows(const A* a, int64_t lda, const B* b, int64_t ldb, int k, int columns, float* c,
                          int64_t ldc, const float* row_scale) {
  int vecs = columns / kLanes;
  for (; vecs >= kTileVecs; vecs -= kTileVecs, b += kTileVecs * kLanes, c += kTileVecs * kLanes)
    multiply_tile<ROWS, kTileVecs>(a, lda, b, ldb, k, c, ldc, row_scale);
  if constexpr (kTileVecs > 2) {
    if (vecs == 3) multiply_tile<ROWS, 3>(a, lda, b, ldb, k, c, ldc, row_scale);
    if (vecs == 2) multiply_tile<ROWS, 2>(a, lda, b, ldb, k, c, ldc, row_scale);
  }
  if (vecs == 1) multiply_tile<ROWS, 1>(a, lda, b, ldb, k, c, ldc, row_scale);
}

// multiply_tile for any rows <= kRows and any columns % kLanes == 0.
template <typename A, typename B>
void multiply(int rows, const A* a, int64_t lda, const B* b, int64_t ldb, int k, int columns, float* c,
                     int64_t ldc, const float* row_scale) {
  switch (rows) {
    case 6: return multiply_rows<6>(a, lda, b, ldb, k, columns, c, ldc, row_scale);
    case 5: return multiply_rows<5>(a, lda, b, ldb, k, columns, c, ldc, row_scale);
    case 4: return multiply_rows<4>(a, lda, b, ldb, k, columns, c, ldc, row_scale);
    case 3: return multiply_rows<3>(a, lda, b, ldb, k, columns, c, ldc, row_scale);
    case 2: return multiply_rows<2>(a, lda, b, ldb, k, columns, c, ldc, row_scale);
    case 1: return multiply_rows<1>(a, lda, b, ldb, k, columns, c, ldc, row_scale);
  }
}

// Transposes a kLanes x kLanes tile of 4-byte elements; elements beyond rows x columns count as 0.  ld_in is in bytes.
inline void transpose_tile(const void* in, int64_t ld_in, int rows, int columns, void* out, int64_t ld_out) {
  VecUint x[kLanes]{}, y[kLanes];
  for (int i = 0; i < rows; ++i) {
    const char* row = static_cast<const char*>(in) + i * ld_in;
    if (columns >= kLanes)
      x[i] = load<VecUint>(row);
    else
      std::memcpy(&x[i], row, columns * sizeof(uint32_t));
  }
  for (int step = 1; step < kLanes; step *= 2) { // interleaving the halves log2(kLanes) times transposes the tile
    for (int i = 0; i < kLanes / 2; ++i) {
      y[2 * i] = __builtin_shuffle(x[i], x[i + kLanes / 2], kLower);
      y[2 * i + 1] = __builtin_shuffle(x[i], x[i + kLanes / 2], kUpper);
    }
    std::memcpy(x, y, sizeof(x));
  }
  for (int i = 0; i < kLanes; ++i) store(static_cast<uint32_t*>(out) + i * ld_out, x[i]);
}

// latent: a page is [block_size][head_size], and a key's first value_size numbers are its value.
enum class Layout { columns, amx, latent };

// How numbers of 8 bits (fp8) become float32: all bits but the sign move up, which makes a float16, and a factor follows.
struct Fp8 {
  int shift;
  float factor;

  // `bytes`: one in each lane.
  Vec widen(VecHalf bytes) const { return widen_half((bytes & 0x80) << 8 | (bytes & 0x7f) << shift) * factor; }
};

// One layer's cache and the shapes that all requests share.  Strides are in elements.
template <typename T>
struct Problem {
  const T* cache;
  const uint8_t* bytes; // the cache if it has 8 bits, and `cache` is null; else null
  Fp8 fp8;
  int64_t page_stride, head_stride;
  int block_size, head_size, value_size, num_kv_heads, group; // group: query heads per KV head
  Layout layout;
  const T *query, *tree_key, *tree_value;
  int64_t query_stride, query_head_stride, output_stride, output_head_stride;
  int64_t key_stride, key_head_stride, value_stride, value_head_stride;
  T* output;
  const int32_t *block_table, *context_lens, *query_start, *query_lens, *tree_start, *tree_lens;
  const uint8_t* mask;
  int64_t table_stride, mask_request_stride, mask_row_stride;
  float scale, soft_cap;       // soft_cap, window, local: 0 for none
  float value_scale;           // factor of the output
  int window, local;           // local: a row sees the keys since the last multiple of it
  bool causal; // the queries are the context's last tokens
  const float *sinks, *slopes; // by query head; null for none

  // What softmax_row multiplies scores by: capped and biased scores are scaled already.
  float softmax_scale() const { return soft_cap || slopes ? kLog2E : scale * kLog2E; }
  int query_head(int kv_head, int row) const { return kv_head * group + row % group; }

  // The first position that a row sees, whose own is the last before `end`; it can be negative.
  int first_seen(int end) const {
    if (local) return std::max(end - 1, 0) / local * local;
    return window ? end - window : 0;
  }
};

struct Unit {
  int request, kv_head, first_row, num_rows;
};

// The type that scores are computed from: float32, or words of two bfloat16 (see accumulate).
template <typename T>
using KeyElement = std::conditional_t<std::is_same_v<T, uint16_t>, uint32_t, float>;

// Elements of a row per KeyElement.
template <typename T>
constexpr int kPerWord = std::is_same_v<T, uint16_t> ? 2 : 1;

// Keys [head_size or words][columns]; values [columns][head_size], either as stored (T) or as float32 in the scratch.
template <typename T>
struct Segment {
  const KeyElement<T>* key;
  int64_t key_stride;
  const T* value;
  const float* wide_value;
  int64_t value_stride;
  int columns;
};

// Positions of a chunk that a query sees: from `hidden` up to, not including, `shown`.
struct Visible {
  int hidden, shown;
};

// Buffers of one thread, aligned, reused between calls.
struct Scratch {
  std::vector<float> storage, tree_storage;
  int head_size = 0, tree_stride = 0;
  float *query, *accumulator, *scores, *key, *value; // query and key hold KeyElement
  float* tail_sums; // [kMostRows][head_size]
  float *tree_key, *tree_scores;                     // [head_size or words][tree_stride], [kMostRows][tree_stride]
  float maxima[kMaxTileRows];
  Vec totals[kMaxTileRows];
  // By query token of the unit: the end of its positions, and those of the chunk that it sees.
  int end[kMaxTileRows];
  Visible chunk[kMaxTileRows];
  std::vector<int32_t> visible; // the tree keys that each query token sees, [tokens][tree_len]

  void resize(int size, int tree_len) {
    if (head_size != size) {
      head_size = size;
      tree_stride = 0;
      float* p = aligned(storage, (2 * kMaxTileRows + 2 * kChunk + 3 * kMostRows) * size + kMostRows * kChunk);
      query = p;
      accumulator = query + (kMaxTileRows + kMostRows) * size; // tiles of AMX take whole ones
      key = accumulator + (kMaxTileRows + kMostRows) * size;
      value = key + kChunk * size;
      tail_sums = value + kChunk * size;
      scores = tail_sums + kMostRows * size;
    }
    if (const int stride = round_up(tree_len, kLanes) + kLanes; stride > tree_stride) { // vectors may begin at any key
      tree_stride = stride;
      tree_key = aligned(tree_storage, (size + kMostRows) * stride);
      tree_scores = tree_key + size * stride;
      visible.resize(kMaxTileRows * stride);
    }
  }

 private:
  static float* aligned(std::vector<float>& memory, size_t count) {
    memory.assign(count + kAlignment / sizeof(float), 0.0f);
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + kAlignment - 1) / kAlignment * kAlignment);
  }
};

// Unpacks `columns` keys and values of a bfloat16 page, starting at `offset`, to key[words][kChunk] and
// value[][head_size]; value may be null.
void unpack_page(const Problem<uint16_t>& p, const uint16_t* page_key, const uint16_t* page_value, int offset,
                 int columns, uint32_t* key, float* value) {
  for (int d = 0; d < p.head_size; d += 2)
    for (int j = 0; j < columns; j += kLanes) {
      const uint16_t* even = page_key + d * p.block_size + offset + j;
      const VecUint upper = __builtin_convertvector(load<VecHalf>(even + p.block_size), VecUint) << 16;
      store(key + d / 2 * kChunk + j, __builtin_convertvector(load<VecHalf>(even), VecUint) | upper);
    }
  if (value)
    for (int i = 0; i < columns * p.head_size; i += kLanes)
      store(value + i, widen(page_value + offset * p.head_size + i));
}

// unpack_page for float16: key[head_size][kChunk].
void unpack_page(const Problem<Half>& p, const Half* page_key, const Half* page_value, int offset, int columns,
                 float* key, float* value) {
  for (int d = 0; d < p.head_size; ++d)
    for (int j = 0; j < columns; j += kLanes)
      store(key + d * kChunk + j, widen(page_key + d * p.block_size + offset + j));
  if (value)
    for (int i = 0; i < columns * p.head_size; i += kLanes)
      store(value + i, widen(page_value + offset * p.head_size + i));
}

// unpack_page for the amx layout, which stores keys as these words, and values as words of two neighbouring tokens.
void unpack_amx_page(const Problem<uint16_t>& p, const uint16_t* page_key, const uint16_t* page_value, int offset,
                     int columns, uint32_t* key, float* value) {
  for (int j = 0; j < columns; j += kGroup) {
    const uint16_t* group = page_key + (int64_t)(offset + j) * p.head_size;
    for (int word = 0; word < p.head_size / 2; ++word, group += 2 * kGroup)
      std::memcpy(key + word * kChunk + j, group, kGroup * sizeof(uint32_t));
  }
  const VecUint upper = splat(0xffff0000u);
  for (int d = 0; d < p.head_size; d += kGroup) {
    const uint16_t* group = page_value + (int64_t)d * p.block_size + (int64_t)offset * kGroup;
    for (int j = 0; j < columns; j += 2, group += 2 * kGroup) // an odd last key: its neighbour is never read
      for (int i = 0; i < kGroup; i += kLanes) {
        const VecUint pair = load<VecUint>(group + 2 * i);
        store(value + j * p.head_size + d + i, (Vec)(pair << 16));
        store(value + (j + 1) * p.head_size + d + i, (Vec)(pair & upper));
      }
  }
}

// Copies keys [count][head_size] to key[head_size or words][stride]; up to the next multiple of kLanes, keys count as 0.
template <typename T>
void transpose_rows(const T* rows, int64_t row_stride, int count, int head_size, KeyElement<T>* key, int64_t stride) {
  const int words = head_size / kPerWord<T>;
  for (int j = 0; j < count; j += kLanes)
    for (int word = 0; word < words; word += kLanes) {
      const T* in = rows + j * row_stride + word * kPerWord<T>;
      auto* const out = key + word * stride + j;
      const int tile_rows = std::min(kLanes, count - j);
      if constexpr (std::is_same_v<T, Half>) {
        float tile[kLanes][kLanes];
        for (int i = 0; i < tile_rows; ++i) store(tile[i], widen(in + i * row_stride));
        transpose_tile(tile, sizeof(tile[0]), tile_rows, kLanes, out, stride);
      } else {
        transpose_tile(in, row_stride * sizeof(T), tile_rows, words - word, out, stride);
      }
    }
}

// unpack_page for the latent layout; `rows`: of the page, from the first key on.
template <typename T>
void unpack_latent(const Problem<T>& p, const T* rows, int columns, KeyElement<T>* key, float* value) {
  transpose_rows(rows, p.head_size, columns, p.head_size, key, kChunk);
  if constexpr (!std::is_same_v<T, float>) {
    for (int j = 0; value && j < columns; ++j)
      for (int d = 0; d < p.value_size; d += kLanes) store(value + j * p.value_size + d, widen(rows + j * p.head_size + d));
  }
}

// Stores keys of two neighbouring dimensions.
inline void store_keys(uint32_t* key, Vec even, Vec odd) { // as a word of bfloat16, which loses nothing of 8 bits
  store(key, (VecUint)even >> 16 | ((VecUint)odd & 0xffff0000u));
}
inline void store_keys(float* key, Vec even, Vec odd) {
  store(key, even);
  store(key + kChunk, odd);
}

// unpack_page for pages of 8 bits.
template <typename T>
void unpack_fp8_page(const Problem<T>& p, const uint8_t* page_key, const uint8_t* page_value, int offset, int columns,
                     KeyElement<T>* key, float* value) {
  const auto bytes = [](const uint8_t* at) { return __builtin_convertvector(load<VecByte>(at), VecHalf); };
  for (int d = 0; d < p.head_size; d += 2)
    for (int j = 0; j < columns; j += kLanes) {
      const uint8_t* even = page_key + d * p.block_size + offset + j;
      store_keys(key + d / kPerWord<T> * kChunk + j, p.fp8.widen(bytes(even)), p.fp8.widen(bytes(even + p.block_size)));
    }
  for (int i = 0; i < columns * p.head_size; i += kLanes)
    store(value + i, p.fp8.widen(bytes(page_value + offset * p.head_size + i)));
}

// unpack_fp8_page for the amx layout: see unpack_amx_page.
template <typename T>
void unpack_fp8_amx_page(const Problem<T>& p, const uint8_t* page_key, const uint8_t* page_value, int offset, int columns,
                         KeyElement<T>* key, float* value) {
  for (int j = 0; j < columns; j += kGroup) {
    const uint8_t* group = page_key + (int64_t)(offset + j) * p.head_size;
    for (int d = 0; d < p.head_size; d += 2, group += 2 * kGroup)
      for (int i = 0; i < kGroup; i += kLanes) {
        const VecHalf pair = load<VecHalf>(group + 2 * i);
        store_keys(key + d / kPerWord<T> * kChunk + j + i, p.fp8.widen(pair & 0xff), p.fp8.widen(pair >> 8));
      }
  }
  for (int d = 0; d < p.head_size; d += kGroup) {
    const uint8_t* group = page_value + (int64_t)d * p.block_size + (int64_t)offset * kGroup;
    for (int j = 0; j < columns; j += 2, group += 2 * kGroup) // an odd last key: its neighbour is never read
      for (int i = 0; i < kGroup; i += kLanes) {
        const VecHalf pair = load<VecHalf>(group + 2 * i);
        store(value + j * p.head_size + d + i, p.fp8.widen(pair & 0xff));
        store(value + (j + 1) * p.head_size + d + i, p.fp8.widen(pair >> 8));
      }
  }
}

// Fills in the segments of the cached keys at `position` up to `until`, at most kChunk.
template <typename T>
void context_chunk(const Problem<T>& p, const Unit& unit, int position, int until, Scratch& scratch, Segment<T>* segments) {
  const bool value_in_place = p.layout != Layout::amx && unit.num_rows <= kInPlaceRows;
  int filled = 0, num_segments = 0;
  while (position < until) {
    const int offset = position % p.block_size;
    const int columns = std::min(p.block_size - offset, until - position);
    const int64_t page = p.block_table[unit.request * p.table_stride + position / p.block_size];
    const int64_t at = page * p.page_stride + unit.kv_head * p.head_stride;
    if (p.bytes) {
      auto* key = reinterpret_cast<KeyElement<T>*>(scratch.key) + filled;
      float* value = scratch.value + filled * p.head_size;
      const auto unpack = p.layout == Layout::amx ? unpack_fp8_amx_page<T> : unpack_fp8_page<T>;
      unpack(p, p.bytes + at, p.bytes + at + (int64_t)p.block_size * p.head_size, offset, columns, key, value);
      segments[num_segments++] = {key, kChunk, nullptr, value, p.head_size, columns};
      filled += columns;
      position += columns;
      continue;
    }
    const T* page_key = p.cache + at;
    const T* page_value = page_key + (int64_t)p.block_size * p.head_size;
    const T* value = page_value + (int64_t)offset * p.head_size;
    if (p.layout == Layout::latent) {
      const T* rows = page_key + (int64_t)offset * p.head_size;
      auto* key = reinterpret_cast<KeyElement<T>*>(scratch.key) + filled;
      float* wide = value_in_place || std::is_same_v<T, float> ? nullptr : scratch.value + filled * p.value_size;
      unpack_latent(p, rows, columns, key, wide);
      segments[num_segments++] = {key, kChunk, rows, wide, wide ? p.value_size : p.head_size, columns};
    } else if constexpr (std::is_same_v<T, float>) {
      segments[num_segments++] = {page_key + offset, p.block_size, value, nullptr, p.head_size, columns};
    } else {
      auto* key = reinterpret_cast<KeyElement<T>*>(scratch.key) + filled;
      float* wide_value = value_in_place ? nullptr : scratch.value + filled * p.head_size;
      if (p.layout == Layout::columns) {
        unpack_page(p, page_key, page_value, offset, columns, key, wide_value);
      } else {
        if constexpr (std::is_same_v<T, uint16_t>)
          unpack_amx_page(p, page_key, page_value, offset, columns, key, wide_value);
      }
      segments[num_segments++] = {key, kChunk, value, wide_value, p.head_size, columns};
    }
    filled += columns;
    position += columns;
  }
}

inline int num_queries(const Unit& unit, int group) {
  return (unit.first_row + unit.num_rows - 1) / group - unit.first_row / group + 1;
}

template <typename T>
const uint8_t* mask_of(const Problem<T>& p, const Unit& unit) {
  return p.mask + unit.request * p.mask_request_stride + unit.first_row / p.group * p.mask_row_stride;
}

// Lists the tree keys that each query sees, and finds where its positions end.
template <typename T>
void find_visible(const Problem<T>& p, const Unit& unit, int context, int tree_len, Scratch& scratch) {
  const uint8_t* mask = mask_of(p, unit);
  for (int i = 0, count = num_queries(unit, p.group); i < count; ++i, mask += p.mask_row_stride) {
    int32_t* const visible = scratch.visible.data() + i * tree_len;
    int found = 0;
    for (int j = 0; j < tree_len; ++j) {
      visible[found] = j;
      found += mask[j];
    }
    // If causal, the queries are the context's last tokens.
    scratch.end[i] = p.causal ? context + unit.first_row / p.group + i + 1 - p.query_lens[unit.request] : context + found;
  }
}

// Copies all tree keys of the unit to scratch.tree_key.
template <typename T>
void transpose_tree(const Problem<T>& p, const Unit& unit, int tree_len, Scratch& scratch) {
  const T* rows = p.tree_key + p.tree_start[unit.request] * p.key_stride + unit.kv_head * p.key_head_stride;
  transpose_rows(rows, p.key_stride, tree_len, p.head_size, reinterpret_cast<KeyElement<T>*>(scratch.tree_key),
                 scratch.tree_stride);
}

// Scales scores, caps them and subtracts slope * distance; slope 0 for none.  `distance`: of the first key.
inline void adjust_scores(float* scores, int columns, float scale, float soft_cap, float slope, int distance) {
  for (int j = 0; j < columns; j += kLanes) {
    Vec s = load<Vec>(scores + j) * scale;
    if (soft_cap) s = tanh(s / soft_cap) * soft_cap;
    if (slope) s -= __builtin_convertvector(distance - j - kLane, Vec) * slope;
    store(scores + j, s);
  }
}

// Returns the largest of a row of scores and `least`, of those in `visible`; the others become -infinity.
inline float mask_row(float* scores, int columns, Visible visible, float least) {
  Vec highest = splat(least);
  if (visible.hidden <= 0 && visible.shown >= round_up(columns, kLanes)) {
    for (int j = 0; j < columns; j += kLanes) highest = max(highest, load<Vec>(scores + j));
  } else {
    for (int j = 0; j < columns; j += kLanes) {
      const VecInt position = kLane + j;
      const VecInt shown = (position >= visible.hidden) & (position < visible.shown);
      const Vec s = select(shown, load<Vec>(scores + j), splat(-INFINITY));
      store(scores + j, s);
      highest = max(highest, s);
    }
  }
  return max_lanes(highest)[0];
}

// The keys of one chunk: positions from `first`, of which `skipped`, a multiple of kSkipped, are seen by no query; then
// cached keys up to `cached`, then tree keys.
struct Positions {
  int first, skipped, cached;
};

// Rows of a unit, from `row` on.
struct RowTile {
  int row, rows;
  int query[kMostRows]; // query token of the unit, by row
};

// The tree keys that a chunk's positions belong to, over all rows of a tile; by row: the first place in its list of visible
// tree keys, and the number of places.
struct TreeColumns {
  int from, until;
  int place[kMostRows], count[kMostRows];
};

inline TreeColumns tree_columns(const Positions& chunk, const RowTile& tile, int context, int tree_len,
                                const Scratch& scratch) {
  TreeColumns found{tree_len, 0, {}, {}};
  for (int r = 0; r < tile.rows; ++r) {
    const int i = tile.query[r];
    const int32_t* visible = scratch.visible.data() + i * tree_len;
    const int begin = std::max(scratch.chunk[i].hidden, chunk.cached), end = scratch.chunk[i].shown;
    found.place[r] = chunk.first + begin - context;
    found.count[r] = std::max(end - begin, 0);
    if (!found.count[r]) continue;
    found.from = std::min(found.from, visible[found.place[r]]);
    found.until = std::max(found.until, visible[found.place[r] + found.count[r] - 1] + 1);
  }
  return found;
}

// Turns a tile's scores, of cached keys by position in scratch.scores and of tree keys in scratch.tree_scores, into weights
// 2^(scale * (score - maximum)), 0 for hidden keys, and calls write(row, column, weights).  Fills in the factors of the
// rows' earlier sums.
template <typename T, typename Write>
void weigh_rows(const Problem<T>& p, const Unit& unit, const Positions& chunk, const RowTile& tile, const TreeColumns& tree,
                int columns, int tree_len, Scratch& scratch, float (&row_scale)[kMostRows], const Write& write) {
  const int count = columns - chunk.skipped;
  const float scale = p.softmax_scale();
  float* const maxima = scratch.maxima + tile.row;
  alignas(kAlignment) float before[kMostRows]{}, after[kMostRows]{};
  for (int r = 0; r < tile.rows; ++r) {
    const int i = tile.query[r];
    const auto [hidden, shown] = scratch.chunk[i];
    float* const row = scratch.scores + r * kChunk;
    const int32_t* visible = scratch.visible.data() + i * tree_len + tree.place[r];
    const float* of_tree = scratch.tree_scores + r * scratch.tree_stride - tree.from;
    for (int j = 0; j < tree.count[r]; ++j) row[std::max(hidden, chunk.cached) + j] = of_tree[visible[j]];
    if (p.soft_cap || p.slopes) {
      const float slope = p.slopes ? p.slopes[p.query_head(unit.kv_head, unit.first_row + tile.row + r)] : 0.0f;
      adjust_scores(row + chunk.skipped, count, p.scale, p.soft_cap, slope,
                    scratch.end[i] - 1 - chunk.first - chunk.skipped);
    }
    before[r] = maxima[r];
    maxima[r] = after[r] = mask_row(row + chunk.skipped, count, {hidden - chunk.skipped, shown - chunk.skipped}, maxima[r]);
  }
  for (int r = 0; r < kMostRows; r += kLanes)
    store(row_scale + r, exp2((load<Vec>(before + r) - load<Vec>(after + r)) * scale));
  for (int r = 0; r < tile.rows; ++r) {
    const float* row = scratch.scores + r * kChunk;
    const Vec offset = splat(after[r] * scale);
    Vec total = scratch.totals[tile.row + r] * row_scale[r];
    for (int j = chunk.skipped; j < columns; j += kLanes) {
      const Vec weights = exp2(load<Vec>(row + j) * scale - offset);
      write(r, j, weights);
      total += weights;
    }
    scratch.totals[tile.row + r] = total;
  }
}

// Computes with vectors. `segments`: the chunk's cached keys.
template <typename T>
void attend_tile(const Problem<T>& p, const Unit& unit, const Positions& chunk, const Segment<T>* segments,
                 const RowTile& tile, int context, int tree_len, Scratch& scratch) {
  const int value_size = p.value_size, words = p.head_size / kPerWord<T>, rows = tile.rows;
  int columns = 0; // up to the last one that a row sees
  for (int r = 0; r < rows; ++r) columns = std::max(columns, scratch.chunk[tile.query[r]].shown);
  if (columns <= chunk.skipped) return;
  const auto* query = reinterpret_cast<const KeyElement<T>*>(scratch.query) + tile.row * words;
  const int cached = std::min(columns, chunk.cached);
  for (int s = 0, column = chunk.skipped; column < cached; column += segments[s++].columns) {
    const int width = round_up(std::min(segments[s].columns, cached - column), kLanes);
    multiply(rows, query, words, segments[s].key, segments[s].key_stride, words, width, scratch.scores + column, kChunk,
             nullptr);
  }
  TreeColumns tree{};
  if (columns > chunk.cached) {
    tree = tree_columns(chunk, tile, context, tree_len, scratch);
    const auto* key = reinterpret_cast<const KeyElement<T>*>(scratch.tree_key) + tree.from;
    multiply(rows, query, words, key, scratch.tree_stride, words, round_up(tree.until - tree.from, kLanes),
             scratch.tree_scores, scratch.tree_stride, nullptr);
  }
  float row_scale[kMostRows];
  weigh_rows(p, unit, chunk, tile, tree, columns, tree_len, scratch, row_scale,
             [&](int r, int column, Vec weights) { store(scratch.scores + r * kChunk + column, weights); });
  float* const accumulator = scratch.accumulator + tile.row * value_size;
  const auto add = [&](const float* weights, int stride, const auto* value, int64_t value_stride, int depth) {
    multiply(rows, weights, stride, value, value_stride, depth, value_size, accumulator, value_size, row_scale);
    std::fill_n(row_scale, rows, 1.0f);
  };
  for (int s = 0, column = chunk.skipped; column < cached; column += segments[s++].columns) {
    const int depth = std::min(segments[s].columns, cached - column);
    if (segments[s].wide_value)
      add(scratch.scores + column, kChunk, segments[s].wide_value, segments[s].value_stride, depth);
    else
      add(scratch.scores + column, kChunk, segments[s].value, segments[s].value_stride, depth);
  }
  if (tree.until <= tree.from) return;
  for (int r = 0; r < rows; ++r) { // weights by tree key
    const int32_t* visible = scratch.visible.data() + tile.query[r] * tree_len + tree.place[r];
    const float* row = scratch.scores + r * kChunk + std::max(scratch.chunk[tile.query[r]].hidden, chunk.cached);
    float* const of_tree = scratch.tree_scores + r * scratch.tree_stride - tree.from;
    std::fill(of_tree + tree.from, of_tree + tree.until, 0.0f);
    for (int j = 0; j < tree.count[r]; ++j) of_tree[visible[j]] = row[j];
  }
  const T* value = p.tree_value + (p.tree_start[unit.request] + tree.from) * p.value_stride + unit.kv_head * p.value_head_stride;
  add(scratch.tree_scores, scratch.tree_stride, value, p.value_stride, tree.until - tree.from);
}

#ifdef SPECPLUG_TILES

// ---- the same in tiles of AMX: scores are products of 32 numbers of the head at once, weighted values of 32 positions.
// Weights are split into two bfloat16, whose sum has 16 bits.

constexpr int kTilePositions = 32, kTileWidth = 16, kTileElements = kTilePositions * kTileWidth;

// A chunk's cached keys, in place or of latents transposed, by 16 and by 32 positions; and the values of its last positions
// as tiles [positions / 32][value_size / 16][16][16][2]: those cached from `tail` on, 0 elsewhere, and a query's tree values.
struct TiledChunk {
  const uint16_t* key[kChunk / kTileWidth];
  int64_t key_stride;
  const uint16_t* value[kChunk / kTilePositions];
  int tail;
  uint16_t* tail_values;
};

// Copies values [count][value_size], which lie head_size apart, to tail_values at the place of the first, which is even.
inline void tile_values(const Problem<uint16_t>& p, const uint16_t* rows, int place, int count, uint16_t* tail_values) {
  const int parts = p.value_size / kTileWidth;
  const auto words = [](const uint16_t* at) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
  };
  for (int j = 0; j < count; j += 2, place += 2) {
    const uint16_t* from = rows + (int64_t)j * p.head_size;
    uint16_t* to = tail_values + (int64_t)(place / kTilePositions) * parts * kTileElements + place % kTilePositions * kTileWidth;
    for (int part = 0; part < parts; ++part, to += kTileElements, from += kTileWidth) {
      const __m512i next = j + 1 < count ? words(from + p.head_size) : _mm512_setzero_si512();
      _mm512_storeu_si512(to, _mm512_or_si512(words(from), _mm512_slli_epi32(next, 16)));
    }
  }
}

inline TiledChunk tiled_chunk(const Problem<uint16_t>& p, const Unit& unit, const Positions& chunk, int last, uint16_t* key,
                              uint16_t* tail_values) {
  const bool latent = p.layout == Layout::latent;
  const int64_t key_stride = latent ? 2 * kChunk : 2 * kTileWidth;
  TiledChunk tiled{{}, key_stride, {}, latent ? 0 : chunk.cached / kTilePositions * kTilePositions, tail_values};
  const auto page_at = [&](int position) {
    const int64_t page = p.block_table[unit.request * p.table_stride + position / p.block_size];
    return p.cache + page * p.page_stride + unit.kv_head * p.head_stride;
  };
  const int parts = p.value_size / kTileWidth;
  if (last > tiled.tail) {
    const int groups = (last - tiled.tail + kTilePositions - 1) / kTilePositions;
    std::memset(tail_values, 0, (size_t)groups * parts * kTileElements * sizeof(uint16_t));
  }
  if (latent) {
    for (int column = 0; column < kChunk; column += kTileWidth) tiled.key[column / kTileWidth] = key + 2 * column;
    for (int column = chunk.skipped, count; column < chunk.cached; column += count) {
      const int offset = (chunk.first + column) % p.block_size;
      count = std::min(p.block_size - offset, chunk.cached - column);
      const uint16_t* rows = page_at(chunk.first + column) + (int64_t)offset * p.head_size;
      transpose_rows(rows, p.head_size, count, p.head_size, reinterpret_cast<uint32_t*>(key) + column, kChunk);
      tile_values(p, rows, column, count, tail_values);
    }
    return tiled;
  }
  for (int column = chunk.skipped; column < chunk.cached; column += kTilePositions) {
    const uint16_t* page = page_at(chunk.first + column);
    const int offset = (chunk.first + column) % p.block_size;
    tiled.key[column / kTileWidth] = page + (int64_t)offset * p.head_size;
    tiled.key[column / kTileWidth + 1] = page + (int64_t)(offset + kTileWidth) * p.head_size;
    tiled.value[column / kTilePositions] = page + (int64_t)p.block_size * p.head_size + offset * kTileWidth;
  }
  if (last > tiled.tail) {
    const int count = chunk.cached - std::max(tiled.tail, chunk.skipped);
    for (int part = 0; count > 0 && part < parts; ++part) {
      const uint16_t* from = tiled.value[tiled.tail / kTilePositions] + (int64_t)part * kTileWidth * p.block_size;
      uint16_t* const to = tail_values + part * kTileElements;
      std::memcpy(to, from, count / 2 * 2 * kTileWidth * sizeof(uint16_t));
      if (count % 2)
        for (int d = 0; d < kTileWidth; ++d) to[count / 2 * 2 * kTileWidth + 2 * d] = from[count / 2 * 2 * kTileWidth + 2 * d];
    }
  }
  return tiled;
}

// Writes the values of a query's tree keys to their positions in tail_values.
inline void place_tree_values(const Problem<uint16_t>& p, const Unit& unit, const TiledChunk& tiled, const int32_t* visible,
                              int position, int count, uint16_t* tail_values) {
  const int parts = p.value_size / kTileWidth;
  for (int j = 0; j < count; ++j, ++position) {
    const uint16_t* value = p.tree_value + (p.tree_start[unit.request] + visible[j]) * p.value_stride +
                            unit.kv_head * p.value_head_stride;
    const int place = position - tiled.tail;
    uint16_t* to = tail_values + place / kTilePositions * parts * kTileElements +
                   place % kTilePositions / 2 * 2 * kTileWidth;
    const __mmask32 side = place % 2 ? 0xaaaaaaaau : 0x55555555u;
    for (int part = 0; part < parts; ++part, to += kTileElements, value += kTileWidth) {
      const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(value)));
      _mm512_mask_storeu_epi16(to, side, place % 2 ? _mm512_slli_epi32(words, 16) : words);
    }
  }
}

// scores[rows][16 * GROUPS] = query[rows][head_size] @ key, where group g of 16 keys is key[g], [head_size / 2][16][2].
template <int GROUPS>
inline void score_groups(const uint16_t* query, int head_size, const uint16_t* const* key, int64_t key_stride, float* scores,
                         int64_t stride) {
  _tile_zero(0);
  if constexpr (GROUPS > 1) _tile_zero(1);
  if constexpr (GROUPS > 2) _tile_zero(2);
  if constexpr (GROUPS > 3) _tile_zero(3);
  for (int d = 0; d < head_size; d += 32) {
    const int64_t at = d / 2 * key_stride;
    _tile_loadd(4, query + d, head_size * sizeof(uint16_t));
    _tile_loadd(6, key[0] + at, key_stride * sizeof(uint16_t));
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (GROUPS > 1) {
      _tile_loadd(7, key[1] + at, key_stride * sizeof(uint16_t));
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (GROUPS > 2) {
      _tile_loadd(6, key[2] + at, key_stride * sizeof(uint16_t));
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (GROUPS > 3) {
      _tile_loadd(7, key[3] + at, key_stride * sizeof(uint16_t));
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  const int64_t bytes = stride * sizeof(float);
  _tile_stored(0, scores, bytes);
  if constexpr (GROUPS > 1) _tile_stored(1, scores + kTileWidth, bytes);
  if constexpr (GROUPS > 2) _tile_stored(2, scores + 2 * kTileWidth, bytes);
  if constexpr (GROUPS > 3) _tile_stored(3, scores + 3 * kTileWidth, bytes);
}

// The compiler does not know that tiles read memory.
inline void finish_stores() { asm volatile("" ::: "memory"); }

inline void score(const uint16_t* query, int head_size, const uint16_t* const* key, int groups, int64_t key_stride,
                  float* scores, int64_t stride) {
  finish_stores();
  for (; groups >= 4; groups -= 4, key += 4, scores += 4 * kTileWidth)
    score_groups<4>(query, head_size, key, key_stride, scores, stride);
  if (groups == 3) score_groups<3>(query, head_size, key, key_stride, scores, stride);
  if (groups == 2) score_groups<2>(query, head_size, key, key_stride, scores, stride);
  if (groups == 1) score_groups<1>(query, head_size, key, key_stride, scores, stride);
}

// Adds weights[planes][rows][positions] @ value[positions / 32][PARTS][16][16][2] to PARTS parts of 16 of sums[rows][head_size].
template <int PARTS>
inline void add_parts(const uint16_t* weights, int64_t plane, const uint16_t* const* value, int64_t part_stride, int groups,
                      float* sums, int head_size) {
  const int64_t bytes = head_size * sizeof(float);
  _tile_loadd(0, sums, bytes);
  if constexpr (PARTS > 1) _tile_loadd(1, sums + kTileWidth, bytes);
  if constexpr (PARTS > 2) _tile_loadd(2, sums + 2 * kTileWidth, bytes);
  if constexpr (PARTS > 3) _tile_loadd(3, sums + 3 * kTileWidth, bytes);
  for (int g = 0; g < groups; ++g) {
    _tile_loadd(4, weights + g * kTilePositions, kChunk * sizeof(uint16_t));
    _tile_loadd(5, weights + plane + g * kTilePositions, kChunk * sizeof(uint16_t));
    _tile_loadd(6, value[g], 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(0, 5, 6);
    if constexpr (PARTS > 1) {
      _tile_loadd(7, value[g] + part_stride, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(1, 5, 7);
    }
    if constexpr (PARTS > 2) {
      _tile_loadd(6, value[g] + 2 * part_stride, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (PARTS > 3) {
      _tile_loadd(7, value[g] + 3 * part_stride, 64);
      _tile_dpbf16ps(3, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, bytes);
  if constexpr (PARTS > 1) _tile_stored(1, sums + kTileWidth, bytes);
  if constexpr (PARTS > 2) _tile_stored(2, sums + 2 * kTileWidth, bytes);
  if constexpr (PARTS > 3) _tile_stored(3, sums + 3 * kTileWidth, bytes);
}

inline void add_values(const uint16_t* weights, int64_t plane, const uint16_t* const* value, int64_t part_stride, int groups,
                       float* sums, int head_size) {
  const uint16_t* from[kChunk / kTilePositions];
  std::copy_n(value, groups, from);
  finish_stores();
  for (int d = 0; d < head_size; d += 4 * kTileWidth, sums += 4 * kTileWidth) {
    const int parts = std::min((head_size - d) / kTileWidth, 4);
    if (parts == 4)
      add_parts<4>(weights, plane, from, part_stride, groups, sums, head_size);
    else
      add_parts<2>(weights, plane, from, part_stride, groups, sums, head_size);
    for (int g = 0; g < groups; ++g) from[g] += 4 * part_stride;
  }
}

// Splits weights into two bfloat16, a plane each.
inline void split_weights(__m512 weights, uint16_t* to, int64_t plane) {
  const __m256i upper = (__m256i)_mm512_cvtneps_pbh(weights);
  const __m512 rest = _mm512_sub_ps(weights, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(upper), 16)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), upper);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + plane), (__m256i)_mm512_cvtneps_pbh(rest));
}

inline void attend_tile(const Problem<uint16_t>& p, const Unit& unit, const Positions& chunk, const TiledChunk& tiled,
                        const RowTile& tile, int context, int tree_len, Scratch& scratch) {
  const int head_size = p.head_size, value_size = p.value_size, rows = tile.rows;
  int columns = 0; // up to the last one that a row sees
  for (int r = 0; r < rows; ++r) columns = std::max(columns, scratch.chunk[tile.query[r]].shown);
  if (columns <= chunk.skipped) return;
  const auto* query = reinterpret_cast<const uint16_t*>(scratch.query) + tile.row * head_size;
  const int cached = std::min(columns, chunk.cached);
  if (cached > chunk.skipped)
    score(query, head_size, tiled.key + chunk.skipped / kTileWidth, (cached - chunk.skipped + kTileWidth - 1) / kTileWidth,
          tiled.key_stride, scratch.scores + chunk.skipped, kChunk);
  TreeColumns tree{};
  if (columns > chunk.cached) {
    tree = tree_columns(chunk, tile, context, tree_len, scratch);
    const auto* key = reinterpret_cast<const uint16_t*>(scratch.tree_key) + 2 * tree.from;
    finish_stores();
    for (int column = tree.from; column < tree.until; column += kTileWidth, key += 2 * kTileWidth)
      score_groups<1>(query, head_size, &key, 2 * scratch.tree_stride, scratch.tree_scores + column - tree.from,
                      scratch.tree_stride);
  }
  constexpr int64_t kPlane = kMostRows * kChunk;
  alignas(64) uint16_t weights[2 * kPlane + kPlane]; // tiles that begin at a later row read beyond the planes
  const int until = round_up(columns, kTilePositions);
  float row_scale[kMostRows];
  weigh_rows(p, unit, chunk, tile, tree, columns, tree_len, scratch, row_scale, [&](int r, int column, Vec whole) {
    split_weights((__m512)whole, weights + r * kChunk + column, kPlane);
  });
  float* const sums = scratch.accumulator + tile.row * value_size;
  for (int r = 0; r < rows; ++r) {
    if (round_up(columns, kLanes) < until) split_weights(_mm512_setzero_ps(), weights + r * kChunk + until - kLanes, kPlane);
    if (row_scale[r] != 1.0f)
      for (int d = 0; d < value_size; d += kLanes) store(sums + r * value_size + d, load<Vec>(sums + r * value_size + d) * row_scale[r]);
  }
  const int whole = std::min(tiled.tail, until), first = chunk.skipped / kTilePositions;
  if (whole > chunk.skipped)
    add_values(weights + chunk.skipped, kPlane, tiled.value + first, kTileWidth * p.block_size, whole / kTilePositions - first,
               sums, value_size);
  const int from = std::max(whole, chunk.skipped);
  if (from >= until) return;
  const int parts = value_size / kTileWidth;
  const uint16_t* tail[kChunk / kTilePositions];
  for (int column = from; column < until; column += kTilePositions)
    tail[(column - from) / kTilePositions] = tiled.tail_values + (column - tiled.tail) / kTilePositions * parts * kTileElements;
  const auto add_tail = [&](int row, float* to) {
    add_values(weights + row * kChunk + from, kPlane, tail, kTileElements, (until - from) / kTilePositions, to, value_size);
  };
  if (tree.until <= tree.from) return add_tail(0, sums);
  // Each query has its own path at these positions.
  for (int row = 0, next; row < rows; row = next) {
    for (next = row + 1; next < rows && tile.query[next] == tile.query[row];) ++next;
    const int i = tile.query[row];
    place_tree_values(p, unit, tiled, scratch.visible.data() + i * tree_len + tree.place[row],
                      std::max(scratch.chunk[i].hidden, chunk.cached), tree.count[row], tiled.tail_values);
    std::memcpy(scratch.tail_sums, sums + row * value_size, (next - row) * value_size * sizeof(float));
    add_tail(row, scratch.tail_sums);
    std::memcpy(sums + row * value_size, scratch.tail_sums, (next - row) * value_size * sizeof(float));
  }
}

// Whether tiles of AMX compute this layer's attention.
template <typename T>
bool in_tiles(const Problem<T>& p) {
  const bool fits = p.layout == Layout::latent ? p.value_size % 32 == 0
                                               : p.layout == Layout::amx && p.block_size % kTilePositions == 0;
  return std::is_same_v<T, uint16_t> && !p.bytes && fits && p.head_size % 32 == 0 && has_tiles();
}

#else

template <typename T>
bool in_tiles(const Problem<T>&) { return false; }

#endif

// Attends from all rows of the unit to one chunk, whose cached keys end at `context`.
template <typename T>
void attend_chunk(const Problem<T>& p, const Unit& unit, int first, int context, int tree_len, bool tiles, Scratch& scratch) {
  Positions chunk{first, kChunk, 0};
  int last = 0;
  for (int i = 0, queries = num_queries(unit, p.group); i < queries; ++i) {
    const int end = scratch.end[i] - first;
    const int shown = std::clamp(end, 0, kChunk), hidden = std::clamp(p.first_seen(scratch.end[i]) - first, 0, shown);
    scratch.chunk[i] = {hidden, shown};
    if (hidden < shown) chunk.skipped = std::min(chunk.skipped, hidden / kSkipped * kSkipped);
    last = std::max(last, shown);
  }
  if (last <= chunk.skipped) return;
  chunk.cached = std::clamp(context - first, chunk.skipped, last);
  const auto for_tiles = [&](int most, const auto& keys) {
    for (RowTile tile{0, 0, {}}; tile.row < unit.num_rows; tile.row += tile.rows) {
      tile.rows = std::min(most, unit.num_rows - tile.row);
      for (int r = 0; r < tile.rows; ++r)
        tile.query[r] = (unit.first_row + tile.row + r) / p.group - unit.first_row / p.group;
      attend_tile(p, unit, chunk, keys, tile, context, tree_len, scratch);
    }
  };
#ifdef SPECPLUG_TILES
  if constexpr (std::is_same_v<T, uint16_t>)
    if (tiles)
      return for_tiles(kMostRows, tiled_chunk(p, unit, chunk, last, reinterpret_cast<uint16_t*>(scratch.key),
                                              reinterpret_cast<uint16_t*>(scratch.value)));
#endif
  Segment<T> segments[kChunk / kGroup + 1];
  context_chunk(p, unit, first + chunk.skipped, first + chunk.cached, scratch, segments);
  const Segment<T>* keys = segments;
  for_tiles(kRows, keys);
}

inline void store_output(float* out, const float* in, float factor, int n) {
  for (int i = 0; i < n; ++i) out[i] = in[i] * factor;
}
inline void store_output(Half* out, const float* in, float factor, int n) {
  for (int i = 0; i < n; ++i) out[i] = in[i] * factor;
}
inline void store_output(uint16_t* out, const float* in, float factor, int n) {
  for (int i = 0; i < n; ++i) out[i] = c10::detail::round_to_nearest_even(in[i] * factor);
}

template <typename T>
void attend_unit(const Problem<T>& p, const Unit& unit, Scratch& scratch) {
  const int head_size = p.head_size;
  const int context = p.context_lens[unit.request], tree_len = p.tree_lens[unit.request];
  scratch.resize(head_size, tree_len);
  const auto token = [&](int row) { return p.query_start[unit.request] + (int64_t)(unit.first_row + row) / p.group; };
  const auto head = [&](int row) { return (int64_t)p.query_head(unit.kv_head, unit.first_row + row); };
  for (int row = 0; row < unit.num_rows; ++row) {
    const T* source = p.query + token(row) * p.query_stride + head(row) * p.query_head_stride;
    if constexpr (std::is_same_v<T, Half>)
      for (int d = 0; d < head_size; d += kLanes) store(scratch.query + row * head_size + d, widen(source + d));
    else
      std::memcpy(reinterpret_cast<T*>(scratch.query) + row * head_size, source, head_size * sizeof(T));
    scratch.maxima[row] = -1e30f; // finite, so that a chunk without visible keys does not change the row
    scratch.totals[row] = Vec{};
  }
  std::fill_n(scratch.accumulator, unit.num_rows * p.value_size, 0.0f);

  find_visible(p, unit, context, tree_len, scratch);
  transpose_tree(p, unit, tree_len, scratch);
  const bool tiles = in_tiles(p);
#ifdef SPECPLUG_TILES
  std::optional<TilesInUse> in_use;
  if (const int height = std::min(unit.num_rows, kMostRows); tiles) in_use.emplace(height, height);
#endif
  const auto [least, most] = std::minmax_element(scratch.end, scratch.end + num_queries(unit, p.group));
  const int first = std::max(p.first_seen(*least), 0), until = *most;
  for (int position = first / kChunk * kChunk; position < until; position += kChunk)
    attend_chunk(p, unit, position, std::min(context, until), tree_len, tiles, scratch);

  for (int row = 0; row < unit.num_rows; ++row) {
    float total = sum_lanes(scratch.totals[row])[0];
    if (p.sinks && total > 0.0f)
      total += std::exp2(p.sinks[head(row)] * kLog2E - scratch.maxima[row] * p.softmax_scale());
    store_output(p.output + token(row) * p.output_stride + head(row) * p.output_head_stride,
                 scratch.accumulator + row * p.value_size, total == 0.0f ? 0.0f : p.value_scale / total, p.value_size);
  }
}

// Returns the rows per unit: many, because each unit unpacks the pages again, but few enough to balance the threads.
int tile_rows(const std::vector<int>& request_rows, int num_kv_heads, int num_threads) {
  for (int tile = kMaxTileRows; tile > 2 * kRows; tile -= kRows) {
    int64_t units = 0, largest = 0, total = 0;
    for (int rows : request_rows) {
      const int tiles = (rows + tile - 1) / tile;
      units += (int64_t)tiles * num_kv_heads;
      total += (int64_t)rows * num_kv_heads;
      if (tiles) largest = std::max<int64_t>(largest, (rows + tiles - 1) / tiles);
    }
    if (!units) return tile;
    const int64_t units_per_thread = (units + num_threads - 1) / num_threads;
    if (units_per_thread * num_threads * largest <= total + total / 8 || units >= 8 * num_threads) return tile;
  }
  return 2 * kRows;
}

template <typename T>
void run(const Problem<T>& p, int num_reqs) {
  std::vector<int> request_rows(num_reqs);
  for (int r = 0; r < num_reqs; ++r) request_rows[r] = p.query_lens[r] * p.group;
  const int num_threads = at::get_num_threads();
  const int tile = tile_rows(request_rows, p.num_kv_heads, num_threads);
  std::vector<Unit> units;
  for (int r = 0; r < num_reqs; ++r) {
    if (!request_rows[r]) continue;
    const int tiles = (request_rows[r] + tile - 1) / tile;
    const int even = std::min(tile, round_up((request_rows[r] + tiles - 1) / tiles, kRows));
    for (int head = 0; head < p.num_kv_heads; ++head)
      for (int row = 0; row < request_rows[r]; row += even)
        units.push_back({r, head, row, std::min(even, request_rows[r] - row)});
  }
  std::atomic<size_t> next{0};
  at::parallel_for(0, std::min<int64_t>(num_threads, units.size()), 1, [&](int64_t, int64_t) {
    thread_local Scratch scratch;
    for (size_t u; (u = next++) < units.size();) attend_unit(p, units[u], scratch);
  });
}

template <typename T>
void dispatch(const at::Tensor& query, const at::Tensor& output, const at::Tensor& kv_cache, int64_t layout,
              const at::Tensor& block_table, const at::Tensor& context_lens, const at::Tensor& query_start,
              const at::Tensor& query_lens, const at::Tensor& tree_key, const at::Tensor& tree_value,
              const at::Tensor& tree_start, const at::Tensor& tree_lens, const at::Tensor& mask, double scale,
              double value_scale, int64_t window, double soft_cap, const std::optional<at::Tensor>& sinks,
              const std::optional<at::Tensor>& slopes, int64_t local, bool causal) {
  const auto data = [](const at::Tensor& t) { return static_cast<T*>(t.data_ptr()); };
  const auto ints = [](const at::Tensor& t) { return static_cast<const int32_t*>(t.data_ptr()); };
  Problem<T> p{};
  switch (kv_cache.scalar_type()) {
    case at::kFloat8_e4m3fn: p.bytes = static_cast<uint8_t*>(kv_cache.data_ptr()), p.fp8 = {7, 256.0f}; break;
    case at::kFloat8_e5m2: p.bytes = static_cast<uint8_t*>(kv_cache.data_ptr()), p.fp8 = {8, 1.0f}; break;
    default: p.cache = data(kv_cache);
  }
  p.page_stride = kv_cache.stride(0), p.head_stride = kv_cache.stride(1);
  p.num_kv_heads = kv_cache.size(1), p.block_size = kv_cache.size(2), p.head_size = query.size(2);
  p.value_size = output.size(2), p.group = query.size(1) / p.num_kv_heads;
  p.layout = static_cast<Layout>(layout);
  p.query = data(query), p.query_stride = query.stride(0), p.query_head_stride = query.stride(1);
  p.output = data(output), p.output_stride = output.stride(0), p.output_head_stride = output.stride(1);
  p.tree_key = data(tree_key), p.key_stride = tree_key.stride(0), p.key_head_stride = tree_key.stride(1);
  p.tree_value = data(tree_value), p.value_stride = tree_value.stride(0), p.value_head_stride = tree_value.stride(1);
  p.block_table = ints(block_table), p.table_stride = block_table.stride(0);
  p.context_lens = ints(context_lens), p.query_start = ints(query_start), p.query_lens = ints(query_lens);
  p.tree_start = ints(tree_start), p.tree_lens = ints(tree_lens);
  p.mask = static_cast<const uint8_t*>(mask.data_ptr());
  p.mask_request_stride = mask.stride(0), p.mask_row_stride = mask.stride(1);
  p.scale = scale, p.value_scale = value_scale, p.soft_cap = soft_cap, p.causal = causal;
  p.window = std::min<int64_t>(window, std::numeric_limits<int>::max());
  p.local = std::min<int64_t>(local, std::numeric_limits<int>::max());
  p.sinks = sinks ? static_cast<const float*>(sinks->data_ptr()) : nullptr;
  p.slopes = slopes ? static_cast<const float*>(slopes->data_ptr()) : nullptr;

  const int num_reqs = context_lens.size(0);
  const int64_t num_blocks = kv_cache.size(0), table_width = block_table.size(1);
  for (int r = 0; r < num_reqs; ++r) {
    TORCH_CHECK(p.query_lens[r] >= 0 && p.query_lens[r] <= (causal ? p.context_lens[r] : mask.size(1)) &&
                    p.query_start[r] >= 0 &&
                    p.query_start[r] + p.query_lens[r] <= std::min(query.size(0), output.size(0)),
                "tree_attention: request ", r, ": query rows out of range");
    TORCH_CHECK(p.tree_lens[r] >= 0 && p.tree_lens[r] <= mask.size(2) && p.tree_start[r] >= 0 &&
                    p.tree_start[r] + p.tree_lens[r] <= std::min(tree_key.size(0), tree_value.size(0)),
                "tree_attention: request ", r, ": tree rows out of range");
    const int64_t pages = ((int64_t)p.context_lens[r] + p.block_size - 1) / p.block_size;
    TORCH_CHECK(p.context_lens[r] >= 0 && pages <= table_width, "tree_attention: request ", r,
                ": context is longer than its block table");
    for (int64_t i = 0; i < pages; ++i)
      TORCH_CHECK((uint64_t)p.block_table[r * p.table_stride + i] < (uint64_t)num_blocks, "tree_attention: request ", r,
                  ": block id out of range");
  }
  run(p, num_reqs);
}

// Copies keys and values of tree rows to `kept`; of latents keys only.
void keep(const at::Tensor& kept, const at::Tensor& tree_key, const at::Tensor& tree_value) {
  const int64_t size = kept.element_size(), bytes = kept.size(3) * size;
  char* copy = static_cast<char*>(kept.data_ptr());
  std::vector<at::Tensor> parts{tree_key, tree_value};
  parts.resize(kept.size(0));
  for (const at::Tensor& t : parts)
    for (int64_t row = 0; row < t.size(0); ++row)
      for (int64_t head = 0; head < t.size(1); ++head, copy += bytes)
        std::memcpy(copy, static_cast<const char*>(t.data_ptr()) + (row * t.stride(0) + head * t.stride(1)) * size, bytes);
}

// Checks the tensors, and attends; `causal`: the queries are the context's last tokens, and there are no tree keys.
void attend(const at::Tensor& query, at::Tensor output, const at::Tensor& kv_cache, int64_t layout,
            const at::Tensor& block_table, const at::Tensor& context_lens, const at::Tensor& query_start,
            const at::Tensor& query_lens, const at::Tensor& tree_key, const at::Tensor& tree_value,
            const at::Tensor& tree_start, const at::Tensor& tree_lens, const at::Tensor& mask, double scale,
            double value_scale, const std::optional<at::Tensor>& kept, int64_t window, double soft_cap,
            const std::optional<at::Tensor>& sinks, const std::optional<at::Tensor>& slopes, int64_t local, bool causal) {
  const auto dtype = query.scalar_type(), stored = kv_cache.scalar_type();
  const bool is_fp8 = stored == at::kFloat8_e4m3fn || stored == at::kFloat8_e5m2;
  const bool amx = layout == int64_t(Layout::amx), latent = layout == int64_t(Layout::latent);
  const int64_t head_size = query.size(-1), value_size = output.size(-1);
  for (const at::Tensor& t : {query, output, tree_key, tree_value})
    TORCH_CHECK(t.dim() == 3 && t.stride(2) == 1, "tree_attention: query, output and tree rows must be [rows, heads, size]");
  TORCH_CHECK(output.scalar_type() == dtype && tree_key.scalar_type() == stored && tree_value.scalar_type() == stored &&
                  (stored == dtype || (is_fp8 && !latent)),
              "tree_attention: query and output must be of one dtype; tree rows and kv_cache of the same or of one fp8");
  TORCH_CHECK(tree_key.size(2) == head_size && tree_value.size(2) == value_size &&
                  (latent ? value_size <= head_size && value_size % kGroup == 0 : value_size == head_size),
              "tree_attention: query and tree keys must have one size, output and tree values another; these sizes are "
              "equal but in the latent layout");
  TORCH_CHECK(layout >= 0 && layout <= int64_t(Layout::latent), "tree_attention: there is no such layout");
  for (const at::Tensor& t : {context_lens, query_start, query_lens, tree_start, tree_lens})
    TORCH_CHECK(t.dim() == 1 && t.scalar_type() == at::kInt && t.is_contiguous() && t.size(0) == context_lens.size(0),
                "tree_attention: lengths and starts must be int32 [num_reqs]");
  const int64_t num_reqs = context_lens.size(0);
  const int64_t content = latent ? head_size : 2 * head_size;
  TORCH_CHECK(kv_cache.dim() == 4 && kv_cache.size(3) == content && kv_cache.stride(3) == 1 && kv_cache.stride(2) == content,
              "tree_attention: kv_cache must be [num_blocks, num_kv_heads, block_size, 2 * head_size]; latents have one "
              "head_size");
  TORCH_CHECK(head_size % kGroup == 0 && kv_cache.size(2) % kGroup == 0,
              "tree_attention: head and block sizes must be multiples of 16");
  TORCH_CHECK(query.size(1) % kv_cache.size(1) == 0 && output.size(1) == query.size(1) &&
                  tree_key.size(1) == kv_cache.size(1) && tree_value.size(1) == kv_cache.size(1),
              "tree_attention: head counts do not match");
  TORCH_CHECK(block_table.dim() == 2 && block_table.scalar_type() == at::kInt && block_table.stride(1) == 1 &&
                  block_table.size(0) >= num_reqs,
              "tree_attention: block_table must be int32 [num_reqs, max_blocks]");
  TORCH_CHECK(mask.dim() == 3 && mask.scalar_type() == at::kBool && mask.size(0) >= num_reqs &&
                  (mask.stride(2) == 1 || mask.size(2) <= 1),
              "tree_attention: mask must be bool [num_reqs, max_query_len, max_tree_len]");
  TORCH_CHECK(!kept || (kept->dim() == 4 && kept->is_contiguous() && kept->scalar_type() == stored &&
                        kept->size(0) == (latent ? 1 : 2) && kept->size(1) == tree_key.size(0) &&
                        kept->size(1) == tree_value.size(0) && kept->size(2) == tree_key.size(1) &&
                        kept->size(3) == head_size),
              "tree_attention: kept must be [2, num_tree_rows, num_kv_heads, head_size], kv_cache's dtype; [1, ...] of latents");
  for (const auto& t : {sinks, slopes})
    TORCH_CHECK(!t || (t->dim() == 1 && t->scalar_type() == at::kFloat && t->is_contiguous() &&
                       t->size(0) == query.size(1)),
                "tree_attention: sinks and slopes must be float32 [num_heads]");
  TORCH_CHECK(window >= 0 && soft_cap >= 0 && local >= 0 && !(window && local),
              "tree_attention: window, soft cap and local must not be negative; only one of window and local is given");
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf,
              "tree_attention: dtype must be float32, bfloat16 or float16");
  TORCH_CHECK(!amx || dtype == at::kBFloat16, "tree_attention: the amx layout is bfloat16");
  const at::Tensor key = tree_key.to(dtype), value = tree_value.to(dtype); // themselves, or exactly these numbers
  const auto run_as = [&](auto element) {
    dispatch<decltype(element)>(query, output, kv_cache, layout, block_table, context_lens, query_start, query_lens, key,
                                value, tree_start, tree_lens, mask, scale, value_scale, window, soft_cap, sinks, slopes,
                                local, causal);
  };
  if (dtype == at::kFloat)
    run_as(float{});
  else if (dtype == at::kHalf)
    run_as(Half{});
  else
    run_as(uint16_t{});
  if (kept) keep(*kept, tree_key, tree_value);
}

} // namespace

void specplug::causal_attention(const at::Tensor& query, at::Tensor output, const at::Tensor& kv_cache, int64_t layout,
                                const at::Tensor& block_table, const at::Tensor& seq_lens,
                                const at::Tensor& query_start, const at::Tensor& query_lens, double scale,
                                double value_scale, int64_t window, double soft_cap, const std::optional<at::Tensor>& sinks,
                                const std::optional<at::Tensor>& slopes, int64_t local) {
  const at::Tensor no_keys = kv_cache.new_empty({0, kv_cache.size(1), query.size(-1)});
  const at::Tensor no_values = kv_cache.new_empty({0, kv_cache.size(1), output.size(-1)});
  const at::Tensor none = seq_lens.new_zeros({seq_lens.size(0)});
  const at::Tensor mask = query.new_empty({seq_lens.size(0), 0, 0}, at::kBool);
  attend(query, output, kv_cache, layout, block_table, seq_lens, query_start, query_lens, no_keys, no_values, none, none,
         mask, scale, value_scale, std::nullopt, window, soft_cap, sinks, slopes, local, true);
}

void specplug::tree_attention(const at::Tensor& query, at::Tensor output, const at::Tensor& kv_cache, int64_t layout,
                              const at::Tensor& block_table, const at::Tensor& context_lens,
                              const at::Tensor& query_start, const at::Tensor& query_lens, const at::Tensor& tree_key,
                              const at::Tensor& tree_value, const at::Tensor& tree_start, const at::Tensor& tree_lens,
                              const at::Tensor& mask, double scale, double value_scale,
                              const std::optional<at::Tensor>& kept, int64_t window, double soft_cap,
                              const std::optional<at::Tensor>& sinks, const std::optional<at::Tensor>& slopes, int64_t local) {
  attend(query, output, kv_cache, layout, block_table, context_lens, query_start, query_lens, tree_key, tree_value, tree_start,
         tree_lens, mask, scale, value_scale, kept, window, soft_cap, sinks, slopes, local, false);
}

namespace {

// Writes rows[i] of one layer's keys and values, each [num_rows][num_kv_heads][head_size], to slot slots[i].
template <typename T>
void write_layer(const T* keys, const T* values, const at::Tensor& kv_cache, bool amx, const int64_t* rows,
                 const int64_t* slots, int64_t count) {
  const int64_t num_kv_heads = kv_cache.size(1), block_size = kv_cache.size(2), head_size = kv_cache.size(3) / 2;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t offset = slots[i] % block_size;
    for (int64_t head = 0; head < num_kv_heads; ++head) {
      const T* key = keys + (rows[i] * num_kv_heads + head) * head_size;
      const T* value = values + (rows[i] * num_kv_heads + head) * head_size;
      T* page_key = static_cast<T*>(kv_cache.data_ptr()) + slots[i] / block_size * kv_cache.stride(0) +
                    head * kv_cache.stride(1);
      T* page_value = page_key + block_size * head_size;
      if (amx) {
        for (int64_t d = 0; d < head_size; ++d) {
          page_key[offset / 16 * 16 * head_size + d / 2 * 32 + offset % 16 * 2 + d % 2] = key[d];
          page_value[d / 16 * 16 * block_size + offset / 2 * 32 + d % 16 * 2 + offset % 2] = value[d];
        }
      } else {
        for (int64_t d = 0; d < head_size; ++d) page_key[d * block_size + offset] = key[d];
        std::memcpy(page_value + offset * head_size, value, head_size * sizeof(T));
      }
    }
  }
}

// Writes rows[i] of one layer's latents, each [num_rows][head_size], to slot slots[i].
template <typename T>
void write_latents(const T* latents, const at::Tensor& kv_cache, const int64_t* rows, const int64_t* slots, int64_t count) {
  const int64_t block_size = kv_cache.size(2), head_size = kv_cache.size(3);
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(static_cast<T*>(kv_cache.data_ptr()) + slots[i] / block_size * kv_cache.stride(0) + slots[i] % block_size * head_size,
                latents + rows[i] * head_size, head_size * sizeof(T));
}

template <typename T>
void write_layers(const at::Tensor& kept, at::TensorList kv_caches, Layout layout, const at::Tensor& rows,
                  const at::Tensor& slots) {
  const auto ints = [](const at::Tensor& t) { return static_cast<const int64_t*>(t.data_ptr()); };
  const T* data = static_cast<const T*>(kept.data_ptr());
  at::parallel_for(0, kv_caches.size(), 1, [&](int64_t first, int64_t last) {
    for (int64_t layer = first; layer < last; ++layer) {
      const T* keys = data + layer * kept.stride(0);
      if (layout == Layout::latent)
        write_latents(keys, kv_caches[layer], ints(rows), ints(slots), rows.numel());
      else
        write_layer(keys, keys + kept.stride(1), kv_caches[layer], layout == Layout::amx, ints(rows), ints(slots), rows.numel());
    }
  });
}

} // namespace

void specplug::write_rows(const at::Tensor& kept, at::TensorList kv_caches, int64_t layout, const at::Tensor& rows,
                const at::Tensor& slots) {
  const auto dtype = kept.scalar_type();
  const bool amx = layout == int64_t(Layout::amx);
  const int64_t parts = layout == int64_t(Layout::latent) ? 1 : 2;
  TORCH_CHECK(kept.dim() == 5 && kept.is_contiguous() && kept.size(0) == (int64_t)kv_caches.size() && kept.size(1) == parts,
              "write_rows: kept must be [num_layers, 2, num_rows, num_kv_heads, head_size]; [num_layers, 1, ...] of latents");
  TORCH_CHECK(dtype == at::kBFloat16 || dtype == at::kByte || ((dtype == at::kFloat || dtype == at::kHalf) && !amx),
              "write_rows: dtype must be float32, bfloat16, float16 or uint8 (fp8), with the amx layout bfloat16 or uint8");
  for (const at::Tensor& t : {rows, slots})
    TORCH_CHECK(t.dim() == 1 && t.scalar_type() == at::kLong && t.is_contiguous() && t.numel() == rows.numel(),
                "write_rows: rows and slots must be int64, one each");
  const auto* row = static_cast<const int64_t*>(rows.data_ptr());
  const auto* slot = static_cast<const int64_t*>(slots.data_ptr());
  for (const at::Tensor& cache : kv_caches) {
    TORCH_CHECK(cache.dim() == 4 && cache.scalar_type() == dtype && cache.stride(3) == 1 &&
                    cache.stride(2) == cache.size(3) && cache.size(1) == kept.size(3) &&
                    cache.size(3) == parts * kept.size(4),
                "write_rows: kv_caches must be [num_blocks, num_kv_heads, block_size, 2 * head_size], as kept is");
    const int64_t num_slots = cache.size(0) * cache.size(2);
    for (int64_t i = 0; i < rows.numel(); ++i)
      TORCH_CHECK(row[i] >= 0 && row[i] < kept.size(2) && slot[i] >= 0 && slot[i] < num_slots, "write_rows: row ",
                  row[i], " or slot ", slot[i], " out of range");
  }
  if (dtype == at::kFloat)
    write_layers<float>(kept, kv_caches, static_cast<Layout>(layout), rows, slots);
  else if (dtype == at::kByte)
    write_layers<uint8_t>(kept, kv_caches, static_cast<Layout>(layout), rows, slots);
  else
    write_layers<uint16_t>(kept, kv_caches, static_cast<Layout>(layout), rows, slots);
}
