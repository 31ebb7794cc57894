// SPDX-License-Identifier: Apache-2.0
#include "halfstep/amp/autocast.h"

#include <cstring>
#include <map>

#include "halfstep/amp/cast_cache.h"
#include "halfstep/amp/overrides_internal.h"
#include "halfstep/amp/region_internal.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/attributes.h"

namespace halfstep::amp {
namespace {

using detail::Overrides;

const Overrides* overrides_of(const AutocastState& state) {
  return static_cast<const Overrides*>(state.overrides.get());
}

thread_local std::vector<Decision>* t_explanation = nullptr;

std::string& path() { return call_origin().module_path; }

void check_dtype(DType dtype) {
  if (!is_low_precision(dtype)) fail<AmpError>("autocast: expected f16 or bf16, got {}", name(dtype));
}

// Floating tensors that precision policies speak of.
bool eligible(DType dtype) { return dtype == DType::f32 || is_low_precision(dtype); }

Policy effective_policy(const Op& op, const AutocastState& state, bool* overridden) {
  *overridden = false;
  if (const Overrides* o = overrides_of(state); o && !o->ops.empty()) {
    if (const auto it = o->ops.find(op.id); it != o->ops.end()) {
      *overridden = true;
      return it->second;
    }
  }
  if (const Overrides* o = overrides_of(state); o && o->table) {
    *overridden = true;
    const auto id = static_cast<std::size_t>(op.id);
    return id < o->table->of.size() ? o->table->of[id] : o->table->others;
  }
  return policy_of(op);
}

// The widest of the dtypes, whatever their order: f16 and bf16 together are as wide as f32.
std::optional<DType> widest(std::span<const DType> dtypes) {
  std::optional<DType> result;
  for (DType d : dtypes) {
    if (!eligible(d)) continue;
    result = !result || *result == d ? d : DType::f32;
  }
  return result;
}

// What the inputs are cast to, if to anything; or what the result is to be.
struct Plan {
  std::optional<DType> cast;
  std::optional<DType> output = {};
};

// The result is `wanted` of inputs as they come; an op that can't be told so is given inputs of it.
Plan output_plan(const Op& op, DType wanted, std::span<const DType> dtypes, bool dtype_given) {
  if (op.dtype_attribute < 0) return {.cast = wanted};
  if (dtype_given || dtypes.empty() || !eligible(dtypes[0])) return {};
  return {.cast = {}, .output = wanted};
}

Plan plan_for(const Op& op, Policy policy, DType low, std::span<const DType> dtypes, bool dtype_given) {
  switch (policy) {
    case Policy::lower_precision:
      return {.cast = low};
    case Policy::float32:
      return {.cast = DType::f32};
    case Policy::float32_output:
      return output_plan(op, DType::f32, dtypes, dtype_given);
    case Policy::low_output:
      return output_plan(op, low, dtypes, dtype_given);
    case Policy::widest:
      return {.cast = widest(dtypes)};
    case Policy::pass_through:
      return {};
    case Policy::banned:
      fail<AmpError>("{}: banned under autocast: {}", op.name, policy_row(op).reason);
  }
  return {};
}

// What a call is made of one of its inputs.
DType used_dtype(const Op& op, const Plan& plan, std::size_t input, DType given) {
  const bool state = input < 16 && (op.state_inputs >> input & 1) != 0;
  return plan.cast && eligible(given) && !state ? *plan.cast : given;
}

// Where the attributes say which dtype the result is to have, if they can.
std::int8_t* dtype_attribute(const Op& op, void* attributes) {
  if (op.dtype_attribute < 0 || !attributes) return nullptr;
  return reinterpret_cast<std::int8_t*>(static_cast<char*>(attributes) + op.dtype_attribute);
}

std::string reason_for(const Op& op, const AutocastState& state, bool overridden) {
  if (overridden) {
    const Overrides* o = overrides_of(state);
    return o && o->table && !o->ops.contains(op.id) ? "by the precision set for the module"
                                                    : "overridden in this region";
  }
  return policy_row(op).reason;
}

void explain_call(const AutocastCall& call, const AutocastState& state, Policy policy, bool overridden,
                  std::span<const DType> given) {
  Decision d{call.op.name, path(), policy, reason_for(call.op, state, overridden), {}, {}};
  for (std::size_t i = 0; i < call.inputs.size(); ++i) {
    if (!call.inputs[i]->defined()) continue;
    d.given.push_back(given[i]);
    d.used.push_back(call.inputs[i]->dtype());
  }
  t_explanation->push_back(std::move(d));
}

void hook(AutocastCall& call) {
  detail::undo_closed();
  const AutocastState& state = thread_state().autocast;
  if (!state.enabled) return;
  bool overridden;
  const Policy policy = effective_policy(call.op, state, &overridden);
  if (policy == Policy::pass_through && !t_explanation) return;
  constexpr std::size_t kInline = 16;
  DType fixed[kInline];
  std::vector<DType> many;
  std::span<DType> dtypes(fixed, call.inputs.size());
  if (call.inputs.size() > kInline) {
    many.resize(call.inputs.size());
    dtypes = many;
  }
  Device device;
  for (std::size_t i = 0; i < call.inputs.size(); ++i) {
    const TensorImpl* p = call.inputs[i]->impl();
    dtypes[i] = p ? p->dtype : DType::boolean;  // an absent input is no float
    if (p) device = p->storage->device();
  }
  if (!(state.device_types >> device.type & 1)) return;
  std::int8_t* out = dtype_attribute(call.op, call.attributes);
  const Plan plan = plan_for(call.op, policy, state.dtype, dtypes, out && *out != kNoDType);
  if (plan.output && out) *out = dtype_code(*plan.output);
  if (plan.cast) {
    for (std::size_t i = 0; i < call.inputs.size(); ++i) {
      const DType used = used_dtype(call.op, plan, i, dtypes[i]);
      if (used == dtypes[i]) continue;
      call.storage[i] = cached_cast(*call.inputs[i], used);
      call.inputs[i] = &call.storage[i];
    }
  }
  if (t_explanation) [[unlikely]]
    explain_call(call, state, policy, overridden, dtypes);
}

[[maybe_unused]] const bool installed = (op_hooks().autocast = hook, true);

std::shared_ptr<const void> merged_overrides(const AutocastOptions& options, const AutocastState& outer) {
  const Overrides* o = overrides_of(outer);
  if (options.ops.empty() && options.modules.empty() && !(o && o->table)) return outer.overrides;
  auto merged = std::make_shared<Overrides>();
  if (o) *merged = *o;
  merged->table = nullptr;  // a region inside a module is nearer than the module's precision
  for (const OpOverride& o : options.ops) {
    const Op* op = find_op(o.op);
    if (!op)
      fail<AmpError>("autocast: an override names the op '{}', which doesn't exist; `halfstep ops` lists them", o.op);
    merged->ops[op->id] = o.policy;
  }
  for (const ModuleOverride& m : options.modules) {
    if (m.path.empty()) fail<AmpError>("autocast: a module override needs a path");
    if (m.dtype) check_dtype(*m.dtype);
    merged->modules.push_back(m);
  }
  return merged;
}

}  // namespace

bool detail::path_matches(std::string_view pattern, std::string_view path) {
  while (true) {
    const auto p = pattern.find('.'), t = path.find('.');
    const auto a = pattern.substr(0, p), b = path.substr(0, t);
    if (a != "*" && a != b) return false;
    if (p == std::string_view::npos || t == std::string_view::npos) return p == t;
    pattern.remove_prefix(p + 1);
    path.remove_prefix(t + 1);
  }
}

Autocast::Autocast(const AutocastOptions& options) {
  detail::undo_closed();
  if (options.enabled) check_dtype(options.dtype);
  const AutocastState& outer = thread_state().autocast;
  AutocastState inner = outer;
  inner.overrides = merged_overrides(options, outer);
  inner.cache = options.cache;
  if (options.device) {
    // Other kinds of device stay as they are outside; one dtype serves all kinds that are on.
    const auto bit = static_cast<std::uint16_t>(1u << options.device->type);
    const std::uint16_t on = outer.enabled ? outer.device_types : std::uint16_t{0};
    inner.device_types = static_cast<std::uint16_t>(options.enabled ? on | bit : on & ~bit);
    inner.enabled = inner.device_types != 0;
  } else {
    inner.enabled = options.enabled;
    inner.device_types = 0xffff;
  }
  if (options.enabled) inner.dtype = options.dtype;
  region_ = detail::open_region(std::move(inner), true);
}

Autocast::Autocast(const AutocastSnapshot& snapshot) {
  detail::undo_closed();
  region_ = detail::open_region(snapshot.state_, true);
}

Autocast::~Autocast() { detail::close_region(region_); }

AutocastSnapshot::AutocastSnapshot() {
  detail::undo_closed();
  state_ = thread_state().autocast;
}

bool is_autocast_enabled() {
  detail::undo_closed();
  return thread_state().autocast.enabled;
}
DType autocast_dtype() {
  detail::undo_closed();
  return thread_state().autocast.dtype;
}

std::string Decision::str() const {
  std::vector<const char*> from, to;
  for (DType d : given) from.push_back(halfstep::name(d));
  for (DType d : used) to.push_back(halfstep::name(d));
  return fmt::format("{}{}({}) ran on ({}): {}; {}", module.empty() ? "" : module + ": ", op, fmt::join(from, ", "),
                     fmt::join(to, ", "), amp::name(policy), reason);
}

std::vector<Decision> explain(const std::function<void()>& function) {
  struct Restore {
    std::vector<Decision>* was = t_explanation;
    ~Restore() { t_explanation = was; }
  };
  std::vector<Decision> decisions;
  const Restore restore;
  t_explanation = &decisions;
  function();
  return decisions;
}

Decision explain(std::string_view op_name, const std::vector<DType>& inputs, const AutocastOptions& options) {
  const Op* op = find_op(op_name);
  if (!op) fail<AmpError>("explain: there is no op called '{}'; `halfstep ops` lists them", op_name);
  const Autocast region(options);
  const AutocastState& state = thread_state().autocast;
  bool overridden;
  const Policy policy = effective_policy(*op, state, &overridden);
  Decision d{std::string(op_name), "", policy, reason_for(*op, state, overridden), inputs, inputs};
  if (!state.enabled) {
    d.policy = Policy::pass_through;
    d.reason = "autocast is off";
    return d;
  }
  if (policy == Policy::banned) return d;
  const Plan plan = plan_for(*op, policy, state.dtype, inputs, false);
  for (std::size_t i = 0; i < inputs.size(); ++i) d.used[i] = used_dtype(*op, plan, i, inputs[i]);
  return d;
}

ModuleScope::ModuleScope(std::string_view name, const ModulePrecision* precision) : length_(path().size()) {
  detail::undo_closed();
  std::string& p = path();
  if (!name.empty()) {
    if (!p.empty()) p += '.';
    p += name;
  }
  const AutocastState& state = thread_state().autocast;
  const Overrides* o = overrides_of(state);
  if (o && !o->modules.empty() && !name.empty()) {
    for (auto it = o->modules.rbegin(); it != o->modules.rend(); ++it) {
      if (!detail::path_matches(it->path, p)) continue;
      AutocastState inner = state;
      inner.enabled = it->enabled;
      if (it->dtype) inner.dtype = *it->dtype;
      by_path_ = detail::open_region(std::move(inner), false);
      break;
    }
  }
  if (precision) enter(*precision);
}

// What the module was given replaces the region's options, but for what that says of modules by path: of those inside.
void ModuleScope::enter(const ModulePrecision& precision) {
  AutocastState inner = thread_state().autocast;
  if (const Overrides* o = overrides_of(inner); o && !o->modules.empty()) {
    auto merged = std::make_shared<Overrides>();
    if (precision.policies) merged->table = static_cast<const Overrides*>(precision.policies.get())->table;
    merged->modules = o->modules;
    inner.overrides = std::move(merged);
  } else {
    inner.overrides = precision.policies;
  }
  inner.enabled = true;
  inner.cache = true;
  inner.dtype = precision.dtype;
  inner.device_types = 0xffff;
  precision_ = detail::open_region(std::move(inner), true);
}

ModuleScope::~ModuleScope() {
  detail::close_region(precision_);
  detail::close_region(by_path_);
  path().resize(length_);
}

const std::string& module_path() { return path(); }

}  // namespace halfstep::amp
