// SPDX-License-Identifier: Apache-2.0
// A program of several ranks for jobs_test.py: `rank_program WHAT`, which prints lines and ends in some way.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "halfstep/core/tensor.h"
#include "halfstep/dist/launcher_internal.h"
#include "halfstep/dist/process_group.h"
#include "halfstep/dist/process_group_internal.h"
#include "halfstep/ops/create.h"

using namespace halfstep;
using namespace std::chrono_literals;

namespace {

template <class T>
Tensor numbers(int rank, std::int64_t n) {
  const Tensor t = empty({n}, {.dtype = dtype_of<T>, .device = Device()});
  std::uint64_t h = static_cast<std::uint64_t>(rank) + 1;
  for (std::int64_t i = 0; i < n; ++i) {
    h = h * 6364136223846793005ULL + 1442695040888963407ULL;
    t.data<T>()[i] = convert<T>(static_cast<double>(h >> 11) * 0x1p-53 - 0.3);
  }
  return t;
}

std::uint64_t hash_of(const Tensor& t) {
  const auto* bytes = static_cast<const unsigned char*>(t.const_raw_data());
  std::uint64_t h = 14695981039346656037ULL;
  for (std::size_t i = 0; i < static_cast<std::size_t>(t.numel()) * t.item_size(); ++i)
    h = (h ^ bytes[i]) * 1099511628211ULL;
  return h;
}

template <class T>
void print_hashes(dist::ProcessGroup& group) {
  for (const std::int64_t n : {5, 3001, 300007}) {
    for (const auto op : {dist::ReduceOp::sum, dist::ReduceOp::mean, dist::ReduceOp::product}) {
      const Tensor t = numbers<T>(group.rank(), n);
      group.all_reduce(t, op).wait();
      std::printf("hash %s %s %lld %016llx\n", name(dtype_of<T>), name(op), static_cast<long long>(n),
                  static_cast<unsigned long long>(hash_of(t)));
    }
  }
}

template <class T>
void time_all_reduce(dist::ProcessGroup& group, std::int64_t n, int times) {
  const Tensor t = zeros({n}, {.dtype = dtype_of<T>, .device = Device()});
  for (int i = 0; i < times / 10 + 2; ++i) group.all_reduce(t).wait();
  double best = 1e9, total = 0;
  for (int i = 0; i < times; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    group.all_reduce(t).wait();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    best = std::min(best, seconds);
    total += seconds;
  }
  if (group.rank() == 0) {
    std::printf("%s %lld bytes: mean %.1f us, best %.1f us\n", name(dtype_of<T>),
                static_cast<long long>(n) * static_cast<long long>(sizeof(T)), total / times * 1e6, best * 1e6);
  }
}

int run(const std::string& what) {
  dist::ProcessGroupOptions options{.timeout = 3s};
  if (what == "library") options.reduction = dist::Reduction::library;
  if (what == "time" || what == "unread" || what == "slow") options.timeout = 60s;
  options.watch = what == "slow" || what == "watched-fork";
  if (what == "absent" && dist::detail::find_launch().rank == 0) {
    std::this_thread::sleep_for(6s);
    return 0;
  }
  dist::ProcessGroup group = dist::ProcessGroup::init(options);
  std::printf("rank %d of %d by %s\n", group.rank(), group.size(), group.library().c_str());
  std::fflush(stdout);
  const bool last = group.rank() == group.size() - 1;
  const Tensor t = zeros({4}, {.device = Device()});
  if (what == "hash" || what == "library") {
    print_hashes<float>(group);
    print_hashes<double>(group);
    if (what == "library") return 0;
    print_hashes<Half>(group);
    print_hashes<BFloat16>(group);
  } else if (what == "time") {
    time_all_reduce<float>(group, 1, 2000);
    time_all_reduce<float>(group, 1024, 1000);
    time_all_reduce<float>(group, 25 << 18, 20);
    time_all_reduce<Half>(group, 25 << 18, 20);
    time_all_reduce<Half>(group, 25 << 19, 20);
  } else if (what == "vanish") {
    if (last) _exit(0);
    group.all_reduce(t).wait();
  } else if (what == "stall") {
    if (last) std::this_thread::sleep_for(6s);
    group.all_reduce(t, dist::ReduceOp::sum, "gradients").wait();
  } else if (what == "leave") {  // the others still want something
    if (last) return 0;
    group.all_reduce(t, dist::ReduceOp::sum, "gradients").wait();
  } else if (what == "fail") {
    if (last) return 7;
    group.all_reduce(t).wait();
  } else if (what == "unfinished") {  // nobody waits for it
    group.all_reduce(zeros({1 << 20}, {.device = Device()}));
  } else if (what == "unanswered") {  // and here it can't be done
    if (!last) group.all_reduce(zeros({1 << 20}, {.device = Device()}));
    if (!last) group.receive(t, group.size() - 1);
  } else if (what == "unread") {  // on its way when the processes end; one message is received, one isn't
    if (last) {
      group.receive(zeros({1 << 20}, {.device = Device()}), 0, 1);
    } else if (group.rank() == 0) {
      group.send(zeros({1 << 20}, {.device = Device()}), group.size() - 1, 1);
      group.receive(t, group.size() - 1, 2);
    }
  } else if (what == "burst") {  // more messages than MPI takes at once
    constexpr int kMany = 20000;
    if (group.rank() == 0) {
      std::vector<dist::Work> sent;
      for (int i = 0; i < kMany; ++i) sent.push_back(group.send(full({100}, i, {.device = Device()}), 1));
      for (const dist::Work& w : sent) w.wait();
    } else if (group.rank() == 1) {
      std::this_thread::sleep_for(500ms);
      const Tensor came = zeros({100}, {.device = Device()});
      for (int i = 0; i < kMany; ++i) {
        group.receive(came, 0).wait();
        if (came.data<float>()[0] != static_cast<float>(i) || came.data<float>()[99] != static_cast<float>(i)) {
          std::printf("message %d is %g\n", i, static_cast<double>(came.data<float>()[0]));
        }
      }
    }
  } else if (what == "slow") {  // slower than the others, but not lost
    if (last) std::this_thread::sleep_for(13s);
    group.all_reduce(t, dist::ReduceOp::sum, "gradients").wait();
  } else if (what == "watched-fork") {  // a child that ends says nothing in its parent's name
    const pid_t child = fork();
    if (child == 0) std::exit(3);
    const auto begin = std::chrono::steady_clock::now();
    int status = -1;
    waitpid(child, &status, 0);
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
    std::printf("child: status %d after %.1f s\n", WEXITSTATUS(status), time.count());
    group.barrier();
  } else if (what == "fork") {
    const pid_t child = fork();
    if (child == 0) {
      try {
        group.all_reduce(t).wait();
      } catch (const dist::DistError& e) {
        std::printf("child: %s\n", e.what());
      }
      std::exit(0);  // with the handlers
    }
    group.barrier();
  } else if (what == "abort") {
    if (last) std::this_thread::sleep_for(2s);
    dist::detail::set_abort_check([] { return std::string("rank 9 has ended"); });
    group.all_reduce(t, dist::ReduceOp::sum, "gradients").wait();
  } else if (what == "current") {
    if (last) {
      std::this_thread::sleep_for(500ms);
    } else {
      std::thread([&] {
        std::this_thread::sleep_for(200ms);
        const auto current = dist::detail::current_collective();
        if (current) std::printf("current: %s\n", current->text.c_str());
      }).detach();
    }
    group.all_reduce(t, dist::ReduceOp::sum, "gradients").wait();
  }
  std::printf("rank %d is done\n", group.rank());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc > 1 ? argv[1] : "");
  } catch (const Error& e) {
    std::printf("error: %s\n", e.what());
    std::fflush(stdout);
    return 1;
  }
}
