// Layers with recurrent states: a row continues the state of the row before it in its sequence.
//
// Sums are float32, in an order that depends on sizes only.  A state is rounded to its type in memory after each row.  So a
// row's result does not depend on where its sequence is cut, nor on the other sequences.  state_scan.py documents the
// arguments.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "operators.h"
#include "types.h"
#include "vectors.h"

namespace {

// Channels that are convolved together: a row of them is a run of 1 KiB in memory.
constexpr int kMostTaps = 16, kChannels = 256;
// Columns of a state that are computed together: so many sums do not wait for each other, and 128 keys fit into the
// first cache.
constexpr int kVectors = 4, kColumns = kVectors * kLanes;
// Rows of a Mamba-2 state that are computed together.
constexpr int kStateRows = 32;

// Sequences of rows, and the places of their states; a source below 0 is a state of zeros.
struct Sequences {
  const int64_t *starts, *sources, *places;
  int64_t count;

  Sequences(const at::Tensor& starts, const at::Tensor& sources, const at::Tensor& places)
      : starts(starts.const_data_ptr<int64_t>()), sources(sources.const_data_ptr<int64_t>()),
        places(places.const_data_ptr<int64_t>()), count(sources.numel()) {
    TORCH_CHECK(starts.numel() == count + 1 && places.numel() == count && starts.is_contiguous() &&
                    sources.is_contiguous() && places.is_contiguous(),
                "state_scan: sequences do not fit together");
  }
  int64_t num_rows() const { return starts[count]; }
};

// Calls `visit(sequence, part)` for all parts of all sequences.
template <typename Visit>
void for_parts(const Sequences& sequences, int64_t parts, const Visit& visit) {
  at::parallel_for(0, sequences.count * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) visit(i / parts, i % parts);
  });
}

float* scratch(std::vector<float>& kept, int64_t size) {
  kept.assign(size + kLanes, 0.0f);
  float* start = kept.data();
  return start + (-(reinterpret_cast<uintptr_t>(start) / sizeof(float)) & (kLanes - 1));
}

template <typename S>
inline Vec rounded(Vec v) {
  if constexpr (std::is_same_v<S, uint16_t>) {
    const VecUint bits = (VecUint)v;
    const VecUint up = bits + 0x7fffu + (bits >> 16 & 1u);
    return select((VecInt)(v == v), (Vec)(up & 0xffff0000u), v);
  } else if constexpr (std::is_same_v<S, Half>) {
    for (int i = 0; i < kLanes; ++i) v[i] = Half(v[i]);
    return v;
  } else {
    return v;
  }
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }
inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
inline Vec silu(Vec x) {
  const Vec small = exp2(select((VecInt)(x < 0), x, -x) * kLog2E);
  return x * select((VecInt)(x < 0), small, splat(1.0f)) / (1.0f + small);
}

// ---- Convolution.

struct Convolution {
  const at::Tensor &x, &weight;
  const std::optional<at::Tensor>& bias;
  const at::Tensor &before, &after;
  const Sequences& sequences;
  bool activates;
  at::Tensor& output;

  template <typename S>
  void compute(int64_t sequence, int64_t first) const {
    const int64_t taps = weight.size(0), width = weight.size(1), count = std::min<int64_t>(kChannels, width - first);
    const int64_t padded = round_up(count, kLanes);
    alignas(64) float window[kMostTaps][kChannels], factors[kMostTaps][kChannels], added[kChannels];
    for (int64_t tap = 0; tap < taps; ++tap) {
      std::fill_n(window[tap], padded, 0.0f);
      std::fill_n(factors[tap], padded, 0.0f);
      std::copy_n(weight.const_data_ptr<float>() + tap * width + first, count, factors[tap]);
    }
    std::fill_n(added, padded, 0.0f);
    if (bias) std::copy_n(bias->const_data_ptr<float>() + first, count, added);
    if (const int64_t source = sequences.sources[sequence]; source >= 0)
      for (int64_t tap = 0; tap + 1 < taps; ++tap)
        for (int64_t c = 0; c < count; ++c) window[tap][c] = to_float(*of<S>(before, source, tap, first + c));
    const int64_t start = sequences.starts[sequence], length = sequences.starts[sequence + 1] - start;
    for (int64_t row = 0; row < length; ++row) {
      const float* inputs = x.const_data_ptr<float>() + (start + row) * width + first;
      std::transform(inputs, inputs + count, window[(row + taps - 1) % taps],
                     [](float input) { return to_float(from_float<S>(input)); });
      const float* inputs_of[kMostTaps];
      for (int64_t tap = 0; tap < taps; ++tap) inputs_of[tap] = window[(row + tap) % taps];
      alignas(64) float sums[kChannels];
      for (int64_t v = 0; v < padded; v += kLanes) {
        Vec sum = load<Vec>(added + v);
        for (int64_t tap = 0; tap < taps; ++tap)
          sum = accumulate(sum, load<Vec>(inputs_of[tap] + v), load<Vec>(factors[tap] + v));
        store(sums + v, activates ? silu(sum) : sum);
      }
      std::copy_n(sums, count, output.mutable_data_ptr<float>() + (start + row) * width + first);
    }
    for (int64_t tap = 0; tap + 1 < taps; ++tap)
      for (int64_t c = 0; c < count; ++c)
        *of<S>(after, sequences.places[sequence], tap, first + c) = from_float<S>(window[(length + tap) % taps][c]);
  }

  template <typename S>
  static S* of(const at::Tensor& states, int64_t place, int64_t tap, int64_t channel) {
    return data<S>(states) + place * states.stride(0) + tap * states.stride(1) + channel * states.stride(2);
  }
};

// ---- States of matrices.

template <typename S>
S* state_of(const at::Tensor& states, int64_t place, int64_t head) {
  return data<S>(states) + place * states.stride(0) + head * states.stride(1);
}

void check_states(const at::Tensor& before, const at::Tensor& after) {
  for (const auto* states : {&before, &after})
    TORCH_CHECK(states->dim() == 4 && states->stride(3) == 1 && states->stride(2) == states->size(3) &&
                    states->scalar_type() == before.scalar_type() && states->sizes().slice(1) == before.sizes().slice(1),
                "state_scan: states must be alike, and contiguous within a head");
}

// Copies `count` numbers of each of `rows` rows of a state to scratch rows of `width`, or back.
template <typename S>
void read_state(const S* state, int64_t stride, int64_t rows, int64_t count, float* kept, int64_t width) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < count; ++c) kept[r * width + c] = to_float(state[r * stride + c]);
}
template <typename S>
void write_state(const float* kept, int64_t width, int64_t rows, int64_t count, S* state, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < count; ++c) state[r * stride + c] = from_float<S>(kept[r * width + c]);
}

struct GatedDelta {
  const at::Tensor &query, &key, &value, &decay, &rate, &before, &after;
  const Sequences& sequences;
  at::Tensor& output;

  // Writes the unit vector of `x`, times `factor`.
  static void normalise(const float* x, int64_t size, float factor, float* unit) {
    std::copy_n(x, size, unit);
    Vec squares{};
    for (int64_t k = 0; k < size; k += kLanes) squares = accumulate(squares, load<Vec>(unit + k), load<Vec>(unit + k));
    const float scale = factor / std::sqrt(sum_lanes(squares)[0] + 1e-6f);
    for (int64_t k = 0; k < size; ++k) unit[k] *= scale;
  }

  template <typename S>
  void compute(int64_t sequence, int64_t head, int64_t first) const {
    const int64_t heads = value.size(1), keys = key.size(2), values = value.size(2), padded = round_up(keys, kLanes);
    const int64_t count = std::min<int64_t>(kColumns, values - first), key_head = head / (heads / key.size(1));
    thread_local std::vector<float> kept;
    float* state = scratch(kept, keys * kColumns + 2 * padded);
    float *unit_key = state + keys * kColumns, *unit_query = unit_key + padded;
    if (const int64_t source = sequences.sources[sequence]; source >= 0)
      read_state(state_of<S>(before, source, head) + first, values, keys, count, state, kColumns);
    for (int64_t row = sequences.starts[sequence]; row < sequences.starts[sequence + 1]; ++row) {
      const int64_t of_keys = (row * key.size(1) + key_head) * keys, of_values = (row * heads + head) * values + first;
      normalise(key.const_data_ptr<float>() + of_keys, keys, 1.0f, unit_key);
      normalise(query.const_data_ptr<float>() + of_keys, keys, 1.0f / std::sqrt(static_cast<float>(keys)), unit_query);
      alignas(64) float numbers[kColumns] = {};
      std::copy_n(value.const_data_ptr<float>() + of_values, count, numbers);
      step<S>(state, unit_key, unit_query, decay.const_data_ptr<float>()[row * heads + head],
              rate.const_data_ptr<float>()[row * heads + head], keys, numbers);
      std::copy_n(numbers, count, output.mutable_data_ptr<float>() + of_values);
    }
    write_state(state, kColumns, keys, count, state_of<S>(after, sequences.places[sequence], head) + first, values);
  }

  // Replaces the values `numbers` by the output.
  template <typename S>
  static void step(float* state, const float* key, const float* query, float decay, float rate, int64_t keys,
                   float* numbers) {
    Vec sums[kVectors] = {}, change[kVectors];
    for (int64_t k = 0; k < keys; ++k)
      for (int v = 0; v < kVectors; ++v)
        sums[v] = accumulate(sums[v], splat(key[k]), load<Vec>(state + k * kColumns + v * kLanes));
    for (int v = 0; v < kVectors; ++v) {
      change[v] = (load<Vec>(numbers + v * kLanes) - sums[v] * decay) * rate;
      sums[v] = Vec{};
    }
    for (int64_t k = 0; k < keys; ++k)
      for (int v = 0; v < kVectors; ++v) {
        float* at = state + k * kColumns + v * kLanes;
        const Vec next = rounded<S>(accumulate(load<Vec>(at) * decay, splat(key[k]), change[v]));
        store(at, next);
        sums[v] = accumulate(sums[v], splat(query[k]), next);
      }
    for (int v = 0; v < kVectors; ++v) store(numbers + v * kLanes, sums[v]);
  }
};

struct Mamba2 {
  const at::Tensor &x, &dt, &a, &b, &c, &d, &before, &after;
  const Sequences& sequences;
  at::Tensor& output;

  template <typename S>
  void compute(int64_t sequence, int64_t head, int64_t first) const {
    constexpr int together = 4; // sums that do not wait for each other
    const int64_t heads = x.size(1), size = x.size(2), numbers = b.size(2), width = round_up(numbers, kLanes);
    const int64_t rows = std::min<int64_t>(kStateRows, size - first), group = head / (heads / b.size(1));
    thread_local std::vector<float> kept;
    float* state = scratch(kept, (kStateRows + 2) * width);
    float *in = state + kStateRows * width, *out = in + width;
    if (const int64_t source = sequences.sources[sequence]; source >= 0)
      read_state(state_of<S>(before, source, head) + first * numbers, numbers, rows, numbers, state, width);
    for (int64_t row = sequences.starts[sequence]; row < sequences.starts[sequence + 1]; ++row) {
      const float step = dt.const_data_ptr<float>()[row * heads + head];
      const float decay = std::exp(step * a.const_data_ptr<float>()[head]);
      const int64_t of_group = (row * b.size(1) + group) * numbers, of_row = (row * heads + head) * size + first;
      std::copy_n(b.const_data_ptr<float>() + of_group, numbers, in);
      std::copy_n(c.const_data_ptr<float>() + of_group, numbers, out);
      float values[kStateRows] = {}, results[kStateRows];
      std::copy_n(x.const_data_ptr<float>() + of_row, rows, values);
      for (int64_t r = 0; r < rows; r += together) {
        Vec sums[together] = {};
        for (int64_t n = 0; n < width; n += kLanes)
          for (int i = 0; i < together; ++i) {
            float* at = state + (r + i) * width + n;
            const Vec next = rounded<S>(accumulate(load<Vec>(at) * decay, splat(step * values[r + i]), load<Vec>(in + n)));
            store(at, next);
            sums[i] = accumulate(sums[i], next, load<Vec>(out + n));
          }
        for (int i = 0; i < together; ++i)
          results[r + i] = sum_lanes(sums[i])[0] + d.const_data_ptr<float>()[head] * values[r + i];
      }
      std::copy_n(results, rows, output.mutable_data_ptr<float>() + of_row);
    }
    write_state(state, width, rows, numbers, state_of<S>(after, sequences.places[sequence], head) + first * numbers, numbers);
  }
};

// Applies a function of floats: those of torch compute the last numbers of a tensor in another way than the others.
template <typename Function>
at::Tensor map(const at::Tensor& x, const Function& function) {
  auto result = at::empty_like(x);
  const int64_t heads = x.size(1);
  for (int64_t i = 0; i < x.numel(); ++i) result.mutable_data_ptr<float>()[i] = function(x.const_data_ptr<float>()[i], i % heads);
  return result;
}

void check_rows(std::initializer_list<const at::Tensor*> tensors) {
  for (const auto* tensor : tensors)
    TORCH_CHECK(tensor->scalar_type() == at::kFloat && tensor->is_contiguous(), "state_scan: rows must be contiguous float32");
}

} // namespace

at::Tensor specplug::causal_conv(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                 const at::Tensor& before, const at::Tensor& after, const at::Tensor& starts,
                                 const at::Tensor& sources, const at::Tensor& places, bool activates) {
  const Sequences sequences(starts, sources, places);
  check_rows({&x, &weight});
  TORCH_CHECK(weight.size(0) <= kMostTaps && before.size(1) + 1 == weight.size(0) && before.size(2) == x.size(1) &&
                  before.scalar_type() == after.scalar_type() && x.size(0) == sequences.num_rows(),
              "causal_conv: sizes do not fit");
  auto output = at::empty_like(x);
  const Convolution convolution{x, weight, bias, before, after, sequences, activates, output};
  with_type(before.scalar_type(), [&](auto type) {
    for_parts(sequences, (x.size(1) + kChannels - 1) / kChannels, [&](int64_t sequence, int64_t part) {
      convolution.compute<decltype(type)>(sequence, part * kChannels);
    });
  });
  return output;
}

at::Tensor specplug::gated_delta(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& a,
                                 const at::Tensor& b, const at::Tensor& a_log, const at::Tensor& dt_bias,
                                 const at::Tensor& before, const at::Tensor& after, const at::Tensor& starts,
                                 const at::Tensor& sources, const at::Tensor& places) {
  const Sequences sequences(starts, sources, places);
  check_rows({&query, &key, &value, &a, &b, &a_log, &dt_bias});
  check_states(before, after);
  const int64_t parts = (value.size(2) + kColumns - 1) / kColumns, heads = value.size(1);
  TORCH_CHECK(before.size(1) == heads && before.size(2) == key.size(2) && before.size(3) == value.size(2) &&
                  value.size(0) == sequences.num_rows() && heads % key.size(1) == 0,
              "gated_delta: sizes do not fit");
  const auto decay = map(a, [&](float x, int64_t head) {
    return std::exp(-std::exp(a_log.const_data_ptr<float>()[head]) * softplus(x + dt_bias.const_data_ptr<float>()[head]));
  });
  const auto rate = map(b, [](float x, int64_t) { return sigmoid(x); });
  auto output = at::empty_like(value);
  const GatedDelta rule{query, key, value, decay, rate, before, after, sequences, output};
  with_type(before.scalar_type(), [&](auto type) {
    for_parts(sequences, heads * parts, [&](int64_t sequence, int64_t part) {
      rule.compute<decltype(type)>(sequence, part / parts, part % parts * kColumns);
    });
  });
  return output;
}

at::Tensor specplug::mamba2_scan(const at::Tensor& x, const at::Tensor& dt, const at::Tensor& a, const at::Tensor& b,
                                 const at::Tensor& c, const at::Tensor& d, const at::Tensor& dt_bias,
                                 const at::Tensor& before, const at::Tensor& after, const at::Tensor& starts,
                                 const at::Tensor& sources, const at::Tensor& places) {
  const Sequences sequences(starts, sources, places);
  check_rows({&x, &dt, &a, &b, &c, &d, &dt_bias});
  check_states(before, after);
  const int64_t parts = (x.size(2) + kStateRows - 1) / kStateRows, heads = x.size(1);
  TORCH_CHECK(before.size(1) == heads && before.size(2) == x.size(2) && before.size(3) == b.size(2) &&
                  x.size(0) == sequences.num_rows() && heads % b.size(1) == 0,
              "mamba2_scan: sizes do not fit");
  const auto steps =
      map(dt, [&](float value, int64_t head) { return softplus(value + dt_bias.const_data_ptr<float>()[head]); });
  auto output = at::empty_like(x);
  const Mamba2 scan{x, steps, a, b, c, d, before, after, sequences, output};
  with_type(before.scalar_type(), [&](auto type) {
    for_parts(sequences, heads * parts, [&](int64_t sequence, int64_t part) {
      scan.compute<decltype(type)>(sequence, part / parts, part % parts * kStateRows);
    });
  });
  return output;
}
