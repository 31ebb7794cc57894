// SPDX-License-Identifier: Apache-2.0
// Products of integers by oneDNN's kernels, each thread with convolutions of its own.
#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "halfstep/backends/cpu/conv_images.h"
#include "halfstep/backends/cpu/int8_product.h"
#include "halfstep/backends/cpu/int8_shares.h"
#include "halfstep/backends/cpu/onednn_int8.h"
#include "halfstep/backends/cpu/packed_weight.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

/// One call: the pieces, their primitives, and the memory that they work in.
class ByteWork {
 public:
  ByteWork(KernelContext* context, Int8Call& call) : context_(context), call_(call) {}

  Status run() {
    const TensorView *x = &call_.input, *r = call_.residual;
    if (!channels_last(*x) || !channels_last(call_.output) || (r != nullptr && !channels_last(*r))) {
      return Status::unsupported;
    }
    if (!plan(in_parallel_region() ? 1 : num_threads()) && !plan(1)) return Status::unsupported;
    const auto count = static_cast<std::int64_t>(shares_.size());
    char* scratch = nullptr;
    if (scratch_bytes_ > 0) {
      scratch = static_cast<char*>(context_->workspace(context_, scratch_bytes_ * shares_.size()));
    }
    if ((scratch_bytes_ > 0 && scratch == nullptr) || !pack_weights()) {
      context_->set_error(context_, "product of integers: out of memory for the workspace");
      return Status::failed;
    }
    const auto item = static_cast<std::int64_t>(item_size(call_.output.dtype));
    const std::int64_t inputs = call_.geometry.c, outputs = call_.geometry.o;
    std::atomic<bool> done{true};
    parallel_for(count, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t share = begin; share < end; ++share) {
        const auto s = static_cast<std::size_t>(share);
        for (std::size_t i = 0; i < shares_[s].size(); ++i) {
          const Int8Piece& piece = shares_[s][i];
          OneDnnInt8Conv& conv = *convs_[s][i];
          const std::int64_t at = piece.output * outputs + piece.first;
          const void* residual = r == nullptr ? nullptr : static_cast<const char*>(r->data) + at;
          if (!conv.run(static_cast<const char*>(x->data) + piece.input * inputs, packed_for(conv, piece.first),
                        static_cast<char*>(call_.output.data) + at * item, call_.scale + piece.first,
                        call_.bias == nullptr ? nullptr : call_.bias + piece.first, call_.zero_point, residual,
                        scratch == nullptr ? nullptr : scratch + s * scratch_bytes_)) {
            done.store(false, std::memory_order_relaxed);
          }
        }
      }
    });
    if (!done.load(std::memory_order_relaxed)) {
      context_->set_error(context_, "product of integers: oneDNN could not run it");
      return Status::failed;
    }
    return Status::ok;
  }

 private:
  /// Weights of some output channels in an order.
  struct Packed {
    std::int64_t order, first;
    const void* data;
  };

  bool plan(int threads) {
    shares_ = int8_shares(call_.geometry, threads);
    convs_.clear();
    scratch_bytes_ = 0;
    for (const auto& share : shares_) {
      auto& convs = convs_.emplace_back();
      for (const Int8Piece& piece : share) {
        convs.push_back(OneDnnInt8Conv::find(piece.geometry, call_.input.dtype, call_.zero_point != 0,
                                             call_.bias != nullptr, call_.epilogue));
        if (convs.back() == nullptr) return false;
        scratch_bytes_ = std::max(scratch_bytes_, (convs.back()->scratch_bytes() + 63) / 64 * 64);
      }
    }
    return !convs_.empty();
  }

  const void* packed_for(const OneDnnInt8Conv& conv, std::int64_t first) const {
    for (const Packed& p : packed_) {
      if (p.order == conv.weight_order() && p.first == first) return p.data;
    }
    return nullptr;
  }

  bool pack_weights() {
    for (std::size_t s = 0; s < shares_.size(); ++s) {
      for (std::size_t i = 0; i < shares_[s].size(); ++i) {
        OneDnnInt8Conv& conv = *convs_[s][i];
        const Int8Piece& piece = shares_[s][i];
        if (packed_for(conv, piece.first) != nullptr) continue;
        const void* const packed = packed_filters(conv, piece.first, piece.geometry.o);
        if (packed == nullptr) return false;
        packed_.push_back({conv.weight_order(), piece.first, packed});
      }
    }
    return true;
  }

  // As it was kept with the weight's memory, or made for this call (and kept, when it is asked for again).
  const void* packed_filters(OneDnnInt8Conv& conv, std::int64_t first, std::int64_t count) {
    TensorView filters = call_.weight;
    const std::int64_t sizes[] = {count, filters.sizes[1], filters.sizes[2], filters.sizes[3]};
    filters.sizes = sizes;
    filters.data = static_cast<char*>(filters.data) + first * filters.strides[0];
    PackedWeight packed = packed_weight(context_, call_.weight_storage, filters, conv.weight_order(),
                                        static_cast<std::int64_t>(filters.dtype), conv.weight_bytes(),
                                        [&](void* to) { return conv.pack(filters.data, filters.strides, to); });
    if (packed.kept) kept_.push_back(std::move(packed.kept));
    return packed.data;
  }

  KernelContext* const context_;
  Int8Call& call_;
  std::vector<std::vector<Int8Piece>> shares_;
  std::vector<std::vector<std::shared_ptr<OneDnnInt8Conv>>> convs_;  // as the pieces of the shares
  std::vector<Packed> packed_;
  std::vector<Ref<Storage>> kept_;
  std::size_t scratch_bytes_ = 0;  // of a share
};

}  // namespace

Status int8_onednn(KernelContext* context, Int8Call& call) {
  try {
    return ByteWork(context, call).run();
  } catch (const std::exception& error) {  // no memory for the plan
    context->set_error(context, error.what());
    return Status::failed;
  }
}

}  // namespace halfstep::cpu
