// SPDX-License-Identifier: Apache-2.0
// Random fills: element i of the row-major order from word i of a Philox stream.
#include "halfstep/core/random.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "halfstep/backends/cpu/convert_block.h"
#include "halfstep/backends/cpu/move.h"
#include "halfstep/backends/cpu/random_block.h"
#include "halfstep/core/box_muller.h"
#include "halfstep/ops/attributes.h"

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kBlocks = 128;  // drawn at a time

PhiloxState state_of(const TensorView& v) {
  const auto* words = static_cast<const std::int64_t*>(v.data);
  const std::int64_t step = v.strides[0];
  return {static_cast<std::uint64_t>(words[0]), static_cast<std::uint64_t>(words[step])};
}

// Where the tensor has element `i` of its row-major order.
std::int64_t place(const TensorView& out, std::int64_t i) {
  if (out.contiguous) return i;
  std::int64_t offset = 0;
  for (int d = out.ndim - 1; d >= 0; --d) {
    offset += i % out.sizes[d] * out.strides[d];
    i /= out.sizes[d];
  }
  return offset;
}

// Sets each element to f(i), i its number in row-major order.
template <class T, class F>
void fill(const TensorView& out, F&& f) {
  T* data = static_cast<T*>(out.data);
  parallel_for(out.numel, kGrain / 8, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) data[place(out, i)] = f(static_cast<std::uint64_t>(i));
  });
}

// Calls f(values, i, stop) for runs of elements, where draw(state, first, blocks, values) makes four values from each
// block and values[0] is element i's.
template <class V, class F>
void for_blocks(const TensorView& out, PhiloxState state, void (*draw)(PhiloxState, std::uint64_t, std::int64_t, V*),
                F&& f) {
  parallel_for(out.numel, kGrain / 8, [&](std::int64_t begin, std::int64_t end) {
    V values[4 * kBlocks];
    for (std::int64_t i = begin; i < end;) {
      const std::int64_t first = i / 4, blocks = std::min(kBlocks, (end + 3) / 4 - first);
      draw(state, static_cast<std::uint64_t>(first), blocks, values);
      const std::int64_t stop = std::min(end, 4 * (first + blocks));
      f(values + (i - 4 * first), i, stop);
      i = stop;
    }
  });
}

// Sets elements i to stop - 1 to f(0), f(1), ...
template <class T, class F>
void set_elements(const TensorView& out, std::int64_t i, std::int64_t stop, F&& f) {
  T* data = static_cast<T*>(out.data);
  if (out.contiguous) {
    data += i;
    for (std::int64_t j = 0; j < stop - i; ++j) data[j] = f(j);
  } else {
    for (std::int64_t j = 0; j < stop - i; ++j) data[place(out, i + j)] = f(j);
  }
}

// Sets each element to f(word, i), where a word has 64 bits: two of them a block.
template <class T, class F>
void fill_words64(const TensorView& out, PhiloxState state, F&& f) {
  T* data = static_cast<T*>(out.data);
  parallel_for(out.numel, kGrain / 8, [&](std::int64_t begin, std::int64_t end) {
    std::uint32_t words[4 * kBlocks];
    for (std::int64_t i = begin; i < end;) {
      const std::int64_t first = i / 2, blocks = std::min(kBlocks, (end + 1) / 2 - first);
      random_words(state, static_cast<std::uint64_t>(first), blocks, words);
      const std::int64_t stop = std::min(end, 2 * (first + blocks));
      const std::uint32_t* halves = words + 2 * (i - 2 * first);
      for (; i < stop; ++i, halves += 2) {
        data[place(out, i)] = f(std::uint64_t{halves[1]} << 32 | halves[0], static_cast<std::uint64_t>(i));
      }
    }
  });
}

// Sets each element to f(value), a double, rounded once.
template <class T, class V, class F>
void fill_doubles(const TensorView& out, PhiloxState state, void (*draw)(PhiloxState, std::uint64_t, std::int64_t, V*),
                  F&& f) {
  T* data = static_cast<T*>(out.data);
  for_blocks(out, state, draw, [&](const V* values, std::int64_t i, std::int64_t stop) {
    double results[4 * kBlocks];
    for (std::int64_t j = 0; j < stop - i; ++j) results[j] = f(values[j]);
    if (out.contiguous) return store_doubles(out.dtype, data + i, stop - i, results);
    for (std::int64_t j = i; j < stop; ++j) data[place(out, j)] = convert<T>(results[j - i]);
  });
}

// The largest value of T below `bound`.
template <class T>
double below(double bound) {
  const T value = convert<T>(bound);
  if (convert<double>(value) < bound) return convert<double>(value);
  if constexpr (std::is_floating_point_v<T>) {
    return std::nextafter(value, -std::numeric_limits<T>::infinity());
  } else {
    // By one place of the 16-bit pattern, which orders magnitudes.
    const std::uint16_t bits = value.bits;
    if ((bits & 0x7fffu) == 0) return convert<double>(T::from_bits(0x8001u));
    return convert<double>(T::from_bits(static_cast<std::uint16_t>(bits & 0x8000u ? bits + 1 : bits - 1)));
  }
}

// 16-bit types take as many bits as their significand has, or the largest numbers would round up to 1.
template <class T>
constexpr int kUniformBits = std::is_same_v<T, Half>       ? 11
                             : std::is_same_v<T, BFloat16> ? 8
                                                           : 24;

Status uniform(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const auto& a = *static_cast<const RandomAttributes*>(attributes);
  visit_floating(out[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const PhiloxState state = state_of(in[1]);
    // The sum may round up to the bound, which does not belong to the interval.
    const double last = a.a < a.b ? below<T>(a.b) : std::numeric_limits<double>::infinity();
    const auto between = [&](double u) { return std::min(a.a + (a.b - a.a) * u, last); };
    if constexpr (std::is_same_v<T, double>) {
      fill_words64<T>(out[0], state, [&](std::uint64_t word, std::uint64_t) { return between(uniform_f64(word)); });
    } else {
      fill_doubles<T>(out[0], state, random_words,
                      [&](std::uint32_t word) { return between(uniform_bits(word, kUniformBits<T>)); });
    }
  });
  return Status::ok;
}

Status normal(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const auto& a = *static_cast<const RandomAttributes*>(attributes);
  visit_floating(out[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const PhiloxState state = state_of(in[1]);
    if constexpr (std::is_same_v<T, double>) {
      fill<T>(out[0], [&](std::uint64_t i) { return a.a + a.b * normal_at64(state, i); });
    } else {
      fill_doubles<T>(out[0], state, random_normals, [&](double z) { return a.a + a.b * z; });
    }
  });
  return Status::ok;
}

Status randint(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const auto& a = *static_cast<const RandomAttributes*>(attributes);
  visit_all(out[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const PhiloxState state = state_of(in[1]);
    fill_words64<T>(out[0], state, [&](std::uint64_t word, std::uint64_t i) {
      std::uint64_t value = 0;
      if (!detail::map_below(word, a.range, value)) [[unlikely]]
        value = integer_below(state, i, a.range);
      return convert<T>(static_cast<std::int64_t>(static_cast<std::uint64_t>(a.low) + value));
    });
  });
  return Status::ok;
}

Status bernoulli_p(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const std::uint64_t threshold = bernoulli_threshold(static_cast<const RandomAttributes*>(attributes)->a);
  // Words are compared with the last one below the threshold, which itself may be 2^32. Where there is none, the first
  // word's result is 0 too.
  const auto last = static_cast<std::uint32_t>(std::max<std::uint64_t>(threshold, 1) - 1);
  visit_all(out[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T heads = convert<T>(threshold != 0), zero{};
    for_blocks(out[0], state_of(in[1]), random_words,
               [&](const std::uint32_t* words, std::int64_t i, std::int64_t stop) {
                 set_elements<T>(out[0], i, stop, [=](std::int64_t j) { return words[j] <= last ? heads : zero; });
               });
  });
  return Status::ok;
}

// Whether a word is below bernoulli_threshold(p), which is cut from p 2^32 + 1/2 to an integer: without that integer,
// which no vector instruction makes from doubles. word + 1 comes from the signed number with the top bit turned.
bool below_threshold_of(std::uint32_t word, double p) {
  const double next = static_cast<double>(static_cast<std::int32_t>(word ^ 0x80000000u)) + 0x1.00000002p31;
  return next <= p * 0x1p32 + 0.5;
}

Status bernoulli(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void*) {
  const TensorView& p = in[0];
  std::atomic<bool> outside{false};
  visit_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* data = static_cast<T*>(out[0].data);
    for_blocks(out[0], state_of(in[1]), random_words,
               [&](const std::uint32_t* words, std::int64_t i, std::int64_t stop) {
                 double v[4 * kBlocks];  // probabilities, then ones and zeros
                 const std::int64_t n = stop - i;
                 if (p.contiguous) {
                   load_doubles(p.dtype, element(p.dtype, static_cast<const void*>(p.data), i), n, v);
                 } else {
                   for (std::int64_t j = 0; j < n; ++j) {
                     v[j] = convert<double>(static_cast<const T*>(p.data)[place(p, i + j)]);
                   }
                 }
                 int wrong = 0;
                 for (std::int64_t j = 0; j < n; ++j) wrong |= !(v[j] >= 0) | !(v[j] <= 1);
                 if (wrong) outside.store(true, std::memory_order_relaxed);
                 for (std::int64_t j = 0; j < n; ++j) v[j] = below_threshold_of(words[j], v[j]) ? 1 : 0;
                 if (out[0].contiguous) return store_doubles(out[0].dtype, data + i, n, v);
                 for (std::int64_t j = 0; j < n; ++j) data[place(out[0], i + j)] = convert<T>(v[j]);
               });
  });
  if (!outside.load(std::memory_order_relaxed)) return Status::ok;
  context->set_error(context, "expected probabilities from 0 to 1");
  return Status::failed;
}

Status randperm(KernelContext*, const TensorView* in, int, TensorView* out, int, const void*) {
  halfstep::randperm(state_of(in[1]), out[0].numel, static_cast<std::int64_t*>(out[0].data));
  return Status::ok;
}

const RegisterCpuKernel random_kernels[] = {
    {"uniform", kFloatingDTypes, uniform},     {"normal", kFloatingDTypes, normal},
    {"randint", kAllDTypes, randint},          {"bernoulli_p", kAllDTypes, bernoulli_p},
    {"bernoulli", kFloatingDTypes, bernoulli}, {"randperm", {DType::i64}, randperm},
};

}  // namespace
}  // namespace halfstep::cpu
