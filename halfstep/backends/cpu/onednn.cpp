// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/onednn.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#ifndef HALFSTEP_NO_OPENMP
#include <omp.h>
#endif

#include "halfstep/backends/cpu/onednn_internal.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

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

}  // namespace

namespace onednn {

OneThread::OneThread() {
  // The cap of HALFSTEP_ISA takes effect only before oneDNN's first use.
  static const bool capped = [] {
    return compute_isa() != detected_isa() && dnnl::set_max_cpu_isa(cap_of(compute_isa())) == dnnl::status::success;
  }();
  (void)capped;
#ifndef HALFSTEP_NO_OPENMP
  before_ = omp_get_max_threads();
  if (before_ != 1) omp_set_num_threads(1);
#endif
}
OneThread::~OneThread() {
#ifndef HALFSTEP_NO_OPENMP
  if (before_ != 1) omp_set_num_threads(before_);
#endif
}

const dnnl::engine& engine() {
  // Never destroyed: a device's thread may compute until plug-ins are shut down.
  static const dnnl::engine& e = *new dnnl::engine(dnnl::engine::kind::cpu, 0);
  return e;
}
// The same for oneDNN's own cache of primitives: it is made here, so before a plug-in is opened, and goes after that.
[[maybe_unused]] const int capacity = dnnl::get_primitive_cache_capacity();

dnnl::stream& stream() {
  static thread_local dnnl::stream s(engine());
  return s;
}

Memory::dims weight_dims(const ConvGeometry& g) {
  if (g.groups == 1) return {g.o, g.c, g.kh, g.kw};
  return {g.groups, g.o / g.groups, g.c / g.groups, g.kh, g.kw};
}
Memory::desc weight_desc(const Memory::dims& dims, Memory::data_type type, const std::int64_t* strides) {
  if (dims.size() == 4) return {dims, type, Memory::dims(strides, strides + 4)};
  return {dims, type, Memory::dims{dims[1] * strides[0], strides[0], strides[1], strides[2], strides[3]}};
}

bool small_enough(const ConvGeometry& g) {
  constexpr std::int64_t kMost = 1 << 29;
  const std::int64_t window[] = {g.kh, g.kw}, outputs[] = {g.oh, g.ow};
  for (int d = 0; d < 2; ++d) {
    const std::int64_t extent = g.dilation[d] * (window[d] - 1) + 1, spanned = (outputs[d] - 1) * g.stride[d] + extent;
    if (std::max({g.stride[d], g.dilation[d], extent, spanned, g.before[d], std::abs(g.after[d])}) > kMost)
      return false;
  }
  return true;
}
std::int64_t number_of(const Memory::desc& order) {
  static std::mutex mutex;
  static auto& known = *new std::vector<Memory::desc>;  // as engine()
  const std::lock_guard lock(mutex);
  const std::int64_t number = std::find(known.begin(), known.end(), order) - known.begin();
  if (number == static_cast<std::int64_t>(known.size())) known.push_back(order);
  return number;
}

}  // namespace onednn

namespace {

using namespace onednn;  // NOLINT(google-build-using-namespace): of internals, in two files

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
using Key = std::array<std::int64_t, 14>;
struct HashKey {
  std::size_t operator()(const Key& key) const noexcept {
    std::uint64_t hash = 0xcbf29ce484222325u;
    for (const std::int64_t v : key) hash = (hash ^ static_cast<std::uint64_t>(v)) * 0x100000001b3u;
    return static_cast<std::size_t>(hash ^ (hash >> 32));
  }
};

struct CachedProduct {
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

CachedProduct make(const GemmArgs& g) {
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
  const dnnl::engine& e = engine();
  dnnl::matmul::primitive_desc description = g.bias != nullptr
                                                 ? dnnl::matmul::primitive_desc(e, a, b, bias, c, attributes)
                                                 : dnnl::matmul::primitive_desc(e, a, b, c, attributes);
  if (!choose_implementation(description)) throw dnnl::error(dnnl_unimplemented, "matmul: no implementation for us");
  CachedProduct p;
  p.matmul = dnnl::matmul(description);
  p.a = Memory(a, e, DNNL_MEMORY_NONE);
  p.b = Memory(b, e, DNNL_MEMORY_NONE);
  p.c = Memory(c, e, DNNL_MEMORY_NONE);
  if (g.bias != nullptr) p.bias = Memory(bias, e, DNNL_MEMORY_NONE);
  p.scratch = Memory(description.scratchpad_desc(), e, DNNL_MEMORY_NONE);
  return p;
}

CachedProduct& product_for(const GemmArgs& g) {
  constexpr std::size_t kMost = 512;
  static thread_local std::unordered_map<Key, CachedProduct, HashKey> products;
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
                   g.beta != 0};
  if (const auto found = products.find(key); found != products.end()) return found->second;
  if (products.size() >= kMost) products.clear();
  return products.emplace(key, make(g)).first->second;
}

/// After rounding, which gives the same as before it; oneDNN's own would turn a NaN into 0.
void relu(const GemmArgs& g) {
  for (std::int64_t row = 0; row < g.batch * g.m; ++row) {
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
}

}  // namespace

bool onednn_serves(const GemmArgs& g) noexcept {
  const auto usual = [](const GemmOperand& m) { return m.row_stride == 1 || m.col_stride == 1; };
  return type_of(g.a.dtype) && g.a.dtype == g.b.dtype && (g.c_dtype == g.a.dtype || g.c_dtype == DType::f32) &&
         (g.bias == nullptr || g.bias_dtype == DType::f32 || g.bias_dtype == g.c_dtype) && usual(g.a) && usual(g.b) &&
         g.a.row_stride >= 1 && g.a.col_stride >= 1 && g.b.row_stride >= 1 && g.b.col_stride >= 1;
}

std::optional<std::size_t> onednn_product_scratch(const GemmArgs& g) noexcept {
  try {
    const OneThread one;
    return product_for(g).scratch.get_desc().get_size();
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

bool onednn_product(const GemmArgs& g, void* scratch) noexcept {
  try {
    const OneThread one;
    CachedProduct& p = product_for(g);
    p.a.set_data_handle(const_cast<void*>(g.a.data));
    p.b.set_data_handle(const_cast<void*>(g.b.data));
    p.c.set_data_handle(g.c);
    if (g.bias != nullptr) p.bias.set_data_handle(const_cast<void*>(g.bias));
    p.scratch.set_data_handle(scratch);
    std::unordered_map<int, Memory> arguments = {
        {DNNL_ARG_SRC, p.a}, {DNNL_ARG_WEIGHTS, p.b}, {DNNL_ARG_DST, p.c}, {DNNL_ARG_SCRATCHPAD, p.scratch}};
    if (g.bias != nullptr) arguments.emplace(DNNL_ARG_BIAS, p.bias);
    p.matmul.execute(stream(), arguments);
    stream().wait();
    if (g.activation == GemmActivation::relu) relu(g);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// --- Convolutions

struct OneDnnConv::Impl {
  ConvPart part;
  Memory::desc input, weight, output, bias, scratch;
  Memory::dims weight_dims;
  Memory::data_type weight_type;
  std::int64_t weight_order = 0;
  std::string implementation;
  dnnl::primitive primitive;
};

namespace {

using ConvKey = std::array<std::int64_t, 22>;

}  // namespace

OneDnnConv::OneDnnConv() : impl_(std::make_unique<Impl>()) {}
OneDnnConv::~OneDnnConv() = default;

std::shared_ptr<OneDnnConv> OneDnnConv::find(ConvPart part, const ConvGeometry& g, DType operands, DType result,
                                             bool bias) noexcept {
  constexpr std::size_t kMost = 1024;
  static thread_local std::map<ConvKey, std::shared_ptr<OneDnnConv>> made;
  if (!small_enough(g)) return nullptr;
  try {
    const OneThread one;
    const ConvKey key =
        onednn::geometry_key<4>(g, {static_cast<std::int64_t>(part), static_cast<std::int64_t>(operands),
                                    static_cast<std::int64_t>(result), bias});
    if (const auto found = made.find(key); found != made.end()) return found->second;
    if (made.size() >= kMost) made.clear();
    auto conv = std::make_shared<OneDnnConv>();
    Impl& c = *conv->impl_;
    const auto type = *type_of(operands), result_type = *type_of(result);
    const auto type_of_part = [&](ConvPart p) { return p == part ? result_type : type; };
    c.part = part;
    c.weight_dims = weight_dims(g);
    c.weight_type = type_of_part(ConvPart::weight);
    const Memory::desc input({g.n, g.c, g.h, g.w}, type_of_part(ConvPart::input), Memory::format_tag::nhwc),
        output({g.n, g.o, g.oh, g.ow}, type_of_part(ConvPart::output), Memory::format_tag::nhwc),
        weight(c.weight_dims, c.weight_type, Memory::format_tag::any);
    const Memory::dims stride = {g.stride[0], g.stride[1]}, dilation = {g.dilation[0] - 1, g.dilation[1] - 1},
                       before = {g.before[0], g.before[1]}, after = {g.after[0], g.after[1]};
    if (bias) c.bias = Memory::desc({g.o}, Memory::data_type::f32, Memory::format_tag::a);
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    const auto keep = [&](auto description) {
      if (!choose_implementation(description, g.stride[0] > 1 || g.stride[1] > 1)) {
        throw dnnl::error(dnnl_unimplemented, "convolution: no implementation for us");
      }
      c.implementation = description.impl_info_str();
      c.scratch = description.scratchpad_desc();
      c.primitive = dnnl::primitive(description.get());
      return description;
    };
    const dnnl::engine& e = engine();
    constexpr auto kDirect = dnnl::algorithm::convolution_direct;
    if (part == ConvPart::output) {
      const auto d = keep(
          bias ? dnnl::convolution_forward::primitive_desc(e, dnnl::prop_kind::forward_training, kDirect, input, weight,
                                                           c.bias, output, stride, dilation, before, after, attributes)
               : dnnl::convolution_forward::primitive_desc(e, dnnl::prop_kind::forward_training, kDirect, input, weight,
                                                           output, stride, dilation, before, after, attributes));
      c.weight = d.weights_desc();
    } else {
      // The backward primitives want to know which forward one they belong to.
      const dnnl::convolution_forward::primitive_desc hint(
          e, dnnl::prop_kind::forward_training, kDirect,
          Memory::desc({g.n, g.c, g.h, g.w}, type, Memory::format_tag::nhwc),
          Memory::desc(c.weight_dims, type, Memory::format_tag::any),
          Memory::desc({g.n, g.o, g.oh, g.ow}, type, Memory::format_tag::nhwc), stride, dilation, before, after);
      if (part == ConvPart::input) {
        c.weight = keep(dnnl::convolution_backward_data::primitive_desc(e, kDirect, input, weight, output, stride,
                                                                        dilation, before, after, hint, attributes))
                       .weights_desc();
      } else {
        c.weight = keep(dnnl::convolution_backward_weights::primitive_desc(e, kDirect, input, weight, output, stride,
                                                                           dilation, before, after, hint, attributes))
                       .diff_weights_desc();
      }
    }
    c.input = input;
    c.output = output;
    c.weight_order = number_of(c.weight);
    made.emplace(key, conv);
    return conv;
  } catch (const std::exception&) {
    return nullptr;  // not for oneDNN, or out of memory, which the path without it says
  }
}

std::size_t OneDnnConv::scratch_bytes() const { return impl_->scratch.get_size(); }
std::size_t OneDnnConv::weight_bytes() const { return impl_->weight.get_size(); }
std::int64_t OneDnnConv::weight_order() const { return impl_->weight_order; }
bool OneDnnConv::takes(const std::int64_t* strides) const {
  return impl_->weight == weight_desc(impl_->weight_dims, impl_->weight_type, strides);
}

const char* OneDnnConv::implementation() const { return impl_->implementation.c_str(); }

namespace {

// Channels of the first dimension that an order keeps together.
std::int64_t block_of(const Memory::desc& order) {
  std::int64_t block = 1;
  const Memory::dims sizes = order.get_inner_blks(), dims = order.get_inner_idxs();
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (dims[i] == 0) block *= sizes[i];
  }
  return block;
}

// Copies between two orders of the same elements, threads taking shares of the output channels.
bool reorder(const Memory::desc& from, const void* data, const Memory::desc& to, void* result) noexcept {
  constexpr std::int64_t kGrain = 1 << 16;  // elements worth a thread
  try {
    const auto copy = [&](const Memory::desc& source_order, const Memory::desc& target_order) {
      const OneThread one;
      Memory source(source_order, engine(), const_cast<void*>(data)), target(target_order, engine(), result);
      dnnl::reorder(source, target).execute(stream(), source, target);
      stream().wait();
    };
    const Memory::dims dims = from.get_dims();
    const std::int64_t channels = dims[0], block = std::lcm(block_of(from), block_of(to));
    std::int64_t elements = 1;
    for (const std::int64_t n : dims) elements *= n;
    const std::int64_t blocks = (channels + block - 1) / block;
    std::atomic<bool> done{true};
    parallel_for(blocks, std::max<std::int64_t>(1, kGrain * blocks / std::max<std::int64_t>(elements, 1)),
                 [&](std::int64_t begin, std::int64_t end) {
                   try {
                     Memory::dims offsets(dims.size(), 0), part = dims;
                     offsets[0] = begin * block;
                     part[0] = std::min(end * block, channels) - offsets[0];
                     if (part[0] == channels) return copy(from, to);
                     copy(from.submemory_desc(part, offsets), to.submemory_desc(part, offsets));
                   } catch (const std::exception&) {
                     done.store(false, std::memory_order_relaxed);
                   }
                 });
    if (!done.load(std::memory_order_relaxed)) copy(from, to);  // an order that can't be divided
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace

bool OneDnnConv::pack(const void* weight, const std::int64_t* strides, void* packed) noexcept {
  const Impl& c = *impl_;
  try {
    return reorder(weight_desc(c.weight_dims, c.weight_type, strides), weight, c.weight, packed);
  } catch (const std::exception&) {
    return false;
  }
}
bool OneDnnConv::unpack(const void* packed, void* weight, DType dtype, const std::int64_t* strides) noexcept {
  const Impl& c = *impl_;
  try {
    return reorder(c.weight, packed, weight_desc(c.weight_dims, *type_of(dtype), strides), weight);
  } catch (const std::exception&) {
    return false;
  }
}

bool OneDnnConv::run(void* input, void* packed_weight, void* output, const float* bias, void* scratch) noexcept {
  try {
    const OneThread one;
    const dnnl::engine& e = engine();
    const Impl& c = *impl_;
    const Memory x(c.input, e, input), w(c.weight, e, packed_weight), y(c.output, e, output);
    const bool back = c.part != ConvPart::output;
    std::unordered_map<int, Memory> arguments = {
        {c.part == ConvPart::input ? DNNL_ARG_DIFF_SRC : DNNL_ARG_SRC, x},
        {c.part == ConvPart::weight ? DNNL_ARG_DIFF_WEIGHTS : DNNL_ARG_WEIGHTS, w},
        {back ? DNNL_ARG_DIFF_DST : DNNL_ARG_DST, y},
        {DNNL_ARG_SCRATCHPAD, Memory(c.scratch, e, scratch)}};
    if (bias != nullptr) arguments.emplace(DNNL_ARG_BIAS, Memory(c.bias, e, const_cast<float*>(bias)));
    c.primitive.execute(stream(), arguments);
    stream().wait();
    return true;
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
