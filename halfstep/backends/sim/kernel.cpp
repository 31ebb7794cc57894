// SPDX-License-Identifier: Apache-2.0
#include "kernel.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>

#include "errors.h"
#include "halfstep/runtime/plugin_numbers.h"
#include "queue.h"

namespace sim {
namespace {

using namespace halfstep_plugin_numbers;

/// Bytes from the first element to the end of the last.
uint64_t extent(const halfstep_tensor& t) {
  if (t.numel == 0) return 0;
  int64_t last = 0;
  for (int i = 0; i < t.ndim; ++i) last += (t.sizes[i] - 1) * t.strides[i];
  return (static_cast<uint64_t>(last) + 1) * item_size(t.dtype);
}

/// What a kernel of the CPU is given while it runs. Its workspace comes from the device memory that the call took, and
/// from the host beyond that: the registers and caches of a chip.
class Run {
 public:
  Run(int32_t device, uint64_t call, char* memory, uint64_t bytes) : memory_(memory), left_(bytes) {
    context_.size = sizeof context_;
    context_.device = device;
    context_.call = call;
    context_.owner = this;
    context_.workspace = [](halfstep_context* context, uint64_t wanted) {
      return static_cast<Run*>(context->owner)->workspace(wanted);
    };
    context_.set_error = [](halfstep_context* context, const char* text) {
      static_cast<Run*>(context->owner)->error_ = text;
    };
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  /// Returns what went wrong, or an empty text.
  std::string operator()(const halfstep_kernel& kernel, std::span<const halfstep_tensor> in,
                         std::vector<halfstep_tensor> out, const void* attributes) {
    context_.state = kernel.state;
    const halfstep_status status = kernel.run(&context_, in.data(), static_cast<int>(in.size()), out.data(),
                                              static_cast<int>(out.size()), attributes);
    if (status == HALFSTEP_OK) return {};
    return error_.empty() ? "its kernel ended with status " + std::to_string(status) : error_;
  }

 private:
  static constexpr uint64_t kAlignment = 64;
  void* workspace(uint64_t bytes) {
    bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (bytes <= left_) {
      left_ -= bytes;
      return std::exchange(memory_, memory_ + bytes);
    }
    blocks_.emplace_back(std::aligned_alloc(kAlignment, std::max(bytes, kAlignment)), std::free);
    return blocks_.back().get();
  }

  halfstep_context context_ = {};
  char* memory_;
  uint64_t left_;
  std::vector<std::unique_ptr<void, void (*)(void*)>> blocks_;
  std::string error_;
};

class KernelWork final : public Work {
 public:
  KernelWork(const KernelDef& def, int32_t device, uint64_t call)
      : Work(Kind::kernel, call), def_(def), device_(device) {}
  Call call_data;
  halfstep_kernel kernel = {};
  char* workspace = nullptr;

  std::string run() const override {
    std::span<const halfstep_tensor> in = call_data.in;
    if (def_.source_of != nullptr) in = in.last(1);
    return Run(device_, call, workspace, def_.workspace)(
        kernel, in, call_data.out, def_.attribute_bytes > 0 ? call_data.attributes.data() : nullptr);
  }
  const char* op() const override { return def_.op; }
  // The element in the middle of the first output that has any: half as large again, or one more.
  void corrupt() const override {
    for (const halfstep_tensor& to : call_data.out) {
      if (to.data == nullptr) continue;
      int64_t rest = to.numel / 2, at = 0;
      for (int i = to.ndim - 1; i >= 0; --i) {
        at += rest % to.sizes[i] * to.strides[i];
        rest /= to.sizes[i];
      }
      with_type(to.dtype, [&](auto zero) {
        using T = decltype(zero);
        T* value = static_cast<T*>(to.data) + at;
        if constexpr (std::is_same_v<T, Bool>) {
          value->bits ^= 1;
        } else if constexpr (std::is_integral_v<T>) {
          *value = static_cast<T>(*value ^ 1);
        } else {
          const auto right = static_cast<double>(load(*value));
          const double wrong = right * 1.5;
          const bool differs = std::isfinite(wrong) && static_cast<double>(load(convert<T>(wrong))) != right;
          *value = convert<T>(differs ? wrong : std::isfinite(right) ? right + 1 : 1.0);
        }
      });
      return;
    }
  }

 private:
  const KernelDef& def_;
  const int32_t device_;
};

/// Notes a failure and tells it to the host in both ways that there are. The host knows op and device, and says them.
halfstep_status refuse(halfstep_context* context, halfstep_status status, const std::string& text) {
  context->set_error(context, text.c_str());
  return fail(status, context->call, "%s", text.c_str());
}

struct Absent {
  std::string_view op;
  const char* reason;
};
// What this device has no unit for, on purpose: somebody has to run into it.
constexpr Absent kAbsent[] = {
    {"softmax", "no unit for exponentials along a dimension"},
    {"log_softmax", "no unit for exponentials along a dimension"},
    {"gelu", "no unit for the error function"},
    {"sort", "no sorting unit"},
    {"topk", "no sorting unit"},
    {"scaled_dot_product_attention", "no unit for exponentials along a dimension"},
    {"multi_clip", "gradients are not scaled in place on this device"},
    {"conv2d", "no convolution unit"},
};

halfstep_status cpu_kernel(const KernelDef& def, int32_t dtype, halfstep_kernel* kernel) {
  kernel->size = sizeof *kernel;
  return machine().host->cpu_kernel(def.source_of != nullptr ? def.source_of : def.op, 1, dtype, kernel);
}

}  // namespace

halfstep_status enqueue(const KernelDef& def, int32_t dtype, halfstep_context* context, const halfstep_tensor* in,
                        int n, halfstep_tensor* out, int m, const void* attributes) {
  return guarded([&]() -> halfstep_status {
    auto* queue = reinterpret_cast<Queue*>(context->queue);
    if (queue == nullptr) return refuse(context, HALFSTEP_FAILED, "no queue was given");
    Device& device = queue->device();
    if (device.lost()) return refuse(context, HALFSTEP_LOST, "the device is lost");

    auto work = std::make_shared<KernelWork>(def, device.index, context->call);
    if (cpu_kernel(def, dtype, &work->kernel) != HALFSTEP_OK) {
      return refuse(context, HALFSTEP_UNSUPPORTED, work->kernel.reason);
    }
    Call& call = work->call_data;
    call.in.assign(in, in + n);
    call.out.assign(out, out + m);
    call.geometry.resize(2 * static_cast<std::size_t>(n + m));
    for (int i = 0; i < n + m; ++i) {
      const auto at = static_cast<std::size_t>(i);
      halfstep_tensor& t = i < n ? call.in[at] : call.out[at - static_cast<std::size_t>(n)];
      const std::string which = (i < n ? "input " : "output ") + std::to_string(i < n ? i : i - n);
      const uint64_t bytes = t.defined ? extent(t) : 0;
      if (bytes == 0) {
        t.data = nullptr;
      } else {
        char* data = device.memory.translate(t.data, bytes);
        if (data == nullptr) return refuse(context, HALFSTEP_FAILED, which + " is not in the memory of this device");
        t.data = data;
        work->touches.push_back({data, data + bytes});
      }
      if (!(def.layouts & HALFSTEP_LAYOUT_STRIDED) && t.defined && !t.contiguous && t.numel > 0) {
        return refuse(context, HALFSTEP_FAILED, which + " is not contiguous");
      }
      if (t.defined) {
        std::copy_n(t.sizes, t.ndim, call.geometry[2 * at].begin());
        std::copy_n(t.strides, t.ndim, call.geometry[2 * at + 1].begin());
      }
      t.sizes = call.geometry[2 * at].data();
      t.strides = call.geometry[2 * at + 1].data();
    }
    if (def.attribute_bytes > 0) {
      if (attributes == nullptr) return refuse(context, HALFSTEP_FAILED, "its attributes are missing");
      call.attributes.resize((def.attribute_bytes + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t));
      std::memcpy(call.attributes.data(), attributes, def.attribute_bytes);
    }
    if (def.refuses != nullptr) {
      if (const char* why = def.refuses(call)) return refuse(context, HALFSTEP_UNSUPPORTED, why);
    }
    // A graph's kernels count when they are launched.
    const FaultPlan faults = queue->capture ? FaultPlan{} : machine().faults.next_kernel(def.op);
    if (faults.lost) {
      device.lose();
      return refuse(context, HALFSTEP_LOST, "the device was lost, as ordered");
    }
    if (faults.unsupported) return refuse(context, HALFSTEP_UNSUPPORTED, "not supported, as ordered");
    if (faults.refuse) return refuse(context, HALFSTEP_FAILED, "refused, as ordered");
    if (def.workspace > 0) {
      const void* space = context->workspace(context, def.workspace);
      if (space == nullptr) return refuse(context, HALFSTEP_OUT_OF_MEMORY, "no memory for its workspace");
      work->workspace = device.memory.translate(space, def.workspace);
      if (work->workspace == nullptr) {
        return refuse(context, HALFSTEP_FAILED, "its workspace is not in the memory of this device");
      }
      work->touches.push_back({work->workspace, work->workspace + def.workspace});
    }
    queue->push(std::move(work), faults);
    return HALFSTEP_OK;
  });
}

halfstep_status find_kernel(const char* op, int32_t version, int32_t dtype, halfstep_kernel* answer) {
  const auto answered = [&](halfstep_kernel_fn run, uint32_t layouts, const char* reason) -> halfstep_status {
    const halfstep_kernel all = {answer->size, layouts, run, reason, nullptr};
    std::memcpy(answer, &all, std::min<std::size_t>(answer->size, sizeof all));
    return run != nullptr ? HALFSTEP_OK : HALFSTEP_UNSUPPORTED;
  };
  for (const Absent& absent : kAbsent) {
    if (absent.op == op) return answered(nullptr, 0, absent.reason);
  }
  for (const Kernel& k : kernels()) {
    const KernelDef& def = *k.def;
    if (std::string_view(def.op) != op) continue;
    if (version != 1) return answered(nullptr, 0, "this plug-in knows version 1 of the op");
    if (dtype < 0 || dtype > HALFSTEP_BOOL || !(def.dtypes >> dtype & 1)) {
      return answered(nullptr, 0, def.missing ? def.missing : "no unit for this dtype");
    }
    halfstep_kernel cpu = {};
    if (cpu_kernel(def, dtype, &cpu) != HALFSTEP_OK) return answered(nullptr, 0, cpu.reason);
    return answered(k.functions[static_cast<std::size_t>(dtype)], def.layouts, nullptr);
  }
  return answered(nullptr, 0, "the device has no such kernel");
}

}  // namespace sim
