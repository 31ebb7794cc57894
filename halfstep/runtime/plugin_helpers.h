// SPDX-License-Identifier: Apache-2.0
// For plug-ins written in C++: what each of them needs around its device and its kernels. Errors of a thread, structs
// of which both sides may know different lengths, checks of a call, and the answer to "which kernel". It depends only
// on plugin.h and plugin_numbers.h. docs/devices/bring-up-a-device.md shows it in use.
#pragma once

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <new>
#include <span>
#include <string>

#include "halfstep/runtime/plugin.h"
#include "halfstep/runtime/plugin_numbers.h"

// Each plug-in has its own, whatever else is loaded.
#pragma GCC visibility push(hidden)

namespace halfstep_plugin_helpers {

// ------------------------------------------------------------------------------------------------------------------
// Structs that may grow

/// Copies what both sides know of a struct that begins with its size: the caller's may be older and shorter, or newer
/// and longer.
template <class Struct>
void answer(Struct* to, Struct from) {
  from.size = to->size;
  std::memcpy(to, &from, std::min<std::size_t>(to->size, sizeof from));
}

// ------------------------------------------------------------------------------------------------------------------
// Errors: one failure a thread, the last, for halfstep_plugin_table.error

/// The last failure of this thread.
inline halfstep_error& last_failure() {
  // Without a destructor: a thread may end after the library was closed.
  static thread_local halfstep_error last = {sizeof(halfstep_error), HALFSTEP_OK, 0, {}};
  return last;
}

/// Notes a failure of this thread and returns its status. `call`: halfstep_context.call of the kernel that failed, 0
/// where it is not known.
[[gnu::format(printf, 3, 4)]] inline halfstep_status fail(halfstep_status status, uint64_t call, const char* format,
                                                          ...) {
  halfstep_error& last = last_failure();
  last.status = status;
  last.call = call;
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(last.text, sizeof last.text, format, arguments);
  va_end(arguments);
  return status;
}

/// Notes why a call of a kernel is refused and tells it to the host in both ways that there are. The host knows op and
/// device, and says them.
inline halfstep_status refuse(halfstep_context* context, halfstep_status status, const char* why) {
  context->set_error(context, why);
  return fail(status, context->call, "%s", why);
}

/// halfstep_plugin_table.error: hands out the failure and forgets it.
inline void take_error(halfstep_error* error) {
  if (error == nullptr) return;
  answer(error, last_failure());
  last_failure() = {sizeof(halfstep_error), HALFSTEP_OK, 0, {}};
}

/// Calls f, which returns a status: no exception crosses the interface.
template <class F>
halfstep_status guarded(F&& f) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return fail(HALFSTEP_FAILED, 0, "the host has no memory left");
  } catch (const std::exception& e) {
    return fail(HALFSTEP_FAILED, 0, "%s", e.what());
  }
}

// ------------------------------------------------------------------------------------------------------------------
// Kernels

/// A mask of dtypes.
constexpr uint32_t dtypes(std::initializer_list<int> list) {
  uint32_t mask = 0;
  for (int d : list) mask |= 1u << d;
  return mask;
}
inline constexpr uint32_t kFloating = dtypes({HALFSTEP_F32, HALFSTEP_F64, HALFSTEP_F16, HALFSTEP_BF16});
inline constexpr uint32_t kIntegers = dtypes({HALFSTEP_I64, HALFSTEP_I32, HALFSTEP_I8, HALFSTEP_U8});
inline constexpr uint32_t kFlag = dtypes({HALFSTEP_BOOL});
inline constexpr uint32_t kNumeric = kFloating | kIntegers;
inline constexpr uint32_t kComputed = kNumeric | kFlag;  ///< "value" in docs/devices/kernels.md
inline constexpr uint32_t kAll = kComputed | dtypes({HALFSTEP_F8E4M3, HALFSTEP_F8E5M2});
inline constexpr uint32_t kStrided = HALFSTEP_LAYOUT_STRIDED, kContiguous = HALFSTEP_LAYOUT_CONTIGUOUS;

/// Bytes from a tensor's first element to the end of its last; 0 where it is absent or empty.
inline uint64_t extent(const halfstep_tensor& t) {
  if (!t.defined || t.numel == 0) return 0;
  int64_t last = 0;
  for (int i = 0; i < t.ndim; ++i) last += (t.sizes[i] - 1) * t.strides[i];
  return (static_cast<uint64_t>(last) + 1) * halfstep_plugin_numbers::item_size(t.dtype);
}

/// What is wrong with a call before anyone looks at what it computes, or an empty text: no queue, attributes that are
/// missing where the kernel needs them, a tensor of another layout than it takes.
inline std::string wrong_call(uint32_t layouts, bool needs_attributes, const halfstep_context& context,
                              const halfstep_tensor* in, int n, const halfstep_tensor* out, int m,
                              const void* attributes) {
  if (context.queue == nullptr) return "no queue was given";
  if (needs_attributes && attributes == nullptr) return "its attributes are missing";
  if ((layouts & HALFSTEP_LAYOUT_STRIDED) != 0) return {};
  for (int i = 0; i < n + m; ++i) {
    const halfstep_tensor& t = i < n ? in[i] : out[i - n];
    if (!t.defined || t.contiguous || t.numel == 0) continue;
    return (i < n ? "input " : "output ") + std::to_string(i < n ? i : i - n) + " is not contiguous";
  }
  return {};
}

/// Answers halfstep_plugin_table.kernel from families of rows: structs with `op`, `dtypes` (a mask, of the key input),
/// `layouts` and `missing` (why the other dtypes are missing; may be null). `found(row, kernel)` is called for the row
/// that has op and dtype: it sets the kernel's `run`, and `state` if it uses one. An op may have several rows, for
/// different dtypes. `no_op` and `no_dtype` are the messages that users see.
template <class Row, class Found>
halfstep_status find_kernel(std::span<const std::span<const Row>> families, const char* op, int32_t version,
                            int32_t dtype, halfstep_kernel* to, Found&& found, const char* no_op,
                            const char* no_dtype) {
  halfstep_kernel kernel = {};
  kernel.reason = no_op;
  for (const std::span<const Row> family : families) {
    for (const Row& row : family) {
      if (kernel.run != nullptr || std::strcmp(row.op, op) != 0) continue;
      if (version != 1) {
        kernel.reason = "this plug-in knows version 1 of the op";
      } else if (dtype < 0 || dtype > HALFSTEP_BOOL || (row.dtypes >> dtype & 1) == 0) {
        kernel.reason = row.missing != nullptr ? row.missing : no_dtype;
      } else {
        kernel.reason = nullptr;
        kernel.layouts = row.layouts;
        found(row, kernel);
      }
    }
  }
  answer(to, kernel);
  return kernel.run != nullptr ? HALFSTEP_OK : HALFSTEP_UNSUPPORTED;
}

}  // namespace halfstep_plugin_helpers

#pragma GCC visibility pop
