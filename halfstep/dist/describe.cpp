// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/core/text.h"
#include "halfstep/dist/describe_internal.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/view.h"

namespace halfstep::dist::describe {
namespace {

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// The first line that a rank has otherwise than rank 0.
struct Difference {
  int rank;
  std::string here, there;  // rank 0's and the other's; empty where it has none
};
std::optional<Difference> compare(const std::string& mine, ProcessGroup& group) {
  const std::vector<std::string> all = group.all_gather_text(mine);
  const std::vector<std::string> first = lines_of(all[0]);
  for (std::size_t r = 1; r < all.size(); ++r) {
    if (all[r] == all[0]) continue;
    const std::vector<std::string> other = lines_of(all[r]);
    std::size_t i = 0;
    while (i < first.size() && i < other.size() && first[i] == other[i]) ++i;
    return Difference{.rank = static_cast<int>(r),
                      .here = i < first.size() ? first[i] : "",
                      .there = i < other.size() ? other[i] : ""};
  }
  return std::nullopt;
}

// What is sent together, as in PyTorch's DistributedDataParallel.
constexpr std::int64_t kMostBytes = std::int64_t{250} << 20;

struct Message {
  std::vector<const NamedTensor*> tensors;  // of one dtype and device
  std::int64_t elements = 0;
};

std::vector<Message> messages_of(const NamedTensors& tensors) {
  std::vector<Message> messages;
  const auto kind = [](const NamedTensor& t) { return std::pair(t.tensor.dtype(), t.tensor.device()); };
  for (const NamedTensor& t : tensors) {
    const auto item = static_cast<std::int64_t>(t.tensor.item_size());
    // The last one of its kind has room, or none has.
    const auto open = std::find_if(messages.rbegin(), messages.rend(),
                                   [&](const Message& m) { return kind(*m.tensors[0]) == kind(t); });
    Message& message = open != messages.rend() && (open->elements + t.tensor.numel()) * item <= kMostBytes
                           ? *open
                           : messages.emplace_back();
    message.tensors.push_back(&t);
    message.elements += t.tensor.numel();
  }
  return messages;
}

void broadcast(const NamedTensor& named, ProcessGroup& group, int root) {
  Tensor tensor = named.tensor.detach();
  const bool dense = tensor.is_contiguous();
  // Ranks may have other layouts: values travel in row-major order.
  const Tensor sent = dense ? tensor : tensor.contiguous();
  group.broadcast(sent, root, named.name).wait();
  if (!dense) tensor.copy_(sent);
}

void broadcast(const Message& message, ProcessGroup& group, int root) {
  const Tensor& first = message.tensors[0]->tensor;
  const Tensor flat = empty({message.elements}, {.dtype = first.dtype(), .device = first.device()});
  std::vector<std::pair<Tensor, Tensor>> places;  // of each tensor
  std::int64_t at = 0;
  for (const NamedTensor* t : message.tensors) {
    const Tensor tensor = t->tensor.detach();
    places.emplace_back(tensor, flat.narrow(0, at, tensor.numel()).view(tensor.sizes()));
    at += tensor.numel();
  }
  if (group.rank() == root) {
    for (auto& [tensor, place] : places) place.copy_(tensor);
  }
  group.broadcast(flat, root, fmt::format("{} to {}", message.tensors[0]->name, message.tensors.back()->name)).wait();
  if (group.rank() == root) return;
  for (auto& [tensor, place] : places) tensor.copy_(place);
}

// FNV-1a with 64 bits, in words of 8 bytes.
std::uint64_t hash_of(const Tensor& t) {
  const NoGrad no_grad;
  const Tensor dense = t.to(Device{}).contiguous();
  const auto* bytes = static_cast<const unsigned char*>(dense.impl()->data());
  std::size_t left = static_cast<std::size_t>(dense.numel()) * dense.item_size();
  std::uint64_t hash = 0xcbf29ce484222325;
  while (left > 0) {
    std::uint64_t word = 0;
    const std::size_t n = std::min(left, sizeof word);
    std::memcpy(&word, bytes, n);
    hash = (hash ^ word) * 0x100000001b3;
    hash ^= hash >> 29;  // so that high bits reach low ones
    bytes += n;
    left -= n;
  }
  return hash;
}

}  // namespace

void check_same(const NamedTensors& tensors, ProcessGroup& group, const char* who) {
  if (group.size() == 1) return;
  std::string mine;
  for (const NamedTensor& t : tensors) {
    mine += fmt::format("{} {} {}\n", printable(t.name), name(t.tensor.dtype()), t.tensor.sizes().str());
  }
  const std::optional<Difference> found = compare(mine, group);
  if (!found) return;
  const auto shown = [](const std::string& line) { return line.empty() ? std::string("no further tensor") : line; };
  fail<DistError>("{}: expected the same network on all ranks, but rank 0 has {} where rank {} has {}", who,
                  shown(found->here), found->rank, shown(found->there));
}

void broadcast_values(const NamedTensors& tensors, ProcessGroup& group, int root) {
  if (group.size() == 1) return;
  const NoGrad no_grad;
  for (const Message& message : messages_of(tensors)) {
    if (message.tensors.size() == 1) {
      broadcast(*message.tensors[0], group, root);
    } else {
      broadcast(message, group, root);
    }
  }
  for (const NamedTensor& t : tensors) {
    t.tensor.storage()->bump_version();
    t.tensor.storage()->forget_derived();
  }
}

std::string first_difference(const NamedTensors& tensors, ProcessGroup& group) {
  std::string mine;
  for (const NamedTensor& t : tensors) mine += fmt::format("{} {:016x}\n", printable(t.name), hash_of(t.tensor));
  const std::optional<Difference> found = compare(mine, group);
  if (!found) return {};
  const std::string& line = found->here.empty() ? found->there : found->here;
  return line.substr(0, line.rfind(' '));
}

std::vector<std::size_t> numbers(std::string_view text) {
  std::istringstream in{std::string(text)};
  std::vector<std::size_t> result;
  for (std::size_t n = 0; in >> n;) result.push_back(n);
  return result;
}

}  // namespace halfstep::dist::describe
