// SPDX-License-Identifier: Apache-2.0
// Random fills: element i of the row-major order from word i of a Philox stream.
#include "halfstep/core/random.h"

#include <cmath>
#include <limits>

#include "halfstep/backends/cpu/move.h"
#include "halfstep/core/box_muller.h"
#include "halfstep/ops/attributes.h"

namespace halfstep::cpu {
namespace {

PhiloxState state_of(const TensorView& v) {
  const auto* words = static_cast<const std::int64_t*>(v.data);
  const std::int64_t step = v.strides[0];
  return {static_cast<std::uint64_t>(words[0]), static_cast<std::uint64_t>(words[step])};
}

// Blocks of four words (two of 64 bits) are computed once for their elements.
class Words {
 public:
  explicit Words(PhiloxState state) : state_(state) {}
  const PhiloxBlock& block(std::uint64_t index) {
    if (index != index_) {
      index_ = index;
      block_ = philox_block(state_, index);
    }
    return block_;
  }
  std::uint32_t word(std::uint64_t i) { return block(i / 4)[i % 4]; }
  std::uint64_t word64(std::uint64_t i) {
    const PhiloxBlock& b = block(i / 2);
    return std::uint64_t{b[i % 2 * 2 + 1]} << 32 | b[i % 2 * 2];
  }
  double normal(std::uint64_t i) {
    const PhiloxBlock& b = block(i / 4);
    const NormalPair pair = i % 4 < 2 ? normal_pair(b[0], b[1]) : normal_pair(b[2], b[3]);
    return i % 2 == 0 ? pair.first : pair.second;
  }

 private:
  PhiloxState state_;
  std::uint64_t index_ = ~std::uint64_t{0};
  PhiloxBlock block_{};
};

// Sets each element to f(words, i), i its number in row-major order.
template <class T, class F>
void fill(const TensorView& out, PhiloxState state, F&& f) {
  T* data = static_cast<T*>(out.data);
  parallel_for(out.numel, kGrain / 8, [&](std::int64_t begin, std::int64_t end) {
    Words words(state);
    for (std::int64_t i = begin; i < end; ++i) {
      std::int64_t offset = i;
      if (!out.contiguous) {
        offset = 0;
        std::int64_t rest = i;
        for (int d = out.ndim - 1; d >= 0; --d) {
          offset += rest % out.sizes[d] * out.strides[d];
          rest /= out.sizes[d];
        }
      }
      data[offset] = f(words, static_cast<std::uint64_t>(i));
    }
  });
}

// The next value of T below.
template <class T>
T before(T value) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::nextafter(value, -std::numeric_limits<T>::infinity());
  } else {
    // By one place of the 16-bit pattern, which orders magnitudes.
    const std::uint16_t bits = value.bits;
    if ((bits & 0x7fffu) == 0) return T::from_bits(0x8001u);
    return T::from_bits(static_cast<std::uint16_t>(bits & 0x8000u ? bits + 1 : bits - 1));
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
    fill<T>(out[0], state_of(in[1]), [&](Words& words, std::uint64_t i) {
      double u;
      if constexpr (std::is_same_v<T, double>) {
        u = uniform_f64(words.word64(i));
      } else {
        u = uniform_bits(words.word(i), kUniformBits<T>);
      }
      T value = convert<T>(a.a + (a.b - a.a) * u);
      if (a.a < a.b && convert<double>(value) >= a.b) value = before(value);
      return value;
    });
  });
  return Status::ok;
}

Status normal(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const auto& a = *static_cast<const RandomAttributes*>(attributes);
  visit_floating(out[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const PhiloxState state = state_of(in[1]);
    fill<T>(out[0], state, [&](Words& words, std::uint64_t i) {
      if constexpr (std::is_same_v<T, double>) {
        return a.a + a.b * normal_at64(state, i);
      } else {
        return convert<T>(a.a + a.b * words.normal(i));
      }
    });
  });
  return Status::ok;
}

Status randint(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const auto& a = *static_cast<const RandomAttributes*>(attributes);
  visit_all(out[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const PhiloxState state = state_of(in[1]);
    fill<T>(out[0], state, [&](Words&, std::uint64_t i) {
      return convert<T>(
          static_cast<std::int64_t>(static_cast<std::uint64_t>(a.low) + integer_below(state, i, a.range)));
    });
  });
  return Status::ok;
}

Status bernoulli_p(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const std::uint64_t threshold = bernoulli_threshold(static_cast<const RandomAttributes*>(attributes)->a);
  visit_all(out[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    fill<T>(out[0], state_of(in[1]),
            [&](Words& words, std::uint64_t i) { return convert<T>(words.word(i) < threshold); });
  });
  return Status::ok;
}

Status bernoulli(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void*) {
  const TensorView& p = in[0];
  Status status = Status::ok;
  visit_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto probability = [&](std::uint64_t i) {
      std::int64_t offset = 0;
      auto rest = static_cast<std::int64_t>(i);
      for (int d = p.ndim - 1; d >= 0; --d) {
        offset += rest % p.sizes[d] * p.strides[d];
        rest /= p.sizes[d];
      }
      return convert<double>(static_cast<const T*>(p.data)[offset]);
    };
    for (std::int64_t i = 0; i < p.numel; ++i) {
      const double v = probability(static_cast<std::uint64_t>(i));
      if (!(v >= 0 && v <= 1)) status = Status::failed;
    }
    if (status != Status::ok) {
      context->set_error(context, "expected probabilities from 0 to 1");
      return;
    }
    fill<T>(out[0], state_of(in[1]), [&](Words& words, std::uint64_t i) {
      return convert<T>(words.word(i) < bernoulli_threshold(probability(i)));
    });
  });
  return status;
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
