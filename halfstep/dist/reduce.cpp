// SPDX-License-Identifier: Apache-2.0
#include "halfstep/dist/reduce.h"

#include <algorithm>
#include <array>
#include <vector>

#include "halfstep/core/fail.h"
#include "halfstep/dist/reduce_kernels_internal.h"
#include "halfstep/runtime/kernel.h"

namespace halfstep::dist {
namespace {

// Elements converted at a time: the blocks of floats fit the first-level cache for up to eight ranks.
constexpr std::int64_t kConvertedBlock = 1024;

// Converts n elements by the CPU's kernel, which rounds to nearest even.
void convert_elements(const KernelTable& table, DType from, const void* source, DType to, void* target,
                      std::int64_t n) {
  const std::int64_t stride = 1;
  TensorView in{.data = const_cast<void*>(source),
                .sizes = &n,
                .strides = &stride,
                .numel = n,
                .ndim = 1,
                .dtype = from,
                .defined = true,
                .contiguous = true};
  TensorView out = in;
  out.data = target;
  out.dtype = to;
  KernelContext context;
  const Status status = table.find(Device{}, from)(&context, &in, 1, &out, 1, nullptr);
  if (status != Status::ok) throw InternalError("reduce_in_order: a conversion failed");
}

// Through float32, block by block.
void reduce_converted(ReduceOp op, DType dtype, std::span<const void* const> inputs, void* output, std::int64_t n,
                      int divisor) {
  static const KernelTable& table = kernel_table("to");
  const auto item = static_cast<std::int64_t>(item_size(dtype));
  std::vector<float> blocks(inputs.size() * kConvertedBlock);
  std::vector<const float*> starts(inputs.size());
  for (std::size_t k = 0; k < inputs.size(); ++k) starts[k] = blocks.data() + k * kConvertedBlock;
  for (std::int64_t at = 0; at < n; at += kConvertedBlock) {
    const std::int64_t size = std::min(kConvertedBlock, n - at);
    for (std::size_t k = 0; k < inputs.size(); ++k) {
      convert_elements(table, dtype, static_cast<const char*>(inputs[k]) + at * item, f32,
                       blocks.data() + k * kConvertedBlock, size);
    }
    detail::reduce_values<float>(op, starts, blocks.data(), size, divisor);
    convert_elements(table, f32, blocks.data(), dtype, static_cast<char*>(output) + at * item, size);
  }
}

// The same for 16 bits, which are widened as they are added.
template <class T>
void reduce_16_bits(ReduceOp op, std::span<const void* const> inputs, void* output, std::int64_t n, int divisor) {
  static const KernelTable& table = kernel_table("to");
  float block[detail::kWidenedBlock];
  std::vector<const T*> starts(inputs.size());
  for (std::int64_t at = 0; at < n; at += detail::kWidenedBlock) {
    const std::int64_t size = std::min(detail::kWidenedBlock, n - at);
    for (std::size_t k = 0; k < inputs.size(); ++k) starts[k] = static_cast<const T*>(inputs[k]) + at;
    detail::reduce_widened<T>(op, starts, block, size, divisor);
    convert_elements(table, f32, block, dtype_of<T>, static_cast<T*>(output) + at, size);
  }
}

template <class T>
void reduce_as(ReduceOp op, std::span<const void* const> inputs, void* output, std::int64_t n, int divisor) {
  std::vector<const T*> typed(inputs.size());
  std::transform(inputs.begin(), inputs.end(), typed.begin(), [](const void* p) { return static_cast<const T*>(p); });
  detail::reduce_values<T>(op, typed, static_cast<T*>(output), n, divisor);
}

}  // namespace

const char* name(ReduceOp op) {
  constexpr std::array kNames = {"sum", "mean", "min", "max", "product"};
  const auto index = static_cast<std::size_t>(op);
  return index < kNames.size() ? kNames[index] : "unknown";
}

void reduce_in_order(ReduceOp op, DType dtype, std::span<const void* const> inputs, void* output, std::int64_t n,
                     int divisor) {
  if (inputs.empty()) fail<Error>("reduce_in_order: expected at least one input, got none");
  if (dtype == DType::boolean) fail<DTypeError>("reduce_in_order: expected a number, got bool");
  if (op == ReduceOp::mean && is_integral(dtype)) {
    fail<DTypeError>("reduce_in_order: expected a floating dtype for the mean, got {}", name(dtype));
  }
  if (divisor <= 0) divisor = static_cast<int>(inputs.size());
  switch (dtype) {
    case DType::f32:
      return reduce_as<float>(op, inputs, output, n, divisor);
    case DType::f64:
      return reduce_as<double>(op, inputs, output, n, divisor);
    case DType::i64:
      return reduce_as<std::int64_t>(op, inputs, output, n, divisor);
    case DType::i32:
      return reduce_as<std::int32_t>(op, inputs, output, n, divisor);
    case DType::i8:
      return reduce_as<std::int8_t>(op, inputs, output, n, divisor);
    case DType::u8:
      return reduce_as<std::uint8_t>(op, inputs, output, n, divisor);
    case DType::f16:
      return reduce_16_bits<Half>(op, inputs, output, n, divisor);
    case DType::bf16:
      return reduce_16_bits<BFloat16>(op, inputs, output, n, divisor);
    default:
      return reduce_converted(op, dtype, inputs, output, n, divisor);
  }
}

}  // namespace halfstep::dist
