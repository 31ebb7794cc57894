// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/attributes.h"

#include <array>
#include <cstddef>
#include <string_view>
#include <type_traits>
#include <utility>

#include "halfstep/runtime/plugin.h"

namespace halfstep {
namespace {

static_assert(kMaxDims == HALFSTEP_MAX_DIMS && sizeof(IntList::values) == kMaxDims * sizeof(std::int64_t));
static_assert(sizeof(DType) == 1 && static_cast<int>(DType::f32) == HALFSTEP_F32 &&
              static_cast<int>(DType::f64) == HALFSTEP_F64 && static_cast<int>(DType::f16) == HALFSTEP_F16 &&
              static_cast<int>(DType::bf16) == HALFSTEP_BF16 && static_cast<int>(DType::f8e4m3) == HALFSTEP_F8E4M3 &&
              static_cast<int>(DType::f8e5m2) == HALFSTEP_F8E5M2 && static_cast<int>(DType::i64) == HALFSTEP_I64 &&
              static_cast<int>(DType::i32) == HALFSTEP_I32 && static_cast<int>(DType::i8) == HALFSTEP_I8 &&
              static_cast<int>(DType::u8) == HALFSTEP_U8 && static_cast<int>(DType::boolean) == HALFSTEP_BOOL);

template <class T>
constexpr AttributeField::Kind kind_of(std::string_view name) {
  using Kind = AttributeField::Kind;
  if constexpr (std::is_same_v<T, std::uint8_t>) {
    return name == "dtype" ? Kind::dtype : Kind::flag;
  } else if constexpr (std::is_same_v<T, std::int8_t>) {
    return Kind::optional_dtype;
  } else if constexpr (std::is_same_v<T, std::int32_t>) {
    return Kind::i32;
  } else if constexpr (std::is_same_v<T, std::int64_t>) {
    return Kind::i64;
  } else if constexpr (std::is_same_v<T, std::uint64_t>) {
    return Kind::u64;
  } else if constexpr (std::is_same_v<T, float>) {
    return Kind::f32;
  } else if constexpr (std::is_same_v<T, double>) {
    return Kind::f64;
  } else if constexpr (std::is_same_v<T, IntList>) {
    return Kind::list;
  } else {
    static_assert(std::is_same_v<T, ScalarValue>);
    return Kind::scalar;
  }
}
template <class T>
constexpr AttributeField field(const char* name, std::size_t offset) {
  using Element = std::remove_all_extents_t<T>;
  return {name, kind_of<Element>(name), static_cast<std::uint16_t>(offset), static_cast<std::uint16_t>(sizeof(T)),
          static_cast<std::uint16_t>(sizeof(T) / sizeof(Element))};
}

// Stands for a value of any field.
struct AnyValue {
  template <class T>
  operator T() const;
};
template <class A, std::size_t... I>
constexpr bool takes(std::index_sequence<I...>) {
  return requires { A{(static_cast<void>(I), AnyValue())...}; };
}
// Whether A has these fields and no others: braces take as many values as they have elements.
template <class A, std::size_t... Counts>
constexpr bool kHasNoOtherFields = takes<A>(std::make_index_sequence<(Counts + ...)>()) &&
                                   !takes<A>(std::make_index_sequence<(Counts + ...) + 1>());

#define HALFSTEP_PARENTHESES ()
#define HALFSTEP_TWICE(...) HALFSTEP_TWICE_2(HALFSTEP_TWICE_2(__VA_ARGS__))
#define HALFSTEP_TWICE_2(...) HALFSTEP_TWICE_3(HALFSTEP_TWICE_3(__VA_ARGS__))
#define HALFSTEP_TWICE_3(...) HALFSTEP_TWICE_4(HALFSTEP_TWICE_4(__VA_ARGS__))
#define HALFSTEP_TWICE_4(...) __VA_ARGS__
// F(A, field) for each field, separated by commas; up to a dozen of them.
#define HALFSTEP_EACH(F, A, ...) __VA_OPT__(HALFSTEP_TWICE(HALFSTEP_NEXT(F, A, __VA_ARGS__)))
#define HALFSTEP_NEXT(F, A, first, ...) \
  F(A, first) __VA_OPT__(, HALFSTEP_NEXT_LATER HALFSTEP_PARENTHESES(F, A, __VA_ARGS__))
#define HALFSTEP_NEXT_LATER() HALFSTEP_NEXT

#define HALFSTEP_FIELD(A, name) field<decltype(A::name)>(#name, offsetof(A, name))
#define HALFSTEP_COUNT(A, name) (sizeof(A::name) / sizeof(std::remove_all_extents_t<decltype(A::name)>))
#define HALFSTEP_DEFINE(A, c_name, ...)                                                                             \
  constexpr AttributeField kFieldsOf##A[] = {HALFSTEP_EACH(HALFSTEP_FIELD, A, __VA_ARGS__)};                        \
  static_assert(kHasNoOtherFields<A, HALFSTEP_EACH(HALFSTEP_COUNT, A, __VA_ARGS__)>, #A ": not all fields listed"); \
  static_assert(std::is_standard_layout_v<A> && std::is_trivially_copyable_v<A>);
HALFSTEP_ATTRIBUTES(HALFSTEP_DEFINE)

enum : std::size_t {
#define HALFSTEP_PLACE(A, ...) kPlaceOf##A,
  HALFSTEP_ATTRIBUTES(HALFSTEP_PLACE)
};
constexpr AttributeStruct kStructs[] = {
#define HALFSTEP_STRUCT(A, c_name, ...) {#c_name, sizeof(A), kFieldsOf##A},
    HALFSTEP_ATTRIBUTES(HALFSTEP_STRUCT)};

}  // namespace

std::span<const AttributeStruct> attribute_structs() { return kStructs; }

#define HALFSTEP_GET(A, ...)                     \
  template <>                                    \
  const AttributeStruct& attribute_struct<A>() { \
    return kStructs[kPlaceOf##A];                \
  }
HALFSTEP_ATTRIBUTES(HALFSTEP_GET)

}  // namespace halfstep
