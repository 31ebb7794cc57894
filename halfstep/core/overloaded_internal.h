// SPDX-License-Identifier: Apache-2.0
// Internal: a set of lambdas as one function, for std::visit.
#pragma once

namespace halfstep::detail {

/// `std::visit(Overloaded{[](const A&) {…}, [](const B&) {…}}, variant)`.
template <class... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};
template <class... Functions>
Overloaded(Functions...) -> Overloaded<Functions...>;

}  // namespace halfstep::detail
