// SPDX-License-Identifier: Apache-2.0
// Data parallel training steps, as a user writes them, by the ranks of an MPI job: `mpirun -n 2 bench_server --ranks`.
#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <iostream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include "benchmarks/server/server.h"
#include "halfstep/core/random.h"
#include "halfstep/dist/data_parallel.h"
#include "halfstep/models/registry.h"
#include "halfstep/nn/activation.h"
#include "halfstep/nn/container.h"
#include "halfstep/nn/linear.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/random.h"
#include "halfstep/optim/sgd.h"

namespace halfstep::bench {
namespace {

// Communication-bound: 16.8 million parameters and a small batch.
constexpr std::int64_t kWide = 2048;
models::Model wide_network() {
  const auto hidden = [] { return nn::Linear{{.in = kWide, .out = kWide}}; };
  const auto net =
      std::make_shared<nn::Sequential>(nn::Sequential{hidden(), nn::ReLU{}, hidden(), nn::ReLU{}, hidden(), nn::ReLU{},
                                                      hidden(), nn::ReLU{}, nn::Linear{{.in = kWide, .out = 10}}});
  return {.module = net, .forward = [net](const Tensor& x) -> Tensor { return (*net)(x); }, .info = {}};
}

struct ParallelNetwork {
  const char* name;
  std::int64_t batch;  // of a rank
  Shape sample;
};
const ParallelNetwork kParallelNetworks[] = {{"mlp", 64, {784}}, {"resnet20", 64, {3, 32, 32}}, {"wide", 16, {kWide}}};

// How gradients are reduced: in their own dtype, compressed, or not at all, which leaves what the step itself takes.
struct Gradients {
  const char* name;
  std::optional<DType> compressed;
  bool reduced;
};
constexpr Gradients kGradients[] = {{"f32", {}, true}, {"f16", f16, true}, {"bf16", bf16, true}, {"none", {}, false}};

class ParallelTraining {
 public:
  ParallelTraining(const ParallelNetwork& network, const Gradients& gradients, const dist::ProcessGroup& group)
      : group_(group),
        net_(network.name == std::string_view("wide") ? wide_network() : models::make_model(network.name)),
        parallel_(
            *net_.module, group,
            {.hook = gradients.compressed ? dist::compress_hook(*gradients.compressed) : dist::CommunicationHook()}),
        optimizer_(net_.module->parameters(), {.lr = 0.01, .momentum = 0.9}) {
    Shape sizes{network.batch};
    for (const std::int64_t n : network.sample) sizes.push_back(n);
    images_ = randn(sizes);
    if (sizes.size() == 4) images_ = images_.contiguous(MemoryFormat::channels_last);
    labels_ = randint(0, 10, {network.batch});
    if (!gradients.reduced) alone_.emplace(parallel_);
  }

  void step() {
    optimizer_.zero_grad();
    if (!alone_) parallel_.broadcast_buffers();
    cross_entropy(net_.forward(images_), labels_).backward();
    optimizer_.step();
  }

  // All ranks begin together, and a repetition takes as long as that of the slowest.
  void begin() { group_.barrier(); }
  double of_slowest(double seconds) {
    const Tensor all = full({1}, seconds, {.dtype = f64, .device = Device{}});
    group_.all_reduce(all, dist::ReduceOp::max).wait();
    return all.item<double>();
  }

  std::map<std::string, double> facts() {
    constexpr int kSteps = 10;
    const dist::DataParallelStats before = parallel_.stats();
    const std::uint64_t sent_before = group_.stats().bytes_sent;
    for (int i = 0; i < kSteps; ++i) step();
    const dist::DataParallelStats after = parallel_.stats();
    const auto sent = static_cast<double>(group_.stats().bytes_sent - sent_before) / kSteps;
    const Tensor mean = full({1}, sent, {.dtype = f64, .device = Device{}});
    group_.all_reduce(mean, dist::ReduceOp::mean).wait();
    std::map<std::string, double> found = {{"bytes_sent", mean.item<double>()}};
    const double reduction = after.reduction_seconds - before.reduction_seconds;
    if (reduction > 0) found["hidden"] = 1 - (after.wait_seconds - before.wait_seconds) / reduction;
    return found;
  }

 private:
  dist::ProcessGroup group_;
  models::Model net_;
  dist::DataParallelBase parallel_;
  optim::SGD optimizer_;
  Tensor images_, labels_;
  std::optional<dist::DataParallelBase::NoSync> alone_;
};

std::vector<Case> parallel_cases(const dist::ProcessGroup& group) {
  std::vector<Case> cases;
  for (const ParallelNetwork& network : kParallelNetworks) {
    for (const Gradients& gradients : kGradients) {
      cases.push_back({fmt::format("parallel/{}/{}/b{}", network.name, gradients.name, network.batch),
                       [&network, &gradients, group] {
                         manual_seed(1);
                         const auto training = std::make_shared<ParallelTraining>(network, gradients, group);
                         return Prepared{.run = [training] { training->step(); },
                                         .facts = [training] { return training->facts(); },
                                         .begin = [training] { training->begin(); },
                                         .elapsed = [training](double s) { return training->of_slowest(s); }};
                       }});
    }
  }
  return cases;
}

[[noreturn]] void fail_with_errno(const char* what) {
  throw std::system_error(errno, std::generic_category(), fmt::format("--ranks: {}", what));
}

// What rank 0 reads from standard input, on all ranks of this machine. The others sleep in between, which a collective
// would not let them.
class SharedInput {
 public:
  explicit SharedInput(dist::ProcessGroup group) : first_(group.rank() == 0) {
    if (group.local_size() != group.size()) throw std::runtime_error("--ranks: expected ranks of one machine");
    if (group.size() == 1) return;
    const int made = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (made < 0) fail_with_errno("socket");
    // A name without a file.
    const std::string name = group.broadcast_text(fmt::format("halfstep-bench-{}", getpid()));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), std::min(name.size(), sizeof(address.sun_path) - 1));
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    auto* const where = reinterpret_cast<sockaddr*>(&address);
    if (first_ && (::bind(made, where, length) != 0 || ::listen(made, group.size()) != 0)) fail_with_errno("listen");
    group.barrier();
    if (!first_) {
      if (::connect(made, where, length) != 0) fail_with_errno("connect");
      files_.push_back(made);
      return;
    }
    for (int r = 1; r < group.size(); ++r) {
      files_.push_back(::accept4(made, nullptr, nullptr, SOCK_CLOEXEC));
      if (files_.back() < 0) fail_with_errno("accept");
    }
    ::close(made);
  }
  ~SharedInput() {
    for (const int file : files_) ::close(file);
  }
  SharedInput(const SharedInput&) = delete;
  SharedInput& operator=(const SharedInput&) = delete;

  bool read(std::string& line) {
    if (first_) {
      if (!std::getline(std::cin, line)) return false;
      for (const int file : files_) {
        const std::string text = line + '\n';
        if (::send(file, text.data(), text.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(text.size())) return false;
      }
      return true;
    }
    line.clear();
    for (char c = 0; ::recv(files_[0], &c, 1, 0) == 1; line += c) {
      if (c == '\n') return true;
    }
    return false;
  }

 private:
  bool first_;
  std::vector<int> files_;
};

}  // namespace

void serve_ranks() {
  dist::ProcessGroup group = dist::ProcessGroup::init({.timeout = std::chrono::minutes(5)});
  SharedInput input(group);
  serve(
      parallel_cases(group), [&input](std::string& line) { return input.read(line); }, group.rank() == 0);
}

}  // namespace halfstep::bench
