// SPDX-License-Identifier: Apache-2.0
// The road over the CPU: what a call touches is copied to the host, the CPU's kernel runs, what it wrote is copied
// back.
#include <algorithm>
#include <chrono>
#include <map>

#include "halfstep/core/fail.h"
#include "halfstep/ops/call_internal.h"
#include "halfstep/runtime/device_backend.h"
#include "halfstep/runtime/fallback.h"
#include "halfstep/runtime/log.h"
#include "halfstep/runtime/transfer.h"

namespace halfstep::detail {
namespace {

// The part of a storage that the tensors of a call reach, and its copy on the host. Tensors that share memory on the
// device share it there too, so that in-place forms and overlapping inputs mean the same.
struct Mirror {
  std::int64_t begin = 0;  // bytes from the storage's start
  std::int64_t end = 0;
  bool written = false;
  bool keep = false;  // something of the old contents matters
  Ref<Storage> host;
};

class Mirrors {
 public:
  explicit Mirrors(const KernelCall& call) : call_(call) {
    for (const Tensor* t : call.inputs) add(*t, false);
    for (const Tensor* t : call.outputs) add(*t, true);
    std::uint64_t down = 0;
    for (auto& [storage, m] : mirrors_) {
      const auto bytes = static_cast<std::size_t>(m.end - m.begin);
      m.host = Storage::allocate(bytes, Device{});
      if (!m.keep || bytes == 0) continue;
      read_memory(m.host->data(), static_cast<char*>(storage->data()) + m.begin, call.device, bytes);
      down += bytes;
    }
    to_host = down;
  }

  Tensor on_host(const Tensor& t) const {
    if (!t.defined()) return t;
    const Mirror& m = mirrors_.at(t.storage().get());
    const auto item = static_cast<std::int64_t>(t.item_size());
    // A storage is addressed in elements of its tensor's dtype.
    const std::int64_t offset = (t.storage_offset() * item - m.begin) / item;
    return Tensor(TensorImpl::make(m.host, t.numel() == 0 ? 0 : offset, t.sizes(), t.strides(), t.dtype()));
  }

  void write_back() {
    for (auto& [storage, m] : mirrors_) {
      const auto bytes = static_cast<std::size_t>(m.end - m.begin);
      if (!m.written || bytes == 0) continue;
      copy_memory(static_cast<char*>(storage->data()) + m.begin, call_.device, m.host->data(), Device{}, bytes);
      storage->forget_magnitude_bound();
      to_device += bytes;
    }
  }

  std::uint64_t to_host = 0;
  std::uint64_t to_device = 0;

 private:
  void add(const Tensor& t, bool output) {
    if (!t.defined()) return;
    Mirror& m = mirrors_[t.storage().get()];
    m.written |= output;
    // A fresh output is dense and has no old contents.
    m.keep |= !(output && call_.fresh);
    if (t.numel() == 0) return;
    const auto item = static_cast<std::int64_t>(t.item_size());
    std::int64_t first = t.storage_offset(), last = first;
    for (int d = 0; d < t.dim(); ++d) last += (t.sizes()[d] - 1) * t.strides()[d];
    // In whole elements of the widest dtype, so that offsets stay whole whatever dtype looks at the storage.
    const std::int64_t begin = first * item / 8 * 8, end = (last + 1) * item;
    if (m.end == m.begin) {
      m.begin = begin, m.end = end;
    } else {
      m.begin = std::min(m.begin, begin), m.end = std::max(m.end, end);
    }
  }

  const KernelCall& call_;
  std::map<Storage*, Mirror> mirrors_;
};

}  // namespace

void run_fallback(const KernelCall& call, const std::string& reason, bool failed) {
  if (!failed && !fallback_options().missing) {
    fail<DeviceError>(
        "{}: {} has {}, and running ops on the CPU in its place is off; HALFSTEP_FALLBACK=1 or set_fallback_options() "
        "allows it",
        call.name, call.device.str(), reason);
  }
  // By the kernel's name, which is what its maker looks for: a conversion inside of another op is `to`.
  const std::string& kernel = call.table.name;
  log_once(LogLevel::warning, fmt::format("fallback {} {} {}", call.device.str(), kernel, failed),
           failed ? fmt::format("{}: {}; it ran again on the CPU", call.name, reason)
                  : fmt::format("{}: {} has {}; it runs on the CPU, with copies there and back", kernel,
                                call.device.str(), reason));
  const auto start = std::chrono::steady_clock::now();
  Mirrors mirrors(call);
  std::vector<Tensor> tensors;
  std::vector<const Tensor*> pointers;
  tensors.reserve(call.inputs.size() + call.outputs.size());
  for (const Tensor* t : call.inputs) tensors.push_back(mirrors.on_host(*t));
  for (const Tensor* t : call.outputs) tensors.push_back(mirrors.on_host(*t));
  for (const Tensor& t : tensors) pointers.push_back(&t);
  KernelCall on_cpu{.table = call.table,
                    .name = call.name,
                    .device = Device{},
                    .dtype = call.dtype,
                    .inputs = std::span(pointers).first(call.inputs.size()),
                    .outputs = std::span(pointers).subspan(call.inputs.size()),
                    .attributes = call.attributes,
                    .fresh = call.fresh};
  run_on_cpu(on_cpu);
  mirrors.write_back();
  count_fallback(kernel, mirrors.to_host, mirrors.to_device,
                 std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), failed);
}

}  // namespace halfstep::detail
