// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/attributes.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>

#include "halfstep/debug/attributes_internal.h"
#include "halfstep/ops/op.h"

namespace halfstep::debug::detail {
namespace {

using Json = nlohmann::ordered_json;
using Kind = AttributeField::Kind;

template <class T>
T read(const void* place) {
  T value;
  std::memcpy(&value, place, sizeof(T));
  return value;
}

Json scalar(const ScalarValue& v) {
  return v.kind == 2 ? number(v.floating) : v.kind == 1 ? Json(v.integer) : Json(v.integer != 0);
}

// One element of a field.
Json value(Kind kind, const void* place) {
  switch (kind) {
    case Kind::flag:
      return read<std::uint8_t>(place) != 0;
    case Kind::i32:
      return read<std::int32_t>(place);
    case Kind::i64:
      return read<std::int64_t>(place);
    case Kind::u64:
      return read<std::uint64_t>(place);
    case Kind::f32:
      return number(static_cast<double>(read<float>(place)));
    case Kind::f64:
      return number(read<double>(place));
    case Kind::dtype:
      return name(static_cast<DType>(read<std::uint8_t>(place)));
    case Kind::optional_dtype: {
      const auto code = read<std::int8_t>(place);
      return code == kNoDType ? Json(nullptr) : Json(name(static_cast<DType>(code)));
    }
    case Kind::list: {
      const auto list = read<IntList>(place);
      return std::vector<std::int64_t>(list.values, list.values + list.size);
    }
    case Kind::scalar:
      break;
  }
  return scalar(read<ScalarValue>(place));
}

Json value(const AttributeField& field, const void* attributes) {
  const auto* place = static_cast<const unsigned char*>(attributes) + field.offset;
  if (field.count == 1) return value(field.kind, place);
  Json list = Json::array();
  for (int i = 0; i < field.count; ++i) list.push_back(value(field.kind, place + i * (field.size / field.count)));
  return list;
}

// The dtype that a call asks for, where it asks for one that may be another.
void widen(unsigned char* place, DType dtype, bool optional) {
  if (optional && read<std::int8_t>(place) == kNoDType) return;
  if (is_floating(static_cast<DType>(*place))) *place = static_cast<unsigned char>(dtype);
}

}  // namespace

Json number(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

Json attributes_of(const ObservedCall& call) {
  if (!call.op || !call.attributes || call.op->attributes_size == 0) return nullptr;
  if (const AttributeStruct* a = call.op->attributes) {
    Json result = Json::object();
    for (const AttributeField& field : a->fields) result[field.name] = value(field, call.attributes);
    return result;
  }
  std::string bytes;
  for (std::uint32_t i = 0; i < call.op->attributes_size; ++i) {
    bytes += fmt::format("{:02x}", static_cast<const unsigned char*>(call.attributes)[i]);
  }
  return {{"bytes", bytes}};
}

void widen_results(const Op& op, void* attributes, DType dtype) {
  auto* bytes = static_cast<unsigned char*>(attributes);
  if (op.attributes) {
    for (const AttributeField& f : op.attributes->fields) {
      if (f.kind == Kind::dtype) widen(bytes + f.offset, dtype, false);
      if (f.kind != Kind::optional_dtype) continue;
      for (int i = 0; i < f.count; ++i) widen(bytes + f.offset + i, dtype, true);
    }
  } else if (op.dtype_attribute >= 0) {
    widen(bytes + op.dtype_attribute, dtype, true);
  }
}

}  // namespace halfstep::debug::detail
