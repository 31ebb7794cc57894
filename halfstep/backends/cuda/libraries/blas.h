// SPDX-License-Identifier: Apache-2.0
// Matrix products by cuBLASLt, with a plan for each kind of product that comes.
#pragma once

#include <cublasLt.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "halfstep/runtime/plugin.h"
#include "libraries/product.h"

namespace hscuda {

inline constexpr std::size_t kMostBlasWorkspace = std::size_t{32} << 20;

struct BlasFunctions;

/// How cuBLASLt does one kind of product: its descriptors and the algorithm that its heuristics chose.
class BlasPlan {
 public:
  ~BlasPlan();
  BlasPlan(const BlasPlan&) = delete;
  BlasPlan& operator=(const BlasPlan&) = delete;

  /// False where cuBLASLt can't: our own kernel does it.
  bool usable() const { return usable_.load(std::memory_order_relaxed); }
  /// Bytes that a run needs.
  std::size_t workspace() const { return workspace_; }

 private:
  friend class Blas;
  explicit BlasPlan(const BlasFunctions& functions) : functions_(functions) {}

  const BlasFunctions& functions_;
  std::atomic<bool> usable_{false};
  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, c_ = nullptr;
  cublasLtMatmulAlgo_t algorithm_ = {};
  std::size_t workspace_ = 0;
  bool accumulate_ = false, wide_ = false, bias_ = false;
  std::mutex mutex_;  ///< the address of the bias is in the descriptor
};

/// A GPU's handle of cuBLASLt and its plans. Any thread may call.
class Blas {
 public:
  /// For the thread's current device; null when the library can't be opened (the failure is noted).
  static std::unique_ptr<Blas> open();
  ~Blas();

  /// The plan for a product; made when it is first asked for. Null, or not usable, where cuBLASLt can't.
  std::shared_ptr<BlasPlan> plan(const Product& product, bool tf32);
  /// Enqueues the product of a usable plan. HALFSTEP_UNSUPPORTED where cuBLASLt refuses after all: nothing is enqueued,
  /// and the plan is no longer usable.
  halfstep_status run(BlasPlan& plan, const Product& product, void* workspace, cudaStream_t stream, uint64_t call);

 private:
  explicit Blas(const BlasFunctions& functions) : functions_(functions) {}
  std::shared_ptr<BlasPlan> make(const Product& product, const PlanKey& key);

  const BlasFunctions& functions_;
  cublasLtHandle_t handle_ = nullptr;
  std::shared_mutex mutex_;
  std::unordered_map<PlanKey, std::shared_ptr<BlasPlan>, PlanKeyHash> plans_;
};

}  // namespace hscuda
