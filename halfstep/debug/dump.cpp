// SPDX-License-Identifier: Apache-2.0
#include "halfstep/debug/dump.h"

#include <algorithm>
#include <cctype>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/debug/attributes_internal.h"
#include "halfstep/debug/files_internal.h"
#include "halfstep/debug/replay_internal.h"

namespace halfstep::debug {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using detail::number;

std::atomic<TensorWriter> tensor_writer{nullptr};

std::vector<double> first_values(const Tensor& tensor, std::int64_t n) {
  std::vector<double> values;
  if (n <= 0) return values;
  // Only what is wanted travels from the device.
  Tensor part = tensor;
  if (tensor.numel() > n && tensor.is_contiguous()) {
    const detail::Unrecorded unrecorded;
    part = tensor.view({tensor.numel()}).narrow(0, 0, n);
  }
  detail::for_each_value(part, [&](double v) {
    if (static_cast<std::int64_t>(values.size()) < n) values.push_back(v);
  });
  return values;
}

Json describe(const Statistics& s) {
  return {{"min", number(s.min)}, {"max", number(s.max)}, {"mean", number(s.mean)}, {"abs_sum", number(s.abs_sum)},
          {"nan", s.nan},         {"inf", s.inf},         {"zero", s.zero},         {"subnormal", s.subnormal}};
}

// An op's name as part of a file's: those of programs may hold anything.
std::string file_name(std::string_view op) {
  std::string text(op);
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return !std::isalnum(c) && c != '_' && c != '-' && c != '.'; },
      '_');
  return text;
}

}  // namespace

void set_tensor_writer(TensorWriter writer) { tensor_writer.store(writer); }

struct Dump::Impl final : detail::CallObserver {
  explicit Impl(const DumpOptions& o)
      : CallObserver(o.all_threads, true), options(o), folder(detail::make_new_folder(o.folder)) {}

  void seen(const ObservedCall& call, std::uint64_t, std::span<const Tensor> inputs) override {
    if (call.path == ExecutionPath::view && !options.views) return;
    if (!options.ops.empty() && std::find(options.ops.begin(), options.ops.end(), call.name) == options.ops.end())
      return;
    const CallSite site = call_site(call, written + 1);
    if (!options.module.empty() && !in_module(site.module, options.module)) return;
    if (written >= options.most_calls) return;
    ++written;
    write(call, site, inputs);
  }

  // One tensor, in both files.
  void add(const char* what, std::size_t i, const Tensor& tensor, Json& list, std::string& text) const {
    if (!tensor.defined()) {
      list.push_back(nullptr);
      text += fmt::format("{} {}: none\n", what, i);
      return;
    }
    const Statistics s = statistics(tensor);
    Json entry = {{"dtype", name(s.dtype)},
                  {"shape", std::vector<std::int64_t>(s.sizes.begin(), s.sizes.end())},
                  {"device", s.device.str()},
                  {"statistics", describe(s)}};
    text += fmt::format("{} {}: {}\n", what, i, s.str());
    if (options.level >= DumpLevel::first) {
      Json values = Json::array();
      std::string line;
      for (const double v : first_values(tensor, options.first)) {
        values.push_back(number(v));
        line += fmt::format(" {}", v);
      }
      if (!line.empty()) text += " " + line + (s.numel > options.first ? " ...\n" : "\n");
      entry["first"] = std::move(values);
    }
    list.push_back(std::move(entry));
  }

  void write(const ObservedCall& call, const CallSite& site, std::span<const Tensor> inputs) const {
    Json json = {{"number", site.number},
                 {"op", site.op},
                 {"version", call.op ? Json(call.op->version) : Json(nullptr)},
                 {"module", site.module},
                 {"backward_of", site.backward_of.empty() ? Json(nullptr) : Json(site.backward_of)},
                 {"device", site.device.str()},
                 {"path", name(site.path)},
                 {"in_place", call.in_place},
                 {"attributes", detail::attributes_of(call)},
                 {"inputs", Json::array()},
                 {"outputs", Json::array()}};
    std::string text = fmt::format("call {}: {}, {}, {}{}\n", site.number, site.str(), site.device.str(),
                                   name(site.path), call.in_place ? ", in place" : "");
    if (!json["attributes"].is_null())
      text += "attributes: " + json["attributes"].dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
    NamedTensors whole;
    const auto keep = [&](const char* what, std::size_t i, const Tensor& t) {
      if (options.level == DumpLevel::whole && t.defined()) {
        whole.push_back({fmt::format("{}{}", what, i), detail::on_host(t)});
      }
    };
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      add("input", i, inputs[i], json["inputs"], text);
      keep("input", i, inputs[i]);
    }
    for (std::size_t i = 0; i < call.outputs.size(); ++i) {
      add("output", i, *call.outputs[i], json["outputs"], text);
      keep("output", i, *call.outputs[i]);
    }
    const fs::path place = folder / fmt::format("{:06}_{}", site.number, file_name(site.op));
    fs::path part = place;
    part += ".part";
    std::error_code error;
    fs::create_directory(part, error);
    if (error) fail<IoError>("{}: can't be made: {}", shown_path(part), error.message());
    try {
      detail::write_text(part / "call.json", json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
      detail::write_text(part / "call.txt", text);
      if (options.level == DumpLevel::whole) {
        const TensorWriter writer = tensor_writer.load();
        if (!writer) fail<InternalError>("Dump: nobody writes whole tensors");
        writer(part / "tensors.safetensors", whole, {{"op", site.op}, {"module", site.module}});
      }
      fs::rename(part, place, error);
      if (error) fail<IoError>("{}: can't be renamed: {}", shown_path(part), error.message());
    } catch (...) {
      fs::remove_all(part, error);
      throw;
    }
  }

  std::uint64_t calls() {
    const std::lock_guard lock(mutex_);
    return written;
  }

  DumpOptions options;
  fs::path folder;
  std::uint64_t written = 0;
  Observing observing{this};
};

Dump::Dump(const DumpOptions& options) : impl_(std::make_unique<Impl>(options)) {}
Dump::~Dump() = default;
const fs::path& Dump::folder() const { return impl_->folder; }
std::uint64_t Dump::calls() const { return impl_->calls(); }

}  // namespace halfstep::debug
