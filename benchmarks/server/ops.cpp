// SPDX-License-Identifier: Apache-2.0
// Single op calls: large products, and calls so small that only the way to the kernel counts.
#include <fmt/format.h>

#include <memory>

#include "benchmarks/server/empty_device.h"
#include "benchmarks/server/server.h"
#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/random.h"
#include "halfstep/core/tensor.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/random.h"

namespace halfstep::bench {
namespace {

// Short calls are made in a row, as a forward pass makes them; a region is entered once for so many.
constexpr int kRow = 64;

struct Tensors {
  Tensor a, b, c;
};

template <class F>
Prepared in_a_row(Tensors tensors, F f) {
  return {[t = std::move(tensors), f] {
            for (int i = 0; i < kRow; ++i) f(t);
          },
          kRow};
}

Prepared prepare_product(std::int64_t m, std::int64_t k, std::int64_t n, DType dtype) {
  manual_seed(1);
  const Tensor a = randn({m, k}).to(dtype), b = randn({k, n}).to(dtype);
  return {[a, b] { mm(a, b); }};
}

Prepared prepare_dense(std::int64_t batch, std::int64_t inputs, std::int64_t outputs, bool biased) {
  manual_seed(1);
  const Tensor x = randn({batch, inputs}).to(bf16), w = randn({outputs, inputs}).to(bf16);
  const Tensor bias = biased ? randn({outputs}).to(bf16) : Tensor();
  return {[x, w, bias] { linear(x, w, bias); }};
}

Prepared prepare_add(bool recorded) {
  return in_a_row({randn({16}, {.requires_grad = recorded}), randn({16}), {}}, [](const Tensors& t) { add(t.a, t.b); });
}

Tensors linear_tensors(bool recorded) {
  const TensorOptions options{.requires_grad = recorded};
  return {randn({1, 16}), randn({16, 16}, options), randn({16}, options)};
}

// On a device whose kernels do nothing.
Prepared prepare_device_add(bool recorded) {
  const Device device = empty_device();
  const Tensor a = empty({16}, {.device = device, .requires_grad = recorded}), b = empty({16}, {.device = device});
  return in_a_row({a, b, {}}, [](const Tensors& t) { add(t.a, t.b); });
}

void call_linear(const Tensors& t) { linear(t.a, t.b, t.c); }

// The calls of `prepared` inside a region.
Prepared in_region(const Prepared& prepared, DType dtype) {
  return {[run = prepared.run, dtype] {
            const amp::Autocast autocast{{.dtype = dtype}};
            run();
          },
          prepared.calls};
}

}  // namespace

void add_op_cases(std::vector<Case>& cases) {
  struct Size {
    std::int64_t m, k, n;
  };
  for (const Size s : {Size{64, 784, 512}, {256, 256, 256}, {512, 512, 512}, {1024, 1024, 1024}, {2048, 2048, 2048}}) {
    for (const DType dtype : {f32, bf16, f16}) {
      cases.push_back({fmt::format("matmul/{}x{}x{}/{}", s.m, s.k, s.n, name(dtype)),
                       [s, dtype] { return prepare_product(s.m, s.k, s.n, dtype); },
                       2.0 * static_cast<double>(s.m * s.k * s.n),
                       static_cast<double>(item_size(dtype)) * static_cast<double>(s.m * s.k + s.k * s.n + s.m * s.n)});
    }
  }
  for (const Size s : {Size{512, 512, 512},
                       {784, 2048, 512},
                       {2048, 384, 1536},
                       {2048, 1536, 384},
                       {4096, 512, 512},
                       {4096, 4096, 4096},
                       {3136, 256, 1024},
                       {12544, 128, 512},
                       {50176, 64, 256}}) {
    for (const bool biased : {false, true}) {
      cases.push_back({fmt::format("dense/{}x{}x{}/{}", s.m, s.k, s.n, biased ? "bias" : "plain"),
                       [s, biased] { return prepare_dense(s.m, s.k, s.n, biased); },
                       2.0 * static_cast<double>(s.m * s.k * s.n),
                       2.0 * static_cast<double>(s.m * s.k + s.k * s.n + s.m * s.n)});
    }
  }
  cases.push_back({"add/16/plain", [] { return prepare_add(false); }});
  cases.push_back({"add/16/recorded", [] { return prepare_add(true); }});
  cases.push_back({"add/16/autocast", [] { return in_region(prepare_add(true), bf16); }});
  cases.push_back({"add/16/device", [] { return prepare_device_add(false); }});
  cases.push_back({"add/16/device_recorded", [] { return prepare_device_add(true); }});
  cases.push_back({"linear/1x16x16/plain", [] { return in_a_row(linear_tensors(false), call_linear); }});
  cases.push_back({"linear/1x16x16/recorded", [] { return in_a_row(linear_tensors(true), call_linear); }});
  cases.push_back(
      {"linear/1x16x16/autocast", [] { return in_region(in_a_row(linear_tensors(true), call_linear), bf16); }});
  cases.push_back({"region/enter",
                   [] { return in_a_row({}, [](const Tensors&) { const amp::Autocast autocast{{.dtype = bf16}}; }); }});
}

}  // namespace halfstep::bench
