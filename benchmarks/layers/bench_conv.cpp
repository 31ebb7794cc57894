// SPDX-License-Identifier: Apache-2.0
// ResNet-50 or MobileNetV2 layer by layer: what each convolution and each pass between them takes, what it moves, and
// what the machine could do at most in that moment. docs/reference/performance.md says how to read it.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <exception>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "benchmarks/layers/bench_conv.h"
#include "benchmarks/server/server.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/conv.h"
#include "halfstep/ops/norm_act.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/pool.h"
#include "halfstep/ops/random.h"
#include "halfstep/runtime/machine.h"
#include "halfstep/runtime/machine_limits.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::bench {

double seconds_of(const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

Tensor image(std::int64_t batch, std::int64_t channels, std::int64_t size, DType dtype) {
  return randn({batch, channels, size, size}).to(dtype).contiguous(MemoryFormat::channels_last);
}

std::string title(const ConvLayer& l) {
  return fmt::format("{0}x{0}, {1} -> {2}, {3}x{3}{4}{5}", l.size, l.in, l.out, l.kernel,
                     l.stride == 1 ? "" : fmt::format(" / {}", l.stride), l.groups > 1 ? ", depthwise" : "");
}

namespace {

const std::vector<Network>& networks() {
  static const std::vector<Network> all = {
      {"resnet50", "ResNet-50", resnet50_convolutions(), resnet50_norms(), 64, 2048},
      {"mobilenet_v2", "MobileNetV2", mobilenet_v2_convolutions(), mobilenet_v2_norms(), 0, 1280}};
  return all;
}

/// What the machine can do at most, measured again beside every time that is compared with it.
class Limits {
 public:
  /// `in_memory`: operands are never in the caches.
  explicit Limits(bool in_memory) : in_memory_(in_memory) {
    std::vector<Case> cases;
    add_machine_cases(cases);
    for (const Case& c : cases) {
      if (c.name == "machine/multiply_add/f32") {
        compute_ = c.prepare();
        operations_ = c.operations;
      } else if (c.name == "machine/stream/8MB") {
        cache_ = c.prepare();
        cache_bytes_ = c.bytes;
      } else if (c.name == "machine/stream/512MB") {
        memory_ = c.prepare();
        memory_bytes_ = c.bytes;
      }
    }
  }

  /// The peak is that of products of a dtype from here on.
  void use(DType dtype) {
    constexpr std::int64_t kRounds = 200'000;
    unit_ = dtype == f32 ? Prepared{} : Prepared{[dtype] { run_multiply_adds(dtype, kRounds); }};
    if (unit_.run) unit_operations_ = run_multiply_adds(dtype, kRounds);
  }

  void measure() {
    peak = rate(compute_, operations_, 4);
    if (unit_.run) peak = std::max(peak, rate(unit_, unit_operations_, 4));
    cache = rate(cache_, cache_bytes_, 8);
    memory = rate(memory_, memory_bytes_, 2);
  }
  double bandwidth(double bytes) const { return bytes <= kCacheSet && !in_memory_ ? cache : memory; }
  bool by_bytes(double operations, double bytes) const { return bytes / bandwidth(bytes) > operations / peak; }
  /// The least seconds for so many operations and bytes moved.
  double seconds(double operations, double bytes) const {
    return std::max(operations / peak, bytes / bandwidth(bytes));
  }

  double peak = 0, cache = 0, memory = 0;

 private:
  static constexpr double kCacheSet = 32e6;  // as benchmarks/harness/stats.py

  static double rate(const Prepared& prepared, double work, int times) {
    double best = 1e9;
    for (int i = 0; i < times; ++i) best = std::min(best, seconds_of(prepared.run));
    return work / best;
  }

  const bool in_memory_;
  Prepared compute_, unit_, cache_, memory_;
  double operations_ = 0, unit_operations_ = 0, cache_bytes_ = 0, memory_bytes_ = 0;
};

/// One thing that is timed. `operations` and `bytes` are those of one run.
struct Part {
  std::string name;
  std::function<void()> run;
  double operations = 0, bytes = 0;
};

struct Measured {
  double seconds = 0, limit = 0, of_limit = 0;
  bool by_bytes = false;
};

std::vector<Measured> measure(const std::vector<Part>& parts, Limits& limits, int turns, std::size_t sets) {
  std::vector<std::vector<double>> seconds(parts.size()), least(parts.size()), shares(parts.size());
  for (const Part& part : parts) {
    // Weights are reordered, blocks chosen, memory taken.
    for (std::size_t i = 0; i < sets; ++i) part.run();
  }
  for (int turn = 0; turn < turns; ++turn) {
    limits.measure();
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const double limit = limits.seconds(parts[i].operations, parts[i].bytes);
      // The limits went through more memory than the caches hold. In a step, what fits them is there: the layer before
      // has just written it. With several sets of operands this call uses another one.
      parts[i].run();
      const double took = seconds_of(parts[i].run);
      seconds[i].push_back(took);
      least[i].push_back(limit);
      shares[i].push_back(limit / took);
    }
  }
  std::vector<Measured> result;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    result.push_back({median(seconds[i]), median(least[i]), median(shares[i]),
                      limits.by_bytes(parts[i].operations, parts[i].bytes)});
  }
  return result;
}

/// What a group of rows takes in a step of the network.
struct Total {
  std::string name;
  double seconds = 0, limit = 0, operations = 0, bytes = 0;
};

void add(std::vector<Total>& totals, const std::string& name, int count, const Part& part, const Measured& measured) {
  auto found = std::find_if(totals.begin(), totals.end(), [&](const Total& total) { return total.name == name; });
  if (found == totals.end()) found = totals.insert(totals.end(), {name});
  found->seconds += count * measured.seconds;
  found->limit += count * measured.limit;
  found->operations += count * part.operations;
  found->bytes += count * part.bytes;
}

void convolutions(const Options& options, DType dtype, Limits& limits, std::vector<Total>& totals) {
  const double n = static_cast<double>(options.batch), width = static_cast<double>(item_size(dtype));
  fmt::print("Convolutions of {} in {}, batch {}\n", options.network->name, name(dtype), options.batch);
  fmt::print("{:>3} {:<53} {:>7} {:>6}", "", "image, channels, kernel", "GFLOP", "MB");
  for (const char* part : {"forward", "input gradient", "weight gradient"}) fmt::print(" | {:>24}", part);
  fmt::print("\n{:>3} {:<53} {:>7} {:>6}", "", "", "", "");
  for (int i = 0; i < 3; ++i) fmt::print(" | {:>7} {:>6} {:>9}", "ms", "GF/s", "of limit");
  fmt::print("\n");
  const NoGrad no_grad;
  for (const ConvLayer& layer : options.network->convolutions) {
    const double operations = 2 * n * layer.multiply_adds();
    const double activations = n * (layer.input() + layer.output()) * width;
    struct Operands {
      Tensor x, g, result;  // the last result, kept until this set's turn comes again
    };
    std::vector<Operands> sets(options.sets(activations));
    sets[0] = {image(options.batch, layer.in, layer.size, dtype),
               image(options.batch, layer.out, layer.out_size(), dtype), Tensor()};
    for (std::size_t i = 1; i < sets.size(); ++i) sets[i] = {sets[0].x.clone(), sets[0].g.clone(), Tensor()};
    std::size_t turn = 0;
    const auto next = [&]() -> Operands& {
      Operands& o = sets[turn++ % sets.size()];
      o.result = Tensor();  // the next one takes its memory
      return o;
    };
    const Tensor w = (randn({layer.out, layer.in / layer.groups, layer.kernel, layer.kernel}) * 0.05)
                         .to(dtype)
                         .contiguous(MemoryFormat::channels_last);
    const ConvFuncOptions conv{.stride = {layer.stride}, .padding = {layer.padding}, .groups = layer.groups};
    ConvAttributes attributes;
    attributes.stride[0] = attributes.stride[1] = layer.stride;
    attributes.padding[0] = attributes.padding[1] = layer.padding;
    attributes.groups = layer.groups;
    std::vector<Part> parts = {{"forward",
                                [&] {
                                  Operands& o = next();
                                  o.result = conv2d(o.x, w, {}, conv);
                                },
                                operations, activations + layer.weight() * width}};
    const bool first = layer.in == 3;  // nothing is trained below it
    if (!first) {
      parts.push_back({"input gradient",
                       [&] {
                         Operands& o = next();
                         ConvAttributes a = attributes;
                         a.sizes = int_list(o.x.sizes());
                         o.result = call(*find_op("conv2d_backward_input"), {&o.g, &w}, a);
                       },
                       operations, activations + layer.weight() * width});
    }
    parts.push_back({"weight gradient",
                     [&] {
                       Operands& o = next();
                       ConvAttributes a = attributes;
                       a.sizes = int_list(w.sizes());
                       a.dtype = dtype_code(f32);  // as autocast asks for it: the weight is float32
                       o.result = call(*find_op("conv2d_backward_weight"), {&o.g, &o.x, &w}, a);
                     },
                     operations, activations + layer.weight() * 4});
    const std::vector<Measured> measured = measure(parts, limits, options.turns, sets.size());
    fmt::print("{:>2}x {:<53} {:>7.2f} {:>6.1f}", layer.count, title(layer), operations * 1e-9, parts[0].bytes * 1e-6);
    std::size_t at = 0;
    for (int column = 0; column < 3; ++column) {
      if (first && column == 1) {
        fmt::print(" | {:>24}", "-");
        continue;
      }
      const Measured& m = measured[at];
      fmt::print(" | {:>7.2f} {:>6.0f} {:>7.0f}% {}", m.seconds * 1e3, operations / m.seconds * 1e-9, m.of_limit * 100,
                 m.by_bytes ? 'm' : 'c');
      add(totals, (layer.groups > 1 ? "depthwise, " : "convolutions, ") + parts[at].name, layer.count, parts[at], m);
      ++at;
    }
    fmt::print("\n");
    std::fflush(stdout);
  }
}

/// A pass and its backward pass, as rows of one table.
struct Pass {
  int count;
  std::string label, group;
  std::function<Tensor()> forward;  ///< records its history when gradients are on
  std::vector<Tensor> inputs;       ///< whose gradients are asked for
  double forward_bytes, backward_bytes;
};

// `make` makes its operands.
void run_pass(const Options& options, const std::function<Pass()>& make, Limits& limits, std::vector<Total>& totals) {
  struct Operands {
    Pass pass;
    Tensor y, gradient, result;
    std::vector<Tensor> gradients;
  };
  std::vector<Operands> sets;
  do {
    Operands& o = sets.emplace_back(make());
    o.y = o.pass.forward();
    o.gradient = randn(o.y.sizes())
                     .to(o.y.dtype())
                     .contiguous(o.y.dim() == 4 ? MemoryFormat::channels_last : MemoryFormat::contiguous);
  } while (sets.size() < options.sets(sets.front().pass.forward_bytes));
  const Pass& pass = sets.front().pass;
  std::size_t turn = 0;
  const auto next = [&]() -> Operands& {
    Operands& o = sets[turn++ % sets.size()];
    o.result = Tensor();
    o.gradients.clear();
    return o;
  };
  const std::vector<Part> parts = {{"forward",
                                    [&] {
                                      const NoGrad no_grad;
                                      Operands& o = next();
                                      o.result = o.pass.forward();
                                    },
                                    0, pass.forward_bytes},
                                   {"backward",
                                    [&] {
                                      Operands& o = next();
                                      o.gradients = grad({o.y}, o.pass.inputs,
                                                         {.grad_outputs = {o.gradient}, .retain_graph = true});
                                    },
                                    0, pass.backward_bytes}};
  const std::vector<Measured> measured = measure(parts, limits, options.turns, sets.size());
  fmt::print("{:>2}x {:<36}", pass.count, pass.label);
  for (std::size_t i = 0; i < 2; ++i) {
    const Measured& m = measured[i];
    fmt::print(" | {:>7.1f} {:>7.2f} {:>6.1f} {:>8.0f}%", parts[i].bytes * 1e-6, m.seconds * 1e3,
               parts[i].bytes / m.seconds * 1e-9, m.of_limit * 100);
    add(totals, pass.group + ", " + parts[i].name, pass.count, parts[i], m);
  }
  fmt::print("\n");
  std::fflush(stdout);
}

void passes(const Options& options, DType dtype, Limits& limits, std::vector<Total>& totals) {
  const std::int64_t n = options.batch;
  const double width = static_cast<double>(item_size(dtype));
  fmt::print("\nPasses between the convolutions in {}, batch {}\n", name(dtype), n);
  fmt::print("{:>3} {:<36} | {:>32} | {:>32}\n{:>3} {:<36}", "", "", "forward", "backward", "", "");
  for (int i = 0; i < 2; ++i) fmt::print(" | {:>7} {:>7} {:>6} {:>9}", "MB", "ms", "GB/s", "of limit");
  fmt::print("\n");
  const auto leaf = [](Tensor tensor) { return tensor.requires_grad_(), tensor; };
  for (const NormLayer& layer : options.network->norms) {
    const double bytes = static_cast<double>(n * layer.channels * layer.size * layer.size) * width;
    // Forward: the input is read for the statistics and again for the result, which is written. Backward: gradient,
    // input and (under ReLU) result are read for the sums and again for the gradients, which are written.
    const bool rectified = layer.activation != Activation::none;
    const double more = layer.residual ? 1 : 0, read = rectified ? 3 : 2;
    const char* const after = layer.activation == Activation::relu6 ? ", ReLU6" : rectified ? ", ReLU" : "";
    const auto make = [&] {
      const Tensor x = leaf(image(n, layer.channels, layer.size, dtype));
      const Tensor residual = layer.residual ? leaf(image(n, layer.channels, layer.size, dtype)) : Tensor();
      const Tensor weight = leaf(randn({layer.channels})), bias = leaf(randn({layer.channels}));
      std::vector<Tensor> inputs = {x, weight, bias};
      if (layer.residual) inputs.push_back(residual);
      const auto forward = [=] {
        return batch_norm_act(x, {.weight = weight, .bias = bias, .training = true}, layer.activation, residual);
      };
      return Pass{.count = layer.count,
                  .label = fmt::format("{0}x{0}, {1}: batch norm{2}{3}", layer.size, layer.channels,
                                       layer.residual ? ", sum" : "", after),
                  .group = "batch norms",
                  .forward = forward,
                  .inputs = inputs,
                  .forward_bytes = (3 + more) * bytes,
                  .backward_bytes = (2 * read + 1 + more) * bytes};
    };
    run_pass(options, make, limits, totals);
  }
  if (options.network->pooled > 0) {
    const std::int64_t channels = options.network->pooled;
    const auto make = [&] {
      const Tensor wide = leaf(image(n, channels, 112, dtype));
      const double bytes = 1.25 * static_cast<double>(wide.numel()) * width;
      return Pass{.count = 1,
                  .label = fmt::format("112x112, {}: max pooling 3x3 / 2", channels),
                  .group = "pooling",
                  .forward = [=] { return max_pool2d(wide, {3}, {.stride = {2}, .padding = {1}}); },
                  .inputs = {wide},
                  .forward_bytes = bytes,
                  .backward_bytes = bytes};
    };
    run_pass(options, make, limits, totals);
  }
  const auto mean = [&] {
    const Tensor last = leaf(image(n, options.network->last, 7, dtype));
    const double bytes = static_cast<double>(last.numel()) * width;
    return Pass{.count = 1,
                .label = fmt::format("7x7, {}: mean of the image", options.network->last),
                .group = "pooling",
                .forward = [=] { return adaptive_avg_pool2d(last, {1}); },
                .inputs = {last},
                .forward_bytes = bytes,
                .backward_bytes = bytes};
  };
  run_pass(options, mean, limits, totals);
  // What the fused pass saves: a sum and a ReLU of their own. Not part of the network's totals.
  std::vector<Total> beside;
  const double bytes = static_cast<double>(n * 256 * 56 * 56) * width;
  const auto sum = [&] {
    const Tensor a = leaf(image(n, 256, 56, dtype)), b = leaf(image(n, 256, 56, dtype));
    return Pass{0, "56x56, 256: sum of two, on its own", "", [=] { return a + b; }, {a, b}, 3 * bytes, 0};
  };
  run_pass(options, sum, limits, beside);
  const auto rectify = [&] {
    const Tensor a = leaf(image(n, 256, 56, dtype));
    return Pass{0, "56x56, 256: ReLU, on its own", "", [=] { return relu(a); }, {a}, 2 * bytes, 3 * bytes};
  };
  run_pass(options, rectify, limits, beside);
}

void run(const Options& options) {
  if (options.threads > 0) set_num_threads(options.threads);
  manual_seed(1);
  Limits limits(options.memory > 0);
  limits.measure();
  const MachineInfo info = machine();
  fmt::print(
      "{}, {}, {} threads; now {:.0f} GFLOP/s in float32, {:.1f} GB/s on 8 MB, {:.1f} GB/s on 512 MB\n"
      "Times are medians of {} turns; `of limit` is the median of limits over times, both of one turn; c: computing is "
      "the limit, m: memory.\n",
      info.cpu, info.isa, info.threads, limits.peak * 1e-9, limits.cache * 1e-9, limits.memory * 1e-9, options.turns);
  if (options.memory > 0) {
    fmt::print("Each line goes through about {} MB of images and results in turn.\n", options.memory);
  }
  for (const DType dtype : options.dtypes) {
    std::vector<Total> totals;
    limits.use(dtype);
    limits.measure();
    fmt::print("\nPeak of products in {}: {:.0f} GFLOP/s\n", name(dtype), limits.peak * 1e-9);
    convolutions(options, dtype, limits, totals);
    passes(options, dtype, limits, totals);
    fmt::print("\nIn a step of the network in {}\n{:<32} {:>9} {:>9} {:>9} {:>7} {:>7} {:>7}\n", name(dtype), "", "ms",
               "limit ms", "of limit", "GFLOP", "GF/s", "GB");
    Total all{"all of it"};
    const auto line = [](const Total& t) {
      fmt::print("{:<32} {:>9.1f} {:>9.1f} {:>8.0f}% {:>7.1f} {:>7.0f} {:>7.2f}\n", t.name, t.seconds * 1e3,
                 t.limit * 1e3, t.limit / t.seconds * 100, t.operations * 1e-9, t.operations / t.seconds * 1e-9,
                 t.bytes * 1e-9);
    };
    for (const Total& total : totals) {
      line(total);
      all.seconds += total.seconds;
      all.limit += total.limit;
      all.operations += total.operations;
      all.bytes += total.bytes;
    }
    line(all);
    std::fflush(stdout);
  }
}

bool number(std::string_view text, std::int64_t low, std::int64_t high, auto& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value >= low && value <= high;
}

bool parse(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; i += 2) {
    if (std::string_view(argv[i]) == "--implementations") {
      options.implementations = true;
      --i;
      continue;
    }
    if (i + 1 == argc) return false;
    const std::string_view flag = argv[i], value = argv[i + 1];
    if (flag == "--network") {
      const auto found = std::find_if(networks().begin(), networks().end(),
                                      [&](const Network& network) { return value == network.flag; });
      if (found == networks().end()) return false;
      options.network = &*found;
    } else if (flag == "--batch") {
      if (!number(value, 1, 4096, options.batch)) return false;
    } else if (flag == "--turns") {
      if (!number(value, 1, 1000, options.turns)) return false;
    } else if (flag == "--threads") {
      if (!number(value, 1, 4096, options.threads)) return false;
    } else if (flag == "--memory") {
      if (!number(value, 0, 1 << 20, options.memory)) return false;
    } else if (flag == "--weight-by") {
      if (value != "products" && value != "pairs" && value != "tiles") return false;
      options.weight_by = value;
    } else if (flag == "--dtype") {
      const std::vector<DType> all = {f32, bf16, f16};
      const auto found = std::find_if(all.begin(), all.end(), [&](DType d) { return value == name(d); });
      if (found == all.end()) return false;
      options.dtypes = {*found};
    } else {
      return false;
    }
  }
  return options.memory == 0 || (!options.implementations && options.weight_by.empty());
}

}  // namespace
}  // namespace halfstep::bench

int main(int argc, char** argv) {
  halfstep::bench::Options options;
  options.network = halfstep::bench::networks().data();
  if (!halfstep::bench::parse(argc, argv, options)) {
    std::fprintf(
        stderr,
        "usage: %s [--network resnet50|mobilenet_v2] [--batch N] [--dtype f32|bf16|f16] [--turns N] [--threads N] "
        "[--memory MB | --implementations | --weight-by products|pairs|tiles]\n",
        argv[0]);
    return 2;
  }
  try {
    if (options.implementations) {
      for (const auto& network : halfstep::bench::networks()) {
        halfstep::bench::list_implementations(options, network.name, network.convolutions);
      }
      halfstep::bench::list_implementations(options, "ResNet-18 for CIFAR",
                                            halfstep::bench::resnet18_cifar_convolutions());
    } else if (!options.weight_by.empty()) {
      halfstep::bench::compare_weight_gradients(options);
    } else {
      halfstep::bench::run(options);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_conv: %s\n", error.what());
    return 1;
  }
  return 0;
}
