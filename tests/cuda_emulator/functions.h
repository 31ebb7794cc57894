// SPDX-License-Identifier: Apache-2.0
// The emulated libraries' functions by name, in place of dlsym.
#pragma once

namespace hscuda::emulator {

/// Makes a function known; for static objects of the files that emulate a library:
///
///     const Function functions[] = {{"cublasLtCreate", cublasLtCreate}, ...};
class Function {
 public:
  template <class R, class... A>
  Function(const char* name, R (*function)(A...))
      : name_(name), address_(reinterpret_cast<void*>(function)), next_(first()) {
    first() = this;
  }
  Function(const Function&) = delete;
  Function& operator=(const Function&) = delete;

 private:
  friend void* find_function(const char* name);
  static const Function*& first() {
    static const Function* list = nullptr;
    return list;
  }

  const char* name_;
  void* address_;
  const Function* next_;
};

/// Null where nothing emulates it.
void* find_function(const char* name);

}  // namespace hscuda::emulator
