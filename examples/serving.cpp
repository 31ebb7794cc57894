// SPDX-License-Identifier: Apache-2.0
// Serving a network: it is loaded from a file, becomes a session, and two threads call it at once.
//
//     serving
//     serving weights.safetensors    # of the network below
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "halfstep/halfstep.h"

using namespace halfstep;

namespace {

nn::Sequential make_network() {
  return nn::Sequential{nn::Conv2d{{.in = 1, .out = 16, .kernel = {3}, .stride = {2}, .padding = 1, .bias = false}},
                        nn::BatchNorm2d{{.channels = 16}}, nn::ReLU{}, nn::Flatten{},
                        nn::Linear{{.in = 16 * 14 * 14, .out = 10}}};
}

}  // namespace

int main(int argc, char** argv) try {
  bool quick = false;
  std::string path;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--quick") == 0) {
      quick = true;
    } else {
      path = argv[i];
    }
  }
  const bool own = path.empty();
  if (own) {
    // A file to load: fresh weights, as somebody's training would have left better ones.
    manual_seed(1);
    path = (std::filesystem::temp_directory_path() / "halfstep_serving.safetensors").string();
    io::save_safetensors(path, make_network().state_dict());
  }
  const nn::Sequential net = make_network();
  net.load_state_dict(io::load_safetensors(path).tensors);
  if (own) std::filesystem::remove(path);

  // Bytes come in; the session normalises them.
  const infer::Session session(net, zeros({1, 1, 28, 28}),
                               {.pictures = infer::Pictures{.mean = {0.1307F}, .std = {0.3081F}}});

  const int requests = quick ? 50 : 2000;
  std::atomic<int> served{0};
  const auto start = std::chrono::steady_clock::now();
  const auto serve = [&](int number) {
    // Each thread has its own pictures and its own place for results: calls take no further memory.
    Tensor pictures = full({4, 1, 28, 28}, 40 * (number + 1), {.dtype = u8});
    Tensor logits = empty({4, 10});
    for (int i = 0; i < requests; ++i) {
      session.run_into({&pictures, 1}, {&logits, 1});
      ++served;
    }
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) threads.emplace_back(serve, t);
  for (std::thread& t : threads) t.join();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const infer::SessionStats stats = session.stats();
  std::cout << served << " requests of 4 pictures in " << seconds << " s; " << stats.planned << " plans\n";
  return served == 2 * requests && stats.planned <= 2 ? 0 : 1;
} catch (const std::exception& e) {
  std::cerr << e.what() << '\n';
  return 1;
}
