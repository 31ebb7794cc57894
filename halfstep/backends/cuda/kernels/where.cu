// SPDX-License-Identifier: Apache-2.0
// Choosing by a mask.
#include <cfloat>

#include "device/elementwise.cuh"
#include "device/math.cuh"

namespace hscuda {
namespace {

struct Where {
  template <class Word>
  __device__ __forceinline__ Word operator()(bool condition, Word a, Word b) const {
    return condition ? a : b;
  }
};
template <class Word>
struct MaskedFill {
  Word value;
  __device__ __forceinline__ Word operator()(Word x, bool mask) const { return mask ? value : x; }
};

halfstep_status where(Call& call) {
  with_word(call.in[1].dtype, [&](auto word) {
    using Word = decltype(word);
    map<Word, Bool, Word, Word>(call, Where{}, call.out[0], call.in[0], call.in[1], call.in[2]);
  });
  return call.launched();
}

double largest_finite(int dtype) {
  switch (dtype) {
    case HALFSTEP_F32:
      return FLT_MAX;
    case HALFSTEP_F16:
      return 65504;
    case HALFSTEP_BF16:
      return 0x1.fep127;
    case HALFSTEP_F8E4M3:
      return 448;
    case HALFSTEP_F8E5M2:
      return 57344;
    default:
      return DBL_MAX;
  }
}
halfstep_status masked_fill(Call& call) {
  const halfstep_scalar& scalar = call.attributes<halfstep_scalar_attributes>().value;
  with_type(call.out[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    T value;
    if constexpr (std::is_floating_point_v<Compute<T>>) {
      // -1e9 masks scores in f16 too, without an infinity that would make a wholly masked softmax NaN.
      const double most = largest_finite(call.out[0].dtype), v = scalar.floating;
      value = convert<T>(std::isfinite(v) ? std::clamp(v, -most, most) : v);
    } else {
      value = convert<T>(number<Compute<T>>(scalar));
    }
    with_word(call.out[0].dtype, [&](auto word) {
      using Word = decltype(word);
      if constexpr (sizeof(Word) == sizeof(T)) {
        map<Word, Word, Bool>(call, MaskedFill<Word>{std::bit_cast<Word>(value)}, call.out[0], call.in[0], call.in[1]);
      }
    });
  });
  return call.launched();
}

constexpr KernelDef kKernels[] = {
    {.op = "where", .dtypes = kAll, .layouts = kStrided, .attributes = false, .run = where},
    {.op = "masked_fill", .dtypes = kAll, .layouts = kStrided, .attributes = true, .run = masked_fill},
};

}  // namespace

std::span<const KernelDef> where_kernels() { return kKernels; }

}  // namespace hscuda
