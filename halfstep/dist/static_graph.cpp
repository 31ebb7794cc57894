// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>

#include "halfstep/core/capture.h"
#include "halfstep/core/fail.h"
#include "halfstep/dist/static_graph_internal.h"

namespace halfstep::dist::detail {

std::string names_of(const NamedTensors& parameters, const std::vector<std::size_t>& which) {
  constexpr std::size_t kMost = 8;
  std::string names;
  for (std::size_t k = 0; k < std::min(which.size(), kMost); ++k) {
    names += (k ? ", " : "") + parameters[which[k]].name;
  }
  if (which.size() > kMost) names += fmt::format(" and {} more", which.size() - kMost);
  return names;
}

void StaticGraph::changed(std::size_t i, int arrivals) const {
  const bool unused = nowhere(i) || unused_here(i);
  fail<DistError>(
      "data_parallel: static_graph: the gradient of {} came {}, which in the first backward pass {}; expected the "
      "same parameters in every pass, or else find_unused_parameters",
      parameters_[i].name, arrivals == 1 ? "once" : fmt::format("{} times", arrivals),
      unused ? "had none" : fmt::format("came {} times", expected_[i]));
}

bool StaticGraph::whole(std::size_t i, int arrivals) const {
  const bool unused = nowhere(i) || unused_here(i);
  if (unused || (known() && arrivals > expected_[i])) changed(i, arrivals);
  return !known() || arrivals == expected_[i];
}

void StaticGraph::check_missing(const std::vector<std::size_t>& missing, int rank) const {
  if (missing.empty()) return;
  fail<DistError>(
      "data_parallel: static_graph: the backward pass on rank {} gave no gradient to {}, which the first one did; "
      "expected the same parameters in every pass, or else find_unused_parameters",
      rank, names_of(parameters_, missing));
}

void StaticGraph::learn(const std::vector<int>& arrivals) {
  expected_ = arrivals;
  ++capture_generation();  // a recording of this pass doesn't send gradients as the next ones will
}

}  // namespace halfstep::dist::detail
