// SPDX-License-Identifier: Apache-2.0
// cuBLASLt's products, term by term, for what the plug-in asks of it. What cuBLASLt refuses is refused here: dtypes,
// leading dimensions, addresses that are aligned worse than was said when the algorithm was chosen.
#include <cublasLt.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#include "functions.h"
#include "halfstep/backends/cuda/device/number.cuh"
#include "launch.h"

struct cublasLtContext {
  int device = 0;
};
struct cublasLtMatrixLayout {
  cudaDataType_t type;
  uint64_t rows, columns;
  int64_t ld;
  int32_t batch = 1;
  int64_t stride = 0;
};
struct cublasLtMatmulDesc {
  cublasComputeType_t compute;
  cudaDataType_t scale;
  int32_t turn_a = CUBLAS_OP_N, turn_b = CUBLAS_OP_N;
  uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
  int32_t bias_type = -1;
};
struct cublasLtMatmulPreference {
  uint64_t workspace = 0;
  uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_MASK;
  uint32_t alignments[4] = {256, 256, 256, 256};  // a, b, c, d
};

namespace {

using hscuda::BFloat16;
using hscuda::convert;
using hscuda::Half;
using hscuda::value_of;

// Enough for the checks to see that somebody passes on what the heuristics ask for.
constexpr std::size_t kWorkspace = 1024;

struct Algorithm {
  uint64_t mark;
  uint64_t alignments[4];
  uint64_t m, n, k;
};
static_assert(sizeof(Algorithm) == sizeof(cublasLtMatmulAlgo_t));
constexpr uint64_t kMark = 0x68616c6673746570;

template <class T>
cublasStatus_t set(T& field, const void* value, std::size_t size) {
  if (value == nullptr || size != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&field, value, size);
  return CUBLAS_STATUS_SUCCESS;
}

/// The table of cublasLtMatmul(), as far as the plug-in uses it.
bool dtypes_fit(const cublasLtMatmulDesc& o, cudaDataType_t a, cudaDataType_t b, cudaDataType_t c) {
  if (a != b) return false;
  switch (o.compute) {
    case CUBLAS_COMPUTE_32F:
      if (o.scale != CUDA_R_32F) return false;
      if (a == CUDA_R_32F) return c == CUDA_R_32F;
      return (a == CUDA_R_16F || a == CUDA_R_16BF) && (c == a || c == CUDA_R_32F);
    case CUBLAS_COMPUTE_32F_FAST_TF32:
      return o.scale == CUDA_R_32F && a == CUDA_R_32F && c == CUDA_R_32F;
    case CUBLAS_COMPUTE_64F:
      return o.scale == CUDA_R_64F && a == CUDA_R_64F && c == CUDA_R_64F;
    default:
      return false;
  }
}

cublasStatus_t check(const cublasLtMatmulDesc& o, const cublasLtMatrixLayout& a, const cublasLtMatrixLayout& b,
                     const cublasLtMatrixLayout& c, const cublasLtMatrixLayout& d) {
  constexpr uint64_t kMost = std::numeric_limits<int32_t>::max();
  for (const auto* layout : {&a, &b, &c, &d}) {
    if (layout->rows == 0 || layout->columns == 0 || layout->batch < 1) return CUBLAS_STATUS_INVALID_VALUE;
    if (layout->ld < static_cast<int64_t>(layout->rows)) return CUBLAS_STATUS_INVALID_VALUE;
    if (layout->rows > kMost || layout->columns > kMost) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (layout->batch != d.batch) return CUBLAS_STATUS_INVALID_VALUE;
  }
  if (!dtypes_fit(o, a.type, b.type, c.type) || c.type != d.type) return CUBLAS_STATUS_NOT_SUPPORTED;
  const uint64_t k = o.turn_a ? a.rows : a.columns;
  if ((o.turn_a ? a.columns : a.rows) != d.rows || (o.turn_b ? b.columns : b.rows) != k ||
      (o.turn_b ? b.rows : b.columns) != d.columns || c.rows != d.rows || c.columns != d.columns) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  if (o.epilogue != CUBLASLT_EPILOGUE_DEFAULT) {
    if (o.epilogue != CUBLASLT_EPILOGUE_BIAS) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (o.bias == nullptr || reinterpret_cast<uintptr_t>(o.bias) % 16 != 0) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (o.bias_type != -1 && o.bias_type != d.type) return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  return CUBLAS_STATUS_SUCCESS;
}

template <class S>
struct Factors {
  S alpha, beta;
};

float to_tf32(float x) {
  if (!std::isfinite(x)) return x;
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits = (bits + 0xfff + (bits >> 13 & 1)) & ~uint32_t{0x1fff};
  std::memcpy(&x, &bits, sizeof bits);
  return x;
}

// S: what is summed up, T: the factors, D: the result.
template <class S, class T, class D>
void multiply(cublasLtMatmulDesc o, cublasLtMatrixLayout a_layout, cublasLtMatrixLayout b_layout,
              cublasLtMatrixLayout d_layout, int64_t c_ld, int64_t c_stride, Factors<S> factors, const T* a, const T* b,
              const D* c, D* d) {
  const auto m = static_cast<int64_t>(d_layout.rows), n = static_cast<int64_t>(d_layout.columns);
  const auto k = static_cast<int64_t>(o.turn_a ? a_layout.rows : a_layout.columns);
  const bool tf32 = o.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
  const auto number = [tf32](T x) -> S {
    const S value = value_of(x);
    if constexpr (std::is_same_v<S, float>) return tf32 ? to_tf32(value) : value;
    return value;
  };
  // Factors as numbers, so that 16 bits are unpacked once. In blocks of rows and columns that fit the first cache.
  constexpr int64_t kRows = 256, kColumns = 8;
  // The sums of a part are added up by themselves, as a kernel adds up tiles: one long chain of sums would be further
  // off than any kernel's.
  constexpr int64_t kPart = 64;
  std::vector<S> left(static_cast<std::size_t>(m * k)), right(static_cast<std::size_t>(kColumns * k));
  S sums[kColumns][kRows], part[kColumns][kRows];
  for (int64_t item = 0; item < d_layout.batch; ++item) {
    const T* const ai = a + item * a_layout.stride;
    const T* const bi = b + item * b_layout.stride;
    if (item == 0 || a_layout.stride != 0) {
      for (int64_t p = 0; p < k; ++p) {
        for (int64_t i = 0; i < m; ++i) {
          left[static_cast<std::size_t>(p * m + i)] = number(ai[o.turn_a ? p + i * a_layout.ld : i + p * a_layout.ld]);
        }
      }
    }
    for (int64_t j0 = 0; j0 < n; j0 += kColumns) {
      const int64_t columns = std::min(kColumns, n - j0);
      for (int64_t jj = 0; jj < columns; ++jj) {
        const int64_t j = j0 + jj;
        for (int64_t p = 0; p < k; ++p) {
          right[static_cast<std::size_t>(jj * k + p)] =
              number(bi[o.turn_b ? j + p * b_layout.ld : p + j * b_layout.ld]);
        }
      }
      for (int64_t i0 = 0; i0 < m; i0 += kRows) {
        const int64_t rows = std::min(kRows, m - i0);
        for (auto& column : sums) std::fill(column, column + rows, S(0));
        for (int64_t first = 0; first < k; first += kPart) {
          for (auto& column : part) std::fill(column, column + rows, S(0));
          for (int64_t p = first; p < std::min(k, first + kPart); ++p) {
            const S* const factors_of_rows = left.data() + p * m + i0;
            for (int64_t jj = 0; jj < columns; ++jj) {
              const S factor = right[static_cast<std::size_t>(jj * k + p)];
              S* const to = part[jj];
              for (int64_t i = 0; i < rows; ++i) to[i] += factors_of_rows[i] * factor;
            }
          }
          for (int64_t jj = 0; jj < columns; ++jj) {
            for (int64_t i = 0; i < rows; ++i) sums[jj][i] += part[jj][i];
          }
        }
        for (int64_t jj = 0; jj < columns; ++jj) {
          for (int64_t ii = 0; ii < rows; ++ii) {
            const int64_t i = i0 + ii, j = j0 + jj;
            S value = factors.alpha * sums[jj][ii];
            // What c holds is not read where beta is 0.
            if (factors.beta != S(0)) value += factors.beta * value_of(c[item * c_stride + i + j * c_ld]);
            if (o.epilogue == CUBLASLT_EPILOGUE_BIAS) value += value_of(static_cast<const D*>(o.bias)[i]);
            d[item * d_layout.stride + i + j * d_layout.ld] = convert<D>(value);
          }
        }
      }
    }
  }
}

bool aligned(const void* data, uint64_t bytes) { return reinterpret_cast<uintptr_t>(data) % bytes == 0; }

}  // namespace

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = new cublasLtContext;
  return cudaGetDevice(&(*handle)->device) == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_INITIALIZED;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}
const char* cublasLtGetStatusString(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "success";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "an unsupported value or parameter was passed to the function";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "the functionality requested is not supported";
    default:
      return "an internal operation failed";
  }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType_t type, uint64_t rows,
                                          uint64_t columns, int64_t ld) {
  *layout = new cublasLtMatrixLayout{type, rows, columns, ld};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void* value,
                                                size_t size) {
  switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
      return set(layout->batch, value, size);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
      return set(layout->stride, value, size);
  }
  return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* operation, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  *operation = new cublasLtMatmulDesc{compute, scale};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t operation) {
  delete operation;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t size) {
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return set(operation->turn_a, value, size);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return set(operation->turn_b, value, size);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return set(operation->epilogue, value, size);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return set(operation->bias, value, size);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
      return set(operation->bias_type, value, size);
  }
  return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = new cublasLtMatmulPreference;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    size_t size) {
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      return set(preference->workspace, value, size);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
      return set(preference->schemes, value, size);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
      return set(preference->alignments[attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value, size);
  }
  return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int most,
                                              cublasLtMatmulHeuristicResult_t* results, int* count) {
  *count = 0;
  if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (most < 1) return CUBLAS_STATUS_INVALID_VALUE;
  if (const auto status = check(*operation, *a, *b, *c, *d)) return status;
  if (preference->workspace < kWorkspace) return CUBLAS_STATUS_NOT_SUPPORTED;
  // For runs of the tests in which the plug-in's own kernel has to do everything.
  if (std::getenv("HALFSTEP_CUDA_EMULATED_WITHOUT_CUBLASLT") != nullptr) return CUBLAS_STATUS_NOT_SUPPORTED;
  const Algorithm algorithm = {
      kMark,
      {preference->alignments[0], preference->alignments[1], preference->alignments[2], preference->alignments[3]},
      d->rows,
      d->columns,
      operation->turn_a ? a->rows : a->columns};
  results[0] = {};
  std::memcpy(&results[0].algo, &algorithm, sizeof algorithm);
  results[0].workspaceSize = kWorkspace;
  results[0].state = CUBLAS_STATUS_SUCCESS;
  *count = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
                              const void* beta, const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* chosen, void* workspace,
                              size_t workspace_size, cudaStream_t stream) {
  if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (const auto status = check(*operation, *a_layout, *b_layout, *c_layout, *d_layout)) return status;
  Algorithm algorithm;
  std::memcpy(&algorithm, chosen, sizeof algorithm);
  if (algorithm.mark != kMark || algorithm.m != d_layout->rows || algorithm.n != d_layout->columns ||
      algorithm.k != (operation->turn_a ? a_layout->rows : a_layout->columns)) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  if (workspace == nullptr || workspace_size < kWorkspace || !aligned(workspace, 16)) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  const void* const all[] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) {
    if (all[i] == nullptr || !aligned(all[i], algorithm.alignments[i])) return CUBLAS_STATUS_INVALID_VALUE;
  }
  // As a kernel writes it, on the stream.
  hscuda::emulator::launch(
      stream, 1, 1, 0, true, +[](char* space) { std::memset(space, 0xa5, kWorkspace); }, static_cast<char*>(workspace));
  const auto go = [&](auto sum, auto factor, auto result) {
    using S = decltype(sum);
    using T = decltype(factor);
    using D = decltype(result);
    const Factors<S> factors = {*static_cast<const S*>(alpha), *static_cast<const S*>(beta)};
    hscuda::emulator::launch(stream, 1, 1, 0, true, multiply<S, T, D>, *operation, *a_layout, *b_layout, *d_layout,
                             c_layout->ld, c_layout->stride, factors, static_cast<const T*>(a),
                             static_cast<const T*>(b), static_cast<const D*>(c), static_cast<D*>(d));
  };
  const bool wide = d_layout->type == CUDA_R_32F;
  if (a_layout->type == CUDA_R_64F) {
    go(double{}, double{}, double{});
  } else if (a_layout->type == CUDA_R_32F) {
    go(float{}, float{}, float{});
  } else if (a_layout->type == CUDA_R_16F) {
    wide ? go(float{}, Half{}, float{}) : go(float{}, Half{}, Half{});
  } else {
    wide ? go(float{}, BFloat16{}, float{}) : go(float{}, BFloat16{}, BFloat16{});
  }
  return CUBLAS_STATUS_SUCCESS;
}

namespace {

using hscuda::emulator::Function;
const Function functions[] = {
    {"cublasLtCreate", cublasLtCreate},
    {"cublasLtDestroy", cublasLtDestroy},
    {"cublasLtGetStatusString", cublasLtGetStatusString},
    {"cublasLtMatmul", cublasLtMatmul},
    {"cublasLtMatmulAlgoGetHeuristic", cublasLtMatmulAlgoGetHeuristic},
    {"cublasLtMatrixLayoutCreate", cublasLtMatrixLayoutCreate},
    {"cublasLtMatrixLayoutDestroy", cublasLtMatrixLayoutDestroy},
    {"cublasLtMatrixLayoutSetAttribute", cublasLtMatrixLayoutSetAttribute},
    {"cublasLtMatmulDescCreate", cublasLtMatmulDescCreate},
    {"cublasLtMatmulDescDestroy", cublasLtMatmulDescDestroy},
    {"cublasLtMatmulDescSetAttribute", cublasLtMatmulDescSetAttribute},
    {"cublasLtMatmulPreferenceCreate", cublasLtMatmulPreferenceCreate},
    {"cublasLtMatmulPreferenceDestroy", cublasLtMatmulPreferenceDestroy},
    {"cublasLtMatmulPreferenceSetAttribute", cublasLtMatmulPreferenceSetAttribute},
};

}  // namespace
