// SPDX-License-Identifier: Apache-2.0
#include "halfstep/dist/agreement_internal.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"

namespace halfstep::dist::detail {
namespace {

constexpr std::size_t kActionBytes = 256;  // of the text that ranks exchange when they differ

std::uint64_t hash_of(std::string_view text) {  // FNV-1a
  std::uint64_t h = 14695981039346656037ULL;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  return h;
}

bool counts_may_differ(CallKind kind) {
  return kind == CallKind::all_gather_text || kind == CallKind::broadcast_text || kind == CallKind::split;
}

bool same_action(const Descriptor& a, const Descriptor& b) {
  return a.kind == b.kind && a.op == b.op && a.dtype == b.dtype && a.root == b.root && a.label == b.label &&
         a.layout == b.layout && a.sequence == b.sequence &&
         (a.count == b.count || counts_may_differ(static_cast<CallKind>(a.kind)));
}

// `ranks 0, 1 and 3`.
std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    text += fmt::format("{}{}", i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ", ranks[i]);
  }
  return text;
}

[[noreturn]] void fail_differing(CommunicationThread& thread, const Call& call, std::span<const Descriptor> all) {
  static std::vector<char>& texts = *new std::vector<char>;
  texts.assign(all.size() * kActionBytes, '\0');
  const std::string own = printable(call.action());
  std::memcpy(texts.data() + static_cast<std::size_t>(call.group->rank) * kActionBytes, own.data(),
              std::min(own.size(), kActionBytes - 1));
  gather_blocks(thread, call, texts.data(), kActionBytes);
  std::string differences, ended;
  std::vector<bool> told(all.size());
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (told[r]) continue;
    std::vector<int> same;
    for (std::size_t k = r; k < all.size(); ++k) {
      if (!same_action(all[r], all[k])) continue;
      told[k] = true;
      same.push_back(static_cast<int>(k));
    }
    if (all[r].kind == static_cast<std::uint8_t>(CallKind::exit)) ended = ranks_text(same);
    differences += fmt::format("{}{}: {}", r == 0 ? "" : "; ", ranks_text(same), texts.data() + r * kActionBytes);
  }
  const std::string text = fmt::format("{}: expected all ranks to do the same, got {}", call.title(), differences);
  if (!ended.empty()) thread.give_up(text);  // they take part in nothing any more
  throw DistError(text);
}

}  // namespace

void gather_blocks(CommunicationThread& thread, const Call& call, char* blocks, std::int64_t bytes) {
  const auto size = static_cast<std::size_t>(call.group->size);
  const std::vector<std::int64_t> counts(size, bytes);
  std::vector<std::int64_t> offsets(size);
  for (std::size_t r = 0; r < size; ++r) offsets[r] = static_cast<std::int64_t>(r) * bytes;
  const halfstep_mpi_parts parts{blocks, counts.data(), offsets.data()};
  halfstep_mpi_request* request = nullptr;
  const int code = thread.mpi().start_allgatherv(call.group->comm, &parts, &request);
  thread.finish(code, request, call);
}

const char* name(CallKind kind) {
  constexpr std::array kNames = {"all_reduce",
                                 "broadcast",
                                 "all_gather",
                                 "reduce_scatter",
                                 "gather",
                                 "scatter",
                                 "all_to_all",
                                 "all_gather_parts",
                                 "reduce_scatter_parts",
                                 "barrier",
                                 "all_gather_text",
                                 "broadcast_text",
                                 "split",
                                 "free",
                                 "end of the process",
                                 "send",
                                 "receive"};
  const auto index = static_cast<std::size_t>(kind);
  return index < kNames.size() ? kNames[index] : "unknown";
}

std::string Call::title() const {
  if (kind == CallKind::send || kind == CallKind::receive) {
    return fmt::format("{} {} rank {} (tag {})", detail::name(kind), kind == CallKind::send ? "to" : "from", peer, tag);
  }
  return fmt::format("{} #{}{}", detail::name(kind), sequence, label.empty() ? "" : " (" + label + ")");
}

std::string Call::action() const {
  std::string text = detail::name(kind);
  if (!operand.empty()) text += " " + operand;
  if (kind == CallKind::all_reduce || kind == CallKind::reduce_scatter || kind == CallKind::reduce_scatter_parts)
    text += std::string(" ") + dist::name(op);
  if (root >= 0) text += fmt::format(" {} {}", kind == CallKind::gather ? "to" : "from", root);
  if (!label.empty()) text += " (" + label + ")";
  return text;
}

std::span<const Descriptor> agree(CommunicationThread& thread, Call& call, const void* payload,
                                  std::int64_t payload_bytes) {
  static std::vector<Descriptor>& all = *new std::vector<Descriptor>;  // of the thread; MPI may use it to the end
  all.assign(static_cast<std::size_t>(call.group->size), Descriptor{});
  Descriptor& own = all[static_cast<std::size_t>(call.group->rank)];
  own.sequence = call.sequence;
  own.label = hash_of(call.label);
  own.count = call.count;
  own.layout = call.layout;
  own.root = call.root;
  own.kind = static_cast<std::uint8_t>(call.kind);
  own.op = static_cast<std::uint8_t>(call.op);
  own.dtype = static_cast<std::uint8_t>(call.dtype);
  own.offer = call.offer;
  if (payload_bytes > 0) std::memcpy(own.payload, payload, static_cast<std::size_t>(payload_bytes));
  const Descriptor mine = own;
  gather_blocks(thread, call, reinterpret_cast<char*>(all.data()), sizeof(Descriptor));
  for (const Descriptor& other : all) {
    if (!same_action(mine, other)) fail_differing(thread, call, all);
  }
  return all;
}

}  // namespace halfstep::dist::detail
