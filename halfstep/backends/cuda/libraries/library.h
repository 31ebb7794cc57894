// SPDX-License-Identifier: Apache-2.0
// NVIDIA's libraries (cublasLt, cudnn, nccl), opened when they are first used: the plug-in loads without them.
#pragma once

#include <string>

namespace hscuda {

/// A shared library. Never closed again: it may have threads and exit handlers of its own.
///
///     Library library("cublasLt", CUBLAS_VER_MAJOR);
///     decltype(&cublasLtCreate) create = nullptr;
///     if (!library.find(create, "cublasLtCreate")) return fail(..., "%s", library.failure().c_str());
///
/// In the emulated build the functions are those that tests/cuda_emulator/functions.h knows.
class Library {
 public:
  /// libNAME.so.MAJOR: by the loader's path, then in the folders of HALFSTEP_CUDA_LIBRARIES (separated by colons), then
  /// in the toolkit's folder that the plug-in was built with.
  Library(const char* name, int major);

  bool is_open() const { return handle_ != nullptr; }
  /// Sets `function`; false where there is none, and failure() says why. After a failure everything fails, so that the
  /// last of many calls tells of the first.
  template <class F>
  bool find(F& function, const char* symbol) {
    function = reinterpret_cast<F>(address(symbol));
    return function != nullptr;
  }
  /// What was tried, and what the loader said; empty as long as all went well.
  const std::string& failure() const { return failure_; }
  /// What was opened, as it was given to the loader.
  const std::string& path() const { return path_; }

 private:
  void* address(const char* symbol);

  void* handle_ = nullptr;
  std::string path_, failure_;
};

}  // namespace hscuda
