// Registers the operators with torch (draft_layer.cpp registers its classes).
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include "draft_growth.h"
#include "operators.h"

void specplug::onednn_product(const at::Tensor& output, const at::Tensor& x, const std::optional<at::Tensor>& bias,
                              const at::Tensor& handle) {
  static const auto product = c10::Dispatcher::singleton().findSchemaOrThrow("_C::onednn_mm", "");
  c10::Stack stack{output, x, bias, handle};
  product.callBoxed(stack);
}

namespace {

// For shapes only, in torch.compile:

at::Tensor byte_linear_meta(const at::Tensor& x, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                            int64_t outputs) {
  return x.new_empty_symint({x.sym_size(0), outputs});
}

at::Tensor row_linear_meta(const at::Tensor& x, const at::Tensor&, const std::optional<at::Tensor>&,
                           const std::optional<at::Tensor>&, int64_t outputs, const std::optional<at::Tensor>&, int64_t) {
  auto sizes = x.sym_sizes().vec();
  sizes.back() = outputs;
  return x.new_empty_symint(sizes);
}

// Growth over the tensors of a pool:

using Optional = std::optional<at::Tensor>;

specplug::Beam grow_level(const at::Tensor& token_ids, const at::Tensor& parents, const at::Tensor& log_values,
                          const at::Tensor& depths, int64_t start, int64_t level, const Optional& beam, const Optional& mask,
                          const at::Tensor& child_ids, const at::Tensor& log_probs, int64_t num_nodes) {
  const specplug::DraftPool pool(token_ids, parents, log_values, depths);
  return specplug::grow_level(pool, start, level, beam, mask, child_ids, log_probs, num_nodes);
}

specplug::RankedTrees rerank_draft(const at::Tensor& token_ids, const at::Tensor& parents, const at::Tensor& log_values,
                                   const at::Tensor& depths, int64_t size, const at::Tensor& root_token_ids, int64_t num_nodes,
                                   double floor) {
  const specplug::DraftPool pool(token_ids.contiguous(), parents.contiguous(), log_values.contiguous(), depths.contiguous());
  return specplug::rerank_draft(pool, size, root_token_ids, num_nodes, floor);
}

} // namespace

TORCH_LIBRARY_FRAGMENT(SPECPLUG_NAMESPACE, m) {
  using namespace specplug;
  constexpr auto cpu = c10::DispatchKey::CPU, meta = c10::DispatchKey::Meta;

  m.def("byte_linear_shapes(int outputs, int inputs, int parts) -> int[][]", &byte_linear_shapes);
  m.def("byte_linear_pack(Tensor weight, Tensor(a!) packed, Tensor(b!) scales) -> ()", &byte_linear_pack);
  m.def("byte_linear(Tensor x, Tensor packed, Tensor scales, Tensor? bias, int outputs) -> Tensor");
  m.impl("byte_linear", cpu, &byte_linear);
  m.impl("byte_linear", meta, &byte_linear_meta);

  m.def("extra_logits(Tensor hidden, Tensor rows, Tensor? other_requests) -> Tensor", &extra_logits);

  m.def(
      "grow_level(Tensor(a!) token_ids, Tensor(b!) parents, Tensor(c!) log_values, Tensor(d!) depths, int start, int level, "
      "Tensor? beam, Tensor? mask, Tensor child_ids, Tensor log_probs, int num_nodes) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
      &::grow_level);
  m.def(
      "rerank_draft(Tensor token_ids, Tensor parents, Tensor log_values, Tensor depths, int size, Tensor root_token_ids, "
      "int num_nodes, float floor) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
      &::rerank_draft);
  m.def("from_flat(Tensor token_ids, Tensor parents, Tensor num_rows) -> (Tensor, Tensor, Tensor)", &from_flat);
  m.def(
      "prune(Tensor token_ids, Tensor parents, Tensor depths, Tensor num_rows, Tensor log_values, Tensor keep) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
      &prune);
  m.def("lay_out(Tensor parents, Tensor depths, Tensor num_rows, Tensor context_lens) -> (Tensor, Tensor)", &lay_out);
  m.def(
      "plan_step(Tensor path_rows, Tensor num_emitted, Tensor row_start, int num_flat_rows) "
      "-> (Tensor, Tensor, Tensor, Tensor)",
      &plan_step);

  m.def(
      "lookup_store(Tensor(a!) store, Tensor(b!) lens, Tensor(c!) linked, Tensor slots, int slot_len, Tensor token_ids, "
      "Tensor requests, Tensor num_tokens) -> (Tensor, Tensor)",
      &lookup_store);
  m.def(
      "lookup_link(Tensor(a!) heads, Tensor(b!) previous, int shift, int heads_per_slot, int n, Tensor tokens, Tensor spans) "
      "-> ()",
      &lookup_link);
  m.def(
      "lookup_follow(Tensor heads, Tensor previous, int shift, int heads_per_slot, int n, Tensor tokens, Tensor suffixes, "
      "Tensor slots, int count) -> (Tensor, Tensor)",
      &lookup_follow);
  m.def(
      "lookup_best(Tensor positions, Tensor lengths, int num_own, Tensor tokens, Tensor ends, Tensor traffic, int cursor, "
      "int long_anchor, int min_match, int max_match, int count, int depth) -> (Tensor, Tensor, Tensor, Tensor)",
      &lookup_best);
  m.def(
      "lookup_prefix_tree(Tensor continuations, Tensor lengths, Tensor ages, Tensor own, Tensor request_features) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
      &lookup_prefix_tree);
  m.def(
      "lookup_pool(Tensor token_ids, Tensor leaders, Tensor nodes, Tensor log_odds, float limit, Tensor rows, int num_rows) "
      "-> (Tensor, Tensor, Tensor, Tensor)",
      &lookup_pool);
  m.def(
      "union_merge(Tensor[] token_ids, Tensor[] parents, Tensor[] num_rows, Tensor[] log_values, int[] sources, "
      "int num_sources, int num_reqs, float limit) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
      &union_merge);

  m.def("greedy_head_shape(int count, int size) -> int[]", &greedy_head_shape);
  m.def("greedy_head_pack(Tensor weight, int count, Tensor(a!) packed, Tensor(b!) bounds) -> ()", &greedy_head_pack);
  m.def("greedy_head(Tensor x, Tensor weight, Tensor? codes, int outputs, Tensor packed, Tensor bounds) -> Tensor",
        &greedy_head);

  m.def("greedy_tokens(Tensor logits) -> Tensor");
  m.impl("greedy_tokens", cpu, &greedy_tokens);
  m.def(
      "greedy_walk(Tensor logits, Tensor token_ids, Tensor parents, Tensor first_rows, Tensor active, int max_emitted) "
      "-> (Tensor, Tensor, Tensor)");
  m.impl("greedy_walk", cpu, &greedy_walk);

  m.def("likeliest(Tensor logits, int top_k, Tensor? draft_ids, Tensor? extra) -> (Tensor, Tensor)");
  m.impl("likeliest", cpu, &likeliest);

  m.def("row_linear(Tensor x, Tensor weight, Tensor? codes, Tensor? bias, int outputs, Tensor? handle, int max_rows) -> Tensor");
  m.impl("row_linear", cpu, &row_linear);
  m.impl("row_linear", meta, &row_linear_meta);
  m.def("head_linear(Tensor x, Tensor[] weights, int outputs) -> Tensor", &head_linear);
  m.def("row_linear_shape(Tensor weight) -> int[]", &row_linear_shape);
  m.def("row_linear_codes(Tensor weight, ScalarType rows) -> Tensor", &row_linear_codes);
  m.def("row_linear_pack_coded(Tensor weight, Tensor(a!) packed, Tensor codes) -> ()", &row_linear_pack_coded);
  m.def("row_linear_in_tiles(Tensor weight, ScalarType rows) -> bool", &row_linear_in_tiles);
  m.def("row_linear_pack(Tensor weight, Tensor(a!) packed, ScalarType rows) -> ()");
  m.impl("row_linear_pack", cpu, &row_linear_pack);

  m.def(
      "causal_conv(Tensor x, Tensor weight, Tensor? bias, Tensor before, Tensor(a!) after, Tensor starts, Tensor sources, "
      "Tensor places, bool activates) -> Tensor",
      &causal_conv);
  m.def(
      "gated_delta(Tensor query, Tensor key, Tensor value, Tensor a, Tensor b, Tensor a_log, Tensor dt_bias, Tensor before, "
      "Tensor(a!) after, Tensor starts, Tensor sources, Tensor places) -> Tensor",
      &gated_delta);
  m.def(
      "mamba2_scan(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor d, Tensor dt_bias, Tensor before, "
      "Tensor(a!) after, Tensor starts, Tensor sources, Tensor places) -> Tensor",
      &mamba2_scan);

  m.def(
      "tree_attention(Tensor query, Tensor(a!) output, Tensor kv_cache, int layout, Tensor block_table, "
      "Tensor context_lens, Tensor query_start, Tensor query_lens, Tensor tree_key, Tensor tree_value, "
      "Tensor tree_start, Tensor tree_lens, Tensor mask, float scale, float value_scale, Tensor(b!)? kept, int window, "
      "float soft_cap, Tensor? sinks, Tensor? slopes, int local) -> ()");
  m.impl("tree_attention", cpu, &tree_attention);
  m.def(
      "causal_attention(Tensor query, Tensor(a!) output, Tensor kv_cache, int layout, Tensor block_table, "
      "Tensor seq_lens, Tensor query_start, Tensor query_lens, float scale, float value_scale, int window, "
      "float soft_cap, Tensor? sinks, Tensor? slopes, int local) -> ()");
  m.impl("causal_attention", cpu, &causal_attention);
  m.def("write_rows(Tensor kept, Tensor(a!)[] kv_caches, int layout, Tensor rows, Tensor slots) -> ()");
  m.impl("write_rows", cpu, &write_rows);
}
