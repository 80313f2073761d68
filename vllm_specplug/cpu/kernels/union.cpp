// Merging of drafts on a CPU.  proposers/union/merge.py documents the arguments.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>
#include <vector>

#include "operators.h"

namespace {

constexpr int64_t kNotExpanded = 0, kOmitted = 1, kDrafted = 2;

// A node of a merged tree; bits: sources.
struct MergedNode {
  int64_t token_id, parent, depth, drafted_by = 0, expanded_by = 0;
  std::vector<int64_t> children = {};
  std::vector<double> log_odds = {};
};

// One request's draft of one source.
struct DraftRows {
  at::TensorAccessor<int64_t, 1> token_ids, parents;
  at::TensorAccessor<float, 1> log_values;
  int64_t num_rows;
};

// The log odds of a log probability; NaN (the difference of two -inf) counts as -inf.
double log_odds_of(double edge, double limit) {
  if (edge >= 0) return limit;
  if (!(edge > -std::numeric_limits<double>::infinity())) return -limit;
  return std::clamp(edge - std::log(-std::expm1(edge)), -limit, limit);
}

// Returns the node's child with a token, which is added if there is none.
int64_t child_of(std::vector<MergedNode>& nodes, int64_t parent, int64_t token_id, int64_t num_sources) {
  for (const int64_t child : nodes[parent].children)
    if (nodes[child].token_id == token_id) return child;
  const int64_t added = nodes.size();
  nodes.push_back({token_id, parent, nodes[parent].depth + 1});
  nodes[added].log_odds.resize(num_sources);
  nodes[parent].children.push_back(added);
  return added;
}

void insert(std::vector<MergedNode>& nodes, const DraftRows& draft, int64_t source, int64_t num_sources, double limit) {
  const int64_t bit = int64_t{1} << source;
  std::vector<int64_t> merged(std::max<int64_t>(draft.num_rows, 1)); // by row of the draft
  for (int64_t row = 1; row < draft.num_rows; ++row) {
    const int64_t above = draft.parents[row];
    TORCH_CHECK_INDEX(above >= 0 && above < row, "union_merge: the parent of row ", row, " is row ", above);
    const int64_t node = merged[row] = child_of(nodes, merged[above], draft.token_ids[row], num_sources);
    nodes[merged[above]].expanded_by |= bit;
    if (nodes[node].drafted_by & bit) continue; // the first of equal siblings counts
    nodes[node].drafted_by |= bit;
    const double edge = static_cast<double>(draft.log_values[row]) - static_cast<double>(draft.log_values[above]);
    nodes[node].log_odds[source] = log_odds_of(edge, limit);
  }
}

int64_t state_of(const MergedNode& node, const MergedNode& parent, int64_t source) {
  if (node.drafted_by >> source & 1) return kDrafted;
  return parent.expanded_by >> source & 1 ? kOmitted : kNotExpanded;
}

} // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> specplug::union_merge(
    at::TensorList token_ids, at::TensorList parents, at::TensorList num_rows, at::TensorList log_values,
    at::IntArrayRef sources, int64_t num_sources, int64_t num_reqs, double limit) {
  std::vector<std::vector<MergedNode>> trees(num_reqs, {MergedNode{kNotExpanded, -1, 0}});
  const at::Tensor counts = at::empty({num_reqs}, at::kLong);
  int64_t num_nodes = 0;
  for (int64_t r = 0; r < num_reqs; ++r) {
    for (size_t i = 0; i < sources.size(); ++i) {
      const DraftRows draft{token_ids[i].accessor<int64_t, 2>()[r], parents[i].accessor<int64_t, 2>()[r],
                            log_values[i].accessor<float, 2>()[r], num_rows[i].accessor<int64_t, 1>()[r]};
      insert(trees[r], draft, sources[i], num_sources, limit);
    }
    counts.accessor<int64_t, 1>()[r] = trees[r].size() - 1;
    num_nodes += trees[r].size() - 1;
  }
  const at::Tensor requests = counts.new_empty({num_nodes}), ids = requests.clone(), above = requests.clone();
  const at::Tensor depths = requests.clone(), states = counts.new_empty({num_sources, num_nodes});
  const at::Tensor log_odds = counts.new_empty({num_sources, num_nodes}, at::kDouble);
  int64_t node = 0;
  for (int64_t r = 0; r < num_reqs; ++r) {
    const auto& nodes = trees[r];
    std::vector<int64_t> order(nodes.size()), entries(nodes.size(), r);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return nodes[a].depth < nodes[b].depth; });
    for (size_t i = 1; i < order.size(); ++i, ++node) {
      const MergedNode& one = nodes[order[i]];
      entries[order[i]] = num_reqs + node;
      requests.accessor<int64_t, 1>()[node] = r;
      ids.accessor<int64_t, 1>()[node] = one.token_id;
      above.accessor<int64_t, 1>()[node] = entries[one.parent];
      depths.accessor<int64_t, 1>()[node] = one.depth;
      for (int64_t source = 0; source < num_sources; ++source) {
        states.accessor<int64_t, 2>()[source][node] = state_of(one, nodes[one.parent], source);
        log_odds.accessor<double, 2>()[source][node] = one.log_odds[source];
      }
    }
  }
  return {requests, ids, above, depths, states, log_odds, counts};
}
