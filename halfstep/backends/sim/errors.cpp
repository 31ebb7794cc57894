// SPDX-License-Identifier: Apache-2.0
#include "errors.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace sim {
namespace {

// Without a destructor: a thread may end after the library was closed.
thread_local halfstep_error last = {sizeof(halfstep_error), HALFSTEP_OK, 0, {}};

}  // namespace

halfstep_status fail(halfstep_status status, uint64_t call, const char* format, ...) {
  last.status = status;
  last.call = call;
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(last.text, sizeof last.text, format, arguments);
  va_end(arguments);
  return status;
}

void take_error(halfstep_error* error) {
  if (error == nullptr) return;
  const uint32_t size = std::min<uint32_t>(error->size, sizeof(halfstep_error));
  last.size = error->size;
  std::memcpy(error, &last, size);
  last = {sizeof(halfstep_error), HALFSTEP_OK, 0, {}};
}

const char* error_text() { return last.text; }

}  // namespace sim
