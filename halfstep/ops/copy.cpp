// SPDX-License-Identifier: Apache-2.0
// Conversion, cloning and copying.
#include "halfstep/ops/copy.h"

#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/create.h"

namespace halfstep {
namespace {

const Op& to_op = define_op({
    .name = "to",
    .signature = "to(input, dtype)",
    .infer =
        [](InferContext& ctx) {
          check_defined(ctx.input(0), ctx.name(), "a tensor");
          const Tensor& x = ctx.input(0);
          ctx.output(x.sizes(), strides_like(x.sizes(), x.strides()), ctx.attributes<CastAttributes>().dtype);
        },
    .grad = [](GradContext& c) { c.set(0, cast(c.grad(), c.grad_dtype(0))); },
    .attributes_size = sizeof(CastAttributes),
});

const Op& clone_op = define_op({
    .name = "clone",
    .signature = "clone(input)",
    .infer =
        [](InferContext& ctx) {
          check_defined(ctx.input(0), ctx.name(), "a tensor");
          const Tensor& x = ctx.input(0);
          const auto format = static_cast<MemoryFormat>(ctx.attributes<ViewAttributes>().dim);
          const Shape strides = format == MemoryFormat::contiguous      ? contiguous_strides(x.sizes())
                                : format == MemoryFormat::channels_last ? channels_last_strides(x.sizes())
                                                                        : strides_like(x.sizes(), x.strides());
          ctx.output(x.sizes(), strides, x.dtype());
        },
    .grad = [](GradContext& c) { c.set(0, c.grad()); },
    .attributes_size = sizeof(ViewAttributes),
});

// copy_: input 0 is the destination (its old values don't matter), input 1 the source.
const Op& copy_op = define_op({
    .name = "copy",
    .signature = "copy_(input, source)",
    .infer =
        [](InferContext& ctx) {
          check_defined(ctx.input(1), ctx.name(), "a source");
          const Tensor& to = ctx.input(0);
          const Shape shape = broadcast_shapes(to.sizes(), ctx.input(1).sizes(), ctx.name());
          if (shape != to.sizes()) {
            fail<ShapeError>("copy_: expected a source that broadcasts to {}, got {}", to.sizes().str(),
                             ctx.input(1).sizes().str());
          }
          ctx.output(to.sizes(), to.strides(), to.dtype());
        },
    .grad =
        [](GradContext& c) {
          if (c.needs(0)) c.set(0, zeros(c.input_sizes(0), {.dtype = c.input_dtype(0), .device = c.device(0)}));
          c.set(1, c.grad());
        },
});

}  // namespace

const Op& cast_op() { return to_op; }

Tensor cast(const Tensor& source, DType dtype) {
  check_defined(source, "to", "a tensor");
  if (source.dtype() == dtype) return source;
  return call(to_op, {&source}, CastAttributes{dtype});
}

Tensor cast_unrecorded(const Tensor& source, DType dtype) {
  Tensor result = empty_like(source, dtype);
  copy_unrecorded(result, source);
  return result;
}

void copy_unrecorded(Tensor& destination, const Tensor& source) {
  const Tensor* from = &source;
  const Tensor* to = &destination;
  run_kernel(*to_op.table, "copy", destination.device(), source.dtype(), {&from, 1}, {&to, 1}, nullptr);
}

Tensor Tensor::to(DType dtype, const ToOptions& options) const {
  check_defined(*this, "to", "a tensor");
  if (this->dtype() == dtype &&
      (options.memory_format == MemoryFormat::preserve || is_contiguous(options.memory_format))) {
    return options.copy ? clone() : *this;
  }
  const Tensor converted = cast(*this, dtype);
  return options.memory_format == MemoryFormat::preserve ? converted : converted.contiguous(options.memory_format);
}

Tensor Tensor::to(Device device, const ToOptions& options) const { return to(device, dtype(), options); }

Tensor Tensor::to(Device device, DType dtype, const ToOptions& options) const {
  if (device != this->device()) {
    fail<DeviceError>("to: no copies between {} and {} in this build", this->device().str(), device.str());
  }
  return to(dtype, options);
}

Tensor Tensor::clone(MemoryFormat format) const {
  return call(clone_op, {this}, ViewAttributes{.dim = static_cast<std::int64_t>(format)});
}

Tensor Tensor::contiguous(MemoryFormat format) const { return is_contiguous(format) ? *this : clone(format); }

Tensor& Tensor::copy_(const Tensor& source) {
  check_defined(*this, "copy_", "a destination");
  return call_in_place(copy_op, *this, {&source});
}

Scalar Tensor::item_scalar() const {
  check_defined(*this, "item", "a tensor");
  if (numel() != 1) fail<ShapeError>("item: expected a tensor of one element, got {}", sizes().str());
  return visit_all(dtype(), [&](auto tag) -> Scalar {
    using T = typename decltype(tag)::type;
    const T value = *static_cast<const T*>(raw_data());
    if constexpr (std::is_same_v<T, bool>) {
      return Scalar(value);
    } else if constexpr (std::is_integral_v<T>) {
      return Scalar(static_cast<std::int64_t>(value));
    } else {
      return Scalar(static_cast<double>(value));
    }
  });
}

template <class T>
std::vector<T> Tensor::to_vector() const {
  check_defined(*this, "to_vector", "a tensor");
  std::vector<T> values(static_cast<std::size_t>(numel()));
  if (values.empty()) return values;
  Tensor target = from_blob(values.data(), sizes(), dtype_of<T>);
  copy_unrecorded(target, *this);
  return values;
}
template std::vector<float> Tensor::to_vector<float>() const;
template std::vector<double> Tensor::to_vector<double>() const;
template std::vector<std::int64_t> Tensor::to_vector<std::int64_t>() const;

}  // namespace halfstep
