// SPDX-License-Identifier: Apache-2.0
// mm, bmm and linear: by cuBLASLt, and by a kernel of our own for integers and whatever cuBLASLt doesn't take.
#include "device/launch.cuh"
#include "device/number.cuh"
#include "host/settings.h"
#include "kernels/copy.h"
#include "kernels/matmul.h"
#include "libraries/blas.h"

namespace hscuda {
namespace {

constexpr int kTile = 64;   // rows and columns of c that a block makes
constexpr int kDepth = 16;  // how much of the inner dimension it has at a time
constexpr int kEach = 4;    // rows and columns of c that a thread makes

/// What a product adds up in: integers in 64 bits, which wrap around to what any smaller size would have.
template <class T>
using Sums = std::conditional_t<std::is_same_v<T, double>, double,
                                std::conditional_t<std::is_floating_point_v<Compute<T>>, float, uint64_t>>;

/// Calls f(zero) with the dtype, one of those that are floats (or that are integers) as what sums are made of is.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class A, class F>
__device__ __forceinline__ void with_number(int dtype, F&& f) {
  with_type(dtype, [&](auto zero) {
    if constexpr (std::is_floating_point_v<Compute<decltype(zero)>> == std::is_floating_point_v<A>) f(zero);
  });
}
template <class A>
__device__ __forceinline__ A load_number(const void* data, int dtype, int64_t at) {
  A value = 0;
  with_number<A>(dtype,
                 [&](auto zero) { value = static_cast<A>(value_of(static_cast<const decltype(zero)*>(data)[at])); });
  return value;
}

template <class A>
__device__ __forceinline__ A multiply_add(A x, A y, A sum) {
  if constexpr (std::is_floating_point_v<A>) {
    return fma(x, y, sum);
  } else {
    return x * y + sum;
  }
}

// Tiles of c in shared memory, for any strides. The products of one depth are added by themselves first, so that the
// error of a long sum grows with the number of depths, not of products.
template <class T>
__global__ void __launch_bounds__(kThreads) multiply_tiles(Product p, int64_t tiles_down, int64_t tiles) {
  using A = Sums<T>;
  static_assert(kTile / kEach * (kTile / kEach) == kThreads);
  auto* const left = dynamic_shared<A[kTile + 1]>();
  auto* const right = left + kDepth;
  const int thread = static_cast<int>(threadIdx.x);
  const int across = thread % (kTile / kEach), down = thread / (kTile / kEach);
  // Neighbouring threads load what lies next to each other, whichever way the matrix lies.
  const bool left_turned = p.a.row < p.a.column, right_turned = p.b.row < p.b.column;
  for (int64_t tile = blockIdx.x; tile < tiles * p.batch; tile += gridDim.x) {
    const int64_t item = tile / tiles, inside = tile % tiles;
    const int64_t row0 = inside % tiles_down * kTile, column0 = inside / tiles_down * kTile;
    const T* const a = static_cast<const T*>(p.a.data) + item * p.a.batch;
    const T* const b = static_cast<const T*>(p.b.data) + item * p.b.batch;
    A sums[kEach][kEach] = {};
    for (int64_t k0 = 0; k0 < p.k; k0 += kDepth) {
      for (int i = thread; i < kTile * kDepth; i += kThreads) {
        const int line = left_turned ? i % kTile : i / kDepth, deep = left_turned ? i / kTile : i % kDepth;
        const int64_t row = row0 + line, k = k0 + deep;
        left[deep][line] = row < p.m && k < p.k ? static_cast<A>(value_of(a[row * p.a.row + k * p.a.column])) : A(0);
      }
      for (int i = thread; i < kTile * kDepth; i += kThreads) {
        const int line = right_turned ? i / kDepth : i % kTile, deep = right_turned ? i % kDepth : i / kTile;
        const int64_t column = column0 + line, k = k0 + deep;
        right[deep][line] =
            column < p.n && k < p.k ? static_cast<A>(value_of(b[k * p.b.row + column * p.b.column])) : A(0);
      }
      __syncthreads();
      A part[kEach][kEach] = {};
#pragma unroll
      for (int deep = 0; deep < kDepth; ++deep) {
        A x[kEach], y[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          x[i] = left[deep][down + i * (kTile / kEach)];
          y[i] = right[deep][across + i * (kTile / kEach)];
        }
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
#pragma unroll
          for (int j = 0; j < kEach; ++j) part[i][j] = multiply_add(x[i], y[j], part[i][j]);
        }
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) sums[i][j] += part[i][j];
      }
      __syncthreads();
    }
    // Unrolled, with the question of the dtype outside: sums that a variable picks would lie in memory all along.
    const int64_t row = row0 + down, column = column0 + across;
    if (p.bias != nullptr) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int64_t k = column + j * (kTile / kEach);
        const A offset = k < p.n ? load_number<A>(p.bias, p.bias_dtype, k * p.bias_stride) : A(0);
#pragma unroll
        for (int i = 0; i < kEach; ++i) sums[i][j] += offset;
      }
    }
    with_number<A>(p.out_dtype, [&](auto zero) {
      using Out = decltype(zero);
      Out* const c = static_cast<Out*>(p.c.data) + item * p.c.batch + row * p.c.row + column * p.c.column;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          constexpr int kStep = kTile / kEach;
          if (row + i * kStep >= p.m || column + j * kStep >= p.n) continue;
          Out& to = c[i * kStep * p.c.row + j * kStep * p.c.column];
          A value = sums[i][j];
          if (p.accumulate) value += static_cast<A>(value_of(to));
          using Signed = std::conditional_t<std::is_same_v<A, uint64_t>, int64_t, A>;
          to = convert<Out>(static_cast<Signed>(value));
        }
      }
    });
  }
}

/// HALFSTEP_CUBLASLT=0: all products by the kernel above, for tools that can't follow the library's.
bool library_wanted() {
  static const bool wanted = switch_setting("HALFSTEP_CUBLASLT", true);
  return wanted;
}

void multiply_ourselves(const Call& call, const Product& p) {
  const int64_t down = divide_up(p.m, kTile), tiles = down * divide_up(p.n, kTile);
  with_numeric(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Launch how{.grid = grid_size(tiles * p.batch, 1), .shared = 2 * kDepth * (kTile + 1) * sizeof(Sums<T>)};
    launch(call, how, multiply_tiles<T>, p, down, tiles);
  });
}

/// A workspace's address as cuBLASLt's kernels like it.
void* aligned_up(void* data) {
  return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(data) + 255) & ~uintptr_t{255});
}

/// Row-major copies of matrices (of one, where all are the same).
void copy_matrices(const Call& call, void* to, const Matrices& from, int dtype, int64_t batch, int64_t rows,
                   int64_t columns) {
  if (from.batch == 0) batch = 1;
  const View source(from.data, dtype, {batch, rows, columns}, {from.batch, from.row, from.column});
  const View result(to, dtype, {batch, rows, columns}, {rows * columns, columns, 1});
  copy_view(call, result, source);
}

/// Makes an operand and the bias fit cuBLASLt by copies, where sizes and dtypes do. False: no memory.
class Fitted {
 public:
  Fitted(const Call& call, Product& product) : call_(call), p_(product) {}

  bool reserve() {
    if (!dtypes_fit(p_.dtype, p_.out_dtype) || !sizes_fit(p_)) return true;
    const std::size_t item = static_cast<std::size_t>(float_size(p_.dtype));
    if (!side_of(p_.m, p_.k, p_.a.row, p_.a.column).fits) {
      a_ = take((p_.a.batch == 0 ? 1 : p_.batch) * p_.m * p_.k, item);
    }
    if (!side_of(p_.k, p_.n, p_.b.row, p_.b.column).fits) {
      b_ = take((p_.b.batch == 0 ? 1 : p_.batch) * p_.k * p_.n, item);
    }
    // The bias is of the result's dtype in cuBLASLt.
    if (!bias_fits(p_)) bias_ = take(p_.n, static_cast<std::size_t>(float_size(p_.out_dtype)));
    return fine_;
  }
  /// Says in the product where the copies will be; nothing is enqueued yet.
  void place() {
    a_from_ = p_.a, b_from_ = p_.b;
    if (a_) p_.a = {a_, p_.k, 1, p_.a.batch == 0 ? 0 : p_.m * p_.k};
    if (b_) p_.b = {b_, p_.n, 1, p_.b.batch == 0 ? 0 : p_.k * p_.n};
    bias_from_ = p_.bias, bias_dtype_ = p_.bias_dtype, bias_stride_ = p_.bias_stride;
    if (bias_) p_.bias = bias_, p_.bias_dtype = p_.out_dtype, p_.bias_stride = 1;
  }
  void copy() const {
    if (a_) copy_matrices(call_, a_, a_from_, p_.dtype, p_.batch, p_.m, p_.k);
    if (b_) copy_matrices(call_, b_, b_from_, p_.dtype, p_.batch, p_.k, p_.n);
    if (bias_) {
      copy_view(call_, View(bias_, p_.out_dtype, {p_.n}, {1}), View(bias_from_, bias_dtype_, {p_.n}, {bias_stride_}));
    }
  }

 private:
  void* take(int64_t count, std::size_t item) {
    void* const data = call_.workspace<char>(count * static_cast<int64_t>(item));
    fine_ = fine_ && data != nullptr;
    return data;
  }

  const Call& call_;
  Product& p_;
  void *a_ = nullptr, *b_ = nullptr, *bias_ = nullptr;
  Matrices a_from_, b_from_;
  const void* bias_from_ = nullptr;
  int bias_dtype_ = 0;
  int64_t bias_stride_ = 1;
  bool fine_ = true;
};

halfstep_status product(Call& call, bool turn_b) {
  const Tensor &a = call.in[0], &b = call.in[1], &c = call.out[0];
  if (c.numel == 0) return HALFSTEP_OK;
  Product p;
  p.dtype = a.dtype, p.out_dtype = c.dtype;
  p.m = c.sizes[c.ndim - 2], p.n = c.sizes[c.ndim - 1], p.k = a.sizes[a.ndim - 1];
  p.batch = c.ndim > 2 ? c.sizes[0] : 1;
  p.a = matrices_of(a), p.b = matrices_of(b), p.c = matrices_of(c);
  if (turn_b) std::swap(p.b.row, p.b.column);
  if (call.has(2)) {
    p.bias = call.in[2].data, p.bias_dtype = call.in[2].dtype;
    p.bias_stride = call.in[2].sizes[0] == 1 ? 1 : call.in[2].strides[0];
  }
  Fitted fitted(call, p);
  ProductSpace space(call);
  if (!fitted.reserve()) return call.no_memory();
  fitted.place();
  if (!space.reserve(p)) return call.no_memory();
  fitted.copy();
  if (const auto status = multiply(call, p, space)) return status;
  return call.launched();
}

halfstep_status mm(Call& call) { return product(call, false); }
halfstep_status linear(Call& call) { return product(call, true); }

constexpr KernelDef kKernels[] = {
    {.op = "linear", .dtypes = kNumeric, .layouts = kStrided, .attributes = false, .run = linear},
    {.op = "mm", .dtypes = kNumeric, .layouts = kStrided, .attributes = false, .run = mm},
    {.op = "bmm", .dtypes = kNumeric, .layouts = kStrided, .attributes = false, .run = mm},
};

}  // namespace

bool ProductSpace::grow(std::size_t bytes) {
  if (bytes <= bytes_) return true;
  void* const data = call_.workspace<char>(static_cast<int64_t>(bytes) + 255);
  if (data == nullptr) return false;
  data_ = aligned_up(data), bytes_ = bytes;
  return true;
}
bool ProductSpace::reserve_any() { return grow(kMostBlasWorkspace); }
bool ProductSpace::reserve(const Product& product) {
  reserved_ = nullptr;
  if (!library_wanted() || !dtypes_fit(product.dtype, product.out_dtype) || product.k == 0) return true;
  Blas* const blas = call_.device().blas();
  if (blas == nullptr) return true;  // multiply() says so
  reserved_ = &product;
  plan_ = blas->plan(product, tf32_allowed());
  return plan_ == nullptr || grow(plan_->workspace());
}

halfstep_status multiply(const Call& call, const Product& p, ProductSpace& space) {
  if (p.m == 0 || p.n == 0 || p.batch == 0) return HALFSTEP_OK;
  if (library_wanted() && dtypes_fit(p.dtype, p.out_dtype) && p.k > 0) {
    Blas* const blas = call.device().blas();
    if (blas == nullptr) return HALFSTEP_FAILED;
    const auto plan = space.reserved_ == &p ? space.plan_ : blas->plan(p, tf32_allowed());
    if (plan && plan->usable() && space.bytes_ >= plan->workspace()) {
      const auto status = blas->run(*plan, p, space.data_, call.stream(), call.number());
      if (status != HALFSTEP_UNSUPPORTED) return status;
    }
  }
  multiply_ourselves(call, p);
  return HALFSTEP_OK;
}

std::span<const KernelDef> matmul_kernels() { return kKernels; }

}  // namespace hscuda
