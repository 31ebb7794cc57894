// SPDX-License-Identifier: Apache-2.0
#include "libraries/blas.h"

#include "host/device.h"
#include "host/errors.h"
#include "libraries/library.h"

namespace hscuda {

// cuBLASLt's functions, found once for the program.
struct BlasFunctions {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtDestroy) destroy;
  decltype(&cublasLtGetStatusString) status_string;
  decltype(&cublasLtMatmul) matmul;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&cublasLtMatrixLayoutCreate) layout_create;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy;
  decltype(&cublasLtMatrixLayoutSetAttribute) layout_set;
  decltype(&cublasLtMatmulDescCreate) operation_create;
  decltype(&cublasLtMatmulDescDestroy) operation_destroy;
  decltype(&cublasLtMatmulDescSetAttribute) operation_set;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;

  bool find(Library& library) {
    return library.find(create, "cublasLtCreate") && library.find(destroy, "cublasLtDestroy") &&
           library.find(status_string, "cublasLtGetStatusString") && library.find(matmul, "cublasLtMatmul") &&
           library.find(heuristic, "cublasLtMatmulAlgoGetHeuristic") &&
           library.find(layout_create, "cublasLtMatrixLayoutCreate") &&
           library.find(layout_destroy, "cublasLtMatrixLayoutDestroy") &&
           library.find(layout_set, "cublasLtMatrixLayoutSetAttribute") &&
           library.find(operation_create, "cublasLtMatmulDescCreate") &&
           library.find(operation_destroy, "cublasLtMatmulDescDestroy") &&
           library.find(operation_set, "cublasLtMatmulDescSetAttribute") &&
           library.find(preference_create, "cublasLtMatmulPreferenceCreate") &&
           library.find(preference_destroy, "cublasLtMatmulPreferenceDestroy") &&
           library.find(preference_set, "cublasLtMatmulPreferenceSetAttribute");
  }
};

namespace {

// Plans for all shapes of many networks fit; who makes ever new shapes starts over instead of filling the memory.
constexpr std::size_t kMostPlans = 8192;
constexpr int kCandidates = 4;

/// Null, and the failure is noted, where the library can't be opened.
const BlasFunctions* blas_functions() {
  struct Opened {
    Library library{"cublasLt", CUBLAS_VER_MAJOR};
    BlasFunctions functions{};
    bool found = functions.find(library);
  };
  static const Opened& opened = *new Opened;
  if (opened.found) return &opened.functions;
  fail(HALFSTEP_FAILED, 0, "no matrix products: %s", opened.library.failure().c_str());
  return nullptr;
}

cudaDataType_t data_type(int dtype) {
  switch (dtype) {
    case HALFSTEP_F64:
      return CUDA_R_64F;
    case HALFSTEP_F16:
      return CUDA_R_16F;
    case HALFSTEP_BF16:
      return CUDA_R_16BF;
    default:
      return CUDA_R_32F;
  }
}

}  // namespace

BlasPlan::~BlasPlan() {
  if (operation_) functions_.operation_destroy(operation_);
  for (const auto layout : {a_, b_, c_}) {
    if (layout) functions_.layout_destroy(layout);
  }
}

std::unique_ptr<Blas> Blas::open() {
  const BlasFunctions* const functions = blas_functions();
  if (functions == nullptr) return nullptr;
  std::unique_ptr<Blas> blas(new Blas(*functions));
  if (const auto status = functions->create(&blas->handle_); status != CUBLAS_STATUS_SUCCESS) {
    fail(HALFSTEP_FAILED, 0, "cublasLtCreate: %s", functions->status_string(status));
    return nullptr;
  }
  return blas;
}

Blas::~Blas() {
  plans_.clear();
  if (handle_) functions_.destroy(handle_);
}

std::shared_ptr<BlasPlan> Blas::plan(const Product& product, bool tf32) {
  const auto key = plan_key(product, tf32);
  if (!key) return nullptr;
  {
    const std::shared_lock lock(mutex_);
    if (const auto found = plans_.find(*key); found != plans_.end()) return found->second;
  }
  // Two threads that ask at once make two: the first stays.
  auto made = make(product, *key);
  const std::unique_lock lock(mutex_);
  if (plans_.size() >= kMostPlans) plans_.clear();
  return plans_.emplace(*key, std::move(made)).first->second;
}

std::shared_ptr<BlasPlan> Blas::make(const Product& product, const PlanKey& key) {
  std::shared_ptr<BlasPlan> plan(new BlasPlan(functions_));
  bool fine = true;
  const auto did = [&](cublasStatus_t status) { fine = fine && status == CUBLAS_STATUS_SUCCESS; };
  const auto type = data_type(key.dtype), out_type = data_type(key.out_dtype);
  plan->wide_ = key.dtype == HALFSTEP_F64;
  plan->accumulate_ = key.accumulate;
  plan->bias_ = key.bias;

  // The type of sums: float32 for float32, f16 and bf16. COMPUTE_32F alone leaves float32 factors as they are.
  const auto compute = plan->wide_ ? CUBLAS_COMPUTE_64F : key.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
  did(functions_.operation_create(&plan->operation_, compute, plan->wide_ ? CUDA_R_64F : CUDA_R_32F));
  if (!fine) return plan;
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    did(functions_.operation_set(plan->operation_, attribute, &value, sizeof value));
  };
  const auto op = [](bool turned) { return static_cast<int32_t>(turned ? CUBLAS_OP_T : CUBLAS_OP_N); };
  set(CUBLASLT_MATMUL_DESC_TRANSA, op(key.b_turned));
  set(CUBLASLT_MATMUL_DESC_TRANSB, op(key.a_turned));
  if (key.bias) {
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<uint32_t>(CUBLASLT_EPILOGUE_BIAS));
    // The heuristics look at its alignment.
    set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, product.bias);
    set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<int32_t>(out_type));
  }

  const auto layout = [&](cublasLtMatrixLayout_t& made, cudaDataType_t dtype, bool turned, int64_t rows,
                          int64_t columns, int64_t ld, int64_t stride) {
    if (turned) std::swap(rows, columns);
    did(functions_.layout_create(&made, dtype, static_cast<uint64_t>(rows), static_cast<uint64_t>(columns), ld));
    if (!fine || key.batch == 1) return;
    const auto count = static_cast<int32_t>(key.batch);
    did(functions_.layout_set(made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
    did(functions_.layout_set(made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride));
  };
  layout(plan->b_, type, key.b_turned, key.n, key.k, key.b_ld, key.b_batch);
  layout(plan->a_, type, key.a_turned, key.k, key.m, key.a_ld, key.a_batch);
  layout(plan->c_, out_type, false, key.n, key.m, key.c_ld, key.c_batch);
  if (!fine) return plan;

  cublasLtMatmulPreference_t preference = nullptr;
  did(functions_.preference_create(&preference));
  if (!fine) return plan;
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    did(functions_.preference_set(preference, attribute, &value, sizeof value));
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(kMostBlasWorkspace));
  // Where the inner dimension is split, the parts' sums may not be rounded to 16 bits before they are added: neither in
  // place (in c) nor in a workspace of the output's type. Without a split nothing of this counts, and where c is of the
  // type of the sums nothing is lost. All schemes add in a fixed order. A bias is added to what has been rounded where
  // the inner dimension is split: a second rounding, so that such products aren't split.
  const bool rounds = !plan->wide_ && key.out_dtype != HALFSTEP_F32;
  const auto schemes = !rounds    ? CUBLASLT_REDUCTION_SCHEME_MASK
                       : key.bias ? CUBLASLT_REDUCTION_SCHEME_NONE
                                  : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<uint32_t>(schemes));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, uint32_t{1} << key.b_align);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, uint32_t{1} << key.a_align);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, uint32_t{1} << key.c_align);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, uint32_t{1} << key.c_align);
  cublasLtMatmulHeuristicResult_t found[kCandidates] = {};
  int count = 0;
  if (fine) {
    did(functions_.heuristic(handle_, plan->operation_, plan->b_, plan->a_, plan->c_, plan->c_, preference, kCandidates,
                             found, &count));
  }
  functions_.preference_destroy(preference);
  for (int i = 0; fine && i < count; ++i) {
    if (found[i].state != CUBLAS_STATUS_SUCCESS) continue;
    plan->algorithm_ = found[i].algo;
    plan->workspace_ = found[i].workspaceSize;
    plan->usable_ = true;
    break;
  }
  return plan;
}

halfstep_status Blas::run(BlasPlan& plan, const Product& product, void* workspace, cudaStream_t stream, uint64_t call) {
  constexpr float kFloats[] = {0, 1};
  constexpr double kDoubles[] = {0, 1};
  const auto factor = [&](int i) { return plan.wide_ ? static_cast<const void*>(&kDoubles[i]) : &kFloats[i]; };
  std::unique_lock lock(plan.mutex_, std::defer_lock);
  if (plan.bias_) {
    lock.lock();
    const auto status = functions_.operation_set(plan.operation_, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &product.bias,
                                                 sizeof product.bias);
    if (status != CUBLAS_STATUS_SUCCESS) {
      return fail(HALFSTEP_FAILED, call, "cublasLtMatmulDescSetAttribute: %s", functions_.status_string(status));
    }
  }
  const auto status = functions_.matmul(handle_, plan.operation_, factor(1), product.b.data, plan.b_, product.a.data,
                                        plan.a_, factor(plan.accumulate_), product.c.data, plan.c_, product.c.data,
                                        plan.c_, &plan.algorithm_, workspace, plan.workspace_, stream);
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return HALFSTEP_OK;
    case CUBLAS_STATUS_INVALID_VALUE:
    case CUBLAS_STATUS_NOT_SUPPORTED:
    case CUBLAS_STATUS_ARCH_MISMATCH:
      plan.usable_ = false;
      return HALFSTEP_UNSUPPORTED;
    default:
      return fail(HALFSTEP_FAILED, call, "cublasLtMatmul: %s", functions_.status_string(status));
  }
}

Blas* Device::blas() {
  if (Blas* const opened = opened_blas_.load(std::memory_order_acquire)) return opened;
  if (use() != HALFSTEP_OK) return nullptr;  // takes the lock itself
  const std::lock_guard lock(mutex_);
  if (blas_ == nullptr) {
    blas_ = Blas::open();
    opened_blas_.store(blas_.get(), std::memory_order_release);
  }
  return blas_.get();
}

}  // namespace hscuda
