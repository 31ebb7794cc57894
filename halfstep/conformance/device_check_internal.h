// SPDX-License-Identifier: Apache-2.0
// Internal: what the parts of check_device() share: cases, bounds and how they are compared.
#pragma once

#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "halfstep/conformance/device_check.h"
#include "halfstep/core/random.h"
#include "halfstep/core/tensor.h"

namespace halfstep::conformance::detail {

using Tensors = std::vector<Tensor>;
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// The dtypes that networks train in, and with them the one that results are compared in.
inline const std::vector<DType> kUsual = {DType::f32, DType::f16, DType::bf16};
inline const std::vector<DType> kAll = {DType::f32, DType::f16, DType::bf16, DType::f64};

/// What a bound's roundings are a share of.
enum class Of {
  value,       ///< each element of the exact result
  magnitudes,  ///< the same computed from the magnitudes of the inputs: of sums of products
  largest,     ///< the largest magnitude of the exact result
};

/// How far a result may be from the exact one.
struct Bound {
  double rounded = 1;  ///< roundings to the result's dtype: the first of the value, those beyond it of `of`
  double summed = 0;   ///< roundings in float32 (float64 for float64), of `of`
  Of of = Of::value;
  /// A result whose bits are given.
  static Bound exact() { return {.rounded = 0}; }
  bool is_exact() const { return rounded == 0 && summed == 0; }
  std::string str(DType dtype) const;
};

/// A call and how exact it has to be.
struct OpCase {
  std::string name;
  Tensors inputs;  ///< on the CPU; those of float64 are converted to the dtype of the line, the others stay
  std::function<Tensors(const Tensors&)> run;
  Bound forward = {};
  Bound backward = {};
  bool gradients = true;  ///< also backward, from random gradients of all floating results
};

/// Runs and compares, and keeps what came out.
class Checker {
 public:
  Checker(Device device, const DeviceCheckOptions& options, DeviceCheckReport& report)
      : device(device), quick(options.quick), options_(options), report_(report) {}

  const Device device;
  const bool quick;

  // --- inputs, in float64 on the CPU, always the same
  Tensor normal(const Shape& sizes, double scale = 1);
  Tensor uniform(const Shape& sizes, double low, double high);
  /// i64, in [0, bound).
  Tensor integers(std::int64_t bound, const Shape& sizes);
  /// `full`, or what is given second in a quick check.
  std::int64_t size(std::int64_t full, std::int64_t small) const { return quick ? small : full; }

  /// One line: calls `body`, notes what it throws as a problem, and what ran on the CPU.
  void line(const std::string& name, const std::string& dtype, const std::function<void()>& body);
  /// A line a dtype for a family of ops.
  void family(const std::string& name, const std::vector<DType>& dtypes, const std::vector<OpCase>& cases);

  /// Whether the device failed permanently: nothing more can be checked.
  bool lost() const { return report_.lost; }

  // --- within a line
  /// A case of its own: what it throws is a problem of its name, and the line goes on.
  void one(const std::string& name, const std::function<void()>& body);
  /// The same bits (NaN is NaN): `got` from the device against `expected` on the CPU.
  void same(const Tensor& got, const Tensor& expected, const std::string& what);
  /// Within the bound of the exact values (f64, on the CPU). `scale`: for Of::magnitudes.
  void near(const Tensor& got, const Tensor& exact, const Tensor& scale, const Bound& bound, const std::string& what);
  /// An error that is measured otherwise, in units of its bound.
  void measured(double error, const std::string& bound, const std::string& what);
  void problem(const std::string& text);
  /// Of the line.
  void note(const std::string& text);

 private:
  void check(const OpCase& c, DType dtype);

  const DeviceCheckOptions& options_;
  DeviceCheckReport& report_;
  Generator generator_{20261121};
  DeviceCheckLine* current_ = nullptr;
  std::string case_;
};

// The parts, in the order in which they run.
void check_copies(Checker& c);
void check_elementwise(Checker& c);
void check_reductions(Checker& c);
void check_products(Checker& c);
void check_layers(Checker& c);
void check_losses(Checker& c);
void check_indexing(Checker& c);
void check_random(Checker& c);
void check_scaling(Checker& c);
void check_optimizers(Checker& c);
void check_networks(Checker& c);
void check_graphs(Checker& c);
void check_collectives(Checker& c);
void check_queues(Checker& c);

}  // namespace halfstep::conformance::detail
