// SPDX-License-Identifier: Apache-2.0
// The paths of gemm() beneath the choice. Arguments have been checked; batch is 1.
#pragma once

#include <cstddef>
#include <cstdint>

#include "halfstep/backends/cpu/gemm.h"
#include "halfstep/backends/cpu/gemm_kernels.h"

namespace halfstep::cpu {

/// Scratch memory cut from one piece, each part aligned to 64 bytes.
class Carver {
 public:
  /// With null for the memory, the parts are measured only.
  explicit Carver(void* memory) : at_(reinterpret_cast<std::uintptr_t>(memory)) {}
  float* floats(std::int64_t n) { return static_cast<float*>(bytes(static_cast<std::size_t>(n) * sizeof(float))); }
  void* bytes(std::size_t n) {
    void* const p = reinterpret_cast<void*>(at_ + used_);
    used_ += (n + 63) / 64 * 64;
    return p;
  }
  std::size_t used() const { return used_; }

 private:
  std::uintptr_t at_;
  std::size_t used_ = 0;
};

/// Steps of a sum that the blocked product takes in one go, at most: a packed panel of these fits L1 of 48 KiB.
inline constexpr std::int64_t kGemmMostSteps = 384;

/// What follows the sums `from` (rows `ld` apart) of the result's rows from `row` and columns from `column` on, of a
/// product that is computed as it is or `turned`: rows and columns are those of the sums. `bias` as float32.
GemmEpilogue epilogue(const GemmArgs& args, bool turned, const float* from, std::int64_t ld, std::int64_t row,
                      std::int64_t rows, std::int64_t column, std::int64_t columns, const float* bias);

std::size_t blocked_workspace(const GemmArgs& args, int threads);
void gemm_blocked(const GemmArgs& args, int threads, void* workspace);

std::size_t narrow_workspace(const GemmArgs& args, int threads);
void gemm_narrow(const GemmArgs& args, int threads, void* workspace);

/// On the tiles of AMX, or by their model where this process may not use them. tiles_serve(): operands of bf16 that are
/// contiguous in one dimension; where both are so along the sum, the number of steps and the other stride of one are
/// even.
bool tiles_serve(const GemmArgs& args) noexcept;
/// Whether that is faster than oneDNN's kernels for AMX, by shape alone, of what tiles_serve().
bool tiles_suit(const GemmArgs& args) noexcept;
std::size_t tiles_workspace(const GemmArgs& args, int threads);
void gemm_tiles(const GemmArgs& args, int threads, void* workspace);

/// Products of float32 or float16 on the tiles of AMX, or by their model, of elements that are split into sums of
/// bfloat16. split_serves(): both operands are contiguous in one dimension. The error of a sum of k products is at most
/// (k + 4) 2^-24 of the sum of their magnitudes, which is about the bound of k float32 additions, plus 12 k 2^-126,
/// since intermediate values below 2^-126 count as 0. Float32Precision::high adds 2^-15 of the sum of magnitudes for
/// float32 elements of at least 2^-109.
bool split_serves(const GemmArgs& args) noexcept;
/// Whether that is faster than gemm_blocked() on a processor with AMX, by shape alone.
bool split_suits(const GemmArgs& args) noexcept;
std::size_t split_workspace(const GemmArgs& args, int threads);
void gemm_split(const GemmArgs& args, int threads, void* workspace);

void gemm_reference(const GemmArgs& args);

/// By oneDNN's kernels for 16-bit units, each thread with a product of its own. Unsupported, with nothing written,
/// where there is no kernel.
Status gemm_onednn(KernelContext* context, const GemmArgs& args);

}  // namespace halfstep::cpu
