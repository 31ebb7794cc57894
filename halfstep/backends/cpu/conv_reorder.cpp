// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/conv_reorder.h"

#include "halfstep/backends/cpu/conv_images.h"
#include "halfstep/backends/cpu/image_order.h"
#include "halfstep/backends/cpu/isa.h"
#include "halfstep/backends/cpu/move.h"
#include "halfstep/runtime/winograd.h"

namespace halfstep::cpu {
namespace {

// Room for the images where they don't lie channels-last. False: there is no memory.
bool take_images(KernelContext* context, const TensorView& images, char*& to) {
  const auto bytes = static_cast<std::size_t>(images.numel) * item_size(images.dtype);
  return channels_last(images) || take_workspace(context, bytes, to);
}

}  // namespace

bool needs_reorder(const ConvCall& call) noexcept {
  if (!all_floats(call) || (channels_last(call.input) && channels_last(call.output))) return false;
  const ReorderedCall reordered(call, nullptr, nullptr);
  return choose_conv_path(reordered.call, compute_isa(), winograd()) != ConvPath::blocks;
}

ReorderedCall::ReorderedCall(const ConvCall& of, void* input, void* output) : call(of) {
  void* const data[] = {input, output};
  TensorView* const views[] = {&call.input, &call.output};
  for (int i = 0; i < 2; ++i) {
    TensorView& view = *views[i];
    if (channels_last(view)) continue;
    channels_last_strides(view.sizes, strides_[i]);
    view.data = data[i], view.strides = strides_[i], view.contiguous = false;
  }
}

Status convolve_reordered(KernelContext* context, ConvCall& call) {
  char *input = nullptr, *output = nullptr;
  if (!take_images(context, call.input, input) || !take_images(context, call.output, output)) {
    return conv_out_of_memory(context);
  }
  ReorderedCall reordered(call, input, output);
  const bool moves = !runs_dry(context);
  if (moves && input != nullptr && call.part != ConvPart::input) move_elements(reordered.call.input, call.input);
  if (moves && output != nullptr && call.part != ConvPart::output) move_elements(reordered.call.output, call.output);
  const Status status = convolve(context, reordered.call);
  if (status == Status::ok && moves && call.part != ConvPart::weight) {
    TensorView& result = call.result();
    if (!channels_last(result)) move_elements(result, reordered.call.result());
  }
  return status;
}

}  // namespace halfstep::cpu
