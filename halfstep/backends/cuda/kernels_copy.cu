// SPDX-License-Identifier: Apache-2.0
// Copies and conversions between any layouts and dtypes, and fills.
#include "copy.h"
#include "elementwise.cuh"

namespace hscuda {
namespace {

struct Same {
  template <class T>
  __device__ __forceinline__ T operator()(T value) const {
    return value;
  }
};

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

// Every pair of dtypes in one kernel, by way of a type that holds every value of the source, so that the one rounding
// is the one into the result. Slower than a kernel of its own, and a hundred kernels fewer.
template <class Middle>
__global__ void __launch_bounds__(kThreads)
    convert_any(Layout<2> layout, void* to, int to_dtype, const void* from, int from_dtype) {
  for (int64_t i = thread_index(); i < layout.numel; i += grid_threads()) {
    int64_t at[2];
    layout.places(static_cast<uint32_t>(i), at);
    Middle value = 0;
    with_type(from_dtype, [&](auto zero) {
      using T = decltype(zero);
      if constexpr (std::is_floating_point_v<Compute<T>> == std::is_floating_point_v<Middle>) {
        value = static_cast<Middle>(value_of(static_cast<const T*>(from)[at[1]]));
      }
    });
    with_type(to_dtype, [&](auto zero) {
      using T = decltype(zero);
      static_cast<T*>(to)[at[0]] = convert<T>(value);
    });
  }
}

}  // namespace

void copy_view(const Call& call, const Tensor& to, const Tensor& from) {
  if (to.numel == 0) return;
  // Elements of one dtype are moved as words, so that every NaN keeps its bits.
  if (to.dtype == from.dtype) {
    with_word(to.dtype, [&](auto word) {
      using Word = decltype(word);
      map<Word, Word>(call, Same{}, to, from);
    });
    return;
  }
  const bool done = with_quick(to.dtype, [&](auto to_zero) {
    return with_quick(from.dtype, [&](auto from_zero) {
      map<decltype(to_zero), decltype(from_zero)>(call, Same{}, to, from);
      return true;
    });
  });
  if (done) return;
  in_pieces(layout_of<2>({&to, &from}), [&](const Layout<2>& layout, const auto& first) {
    const auto place = [](const Tensor& t, int64_t element) {
      return static_cast<char*>(t.data) + element * static_cast<int64_t>(item_size(t.dtype));
    };
    const Launch how{.grid = grid_size(layout.numel, kThreads), .alone = true};
    launch(call, how, is_floating(from.dtype) ? convert_any<double> : convert_any<int64_t>, layout, place(to, first[0]),
           static_cast<int>(to.dtype), place(from, first[1]), static_cast<int>(from.dtype));
  });
}

namespace {

halfstep_status copy(Call& call) {
  copy_view(call, call.out[0], call.in[call.n - 1]);
  return call.launched();
}

template <class Word>
struct Constant {
  Word value;
  __device__ __forceinline__ Word operator()() const { return value; }
};

halfstep_status fill(Call& call) {
  const halfstep_scalar& value = call.attributes<halfstep_fill_attributes>().value;
  with_type(call.out[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    const T v = value.kind == 2 ? convert<T>(value.floating) : convert<T>(value.integer);
    with_word(call.out[0].dtype, [&](auto word) {
      using Word = decltype(word);
      if constexpr (sizeof(Word) == sizeof(T)) {
        map<Word>(call, Constant<Word>{std::bit_cast<Word>(v)}, call.out[0]);
      }
    });
  });
  return call.launched();
}

constexpr KernelDef kKernels[] = {
    {.op = "copy", .dtypes = kAll, .layouts = kStrided, .attributes = false, .run = copy},
    {.op = "to", .dtypes = kAll, .layouts = kStrided, .attributes = false, .run = copy},
    {.op = "clone", .dtypes = kAll, .layouts = kStrided, .attributes = false, .run = copy},
    {.op = "fill", .dtypes = kAll, .layouts = kStrided, .attributes = true, .run = fill},
};

}  // namespace

std::span<const KernelDef> copy_kernels() { return kKernels; }

}  // namespace hscuda
