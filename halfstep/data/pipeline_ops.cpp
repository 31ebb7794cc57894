// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/pipeline_ops.h"

#include <array>
#include <cmath>
#include <cstring>
#include <optional>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/write_internal.h"

namespace halfstep::data {
namespace {

/// The sizes of one sample of a batch.
ColumnType sample_type(const Tensor& batch) {
  Shape sizes = batch.sizes();
  sizes.erase(0);
  return {.sizes = sizes, .dtype = batch.dtype()};
}

/// f32, or f64 where there was f64 before.
DType real_dtype(DType dtype) { return dtype == f64 ? f64 : f32; }

/// out[i] = change(in[i], i), in float64.
template <class F>
Tensor map_real(const Tensor& batch, F&& change) {
  const Tensor in = batch.contiguous();
  Tensor out = empty(in.sizes(), {.dtype = real_dtype(in.dtype()), .device = Device{}});
  const std::int64_t n = in.numel();
  visit_dtype(in.dtype(), [&](auto tag) {
    using From = storage_t<tag.value>;
    using To = std::conditional_t<tag.value == DType::f64, double, float>;
    const From* from = in.data<const From>();
    To* to = write_data<To>(out);
    change(from, to, n);
  });
  return out;
}

void check_number(const char* name, const char* what, double value) {
  if (!std::isfinite(value)) fail<Error>("{}: expected a finite {}, got {}", name, what, value);
}

}  // namespace

std::string ColumnType::str() const { return fmt::format("{} {}", halfstep::name(dtype), sizes.str()); }

struct ColumnTransform::Impl {
  std::string name;
  std::function<Tensor(const Tensor&, const BatchRequest&)> run;
};

ColumnTransform::ColumnTransform(const Rescale& r) {
  check_number("Rescale", "scale", r.scale);
  check_number("Rescale", "shift", r.shift);
  // Of a byte there are 256 values.
  std::array<float, 256> of_byte;
  for (std::size_t p = 0; p < of_byte.size(); ++p) {
    of_byte[p] = static_cast<float>(static_cast<double>(p) * r.scale + r.shift);
  }
  const auto run = [r, of_byte](const Tensor& batch, const BatchRequest&) {
    return map_real(batch, [&](const auto* in, auto* out, std::int64_t n) {
      using From = std::remove_cvref_t<decltype(*in)>;
      using To = std::remove_reference_t<decltype(*out)>;
      for (std::int64_t i = 0; i < n; ++i) {
        if constexpr (std::is_same_v<From, std::uint8_t>) {
          out[i] = of_byte[in[i]];
        } else {
          out[i] = static_cast<To>(convert<double>(in[i]) * r.scale + r.shift);
        }
      }
    });
  };
  impl_ = std::make_shared<const Impl>(Impl{"Rescale", run});
}

ColumnTransform::ColumnTransform(const Normalize& given) {
  if (given.mean.empty() || given.mean.size() != given.std.size()) {
    fail<Error>("Normalize: expected a mean and a std for each channel, got {} and {}", given.mean.size(),
                given.std.size());
  }
  for (const double mean : given.mean) check_number("Normalize", "mean", mean);
  for (const double deviation : given.std) {
    check_number("Normalize", "std", deviation);
    if (!(deviation > 0) || !std::isfinite(1 / deviation))
      fail<Error>("Normalize: expected a std above 0, got {}", deviation);
  }
  const auto run = [o = given](const Tensor& batch, const BatchRequest&) {
    const ColumnType type = sample_type(batch);
    const auto channels = static_cast<std::int64_t>(o.mean.size());
    if (type.sizes.size() != 3) {
      fail<ShapeError>("Normalize: expected samples {}, got {}", o.is_hwc ? "[H, W, C]" : "[C, H, W]", type.str());
    }
    if (type.sizes[o.is_hwc ? 2 : 0] != channels) {
      const bool other = type.sizes[o.is_hwc ? 0 : 2] == channels;
      fail<ShapeError>("Normalize: expected a mean and a std for each of the {} channels of {}, got {}{}",
                       type.sizes[o.is_hwc ? 2 : 0], type.str(), channels,
                       !other     ? ""
                       : o.is_hwc ? "; does it stand behind HWC2CHW? then .is_hwc = false"
                                  : "; does it stand before HWC2CHW? then .is_hwc = true");
    }
    // Channels alternate, or follow one another in runs.
    const std::int64_t run_length = o.is_hwc ? 1 : type.sizes[1] * type.sizes[2];
    return map_real(batch, [&](const auto* in, auto* out, std::int64_t n) {
      using To = std::remove_reference_t<decltype(*out)>;
      if (run_length == 1 && channels == 1) {
        const double mean = o.mean[0], inverse = 1 / o.std[0];
        for (std::int64_t i = 0; i < n; ++i) out[i] = static_cast<To>((convert<double>(in[i]) - mean) * inverse);
        return;
      }
      for (std::int64_t i = 0; i < n;) {
        for (std::size_t c = 0; c < o.mean.size(); ++c) {
          const double mean = o.mean[c], inverse = 1 / o.std[c];
          for (std::int64_t k = 0; k < run_length; ++k, ++i) {
            out[i] = static_cast<To>((convert<double>(in[i]) - mean) * inverse);
          }
        }
      }
    });
  };
  impl_ = std::make_shared<const Impl>(Impl{"Normalize", run});
}

ColumnTransform::ColumnTransform(HWC2CHW) {
  impl_ = std::make_shared<const Impl>(Impl{"HWC2CHW", [](const Tensor& batch, const BatchRequest&) {
                                              if (batch.dim() != 4) {
                                                fail<ShapeError>("HWC2CHW: expected samples [H, W, C], got {}",
                                                                 sample_type(batch).str());
                                              }
                                              return batch.permute({0, 3, 1, 2});
                                            }});
}

ColumnTransform::ColumnTransform(TypeCast cast) {
  impl_ = std::make_shared<const Impl>(
      Impl{"TypeCast", [cast](const Tensor& batch, const BatchRequest&) { return batch.to(cast.dtype); }});
}

ColumnTransform::ColumnTransform(Function function, int) {
  if (!function) fail<Error>("Pipeline::map: expected a function, got an empty one");
  const auto run = [f = std::move(function)](const Tensor& batch, const BatchRequest& request) {
    std::optional<ColumnType> first;
    Tensor out;
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < request.indices.size(); ++i) {
      const std::int64_t index = request.indices[i];
      const Tensor given = batch.select(0, static_cast<std::int64_t>(i));
      Tensor made = f(given, {.seed = request.seed, .epoch = request.epoch, .sample = index});
      if (!made.defined())
        fail<Error>("Pipeline::map: expected a tensor from the function, got none for sample {}", index);
      if (!made.device().is_cpu()) {
        fail<DeviceError>(
            "Pipeline::map: expected a tensor on the CPU from the function, got one on {}; the loader "
            "sends batches to a device",
            made.device().str());
      }
      made = made.detach().contiguous();
      const ColumnType type{.sizes = made.sizes(), .dtype = made.dtype()};
      if (!first) {
        first = type;
        Shape sizes = type.sizes;
        sizes.insert(0, static_cast<std::int64_t>(request.indices.size()));
        out = empty(sizes, {.dtype = type.dtype, .device = Device{}});
        bytes = static_cast<std::size_t>(made.numel()) * made.item_size();
      }
      if (type != *first) {
        fail<ShapeError>(
            "Pipeline::map: expected the same from the function for all samples of a batch, got {} for "
            "sample {} and {} for sample {}",
            first->str(), request.indices[0], type.str(), index);
      }
      if (bytes > 0)
        std::memcpy(static_cast<std::byte*>(write_raw_data(out)) + i * bytes, made.const_raw_data(), bytes);
    }
    return out;
  };
  impl_ = std::make_shared<const Impl>(Impl{"function", run});
}

const std::string& ColumnTransform::name() const { return impl_->name; }

Tensor ColumnTransform::apply(const Tensor& batch, const BatchRequest& request) const {
  if (!batch.defined() || batch.dim() == 0 || batch.size(0) != static_cast<std::int64_t>(request.indices.size())) {
    fail<ShapeError>("{}: expected a batch of {} samples, got {}", impl_->name, request.indices.size(),
                     batch.defined() ? batch.sizes().str() : "none");
  }
  if (!batch.device().is_cpu()) {
    fail<DeviceError>("{}: expected samples on the CPU, got {}", impl_->name, batch.device().str());
  }
  // The loop's own thread may make batches too, under whatever regions it is in.
  const NoGrad no_grad;
  const amp::Autocast plain{{.enabled = false}};
  return impl_->run(batch, request);
}

}  // namespace halfstep::data
