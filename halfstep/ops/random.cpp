// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/random.h"

#include <cmath>
#include <limits>
#include <type_traits>

#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/recorder.h"

namespace halfstep {
namespace {

// Input 0 is the destination, whose old values don't matter; input 1 the state: seed and offset, as it changes from
// call to call.
void infer_fill(InferContext& ctx) {
  const Tensor& x = ctx.input(0);
  ctx.output(x.sizes(), x.strides(), x.dtype());
}
void no_gradient(GradContext& c) {
  c.set(0, zeros(c.input_sizes(0), {.dtype = c.input_dtype(0), .device = c.device(0)}));
}

Op fill_declaration(const char* name, const char* signature) {
  return {.name = name,
          .signature = signature,
          .infer = infer_fill,
          .grad = no_gradient,
          .attributes = &attribute_struct<RandomAttributes>()};
}

const Op& uniform_op = define_op(fill_declaration("uniform", "uniform_(input, low=0, high=1)"));
const Op& normal_op = define_op(fill_declaration("normal", "normal_(input, mean=0, std=1)"));
const Op& randint_op = define_op(fill_declaration("randint", "randint(low, high, sizes)"));
const Op& bernoulli_p_op = define_op(fill_declaration("bernoulli_p", "bernoulli_(input, p=0.5)"));
const Op& randperm_op = define_op(fill_declaration("randperm", "randperm(n)"));
const Op& bernoulli_op = define_op({
    .name = "bernoulli",
    .signature = "bernoulli(input)",
    .infer =
        [](InferContext& ctx) {
          check_defined(ctx.input(0), ctx.name(), "probabilities");
          check_floating(ctx.input(0), ctx.name());
          ctx.output(ctx.input(0).sizes(), strides_like(ctx.input(0).sizes(), ctx.input(0).strides()),
                     ctx.input(0).dtype());
        },
    .grad = no_gradient,
});

Tensor state_tensor(Generator* generator, std::uint64_t blocks, Device device) {
  Generator& source = generator ? *generator : default_generator();
  if (capture_sink()) [[unlikely]]
    source.note_captured();
  return host_numbers<std::int64_t>(2, device, [&source, blocks](std::int64_t* numbers) {
    const PhiloxState state = source.reserve(blocks);
    numbers[0] = static_cast<std::int64_t>(state.seed);
    numbers[1] = static_cast<std::int64_t>(state.offset);
  });
}
// One word an element, two for f64.
std::uint64_t blocks_for(const Tensor& t, bool wide) {
  const auto n = static_cast<std::uint64_t>(t.numel());
  return wide ? philox_blocks64(n) : philox_blocks(n);
}

void fill(const Op& op, Tensor& t, Generator* generator, bool wide, const RandomAttributes& attributes) {
  const Tensor state = state_tensor(generator, blocks_for(t, wide), t.device());
  call_in_place(op, t, {&state}, attributes);
}

TensorOptions plain(const TensorOptions& options) { return {.dtype = options.dtype, .device = options.device}; }
Tensor finish(Tensor t, const TensorOptions& options) {
  if (options.requires_grad) t.requires_grad_();
  return t;
}
void check_kind(const Tensor& t, const char* op) {
  check_defined(t, op, "a tensor");
  check_floating(t, op);
}

RandomAttributes range(std::int64_t low, std::int64_t high, DType dtype) {
  if (low >= high) fail<Error>("randint: expected low below high, got {} and {}", low, high);
  const bool fits = visit_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_same_v<T, bool>) {
      return low >= 0 && high <= 2;
    } else if constexpr (std::is_integral_v<T>) {
      return low >= static_cast<std::int64_t>(std::numeric_limits<T>::min()) &&
             high - 1 <= static_cast<std::int64_t>(std::numeric_limits<T>::max());
    } else {
      return true;
    }
  });
  if (!fits) fail<DTypeError>("randint: {} can't hold the integers from {} to {}", name(dtype), low, high - 1);
  RandomAttributes a;
  a.low = low;
  a.range = static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low);
  return a;
}

}  // namespace

Tensor uniform_(Tensor input, double low, double high, Generator* generator) {
  check_kind(input, "uniform_");
  if (!(low <= high) || !std::isfinite(high - low)) {
    fail<Error>("uniform_: expected finite bounds with low at most high, got {} and {}", low, high);
  }
  fill(uniform_op, input, generator, input.dtype() == DType::f64, {.a = low, .b = high});
  return input;
}

Tensor normal_(Tensor input, double mean, double std, Generator* generator) {
  check_kind(input, "normal_");
  if (!(std >= 0)) fail<Error>("normal_: expected a standard deviation of at least 0, got {}", std);
  fill(normal_op, input, generator, input.dtype() == DType::f64, {.a = mean, .b = std});
  return input;
}

Tensor bernoulli_(Tensor input, double p, Generator* generator) {
  check_defined(input, "bernoulli_", "a tensor");
  if (!(p >= 0 && p <= 1)) fail<Error>("bernoulli_: expected a probability from 0 to 1, got {}", p);
  fill(bernoulli_p_op, input, generator, false, {.a = p});
  return input;
}

Tensor bernoulli(const Tensor& input, Generator* generator) {
  check_kind(input, "bernoulli");
  const Tensor state = state_tensor(generator, blocks_for(input, false), input.device());
  return call(bernoulli_op, {&input, &state});
}

Tensor rand(const Shape& sizes, const TensorOptions& options, Generator* generator) {
  return finish(uniform_(empty(sizes, plain(options)), 0, 1, generator), options);
}
Tensor randn(const Shape& sizes, const TensorOptions& options, Generator* generator) {
  return finish(normal_(empty(sizes, plain(options)), 0, 1, generator), options);
}
Tensor randint(std::int64_t low, std::int64_t high, const Shape& sizes, const TensorOptions& options,
               Generator* generator) {
  const RandomAttributes attributes = range(low, high, options.dtype);
  Tensor result = empty(sizes, plain(options));
  fill(randint_op, result, generator, true, attributes);
  return finish(result, options);
}
Tensor randperm(std::int64_t n, const TensorOptions& options, Generator* generator) {
  if (n < 0) fail<Error>("randperm: expected n of at least 0, got {}", n);
  Tensor result = empty({n}, {.dtype = DType::i64, .device = options.device});
  const Tensor state = state_tensor(generator, randperm_blocks(n), options.device);
  call_in_place(randperm_op, result, {&state}, RandomAttributes{});
  return finish(result.to(options.dtype), options);
}

Tensor rand_like(const Tensor& other, Generator* generator) {
  check_kind(other, "rand_like");
  return uniform_(empty_like(other), 0, 1, generator);
}
Tensor randn_like(const Tensor& other, Generator* generator) {
  check_kind(other, "randn_like");
  return normal_(empty_like(other), 0, 1, generator);
}
Tensor randint_like(const Tensor& other, std::int64_t low, std::int64_t high, Generator* generator) {
  check_defined(other, "randint_like", "a tensor");
  const RandomAttributes attributes = range(low, high, other.dtype());
  Tensor result = empty_like(other);
  fill(randint_op, result, generator, true, attributes);
  return result;
}

}  // namespace halfstep
