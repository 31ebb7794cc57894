// SPDX-License-Identifier: Apache-2.0
// Internal: what a capture remembers of a step, and how it runs it again.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "halfstep/autograd/node.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/recorder.h"

namespace halfstep::detail {

/// The memory of one recording. What the step frees is used again by what it makes later, in every replay in the same
/// way. Lives until the recording and all tensors in it have gone.
class CaptureArena final : public Allocator {
 public:
  static CaptureArena* make() { return new CaptureArena; }
  void* allocate(std::size_t bytes) override;
  void deallocate(void* data, std::size_t bytes) noexcept override;
  /// Whether the address lies in it.
  bool owns(const void* data) const;
  /// Blocks in use.
  std::size_t in_use() const;
  /// Called by the recording at its end: unused blocks are returned now, the others when they are freed.
  void close() noexcept;

 private:
  CaptureArena() = default;
  ~CaptureArena() override = default;
  void release(std::unique_lock<std::mutex> lock) noexcept;

  mutable std::mutex mutex_;
  std::map<std::size_t, std::vector<void*>> free_;  // by size
  std::map<const char*, std::size_t> blocks_;       // all that was taken from the system
  std::uint64_t users_ = 1;                         // blocks in use, and the recording
  bool closed_ = false;
};

/// A recorded run of a step.
class Recording final : public KernelRecorder {
 public:
  /// Only looks, which parameters the step uses and whether it can be captured.
  Recording() = default;
  /// Remembers everything; `inputs` of later runs may lie elsewhere.
  Recording(std::span<const Tensor> inputs, const std::vector<Ref<TensorImpl>>& leaves);
  ~Recording() override;
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  // KernelRecorder
  Allocator* memory() override { return arena_; }
  void refuse(std::string why) override;
  void kernel(const KernelCall& call, KernelFn function, bool bounded) override;
  void host(std::function<void()> work) override;
  void before(std::function<bool()> work) override;
  void keep(const Tensor& tensor) override;
  void manage(const Tensor& tensor) override;
  void uses(const Tensor& parameter) override;
  const float* bound_of(const Tensor& tensor) override;

  /// Ends the recording: takes over what the step returned and the gradients that it left. False when something else
  /// that the step made is still in use: state that it keeps, which a replay would make anew.
  bool finish(const std::vector<Tensor>& results, const std::vector<Ref<TensorImpl>>& leaves,
              std::span<const Tensor> inputs);
  /// The inputs under storages of their own, which tell them from what others have in their memory; for the step.
  const std::vector<Tensor>& aliases() const { return aliases_; }
  const std::string& refusal() const { return refusal_; }
  const std::vector<Ref<TensorImpl>>& leaves() const { return leaves_; }

  /// Whether all that it works on is still there and in use.
  bool valid() const;
  /// Does what comes before a replay; false when the recording no longer fits.
  bool ready();
  /// Runs it again. Throws what kernels and the host's work throw.
  std::vector<Tensor> replay(std::span<const Tensor> inputs);

 private:
  struct Step {
    KernelFn function = nullptr;  ///< null: work of the host
    const char* name = nullptr;
    const void* attributes = nullptr;
    std::size_t first_view = 0;
    int inputs = 0;
    int outputs = 0;
    bool bounded = false;
    float bound = 0;
    std::vector<Storage*> written = {};            ///< outside of the arena
    std::vector<std::size_t> written_inputs = {};  ///< that lie there
    std::function<void()> work = {};
  };
  struct Relocation {
    std::size_t view;
    std::size_t input;
    std::ptrdiff_t offset;  ///< in bytes, from the input's first element
  };
  struct Context;

  void add_view(const Tensor& tensor, bool written, Step& step);
  void note_leaf(const Tensor& tensor);

  CaptureArena* arena_ = nullptr;
  std::string refusal_;
  std::vector<Ref<TensorImpl>> leaves_;
  std::set<const TensorImpl*> known_leaves_;

  std::deque<Step> steps_;  // bounds of steps are pointed to
  std::vector<TensorView> views_;
  std::vector<Storage*> storages_;  // of each view, where it lies outside of the arena; else null
  std::deque<Shape> shapes_;
  std::vector<std::unique_ptr<unsigned char[]>> attributes_;
  std::vector<Relocation> relocations_;
  std::vector<std::function<bool()>> before_;
  std::vector<Tensor> kept_;
  std::map<Storage*, Ref<Storage>> outside_;
  std::set<const Storage*> managed_;
  std::map<TensorImpl*, std::pair<Ref<TensorImpl>, bool>> modes_;  // of tensors outside: whether they require grad
  std::vector<std::pair<Ref<TensorImpl>, Storage*>> places_;       // of leaves
  std::map<const Storage*, const float*> bounds_;                  // while recording
  std::vector<Tensor> aliases_;
  std::vector<std::pair<const Storage*, std::size_t>> inputs_;
  std::vector<const void*> input_data_;

  std::vector<std::pair<Ref<TensorImpl>, Tensor>> start_;       // gradients at the start, while recording
  std::vector<std::pair<Ref<TensorImpl>, Storage*>> added_to_;  // those that the step reads

  std::vector<Tensor> results_;
  std::vector<std::pair<Ref<TensorImpl>, Tensor>> gradients_;
  std::vector<TensorView> scratch_;
  std::vector<std::pair<void*, std::size_t>> workspace_;
};

/// The gradient that a leaf holds; undefined for none.
Tensor gradient_of(const TensorImpl& leaf);

}  // namespace halfstep::detail
