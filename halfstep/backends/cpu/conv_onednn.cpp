// SPDX-License-Identifier: Apache-2.0
// Convolutions by oneDNN's kernels, each thread with convolutions of its own: some images, or some rows of one. What
// oneDNN can't read as it lies is brought to dense channels-last float32 a few images at a time, so that it stays in
// the cache, and results are rounded once.
#include <algorithm>
#include <atomic>
#include <functional>
#include <limits>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "halfstep/backends/cpu/conv.h"
#include "halfstep/backends/cpu/conv_images.h"
#include "halfstep/backends/cpu/conv_shares.h"
#include "halfstep/backends/cpu/convert_block.h"
#include "halfstep/backends/cpu/packed_weight.h"
#include "halfstep/backends/cpu/round_up.h"
#include "halfstep/backends/cpu/row_block.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

// Of widened images, in and out, a thread. ResNet-50's layers at batch 16 on two threads with 1 MiB of second and 36
// MiB of third cache: 1 to 4 MiB are equal within 4%, with half a MiB input gradients take 10% longer.
constexpr std::int64_t kConvOnednnBlockBytes = 2 << 20;
constexpr std::int64_t kWhole = std::numeric_limits<std::int64_t>::max();  // all of a share in one piece
constexpr std::int64_t kAddGrain = 1 << 15;                                // elements worth a thread

/// Images as oneDNN's kernels want them: as they are where they can be read so, or through buffers.
struct Images {
  TensorView* view;
  std::int64_t rows, row;  ///< rows of an image and elements of a row
  DType compute;
  float* buffer = nullptr;
  std::int64_t buffered = 0;  ///< images of a buffer: a worker's, or all

  std::int64_t each() const { return rows * row; }
  bool direct() const { return view->dtype == compute && channels_last(*view); }
  /// Where the piece lies that begins at `first_row` of image `first`. `worker`: whose buffer, when each has its own.
  void* at(std::int64_t first, std::int64_t first_row, std::int64_t worker, bool bands) const {
    if (direct()) {
      return static_cast<char*>(view->data) +
             (first * each() + first_row * row) * static_cast<std::int64_t>(item_size(compute));
    }
    return bands ? buffer + first * each() + first_row * row : buffer + worker * buffered * each();
  }
};

// Adds to float32 [count, places, channels].
void add_bias(float* images, std::int64_t places, std::int64_t channels, const float* bias) {
  parallel_for(places, std::max<std::int64_t>(1, kAddGrain / channels), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t p = begin; p < end; ++p) {
      for (std::int64_t c = 0; c < channels; ++c) images[p * channels + c] += bias[c];
    }
  });
}

void add(const float* from, std::int64_t n, float* to) {
  for (std::int64_t i = 0; i < n; ++i) to[i] += from[i];
}

/// Weights in the order that `conv` wants: as they are, as they were kept, or made for this call. `convert` gives the
/// elements as `conv` may read them, with the weight's strides; none: they are so already. Null when memory ran out.
PackedWeight packed_weight_for(KernelContext* context, const ConvCall& call, OneDnnConv& conv,
                               const std::function<const void*()>& convert) {
  const TensorView& w = call.weight;
  if (!convert && conv.takes(w.strides)) return {w.data, {}};
  return packed_weight(context, call.weight_storage, w, conv.weight_order(), static_cast<std::int64_t>(w.dtype),
                       conv.weight_bytes(), [&](void* to) {
                         const void* const from = convert ? convert() : w.data;
                         return from != nullptr && (runs_dry(context) || conv.pack(from, w.strides, to));
                       });
}

/// One call: the pieces, their primitives, and the memory that they work in.
class Work {
 public:
  Work(KernelContext* context, ConvCall& call, DType compute)
      : context_(context),
        call_(call),
        g_(call.geometry),
        compute_(compute),
        part_(call.part),
        x_{&call.input, g_.h, g_.w * g_.c, compute_of(ConvPart::input)},
        y_{&call.output, g_.oh, g_.ow * g_.o, compute_of(ConvPart::output)} {}

  /// False where oneDNN has no kernel.
  bool plan() {
    // A bias that is added after oneDNN's kernel, before the result is rounded, needs a block of it in float32.
    if (compute_ != DType::f32 && (!reads(x_, ConvPart::input) || !reads(y_, ConvPart::output))) return false;
    if (compute_ != DType::f32 && part_ != ConvPart::weight && call_.weight.dtype != compute_) return false;
    // Pieces of a few images may have weight gradients in several orders; whole shares differ less, one not at all.
    const std::int64_t threads = in_parallel_region() ? 1 : num_threads();
    const std::int64_t shares = part_ == ConvPart::weight ? terms() : stolen_shares(g_, threads);
    if (!plan(shares, kConvOnednnBlockBytes) && !plan(shares, kWhole) && !plan(1, kWhole)) return false;
    workers_ = num_workers(static_cast<std::int64_t>(shares_.shares.size()));
    return true;
  }
  /// Of the first piece.
  const char* kernel() const { return convs_[0][0]->implementation(); }

  /// Unsupported, with nothing written, where oneDNN has no kernel.
  Status run() {
    if (!plan()) return Status::unsupported;
    if (!take_images(x_) || !take_images(y_) || !read_bias() ||
        !take_workspace(context_, scratch_bytes_ * static_cast<std::size_t>(workers_), scratch_) ||
        !(part_ == ConvPart::weight ? take_sums() : pack_weights())) {
      return conv_out_of_memory(context_);
    }
    if (runs_dry(context_)) return Status::ok;
    if (shares_.bands) load(x_, ConvPart::input, 0, g_.n, x_.buffer), load(y_, ConvPart::output, 0, g_.n, y_.buffer);
    std::atomic<bool> done{true};
    parallel_jobs(static_cast<std::int64_t>(shares_.shares.size()), [&](std::int64_t share, std::int64_t worker) {
      if (!run_share(share, worker)) done.store(false, std::memory_order_relaxed);
    });
    if (!done.load(std::memory_order_relaxed)) {
      context_->set_error(context_, "convolution: oneDNN could not run it");
      return Status::failed;
    }
    if (shares_.bands && part_ != ConvPart::weight) {
      const Images& i = part_ == ConvPart::input ? x_ : y_;
      if (!i.direct()) store_images(i.buffer, 0, g_.n, *i.view);
    }
    if (part_ == ConvPart::weight && !finish_weight()) {
      context_->set_error(context_, "convolution: oneDNN could not bring the weight's gradient into its order");
      return Status::failed;
    }
    return Status::ok;
  }

 private:
  // Results of a bf16 or f16 kernel may be float32; float32 kernels give float32.
  DType compute_of(ConvPart part) const {
    if (part != part_ || compute_ == DType::f32) return compute_;
    const bool adds_bias = call_.bias != nullptr && !fused_bias();
    return part == ConvPart::weight || adds_bias ? DType::f32 : call_.result().dtype;
  }
  bool reads(const Images& images, ConvPart part) const {
    return images.direct() || (part == part_ && images.compute != images.view->dtype && channels_last(*images.view));
  }

  /// Of the weight's gradient.
  std::int64_t terms() const { return std::max(weight_terms(g_.n * g_.oh * g_.ow), std::min<std::int64_t>(g_.n, 4)); }

  bool fused_bias() const { return call_.bias != nullptr && part_ == ConvPart::output; }

  /// Cuts the call, where images are converted into pieces of about so many bytes, and finds a primitive for each.
  /// False: there is none for one, or they disagree about the order of the weight's gradient.
  bool plan(std::int64_t shares, std::int64_t piece_bytes) {
    const std::int64_t bytes = (x_.each() + y_.each()) * 4;
    const bool direct = x_.direct() && y_.direct();
    const std::int64_t most =
        direct ? g_.n : std::clamp<std::int64_t>(piece_bytes / std::max<std::int64_t>(bytes, 1), 1, g_.n);
    shares_ = conv_shares(part_, g_, shares, most);
    // A matrix product of a whole image may sum in another order than one of some rows.
    if (shares_.bands && part_ != ConvPart::weight) {
      const auto conv = find(shares_.shares[0][0]);
      if (conv != nullptr && std::string_view(conv->implementation()).find("gemm") != std::string_view::npos) {
        shares_ = conv_shares(part_, g_, shares, most, false);
      }
    }
    convs_.clear();
    scratch_bytes_ = 0;
    for (const auto& share : shares_.shares) {
      auto& convs = convs_.emplace_back();
      for (const ConvPiece& piece : share) {
        convs.push_back(find(piece));
        if (convs.back() == nullptr) return false;
        if (part_ == ConvPart::weight && convs.back()->weight_order() != convs_[0][0]->weight_order()) return false;
        scratch_bytes_ = std::max(scratch_bytes_, whole_lines(convs.back()->scratch_bytes()));
      }
    }
    return !convs_.empty();
  }

  std::shared_ptr<OneDnnConv> find(const ConvPiece& piece) const {
    return OneDnnConv::find(part_, piece.geometry, compute_, compute_of(part_), fused_bias());
  }

  bool take_images(Images& images) {
    if (images.direct()) return true;
    for (const auto& share : shares_.shares) {
      for (const ConvPiece& piece : share) images.buffered = std::max(images.buffered, piece.geometry.n);
    }
    const std::int64_t count = shares_.bands ? g_.n : images.buffered * workers_;
    return take_workspace(context_, static_cast<std::size_t>(count * images.each()), images.buffer);
  }

  bool read_bias() {
    if (call_.bias == nullptr) return true;
    if (!take_workspace(context_, static_cast<std::size_t>(call_.bias->sizes[0]), bias_)) return false;
    if (!runs_dry(context_)) read_row(*call_.bias, 0, call_.bias->strides[0], call_.bias->sizes[0], bias_);
    return true;
  }

  bool pack_weights() {
    const TensorView& w = call_.weight;
    std::function<const void*()> widen;
    float* wide = nullptr;
    if (w.dtype != compute_) {
      widen = [&]() -> const void* {
        if (wide == nullptr && take_workspace(context_, static_cast<std::size_t>(w.numel), wide) &&
            !runs_dry(context_)) {
          load_all(w, wide);
        }
        return wide;
      };
    }
    for (const auto& convs : convs_) {
      for (const auto& conv : convs) {
        if (packed_for(*conv) != nullptr) continue;
        PackedWeight packed = packed_weight_for(context_, call_, *conv, widen);
        if (packed.data == nullptr) return false;
        packed_.emplace_back(conv->weight_order(), packed.data);
        if (packed.kept) kept_.push_back(std::move(packed.kept));
      }
    }
    return true;
  }
  void* packed_for(const OneDnnConv& conv) const {
    for (const auto& [order, packed] : packed_) {
      if (order == conv.weight_order()) return packed;
    }
    return nullptr;
  }

  // A sum of each share, and room for a term where shares have several.
  bool take_sums() {
    const TensorView& w = call_.weight;
    weights_ = static_cast<std::int64_t>(whole_lines(convs_[0][0]->weight_bytes()) / sizeof(float));
    as_is_ = w.dtype == DType::f32 && convs_[0][0]->takes(w.strides);
    const bool several = std::any_of(convs_.begin(), convs_.end(), [](const auto& c) { return c.size() > 1; });
    const auto count = static_cast<std::int64_t>(shares_.shares.size());
    return take_workspace(context_, static_cast<std::size_t>(weights_ * (count - (as_is_ ? 1 : 0))), sums_) &&
           take_workspace(context_, several ? static_cast<std::size_t>(weights_ * workers_) : 0, terms_);
  }
  float* sum_of(std::int64_t share) const {
    if (!as_is_) return sums_ + share * weights_;
    return share == 0 ? static_cast<float*>(call_.weight.data) : sums_ + (share - 1) * weights_;
  }

  void load(const Images& images, ConvPart as, std::int64_t first, std::int64_t count, void* to) const {
    if (part_ != as && !images.direct()) load_images(*images.view, first, count, static_cast<float*>(to));
  }

  bool run_share(std::int64_t share, std::int64_t worker) {
    const auto& pieces = shares_.shares[static_cast<std::size_t>(share)];
    char* const scratch = scratch_bytes_ == 0 ? nullptr : scratch_ + static_cast<std::size_t>(worker) * scratch_bytes_;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const ConvPiece& piece = pieces[i];
      OneDnnConv& conv = *convs_[static_cast<std::size_t>(share)][i];
      const std::int64_t count = piece.geometry.n;
      void* const x = x_.at(piece.first, piece.input_row, worker, shares_.bands);
      void* const y = y_.at(piece.first, piece.output_row, worker, shares_.bands);
      if (!shares_.bands) {
        load(x_, ConvPart::input, piece.first, count, x);
        load(y_, ConvPart::output, piece.first, count, y);
      }
      float* const sum = part_ == ConvPart::weight ? sum_of(share) : nullptr;
      void* const weight = sum == nullptr ? packed_for(conv) : i == 0 ? sum : terms_ + worker * weights_;
      if (!conv.run(x, weight, y, fused_bias() ? bias_ : nullptr, scratch)) return false;
      if (sum != nullptr && i > 0) {
        add(terms_ + worker * weights_, static_cast<std::int64_t>(conv.weight_bytes() / sizeof(float)), sum);
      }
      if (part_ == ConvPart::input && bias_ != nullptr) {
        add_bias(static_cast<float*>(x), count * piece.geometry.h * g_.w, g_.c, bias_);
      }
      if (shares_.bands) continue;
      if (part_ == ConvPart::output && !y_.direct()) {
        store_images(static_cast<float*>(y), piece.first, count, call_.output);
      }
      if (part_ == ConvPart::input && !x_.direct()) {
        store_images(static_cast<float*>(x), piece.first, count, call_.input);
      }
    }
    return true;
  }

  // The shares' sums in their order, as the weight lies.
  bool finish_weight() {
    OneDnnConv& conv = *convs_[0][0];
    const auto shares = static_cast<std::int64_t>(shares_.shares.size());
    if (shares > 1) {
      parallel_for(static_cast<std::int64_t>(conv.weight_bytes() / sizeof(float)), kAddGrain / shares,
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t s = 1; s < shares; ++s) add(sum_of(s) + begin, end - begin, sum_of(0) + begin);
                   });
    }
    TensorView& w = call_.weight;
    return as_is_ || conv.unpack(sum_of(0), w.data, w.dtype, w.strides);
  }

  KernelContext* const context_;
  ConvCall& call_;
  const ConvGeometry& g_;
  const DType compute_;
  const ConvPart part_;
  Images x_, y_;
  ConvShares shares_;
  std::vector<std::vector<std::shared_ptr<OneDnnConv>>> convs_;  // as the pieces of the shares
  std::vector<std::pair<std::int64_t, void*>> packed_;           // weights by order
  std::vector<Ref<Storage>> kept_;
  std::int64_t workers_ = 0;       // who take the shares, each with memory of its own
  std::size_t scratch_bytes_ = 0;  // of a worker
  char* scratch_ = nullptr;
  float* bias_ = nullptr;
  std::int64_t weights_ = 0;  // floats of a sum
  bool as_is_ = false;
  float *sums_ = nullptr, *terms_ = nullptr;
};

}  // namespace

Status convolve_onednn(KernelContext* context, ConvCall& call, DType compute) {
  try {
    return Work(context, call, compute).run();
  } catch (const std::exception& error) {  // no memory for the plan
    context->set_error(context, error.what());
    return Status::failed;
  }
}

std::string onednn_kernel(ConvCall& call, DType compute) {
  Work work(nullptr, call, compute);
  return work.plan() ? work.kernel() : "";
}

}  // namespace halfstep::cpu
