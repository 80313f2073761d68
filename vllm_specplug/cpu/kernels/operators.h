// The operators.  They are registered in operators.cpp: registration needs torch's largest headers, and a file without
// them compiles in half the time or less.  The Python modules of the same names document the arguments.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

namespace specplug {

// Returns the shapes of packed weights and of their factors; none if this CPU cannot do it.
std::vector<std::vector<int64_t>> byte_linear_shapes(int64_t outputs, int64_t inputs, int64_t parts);
void byte_linear_pack(const at::Tensor& weight, const at::Tensor& packed, const at::Tensor& scales);
at::Tensor byte_linear(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scales,
                       const std::optional<at::Tensor>& bias, int64_t outputs);

at::Tensor extra_logits(const at::Tensor& hidden, const at::Tensor& rows, const std::optional<at::Tensor>& other_requests);

// Returns the number of blocks, and of floats of a block's bounds; none if this CPU or this size cannot do it.
std::vector<int64_t> greedy_head_shape(int64_t count, int64_t size);
void greedy_head_pack(const at::Tensor& weight, int64_t count, const at::Tensor& packed, const at::Tensor& bounds);
at::Tensor greedy_head(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& codes, int64_t outputs,
                       const at::Tensor& packed, const at::Tensor& bounds);

at::Tensor greedy_tokens(const at::Tensor& logits);
std::tuple<at::Tensor, at::Tensor, at::Tensor> greedy_walk(const at::Tensor& logits, const at::Tensor& token_ids,
                                                           const at::Tensor& parents, const at::Tensor& first_rows,
                                                           const at::Tensor& active, int64_t max_emitted);

std::tuple<at::Tensor, at::Tensor> likeliest(const at::Tensor& logits, int64_t top_k,
                                             const std::optional<at::Tensor>& draft_ids,
                                             const std::optional<at::Tensor>& extra);

std::vector<int64_t> row_linear_shape(const at::Tensor& weight);
void row_linear_pack(const at::Tensor& weight, at::Tensor packed, at::ScalarType rows);
// Returns int32 numbers that tell how to keep a weight in 12 bits (`Codes`); none: it is kept as it is.
at::Tensor row_linear_codes(const at::Tensor& weight, at::ScalarType rows);
// Writes uint8 [blocks][size][48].
void row_linear_pack_coded(const at::Tensor& weight, at::Tensor packed, const at::Tensor& codes);
bool row_linear_in_tiles(const at::Tensor& weight, at::ScalarType rows);
at::Tensor row_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& codes,
                      const std::optional<at::Tensor>& bias, int64_t outputs, const std::optional<at::Tensor>& handle,
                      int64_t max_rows);
// x: [num_rows, heads, inputs]; each head has a packed weight of its own.  Returns [num_rows, heads, outputs].
at::Tensor head_linear(const at::Tensor& x, at::TensorList weights, int64_t outputs);
// The same of some blocks of outputs, of two vectors each and not in tiles of AMX; the other outputs are -infinity.
// x: [num_rows, inputs], contiguous, of few rows.
at::Tensor row_linear_blocks(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& codes,
                             int64_t outputs, const std::vector<int64_t>& blocks);
// vLLM's own product with a weight that it has packed: output, x are [num_rows, *].
void onednn_product(const at::Tensor& output, const at::Tensor& x, const std::optional<at::Tensor>& bias,
                    const at::Tensor& handle);

// Trees as rows.
std::tuple<at::Tensor, at::Tensor, at::Tensor> from_flat(const at::Tensor& token_ids, const at::Tensor& parents,
                                                         const at::Tensor& num_rows);
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> prune(
    const at::Tensor& token_ids, const at::Tensor& parents, const at::Tensor& depths, const at::Tensor& num_rows,
    const at::Tensor& log_values, const at::Tensor& keep);
std::tuple<at::Tensor, at::Tensor> lay_out(const at::Tensor& parents, const at::Tensor& depths, const at::Tensor& num_rows,
                                           const at::Tensor& context_lens);
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> plan_step(const at::Tensor& path_rows, const at::Tensor& num_emitted,
                                                                     const at::Tensor& row_start, int64_t num_flat_rows);

std::tuple<at::Tensor, at::Tensor> lookup_store(const at::Tensor& store, const at::Tensor& lens, const at::Tensor& linked,
                                                const at::Tensor& slots, int64_t slot_len, const at::Tensor& token_ids,
                                                const at::Tensor& requests, const at::Tensor& num_tokens);
void lookup_link(const at::Tensor& heads, const at::Tensor& previous, int64_t shift, int64_t heads_per_slot, int64_t n,
                 const at::Tensor& tokens, const at::Tensor& spans);
std::tuple<at::Tensor, at::Tensor> lookup_follow(const at::Tensor& heads, const at::Tensor& previous, int64_t shift,
                                                 int64_t heads_per_slot, int64_t n, const at::Tensor& tokens,
                                                 const at::Tensor& suffixes, const at::Tensor& slots, int64_t count);
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> lookup_best(
    const at::Tensor& positions, const at::Tensor& lengths, int64_t num_own, const at::Tensor& tokens, const at::Tensor& ends,
    const at::Tensor& traffic, int64_t cursor, int64_t long_anchor, int64_t min_match, int64_t max_match, int64_t count,
    int64_t depth);
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> lookup_prefix_tree(
    const at::Tensor& continuations, const at::Tensor& lengths, const at::Tensor& ages, const at::Tensor& own,
    const at::Tensor& request_features);
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> lookup_pool(const at::Tensor& token_ids, const at::Tensor& leaders,
                                                                       const at::Tensor& nodes, const at::Tensor& log_odds,
                                                                       double limit, const at::Tensor& rows, int64_t num_rows);

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> union_merge(
    at::TensorList token_ids, at::TensorList parents, at::TensorList num_rows, at::TensorList log_values,
    at::IntArrayRef sources, int64_t num_sources, int64_t num_reqs, double limit);

void tree_attention(const at::Tensor& query, at::Tensor output, const at::Tensor& kv_cache, int64_t layout,
                    const at::Tensor& block_table, const at::Tensor& context_lens, const at::Tensor& query_start,
                    const at::Tensor& query_lens, const at::Tensor& tree_key, const at::Tensor& tree_value,
                    const at::Tensor& tree_start, const at::Tensor& tree_lens, const at::Tensor& mask, double scale,
                    double value_scale, const std::optional<at::Tensor>& kept, int64_t window, double soft_cap,
                    const std::optional<at::Tensor>& sinks, const std::optional<at::Tensor>& slopes, int64_t local = 0);
void causal_attention(const at::Tensor& query, at::Tensor output, const at::Tensor& kv_cache, int64_t layout,
                      const at::Tensor& block_table, const at::Tensor& seq_lens, const at::Tensor& query_start,
                      const at::Tensor& query_lens, double scale, double value_scale, int64_t window, double soft_cap,
                      const std::optional<at::Tensor>& sinks, const std::optional<at::Tensor>& slopes, int64_t local = 0);

// Recurrent states.
at::Tensor causal_conv(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       const at::Tensor& before, const at::Tensor& after, const at::Tensor& starts,
                       const at::Tensor& sources, const at::Tensor& places, bool activates);
at::Tensor gated_delta(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& a,
                       const at::Tensor& b, const at::Tensor& a_log, const at::Tensor& dt_bias, const at::Tensor& before,
                       const at::Tensor& after, const at::Tensor& starts, const at::Tensor& sources,
                       const at::Tensor& places);
at::Tensor mamba2_scan(const at::Tensor& x, const at::Tensor& dt, const at::Tensor& a, const at::Tensor& b,
                       const at::Tensor& c, const at::Tensor& d, const at::Tensor& dt_bias, const at::Tensor& before,
                       const at::Tensor& after, const at::Tensor& starts, const at::Tensor& sources,
                       const at::Tensor& places);

void write_rows(const at::Tensor& kept, at::TensorList kv_caches, int64_t layout, const at::Tensor& rows, const at::Tensor& slots);

} // namespace specplug
