// SPDX-License-Identifier: Apache-2.0
#include "halfstep/io/weights.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string_view>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/input_file_internal.h"
#include "halfstep/core/text.h"
#include "halfstep/io/checkpoint_shards_internal.h"
#include "halfstep/io/pth.h"
#include "halfstep/io/safetensors.h"
#include "halfstep/runtime/log.h"

namespace halfstep::io {
namespace {

namespace fs = std::filesystem;

// A safetensors file begins with the length of its header in eight bytes, of which the upper four are 0, and `{`: no
// zip archive and no pickle does.
bool is_pth(const fs::path& path) {
  const InputFile file(path);
  char start[9] = {};
  file.read(0, start, static_cast<std::size_t>(std::min<std::uint64_t>(file.size(), sizeof(start))));
  const std::string_view text(start, sizeof(start));
  if (text[8] == '{' && text.substr(4, 4) == std::string_view("\0\0\0\0", 4)) return false;
  return text.starts_with("PK\x03\x04") || text.starts_with("\x80\x02\x8a\x0a");
}

void strip_data_parallel(NamedTensors& tensors, const std::string& file) {
  constexpr std::string_view kPrefix = "module.";
  const bool all =
      std::all_of(tensors.begin(), tensors.end(), [&](const NamedTensor& t) { return t.name.starts_with(kPrefix); });
  if (!all) return;
  for (NamedTensor& t : tensors) t.name.erase(0, kPrefix.size());
  log(LogLevel::info,
      fmt::format("{}: the names begin with 'module.', as those of torch.nn.DataParallel do; left out", file));
}

std::string_view layer_of(std::string_view name) {
  const std::size_t dot = name.rfind('.');
  return dot == std::string_view::npos ? std::string_view() : name.substr(0, dot);
}

// Names that image networks give their last layer.
bool is_head(std::string_view name) {
  const std::string_view first = name.substr(0, name.find('.'));
  return first == "fc" || first == "classifier" || first == "head" || first == "heads";
}

// Insertions, deletions and replacements that lead from one name to the other.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

// What a counter of batches can't have come to.
std::optional<std::int64_t> wrong_count(std::string_view name, const Tensor& given) {
  constexpr std::int64_t kMost = std::int64_t{1} << 62;
  if (!name.ends_with("num_batches_tracked") || given.is_floating() || given.numel() != 1) return std::nullopt;
  const auto count = given.to_vector<std::int64_t>()[0];
  return count < 0 || count > kMost ? std::optional(count) : std::nullopt;
}

// The differences, in words.
class Differences {
 public:
  Differences(const NamedTensors& own, const std::map<std::string, Tensor>& given) : own_(own), given_(given) {}

  void missing(const NamedTensor& own) { missing_.push_back(&own); }
  void unexpected(const std::string& name) { unexpected_.push_back(name); }
  void shape(const NamedTensor& own, const Tensor& given) {
    shapes_.push_back(fmt::format("{} is {} in the network and {} in the file", own.name, own.tensor.sizes().str(),
                                  given.sizes().str()));
  }
  void dtype(const NamedTensor& own, const Tensor& given) {
    shapes_.push_back(fmt::format("{} is {} in the network and {} in the file", own.name, name(own.tensor.dtype()),
                                  name(given.dtype())));
  }
  void value(const NamedTensor& own, std::int64_t value) {
    shapes_.push_back(fmt::format("{} counts to {} in the file", own.name, value));
  }

  void check() const {
    if (missing_.empty() && unexpected_.empty() && shapes_.empty()) return;
    std::vector<std::string> parts;
    if (!missing_.empty()) {
      std::vector<std::string> names;
      for (const NamedTensor* t : missing_) names.push_back(t->name + (names.size() < kShown ? meant(*t) : ""));
      parts.push_back("the file lacks " + listed(names));
    }
    if (!unexpected_.empty()) parts.push_back("the network lacks " + listed(unexpected_));
    if (!shapes_.empty()) parts.push_back(listed(shapes_));
    fail<Error>("load_pretrained: the weights are of another network: {}{}", fmt::join(parts, "; "), prefix_hint());
  }

 private:
  static constexpr std::size_t kShown = 6;
  static constexpr int kDots = 16;  // a file may have names of nothing but dots

  static std::string listed(const std::vector<std::string>& names) {
    const auto shown = static_cast<std::ptrdiff_t>(std::min(names.size(), kShown));
    std::string text;
    for (std::ptrdiff_t i = 0; i < shown; ++i) {
      text += (i == 0 ? "" : ", ") + printable_start(names[static_cast<std::size_t>(i)], 300);
    }
    if (names.size() > kShown) text += fmt::format(" and {} more", names.size() - kShown);
    return text;
  }

  // The name in the file that is nearest, of those that nothing else wants and that have the same sizes.
  std::string meant(const NamedTensor& own) const {
    std::size_t least = own.name.size() / 3 + 1;
    std::string best;
    for (const std::string& name : unexpected_) {
      if (given_.at(name).sizes() != own.tensor.sizes() || name.size() > 200 || own.name.size() > 200) continue;
      if (const std::size_t d = distance(own.name, name); d < least) {
        least = d;
        best = name;
      }
    }
    return best.empty() ? "" : fmt::format(" (it has {}, of the same shape)", best);
  }

  // One prefix that all names of one side have and those of the other don't.
  std::string prefix_hint() const {
    std::set<std::string_view> own, given;
    for (const NamedTensor& t : own_) own.insert(t.name);
    for (const auto& [name, tensor] : given_) given.insert(name);
    for (const bool in_file : {true, false}) {
      const std::set<std::string_view>&longer = in_file ? given : own, &shorter = in_file ? own : given;
      if (longer.empty()) continue;
      const std::string_view name = *longer.begin();
      int dots = 0;
      for (std::size_t dot = name.find('.'); dot != std::string_view::npos && ++dots <= kDots;
           dot = name.find('.', dot + 1)) {
        const std::string_view prefix = name.substr(0, dot + 1);
        const auto fits = [&](std::string_view n) {
          return n.starts_with(prefix) && shorter.contains(n.substr(prefix.size()));
        };
        if (static_cast<std::size_t>(std::count_if(longer.begin(), longer.end(), fits)) * 2 > longer.size()) {
          return fmt::format("; names in the {} begin with '{}', those in the {} don't", in_file ? "file" : "network",
                             printable_start(prefix), in_file ? "network" : "file");
        }
      }
    }
    return "";
  }

  const NamedTensors& own_;
  const std::map<std::string, Tensor>& given_;
  std::vector<const NamedTensor*> missing_;
  std::vector<std::string> unexpected_;
  std::vector<std::string> shapes_;
};

}  // namespace

WeightsFile load_weights_file(const fs::path& path, const ReadLimits& limits) {
  return load_weights_file(path, limits, Portion::all);
}

WeightsFile load_weights_file(const fs::path& path, const ReadLimits& limits, Portion which) {
  WeightsFile file;
  if (is_pth(path)) {
    PthFile content = load_pth(path, limits);
    file = {std::move(content.tensors), std::move(content.metadata), WeightsFormat::pth, std::move(content.others)};
  } else {
    Safetensors content = load_checkpoint_file(path, limits, which);
    file = {std::move(content.tensors), std::move(content.metadata), WeightsFormat::safetensors, {}};
  }
  if (file.tensors.empty()) fail<IoError>("{}: there are no tensors in it", shown_path(path));
  strip_data_parallel(file.tensors, shown_path(path));
  return file;
}

PretrainedReport load_pretrained(const nn::ModuleBase& module, const NamedTensors& tensors,
                                 const PretrainedOptions& options) {
  std::map<std::string, Tensor> given;
  for (const NamedTensor& t : tensors) {
    if (!t.tensor.defined()) fail<Error>("load_pretrained: '{}' is an undefined tensor", t.name);
    if (!given.emplace(t.name, t.tensor).second) fail<Error>("load_pretrained: '{}' is there twice", t.name);
  }
  const NamedTensors own = module.state_dict();
  const std::string last(own.empty() ? std::string_view() : layer_of(own.back().name));
  const auto may_differ = [&](std::string_view name) {
    if (!options.replace_head) return false;
    const auto& heads = options.heads;
    return is_head(name) || (!last.empty() && layer_of(name) == last) ||
           std::any_of(heads.begin(), heads.end(), [&](const std::string& h) { return name.starts_with(h); });
  };
  // A layer stays as it was made with all its tensors or with none.
  std::set<std::string, std::less<>> replaced_layers;
  std::map<std::string_view, bool> layer_there;
  for (const NamedTensor& t : own) layer_there[layer_of(t.name)] |= given.contains(t.name);
  for (const NamedTensor& t : own) {
    const auto it = given.find(t.name);
    const bool differs = it == given.end() ? !layer_there[layer_of(t.name)] : it->second.sizes() != t.tensor.sizes();
    if (differs && may_differ(t.name)) replaced_layers.emplace(layer_of(t.name));
  }
  PretrainedReport report;
  Differences differences(own, given);
  std::vector<std::pair<Tensor, Tensor>> copies;
  std::set<std::string_view> known;
  std::vector<std::string> changes;
  for (const NamedTensor& t : own) {
    known.insert(t.name);
    const auto it = given.find(t.name);
    if (replaced_layers.contains(layer_of(t.name))) {
      report.replaced.push_back(t.name);
      changes.push_back(fmt::format("{} ({} here, {} in the file)", t.name, t.tensor.sizes().str(),
                                    it == given.end() ? "nothing" : it->second.sizes().str()));
    } else if (it == given.end()) {
      if (t.name.ends_with("num_batches_tracked")) {
        report.missing.push_back(t.name);
      } else {
        differences.missing(t);
      }
    } else if (it->second.sizes() != t.tensor.sizes()) {
      differences.shape(t, it->second);
    } else if (!t.tensor.is_floating() && it->second.is_floating()) {
      // A counter as a floating value may be NaN, or rounded.
      differences.dtype(t, it->second);
    } else if (const auto count = wrong_count(t.name, it->second)) {
      differences.value(t, *count);
    } else {
      report.loaded.push_back(t.name);
      copies.emplace_back(t.tensor, it->second);
    }
  }
  for (const auto& [name, tensor] : given) {
    if (known.contains(name)) continue;
    if (options.replace_head && is_head(name)) {
      report.unexpected.push_back(name);
    } else {
      differences.unexpected(name);
    }
  }
  differences.check();
  {
    const NoGrad no_grad;
    for (auto& [to, from] : copies) to.copy_(from);
  }
  if (!changes.empty()) {
    log(LogLevel::warning,
        fmt::format("the last layer was not loaded and starts as it was made: {}", fmt::join(changes, ", ")));
  }
  return report;
}

}  // namespace halfstep::io
