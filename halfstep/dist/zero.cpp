// SPDX-License-Identifier: Apache-2.0
#include "halfstep/dist/zero.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/dist/captured_internal.h"
#include "halfstep/dist/zero_parameters_internal.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/view.h"

namespace halfstep::dist {
namespace {

constexpr const char* kZero = "zero_redundancy";
constexpr int kStateTag = 1 << 14;      // of messages with optimizer state
constexpr std::int64_t kPiece = 16384;  // elements of a sum of the kernel multi_norm_pieces

std::int64_t bytes_of_tensor(const Tensor& t) { return t.numel() * static_cast<std::int64_t>(t.item_size()); }

// Whole parameters, the largest first, to the rank that has the least so far.
std::map<const TensorImpl*, int> deal_out(const NamedTensors& parameters, int ranks) {
  std::vector<std::size_t> order(parameters.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return parameters[a].tensor.numel() > parameters[b].tensor.numel();
  });
  std::vector<std::int64_t> load(static_cast<std::size_t>(ranks));
  std::map<const TensorImpl*, int> owners;
  for (const std::size_t i : order) {
    const auto least = std::min_element(load.begin(), load.end());
    owners[parameters[i].tensor.impl()] = static_cast<int>(least - load.begin());
    *least += parameters[i].tensor.numel();
  }
  return owners;
}

std::int64_t pieces_of(const Tensor& t) { return (t.numel() + kPiece - 1) / kPiece; }

// The sums that the norm of a gradient is made of; a `limit` of 1 asks for those of amp_unscale.
void norm_pieces(const Tensor& gradient, const Tensor& sums, double norm_type, bool unscaled) {
  static const KernelTable& table = kernel_table("multi_norm_pieces");
  const Tensor *in = &gradient, *out = &sums;
  run_kernel(table, "multi_norm_pieces", gradient.device(), DType::f32, {&in, 1}, {&out, 1},
             ClipAttributes{.limit = unscaled ? 1.0 : 0.0, .norm_type = norm_type});
}

double norm_of(const std::vector<double>& sums, double norm_type) {
  double total = 0;
  for (const double v : sums) {
    if (!std::isinf(norm_type)) {
      total += v;
    } else if (!(v <= total) && !std::isnan(total)) {
      total = v;
    }
  }
  if (std::isinf(norm_type)) return total;
  return norm_type == 2 ? std::sqrt(total) : std::pow(total, 1 / norm_type);
}

}  // namespace

struct ZeroRedundancy::Impl final : optim::StateSharding, std::enable_shared_from_this<ZeroRedundancy::Impl> {
  Impl(DataParallelBase& net, optim::Optimizer& of, const ZeroOptions& given)
      : group(net.group()),
        options(given),
        parameters(net.parameters()),
        optimizer(of),
        owners(deal_out(parameters, group.size())) {}

  int rank() const override { return group.rank(); }
  int ranks() const override { return group.size(); }
  int owner(const Tensor& parameter) const override {
    const auto found = owners.find(parameter.impl());
    return found == owners.end() ? -1 : found->second;
  }
  // One that doesn't require grad is never updated.
  bool owns(const Tensor& parameter) const override {
    const int rank = owner(parameter);
    return rank < 0 || rank == group.rank();
  }
  bool gradients_too() const override { return options.stage >= 2; }
  bool parameters_too() const override { return options.stage == 3; }
  void updated(const optim::Optimizer& of) override;
  void share(const optim::Optimizer& of, amp::GradientFindings& found) override;
  Tensor grad_norm(const NamedTensors& of, double norm_type) override { return norm(of, norm_type, false); }
  optim::OptimizerState whole_state(const optim::Optimizer& of) const override;
  bool is_whole() const override { return whole_at >= 0; }
  optim::OptimizerState whole_state_of_groups(const optim::Optimizer& of) override;
  std::vector<std::string> gather_texts(std::string_view text) override { return group.all_gather_text(text); }
  void state_replaced() override {
    whole.reset();
    whole_at = -1;
  }
  std::shared_ptr<void> gather_parameters() override { return shards ? shards->gather_all() : nullptr; }
  std::shared_ptr<void> watch_pass() override { return shards ? shards->watch_pass() : nullptr; }
  void follow_pass() override {
    if (shards) shards->follow_pass();
  }
  // The rank whose state of a parameter counts.
  int keeper(const Tensor& parameter) const { return std::max(owner(parameter), 0); }

  Tensor norm(const NamedTensors& of, double norm_type, bool unscaled);
  void exchange(const std::vector<Tensor>& all);
  void consolidate(int to);

  ProcessGroup group;
  const ZeroOptions options;
  const NamedTensors parameters;
  optim::Optimizer& optimizer;
  const std::map<const TensorImpl*, int> owners;
  std::shared_ptr<detail::ParameterShards> shards;  // at stage 3
  std::optional<optim::OptimizerState> whole;
  int whole_at = -1;  // rank that has `whole`
};

void ZeroRedundancy::Impl::updated(const optim::Optimizer& of) {
  whole.reset();
  whole_at = -1;
  if (options.stage == 3) return shards->values_change();  // they come when they are used
  std::vector<Tensor> all;
  for (const NamedTensor& p : of.named_parameters()) {
    if (owner(p.tensor) >= 0) all.push_back(p.tensor);
  }
  detail::repeated(all, [self = shared_from_this(), all] {
    const NoGrad no_grad;
    self->exchange(all);
    for (const Tensor& p : all) {
      if (!self->owns(p)) p.storage()->forget_derived();
    }
    self->whole.reset();
    self->whole_at = -1;
  });
}

// Everybody gets each parameter from its owner: many small ones as one message, whose parts are the owners'.
void ZeroRedundancy::Impl::exchange(const std::vector<Tensor>& all) {
  struct Part {
    std::vector<Tensor> members;
    std::int64_t bytes = 0;
  };
  std::vector<Part> parts;
  for (const Tensor& p : all) {
    const bool fits = !parts.empty() && parts.back().members[0].dtype() == p.dtype() &&
                      parts.back().members[0].device() == p.device() &&
                      static_cast<double>(parts.back().bytes + bytes_of_tensor(p)) <= options.bucket_cap_mb * 0x1p20;
    if (!fits) parts.emplace_back();
    parts.back().members.push_back(p);
    parts.back().bytes += bytes_of_tensor(p);
  }
  std::function<void()> unpack;  // of the part before
  for (Part& part : parts) {
    std::vector<Tensor>& members = part.members;
    std::stable_sort(members.begin(), members.end(),
                     [&](const Tensor& a, const Tensor& b) { return owner(a) < owner(b); });
    std::vector<std::int64_t> counts(static_cast<std::size_t>(group.size()));
    std::int64_t total = 0;
    for (const Tensor& p : members) {
      counts[static_cast<std::size_t>(owner(p))] += p.numel();
      total += p.numel();
    }
    const Tensor flat = empty({total}, {.dtype = members[0].dtype(), .device = members[0].device()});
    std::vector<Tensor> places;
    std::int64_t at = 0;
    for (const Tensor& p : members) {
      Tensor place = as_strided(flat, p.sizes(), p.strides(), at);
      if (owns(p)) place.copy_(p.detach());
      places.push_back(std::move(place));
      at += p.numel();
    }
    const Work work = group.all_gather_parts(flat, counts, "updated parameters");
    if (unpack) unpack();
    unpack = [this, work, members, places] {
      work.wait();
      for (std::size_t i = 0; i < members.size(); ++i) {
        if (!owns(members[i])) members[i].detach().copy_(places[i]);
      }
    };
  }
  if (unpack) unpack();
}

// Largest flag of any rank, for all parameters: 0 where none has a gradient.
void ZeroRedundancy::Impl::share(const optim::Optimizer& of, amp::GradientFindings& found) {
  const NoGrad no_grad;
  const NamedTensors& all = of.named_parameters();
  const Device device = found.found.device();
  auto names = std::make_shared<std::vector<std::string>>();
  std::vector<bool> here;
  for (std::size_t i = 0; i < all.size(); ++i) {
    names->push_back(all[i].name.empty() ? fmt::format("parameter {} {}", i, all[i].tensor.sizes().str())
                                         : all[i].name);
    here.push_back(all[i].tensor.grad().defined());
  }
  const Tensor own = found.per_parameter;
  Tensor flag = empty({}, {.dtype = f32, .device = device}),
         flags = empty({static_cast<std::int64_t>(all.size())}, {.dtype = f32, .device = device});
  const auto anywhere = std::make_shared<bool>();
  detail::repeated({own, flags, flag}, [own, flags, flag, here, anywhere, g = group]() mutable {
    const NoGrad no_grad;
    const std::vector<float> values = own.to_vector<float>();
    std::vector<double> mine(here.size(), -1);
    for (std::size_t i = 0, k = 0; i < here.size(); ++i) {
      if (here[i]) mine[i] = static_cast<double>(values[k++]);
    }
    const Tensor merged = tensor(mine, flags.sizes(), {.dtype = f32, .device = Device{}});
    g.all_reduce(merged, ReduceOp::max, "overflows").wait();
    bool any = false;
    for (std::size_t i = 0; i < here.size(); ++i) {
      // NaN counts.
      const auto value = static_cast<double>(merged.data<const float>()[i]);
      *anywhere |= !(value < 0);
      mine[i] = value < 0 ? 0 : value;
      any |= mine[i] != 0;
    }
    flags.copy_(tensor(mine, flags.sizes(), {.dtype = f32, .device = Device{}}));
    flag.copy_(full({}, any ? 1.0 : 0.0, {.dtype = f32, .device = Device{}}));
  });
  if (!*anywhere) names->clear();
  found.per_parameter = flags;
  found.found = flag;
  found.names = std::move(names);
  if (found.norm.defined()) found.norm = norm(all, 2, true).to(f32);
}

// The same sums in the same order as on one rank, each from the rank that has the gradient.
Tensor ZeroRedundancy::Impl::norm(const NamedTensors& of, double norm_type, bool unscaled) {
  if (!(norm_type > 0)) fail<Error>("grad_norm: expected a norm type above 0, got {}", norm_type);
  const NoGrad no_grad;
  const Device device = of.empty() ? Device{} : of[0].tensor.device();
  std::int64_t count = 0;
  for (const NamedTensor& p : of) count += pieces_of(p.tensor);
  const Tensor sums = zeros({count}, {.dtype = f64, .device = device});
  std::int64_t at = 0;
  bool wide = !of.empty();
  for (const NamedTensor& p : of) {
    wide &= p.tensor.dtype() == DType::f64;
    const std::int64_t pieces = pieces_of(p.tensor);
    // What all ranks have counts once.
    const bool own = owner(p.tensor) == group.rank() || (owner(p.tensor) < 0 && group.rank() == 0);
    if (const Tensor g = p.tensor.grad(); own && g.defined() && pieces > 0) {
      norm_pieces(g, sums.narrow(0, at, pieces), norm_type, unscaled);
    }
    at += pieces;
  }
  Tensor result = empty({}, {.dtype = wide ? f64 : f32, .device = device});
  detail::repeated({sums, result}, [sums, result, norm_type, g = group]() mutable {
    const NoGrad no_grad;
    const Tensor all = sums.to(Device{}).clone();
    g.all_reduce(all, ReduceOp::sum, "norms of gradients").wait();
    result.copy_(full({}, norm_of(all.to_vector<double>(), norm_type), {.dtype = result.dtype(), .device = Device{}}));
  });
  return result;
}

optim::OptimizerState ZeroRedundancy::Impl::whole_state(const optim::Optimizer& of) const {
  if (whole) return *whole;
  fail<Error>(
      "{}: its state is divided among {} ranks, and {}; call consolidate_state_dict() on all ranks since the "
      "last step, and state_dict() on the rank that it names",
      of.kind(), group.size(),
      whole_at < 0 ? std::string("no rank has all of it") : fmt::format("rank {} has all of it", whole_at));
}

optim::OptimizerState ZeroRedundancy::Impl::whole_state_of_groups(const optim::Optimizer& of) {
  const NoGrad no_grad;
  const CapturePause pause;
  optim::OptimizerState state = of.state_of_groups();
  for (int g = 0; g < of.num_groups(); ++g) {
    const std::vector<std::size_t>& members = of.group_parameters(g);
    NamedTensor& count = state.tensors[static_cast<std::size_t>(g)];
    std::vector<std::int64_t> made = count.tensor.to_vector<std::int64_t>();
    for (std::size_t k = 0; k < made.size(); ++k) {
      if (keeper(of.named_parameters()[members[k]].tensor) != group.rank()) made[k] = 0;
    }
    const Tensor merged = tensor_from_integers(made, count.tensor.sizes(), {.dtype = i64, .device = Device{}});
    group.all_reduce(merged, ReduceOp::sum, count.name).wait();
    count.tensor = merged.to(count.tensor.device());
  }
  return state;
}

void ZeroRedundancy::Impl::consolidate(int to) {
  if (to < 0 || to >= group.size()) {
    fail<Error>("consolidate_state_dict: expected a rank from 0 to {}, got {}", group.size() - 1, to);
  }
  const NoGrad no_grad;
  const CapturePause pause;
  const NamedTensors& all = optimizer.named_parameters();
  const auto keeper_of = [&](std::size_t i) { return keeper(all[i].tensor); };
  optim::OptimizerState state = whole_state_of_groups(optimizer);
  NamedTensors steps = std::exchange(state.tensors, {});
  std::vector<std::pair<std::size_t, std::string>> wanted;  // parameter, and `exp_avg f32`
  std::string text;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (keeper_of(i) != group.rank()) continue;
    for (const NamedTensor& t : optimizer.state_of(i)) {
      text += fmt::format("{} {} {}\n", i, t.name.substr(all[i].name.size() + 1), name(t.tensor.dtype()));
    }
  }
  std::map<std::size_t, std::vector<std::pair<std::string, DType>>> tensors;
  for (const std::string& lines : group.all_gather_text(text)) {
    std::istringstream in(lines);
    std::size_t i = 0;
    for (std::string what, dtype; in >> i >> what >> dtype;) tensors[i].emplace_back(what, *parse_dtype(dtype));
  }
  for (int g = 0; g < optimizer.num_groups(); ++g) {
    state.tensors.push_back(std::move(steps[static_cast<std::size_t>(g)]));
    for (const std::size_t i : optimizer.group_parameters(g)) {
      const int from = keeper_of(i);
      const NamedTensors own = from == group.rank() ? optimizer.state_of(i) : NamedTensors();
      for (std::size_t k = 0; k < tensors[i].size(); ++k) {
        const auto& [what, dtype] = tensors[i][k];
        if (from == to) {
          if (group.rank() == to) state.tensors.push_back(own[k]);
        } else if (group.rank() == from) {
          group.send(own[k].tensor.contiguous(), to, kStateTag).wait();
        } else if (group.rank() == to) {
          const Tensor t = empty(all[i].tensor.sizes(), {.dtype = dtype, .device = all[i].tensor.device()});
          group.receive(t, from, kStateTag).wait();
          state.tensors.push_back({all[i].name + "." + what, t});
        }
      }
    }
  }
  whole_at = to;
  whole.reset();
  if (group.rank() == to) whole = std::move(state);
}

ZeroRedundancy::ZeroRedundancy(DataParallelBase& net, const nn::ModuleBase& module, optim::Optimizer& optimizer,
                               const ZeroOptions& options) {
  if (options.stage < 1 || options.stage > 3)
    fail<Error>("{}: expected a stage from 1 to 3, got {}", kZero, options.stage);
  if (!(options.bucket_cap_mb > 0)) {
    fail<Error>("{}: expected a bucket_cap_mb above 0, got {}", kZero, options.bucket_cap_mb);
  }
  impl_ = std::make_shared<Impl>(net, optimizer, options);
  Impl& s = *impl_;
  if (s.group.size() == 1) return;
  optimizer.shard(impl_);
  const auto owner_of = [&s](const Tensor& p) { return s.owner(p); };
  if (options.stage >= 2) net.shard_gradients(owner_of);
  if (options.stage == 3) {
    const bool beside = s.group.local_size() < s.group.size() ||
                        std::any_of(s.parameters.begin(), s.parameters.end(),
                                    [](const NamedTensor& p) { return !p.tensor.device().is_cpu(); });
    s.shards =
        std::make_shared<detail::ParameterShards>(s.parameters, owner_of, s.group, options.prefetch.value_or(beside));
    s.shards->attach(module);
  }
}

int ZeroRedundancy::owner(const Tensor& parameter) const { return impl_->owner(parameter); }
int ZeroRedundancy::stage() const { return impl_->options.stage; }

ZeroMemory ZeroRedundancy::memory() const {
  const Impl& s = *impl_;
  ZeroMemory memory;
  for (const NamedTensor& p : s.parameters) {
    if (!s.shards) memory.parameters += bytes_of_tensor(p.tensor);
    if (const Tensor g = p.tensor.grad(); g.defined()) memory.gradients += bytes_of_tensor(g);
  }
  if (s.shards) memory.parameters = s.shards->bytes();
  for (std::size_t i = 0; i < s.optimizer.named_parameters().size(); ++i) {
    for (const NamedTensor& t : s.optimizer.state_of(i)) memory.optimizer += bytes_of_tensor(t.tensor);
  }
  return memory;
}

ZeroGathers ZeroRedundancy::gathers() const { return impl_->shards ? impl_->shards->stats() : ZeroGathers(); }

Tensor ZeroRedundancy::clip_grad_norm_(double max_norm, const optim::ClipOptions& options) {
  const NamedTensors& all = impl_->optimizer.named_parameters();
  optim::ClipOptions given = options;
  if (!given.norm.defined() && impl_->optimizer.shares_gradients())
    given.norm = impl_->norm(all, given.norm_type, false);
  return optim::clip_grad_norm_(all, max_norm, given);
}

void ZeroRedundancy::consolidate_state_dict(int to) {
  if (impl_->group.size() > 1) impl_->consolidate(to);
}
void ZeroRedundancy::drop_state_dict() {
  impl_->whole.reset();
  impl_->whole_at = -1;
}

std::shared_ptr<void> ZeroRedundancy::gather_parameters() { return impl_->gather_parameters(); }

}  // namespace halfstep::dist
