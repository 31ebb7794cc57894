// SPDX-License-Identifier: Apache-2.0
// Comparisons and tests, logic and bits.
#include "device/elementwise.cuh"
#include "device/math.cuh"

namespace hscuda {
namespace {

/// All six comparisons: which of the four ways that two numbers can stand give true.
struct Compare {
  bool less, equal, greater, unordered;
  template <class C>
  __device__ __forceinline__ bool operator()(C a, C b) const {
    return a < b ? less : a == b ? equal : a > b ? greater : unordered;
  }
};
constexpr Compare kEq{false, true, false, false}, kNe{true, false, true, true}, kLt{true, false, false, false},
    kLe{true, true, false, false}, kGt{false, false, true, false}, kGe{false, true, true, false};

/// isnan, isinf and isfinite likewise.
struct Test {
  bool nan, infinite, finite;
  template <class C>
  __device__ __forceinline__ bool operator()(C x) const {
    return x != x ? nan : std::fabs(x) <= std::numeric_limits<C>::max() ? finite : infinite;
  }
};
constexpr Test kIsNan{true, false, false}, kIsInf{false, true, false}, kIsFinite{false, false, true};

struct Always {
  bool value;
  __device__ __forceinline__ bool operator()() const { return value; }
};

/// and, or, xor: of two bits, what is left where both are set, and where one is.
template <class Word>
struct Bits {
  Word both, one;
  __device__ __forceinline__ Word operator()(Word a, Word b) const {
    return static_cast<Word>((a & b & both) | ((a ^ b) & one));
  }
};
template <class Word>
struct Turn {
  Word turned;
  __device__ __forceinline__ Word operator()(Word a) const { return static_cast<Word>(a ^ turned); }
};

template <const Compare& f>
halfstep_status compare(Call& call) {
  with_computed(call.in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    map<Bool, T, T>(call, f, call.out[0], call.in[0], call.in[1]);
  });
  return call.launched();
}
template <const Test& f>
halfstep_status test(Call& call) {
  if (!is_floating(call.in[0].dtype)) {
    map<Bool>(call, Always{f.finite}, call.out[0]);
    return call.launched();
  }
  with_floating(call.in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    map<Bool, T>(call, f, call.out[0], call.in[0]);
  });
  return call.launched();
}

enum class Logic { kAnd, kOr, kXor };
template <Logic f>
halfstep_status logic(Call& call) {
  with_word(call.in[0].dtype, [&](auto word) {
    using Word = decltype(word);
    constexpr auto kAll = static_cast<Word>(-1);
    const Bits<Word> bits{f == Logic::kXor ? Word{0} : kAll, f == Logic::kAnd ? Word{0} : kAll};
    map<Word, Word, Word>(call, bits, call.out[0], call.in[0], call.in[1]);
  });
  return call.launched();
}
halfstep_status turn(Call& call) {
  const bool flag = call.in[0].dtype == HALFSTEP_BOOL;
  with_word(call.in[0].dtype, [&](auto word) {
    using Word = decltype(word);
    map<Word, Word>(call, Turn<Word>{flag ? Word{1} : static_cast<Word>(-1)}, call.out[0], call.in[0]);
  });
  return call.launched();
}

constexpr KernelDef kernel(const char* op, uint32_t dtypes, halfstep_status (*run)(Call&)) {
  return {.op = op, .dtypes = dtypes, .layouts = kStrided, .attributes = false, .run = run};
}
constexpr KernelDef kKernels[] = {
    kernel("eq", kComputed, compare<kEq>),
    kernel("ne", kComputed, compare<kNe>),
    kernel("lt", kComputed, compare<kLt>),
    kernel("le", kComputed, compare<kLe>),
    kernel("gt", kComputed, compare<kGt>),
    kernel("ge", kComputed, compare<kGe>),
    kernel("isnan", kComputed, test<kIsNan>),
    kernel("isinf", kComputed, test<kIsInf>),
    kernel("isfinite", kComputed, test<kIsFinite>),
    kernel("logical_and", kFlag, logic<Logic::kAnd>),
    kernel("logical_or", kFlag, logic<Logic::kOr>),
    kernel("logical_xor", kFlag, logic<Logic::kXor>),
    kernel("logical_not", kFlag, turn),
    kernel("bitwise_and", kIntegers | kFlag, logic<Logic::kAnd>),
    kernel("bitwise_or", kIntegers | kFlag, logic<Logic::kOr>),
    kernel("bitwise_xor", kIntegers | kFlag, logic<Logic::kXor>),
    kernel("bitwise_not", kIntegers | kFlag, turn),
};

}  // namespace

std::span<const KernelDef> compare_kernels() { return kKernels; }

}  // namespace hscuda
