// SPDX-License-Identifier: Apache-2.0
// Training steps that run once and are then replayed.
#pragma once

#include <any>
#include <array>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "halfstep/core/tensor.h"

namespace halfstep {

/// How the calls of a captured step ran.
struct CaptureStats {
  std::uint64_t plain = 0;     ///< normally
  std::uint64_t recorded = 0;  ///< normally, while being recorded
  std::uint64_t replayed = 0;  ///< replayed, kernel by kernel or through graphs of a device
  std::uint64_t graphs = 0;    ///< those of the replayed ones that went through graphs
  std::uint64_t chained = 0;   ///< kernel calls of replays that ran block by block with their neighbours
};

/// How steps are captured.
struct CaptureOptions {
  /// Replays neighbouring elementwise calls on large tensors of the CPU together, block by block: what one writes is
  /// read from the cache, and what nothing else reads isn't written to memory. The results are the same bits. Pays for
  /// formulas written out in ops; off by default, since the networks of this library have next to none.
  bool chains = false;
};

/// Calls `visit` for each tensor of a step's result: a tensor, or those in a vector, array, pair or tuple. A custom
/// type can participate by providing a function of this name in its namespace.
template <class V>
void visit_tensors(Tensor& t, V&& visit) {
  visit(t);
}
template <class T, class V>
void visit_tensors(std::vector<T>& list, V&& visit) {
  for (T& t : list) visit_tensors(t, visit);
}
template <class T, std::size_t N, class V>
void visit_tensors(std::array<T, N>& list, V&& visit) {
  for (T& t : list) visit_tensors(t, visit);
}
template <class A, class B, class V>
void visit_tensors(std::pair<A, B>& both, V&& visit) {
  visit_tensors(both.first, visit);
  visit_tensors(both.second, visit);
}
template <class... T, class V>
void visit_tensors(std::tuple<T...>& all, V&& visit) {
  std::apply([&](auto&... t) { (visit_tensors(t, visit), ...); }, all);
}

/// A step as a function of lists of tensors; capture() converts any function to it.
class HS_API CapturedStep {
 public:
  /// The result of a run: its tensors, and the value that contains them.
  struct Result {
    std::vector<Tensor> tensors;
    std::any frame = {};
  };
  using Function = std::function<Result(std::span<const Tensor>)>;

  explicit CapturedStep(Function step, const CaptureOptions& options = {});
  CapturedStep(CapturedStep&&) noexcept;
  CapturedStep& operator=(CapturedStep&&) noexcept;
  ~CapturedStep();

  Result operator()(std::span<const Tensor> inputs);

  /// Whether the last call was a replay.
  bool replayed() const;
  /// Why steps like the last call's can't be captured; empty if they can.
  const std::string& why_not() const;
  const CaptureStats& stats() const;
  /// Frees the memory of all recordings except what gradients and results still use. The next call with inputs of a
  /// known kind records the step again.
  void release();
  /// Discards all recordings.
  void reset();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

namespace detail {
[[noreturn]] HS_API void refuse_arity(std::size_t expected, std::size_t got);
}

/// A function whose calls are captured; see capture().
template <class F>
class Captured {
 public:
  explicit Captured(F step, const CaptureOptions& options = {})
      : step_(std::make_unique<F>(std::move(step))), options_(options) {}

  /// The step's result, for tensors of any shapes and dtypes, as many as at the first call. Throws Error for a
  /// different number of them, and whatever the step throws.
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    static_assert((std::is_convertible_v<const Inputs&, const Tensor&> && ...), "a captured step takes tensors");
    using Result = std::invoke_result_t<F&, const Inputs&...>;
    const std::array<Tensor, sizeof...(Inputs)> list{inputs...};
    if (captured_ && arity_ != sizeof...(Inputs)) detail::refuse_arity(arity_, sizeof...(Inputs));
    if (!captured_) {
      arity_ = sizeof...(Inputs);
      captured_ = std::make_unique<CapturedStep>(
          [step = step_.get()](std::span<const Tensor> given) {
            return run<Result>(*step, given, std::index_sequence_for<Inputs...>());
          },
          options_);
    }
    CapturedStep::Result made = (*captured_)(list);
    if constexpr (!std::is_void_v<Result>) {
      auto result = std::any_cast<Result>(std::move(made.frame));
      std::size_t i = 0;
      visit_tensors(result, [&](Tensor& t) { t = std::move(made.tensors[i++]); });
      return result;
    }
  }

  /// Whether the last call was a replay.
  bool replayed() const { return captured_ && captured_->replayed(); }
  /// Why steps like the last call's can't be captured; empty if they can.
  std::string why_not() const { return captured_ ? captured_->why_not() : std::string(); }
  CaptureStats stats() const { return captured_ ? captured_->stats() : CaptureStats(); }
  /// Discards all recordings.
  void reset() {
    if (captured_) captured_->reset();
  }

 private:
  template <class Result, std::size_t... I>
  static CapturedStep::Result run(F& step, std::span<const Tensor> given, std::index_sequence<I...>) {
    CapturedStep::Result made;
    if constexpr (std::is_void_v<Result>) {
      step(given[I]...);
    } else {
      Result result = step(given[I]...);
      visit_tensors(result, [&](Tensor& t) { made.tensors.push_back(std::exchange(t, Tensor())); });
      made.frame = std::move(result);
    }
    return made;
  }

  std::unique_ptr<F> step_;
  CaptureOptions options_;
  std::unique_ptr<CapturedStep> captured_;
  std::size_t arity_ = 0;
};

/// A step (forward pass, backward pass, optimizer, loss scaler, or any part of them) that is recorded once for each set
/// of shapes and then replayed: the same kernels on the same memory, without shape inference, autograd recording and
/// allocations. It does for a training step what the jit of MindSpore and JAX does, but by running it instead of
/// analysing its source.
///
///     auto step = capture([&](const Tensor& x, const Tensor& y) {
///       auto [loss, gradients] = grad_fn(x, y);
///       optimizer.step(gradients);
///       return loss;
///     });
///     for (auto [images, labels] : loader) losses.push_back(step(images, labels));
///
/// The step takes tensors and returns tensors (or a vector, pair or tuple of them, or nothing). It runs normally at the
/// first call with given shapes, dtypes and strides (when state such as momenta is created) and at the second, which is
/// recorded. Replays read the inputs in place and follow changes of learning rates, loss scales, generators, parameters
/// changed in place and running statistics. Anything that depends on the host stays as recorded: branches of the step,
/// numbers in it, and which tensors its variables refer to. Changing a module's mode or precision, or loading an
/// optimizer's or scaler's state, causes a new recording. Results are copies without history; grad() of parameters is
/// the same memory in every replay.
///
/// On the CPU, neighbouring elementwise ops on large tensors can run together, block by block (CaptureOptions::chains).
///
/// On a device whose plug-in has graphs, a replay launches graphs of its kernels (from the second replay on), after the
/// host has brought it learning rates, random states and the like; ops that run on the CPU and exchanges with other
/// ranks (dist/data_parallel.h) lie between graphs. On other devices kernels are enqueued one by one. Either way
/// nothing is read back but what ranks exchange.
///
/// A step that can't be replayed runs normally: one that reads values on the host (item(), to_vector(), data()), calls
/// gradient hooks, seeds a generator, sets a learning rate, keeps tensors for later, waits for a device, or computes on
/// several devices or queues. why_not() and a line in the log give the reason. A step also runs normally while
/// debugging or profiling observes ops, and where every op waits (HALFSTEP_SYNC=1). One thread at a time.
template <class F>
Captured<std::decay_t<F>> capture(F&& step, const CaptureOptions& options = {}) {
  return Captured<std::decay_t<F>>(std::forward<F>(step), options);
}

}  // namespace halfstep
