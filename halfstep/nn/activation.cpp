// SPDX-License-Identifier: Apache-2.0
#include "halfstep/nn/activation.h"

#include "halfstep/core/fail.h"
#include "halfstep/nn/given_internal.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/dropout.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/softmax.h"
#include "halfstep/ops/view.h"

namespace halfstep::nn {

Tensor ReLU::forward(const Tensor& input) const { return relu(input); }
Tensor SiLU::forward(const Tensor& input) const { return silu(input); }
Tensor Sigmoid::forward(const Tensor& input) const { return sigmoid(input); }
Tensor Tanh::forward(const Tensor& input) const { return halfstep::tanh(input); }

Tensor LeakyReLU::forward(const Tensor& input) const { return leaky_relu(input, options.negative_slope); }
std::string LeakyReLU::describe() const { return fmt::format("{}", options.negative_slope); }

PReLU::PReLU(const PReLUOptions& o)
    : options(o), weight(parameter("weight", [&] {
        if (o.channels < 1) fail<Error>("PReLU: expected at least 1 parameter, got {}", o.channels);
        return full({o.channels}, o.init, {.dtype = o.dtype});
      }())) {}
Tensor PReLU::forward(const Tensor& input) const { return prelu(input, weight); }
std::string PReLU::describe() const { return fmt::format("{}", options.channels); }

Tensor GELU::forward(const Tensor& input) const { return gelu(input, options.form); }
std::string GELU::describe() const { return options.form == GeluForm::tanh ? "tanh" : ""; }

Tensor Softplus::forward(const Tensor& input) const { return softplus(input, options.beta, options.threshold); }
std::string Softplus::describe() const { return fmt::format("{}, {}", options.beta, options.threshold); }

Softmax::Softmax(const SoftmaxOptions& o) : options(o) { check_given(o.dim, "Softmax", "dim", ".dim = 1"); }
Tensor Softmax::forward(const Tensor& input) const { return softmax(input, options.dim); }
std::string Softmax::describe() const { return fmt::format("{}", options.dim); }
LogSoftmax::LogSoftmax(const SoftmaxOptions& o) : options(o) { check_given(o.dim, "LogSoftmax", "dim", ".dim = 1"); }
Tensor LogSoftmax::forward(const Tensor& input) const { return log_softmax(input, options.dim); }
std::string LogSoftmax::describe() const { return fmt::format("{}", options.dim); }

Tensor Flatten::forward(const Tensor& input) const { return flatten(input, options.start, options.end); }
std::string Flatten::describe() const { return fmt::format("{}, {}", options.start, options.end); }

Dropout::Dropout(const DropoutOptions& o) : options(o) {
  if (!(o.p >= 0 && o.p <= 1)) fail<Error>("Dropout: expected a probability from 0 to 1, got {}", o.p);
}
Tensor Dropout::forward(const Tensor& input) const { return dropout(input, options.p, is_training()); }
std::string Dropout::describe() const { return fmt::format("{}", options.p); }

}  // namespace halfstep::nn
