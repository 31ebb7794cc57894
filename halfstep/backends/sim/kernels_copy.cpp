// SPDX-License-Identifier: Apache-2.0
// Copies and conversions between any layouts and dtypes, and fills.
#include <cstring>

#include "walk.h"

namespace sim {
namespace {

// Elements are moved as words, so that every NaN keeps its bits.
template <class Word>
void move_words(const View& to, const View& from) {
  Walk<2>({&to, &from}).each_run([&](const auto& at, int64_t n, const auto& step) {
    Word* y = to.at<Word>(at[0]);
    const Word* x = from.at<Word>(at[1]);
    if (step[0] == 1 && step[1] == 1) {
      if (x != y) std::memcpy(y, x, static_cast<std::size_t>(n) * sizeof(Word));
    } else {
      for (int64_t i = 0; i < n; ++i) y[i * step[0]] = x[i * step[1]];
    }
  });
}

/// f(zero) for the dtypes that are converted all the time; false for the rest.
template <class F>
bool with_quick(int dtype, F&& f) {
  switch (dtype) {
    case HALFSTEP_F32:
      return f(float{});
    case HALFSTEP_F16:
      return f(Half{});
    case HALFSTEP_BF16:
      return f(BFloat16{});
    default:
      return false;
  }
}

constexpr int64_t kBlock = 512;

template <class Middle>
void read_block(const View& from, int64_t at, int64_t step, int64_t n, Middle* block) {
  with_type(from.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (std::is_floating_point_v<Compute<T>> == std::is_floating_point_v<Middle>) {
      const T* x = from.at<T>(at);
      for (int64_t i = 0; i < n; ++i) block[i] = static_cast<Middle>(load(x[i * step]));
    }
  });
}

/// By way of a type that holds every value of the source, so that the one rounding is the one into the result.
template <class Middle>
void convert_through(const View& to, const View& from) {
  Walk<2>({&to, &from}).each_run([&](const auto& at, int64_t count, const auto& step) {
    Middle block[kBlock];
    for (int64_t first = 0; first < count; first += kBlock) {
      const int64_t n = std::min(kBlock, count - first);
      read_block(from, at[1] + first * step[1], step[1], n, block);
      with_type(to.dtype, [&](auto zero) {
        using T = decltype(zero);
        T* y = to.at<T>(at[0] + first * step[0]);
        for (int64_t i = 0; i < n; ++i) y[i * step[0]] = convert<T>(block[i]);
      });
    }
  });
}

std::string copy_view(const View& to, const View& from) {
  if (to.dtype == from.dtype) {
    switch (item_size(to.dtype)) {
      case 1:
        move_words<uint8_t>(to, from);
        break;
      case 2:
        move_words<uint16_t>(to, from);
        break;
      case 4:
        move_words<uint32_t>(to, from);
        break;
      default:
        move_words<uint64_t>(to, from);
    }
    return {};
  }
  bool done = false;
  with_quick(to.dtype, [&](auto to_zero) {
    done = with_quick(from.dtype, [&](auto from_zero) {
      map<decltype(to_zero), decltype(from_zero)>(to, from, [](auto x) { return x; });
      return true;
    });
    return done;
  });
  if (done) return {};
  if (is_floating(from.dtype)) {
    convert_through<double>(to, from);
  } else {
    convert_through<int64_t>(to, from);
  }
  return {};
}

// `to` and `clone` have the source only; `copy` has its destination as input 0 when it is called as the op that
// copy_() is, and the source only when the host moves tensors of its own.
std::string copy(const Call& call) { return copy_view(call.out[0], call.in.back()); }

std::string fill(const Call& call) {
  const halfstep_scalar& value = call.attributes<halfstep_fill_attributes>().value;
  const View& to = call.out[0];
  with_type(to.dtype, [&](auto zero) {
    using T = decltype(zero);
    const T v = value.kind == 2 ? convert<T>(value.floating) : convert<T>(value.integer);
    Walk<1>({&to}).each_run([&](const auto& at, int64_t n, const auto& step) {
      T* y = to.at<T>(at[0]);
      for (int64_t i = 0; i < n; ++i) y[i * step[0]] = v;
    });
  });
  return {};
}

constexpr KernelDef kCopy{
    .op = "copy", .dtypes = kAll, .layouts = HALFSTEP_LAYOUT_STRIDED, .attribute_bytes = 0, .run = copy};
constexpr KernelDef kTo{
    .op = "to", .dtypes = kAll, .layouts = HALFSTEP_LAYOUT_STRIDED, .attribute_bytes = 0, .run = copy};
constexpr KernelDef kClone{
    .op = "clone", .dtypes = kAll, .layouts = HALFSTEP_LAYOUT_STRIDED, .attribute_bytes = 0, .run = copy};
constexpr KernelDef kFill{.op = "fill",
                          .dtypes = kAll,
                          .layouts = HALFSTEP_LAYOUT_STRIDED,
                          .attribute_bytes = sizeof(halfstep_fill_attributes),
                          .run = fill};

}  // namespace

std::span<const Kernel> copy_kernels() {
  static constexpr Kernel kKernels[] = {kernel<kCopy>, kernel<kTo>, kernel<kClone>, kernel<kFill>};
  return kKernels;
}

}  // namespace sim
