// SPDX-License-Identifier: Apache-2.0
// The simulated accelerator's table, as a host sees it, without any of Halfstep between: for the tests of the plug-in.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "halfstep/backends/sim/sim.h"
#include "halfstep/runtime/plugin.h"
#include "tests/runtime/opened_plugin.h"

namespace halfstep::test {

/// The table of the library at HALFSTEP_SIM_PLUGIN, opened once for the whole program.
inline const halfstep_plugin_table& sim() {
  static const halfstep_plugin_table& table = opened_plugin(HALFSTEP_SIM_PLUGIN);
  return table;
}

inline halfstep_error last_error() { return taken_error(sim()); }
inline bool order(const char* faults) {
  return reinterpret_cast<halfstep_sim_order_fault_fn>(sim().extension("sim_order_fault"))(faults) == 0;
}
inline halfstep_sim_stats stats() {
  halfstep_sim_stats result = {};
  result.size = sizeof result;
  reinterpret_cast<halfstep_sim_stats_fn>(sim().extension("sim_stats"))(&result);
  return result;
}

/// Device memory of one call.
class Memory {
 public:
  explicit Memory(uint64_t bytes, int32_t device = 0) : device_(device), bytes_(bytes) {
    EXPECT_EQ(sim().allocate(device, bytes, &data_), HALFSTEP_OK);
  }
  ~Memory() {
    if (data_ == nullptr || sim().deallocate(device_, data_, bytes_) != HALFSTEP_FAILED) return;
    // A test that didn't read its last result: the queue is still at it.
    EXPECT_EQ(sim().synchronize(device_), HALFSTEP_OK) << last_error().text;
    EXPECT_EQ(sim().deallocate(device_, data_, bytes_), HALFSTEP_OK) << last_error().text;
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

 private:
  int32_t device_;
  uint64_t bytes_;
  void* data_ = nullptr;
};

template <class T>
constexpr uint8_t kDType = HALFSTEP_F32;
template <>
constexpr uint8_t kDType<double> = HALFSTEP_F64;
template <>
constexpr uint8_t kDType<int64_t> = HALFSTEP_I64;
template <>
constexpr uint8_t kDType<int32_t> = HALFSTEP_I32;
template <>
constexpr uint8_t kDType<int8_t> = HALFSTEP_I8;
template <>
constexpr uint8_t kDType<uint8_t> = HALFSTEP_U8;

/// A tensor on the device; copies of the handle share its memory.
struct DeviceTensor {
  std::shared_ptr<Memory> memory;
  std::vector<int64_t> sizes, strides;
  uint8_t dtype = HALFSTEP_F32;
  int64_t offset = 0;  ///< bytes

  halfstep_tensor view() const {
    halfstep_tensor t = {};
    if (!memory) return t;
    t.numel = 1;
    int64_t row_major = 1;
    t.contiguous = 1;
    for (std::size_t i = sizes.size(); i-- > 0;) {
      t.numel *= sizes[i];
      if (sizes[i] != 1 && strides[i] != row_major) t.contiguous = 0;
      row_major *= sizes[i];
    }
    t.data = static_cast<char*>(memory->data()) + offset;
    t.sizes = sizes.data();
    t.strides = strides.data();
    t.ndim = static_cast<int32_t>(sizes.size());
    t.dtype = dtype;
    t.defined = 1;
    return t;
  }
};

/// One queue of a device, and calls on it. Destroyed with its queue.
class SimQueue {
 public:
  explicit SimQueue(int32_t device = 0, int32_t priority = 0) : device_(device) {
    EXPECT_EQ(sim().queue_create(device, priority, &queue_), HALFSTEP_OK);
  }
  ~SimQueue() {
    if (queue_ != nullptr) sim().queue_destroy(queue_);
  }
  SimQueue(const SimQueue&) = delete;
  SimQueue& operator=(const SimQueue&) = delete;
  halfstep_queue* get() const { return queue_; }

  /// Memory of a shape, with row-major strides.
  DeviceTensor empty(std::vector<int64_t> sizes, uint8_t dtype = HALFSTEP_F32) const {
    static constexpr uint64_t kSizes[] = {4, 8, 2, 2, 1, 1, 8, 4, 1, 1, 1};
    DeviceTensor t;
    t.strides.resize(sizes.size());
    int64_t numel = 1;
    for (std::size_t i = sizes.size(); i-- > 0;) {
      t.strides[i] = numel;
      numel *= sizes[i];
    }
    t.sizes = std::move(sizes);
    t.dtype = dtype;
    t.memory = std::make_shared<Memory>(std::max<uint64_t>(1, static_cast<uint64_t>(numel) * kSizes[dtype]), device_);
    return t;
  }
  template <class T>
  DeviceTensor tensor(const std::vector<T>& values, std::vector<int64_t> sizes, uint8_t dtype = kDType<T>) const {
    DeviceTensor t = empty(std::move(sizes), dtype);
    EXPECT_EQ(sim().copy(queue_, t.memory->data(), values.data(), values.size() * sizeof(T), HALFSTEP_COPY_TO_DEVICE),
              HALFSTEP_OK)
        << last_error().text;
    return t;
  }
  template <class T>
  DeviceTensor tensor(const std::vector<T>& values) const {
    return tensor(values, {static_cast<int64_t>(values.size())});
  }
  /// All bytes of the tensor's memory as numbers.
  template <class T>
  std::vector<T> read(const DeviceTensor& t) const {
    std::vector<T> values(t.memory->bytes() / sizeof(T));
    EXPECT_EQ(sim().copy(queue_, values.data(), t.memory->data(), values.size() * sizeof(T), HALFSTEP_COPY_TO_HOST),
              HALFSTEP_OK)
        << last_error().text;
    return values;
  }

  /// Calls a kernel. The reason for a refusal is kept in `reason`.
  halfstep_status call(const char* op, uint8_t dtype, const std::vector<DeviceTensor>& in,
                       const std::vector<DeviceTensor>& out, const void* attributes = nullptr, uint64_t number = 7) {
    halfstep_kernel kernel = {};
    kernel.size = sizeof kernel;
    if (const auto status = sim().kernel(op, 1, dtype, &kernel)) {
      reason = kernel.reason != nullptr ? kernel.reason : "";
      return status;
    }
    std::vector<halfstep_tensor> ins, outs;
    for (const auto& t : in) ins.push_back(t.view());
    for (const auto& t : out) outs.push_back(t.view());
    halfstep_context context = {};
    context.size = sizeof context;
    context.device = device_;
    context.call = number;
    context.queue = queue_;
    context.owner = this;
    context.workspace = [](halfstep_context* c, uint64_t bytes) -> void* {
      auto* self = static_cast<SimQueue*>(c->owner);
      self->workspaces_.push_back(std::make_unique<Memory>(bytes, self->device_));
      return self->workspaces_.back()->data();
    };
    context.set_error = [](halfstep_context* c, const char* text) { static_cast<SimQueue*>(c->owner)->reason = text; };
    return kernel.run(&context, ins.data(), static_cast<int>(ins.size()), outs.data(), static_cast<int>(outs.size()),
                      attributes);
  }
  std::string reason;

 private:
  int32_t device_;
  halfstep_queue* queue_ = nullptr;
  std::vector<std::unique_ptr<Memory>> workspaces_;
};

/// Calls kernels on the first device's queue, which must be without failures in the end.
class KernelCalls : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_EQ(sim().synchronize(0), HALFSTEP_OK) << last_error().text; }

  void call(const char* op, uint8_t dtype, const std::vector<DeviceTensor>& in, const std::vector<DeviceTensor>& out,
            const void* attributes = nullptr) {
    ASSERT_EQ(queue.call(op, dtype, in, out, attributes), HALFSTEP_OK) << op << ": " << queue.reason;
  }
  /// Numbers in a dtype, converted on the device.
  DeviceTensor make(const std::vector<float>& values, std::vector<int64_t> sizes, uint8_t dtype) {
    const DeviceTensor exact = queue.tensor(values, sizes);
    const DeviceTensor t = queue.empty(std::move(sizes), dtype);
    call("copy", HALFSTEP_F32, {exact}, {t});
    return t;
  }
  DeviceTensor number(float value) { return queue.tensor(std::vector<float>{value}, {}); }
  /// All values, widened on the device.
  std::vector<double> doubles(const DeviceTensor& t) {
    const DeviceTensor wide = queue.empty(t.sizes, HALFSTEP_F64);
    call("to", t.dtype, {t}, {wide});
    auto values = queue.read<double>(wide);
    int64_t numel = 1;
    for (int64_t s : t.sizes) numel *= s;
    values.resize(static_cast<std::size_t>(numel));
    return values;
  }

  SimQueue queue;
};

}  // namespace halfstep::test
