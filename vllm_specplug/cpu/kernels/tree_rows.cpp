// Trees as rows on a CPU.  The references are in Python: core/tree.py, core/pruning.py, core/layout.py and core/step.py.

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

#include "operators.h"

namespace {

constexpr int64_t kPadding = -1;
constexpr float kNever = -std::numeric_limits<float>::infinity();

// Parents come before their children: everything here reads a parent's result.
void check_parent(int64_t parent, int64_t row) {
  TORCH_CHECK_INDEX(parent < row, "the parent of row ", row, " is row ", parent, "; it must be above");
}

at::Tensor as_ints(const at::Tensor& values) { return values.to(at::kLong); }

} // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> specplug::from_flat(const at::Tensor& token_ids, const at::Tensor& parents,
                                                                   const at::Tensor& num_rows) {
  const at::Tensor ids = as_ints(token_ids), above = as_ints(parents), counts = as_ints(num_rows);
  const int64_t num_reqs = ids.size(0), width = ids.size(1);
  TORCH_CHECK(above.sizes() == ids.sizes() && counts.numel() == num_reqs, "from_flat: the shapes differ");
  const at::Tensor new_ids = ids.new_full({num_reqs, width}, kPadding), new_parents = new_ids.clone();
  const at::Tensor depths = ids.new_zeros({num_reqs, width});
  const auto id_of = ids.accessor<int64_t, 2>(), parent_of = above.accessor<int64_t, 2>();
  auto new_id_of = new_ids.accessor<int64_t, 2>(), new_parent_of = new_parents.accessor<int64_t, 2>();
  auto depth_of = depths.accessor<int64_t, 2>();
  for (int64_t r = 0; r < num_reqs; ++r) {
    for (int64_t row = 0; row < std::min(counts.accessor<int64_t, 1>()[r], width); ++row) {
      const int64_t parent = row ? parent_of[r][row] : kPadding;
      check_parent(parent, row);
      new_id_of[r][row] = id_of[r][row];
      new_parent_of[r][row] = parent;
      depth_of[r][row] = parent < 0 ? 0 : depth_of[r][parent] + 1;
    }
  }
  return {new_ids, new_parents, depths};
}

// Returns token ids, parents, depths, numbers of rows, values, and of each row its index before; -1: padding.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> specplug::prune(
    const at::Tensor& token_ids, const at::Tensor& parents, const at::Tensor& depths, const at::Tensor& num_rows,
    const at::Tensor& log_values, const at::Tensor& keep) {
  const int64_t num_reqs = token_ids.size(0), width = token_ids.size(1);
  TORCH_CHECK(keep.sizes() == token_ids.sizes() && parents.sizes() == keep.sizes() && depths.sizes() == keep.sizes() &&
                  log_values.sizes() == keep.sizes() && num_rows.numel() == num_reqs,
              "prune: the shapes differ");
  const auto keeps = keep.accessor<bool, 2>();
  std::vector<std::vector<int64_t>> kept(num_reqs, std::vector<int64_t>{0});
  size_t longest = 1;
  for (int64_t r = 0; r < num_reqs; ++r) {
    for (int64_t row = 1; row < std::min(num_rows.accessor<int64_t, 1>()[r], width); ++row)
      if (keeps[r][row]) kept[r].push_back(row);
    longest = std::max(longest, kept[r].size());
  }
  const std::vector<int64_t> shape{num_reqs, static_cast<int64_t>(longest)};
  const at::Tensor new_ids = token_ids.new_full(shape, kPadding), new_parents = new_ids.clone(), sources = new_ids.clone();
  const at::Tensor new_depths = token_ids.new_zeros(shape), counts = token_ids.new_empty({num_reqs});
  const at::Tensor values = log_values.new_full(shape, kNever);
  const auto id_of = token_ids.accessor<int64_t, 2>(), parent_of = parents.accessor<int64_t, 2>();
  const auto depth_of = depths.accessor<int64_t, 2>();
  const auto value_of = log_values.accessor<float, 2>();
  for (int64_t r = 0; r < num_reqs; ++r) {
    for (size_t place = 0; place < kept[r].size(); ++place) {
      const int64_t row = kept[r][place], parent = parent_of[r][row];
      check_parent(parent, row);
      const auto behind = std::upper_bound(kept[r].begin(), kept[r].end(), parent);
      new_ids.accessor<int64_t, 2>()[r][place] = id_of[r][row];
      new_parents.accessor<int64_t, 2>()[r][place] = parent < 0 ? kPadding : behind - kept[r].begin() - 1;
      new_depths.accessor<int64_t, 2>()[r][place] = depth_of[r][row];
      values.accessor<float, 2>()[r][place] = value_of[r][row];
      sources.accessor<int64_t, 2>()[r][place] = row;
    }
    counts.accessor<int64_t, 1>()[r] = kept[r].size();
  }
  return {new_ids, new_parents, new_depths, counts, values, sources};
}

std::tuple<at::Tensor, at::Tensor> specplug::lay_out(const at::Tensor& parents, const at::Tensor& depths,
                                                     const at::Tensor& num_rows, const at::Tensor& context_lens) {
  const int64_t num_reqs = parents.size(0), width = parents.size(1);
  TORCH_CHECK(depths.sizes() == parents.sizes() && num_rows.numel() == num_reqs && context_lens.numel() == num_reqs,
              "lay_out: the shapes differ");
  const at::Tensor positions = as_ints(context_lens).unsqueeze(1).add(depths);
  const at::Tensor mask = parents.new_zeros({num_reqs, width, width}, at::kBool);
  const auto parent_of = parents.accessor<int64_t, 2>();
  for (int64_t r = 0; r < num_reqs; ++r) {
    bool* sees = mask.mutable_data_ptr<bool>() + r * width * width;
    for (int64_t row = 0; row < std::min(num_rows.accessor<int64_t, 1>()[r], width); ++row) {
      const int64_t parent = parent_of[r][row];
      check_parent(parent, row);
      if (row > 0) std::copy_n(sees + std::max<int64_t>(parent, 0) * width, row, sees + row * width);
      sees[row * width + row] = true;
    }
  }
  return {positions, mask};
}

// Returns the fields of `StepPlan`.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> specplug::plan_step(const at::Tensor& path_rows,
                                                                               const at::Tensor& num_emitted,
                                                                               const at::Tensor& row_start,
                                                                               int64_t num_flat_rows) {
  const at::Tensor first = as_ints(row_start), emitted = as_ints(num_emitted);
  const int64_t num_reqs = path_rows.size(0), width = path_rows.size(1);
  TORCH_CHECK(first.numel() == num_reqs && emitted.numel() == num_reqs && width > 0, "plan_step: the shapes differ");
  const at::Tensor sources = path_rows.new_full({num_reqs, width}, kPadding), targets = sources.clone();
  const at::Tensor path_index = path_rows.new_empty({num_flat_rows}), last_rows = path_rows.new_empty({num_reqs});
  int64_t* flat = path_index.mutable_data_ptr<int64_t>();
  for (int64_t row = 0; row < num_flat_rows; ++row) flat[row] = row;
  const auto path_of = path_rows.accessor<int64_t, 2>();
  for (int64_t r = 0; r < num_reqs; ++r) {
    const int64_t start = first.accessor<int64_t, 1>()[r], count = emitted.accessor<int64_t, 1>()[r];
    for (int64_t depth = 0; depth < std::min(std::max<int64_t>(count, 1), width); ++depth) {
      const int64_t source = start + path_of[r][depth], target = start + depth;
      TORCH_CHECK_INDEX(target >= 0 && target < num_flat_rows, "plan_step: there is no row ", target);
      sources.accessor<int64_t, 2>()[r][depth] = source;
      targets.accessor<int64_t, 2>()[r][depth] = target;
      flat[target] = last_rows.accessor<int64_t, 1>()[r] = source;
    }
  }
  return {sources, targets, path_index, last_rows};
}
