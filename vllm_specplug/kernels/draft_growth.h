// The growth of one request's draft tree (EAGLE-2, section 4).  Its reference is in Python: core/growth.py and
// core/pruning.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity(); // the value of a node that must not be used

// Returns the indices of the best `count` values, ties to the lower index, without values below `floor`; ascending.
inline std::vector<int64_t> best_indices(const float* values, int64_t size, int64_t count, float floor) {
  std::vector<int64_t> found(size);
  std::iota(found.begin(), found.end(), 0);
  std::stable_sort(found.begin(), found.end(), [values](int64_t a, int64_t b) { return values[a] > values[b]; });
  found.resize(std::min(size, count));
  found.erase(std::remove_if(found.begin(), found.end(), [=](int64_t i) { return values[i] < floor; }), found.end());
  std::sort(found.begin(), found.end());
  return found;
}

// The nodes drafted so far, in the order of drafting, and the beam: those of the newest level that the drafter reads next.
struct GrowingTree {
  std::vector<int64_t> token_ids, parents, depths; // a parent is the index of a node; -1: the root
  std::vector<float> log_values;                   // sums of log probabilities from the root
  std::vector<int64_t> beam, sources;              // nodes; and of each, the place of its parent in the beam before
  std::vector<std::vector<bool>> sees;             // by place in the beam: which of all nodes read are its ancestors or itself

  // Adds a level: `width` children of each node of the beam (at first: of the root), best first.
  void append(const int64_t* child_ids, const float* log_probs, int64_t width) {
    width_ = width, level_start_ = token_ids.size(), ++num_levels_;
    const int64_t num_parents = std::max<int64_t>(beam.size(), 1);
    for (int64_t i = 0; i < num_parents * width; ++i) {
      const int64_t parent = beam.empty() ? -1 : beam[i / width];
      const float log_prob = std::isnan(log_probs[i]) ? kNever : std::min(log_probs[i], 0.0f);
      token_ids.push_back(child_ids[i]);
      parents.push_back(parent);
      depths.push_back(num_levels_);
      log_values.push_back((parent < 0 ? 0.0f : log_values[parent]) + log_prob);
    }
  }

  // Whether a deeper node could be among the best `num_nodes`: it has at most the newest level's best value.
  bool can_grow(int64_t num_nodes) const {
    const float bound = *std::max_element(log_values.begin() + level_start_, log_values.end());
    const auto is_as_good = [bound](float value) { return value >= bound; };
    return bound > kNever && std::count_if(log_values.begin(), log_values.end(), is_as_good) < num_nodes;
  }

  // Makes the best nodes of the newest level the beam.
  void pick_beam(int64_t count) {
    const int64_t size = token_ids.size() - level_start_;
    const auto picked = best_indices(log_values.data() + level_start_, size, count, kNever);
    const auto above = std::exchange(sees, {});
    beam.clear(), sources.clear();
    for (size_t place = 0; place < picked.size(); ++place) {
      const int64_t source = picked[place] / width_;
      std::vector<bool> row = above.empty() ? std::vector<bool>{} : above[source];
      row.resize(row.size() + picked.size());
      row[row.size() - picked.size() + place] = true;
      sees.push_back(std::move(row));
      sources.push_back(source);
      beam.push_back(level_start_ + picked[place]);
    }
  }

 private:
  int64_t width_ = 0, level_start_ = 0, num_levels_ = 0;
};

} // namespace
