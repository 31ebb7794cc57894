// SPDX-License-Identifier: Apache-2.0
// The parts of check_device() for what adds up: reductions, matrix products, softmax, norms, convolutions, pooling,
// attention and losses.
#include <cmath>

#include "halfstep/conformance/device_check_internal.h"
#include "halfstep/core/fail.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/attention.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/conv.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/norm.h"
#include "halfstep/ops/norm_act.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/pool.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/softmax.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/float32_precision.h"

namespace halfstep::conformance::detail {
namespace {

// Roundings of a blocked sum over n.
double blocked(std::int64_t n) { return 2 * std::sqrt(static_cast<double>(n)) + 16; }
Bound sum_of(double terms, double rounded = 1) { return {.rounded = rounded, .summed = terms, .of = Of::magnitudes}; }
Bound largest(double rounded, double terms) { return {.rounded = rounded, .summed = terms, .of = Of::largest}; }

Tensor channels_last(const Tensor& t) { return t.contiguous(MemoryFormat::channels_last); }

}  // namespace

void check_reductions(Checker& c) {
  const Tensor x = c.normal({65, 129, 7}), rows = c.normal({5, c.size(50257, 5003)}),
               columns = c.normal({c.size(20011, 2003), 5}), small = c.uniform({65, 11, 7}, 0.8, 1.25);
  std::vector<OpCase> cases;
  const auto add = [&](const char* name, const Tensor& t, auto f, Bound forward, Bound backward,
                       bool gradients = true) {
    cases.push_back({.name = name,
                     .inputs = {t},
                     .run = [f](const Tensors& in) { return f(in[0]); },
                     .forward = forward,
                     .backward = backward,
                     .gradients = gradients});
  };
  const Bound exact = Bound::exact();
  add(
      "sum of all", x, [](const Tensor& t) { return Tensors{sum(t)}; }, sum_of(blocked(x.numel())), exact);
  add(
      "sum along the last", x, [](const Tensor& t) { return Tensors{sum(t, {2})}; }, sum_of(blocked(7)), exact);
  add(
      "sum along the middle", x, [](const Tensor& t) { return Tensors{sum(t, {1})}; }, sum_of(blocked(129)), exact);
  add(
      "sum along the first", columns, [](const Tensor& t) { return Tensors{sum(t, {0})}; },
      sum_of(blocked(columns.size(0))), exact);
  add(
      "sum of long rows", rows, [](const Tensor& t) { return Tensors{sum(t, {1})}; }, sum_of(blocked(rows.size(1))),
      exact);
  add(
      "sum of transposed", x,
      [](const Tensor& t) {
        return Tensors{sum(t.permute({2, 0, 1}), {1})};
      },
      sum_of(blocked(65)), exact);
  add(
      "mean", x,
      [](const Tensor& t) {
        return Tensors{mean(t, {0, 2})};
      },
      sum_of(blocked(65 * 7)), largest(2, 4));
  add(
      "var", x,
      [](const Tensor& t) {
        return Tensors{var(t, {0, 2})};
      },
      largest(1, 2 * blocked(65 * 7)), largest(3, 2 * blocked(65 * 7)));
  add(
      "norm", x, [](const Tensor& t) { return Tensors{norm(t, 2, {1})}; }, largest(1, blocked(129)),
      largest(3, blocked(129)));
  add(
      "logsumexp", x, [](const Tensor& t) { return Tensors{logsumexp(t, {1})}; }, largest(1, blocked(129)),
      largest(4, blocked(129)));
  add(
      "prod", small, [](const Tensor& t) { return Tensors{prod(t, {1})}; }, largest(1, 16), largest(3, 32));
  add(
      "cumsum", small, [](const Tensor& t) { return Tensors{cumsum(t, 1)}; }, sum_of(2 * 11), sum_of(2 * 11, 2));
  add(
      "amax", x, [](const Tensor& t) { return Tensors{amax(t, {1})}; }, exact, exact, false);
  add(
      "amin of all", x, [](const Tensor& t) { return Tensors{min(t)}; }, exact, exact, false);
  add(
      "max with places", x,
      [](const Tensor& t) {
        const auto r = max(t, 1);
        return Tensors{r.values, r.indices};
      },
      exact, exact, false);
  add(
      "argmin, long rows", rows, [](const Tensor& t) { return Tensors{argmin(t, 1)}; }, exact, exact, false);
  add(
      "any, all, count", x,
      [](const Tensor& t) {
        return Tensors{any(gt(t, 2.5), {2}), all(gt(t, -2.0), {2}), count_nonzero(gt(t, 1.0), {0})};
      },
      exact, exact, false);
  c.family("reductions", kAll, cases);

  std::vector<OpCase> soft;
  const auto softly = [&](const char* name, const Tensor& t, auto f, std::int64_t n) {
    // The gradient is y (g - sum g y) with y as it was saved.
    soft.push_back({.name = name,
                    .inputs = {t},
                    .run = [f](const Tensors& in) { return Tensors{f(in[0])}; },
                    .forward = largest(1, blocked(n)),
                    .backward = largest(6, 4 * blocked(n))});
  };
  softly(
      "softmax", x, [](const Tensor& t) { return softmax(t, 1); }, 129);
  softly(
      "softmax of long rows", rows, [](const Tensor& t) { return softmax(t, 1); }, rows.size(1));
  softly(
      "softmax of short rows", c.normal({c.size(4001, 401), 7}, 3), [](const Tensor& t) { return softmax(t, -1); }, 7);
  softly(
      "log_softmax", c.normal({301, 1000}, 2), [](const Tensor& t) { return log_softmax(t, 1); }, 1000);
  softly(
      "log_softmax along the first", x, [](const Tensor& t) { return log_softmax(t, 0); }, 65);
  c.family("softmax", kAll, soft);
}

void check_products(Checker& c) {
  std::vector<OpCase> cases;
  const auto product = [&](const std::string& name, Tensors inputs, auto f, double terms, double back) {
    cases.push_back({.name = name,
                     .inputs = std::move(inputs),
                     .run = [f](const Tensors& in) { return Tensors{f(in)}; },
                     .forward = sum_of(terms),
                     .backward = sum_of(back)});
  };
  const std::int64_t m = c.size(160, 33), k = c.size(384, 67), n = c.size(256, 41);
  const double most = static_cast<double>(std::max({m, k, n}));
  const auto plain = [](const Tensors& t) { return mm(t[0], t[1]); };
  product("mm", {c.normal({m, k}), c.normal({k, n})}, plain, most, most);
  product("mm, odd sizes", {c.normal({37, 129}), c.normal({129, 71})}, plain, 129, 129);
  product("mm, one row", {c.normal({1, k}), c.normal({k, n})}, plain, most, most);
  product("mm, one column", {c.normal({m, k}), c.normal({k, 1})}, plain, most, most);
  product("mm, one term", {c.normal({m, 1}), c.normal({1, n})}, plain, most, most);
  product(
      "mm, first transposed", {c.normal({k, m}), c.normal({k, n})}, [](const Tensors& t) { return mm(t[0].t(), t[1]); },
      most, most);
  product(
      "mm, second transposed", {c.normal({m, k}), c.normal({n, k})},
      [](const Tensors& t) { return mm(t[0], t[1].t()); }, most, most);
  product(
      "mm, both transposed", {c.normal({k, m}), c.normal({n, k})},
      [](const Tensors& t) { return mm(t[0].t(), t[1].t()); }, most, most);
  product(
      "mm, every second column", {c.normal({m, 2 * 48}), c.normal({48, n})},
      [](const Tensors& t) { return mm(t[0].slice(1, 0, 96, 2), t[1]); }, most, most);
  product(
      "bmm", {c.normal({5, 33, 65}), c.normal({5, 65, 17})}, [](const Tensors& t) { return bmm(t[0], t[1]); }, 65, 65);
  product(
      "bmm, transposed", {c.normal({5, 33, 65}), c.normal({5, 17, 65})},
      [](const Tensors& t) { return bmm(t[0], t[1].transpose(1, 2)); }, 65, 65);
  // The gradient of what is broadcast adds up over the batch too, each product rounded before.
  cases.push_back({.name = "matmul, broadcast",
                   .inputs = {c.normal({3, 1, 19, 31}), c.normal({4, 31, 23})},
                   .run = [](const Tensors& t) { return Tensors{matmul(t[0], t[1])}; },
                   .forward = sum_of(31),
                   .backward = sum_of(4 * 31, 2)});
  product(
      "matmul, vector", {c.normal({m, k}), c.normal({k})}, [](const Tensors& t) { return matmul(t[0], t[1]); }, most,
      most);
  product(
      "linear", {c.normal({m, k}), c.normal({n, k}), c.normal({n})},
      [](const Tensors& t) { return linear(t[0], t[1], t[2]); }, most + 1, most);
  product(
      "linear without bias, odd sizes", {c.normal({3, 11, 67}), c.normal({13, 67})},
      [](const Tensors& t) { return linear(t[0], t[1]); }, 67, 67);
  // Its gradients are sums of products that have been rounded.
  cases.push_back({.name = "outer",
                   .inputs = {c.normal({33}), c.normal({41})},
                   .run = [](const Tensors& t) { return Tensors{outer(t[0], t[1])}; },
                   .forward = sum_of(41),
                   .backward = sum_of(41, 2)});
  c.family("matrix products", kAll, cases);

  c.family("matrix products, result in f32", {DType::f16, DType::bf16},
           {{.name = "mm",
             .inputs = {c.normal({m, k}), c.normal({k, n})},
             .run = [](const Tensors& t) { return Tensors{mm(t[0], t[1], {.dtype = f32})}; },
             .forward = sum_of(most),
             .gradients = false}});

  // TF32 keeps 10 bits of a factor's mantissa, cut off or rounded: at most 2^-10 of each factor, 2^14 float32
  // roundings.
  set_float32_precision(Float32Precision::high);
  const double cut = 2 * 0x1p14;
  c.family("matrix products and convolutions, TF32 allowed", {DType::f32},
           {{.name = "mm",
             .inputs = {c.normal({m, k}), c.normal({k, n})},
             .run = [](const Tensors& t) { return Tensors{mm(t[0], t[1])}; },
             .forward = sum_of(most + cut),
             .backward = sum_of(most + cut)},
            {.name = "conv2d",
             .inputs = {c.normal({2, 16, 9, 11}), c.normal({8, 16, 3, 3})},
             .run =
                 [](const Tensors& t) {
                   return Tensors{conv2d(channels_last(t[0]), channels_last(t[1]), {}, {.padding = {1}})};
                 },
             .forward = sum_of(16 * 9 + cut),
             .backward = sum_of(2 * 9 * 11 + cut)}});
  set_float32_precision(Float32Precision::highest);
}

namespace {

std::vector<OpCase> convolutions(Checker& c, bool last) {
  std::vector<OpCase> cases;
  const auto add = [&](const char* name, const Shape& x, const Shape& w, bool bias, const ConvFuncOptions& o) {
    Tensors inputs{c.normal(x), c.normal(w)};
    if (bias) inputs.push_back(c.normal({w[0]}));
    const double forward = static_cast<double>(w[1] * w[2] * w[3]) + 1;
    // The weight's gradient adds up over all places of all samples, the input's over the outputs that see it.
    const double backward = static_cast<double>(std::max(x[0] * x[2] * x[3], w[0] * w[2] * w[3]));
    cases.push_back({.name = name,
                     .inputs = inputs,
                     .run =
                         [last, o](const Tensors& t) {
                           const Tensor b = t.size() > 2 ? t[2] : Tensor();
                           return Tensors{last ? conv2d(channels_last(t[0]), channels_last(t[1]), b, o)
                                               : conv2d(t[0], t[1], b, o)};
                         },
                     .forward = sum_of(forward),
                     .backward = sum_of(backward)});
  };
  const std::int64_t n = c.size(4, 2), channels = c.size(32, 16), side = c.size(21, 9);
  add("3x3", {n, channels, side, side}, {channels, channels, 3, 3}, false, {.padding = {1}});
  add("3x3, stride 2, odd sizes", {3, 24, 15, 17}, {40, 24, 3, 3}, true, {.stride = {2}, .padding = {1}});
  add("1x1", {n, channels, side, side}, {2 * channels, channels, 1, 1}, false, {});
  add("1x1, stride 2", {2, 16, 14, 14}, {32, 16, 1, 1}, false, {.stride = {2}});
  add("7x7, stride 2, 3 channels", {2, 3, c.size(45, 23), 33}, {16, 3, 7, 7}, false, {.stride = {2}, .padding = {3}});
  add("dilated, bias", {2, 8, 13, 11}, {12, 8, 3, 3}, true, {.padding = {2}, .dilation = {2}});
  add("in groups", {2, 16, 9, 9}, {24, 4, 3, 3}, true, {.padding = {1}, .groups = 4});
  add("a channel each", {2, 32, 14, 14}, {32, 1, 3, 3}, false, {.padding = {1}, .groups = 32});
  add("1x5, uneven", {2, 5, 7, 19}, {6, 5, 1, 5}, true, {.stride = {1, 3}, .padding = {0, 2}});
  return cases;
}

}  // namespace

void check_layers(Checker& c) {
  c.family("convolutions, channels last", kUsual, convolutions(c, true));
  std::vector<OpCase> rows = convolutions(c, false);
  rows.push_back({.name = "transposed",
                  .inputs = {c.normal({2, 12, 7, 9}), c.normal({12, 10, 3, 3}), c.normal({10})},
                  .run =
                      [](const Tensors& t) {
                        return Tensors{
                            conv_transpose2d(t[0], t[1], t[2], {.stride = {2}, .padding = {1}, .output_padding = {1}})};
                      },
                  .forward = sum_of(12 * 9 + 1),
                  .backward = sum_of(10 * 9 * 14 * 18)});
  rows.push_back({.name = "of sequences",
                  .inputs = {c.normal({3, 9, 51}), c.normal({7, 9, 5}), c.normal({7})},
                  .run = [](const Tensors& t) { return Tensors{conv1d(t[0], t[1], t[2], {.padding = {2}})}; },
                  .forward = sum_of(9 * 5 + 1),
                  .backward = sum_of(3 * 51)});
  c.family("convolutions, row-major", kUsual, rows);

  const Tensor images = c.normal({3, 16, 14, 15});
  std::vector<OpCase> pools;
  const auto pool = [&](const char* name, auto f, Bound forward, Bound backward) {
    for (const bool last : {true, false}) {
      pools.push_back({.name = fmt::format("{}, {}", name, last ? "channels last" : "row-major"),
                       .inputs = {images},
                       .run = [f, last](const Tensors& t) { return f(last ? channels_last(t[0]) : t[0]); },
                       .forward = forward,
                       .backward = backward});
    }
  };
  pool(
      "largest, with places",
      [](const Tensor& t) {
        const auto r = max_pool2d_with_indices(t, {3}, {.stride = {2}, .padding = {1}});
        return Tensors{r.values, r.indices};
      },
      Bound::exact(), largest(2, 9));
  pool(
      "largest, 2x2", [](const Tensor& t) { return Tensors{max_pool2d(t, {2})}; }, Bound::exact(), Bound::exact());
  pool(
      "mean", [](const Tensor& t) { return Tensors{avg_pool2d(t, {3}, {.stride = {2}, .padding = {1}})}; }, sum_of(12),
      sum_of(12, 2));
  pool(
      "mean of all", [](const Tensor& t) { return Tensors{adaptive_avg_pool2d(t, {1})}; }, sum_of(14 * 15), sum_of(4));
  pool(
      "mean to 3x4",
      [](const Tensor& t) {
        return Tensors{adaptive_avg_pool2d(t, {3, 4})};
      },
      sum_of(30), sum_of(12, 2));
  c.family("pooling", kUsual, pools);

  std::vector<OpCase> norms;
  const auto normalise = [&](const std::string& name, Tensors inputs, auto f, std::int64_t n, std::int64_t over) {
    // Statistics over n, the gradients of weights over the rest; x hat is made anew from the rounded input.
    norms.push_back({.name = name,
                     .inputs = std::move(inputs),
                     .run = [f](const Tensors& t) { return Tensors{f(t)}; },
                     .forward = largest(1, 4 * blocked(n)),
                     .backward = largest(4, 8 * blocked(std::max(n, over)))});
  };
  const std::int64_t wide = c.size(1024, 130);
  normalise(
      "layer_norm", {c.normal({7, 33, wide}) + 2.0, c.normal({wide}), c.normal({wide})},
      [wide](const Tensors& t) { return layer_norm(t[0], {wide}, {.weight = t[1], .bias = t[2]}); }, wide, 7 * 33);
  normalise(
      "layer_norm without weights", {c.normal({65, 49})}, [](const Tensors& t) { return layer_norm(t[0], {49}); }, 49,
      65);
  normalise(
      "rms_norm", {c.normal({65, wide}), c.normal({wide})},
      [wide](const Tensors& t) { return rms_norm(t[0], {wide}, {.weight = t[1], .eps = 1e-5}); }, wide, 65);
  normalise(
      "group_norm", {c.normal({4, 24, 7, 9}), c.normal({24}), c.normal({24})},
      [](const Tensors& t) { return group_norm(t[0], 4, {.weight = t[1], .bias = t[2]}); }, 6 * 63, 4 * 63);
  const Tensor pictures = c.normal({c.size(16, 5), 24, 14, 13}) + 1.0, residual = c.normal(pictures.sizes());
  const std::int64_t each = pictures.numel() / 24;
  for (const bool last : {true, false}) {
    const auto lay = [last](const Tensor& t) { return last ? channels_last(t) : t; };
    const char* layout = last ? "channels last" : "row-major";
    normalise(
        fmt::format("batch_norm, {}", layout), {pictures, c.normal({24}), c.normal({24})},
        [lay](const Tensors& t) { return batch_norm(lay(t[0]), {.weight = t[1], .bias = t[2], .training = true}); },
        each, each);
    // Devices without the kernel that does it in one pass round before they add.
    normalise(
        fmt::format("batch_norm with residual, {}", layout), {pictures, c.normal({24}), c.normal({24}), residual},
        [lay](const Tensors& t) {
          return batch_norm_act(lay(t[0]), {.weight = t[1], .bias = t[2], .training = true}, Activation::none,
                                lay(t[3]));
        },
        each, each);
    norms.back().forward.rounded = 3;
    // The same, before silu and after it; on the way back silu's gradient is rounded, too.
    normalise(
        fmt::format("batch_norm and silu, {}", layout), {pictures, c.normal({24}), c.normal({24})},
        [lay](const Tensors& t) {
          return batch_norm_act(lay(t[0]), {.weight = t[1], .bias = t[2], .training = true}, Activation::silu);
        },
        each, each);
    norms.back().forward.rounded = 3;
    norms.back().backward.rounded = 6;
  }
  c.family("norms", kUsual, norms);
  c.line("running statistics", "", [&] {
    for (DType dtype : kUsual) {
      const Tensor x = pictures.to(dtype);
      const auto statistics = [&](const Tensor& in, DType of) {
        const Tensor m = zeros({24}, {.dtype = of, .device = in.device()}),
                     v = ones({24}, {.dtype = of, .device = in.device()});
        batch_norm(channels_last(in), {.running_mean = m, .running_var = v, .training = true});
        return Tensors{m, v};
      };
      const Tensors exact = statistics(x.to(DType::f64), DType::f64), got = statistics(x.to(c.device), f32);
      c.one(name(dtype), [&] {
        c.near(got[0], exact[0], {}, largest(1, blocked(each)), "running mean");
        c.near(got[1], exact[1], {}, largest(1, 4 * blocked(each)), "running variance");
      });
    }
  });

  const std::int64_t length = c.size(128, 37), width = c.size(64, 24);
  const Tensor q = c.normal({2, 4, length, width}), k = c.normal({2, 4, length, width}),
               v = c.normal({2, 4, length, width});
  // Scores, weights and the product with them may each be in the dtype.
  const Bound attend = largest(4, 4 * static_cast<double>(width + length)),
              back = largest(12, 16 * static_cast<double>(width + length));
  const auto attention = [&](const char* name, Tensors inputs, auto f) {
    return OpCase{.name = name,
                  .inputs = std::move(inputs),
                  .run = [f](const Tensors& t) { return Tensors{f(t)}; },
                  .forward = attend,
                  .backward = back};
  };
  c.family(
      "attention", kUsual,
      {attention("plain", {q, k, v}, [](const Tensors& t) { return scaled_dot_product_attention(t[0], t[1], t[2]); }),
       attention("causal", {q, k, v},
                 [](const Tensors& t) { return scaled_dot_product_attention(t[0], t[1], t[2], {.is_causal = true}); }),
       attention("other lengths", {c.normal({2, 3, 19, 40}), c.normal({2, 3, 33, 40}), c.normal({2, 3, 33, 40})},
                 [](const Tensors& t) { return scaled_dot_product_attention(t[0], t[1], t[2], {.scale = 0.25}); }),
       attention("with a mask", {q, k, v, c.normal({length, length})}, [](const Tensors& t) {
         return scaled_dot_product_attention(t[0], t[1], t[2], {.mask = t[3].detach()});
       })});
}

void check_losses(Checker& c) {
  const std::int64_t classes = c.size(1000, 101);
  const Tensor logits = c.normal({129, classes}, 2), targets = c.integers(classes, {129}),
               weight = c.uniform({classes}, 0.5, 2);
  Tensor some = targets.clone();
  some.slice(0, 0, 129, 4).fill_(-100);
  const Bound forward = largest(1, blocked(classes) + blocked(129)), backward = largest(3, 4 * blocked(classes));
  std::vector<OpCase> cases;
  const auto add = [&](const char* name, Tensors inputs, auto f) {
    cases.push_back({.name = name,
                     .inputs = std::move(inputs),
                     .run = [f](const Tensors& t) { return Tensors{f(t)}; },
                     .forward = forward,
                     .backward = backward});
  };
  add("cross_entropy", {logits, targets}, [](const Tensors& t) { return cross_entropy(t[0], t[1]); });
  add("cross_entropy, ignored targets", {logits, some}, [](const Tensors& t) { return cross_entropy(t[0], t[1]); });
  add("cross_entropy, smoothing", {logits, targets},
      [](const Tensors& t) { return cross_entropy(t[0], t[1], {.label_smoothing = 0.1}); });
  add("cross_entropy, weights", {logits, targets, weight},
      [](const Tensors& t) { return cross_entropy(t[0], t[1], {.weight = t[2].detach()}); });
  add("cross_entropy, each", {logits, targets},
      [](const Tensors& t) { return cross_entropy(t[0], t[1], {.reduction = Reduction::none}); });
  const Tensor x = c.normal({33, 65}), y = c.normal({33, 65}), p = c.uniform({33, 65}, 0.1, 0.9);
  add("mse_loss", {x, y}, [](const Tensors& t) { return mse_loss(t[0], t[1]); });
  add("l1_loss", {x, y}, [](const Tensors& t) { return l1_loss(t[0], t[1]); });
  add("smooth_l1_loss", {x, y}, [](const Tensors& t) { return smooth_l1_loss(t[0], t[1]); });
  add("huber_loss", {x, y}, [](const Tensors& t) { return huber_loss(t[0], t[1]); });
  add("binary_cross_entropy_with_logits", {x, p},
      [](const Tensors& t) { return binary_cross_entropy_with_logits(t[0], t[1].detach()); });
  c.family("losses", kUsual, cases);
}

}  // namespace halfstep::conformance::detail
