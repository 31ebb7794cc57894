// SPDX-License-Identifier: Apache-2.0
// What `halfstep plan-parallel` knows of machines, and what it draws.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "halfstep/dist/cost_model.h"
#include "halfstep/io/drawing.h"

namespace halfstep::cli {

/// Accelerators and the ways between them, from data sheets and published measurements.
struct PlanSystem {
  const char* name;
  const char* description;
  int ranks_per_machine;
  double inside_gbs, between_gbs;  ///< of the data sheets, 1e9 bytes a second in one direction
  double inside_us, between_us;    ///< of a message
  double f32_images, f16_images;   ///< a second, of ResNet-50 in training on one of them; 0: unknown
  const char* source;              ///< of the speeds
};
std::span<const PlanSystem> plan_systems();
/// Throws UsageError for a name that there isn't.
const PlanSystem& plan_system(const std::string& name);
/// Its ways with the part of the data sheet's bandwidth that collectives reach.
dist::ClusterCost cluster_of(const PlanSystem& system);

/// A prediction for a number of ranks, with the bucket that is best there.
struct PlanRow {
  int ranks = 1;
  double bucket = 0;  ///< bytes
  dist::StepPrediction step = {};
  std::vector<double> of_buckets = {};  ///< seconds of the step, for each size that was asked for
};
struct PlanSeries {
  std::string precision;  ///< `f16, gradients in f16`
  double compute = 0;     ///< seconds of a step without communication
  std::vector<PlanRow> rows = {};
};
struct PlanFigure {
  std::string title, subtitle;
  std::span<const PlanSeries> series;
  std::span<const double> buckets;  ///< bytes
};
/// Scaling efficiency over the ranks, and the step over the size of buckets on the most ranks.
io::Drawing draw_plan(const PlanFigure& figure);

}  // namespace halfstep::cli
