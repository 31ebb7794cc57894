// SPDX-License-Identifier: Apache-2.0
// Finds chains in a recorded step and runs them. A chain has neighbouring calls, in their order, and each call has the
// same blocks, so that a block's results are complete when the next call reads them. What lies in memory at all is
// therefore either the same elements for two calls or has no byte in common. What nobody reads after the chain stays in
// a thread's own memory, block by block.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <numeric>
#include <string>

#include "halfstep/capture/replay_internal.h"
#include "halfstep/core/fail.h"
#include "halfstep/runtime/kernel.h"
#include "halfstep/runtime/log.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::detail {
namespace {

using Kind = ChainOperand::Kind;

// Tensors of fewer elements stay in the cache from call to call anyway, and their calls use one thread.
constexpr std::int64_t kLeastElements = 32768;
// Of a block. Tensors of 128 KB stay in the second cache, and are long enough for the processor to fetch ahead what
// comes from memory: with blocks of 16 KB that costs more than the chain saves.
constexpr std::int64_t kMostInBlock = 32768;
// Blocks begin where vectors of every width and the generator's blocks of random numbers do.
constexpr std::int64_t kBlockMultiple = 64;
// Of a thread, for what stays in the chain.
constexpr std::int64_t kKeptBytes = 524288;
constexpr std::size_t kMostCalls = 32;
constexpr int kMostOperands = 8;
// Elements of one call that are worth a thread, and the fewest of a whole chain.
constexpr std::int64_t kCallGrain = 32768, kChainGrain = 8192;

struct Range {
  const char* begin;
  const char* end;
  bool overlaps(const Range& other) const { return begin < other.end && other.begin < end; }
};

// Bytes from the lowest element to the end of the highest.
Range range_of(const TensorView& view) {
  const auto* data = static_cast<const char*>(view.data);
  if (!view.defined || view.numel == 0) return {data, data};
  std::int64_t low = 0, high = 1;
  for (int d = 0; d < view.ndim; ++d) {
    const std::int64_t last = (view.sizes[d] - 1) * view.strides[d];
    (last < 0 ? low : high) += last;
  }
  const auto size = static_cast<std::int64_t>(item_size(view.dtype));
  return {data + low * size, data + high * size};
}

// Whether its elements, in some order of the dimensions, lie without gaps, each in a place of its own.
bool is_dense(const TensorView& view) {
  if (view.contiguous) return true;
  std::int64_t expected = 1;
  for (int found = -1, done = 0; done < view.ndim; ++done, found = -1) {
    for (int d = 0; d < view.ndim && found < 0; ++d) {
      if (view.sizes[d] > 1 && view.strides[d] == expected) found = d;
    }
    if (found < 0) break;
    expected *= view.sizes[found];
  }
  return expected == view.numel;
}

bool same_layout(const TensorView& a, const TensorView& b) {
  if (a.contiguous && b.contiguous) return a.numel == b.numel;
  if (a.ndim != b.ndim) return false;
  for (int d = 0; d < a.ndim; ++d) {
    if (a.sizes[d] != b.sizes[d] || (a.sizes[d] > 1 && a.strides[d] != b.strides[d])) return false;
  }
  return true;
}

// Takes what lies in `gone` out of `ranges`.
void subtract(std::vector<Range>& ranges, const Range& gone) {
  std::vector<Range> rest;
  for (const Range& r : ranges) {
    if (!r.overlaps(gone)) {
      rest.push_back(r);
      continue;
    }
    if (r.begin < gone.begin) rest.push_back({r.begin, gone.begin});
    if (gone.end < r.end) rest.push_back({gone.end, r.end});
  }
  ranges = std::move(rest);
}

bool any_overlaps(const std::vector<Range>& ranges, const Range& other) {
  return std::any_of(ranges.begin(), ranges.end(), [&](const Range& r) { return r.overlaps(other); });
}

}  // namespace

// Looks at a run of calls that all can be sliced.
class ChainFinder {
 public:
  explicit ChainFinder(const Recording& recording) : r_(recording), moves_(r_.views_.size()) {
    for (const auto& relocation : r_.relocations_) moves_[relocation.view] = true;
    const auto root = [&](const Tensor& t) {
      if (!t.defined()) return;
      const auto* begin = static_cast<const char*>(t.storage()->address());
      roots_.push_back({begin, begin + t.storage()->bytes()});
    };
    for (const Tensor& t : r_.results_) root(t);
    for (const Tensor& t : r_.kept_) root(t);
    for (const auto& [leaf, gradient] : r_.gradients_) root(gradient);
  }

  std::vector<Chain> find() const {
    std::vector<Chain> chains;
    for (std::size_t at = 0; at < r_.steps_.size();) {
      std::size_t last = at;
      while (last < r_.steps_.size() && last - at < kMostCalls && can_slice(r_.steps_[last]) &&
             output(last).numel == output(at).numel) {
        ++last;
      }
      Chain chain;
      if (last - at > 1 && plan(at, last, chain)) {
        at = chain.last;
        chains.push_back(std::move(chain));
      } else {
        ++at;
      }
    }
    return chains;
  }

 private:
  using Step = Recording::Step;

  const TensorView& output(std::size_t step) const {
    const Step& s = r_.steps_[step];
    return r_.views_[s.first_view + static_cast<std::size_t>(s.inputs)];
  }

  static Slices slices_of(const Step& s) { return s.table->traits[static_cast<std::size_t>(s.dtype)].slices; }

  bool can_slice(const Step& s) const {
    if (s.kind != Step::Kind::kernel || !s.device.is_cpu() || s.outputs != 1 || s.inputs >= kMostOperands ||
        !s.written_inputs.empty()) {
      return false;
    }
    const Slices slices = slices_of(s);
    const TensorView& out = r_.views_[s.first_view + static_cast<std::size_t>(s.inputs)];
    if (slices == Slices::none || !out.defined || out.numel < kLeastElements || !is_dense(out)) return false;
    for (int k = 0; k < s.inputs; ++k) {
      const TensorView& in = r_.views_[s.first_view + static_cast<std::size_t>(k)];
      if (!in.defined) return false;
      if (slices == Slices::random) {
        if (k == 1 ? in.dtype != DType::i64 || in.numel != 2 || !in.contiguous : !in.contiguous || !out.contiguous) {
          return false;
        }
        if (k == 1) continue;
      }
      if (in.numel != 1 && !same_layout(in, out)) return false;
    }
    return true;
  }

  std::vector<ChainOperand> operands(std::size_t step) const {
    const Step& s = r_.steps_[step];
    const bool random = slices_of(s) == Slices::random;
    std::vector<ChainOperand> all;
    for (int k = 0; k <= s.inputs; ++k) {
      const std::size_t view = s.first_view + static_cast<std::size_t>(k);
      const TensorView& v = r_.views_[view];
      const Kind kind = random && k == 1 ? Kind::state : v.numel == 1 ? Kind::number : Kind::elements;
      all.push_back({.view = view, .kind = kind, .size = static_cast<std::int64_t>(item_size(v.dtype))});
    }
    return all;
  }

  Range range(const ChainOperand& o) const { return range_of(r_.views_[o.view]); }
  // Whether two operands that have bytes in common have each element in common, so that their blocks are the same.
  bool same_elements(const ChainOperand& a, const ChainOperand& b) const {
    return a.kind == Kind::elements && b.kind == Kind::elements && a.size == b.size &&
           r_.views_[a.view].data == r_.views_[b.view].data;
  }

  // Whether anything but the calls of the chain [first, last) reads what step `writer` of it wrote.
  bool needed(std::size_t writer, std::size_t last) const {
    const Range written = range_of(output(writer));
    if (!r_.arena_->owns(written.begin)) return true;  // the user's
    std::vector<Range> rest{written};
    for (std::size_t i = writer + 1; i < last; ++i) subtract(rest, range_of(output(i)));
    for (std::size_t i = last; i < r_.steps_.size() && !rest.empty(); ++i) {
      const Step& s = r_.steps_[i];
      if (s.kind != Step::Kind::kernel) return true;
      const bool whole = s.fresh || slices_of(s) != Slices::none;  // it reads nothing of its outputs
      const int reads = whole ? s.inputs : s.inputs + s.outputs;
      for (int k = 0; k < reads; ++k) {
        if (any_overlaps(rest, range_of(r_.views_[s.first_view + static_cast<std::size_t>(k)]))) return true;
      }
      for (int k = s.inputs; whole && k < s.inputs + s.outputs; ++k) {
        const TensorView& out = r_.views_[s.first_view + static_cast<std::size_t>(k)];
        if (out.defined && is_dense(out)) subtract(rest, range_of(out));
      }
    }
    return std::any_of(roots_.begin(), roots_.end(), [&](const Range& root) { return any_overlaps(rest, root); });
  }

  // The longest chain of [first, last) from `first` on; false for none, or where its calls have nothing in common.
  bool plan(std::size_t first, std::size_t last, Chain& chain) const {
    std::vector<std::vector<ChainOperand>> calls;
    for (std::size_t i = first; i < last; ++i) calls.push_back(operands(i));
    // The call that wrote what each operand reads, where it is one of them; else -1.
    std::vector<std::vector<int>> from(calls.size());
    for (std::size_t i = 0; i < calls.size(); ++i) {
      if (!find_writers(calls, i, from[i])) calls.resize(i);
    }
    std::vector<bool> stays;
    for (bool changed = true; changed;) {
      changed = false;
      if (calls.size() < 2) return false;
      stays.assign(calls.size(), false);
      for (std::size_t i = 0; i < calls.size(); ++i) stays[i] = !needed(first + i, first + calls.size());
      if (const std::size_t end = conflict(calls, from, stays); end < calls.size()) {
        calls.resize(end);
        changed = true;
      }
    }
    chain = {.first = first, .last = first + calls.size(), .elements = output(first).numel, .block = 0, .calls = {}};
    for (std::size_t i = 0; i < calls.size(); ++i) chain.calls.push_back({first + i, std::move(calls[i])});
    return keep(chain, from, stays);
  }

  // For each input of call i, the last call before it that wrote what it reads; false where that isn't all of it.
  bool find_writers(const std::vector<std::vector<ChainOperand>>& calls, std::size_t i, std::vector<int>& from) const {
    for (std::size_t k = 0; k + 1 < calls[i].size(); ++k) {
      std::size_t w = i;
      while (w > 0 && !range(calls[i][k]).overlaps(range(calls[w - 1].back()))) --w;
      if (w > 0 && !same_elements(calls[i][k], calls[w - 1].back())) return false;
      from.push_back(static_cast<int>(w) - 1);
    }
    return true;
  }

  // The first call that can't be in a chain with those before it: what it writes to memory, or what one of them does,
  // has bytes in common with other elements of another.
  std::size_t conflict(const std::vector<std::vector<ChainOperand>>& calls, const std::vector<std::vector<int>>& from,
                       const std::vector<bool>& stays) const {
    const auto in_memory = [&](std::size_t call, std::size_t operand) {
      if (operand + 1 == calls[call].size()) return !stays[call];
      return from[call][operand] < 0 || !stays[static_cast<std::size_t>(from[call][operand])];
    };
    std::size_t end = calls.size();
    for (std::size_t w = 0; w < end; ++w) {
      if (stays[w]) continue;
      for (std::size_t i = 0; i < end; ++i) {
        for (std::size_t k = 0; k < calls[i].size(); ++k) {
          if (!in_memory(i, k) || !range(calls[i][k]).overlaps(range(calls[w].back()))) continue;
          if (!same_elements(calls[i][k], calls[w].back())) end = std::min(end, std::max(i, w));
        }
      }
    }
    return end;
  }

  // Finds places for what stays in the chain, each used again when it has been read for the last time.
  bool keep(Chain& chain, const std::vector<std::vector<int>>& from, const std::vector<bool>& stays) const {
    const std::size_t n = chain.calls.size();
    std::vector<std::size_t> last_read(n);
    std::iota(last_read.begin(), last_read.end(), std::size_t{0});
    std::vector<Range> seen;
    const auto bytes = [&](const ChainOperand& o) { return static_cast<std::size_t>(chain.elements * o.size); };
    for (std::size_t i = 0; i < n; ++i) {
      const auto& operands = chain.calls[i].operands;
      for (std::size_t k = 0; k + 1 < operands.size(); ++k) {
        chain.moves = chain.moves || moves_[operands[k].view];
        if (operands[k].kind != Kind::elements) continue;
        if (from[i][k] >= 0) last_read[static_cast<std::size_t>(from[i][k])] = i;
        if (from[i][k] >= 0 || any_overlaps(seen, range(operands[k]))) chain.bytes_spared += bytes(operands[k]);
        seen.push_back(range(operands[k]));
      }
      seen.push_back(range(operands.back()));
      // Memory is read before it is written.
      if (stays[i]) chain.bytes_spared += 2 * bytes(operands.back());
    }
    if (chain.bytes_spared == 0) return false;
    std::vector<std::size_t> free_after;  // of each place, the call that reads it last
    std::vector<std::int64_t> size;
    std::vector<int> place(n, -1);
    for (std::size_t i = 0; i < n; ++i) {
      if (!stays[i]) continue;
      const auto found = std::find_if(free_after.begin(), free_after.end(), [&](std::size_t call) { return call < i; });
      place[i] = static_cast<int>(found - free_after.begin());
      if (found == free_after.end()) {
        free_after.push_back(0);
        size.push_back(0);
      }
      free_after[static_cast<std::size_t>(place[i])] = last_read[i];
      size[static_cast<std::size_t>(place[i])] =
          std::max(size[static_cast<std::size_t>(place[i])], chain.calls[i].operands.back().size);
    }
    const std::int64_t total = std::accumulate(size.begin(), size.end(), std::int64_t{0});
    chain.block = std::min(kMostInBlock, kKeptBytes / std::max<std::int64_t>(total, 1));
    chain.block = std::max(chain.block / kBlockMultiple * kBlockMultiple, kBlockMultiple);
    chain.kept_bytes = static_cast<std::size_t>(total * chain.block);
    std::vector<std::ptrdiff_t> offset(size.size());
    std::exclusive_scan(size.begin(), size.end(), offset.begin(), std::int64_t{0});
    for (std::size_t i = 0; i < n; ++i) {
      auto& operands = chain.calls[i].operands;
      for (std::size_t k = 0; k + 1 < operands.size(); ++k) {
        const int writer = from[i][k];
        if (writer < 0 || place[static_cast<std::size_t>(writer)] < 0) continue;
        operands[k].kept = offset[static_cast<std::size_t>(place[static_cast<std::size_t>(writer)])] * chain.block;
      }
      if (place[i] >= 0) operands.back().kept = offset[static_cast<std::size_t>(place[i])] * chain.block;
    }
    return true;
  }

  const Recording& r_;
  std::vector<bool> moves_;
  std::vector<Range> roots_;
};

void Recording::find_chains() {
  chains_ = ChainFinder(*this).find();
  std::size_t calls = 0, bytes = 0;
  for (const Chain& chain : chains_) {
    calls += chain.calls.size();
    bytes += chain.bytes_spared;
    std::string names;
    for (const ChainCall& call : chain.calls) names += fmt::format(" {}", steps_[call.step].name);
    log(LogLevel::debug,
        fmt::format("capture: a chain of {} elements in blocks of {}, {:.3f} MB spared:{}", chain.elements, chain.block,
                    static_cast<double>(chain.bytes_spared) / 1e6, names));
  }
  log(LogLevel::debug, fmt::format("capture: {} of {} calls in {} chains, which spare {:.3f} MB a step", calls,
                                   steps_.size(), chains_.size(), static_cast<double>(bytes) / 1e6));
}

namespace {

// What kernels of a chain are called with, on one thread.
struct SliceContext : KernelContext {
  std::string error;
  SliceContext() {
    owner = this;
    set_error = [](KernelContext* context, const char* text) { static_cast<SliceContext*>(context)->error = text; };
    workspace = [](KernelContext*, std::uint64_t) -> void* { return nullptr; };
  }
};

// The first call that failed.
struct Failure {
  std::mutex mutex;
  std::size_t call = std::numeric_limits<std::size_t>::max();
  std::string error;
  void keep(std::size_t failed, const std::string& why) {
    const std::lock_guard lock(mutex);
    if (failed >= call) return;
    call = failed;
    error = why;
  }
  bool failed() const { return call != std::numeric_limits<std::size_t>::max(); }
};

}  // namespace

bool Recording::apart(const Chain& chain) const {
  for (const ChainCall& reader : chain.calls) {
    for (const ChainOperand& in : reader.operands) {
      if (in.kept >= 0) continue;
      const Range read = range_of(views_[in.view]);
      for (const ChainCall& writer : chain.calls) {
        const ChainOperand& out = writer.operands.back();
        if (out.kept >= 0 || !read.overlaps(range_of(views_[out.view]))) continue;
        if (in.kind != Kind::elements || in.size != out.size || views_[in.view].data != views_[out.view].data)
          return false;
      }
    }
  }
  return true;
}

Status Recording::call_slice(const ChainCall& call, KernelContext& context, std::int64_t at, std::int64_t count,
                             char* memory) const {
  const std::int64_t one = 1;
  std::int64_t random[2];
  TensorView views[kMostOperands];
  for (std::size_t k = 0; k < call.operands.size(); ++k) {
    const ChainOperand& o = call.operands[k];
    TensorView& view = views[k] = views_[o.view];
    switch (o.kind) {
      case Kind::elements:
        view.data = o.kept >= 0 ? memory + o.kept : static_cast<char*>(view.data) + at * o.size;
        view.sizes = &count;
        view.strides = &one;
        view.numel = count;
        view.ndim = 1;
        view.contiguous = true;
        break;
      case Kind::number:
        view.ndim = 0;
        view.contiguous = true;
        break;
      case Kind::state: {
        const auto* state = static_cast<const std::int64_t*>(view.data);
        random[0] = state[0];
        random[1] =
            static_cast<std::int64_t>(static_cast<std::uint64_t>(state[1]) + static_cast<std::uint64_t>(at / 4));
        view.data = random;
        break;
      }
    }
  }
  const Step& step = steps_[call.step];
  return step.function(&context, views, step.inputs, views + step.inputs, 1, step.attributes);
}

bool Recording::run_chain(const Chain& chain, std::span<const Tensor> inputs) {
  if (chain.moves && !apart(chain)) return false;
  const std::int64_t grain = std::max(kChainGrain, kCallGrain / static_cast<std::int64_t>(chain.calls.size()));
  const std::int64_t ranges = num_ranges(chain.elements, grain);
  const auto edge = [&](std::int64_t range) {
    return range == ranges ? chain.elements : chain.elements / kBlockMultiple * range / ranges * kBlockMultiple;
  };
  workspace_.begin();
  char* const memory = static_cast<char*>(workspace_.take(static_cast<std::size_t>(ranges) * chain.kept_bytes));
  Failure failure;
  const auto run_range = [&](std::int64_t range) {
    SliceContext context;
    for (std::int64_t at = edge(range); at < edge(range + 1); at += chain.block) {
      const std::int64_t count = std::min(chain.block, edge(range + 1) - at);
      for (const ChainCall& call : chain.calls) {
        char* const own = memory + static_cast<std::size_t>(range) * chain.kept_bytes;
        if (call_slice(call, context, at, count, own) == Status::ok) continue;
        failure.keep(call.step, context.error);
        return;
      }
    }
  };
  parallel_for(ranges, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t range = begin; range < end; ++range) run_range(range);
  });
  for (const ChainCall& call : chain.calls) {
    Step& step = steps_[call.step];
    step.bound = std::numeric_limits<float>::infinity();
    wrote(step, inputs);
  }
  if (failure.failed()) {
    fail<Error>("{}: {}, in the replay of a captured step", steps_[failure.call].name,
                failure.error.empty() ? "its kernel refused these inputs" : failure.error);
  }
  chained_ += chain.calls.size();
  return true;
}

}  // namespace halfstep::detail
