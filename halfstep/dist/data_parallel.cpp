// SPDX-License-Identifier: Apache-2.0
#include "halfstep/dist/data_parallel.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <sstream>

#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/autograd/node.h"
#include "halfstep/core/fail.h"
#include "halfstep/dist/bucket_internal.h"
#include "halfstep/dist/bucket_tuner_internal.h"
#include "halfstep/dist/captured_internal.h"
#include "halfstep/dist/describe_internal.h"
#include "halfstep/dist/joining_internal.h"
#include "halfstep/dist/static_graph_internal.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/view.h"

namespace halfstep::dist {
namespace {

using detail::Bucket;
using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

constexpr const char* kName = "data_parallel";
constexpr std::int64_t kAlignment = 64;  // bytes, of each gradient in its bucket

std::int64_t bytes_of(const Tensor& t) { return t.numel() * static_cast<std::int64_t>(t.item_size()); }

// The layout that a parameter's gradient has, so that optimizers read both in one order.
Shape strides_of(const Tensor& parameter) {
  return parameter.is_contiguous(MemoryFormat::preserve) ? parameter.strides() : contiguous_strides(parameter.sizes());
}

void check_options(const DataParallelOptions& o) {
  if (!(o.bucket_cap_mb >= 0)) {
    fail<Error>("{}: expected a bucket_cap_mb above 0, or 0 for one that is tuned, got {}", kName, o.bucket_cap_mb);
  }
  if (!(o.first_bucket_cap_mb > 0)) {
    fail<Error>("{}: expected a first_bucket_cap_mb above 0, got {}", kName, o.first_bucket_cap_mb);
  }
}

}  // namespace

struct DataParallelBase::Impl : std::enable_shared_from_this<Impl> {
  Impl(const nn::ModuleBase& module, ProcessGroup of, const DataParallelOptions& given)
      : options(given), group(std::move(of)), buffers(module.buffers()) {
    std::set<const TensorImpl*> known;  // a shared parameter has several names
    for (const NamedTensor& p : module.trainable_parameters()) {
      if (!known.insert(p.tensor.impl()).second) continue;
      parameters.push_back(p);
      layouts.push_back(strides_of(p.tensor));
    }
  }
  ~Impl() { remove_hooks(); }

  void add_hooks() {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      hooks.push_back(register_recorded_grad_hook(parameters[i].tensor, [weak = weak_from_this(), i](const Tensor&) {
        if (const auto self = weak.lock()) self->ready(i);
      }));
    }
  }
  // Recorded steps, which keep this, may outlive the network's wrapper.
  void remove_hooks() {
    for (std::size_t i = 0; i < hooks.size(); ++i) parameters[i].tensor.remove_hook(hooks[i]);
    hooks.clear();
  }
  /// Buckets for the parameters in this order, which is the one that their gradients are expected in.
  void make_buckets(std::span<const std::size_t> members_in_order);
  void make_flat(Bucket& bucket);
  void use_bucket_view(std::size_t i);
  bool sharded() const { return !owners.empty(); }
  void finish_bucket(std::size_t b);
  void complete(std::size_t b);
  void keep_own_part(Bucket& bucket);

  /// `announced`: the ranks whose loops are over know of it (join()).
  void begin(bool announced = false);
  void ready(std::size_t i);
  void launch();
  void send(std::size_t b);
  void start(std::size_t b, const Tensor& flat);
  void wait();
  /// `backward`: the pass was one, and not what stands for it on a rank without samples.
  void finish(bool backward = true);
  void resolve_missing(bool backward);
  void take_as_it_is(std::size_t i);
  void reduce_without_backward(bool announced);
  void find_order();
  void remake_buckets();
  std::string label(std::size_t b) const;

  const DataParallelOptions options;
  ProcessGroup group;
  NamedTensors parameters;     // each once
  std::vector<Shape> layouts;  // strides of their gradients
  NamedTensors buffers;
  std::vector<std::uint64_t> hooks;
  std::vector<Bucket> buckets;
  std::vector<Tensor> views;           // of each parameter's place in its bucket
  std::vector<std::size_t> bucket_of;  // each parameter
  std::vector<int> owners;             // of the parameters' gradients; empty: all ranks have all
  std::vector<bool> absent;            // in this pass, on all ranks
  std::vector<std::uint64_t> reduced;  // numbers of the storages that own gradients were put in
  std::shared_ptr<int> no_sync = std::make_shared<int>(0);

  bool armed = false;                    // a backward pass is on its way
  std::vector<bool> seen;                // in this pass
  std::vector<std::size_t> ready_order;  // of this pass
  std::vector<int> arrivals;             // of each gradient in this pass
  std::size_t next = 0;                  // bucket to be started
  std::vector<std::size_t> order;        // that buckets are filled in; empty: not known yet
  double cap_mb = options.bucket_cap_mb > 0 ? options.bucket_cap_mb : detail::BucketTuner::kStart;
  bool stale = false;  // buckets are made anew when the next pass begins
  std::optional<detail::BucketTuner> tuner;
  detail::StaticGraph fixed{options.static_graph, parameters};
  std::optional<detail::Joining> joining;
  DataParallelStats stats;
  Clock::time_point started, ended;  // the first reduction was; the backward pass has
};

void DataParallelBase::Impl::make_buckets(std::span<const std::size_t> members_in_order) {
  buckets.clear();
  views.assign(parameters.size(), Tensor());
  bucket_of.assign(parameters.size(), 0);
  for (std::vector<std::size_t>& members :
       detail::bucket_members(parameters, members_in_order, std::min(options.first_bucket_cap_mb, cap_mb), cap_mb)) {
    if (sharded()) {
      std::stable_sort(members.begin(), members.end(),
                       [&](std::size_t a, std::size_t b) { return owners[a] < owners[b]; });
    }
    const Tensor& first = parameters[members[0]].tensor;
    const auto item = static_cast<std::int64_t>(first.item_size()), unit = kAlignment / item;
    Bucket bucket{.parameters = members};
    if (sharded()) bucket.counts.resize(static_cast<std::size_t>(group.size()));
    for (const std::size_t i : members) {
      bucket.offsets.push_back(bucket.numel);
      const std::int64_t n = (parameters[i].tensor.numel() + unit - 1) / unit * unit;
      bucket.numel += n;
      if (sharded()) bucket.counts[static_cast<std::size_t>(owners[i])] += n;
      bucket_of[i] = buckets.size();
    }
    if (!sharded()) make_flat(bucket);
    buckets.push_back(std::move(bucket));
  }
  stats.buckets = static_cast<int>(buckets.size());
  stats.bucket_mb = cap_mb;
}

void DataParallelBase::Impl::make_flat(Bucket& bucket) {
  std::optional<CapturePause> pause;
  if (!sharded()) pause.emplace();  // buckets outlive a captured step
  const Tensor& first = parameters[bucket.parameters[0]].tensor;
  bucket.flat = zeros({bucket.numel}, {.dtype = first.dtype(), .device = first.device()});
  for (std::size_t k = 0; k < bucket.parameters.size(); ++k) {
    const std::size_t i = bucket.parameters[k];
    const Tensor& p = parameters[i].tensor;
    views[i] = as_strided(bucket.flat, p.sizes(), layouts[i], bucket.offsets[k]);
  }
}

std::string DataParallelBase::Impl::label(std::size_t b) const {
  const std::vector<std::size_t>& members = buckets[b].parameters;
  const std::string& first = parameters[members.front()].name;
  return fmt::format("gradients of bucket {}: {}", b,
                     members.size() == 1 ? first : first + " to " + parameters[members.back()].name);
}

void DataParallelBase::Impl::begin(bool announced) {
  if (joining && !announced) joining->announce(detail::Joining::Turn::reduce);
  if (stale) remake_buckets();
  armed = true;
  next = 0;
  arrivals.assign(parameters.size(), 0);
  seen.assign(parameters.size(), false);
  ready_order.clear();
  absent.assign(parameters.size(), false);
  for (Bucket& b : buckets) {
    b.waiting = static_cast<int>(b.parameters.size());
    b.abandon();
    if (sharded()) b.flat = Tensor();  // of a pass that failed
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (fixed.unused_here(i)) take_as_it_is(i);
  }
}

// Its gradient, or zeros, in the place of one that comes.
void DataParallelBase::Impl::take_as_it_is(std::size_t i) {
  seen[i] = true;
  Bucket& bucket = buckets[bucket_of[i]];
  absent[i] = fixed.nowhere(i);
  if (!absent[i]) use_bucket_view(i);
  if (!bucket.flat.defined()) make_flat(bucket);
  --bucket.waiting;
}

// The parameter's gradient is the view of its bucket from here on; its values move there.
void DataParallelBase::Impl::use_bucket_view(std::size_t i) {
  const Tensor& p = parameters[i].tensor;
  const Tensor gradient = p.grad();
  if (sharded() && gradient.defined() && gradient.storage()->id() == reduced[i]) {
    fail<DistError>(
        "{}: the gradient of {} was added to the one that the pass before it had reduced to rank {}; with sharded "
        "gradients call zero_grad() after each reduction, and add up passes under no_sync()",
        kName, parameters[i].name, owners[i]);
  }
  if (Bucket& bucket = buckets[bucket_of[i]]; !bucket.flat.defined()) make_flat(bucket);
  Tensor view = views[i];
  if (gradient.defined() && gradient.storage() == view.storage()) return;
  const NoGrad no_grad;
  if (gradient.defined()) {
    view.copy_(gradient);
  } else {
    view.zero_();
  }
  p.set_grad(view);
}

void DataParallelBase::Impl::ready(std::size_t i) {
  if (*no_sync > 0) return fixed.check_unreduced(i);
  if (!armed) {
    begin();
    // A pass that throws destroys the work undone, and is over too.
    const std::shared_ptr<void> over(nullptr, [self = shared_from_this()](void*) { self->armed = false; });
    halfstep::detail::at_end_of_backward([self = shared_from_this(), over] { self->finish(); });
  }
  Bucket& bucket = buckets[bucket_of[i]];
  ++arrivals[i];
  if (fixed.on() && !fixed.whole(i, arrivals[i])) return;
  if (seen[i]) {
    if (bucket_of[i] < next) {
      fail<DistError>(
          "{}: the gradient of {} came twice in one backward pass, the second time when its bucket had been sent; does "
          "a checkpointed part use it that is used outside, too?",
          kName, parameters[i].name);
    }
    return;
  }
  seen[i] = true;
  ready_order.push_back(i);
  use_bucket_view(i);
  --bucket.waiting;
  if (!fixed.learns()) launch();
}

void DataParallelBase::Impl::launch() {
  while (next < buckets.size() && buckets[next].waiting == 0) {
    send(next);
    // The memory of those before goes to the ones that come.
    if (sharded() && next > 0) finish_bucket(next - 1);
    ++next;
  }
}

void DataParallelBase::Impl::send(std::size_t b) {
  const auto self = shared_from_this();
  if (!sharded()) {
    detail::repeated({buckets[b].flat}, [self, b] { self->start(b, self->buckets[b].flat); });
    return;
  }
  struct Replayed {
    std::shared_ptr<Impl> self;
    std::size_t bucket;
    int runs = 0;
    // The recording, which has the bucket's memory, goes: that ends what a replay that failed has begun.
    ~Replayed() {
      if (runs > 1 && bucket < self->buckets.size()) self->buckets[bucket].abandon();
    }
  };
  detail::repeated_in(buckets[b].flat,
                      [of = std::make_shared<Replayed>(Replayed{.self = self, .bucket = b})](const Tensor& flat) {
                        ++of->runs;
                        of->self->start(of->bucket, flat);
                      });
}

void DataParallelBase::Impl::start(std::size_t b, const Tensor& flat) {
  if (b == 0) started = Clock::now();
  Bucket& bucket = buckets[b];
  if (!options.hook && sharded()) {
    bucket.finish = [work = group.reduce_scatter_parts(flat, bucket.counts, ReduceOp::mean, label(b))] { work.wait(); };
    return;
  }
  if (!options.hook) {
    bucket.finish = [work = group.all_reduce(flat, ReduceOp::mean, label(b))] { work.wait(); };
    return;
  }
  const NoGrad no_grad;
  GradBucket given{
      .index = static_cast<int>(b), .is_last = b + 1 == buckets.size(), .buffer = flat, .gradients = {}, .names = {}};
  for (std::size_t k = 0; k < bucket.parameters.size(); ++k) {
    const std::size_t i = bucket.parameters[k];
    given.gradients.push_back(as_strided(flat, parameters[i].tensor.sizes(), layouts[i], bucket.offsets[k]));
    given.names.push_back(parameters[i].name);
  }
  bucket.finish = options.hook(given, group);
}

void DataParallelBase::Impl::wait() {
  for (std::size_t b = 0; b < buckets.size(); ++b) complete(b);
  stats.wait_seconds += seconds_since(ended);
  stats.reduction_seconds += seconds_since(started);
  ++stats.reductions;
  if (!tuner || order.empty()) return;
  if (const std::optional<double> mb = tuner->passed(Clock::now(), group)) {
    stale = *mb != cap_mb;
    cap_mb = *mb;
    ++capture_generation();
  }
  stats.tuning = !tuner->done();
}

// The mean is in the bucket.
void DataParallelBase::Impl::complete(std::size_t b) {
  const NoGrad no_grad;
  Bucket& bucket = buckets[b];
  if (bucket.finish) std::exchange(bucket.finish, {})();
  if (!bucket.flat.defined()) return;  // of a replay, or divided before
  // The other ranks' values: nothing known of one's own holds for the mean.
  bucket.flat.storage()->bump_version();
  bucket.flat.storage()->forget_derived();
  if (joining && joining->factor() != 1) bucket.flat.mul_(joining->factor());
}

// Where gradients are sharded.
void DataParallelBase::Impl::finish_bucket(std::size_t b) {
  if (!buckets[b].flat.defined()) return;  // finished before
  detail::repeated_in(buckets[b].flat, [self = shared_from_this(), b](const Tensor&) { self->complete(b); });
  const NoGrad no_grad;
  keep_own_part(buckets[b]);
}

// The gradients of this rank's parameters get memory of their own; the bucket's is free for the next one.
void DataParallelBase::Impl::keep_own_part(Bucket& bucket) {
  const std::int64_t begin =
      std::accumulate(bucket.counts.begin(), bucket.counts.begin() + group.rank(), std::int64_t{0});
  const std::int64_t count = bucket.counts[static_cast<std::size_t>(group.rank())];
  const Tensor own = count > 0 ? bucket.flat.narrow(0, begin, count).clone() : Tensor();
  for (std::size_t k = 0; k < bucket.parameters.size(); ++k) {
    const std::size_t i = bucket.parameters[k];
    const Tensor& p = parameters[i].tensor;
    views[i] = Tensor();
    reduced[i] = 0;
    if (absent[i]) continue;
    const bool mine = owners[i] == group.rank();
    p.set_grad(mine ? as_strided(own, p.sizes(), layouts[i], bucket.offsets[k] - begin) : Tensor());
    if (mine) reduced[i] = own.storage()->id();
  }
  bucket.flat = Tensor();
}

// Parameters that the pass didn't reach.
void DataParallelBase::Impl::resolve_missing(bool backward) {
  std::vector<std::size_t> missing;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!seen[i]) missing.push_back(i);
  }
  if (fixed.known()) return fixed.check_missing(missing, group.rank());
  if (!options.find_unused_parameters && !fixed.on()) {
    if (missing.empty()) return;
    fail<DistError>(
        "{}: the backward pass on rank {} gave no gradient to {}; if the loss doesn't depend on all parameters, pass "
        "{{.find_unused_parameters = true}}, or static_graph",
        kName, group.rank(), detail::names_of(parameters, missing));
  }
  if (CaptureSink* sink = capture_sink(); sink && !fixed.on()) [[unlikely]]
    sink->refuse("which parameters it uses is found out on the host (find_unused_parameters)");
  const CapturePause pause;
  // Where no rank has a gradient there is none: neither was before.
  std::vector<std::int64_t> used(parameters.size(), 1);
  for (const std::size_t i : missing) used[i] = parameters[i].tensor.grad().defined() ? 1 : 0;
  for (const std::size_t i : missing) take_as_it_is(i);
  launch();
  // Behind the buckets: a rank that reached all parameters has sent them already.
  if (!fixed.agreed()) {
    const Tensor anywhere = tensor_from_integers(used, {static_cast<std::int64_t>(used.size())}, {.device = Device{}});
    group.all_reduce(anywhere, ReduceOp::max, "parameters in use").wait();
    const auto in_use = anywhere.to_vector<std::int64_t>();
    for (const std::size_t i : missing) {
      if (in_use[i] != 0) continue;
      absent[i] = true;
      parameters[i].tensor.set_grad({});
    }
    std::vector<bool> nowhere;
    for (const std::int64_t n : in_use) nowhere.push_back(n == 0);
    if (fixed.on()) fixed.agree(std::move(nowhere));
  }
  if (fixed.on() && backward) fixed.learn(arrivals);
}

void DataParallelBase::Impl::finish(bool backward) {
  armed = false;
  resolve_missing(backward);
  detail::repeated({}, [self = shared_from_this()] { self->ended = Clock::now(); });
  std::vector<Tensor> flats;
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    if (sharded()) {
      finish_bucket(b);
    } else {
      flats.push_back(buckets[b].flat);
    }
  }
  detail::repeated(flats, [self = shared_from_this()] { self->wait(); });
  if (order.empty()) find_order();
}

// The order in which rank 0's gradients came is that of the next passes.
void DataParallelBase::Impl::find_order() {
  // Behind them those that came in none, in the order that the buckets have had so far.
  std::vector<std::size_t> came = ready_order;
  std::vector<bool> known(parameters.size());
  for (const std::size_t i : came) known[i] = true;
  for (std::size_t i = parameters.size(); i-- > 0;) {
    if (!known[i]) came.push_back(i);
  }
  std::string text;
  for (const std::size_t i : came) text += std::to_string(i) + ' ';
  const CapturePause pause;  // once: the next pass is recorded anew
  order = describe::numbers(group.broadcast_text(text));
  std::vector<std::size_t> now;
  for (const Bucket& b : buckets) now.insert(now.end(), b.parameters.begin(), b.parameters.end());
  if (now == order) return;
  stale = true;
  ++capture_generation();
}

void DataParallelBase::Impl::remake_buckets() {
  stale = false;
  const CapturePause pause;
  const std::vector<Tensor> before = views;
  make_buckets(order);
  ++capture_generation();  // gradients that were there have moved
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const Tensor gradient = parameters[i].tensor.grad();
    if (sharded() || !gradient.defined()) continue;
    if (gradient.storage() == before[i].storage()) use_bucket_view(i);
  }
}

DataParallelBase::DataParallelBase(const nn::ModuleBase& module, ProcessGroup group,
                                   const DataParallelOptions& options) {
  check_options(options);
  impl_ = std::make_shared<Impl>(module, std::move(group), options);
  Impl& s = *impl_;
  if (s.parameters.empty()) fail<Error>("{}: the network has no parameters that require grad", kName);
  describe::check_same(module.state_dict(), s.group, kName);
  describe::broadcast_values(module.state_dict(), s.group);
  std::vector<std::size_t> order(s.parameters.size());
  std::iota(order.rbegin(), order.rend(), std::size_t{0});
  s.make_buckets(order);
  if (options.bucket_cap_mb == 0) {
    std::int64_t bytes = 0;
    for (const NamedTensor& p : s.parameters) bytes += bytes_of(p.tensor);
    s.tuner.emplace(bytes);
    s.stats.tuning = true;
  }
  s.add_hooks();
}
DataParallelBase::~DataParallelBase() {
  if (impl_) impl_->remove_hooks();
}
DataParallelBase::DataParallelBase(DataParallelBase&&) noexcept = default;
DataParallelBase& DataParallelBase::operator=(DataParallelBase&& other) noexcept {
  DataParallelBase last(std::move(*this));
  impl_ = std::move(other.impl_);
  return *this;
}

// A guard that a step makes and lets go is in the step's recording, and changes nothing that the step finds.
DataParallelBase::NoSync::NoSync(const DataParallelBase& of) : depth_(of.impl_->no_sync), step_(capture_sink()) {
  ++*depth_;
  if (!step_) ++capture_generation();
}
DataParallelBase::NoSync::~NoSync() {
  --*depth_;
  if (!step_ || step_ != capture_sink()) ++capture_generation();
}

void DataParallelBase::reduce_without_backward() { impl_->reduce_without_backward(false); }

void DataParallelBase::Impl::reduce_without_backward(bool announced) {
  if (armed) fail<Error>("{}: reduce_without_backward() inside of a backward pass", kName);
  begin(announced);
  const NoGrad no_grad;
  if (fixed.on() ? fixed.agreed() : !options.find_unused_parameters) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (!seen[i]) take_as_it_is(i);
    }
    launch();
  }
  finish(false);
}

void DataParallelBase::join(const std::function<void()>& loop, const JoinOptions& options) {
  using Turn = detail::Joining::Turn;
  Impl& s = *impl_;
  if (s.joining || s.armed) fail<Error>("{}: join() inside of another one, or of a backward pass", kName);
  s.joining.emplace(s.group, options);
  ++capture_generation();
  struct End {
    Impl& s;
    ~End() {
      s.joining.reset();
      ++capture_generation();
    }
  } const end{s};
  loop();
  for (Turn turn = s.joining->announce(Turn::none); turn != Turn::none; turn = s.joining->announce(Turn::none)) {
    if (turn == Turn::buffers) {
      describe::broadcast_values(s.buffers, s.group, s.joining->first_active());
      continue;
    }
    for (const NamedTensor& p : s.parameters) p.tensor.set_grad({});
    s.reduce_without_backward(true);
    if (options.step) options.step();
  }
  if (!s.joining->shadowed()) return;
  for (const NamedTensors* all : {&s.parameters, &s.buffers}) {
    describe::broadcast_values(*all, s.group, s.joining->first_active());
  }
}

void DataParallelBase::mean_(const Tensor& tensor, std::string_view label) const {
  detail::repeated({tensor}, [tensor, group = impl_->group, label = std::string(label)]() mutable {
    group.all_reduce(tensor, ReduceOp::mean, label).wait();
    tensor.storage()->bump_version();
  });
}

void DataParallelBase::broadcast_buffers() {
  Impl& s = *impl_;
  if (s.group.size() == 1 || s.buffers.empty()) return;
  if (s.joining) {
    s.joining->announce(detail::Joining::Turn::buffers);
    return describe::broadcast_values(s.buffers, s.group, s.joining->first_active());
  }
  std::vector<Tensor> tensors;
  for (const NamedTensor& b : s.buffers) tensors.push_back(b.tensor);
  detail::repeated(tensors, [self = impl_] { describe::broadcast_values(self->buffers, self->group); });
}

void DataParallelBase::shard_gradients(const std::function<int(const Tensor&)>& owner) {
  Impl& s = *impl_;
  std::vector<std::size_t> order;
  for (const Bucket& b : s.buckets) order.insert(order.end(), b.parameters.begin(), b.parameters.end());
  for (const NamedTensor& p : s.parameters) {
    s.owners.push_back(owner(p.tensor));
    p.tensor.set_grad({});
  }
  s.reduced.assign(s.parameters.size(), 0);
  s.make_buckets(order);
  ++capture_generation();
}

const NamedTensors& DataParallelBase::parameters() const { return impl_->parameters; }
const ProcessGroup& DataParallelBase::group() const { return impl_->group; }
const DataParallelOptions& DataParallelBase::options() const { return impl_->options; }
DataParallelStats DataParallelBase::stats() const { return impl_->stats; }

void broadcast_state(amp::GradScaler& scaler, const ProcessGroup& group) {
  std::string text;
  for (const auto& [key, value] : scaler.state_dict()) text += fmt::format("{} {:a}\n", key, value);
  ProcessGroup g = group;
  text = g.broadcast_text(text);
  std::map<std::string, double> state;
  std::istringstream in(text);
  for (std::string key, value; in >> key >> value;) state[key] = std::strtod(value.c_str(), nullptr);
  if (!state.empty()) scaler.load_state_dict(state);
}

std::string first_difference(const nn::ModuleBase& module, ProcessGroup& group) {
  return describe::first_difference(module.state_dict(), group);
}

}  // namespace halfstep::dist
