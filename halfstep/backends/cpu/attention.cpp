// SPDX-License-Identifier: Apache-2.0
// Scaled dot-product attention and its backward pass. A block of queries at a time: their scores with all keys fit the
// second-level cache, go through the softmax where they lie, and meet the values, so that no matrix of all scores is
// ever in memory. Between products everything is float32 (float64 for f64).
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <numeric>

#include "halfstep/backends/cpu/exp_block.h"
#include "halfstep/backends/cpu/gemm.h"
#include "halfstep/backends/cpu/row_block.h"
#include "halfstep/core/philox.h"
#include "halfstep/ops/attributes.h"

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kScores = 128 * 1024;  // scores of a block: half a megabyte in float32
constexpr std::int64_t kMinRows = 16;
constexpr std::int64_t kMaxRows = 128;
// Under a causal mask a block computes scores that its first queries don't see: half its square.
constexpr std::int64_t kMaxCausalRows = 48;
constexpr double kAttentionWorkPerThread = 250'000;  // multiply-adds that are worth a thread

/// Memory of one thread, and the context of its products: both come from the op's context, which serves one thread at a
/// time. A product gives its workspace back when it returns, so that the next can have it.
class Lane : public KernelContext {
 public:
  Lane(KernelContext* shared, std::mutex* mutex) : KernelContext(*shared), shared_(shared), mutex_(mutex) {
    owner = this;
    workspace = [](KernelContext* self, std::size_t bytes) -> void* {
      auto* lane = static_cast<Lane*>(self->owner);
      if (bytes > lane->bytes_) {
        // Products grow with the number of keys under a causal mask: doubling keeps the sum of all requests small.
        lane->bytes_ = std::max(bytes, 2 * lane->bytes_);
        lane->data_ = lane->take(lane->bytes_);
      }
      return lane->data_;
    };
    set_error = [](KernelContext* self, const char* text) {
      auto* lane = static_cast<Lane*>(self->owner);
      const std::lock_guard lock(*lane->mutex_);
      lane->shared_->set_error(lane->shared_, text);
    };
  }

  void* take(std::size_t bytes) {
    const std::lock_guard lock(*mutex_);
    return shared_->workspace(shared_, bytes);
  }
  /// `n` numbers for as long as the op runs; null when there is no memory left.
  template <class C>
  C* take_numbers(std::int64_t n) {
    return static_cast<C*>(take(static_cast<std::size_t>(std::max<std::int64_t>(n, 1)) * sizeof(C)));
  }

 private:
  KernelContext* shared_;
  std::mutex* mutex_;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// A tensor [batch, heads, rows, columns] seen from [B, H, rows, columns]: one item may serve all, one head several.
struct Heads {
  const TensorView* t;
  std::int64_t batch_stride;
  std::int64_t group;  ///< neighbouring heads that this one's serve

  Heads(const TensorView& view, std::int64_t heads)
      : t(&view),
        batch_stride(view.sizes[0] == 1 ? 0 : view.strides[0]),
        group(view.sizes[1] == 0 ? 1 : heads / view.sizes[1]) {}

  /// Element (row, 0) of a head.
  std::int64_t at(std::int64_t item, std::int64_t head, std::int64_t row) const {
    return item * batch_stride + head / group * t->strides[1] + row * t->strides[2];
  }
  void* pointer(std::int64_t item, std::int64_t head, std::int64_t row) const {
    return static_cast<char*>(t->data) + at(item, head, row) * static_cast<std::int64_t>(item_size(t->dtype));
  }
  /// The rows from `row` on as an operand, or turned.
  GemmOperand operand(std::int64_t item, std::int64_t head, std::int64_t row = 0) const {
    return {pointer(item, head, row), t->dtype, t->strides[2], t->strides[3]};
  }
  GemmOperand turned(std::int64_t item, std::int64_t head, std::int64_t row = 0) const {
    return {pointer(item, head, row), t->dtype, t->strides[3], t->strides[2]};
  }
};

template <class C>
constexpr DType kDType = std::is_same_v<C, double> ? DType::f64 : DType::f32;

/// Rows of numbers of our own, contiguous, as an operand.
template <class C>
GemmOperand rows_of(const C* data, std::int64_t columns) {
  return {data, kDType<C>, columns, 1};
}
template <class C>
GemmOperand columns_of(const C* data, std::int64_t columns) {
  return {data, kDType<C>, 1, columns};
}

/// c[m, n] = a[m, k] b[k, n], or added to c.
bool multiply(Lane& lane, std::int64_t m, std::int64_t n, std::int64_t k, const GemmOperand& a, const GemmOperand& b,
              void* c, DType c_dtype, std::int64_t ldc, bool add = false) {
  GemmArgs g;
  g.m = m, g.n = n, g.k = k;
  g.a = a, g.b = b;
  g.c = c, g.c_dtype = c_dtype, g.ldc = std::max(ldc, n);
  g.beta = add ? 1 : 0;
  const Status status = gemm(&lane, g);
  if (status == Status::unsupported) lane.set_error(&lane, "no matrix product for these dtypes");
  return status == Status::ok;
}

/// What both passes know of a call.
struct AttentionPlan {
  Heads q, k, v;
  const TensorView& mask;
  const AttentionAttributes& attributes;
  std::int64_t items, heads, queries, keys, width, value_width;
  std::int64_t rows;  ///< of a block
  bool dry;           ///< only what the products need is asked for
  PhiloxState state;
  std::uint64_t threshold;  ///< words below it drop their weight
  double kept;              ///< factor of the others

  /// `like` is [B, H, L, Ev].
  AttentionPlan(const TensorView& query, const TensorView& key, const TensorView& value, const TensorView& mask_view,
                const TensorView& dropout, const TensorView& like, const AttentionAttributes& a, bool dry_run)
      : q(query, like.sizes[1]),
        k(key, like.sizes[1]),
        v(value, like.sizes[1]),
        mask(mask_view),
        attributes(a),
        items(like.sizes[0]),
        heads(like.sizes[1]),
        queries(query.sizes[2]),
        keys(key.sizes[2]),
        width(query.sizes[3]),
        value_width(value.sizes[3]),
        rows(std::clamp(kScores / std::max<std::int64_t>(keys, 1), kMinRows, a.causal ? kMaxCausalRows : kMaxRows)),
        dry(dry_run),
        threshold(bernoulli_threshold(a.dropout)),
        kept(a.dropout < 1 ? 1 / (1 - a.dropout) : 0) {
    rows = std::min(rows, std::max<std::int64_t>(queries, 1));
    if (dropout.defined && !dry) {
      const auto* words = static_cast<const std::int64_t*>(dropout.data);
      state = {static_cast<std::uint64_t>(words[0]), static_cast<std::uint64_t>(words[1])};
    }
  }

  std::int64_t blocks() const { return (queries + rows - 1) / rows; }
  /// Keys that a query before `end` may see.
  std::int64_t keys_before(std::int64_t end) const { return attributes.causal ? std::min(keys, end) : keys; }

  /// Scales the raw scores of one query and applies its mask.
  template <class C>
  void finish_scores(C* x, std::int64_t n, std::int64_t item, std::int64_t head, std::int64_t query) const {
    const C scale = static_cast<C>(attributes.scale);
    for (std::int64_t j = 0; j < n; ++j) x[j] *= scale;
    if (!mask.defined) return;
    const std::int64_t index[] = {item, head, query};
    std::int64_t at = 0;
    for (int d = 0; d < 3; ++d) at += mask.sizes[d] == 1 ? 0 : index[d] * mask.strides[d];
    const std::int64_t step = mask.sizes[3] == 1 ? 0 : mask.strides[3];
    if (mask.dtype == DType::boolean) {
      const auto* m = static_cast<const bool*>(mask.data) + at;
      for (std::int64_t j = 0; j < n; ++j) x[j] = m[j * step] ? x[j] : -std::numeric_limits<C>::infinity();
      return;
    }
    constexpr std::int64_t kBlock = 512;
    C values[kBlock];
    for (std::int64_t from = 0; from < n; from += kBlock) {
      const std::int64_t count = std::min(kBlock, n - from);
      read_row(mask, at + from * step, step, count, values);
      for (std::int64_t j = 0; j < count; ++j) x[from + j] += values[j];
    }
  }

  /// Calls f(j, factor) for the weights of one query: 0 where dropped.
  template <class F>
  void for_dropout(std::int64_t n, std::int64_t item, std::int64_t head, std::int64_t query, F&& f) const {
    const auto first = static_cast<std::uint64_t>(((item * heads + head) * queries + query) * keys);
    PhiloxBlock block{};
    for (std::int64_t j = 0; j < n; ++j) {
      const std::uint64_t i = first + static_cast<std::uint64_t>(j);
      if (j == 0 || i % 4 == 0) block = philox_block(state, i / 4);
      f(j, block[i % 4] < threshold ? 0.0 : kept);
    }
  }
};

/// Runs f(lane, begin, end) on ranges of n pieces of `work` multiply-adds each.
template <class F>
Status share(KernelContext* context, std::int64_t n, double work, F&& f) {
  std::mutex mutex;
  std::atomic<bool> fine{true};
  const auto grain = static_cast<std::int64_t>(std::clamp(kAttentionWorkPerThread / std::max(work, 1.0), 1.0, 1e6));
  // One range a thread, since each takes memory of its own.
  const std::int64_t ranges = n == 0 ? 0 : detail::num_ranges(n, grain);
  parallel_jobs(ranges, [&](std::int64_t i, std::int64_t) {
    Lane lane(context, &mutex);
    if (!f(lane, n * i / ranges, n * (i + 1) / ranges)) fine.store(false, std::memory_order_relaxed);
  });
  return fine.load(std::memory_order_relaxed) ? Status::ok : Status::failed;
}

bool no_memory(Lane& lane) {
  lane.set_error(&lane, "out of memory for a block of scores");
  return false;
}

/// The softmax of one query's `n` scores in place; returns log(sum(exp)), -infinity where nothing is seen.
template <class C>
C softmax_row(C* x, std::int64_t n) {
  constexpr C kNothing = -std::numeric_limits<C>::infinity();
  const C top = max_of(x, n);
  if (top == kNothing) {
    std::fill_n(x, n, C(0));
    return kNothing;
  }
  const double sum = exp_sum(x, n, top, x);
  const C divisor = static_cast<C>(sum);
  for (std::int64_t j = 0; j < n; ++j) x[j] /= divisor;
  return static_cast<C>(static_cast<double>(top) + std::log(sum));
}

template <class C>
Status forward(KernelContext* context, const AttentionPlan& p, TensorView* out) {
  const Heads result(out[0], p.heads);
  C* const lse = static_cast<C*>(out[1].data);
  const std::int64_t blocks = p.blocks();
  const double work = static_cast<double>(p.rows * p.keys * (p.width + p.value_width + 8));
  return share(context, p.items * p.heads * blocks, work, [&](Lane& lane, std::int64_t begin, std::int64_t end) {
    C* const scores = lane.take_numbers<C>(p.rows * p.keys);
    if (scores == nullptr) return no_memory(lane);
    for (std::int64_t piece = begin; piece < end; ++piece) {
      const std::int64_t head = piece / blocks % p.heads, item = piece / blocks / p.heads;
      const std::int64_t first = piece % blocks * p.rows, last = std::min(first + p.rows, p.queries);
      const std::int64_t m = last - first, n = p.keys_before(last);
      if (!multiply(lane, m, n, p.width, p.q.operand(item, head, first), p.k.turned(item, head), scores, kDType<C>,
                    n)) {
        return false;
      }
      for (std::int64_t i = first; i < last && !p.dry; ++i) {
        C* const x = scores + (i - first) * n;
        const std::int64_t seen = p.attributes.causal ? std::min(n, i + 1) : n;
        p.finish_scores(x, seen, item, head, i);
        lse[(item * p.heads + head) * p.queries + i] = softmax_row(x, seen);
        std::fill(x + seen, x + n, C(0));
        if (p.threshold != 0) {
          p.for_dropout(seen, item, head, i, [x](std::int64_t j, double f) { x[j] *= static_cast<C>(f); });
        }
      }
      if (!multiply(lane, m, p.value_width, n, rows_of(scores, n), p.v.operand(item, head),
                    result.pointer(item, head, first), out[0].dtype, out[0].strides[2])) {
        return false;
      }
    }
    return true;
  });
}

/// Sums that become the gradient of one head of key or value.
template <class C>
struct Accumulator {
  C* sums = nullptr;
  std::int64_t rows, columns;

  void clear() const { std::fill_n(sums, rows * columns, C(0)); }
  void store(const Heads& to, TensorView& view, std::int64_t item, std::int64_t head) const {
    for (std::int64_t r = 0; r < rows; ++r) {
      write_row(view, to.at(item, head, r), view.strides[3], columns, sums + r * columns);
    }
  }
};

template <class C>
class Backward {
 public:
  Backward(const AttentionPlan& plan, const TensorView& gradient, const TensorView& lse, TensorView* out)
      : p(plan),
        g(gradient, plan.heads),
        lse_(static_cast<const C*>(lse.data)),
        out_(out),
        dq(out[0].ndim == 4 ? out[0] : gradient, plan.heads),
        dk(out[1].ndim == 4 ? out[1] : gradient, plan.heads),
        dv(out[2].ndim == 4 ? out[2] : gradient, plan.heads),
        want_(plan.attributes.want) {}

  /// Heads of key and value serve groups of the query's. A piece of work is what shares none of them with another.
  Status run(KernelContext* context) {
    const std::int64_t sets = p.heads == 0 ? 0 : std::gcd(p.heads / p.k.group, p.heads / p.v.group);
    const std::int64_t a_set = sets == 0 ? 0 : p.heads / sets;
    const double work =
        static_cast<double>(a_set * p.queries * p.keys) * static_cast<double>(3 * p.width + 2 * p.value_width + 16);
    return share(context, p.items * sets, work, [&](Lane& lane, std::int64_t begin, std::int64_t end) {
      Scratch s;
      const std::int64_t n = p.rows * p.keys;
      const bool scores = want_[0] || want_[1] || want_[3];
      s.weights = lane.take_numbers<C>(n);
      s.scores = scores ? lane.take_numbers<C>(n) : s.weights;
      s.dropped = p.threshold != 0 ? lane.take_numbers<C>(n) : s.weights;
      s.key = {want_[1] ? lane.take_numbers<C>(p.keys * p.width) : s.weights, p.keys, p.width};
      s.value = {want_[2] ? lane.take_numbers<C>(p.keys * p.value_width) : s.weights, p.keys, p.value_width};
      if (!s.weights || !s.scores || !s.dropped || !s.key.sums || !s.value.sums) return no_memory(lane);
      for (std::int64_t piece = begin; piece < end; ++piece) {
        const std::int64_t item = piece / sets, from = piece % sets * a_set;
        for (std::int64_t head = from; head < from + a_set; ++head) {
          if (!one_head(lane, s, item, head)) return false;
        }
      }
      return true;
    });
  }

 private:
  struct Scratch {
    C* weights;  ///< after the softmax
    C* scores;   ///< their gradient, once it is known
    C* dropped;  ///< the weights after dropout
    Accumulator<C> key, value;
  };

  bool one_head(Lane& lane, Scratch& s, std::int64_t item, std::int64_t head) {
    if (!p.dry && want_[1] && head % p.k.group == 0) s.key.clear();
    if (!p.dry && want_[2] && head % p.v.group == 0) s.value.clear();
    for (std::int64_t first = 0; first < p.queries; first += p.rows) {
      if (!one_block(lane, s, item, head, first, std::min(first + p.rows, p.queries))) return false;
    }
    if (p.dry) return true;
    if (want_[1] && (head + 1) % p.k.group == 0) s.key.store(dk, out_[1], item, head);
    if (want_[2] && (head + 1) % p.v.group == 0) s.value.store(dv, out_[2], item, head);
    return true;
  }

  bool one_block(Lane& lane, Scratch& s, std::int64_t item, std::int64_t head, std::int64_t first, std::int64_t last) {
    const std::int64_t m = last - first, n = p.keys_before(last);
    const GemmOperand grad = g.operand(item, head, first), query = p.q.operand(item, head, first);
    if (!multiply(lane, m, n, p.width, query, p.k.turned(item, head), s.weights, kDType<C>, n)) return false;
    for (std::int64_t i = first; i < last && !p.dry; ++i) find_weights(s, item, head, i, first, n);
    if (want_[2] && !multiply(lane, n, p.value_width, m, columns_of(s.dropped, n), grad, s.value.sums, kDType<C>,
                              p.value_width, true)) {
      return false;
    }
    if (!want_[0] && !want_[1] && !want_[3]) return true;
    if (!multiply(lane, m, n, p.value_width, grad, p.v.turned(item, head), s.scores, kDType<C>, n)) return false;
    for (std::int64_t i = first; i < last && !p.dry; ++i) find_score_gradient(s, item, head, i, first, n);
    if (want_[0] && !multiply(lane, m, p.width, n, rows_of(s.scores, n), p.k.operand(item, head),
                              dq.pointer(item, head, first), out_[0].dtype, out_[0].strides[2])) {
      return false;
    }
    return !want_[1] ||
           multiply(lane, n, p.width, m, columns_of(s.scores, n), query, s.key.sums, kDType<C>, p.width, true);
  }

  void find_weights(Scratch& s, std::int64_t item, std::int64_t head, std::int64_t i, std::int64_t first,
                    std::int64_t n) {
    C* const x = s.weights + (i - first) * n;
    const std::int64_t seen = p.attributes.causal ? std::min(n, i + 1) : n;
    const C shift = lse_[(item * p.heads + head) * p.queries + i];
    if (shift == -std::numeric_limits<C>::infinity()) {
      std::fill_n(x, n, C(0));
    } else {
      p.finish_scores(x, seen, item, head, i);
      exp_sum(x, seen, shift, x);
      std::fill(x + seen, x + n, C(0));
    }
    if (p.threshold == 0) return;
    C* const y = s.dropped + (i - first) * n;
    std::fill(y + seen, y + n, C(0));
    p.for_dropout(seen, item, head, i, [x, y](std::int64_t j, double f) { y[j] = x[j] * static_cast<C>(f); });
  }

  // ds = p (dp - sum(p dp)), and what goes on to query and key has the scale in it.
  void find_score_gradient(Scratch& s, std::int64_t item, std::int64_t head, std::int64_t i, std::int64_t first,
                           std::int64_t n) {
    const C* const x = s.weights + (i - first) * n;
    C* const d = s.scores + (i - first) * n;
    const std::int64_t seen = p.attributes.causal ? std::min(n, i + 1) : n;
    if (p.threshold != 0) {
      p.for_dropout(seen, item, head, i, [d](std::int64_t j, double f) { d[j] *= static_cast<C>(f); });
    }
    const C total = static_cast<C>(dot_of(x, d, seen));
    for (std::int64_t j = 0; j < seen; ++j) d[j] = x[j] * (d[j] - total);
    std::fill(d + seen, d + n, C(0));
    if (want_[3]) {
      C* const to = static_cast<C*>(out_[3].data) + ((item * p.heads + head) * p.queries + i) * p.keys;
      std::copy_n(d, n, to);
    }
    const C scale = static_cast<C>(p.attributes.scale);
    for (std::int64_t j = 0; j < seen; ++j) d[j] *= scale;
  }

  const AttentionPlan& p;
  const Heads g;
  const C* lse_;
  TensorView* out_;
  const Heads dq, dk, dv;
  const std::uint8_t* want_;
};

Status attention(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  if (out[0].numel == 0 && out[1].numel == 0) return Status::ok;
  const AttentionPlan plan(in[0], in[1], in[2], in[3], in[4], out[0],
                           *static_cast<const AttentionAttributes*>(attributes), runs_dry(context));
  return in[0].dtype == DType::f64 ? forward<double>(context, plan, out) : forward<float>(context, plan, out);
}

Status attention_backward(KernelContext* context, const TensorView* in, int, TensorView* out, int,
                          const void* attributes) {
  if (in[6].numel == 0) {
    if (runs_dry(context)) return Status::ok;
    // Without a query a key may still be there, for no one.
    for (int i = 0; i < 4; ++i) {
      if (out[i].numel > 0)
        std::memset(out[i].data, 0, static_cast<std::size_t>(out[i].numel) * item_size(out[i].dtype));
    }
    return Status::ok;
  }
  const AttentionPlan plan(in[1], in[2], in[3], in[4], in[5], in[0],
                           *static_cast<const AttentionAttributes*>(attributes), runs_dry(context));
  return in[1].dtype == DType::f64 ? Backward<double>(plan, in[0], in[6], out).run(context)
                                   : Backward<float>(plan, in[0], in[6], out).run(context);
}

const RegisterCpuKernel attention_kernels[] = {
    {"scaled_dot_product_attention", kFloatingDTypes, attention, kRunsDry},
    {"scaled_dot_product_attention_backward", kFloatingDTypes, attention_backward, kRunsDry},
};

}  // namespace
}  // namespace halfstep::cpu
