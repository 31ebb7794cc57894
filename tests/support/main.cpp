// SPDX-License-Identifier: Apache-2.0
// The main function of all test programs: GoogleTest's, and `--device NAME`, which makes the tests' tensors there.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>

#include "halfstep/core/device.h"
#include "halfstep/core/error.h"
#include "halfstep/runtime/queue.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  halfstep::Device device;
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::strcmp(argv[i], "--device") != 0) continue;
    try {
      device = halfstep::Device(argv[i + 1]);
    } catch (const halfstep::Error& e) {
      std::fprintf(stderr, "%s\n", e.what());
      return 2;
    }
    halfstep::set_default_device(device);
  }
  const int result = RUN_ALL_TESTS();
  try {
    // A kernel that failed after the last test had looked is a failure too.
    halfstep::synchronize(device);
  } catch (const halfstep::Error& e) {
    std::fprintf(stderr, "after the tests: %s\n", e.what());
    return 1;
  }
  return result;
}
