// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/memory_plan.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <string_view>

#include "halfstep/core/fail.h"
#include "halfstep/core/random.h"
#include "halfstep/nn/container.h"
#include "halfstep/runtime/caching_allocator.h"
#include "halfstep/train/networks.h"
#include "halfstep/train/registry.h"
#include "halfstep/train/step_plan.h"
#include "halfstep/train/trace_step.h"

namespace halfstep::training {
namespace {

constexpr const char *kAll = "all", *kNone = "none";

bool has_parameters(const nn::ModuleBase& module) {
  return !module.own_parameters().empty() ||
         std::ranges::any_of(module.children(), [](const auto& c) { return has_parameters(*c.second); });
}

// The children that the module's class knows of, without those that were attached.
std::vector<std::pair<std::string, const nn::ModuleBase*>> own_children(const nn::ModuleBase& module) {
  auto result = module.children();
  std::erase_if(result, [&](const auto& c) { return module.attached(c.first).get() == c.second; });
  return result;
}

bool is_list(const nn::ModuleBase& module) {
  if (dynamic_cast<const nn::Sequential*>(&module)) return true;
  const auto children = own_children(module);
  for (std::size_t i = 0; i < children.size(); ++i) {
    if (children[i].first != std::to_string(i)) return false;
  }
  return !children.empty() && module.own_parameters().empty();
}

// Made of modules that have parameters.
bool is_composed(const nn::ModuleBase& module) {
  return std::ranges::any_of(own_children(module), [](const auto& c) { return has_parameters(*c.second); });
}

void find_blocks(const std::string& path, const nn::ModuleBase& module, std::vector<std::string>& found) {
  for (const auto& [name, child] : own_children(module)) {
    const std::string own = path.empty() ? name : path + "." + name;
    if (!is_composed(*child)) continue;
    const auto inside = own_children(*child);
    const bool of_blocks = std::ranges::any_of(inside, [](const auto& c) { return is_composed(*c.second); });
    if (is_list(module) && !is_list(*child)) {
      found.push_back(own);
    } else if (is_list(*child) && !of_blocks) {
      if (dynamic_cast<const nn::Sequential*>(child)) found.push_back(own);  // others are never called
    } else {
      find_blocks(own, *child, found);
    }
  }
}

// Layers that none of the blocks contains: modules with parameters that are made of no others.
void find_layers(const std::string& path, const nn::ModuleBase& module, const std::vector<std::string>& blocks,
                 std::vector<std::string>& found) {
  for (const auto& [name, child] : own_children(module)) {
    const std::string own = path.empty() ? name : path + "." + name;
    if (std::ranges::find(blocks, own) != blocks.end() || !has_parameters(*child)) continue;
    if (is_composed(*child)) {
      find_layers(own, *child, blocks, found);
    } else {
      found.push_back(own);
    }
  }
}

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> result;
  for (std::size_t at = 0; at <= list.size();) {
    const std::size_t comma = std::min(list.find(',', at), list.size());
    result.push_back(list.substr(at, comma - at));
    at = comma + 1;
  }
  return result;
}

// Paths as a message has them: not more than a line.
std::string some_of(const std::vector<std::string>& paths) {
  constexpr std::size_t kMost = 8;
  if (paths.size() <= kMost) return fmt::format("{}", fmt::join(paths, ", "));
  const auto first = std::span(paths).first(kMost - 2);
  return fmt::format("{}, ... {}", fmt::join(first, ", "), paths.back());
}

// The cheapest modules whose savings add up to `need`; all of them where they don't.
std::vector<bool> cheapest(std::span<const RecomputeCandidate> modules, const std::vector<double>& savings,
                           double need) {
  constexpr std::size_t kParts = 2000;  // of what is needed; savings are rounded down
  const double infinite = std::numeric_limits<double>::infinity();
  std::vector<double> least(kParts + 1, infinite);  // cost, by what is saved
  least[0] = 0;
  std::vector<std::vector<bool>> taken(modules.size(), std::vector<bool>(kParts + 1, false));
  for (std::size_t i = 0; i < modules.size(); ++i) {
    const auto saved = static_cast<std::size_t>(std::clamp(savings[i] / need, 0.0, 1.0) * kParts);
    if (saved == 0) continue;
    for (std::size_t to = kParts; to > 0; --to) {
      const double cost = least[to > saved ? to - saved : 0] + modules[i].cost;
      if (cost < least[to]) {
        least[to] = cost;
        taken[i][to] = true;
      }
    }
  }
  if (least[kParts] == infinite) return std::vector<bool>(modules.size(), true);
  std::vector<bool> result(modules.size(), false);
  std::size_t to = kParts;
  for (std::size_t i = modules.size(); i-- > 0;) {
    if (!taken[i][to]) continue;
    result[i] = true;
    const auto saved = static_cast<std::size_t>(std::clamp(savings[i] / need, 0.0, 1.0) * kParts);
    to = to > saved ? to - saved : 0;
  }
  return result;
}

double cost_of(const debug::TracedCall& call) {
  // Processors do some multiply-adds in the time in which they move a byte; what is written is read too.
  constexpr double kPerByte = 4;
  double bytes = 0;
  if (call.site.path != ExecutionPath::view) {
    for (std::size_t i = 0; i < call.outputs.size(); ++i) {
      bytes += static_cast<double>(call.outputs[i].numel()) * static_cast<double>(item_size(call.output_dtypes[i]));
    }
  }
  return static_cast<double>(call.multiply_adds) + kPerByte * 2 * bytes;
}

bool is_forward(const debug::TracedCall& call) { return std::string_view(call.site.pass()) == "forward"; }

// The modules of a network that a plan chooses among, in the order in which `calls`, a step without recomputation, runs
// them: the blocks that repeat, and layers outside of them that pass over memory only, such as a batch norm. A layer of
// products is none: its result is an input of the next layer, which keeps it.
std::vector<RecomputeCandidate> candidates_of(const nn::ModuleBase& network,
                                              const std::vector<debug::TracedCall>& calls) {
  struct Found {
    RecomputeCandidate candidate;
    std::size_t first;  // call
    std::int64_t multiply_adds = 0;
  };
  std::vector<std::string> paths = recompute_candidates(network);
  const std::size_t blocks = paths.size();
  find_layers("", network, std::vector(paths), paths);
  std::vector<Found> found;
  for (const std::string& path : paths) found.push_back({.candidate = {.path = path}, .first = calls.size()});
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const debug::TracedCall& call = calls[i];
    if (!is_forward(call)) continue;
    for (Found& f : found) {
      if (!debug::in_module(call.site.module, f.candidate.path)) continue;
      f.first = std::min(f.first, i);
      f.multiply_adds += call.multiply_adds;
      f.candidate.cost += cost_of(call);
      f.candidate.alike += call.site.op + " ";
      for (std::size_t k = 0; k < call.outputs.size(); ++k) {
        f.candidate.alike += fmt::format("{} {} ", name(call.output_dtypes[k]), call.outputs[k].str());
      }
    }
  }
  for (std::size_t i = found.size(); i-- > 0;) {
    const bool never_runs = found[i].first == calls.size();
    if (never_runs || (i >= blocks && found[i].multiply_adds > 0)) found.erase(found.begin() + std::ptrdiff_t(i));
  }
  std::ranges::stable_sort(found, {}, &Found::first);
  std::vector<RecomputeCandidate> result;
  for (Found& f : found) result.push_back(std::move(f.candidate));
  return result;
}

}  // namespace

std::uint64_t parse_bytes(const std::string& text) {
  struct Unit {
    const char* name;
    double bytes;
  };
  constexpr std::array kUnits = {Unit{"", 1},         Unit{"B", 1},        Unit{"KB", 1e3},    Unit{"kB", 1e3},
                                 Unit{"MB", 1e6},     Unit{"GB", 1e9},     Unit{"TB", 1e12},   Unit{"KiB", 0x1p10},
                                 Unit{"MiB", 0x1p20}, Unit{"GiB", 0x1p30}, Unit{"TiB", 0x1p40}};
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, std::chars_format::fixed);
  const std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  for (const Unit& u : kUnits) {
    if (error != std::errc{} || unit != u.name) continue;
    const double bytes = value * u.bytes;
    if (bytes >= 1 && bytes < 0x1p60) return static_cast<std::uint64_t>(bytes);
  }
  fail<Error>("expected a size such as 1GB, 800MB or 1.5GiB, or a number of bytes, got '{}'", text);
}

std::string megabytes_text(std::uint64_t bytes) { return fmt::format("{:.1f} MB", static_cast<double>(bytes) / 1e6); }

std::vector<std::string> recompute_candidates(const nn::ModuleBase& network) {
  std::vector<std::string> found;
  find_blocks("", network, found);
  return found;
}

void set_recomputed(const nn::ModuleBase& network, const std::string& which) {
  if (which.empty()) return;
  const std::vector<std::string> blocks = recompute_candidates(network);
  const std::vector<std::string> list = which == kAll    ? blocks
                                        : which == kNone ? std::vector<std::string>()
                                                         : split(which);
  if (which == kAll && blocks.empty()) {
    fail<Error>("--recompute all: {} has no blocks that repeat; expected paths of modules, or none", network.kind());
  }
  std::set<std::string> wanted(list.begin(), list.end()), there;
  network.apply([&](const std::string& path, const nn::ModuleBase&) { there.insert(path); });
  there.erase("");
  for (const std::string& path : list) {
    if (there.contains(path)) continue;
    fail<Error>("--recompute: expected all, none or paths of modules{}, got '{}'",
                blocks.empty() ? std::string() : fmt::format(" such as {}", some_of(blocks)), path);
  }
  network.apply([&](const std::string& path, const nn::ModuleBase& m) { m.recompute(wanted.contains(path)); });
}

std::string MemoryPlan::modules() const {
  return recomputed.empty() ? kNone : fmt::format("{}", fmt::join(recomputed, ","));
}

std::string MemoryPlan::text() const {
  std::string line = "recomputing nothing";
  if (!recomputed.empty()) {
    line = candidates > 0
               ? fmt::format("recomputing {} of {} modules ({})", recomputed.size(), candidates, some_of(recomputed))
               : fmt::format("recomputing {}", some_of(recomputed));
  }
  if (budget == 0) return line;
  if (extra > 0) line += fmt::format(", {:.0f}% more work", 100 * extra);
  line += fmt::format("; predicted peak of tensors {} of {}", megabytes_text(peak), megabytes_text(budget));
  if (!recomputed.empty()) line += fmt::format(", {} without", megabytes_text(peak_without));
  return line;
}

MemoryPlan choose_recomputed(std::span<const RecomputeCandidate> modules,
                             const std::function<std::uint64_t(const std::vector<bool>&)>& peak, std::uint64_t budget) {
  using Set = std::vector<bool>;
  std::map<Set, std::uint64_t> known;
  const auto peak_of = [&](const Set& set) {
    const auto it = known.find(set);
    return it != known.end() ? it->second : known.emplace(set, peak(set)).first->second;
  };
  const auto cost = [&](const Set& set) {
    double sum = 0;
    for (std::size_t i = 0; i < modules.size(); ++i) sum += set[i] ? modules[i].cost : 0;
    return sum;
  };
  const Set none(modules.size(), false), all(modules.size(), true);
  const std::uint64_t without = peak_of(none);
  const auto plan = [&](const Set& set) {
    MemoryPlan result{.candidates = modules.size(), .budget = budget, .peak = peak_of(set), .peak_without = without};
    for (std::size_t i = 0; i < modules.size(); ++i) {
      if (set[i]) result.recomputed.push_back(modules[i].path);
    }
    return result;
  };
  if (without <= budget || modules.empty()) return plan(none);
  peak_of(all);
  // Of modules that are alike, one is tried.
  std::map<std::string, double> saved_by;
  std::vector<double> savings;
  for (std::size_t i = 0; i < modules.size(); ++i) {
    const auto [it, fresh] = saved_by.try_emplace(modules[i].alike, 0);
    if (fresh) {
      Set one = none;
      one[i] = true;
      it->second = std::max(0.0, static_cast<double>(without) - static_cast<double>(peak_of(one)));
    }
    savings.push_back(it->second);
  }
  // Savings don't quite add up: what a set lacks is asked for in addition.
  double need = static_cast<double>(without - budget);
  constexpr int kCorrections = 12;
  for (int i = 0; i < kCorrections; ++i) {
    const Set set = cheapest(modules, savings, need);
    const std::uint64_t got = peak_of(set);
    if (got <= budget || set == all) break;
    need += std::max(static_cast<double>(got - budget), 0.005 * need);
  }
  // The last module's second run begins where its first one ended, and saves nothing.
  Set but_last = all;
  but_last.back() = false;
  peak_of(but_last);
  const auto best = [&] {
    const auto better = [&](const auto& a, const auto& b) {
      const bool fits = a.second <= budget;
      if (fits != (b.second <= budget)) return fits;
      return fits ? std::pair(cost(a.first), a.second) < std::pair(cost(b.first), b.second) : a.second < b.second;
    };
    return *std::min_element(known.begin(), known.end(), better);
  };
  // Where none fits, the least: what a backward pass comes to first is the least worth recomputing, since little is
  // kept behind it. From the best of the sets that begin with the first module, one more or less at a time, as long as
  // that takes less.
  if (best().second > budget) {
    Set first = none;
    for (std::size_t i = 0; i < first.size(); ++i) {
      first[i] = true;
      peak_of(first);
    }
  }
  constexpr int kFlips = 64;
  for (int flips = 0, before = -1; best().second > budget && flips < kFlips && flips != before;) {
    before = flips;
    const auto [from, least] = best();
    for (std::size_t i = 0; i < modules.size() && flips < kFlips; ++i) {
      Set other = from;
      other[i] = !other[i];
      if (known.contains(other)) continue;
      ++flips;
      if (peak_of(other) < least) break;
    }
  }
  // What can be left out of a set that fits, the most expensive ones first.
  Set set = best().first;
  const bool fits = peak_of(set) <= budget;
  std::vector<std::size_t> order(modules.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return modules[a].cost > modules[b].cost; });
  constexpr int kTries = 16;
  int tries = 0;
  std::set<std::string> needed;  // kinds of modules of which none can be left out
  for (const std::size_t i : order) {
    if (!fits || tries == kTries) break;
    if (!set[i] || needed.contains(modules[i].alike)) continue;
    Set fewer = set;
    fewer[i] = false;
    ++tries;
    if (peak_of(fewer) <= budget) {
      set = fewer;
    } else {
      needed.insert(modules[i].alike);
    }
  }
  return plan(best().first);
}

MemoryPlan plan_memory(const TrainConfig& config, std::int64_t batch_size, std::int64_t image_size,
                       std::uint64_t budget) {
  const PhiloxState random = default_generator().state();
  TrainConfig c = config;
  c.recompute = kNone;
  c.memory_budget.clear();
  const std::vector<debug::TracedCall> calls = predict_calls(c, batch_size, image_size);
  const double whole = std::accumulate(calls.begin(), calls.end(), 0.0,
                                       [](double sum, const auto& call) { return sum + cost_of(call); });
  std::vector<RecomputeCandidate> candidates;
  {
    const DeviceGuard nowhere(kMeta);
    candidates = candidates_of(random_task(c)->network(), calls);
  }
  const auto peak = [&](const std::vector<bool>& recomputed) {
    std::vector<std::string> chosen;
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      if (recomputed[i]) chosen.push_back(candidates[i].path);
    }
    c.recompute = chosen.empty() ? kNone : fmt::format("{}", fmt::join(chosen, ","));
    return predict_memory(c, batch_size, image_size).peak;
  };
  MemoryPlan plan = choose_recomputed(candidates, peak, budget);
  default_generator().set_state(random);
  if (plan.peak > budget) {
    constexpr std::uint64_t kShown = 100'000;  // bytes of the last digit: as much as is named has to be enough
    fail<Error>(
        "--memory-budget: expected at least {}, the least that a step of {} on {} samples needs{}, got {}; a smaller "
        "--batch-size{} needs less",
        megabytes_text((plan.peak + kShown - 1) / kShown * kShown), network_label(config), batch_size,
        candidates.empty() ? std::string(" (it has no modules to recompute)")
        : plan.recomputed.empty()
            ? std::string()
            : fmt::format(" with {} of {} modules recomputed", plan.recomputed.size(), candidates.size()),
        megabytes_text(budget), amp_mode(config).dtype() ? "" : " or --amp bf16");
  }
  for (const RecomputeCandidate& m : candidates) {
    if (std::ranges::find(plan.recomputed, m.path) != plan.recomputed.end()) plan.extra += m.cost;
  }
  if (whole > 0) plan.extra /= whole;
  return plan;
}

std::optional<MemoryPlan> plan_of_run(const TrainConfig& config, const nn::ModuleBase& network) {
  if (config.memory_budget.empty()) {
    if (config.recompute.empty()) return std::nullopt;
    MemoryPlan plan;
    network.apply([&](const std::string& path, const nn::ModuleBase& m) {
      if (m.is_recomputed()) plan.recomputed.push_back(path);
    });
    return plan;
  }
  const std::int64_t ranks = config.group.size();
  const bool of_pictures = !data_of(config.model).flags.empty();
  const std::int64_t size = of_pictures ? config.images.image_size : 0;
  const std::uint64_t budget = parse_bytes(config.memory_budget);
  MemoryPlan plan = plan_memory(config, (config.batch_size + ranks - 1) / ranks, size, budget);
  empty_memory_cache();  // of the plan's steps, so that the run's memory doesn't come on top of it
  return plan;
}

}  // namespace halfstep::training
