// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "halfstep/optim/optimizer.h"

namespace halfstep::optim {

/// How LBFGS chooses the length of a step.
enum class LineSearch : std::uint8_t {
  none,          ///< always the learning rate
  strong_wolfe,  ///< cubic interpolation until the strong Wolfe conditions hold (Nocedal and Wright, algorithm 3.5)
};

/// Options of LBFGS; the defaults are PyTorch's.
struct LBFGSOptions {
  double lr = 1;
  std::int64_t max_iter = 20;       ///< iterations in a step
  std::int64_t max_eval = 0;        ///< evaluations of the closure in a step; 0: max_iter * 5 / 4
  double tolerance_grad = 1e-7;     ///< a step ends when no gradient is larger
  double tolerance_change = 1e-9;   ///< a step ends when loss and parameters move less
  std::int64_t history_size = 100;  ///< number of stored pairs, each two vectors as large as all parameters
  LineSearch line_search = LineSearch::none;
};

/// L-BFGS (Liu and Nocedal, 1989), as PyTorch's torch.optim.LBFGS: one group, and the closure is evaluated several
/// times per step. Vectors are float32 on the host (float64 when a parameter is f64), their products float64; 16-bit
/// parameters have float32 master weights. Parameters without a gradient count as having a gradient of zero. If the
/// closure throws (a scaler does so at an overflow), parameters and state are restored to before the step.
class HS_API LBFGS : public Optimizer {
 public:
  LBFGS(const NamedTensors& parameters, const LBFGSOptions& options = {});
  ~LBFGS() override;
  /// Evaluations of closures so far.
  std::int64_t evaluations() const { return state_.evaluations; }
  std::string kind() const override { return "LBFGS"; }
  /// Throws Error: without a closure there is no step.
  void step_unless(const Tensor& found_inf, const Tensor& scale) override;
  bool unscales() const override { return false; }
  Tensor step_closure(const std::function<Tensor()>& closure) override;
  OptimizerState state_dict() const override;
  void load_state_dict(const OptimizerState& state) override;

 protected:
  std::vector<std::string> state_names(int group) const override;
  const KernelTable* kernel() const override;
  const char* kernel_name() const override;
  std::span<const std::byte> attributes(int group) override;
  void update(const std::vector<Tensor>& gradients, const Tensor& unless) override;
  bool can_be_sharded() const override { return false; }
  std::map<std::string, double> numbers(int group) const override;
  void load_numbers(int group, const std::map<std::string, double>& numbers) override;

 private:
  // Tensors in it are never written to, so that a copy allows a rollback.
  struct State {
    std::int64_t iterations = 0;
    std::int64_t evaluations = 0;
    Tensor direction;
    Tensor gradient;  // of the iteration before
    double loss = 0;  // of the iteration before
    double length = 0;
    double scale = 1;                    // of the first Hessian
    std::vector<Tensor> steps, changes;  // pairs, oldest first
    Tensor weights;                      // when there are 16-bit parameters: their values before rounding
  };
  struct Point {
    double loss = 0;
    Tensor gradient;
    double slope = 0;  // along the direction
  };

  DType dtype() const;
  Tensor gather(bool gradients) const;
  Tensor start() const;
  void write(const Tensor& weights) const;
  // At most `limit` evaluations after the first; the chosen length is returned in `length`.
  Point search(const std::function<Point(double)>& at, const Tensor& direction, const Point& start, std::int64_t limit,
               double* length) const;

  LBFGSOptions options_;
  State state_;
};

}  // namespace halfstep::optim
