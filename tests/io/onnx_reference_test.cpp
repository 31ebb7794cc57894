// SPDX-License-Identifier: Apache-2.0
// Exported ops, run by ONNX's reference evaluator; networks are in onnx_networks_test.cpp.
#include <gtest/gtest.h>

#include "halfstep/nn/conv.h"
#include "halfstep/nn/embedding.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/nn/pooling.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/attention.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/conv.h"
#include "halfstep/ops/einsum.h"
#include "halfstep/ops/index.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/norm.h"
#include "halfstep/ops/norm_act.h"
#include "halfstep/ops/pad.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/pool.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/resample.h"
#include "halfstep/ops/softmax.h"
#include "halfstep/ops/triangle.h"
#include "halfstep/ops/view.h"
#include "tests/io/onnx_reference.h"

namespace halfstep {
namespace {

using test::Function;
using test::kUnit;
using test::OnnxReference;
using Unary = std::function<Tensor(const Tensor&)>;

constexpr double kElementwise = 32 * kUnit;

TEST_F(OnnxReference, ElementwiseOps) {
  struct Case {
    const char* name;
    Unary f;
    double low = -4, high = 4;
  };
  const Case cases[] = {
      {"relu", [](const Tensor& x) { return relu(x); }},
      {"relu6", [](const Tensor& x) { return relu6(x * 3); }},
      {"hardtanh", [](const Tensor& x) { return hardtanh(x, -0.5, 2); }},
      {"clamp_min", [](const Tensor& x) { return clamp(x, 0.25); }},
      {"clamp_max", [](const Tensor& x) { return clamp(x, std::nullopt, 0.25); }},
      {"sigmoid", [](const Tensor& x) { return sigmoid(x); }},
      {"silu", [](const Tensor& x) { return silu(x); }},
      {"gelu", [](const Tensor& x) { return gelu(x); }},
      {"gelu_tanh", [](const Tensor& x) { return gelu(x, GeluForm::tanh); }},
      {"tanh", [](const Tensor& x) { return tanh(x); }},
      {"elu", [](const Tensor& x) { return elu(x, 0.7); }},
      {"selu", [](const Tensor& x) { return selu(x); }},
      {"leaky_relu", [](const Tensor& x) { return leaky_relu(x, 0.2); }},
      {"softplus", [](const Tensor& x) { return softplus(x); }},
      {"softplus_beta", [](const Tensor& x) { return softplus(x, 2); }},
      {"softplus_cut", [](const Tensor& x) { return softplus(x, 2, 3); }},
      {"threshold", [](const Tensor& x) { return threshold(x, 0.5, -7); }},
      {"mish", [](const Tensor& x) { return mish(x); }},
      {"hardswish", [](const Tensor& x) { return hardswish(x); }},
      {"hardsigmoid", [](const Tensor& x) { return hardsigmoid(x); }},
      {"logsigmoid", [](const Tensor& x) { return logsigmoid(x); }},
      {"abs", [](const Tensor& x) { return abs(x); }},
      {"neg", [](const Tensor& x) { return -x; }},
      {"sign", [](const Tensor& x) { return sign(x); }},
      {"floor", [](const Tensor& x) { return floor(x); }},
      {"ceil", [](const Tensor& x) { return ceil(x); }},
      {"round", [](const Tensor& x) { return round(x * 2) + round(x); }},
      {"square", [](const Tensor& x) { return square(x); }},
      {"exp", [](const Tensor& x) { return exp(x); }},
      {"erf", [](const Tensor& x) { return erf(x); }},
      {"sin_cos", [](const Tensor& x) { return sin(x) + cos(x); }},
      {"sinh_cosh", [](const Tensor& x) { return sinh(x) + cosh(x); }},
      {"atan_asinh", [](const Tensor& x) { return atan(x) + asinh(x); }},
      {"tan_asin_acos", [](const Tensor& x) { return tan(x) + asin(x) + acos(x) + atanh(x); }, -0.9, 0.9},
      {"log_sqrt", [](const Tensor& x) { return log(x) + sqrt(x) + rsqrt(x) + reciprocal(x) + acosh(x + 1); }, 0.5, 4},
      {"add_sub", [](const Tensor& x) { return sub(halfstep::add(x, x.slice(1, 0, 1), 0.5), x * x, 2) - 1.5; }},
      {"mul_div", [](const Tensor& x) { return (2 / (x * x + 1)) / (x * x + 0.5) / 3; }},
      {"pow", [](const Tensor& x) { return pow(x, 3) + pow(2, x) + pow(abs(x) + 0.5, x); }},
      {"max_min", [](const Tensor& x) { return maximum(x, x * x) - minimum(x, x * 0.5); }},
      {"compare", [](const Tensor& x) { return where(gt(x, 0.5), x, x * 2) + masked_fill(x, le(x, 0), 3); }},
      {"compare_all",
       [](const Tensor& x) {
         const Tensor y = round(x);
         return eq(y, 1).to(f32) + ne(y, 1).to(f32) * 2 + lt(y, 1).to(f32) * 4 + ge(y, 1).to(f32) * 8;
       }},
      {"to_bool_and_back", [](const Tensor& x) { return gt(x, 0).to(i64).to(f32) + x.to(i32).to(f32); }},
  };
  for (const Case& c : cases) {
    const auto input = [&](std::int64_t n) { return rand({n, 5, 3}) * (c.high - c.low) + c.low; };
    add(c.name, Function(c.f), {input(1), input(4)}, kElementwise);
    if (std::string_view(c.name).starts_with("gelu")) {
      add(c.name + std::string("_20"), Function(c.f), {input(2)}, kElementwise, {.opset = 20});
    }
  }
  add("prelu", Function([](const Tensor& x, const auto& p) { return prelu(x, p[0]); }, {rand({5})}),
      {randn({1, 5, 3}), randn({4, 5, 3})}, kElementwise);
  check();
}

TEST_F(OnnxReference, ViewsAndJoins) {
  const std::pair<const char*, Unary> cases[] = {
      {"flatten", [](const Tensor& x) { return flatten(x, 1); }},
      {"reshape",
       [](const Tensor& x) {
         return x.reshape({x.size(0), 6, -1}).reshape({-1, 4});
       }},
      {"two_open_sizes",
       [](const Tensor& x) {
         const Tensor rows = x.reshape({x.size(0), 24}).slice(1, 5, 6);
         return (rows * rows.t()).unsqueeze(0).unsqueeze(0);
       }},
      {"permute",
       [](const Tensor& x) {
         return x.permute({0, 2, 3, 1});
       }},
      {"batch_last",
       [](const Tensor& x) {
         return x.permute({1, 2, 3, 0}) * 2;
       }},
      {"transpose", [](const Tensor& x) { return x.transpose(1, -1).transpose(0, 2).transpose(0, 2); }},
      {"squeeze", [](const Tensor& x) { return x.slice(2, 0, 1).squeeze(2).unsqueeze(1).unsqueeze(-1); }},
      {"select",
       [](const Tensor& x) { return x.select(1, -1) + x.select(2, 0).select(1, 0).unsqueeze(1).unsqueeze(1); }},
      {"slice", [](const Tensor& x) { return x.slice(3, 1, 4, 2).slice(1, -1); }},
      {"slice_batch", [](const Tensor& x) { return x.slice(0, 0) + x.slice(0, 0, 1); }},
      {"expand",
       [](const Tensor& x) {
         return x.slice(1, 0, 1).expand({-1, 5, -1, -1}) * 2;
       }},
      {"expand_to_batch",
       [](const Tensor& x) {
         return ones({1, 7}).expand({x.size(0), 7}) * x.reshape({x.size(0), 24}).slice(1, 0, 7);
       }},
      {"token",
       [](const Tensor& x) {
         const Tensor parts[] = {zeros({x.size(0), 1, 12}), x.reshape({x.size(0), 2, 12})};
         return cat(parts, 1);
       }},
      {"cat",
       [](const Tensor& x) {
         const Tensor parts[] = {x, x * 2, x.slice(-1, 0, 1)};
         return cat(parts, -1);
       }},
      {"stack_chunk",
       [](const Tensor& x) {
         const auto parts = chunk(x, 2, 3);
         return stack(parts, 1);
       }},
      {"flip",
       [](const Tensor& x) {
         return flip(x, {1, -1});
       }},
      {"contiguous",
       [](const Tensor& x) {
         return x.permute({0, 2, 1, 3}).contiguous().view({-1, 3, 8});
       }},
      {"channels_last",
       [](const Tensor& x) {
         return to_channels_last(x).permute({0, 2, 3, 1}).reshape({-1, 2});
       }},
      {"triangles", [](const Tensor& x) { return tril(x) + triu(x, 1) * 2; }},
      {"repeat",
       [](const Tensor& x) {
         return repeat(x, {1, 2, 1, 1});
       }},
  };
  for (const auto& [name, f] : cases) add(name, Function(f), {randn({1, 2, 3, 4}), randn({5, 2, 3, 4})}, kUnit);
  add("in_place", Function([](const Tensor& x) {
        Tensor y = x * 2;
        const Tensor before = y.clone();
        relu_(y);
        y.add_(before);
        return y.mul_(0.5);
      }),
      {randn({2, 3})}, kElementwise);
  check();
}

TEST_F(OnnxReference, ProductsReductionsAndSoftmax) {
  const double sums = 64 * kUnit;  // at most 24 terms, and what comes of them once more
  const std::pair<const char*, Unary> cases[] = {
      {"mm",
       [](const Tensor& x) {
         return mm(x.reshape({-1, 4}), ones({4, 3})).reshape({x.size(0), 6, 3});
       }},
      {"matmul", [](const Tensor& x) { return matmul(x, x.transpose(-1, -2)); }},
      {"addmm",
       [](const Tensor& x) {
         return addmm(ones({5}), x.reshape({x.size(0), 24}), full({24, 5}, 0.25), {.beta = 0.5, .alpha = 2});
       }},
      {"einsum",
       [](const Tensor& x) {
         const Tensor both[] = {x, x};
         return einsum("bchw,bcxw->bchx", both);
       }},
      {"sum",
       [](const Tensor& x) {
         return sum(x, {1, -1});
       }},
      {"sum_all", [](const Tensor& x) { return sum(x) + x; }},
      {"mean",
       [](const Tensor& x) {
         return mean(x, {2, 3});
       }},
      {"mean_keepdim", [](const Tensor& x) { return x - mean(x, {1}, {.keepdim = true}); }},
      {"prod", [](const Tensor& x) { return prod(x, {3}); }},
      {"amax_amin",
       [](const Tensor& x) {
         return amax(x, {1, 2}) - amin(x, {1, 2});
       }},
      {"logsumexp", [](const Tensor& x) { return logsumexp(x, {-1}); }},
      {"argmax", [](const Tensor& x) { return argmax(x, 1); }},
      {"argmin", [](const Tensor& x) { return argmin(x, -1, {.keepdim = true}); }},
      {"max_dim", [](const Tensor& x) { return max(x, 1).values + max(x, 1).indices.to(f32); }},
      {"min_values", [](const Tensor& x) { return min(x, 2, {.keepdim = true}).values; }},
      {"softmax", [](const Tensor& x) { return softmax(x, 1); }},
      {"log_softmax",
       [](const Tensor& x) {
         return log_softmax(x.reshape({-1, 24}), -1);
       }},
      {"cumsum", [](const Tensor& x) { return cumsum(x, 2); }},
  };
  for (const auto& [name, f] : cases) {
    const std::vector<Tensor> inputs{randn({1, 2, 3, 4}), randn({5, 2, 3, 4})};
    add(name, Function(f), inputs, sums);
    // Axes became an input there.
    if (std::string_view(name).starts_with("mean") || std::string_view(name).starts_with("amax")) {
      add(name + std::string("_18"), Function(f), inputs, sums, {.opset = 18});
    }
  }
  add("linear_3d", nn::Linear{{.in = 4, .out = 5}}, {randn({1, 3, 4}), randn({4, 3, 4})}, sums);
  add("linear_no_bias", nn::Linear{{.in = 4, .out = 5, .bias = false}}, {randn({2, 4})}, sums);
  add("tied", Function([](const Tensor& x, const auto& p) { return mm(mm(x, p[0]), p[0].t()); }, {randn({4, 6})}),
      {randn({2, 4})}, sums);
  check();
}

TEST_F(OnnxReference, NormsEmbeddingAndAttention) {
  const double sums = 256 * kUnit;
  const auto randomised = [](const auto& module) {
    for (const NamedTensor& t : module.state_dict()) {
      if (t.tensor.is_floating()) nn::replace_contents(t.tensor, rand(t.tensor.sizes()) + 0.5);
    }
    return module;
  };
  const std::vector<Tensor> images{randn({1, 6, 3, 4}), randn({3, 6, 3, 4})};
  add("batch_norm", randomised(nn::BatchNorm2d{{.channels = 6, .eps = 1e-3}}), images, sums);
  add("batch_norm_plain", nn::BatchNorm2d{{.channels = 6, .affine = false}}, images, sums);
  const auto act = [&](Activation activation) {
    const nn::BatchNorm2d norm = randomised(nn::BatchNorm2d{{.channels = 6}});
    norm.eval();
    return Function([=](const Tensor& x) { return norm(x * 2, activation, x); });
  };
  add("batch_norm_relu", act(Activation::relu), images, sums);
  add("batch_norm_relu6", act(Activation::relu6), images, sums);
  add("batch_norm_add", act(Activation::none), images, sums);
  add("batch_norm_1d", randomised(nn::BatchNorm1d{{.channels = 6}}), {randn({1, 6}), randn({5, 6})}, sums);
  add("layer_norm", randomised(nn::LayerNorm{{.normalized_shape = {3, 4}}}), images, sums);
  add("layer_norm_plain", Function([](const Tensor& x) { return layer_norm(x, {6, 3, 4}); }), images, sums);
  add("rms_norm", randomised(nn::RMSNorm{{.normalized_shape = {4}}}), images, sums);
  add("group_norm", randomised(nn::GroupNorm{{.groups = 3, .channels = 6}}), images, sums);
  add("group_norm_plain", Function([](const Tensor& x) { return group_norm(x, 2); }), images, sums);
  add("embedding", nn::Embedding{{.num = 9, .dim = 5}}, {randint(0, 9, {1, 4}), randint(0, 9, {3, 4})}, sums);
  add("index_select",
      Function(
          [](const Tensor& x, const auto& p) {
            return index_select(p[0], 1, x.reshape({-1})).unsqueeze(0) * x.slice(0, 0, 1).slice(1, 0, 1).to(f32);
          },
          {randn({2, 9})}),
      {randint(0, 9, {2, 4})}, sums, {.dynamic_batch = false});
  add("gather", Function([](const Tensor& x) { return gather(x, 3, argmax(x, 3, {.keepdim = true})); }), images, sums);
  const auto heads = [](std::int64_t n) { return randn({n, 2, 5, 4}); };
  add("attention", Function([](const Tensor& x) { return scaled_dot_product_attention(x, x * 0.5, x + 1); }),
      {heads(1), heads(3)}, sums);
  add("attention_causal", Function([](const Tensor& x) {
        return scaled_dot_product_attention(x, x * 0.5, x + 1, {.is_causal = true, .scale = 0.3});
      }),
      {heads(1), heads(3)}, sums);
  add("attention_mask", Function([](const Tensor& x) {
        // The last query sees nothing.
        const Tensor mask = tril(ones({5, 5}, {.dtype = boolean})).transpose(0, 1).slice(0, 0, 4);
        const Tensor rows[] = {mask, zeros({1, 5}, {.dtype = boolean})};
        return scaled_dot_product_attention(x, x * 0.5, x + 1, {.mask = cat(rows)});
      }),
      {heads(1), heads(3)}, sums);
  add("attention_added",
      Function([](const Tensor& x,
                  const auto& p) { return scaled_dot_product_attention(x, x * 0.5, x + 1, {.mask = p[0]}); },
               {randn({5, 5})}),
      {heads(1), heads(3)}, sums);
  check();
}

TEST_F(OnnxReference, ImageOps) {
  const std::vector<Tensor> images{randn({1, 4, 9, 8}), randn({3, 4, 9, 8})};
  const auto with = [](Function::F f, const Shape& weight, const Shape& bias) {
    return Function(std::move(f), {randn(weight), randn(bias)});
  };
  // At most 4 x 3 x 5 products.
  const double sums = 128 * kUnit;
  add("conv",
      with([](const Tensor& x, const auto& p) { return conv2d(x, p[0], p[1], {.padding = {1}}); }, {6, 4, 3, 3}, {6}),
      images, sums);
  add("conv_odd",
      with(
          [](const Tensor& x, const auto& p) {
            return conv2d(x, p[0], {}, {.stride = {2, 1}, .padding = {0, 3}, .dilation = {2, 1}, .groups = 2});
          },
          {6, 2, 3, 5}, {6}),
      images, sums);
  add("depthwise",
      with(
          [](const Tensor& x, const auto& p) {
            return conv2d(to_channels_last(x), p[0], p[1], {.stride = {2}, .padding = {1}, .groups = 4});
          },
          {4, 1, 3, 3}, {4}),
      images, sums);
  add("conv1d",
      with(
          [](const Tensor& x, const auto& p) {
            return conv1d(x.reshape({x.size(0), 4, 72}), p[0], p[1], {.stride = {3}, .padding = {2}});
          },
          {5, 4, 4}, {5}),
      images, sums);
  add("conv_transpose",
      with(
          [](const Tensor& x, const auto& p) {
            return conv_transpose2d(x, p[0], p[1], {.stride = {2, 3}, .padding = {1, 0}, .output_padding = {1, 2}});
          },
          {4, 5, 3, 4}, {5}),
      images, sums);
  // The evaluator of onnx 1.23 can't divide these into groups; onnx_test.cpp looks at the attribute.
  add("conv_transpose_dilated",
      with([](const Tensor& x,
              const auto& p) { return conv_transpose2d(x, p[0], {}, {.padding = {2}, .dilation = {2}}); },
           {4, 5, 3, 3}, {5}),
      images, sums);
  check();
}

TEST_F(OnnxReference, ConvolutionModules) {
  const std::vector<Tensor> images{randn({1, 4, 9, 8}), randn({3, 4, 9, 8})};
  const double sums = 128 * kUnit;
  using nn::PaddingMode;
  add("same", nn::Conv2d{{.in = 4, .out = 6, .kernel = {4, 3}, .padding = "same"}}, images, sums);
  add("reflect", nn::Conv2d{{.in = 4, .out = 6, .kernel = {3}, .padding = 1, .padding_mode = PaddingMode::reflect}},
      images, sums);
  add("replicate", nn::Conv2d{{.in = 4, .out = 6, .kernel = {3}, .padding = 2, .padding_mode = PaddingMode::replicate}},
      images, sums);
  add("circular", nn::Conv2d{{.in = 4, .out = 6, .kernel = {3}, .padding = 1, .padding_mode = PaddingMode::circular}},
      images, sums, {.opset = 19});
  const std::vector<Tensor> lines{randn({1, 4, 11}), randn({3, 4, 11})};
  add("line", nn::Conv1d{{.in = 4, .out = 6, .kernel = {5}, .stride = {2}, .padding = 2, .groups = 2}}, lines, sums);
  add("line_up", nn::ConvTranspose1d{{.in = 4, .out = 5, .kernel = {4}, .stride = {3}, .padding = {1}}}, lines, sums);
  const nn::Conv2d last{{.in = 4, .out = 6, .kernel = {3}}};
  last.to(MemoryFormat::channels_last);
  add("channels_last", last, {to_channels_last(images[0]), to_channels_last(images[1])}, sums);
  // Without a batch.
  add("single", nn::Conv2d{{.in = 4, .out = 6, .kernel = {3}}}, {randn({4, 9, 8})}, sums, {.dynamic_batch = false});
  check();
}

TEST_F(OnnxReference, Pooling) {
  // Sums of 15 terms at most.
  const double sums = 32 * kUnit;
  const std::pair<const char*, Unary> cases[] = {
      {"max", [](const Tensor& x) { return max_pool2d(x, {3}, {.stride = {2}, .padding = {1}}); }},
      {"max_odd",
       [](const Tensor& x) {
         return max_pool2d(x, {3, 2}, {.stride = {2, 3}, .padding = {1, 0}, .dilation = {2, 3}});
       }},
      {"max_up", [](const Tensor& x) { return max_pool2d(x, {2}, {.stride = {2}, .ceil_mode = true}); }},
      // A third window would begin behind the input.
      {"max_up_not",
       [](const Tensor& x) { return max_pool2d(x, {2}, {.stride = {5}, .padding = {1}, .ceil_mode = true}); }},
      {"max_line", [](const Tensor& x) { return max_pool1d(flatten(x, 2), {5}, {.stride = {3}}); }},
      {"avg",
       [](const Tensor& x) {
         return avg_pool2d(x, {3, 5}, {.stride = {2, 1}, .padding = {1, 2}});
       }},
      {"avg_without",
       [](const Tensor& x) { return avg_pool2d(x, {3}, {.stride = {2}, .padding = {1}, .count_include_pad = false}); }},
      {"avg_divisor",
       [](const Tensor& x) {
         return avg_pool2d(x, {3}, {.padding = {1}, .count_include_pad = false, .divisor_override = 5});
       }},
      {"avg_up_not",
       [](const Tensor& x) {
         return avg_pool2d(x, {3, 2}, {.ceil_mode = true});
       }},
      {"avg_line", [](const Tensor& x) { return avg_pool1d(flatten(x, 2), {4}); }},
      {"global", [](const Tensor& x) { return adaptive_avg_pool2d(x, {1}); }},
      {"adaptive",
       [](const Tensor& x) {
         return adaptive_avg_pool2d(x, {3, 4});
       }},
      {"adaptive_line", [](const Tensor& x) { return adaptive_avg_pool1d(flatten(x, 2), {9}); }},
      {"global_max", [](const Tensor& x) { return adaptive_max_pool2d(x, {1}); }},
      {"adaptive_max",
       [](const Tensor& x) {
         return adaptive_max_pool2d(x, {9, 2});
       }},
  };
  for (const auto& [name, f] : cases) add(name, Function(f), {randn({1, 3, 9, 8}), randn({4, 3, 9, 8})}, sums);
  add("max_f16", nn::MaxPool2d{{.kernel = {3}, .stride = {2}, .padding = {1}}}, {randn({2, 3, 9, 8})}, 0,
      {.dtype = f16});
  check();
}

TEST_F(OnnxReference, ResizingAndPadding) {
  using Mode = InterpolateMode;
  // Four products, with weights from coordinates that are rounded themselves: units of the image's size.
  const double sums = 128 * kUnit;
  const std::pair<const char*, Unary> cases[] = {
      {"twice", [](const Tensor& x) { return interpolate(x, {.scale_factor = {2}}); }},
      {"nearest_size",
       [](const Tensor& x) {
         return interpolate(x, {.size = {11, 5}});
       }},
      {"nearest_exact",
       [](const Tensor& x) {
         return interpolate(x, {.size = {11, 5}, .mode = Mode::nearest_exact});
       }},
      {"bilinear",
       [](const Tensor& x) {
         return interpolate(x, {.size = {13, 5}, .mode = Mode::bilinear});
       }},
      {"bilinear_corners",
       [](const Tensor& x) {
         return interpolate(x, {.size = {13, 5}, .mode = Mode::bilinear, .align_corners = true});
       }},
      {"bilinear_factor",
       [](const Tensor& x) {
         return interpolate(x, {.scale_factor = {1.7, 0.6}, .mode = Mode::bilinear});
       }},
      {"bilinear_recomputed",
       [](const Tensor& x) {
         return interpolate(x, {.scale_factor = {1.7, 0.6}, .mode = Mode::bilinear, .recompute_scale_factor = true});
       }},
      {"zeros",
       [](const Tensor& x) {
         return pad(x, {1, 2, 3, 0});
       }},
      {"value",
       [](const Tensor& x) {
         return pad(x, {0, 1}, PadMode::constant, -1.5);
       }},
      {"channels",
       [](const Tensor& x) {
         return pad(x, {0, 0, 0, 0, 2, 1});
       }},
      {"reflect",
       [](const Tensor& x) {
         return pad(x, {7, 2, 2, 1}, PadMode::reflect);
       }},
      {"replicate",
       [](const Tensor& x) {
         return pad(x, {9, 2, 2, 1}, PadMode::replicate);
       }},
      {"cut",
       [](const Tensor& x) {
         return pad(x, {-1, 2, -2, -3}, PadMode::constant, 4);
       }},
      {"cut_only",
       [](const Tensor& x) {
         return pad(x, {-1, 0, 0, -3});
       }},
      {"cut_mirror",
       [](const Tensor& x) {
         return pad(x, {-5, 6, 4, -1}, PadMode::reflect);
       }},
      {"nothing",
       [](const Tensor& x) {
         return relu(pad(x, {0, 0}));
       }},
      {"integers",
       [](const Tensor& x) {
         return pad(round(x).to(i64), {1, 1}, PadMode::constant, 3);
       }},
  };
  for (const auto& [name, f] : cases) add(name, Function(f), {randn({1, 3, 9, 8}), randn({4, 3, 9, 8})}, sums);
  add("circular", Function([](const Tensor& x) {
        return pad(x, {8, 2, 7, -2}, PadMode::circular);
      }),
      {randn({1, 3, 9, 8}), randn({4, 3, 9, 8})}, 0, {.opset = 19});
  add("upsample_f16", nn::Upsample{{.scale_factor = {2}}}, {randn({2, 3, 9, 8})}, 0, {.dtype = f16});
  check();
}

}  // namespace
}  // namespace halfstep
