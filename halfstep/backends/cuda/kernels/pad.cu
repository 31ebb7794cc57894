// SPDX-License-Identifier: Apache-2.0
// pad and its backward pass. Forward, elements of the innermost dimension without padding move up to 16 bytes at a
// time; backward, each place gathers from its copies.
#include "device/norm.cuh"
#include "device/window_plan.h"

namespace hscuda {
namespace {

// Elements that move as one.
template <class Word>
struct PadForward {
  PadPlan plan;
  bool narrow;
  const Word* x;
  Word* y;
  Word value;
  __device__ void operator()(int64_t i) const {
    int64_t to = 0, from = 0;
    bool inside = true;
    for (int d = 0; d < HALFSTEP_MAX_DIMS; ++d) {
      if (d >= plan.n) break;
      const PadDim& dim = plan.dims[d];
      const int64_t next = narrow ? dim.padded_divisor.divide(static_cast<uint32_t>(i)) : i / dim.size;
      const int64_t index = i - next * dim.size, source = dim.plain() ? index : dim.source(index);
      i = next;
      to += index * dim.padded_step;
      inside = inside && source >= 0;
      from += source * dim.step;
    }
    y[to] = inside ? x[from] : value;
  }
};

template <class Word>
void move(const Call& call, const PadPlan& plan, int64_t n, Word value) {
  const Tensor &x = call.in[0], &y = call.out[0];
  for_each(call, n,
           PadForward<Word>{plan, n < (int64_t{1} << 31), static_cast<const Word*>(x.data), static_cast<Word*>(y.data),
                            value});
}

void with_divisors(PadPlan& plan) {
  for (int d = 0; d < plan.n; ++d) {
    PadDim& dim = plan.dims[d];
    if (dim.size > 0 && dim.size < (int64_t{1} << 31)) dim.padded_divisor = Divisor(static_cast<uint32_t>(dim.size));
    if (dim.inner > 0 && dim.inner < (int64_t{1} << 31)) dim.divisor = Divisor(static_cast<uint32_t>(dim.inner));
  }
}

halfstep_status pad(Call& call) {
  const auto& a = call.attributes<halfstep_pad_attributes>();
  const Tensor &x = call.in[0], &y = call.out[0];
  if (y.numel == 0) return HALFSTEP_OK;
  PadPlan plan = pad_plan(y, x, a);
  const int item = static_cast<int>(item_size(y.dtype));
  int width = pad_width(plan, 16 / item);
  while (width > 1 && !(starts_even(x, width) && starts_even(y, width))) width /= 2;
  plan = in_units(plan, width);
  with_divisors(plan);
  with_type(y.dtype, [&](auto zero) {
    using T = decltype(zero);
    const T value = a.value.kind == 2 ? convert<T>(a.value.floating) : convert<T>(a.value.integer);
    uint64_t pattern[2];
    for (std::size_t i = 0; i < sizeof pattern; i += sizeof(T)) {
      std::memcpy(reinterpret_cast<char*>(pattern) + i, &value, sizeof(T));
    }
    const int64_t n = y.numel / width;
    switch (item * width) {
      case 1:
        return move(call, plan, n, static_cast<uint8_t>(pattern[0]));
      case 2:
        return move(call, plan, n, static_cast<uint16_t>(pattern[0]));
      case 4:
        return move(call, plan, n, static_cast<uint32_t>(pattern[0]));
      case 8:
        return move(call, plan, n, pattern[0]);
      default:
        return move(call, plan, n, Pack<uint64_t, 2>{pattern[0], pattern[1]});
    }
  });
  return call.launched();
}

// A place's copies are the combinations of its copies along the dimensions, the innermost first. Most have one: it is
// found on the way. For the others the place is taken apart again, copy by copy, as what there is of each dimension
// would lie in local memory.
template <class C>
struct PadBackward {
  PadPlan plan;
  bool narrow, narrow_copies;
  AnyFloat g, x_grad;

  struct Along {
    int64_t index;
    PadDim::Copies copies;
  };
  /// The place's index along a dimension, and where it was copied to there; `i` becomes what the next ones number.
  __device__ __forceinline__ Along take(const PadDim& dim, int64_t& i) const {
    const int64_t next = narrow ? dim.divisor.divide(static_cast<uint32_t>(i)) : i / dim.inner;
    const int64_t index = i - next * dim.inner;
    i = next;
    return {index, dim.copies(index)};
  }
  /// `copy` divided by a dimension's `count`; the rest is the number of the copy there.
  __device__ __forceinline__ int64_t take_copy(int64_t count, int64_t& copy) const {
    if (count == 1) return 0;
    const int64_t next = narrow_copies ? static_cast<uint32_t>(copy) / static_cast<uint32_t>(count) : copy / count;
    const int64_t number = copy - next * count;
    copy = next;
    return number;
  }

  __device__ void operator()(int64_t i) const {
    int64_t to = 0, from = 0, count = 1, rest = i;
#pragma unroll 1
    for (int d = 0; d < plan.n; ++d) {
      const Along along = take(plan.dims[d], rest);
      to += along.index * plan.dims[d].step;
      from += along.copies.at(0) * plan.dims[d].padded_step;
      count *= along.copies.count;
    }
    C sum = 0;
    if (count > 0) sum += g.load<C>(from);
#pragma unroll 1
    for (int64_t copy = 1; copy < count; ++copy) {
      int64_t number = copy;
      from = 0, rest = i;
#pragma unroll 1
      for (int d = 0; d < plan.n; ++d) {
        const Along along = take(plan.dims[d], rest);
        from += along.copies.at(take_copy(along.copies.count, number)) * plan.dims[d].padded_step;
      }
      sum += g.load<C>(from);
    }
    x_grad.store<C>(to, sum);
  }
};

halfstep_status pad_backward(Call& call) {
  const auto& a = call.attributes<halfstep_pad_attributes>();
  const Tensor &g = call.in[0], &x_grad = call.out[0];
  if (x_grad.numel == 0) return HALFSTEP_OK;
  PadPlan plan = pad_plan(g, x_grad, a);
  with_divisors(plan);
  const bool narrow = x_grad.numel < (int64_t{1} << 31), narrow_copies = g.numel < (int64_t{1} << 31);
  if (g.dtype == HALFSTEP_F64 || x_grad.dtype == HALFSTEP_F64) {
    for_each(call, x_grad.numel, PadBackward<double>{plan, narrow, narrow_copies, AnyFloat(g), AnyFloat(x_grad)});
  } else {
    for_each(call, x_grad.numel, PadBackward<float>{plan, narrow, narrow_copies, AnyFloat(g), AnyFloat(x_grad)});
  }
  return call.launched();
}

constexpr KernelDef kKernels[] = {
    {.op = "pad", .dtypes = kAll, .layouts = kStrided, .attributes = true, .run = pad},
    {.op = "pad_backward", .dtypes = kFloating, .layouts = kStrided, .attributes = true, .run = pad_backward},
};

}  // namespace

std::span<const KernelDef> pad_kernels() { return kKernels; }

}  // namespace hscuda
