// SPDX-License-Identifier: Apache-2.0
#include "halfstep/dist/power_sgd.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/random.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/dist/orthonormal_internal.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::dist {
namespace {

constexpr const char* kPowerSGD = "power_sgd";
constexpr const char* kIteration = "iteration";
constexpr std::string_view kError = "error.", kFactor = "q.";

// What is kept of a parameter from pass to pass.
struct Memory {
  Tensor error;  // [n, m], without the loss scale; undefined: zeros
  Tensor q;      // [m, rank] as it was reduced; undefined: to be drawn
};

// A gradient on its way.
struct Matrix {
  std::string name;
  Tensor gradient;     // a part of the bucket, which the mean goes to
  Tensor own;          // [n, m], with what the last pass left out
  Tensor p, q, own_q;  // [n, rank]; [m, rank], of all ranks and of this one
  std::int64_t rank = 1;
};

struct Flight {
  GradBucket bucket;
  ProcessGroup group;
  Tensor whole;  // of a pass that compresses nothing: the bucket's buffer
  std::vector<Tensor> plain;
  std::vector<Matrix> matrices;
  Tensor first, second;  // plain gradients and all p; all q
  Work sent;
  bool halfway = false;  // the second message is on its way
  bool finite = true;
};

std::uint64_t hash_of_text(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

bool all_finite(const Tensor& t) { return t.numel() == 0 || std::isfinite(sum(t * 0).item<double>()); }

template <class F>
decltype(auto) with_type(const Tensor& t, F&& f) {
  return t.dtype() == f64 ? f(double{}) : f(float{});
}
template <class T>
T* elements_of(const Tensor& t) {
  return static_cast<T*>(t.impl()->data());
}

// On a device, by way of the host, where it is the same on all ranks.
void make_orthonormal(const Tensor& matrix, const std::function<double()>& replace = {}) {
  const Tensor here = matrix.to(Device{}).contiguous();
  with_type(here, [&](auto zero) {
    using T = decltype(zero);
    detail::orthonormalize<T>({elements_of<T>(here), static_cast<std::size_t>(here.numel())}, here.size(0),
                              here.size(1), replace);
  });
  if (Tensor to = matrix; !to.is_same(here)) to.copy_(here);
}

// p q^T, into `out`; p own_q^T is taken away from `own`, where there is one.
void decompress(const Matrix& m, const Tensor& out, bool keep_error) {
  if (!out.device().is_cpu()) {
    Tensor(out).copy_(mm(m.p, m.q.t()));
    if (keep_error) Tensor(m.own).sub_(mm(m.p, m.own_q.t()));
    return;
  }
  const Tensor qt = m.q.t().contiguous(), own_qt = keep_error ? m.own_q.t().contiguous() : Tensor();
  const std::int64_t n = out.size(0), width = out.size(1);
  with_type(out, [&](auto zero) {
    using T = decltype(zero);
    T* const to = elements_of<T>(out);
    T* const own = keep_error ? elements_of<T>(m.own) : nullptr;
    const T* const p = elements_of<T>(m.p);
    const T* const q = elements_of<T>(qt);
    const T* const mine = keep_error ? elements_of<T>(own_qt) : nullptr;
    const std::int64_t grain = std::max<std::int64_t>(1, 16384 / std::max<std::int64_t>(width, 1));
    parallel_for(n, grain, [&](std::int64_t begin, std::int64_t end) {
      std::vector<T> row(own ? static_cast<std::size_t>(width) : 0);
      for (std::int64_t i = begin; i < end; ++i) {
        detail::product_row(p + i * m.rank, q, m.rank, width, to + i * width);
        if (!own) continue;
        detail::product_row(p + i * m.rank, mine, m.rank, width, row.data());
        for (std::int64_t j = 0; j < width; ++j) own[i * width + j] -= row[static_cast<std::size_t>(j)];
      }
    });
  });
}

}  // namespace

struct PowerSGD::Impl {
  explicit Impl(const PowerSGDOptions& o) : options(o) {
    if (o.rank < 1) fail<Error>("{}: expected a rank of at least 1, got {}", kPowerSGD, o.rank);
    if (o.start < 0) fail<Error>("{}: expected a start of at least 0, got {}", kPowerSGD, o.start);
    if (!(o.min_compression_rate > 0)) {
      fail<Error>("{}: expected a min_compression_rate above 0, got {}", kPowerSGD, o.min_compression_rate);
    }
  }

  void start(const GradBucket& bucket, const ProcessGroup& group);
  void finish(std::size_t index);
  void send_second(Flight& flight);
  Tensor factor(const std::string& name, std::int64_t rows, std::int64_t rank, const TensorOptions& like);
  // Standard normal numbers that belong to a parameter and a pass.
  std::function<double()> draws(const std::string& name, std::uint64_t purpose) const;
  void end_pass();

  const PowerSGDOptions options;
  std::function<double()> loss_scale;
  std::int64_t iteration = 0;
  std::map<std::string, Memory> memory;
  PowerSGDStats stats;

  std::vector<Flight> flights;                          // of this pass, by bucket
  std::vector<std::pair<std::string, Memory>> learned;  // in this pass; taken over when all of it was finite
  double scale = 1;                                     // of this pass
  bool finite = true;
};

std::function<double()> PowerSGD::Impl::draws(const std::string& name, std::uint64_t purpose) const {
  const std::uint64_t seed = derive_seed(options.seed, hash_of_text(name), purpose);
  return [stream = std::make_shared<RandomStream>(seed)] { return stream->normal(); };
}

// The columns that P is sought with.
Tensor PowerSGD::Impl::factor(const std::string& name, std::int64_t rows, std::int64_t rank,
                              const TensorOptions& like) {
  const auto pass = static_cast<std::uint64_t>(iteration);
  if (options.warm_start) {
    const auto known = memory.find(name);
    // (Those of a checkpoint may have another number of columns.)
    if (known != memory.end() && known->second.q.defined() && known->second.q.sizes() == Shape{rows, rank}) {
      Tensor q = known->second.q.to(like.device, like.dtype).clone();
      make_orthonormal(q, draws(name, 2 * pass + 1));
      return q;
    }
  }
  const auto draw = draws(name, 2 * pass);
  std::vector<double> values(static_cast<std::size_t>(rows * rank));
  for (double& v : values) v = draw();
  const Tensor q = tensor(values, {rows, rank}, {.dtype = like.dtype, .device = Device{}}).to(like.device);
  make_orthonormal(q, draw);
  return q;
}

void PowerSGD::Impl::start(const GradBucket& bucket, const ProcessGroup& group) {
  const NoGrad no_grad;
  if (bucket.index == 0) {
    flights.clear();  // of a pass that threw
    learned.clear();
    finite = true;
    scale = loss_scale ? loss_scale() : 1;
    if (!(scale > 0) || !std::isfinite(scale))
      fail<Error>("{}: expected a loss scale above 0, got {}", kPowerSGD, scale);
    if (iteration >= options.start) stats = {};
  }
  Flight flight{.bucket = bucket,
                .group = group,
                .whole = {},
                .plain = {},
                .matrices = {},
                .first = {},
                .second = {},
                .sent = {}};
  if (iteration < options.start) {
    flight.whole = bucket.buffer;
    flight.sent =
        flight.group.all_reduce(bucket.buffer, ReduceOp::mean, fmt::format("gradients of bucket {}", bucket.index));
    flights.push_back(std::move(flight));
    return;
  }
  const DType dtype = accumulate_dtype(bucket.buffer.dtype());
  const TensorOptions like{.dtype = dtype, .device = bucket.buffer.device()};
  std::vector<Tensor> parts;
  for (std::size_t i = 0; i < bucket.gradients.size(); ++i) {
    const Tensor& g = bucket.gradients[i];
    stats.elements += g.numel();
    const std::int64_t n = g.dim() > 0 ? g.size(0) : 1, m = n > 0 ? g.numel() / n : 0,
                       rank = std::min({n, m, static_cast<std::int64_t>(options.rank)});
    if (g.dim() < 2 ||
        !(static_cast<double>((n + m) * rank) * options.min_compression_rate < static_cast<double>(n * m))) {
      flight.plain.push_back(g);
      parts.push_back(g.to(dtype).reshape({g.numel()}));
      continue;
    }
    Matrix matrix{.name = bucket.names[i], .gradient = g, .own = {}, .p = {}, .q = {}, .own_q = {}, .rank = rank};
    matrix.own = g.to(dtype).reshape({n, m}).clone();
    if (const auto known = memory.find(matrix.name); known != memory.end() && known->second.error.defined()) {
      const Tensor& error = known->second.error;
      if (error.sizes() != matrix.own.sizes()) {
        fail<Error>("{}: expected {} of error.{} in the state that was loaded, got {}", kPowerSGD,
                    matrix.own.sizes().str(), matrix.name, error.sizes().str());
      }
      matrix.own.add_(error.to(like.device, dtype) * scale);
    }
    matrix.q = factor(matrix.name, m, rank, like);
    matrix.p = mm(matrix.own, matrix.q);
    stats.sent += (n + m) * rank;
    flight.matrices.push_back(std::move(matrix));
  }
  for (const Tensor& t : parts) stats.sent += t.numel();
  for (const Matrix& m : flight.matrices) parts.push_back(m.p.reshape({m.p.numel()}));
  flight.first = cat(parts, 0);
  flight.sent = flight.group.all_reduce(flight.first, ReduceOp::mean,
                                        fmt::format("gradients and P of bucket {}: {}", bucket.index, bucket.names[0]));
  flights.push_back(std::move(flight));
}

// What came of the first message; the second one is on its way.
void PowerSGD::Impl::send_second(Flight& flight) {
  flight.halfway = true;
  flight.sent.wait();
  flight.finite = all_finite(flight.first);
  std::int64_t at = 0;
  for (Tensor& g : flight.plain) {
    g.copy_(flight.first.narrow(0, at, g.numel()).view(g.sizes()));
    at += g.numel();
  }
  if (flight.matrices.empty()) return;
  std::vector<Tensor> parts;
  for (Matrix& m : flight.matrices) {
    m.p = flight.first.narrow(0, at, m.p.numel()).view(m.p.sizes());
    at += m.p.numel();
    // (Of what isn't finite something comes out that nobody uses.)
    make_orthonormal(m.p);
    m.own_q = mm(m.own.t(), m.p);
    parts.push_back(m.own_q.reshape({m.own_q.numel()}));
  }
  flight.second = cat(parts, 0);
  flight.sent = flight.group.all_reduce(flight.second, ReduceOp::mean,
                                        fmt::format("Q of bucket {}: {}", flight.bucket.index, flight.bucket.names[0]));
}

void PowerSGD::Impl::finish(std::size_t index) {
  const NoGrad no_grad;
  Flight& flight = flights.at(index);
  if (flight.whole.defined()) {
    flight.sent.wait();
  } else {
    // Those of all buckets, so that each waits for its own while others are on their way.
    for (Flight& f : flights) {
      if (!f.halfway) send_second(f);
    }
    std::int64_t at = 0;
    if (!flight.matrices.empty()) {
      flight.sent.wait();
      flight.finite = flight.finite && all_finite(flight.second);
    }
    for (Matrix& m : flight.matrices) {
      m.q = flight.second.narrow(0, at, m.own_q.numel()).view(m.own_q.sizes());
      at += m.own_q.numel();
      if (!flight.finite) {
        // The same on all ranks: they have seen the same messages.
        Tensor(m.gradient).copy_(full({}, std::numeric_limits<double>::quiet_NaN(), {.device = m.gradient.device()}));
        continue;
      }
      const Tensor out = empty(m.own.sizes(), {.dtype = m.own.dtype(), .device = m.own.device()});
      decompress(m, out, options.error_feedback);
      Tensor(m.gradient).copy_(out.view(m.gradient.sizes()));
      Memory now;
      if (options.error_feedback) now.error = scale == 1 ? m.own : m.own / scale;
      if (options.warm_start) now.q = m.q.clone();
      learned.emplace_back(m.name, std::move(now));
    }
    finite = finite && flight.finite;
    flight.matrices.clear();
  }
  if (flight.bucket.is_last) end_pass();
}

void PowerSGD::Impl::end_pass() {
  if (finite) {
    for (auto& [name, now] : learned) memory[name] = std::move(now);
  }
  learned.clear();
  flights.clear();
  ++iteration;
}

PowerSGD::PowerSGD(const PowerSGDOptions& options) : impl_(std::make_shared<Impl>(options)) {}

CommunicationHook PowerSGD::hook() const {
  return [impl = impl_](const GradBucket& bucket, const ProcessGroup& group) -> std::function<void()> {
    if (!is_floating(bucket.buffer.dtype())) {
      fail<DTypeError>("{}: expected floating-point gradients, got {}", kPowerSGD, name(bucket.buffer.dtype()));
    }
    impl->start(bucket, group);
    return [impl, index = static_cast<std::size_t>(bucket.index)] { impl->finish(index); };
  };
}

const PowerSGDOptions& PowerSGD::options() const { return impl_->options; }
PowerSGDStats PowerSGD::stats() const { return impl_->stats; }
void PowerSGD::follow(std::function<double()> loss_scale) { impl_->loss_scale = std::move(loss_scale); }

NamedTensors PowerSGD::state_dict(ProcessGroup& group) const {
  const NoGrad no_grad;
  const bool first = group.rank() == 0;
  NamedTensors state;
  if (first) state.push_back({kIteration, tensor_from_integers({impl_->iteration}, {}, {.device = Device{}})});
  for (const auto& [name, kept] : impl_->memory) {
    if (first && kept.q.defined()) state.push_back({std::string(kFactor) + name, kept.q.to(Device{}).clone()});
    if (!kept.error.defined()) continue;
    const Tensor own = kept.error.to(Device{});
    const std::int64_t n = own.size(0), m = own.size(1);
    const Tensor all = first ? empty({group.size() * n, m}, {.dtype = own.dtype(), .device = Device{}}) : Tensor();
    group.gather(all, own, 0, "what compression left out: " + name).wait();
    if (first) state.push_back({std::string(kError) + name, all.view({group.size(), n, m})});
  }
  return state;
}

void PowerSGD::load_state_dict(const NamedTensors& state, const ProcessGroup& group) {
  const NoGrad no_grad;
  std::map<std::string, Memory> memory;
  std::optional<std::int64_t> iteration;
  const auto check = [](const NamedTensor& t, int dim) {
    if (is_floating(t.tensor.dtype()) && t.tensor.dim() == dim && t.tensor.numel() > 0 && all_finite(t.tensor)) return;
    fail<Error>("{}: expected finite numbers of {} dimensions for {}, got {} {}", kPowerSGD, dim, t.name,
                halfstep::name(t.tensor.dtype()), t.tensor.sizes().str());
  };
  for (const NamedTensor& t : state) {
    if (t.name == kIteration && t.tensor.numel() == 1) {
      iteration = t.tensor.item<std::int64_t>();
    } else if (t.name.starts_with(kFactor)) {
      check(t, 2);
      const Tensor& q = t.tensor;
      if (impl_->options.warm_start) memory[t.name.substr(kFactor.size())].q = q.clone();
    } else if (t.name.starts_with(kError)) {
      check(t, 3);
      const std::int64_t ranks = t.tensor.size(0);
      Tensor& error = memory[t.name.substr(kError.size())].error;
      if (!impl_->options.error_feedback) continue;
      error = ranks == group.size() ? t.tensor.select(0, group.rank()).clone() : mean(t.tensor, {0});
    } else {
      fail<Error>("{}: expected a state of iteration, q.NAME and error.NAME, got {}", kPowerSGD, t.name);
    }
  }
  if (!iteration || *iteration < 0) fail<Error>("{}: expected a state with an iteration of at least 0", kPowerSGD);
  impl_->memory = std::move(memory);
  impl_->iteration = *iteration;
}

}  // namespace halfstep::dist
