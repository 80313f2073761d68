// The growth of draft trees (EAGLE-2, section 4), for the operators and for draft_layer.cpp.  Its reference is in Python:
// core/growth.py and core/pruning.py, whose arguments these are.
#pragma once

#include <ATen/core/Tensor.h>

#include <limits>
#include <optional>
#include <tuple>

namespace specplug {

// The nodes drafted so far, [num_reqs, pool_width] each: token ids, parents, values, depths.
struct DraftPool {
  DraftPool(int64_t num_reqs, int64_t width);
  DraftPool(at::Tensor token_ids, at::Tensor parents, at::Tensor log_values, at::Tensor depths);
  at::Tensor token_ids, parents, log_values, depths;
};

// The nodes that the drafter reads next; none: the growth ends.
using Beam = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// `start`: nodes drafted before; `level`: of the new nodes; `beam`, `mask`: the nodes that were read, none for the root.
Beam grow_level(const DraftPool& pool, int64_t start, int64_t level, const std::optional<at::Tensor>& beam,
                const std::optional<at::Tensor>& mask, const at::Tensor& child_ids, const at::Tensor& log_probs,
                int64_t num_nodes);

// Token ids, parents, depths, numbers of rows and values of trees, and the pool's index of each row.
using RankedTrees = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

RankedTrees rerank_draft(const DraftPool& pool, int64_t size, const at::Tensor& root_token_ids, int64_t num_nodes, double floor);

} // namespace specplug
