// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/onednn_int8.h"

#include <array>
#include <bit>
#include <exception>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>

#include "halfstep/backends/cpu/onednn_internal.h"

namespace halfstep::cpu {

struct OneDnnInt8Conv::Impl {
  onednn::Memory::desc input, weight, output, scale, bias, residual, number, scratch;
  onednn::Memory::dims weight_dims;
  std::int64_t weight_order = 0;
  bool zero_point = false, with_bias = false;
  std::int32_t output_zero_point = 0;
  std::string implementation;
  dnnl::primitive primitive;
};

namespace {

using ByteMemory = onednn::Memory;
using ByteConvKey = std::array<std::int64_t, 33>;
struct HashByteConvKey {
  std::size_t operator()(const ByteConvKey& key) const noexcept {
    std::uint64_t hash = 0xcbf29ce484222325u;
    for (const std::int64_t v : key) hash = (hash ^ static_cast<std::uint64_t>(v)) * 0x100000001b3u;
    return static_cast<std::size_t>(hash ^ (hash >> 32));
  }
};

ByteMemory::data_type byte_type(DType dtype) {
  return dtype == DType::u8   ? ByteMemory::data_type::u8
         : dtype == DType::i8 ? ByteMemory::data_type::s8
                              : ByteMemory::data_type::f32;
}

void append_activation(dnnl::post_ops& ops, const Int8Epilogue& e) {
  using dnnl::algorithm;
  switch (e.activation) {
    case 1:
      return ops.append_eltwise(algorithm::eltwise_relu, 0.0f, 0.0f);
    case 2:
      return ops.append_eltwise(algorithm::eltwise_clip, e.a, e.b);
    case 3:
      return ops.append_eltwise(algorithm::eltwise_swish, 1.0f, 0.0f);
    case 4:
      return ops.append_eltwise(algorithm::eltwise_relu, e.a, 0.0f);
    case 5:
      return ops.append_eltwise(algorithm::eltwise_hardswish, 1.0f / 6, 0.5f);
    default:
      return;
  }
}

// oneDNN's own order would add the zero point of the result before it rounds: another integer where the value is in the
// middle of two and the zero point is odd. Rounding has a step of its own therefore, which costs nothing that could be
// measured.
dnnl::post_ops post_ops_of(const Int8Epilogue& e, const ByteMemory::desc& residual) {
  using dnnl::algorithm;
  dnnl::post_ops ops;
  if (e.residual) ops.append_binary(algorithm::binary_add, residual);
  if (e.middle != 1) ops.append_eltwise(algorithm::eltwise_linear, e.middle, 0.0f);
  append_activation(ops, e);
  if (e.last != 1) ops.append_eltwise(algorithm::eltwise_linear, e.last, 0.0f);
  if (!e.integers) return ops;
  ops.append_eltwise(algorithm::eltwise_round, 0.0f, 0.0f);
  const bool is_signed = e.dtype == DType::i8;
  const bool whole =
      e.least + e.zero_point == (is_signed ? -128 : 0) && e.most + e.zero_point == (is_signed ? 127 : 255);
  if (!whole) ops.append_eltwise(algorithm::eltwise_clip, static_cast<float>(e.least), static_cast<float>(e.most));
  return ops;
}

// Whether oneDNN adds products of bytes in 32 bits: without VNNI it does so by pairs in 16, where large ones saturate.
// What it may use is limited by HALFSTEP_ISA and by its own variables.
bool adds_exactly() {
  static const bool exact = [] {
    const onednn::OneThread limited;
    switch (dnnl::get_effective_cpu_isa()) {
      case dnnl::cpu_isa::isa_default:
      case dnnl::cpu_isa::sse41:
      case dnnl::cpu_isa::avx:
      case dnnl::cpu_isa::avx2:
      case dnnl::cpu_isa::avx512_core:
        return false;
      default:
        return true;
    }
  }();
  return exact;
}

}  // namespace

OneDnnInt8Conv::OneDnnInt8Conv() : impl_(std::make_unique<Impl>()) {}
OneDnnInt8Conv::~OneDnnInt8Conv() = default;

std::shared_ptr<OneDnnInt8Conv> OneDnnInt8Conv::find(const ConvGeometry& g, DType input, bool zero_point, bool bias,
                                                     const Int8Epilogue& e) noexcept {
  constexpr std::size_t kMost = 4096;
  using Map = std::unordered_map<ByteConvKey, std::shared_ptr<OneDnnInt8Conv>, HashByteConvKey>;
  // Not destroyed: oneDNN may be gone by then.
  static Map& made = *new Map;
  static std::shared_mutex& mutex = *new std::shared_mutex;
  if (!onednn::small_enough(g) || !adds_exactly()) return nullptr;
  const auto bits = [](float v) { return static_cast<std::int64_t>(std::bit_cast<std::uint32_t>(v)); };
  try {
    const ByteConvKey key = onednn::geometry_key<15>(
        g, {static_cast<std::int64_t>(input), static_cast<std::int64_t>(zero_point), static_cast<std::int64_t>(bias),
            static_cast<std::int64_t>(e.residual), static_cast<std::int64_t>(e.residual_dtype), bits(e.middle),
            static_cast<std::int64_t>(e.activation), bits(e.a), bits(e.b), bits(e.last),
            static_cast<std::int64_t>(e.integers), e.zero_point, e.least, e.most, static_cast<std::int64_t>(e.dtype)});
    {
      const std::shared_lock lock(mutex);
      if (const auto found = made.find(key); found != made.end()) return found->second;
    }
    const onednn::OneThread one;
    auto conv = std::make_shared<OneDnnInt8Conv>();
    Impl& c = *conv->impl_;
    c.weight_dims = onednn::weight_dims(g);
    c.input = {{g.n, g.c, g.h, g.w}, byte_type(input), ByteMemory::format_tag::nhwc};
    c.output = {{g.n, g.o, g.oh, g.ow}, byte_type(e.dtype), ByteMemory::format_tag::nhwc};
    if (e.residual) c.residual = {{g.n, g.o, g.oh, g.ow}, byte_type(e.residual_dtype), ByteMemory::format_tag::nhwc};
    c.scale = c.bias = {{g.o}, ByteMemory::data_type::f32, ByteMemory::format_tag::a};
    c.number = {{1}, ByteMemory::data_type::s32, ByteMemory::format_tag::a};
    c.zero_point = zero_point;
    c.with_bias = bias;
    c.output_zero_point = e.integers ? e.zero_point : 0;
    const ByteMemory::desc weight(c.weight_dims, ByteMemory::data_type::s8, ByteMemory::format_tag::any);
    const ByteMemory::dims stride = {g.stride[0], g.stride[1]}, dilation = {g.dilation[0] - 1, g.dilation[1] - 1},
                           before = {g.before[0], g.before[1]}, after = {g.after[0], g.after[1]};
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    attributes.set_scales_mask(DNNL_ARG_WEIGHTS, g.groups == 1 ? 1 : 3);
    if (zero_point) attributes.set_zero_points_mask(DNNL_ARG_SRC, 0);
    if (c.output_zero_point != 0) attributes.set_zero_points_mask(DNNL_ARG_DST, 0);
    attributes.set_post_ops(post_ops_of(e, c.residual));
    constexpr auto kDirect = dnnl::algorithm::convolution_direct;
    constexpr auto kInference = dnnl::prop_kind::forward_inference;
    const dnnl::engine& engine = onednn::engine();
    dnnl::convolution_forward::primitive_desc d =
        bias ? dnnl::convolution_forward::primitive_desc(engine, kInference, kDirect, c.input, weight, c.bias, c.output,
                                                         stride, dilation, before, after, attributes)
             : dnnl::convolution_forward::primitive_desc(engine, kInference, kDirect, c.input, weight, c.output, stride,
                                                         dilation, before, after, attributes);
    if (!onednn::choose_implementation(d)) {
      throw dnnl::error(dnnl_unimplemented, "convolution of integers: no implementation for us");
    }
    c.implementation = d.impl_info_str();
    c.scratch = d.scratchpad_desc();
    c.primitive = dnnl::primitive(d.get());
    c.weight = d.weights_desc();
    c.weight_order = onednn::number_of(c.weight);
    const std::unique_lock lock(mutex);
    if (made.size() >= kMost) made.clear();
    return made.emplace(key, conv).first->second;
  } catch (const std::exception&) {
    return nullptr;  // not for oneDNN, or out of memory, which the path without it says
  }
}

std::size_t OneDnnInt8Conv::scratch_bytes() const { return impl_->scratch.get_size(); }
std::size_t OneDnnInt8Conv::weight_bytes() const { return impl_->weight.get_size(); }
std::int64_t OneDnnInt8Conv::weight_order() const { return impl_->weight_order; }
const char* OneDnnInt8Conv::implementation() const { return impl_->implementation.c_str(); }

bool OneDnnInt8Conv::pack(const void* weight, const std::int64_t* strides, void* packed) noexcept {
  const Impl& c = *impl_;
  try {
    const onednn::OneThread one;
    const dnnl::engine& engine = onednn::engine();
    ByteMemory from(onednn::weight_desc(c.weight_dims, ByteMemory::data_type::s8, strides), engine,
                    const_cast<void*>(weight));
    ByteMemory to(c.weight, engine, packed);
    dnnl::reorder(from, to).execute(onednn::stream(), from, to);
    onednn::stream().wait();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

bool OneDnnInt8Conv::run(const void* input, const void* packed_weight, void* output, const float* scale,
                         const float* bias, std::int32_t zero_point, const void* residual, void* scratch) noexcept {
  try {
    const onednn::OneThread one;
    const dnnl::engine& engine = onednn::engine();
    const Impl& c = *impl_;
    std::int32_t output_zero_point = c.output_zero_point;
    const auto memory = [&](const ByteMemory::desc& d, const void* p) {
      return ByteMemory(d, engine, const_cast<void*>(p));
    };
    std::unordered_map<int, ByteMemory> arguments = {{DNNL_ARG_SRC, memory(c.input, input)},
                                                     {DNNL_ARG_WEIGHTS, memory(c.weight, packed_weight)},
                                                     {DNNL_ARG_DST, memory(c.output, output)},
                                                     {DNNL_ARG_SCRATCHPAD, memory(c.scratch, scratch)},
                                                     {DNNL_ARG_ATTR_SCALES | DNNL_ARG_WEIGHTS, memory(c.scale, scale)}};
    if (c.with_bias) arguments.emplace(DNNL_ARG_BIAS, memory(c.bias, bias));
    if (c.zero_point) arguments.emplace(DNNL_ARG_ATTR_ZERO_POINTS | DNNL_ARG_SRC, memory(c.number, &zero_point));
    if (c.output_zero_point != 0) {
      arguments.emplace(DNNL_ARG_ATTR_ZERO_POINTS | DNNL_ARG_DST, memory(c.number, &output_zero_point));
    }
    if (residual != nullptr) {
      arguments.emplace(DNNL_ARG_ATTR_MULTIPLE_POST_OP(0) | DNNL_ARG_SRC_1, memory(c.residual, residual));
    }
    c.primitive.execute(onednn::stream(), arguments);
    onednn::stream().wait();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace halfstep::cpu
