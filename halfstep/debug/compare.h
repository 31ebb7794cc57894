// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "halfstep/debug/call_site.h"

namespace halfstep::debug {

/// Options of Compare.
struct CompareOptions {
  DType reference = f64;       ///< the dtype of the CPU reference: f64 or f32
  std::size_t most = 100'000;  ///< number of results kept, the worst ones
  bool all_threads = false;    ///< else only the calls of the thread that made it
};

/// The error of one result of one call relative to the reference.
struct HS_API Comparison {
  CallSite site;
  int output = 0;
  DType dtype = DType::f32;
  Shape sizes = {};
  /// Largest error in units in the last place of the exact value in the result's dtype; infinite if one of them is not
  /// finite and they differ; for integers and bools the largest difference.
  double max_ulp = 0;
  /// Largest error in units of the expected rounding: as max_ulp, but for matrix products and sums the unit is one in
  /// the last place plus 2^-24 sum |a||b| (terms summed in float32), since few digits remain when terms cancel.
  double max_roundings = 0;
  double max_absolute = 0;
  double max_relative = 0;       ///< largest error relative to the largest exact magnitude
  std::int64_t worst_index = 0;  ///< of the element with the largest max_roundings, in row-major order
  double got = 0;                ///< its value
  double expected = 0;           ///< and the expected value
};

/// For its lifetime, every op is run again on the CPU in float64 (or float32) with the inputs it received, and the
/// results are compared:
///
///     debug::Compare compare;
///     net(x.to(Device("cuda")));
///     std::cout << compare.report();
///
/// A result of one rounding is within 0.5 ulp; a sum of K products in float32 is within 0.5 ulp plus K 2^-24
/// sum |a||b|, which is many ulp if the terms cancel. Results are therefore sorted by Comparison::max_roundings, which
/// should be about 1 and approaches K only if all roundings go in the same direction. The reference is used for
/// comparison only and never enters the computation. Random ops get the same state and therefore the same numbers. Ops
/// that can't be run again (no kernel of that dtype, kernels that run by themselves, such as an optimizer's) are
/// counted with the reason. Views and copies between devices are not compared.
class HS_API Compare {
 public:
  /// Throws DTypeError for a reference other than f64 and f32.
  explicit Compare(const CompareOptions& options = {});
  ~Compare();
  Compare(const Compare&) = delete;
  Compare& operator=(const Compare&) = delete;

  /// Results by max_roundings, worst first; equal ones in the order of the calls.
  std::vector<Comparison> worst() const;
  /// Number of results compared, including those beyond CompareOptions::most.
  std::uint64_t compared() const;
  /// Why calls were not compared, and how many: `adam_step: a kernel that runs by itself`.
  std::map<std::string, std::uint64_t> skipped() const;
  /// The worst results, the worst of each op and dtype, and what was skipped, as text.
  std::string report(std::size_t rows = 20) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace halfstep::debug
