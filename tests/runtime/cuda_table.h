// SPDX-License-Identifier: Apache-2.0
// The table of the plug-in for NVIDIA GPUs, on two emulated GPUs, as a host sees it: for the tests of the plug-in.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "halfstep/runtime/plugin.h"
#include "tests/runtime/opened_plugin.h"

namespace halfstep::test::emulated_cuda {

/// The table of the emulated plug-in, opened once for the whole program.
inline const halfstep_plugin_table& cuda() {
  static const halfstep_plugin_table* table = [] {
    setenv("HALFSTEP_CUDA_EMULATED_DEVICES", "2", 1);
    setenv("HALFSTEP_CUDA_EMULATED_MEMORY", "64M", 1);
    return &opened_plugin(HALFSTEP_CUDA_EMULATED_PLUGIN);
  }();
  return *table;
}

inline halfstep_error last_error() { return taken_error(cuda()); }
inline testing::AssertionResult ok(halfstep_status status) {
  if (status == HALFSTEP_OK) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "status " << status << ": " << last_error().text;
}
inline bool says(const std::string& part) {
  const std::string text = last_error().text;
  return text.find(part) != std::string::npos ? true : (ADD_FAILURE() << "'" << part << "' is not in: " << text, false);
}

/// With a queue of the first of two GPUs.
class CudaPlugin : public ::testing::Test {
 protected:
  void SetUp() override {
    last_error();
    ASSERT_TRUE(ok(cuda().queue_create(0, 0, &queue)));
  }
  void TearDown() override {
    EXPECT_TRUE(ok(cuda().queue_destroy(queue)));
    for (const auto& [device, data, bytes] : memory) EXPECT_TRUE(ok(cuda().deallocate(device, data, bytes)));
  }

  static constexpr unsigned char kFresh = 0x5a;  // of workspace that nothing was written to

  void* allocate(uint64_t bytes, int32_t device = 0) {
    void* data = nullptr;
    EXPECT_TRUE(ok(cuda().allocate(device, bytes, &data)));
    memory.push_back({device, data, bytes});
    return data;
  }
  template <class T>
  void* put(const std::vector<T>& values) {
    void* data = allocate(values.size() * sizeof(T));
    EXPECT_TRUE(ok(cuda().copy(queue, data, values.data(), values.size() * sizeof(T), HALFSTEP_COPY_TO_DEVICE)));
    return data;
  }
  template <class T>
  std::vector<T> get(const void* data, std::size_t n, halfstep_queue* on = nullptr) {
    std::vector<T> values(n);
    EXPECT_TRUE(ok(cuda().copy(on ? on : queue, values.data(), data, n * sizeof(T), HALFSTEP_COPY_TO_HOST)));
    return values;
  }
  /// A row-major tensor of one dimension.
  halfstep_tensor vector(void* data, const int64_t& size, uint8_t dtype) {
    static const int64_t one = 1;
    return {data, &size, &one, size, 1, dtype, 1, 1, 0};
  }
  halfstep_status run(const char* op, uint8_t dtype, std::vector<halfstep_tensor> in, std::vector<halfstep_tensor> out,
                      const void* attributes, uint64_t number = 7) {
    halfstep_kernel kernel = {};
    kernel.size = sizeof kernel;
    if (const auto status = cuda().kernel(op, 1, dtype, &kernel)) return status;
    halfstep_context context = {};
    context.size = sizeof context;
    context.call = number;
    context.queue = queue;
    context.owner = this;
    context.state = kernel.state;
    context.workspace = [](halfstep_context* c, uint64_t bytes) -> void* {
      auto* self = static_cast<CudaPlugin*>(c->owner);
      if (self->workspaces == 0) return nullptr;
      --self->workspaces;
      void* const data = self->allocate(bytes);
      std::vector<unsigned char> fresh(bytes, kFresh);
      EXPECT_TRUE(ok(cuda().copy(self->queue, data, fresh.data(), bytes, HALFSTEP_COPY_TO_DEVICE)));
      return data;
    };
    context.set_error = [](halfstep_context* c, const char* text) {
      static_cast<CudaPlugin*>(c->owner)->reason = text;
    };
    return kernel.run(&context, in.data(), static_cast<int>(in.size()), out.data(), static_cast<int>(out.size()),
                      attributes);
  }

  struct Block {
    int32_t device;
    void* data;
    uint64_t bytes;
  };
  halfstep_queue* queue = nullptr;
  std::vector<Block> memory;
  std::string reason;
  int workspaces = -1;  ///< that calls may still have; -1: as many as they like
};

}  // namespace halfstep::test::emulated_cuda
