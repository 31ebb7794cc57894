// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/onednn.h"

#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>

#include <dnnl.hpp>
#ifndef HALFSTEP_STD_THREADS
#include <omp.h>
#endif

#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

using Memory = dnnl::memory;

dnnl::cpu_isa cap_of(Isa isa) {
  switch (isa) {
    case Isa::avx2:
      return dnnl::cpu_isa::avx2;
    case Isa::avx512:
      return dnnl::cpu_isa::avx512_core;
    case Isa::avx512_vnni:
      return dnnl::cpu_isa::avx512_core_vnni;
    case Isa::avx512_bf16:
      return dnnl::cpu_isa::avx512_core_bf16;
    case Isa::avx512_fp16:
      return dnnl::cpu_isa::avx512_core_fp16;
    case Isa::amx:
      break;
  }
  return dnnl::cpu_isa::isa_default;
}

/// Before every use: oneDNN works with the threads of parallel_for, and never above the cap of HALFSTEP_ISA.
void prepare() {
  // The cap takes effect only before oneDNN's first use.
  static const bool capped = [] {
    return compute_isa() != detected_isa() && dnnl::set_max_cpu_isa(cap_of(compute_isa())) == dnnl::status::success;
  }();
  (void)capped;
#ifndef HALFSTEP_STD_THREADS
  if (omp_get_max_threads() != num_threads()) omp_set_num_threads(num_threads());
#endif
}

struct Engine {
  Engine() : engine(dnnl::engine::kind::cpu, 0), stream(engine) {}
  dnnl::engine engine;
  dnnl::stream stream;
};

Engine& engine() {
  // A stream belongs to one thread at a time.
  static thread_local Engine e;
  return e;
}

std::optional<Memory::data_type> type_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return Memory::data_type::f32;
    case DType::bf16:
      return Memory::data_type::bf16;
    case DType::f16:
      return Memory::data_type::f16;
    default:
      return std::nullopt;
  }
}

/// What a primitive depends on.
using Key = std::array<std::int64_t, 15>;
struct HashKey {
  std::size_t operator()(const Key& key) const noexcept {
    std::uint64_t hash = 0xcbf29ce484222325u;
    for (const std::int64_t v : key) hash = (hash ^ static_cast<std::uint64_t>(v)) * 0x100000001b3u;
    return static_cast<std::size_t>(hash ^ (hash >> 32));
  }
};

struct Product {
  dnnl::matmul matmul;
  Memory a, b, c, bias, scratch;
};

Memory::desc matrix(const GemmArgs& g, std::int64_t rows, std::int64_t cols, DType dtype, std::int64_t row_stride,
                    std::int64_t col_stride, std::int64_t batch_stride) {
  if (g.batch == 1) return {{rows, cols}, *type_of(dtype), Memory::dims{row_stride, col_stride}};
  const bool shared = batch_stride == 0;
  return {{shared ? 1 : g.batch, rows, cols},
          *type_of(dtype),
          Memory::dims{shared ? rows * cols : batch_stride, row_stride, col_stride}};
}

Product make(const GemmArgs& g) {
  const Memory::desc a = matrix(g, g.m, g.k, g.a.dtype, g.a.row_stride, g.a.col_stride, g.a_batch_stride),
                     b = matrix(g, g.k, g.n, g.b.dtype, g.b.row_stride, g.b.col_stride, g.b_batch_stride),
                     c = matrix(g, g.m, g.n, g.c_dtype, g.ldc, 1, g.c_batch_stride);
  Memory::desc bias;
  if (g.bias != nullptr) {
    Memory::dims dims(g.batch == 1 ? 2 : 3, 1), strides(g.batch == 1 ? 2 : 3, g.n);
    dims.back() = g.n;
    strides.back() = 1;
    bias = {dims, *type_of(g.bias_dtype), strides};
  }
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (g.beta != 0) {
    dnnl::post_ops ops;
    ops.append_sum(1.0f);
    attributes.set_post_ops(ops);
  }
  const dnnl::engine& e = engine().engine;
  const dnnl::matmul::primitive_desc description = g.bias != nullptr
                                                       ? dnnl::matmul::primitive_desc(e, a, b, bias, c, attributes)
                                                       : dnnl::matmul::primitive_desc(e, a, b, c, attributes);
  Product p;
  p.matmul = dnnl::matmul(description);
  p.a = Memory(a, e, DNNL_MEMORY_NONE);
  p.b = Memory(b, e, DNNL_MEMORY_NONE);
  p.c = Memory(c, e, DNNL_MEMORY_NONE);
  if (g.bias != nullptr) p.bias = Memory(bias, e, DNNL_MEMORY_NONE);
  p.scratch = Memory(description.scratchpad_desc(), e, DNNL_MEMORY_NONE);
  return p;
}

Product& product_for(const GemmArgs& g) {
  constexpr std::size_t kMost = 512;
  static thread_local std::unordered_map<Key, Product, HashKey> products;
  const Key key = {g.m,
                   g.n,
                   g.k,
                   g.a.row_stride,
                   g.a.col_stride,
                   g.b.row_stride,
                   g.b.col_stride,
                   g.ldc,
                   g.batch,
                   g.a_batch_stride,
                   g.b_batch_stride,
                   g.c_batch_stride,
                   static_cast<std::int64_t>(g.a.dtype) | static_cast<std::int64_t>(g.c_dtype) << 8 |
                       static_cast<std::int64_t>(g.bias_dtype) << 16 | std::int64_t{g.bias != nullptr} << 24,
                   g.beta != 0,
                   num_threads()};
  if (const auto found = products.find(key); found != products.end()) return found->second;
  if (products.size() >= kMost) products.clear();
  return products.emplace(key, make(g)).first->second;
}

/// After rounding, which gives the same as before it; oneDNN's own would turn a NaN into 0.
void relu(const GemmArgs& g) {
  parallel_for(g.batch * g.m, std::max<std::int64_t>(1, 32768 / g.n), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t at = row / g.m * g.c_batch_stride + row % g.m * g.ldc;
      if (g.c_dtype == DType::f32) {
        float* c = static_cast<float*>(g.c) + at;
        for (std::int64_t j = 0; j < g.n; ++j) c[j] = c[j] < 0 ? 0.0f : c[j];
      } else {
        const std::uint16_t infinity = g.c_dtype == DType::bf16 ? 0x7F80 : 0x7C00;
        std::uint16_t* c = static_cast<std::uint16_t*>(g.c) + at;
        for (std::int64_t j = 0; j < g.n; ++j) {
          const bool negative = c[j] > 0x8000 && (c[j] & 0x7FFF) <= infinity;
          c[j] = negative ? std::uint16_t{0} : c[j];
        }
      }
    }
  });
}

}  // namespace

bool onednn_serves(const GemmArgs& g) noexcept {
  const auto usual = [](const GemmOperand& m) { return m.row_stride == 1 || m.col_stride == 1; };
  return type_of(g.a.dtype) && g.a.dtype == g.b.dtype && (g.c_dtype == g.a.dtype || g.c_dtype == DType::f32) &&
         (g.bias == nullptr || g.bias_dtype == DType::f32 || g.bias_dtype == g.c_dtype) && usual(g.a) && usual(g.b) &&
         g.a.row_stride >= 1 && g.a.col_stride >= 1 && g.b.row_stride >= 1 && g.b.col_stride >= 1;
}

Status onednn_gemm(KernelContext* context, const GemmArgs& g) noexcept {
  try {
    prepare();
    Product& p = product_for(g);
    void* scratch = nullptr;
    if (const std::size_t bytes = p.scratch.get_desc().get_size(); bytes > 0) {
      scratch = context->workspace(context, bytes);
      if (scratch == nullptr) {
        context->set_error(context, "matrix product: out of memory for the workspace");
        return Status::failed;
      }
    }
    p.a.set_data_handle(const_cast<void*>(g.a.data));
    p.b.set_data_handle(const_cast<void*>(g.b.data));
    p.c.set_data_handle(g.c);
    if (g.bias != nullptr) p.bias.set_data_handle(const_cast<void*>(g.bias));
    p.scratch.set_data_handle(scratch);
    std::unordered_map<int, Memory> arguments = {
        {DNNL_ARG_SRC, p.a}, {DNNL_ARG_WEIGHTS, p.b}, {DNNL_ARG_DST, p.c}, {DNNL_ARG_SCRATCHPAD, p.scratch}};
    if (g.bias != nullptr) arguments.emplace(DNNL_ARG_BIAS, p.bias);
    p.matmul.execute(engine().stream, arguments);
    engine().stream.wait();
    if (g.activation == GemmActivation::relu) relu(g);
    return Status::ok;
  } catch (const dnnl::error& error) {
    if (error.status == dnnl_unimplemented || error.status == dnnl_invalid_arguments) return Status::unsupported;
    context->set_error(context, error.what());
    return Status::failed;
  } catch (const std::exception& error) {
    context->set_error(context, error.what());
    return Status::failed;
  }
}

bool onednn_sgemm(const OneDnnMatrix& a, const OneDnnMatrix& b, std::int64_t m, std::int64_t n, std::int64_t k,
                  float beta, float* c, std::int64_t ldc) noexcept {
  try {
    prepare();
    return dnnl_sgemm(a.turned ? 'T' : 'N', b.turned ? 'T' : 'N', m, n, k, 1.0f, a.data, a.ld, b.data, b.ld, beta, c,
                      ldc) == dnnl_success;
  } catch (const std::exception&) {
    return false;
  }
}

const char* onednn_version() noexcept {
  static const std::string version = [] {
    const dnnl_version_t* v = dnnl_version();
    return std::to_string(v->major) + "." + std::to_string(v->minor) + "." + std::to_string(v->patch);
  }();
  return version.c_str();
}

}  // namespace halfstep::cpu
