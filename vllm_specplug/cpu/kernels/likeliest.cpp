// The likeliest tokens of each row of logits, with their log probabilities, in two passes over the logits: the largest
// values with the sum's offset, then the sum of the exponentials.  likeliest.py documents the arguments.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

#include "operators.h"
#include "vectors.h"

namespace {

constexpr int kVectors = 4;               // vectors of a block
constexpr int kBlock = kVectors * kLanes; // values that are compared at once
constexpr float kLowest = -std::numeric_limits<float>::infinity();

// The largest values so far and their columns, best first; of equal ones the lower column.
class Best {
 public:
  Best(float* values, int64_t* columns, int64_t count) : values_(values), columns_(columns), count_(count) {
    std::fill(values_, values_ + count_, kLowest);
  }
  // What a value must exceed to enter; nothing is below -inf, which enters while there is room.
  float last() const { return filled_ < count_ ? kLowest : values_[count_ - 1]; }
  bool has_room() const { return filled_ < count_; }
  void offer(float value, int64_t column) {
    if (!has_room() && !(value > last())) return;
    filled_ = std::min(filled_ + 1, count_);
    int64_t slot = filled_ - 1;
    for (; slot > 0 && values_[slot - 1] < value; --slot) {
      values_[slot] = values_[slot - 1];
      columns_[slot] = columns_[slot - 1];
    }
    values_[slot] = value;
    columns_[slot] = column;
  }

 private:
  float* values_;
  int64_t* columns_;
  int64_t count_, filled_ = 0;
};

// Offers the values of a part of a row; returns whether one of them is NaN.
template <typename T>
bool offer_part(const T* row, int64_t size, int64_t first_column, Best& best) {
  bool has_nan = false;
  int64_t i = 0;
  for (; i + kBlock <= size; i += kBlock) {
    const Vec last = splat(best.last());
    VecInt hits{};
    for (int v = 0; v < kVectors; ++v) hits |= ~(widen(row + i + v * kLanes) <= last); // NaN is a hit
    if (!best.has_room()) {
      int32_t any = 0;
      for (int lane = 0; lane < kLanes; ++lane) any |= hits[lane];
      if (!any) continue;
    }
    for (int64_t j = i; j < i + kBlock; ++j) {
      const float value = to_float(row[j]);
      has_nan |= std::isnan(value);
      best.offer(value, first_column + j);
    }
  }
  for (; i < size; ++i) {
    const float value = to_float(row[i]);
    has_nan |= std::isnan(value);
    best.offer(value, first_column + i);
  }
  return has_nan;
}

// Sums exp(value - maximum) over a part of a row.
template <typename T>
float sum_part(const T* row, int64_t size, float maximum) {
  Vec sums[kVectors] = {};
  const Vec offset = splat(maximum), scale = splat(kLog2E);
  int64_t i = 0;
  for (; i + kBlock <= size; i += kBlock)
    for (int v = 0; v < kVectors; ++v) sums[v] += exp2((widen(row + i + v * kLanes) - offset) * scale);
  float sum = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]))[0];
  for (; i < size; ++i) sum += std::exp(to_float(row[i]) - maximum);
  return sum;
}

template <typename T>
void likeliest_rows(const at::Tensor& logits, const std::optional<at::Tensor>& extra, int64_t top_k, int64_t* columns,
                    float* log_probs) {
  const int64_t width = logits.size(1), more = extra ? extra->size(1) : 0;
  const T* values = static_cast<const T*>(logits.const_data_ptr());
  const T* extra_values = extra ? static_cast<const T*>(extra->const_data_ptr()) : nullptr;
  at::parallel_for(0, logits.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* main_part = values + row * logits.stride(0);
      const T* extra_part = more ? extra_values + row * extra->stride(0) : nullptr;
      float* found = log_probs + row * top_k;
      Best best(found, columns + row * top_k, top_k);
      bool has_nan = offer_part(main_part, width, 0, best);
      if (more) has_nan |= offer_part(extra_part, more, width, best);
      const float maximum = found[0];
      if (has_nan || !std::isfinite(maximum)) { // as log_softmax
        std::fill(found, found + top_k, std::numeric_limits<float>::quiet_NaN());
        for (int64_t i = 0; i < top_k; ++i) columns[row * top_k + i] = i;
        continue;
      }
      float sum = sum_part(main_part, width, maximum);
      if (more) sum += sum_part(extra_part, more, maximum);
      const float log_sum = std::log(sum);
      for (int64_t i = 0; i < top_k; ++i) found[i] = found[i] - maximum - log_sum;
    }
  });
}

} // namespace

std::tuple<at::Tensor, at::Tensor> specplug::likeliest(const at::Tensor& logits_, int64_t top_k,
                                             const std::optional<at::Tensor>& draft_ids,
                                             const std::optional<at::Tensor>& extra_) {
  TORCH_CHECK(logits_.dim() == 2, "likeliest: logits must be [num_rows, draft_vocab]");
  const at::Tensor logits = logits_.stride(1) == 1 ? logits_ : logits_.contiguous();
  std::optional<at::Tensor> extra;
  if (extra_) {
    TORCH_CHECK(extra_->dim() == 2 && extra_->size(0) == logits.size(0) && extra_->scalar_type() == logits.scalar_type(),
                "likeliest: extra must have the rows and the type of logits");
    extra = extra_->stride(1) == 1 ? *extra_ : extra_->contiguous();
  }
  const int64_t width = logits.size(1) + (extra ? extra->size(1) : 0);
  TORCH_CHECK(top_k > 0 && top_k <= width, "likeliest: top_k must be between 1 and ", width);
  at::Tensor ids;
  if (draft_ids) {
    ids = draft_ids->contiguous();
    TORCH_CHECK(ids.scalar_type() == at::kLong && ids.numel() == width,
                "likeliest: draft_ids must be int64 [", width, "]");
  }
  const at::Tensor columns = logits.new_empty({logits.size(0), top_k}, at::kLong);
  const at::Tensor log_probs = logits.new_empty({logits.size(0), top_k}, at::kFloat);
  int64_t* found = columns.mutable_data_ptr<int64_t>();
  float* values = log_probs.mutable_data_ptr<float>();
  switch (logits.scalar_type()) {
    case at::kFloat: likeliest_rows<float>(logits, extra, top_k, found, values); break;
    case at::kBFloat16: likeliest_rows<uint16_t>(logits, extra, top_k, found, values); break;
    case at::kHalf: likeliest_rows<Half>(logits, extra, top_k, found, values); break;
    default: TORCH_CHECK(false, "likeliest: logits must be float32, bfloat16 or float16");
  }
  if (draft_ids) {
    const int64_t* id_of = ids.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < columns.numel(); ++i) found[i] = id_of[found[i]];
  }
  return {columns, log_probs};
}
