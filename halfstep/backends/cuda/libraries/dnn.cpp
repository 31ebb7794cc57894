// SPDX-License-Identifier: Apache-2.0
#include "libraries/dnn.h"

#include <cstdio>
#include <utility>

#include "host/kernel.h"
#include "host/settings.h"

namespace hscuda {
namespace {

constexpr std::size_t kMostPlans = 4096;

}  // namespace

std::unique_ptr<Dnn> Dnn::open(std::string* why) {
  const DnnFunctions* const dnn = DnnFunctions::open(why);
  if (dnn == nullptr) return nullptr;
  cudnnHandle_t handle = nullptr;
  if (const auto status = dnn->create(&handle)) {
    *why = std::string("cudnnCreate: ") + dnn->error_string(status);
    return nullptr;
  }
  return std::unique_ptr<Dnn>(new Dnn(*dnn, handle));
}

Dnn::Dnn(const DnnFunctions& dnn, cudnnHandle_t handle)
    : dnn_(dnn), handle_(handle), compile_(switch_setting("HALFSTEP_CUDNN_COMPILE", false)) {}

Dnn::~Dnn() {
  plans_.clear();
  dnn_.destroy(handle_);
}

std::shared_ptr<const DnnPlan> Dnn::plan(const ConvProblem& problem) {
  const std::lock_guard lock(mutex_);
  if (const auto found = plans_.find(problem); found != plans_.end()) return found->second;
  std::string why;
  auto plans = make_plans(dnn_, {.handle = handle_}, problem, {.compile = compile_}, &why);
  // Images of ever other sizes would fill the memory: what is in use stays until it has been used.
  if (plans_.size() >= kMostPlans) plans_.clear();
  return plans_[problem] = plans.empty() ? nullptr : std::make_shared<const DnnPlan>(std::move(plans.front()));
}

halfstep_status Dnn::run(const Call& call, const DnnPlan& plan, const void* x, const void* w, const void* y,
                         const void* bias, void* workspace) {
  constexpr int64_t kIds[] = {kDnnX, kDnnW, kDnnY, kDnnBias};
  const void* const data[] = {x, w, y, bias};
  const int64_t count = bias != nullptr ? 4 : 3;
  DnnDescriptor pack(dnn_, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, kIds, count);
  pack.set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, data, count);
  pack.set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, &workspace);
  pack.finalize();
  cudnnStatus_t status = pack.status();
  if (status == CUDNN_STATUS_SUCCESS) {
    // The handle's stream belongs to whoever executes.
    const std::lock_guard lock(mutex_);
    status = dnn_.set_stream(handle_, call.stream());
    if (status == CUDNN_STATUS_SUCCESS) status = dnn_.execute(handle_, plan.get(), pack.get());
  }
  if (status == CUDNN_STATUS_SUCCESS) return HALFSTEP_OK;
  char said[160] = {}, text[256];
  dnn_.last_error(said, sizeof said);
  std::snprintf(text, sizeof text, "cuDNN: %s%s%s", dnn_.error_string(status), said[0] ? ": " : "", said);
  return call.fail(HALFSTEP_FAILED, text);
}

Dnn* Device::dnn() {
  const std::lock_guard lock(mutex_);
  if (dnn_ == nullptr && !dnn_tried_) {
    dnn_tried_ = true;
    std::string why;
    if (switch_setting("HALFSTEP_CUDNN", true)) dnn_ = Dnn::open(&why);
    if (!why.empty()) log(HALFSTEP_LOG_WARNING, "cuda: convolutions run in slow kernels of the plug-in's own: " + why);
  }
  return dnn_.get();
}

}  // namespace hscuda
