// Greedy decoding directly from float32, bfloat16 or float16 logits.  vLLM first converts all logits to float32, in memory that
// it maps anew at every step.  As in torch.argmax, the first of equal values counts, -0 equals 0, NaN is the largest.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "operators.h"

namespace {

constexpr int64_t kBlock = 2048; // values per maximum
constexpr int64_t kPadding = -1;
#ifdef __AVX512F__
constexpr int kVectorBytes = 64;
#else
constexpr int kVectorBytes = 32;
#endif

// Bits of floating-point numbers as integers.
template <typename Integer, Integer infinity_bits>
struct Format {
  using Int = Integer;
  typedef Int Vector __attribute__((vector_size(kVectorBytes)));
  static constexpr Int infinity = infinity_bits;
};
using Float32 = Format<int32_t, 0x7f800000>;
using BFloat16 = Format<int16_t, 0x7f80>;
using Float16 = Format<int16_t, 0x7c00>;

// Maps the bits of floats to integers in the same order; for one value or a vector.
template <typename F, typename V>
inline V order(V bits) {
  using Int = typename F::Int;
  constexpr Int largest = std::numeric_limits<Int>::max();
  const V sign = bits >> (8 * sizeof(Int) - 1); // 0 or -1
  const V magnitude = bits & largest;
  const V value = (magnitude ^ sign) - sign, nan = V{} + largest;
  return magnitude > F::infinity ? nan : value;
}

template <typename F>
typename F::Int largest_of(const typename F::Int* values, int64_t size) {
  using Int = typename F::Int;
  using V = typename F::Vector;
  constexpr int64_t lanes = sizeof(V) / sizeof(Int);
  Int maximum = std::numeric_limits<Int>::min();
  int64_t i = 0;
  if (size >= lanes) {
    V maxima = V{} + maximum;
    for (; i + lanes <= size; i += lanes) {
      V bits;
      std::memcpy(&bits, values + i, sizeof(V));
      const V here = order<F>(bits);
      maxima = here > maxima ? here : maxima;
    }
    for (int64_t lane = 0; lane < lanes; ++lane) maximum = std::max<Int>(maximum, maxima[lane]);
  }
  for (; i < size; ++i) maximum = std::max<Int>(maximum, order<F>(values[i]));
  return maximum;
}

template <typename F>
int64_t first_largest(const void* data, int64_t offset, int64_t size) {
  using Int = typename F::Int;
  const Int* row = static_cast<const Int*>(data) + offset;
  Int maximum = std::numeric_limits<Int>::min();
  int64_t found = 0;
  for (int64_t begin = 0; begin < size; begin += kBlock) {
    const Int here = largest_of<F>(row + begin, std::min(size - begin, kBlock));
    if (here > maximum) {
      maximum = here;
      found = begin;
    }
  }
  while (order<F>(row[found]) != maximum) ++found;
  return found;
}

// The first largest values of the rows of logits.
class Rows {
 public:
  Rows(const at::Tensor& logits, const char* name) : logits_(logits.stride(-1) == 1 ? logits : logits.contiguous()) {
    TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0, name, ": logits must be [num_rows, vocab_size]");
    const auto dtype = logits.scalar_type();
    TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, name,
                ": logits must be float32, bfloat16 or float16");
  }
  int64_t count() const { return logits_.size(0); }
  int64_t token(int64_t row) const {
    TORCH_CHECK_INDEX(row >= 0 && row < count(), "greedy decoding: there are no logits for row ", row);
    const int64_t offset = row * logits_.stride(0), size = logits_.size(1);
    const void* data = logits_.const_data_ptr();
    if (logits_.scalar_type() == at::kFloat) return first_largest<Float32>(data, offset, size);
    if (logits_.scalar_type() == at::kHalf) return first_largest<Float16>(data, offset, size);
    return first_largest<BFloat16>(data, offset, size);
  }

 private:
  at::Tensor logits_;
};

} // namespace

at::Tensor specplug::greedy_tokens(const at::Tensor& logits) {
  const Rows rows(logits, "greedy_tokens");
  const at::Tensor result = logits.new_empty({rows.count(), 1}, at::kInt);
  int32_t* tokens = result.mutable_data_ptr<int32_t>();
  at::parallel_for(0, rows.count(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) tokens[row] = static_cast<int32_t>(rows.token(row));
  });
  return result;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> specplug::greedy_walk(const at::Tensor& logits, const at::Tensor& token_ids,
                                                           const at::Tensor& parents, const at::Tensor& first_rows,
                                                           const at::Tensor& active, int64_t max_emitted) {
  const Rows rows(logits, "greedy_walk");
  const int64_t num_reqs = token_ids.size(0), width = token_ids.size(1);
  for (const at::Tensor& t : {token_ids, parents, first_rows})
    TORCH_CHECK(t.scalar_type() == at::kLong && t.is_contiguous(), "greedy_walk: trees must be contiguous and int64");
  TORCH_CHECK(active.scalar_type() == at::kBool && active.is_contiguous(), "greedy_walk: active must be bool");
  TORCH_CHECK(parents.sizes() == token_ids.sizes() && first_rows.numel() == num_reqs && active.numel() == num_reqs,
              "greedy_walk: the shapes of the trees differ");
  const int64_t *tokens = token_ids.const_data_ptr<int64_t>(), *above = parents.const_data_ptr<int64_t>();
  const int64_t* first = first_rows.const_data_ptr<int64_t>();
  const bool* walks = active.const_data_ptr<bool>();

  std::vector<std::vector<std::pair<int64_t, int64_t>>> paths(num_reqs); // (row, token)
  at::parallel_for(0, num_reqs, 1, [&](int64_t begin, int64_t end) {
    for (int64_t request = begin; request < end; ++request) {
      const int64_t *token_of = tokens + request * width, *parent_of = above + request * width;
      auto& path = paths[request];
      for (int64_t row = walks[request] ? 0 : width; row < width && (int64_t)path.size() < max_emitted;) {
        const int64_t token = rows.token(first[request] + row), parent = row;
        path.emplace_back(row, token);
        for (++row; row < width && !(parent_of[row] == parent && token_of[row] == token); ++row) {
        }
      }
    }
  });

  int64_t depth = 1;
  for (const auto& path : paths) depth = std::max<int64_t>(depth, path.size());
  const at::Tensor output = token_ids.new_full({num_reqs, depth}, kPadding, at::kInt);
  const at::Tensor path_rows = token_ids.new_full({num_reqs, depth}, kPadding);
  const at::Tensor num_emitted = token_ids.new_empty({num_reqs});
  for (int64_t request = 0; request < num_reqs; ++request) {
    int32_t* output_of = output.mutable_data_ptr<int32_t>() + request * depth;
    int64_t* rows_of = path_rows.mutable_data_ptr<int64_t>() + request * depth;
    rows_of[0] = 0; // the root, also for requests that emit nothing
    int64_t index = 0;
    for (const auto& [row, token] : paths[request]) {
      output_of[index] = static_cast<int32_t>(token);
      rows_of[index++] = row;
    }
    num_emitted.mutable_data_ptr<int64_t>()[request] = index;
  }
  return {output, path_rows, num_emitted};
}
