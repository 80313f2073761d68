// The growth of draft trees in a pool, see draft_growth.h.

#include "draft_growth.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "operators.h"
#include "types.h"

namespace {

constexpr int64_t kPadding = -1;
constexpr float kNever = -std::numeric_limits<float>::infinity(); // the value of a node that must not be used

// NaN counts as the largest value, as in torch.
float order(float value) { return std::isnan(value) ? std::numeric_limits<float>::infinity() : value; }

// Returns the indices of the best `count` values, ties to the lower index, without values below `floor`; ascending.
std::vector<int64_t> best_indices(const float* values, int64_t size, int64_t count, float floor) {
  std::vector<int64_t> found(size);
  std::iota(found.begin(), found.end(), 0);
  const auto is_better = [values](int64_t a, int64_t b) {
    const float one = order(values[a]), other = order(values[b]);
    return one > other || (one == other && a < b);
  };
  if (count < size) {
    std::nth_element(found.begin(), found.begin() + count, found.end(), is_better);
    found.resize(count);
  }
  found.erase(std::remove_if(found.begin(), found.end(), [=](int64_t i) { return values[i] < floor; }), found.end());
  std::sort(found.begin(), found.end());
  return found;
}

// One request's row of a pool.
struct PoolRow {
  PoolRow(const specplug::DraftPool& pool, int64_t request) {
    const int64_t first = request * pool.token_ids.size(1);
    token_ids = data<int64_t>(pool.token_ids) + first;
    parents = data<int64_t>(pool.parents) + first;
    depths = data<int64_t>(pool.depths) + first;
    log_values = data<float>(pool.log_values) + first;
  }

  // Adds a level from `start` on: `top_k` children of each node of the beam (`beam` null: of the root).
  void append(int64_t start, int64_t level, const int64_t* beam, const int64_t* child_ids, const float* log_probs,
              int64_t count, int64_t top_k) const {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t parent = beam ? beam[i / top_k] : kPadding;
      const float log_prob = std::isnan(log_probs[i]) ? kNever : std::min(log_probs[i], 0.0f);
      token_ids[start + i] = child_ids[i];
      parents[start + i] = parent;
      depths[start + i] = level;
      log_values[start + i] = (beam ? log_values[parent] : 0.0f) + log_prob;
    }
  }

  // Whether a node below the newest level could be among the best `num_nodes`: it has at most that level's best value.
  bool can_grow(int64_t start, int64_t size, int64_t num_nodes) const {
    const float bound = *std::max_element(log_values + start, log_values + size);
    const auto is_as_good = [bound](float value) { return value >= bound; };
    return bound > kNever && std::count_if(log_values, log_values + size, is_as_good) < num_nodes;
  }

  int64_t *token_ids, *parents, *depths;
  float* log_values;
};

specplug::Beam empty_beam(const at::Tensor& like, int64_t num_reqs, int64_t width, int64_t num_seen) {
  return {like.new_empty({num_reqs, width}), like.new_empty({num_reqs, width}), like.new_empty({num_reqs, width}, at::kFloat),
          like.new_empty({num_reqs * width}), like.new_zeros({num_reqs, width, num_seen}, at::kBool)};
}

} // namespace

specplug::DraftPool::DraftPool(at::Tensor token_ids, at::Tensor parents, at::Tensor log_values, at::Tensor depths)
    : token_ids(std::move(token_ids)),
      parents(std::move(parents)),
      log_values(std::move(log_values)),
      depths(std::move(depths)) {
  for (const at::Tensor& ints : {this->token_ids, this->parents, this->depths})
    TORCH_CHECK(ints.scalar_type() == at::kLong && ints.is_contiguous() && ints.sizes() == this->token_ids.sizes(),
                "a pool must be contiguous and int64");
  TORCH_CHECK(this->log_values.scalar_type() == at::kFloat && this->log_values.is_contiguous() &&
                  this->log_values.sizes() == this->token_ids.sizes(),
              "a pool's values must be contiguous and float32");
}

specplug::DraftPool::DraftPool(int64_t num_reqs, int64_t width)
    : DraftPool(at::empty({num_reqs, width}, at::kLong), at::empty({num_reqs, width}, at::kLong),
                at::empty({num_reqs, width}, at::kFloat), at::empty({num_reqs, width}, at::kLong)) {}

specplug::Beam specplug::grow_level(const DraftPool& pool, int64_t start, int64_t level, const std::optional<at::Tensor>& beam,
                                    const std::optional<at::Tensor>& mask, const at::Tensor& child_ids,
                                    const at::Tensor& log_probs, int64_t num_nodes) {
  const int64_t num_reqs = pool.token_ids.size(0), capacity = pool.token_ids.size(1), top_k = child_ids.size(1);
  const int64_t num_fed = beam ? beam->size(1) : 1, count = num_fed * top_k, size = start + count;
  const int64_t num_before = mask ? mask->size(2) : 0;
  TORCH_CHECK(size <= capacity, "the pool holds ", capacity, " nodes, ", size, " would be drafted");
  TORCH_CHECK(child_ids.numel() == num_reqs * count && log_probs.sizes() == child_ids.sizes(), "wrong number of children");
  const at::Tensor ids = child_ids.to(at::kLong).contiguous(), probs = log_probs.to(at::kFloat).contiguous();
  bool grows = false;
  for (int64_t r = 0; r < num_reqs; ++r) {
    const PoolRow row(pool, r);
    const int64_t* parents = beam ? data<int64_t>(*beam) + r * num_fed : nullptr;
    row.append(start, level, parents, data<int64_t>(ids) + r * count, data<float>(probs) + r * count, count, top_k);
    grows |= row.can_grow(start, size, num_nodes);
  }
  const int64_t width = grows && size < capacity ? std::min(top_k, count) : 0, num_seen = num_before + width;
  const Beam next = empty_beam(ids, num_reqs, width, num_seen);
  const auto& [nodes, token_ids, values, sources, sees] = next;
  for (int64_t r = 0; width > 0 && r < num_reqs; ++r) {
    const PoolRow row(pool, r);
    int64_t place = r * width;
    for (const int64_t child : best_indices(row.log_values + start, count, width, kNever)) {
      data<int64_t>(nodes)[place] = start + child;
      data<int64_t>(token_ids)[place] = row.token_ids[start + child];
      data<float>(values)[place] = row.log_values[start + child];
      data<int64_t>(sources)[place] = r * num_fed + child / top_k;
      bool* seen = data<bool>(sees) + place * num_seen;
      if (mask) std::copy_n(data<bool>(*mask) + (r * num_fed + child / top_k) * num_before, num_before, seen);
      seen[num_before + place++ - r * width] = true;
    }
  }
  return next;
}

specplug::RankedTrees specplug::rerank_draft(const DraftPool& pool, int64_t size, const at::Tensor& root_token_ids,
                                             int64_t num_nodes, double floor) {
  const int64_t num_reqs = pool.token_ids.size(0), width = num_nodes + 1;
  TORCH_CHECK(root_token_ids.numel() == num_reqs && size <= pool.token_ids.size(1), "rerank_draft: the shapes differ");
  const at::Tensor roots = root_token_ids.to(at::kLong).contiguous();
  const at::Tensor token_ids = roots.new_full({num_reqs, width}, kPadding), parents = token_ids.clone();
  const at::Tensor indices = token_ids.clone(), depths = roots.new_zeros({num_reqs, width});
  const at::Tensor num_rows = roots.new_empty({num_reqs}), log_values = roots.new_full({num_reqs, width}, kNever, at::kFloat);
  for (int64_t r = 0; r < num_reqs; ++r) {
    const PoolRow row(pool, r);
    const auto kept = best_indices(row.log_values, size, num_nodes, floor);
    int64_t place = r * width;
    data<int64_t>(token_ids)[place] = data<int64_t>(roots)[r];
    data<float>(log_values)[place] = 0;
    for (const int64_t node : kept) {
      ++place;
      // The parent's row: its value is no lower, so that it is kept too.
      const auto parent = std::upper_bound(kept.begin(), kept.end(), row.parents[node]);
      data<int64_t>(token_ids)[place] = row.token_ids[node];
      data<int64_t>(parents)[place] = parent - kept.begin();
      data<int64_t>(depths)[place] = row.depths[node];
      data<float>(log_values)[place] = row.log_values[node];
      data<int64_t>(indices)[place] = node;
    }
    data<int64_t>(num_rows)[r] = kept.size() + 1;
  }
  return {token_ids, parents, depths, num_rows, log_values, indices};
}
