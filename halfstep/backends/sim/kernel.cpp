// SPDX-License-Identifier: Apache-2.0
#include "kernel.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>

#include "halfstep/runtime/plugin_numbers.h"
#include "queue.h"

namespace sim {
namespace {

using namespace halfstep_plugin_numbers;

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
    const std::string wrong = wrong_call(def.layouts, def.attribute_bytes > 0, *context, in, n, out, m, attributes);
    if (!wrong.empty()) return refuse(context, HALFSTEP_FAILED, wrong.c_str());
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
      const uint64_t bytes = extent(t);
      if (bytes == 0) {
        t.data = nullptr;
      } else {
        char* data = device.memory.translate(t.data, bytes);
        if (data == nullptr) {
          const std::string which = (i < n ? "input " : "output ") + std::to_string(i < n ? i : i - n);
          return refuse(context, HALFSTEP_FAILED, (which + " is not in the memory of this device").c_str());
        }
        t.data = data;
        work->touches.push_back({data, data + bytes});
      }
      if (t.defined) {
        std::copy_n(t.sizes, t.ndim, call.geometry[2 * at].begin());
        std::copy_n(t.strides, t.ndim, call.geometry[2 * at + 1].begin());
      }
      t.sizes = call.geometry[2 * at].data();
      t.strides = call.geometry[2 * at + 1].data();
    }
    if (def.attribute_bytes > 0) {
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
  const char* reason = "the device has no such kernel";
  for (const Absent& absent : kAbsent) {
    if (absent.op == op) reason = absent.reason;
  }
  const std::span<const Kernel> families[] = {kernels()};
  return halfstep_plugin_helpers::find_kernel<Kernel>(
      families, op, version, dtype, answer,
      [&](const Kernel& k, halfstep_kernel& kernel) {
        halfstep_kernel cpu = {};
        if (cpu_kernel(k, dtype, &cpu) == HALFSTEP_OK) {
          kernel.run = k.functions[static_cast<std::size_t>(dtype)];
        } else {
          kernel.reason = cpu.reason;
        }
      },
      reason, "no unit for this dtype");
}

}  // namespace sim
