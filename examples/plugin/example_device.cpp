// SPDX-License-Identifier: Apache-2.0
// The least that makes a device of Halfstep: memory, one queue and four kernels. docs/devices/bring-up-a-device.md
// walks through it. Everything that it lacks runs on the CPU, and the MNIST network trains.
//
// "Device memory" is memory of the host here, and work is done before the call that orders it returns. A driver puts
// its own calls in their places; the comments say where that makes a difference.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <span>

#include "halfstep/runtime/plugin_helpers.h"
#include "halfstep/runtime/plugin_numbers.h"

// What the handles of the interface stand for. They are ours alone; Halfstep passes the pointers on.
struct halfstep_queue {};
struct halfstep_event {
  std::chrono::steady_clock::time_point time;
};

namespace {

// Errors, checks and the answer to "which kernel" as every plug-in has them, and element types with their conversions.
// Every call that fails leaves its reason with fail() or refuse(), and the host asks for it on the same thread.
using namespace halfstep_plugin_helpers;
using namespace halfstep_plugin_numbers;

// ------------------------------------------------------------------------------------------------------------------
// Identity and memory. Halfstep caches memory: these calls are rare and may be slow.

constexpr uint64_t kMemory = uint64_t{4} << 30;
std::atomic<uint64_t> memory_in_use = 0;

int32_t device_count() { return 1; }

halfstep_status device_info(int32_t, halfstep_device_info* to) {
  halfstep_device_info info = {};
  info.dtypes = (1u << (HALFSTEP_BOOL + 1)) - 1;  // memory is memory: tensors of every dtype may live in it
  info.memory = kMemory;
  std::snprintf(info.name, sizeof info.name, "Example device");
  info.low_dtypes = 0;  // f16 and bf16 are no faster than f32 here
  info.priorities = 1;
  answer(to, info);
  return HALFSTEP_OK;
}

uint64_t rounded(uint64_t bytes) { return (bytes + 255) / 256 * 256; }

halfstep_status allocate(int32_t, uint64_t bytes, void** data) {
  *data = nullptr;
  const uint64_t taken = rounded(bytes);
  if (memory_in_use.fetch_add(taken) + taken <= kMemory) *data = std::aligned_alloc(256, taken);
  if (*data != nullptr) return HALFSTEP_OK;
  memory_in_use -= taken;
  return fail(HALFSTEP_OUT_OF_MEMORY, 0, "the memory is full");
}

halfstep_status deallocate(int32_t, void* data, uint64_t bytes) {
  std::free(data);
  memory_in_use -= rounded(bytes);
  return HALFSTEP_OK;
}

halfstep_status memory_info(int32_t, uint64_t* free_bytes, uint64_t* total_bytes) {
  *total_bytes = kMemory;
  *free_bytes = kMemory - std::min(memory_in_use.load(), kMemory);
  return HALFSTEP_OK;
}

// ------------------------------------------------------------------------------------------------------------------
// Copies, queues and events. Whatever is ordered is done at once, so that there is never anything to wait for. A device
// that works by itself enqueues instead, and reports what failed in the calls that wait.

halfstep_status copy_bytes(halfstep_queue*, void* destination, const void* source, uint64_t bytes, int32_t) {
  std::memmove(destination, source, bytes);
  return HALFSTEP_OK;
}

halfstep_status synchronize(int32_t) { return HALFSTEP_OK; }

// One queue of the hardware is behind all that Halfstep asks for, which is right as long as it keeps the order.
halfstep_status queue_create(int32_t, int32_t, halfstep_queue** queue) {
  static halfstep_queue the_queue;
  *queue = &the_queue;
  return HALFSTEP_OK;
}
halfstep_status queue_destroy(halfstep_queue*) { return HALFSTEP_OK; }
halfstep_status queue_synchronize(halfstep_queue*) { return HALFSTEP_OK; }
halfstep_status queue_query(halfstep_queue*) { return HALFSTEP_OK; }
halfstep_status queue_wait(halfstep_queue*, halfstep_event*) { return HALFSTEP_OK; }

halfstep_status event_create(int32_t, uint32_t, halfstep_event** event) {
  *event = new (std::nothrow) halfstep_event{};
  return *event != nullptr ? HALFSTEP_OK : fail(HALFSTEP_FAILED, 0, "the host has no memory left");
}
halfstep_status event_destroy(halfstep_event* event) {
  delete event;
  return HALFSTEP_OK;
}
halfstep_status event_record(halfstep_event* event, halfstep_queue*) {
  event->time = std::chrono::steady_clock::now();
  return HALFSTEP_OK;
}
halfstep_status event_query(halfstep_event*) { return HALFSTEP_OK; }
halfstep_status event_synchronize(halfstep_event*) { return HALFSTEP_OK; }
halfstep_status event_elapsed(halfstep_event* start, halfstep_event* end, double* milliseconds) {
  *milliseconds = std::chrono::duration<double, std::milli>(end->time - start->time).count();
  return HALFSTEP_OK;
}

// ------------------------------------------------------------------------------------------------------------------
// Elements. 16-bit floats are stored in 16 bits, computed with in float32 and rounded once, to nearest even:
// plugin_numbers.h has the conversions.

/// Calls f with an element of a floating dtype that this device computes in; false for others.
template <class F>
bool with_float(int dtype, F f) {
  if (dtype == HALFSTEP_F32) return f(float{}), true;
  if (dtype == HALFSTEP_F16) return f(Half{}), true;
  if (dtype == HALFSTEP_BF16) return f(BFloat16{}), true;
  return false;
}

/// Calls f with the places of each element in two tensors of the same sizes, whatever their strides.
template <class F>
void each_element(const halfstep_tensor& a, const halfstep_tensor& b, F f) {
  int64_t index[HALFSTEP_MAX_DIMS] = {}, at_a = 0, at_b = 0;
  for (int64_t n = 0; n < a.numel; ++n) {
    f(at_a, at_b);
    for (int d = a.ndim - 1; d >= 0; --d) {
      at_a += a.strides[d];
      at_b += b.strides[d];
      if (++index[d] < a.sizes[d]) break;
      at_a -= a.strides[d] * a.sizes[d];
      at_b -= b.strides[d] * a.sizes[d];
      index[d] = 0;
    }
  }
}

// ------------------------------------------------------------------------------------------------------------------
// Kernels. What a kernel is given belongs to Halfstep and lasts for the call: one that enqueues its work copies the
// sizes, strides and attributes that it needs, and remembers context->call for its errors.

/// `to`, `clone` and `copy`: from any layout into any other, and between the dtypes that this device computes in. The
/// source comes last: `copy` has its destination's old values before it.
halfstep_status copy(halfstep_context* context, const halfstep_tensor* in, int n, halfstep_tensor* out, int,
                     const void*) {
  const halfstep_tensor &from = in[n - 1], &to = out[0];
  if (from.ndim != to.ndim || !std::equal(from.sizes, from.sizes + from.ndim, to.sizes)) {
    return refuse(context, HALFSTEP_UNSUPPORTED, "the sizes differ");  // Halfstep takes the CPU for this call
  }
  if (from.dtype == to.dtype) {  // the bits, whatever they mean
    const int64_t bytes = static_cast<int64_t>(item_size(to.dtype));
    each_element(to, from, [&](int64_t y, int64_t x) {
      std::memmove(static_cast<char*>(to.data) + y * bytes, static_cast<const char*>(from.data) + x * bytes, bytes);
    });
    return HALFSTEP_OK;
  }
  bool done = false;
  with_float(to.dtype, [&](auto y_type) {
    done = with_float(from.dtype, [&](auto x_type) {
      auto* y = static_cast<decltype(y_type)*>(to.data);
      const auto* x = static_cast<const decltype(x_type)*>(from.data);
      each_element(to, from, [&](int64_t at_y, int64_t at_x) { y[at_y] = convert<decltype(y_type)>(load(x[at_x])); });
    });
  });
  return done ? HALFSTEP_OK : refuse(context, HALFSTEP_UNSUPPORTED, "no conversion between these dtypes");
}

/// `fill`: one number everywhere. Its kind is that of the program's number, not of the tensor.
halfstep_status fill(halfstep_context* context, const halfstep_tensor*, int, halfstep_tensor* out, int,
                     const void* attributes) {
  const halfstep_scalar& value = static_cast<const halfstep_fill_attributes*>(attributes)->value;
  const double exact = value.kind == 2 ? value.floating : static_cast<double>(value.integer);
  const auto number = static_cast<float>(exact);
  if (out[0].dtype != HALFSTEP_F32 && static_cast<double>(number) != exact) {
    return refuse(context, HALFSTEP_UNSUPPORTED, "a number that float32 doesn't hold would be rounded twice");
  }
  with_float(out[0].dtype, [&](auto element) {
    element = convert<decltype(element)>(number);
    auto* y = static_cast<decltype(element)*>(out[0].data);
    each_element(out[0], out[0], [=](int64_t at, int64_t) { y[at] = element; });
  });
  return HALFSTEP_OK;
}

/// `relu`: of row-major tensors without gaps; Halfstep makes others into such.
halfstep_status relu(halfstep_context*, const halfstep_tensor* in, int, halfstep_tensor* out, int, const void*) {
  with_float(out[0].dtype, [&](auto zero) {
    const auto* x = static_cast<const decltype(zero)*>(in[0].data);
    auto* y = static_cast<decltype(zero)*>(out[0].data);
    for (int64_t i = 0; i < out[0].numel; ++i) {
      const float value = load(x[i]);
      y[i] = convert<decltype(zero)>(value <= 0 ? 0 : value);  // a NaN stays one
    }
  });
  return HALFSTEP_OK;
}

/// The elements of a row-major tensor as float32, in device memory of this call where they are something else; null
/// when there is none left.
const float* as_floats(halfstep_context* context, const halfstep_tensor& t) {
  if (t.dtype == HALFSTEP_F32) return static_cast<const float*>(t.data);
  auto* floats = static_cast<float*>(context->workspace(context, static_cast<uint64_t>(t.numel + 1) * sizeof(float)));
  if (floats == nullptr) return nullptr;
  with_float(t.dtype, [&](auto zero) {
    const auto* x = static_cast<const decltype(zero)*>(t.data);
    for (int64_t i = 0; i < t.numel; ++i) floats[i] = load(x[i]);
  });
  return floats;
}

float dot(const float* a, const float* b, int64_t n) {
  constexpr int kSums = 16;  // sums that don't wait for each other
  float sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums) {
    for (int j = 0; j < kSums; ++j) sums[j] += a[i + j] * b[i + j];
  }
  for (; i < n; ++i) sums[i % kSums] += a[i] * b[i];
  for (int width = kSums / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) sums[j] += sums[j + width];
  }
  return sums[0];
}

/// `linear`: input [m, k], weight [n, k] and perhaps a bias [n]; the result is [m, n].
halfstep_status linear(halfstep_context* context, const halfstep_tensor* in, int count, halfstep_tensor* out, int,
                       const void*) {
  const bool has_bias = count > 2 && in[2].defined;
  const auto is_float = [](const halfstep_tensor& t) { return with_float(t.dtype, [](auto) {}); };
  if (!is_float(in[1]) || (has_bias && !is_float(in[2])) || !is_float(out[0])) {
    return refuse(context, HALFSTEP_UNSUPPORTED, "no unit for these dtypes");
  }
  const int64_t m = out[0].sizes[0], n = out[0].sizes[1], k = in[0].sizes[1];
  const float* x = as_floats(context, in[0]);
  const float* w = as_floats(context, in[1]);
  const float* bias = has_bias ? as_floats(context, in[2]) : nullptr;
  // Before anything is written: a call that fails has changed nothing.
  if ((m * k != 0 && x == nullptr) || (n * k != 0 && w == nullptr) || (has_bias && n != 0 && bias == nullptr)) {
    return refuse(context, HALFSTEP_OUT_OF_MEMORY, "no memory for the factors in float32");
  }
  with_float(out[0].dtype, [&](auto zero) {
    auto* y = static_cast<decltype(zero)*>(out[0].data);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        y[i * n + j] = convert<decltype(zero)>(dot(x + i * k, w + j * k, k) + (has_bias ? bias[j] : 0.f));
      }
    }
  });
  return HALFSTEP_OK;
}

// ------------------------------------------------------------------------------------------------------------------
// Which kernel for which op and dtype.

constexpr uint32_t kFloats = dtypes({HALFSTEP_F32, HALFSTEP_F16, HALFSTEP_BF16});

struct Row {
  const char* op;
  uint32_t dtypes;
  uint32_t layouts;
  halfstep_kernel_fn run;
  const char* missing = "computed in f32, f16 and bf16 only";
};
constexpr Row kRows[] = {
    {"to", kAll, kStrided, copy},      {"clone", kAll, kStrided, copy},      {"copy", kAll, kStrided, copy},
    {"fill", kFloats, kStrided, fill}, {"relu", kFloats, kContiguous, relu}, {"linear", kFloats, kContiguous, linear},
};

halfstep_status kernel(const char* op, int32_t version, int32_t dtype, halfstep_kernel* to) {
  const std::span<const Row> rows[] = {kRows};
  return find_kernel<Row>(
      rows, op, version, dtype, to, [](const Row& row, halfstep_kernel& found) { found.run = row.run; }, nullptr,
      nullptr);
}

// What is not set is null, and so absent: everything optional.
halfstep_plugin_table make_table() {
  halfstep_plugin_table t = {};
  t.size = sizeof(halfstep_plugin_table);
  t.major = HALFSTEP_PLUGIN_MAJOR;
  t.minor = HALFSTEP_PLUGIN_MINOR;
  t.name = "example";
  t.vendor = "Halfstep examples";
  t.version = "1.0";
  t.device_count = device_count;
  t.device_info = device_info;
  t.error = take_error;
  t.synchronize = synchronize;
  t.allocate = allocate;
  t.deallocate = deallocate;
  t.memory_info = memory_info;
  t.copy = copy_bytes;
  t.queue_create = queue_create;
  t.queue_destroy = queue_destroy;
  t.queue_synchronize = queue_synchronize;
  t.queue_query = queue_query;
  t.queue_wait = queue_wait;
  t.event_create = event_create;
  t.event_destroy = event_destroy;
  t.event_record = event_record;
  t.event_query = event_query;
  t.event_synchronize = event_synchronize;
  t.event_elapsed = event_elapsed;
  t.kernel = kernel;
  return t;
}

}  // namespace

extern "C" [[gnu::visibility("default")]] const halfstep_plugin_table* halfstep_plugin(const halfstep_host*) {
  static const halfstep_plugin_table table = make_table();
  return &table;
}
