// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "halfstep/core/fail.h"
#include "halfstep/io/pth_internal.h"
#include "halfstep/ops/view.h"

namespace halfstep::io {
namespace {

using nlohmann::json;

// One storage of the file: a tensor, or the stretch of memory that several tensors share.
struct Block {
  Tensor data;  // dense, on the CPU
  DType dtype;
  std::int64_t elements;
};

// Where a tensor is in its block, in elements.
struct Placed {
  std::size_t block = 0;
  std::int64_t offset = 0;
  Shape strides;
};

// Elements of its storage that a tensor reaches: from the first to the one behind the last.
std::pair<std::int64_t, std::int64_t> reach(const Tensor& t) {
  std::int64_t last = t.storage_offset();
  for (int i = 0; i < t.dim(); ++i) last += (t.sizes()[i] - 1) * t.strides()[i];
  return {t.storage_offset(), last + 1};
}

struct Plan {
  std::vector<Block> blocks;
  std::vector<Placed> places;
};

void place_alone(Plan& plan, std::size_t i, const Tensor& tensor) {
  Tensor dense = is_dense(tensor.sizes(), tensor.strides()) ? tensor : tensor.contiguous();
  dense = dense.to(Device{});
  plan.places[i] = {plan.blocks.size(), 0, dense.strides()};
  plan.blocks.push_back({dense, dense.dtype(), dense.numel()});
}

// Tensors whose stretches of one storage overlap go into one block, all others into blocks of their own: a file of
// slices doesn't hold what they were cut from.
Plan make_plan(const std::vector<Tensor>& tensors) {
  Plan plan;
  plan.places.resize(tensors.size());
  std::map<std::pair<std::uint64_t, DType>, std::vector<std::size_t>> by_storage;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].numel() > 0) by_storage[{tensors[i].storage()->id(), tensors[i].dtype()}].push_back(i);
  }
  std::vector<std::vector<std::size_t>> groups;
  for (auto& [storage, members] : by_storage) {
    std::sort(members.begin(), members.end(),
              [&](std::size_t a, std::size_t b) { return reach(tensors[a]) < reach(tensors[b]); });
    std::int64_t end = 0;
    for (std::size_t k = 0; k < members.size(); ++k) {
      const auto [from, to] = reach(tensors[members[k]]);
      if (k == 0 || from >= end) groups.emplace_back();
      groups.back().push_back(members[k]);
      end = k == 0 ? to : std::max(end, to);
    }
  }
  std::vector<const std::vector<std::size_t>*> group_of(tensors.size());
  for (const auto& group : groups) {
    if (group.size() < 2) continue;
    for (const std::size_t i : group) group_of[i] = &group;
  }
  // In the order of the tensors, so that the same ones give the same file.
  std::map<const std::vector<std::size_t>*, std::pair<std::size_t, std::int64_t>> written;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto* group = group_of[i];
    if (group == nullptr) {
      place_alone(plan, i, tensors[i]);
      continue;
    }
    auto it = written.find(group);
    if (it == written.end()) {
      std::int64_t from = reach(tensors[group->front()]).first, to = from;
      for (const std::size_t k : *group) to = std::max(to, reach(tensors[k]).second);
      const Tensor all = as_strided(tensors[i], {to - from}, {1}, from).to(Device{});
      it = written.emplace(group, std::pair{plan.blocks.size(), from}).first;
      plan.blocks.push_back({all, all.dtype(), to - from});
    }
    plan.places[i] = {it->second.first, tensors[i].storage_offset() - it->second.second, tensors[i].strides()};
  }
  return plan;
}

void write_tuple(PickleWriter& p, const Shape& values) {
  p.mark();
  for (const std::int64_t v : values) p.integer(v);
  p.tuple();
}

void write_tensor(PickleWriter& p, const Tensor& tensor, const Placed& place, const Block& block) {
  const char* storage = pth_storage_class(tensor.dtype());
  p.global("torch._utils", storage ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
  p.mark();
  p.mark();
  p.repeated_text("storage");
  if (storage) {
    p.global("torch", storage);
  } else {
    p.global("torch.storage", "UntypedStorage");
  }
  p.text(fmt::format("{}", place.block));
  p.repeated_text("cpu");
  p.integer(storage ? block.elements : block.elements * static_cast<std::int64_t>(item_size(block.dtype)));
  p.tuple();
  p.persistent();
  p.integer(place.offset);
  write_tuple(p, tensor.sizes());
  write_tuple(p, place.strides);
  p.boolean(false);  // requires_grad
  p.global("collections", "OrderedDict");
  p.empty_tuple();
  p.call();
  if (!storage) p.global("torch", pth_dtype_name(tensor.dtype()));
  p.tuple();
  p.call();
}

void write_json(PickleWriter& p, const json& value) {
  switch (value.type()) {
    case json::value_t::object:
      p.empty_dict();
      p.mark();
      for (const auto& [key, item] : value.items()) {
        p.text(key);
        write_json(p, item);
      }
      return p.set_items();
    case json::value_t::array:
      p.empty_list();
      p.mark();
      for (const json& item : value) write_json(p, item);
      return p.append_items();
    case json::value_t::string:
      return p.text(value.get_ref<const std::string&>());
    case json::value_t::boolean:
      return p.boolean(value.get<bool>());
    case json::value_t::number_unsigned:
      if (value.get<std::uint64_t>() > INT64_MAX) return p.real(value.get<double>());
      return p.integer(value.get<std::int64_t>());
    case json::value_t::number_integer:
      return p.integer(value.get<std::int64_t>());
    case json::value_t::number_float:
      return p.real(value.get<double>());
    default:
      return p.none();
  }
}

std::string write_pickle(const NamedTensors& named, const std::vector<Tensor>& tensors, const Plan& plan,
                         const std::map<std::string, std::string>& metadata) {
  PickleWriter p;
  if (!metadata.empty()) {
    p.empty_dict();
    p.mark();
    p.text("state_dict");
  }
  p.global("collections", "OrderedDict");
  p.empty_tuple();
  p.call();
  p.mark();
  for (std::size_t i = 0; i < named.size(); ++i) {
    p.text(named[i].name);
    write_tensor(p, tensors[i], plan.places[i], plan.blocks[plan.places[i].block]);
  }
  p.set_items();
  for (const auto& [key, text] : metadata) {
    if (key == "state_dict") fail<Error>("save_pth: state_dict is no name for metadata");
    const json value = json::parse(text, nullptr, false);
    if (value.is_discarded()) fail<Error>("save_pth: expected JSON for '{}', got {}", key, text.substr(0, 80));
    p.text(key);
    write_json(p, value);
  }
  if (!metadata.empty()) p.set_items();
  return p.finish();
}

}  // namespace

void save_pth(const std::filesystem::path& path, const NamedTensors& named, const PthOptions& options) {
  std::set<std::string_view> names;
  std::vector<Tensor> tensors;
  for (const NamedTensor& t : named) {
    if (!t.tensor.defined()) fail<Error>("save_pth: '{}' is an undefined tensor", t.name);
    if (!names.insert(t.name).second) fail<Error>("save_pth: there are two tensors called '{}'", t.name);
    tensors.push_back(t.tensor.detach());
  }
  const Plan plan = make_plan(tensors);
  const std::string pickle = write_pickle(named, tensors, plan, options.metadata);
  AtomicFile file(path);
  ZipWriter zip(file);
  const auto add = [&](const std::string& name, const std::string& text) { zip.add(name, text.data(), text.size()); };
  add("archive/data.pkl", pickle);
  add("archive/byteorder", "little");
  for (std::size_t i = 0; i < plan.blocks.size(); ++i) {
    const Block& b = plan.blocks[i];
    zip.add(fmt::format("archive/data/{}", i), b.data.const_raw_data(),
            static_cast<std::uint64_t>(b.elements) * item_size(b.dtype));
  }
  add("archive/version", "3\n");
  zip.finish();
  file.commit();
}

}  // namespace halfstep::io
