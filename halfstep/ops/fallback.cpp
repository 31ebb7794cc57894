// SPDX-License-Identifier: Apache-2.0
// The fallback to the CPU: what a call touches is copied to the host, the CPU's kernel runs, and what it wrote is
// copied back, or stays on the host until somebody asks for it on the device.
#include <algorithm>
#include <chrono>
#include <map>

#include "halfstep/core/fail.h"
#include "halfstep/ops/call_internal.h"
#include "halfstep/ops/recorder.h"
#include "halfstep/runtime/device_backend.h"
#include "halfstep/runtime/device_wait_internal.h"
#include "halfstep/runtime/fallback.h"
#include "halfstep/runtime/log.h"
#include "halfstep/runtime/queue.h"
#include "halfstep/runtime/transfer.h"

namespace halfstep::detail {
namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// A result that stayed on the host is wanted on the device.
void bring(const Storage::Bring& how, const Storage& block, void* to, const Storage& from) {
  const auto start = Clock::now();
  const Device device = block.device();
  copy_memory(to, device, from.data(), Device{}, block.bytes());
  KernelRecorder* const recorder = kernel_recorder();
  if (!recorder || !recorder->owns(block)) {
    // Work of any queue may read it from here on, as if it had come when it was made. What a captured step makes is
    // used on one queue.
    DeviceBackend& backend = backend_for(device, how.made_by);
    auto* const queue = static_cast<halfstep_queue*>(current_native_queue(device));
    const DeviceWait waiting;
    backend.check(backend.table.queue_synchronize(queue), "copy to device", device.index);
  }
  count_fallback_result(how.made_by, block.bytes(), seconds_since(start));
}
void brought(const Storage::Bring& how, Storage& block, Storage& from) {
  KernelRecorder* const recorder = kernel_recorder();
  // What the step finds in its place is brought before a replay.
  if (!recorder || !recorder->owns(block)) return;
  recorder->copy({Ref<Storage>::share(&block), 0}, {Ref<Storage>::share(&from), 0}, block.bytes(), false);
  recorder->host([how, bytes = block.bytes()] { count_fallback_result(how.made_by, bytes, 0); });
}

// Whether the contents of a storage may be on the host without anybody noticing.
bool may_stay(const Storage& storage) {
  KernelRecorder* const recorder = kernel_recorder();
  return !storage.address_held() && (!recorder || recorder->owns(storage));
}

// The part of a storage that the tensors of a call reach, and its copy on the host. Tensors that share memory on the
// device share it there too, so that in-place forms and overlapping inputs mean the same.
struct Mirror {
  std::int64_t begin = 0;  // bytes from the storage's start
  std::int64_t end = 0;
  bool written = false;
  bool keep = false;  // something of the old contents matters
  Ref<Storage> host;
  bool stays = false;  // all of the storage is there, and may stay
};

class Mirrors {
 public:
  explicit Mirrors(const KernelCall& call) : call_(call) {
    for (const Tensor* t : call.inputs) add(*t, false);
    for (const Tensor* t : call.outputs) add(*t, true);
    std::uint64_t down = 0;
    for (auto& [storage, m] : mirrors_) {
      const auto bytes = static_cast<std::size_t>(m.end - m.begin);
      if (bytes == 0) {
        m.host = Storage::allocate(0, Device{});
        continue;
      }
      const bool may = may_stay(*storage);
      m.stays = may && m.begin == 0 && bytes == storage->bytes();
      if (may) m.host = storage->host_copy();
      if (m.host) {
        m.begin = 0, m.end = static_cast<std::int64_t>(storage->bytes());
        m.stays = true;
        continue;
      }
      m.host = Storage::allocate(bytes, Device{});
      if (!m.keep) continue;
      read_memory(m.host->data(), static_cast<char*>(storage->data()) + m.begin, call.device, bytes);
      if (KernelRecorder* recorder = kernel_recorder()) [[unlikely]]
        recorder->copy({m.host, 0}, {Ref<Storage>::share(storage), m.begin}, bytes, false);
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
      storage->forget_magnitude_bound();
      // The CPU's kernels keep what they derive from contents, here from those of a copy that lives on.
      m.host->bump_version();
      if (m.stays) {
        storage->keep_on_host(m.host, {.made_by = call_.table.name.c_str(), .copy = bring, .copied = brought});
        continue;
      }
      copy_memory(static_cast<char*>(storage->data()) + m.begin, call_.device, m.host->data(), Device{}, bytes);
      if (KernelRecorder* recorder = kernel_recorder()) [[unlikely]]
        recorder->copy({Ref<Storage>::share(storage), m.begin}, {m.host, 0}, bytes, false);
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
  KernelRecorder* const recorder = kernel_recorder();
  const auto begun = std::make_shared<Clock::time_point>(Clock::now());
  if (recorder) [[unlikely]] {
    for (const auto list : {call.inputs, call.outputs}) {
      for (const Tensor* t : list) recorder->uses(*t);
    }
    recorder->host([begun] { *begun = Clock::now(); });
  }
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
                    .attributes_bytes = call.attributes_bytes,
                    .fresh = call.fresh,
                    .live = call.live};
  run_on_host(on_cpu);
  mirrors.write_back();
  const auto count = [begun, kernel, failed, to_host = mirrors.to_host, to_device = mirrors.to_device] {
    count_fallback(kernel, to_host, to_device, seconds_since(*begun), failed);
  };
  count();
  if (recorder) [[unlikely]]
    recorder->host(count);
}

void run_fallback(const KernelCall& call, std::span<const TensorView> inputs, std::span<const TensorView> outputs,
                  const std::string& reason) {
  // Views that have bytes in common are of one storage.
  struct Part {
    std::uintptr_t begin, end;
    Ref<Storage> storage;
  };
  std::vector<Part> parts;
  const auto part_of = [](const TensorView& v) {
    std::int64_t last = 0;
    for (int d = 0; d < v.ndim; ++d) last += (v.sizes[d] - 1) * v.strides[d];
    const auto begin = reinterpret_cast<std::uintptr_t>(v.data);
    return Part{begin, begin + static_cast<std::size_t>(last + 1) * item_size(v.dtype), {}};
  };
  for (const auto list : {inputs, outputs}) {
    for (const TensorView& v : list) {
      if (!v.defined || v.numel == 0) continue;
      Part all = part_of(v);
      std::erase_if(parts, [&](const Part& p) {
        if (p.end <= all.begin || all.end <= p.begin) return false;
        all.begin = std::min(all.begin, p.begin), all.end = std::max(all.end, p.end);
        return true;
      });
      parts.push_back(all);
    }
  }
  for (Part& p : parts) p.storage = Storage::wrap(reinterpret_cast<void*>(p.begin), p.end - p.begin, call.device, {});
  std::vector<Tensor> tensors;
  for (const auto list : {inputs, outputs}) {
    for (const TensorView& v : list) {
      const auto ndim = static_cast<std::size_t>(v.ndim);
      if (!v.defined) {
        tensors.emplace_back();
        continue;
      }
      Ref<Storage> storage;
      std::int64_t offset = 0;
      if (v.numel == 0) {
        storage = Storage::wrap(nullptr, 0, call.device, {});
      } else {
        const auto begin = reinterpret_cast<std::uintptr_t>(v.data);
        const auto p = std::find_if(parts.begin(), parts.end(),
                                    [&](const Part& part) { return part.begin <= begin && begin < part.end; });
        storage = p->storage;
        offset = static_cast<std::int64_t>((begin - p->begin) / item_size(v.dtype));
      }
      tensors.emplace_back(TensorImpl::make(std::move(storage), offset, Shape(std::span(v.sizes, ndim)),
                                            Shape(std::span(v.strides, ndim)), v.dtype));
    }
  }
  std::vector<const Tensor*> pointers;
  for (const Tensor& t : tensors) pointers.push_back(&t);
  run_fallback({.table = call.table,
                .name = call.name,
                .device = call.device,
                .dtype = call.dtype,
                .inputs = std::span(pointers).first(inputs.size()),
                .outputs = std::span(pointers).subspan(inputs.size()),
                .attributes = call.attributes,
                .attributes_bytes = call.attributes_bytes,
                .live = call.live},
               reason, false);
}

}  // namespace halfstep::detail
