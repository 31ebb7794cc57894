// SPDX-License-Identifier: Apache-2.0
// A program of several ranks for jobs_test.py: `rank_program WHAT`, which prints lines and ends in some way.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "halfstep/backends/sim/sim.h"
#include "halfstep/core/error.h"
#include "halfstep/core/random.h"
#include "halfstep/core/tensor.h"
#include "halfstep/dist/launcher_internal.h"
#include "halfstep/dist/process_group.h"
#include "halfstep/dist/process_group_internal.h"
#include "halfstep/dist/zero.h"
#include "halfstep/nn/container.h"
#include "halfstep/nn/linear.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/optim/adam.h"
#include "halfstep/runtime/devices.h"
#include "halfstep/train/trainer.h"

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

// A collective of the simulated device in which the last rank does something wrong.
void run_on_device(const std::string& what, dist::ProcessGroup& group) {
  signal(SIGTERM, SIG_IGN);  // a launcher that ends the others leaves them time to speak
  const Device device("sim");
  const bool last = group.rank() == group.size() - 1;
  const Tensor t = zeros({1 << 16}, {.device = device});
  const auto order = reinterpret_cast<halfstep_sim_order_fault_fn>(device_extension(device, "sim_order_fault"));
  if (last && what == "device_absent") order("refuse:group_create:1");
  group.all_reduce(t).wait();
  std::printf("by devices: %d\n", static_cast<int>(group.stats().on_devices));
  std::fflush(stdout);
  const char* orders = what == "device_killed"    ? "delay:all_reduce:1:20s"
                       : what == "device_refuses" ? "refuse:all_reduce:1"
                       : what == "device_lost"    ? "lost:1"
                                                  : "delay:all_reduce:1:20s";
  if (what == "device_absent") return;
  if (last) order(orders);
  const dist::Work work = group.all_reduce(t, dist::ReduceOp::sum, "gradients");
  if (last && what == "device_killed") {
    std::this_thread::sleep_for(300ms);
    raise(SIGKILL);
  }
  work.wait();
}

std::int64_t data_bytes() {
  std::ifstream in("/proc/self/status");
  std::int64_t kilobytes = 0;
  for (std::string word; in >> word;) {
    if (word == "VmData:") in >> kilobytes;
  }
  return kilobytes << 10;
}

// Adam on 16 matrices of 4 MiB: 256 MiB of parameters, gradients and moments in float32, on ranks that may take `most`
// bytes more than they have (0: any number).
void train_divided(const dist::ProcessGroup& group, int stage, std::int64_t most) {
  const std::int64_t begin = data_bytes();
  if (most > 0) {
    const rlimit limit{.rlim_cur = static_cast<rlim_t>(begin + most), .rlim_max = RLIM_INFINITY};
    if (setrlimit(RLIMIT_DATA, &limit) != 0) throw Error("no limit could be set");
  }
  manual_seed(3);
  nn::Sequential layers;
  for (int i = 0; i < 16; ++i) layers.push_back(nn::Linear{{.in = 1024, .out = 1024, .bias = false}});
  dist::DataParallel net(layers, group, {.bucket_cap_mb = 4, .first_bucket_cap_mb = 4});
  optim::Adam adam(layers.parameters());
  std::optional<dist::ZeroRedundancy> zero;
  if (stage > 0) zero.emplace(net, adam, dist::ZeroOptions{.stage = stage, .bucket_cap_mb = 4});
  double first = 0, loss = 0;
  for (int step = 0; step < 4; ++step) {
    manual_seed(static_cast<std::uint64_t>(group.rank()) + 1);
    adam.zero_grad();
    const Tensor out = net(randn({8, 1024}));
    const Tensor error = mean(out * out);
    error.backward();
    if (zero && step == 3) {
      const dist::ZeroMemory m = zero->memory();
      std::printf("memory %d: %lld %lld %lld\n", group.rank(), static_cast<long long>(m.parameters),
                  static_cast<long long>(m.gradients), static_cast<long long>(m.optimizer));
    }
    adam.step();
    loss = error.item<double>();
    if (step == 0) first = loss;
  }
  std::printf("trained: %s, %lld MiB\n", loss < first ? "better" : "worse",
              static_cast<long long>((data_bytes() - begin) >> 20));
}

// Samples of a task whose loss goes down: the mean of the network's outputs, squared.
class Shrink final : public training::Task {
 public:
  explicit Shrink(nn::Sequential layers) : layers_(std::move(layers)) {}
  const nn::ModuleBase& network() const override { return layers_; }
  training::TaskLoss loss(const data::Batch& batch) override {
    const Tensor out = layers_(batch.input);
    return {.loss = mean(out * out)};
  }

 private:
  nn::Sequential layers_;
};

// The same state, by a run with evaluations and checkpoints: 2 epochs of 3 steps, after which ranks evaluate 3 and 2
// batches; or, where its folder has one, a third epoch. `what`: the stage, `:`, the limit in MiB, `:`, the folder.
void train_run(const dist::ProcessGroup& group, const std::string& what) {
  const std::size_t colon = what.find(':'), second = what.find(':', colon + 1);
  const std::int64_t begin = data_bytes(), most = std::atoll(what.c_str() + colon + 1) << 20;
  manual_seed(3);
  const auto samples = std::make_shared<data::TensorDataset>(randn({48, 1024}), zeros({48}, {.dtype = i64}));
  const auto test = std::make_shared<data::TensorDataset>(randn({9, 1024}), zeros({9}, {.dtype = i64}));
  const rlimit limit{.rlim_cur = static_cast<rlim_t>(begin + most), .rlim_max = RLIM_INFINITY};
  if (most > 0 && setrlimit(RLIMIT_DATA, &limit) != 0) throw Error("no limit could be set");
  nn::Sequential layers;
  for (int i = 0; i < 16; ++i) layers.push_back(nn::Linear{{.in = 1024, .out = 1024, .bias = false}});
  training::TrainConfig config;
  config.model = "layers";
  config.batch_size = 16;
  config.eval_batch_size = 4;
  config.lr = 1e-3;
  config.optimizer = "adam";
  config.workers = 0;
  config.out = what.substr(second + 1);
  const bool resumed = std::filesystem::exists(config.out / "last.safetensors");
  if (resumed) config.resume = config.out;
  config.epochs = resumed ? 3 : 2;
  config.group = group;
  config.bucket_mb = 4;
  config.zero = what[0] - '0';
  training::TrainCallbacks callbacks;
  callbacks.on_eval = [](const training::EvalReport& e) {
    std::printf("evaluated: %.9g\n", static_cast<double>(e.metrics["loss"]));
  };
  callbacks.on_checkpoint = [](const std::filesystem::path&) { std::printf("saved\n"); };
  const training::RunReport report =
      training::train(config, std::make_shared<Shrink>(std::move(layers)), samples, test, callbacks);
  std::printf("trained: %lld steps, %lld MiB\n", static_cast<long long>(report.steps),
              static_cast<long long>((data_bytes() - begin) >> 20));
}

// Of this process: the oldest thread of that name, which those that MPI starts from it inherit.
void abort_in_communication_thread() {
  int oldest = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::ifstream file(task.path() / "comm");
    std::getline(file, name);
    const int thread = std::stoi(task.path().filename().string());
    if (name == "halfstep_comm" && (oldest == 0 || thread < oldest)) oldest = thread;
  }
  if (oldest > 0) syscall(SYS_tgkill, getpid(), oldest, SIGABRT);
}

// Ways for stay_behind().
bool is_behind(const std::string& what) {
  for (const char* kind : {"hang:", "late:", "busy:", "slow:", "message:"}) {
    if (what.starts_with(kind)) return true;
  }
  return false;
}

// Blocks this thread for `seconds`, or for good (0), in a way that only what it is told explains.
void block(const std::string& how, unsigned seconds) {
  static std::mutex mutex;
  static std::condition_variable changed;
  static int pipe_end = -1;
  const auto let_go = [](int) { (void)!write(pipe_end, "x", 1); };
  std::string path = "/tmp/halfstep-rank-program-XXXXXX";
  if (how == "pipe" || how == "open") {
    if (!mkdtemp(path.data())) throw Error("no folder could be made");
    const std::string pipe = path + "/pipe";
    if (mkfifo(pipe.c_str(), 0600) != 0) throw Error("no pipe could be made");
    // With both ends in this process nothing ends the reading.
    pipe_end = how == "pipe" ? open(pipe.c_str(), O_RDWR | O_CLOEXEC) : -1;
    std::thread([path] {  // it is gone before the process is
      std::this_thread::sleep_for(500ms);
      std::filesystem::remove_all(path);
    })
        .detach();
    signal(SIGALRM, let_go);
    alarm(seconds);
    char byte = 0;
    (void)!read(pipe_end >= 0 ? pipe_end : open(pipe.c_str(), O_RDONLY | O_CLOEXEC), &byte, 1);
  } else if (how == "lock") {  // of a thread that has kept it
    std::thread([] { mutex.lock(); }).join();
    mutex.lock();
  } else if (how == "condition") {
    std::unique_lock lock(mutex);
    changed.wait(lock, [] { return false; });
  } else if (how == "sleep") {  // longer than anybody would poll
    std::this_thread::sleep_for(1h);
  } else if (how == "thread") {  // what this one waits for is stuck itself
    std::thread([] { block("pipe", 0); }).join();
  } else {
    throw Error("no such way to block: " + how);
  }
}

// The last rank is slow, in one of many ways, or blocked; the others wait for it in a collective.
void stay_behind(const std::string& what, dist::ProcessGroup& group) {
  const auto begin = std::chrono::steady_clock::now();
  const auto passed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
  const std::size_t colon = what.find(':');
  const std::string how = what.substr(colon + 1);
  const Tensor t = zeros({4096}, {.device = Device()});
  group.all_reduce(t, dist::ReduceOp::sum, "loss").wait();
  constexpr unsigned kSeconds = 9;
  if (what.starts_with("message")) {  // the last waits for the first, which is slow, the others for both
    if (group.rank() == 0) std::this_thread::sleep_for(std::chrono::seconds(kSeconds));
    if (group.rank() == 0) group.send(t, group.size() - 1).wait();
    if (group.rank() == group.size() - 1) group.receive(t, 0).wait();
  } else if (group.rank() == group.size() - 1) {
    if (what.starts_with("hang:")) block(how, 0);
    if (what.starts_with("late:")) block(how, kSeconds);
    if (what.starts_with("busy:")) {
      const dist::Busy busy("the scheduler");
      block(how, kSeconds);
    }
    double x = 0;
    const Tensor matrix = ones({256, 256}, {.device = Device()});
    int socket[2] = {-1, -1};
    while (what == "slow:compute" && passed() < kSeconds) x += sum(matrix * matrix).item<double>();
    while (what == "slow:poll" && passed() < kSeconds) std::this_thread::sleep_for(50ms);
    if (what == "slow:sleep") std::this_thread::sleep_for(std::chrono::seconds(kSeconds));
    if (what == "slow:thread") {  // the main thread waits for one that computes
      std::thread([&] {
        while (passed() < kSeconds) x += sum(matrix * matrix).item<double>();
      }).join();
    }
    if (what == "slow:program" && std::system("sleep 9") != 0) throw Error("no sleep");
    if (what == "slow:socket") {  // the answer of somebody else, here this process's own
      if (socketpair(AF_UNIX, SOCK_STREAM, 0, socket) != 0) throw Error("no sockets could be made");
      static int other_end = -1;
      other_end = socket[1];
      signal(SIGALRM, [](int) { (void)!write(other_end, "x", 1); });
      alarm(kSeconds);
      char byte = 0;
      (void)!read(socket[0], &byte, 1);
    }
    if (x < 0) std::printf("no\n");
  }
  try {
    group.all_reduce(t, dist::ReduceOp::sum, "bucket 0, layer1.weight").wait();
  } catch (const dist::DistError& e) {
    std::printf("rank %d learnt after %.1f s: %s\n", group.rank(), passed(), e.what());
    std::fflush(stdout);
    std::this_thread::sleep_for(1s);  // a launcher that ends the others leaves them time to speak so
    throw;
  }
}

int run(const std::string& what) {
  dist::ProcessGroupOptions options{.timeout = 3s};
  if (what == "library") options.reduction = dist::Reduction::library;
  if (is_behind(what) || what == "time" || what == "unread" || what == "slow" || what.starts_with("zero") ||
      what.starts_with("run"))
    options.timeout = 60s;
  options.watch = what == "slow" || what == "watched-fork" || is_behind(what);
  if (what == "absent" && dist::detail::find_launch().rank == 0) {
    std::this_thread::sleep_for(6s);
    return 0;
  }
  dist::ProcessGroup group = dist::ProcessGroup::init(options);
  std::printf("rank %d of %d by %s\n", group.rank(), group.size(), group.library().c_str());
  std::fflush(stdout);
  const bool last = group.rank() == group.size() - 1;
  const Tensor t = zeros({4}, {.device = Device()});
  if (what.starts_with("device_")) {
    run_on_device(what, group);
  } else if (what == "hash" || what == "library") {
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
  } else if (what.starts_with("zero")) {  // zero3, or with a limit of 240 MiB: zero3:240
    const std::size_t colon = what.find(':');
    const std::int64_t most = colon == std::string::npos ? 0 : std::atoll(what.c_str() + colon + 1) << 20;
    train_divided(group, what[4] - '0', most);
  } else if (what.starts_with("run")) {  // run3:240:FOLDER
    train_run(group, what.substr(3));
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
  } else if (is_behind(what)) {
    stay_behind(what, group);
  } else if (what == "abort") {
    if (last) std::this_thread::sleep_for(2s);
    dist::detail::set_abort_check([] { return std::string("rank 9 has ended"); });
    group.all_reduce(t, dist::ReduceOp::sum, "gradients").wait();
  } else if (what == "mpi-aborts") {  // as UCX does where it copies from a process that has died
    static std::atomic<bool> known{false};
    dist::detail::set_abort_check([] { return std::string(known ? "rank 9 has ended" : ""); });
    if (last) {
      std::this_thread::sleep_for(2s);
      return 1;
    }
    std::thread([] {
      std::this_thread::sleep_for(300ms);
      abort_in_communication_thread();
      std::this_thread::sleep_for(300ms);
      known = true;
    }).detach();
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
  } catch (const std::exception& e) {
    std::printf("error: %s\n", e.what());
    std::fflush(stdout);
    return 1;
  }
}
