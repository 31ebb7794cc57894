// SPDX-License-Identifier: Apache-2.0
// sum, mean and the norm of many tensors. Floats are added up in float64, in blocks, integers in 64 bits.
#include "walk.h"

namespace sim {
namespace {

/// Some dimensions of a tensor, the innermost first, merged where they lie straight behind each other.
struct Dims {
  int n = 0;
  int64_t sizes[HALFSTEP_MAX_DIMS], strides[HALFSTEP_MAX_DIMS];
  int64_t numel = 1;

  void add_outer(int64_t size, int64_t stride) {
    numel *= size;
    if (size == 1) return;
    if (n > 0 && stride == strides[n - 1] * sizes[n - 1]) {
      sizes[n - 1] *= size;
    } else {
      sizes[n] = size;
      strides[n++] = stride;
    }
  }
  int64_t inner_size() const { return n > 0 ? sizes[0] : 1; }
  int64_t inner_stride() const { return n > 0 ? strides[0] : 1; }
  int64_t offset(int64_t i) const {
    int64_t at = 0;
    for (int d = 0; d < n; ++d) {
      at += i % sizes[d] * strides[d];
      i /= sizes[d];
    }
    return at;
  }
};

struct Plan {
  Dims kept, reduced;
  Plan(const View& x, const halfstep_int_list& dims) {
    uint32_t mask = dims.size == 0 ? ~0u : 0u;
    for (int i = 0; i < dims.size; ++i) mask |= 1u << (dims.values[i] < 0 ? dims.values[i] + x.ndim : dims.values[i]);
    for (int d = x.ndim - 1; d >= 0; --d) (mask >> d & 1 ? reduced : kept).add_outer(x.sizes[d], x.strides[d]);
  }
};

constexpr int64_t kBlock = 1024;  // elements that are added up before they join the total
constexpr int kLanes = 8;

/// The sum of f(x) over a run, in lanes so that additions need not wait for each other.
template <class T, class F>
double sum_run(const T* x, int64_t n, int64_t step, F f) {
  double total = 0;
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t end = std::min(n, start + kBlock);
    double lanes[kLanes] = {};
    int64_t i = start;
    for (; i + kLanes <= end; i += kLanes) {
      for (int l = 0; l < kLanes; ++l) lanes[l] += f(static_cast<double>(load(x[(i + l) * step])));
    }
    for (; i < end; ++i) lanes[0] += f(static_cast<double>(load(x[i * step])));
    total += ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
  }
  return total;
}

constexpr int64_t kColumns = 128;  // results that lie side by side and are summed together

template <class T, class Store>
void sum_floats(const View& x, const Plan& plan, Store store) {
  const auto same = [](double v) { return v; };
  const Dims &kept = plan.kept, &reduced = plan.reduced;
  if (kept.numel == 0) return;
  const int64_t inner = kept.inner_size();
  if (inner >= 4 && kept.inner_stride() == 1 && reduced.inner_stride() != 1) {
    for (int64_t first = 0; first < kept.numel;) {
      const int64_t n = std::min(kColumns, inner - first % inner);
      const T* base = x.at<T>(kept.offset(first));
      double totals[kColumns] = {}, part[kColumns] = {};
      for (int64_t row = 0; row < reduced.numel; ++row) {
        const T* line = base + reduced.offset(row);
        for (int64_t c = 0; c < n; ++c) part[c] += static_cast<double>(load(line[c]));
        if (row % 128 != 127) continue;
        for (int64_t c = 0; c < n; ++c) {
          totals[c] += part[c];
          part[c] = 0;
        }
      }
      for (int64_t c = 0; c < n; ++c) store(first + c, totals[c] + part[c]);
      first += n;
    }
    return;
  }
  for (int64_t o = 0; o < kept.numel; ++o) {
    const T* base = x.at<T>(kept.offset(o));
    double total = 0;
    const int64_t run = reduced.inner_size();
    for (int64_t at = 0; at < reduced.numel; at += run) {
      total += sum_run(base + reduced.offset(at), run, reduced.inner_stride(), same);
    }
    store(o, total);
  }
}

template <class T, class Store>
void sum_integers(const View& x, const Plan& plan, Store store) {
  for (int64_t o = 0; o < plan.kept.numel; ++o) {
    const T* base = x.at<T>(plan.kept.offset(o));
    uint64_t total = 0;
    for (int64_t i = 0; i < plan.reduced.numel; ++i) {
      total += static_cast<uint64_t>(load(base[plan.reduced.offset(i)]));
    }
    store(o, static_cast<int64_t>(total));
  }
}

std::string reduce(const Call& call, bool mean) {
  const View &x = call.in[0], &to = call.out[0];
  const Plan plan(x, call.attributes<halfstep_reduce_attributes>().dims);
  const auto count = static_cast<double>(plan.reduced.numel);
  with_type(to.dtype, [&](auto to_zero) {
    using To = decltype(to_zero);
    with_type(x.dtype, [&](auto zero) {
      using T = decltype(zero);
      if constexpr (std::is_floating_point_v<Compute<T>>) {
        sum_floats<T>(x, plan, [&](int64_t o, double v) { *to.at<To>(o) = convert<To>(mean ? v / count : v); });
      } else {
        sum_integers<T>(x, plan, [&](int64_t o, int64_t v) { *to.at<To>(o) = convert<To>(v); });
      }
    });
  });
  return {};
}
std::string sum(const Call& call) { return reduce(call, false); }
std::string mean(const Call& call) { return reduce(call, true); }

// The norm of all inputs together. Inputs are dense: the order of their elements doesn't matter.
std::string multi_norm(const Call& call) {
  const double p = call.attributes<halfstep_clip_attributes>().norm_type;
  const bool largest = std::isinf(p);
  double total = 0;
  for (const View& x : call.in) {
    if (x.numel == 0) continue;
    with_type(x.dtype, [&](auto zero) {
      using T = decltype(zero);
      if constexpr (std::is_floating_point_v<Compute<T>>) {
        const T* values = x.at<T>();
        if (largest) {
          for (int64_t i = 0; i < x.numel; ++i) {
            const double v = std::fabs(static_cast<double>(load(values[i])));
            if (!(v <= total) && total == total) total = v;  // a NaN stays
          }
        } else if (p == 2) {
          total += sum_run(values, x.numel, 1, [](double v) { return v * v; });
        } else if (p == 1) {
          total += sum_run(values, x.numel, 1, [](double v) { return std::fabs(v); });
        } else {
          total += sum_run(values, x.numel, 1, [p](double v) { return std::pow(std::fabs(v), p); });
        }
      }
    });
  }
  if (!largest) total = p == 2 ? std::sqrt(total) : std::pow(total, 1 / p);
  with_type(call.out[0].dtype, [&](auto zero) { *call.out[0].at<decltype(zero)>() = convert<decltype(zero)>(total); });
  return {};
}

constexpr KernelDef kSum{.op = "sum",
                         .dtypes = kComputed,
                         .layouts = HALFSTEP_LAYOUT_STRIDED,
                         .attribute_bytes = sizeof(halfstep_reduce_attributes),
                         .run = sum};
constexpr KernelDef kMean{.op = "mean",
                          .dtypes = kFloating & ~dtypes({HALFSTEP_F64}),
                          .layouts = HALFSTEP_LAYOUT_STRIDED,
                          .attribute_bytes = sizeof(halfstep_reduce_attributes),
                          .run = mean,
                          .missing = "the reduction unit has no f64 divider"};
// Asked for with f32, whatever the gradients are.
constexpr KernelDef kMultiNorm{.op = "multi_norm",
                               .dtypes = dtypes({HALFSTEP_F32}),
                               .layouts = HALFSTEP_LAYOUT_STRIDED,
                               .attribute_bytes = sizeof(halfstep_clip_attributes),
                               .run = multi_norm};

}  // namespace

std::span<const Kernel> reduce_kernels() {
  static constexpr Kernel kKernels[] = {kernel<kSum>, kernel<kMean>, kernel<kMultiNorm>};
  return kKernels;
}

}  // namespace sim
