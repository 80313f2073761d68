// Lookup on a CPU: the index of n-grams, the best matches and their prefix tree.  proposers/lookup documents the arguments
// (index.py, matches.py, prefix_tree.py).

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "operators.h"

namespace {

constexpr int32_t kBreak = -1;
constexpr int64_t kPadding = -1, kRecheck = 4, kNumFeatures = 6;
constexpr uint32_t kMultipliers[] = {0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F};

// The bucket of the `n` tokens at `newest` and in the direction of `step`, newest first.
int64_t bucket_of(const int32_t* newest, int64_t n, int64_t step, int64_t shift) {
  uint32_t mixed = 0;
  for (int64_t back = 0; back < n; ++back) mixed += static_cast<uint32_t>(newest[back * step]) * kMultipliers[back];
  mixed ^= mixed >> 15;
  return static_cast<uint32_t>(mixed * kMultipliers[3]) >> shift;
}

// A continuation while its request's tree is built.
struct Continuation {
  bool exists;
  int64_t parent;               // the leader above
  double weight, parent_weight; // of itself; of all that share its parent
};

// The continuations that one node represents.
struct Supporters {
  double weight = 0;
  int64_t count = 0, own = 0;
};

} // namespace

std::tuple<at::Tensor, at::Tensor> specplug::lookup_store(const at::Tensor& store, const at::Tensor& lens,
                                                          const at::Tensor& linked, const at::Tensor& slots, int64_t slot_len,
                                                          const at::Tensor& token_ids, const at::Tensor& requests,
                                                          const at::Tensor& num_tokens) {
  const auto given = token_ids.accessor<int32_t, 2>();
  const auto counts = num_tokens.accessor<int64_t, 1>(), slot_of = slots.accessor<int64_t, 1>();
  auto len_of = lens.accessor<int64_t, 1>(), linked_of = linked.accessor<int64_t, 1>();
  auto stored = store.accessor<int32_t, 1>();
  const at::Tensor spans = lens.new_empty({slots.size(0), 4}), changes = lens.new_empty({slots.size(0)}, at::kBool);
  for (int64_t k = 0; k < slots.size(0); ++k)
    TORCH_CHECK_VALUE(counts[k] >= 0 && counts[k] <= std::min(slot_len - 1, given.size(1)),
                      "a request has more tokens than a slot holds");
  for (int64_t k = 0; k < slots.size(0); ++k) {
    const int64_t slot = slot_of[k], count = counts[k], start = slot * slot_len + 2, old = len_of[slot];
    const auto tokens = given[requests.accessor<int64_t, 1>()[k]];
    bool changed = count < old;
    for (int64_t i = std::max<int64_t>(old - kRecheck, 0); i < std::min(old, count); ++i)
      changed |= stored[start + i] != tokens[i];
    if (changed) linked_of[slot] = 0;
    for (int64_t i = changed ? 0 : old; i < count; ++i) stored[start + i] = tokens[i];
    len_of[slot] = count;
    changes.accessor<bool, 1>()[k] = changed;
    // The newest token is linked once its successor is known: until then, a lookup would find the query itself.
    const int64_t span[] = {slot, start, linked_of[slot], std::max<int64_t>(count - 1, 0)};
    std::copy_n(span, 4, spans.mutable_data_ptr<int64_t>() + 4 * k);
    linked_of[slot] = span[3];
  }
  return {spans, changes};
}

void specplug::lookup_link(const at::Tensor& heads, const at::Tensor& previous, int64_t shift, int64_t heads_per_slot, int64_t n,
                           const at::Tensor& tokens, const at::Tensor& spans) {
  auto head_of = heads.accessor<int32_t, 1>(), previous_of = previous.accessor<int32_t, 1>();
  const int32_t* token_of = tokens.const_data_ptr<int32_t>();
  const auto span_of = spans.accessor<int64_t, 2>();
  for (int64_t k = 0; k < spans.size(0); ++k) {
    const int64_t slot = span_of[k][0], start = span_of[k][1], linked = span_of[k][2], count = span_of[k][3];
    for (int64_t position = start + std::max(linked, n - 1); position < start + count; ++position) {
      int32_t& head = head_of[slot * heads_per_slot + bucket_of(token_of + position, n, -1, shift)];
      previous_of[position] = head;
      head = position;
    }
  }
}

std::tuple<at::Tensor, at::Tensor> specplug::lookup_follow(const at::Tensor& heads, const at::Tensor& previous, int64_t shift,
                                                           int64_t heads_per_slot, int64_t n, const at::Tensor& tokens,
                                                           const at::Tensor& suffixes, const at::Tensor& slots, int64_t count) {
  const auto head_of = heads.accessor<int32_t, 1>(), previous_of = previous.accessor<int32_t, 1>();
  const auto token_of = tokens.accessor<int32_t, 1>();
  const int64_t num_reqs = slots.size(0), most = suffixes.size(1);
  const at::Tensor positions = slots.new_zeros({num_reqs, count}), lengths = positions.clone();
  for (int64_t r = 0; r < num_reqs; ++r) {
    const int32_t* suffix = suffixes.const_data_ptr<int32_t>() + r * most;
    const int64_t head = slots.accessor<int64_t, 1>()[r] * heads_per_slot + bucket_of(suffix, n, 1, shift);
    int64_t position = head_of[head];
    for (int64_t k = 0; k < count && position != 0; ++k, position = previous_of[position]) {
      int64_t length = 0;
      while (length < std::min(position, most) && suffix[length] != kBreak && token_of[position - length] == suffix[length])
        ++length;
      positions.accessor<int64_t, 2>()[r][k] = position;
      lengths.accessor<int64_t, 2>()[r][k] = length;
    }
  }
  return {positions, lengths};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> specplug::lookup_best(
    const at::Tensor& positions, const at::Tensor& lengths, int64_t num_own, const at::Tensor& tokens, const at::Tensor& ends,
    const at::Tensor& traffic, int64_t cursor, int64_t long_anchor, int64_t min_match, int64_t max_match, int64_t count,
    int64_t depth) {
  const int64_t num_reqs = positions.size(0), traffic_len = traffic.size(0) - 1;
  const auto position_of = positions.accessor<int64_t, 2>(), length_of = lengths.accessor<int64_t, 2>();
  const auto own_token = tokens.accessor<int32_t, 1>(), traffic_token = traffic.accessor<int32_t, 1>();
  const at::Tensor continuations = tokens.new_full({num_reqs, count, depth}, kBreak);
  const at::Tensor best = positions.new_zeros({num_reqs, count}), ages = positions.new_ones({num_reqs, count});
  const at::Tensor own = positions.new_zeros({num_reqs, count}, at::kBool);
  for (int64_t r = 0; r < num_reqs; ++r) {
    const int64_t end = ends.accessor<int64_t, 1>()[r];
    std::vector<int64_t> chosen;
    for (int64_t k = 0; k < positions.size(1); ++k) {
      // The long chain's columns come first: a match of its length in the short chain's columns is a duplicate.
      const bool repeated = position_of[r][k] >= end || (k >= count && length_of[r][k] >= long_anchor);
      const bool is_match = position_of[r][k] != 0 && std::min(length_of[r][k], max_match) >= min_match;
      if (is_match && !(k < num_own && repeated)) chosen.push_back(k);
    }
    const auto is_longer = [&](int64_t a, int64_t b) {
      return std::min(length_of[r][a], max_match) > std::min(length_of[r][b], max_match);
    };
    std::stable_sort(chosen.begin(), chosen.end(), is_longer);
    chosen.resize(std::min<size_t>(chosen.size(), count));
    for (size_t rank = 0; rank < chosen.size(); ++rank) {
      const int64_t k = chosen[rank], position = position_of[r][k];
      const bool is_own = k < num_own;
      const int64_t age = is_own ? end - position : ((cursor - position) % traffic_len + traffic_len) % traffic_len;
      auto continuation = continuations.accessor<int32_t, 3>()[r][rank];
      if (is_own) { // at the end of the known tokens, a repetition continues from its beginning
        for (int64_t d = 0; d < depth; ++d) continuation[d] = own_token[position + 1 + d % age];
      } else {
        for (int64_t d = 0; d < std::min(depth, traffic_len - position); ++d) continuation[d] = traffic_token[position + 1 + d];
      }
      best.accessor<int64_t, 2>()[r][rank] = std::min(length_of[r][k], max_match);
      ages.accessor<int64_t, 2>()[r][rank] = age;
      own.accessor<bool, 2>()[r][rank] = is_own;
    }
  }
  return {continuations, best, ages, own};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> specplug::lookup_prefix_tree(
    const at::Tensor& continuations, const at::Tensor& lengths, const at::Tensor& ages, const at::Tensor& own,
    const at::Tensor& request_features) {
  const int64_t num_reqs = continuations.size(0), count = continuations.size(1), depth = continuations.size(2);
  const auto token_of = continuations.accessor<int32_t, 3>();
  const auto length_of = lengths.accessor<int64_t, 2>(), age_of = ages.accessor<int64_t, 2>();
  const at::Tensor token_ids = continuations.transpose(1, 2).to(at::kLong).contiguous();
  const at::Tensor leaders = lengths.new_zeros({num_reqs, depth, count}), models = leaders.clone();
  const at::Tensor nodes = lengths.new_zeros({num_reqs, depth, count}, at::kBool);
  const at::Tensor features = lengths.new_zeros({num_reqs, depth, count, kNumFeatures}, at::kDouble);
  std::vector<Continuation> all(count);
  for (int64_t r = 0; r < num_reqs; ++r) {
    int64_t longest = 0;
    double total = 0;
    for (int64_t k = 0; k < count; ++k) longest = std::max(longest, length_of[r][k]);
    for (int64_t k = 0; k < count; ++k) {
      // Each token by which a match is longer doubles its weight; the longest match weighs 1.
      const bool exists = length_of[r][k] > 0;
      all[k] = {exists, 0, exists ? std::ldexp(1.0, length_of[r][k] - longest) : 0.0, 0};
      total += all[k].weight;
    }
    for (Continuation& one : all) one.parent_weight = total;
    for (int64_t d = 0; d < depth; ++d) {
      std::vector<Supporters> supporters(count);
      auto leader_of = leaders.accessor<int64_t, 3>()[r][d];
      for (int64_t k = 0; k < count; ++k) {
        const int32_t token = token_of[r][k][d];
        all[k].exists &= token != kBreak;
        if (!all[k].exists) continue;
        int64_t leader = 0;
        while (!(all[leader].exists && all[leader].parent == all[k].parent && token_of[r][leader][d] == token)) ++leader;
        leader_of[k] = leader;
        supporters[leader].weight += all[k].weight;
        supporters[leader].count += 1;
        supporters[leader].own += own.accessor<bool, 2>()[r][k];
      }
      for (int64_t k = 0; k < count; ++k) {
        if (!all[k].exists || leader_of[k] != k) continue;
        const auto& [weight, support, own_support] = supporters[k];
        auto of_node = features.accessor<double, 4>()[r][d][k];
        of_node[0] = 1;
        // The node matters only if its ancestors are accepted: they then lengthen the match.
        of_node[1] = std::log2(std::min<int64_t>(length_of[r][k] + d, 64));
        of_node[2] = std::log((weight + 1e-3) / (std::max(all[k].parent_weight - weight, 0.0) + 0.5));
        of_node[3] = std::log2(support);
        of_node[4] = std::log2(1.0 + age_of[r][k]) / 10;
        of_node[5] = request_features.accessor<double, 1>()[r];
        nodes.accessor<bool, 3>()[r][d][k] = true;
        models.accessor<int64_t, 3>()[r][d][k] = own_support == 0 ? 1 : own_support < support ? 2 : 0;
      }
      for (int64_t k = 0; k < count; ++k) {
        all[k].parent = leader_of[k];
        all[k].parent_weight = supporters[leader_of[k]].weight;
      }
    }
  }
  return {token_ids, leaders, nodes, features, models};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> specplug::lookup_pool(
    const at::Tensor& token_ids, const at::Tensor& leaders, const at::Tensor& nodes, const at::Tensor& log_odds, double limit,
    const at::Tensor& rows, int64_t num_rows) {
  const int64_t depth = nodes.size(1), count = nodes.size(2), width = depth * count;
  const at::Tensor ids = token_ids.new_full({num_rows, width}, kPadding), parents = ids.clone();
  const at::Tensor depths = ids.new_zeros({num_rows, width});
  const at::Tensor values = ids.new_full({num_rows, width}, -std::numeric_limits<float>::infinity(), at::kFloat);
  std::vector<double> value_of(width);
  for (int64_t r = 0; r < nodes.size(0); ++r) {
    const int64_t row = rows.accessor<int64_t, 1>()[r];
    for (int64_t column = 0; column < width; ++column) {
      const int64_t d = column / count, k = column % count;
      if (!nodes.accessor<bool, 3>()[r][d][k]) continue;
      const int64_t parent = d ? (d - 1) * count + leaders.accessor<int64_t, 3>()[r][d - 1][k] : kPadding;
      const double odds = std::clamp(log_odds.accessor<double, 3>()[r][d][k], -limit, limit);
      value_of[column] = -std::log(1 + std::exp(-odds)) + (d ? value_of[parent] : 0);
      ids.accessor<int64_t, 2>()[row][column] = token_ids.accessor<int64_t, 3>()[r][d][k];
      parents.accessor<int64_t, 2>()[row][column] = parent;
      values.accessor<float, 2>()[row][column] = value_of[column];
      depths.accessor<int64_t, 2>()[row][column] = d + 1;
    }
  }
  return {ids, parents, values, depths};
}
