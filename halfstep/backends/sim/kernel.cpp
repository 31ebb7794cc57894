// SPDX-License-Identifier: Apache-2.0
#include "kernel.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <string_view>

#include "errors.h"
#include "queue.h"

namespace sim {
namespace {

/// Bytes from the first element to the end of the last.
uint64_t extent(const halfstep_tensor& t) {
  if (t.numel == 0) return 0;
  int64_t last = 0;
  for (int i = 0; i < t.ndim; ++i) last += (t.sizes[i] - 1) * t.strides[i];
  return (static_cast<uint64_t>(last) + 1) * item_size(t.dtype);
}

/// False when the tensor's elements are not all in this device's memory.
bool copy_view(const Device& device, const halfstep_tensor& t, View* view, std::vector<Span>* touches) {
  view->data = nullptr;
  view->numel = t.numel;
  view->ndim = t.ndim;
  view->dtype = t.dtype;
  view->defined = t.defined != 0;
  view->contiguous = t.contiguous != 0;
  if (!view->defined) return true;
  std::copy_n(t.sizes, t.ndim, view->sizes);
  std::copy_n(t.strides, t.ndim, view->strides);
  const uint64_t bytes = extent(t);
  if (bytes == 0) return true;
  view->data = device.memory.translate(t.data, bytes);
  if (view->data == nullptr) return false;
  touches->push_back({view->data, view->data + bytes});
  return true;
}

class KernelWork final : public Work {
 public:
  KernelWork(const KernelDef& def, uint64_t call) : Work(Kind::kernel, call), def_(def) {}
  Call call_data;

  std::string run() const override { return def_.run(call_data); }
  const char* op() const override { return def_.op; }
  // The element in the middle of the first output that has any: half as large again, or one more.
  void corrupt() const override {
    for (const View& view : call_data.out) {
      if (view.data == nullptr) continue;
      int64_t rest = view.numel / 2, at = 0;
      for (int i = view.ndim - 1; i >= 0; --i) {
        at += rest % view.sizes[i] * view.strides[i];
        rest /= view.sizes[i];
      }
      with_type(view.dtype, [&](auto zero) {
        using T = decltype(zero);
        T* value = view.at<T>(at);
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

}  // namespace

halfstep_status enqueue(const KernelDef& def, halfstep_context* context, const halfstep_tensor* in, int n,
                        halfstep_tensor* out, int m, const void* attributes) {
  return guarded([&]() -> halfstep_status {
    auto* queue = reinterpret_cast<Queue*>(context->queue);
    if (queue == nullptr) return refuse(context, HALFSTEP_FAILED, "no queue was given");
    Device& device = queue->device();
    if (device.lost()) return refuse(context, HALFSTEP_LOST, "the device is lost");

    auto work = std::make_shared<KernelWork>(def, context->call);
    Call& call = work->call_data;
    call.in.resize(static_cast<std::size_t>(n));
    call.out.resize(static_cast<std::size_t>(m));
    for (int i = 0; i < n + m; ++i) {
      const halfstep_tensor& from = i < n ? in[i] : out[i - n];
      View& to = i < n ? call.in[static_cast<std::size_t>(i)] : call.out[static_cast<std::size_t>(i - n)];
      const std::string which = (i < n ? "input " : "output ") + std::to_string(i < n ? i : i - n);
      if (!copy_view(device, from, &to, &work->touches)) {
        return refuse(context, HALFSTEP_FAILED, which + " is not in the memory of this device");
      }
      if (!(def.layouts & HALFSTEP_LAYOUT_STRIDED) && to.defined && !to.contiguous && to.numel > 0) {
        return refuse(context, HALFSTEP_FAILED, which + " is not contiguous");
      }
    }
    if (def.attribute_bytes > 0) {
      if (attributes == nullptr) return refuse(context, HALFSTEP_FAILED, "its attributes are missing");
      std::memcpy(call.attribute_bytes, attributes, def.attribute_bytes);
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
    const uint64_t bytes = def.workspace != nullptr ? def.workspace(call) : 0;
    if (bytes > 0) {
      const void* space = context->workspace(context, bytes);
      if (space == nullptr) return refuse(context, HALFSTEP_OUT_OF_MEMORY, "no memory for its workspace");
      call.workspace = device.memory.translate(space, bytes);
      if (call.workspace == nullptr) {
        return refuse(context, HALFSTEP_FAILED, "its workspace is not in the memory of this device");
      }
      work->touches.push_back({call.workspace, call.workspace + bytes});
    }
    queue->push(std::move(work), faults);
    return HALFSTEP_OK;
  });
}

halfstep_status find_kernel(const char* op, int32_t version, int32_t dtype, halfstep_kernel* answer) {
  const auto answered = [&](const Kernel* found, const char* reason) -> halfstep_status {
    halfstep_kernel all = {answer->size, found ? found->def->layouts : 0, found ? found->function : nullptr, reason,
                           nullptr};
    std::memcpy(answer, &all, std::min<std::size_t>(answer->size, sizeof all));
    return found ? HALFSTEP_OK : HALFSTEP_UNSUPPORTED;
  };
  for (const Absent& absent : kAbsent) {
    if (absent.op == op) return answered(nullptr, absent.reason);
  }
  for (const auto family : {copy_kernels(), arithmetic_kernels(), matmul_kernels(), reduce_kernels(), loss_kernels(),
                            amp_kernels(), optimizer_kernels()}) {
    for (const Kernel& k : family) {
      if (std::string_view(k.def->op) != op) continue;
      if (version != 1) return answered(nullptr, "this plug-in knows version 1 of the op");
      if (dtype < 0 || dtype > HALFSTEP_BOOL || !(k.def->dtypes >> dtype & 1)) {
        return answered(nullptr, k.def->missing ? k.def->missing : "no unit for this dtype");
      }
      return answered(&k, nullptr);
    }
  }
  return answered(nullptr, "the device has no such kernel");
}

}  // namespace sim
