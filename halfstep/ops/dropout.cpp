// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/dropout.h"

#include "halfstep/core/fail.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/dropout_internal.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/recorder.h"

namespace halfstep {
namespace {

// Input 1 holds seed and offset. The op is linear in input 0: its gradient is the op itself.
const Op& dropout_op = define_op({
    .name = "dropout",
    .signature = "dropout(input, p=0.5, training=True)",
    .infer =
        [](InferContext& ctx) {
          const Tensor& x = ctx.input(0);
          check_defined(x, ctx.name(), "a tensor");
          check_floating(x, ctx.name());
          ctx.output(x.sizes(), strides_like(x.sizes(), x.strides()), x.dtype());
        },
    .grad =
        [](GradContext& c) {
          c.set(0, call(c.op(), {&c.grad(), &c.input(1)}, c.attributes<DropoutAttributes>()));
        },
    .saves = {in(1)},
    .attributes = &attribute_struct<DropoutAttributes>(),
});

}  // namespace

Tensor reserve_dropout_state(std::int64_t numel, Device device) {
  const std::uint64_t blocks = philox_blocks(static_cast<std::uint64_t>(numel));
  return host_numbers<std::int64_t>(2, device, [blocks](std::int64_t* numbers) {
    const PhiloxState state = default_generator().reserve(blocks);
    numbers[0] = static_cast<std::int64_t>(state.seed);
    numbers[1] = static_cast<std::int64_t>(state.offset);
  });
}

Tensor dropout(const Tensor& input, double p, bool training) {
  check_defined(input, "dropout", "a tensor");
  if (!(p >= 0 && p <= 1)) fail<Error>("dropout: expected a probability between 0 and 1, got {}", p);
  if (!training || p == 0) return input;
  const Tensor where = reserve_dropout_state(input.numel(), input.device());
  return call(dropout_op, {&input, &where}, DropoutAttributes{p});
}

}  // namespace halfstep
