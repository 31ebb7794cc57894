// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/options.h"
#include "cli/verbs.h"
#include "cli/weights_files.h"
#include "halfstep/core/tensor.h"
#include "halfstep/core/text.h"
#include "halfstep/io/pth.h"
#include "halfstep/io/safetensors.h"
#include "halfstep/train/checkpoint.h"

namespace halfstep::cli {
namespace {

namespace fs = std::filesystem;

struct ConvertOptions {
  fs::path from, to;
  std::string dtype;
  bool force = false;
};

bool to_pth(const fs::path& path) {
  const std::string extension = path.extension().string();
  if (extension == ".pth" || extension == ".pt") return true;
  if (extension == ".safetensors") return false;
  throw UsageError(
      fmt::format("convert: expected a target that ends in .safetensors, .pth or .pt, got '{}'", shown_path(path)));
}

std::optional<DType> dtype_of_file(const std::string& name) {
  if (name.empty()) return std::nullopt;
  for (const DType dtype : {f16, bf16, f32}) {
    if (name == halfstep::name(dtype)) return dtype;
  }
  throw UsageError(fmt::format("--dtype: expected f16, bf16 or f32, got '{}'", name));
}

void check_target(const ConvertOptions& o) {
  std::error_code error;
  if (fs::equivalent(o.from, o.to, error)) {
    throw UsageError(fmt::format("convert: {} is the source; give the target another name", shown_path(o.to)));
  }
  const auto there = fs::symlink_status(o.to, error);
  if (fs::is_directory(there)) throw UsageError(fmt::format("convert: {} is a folder", shown_path(o.to)));
  if (fs::exists(there) && !o.force) {
    throw UsageError(fmt::format("convert: {} is there already; --force replaces it", shown_path(o.to)));
  }
}

// Finite values that rounding to float16 makes infinite.
std::int64_t overflowing(const Tensor& tensor) {
  const Tensor dense = tensor.contiguous();
  std::int64_t n = 0;
  visit_floating(dense.dtype(), [&](auto tag) {
    const auto* values = dense.data<const storage_t<decltype(tag)::value>>();
    for (std::int64_t i = 0; i < dense.numel(); ++i) {
      const double v = std::abs(convert<double>(values[i]));
      n += v >= 65520 && std::isfinite(v);
    }
  });
  return n;
}

// Weights in another dtype. Integers stay, and so do running statistics, which 16 bits are too few for.
void convert_dtype(NamedTensors& tensors, DType dtype) {
  const auto tied = tied_names(tensors);
  std::map<std::string, Tensor> done;
  for (NamedTensor& t : tensors) {
    if (!t.tensor.is_floating() || is_float8(t.tensor.dtype())) continue;
    if (dtype != f32 && (t.name.ends_with("running_mean") || t.name.ends_with("running_var"))) continue;
    if (const auto other = tied.find(t.name); other != tied.end()) {
      if (const auto it = done.find(other->second); it != done.end()) t.tensor = it->second;
      continue;
    }
    if (const std::int64_t n = dtype == f16 ? overflowing(t.tensor) : 0; n > 0) {
      throw IoError(
          fmt::format("{}: {} values of {} are beyond float16's 65504 and would be infinite; use --dtype bf16", t.name,
                      n, t.tensor.numel()));
    }
    t.tensor = t.tensor.to(dtype);
    done[t.name] = t.tensor;
  }
}

// JSON texts as what they say.
std::string plain(const std::string& value) {
  const auto parsed = nlohmann::json::parse(value, nullptr, false);
  return parsed.is_string() ? parsed.get<std::string>() : value;
}

std::string listed(const std::set<std::string>& names) { return printable(fmt::format("{}", fmt::join(names, ", "))); }

int run(const ConvertOptions& o) {
  const bool pth = to_pth(o.to);
  const auto dtype = dtype_of_file(o.dtype);
  check_target(o);
  io::WeightsFile file = io::load_weights_file(o.from);
  std::set<std::string> left_out, kept;
  if (is_checkpoint(file)) {
    file.tensors = training::load_weights(o.from);
    file.metadata.clear();
    left_out.insert("the state of the training");
  }
  for (const NamedTensor& t : file.others) left_out.insert(t.name.substr(0, t.name.find('.')));
  std::map<std::string, std::string> metadata;
  for (const auto& [key, value] : file.metadata) {
    if (left_out.contains(key) || key == "format") continue;
    if (pth) {
      left_out.insert(key);
    } else {
      metadata[key] = file.format == io::WeightsFormat::pth ? plain(value) : value;
      kept.insert(key);
    }
  }
  if (dtype) convert_dtype(file.tensors, *dtype);
  const auto tied = tied_names(file.tensors);
  if (pth) {
    io::save_pth(o.to, file.tensors);
  } else {
    metadata["format"] = "pt";  // what the other readers of such files want to see
    io::save_safetensors(o.to, file.tensors, metadata);
  }
  fmt::print("{}: {} tensors, {}\n", shown_path(o.to), file.tensors.size(), bytes_text(total_bytes(file.tensors)));
  if (!kept.empty()) fmt::print("kept as metadata: {}\n", listed(kept));
  if (!left_out.empty()) fmt::print("left out: {}\n", listed(left_out));
  if (!pth && !tied.empty()) {
    fmt::print("written twice, since safetensors files share no memory: ");
    bool first = true;
    for (const auto& [name, other] : tied) {
      fmt::print("{}{} (as {})", first ? "" : ", ", printable(name), printable(other));
      first = false;
    }
    fmt::print("\n");
  }
  return kDone;
}

}  // namespace

void add_convert(CLI::App& program, int& status) {
  const Verb verb = add_verb(program, "convert", "Convert weights between safetensors and PyTorch's .pth files");
  auto o = std::make_shared<ConvertOptions>();
  add_path(verb, "FROM", o->from, "A .safetensors or .pth file, recognised by its content").required();
  add_path(verb, "TO", o->to, "File to write; its extension chooses the format: .safetensors, .pth or .pt").required();
  add_word(verb, "--dtype", o->dtype, "Convert weights: f16, bf16 or f32");
  add_read_limits(verb);
  verb.add_switch("--force", o->force, "Replace an existing file");
  verb.run([o, &status] {
    refuse_many_processes("convert");
    status = run(*o);
  });
}

}  // namespace halfstep::cli
