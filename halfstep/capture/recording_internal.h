// SPDX-License-Identifier: Apache-2.0
// Internal: what a capture remembers of a step, and how it runs it again.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "halfstep/autograd/node.h"
#include "halfstep/capture/arena_internal.h"
#include "halfstep/capture/chains_internal.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/recorder.h"
#include "halfstep/runtime/device_backend.h"
#include "halfstep/runtime/queue.h"

namespace halfstep::detail {

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
  Allocator* memory(Device device) override;
  void refuse(std::string why) override;
  void kernel(const KernelCall& call, const KernelRun& run) override;
  void copy(const Bytes& to, const Bytes& from, std::size_t count, bool non_blocking) override;
  void host(std::function<void()> work) override;
  void exchange(std::span<const Tensor> tensors, std::function<void()> work) override;
  void own_memory(bool on) override { own_memory_ = on; }
  Tensor stand_in(const Tensor& tensor) override;
  void before(std::function<bool()> work) override;
  void keep(const Tensor& tensor) override;
  void manage(const Tensor& tensor) override;
  bool owns(const Storage& block) override { return arena_ && owns(block.address()); }
  void uses(const Tensor& tensor) override;
  const float* bound_of(const Tensor& tensor) override;

  /// Brings what is left of the step to the device, before the recording ends.
  void settle(const std::vector<Tensor>& results, const std::vector<Ref<TensorImpl>>& leaves);
  /// Ends the recording: takes over what the step returned and the gradients that it left. False when something else
  /// that the step made is still in use: state that it keeps, which a replay would make anew.
  bool finish(const std::vector<Tensor>& results, const std::vector<Ref<TensorImpl>>& leaves,
              std::span<const Tensor> inputs);
  /// The inputs under storages of their own, which tell them from what others have in their memory; for the step.
  const std::vector<Tensor>& aliases() const { return aliases_; }
  const std::string& refusal() const { return refusal_; }
  const std::vector<Ref<TensorImpl>>& leaves() const { return leaves_; }
  /// Bytes of the tensors that it makes, what lies in the same place counted once.
  std::size_t bytes() const;

  /// Whether all that it works on is still there and in use.
  bool valid() const;
  /// Does what comes before a replay; false when the recording no longer fits.
  bool ready();
  /// Runs it again and returns copies of its results. Throws what kernels and the host's work throw.
  std::vector<Tensor> replay(std::span<const Tensor> inputs);
  /// The same without the copies: results() have what it computed, until it runs again. On the CPU it takes no memory.
  void run_again(std::span<const Tensor> inputs);
  const std::vector<Tensor>& results() const { return results_; }
  /// Runs kernels one by one: while a graph is made, no other thread may use the queue.
  void leave_out_graphs() { no_graphs_ = true; }
  /// Runs elementwise calls one by one, each over all of its elements.
  void leave_out_chains() { no_chains_ = true; }
  /// Calls of kernels that ran in chains, in all replays.
  std::uint64_t chained_calls() const { return chained_; }
  /// Whether the last replay went through graphs of the device.
  bool used_graphs() const { return used_graphs_; }

 private:
  struct Step {
    enum class Kind { kernel, copy, host };
    Kind kind = Kind::kernel;
    Device device = {};  ///< of a kernel
    KernelFn function = nullptr;
    void* state = nullptr;
    const KernelTable* table = nullptr;
    const char* name = nullptr;
    DType dtype = DType::f32;
    const void* attributes = nullptr;
    std::size_t live_bytes = 0;  ///< of attributes that may change
    std::size_t first_view = 0;
    int inputs = 0;
    int outputs = 0;
    bool fresh = false;  ///< nothing of the outputs is read
    bool bounded = false;
    float bound = 0;
    void* work_memory = nullptr;  ///< planned memory to work in
    std::size_t work_bytes = 0;
    Device from = {}, to = {};  ///< of a copy
    std::size_t bytes = 0;
    bool non_blocking = false;
    bool early = false;                  ///< a copy of what the host made, to memory that only this copy writes
    std::vector<Storage*> written = {};  ///< outside of the arenas
    std::vector<std::size_t> written_inputs = {};  ///< that lie there
    std::function<void()> work = {};
    bool ordered = false;                  ///< work of exchange(): kernels stay ahead of it and behind it
    std::vector<Storage*> exchanged = {};  ///< of a device, by that work
    // Of kernels in a graph:
    std::vector<unsigned char> baked = {};  ///< live attributes as the graph has them
    bool alone = false;                     ///< they change too often for one

    bool on_device() const { return kind == Kind::kernel && !device.is_host(); }
  };
  struct Relocation {
    std::size_t view;
    std::size_t input;
    std::ptrdiff_t offset;  ///< in bytes, from the input's first element
  };
  // Steps from `first` to `last`, excluded: what the host has to do for them, then a graph of the device's kernels.
  // None of them is an exchange.
  struct Segment {
    std::size_t first, last;
    halfstep_graph* graph;
  };
  struct Context;

  void add_view(const Tensor& tensor, bool written, Step& step);
  /// Where the next view lies: in an input, in the arenas, or outside. Returns the storage in the last case.
  Storage* place(const Ref<Storage>& storage, const void* data, bool written, Step& step);
  void note_leaf(const Tensor& tensor);
  void note_mode(const Tensor& tensor);
  /// Sees to it that there is one device and one queue; false when the step has others.
  bool use_device(Device device, void* queue);
  bool owns(const void* data) const;
  std::array<CaptureArena*, 3> arenas() const { return {arena_, meta_arena_, device_arena_}; }
  std::size_t blocks_in_use() const;
  /// The arena of this address, and where it lies in there; the step that is recorded now uses it.
  struct Lies {
    CaptureArena* arena;
    CaptureArena::Place place;
  };
  std::optional<Lies> find(const void* data) const;
  std::optional<Lies> note_use(const void* data);
  /// Gives all that the step works in and leaves behind its place in replays.
  void place_memory();

  void relocate(std::span<const Tensor> inputs);
  /// The same, with copies of those that lie in the recording's memory and aren't written; empty where none lies there.
  std::vector<Tensor> outside_of_own_memory(std::span<const Tensor> inputs) const;
  void wrote(const Step& step, std::span<const Tensor> inputs);
  void run(Step& step, Context& context, std::span<const Tensor> inputs);
  void launch(Step& step, Context& context);
  Status call(Step& step, Context& context);

  // Chains of elementwise calls (chains.cpp).
  friend class ChainFinder;
  void find_chains();
  /// False where what the chain reads and writes in this replay overlaps otherwise than in the recorded step.
  bool run_chain(const Chain& chain, std::span<const Tensor> inputs);
  bool apart(const Chain& chain) const;
  /// The kernel of one call on `count` elements from `at` on.
  Status call_slice(const ChainCall& call, KernelContext& context, std::int64_t at, std::int64_t count,
                    char* memory) const;

  // Graphs of the device (graphs.cpp).
  bool can_have_graphs() const;
  void make_graphs(Context& context, std::span<const Tensor> inputs);
  bool find_buffers(const std::vector<std::pair<std::size_t, std::size_t>>& ranges, std::span<const Tensor> inputs);
  bool add_segment(std::size_t first, std::size_t last, Context& context);
  bool run_segment(const Segment& segment, Context& context, std::span<const Tensor> inputs);
  void run_with_graphs(Context& context, std::span<const Tensor> inputs);
  void drop_graphs() noexcept;

  CaptureArena* arena_ = nullptr;         // of the CPU; null while it only looks
  CaptureArena* meta_arena_ = nullptr;    // of meta, used as the CPU's; null for none
  CaptureArena* device_arena_ = nullptr;  // of the device; null for none
  bool own_memory_ = false;
  Device device_ = {};
  DeviceBackend* backend_ = nullptr;  // of the device
  std::optional<Queue> queue_;        // the one that the step used
  std::string refusal_;
  std::vector<Ref<TensorImpl>> leaves_;
  std::set<const TensorImpl*> known_leaves_;

  std::deque<Step> steps_;  // bounds of steps are pointed to
  std::vector<TensorView> views_;
  std::vector<Storage*> storages_;  // of each view, where it lies outside of the arena; else null
  std::deque<Shape> shapes_;
  std::vector<std::unique_ptr<unsigned char[]>> attributes_;
  std::vector<Relocation> relocations_;
  std::vector<std::pair<std::size_t, Lies>> lying_;  // views in the arenas, while recording
  std::vector<std::pair<Step*, Lies>> working_;      // steps that work in them, while recording
  std::vector<std::pair<Ref<Storage>, Lies>> stand_ins_;
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
  Scratch workspace_{Device{}};
  Scratch meta_workspace_{kMeta};
  std::optional<Scratch> device_workspace_;

  std::vector<Chain> chains_;  // in the order of their steps
  bool no_chains_ = false;
  std::uint64_t chained_ = 0;

  std::uint64_t replays_ = 0;
  bool no_graphs_ = false;    // they failed
  bool graphs_made_ = false;  // as far as there is something to be made
  bool building_ = false;     // kernels go into a graph
  bool used_graphs_ = false;  // in the last replay
  std::vector<Segment> segments_;
  // Where graphs read inputs: each is copied there before a replay.
  struct Buffer {
    std::size_t input;
    void* data;
    std::size_t bytes;
  };
  std::vector<Buffer> buffers_;
};

/// The gradient that a leaf holds; undefined for none.
Tensor gradient_of(const TensorImpl& leaf);

}  // namespace halfstep::detail
