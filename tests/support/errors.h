// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <string>
#include <utility>

namespace halfstep::test {

/// The text of the error of class `E` that `f` throws; empty when it throws none. Others pass through.
template <class E = std::exception, class F>
std::string error_of(F&& f) {
  try {
    std::forward<F>(f)();
  } catch (const E& e) {
    return e.what();
  }
  return {};
}

}  // namespace halfstep::test
