// Operators that other operators call.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace specplug {

at::Tensor row_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& codes,
                      const std::optional<at::Tensor>& bias, int64_t outputs, const std::optional<at::Tensor>& handle,
                      int64_t max_rows);

// The same of some blocks of outputs, of two vectors each and not in tiles of AMX; the other outputs are -infinity.
// x: [num_rows, inputs], contiguous, of few rows.
at::Tensor row_linear_blocks(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& codes,
                             int64_t outputs, const std::vector<int64_t>& blocks);

// A product in 8 bits; byte_linear.py documents the arguments.
at::Tensor byte_linear(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scales,
                       const std::optional<at::Tensor>& bias, int64_t outputs);

void tree_attention(const at::Tensor& query, at::Tensor output, const at::Tensor& kv_cache, bool amx,
                    const at::Tensor& block_table, const at::Tensor& context_lens, const at::Tensor& query_start,
                    const at::Tensor& query_lens, const at::Tensor& tree_key, const at::Tensor& tree_value,
                    const at::Tensor& tree_start, const at::Tensor& tree_lens, const at::Tensor& mask, double scale,
                    const std::optional<at::Tensor>& kept, int64_t window, double soft_cap,
                    const std::optional<at::Tensor>& sinks, const std::optional<at::Tensor>& slopes);

void write_rows(const at::Tensor& kept, at::TensorList kv_caches, bool amx, const at::Tensor& rows, const at::Tensor& slots);

} // namespace specplug
