// Logits of a few further tokens, beside those of a draft vocabulary.  extra_logits.py documents the arguments.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "operators.h"
#include "types.h"
#include "vectors.h"

namespace {

constexpr int kTile = 4; // rows of hidden states that share what is read of a token

template <typename T>
void multiply(const at::Tensor& hidden, const at::Tensor& rows, const at::Tensor& logits, const bool* hides,
                  int64_t width) {
  const T *from = data<T>(hidden), *tokens = data<T>(rows);
  const int64_t num_rows = hidden.size(0), count = rows.size(0), size = hidden.size(1);
  const int64_t whole = size / kLanes * kLanes, num_tiles = (num_rows + kTile - 1) / kTile;
  std::vector<float> widened(num_tiles * kTile * size); // the last tile is filled up with zeros
  for (int64_t i = 0; i < num_rows * size; ++i) widened[i] = to_float(from[i]);
  at::parallel_for(0, count, 64, [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      const T* token = tokens + j * size;
      for (int64_t first = 0; first < num_rows; first += kTile) {
        const float* tile = widened.data() + first * size;
        Vec sums[kTile]{};
        for (int64_t k = 0; k < whole; k += kLanes) {
          const Vec weight = widen(token + k);
          for (int t = 0; t < kTile; ++t) sums[t] = accumulate(sums[t], widen(tile + t * size + k), weight);
        }
        for (int64_t row = first; row < std::min(first + kTile, num_rows); ++row) {
          float sum = sum_lanes(sums[row - first])[0];
          for (int64_t k = whole; k < size; ++k) sum += widened[row * size + k] * to_float(token[k]);
          if (hides && hides[row / width * count + j]) sum = -std::numeric_limits<float>::infinity();
          data<T>(logits)[row * count + j] = from_float<T>(sum);
        }
      }
    }
  });
}

} // namespace

at::Tensor specplug::extra_logits(const at::Tensor& hidden, const at::Tensor& rows, const std::optional<at::Tensor>& other_requests) {
  TORCH_CHECK(hidden.dim() == 2 && rows.dim() == 2 && hidden.size(1) == rows.size(1) &&
                  hidden.scalar_type() == rows.scalar_type(),
              "extra_logits: hidden and rows must be [*, hidden_size], of one type");
  const at::Tensor from = hidden.contiguous(), tokens = rows.contiguous();
  at::Tensor others;
  int64_t width = 1;
  if (other_requests) {
    others = other_requests->contiguous();
    TORCH_CHECK(others.scalar_type() == at::kBool && others.dim() == 2 && others.size(0) > 0 &&
                    others.size(1) == rows.size(0) && hidden.size(0) % others.size(0) == 0,
                "extra_logits: other_requests must be bool [num_reqs, num_extra], and each request have as many rows");
    width = std::max<int64_t>(hidden.size(0) / others.size(0), 1);
  }
  const bool* hides = other_requests ? others.const_data_ptr<bool>() : nullptr;
  const at::Tensor logits = hidden.new_empty({hidden.size(0), rows.size(0)});
  with_type(hidden.scalar_type(), [&](auto type) { multiply<decltype(type)>(from, tokens, logits, hides, width); });
  return logits;
}
