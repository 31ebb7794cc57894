// SPDX-License-Identifier: Apache-2.0
// Convolutions of the CUDA plug-in as far as they need no GPU: what cuDNN is asked for, and whether the real library,
// where it is installed, has an answer for an H200 that is only described to it.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "halfstep/backends/cuda/libraries/conv_plan.h"
#include "halfstep/backends/cuda/libraries/dnn_graph.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
#endif

namespace hscuda {
namespace {

alignas(16) char memory[64];

/// A tensor [n, c, h, w] that is not looked into.
struct Image {
  int64_t sizes[4];
  int64_t strides[4];
  halfstep_tensor tensor = {};

  Image(int64_t n, int64_t c, int64_t h, int64_t w, int dtype, bool last) : sizes{n, c, h, w} {
    const int orders[2][4] = {{3, 2, 1, 0}, {1, 3, 2, 0}};
    int64_t stride = 1;
    for (const int d : orders[last]) strides[d] = stride, stride *= sizes[d];
    tensor.data = memory;
    tensor.sizes = sizes, tensor.strides = strides;
    tensor.numel = stride, tensor.ndim = 4;
    tensor.dtype = static_cast<uint8_t>(dtype), tensor.defined = 1;
  }
  Image(const Image&) = delete;
};

/// A convolution of 3 x 3 with padding 1 and all that belongs to it.
struct Example {
  Image x, w, y, row;
  halfstep_conv_attributes attributes = {};
  ConvCall call;

  explicit Example(ConvPart part, int dtype, int result, bool last = true, bool bias = false, int64_t groups = 1)
      : x(2, 16, 8, 8, part == ConvPart::kInput ? result : dtype, last),
        w(32, 16 / groups, 3, 3, part == ConvPart::kWeight ? result : dtype, last),
        y(2, 32, 8, 8, part == ConvPart::kOutput ? result : dtype, last),
        row(1, 32, 1, 1, dtype, false) {
    for (int d = 0; d < 2; ++d) attributes.stride[d] = attributes.padding[d] = attributes.dilation[d] = 1;
    attributes.groups = groups;
    row.tensor.ndim = 1, row.strides[0] = 1;
    call = {part, &x.tensor, &w.tensor, &y.tensor, bias ? &row.tensor : nullptr, &attributes};
  }
  std::vector<ConvPlan> plans(ConvChoices choices = {}) {
    ConvPlan all[kConvPlans];
    why = "";
    return std::vector<ConvPlan>(all, all + plan_convolution(call, choices, all, &why));
  }
  std::string why_text() { return plans().empty() ? why : ""; }
  const char* why = "";
};

TEST(CudaConvPlan, TakesDenseTensorsAsTheyLie) {
  for (const bool last : {false, true}) {
    for (const ConvPart part : {ConvPart::kOutput, ConvPart::kInput, ConvPart::kWeight}) {
      const auto plans = Example(part, HALFSTEP_F32, HALFSTEP_F32, last).plans();
      ASSERT_EQ(plans.size(), 1u);
      EXPECT_EQ(plans[0].problem.channels_last, last);
      EXPECT_EQ(plans[0].problem.dtype, HALFSTEP_F32);
      EXPECT_EQ(plans[0].problem.alignment, 16);
      EXPECT_FALSE(plans[0].copy_x || plans[0].copy_w || plans[0].copy_y || plans[0].add_bias);
      int64_t strides[4];
      plans[0].problem.strides(plans[0].problem.x, strides);
      EXPECT_EQ(strides[1], last ? 1 : 64);
      EXPECT_EQ(strides[3], last ? 16 : 1);
    }
  }
}

TEST(CudaConvPlan, BringsTensorsToOneLayout) {
  Example e(ConvPart::kOutput, HALFSTEP_F16, HALFSTEP_F16);
  Image rows(32, 16, 3, 3, HALFSTEP_F16, false);
  e.call.w = &rows.tensor;
  const auto plan = e.plans().at(0);
  EXPECT_TRUE(plan.problem.channels_last);
  EXPECT_TRUE(plan.copy_w);
  EXPECT_FALSE(plan.copy_x || plan.copy_y);
  // A single channel lies both ways: nothing is moved for its sake.
  Image one(2, 1, 8, 8, HALFSTEP_F16, false);
  EXPECT_EQ(conv_layouts(one.tensor), kRowMajor | kChannelsLast);
}

TEST(CudaConvPlan, RoundsOnce) {
  // The bias is added to the sums where it can be, before that of 16 bits to float32 ones.
  Example biased(ConvPart::kOutput, HALFSTEP_BF16, HALFSTEP_BF16, true, true);
  auto plans = biased.plans();
  ASSERT_EQ(plans.size(), 2u);
  EXPECT_EQ(plans[0].problem.epilogue, ConvEpilogue::kBias);
  EXPECT_FALSE(plans[0].add_bias);
  EXPECT_EQ(plans[1].problem.dtype, HALFSTEP_F32);
  EXPECT_TRUE(plans[1].add_bias && plans[1].copy_x && plans[1].copy_w && plans[1].copy_y);
  EXPECT_TRUE(plans[1].problem.tf32);
  // A result of another dtype is made of float32 sums.
  Example wide(ConvPart::kWeight, HALFSTEP_F16, HALFSTEP_F32);
  plans = wide.plans();
  ASSERT_EQ(plans.size(), 1u);
  EXPECT_EQ(plans[0].problem.dtype, HALFSTEP_F32);
  EXPECT_TRUE(plans[0].copy_x && plans[0].copy_y);
  EXPECT_FALSE(plans[0].copy_w);
  plans = wide.plans({.compile = true});
  ASSERT_EQ(plans.size(), 2u);
  EXPECT_EQ(plans[0].problem.epilogue, ConvEpilogue::kWiden);
  EXPECT_EQ(plans[0].problem.result(), HALFSTEP_F32);
  EXPECT_FALSE(plans[0].copy_x || plans[0].copy_y || plans[0].copy_w);
  // float32 itself needs no second plan, and none of TF32.
  plans = Example(ConvPart::kInput, HALFSTEP_F32, HALFSTEP_F16).plans();
  ASSERT_EQ(plans.size(), 1u);
  EXPECT_TRUE(plans[0].copy_x);
  EXPECT_FALSE(plans[0].problem.tf32);
  EXPECT_TRUE(Example(ConvPart::kInput, HALFSTEP_F32, HALFSTEP_F32).plans({.tf32 = true})[0].problem.tf32);
  EXPECT_FALSE(Example(ConvPart::kInput, HALFSTEP_F64, HALFSTEP_F64).plans({.tf32 = true})[0].problem.tf32);
}

TEST(CudaConvPlan, KeysTellApartWhatMatters) {
  const auto key = [](auto... arguments) { return Example(arguments...).plans().at(0).problem; };
  const ConvProblem base = key(ConvPart::kOutput, HALFSTEP_F32, HALFSTEP_F32);
  EXPECT_EQ(base, key(ConvPart::kOutput, HALFSTEP_F32, HALFSTEP_F32));
  EXPECT_EQ(hash(base), hash(key(ConvPart::kOutput, HALFSTEP_F32, HALFSTEP_F32)));
  EXPECT_NE(base, key(ConvPart::kInput, HALFSTEP_F32, HALFSTEP_F32));
  EXPECT_NE(base, key(ConvPart::kOutput, HALFSTEP_F16, HALFSTEP_F16));
  EXPECT_NE(base, key(ConvPart::kOutput, HALFSTEP_F32, HALFSTEP_F32, false));
  EXPECT_NE(base, key(ConvPart::kOutput, HALFSTEP_F32, HALFSTEP_F32, true, true));
  EXPECT_NE(base, key(ConvPart::kOutput, HALFSTEP_F32, HALFSTEP_F32, true, false, 4));
  Example shifted(ConvPart::kOutput, HALFSTEP_F32, HALFSTEP_F32);
  shifted.x.tensor.data = memory + 4;
  EXPECT_EQ(shifted.plans().at(0).problem.alignment, 4);
}

TEST(CudaConvPlan, RefusesWhatLibrariesDoNotTake) {
  Example e(ConvPart::kOutput, HALFSTEP_F32, HALFSTEP_F32);
  EXPECT_EQ(e.why_text(), "");
  e.attributes.padding[1] = 2;
  EXPECT_EQ(e.why_text(), "other sizes than windows fit");
  e.attributes.padding[1] = 1;
  e.attributes.stride[0] = INT32_MAX;
  EXPECT_EQ(e.why_text(), "a stride, padding or dilation beyond what cuDNN computes with");
  e.attributes.stride[0] = 1;
  e.x.strides[3] *= 2;
  EXPECT_EQ(e.why_text(), "strides with gaps");
  e.x.strides[3] /= 2;
  e.w.tensor.numel = 0;
  EXPECT_EQ(e.why_text(), "an empty tensor");
  e.w.tensor.numel = int64_t{1} << 31;
  EXPECT_EQ(e.why_text(), "more elements than 31 bits count");
  e.w.tensor.numel = 1;
  e.y.tensor.dtype = HALFSTEP_I32;
  EXPECT_EQ(e.why_text(), "a dtype that is not floating");
}

TEST(CudaConvPlan, EnginesKeepWhatKernelsPromise) {
  ConvProblem p = {};
  p.dtype = HALFSTEP_F32;
  EXPECT_TRUE(engine_fits(p, 0, {}));
  EXPECT_TRUE(engine_fits(p, 0, {CUDNN_NUMERICAL_NOTE_STRICT_NAN_PROP}));
  EXPECT_FALSE(engine_fits(p, 0, {CUDNN_NUMERICAL_NOTE_TENSOR_CORE}));
  p.tf32 = 1;
  EXPECT_TRUE(engine_fits(p, 0, {CUDNN_NUMERICAL_NOTE_TENSOR_CORE}));
  p.dtype = HALFSTEP_F16, p.tf32 = 0;
  EXPECT_TRUE(engine_fits(p, 0, {CUDNN_NUMERICAL_NOTE_TENSOR_CORE}));
  for (const auto note :
       {CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS, CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION,
        CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC, CUDNN_NUMERICAL_NOTE_WINOGRAD, CUDNN_NUMERICAL_NOTE_FFT}) {
    EXPECT_FALSE(engine_fits(p, 0, {CUDNN_NUMERICAL_NOTE_TENSOR_CORE, note}));
  }
}

TEST(CudaConvPlan, LeavesOutEnginesThatWereSeenToRoundPartsOfSums) {
  ConvProblem p = {};
  const auto fits = [&](ConvPart part, int dtype, int64_t engine) {
    p.part = part, p.dtype = dtype;
    return engine_fits(p, engine, {CUDNN_NUMERICAL_NOTE_TENSOR_CORE});
  };
  EXPECT_FALSE(fits(ConvPart::kInput, HALFSTEP_F16, 2));
  EXPECT_TRUE(fits(ConvPart::kOutput, HALFSTEP_F16, 2));
  EXPECT_FALSE(fits(ConvPart::kWeight, HALFSTEP_BF16, 47));
  EXPECT_TRUE(fits(ConvPart::kWeight, HALFSTEP_BF16, 46));
  p.tf32 = 1;
  EXPECT_TRUE(fits(ConvPart::kInput, HALFSTEP_F32, 2));
  EXPECT_FALSE(fits(ConvPart::kWeight, HALFSTEP_F32, 17));
  EXPECT_TRUE(fits(ConvPart::kWeight, HALFSTEP_F64, 17));
}

/// The real library, and an H200 as it describes one: cuDNN makes plans for a device that isn't there.
class CudaRealCudnn : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    dnn_ = DnnFunctions::open(&why);
    if (dnn_ == nullptr) GTEST_SKIP() << why;
    if (dnn_->version() < 90800) GTEST_SKIP() << "cuDNN " << dnn_->version() << " makes no plans without a device";
    const std::string h200 =
        R"({"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],"regsPerBlock":65536,)"
        R"("multiProcessorCount":132,"warpSize":32,"maxSharedMemoryPerBlock":49152,)"
        R"("maxSharedMemoryPerBlockOptin":232448,"reservedSharedMemoryPerBlock":1024,"maxRegistersPerSM":65536,)"
        R"("maxCtasPerSM":32,"maxThreadsPerBlock":1024,"maxThreadsPerSM":2048,"pciDeviceId":0,"isTccDriver":0,)"
        R"("supportCoopLaunch":1,"totalGlobalMem":150110011392,"smClockRateKHz":1980000,"memClockRateKHz":3201000,)"
        R"("l2CacheSize":62914560,"cudaDeviceId":0,"deviceVer":900,"driverVer":13000,"deviceName":"NVIDIA H200"})";
    device_ = std::make_unique<DnnDescriptor>(*dnn_, CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
    device_->set(CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, h200.data(),
                 static_cast<int64_t>(h200.size()));
    if (!device_->finalize().ok()) GTEST_SKIP() << "cuDNN " << dnn_->version() << " describes devices otherwise";
  }

  std::vector<DnnPlan> plans(const ConvProblem& problem, std::string* why) {
    return make_plans(*dnn_, {.properties = device_->get()}, problem, {}, why);
  }

#ifdef __SANITIZE_ADDRESS__
  __lsan::ScopedDisabler ignored_;  // cuDNN's own: its heuristics keep what they allocate
#endif
  const DnnFunctions* dnn_ = nullptr;
  std::unique_ptr<DnnDescriptor> device_;
};

struct Sizes {
  const char* name;
  int64_t n, c, size, o, kernel, stride, padding, dilation, groups;
};

ConvProblem problem(const Sizes& s, ConvPart part, int dtype, bool last) {
  ConvProblem p = {};
  const int64_t out = (s.size + 2 * s.padding - s.dilation * (s.kernel - 1) - 1) / s.stride + 1;
  const int64_t x[] = {s.n, s.c, s.size, s.size}, w[] = {s.o, s.c / s.groups, s.kernel, s.kernel},
                y[] = {s.n, s.o, out, out};
  for (int d = 0; d < 4; ++d) p.x[d] = x[d], p.w[d] = w[d], p.y[d] = y[d];
  for (int d = 0; d < 2; ++d) p.stride[d] = s.stride, p.padding[d] = s.padding, p.dilation[d] = s.dilation;
  p.groups = s.groups;
  p.part = part;
  p.dtype = dtype;
  p.channels_last = last;
  p.alignment = 16;
  return p;
}

TEST_F(CudaRealCudnn, HasPlansForAnH200) {
  const Sizes all[] = {{"stem", 256, 3, 224, 64, 7, 2, 3, 1, 1},          {"3x3", 256, 64, 56, 64, 3, 1, 1, 1, 1},
                       {"1x1", 256, 256, 56, 64, 1, 1, 0, 1, 1},          {"depthwise", 64, 32, 56, 32, 3, 1, 1, 1, 32},
                       {"dilated groups", 32, 64, 28, 64, 3, 1, 2, 2, 4}, {"odd", 2, 3, 9, 5, 3, 1, 1, 1, 1}};
  std::string why;
  for (const Sizes& sizes : all) {
    for (const ConvPart part : {ConvPart::kOutput, ConvPart::kInput, ConvPart::kWeight}) {
      for (const int dtype : {HALFSTEP_F16, HALFSTEP_BF16, HALFSTEP_F32, HALFSTEP_F64}) {
        ConvProblem p = problem(sizes, part, dtype, true);
        const auto found = plans(p, &why);
        ASSERT_EQ(found.size(), 1u) << sizes.name << ", part " << static_cast<int>(part) << ", dtype " << dtype << ": "
                                    << why;
        EXPECT_TRUE(engine_fits(p, found[0].engine, found[0].notes));
        EXPECT_LE(found[0].workspace, DnnLimits{}.workspace);
        EXPECT_FALSE(found[0].compiles);
      }
    }
  }
}

TEST_F(CudaRealCudnn, AddsABiasToTheSums) {
  std::string why;
  for (const bool last : {false, true}) {
    for (const int dtype : {HALFSTEP_F16, HALFSTEP_BF16, HALFSTEP_F32}) {
      ConvProblem p = problem({"3x3", 256, 64, 56, 64, 3, 1, 1, 1, 1}, ConvPart::kOutput, dtype, last);
      p.epilogue = ConvEpilogue::kBias;
      EXPECT_EQ(plans(p, &why).size(), 1u) << dtype << ": " << why;
    }
  }
}

TEST_F(CudaRealCudnn, TakesMatrixUnitsForSixteenBitsAndWhereTf32IsAllowed) {
  const Sizes sizes = {"3x3", 256, 64, 56, 64, 3, 1, 1, 1, 1};
  const std::vector<cudnnBackendNumericalNote_t> matrix_units = {CUDNN_NUMERICAL_NOTE_TENSOR_CORE};
  std::string why;
  for (const ConvPart part : {ConvPart::kOutput, ConvPart::kInput, ConvPart::kWeight}) {
    for (const int dtype : {HALFSTEP_F16, HALFSTEP_BF16, HALFSTEP_F32}) {
      ConvProblem p = problem(sizes, part, dtype, true);
      p.tf32 = dtype == HALFSTEP_F32;
      const auto found = plans(p, &why);
      ASSERT_EQ(found.size(), 1u) << why;
      EXPECT_EQ(found[0].notes, matrix_units) << "part " << static_cast<int>(part) << ", dtype " << dtype;
    }
  }
}

TEST_F(CudaRealCudnn, SaysWhyThereIsNoPlan) {
  std::string why;
  ConvProblem p = problem({"3x3", 2, 16, 8, 16, 3, 1, 1, 1, 1}, ConvPart::kOutput, HALFSTEP_F32, true);
  p.y[3] = 7;
  EXPECT_TRUE(plans(p, &why).empty());
  EXPECT_NE(why.find("operation: CUDNN_STATUS_BAD_PARAM"), std::string::npos) << why;
}

}  // namespace
}  // namespace hscuda
