// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/create.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <stdexcept>
#include <utility>

#include "halfstep/core/fail.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/recorder.h"
#include "halfstep/runtime/transfer.h"

namespace halfstep {
namespace {

// fill_: input 0 is the destination.
const Op& fill_op = define_op({
    .name = "fill",
    .signature = "fill_(input, value)",
    .infer = [](InferContext& ctx) { ctx.output(ctx.input(0).sizes(), ctx.input(0).strides(), ctx.input(0).dtype()); },
    .grad =
        [](GradContext& c) { c.set(0, zeros(c.input_sizes(0), {.dtype = c.input_dtype(0), .device = c.device(0)})); },
    .attributes = &attribute_struct<FillAttributes>(),
});

ScalarValue scalar_value(const Scalar& s) {
  return {.floating = s.to_double(), .integer = s.is_floating() ? 0 : s.to_int(), .kind = static_cast<int>(s.kind())};
}

void fill_unrecorded(const Tensor& t, Scalar value) {
  const FillAttributes attributes{scalar_value(value)};
  const Tensor* output = &t;
  run_kernel(*fill_op.table, "fill", t.device(), t.dtype(), {}, {&output, 1}, attributes);
}

Tensor finish(Tensor t, const TensorOptions& options) {
  if (options.requires_grad) t.requires_grad_();
  return t;
}

TensorOptions plain(const TensorOptions& options) { return {.dtype = options.dtype, .device = options.device}; }

// Values that are made on the host first. Throws OutOfMemoryError, not what std::vector throws; what is longer than any
// address space isn't asked of the allocator, since a sanitizer's ends the program there.
template <class T>
std::vector<T> host_values(std::int64_t count, const char* op) {
  constexpr std::int64_t kAddresses = std::int64_t{1} << 47;
  if (count <= kAddresses / static_cast<std::int64_t>(sizeof(T))) {
    try {
      return std::vector<T>(static_cast<std::size_t>(count));
    } catch (const std::bad_alloc&) {
    }
  }
  fail<OutOfMemoryError>("{}: there is no memory for {} elements", op, count);
}

template <class T>
Tensor from_values(const std::vector<T>& values, const Shape& sizes, const TensorOptions& options) {
  if (sizes.numel() != static_cast<std::int64_t>(values.size())) {
    fail<ShapeError>("tensor: expected {} values for {}, got {}", sizes.numel(), sizes.str(), values.size());
  }
  Tensor result = [&] {
    const OwnMemory own;
    return empty(sizes, plain(options));
  }();
  if (!values.empty()) {
    Tensor source;
    if (KernelRecorder* recorder = kernel_recorder()) [[unlikely]] {
      // A replay reads the values again, which no kernel may have overwritten: not from the recording's memory.
      {
        const CapturePause pause;
        source = empty(sizes, {.dtype = dtype_of<T>, .device = options.device.is_meta() ? kMeta : Device{}});
      }
      copy_memory(source.impl()->data(), source.device(), values.data(), Device{}, values.size() * sizeof(T));
      recorder->keep(source);
    } else if (result.device().is_meta()) {
      // Never read, so that what follows is the CPU's copy from here.
      auto storage = Storage::wrap(const_cast<T*>(values.data()), values.size() * sizeof(T), kMeta, {});
      source = Tensor(TensorImpl::make(std::move(storage), 0, sizes, contiguous_strides(sizes), dtype_of<T>));
    } else {
      source = from_blob(const_cast<T*>(values.data()), sizes, dtype_of<T>);
    }
    copy_unrecorded(result, source);
  }
  return finish(result, options);
}

}  // namespace

Tensor& Tensor::fill_(Scalar value) {
  check_defined(*this, "fill_", "a tensor");
  return call_in_place(fill_op, *this, {}, FillAttributes{scalar_value(value)});
}
Tensor& Tensor::zero_() { return fill_(0); }

Tensor full(const Shape& sizes, Scalar value, const TensorOptions& options) {
  Tensor result = empty(sizes, plain(options));
  fill_unrecorded(result, value);
  return finish(result, options);
}
Tensor zeros(const Shape& sizes, const TensorOptions& options) { return full(sizes, 0, options); }
Tensor ones(const Shape& sizes, const TensorOptions& options) { return full(sizes, 1, options); }

Tensor full_like(const Tensor& other, Scalar value, DType dtype) {
  check_defined(other, "full_like", "a tensor");
  Tensor result = empty_like(other, dtype);
  fill_unrecorded(result, value);
  return result;
}
Tensor full_like(const Tensor& other, Scalar value) {
  check_defined(other, "full_like", "a tensor");
  return full_like(other, value, other.dtype());
}
Tensor zeros_like(const Tensor& other, DType dtype) { return full_like(other, 0, dtype); }
Tensor ones_like(const Tensor& other, DType dtype) { return full_like(other, 1, dtype); }
Tensor zeros_like(const Tensor& other) { return full_like(other, 0); }
Tensor ones_like(const Tensor& other) { return full_like(other, 1); }

Tensor tensor(const std::vector<double>& values, const Shape& sizes, const TensorOptions& options) {
  return from_values(values, sizes, options);
}
Tensor tensor(const std::vector<double>& values, const TensorOptions& options) {
  return from_values(values, {static_cast<std::int64_t>(values.size())}, options);
}
namespace {
template <class Rows>
void append(const Rows& rows, std::vector<double>& values, Shape& sizes, int depth) {
  const auto n = static_cast<std::int64_t>(rows.size());
  if (sizes.size() == depth) {
    sizes.push_back(n);
  } else if (sizes[depth] != n) {
    fail<ShapeError>("tensor: expected {} items in each list of dimension {}, got {}", sizes[depth], depth, n);
  }
  for (const auto& row : rows) {
    if constexpr (std::is_same_v<std::decay_t<decltype(row)>, double>) {
      values.push_back(row);
    } else {
      append(row, values, sizes, depth + 1);
    }
  }
}
template <class Rows>
Tensor from_rows(const Rows& rows, int ndim, const TensorOptions& options) {
  std::vector<double> values;
  Shape sizes;
  append(rows, values, sizes, 0);
  while (sizes.size() < ndim) sizes.push_back(0);
  return from_values(values, sizes, options);
}
}  // namespace
Tensor tensor(std::initializer_list<std::initializer_list<double>> rows, const TensorOptions& options) {
  return from_rows(rows, 2, options);
}
Tensor tensor(std::initializer_list<std::initializer_list<std::initializer_list<double>>> matrices,
              const TensorOptions& options) {
  return from_rows(matrices, 3, options);
}
Tensor tensor_from_integers(const std::vector<std::int64_t>& values, const Shape& sizes, const TensorOptions& options) {
  return from_values(values, sizes, options);
}
Tensor scalar_tensor(Scalar value, const TensorOptions& options) { return full({}, value, options); }

Tensor arange(std::int64_t start, std::int64_t end, std::int64_t step, const TensorOptions& options) {
  if (step == 0) fail<Error>("arange: expected a step other than 0");
  // In 128 bits: the ends may be as far apart as i64 goes.
  __extension__ using Wide = __int128;
  const Wide span = step > 0 ? Wide{end} - start : Wide{start} - end, stride = step > 0 ? Wide{step} : -Wide{step};
  const Wide count = span <= 0 ? Wide{0} : (span + stride - 1) / stride;
  if (count > INT64_MAX / 16) fail<ShapeError>("arange: from {} to {} by {} is too long", start, end, step);
  std::vector<std::int64_t> values = host_values<std::int64_t>(static_cast<std::int64_t>(count), "arange");
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<std::int64_t>(static_cast<std::uint64_t>(start) + i * static_cast<std::uint64_t>(step));
  return from_values(values, {static_cast<std::int64_t>(values.size())}, options);
}

Tensor arange(std::int64_t end) { return arange(0, end, 1); }

Tensor detail::arange_floating(double start, double end, double step, const TensorOptions& options) {
  const double count = std::ceil((end - start) / step);
  if (step == 0 || !std::isfinite(start) || !std::isfinite(end) || std::isnan(step)) {
    fail<Error>("arange: expected finite ends and a step other than 0, got {}, {} and {}", start, end, step);
  }
  if (count > 1e15) fail<ShapeError>("arange: from {} to {} by {} is too long", start, end, step);
  std::vector<double> values = host_values<double>(static_cast<std::int64_t>(std::max(count, 0.0)), "arange");
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = start + static_cast<double>(i) * step;
  return from_values(values, {static_cast<std::int64_t>(values.size())}, options);
}

Tensor linspace(double start, double end, std::int64_t steps, const TensorOptions& options) {
  if (steps < 0) fail<Error>("linspace: expected at least 0 steps, got {}", steps);
  std::vector<double> values = host_values<double>(steps, "linspace");
  for (std::int64_t i = 0; i < steps; ++i) {
    // From both ends, so that the last value is exact.
    const double step = steps > 1 ? (end - start) / static_cast<double>(steps - 1) : 0;
    values[static_cast<std::size_t>(i)] = i < steps / 2 || steps == 1 ? start + step * static_cast<double>(i)
                                                                      : end - step * static_cast<double>(steps - 1 - i);
  }
  return from_values(values, {steps}, options);
}

Tensor logspace(double start, double end, std::int64_t steps, double base, const TensorOptions& options) {
  std::vector<double> values =
      linspace(start, end, steps, {.dtype = DType::f64, .device = Device{}}).to_vector<double>();
  for (double& v : values) v = std::pow(base, v);
  return from_values(values, {steps}, options);
}

Tensor eye(std::int64_t n, const TensorOptions& options) {
  Tensor result = zeros({n, n}, plain(options));
  if (n > 0) {
    Tensor diagonal = result.view({n * n}).slice(0, 0, n * n, n + 1);
    fill_unrecorded(diagonal, 1);
  }
  return finish(result, options);
}

}  // namespace halfstep
