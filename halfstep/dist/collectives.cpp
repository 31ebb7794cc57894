// SPDX-License-Identifier: Apache-2.0
// The collectives as the communication thread runs them. All begin with an exchange of what each rank is about to do.
//
// A reduction of n elements: rank r gets part r of everybody's elements, adds them up in the order of ranks and, in an
// all-reduce, gives the result to all. That moves as many bytes as a ring, which however adds in an order that depends
// on the part, and rounds 16-bit values at every hop. Small tensors, for which the number of messages counts, go whole
// to everybody, and each rank adds up all of them: the same order, and so the same bits.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "halfstep/core/fail.h"
#include "halfstep/dist/agreement_internal.h"
#include "halfstep/dist/communication_thread_internal.h"
#include "halfstep/dist/device_group_internal.h"
#include "halfstep/dist/device_messages_internal.h"
#include "halfstep/dist/reduce.h"
#include "halfstep/dist/retired_groups_internal.h"

namespace halfstep::dist::detail {
namespace {

constexpr std::int64_t kSmallBytes = 16 << 10;  // up to which an all-reduce goes whole to everybody
// Reductions of more go segment by segment: what has come from other ranks stays in the caches, and the memory for it
// doesn't grow with the tensor.
constexpr std::int64_t kSegmentBytes = 8 << 20;

/// Sizes and places of parts in bytes, one a rank.
struct RankParts {
  explicit RankParts(int size) : bytes(static_cast<std::size_t>(size)), offsets(static_cast<std::size_t>(size)) {}
  std::vector<std::int64_t> bytes, offsets;
  std::int64_t total() const { return std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0}); }
  halfstep_mpi_parts of(const void* data) const { return {const_cast<void*>(data), bytes.data(), offsets.data()}; }
};

class CollectiveRun {
 public:
  CollectiveRun(CommunicationThread& thread, Call& call)
      : thread_(thread), mpi_(thread.mpi()), call_(call), group_(*call.group), size_(group_.size), rank_(group_.rank) {}

  void all_reduce() {
    const std::int64_t bytes = call_.bytes();
    auto* data = static_cast<char*>(call_.output);
    if (bytes <= Descriptor::kPayloadBytes) {
      const auto all = agree(thread_, call_, data, bytes);
      if (bytes == 0) return;
      std::vector<const void*> inputs;
      for (const Descriptor& d : all) inputs.push_back(d.payload);
      reduce_in_order(call_.op, call_.dtype, inputs, data, call_.count);
      sent(bytes * (size_ - 1));
      return;
    }
    if (!agree()) return;
    data = static_cast<char*>(call_.output);  // staged by now
    if (by_library()) return all_reduce_by_library();
    if (bytes <= kSmallBytes) {
      char* all = thread_.scratch(static_cast<std::size_t>(bytes * size_));
      std::memcpy(all + rank_ * bytes, data, static_cast<std::size_t>(bytes));
      gather_equal(all, bytes);
      reduce_parts(all, bytes, nullptr, data, call_.count);
      return;
    }
    const std::int64_t segment = kSegmentBytes / item();
    for (std::int64_t at = 0; at < call_.count; at += segment) {
      all_reduce_segment(data + at * item(), std::min(segment, call_.count - at));
    }
  }

  void reduce_scatter() {
    if (!agree()) return;
    const auto* input = static_cast<const char*>(call_.input);
    auto* output = static_cast<char*>(call_.output);
    const std::int64_t segment = std::max<std::int64_t>(kSegmentBytes / size_ / item(), 1);
    for (std::int64_t at = 0; at < call_.count; at += segment) {
      const std::int64_t n = std::min(segment, call_.count - at), bytes = n * item();
      RankParts send(size_), receive(size_);
      for (int r = 0; r < size_; ++r) {
        send.bytes[r] = receive.bytes[r] = r == rank_ ? 0 : bytes;
        send.offsets[r] = r * call_.bytes() + at * item();
        receive.offsets[r] = r * bytes;
      }
      char* scratch = thread_.scratch(static_cast<std::size_t>(bytes * size_));
      exchange(input, send, scratch, receive);
      reduce_parts(scratch, bytes, input + send.offsets[rank_], output + at * item(), n);
    }
  }

  // As reduce_scatter(), of parts that lie in one tensor and have unlike lengths.
  void reduce_scatter_parts() {
    if (!agree()) return;
    auto* data = static_cast<char*>(call_.output);
    const std::vector<std::int64_t> starts = starts_of_parts();
    const std::int64_t segment = std::max<std::int64_t>(kSegmentBytes / size_ / item(), 1),
                       longest = *std::max_element(call_.counts.begin(), call_.counts.end());
    for (std::int64_t at = 0; at < longest; at += segment) {
      const auto left = [&](int r) {
        return std::clamp<std::int64_t>(call_.counts[static_cast<std::size_t>(r)] - at, 0, segment);
      };
      const std::int64_t own = left(rank_), bytes = own * item();
      RankParts send(size_), receive(size_);
      for (int r = 0; r < size_; ++r) {
        const auto k = static_cast<std::size_t>(r);
        send.bytes[k] = r == rank_ ? 0 : left(r) * item();
        send.offsets[k] = (starts[k] + (left(r) > 0 ? at : 0)) * item();
        receive.bytes[k] = r == rank_ ? 0 : bytes;
        receive.offsets[k] = r * bytes;
      }
      char* scratch = thread_.scratch(static_cast<std::size_t>(std::max<std::int64_t>(bytes * size_, 1)));
      exchange(data, send, scratch, receive);
      char* mine = data + send.offsets[static_cast<std::size_t>(rank_)];
      if (own > 0) reduce_parts(scratch, bytes, mine, mine, own);
    }
  }

  void all_gather_parts() {
    if (!agree()) return;
    const std::vector<std::int64_t> starts = starts_of_parts();
    RankParts parts(size_);
    for (std::size_t r = 0; r < starts.size(); ++r) {
      parts.bytes[r] = call_.counts[r] * item();
      parts.offsets[r] = starts[r] * item();
    }
    gather_in_place(static_cast<char*>(call_.output), parts);
  }

  void broadcast() {
    const std::int64_t bytes = call_.bytes();
    if (bytes <= Descriptor::kPayloadBytes) {
      const auto all = agree(thread_, call_, call_.output, bytes);
      if (bytes != 0) std::memcpy(call_.output, all[root()].payload, static_cast<std::size_t>(bytes));
    } else {
      if (!agree()) return;
      halfstep_mpi_request* request = nullptr;
      const int code = mpi_.start_broadcast(group_.comm, call_.output, bytes, call_.root, &request);
      thread_.finish(code, request, call_, bytes);
    }
    if (rank_ == call_.root) sent(bytes * (size_ - 1));
  }

  void all_gather() {
    const std::int64_t bytes = call_.bytes();
    auto* output = static_cast<char*>(call_.output);
    if (bytes <= Descriptor::kPayloadBytes) {
      const auto all = agree(thread_, call_, call_.input, bytes);
      for (int r = 0; r < size_ && bytes != 0; ++r) {
        std::memcpy(output + r * bytes, all[static_cast<std::size_t>(r)].payload, static_cast<std::size_t>(bytes));
      }
      sent(bytes * (size_ - 1));
      return;
    }
    if (!agree()) return;
    output = static_cast<char*>(call_.output);  // staged by now
    if (output + rank_ * bytes != call_.input) {
      std::memcpy(output + rank_ * bytes, call_.input, static_cast<std::size_t>(bytes));
    }
    gather_equal(output, bytes);
  }

  void gather() {
    if (!agree()) return;
    const RankParts parts = equal_parts(call_.bytes());
    const halfstep_mpi_parts all = parts.of(call_.output);
    halfstep_mpi_request* request = nullptr;
    const int code = mpi_.start_gatherv(group_.comm, call_.input, call_.bytes(), &all, call_.root, &request);
    thread_.finish(code, request, call_, call_.bytes() * size_);
    if (rank_ != call_.root) sent(call_.bytes());
  }

  void scatter() {
    if (!agree()) return;
    const RankParts parts = equal_parts(call_.bytes());
    const halfstep_mpi_parts all = parts.of(call_.input);
    halfstep_mpi_request* request = nullptr;
    const int code = mpi_.start_scatterv(group_.comm, &all, call_.output, call_.bytes(), call_.root, &request);
    thread_.finish(code, request, call_, call_.bytes() * size_);
    if (rank_ == call_.root) sent(call_.bytes() * (size_ - 1));
  }

  void all_to_all() {
    if (!agree()) return;
    RankParts parts = equal_parts(call_.bytes());
    parts.bytes[static_cast<std::size_t>(rank_)] = 0;
    const std::int64_t own = rank_ * call_.bytes();
    if (call_.bytes() != 0) {
      std::memcpy(static_cast<char*>(call_.output) + own, static_cast<const char*>(call_.input) + own,
                  static_cast<std::size_t>(call_.bytes()));
    }
    exchange(call_.input, parts, call_.output, parts);
  }

  void all_gather_text() {
    call_.count = static_cast<std::int64_t>(call_.text.size());
    const auto all = detail::agree(thread_, call_, nullptr, 0);
    RankParts parts(size_);
    std::int64_t at = 0;
    for (int r = 0; r < size_; ++r) {
      parts.bytes[r] = all[static_cast<std::size_t>(r)].count;
      parts.offsets[r] = at;
      at += parts.bytes[r];
    }
    call_.buffers.emplace_back(static_cast<std::size_t>(at + 1));
    char* data = call_.buffers.back().data();
    if (!call_.text.empty()) std::memcpy(data + parts.offsets[rank_], call_.text.data(), call_.text.size());
    gather_in_place(data, parts);
    for (int r = 0; r < size_; ++r) {
      call_.texts.emplace_back(data + parts.offsets[r], static_cast<std::size_t>(parts.bytes[r]));
    }
  }

  void broadcast_text() {
    call_.count = rank_ == call_.root ? static_cast<std::int64_t>(call_.text.size()) : 0;
    const auto all = detail::agree(thread_, call_, nullptr, 0);
    const std::int64_t bytes = all[root()].count;
    call_.buffers.emplace_back(static_cast<std::size_t>(bytes + 1));
    char* data = call_.buffers.back().data();
    if (rank_ == call_.root) std::memcpy(data, call_.text.data(), call_.text.size());
    if (bytes > 0) {
      halfstep_mpi_request* request = nullptr;
      const int code = mpi_.start_broadcast(group_.comm, data, bytes, call_.root, &request);
      thread_.finish(code, request, call_, bytes);
    }
    if (rank_ == call_.root) sent(bytes * (size_ - 1));
    call_.texts.emplace_back(data, static_cast<std::size_t>(bytes));
  }

  void split() {
    const DeviceMessages::Taken taken(thread_, call_);  // MPI's call waits for the other ranks, and does nothing else
    // Numbers that no other group has, and how many groups this rank has retired.
    static std::int64_t number = 0;
    const std::vector<GroupIdentity> retired = retired_within(group_);
    struct Given {
      std::int32_t color, key;
      std::int64_t number, retired;
    };
    static_assert(sizeof(Given) <= Descriptor::kPayloadBytes);
    const Given own{call_.color, call_.key, ++number, static_cast<std::int64_t>(retired.size())};
    const auto all = agree(thread_, call_, &own, sizeof(own));
    struct Member {
      Given given;
      int rank;
    };
    std::vector<Member> members;
    std::vector<std::int64_t> counts;
    for (int r = 0; r < size_; ++r) {
      Member m{.given = {}, .rank = r};
      std::memcpy(&m.given, all[static_cast<std::size_t>(r)].payload, sizeof(m.given));
      counts.push_back(m.given.retired);
      if (m.given.color == call_.color) members.push_back(m);
    }
    std::stable_sort(members.begin(), members.end(),
                     [](const Member& a, const Member& b) { return a.given.key < b.given.key; });
    free_retired(thread_, call_, retired, counts);
    // All ranks are here, so this waits for none of them.
    GroupState& made = *call_.made;
    if (mpi_.comm_split(group_.comm, call_.color, call_.key, &made.comm) != 0) {
      thread_.give_up(fmt::format("{}: MPI can't make another communicator", call_.title()));
    }
    mpi_.comm_place(made.comm, &made.rank, &made.size);
    for (const Member& m : members) {
      made.hosts.push_back(group_.hosts[static_cast<std::size_t>(m.rank)]);
      made.members.push_back(group_.members[static_cast<std::size_t>(m.rank)]);
    }
    made.identity = {made.members[0], members[0].given.number};
  }

  void free() {
    thread_.finish_messages(call_);
    const DeviceMessages::Taken taken(thread_, call_);
    agree();
    release(thread_, call_, std::exchange(group_.comm, nullptr), std::move(group_.device_group));
    group_.freed = true;
  }

  /// False where the devices have done the rest.
  bool agree() {
    call_.offer = device_offer(call_);
    const auto all = detail::agree(thread_, call_, nullptr, 0);
    if (!call_.on_device) return true;
    const bool same = std::all_of(all.begin(), all.end(), [&](const Descriptor& d) { return d.offer == call_.offer; });
    try {
      if (same && call_.offer != 0 && run_on_device(thread_, call_)) return false;
      stage_to_host(call_);
    } catch (const DeviceError& e) {
      thread_.give_up(fmt::format("{}: {}", call_.title(), e.what()));  // the others do what has been agreed
    }
    return true;
  }

 private:
  std::int64_t item() const { return static_cast<std::int64_t>(item_size(call_.dtype)); }
  std::size_t root() const { return static_cast<std::size_t>(call_.root); }
  std::span<const Descriptor> agree(CommunicationThread& thread, Call& call, const void* payload, std::int64_t bytes) {
    return detail::agree(thread, call, payload, bytes);
  }

  static void sent(std::int64_t bytes) { StatsCounter::get().add({.bytes_sent = static_cast<std::uint64_t>(bytes)}); }

  std::vector<std::int64_t> starts_of_parts() const {
    std::vector<std::int64_t> starts(call_.counts.size());
    std::exclusive_scan(call_.counts.begin(), call_.counts.end(), starts.begin(), std::int64_t{0});
    return starts;
  }

  RankParts equal_parts(std::int64_t bytes) const {
    RankParts parts(size_);
    for (int r = 0; r < size_; ++r) {
      parts.bytes[r] = bytes;
      parts.offsets[r] = r * bytes;
    }
    return parts;
  }

  void gather_in_place(char* data, const RankParts& parts) {
    if (parts.total() == 0) return;
    const halfstep_mpi_parts all = parts.of(data);
    halfstep_mpi_request* request = nullptr;
    const int code = mpi_.start_allgatherv(group_.comm, &all, &request);
    thread_.finish(code, request, call_, parts.total());
    sent(parts.bytes[static_cast<std::size_t>(rank_)] * (size_ - 1));
  }
  void gather_equal(char* data, std::int64_t bytes) { gather_in_place(data, equal_parts(bytes)); }

  void exchange(const void* from, const RankParts& send, void* to, const RankParts& receive) {
    const halfstep_mpi_parts out = send.of(from), in = receive.of(to);
    halfstep_mpi_request* request = nullptr;
    const int code = mpi_.start_alltoallv(group_.comm, &out, &in, &request);
    thread_.finish(code, request, call_, send.total() + receive.total());
    sent(send.total());
  }

  // Adds up the ranks' parts, `stride` bytes apart in `parts`; this rank's own are at `own` if that isn't null.
  void reduce_parts(const char* parts, std::int64_t stride, const char* own, char* output, std::int64_t n) {
    std::vector<const void*> inputs;
    for (int r = 0; r < size_; ++r) inputs.push_back(r == rank_ && own ? own : parts + r * stride);
    reduce_in_order(call_.op, call_.dtype, inputs, output, n);
  }

  void all_reduce_segment(char* data, std::int64_t count) {
    // Equal parts of whole cache lines; the last ranks may get less, or nothing.
    const std::int64_t line = 64 / item(), share = ((count + size_ - 1) / size_ + line - 1) / line * line;
    RankParts parts(size_);
    for (int r = 0; r < size_; ++r) {
      const std::int64_t begin = std::min(count, r * share), end = std::min(count, begin + share);
      parts.offsets[r] = begin * item();
      parts.bytes[r] = (end - begin) * item();
    }
    const auto me = static_cast<std::size_t>(rank_);
    const std::int64_t own = parts.bytes[me];
    RankParts send = parts, receive(size_);
    send.bytes[me] = 0;
    for (int r = 0; r < size_; ++r) {
      receive.bytes[r] = r == rank_ ? 0 : own;
      receive.offsets[r] = r * own;
    }
    char* scratch = thread_.scratch(static_cast<std::size_t>(std::max<std::int64_t>(own * size_, 1)));
    exchange(data, send, scratch, receive);
    char* mine = data + parts.offsets[me];
    reduce_parts(scratch, own, mine, mine, own / item());
    gather_in_place(data, parts);
  }

  // min and max of floating values stay here: MPI says nothing of NaN.
  bool by_library() const {
    const bool known = call_.dtype == DType::f32 || call_.dtype == DType::f64 || is_integral(call_.dtype);
    const bool order = call_.op == ReduceOp::min || call_.op == ReduceOp::max;
    return group_.reduction == Reduction::library && known && !(order && is_floating(call_.dtype));
  }
  void all_reduce_by_library() {
    const auto dtype = [&] {
      switch (call_.dtype) {
        case DType::f32:
          return HALFSTEP_MPI_F32;
        case DType::f64:
          return HALFSTEP_MPI_F64;
        case DType::i64:
          return HALFSTEP_MPI_I64;
        case DType::i32:
          return HALFSTEP_MPI_I32;
        case DType::i8:
          return HALFSTEP_MPI_I8;
        default:
          return HALFSTEP_MPI_U8;
      }
    }();
    const auto op = call_.op == ReduceOp::min       ? HALFSTEP_MPI_MIN
                    : call_.op == ReduceOp::max     ? HALFSTEP_MPI_MAX
                    : call_.op == ReduceOp::product ? HALFSTEP_MPI_PRODUCT
                                                    : HALFSTEP_MPI_SUM;
    halfstep_mpi_request* request = nullptr;
    const int code = mpi_.start_allreduce(group_.comm, call_.output, call_.count, dtype, op, &request);
    thread_.finish(code, request, call_, 2 * call_.bytes());
    sent(2 * call_.bytes() * (size_ - 1) / size_);
    if (call_.op == ReduceOp::mean) {
      const void* const sum[] = {call_.output};
      reduce_in_order(ReduceOp::mean, call_.dtype, sum, call_.output, call_.count, size_);
    }
  }

  CommunicationThread& thread_;
  const halfstep_mpi_table& mpi_;
  Call& call_;
  GroupState& group_;
  int size_, rank_;
};

}  // namespace

namespace {

void run_call_kind(CommunicationThread& thread, Call& call) {
  CollectiveRun run(thread, call);
  switch (call.kind) {
    case CallKind::all_reduce:
      return run.all_reduce();
    case CallKind::broadcast:
      return run.broadcast();
    case CallKind::all_gather:
      return run.all_gather();
    case CallKind::reduce_scatter:
      return run.reduce_scatter();
    case CallKind::gather:
      return run.gather();
    case CallKind::scatter:
      return run.scatter();
    case CallKind::all_to_all:
      return run.all_to_all();
    case CallKind::all_gather_parts:
      return run.all_gather_parts();
    case CallKind::reduce_scatter_parts:
      return run.reduce_scatter_parts();
    case CallKind::all_gather_text:
      return run.all_gather_text();
    case CallKind::broadcast_text:
      return run.broadcast_text();
    case CallKind::split:
      return run.split();
    case CallKind::free:
      return run.free();
    case CallKind::barrier:
    case CallKind::exit:
      run.agree();
      return;
    case CallKind::send:
    case CallKind::receive:
      break;
  }
  throw InternalError("run_collective: a message between two ranks is none");
}

}  // namespace

void run_collective(CommunicationThread& thread, Call& call) {
  run_call_kind(thread, call);
  if (call.on_device) return_to_device(call);
}

}  // namespace halfstep::dist::detail
