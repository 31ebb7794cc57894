// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/image_order.h"

#include <algorithm>
#include <vector>

#include "halfstep/backends/cpu/move.h"

namespace halfstep::cpu {
namespace {

// Of all copies. max_pool2d of 16 x 64 x 56x56 in f32 and its gradient, two threads of a Zen 5 with 1 MiB of second and
// 32 MiB of third cache: 3 and 4 MiB take 2.0 ms, 6 to 64 MiB 2.1 to 2.6, and 2 MiB, which is one image, 4.3.
constexpr std::int64_t kCopiedBytes = 4 << 20;
constexpr std::int64_t kFewestChannels = 8;

bool side_by_side(const TensorView& images) { return images.strides[1] == 1; }

/// Some images of an operand, and room for them channels-last unless they lie so.
struct Piece {
  TensorView lying, view;
  std::int64_t sizes[4], strides[4];
};

void begin_at(Piece& piece, const TensorView& images, std::int64_t first, std::int64_t count) {
  std::copy_n(images.sizes, 4, piece.sizes);
  piece.sizes[0] = count;
  piece.lying = images;
  advance(piece.lying, first * images.strides[0]);
  piece.lying.sizes = piece.sizes;
  piece.lying.numel = count * images.sizes[1] * images.sizes[2] * images.sizes[3];
  piece.lying.contiguous = false;
  void* const room = piece.view.data;
  piece.view = piece.lying;
  if (side_by_side(images)) return;
  channels_last_strides(piece.sizes, piece.strides);
  piece.view.data = room;
  piece.view.strides = piece.strides;
}

}  // namespace

void channels_last_strides(const std::int64_t* sizes, std::int64_t* strides) {
  strides[0] = sizes[1] * sizes[2] * sizes[3];
  strides[1] = 1;
  strides[2] = sizes[1] * sizes[3];
  strides[3] = sizes[1];
}

bool reorders_images(std::span<const TensorView> in, std::span<const TensorView> out) {
  bool lies_otherwise = false;
  for (const auto& operands : {in, out}) {
    for (const TensorView& images : operands) {
      if (images.dtype == DType::f64 || images.sizes[1] < kFewestChannels || images.numel == 0) return false;
      lies_otherwise = lies_otherwise || !side_by_side(images);
    }
  }
  return lies_otherwise;
}

Status run_channels_last(KernelContext* context, ImageKernel kernel, std::span<const TensorView> in,
                         std::span<TensorView> out, const void* attributes) {
  std::vector<Piece> pieces(in.size() + out.size());
  std::vector<TensorView> views(pieces.size());
  const auto operand = [&](std::size_t i) -> const TensorView& { return i < in.size() ? in[i] : out[i - in.size()]; };
  const std::int64_t images = operand(0).sizes[0];
  std::int64_t bytes = 0;
  const auto bytes_of = [](const TensorView& v) {
    return v.numel / v.sizes[0] * static_cast<std::int64_t>(item_size(v.dtype));
  };
  for (std::size_t i = 0; i < pieces.size(); ++i) bytes += side_by_side(operand(i)) ? 0 : bytes_of(operand(i));
  const std::int64_t at_once = std::clamp<std::int64_t>(kCopiedBytes / bytes, 1, images);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    if (side_by_side(operand(i))) continue;
    pieces[i].view.data = context->workspace(context, static_cast<std::uint64_t>(at_once * bytes_of(operand(i))));
    if (pieces[i].view.data == nullptr) return Status::out_of_memory;
  }
  for (std::int64_t first = 0; first < images; first += at_once) {
    const std::int64_t count = std::min(at_once, images - first);
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      begin_at(pieces[i], operand(i), first, count);
      if (i < in.size() && !side_by_side(operand(i))) move_elements(pieces[i].view, pieces[i].lying);
      views[i] = pieces[i].view;
    }
    const Status status = kernel(context, views.data(), static_cast<int>(in.size()), views.data() + in.size(),
                                 static_cast<int>(out.size()), attributes);
    if (status != Status::ok) return status;
    for (std::size_t i = in.size(); i < pieces.size(); ++i) {
      if (!side_by_side(operand(i))) move_elements(pieces[i].lying, pieces[i].view);
    }
  }
  return Status::ok;
}

}  // namespace halfstep::cpu
