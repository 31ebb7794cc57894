// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/train_step.h"

#include <algorithm>
#include <any>
#include <bit>
#include <map>
#include <numeric>
#include <set>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/capture.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/random.h"
#include "halfstep/dist/loss_scale.h"
#include "halfstep/nn/no_samples_internal.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/view.h"
#include "halfstep/optim/clip.h"
#include "halfstep/quant/quantization.h"
#include "halfstep/runtime/trace.h"
#include "halfstep/train/evaluate.h"
#include "halfstep/train/merge_ranks_internal.h"
#include "halfstep/train/rank_lines_internal.h"
#include "halfstep/train/shards_internal.h"

namespace halfstep::training {
namespace {

constexpr const char* kName = "build_train_network";

bool low(std::optional<DType> dtype) { return dtype && is_low_precision(*dtype); }

// The level and dtype that the options come to.
struct Resolved {
  amp::Level level;
  DType dtype;
};
Resolved resolve(const TrainNetworkOptions& o) {
  using amp::Level;
  if (o.cast_model_type && *o.cast_model_type != f32 && !low(o.cast_model_type)) {
    fail<AmpError>("{}: expected a cast_model_type of f16, bf16 or f32, got {}", kName, name(*o.cast_model_type));
  }
  const DType dtype = o.cast_model_type.value_or(f16);
  Level level = o.level;
  if (o.cast_model_type == f32) level = Level::O0;
  // A type without a level: the whole network, as MindSpore casts it then.
  if (o.level == Level::O0 && low(o.cast_model_type)) level = Level::O3;
  if (level == Level::O2 || level == Level::O3) {
    if (o.keep_batchnorm_fp32) level = *o.keep_batchnorm_fp32 ? Level::O2 : Level::O3;
  } else if (o.keep_batchnorm_fp32 == false) {
    fail<AmpError>("{}: at level {} norms are not cast as a whole; keep_batchnorm_fp32 = false is for O2 and O3", kName,
                   amp::name(level));
  }
  return {level, dtype};
}

void check_parameters(const nn::ModuleBase& network, const optim::Optimizer& optimizer, const char* who) {
  std::set<const TensorImpl*> own;
  for (const auto& p : network.parameters()) own.insert(p.tensor.impl());
  for (const auto& p : optimizer.named_parameters()) {
    if (own.contains(p.tensor.impl())) continue;
    fail<Error>("{}: the optimizer holds {} {}, which is no parameter of this network; was it made of another one?",
                who, p.name.empty() ? "a parameter" : "'" + p.name + "'", p.tensor.sizes().str());
  }
}

/// A network as a function and a loss of its output: what build_train_network() is given.
class OutputTask final : public Task {
 public:
  OutputTask(std::shared_ptr<nn::ModuleBase> network, std::function<Tensor(const Tensor&)> forward, LossFunction loss)
      : network_(std::move(network)), forward_(std::move(forward)), loss_(std::move(loss)) {}
  const nn::ModuleBase& network() const override { return *network_; }
  TaskLoss loss(const data::Batch& batch) override {
    TaskLoss made;
    {
      const TraceRange range("forward");
      made.output = forward_(batch.input);
    }
    const TraceRange range("loss");
    made.loss = take_loss(made.output, batch.target);
    return made;
  }
  Tensor forward(const Tensor& input) const { return forward_(input); }
  Tensor take_loss(const Tensor& output, const Tensor& target) const { return wide(loss_(wide(output), wide(target))); }

 private:
  static Tensor wide(const Tensor& t) { return t.defined() && is_low_precision(t.dtype()) ? t.to(f32) : t; }

  std::shared_ptr<nn::ModuleBase> network_;
  std::function<Tensor(const Tensor&)> forward_;
  LossFunction loss_;
};

void check_loss(const Tensor& loss) {
  check_defined(loss, "train_step", "a loss");
  if (loss.numel() != 1) {
    fail<ShapeError>("train_step: expected a loss of one element, got {}; take its mean?", loss.sizes().str());
  }
}

}  // namespace

struct TrainStep::Impl {
  std::shared_ptr<Task> task;
  optim::Optimizer& optimizer;
  std::optional<amp::GradScaler> scaler = {};
  StepOptions options = {};
  bool drop = true;
  NamedTensors parameters = {};  // of the network, in its order
  Tensor never = {}, one = {};   // overflow and scale where there are none: handed out as they are
  std::uint32_t made[2] = {};    // their versions
  std::unique_ptr<CapturedStep> captured = {};
  CaptureStats before = {};          // of calls of run_captured() that `captured` didn't see
  std::string why_plain = {};        // of the last call
  std::int64_t largest = 0;          // samples of a step
  int since_smaller = 0;             // steps in a row that weren't smaller
  std::size_t tensors_in_batch = 0;  // of the calls that `captured` takes
  struct Share {
    std::int64_t all_samples;
    bool stand_in;
    friend bool operator==(const Share&, const Share&) = default;
  };
  std::vector<Share> shares = {};  // of a batch on this rank, in those calls

  /// Also those that the optimizer doesn't have: they would grow from step to step.
  void drop_gradients() {
    optimizer.zero_grad();
    for (const NamedTensor& p : parameters) p.tensor.set_grad({});
  }
  /// The optimizer's parameters in the order of the network, which the norm's sum keeps.
  NamedTensors clipped() const {
    std::set<const TensorImpl*> own;
    for (const NamedTensor& p : optimizer.named_parameters()) own.insert(p.tensor.impl());
    NamedTensors result;
    for (const NamedTensor& p : parameters) {
      if (own.contains(p.tensor.impl())) result.push_back(p);
    }
    return result;
  }
  void constants(Device device) {
    // Whoever got them may have written to them.
    if (never.defined() && never.device() == device && never.version() == made[0] && one.version() == made[1]) return;
    never = zeros({}, {.device = device});
    one = ones({}, {.device = device});
    made[0] = never.version();
    made[1] = one.version();
  }
  /// Overflow and scale of a step without a scaler.
  void set_constants(StepValues& values) {
    constants(values.losses[0].device());
    values.overflow = never;
    values.scale = one;
  }
  /// Forward and backward pass of a batch that is `weight` of the step. With `outputs`, nothing is counted, and what
  /// the network gave is put there.
  void add(const data::Batch& batch, double weight, StepValues& values, std::vector<Tensor>* outputs);
  /// The optimizer's part.
  void update(StepValues& values);
  /// With `outputs`, losses and parts are this rank's.
  StepValues run(std::span<const data::Batch> batches, std::vector<Tensor>* outputs = nullptr);
  /// The step of StepOptions::shards.
  StepValues run_shards(std::span<const data::Batch> batches);
  void merge_shards(const StepValues& own, StepValues& values);
  int ranks() const { return options.parallel ? options.parallel->group().size() : 1; }
  const OutputTask& output_task(const char* call) const {
    const auto* own = dynamic_cast<const OutputTask*>(task.get());
    if (!own) fail<Error>("TrainStep::{}: expected a step of build_train_network(), got one of a Task", call);
    return *own;
  }
};

Tensor StepValues::loss() const {
  if (losses.size() == 1) return losses[0];
  const NoGrad no_grad;
  Tensor sum;
  for (std::size_t i = 0; i < losses.size(); ++i) {
    const Tensor part = losses[i] * weights[i];
    sum = sum.defined() ? sum + part : part;
  }
  return sum;
}

namespace {

// What a task said of a batch beside its loss; of one that stands in for none, nothing counts.
void take_over(TaskLoss& made, const data::Batch& batch, StepValues& values) {
  if (made.count_later && batch.stand_in) made.count_later = [](std::map<std::string, double>&) {};
  if (made.count_later) values.count_later.push_back(std::move(made.count_later));
  for (NamedTensor& part : made.parts) {
    if (batch.stand_in) part.tensor = zeros_like(part.tensor.detach());
    const auto same = [&](const NamedTensor& known) { return known.name == part.name; };
    const auto known = std::find_if(values.parts.begin(), values.parts.end(), same);
    if (known == values.parts.end()) {
      values.parts.push_back({part.name, part.tensor.detach()});
    } else {
      known->tensor = known->tensor + part.tensor.detach();
    }
  }
}

}  // namespace

void TrainStep::Impl::add(const data::Batch& batch, double weight, StepValues& values, std::vector<Tensor>* outputs) {
  TaskLoss made;
  {
    const EnableGrad on;
    const nn::detail::NoSamples none(batch.stand_in);  // backward too: checkpoint() repeats forward passes there
    {
      std::optional<amp::Autocast> region;
      if (options.autocast) region.emplace(amp::AutocastOptions{.dtype = *options.autocast});
      made = task->loss(batch);
    }
    check_loss(made.loss);
    const TraceRange range("backward");
    const double factor = options.sum_over_samples ? weight * static_cast<double>(values.samples) : weight;
    const Tensor share = factor == 1 ? made.loss : made.loss * factor;
    (scaler ? scaler->scale(share) : share).backward();
  }
  const NoGrad no_grad;
  values.losses.push_back(made.loss.detach());
  if (outputs) {
    outputs->push_back(made.output.defined() ? made.output.detach() : Tensor());
  } else {
    task->count(made, batch);
  }
  take_over(made, batch, values);
}

void TrainStep::Impl::update(StepValues& values) {
  const TraceRange range("step");
  const NoGrad no_grad;
  set_constants(values);
  if (scaler) {
    values.overflow = never.clone();
    values.scale = scaler->scale_tensor().clone();
  }
  if (options.clip_norm > 0) {
    Tensor norm = scaler ? scaler->unscale_(optimizer, {.norm = true}) : Tensor();
    if (!norm.defined() && optimizer.shares_gradients()) norm = optimizer.sharding()->grad_norm(clipped(), 2);
    optim::clip_grad_norm_(clipped(), options.clip_norm, {.norm = norm});
  }
  if (!scaler) {
    optimizer.step();
  } else if (drop) {
    const amp::StepResult done = scaler->step(optimizer);
    values.overflow = done.found_inf();
    values.overflow_flags = done.overflow_flags();
    values.gradient_names = done.gradient_names();
    scaler->update();
    if (options.parallel && dist::debug_checks()) dist::check_same_scale(*scaler, options.parallel->group());
  } else if (optimizer.unscales()) {
    optimizer.step_unless({}, scaler->scale_tensor());
  } else {
    for (const auto& p : optimizer.named_parameters()) {
      if (const Tensor g = p.tensor.grad(); g.defined()) p.tensor.set_grad(g.to(f32) / values.scale);
    }
    optimizer.step();
  }
  if (const auto quantization = quant::quantization_of(task->network())) quant::commit(*quantization, values.overflow);
}

StepValues TrainStep::Impl::run(std::span<const data::Batch> batches, std::vector<Tensor>* outputs) {
  if (batches.empty()) fail<Error>("train_step: expected at least one batch, got none");
  if (options.shards > 0) return run_shards(batches);
  drop_gradients();
  StepValues values;
  std::vector<std::int64_t> samples;
  for (const data::Batch& batch : batches) {
    samples.push_back(task->samples(batch));
    if (samples.back() < 1) {
      fail<Error>("train_step: expected at least one sample in each batch, got {}", samples.back());
    }
    values.samples += batch.all_samples > 0 ? batch.all_samples : samples.back() * ranks();
    if (batch.stand_in) samples.back() = 0;
  }
  if (options.parallel && options.parallel->options().broadcast_buffers) options.parallel->broadcast_buffers();
  for (std::size_t i = 0; i < batches.size(); ++i) {
    // In float64, so that the only batch of a step weighs 1 exactly. The mean over ranks divides by their number.
    values.weights.push_back(static_cast<double>(samples[i] * ranks()) / static_cast<double>(values.samples));
    std::optional<dist::DataParallelBase::NoSync> alone;
    if (options.parallel && i + 1 < batches.size()) alone.emplace(*options.parallel);
    add(batches[i], values.weights[i], values, outputs);
  }
  update(values);
  // Behind the optimizer's exchanges, as in run_captured(): a rank may replay a step that another one runs as it is.
  if (ranks() > 1 && !outputs) {
    merge_ranks(values, samples, *options.parallel, device_of(task->network()));
  }
  return values;
}

StepValues TrainStep::Impl::run_shards(std::span<const data::Batch> batches) {
  const NoGrad no_grad;
  const int own = options.shards / ranks(), rank = options.parallel ? options.parallel->group().rank() : 0;
  if (options.shards % ranks() != 0 || !std::has_single_bit(static_cast<unsigned>(options.shards))) {
    fail<Error>("train_step: expected a power of 2 of shards that the {} ranks divide, got {}", ranks(),
                options.shards);
  }
  drop_gradients();
  StepValues values;
  for (const data::Batch& b : batches) values.samples += b.all_samples > 0 ? b.all_samples : task->samples(b) * ranks();
  const NamedTensors buffers = task->network().buffers();
  std::vector<Tensor> kept, begin_with;
  // What activations are rounded by depends on the ranges so far: those of the shards before this step, of which the
  // first one's are kept.
  if (quant::quantization_of(task->network())) {
    if (options.parallel) options.parallel->broadcast_buffers();
    for (const NamedTensor& b : buffers) begin_with.push_back(b.tensor.clone());
  }
  const auto set_buffers = [&](const std::vector<Tensor>& values) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      Tensor to = buffers[i].tensor;
      to.copy_(values[i]);
    }
  };
  const PhiloxState random = default_generator().state();
  constexpr std::uint64_t kPurpose = 0x7368617264;  // keeps shards' numbers apart from other uses of the seed
  Tree tree;
  StepValues one;  // what the shards give, one behind the other
  one.samples = values.samples;
  for (int k = 0; k < own; ++k) {
    const std::int64_t shard = rank * own + k;
    if (k > 0) set_buffers(begin_with);
    default_generator().set_state(
        {.seed = derive_seed(derive_seed(random.seed, random.offset, kPurpose), static_cast<std::uint64_t>(shard)),
         .offset = 0});
    std::optional<dist::DataParallelBase::NoSync> alone;
    if (options.parallel) alone.emplace(*options.parallel);
    for (const data::Batch& batch : batches) {
      const std::vector<std::int64_t> sizes = shards_of(batch, task->samples(batch), own, ranks());
      const auto at = sizes.begin() + k;
      if (*at == 0) continue;
      const std::int64_t begin = std::accumulate(sizes.begin(), at, std::int64_t{0}), n = *at;
      data::Batch part = batch;
      visit_tensors(part, [&](Tensor& t) {
        if (t.defined()) t = t.narrow(0, begin, n);
      });
      const double weight = static_cast<double>(n) / static_cast<double>(values.samples);
      add(part, weight, one, nullptr);
      one.weights.push_back(weight);
    }
    Gradients leaf;
    for (const NamedTensor& p : parameters) {
      leaf.push_back(p.tensor.grad());
      p.tensor.set_grad({});
    }
    tree.add(std::move(leaf));
    if (k == 0) {
      for (const NamedTensor& b : buffers) kept.push_back(b.tensor.clone());
    }
  }
  default_generator().set_state({.seed = random.seed, .offset = random.offset + 1});
  set_buffers(kept);
  const Gradients sum = tree.sum();
  for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].tensor.set_grad(sum[i]);
  if (options.parallel) options.parallel->reduce_without_backward();
  merge_shards(one, values);
  update(values);
  return values;
}

// The numbers of all shards on all ranks, in the order of shards.
void TrainStep::Impl::merge_shards(const StepValues& own, StepValues& values) {
  const Device device = device_of(task->network());
  std::string text;
  std::map<std::string, double> parts;
  const std::string kLoss;  // no part's name
  for (std::size_t i = 0; i < own.losses.size(); ++i) {
    text += line_of(kLoss, own.losses[i].item<double>() * own.weights[i]);
  }
  std::map<std::string, double> counts;
  for (const NamedTensor& p : own.parts) counts[p.name] += p.tensor.item<double>();
  for (const auto& count : own.count_later) count(counts);
  for (const auto& [name, sum] : counts) text += line_of(name, sum);
  std::vector<std::string> all{text};
  if (options.parallel) {
    dist::ProcessGroup group = options.parallel->group();
    all = group.all_gather_text(text);
  }
  for (const std::string& lines : all) add_lines(lines, parts);
  const double loss = parts[kLoss];
  parts.erase(kLoss);
  values.losses = {full({}, loss, {.dtype = accumulate_dtype(f32), .device = device})};
  values.weights = {1};
  for (const auto& [name, sum] : parts) values.parts.push_back({name, full({}, sum, {.dtype = f32, .device = device})});
}

TrainStepResult TrainStep::operator()(const Tensor& input, const Tensor& target) {
  const data::Batch batch{input, target};
  StepValues values = impl_->run({&batch, 1});
  return {.loss = values.losses[0], .overflow = ne(values.overflow, 0), .scale = values.scale};
}

StepValues TrainStep::run(std::span<const data::Batch> batches) { return impl_->run(batches); }

StepValues TrainStep::run_captured(std::span<const data::Batch> batches) {
  Impl& s = *impl_;
  if (batches.empty()) return s.run(batches);  // which says so
  std::vector<Tensor> inputs;
  for (const data::Batch& batch : batches) {
    inputs.push_back(batch.input);
    inputs.push_back(batch.target);
    inputs.insert(inputs.end(), batch.more.begin(), batch.more.end());
    if (&batch == &batches[0] && s.tensors_in_batch != inputs.size()) {
      s.tensors_in_batch = inputs.size();
      if (s.captured) s.before = capture_stats();
      s.captured.reset();
    }
  }
  std::int64_t samples = 0;
  for (const data::Batch& batch : batches) samples += s.task->samples(batch);
  // An epoch's last, smaller step runs uncaptured in the memory of the others: a second recording would hold memory for
  // one step per epoch. Smaller steps that come often are recorded like any other.
  constexpr int kOften = 3;
  const bool smaller = samples < s.largest, rare = smaller && s.since_smaller >= kOften;
  s.largest = std::max(s.largest, samples);
  s.since_smaller = smaller ? 0 : std::min(s.since_smaller + 1, kOften);
  s.why_plain.clear();
  if (s.options.shards > 0) {
    s.why_plain = "its batches are divided into shards (reproducible)";
    ++s.before.plain;
    return s.run(batches);
  }
  if (rare || inputs.size() != s.tensors_in_batch * batches.size()) {
    s.why_plain = rare ? "it has fewer samples than the steps before it" : "its batches have unlike numbers of tensors";
    release_captured();
    ++s.before.plain;
    return s.run(batches);
  }
  std::vector<Impl::Share> shares;
  for (const data::Batch& batch : batches) shares.push_back({batch.all_samples, batch.stand_in});
  if (s.captured && shares != s.shares) {
    // A recording holds the weight that its samples have among those of all ranks.
    const auto of_all = [](const std::vector<Impl::Share>& of) {
      return std::accumulate(of.begin(), of.end(), std::int64_t{0},
                             [](auto n, const auto& b) { return n + b.all_samples; });
    };
    if (of_all(shares) <= of_all(s.shares)) {
      s.why_plain = "the ranks' parts of its batches differ from those of the steps before it";
      ++s.before.plain;
      return s.run(batches);
    }
    // The first step was an epoch's last, smaller one: a run was resumed there.
    s.before = capture_stats();
    s.captured.reset();
  }
  s.shares = shares;
  if (!s.captured) {
    s.captured = std::make_unique<CapturedStep>([&s](std::span<const Tensor> given) {
      std::vector<data::Batch> parts(given.size() / s.tensors_in_batch);
      for (std::size_t i = 0; i < parts.size(); ++i) {
        parts[i].more.resize(s.tensors_in_batch - 2);
        visit_tensors(parts[i], [&, at = i * s.tensors_in_batch](Tensor& t) mutable { t = given[at++]; });
        parts[i].all_samples = s.shares[i].all_samples;
        parts[i].stand_in = s.shares[i].stand_in;
      }
      // Counting may wait for the device or leave work to the host; on the CPU it is part of the step. Ranks merge
      // losses where they merge what is counted.
      std::vector<Tensor> outputs;
      const bool counted_later = !device_of(s.task->network()).is_host();
      StepValues values = s.run(parts, counted_later ? &outputs : nullptr);
      if (!values.count_later.empty() && capture_sink()) capture_sink()->refuse("values are counted on the host");
      // A recording would copy them in every replay.
      if (!s.scaler) values.overflow = values.scale = Tensor();
      CapturedStep::Result made;
      visit_tensors(values, [&](Tensor& t) { made.tensors.push_back(std::exchange(t, Tensor())); });
      made.tensors.insert(made.tensors.end(), outputs.begin(), outputs.end());
      made.frame = std::move(values);
      return made;
    });
  }
  // New constants are not of the step.
  if (s.never.defined()) s.constants(s.never.device());
  // A recording would keep the previous gradients for as long as it is made.
  s.drop_gradients();
  CapturedStep::Result made = (*s.captured)(inputs);
  auto values = std::any_cast<StepValues>(std::move(made.frame));
  std::size_t i = 0;
  visit_tensors(values, [&](Tensor& t) { t = std::move(made.tensors[i++]); });
  const NoGrad no_grad;
  if (!s.scaler) s.set_constants(values);
  for (std::size_t b = 0; i < made.tensors.size(); ++b, ++i) {
    TaskLoss counted;
    counted.loss = values.losses[b];
    counted.output = std::move(made.tensors[i]);
    s.task->count(counted, batches[b]);
    take_over(counted, batches[b], values);
  }
  if (s.ranks() > 1 && !device_of(s.task->network()).is_host()) {
    std::vector<std::int64_t> own;
    for (const data::Batch& batch : batches) own.push_back(batch.stand_in ? 0 : s.task->samples(batch));
    merge_ranks(values, own, *s.options.parallel, device_of(s.task->network()));
  }
  return values;
}

void TrainStep::release_captured() {
  if (impl_->captured) impl_->captured->release();
}
CaptureStats TrainStep::capture_stats() const {
  CaptureStats stats = impl_->captured ? impl_->captured->stats() : CaptureStats();
  stats.plain += impl_->before.plain;
  stats.recorded += impl_->before.recorded;
  stats.replayed += impl_->before.replayed;
  stats.graphs += impl_->before.graphs;
  stats.chained += impl_->before.chained;
  return stats;
}
std::string TrainStep::why_not_captured() const {
  // What keeps every step from being replayed says more than that the last one was an epoch's smaller one.
  const std::string why = impl_->captured ? impl_->captured->why_not() : std::string();
  return why.empty() ? impl_->why_plain : why;
}

Tensor TrainStep::predict(const Tensor& input) const {
  const OutputTask& own = impl_->output_task("predict");
  const NoGrad no_grad;
  const nn::EvalMode mode(own.network());
  return own.forward(input);
}

Tensor TrainStep::loss(const Tensor& output, const Tensor& target) const {
  const Tensor loss = impl_->output_task("loss").take_loss(output, target);
  check_loss(loss);
  return loss;
}
Task& TrainStep::task() const { return *impl_->task; }
const nn::ModuleBase& TrainStep::network() const { return impl_->task->network(); }
optim::Optimizer& TrainStep::optimizer() const { return impl_->optimizer; }
amp::GradScaler* TrainStep::scaler() const { return impl_->scaler ? &*impl_->scaler : nullptr; }
const StepOptions& TrainStep::options() const { return impl_->options; }

TrainStep make_train_step(std::shared_ptr<Task> task, optim::Optimizer& optimizer,
                          std::optional<amp::GradScaler> scaler, const StepOptions& options) {
  if (!task) fail<Error>("train_step: expected a task, got none");
  if (options.autocast && !is_low_precision(*options.autocast)) {
    fail<AmpError>("train_step: expected f16 or bf16 for autocast, got {}", name(*options.autocast));
  }
  if (!(options.clip_norm >= 0)) {
    fail<Error>("train_step: expected a clip_norm of at least 0, got {}", options.clip_norm);
  }
  check_parameters(task->network(), optimizer, "train_step");
  if (scaler && !scaler->is_enabled()) scaler.reset();
  NamedTensors parameters = task->network().parameters();
  return TrainStep(std::make_shared<TrainStep::Impl>(TrainStep::Impl{.task = std::move(task),
                                                                     .optimizer = optimizer,
                                                                     .scaler = std::move(scaler),
                                                                     .options = options,
                                                                     .parameters = std::move(parameters)}));
}

TrainStep make_train_step(std::shared_ptr<nn::ModuleBase> network, std::function<Tensor(const Tensor&)> forward,
                          optim::Optimizer& optimizer, LossFunction loss, const TrainNetworkOptions& options) {
  if (!loss) fail<Error>("{}: expected a loss function, got none", kName);
  const Resolved precision = resolve(options);
  check_parameters(*network, optimizer, kName);
  if (precision.level != amp::Level::O0) {
    amp::set_level(*network, precision.level, precision.dtype);
  }
  auto manager = options.loss_scale_manager;
  // bf16 has float32's range and needs no scale.
  if (!manager && options.level == amp::Level::O2 && precision.level != amp::Level::O0 && precision.dtype == f16) {
    manager = amp::DynamicLossScaleManager();
  }
  auto task = std::make_shared<OutputTask>(std::move(network), std::move(forward), std::move(loss));
  auto impl = std::make_shared<TrainStep::Impl>(TrainStep::Impl{.task = std::move(task), .optimizer = optimizer});
  if (manager) {
    impl->scaler.emplace(manager->policy());
    impl->drop = manager->drop_overflow_update();
  }
  return TrainStep(std::move(impl));
}

}  // namespace halfstep::training
