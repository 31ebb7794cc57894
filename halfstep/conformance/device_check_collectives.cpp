// SPDX-License-Identifier: Apache-2.0
// The part of check_device() for collectives: each device of the kind is a rank, in a thread of this process.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "halfstep/conformance/device_check_internal.h"
#include "halfstep/core/fail.h"
#include "halfstep/dist/reduce.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/runtime/device_backend.h"
#include "halfstep/runtime/devices.h"
#include "halfstep/runtime/queue.h"

namespace halfstep::conformance::detail {
namespace {

using Clock = std::chrono::steady_clock;
using dist::ReduceOp;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int kMostRanks = 4;
constexpr seconds kForACall{60}, kForWork{20};
constexpr const char* kUnsupported = "HALFSTEP_UNSUPPORTED";  // what a call of a rank came to

const void* address(const Tensor& t) { return t.const_raw_data(); }
void* place(const Tensor& t) { return const_cast<void*>(t.const_raw_data()); }

// A group with a rank on each of some devices. Kept by all threads that may still use it.
struct Group {
  struct Member {
    Device device;
    std::unique_ptr<Queue> queue;
    halfstep_group* group = nullptr;
  };
  explicit Group(DeviceBackend& b) : backend(b) {}

  DeviceBackend& backend;
  std::vector<Member> members;
  std::atomic<int> away = 0;  // calls that have not come back

  int size() const { return static_cast<int>(members.size()); }
  std::string reason(halfstep_status status) const {
    halfstep_error error{};
    error.size = sizeof(error);
    backend.table.error(&error);
    error.text[sizeof(error.text) - 1] = '\0';
    return fmt::format("status {}: {}", status, error.text[0] ? error.text : "no reason was given");
  }
};
using GroupPtr = std::shared_ptr<Group>;

// Calls f(rank) for all ranks at once and returns what each returned: what went wrong, or nothing. Who doesn't come
// back is left alone.
template <class F>
std::vector<std::string> on_all_ranks(const GroupPtr& group, F f) {
  struct Answer {
    std::atomic<bool> there{false};
    std::string text;
  };
  const auto answers = std::make_shared<std::vector<Answer>>(group->members.size());
  for (int r = 0; r < group->size(); ++r) {
    ++group->away;
    std::thread([answers, group, f, r] {
      Answer& answer = (*answers)[static_cast<std::size_t>(r)];
      try {
        answer.text = f(r);
      } catch (const std::exception& e) {
        answer.text = e.what();
      }
      --group->away;
      answer.there = true;
    }).detach();
  }
  std::vector<std::string> texts;
  const auto until = Clock::now() + kForACall;
  for (Answer& answer : *answers) {
    while (!answer.there && Clock::now() < until) std::this_thread::sleep_for(milliseconds(1));
    texts.push_back(answer.there ? answer.text : fmt::format("not back after {} s", kForACall.count()));
  }
  return texts;
}

// Waits for a rank's queue without trusting it to end.
std::string outcome(const Group& group, const Group::Member& m) {
  auto* queue = static_cast<halfstep_queue*>(m.queue->native());
  const auto until = Clock::now() + kForWork;
  while (group.backend.table.queue_query(queue) == HALFSTEP_NOT_READY) {
    if (const auto status = group.backend.table.group_error(m.group)) {
      std::string text = group.reason(status);
      group.backend.table.group_abort(m.group);
      return text;
    }
    if (Clock::now() > until) {
      group.backend.table.group_abort(m.group);
      return fmt::format("its work was not done after {} s", kForWork.count());
    }
    std::this_thread::sleep_for(milliseconds(1));
  }
  if (const auto status = group.backend.table.queue_synchronize(queue)) return group.reason(status);
  if (const auto status = group.backend.table.group_error(m.group)) return group.reason(status);
  return {};
}

// A collective: call(member, rank, queue) of every rank, and the wait for it. False if the group is of no use any more,
// or `unsupported` was set: all ranks say so.
template <class F>
bool collective(Checker& c, const GroupPtr& group, F call, bool* unsupported = nullptr) {
  for (const Group::Member& m : group->members) synchronize(m.device);  // what it reads is there
  const auto texts = on_all_ranks(group, [group, call](int r) -> std::string {
    const Group::Member& m = group->members[static_cast<std::size_t>(r)];
    const halfstep_status status = call(m, r, static_cast<halfstep_queue*>(m.queue->native()));
    if (status == HALFSTEP_UNSUPPORTED) return kUnsupported;
    if (status != HALFSTEP_OK) {
      std::string text = group->reason(status);
      group->backend.table.group_abort(m.group);
      return text;
    }
    return outcome(*group, m);
  });
  if (unsupported && std::all_of(texts.begin(), texts.end(), [](const auto& t) { return t == kUnsupported; })) {
    *unsupported = true;
    return false;
  }
  bool good = true;
  for (std::size_t r = 0; r < texts.size(); ++r) {
    if (texts[r].empty()) continue;
    c.problem(fmt::format("rank {}: {}", r, texts[r]));
    good = false;
  }
  return good;
}

class CollectivesCheck {
 public:
  CollectivesCheck(Checker& c, GroupPtr group)
      : c_(c), group_(std::move(group)), table_(group_->backend.table), ranks_(group_->size()) {}

  bool create() {
    char id[HALFSTEP_GROUP_ID_BYTES] = {};
    std::uint64_t bytes = 0;
    if (const auto status = table_.group_id(id, sizeof(id), &bytes)) {
      c_.problem("group_id: " + group_->reason(status));
      return false;
    }
    if (bytes == 0 || bytes > sizeof(id)) {
      c_.problem(fmt::format("group_id: {} bytes, expected 1 to {}", bytes, sizeof(id)));
      return false;
    }
    const auto texts = on_all_ranks(group_, [group = group_, text = std::string(id, bytes)](int r) -> std::string {
      Group::Member& m = group->members[static_cast<std::size_t>(r)];
      const auto status =
          group->backend.table.group_create(m.device.index, group->size(), r, text.data(), text.size(), &m.group);
      return status == HALFSTEP_OK ? "" : group->reason(status);
    });
    bool good = true;
    for (std::size_t r = 0; r < texts.size(); ++r) {
      if (texts[r].empty()) continue;
      c_.problem(fmt::format("group_create of rank {}: {}", r, texts[r]));
      good = false;
    }
    broken_ = !good;
    return good;
  }

  /// Bytes of odd numbers from and to odd addresses.
  void movement() {
    for (const std::int64_t n : {std::int64_t{1}, std::int64_t{1001}, c_.size(3'000'001, 100'003)}) {
      const Tensors own = bytes_of_ranks(n), whole = bytes_of_ranks(n * ranks_);
      const Tensor all = joined(own);
      one("broadcast", n, [&] {
        const int root = ranks_ - 1;
        const Tensors t = there(own);
        if (!collective(c_, group_, [t, n, root, this_table = &table_](const auto& m, int r, halfstep_queue* q) {
              return this_table->broadcast(m.group, q, place(t[static_cast<std::size_t>(r)]), n, HALFSTEP_U8, root);
            })) {
          return false;
        }
        return same(t, Tensors(own.size(), own.back()));
      });
      for (const bool in_place : {false, true}) {
        one(in_place ? "all_gather in place" : "all_gather", n, [&] {
          const Tensors out = blanks(n * ranks_, u8);
          Tensors in = there(own);
          for (std::size_t r = 0; r < in.size() && in_place; ++r) {
            Tensor part = out[r].narrow(0, static_cast<std::int64_t>(r) * n, n);
            part.copy_(in[r]);
            in[r] = part;
          }
          if (!collective(c_, group_, [in, out, n, this_table = &table_](const auto& m, int r, halfstep_queue* q) {
                const auto k = static_cast<std::size_t>(r);
                return this_table->all_gather(m.group, q, address(in[k]), place(out[k]), n, HALFSTEP_U8);
              })) {
            return false;
          }
          return same(out, Tensors(own.size(), all));
        });
      }
      const auto part = [&](std::size_t of, std::size_t r) {
        return whole[of].narrow(0, static_cast<std::int64_t>(r) * n, n);
      };
      one("all_to_all", n, [&] {
        const Tensors in = there(whole), out = blanks(n * ranks_, u8);
        if (!collective(c_, group_, [in, out, n, this_table = &table_](const auto& m, int r, halfstep_queue* q) {
              const auto k = static_cast<std::size_t>(r);
              return this_table->all_to_all(m.group, q, address(in[k]), place(out[k]), n, HALFSTEP_U8);
            })) {
          return false;
        }
        Tensors expected;
        for (std::size_t r = 0; r < own.size(); ++r) {
          Tensors parts;
          for (std::size_t of = 0; of < own.size(); ++of) parts.push_back(part(of, r));
          expected.push_back(joined(parts));
        }
        return same(out, expected);
      });
      // Each to the next and from the last, and a single byte behind it.
      if (ranks_ == 1) continue;
      one("send_receive", n, [&] {
        const Tensors in = there(own), out = blanks(n + 1, u8);
        if (!collective(c_, group_,
                        [in, out, n, ranks = ranks_, this_table = &table_](const auto& m, int r, halfstep_queue* q) {
                          const auto k = static_cast<std::size_t>(r);
                          const int next = (r + 1) % ranks, last = (r + ranks - 1) % ranks;
                          char* to = static_cast<char*>(place(out[k]));
                          const halfstep_transfer transfers[] = {{place(in[k]), n, HALFSTEP_U8, next, 0, 0},
                                                                 {to, n, HALFSTEP_U8, last, 1, 0},
                                                                 {place(in[k]), 1, HALFSTEP_U8, next, 0, 0},
                                                                 {to + n, 1, HALFSTEP_U8, last, 1, 0}};
                          return this_table->send_receive(m.group, q, transfers, 4);
                        })) {
          return false;
        }
        Tensors expected;
        for (std::size_t r = 0; r < own.size(); ++r) {
          const Tensor& from = own[(r + own.size() - 1) % own.size()];
          expected.push_back(joined({from, from.narrow(0, 0, 1)}));
        }
        return same(out, expected);
      });
    }
  }

  void reductions(DType dtype) {
    const bool ordered = (group_->backend.info(c_.device.index).collectives & HALFSTEP_COLLECTIVES_IN_ORDER) != 0;
    std::string missing;
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::mean, ReduceOp::product, ReduceOp::min, ReduceOp::max}) {
      if (op == ReduceOp::mean && is_integral(dtype)) continue;
      for (const bool scatter : {false, true}) {
        const std::int64_t n = c_.size(100'003, 1001);
        bool unsupported = false;
        one(fmt::format("{}, {}", scatter ? "reduce_scatter" : "all_reduce", dist::name(op)), n,
            [&] { return reduction(dtype, op, scatter, n, ordered, &unsupported) || unsupported; });
        if (unsupported && !scatter) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", dist::name(op));
      }
    }
    if (!missing.empty()) c_.note("not by the library: " + missing);
  }

  /// Something went wrong: nobody knows what the group still does.
  bool broken() const { return broken_; }

  /// Ends a collective that another rank never begins.
  void abort() {
    if (broken_) return;
    c_.one("a rank that waits is aborted", [&] {
      const Tensors t = there(bytes_of_ranks(1001));
      const auto begin = Clock::now();
      const auto texts = on_all_ranks(group_, [group = group_, t](int r) -> std::string {
        const Group::Member& m = group->members[static_cast<std::size_t>(r)];
        const halfstep_plugin_table& table = group->backend.table;
        auto* queue = static_cast<halfstep_queue*>(m.queue->native());
        if (const auto status = table.group_error(m.group)) return "before: " + group->reason(status);
        if (group->size() > 1 && r == 0) {
          const auto status = table.broadcast(m.group, queue, place(t[0]), 1001, HALFSTEP_U8, group->size() - 1);
          if (status != HALFSTEP_OK) return group->reason(status);
          std::this_thread::sleep_for(milliseconds(100));
        }
        if (const auto status = table.group_abort(m.group)) return "group_abort: " + group->reason(status);
        const auto until = Clock::now() + kForWork;
        while (table.queue_query(queue) == HALFSTEP_NOT_READY) {
          if (Clock::now() > until) return fmt::format("the queue still waits {} s after it", kForWork.count());
          std::this_thread::sleep_for(milliseconds(1));
        }
        return {};
      });
      for (std::size_t r = 0; r < texts.size(); ++r) {
        if (texts[r].empty()) continue;
        c_.problem(fmt::format("rank {}: {}", r, texts[r]));
        broken_ = true;
      }
      c_.measured(std::chrono::duration<double>(Clock::now() - begin) / kForWork, fmt::format("{} s", kForWork.count()),
                  "time");
    });
  }

  /// Nothing that may still be in use is destroyed: after an error a group is ended, and left where it does not end.
  void destroy() {
    if (broken_) {
      for (const Group::Member& m : group_->members) {
        if (m.group != nullptr) table_.group_abort(m.group);
      }
      const auto until = Clock::now() + kForWork;
      while (busy()) {
        if (Clock::now() > until) return;
        std::this_thread::sleep_for(milliseconds(1));
      }
    }
    for (Group::Member& m : group_->members) {
      if (m.group == nullptr) continue;
      if (const auto status = table_.group_destroy(m.group)) c_.problem("group_destroy: " + group_->reason(status));
      m.group = nullptr;
    }
  }

 private:
  bool busy() const {
    return group_->away > 0 || std::any_of(group_->members.begin(), group_->members.end(), [&](const auto& m) {
             return table_.queue_query(static_cast<halfstep_queue*>(m.queue->native())) == HALFSTEP_NOT_READY;
           });
  }
  // A case, unless an earlier one has left the group in an unknown state.
  template <class F>
  void one(const std::string& name, std::int64_t n, F&& f) {
    if (broken_) return;
    c_.one(fmt::format("{} of {}", name, n), [&] {
      if (!f()) broken_ = true;
    });
  }

  Tensors bytes_of_ranks(std::int64_t n) {
    Tensors all;
    for (int r = 0; r < ranks_; ++r) all.push_back(c_.integers(256, {n}).to(u8));
    return all;
  }
  Tensors there(const Tensors& here) const {
    Tensors all;
    for (std::size_t r = 0; r < here.size(); ++r) all.push_back(here[r].to(group_->members[r].device).clone());
    return all;
  }
  Tensors blanks(std::int64_t n, DType dtype) const {
    Tensors all;
    for (const Group::Member& m : group_->members) all.push_back(zeros({n}, {.dtype = dtype, .device = m.device}));
    return all;
  }
  static Tensor joined(const Tensors& parts) {
    std::int64_t n = 0;
    for (const Tensor& t : parts) n += t.numel();
    const Tensor all = empty({n}, {.dtype = parts[0].dtype(), .device = Device{}});
    n = 0;
    for (const Tensor& t : parts) {
      Tensor place = all.narrow(0, n, t.numel());
      place.copy_(t);
      n += t.numel();
    }
    return all;
  }
  bool same(const Tensors& got, const Tensors& expected) {
    for (std::size_t r = 0; r < got.size(); ++r) c_.same(got[r], expected[r], fmt::format("rank {}", r));
    return true;
  }

  bool reduction(DType dtype, ReduceOp op, bool scatter, std::int64_t n, bool ordered, bool* unsupported) {
    const std::int64_t length = scatter ? n * ranks_ : n;
    Tensors own;
    for (int r = 0; r < ranks_; ++r) {
      own.push_back(is_integral(dtype) ? c_.integers(200, {length}).to(dtype) : c_.normal({length}).to(dtype));
    }
    const Tensors in = there(own), out = blanks(n, dtype);
    const int reduce = op == ReduceOp::min       ? HALFSTEP_REDUCE_MIN
                       : op == ReduceOp::max     ? HALFSTEP_REDUCE_MAX
                       : op == ReduceOp::mean    ? HALFSTEP_REDUCE_MEAN
                       : op == ReduceOp::product ? HALFSTEP_REDUCE_PROD
                                                 : HALFSTEP_REDUCE_SUM;
    const bool done = collective(
        c_, group_,
        [in, out, n, dtype, reduce, scatter, this_table = &table_](const auto& m, int r, halfstep_queue* q) {
          const auto k = static_cast<std::size_t>(r);
          const auto entry = scatter ? this_table->reduce_scatter : this_table->all_reduce;
          return entry(m.group, q, address(in[k]), place(out[k]), n, static_cast<std::int32_t>(dtype), reduce);
        },
        unsupported);
    if (!done) return false;
    const auto expected_of = [&](const Tensors& from, DType type, int rank) {
      std::vector<const void*> inputs;
      for (const Tensor& t : from) inputs.push_back(t.narrow(0, scatter ? rank * n : 0, n).const_raw_data());
      const Tensor result = empty({n}, {.dtype = type, .device = Device{}});
      dist::reduce_in_order(op, type, inputs, place(result), n);
      return result;
    };
    Tensors wide, magnitudes;
    for (const Tensor& t : own) {
      wide.push_back(t.is_floating() ? t.to(f64) : t);
      magnitudes.push_back(t.is_floating() ? abs(wide.back()) : t);
    }
    for (int r = 0; r < ranks_; ++r) {
      const Tensor& got = out[static_cast<std::size_t>(r)];
      const std::string what = fmt::format("rank {}", r);
      if (ordered || is_integral(dtype) || op == ReduceOp::min || op == ReduceOp::max) {
        c_.same(got, expected_of(own, dtype, r), what);
      } else {
        // Rounded at every step, and once for the mean.
        c_.near(got, expected_of(wide, f64, r), expected_of(magnitudes, f64, r),
                {.rounded = static_cast<double>(ranks_), .of = Of::magnitudes}, what);
      }
    }
    return true;
  }

  Checker& c_;
  const GroupPtr group_;
  const halfstep_plugin_table& table_;
  const int ranks_;
  bool broken_ = false;
};

}  // namespace

void check_collectives(Checker& c) {
  if (c.device.is_cpu() || c.lost()) return;
  DeviceBackend& backend = backend_for(c.device, "check");
  const std::string name = "collectives";
  if (!backend.has_collectives()) {
    c.line(name, "", [&] { c.note("the plug-in has none: tensors are staged through the host"); });
    return;
  }
  const auto group = std::make_shared<Group>(backend);
  group->members.push_back({.device = c.device, .queue = std::make_unique<Queue>(c.device)});
  for (const DeviceInfo& d : devices()) {
    if (d.device.type != c.device.type || d.device == c.device || d.lost || group->size() == kMostRanks) continue;
    group->members.push_back({.device = d.device, .queue = std::make_unique<Queue>(d.device)});
  }
  const std::string ranks = fmt::format("{} rank{}", group->size(), group->size() == 1 ? "" : "s");
  CollectivesCheck check(c, group);
  bool created = false;
  c.line(fmt::format("{}, {}", name, ranks), "", [&] {
    if (group->size() == 1) c.note("there is one device: it exchanges with itself only");
    c.one("a group", [&] { created = check.create(); });
    if (created) check.movement();
    // A group that a rank may still be making is left alone.
    if (check.broken() && (created || group->away == 0)) check.destroy();
  });
  if (check.broken() || !created) return;
  for (const DType dtype : {f32, f16, bf16, f64, f8e4m3, f8e5m2, i64, i32, i8, u8}) {
    c.line("reductions between " + ranks, halfstep::name(dtype), [&] {
      check.reductions(dtype);
      if (check.broken()) check.destroy();
    });
    if (check.broken()) return;
  }
  c.line("collectives that are ended", "", [&] {
    check.abort();
    check.destroy();
  });
}

}  // namespace halfstep::conformance::detail
