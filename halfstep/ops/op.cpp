// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/op.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>

#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/copy.h"

namespace halfstep {
namespace {

struct OpTable {
  std::shared_mutex mutex;
  std::map<std::string, std::unique_ptr<Op>, std::less<>> ops;
};
OpTable& op_table() {
  static OpTable& table = *new OpTable;
  return table;
}

constexpr std::size_t kMaxAttributes = 512;

}  // namespace

const Op& define_op(const Op& declaration) {
  const std::uint32_t size = declaration.attributes ? declaration.attributes->size : declaration.attributes_size;
  if (size > kMaxAttributes) {
    fail<InternalError>("define_op: attributes of {} take {} bytes, at most {} are allowed", declaration.name, size,
                        kMaxAttributes);
  }
  OpTable& table = op_table();
  std::lock_guard lock(table.mutex);
  if (table.ops.contains(declaration.name))
    fail<Error>("define_op: there is already an op called {}", declaration.name);
  auto op = std::make_unique<Op>(declaration);
  op->attributes_size = size;
  KernelTable& table_of_kernels = kernel_table(declaration.name);
  table_of_kernels.version = declaration.version;
  op->table = &table_of_kernels;
  op->id = static_cast<int>(table.ops.size());
  const Op& result = *op;
  table.ops.emplace(declaration.name, std::move(op));
  return result;
}

const Op* find_op(std::string_view name) {
  OpTable& table = op_table();
  std::shared_lock lock(table.mutex);
  auto it = table.ops.find(name);
  return it == table.ops.end() ? nullptr : it->second.get();
}

std::vector<const Op*> all_ops() {
  OpTable& table = op_table();
  std::shared_lock lock(table.mutex);
  std::vector<const Op*> result;
  for (const auto& [name, op] : table.ops) result.push_back(op.get());
  return result;
}

void InferContext::output(const Shape& sizes, DType dtype) { output(sizes, contiguous_strides(sizes), dtype); }
void InferContext::output(const Shape& sizes, const Shape& strides, DType dtype) {
  if (num_outputs == kMaxOutputs) fail<InternalError>("{}: more than {} outputs", op_.name, kMaxOutputs);
  outputs[static_cast<std::size_t>(num_outputs++)] = {sizes, strides, dtype};
}
void InferContext::view(const Shape& sizes, const Shape& strides, std::int64_t offset) {
  output(sizes, strides, input(0).dtype());
  view_offset = offset;
}

void detail::check_attributes(const Op& op, std::size_t size) {
  fail<InternalError>("{}: called with attributes of {} bytes, declared with {}", op.name, size, op.attributes_size);
}

ThreadState& thread_state() {
  thread_local ThreadState state;
  return state;
}

OpHooks& op_hooks() {
  static OpHooks hooks;
  return hooks;
}

void infer_elementwise(InferContext& ctx, DType dtype) {
  const Tensor& first = ctx.input(0);
  const TensorImpl* a = first.impl();
  check_defined(first, ctx.name(), "input 0");
  // Most calls: one input, or two of the same shape and layout.
  bool same = a->contiguous;
  for (int i = 1; same && i < ctx.size(); ++i) {
    const TensorImpl* b = ctx.input(i).impl();
    same = b && b->contiguous && b->sizes == a->sizes;
  }
  if (same) {
    ctx.output(a->sizes, a->strides, dtype);
    return;
  }
  Shape sizes = a->sizes;
  for (int i = 1; i < ctx.size(); ++i) {
    check_defined(ctx.input(i), ctx.name(), "an input");
    sizes = broadcast_shapes(sizes, ctx.input(i).sizes(), ctx.name());
  }
  for (int i = 0; i < ctx.size(); ++i) {
    const Tensor& t = ctx.input(i);
    if (t.sizes() == sizes && sizes.size() > 1 && !t.is_contiguous() && is_dense(sizes, t.strides())) {
      ctx.output(sizes, strides_like(sizes, t.strides()), dtype);
      return;
    }
    if (t.sizes() == sizes && t.is_contiguous()) break;
  }
  ctx.output(sizes, dtype);
}

DType result_type(std::span<const Tensor* const> inputs, const char* op) {
  // PyTorch's three ranks: tensors with dimensions, then 0-d tensors (numbers have a function of their own); a lower
  // rank counts only when its kind (bool, integer, floating) is higher than all of the ranks above.
  const auto kind = [](DType d) { return d == DType::boolean ? 0 : is_integral(d) ? 1 : 2; };
  std::optional<DType> ranks[2];
  for (const Tensor* t : inputs) {
    if (!t->defined()) continue;
    std::optional<DType>& rank = ranks[t->dim() == 0 ? 1 : 0];
    if (!rank) {
      rank = t->dtype();
    } else {
      const auto both = promote_types(*rank, t->dtype());
      if (!both) {
        fail<DTypeError>("{}: {} and {} have no common dtype; convert one with .to()", op, name(*rank),
                         name(t->dtype()));
      }
      rank = both;
    }
  }
  if (!ranks[0]) return ranks[1].value_or(DType::f32);
  if (ranks[1] && kind(*ranks[1]) > kind(*ranks[0])) {
    const auto both = promote_types(*ranks[0], *ranks[1]);
    if (!both) fail<DTypeError>("{}: {} and {} have no common dtype", op, name(*ranks[0]), name(*ranks[1]));
    return *both;
  }
  return *ranks[0];
}

DType result_type(const Tensor& input, const Scalar& number) {
  const DType dtype = input.dtype();
  if (number.is_floating() && !is_floating(dtype)) return DType::f32;
  if (number.kind() == Scalar::Kind::integer && dtype == DType::boolean) return DType::i64;
  return dtype;
}

void check_floating(const Tensor& input, const char* op) {
  const DType d = input.dtype();
  if (d != DType::f32 && d != DType::f64 && d != DType::f16 && d != DType::bf16) {
    fail<DTypeError>("{}: expected f32, f64, f16 or bf16, got {} {}", op, name(d), input.sizes().str());
  }
}

void check_defined(const Tensor& input, const char* op, const char* what) {
  if (!input.defined()) [[unlikely]]
    fail<Error>("{}: expected {}, got an undefined tensor", op, what);
}

void check_values(const Tensor& input, const char* op) {
  if (input.defined() && input.device().is_meta()) [[unlikely]] {
    fail<DeviceError>(
        "{}: the sizes of its result depend on values, which {} {} of the device meta has none of; compute it on "
        "another device",
        op, name(input.dtype()), input.sizes().str());
  }
}

}  // namespace halfstep
