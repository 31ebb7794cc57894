// SPDX-License-Identifier: Apache-2.0
#include "functions.h"

#include <cstring>

namespace hscuda::emulator {

void* find_function(const char* name) {
  for (const Function* f = Function::first(); f != nullptr; f = f->next_) {
    if (std::strcmp(f->name_, name) == 0) return f->address_;
  }
  return nullptr;
}

}  // namespace hscuda::emulator
