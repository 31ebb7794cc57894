// SPDX-License-Identifier: Apache-2.0
#include "halfstep/nn/summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/autograd/node.h"
#include "halfstep/core/random.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/observer.h"

namespace halfstep::nn {
namespace {

// What calls keep for the backward pass, by the module that they run in.
class Saved final : public SavingHook, public OpObserver {
 public:
  explicit Saved(const ModuleBase& module) {
    for (const NamedTensor& t : module.state_dict()) {
      if (t.tensor.defined()) weights_.insert(t.tensor.storage().get());
    }
    outer_ = std::exchange(saving_hook(), this);
    add_observer(this);
  }
  ~Saved() override {
    remove_observer(this);
    saving_hook() = outer_;
  }
  Saved(const Saved&) = delete;
  Saved& operator=(const Saved&) = delete;

  std::shared_ptr<SavedSlot> save(const Tensor& tensor, bool /*is_output*/, std::uint32_t /*version*/) override {
    const Storage* storage = tensor.storage().get();
    if (weights_.contains(storage) || !seen_.insert(storage).second) return nullptr;
    // Held, so that no later one gets its address.
    held_.push_back(tensor.storage());
    if (copies_.contains(storage)) {
      weight_copies += storage->bytes();
    } else {
      bytes[call_origin().module_path] += storage->bytes();
    }
    return nullptr;
  }
  void read(std::span<const Tensor* const> /*inputs*/) override {}
  bool takes_fused() const override { return true; }
  void after_call(const ObservedCall& call) override {
    const std::string_view op = call.name;
    const bool converts = op == "to" || op == "copy" || op == "clone";
    if (!converts || call.inputs.empty() || call.outputs.size() != 1 || !call.inputs.back()->defined()) return;
    if (!weights_.contains(call.inputs.back()->storage().get())) return;
    copies_.insert(call.outputs[0]->storage().get());
    held_.push_back(call.outputs[0]->storage());
  }

  std::map<std::string, std::uint64_t> bytes;  // of modules themselves
  std::uint64_t weight_copies = 0;

 private:
  SavingHook* outer_;
  std::unordered_set<const Storage*> weights_, copies_, seen_;
  std::vector<Ref<Storage>> held_;
};

// A pass that leaves the module as it was.
class Undisturbed {
 public:
  explicit Undisturbed(const ModuleBase& module) : module_(module), random_(default_generator().state()) {
    const NoGrad no_grad;
    for (const NamedTensor& b : module.buffers()) buffers_.push_back(b.tensor.clone());
    module.apply([&](const std::string&, const ModuleBase& m) { modes_.emplace_back(&m, m.is_training()); });
    module.train();
  }
  ~Undisturbed() {
    const NoGrad no_grad;
    std::size_t i = 0;
    for (const NamedTensor& b : module_.buffers()) Tensor(b.tensor).copy_(buffers_[i++]);
    // From the outermost on: each sets all that is inside of it.
    for (const auto& [m, training] : modes_) m->train(training);
    default_generator().set_state(random_);
  }
  Undisturbed(const Undisturbed&) = delete;
  Undisturbed& operator=(const Undisturbed&) = delete;

 private:
  const ModuleBase& module_;
  PhiloxState random_;
  std::vector<Tensor> buffers_;
  std::vector<std::pair<const ModuleBase*, bool>> modes_;
};

struct Pass {
  std::map<std::string, std::uint64_t> saved;
  std::uint64_t weight_copies = 0;
  std::vector<debug::TracedCall> calls;
};

Pass run(const ModuleBase& module, const std::function<void()>& forward, std::optional<DType> dtype) {
  const Undisturbed undisturbed(module);
  const AutocastOff outside;
  std::optional<amp::Autocast> region;
  if (dtype) region.emplace(amp::AutocastOptions{.dtype = *dtype});
  Pass pass;
  debug::CallTrace trace;
  {
    Saved saved(module);
    forward();
    pass.saved = std::move(saved.bytes);
    pass.weight_copies = saved.weight_copies;
  }
  pass.calls = trace.calls();
  return pass;
}

// The calling thread's recording, on for a scope.
class Recording {
 public:
  Recording() : was_(std::exchange(thread_state().grad_enabled, true)) {}
  ~Recording() { thread_state().grad_enabled = was_; }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

 private:
  bool was_;
};

bool inside(std::string_view path, std::string_view module) {
  return module.empty() || (path.starts_with(module) && (path.size() == module.size() || path[module.size()] == '.'));
}

std::uint64_t sum_inside(const std::map<std::string, std::uint64_t>& saved, std::string_view module) {
  std::uint64_t sum = 0;
  for (const auto& [path, bytes] : saved) sum += inside(path, module) ? bytes : 0;
  return sum;
}

std::int64_t elements(const NamedTensors& tensors) {
  std::int64_t sum = 0;
  for (const NamedTensor& t : tensors) sum += t.tensor.numel();
  return sum;
}

std::string kind_of(const ModuleBase& module) {
  const std::string inner = module.describe();
  return inner.empty() ? module.kind() : fmt::format("{}({})", module.kind(), inner);
}

std::string grouped(std::int64_t n) {
  std::string digits = std::to_string(n);
  for (auto at = static_cast<std::ptrdiff_t>(digits.size()) - 3; at > 0; at -= 3) {
    digits.insert(static_cast<std::size_t>(at), ",");
  }
  return digits;
}

std::string operations(std::int64_t n) {
  return n == 0             ? ""
         : n < 10'000       ? grouped(n)
         : n >= 100'000'000 ? fmt::format("{:.2f} G", static_cast<double>(n) / 1e9)
                            : fmt::format("{:.2f} M", static_cast<double>(n) / 1e6);
}

std::string megabytes(std::uint64_t n) {
  return n == 0 ? "" : fmt::format("{:.{}f}", static_cast<double>(n) / 1e6, n < 100'000 ? 4 : 2);
}

// Modules that are attached have parts named after modules, for what those give (`layer1.0.bn1`), and after their
// tensors (`fc.weight`): these move into the rows of the modules.
void fold_attached(const ModuleBase& module, std::vector<SummaryRow>& rows) {
  const auto row_at = [&](std::string_view path) {
    return std::find_if(rows.begin(), rows.end(), [&](const SummaryRow& r) { return r.path == path; });
  };
  for (const auto& [name, part] : module.children()) {
    if (!module.attached(name)) continue;
    for (const auto& [of, what] : part->children()) {
      auto row = row_at(of);
      std::string tensor = "output";
      if (row == rows.end()) {
        const std::size_t dot = of.rfind('.');
        row = row_at(dot == std::string::npos ? "" : std::string_view(of).substr(0, dot));
        tensor = dot == std::string::npos ? of : of.substr(dot + 1);
      }
      if (row == rows.end()) continue;
      const std::string how = what->describe();
      row->attached += fmt::format("{}{} {}", row->attached.empty() ? "" : ", ", tensor, how.substr(0, how.find(',')));
      std::erase_if(rows, [&, path = name + "." + of](const SummaryRow& r) { return inside(r.path, path); });
    }
  }
}

using Cells = std::vector<std::string>;

// The first column to the left, and `lefts` more, and those from `last_left` on; the others to the right.
std::string table(const std::vector<Cells>& rows, std::size_t lefts, std::size_t last_left = 1000) {
  std::vector<std::size_t> widths(rows[0].size(), 0);
  for (const Cells& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    std::string line;
    for (std::size_t i = 0; i < rows[r].size(); ++i) {
      const bool left = i <= lefts || i >= last_left;
      line += left ? fmt::format("{:<{}}  ", rows[r][i], widths[i]) : fmt::format("{:>{}}  ", rows[r][i], widths[i]);
    }
    text += line.substr(0, line.find_last_not_of(' ') + 1) + '\n';
    if (r > 0) continue;
    for (std::size_t i = 0; i < widths.size(); ++i) {
      text += std::string(widths[i], '-') + (i + 1 < widths.size() ? "  " : "\n");
    }
  }
  return text;
}

}  // namespace

Summary summary(const ModuleBase& module, const std::function<void()>& forward, const SummaryOptions& options) {
  const Recording recording;
  Summary made{.rows = {}, .low = options.amp.value_or(f16), .autocast = options.amp.has_value()};
  const Pass wide = run(module, forward, {});
  const Pass low = run(module, forward, made.low);
  made.weight_copies = low.weight_copies;
  const std::vector<debug::TracedCall>& calls = made.autocast ? low.calls : wide.calls;
  made.ops = debug::placements(calls);
  made.buffers = elements(module.buffers());
  made.trainable = elements(module.trainable_parameters());
  module.apply([&](const std::string& path, const ModuleBase& m) {
    // A module that belongs to another one has a name, which its own paths don't begin with.
    const std::string seen = module.name().empty() ? path : path.empty() ? module.name() : module.name() + "." + path;
    SummaryRow row{.path = path,
                   .kind = kind_of(m),
                   .depth = path.empty() ? 0 : 1 + static_cast<int>(std::count(path.begin(), path.end(), '.')),
                   .parameters = elements(m.parameters()),
                   .saved_float32 = sum_inside(wide.saved, seen),
                   .saved_low = sum_inside(low.saved, seen)};
    for (const debug::TracedCall& c : calls) {
      if (!inside(c.site.module, seen)) continue;
      row.multiply_adds += c.multiply_adds;
      // What a module gives is no counter that it keeps, nor a conversion.
      if (c.site.standalone || c.outputs.empty() || !is_floating(c.output_dtypes[0])) continue;
      row.called = true;
      row.output = c.outputs[0];
      row.dtype = c.output_dtypes[0];
    }
    made.rows.push_back(std::move(row));
  });
  fold_attached(module, made.rows);
  return made;
}

std::string Summary::str(std::optional<int> depth) const {
  constexpr std::size_t kNumbered = 8;  // columns before that of attached modules
  std::vector<Cells> cells = {{"module", "kind", "output", "dtype", "parameters", "multiply-adds", "saved f32, MB",
                               fmt::format("{}, MB", name(low))}};
  for (const SummaryRow& r : rows) {
    if (depth && r.depth > *depth) continue;
    const std::string last = r.path.substr(r.path.rfind('.') + 1);
    constexpr std::size_t kWidest = 36;
    const bool fits = r.kind.size() <= kWidest;
    const std::string kind = fits ? r.kind : fmt::format("{}...", r.kind.substr(0, kWidest - 3));
    cells.push_back({std::string(static_cast<std::size_t>(2 * std::max(r.depth - 1, 0)), ' ') + last, kind,
                     r.called ? r.output.str() : "", r.called ? std::string(name(r.dtype)) : "",
                     r.parameters == 0 ? "" : grouped(r.parameters), operations(r.multiply_adds),
                     megabytes(r.saved_float32), megabytes(r.saved_low)});
  }
  if (cells.size() > 1) cells[1][0] = "(network)";
  if (std::any_of(rows.begin(), rows.end(), [](const SummaryRow& r) { return !r.attached.empty(); })) {
    cells[0].emplace_back("attached");
    std::size_t i = 1;
    for (const SummaryRow& r : rows) {
      if (!depth || r.depth <= *depth) cells[i++].push_back(r.attached);
    }
  }
  std::string text = table(cells, 1, kNumbered) + '\n';
  if (rows.empty()) return text;
  const SummaryRow& all = rows[0];
  const double share =
      all.saved_float32 == 0 ? 0 : static_cast<double>(all.saved_low) / static_cast<double>(all.saved_float32);
  text += fmt::format("parameters: {} ({} trainable), {:.1f} MB in float32; buffers: {}\n", grouped(all.parameters),
                      grouped(trainable), static_cast<double>(all.parameters) * 4 / 1e6, grouped(buffers));
  text += fmt::format("multiply-adds of a forward pass: {}\n", grouped(all.multiply_adds));
  text += fmt::format(
      "kept for the backward pass: {:.2f} MB in float32, {:.2f} MB under autocast in {} ({:.2f}x){}\n\n",
      static_cast<double>(all.saved_float32) / 1e6, static_cast<double>(all.saved_low) / 1e6, name(low), share,
      weight_copies == 0 ? ""
                         : fmt::format(", and {:.2f} MB of {} copies of weights",
                                       static_cast<double>(weight_copies) / 1e6, name(low)));
  std::vector<Cells> places = {{"op", "kernel", "runs", "calls"}};
  for (const debug::Placement& p : ops) {
    const std::string device = p.device.is_cpu() ? "cpu" : p.device.str() + ", " + p.str();
    places.push_back({p.op, std::string(name(p.dtype)), device, std::to_string(p.calls())});
  }
  return text + table(places, 2);
}

}  // namespace halfstep::nn
