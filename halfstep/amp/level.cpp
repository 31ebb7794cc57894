// SPDX-License-Identifier: Apache-2.0
#include "halfstep/amp/level.h"

#include <algorithm>
#include <set>

#include "halfstep/amp/cast_cache.h"
#include "halfstep/amp/overrides_internal.h"
#include "halfstep/core/capture.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/runtime/log.h"

namespace halfstep::amp {
namespace {

using detail::OpPolicies;
using detail::Overrides;

constexpr const char* kWhite[] = {"Conv1d", "Conv2d", "ConvTranspose1d", "ConvTranspose2d", "Linear", "PReLU", "ReLU",
                                  // ops
                                  "conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d", "linear", "matmul", "mm",
                                  "bmm", "mv", "addmm", "addmv", "addbmm", "baddbmm", "outer", "einsum", "prelu",
                                  "relu"};
constexpr const char* kBlackModules[] = {"BatchNorm1d", "BatchNorm2d", "LayerNorm", "GroupNorm", "RMSNorm"};
constexpr const char* kBlackOps[] = {"batch_norm", "batch_norm_act", "batch_norm_silu",
                                     "layer_norm", "group_norm",     "rms_norm"};
// Ops that neither compute nor choose a dtype, or whose caller chose it.
constexpr const char* kAsTheyCome[] = {"to", "clone", "copy", "fill", "to_device"};

using Names = std::set<std::string, std::less<>>;

template <std::size_t N>
bool among(const char* const (&list)[N], std::string_view name) {
  return std::find(std::begin(list), std::end(list), name) != std::end(list);
}

void check_low(DType dtype, const char* call) {
  if (!is_low_precision(dtype)) {
    fail<AmpError>("{}: expected f16 or bf16, got {}", call, halfstep::name(dtype));
  }
}

// A policy for each op; `choose` is asked about those that compute.
template <class F>
std::shared_ptr<const void> policies(Policy others, F&& choose) {
  auto table = std::make_shared<OpPolicies>();
  table->others = others;
  for (const Op* op : all_ops()) {
    const auto id = static_cast<std::size_t>(op->id);
    if (table->of.size() <= id) table->of.resize(id + 1, others);
    table->of[id] = op->view || among(kAsTheyCome, op->name) ? Policy::pass_through : choose(*op);
  }
  auto overrides = std::make_shared<Overrides>();
  overrides->table = std::move(table);
  return overrides;
}

// All ops in the module's dtype, but for those on a black list.
std::shared_ptr<const void> all_but(const Names& black) {
  return policies(Policy::lower_precision, [&](const Op& op) {
    // Norms compute in float32 whatever they read: a cast before them and one behind would change nothing.
    if (black.contains(op.name)) return among(kBlackOps, op.name) ? Policy::pass_through : Policy::float32;
    const Policy usual = policy_of(op);
    // What 16 bits can't do at all.
    if (usual == Policy::banned) return Policy::float32;
    return usual == Policy::low_output ? usual : Policy::lower_precision;
  });
}

// All ops in float32, but for those on a white list.
std::shared_ptr<const void> none_but(const Names& white) {
  return policies(Policy::float32,
                  [&](const Op& op) { return white.contains(op.name) ? Policy::lower_precision : Policy::float32; });
}

using Setting = std::shared_ptr<const ModulePrecision>;

Setting setting(std::shared_ptr<const void> policies, DType dtype, bool cast_inputs, std::string label) {
  return std::make_shared<ModulePrecision>(ModulePrecision{
      .policies = std::move(policies), .dtype = dtype, .cast_inputs = cast_inputs, .label = std::move(label)});
}

// A module with its path, and all inside.
void visit(const Castable& module, const std::string& path,
           const std::function<bool(const std::string&, const Castable&)>& function) {
  if (!function(path, module)) return;
  for (const auto& [name, inner] : module.castables()) {
    visit(*inner, path.empty() ? name : path + "." + name, function);
  }
}

// How well a list knows a module: not at all, by its kind, or by its path.
enum class Match { none, kind, path };
Match match(const Names& list, const std::string& path, const std::string& kind) {
  if (!path.empty()) {
    for (const std::string& entry : list) {
      if (detail::path_matches(entry, path)) return Match::path;
    }
  }
  return list.contains(kind) ? Match::kind : Match::none;
}

// What a level gives to the modules.
struct LevelPlan {
  Setting root;
  Names white = {}, black = {};
  Setting white_module = {};  // for those on the lists
  Setting black_module = {};
};

void clear(const Castable& root) {
  ++capture_generation();
  visit(root, "", [](const std::string&, const Castable& module) {
    module.precision().level = nullptr;
    return true;
  });
}

void apply(const Castable& root, const LevelPlan& plan, const char* call, const std::string& what) {
  ++capture_generation();
  bool again = false;
  visit(root, "", [&](const std::string&, const Castable& module) {
    again |= module.precision().level != nullptr;
    return true;
  });
  if (again) {
    log(LogLevel::warning,
        fmt::format("{}: the network has a level or lists already; {} takes their place", call, what));
  }
  clear(root);
  visit(root, "", [&](const std::string& path, const Castable& module) {
    PrecisionSlot& slot = module.precision();
    if (path.empty()) {
      slot.own = nullptr;
    } else if (slot.own) {
      return false;  // said for this module in so many words, and so for what is inside
    }
    const Match white = match(plan.white, path, module.kind()), black = match(plan.black, path, module.kind());
    Setting chosen = path.empty() ? plan.root : nullptr;
    if (white > black) chosen = plan.white_module;
    if (black > white) chosen = plan.black_module;
    if (path.empty()) {
      auto at_root = std::make_shared<ModulePrecision>(*chosen);
      at_root->float32_output = true;
      chosen = std::move(at_root);
    }
    // A module that is there under several names is one: what a list says of one of them holds.
    if (chosen) slot.level = std::move(chosen);
    return true;
  });
}

Setting everything_in(DType dtype) { return setting(all_but({}), dtype, true, halfstep::name(dtype)); }

// Modules that stay float32 read what comes as it is: ops cast where they have to.
Setting kept_in_float32(Names black) {
  black.insert(std::begin(kBlackOps), std::end(kBlackOps));
  return setting(all_but(black), DType::f32, false, "f32");
}

LevelPlan listed(Names white, Names black, DType dtype) {
  LevelPlan plan{
      .root = setting(none_but(white), dtype, false, "f32"), .white = std::move(white), .black = std::move(black)};
  plan.white_module = setting(all_but(plan.black), dtype, true, halfstep::name(dtype));
  plan.black_module = kept_in_float32(plan.black);
  return plan;
}

LevelPlan unlisted(Names black, DType dtype) {
  LevelPlan plan{.root = setting(all_but(black), dtype, true, halfstep::name(dtype)), .black = std::move(black)};
  plan.black_module = kept_in_float32(plan.black);
  return plan;
}

constexpr const char* kLevelNames[] = {"O0", "O1", "O2", "O3", "auto"};

}  // namespace

Castable::~Castable() = default;

const char* name(Level level) { return kLevelNames[static_cast<int>(level)]; }

Level parse_level(std::string_view text) {
  for (std::size_t i = 0; i < std::size(kLevelNames); ++i) {
    if (text == kLevelNames[i]) return static_cast<Level>(i);
  }
  fail<AmpError>("level: expected O0, O1, O2, O3 or auto, got '{}'", text);
}

std::vector<std::string> white_list() { return {std::begin(kWhite), std::end(kWhite)}; }

std::vector<std::string> black_list() {
  std::vector<std::string> result(std::begin(kBlackModules), std::end(kBlackModules));
  result.insert(result.end(), std::begin(kBlackOps), std::end(kBlackOps));
  return result;
}

Tensor cast_input(const Tensor& tensor, DType dtype) {
  if (!tensor.defined()) return tensor;
  const DType from = tensor.dtype();
  return (from == DType::f32 || is_low_precision(from)) ? cached_cast(tensor, dtype) : tensor;
}

void set_precision(const Castable& module, DType dtype) {
  if (dtype != DType::f32 && !is_low_precision(dtype)) {
    fail<AmpError>("to_float: expected f16, bf16 or f32, got {}", halfstep::name(dtype));
  }
  ++capture_generation();
  module.precision().own = everything_in(dtype);
  // What a level said of the modules inside would be nearer than this, which was said later and of them all.
  for (const auto& [name, inner] : module.castables()) clear(*inner);
}

void set_level(const Castable& root, Level level, DType dtype) {
  constexpr const char* kCall = "auto_mixed_precision";
  check_low(dtype, kCall);
  const std::string what = amp::name(level);
  switch (level) {
    case Level::O0:
      return clear(root);
    case Level::O1:
      return apply(root, listed({std::begin(kWhite), std::end(kWhite)}, {}, dtype), kCall, what);
    case Level::O2: {
      const auto black = black_list();
      return apply(root, unlisted({black.begin(), black.end()}, dtype), kCall, what);
    }
    case Level::O3:
      return apply(root, unlisted({}, dtype), kCall, what);
    case Level::automatic:
      return apply(root, {.root = setting(nullptr, dtype, false, std::string("auto ") + halfstep::name(dtype))}, kCall,
                   what);
  }
  fail<AmpError>("{}: expected a level from O0 to O3 or automatic, got number {}", kCall, static_cast<int>(level));
}

namespace detail {

void apply_lists(const Castable& root, const PrecisionLists& lists) {
  constexpr const char* kCall = "custom_mixed_precision";
  check_low(lists.dtype, kCall);
  if (lists.white.empty() && lists.black.empty()) {
    fail<AmpError>("{}: expected a white list or a black list, got neither", kCall);
  }
  const Names white(lists.white.begin(), lists.white.end()), black(lists.black.begin(), lists.black.end());
  Names kinds;
  std::vector<std::string> paths;
  visit(root, "", [&](const std::string& path, const Castable& module) {
    const std::string kind = module.kind();
    kinds.insert(kind);
    if (!path.empty()) paths.push_back(path);
    const Match w = match(white, path, kind), b = match(black, path, kind);
    if (w != Match::none && w == b) {
      fail<AmpError>("{}: {} ({}) is on the white list and on the black list", kCall,
                     path.empty() ? "the network itself" : path, kind);
    }
    return true;
  });
  for (const Names* list : {&white, &black}) {
    for (const std::string& entry : *list) {
      if (list == &white && black.contains(entry)) {
        fail<AmpError>("{}: '{}' is on the white list and on the black list", kCall, entry);
      }
      const bool known =
          kinds.contains(entry) || among(kWhite, entry) || among(kBlackModules, entry) || find_op(entry) != nullptr ||
          std::any_of(paths.begin(), paths.end(), [&](const auto& path) { return path_matches(entry, path); });
      if (!known) {
        fail<AmpError>("{}: '{}' is neither a kind of module in the network ({}), nor a path in it, nor an op", kCall,
                       entry, fmt::join(kinds, ", "));
      }
    }
  }
  if (white.empty()) {
    for (const char* norm : kBlackModules) {
      if (kinds.contains(norm) && !black.contains(norm)) {
        log(LogLevel::warning,
            fmt::format("{}: {} is not on the black list given and will read 16-bit weights", kCall, norm));
      }
    }
  }
  apply(root, white.empty() ? unlisted(black, lists.dtype) : listed(white, black, lists.dtype), kCall, "the new one");
}

void refuse_function(Level level) {
  fail<AmpError>("auto_mixed_precision: a function has no modules to go by; expected the level auto, got {}",
                 amp::name(level));
}

}  // namespace detail
}  // namespace halfstep::amp
