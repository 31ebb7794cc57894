// SPDX-License-Identifier: Apache-2.0
// The activations of ops/activation.h and ops/softmax.h as modules, for Sequential; and shapes and dropout.
#pragma once

#include "halfstep/nn/module.h"
#include "halfstep/ops/activation.h"

namespace halfstep::nn {

/// max(x, 0): see halfstep::relu.
class HS_API ReLU : public Module<ReLU> {
 public:
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "ReLU"; }
};

/// x sigmoid(x): see halfstep::silu.
class HS_API SiLU : public Module<SiLU> {
 public:
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "SiLU"; }
};

/// 1 / (1 + exp(-x)): see halfstep::sigmoid.
class HS_API Sigmoid : public Module<Sigmoid> {
 public:
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "Sigmoid"; }
};

/// Hyperbolic tangent: see halfstep::tanh.
class HS_API Tanh : public Module<Tanh> {
 public:
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "Tanh"; }
};

/// Its input.
class HS_API Identity : public Module<Identity> {
 public:
  Tensor forward(const Tensor& input) const { return input; }
  std::string kind() const override { return "Identity"; }
};

/// Options of LeakyReLU.
struct LeakyReLUOptions {
  double negative_slope = 0.01;
};
/// x where it is positive, negative_slope x elsewhere.
class HS_API LeakyReLU : public Module<LeakyReLU> {
 public:
  explicit LeakyReLU(const LeakyReLUOptions& o = {}) : options(o) {}
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "LeakyReLU"; }
  std::string describe() const override;
  LeakyReLUOptions options;
};

/// Options of PReLU.
struct PReLUOptions {
  std::int64_t channels = 1;  ///< 1, or the number of channels
  double init = 0.25;
  DType dtype = f32;
};
/// LeakyReLU with learned slopes: `weight` [channels].
class HS_API PReLU : public Module<PReLU> {
 public:
  explicit PReLU(const PReLUOptions& options = {});
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "PReLU"; }
  std::string describe() const override;
  PReLUOptions options;
  Parameter weight;
};

/// Options of GELU.
struct GELUOptions {
  GeluForm form = GeluForm::exact;
};
/// x Phi(x): see halfstep::gelu.
class HS_API GELU : public Module<GELU> {
 public:
  explicit GELU(const GELUOptions& o = {}) : options(o) {}
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "GELU"; }
  std::string describe() const override;
  GELUOptions options;
};

/// Options of Softplus.
struct SoftplusOptions {
  double beta = 1;
  double threshold = 20;
};
/// log(1 + exp(beta x)) / beta.
class HS_API Softplus : public Module<Softplus> {
 public:
  explicit Softplus(const SoftplusOptions& o = {}) : options(o) {}
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "Softplus"; }
  std::string describe() const override;
  SoftplusOptions options;
};

/// Options of Softmax and LogSoftmax.
struct SoftmaxOptions {
  std::int64_t dim = kNotGiven;  ///< along which the results add up to 1
};
/// exp(x) / sum(exp(x)).
class HS_API Softmax : public Module<Softmax> {
 public:
  explicit Softmax(const SoftmaxOptions& options);
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "Softmax"; }
  std::string describe() const override;
  SoftmaxOptions options;
};
/// log(softmax(x)).
class HS_API LogSoftmax : public Module<LogSoftmax> {
 public:
  explicit LogSoftmax(const SoftmaxOptions& options);
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "LogSoftmax"; }
  std::string describe() const override;
  SoftmaxOptions options;
};

/// Options of Flatten.
struct FlattenOptions {
  std::int64_t start = 1;
  std::int64_t end = -1;
};
/// Joins dimensions start to end, both included: [N, C, H, W] -> [N, C H W].
class HS_API Flatten : public Module<Flatten> {
 public:
  explicit Flatten(const FlattenOptions& o = {}) : options(o) {}
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "Flatten"; }
  std::string describe() const override;
  FlattenOptions options;
};

/// Options of Dropout.
struct DropoutOptions {
  double p = 0.5;  ///< probability with which an element becomes 0
};
/// While training, zeroes elements at random and divides the others by 1 - p.
class HS_API Dropout : public Module<Dropout> {
 public:
  /// Throws Error unless 0 <= p <= 1.
  explicit Dropout(const DropoutOptions& options = {});
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "Dropout"; }
  bool depends_on_mode() const override { return true; }
  std::string describe() const override;
  DropoutOptions options;
};

}  // namespace halfstep::nn
