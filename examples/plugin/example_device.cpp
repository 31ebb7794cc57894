// SPDX-License-Identifier: Apache-2.0
// The least that makes a device of Halfstep: memory, one queue and four kernels. docs/devices/bring-up-a-device.md
// walks through it. Everything that it lacks runs on the CPU, and the MNIST network trains.
//
// "Device memory" is memory of the host here, and work is done before the call that orders it returns. A driver puts
// its own calls in their places; the comments say where that makes a difference.
#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "halfstep/runtime/plugin.h"

// What the handles of the interface stand for. They are ours alone; Halfstep passes the pointers on.
struct halfstep_queue {};
struct halfstep_event {
  std::chrono::steady_clock::time_point time;
};

namespace {

// ------------------------------------------------------------------------------------------------------------------
// Errors: every call that fails leaves its reason here, and the host asks for it on the same thread.

thread_local halfstep_error last_error;

halfstep_status fail(halfstep_status status, const char* text) {
  last_error = {};  // its `call` is for kernels that fail after their call has returned: halfstep_context.call
  last_error.status = status;
  std::snprintf(last_error.text, sizeof last_error.text, "%s", text);
  return status;
}

/// Copies what both sides know of a struct: the caller's may be older and shorter, or newer and longer.
template <class Struct>
void answer(Struct* to, Struct from) {
  from.size = to->size;
  std::memcpy(to, &from, std::min<size_t>(to->size, sizeof from));
}

void error(halfstep_error* to) {
  answer(to, last_error);
  last_error = {};
}

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
  return fail(HALFSTEP_OUT_OF_MEMORY, "the memory is full");
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
  return *event != nullptr ? HALFSTEP_OK : fail(HALFSTEP_FAILED, "the host has no memory left");
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
// Elements. 16-bit floats are stored in 16 bits, computed with in float32 and rounded once, to nearest even.

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

float widen(float x) { return x; }
float widen(BFloat16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }
float widen(Half x) {
  // Exponent and mantissa in their places; the multiplication corrects the exponent's bias, also of subnormals.
  const uint32_t shifted = (x.bits & 0x7fffu) << 13;
  const float magnitude = std::bit_cast<float>(shifted) * 0x1p112f;
  const uint32_t bits = shifted >= 0x1fu << 23 ? shifted | 0x7f800000u : std::bit_cast<uint32_t>(magnitude);
  return std::bit_cast<float>(bits | (x.bits & 0x8000u) << 16);
}

void narrow(float x, float* to) { *to = x; }
void narrow(float x, BFloat16* to) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const bool nan = std::isnan(x);
  to->bits = static_cast<uint16_t>(nan ? bits >> 16 | 0x40u : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
void narrow(float x, Half* to) {
  const uint32_t bits = std::bit_cast<uint32_t>(x) & 0x7fffffffu;
  uint32_t magnitude;
  if (std::isnan(x)) {
    magnitude = 0x7e00u | (bits >> 13 & 0x3ffu);  // what a NaN carries stays
  } else if (bits >= 0x477ff000u) {               // 65520, halfway between the largest value and the next power of two
    magnitude = 0x7c00;
  } else if (bits < 113u << 23) {  // below 2^-14: a multiple of 2^-24, which the processor rounds to
    magnitude = static_cast<uint32_t>(std::lrint(std::fabs(x) * 0x1p24f));
  } else {
    magnitude = ((bits + 0xfffu + (bits >> 13 & 1)) >> 13) - (112u << 10);
  }
  to->bits = static_cast<uint16_t>(magnitude | (std::signbit(x) ? 0x8000u : 0u));
}

/// Calls f with an element of a floating dtype that this device computes in; false for others.
template <class F>
bool with_float(int dtype, F f) {
  if (dtype == HALFSTEP_F32) return f(float{}), true;
  if (dtype == HALFSTEP_F16) return f(Half{}), true;
  if (dtype == HALFSTEP_BF16) return f(BFloat16{}), true;
  return false;
}

/// Of an element of each dtype, in the order of their numbers.
constexpr int64_t kBytes[] = {4, 8, 2, 2, 1, 1, 8, 4, 1, 1, 1};

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

halfstep_status refuse(halfstep_context* context, halfstep_status status, const char* why) {
  context->set_error(context, why);
  return status;
}

/// `to`, `clone` and `copy`: from any layout into any other, and between the dtypes that this device computes in. The
/// source comes last: `copy` has its destination's old values before it.
halfstep_status copy(halfstep_context* context, const halfstep_tensor* in, int n, halfstep_tensor* out, int,
                     const void*) {
  const halfstep_tensor &from = in[n - 1], &to = out[0];
  if (from.ndim != to.ndim || !std::equal(from.sizes, from.sizes + from.ndim, to.sizes)) {
    return refuse(context, HALFSTEP_UNSUPPORTED, "the sizes differ");  // Halfstep takes the CPU for this call
  }
  if (from.dtype == to.dtype) {  // the bits, whatever they mean
    const int64_t bytes = kBytes[to.dtype];
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
      each_element(to, from, [&](int64_t at_y, int64_t at_x) { narrow(widen(x[at_x]), &y[at_y]); });
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
    narrow(number, &element);
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
      const float value = widen(x[i]);
      narrow(value <= 0 ? 0 : value, &y[i]);  // a NaN stays one
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
    for (int64_t i = 0; i < t.numel; ++i) floats[i] = widen(x[i]);
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
        narrow(dot(x + i * k, w + j * k, k) + (has_bias ? bias[j] : 0.f), &y[i * n + j]);
      }
    }
  });
  return HALFSTEP_OK;
}

// ------------------------------------------------------------------------------------------------------------------
// Which kernel for which op and dtype.

constexpr uint32_t kFloats = 1u << HALFSTEP_F32 | 1u << HALFSTEP_F16 | 1u << HALFSTEP_BF16;
constexpr uint32_t kAll = (1u << (HALFSTEP_BOOL + 1)) - 1;

constexpr struct {
  const char* op;
  uint32_t dtypes;
  uint32_t layouts;
  halfstep_kernel_fn run;
} kKernels[] = {
    {"to", kAll, HALFSTEP_LAYOUT_STRIDED, copy},         {"clone", kAll, HALFSTEP_LAYOUT_STRIDED, copy},
    {"copy", kAll, HALFSTEP_LAYOUT_STRIDED, copy},       {"fill", kFloats, HALFSTEP_LAYOUT_STRIDED, fill},
    {"relu", kFloats, HALFSTEP_LAYOUT_CONTIGUOUS, relu}, {"linear", kFloats, HALFSTEP_LAYOUT_CONTIGUOUS, linear},
};

halfstep_status kernel(const char* op, int32_t version, int32_t dtype, halfstep_kernel* to) {
  halfstep_kernel found = {};
  for (const auto& k : kKernels) {
    if (std::strcmp(k.op, op) != 0) continue;
    const bool computes = version == 1 && (k.dtypes >> dtype & 1) != 0;
    if (computes) found.run = k.run, found.layouts = k.layouts;
    if (!computes)
      found.reason = version == 1 ? "computed in f32, f16 and bf16 only" : "made for another version of it";
  }
  answer(to, found);
  return found.run != nullptr ? HALFSTEP_OK : HALFSTEP_UNSUPPORTED;
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
  t.error = error;
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
