// The draft phase of an EAGLE head of one layer on a CPU: its first forward, over the accepted rows, those of the levels, and
// the growth of trees between them.  draft_layer.py documents them.  The reference of the forwards is vLLM's model of the
// head, that of the growth grow_tree in proposers/eagle2/drafting.py.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "draft_growth.h"
#include "operators.h"
#include "types.h"
#include "vectors.h"

namespace {

at::Tensor ints(int64_t count) { return at::empty({count}, at::TensorOptions(at::kInt)); }

// A linear layer: by row_linear, or in 8 bits.
struct DraftLinear : torch::CustomClassHolder {
  DraftLinear(at::Tensor weight, std::optional<at::Tensor> codes, std::optional<at::Tensor> bias, int64_t outputs,
              std::optional<at::Tensor> scales)
      : weight_(std::move(weight)),
        codes_(std::move(codes)),
        bias_(std::move(bias)),
        scales_(std::move(scales)),
        outputs_(outputs) {}

  at::Tensor operator()(const at::Tensor& x) const {
    if (scales_) return specplug::byte_linear(x, weight_, *scales_, bias_, outputs_);
    return specplug::row_linear(x, weight_, codes_, bias_, outputs_, std::nullopt, 0);
  }

 private:
  at::Tensor weight_;
  std::optional<at::Tensor> codes_, bias_, scales_;
  int64_t outputs_;
};

using Linear = c10::intrusive_ptr<DraftLinear>;

// x [n][size] times the factor that makes its mean square 1, and times `weight`.
template <typename T>
at::Tensor normalised(const at::Tensor& x, const at::Tensor& weight, float epsilon) {
  const at::Tensor result = at::empty(x.sizes(), x.options());
  const int64_t size = x.size(1);
  for (int64_t row = 0; row < x.size(0); ++row) {
    const T* from = data<T>(x) + row * size;
    float squares = 0;
    for (int64_t i = 0; i < size; ++i) squares += to_float(from[i]) * to_float(from[i]);
    const float factor = 1 / std::sqrt(squares / size + epsilon);
    for (int64_t i = 0; i < size; ++i)
      data<T>(result)[row * size + i] =
          from_float<T>(to_float(from_float<T>(to_float(from[i]) * factor)) * to_float(data<T>(weight)[i]));
  }
  return result;
}

template <typename T>
void add(const at::Tensor& to, const at::Tensor& x) {
  for (int64_t i = 0; i < to.numel(); ++i)
    data<T>(to)[i] = from_float<T>(to_float(data<T>(to)[i]) + to_float(data<T>(x)[i]));
}

// silu(gate) * up of x [n][gate, up].
template <typename T>
at::Tensor gated(const at::Tensor& x) {
  const int64_t size = x.size(1) / 2;
  const at::Tensor result = at::empty({x.size(0), size}, x.options());
  for (int64_t row = 0; row < x.size(0); ++row) {
    const T *gates = data<T>(x) + row * 2 * size, *ups = gates + size;
    for (int64_t k = 0; k < size; k += kLanes) {
      const Vec gate = widen(gates + k), zero{}, power = exp2(-max(gate, -gate) * kLog2E);
      const Vec values = gate * select(gate >= zero, splat(1.0f), power) / (power + 1.0f) * widen(ups + k);
      for (int lane = 0; lane < kLanes; ++lane) data<T>(result)[row * size + k + lane] = from_float<T>(values[lane]);
    }
  }
  return result;
}

struct DraftLayer : torch::CustomClassHolder {
  DraftLayer(at::Tensor embedding, at::Tensor cos_sin, at::Tensor norm, double epsilon, double scale, int64_t num_heads,
             Linear fc, Linear qkv, Linear o, Linear gate_up, Linear down, int64_t max_position)
      : embedding_(std::move(embedding)),
        cos_sin_(std::move(cos_sin)),
        norm_(std::move(norm)),
        epsilon_(epsilon),
        scale_(scale),
        num_heads_(num_heads),
        max_position_(max_position),
        fc_(std::move(fc)),
        qkv_(std::move(qkv)),
        o_(std::move(o)),
        gate_up_(std::move(gate_up)),
        down_(std::move(down)) {}

  at::Tensor first(const at::Tensor& token_ids, const at::Tensor& starts, const at::Tensor& counts,
                   const at::Tensor& hidden_states, const std::optional<at::Tensor>& rows, const at::Tensor& kv_cache,
                   bool amx, const at::Tensor& block_table) {
    const int64_t num_reqs = counts.numel();
    const int64_t *start = starts.const_data_ptr<int64_t>(), *count = counts.const_data_ptr<int64_t>();
    TORCH_CHECK(token_ids.scalar_type() == at::kInt && token_ids.stride(1) == 1 && token_ids.size(0) >= num_reqs &&
                    block_table.scalar_type() == at::kInt && block_table.size(0) >= num_reqs && starts.numel() == num_reqs,
                "draft_layer: token_ids and block_table must be int32, a row for each request");
    int64_t num_rows = 0;
    for (int64_t r = 0; r < num_reqs; ++r) {
      TORCH_CHECK(count[r] > 0 && start[r] >= 0 && start[r] + count[r] < token_ids.size(1) &&
                      start[r] + count[r] - 1 <= max_position_ &&
                      (start[r] + count[r] - 1) / kv_cache.size(2) < block_table.size(1),
                  "draft_layer: request ", r, ": rows out of range");
      num_rows += count[r];
    }
    TORCH_CHECK((rows ? rows->numel() : hidden_states.size(0)) >= num_rows, "draft_layer: too few hidden states");
    const at::Tensor ids = at::empty({num_rows}, at::kLong), positions = at::empty({num_rows}, at::kLong);
    const at::Tensor slots = at::empty({num_rows}, at::kLong), last = at::empty({num_reqs}, at::kLong);
    block_table_ = block_table, kv_cache_ = kv_cache, amx_ = amx;
    context_lens_ = ints(num_reqs);
    positions_ = at::empty({num_reqs}, at::kLong);
    int64_t row = 0;
    for (int64_t r = 0; r < num_reqs; ++r) {
      for (int64_t position = start[r]; position < start[r] + count[r]; ++position, ++row) {
        data<int64_t>(ids)[row] = data<int32_t>(token_ids)[r * token_ids.stride(0) + position + 1];
        data<int64_t>(positions)[row] = position;
        const int64_t block = data<int32_t>(block_table)[r * block_table.stride(0) + position / kv_cache.size(2)];
        data<int64_t>(slots)[row] = block * kv_cache.size(2) + position % kv_cache.size(2);
      }
      data<int64_t>(last)[r] = row - 1;
      data<int64_t>(positions_)[r] = start[r] + count[r] - 1;
      data<int32_t>(context_lens_)[r] = start[r] + count[r];
    }
    at::Tensor result;
    with_type(embedding_.scalar_type(), [&](auto type) {
      using T = decltype(type);
      const at::Tensor inputs = joined<T>(ids, hidden_states, rows ? rows->const_data_ptr<int64_t>() : nullptr);
      const at::Tensor residual = (*fc_)(inputs), projected = (*qkv_)(residual);
      rotate<T>(projected, positions);
      write<T>(projected, slots);
      const at::Tensor query_start = ints(num_reqs), one = ints(num_reqs), none = ints(num_reqs);
      for (int64_t r = 0; r < num_reqs; ++r) {
        data<int32_t>(query_start)[r] = r;
        data<int32_t>(one)[r] = 1;
        data<int32_t>(none)[r] = 0;
      }
      const at::Tensor mask = at::empty({num_reqs, 1, 0}, at::kBool), chosen = projected.index_select(0, last);
      const at::Tensor key = heads(chosen, 1);
      const at::Tensor attended = at::empty({num_reqs, num_heads_, head_size()}, projected.options());
      specplug::tree_attention(heads(chosen, 0), attended, kv_cache_, amx_, block_table_, context_lens_, query_start, one,
                               key, key, none, none, mask, scale_, 1.0, std::nullopt, 0, 0, std::nullopt, std::nullopt);
      result = finish<T>(residual.index_select(0, last), attended);
    });
    return result;
  }

  at::Tensor level(int64_t number, const at::Tensor& token_ids, const at::Tensor& features, const at::Tensor& mask,
                   int64_t capacity) {
    return level_of_rows(number, token_ids, features.flatten(0, 1), nullptr, mask, capacity);
  }

  // Returns the trees with their values, and of each level behind the first one the sum of the values of its beam, and the seconds.
  std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, std::vector<double>, std::vector<double>> grow(
      const at::Tensor& root_token_ids, const at::Tensor& root, const Linear& head, const std::optional<at::Tensor>& ids,
      const std::optional<at::Tensor>& extra_rows, const std::optional<at::Tensor>& other_requests, int64_t num_nodes,
      int64_t top_k, const std::vector<double>& level_floors, double min_log_value, int64_t capacity) {
    const int64_t num_reqs = root_token_ids.numel();
    TORCH_CHECK(root_token_ids.scalar_type() == at::kLong && root.size(0) == num_reqs && num_reqs > 0,
                "draft_layer: root_token_ids must be int64, with a row of features for each");
    const int64_t max_levels = level_floors.size() + 1;
    const specplug::DraftPool pool(num_reqs, top_k + (max_levels - 1) * top_k * top_k);
    specplug::Beam beam;
    std::vector<double> beams, seconds;
    at::Tensor features = root;
    int64_t size = 0;
    for (int64_t number = 0;; ++number) {
      const auto begin = std::chrono::steady_clock::now();
      if (number > 0) features = next_level(number - 1, beam, features, capacity);
      std::optional<at::Tensor> extra, read, mask;
      if (extra_rows) extra = specplug::extra_logits(features, *extra_rows, other_requests);
      const auto [token_ids, log_probs] = specplug::likeliest((*head)(features), top_k, ids, extra);
      if (number > 0) read = std::get<0>(beam), mask = std::get<4>(beam);
      beam = specplug::grow_level(pool, size, number + 1, read, mask, token_ids, log_probs, num_nodes);
      size += token_ids.numel() / num_reqs;
      if (number > 0) seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
      const at::Tensor values = std::get<2>(beam);
      if (values.numel() == 0) break;
      double sum = 0;
      for (int64_t i = 0; i < values.numel(); ++i) sum += std::exp(data<float>(values)[i]);
      if (sum < level_floors[number]) break;
      beams.push_back(sum);
    }
    const auto [token_ids, parents, depths, num_rows, log_values, indices] =
        specplug::rerank_draft(pool, size, root_token_ids, num_nodes, min_log_value);
    return {token_ids, parents, depths, num_rows, log_values, beams, seconds};
  }

 private:
  // Runs the drafter over the nodes of a beam; `features` are those of the level before.
  at::Tensor next_level(int64_t number, const specplug::Beam& beam, const at::Tensor& features, int64_t capacity) {
    const auto& [nodes, token_ids, values, sources, mask] = beam;
    return level_of_rows(number, token_ids, features, data<int64_t>(sources), mask, capacity).flatten(0, 1);
  }

  // Runs a level; `rows` are the nodes' rows of features; null: one for each, in their order.
  at::Tensor level_of_rows(int64_t number, const at::Tensor& token_ids, const at::Tensor& features, const int64_t* rows,
                           const at::Tensor& mask, int64_t capacity) {
    const int64_t num_reqs = token_ids.size(0), width = token_ids.size(1), num_rows = num_reqs * width;
    TORCH_CHECK(context_lens_.defined() && context_lens_.numel() == num_reqs && (number + 1) * width <= capacity &&
                    token_ids.scalar_type() == at::kLong,
                "draft_layer: a level must follow `first`, with its requests");
    const int64_t num_kv_heads = kv_cache_.size(1);
    if (!key_.defined() || key_.size(0) < num_reqs * capacity) {
      key_ = at::empty({num_reqs * capacity, num_kv_heads, head_size()}, embedding_.options()).zero_();
      value_ = key_.clone();
    }
    const at::Tensor positions = at::empty({num_rows}, at::kLong), tree_start = ints(num_reqs), tree_lens = ints(num_reqs);
    const at::Tensor query_start = ints(num_reqs), query_lens = ints(num_reqs);
    for (int64_t r = 0; r < num_reqs; ++r) {
      data<int32_t>(tree_start)[r] = r * capacity;
      data<int32_t>(tree_lens)[r] = (number + 1) * width;
      data<int32_t>(query_start)[r] = r * width;
      data<int32_t>(query_lens)[r] = width;
      // All nodes of a level share a position.  Near the last one, nodes cannot be emitted anyway.
      const int64_t position = std::min(data<int64_t>(positions_)[r] + number + 1, max_position_);
      std::fill_n(data<int64_t>(positions) + r * width, width, position);
    }
    at::Tensor result;
    with_type(embedding_.scalar_type(), [&](auto type) {
      using T = decltype(type);
      const at::Tensor inputs = joined<T>(token_ids.contiguous(), features, rows);
      const at::Tensor residual = (*fc_)(inputs), projected = (*qkv_)(residual);
      rotate<T>(projected, positions);
      const int64_t bytes = num_kv_heads * head_size() * sizeof(T);
      const at::Tensor key = heads(projected, 1), value = heads(projected, 2);
      for (int64_t row = 0; row < num_rows; ++row) {
        const int64_t place = row / width * capacity + number * width + row % width;
        std::memcpy(data<T>(key_) + place * key_.stride(0), data<T>(key) + row * key.stride(0), bytes);
        std::memcpy(data<T>(value_) + place * value_.stride(0), data<T>(value) + row * value.stride(0), bytes);
      }
      const at::Tensor attended = at::empty({num_rows, num_heads_, head_size()}, projected.options());
      specplug::tree_attention(heads(projected, 0), attended, kv_cache_, amx_, block_table_, context_lens_, query_start,
                               query_lens, key_, value_, tree_start, tree_lens, mask, scale_, 1.0, std::nullopt, 0, 0,
                               std::nullopt, std::nullopt);
      result = finish<T>(residual, attended).view({num_reqs, width, -1});
    });
    return result;
  }

  int64_t head_size() const { return kv_cache_.size(3) / 2; }

  // Queries (0), keys (1) or values (2) of projected rows: [n, heads, head_size].
  at::Tensor heads(const at::Tensor& projected, int part) const {
    const int64_t kv_heads = kv_cache_.size(1), size = head_size();
    const int64_t first = part == 0 ? 0 : num_heads_ + (part - 1) * kv_heads, count = part == 0 ? num_heads_ : kv_heads;
    return projected.narrow(1, first * size, count * size).unflatten(1, {count, size});
  }

  // The inputs of fc: embeddings beside hidden states.  `rows`: of the latter; null: all, in their order.
  template <typename T>
  at::Tensor joined(const at::Tensor& ids, const at::Tensor& hidden_states, const int64_t* rows) const {
    const at::Tensor hidden = hidden_states.contiguous();
    const int64_t size = embedding_.size(1), count = ids.numel();
    TORCH_CHECK(hidden.scalar_type() == embedding_.scalar_type() && hidden.size(1) == size,
                "draft_layer: hidden states must be [n, ", size, "] of the embedding's type");
    const at::Tensor inputs = at::empty({count, 2 * size}, embedding_.options());
    for (int64_t i = 0; i < count; ++i) {
      const int64_t id = data<int64_t>(ids)[i], row = rows ? rows[i] : i;
      TORCH_CHECK(id >= 0 && id < embedding_.size(0) && row >= 0 && row < hidden.size(0), "draft_layer: token ", id,
                  " or row ", row, " out of range");
      std::memcpy(data<T>(inputs) + 2 * i * size, data<T>(embedding_) + id * size, size * sizeof(T));
      std::memcpy(data<T>(inputs) + (2 * i + 1) * size, data<T>(hidden) + row * size, size * sizeof(T));
    }
    return inputs;
  }

  // Rotates queries and keys by their positions (halves, as in Llama).
  template <typename T>
  void rotate(const at::Tensor& projected, const at::Tensor& positions) const {
    const int64_t size = head_size(), half = size / 2, num_rotated = num_heads_ + kv_cache_.size(1);
    for (int64_t row = 0; row < projected.size(0); ++row) {
      const float* cos = data<float>(cos_sin_) + data<int64_t>(positions)[row] * size;
      for (int64_t head = 0; head < num_rotated; ++head) {
        T* x = data<T>(projected) + row * projected.stride(0) + head * size;
        for (int64_t i = 0; i < half; ++i) {
          const float a = to_float(x[i]), b = to_float(x[half + i]);
          x[i] = from_float<T>(a * cos[i] - b * cos[half + i]);
          x[half + i] = from_float<T>(b * cos[i] + a * cos[half + i]);
        }
      }
    }
  }

  // Writes keys and values to the pages.
  template <typename T>
  void write(const at::Tensor& projected, const at::Tensor& slots) const {
    const int64_t num_rows = projected.size(0);
    const at::Tensor kept = at::empty({1, 2, num_rows, kv_cache_.size(1), head_size()}, projected.options());
    kept[0][0].copy_(heads(projected, 1));
    kept[0][1].copy_(heads(projected, 2));
    const at::Tensor rows = at::empty({num_rows}, at::kLong);
    for (int64_t i = 0; i < num_rows; ++i) data<int64_t>(rows)[i] = i;
    specplug::write_rows(kept, kv_cache_, amx_, rows, slots);
  }

  // What follows the attention.
  template <typename T>
  at::Tensor finish(const at::Tensor& residual, const at::Tensor& attended) const {
    add<T>(residual, (*o_)(attended.flatten(1)));
    add<T>(residual, (*down_)(gated<T>((*gate_up_)(normalised<T>(residual, norm_, epsilon_)))));
    return residual;
  }

  at::Tensor embedding_, cos_sin_, norm_;
  double epsilon_, scale_;
  int64_t num_heads_, max_position_;
  Linear fc_, qkv_, o_, gate_up_, down_;
  // Of the draft phase.
  at::Tensor block_table_, kv_cache_, context_lens_, positions_;
  bool amx_ = false;
  at::Tensor key_, value_;
};

} // namespace

TORCH_LIBRARY_FRAGMENT(SPECPLUG_NAMESPACE, m) {
  m.class_<DraftLinear>("DraftLinear")
      .def(torch::init<at::Tensor, std::optional<at::Tensor>, std::optional<at::Tensor>, int64_t,
                       std::optional<at::Tensor>>());
  m.class_<DraftLayer>("DraftLayer")
      .def(torch::init<at::Tensor, at::Tensor, at::Tensor, double, double, int64_t, Linear, Linear, Linear, Linear, Linear,
                       int64_t>())
      .def("first", &DraftLayer::first)
      .def("level", &DraftLayer::level)
      .def("grow", &DraftLayer::grow);
}
