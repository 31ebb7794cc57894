// SPDX-License-Identifier: Apache-2.0
// Scaled dot-product attention and its backward pass, by matrix products and kernels for the rows of scores. The scores
// of a piece at a time are in a workspace, in float32 (float64), as is all that comes of them until a result is
// rounded. What is multiplied by bf16 is split into two bf16 (attention_rows.cuh), so that matrix units make these
// products too. Elsewhere, where TF32 is allowed, the products with weights and slopes of scores are made in it: what
// they are multiplied by loses nothing if it came in 16 bits.
#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "device/attention_rows.cuh"
#include "host/settings.h"
#include "kernels/attention.h"
#include "kernels/copy.h"
#include "kernels/matmul.h"
#include "libraries/product_batches.h"

namespace hscuda {
namespace {

template <class C>
inline constexpr int kSumType = std::is_same_v<C, double> ? HALFSTEP_F64 : HALFSTEP_F32;

/// Matrices [items, heads, rows, columns] in memory. One item may be all (a step of 0); `group` neighbouring heads of
/// the result share one.
struct Stack {
  void* data = nullptr;
  int dtype = HALFSTEP_F32;
  int64_t item = 0, head = 0, row = 0, column = 1;
  int64_t group = 1;
  int64_t rest = 0;  ///< where what the values lack lies behind them, where they are split

  Stack turned() const {
    Stack t = *this;
    std::swap(t.row, t.column);
    return t;
  }
};

constexpr const char* kUnnested = "heads of query and key in groups that don't nest in each other";

/// Where a piece lies in a tensor: its heads are the result's.
struct Range {
  int64_t item, items, head, heads, row, rows;
};

Stack stack_of(const Tensor& t, int64_t heads) {
  return {t.data,       t.dtype,      t.sizes[0] == 1 ? 0 : t.strides[0],      t.strides[1],
          t.strides[2], t.strides[3], t.sizes[1] == 0 ? 1 : heads / t.sizes[1]};
}
/// The part of it that a piece has.
Stack part_of(Stack s, const Range& r) {
  const int64_t at = r.item * s.item + r.head / s.group * s.head + r.row * s.row;
  s.data = static_cast<char*>(s.data) + at * item_size(s.dtype);
  return s;
}

/// A tensor that products take part of: as it lies, or pieces of it copied row-major and converted.
class Operand {
 public:
  Operand() = default;
  /// `joined`: items and heads one behind the other, for a single product.
  Operand(const Tensor& t, int64_t heads, int dtype, bool joined = false)
      : whole_(stack_of(t, heads)), dtype_(dtype), tensor_(&t) {
    copied_ = t.dtype != dtype || !side_of(t.sizes[2], t.sizes[3], t.strides[2], t.strides[3]).fits ||
              (joined && t.sizes[0] > 1 && t.sizes[1] > 1 && t.strides[0] != t.sizes[1] * t.strides[1]);
  }
  /// Memory for the copies; `most`: the largest piece. False: there is none.
  bool reserve(const Call& call, const Range& most) {
    if (!copied_) return true;
    const int64_t count = items(most) * own_heads(most) * most.rows * tensor_->sizes[3];
    buffer_ = call.workspace<char>(count * item_size(dtype_));
    return buffer_ != nullptr;
  }
  Stack part(const Call& call, const Range& r) const {
    const Stack from = part_of(whole_, r);
    if (!copied_) return from;
    const int64_t columns = tensor_->sizes[3], n = items(r), heads = own_heads(r);
    copy_view(
        call,
        View(buffer_, dtype_, {n, heads, r.rows, columns}, {heads * r.rows * columns, r.rows * columns, columns, 1}),
        View(from.data, from.dtype, {n, heads, r.rows, columns}, {from.item, from.head, from.row, from.column}));
    return {buffer_, dtype_, n == 1 ? 0 : heads * r.rows * columns, r.rows * columns, columns, 1, whole_.group};
  }

 private:
  int64_t items(const Range& r) const { return whole_.item == 0 ? 1 : r.items; }
  int64_t own_heads(const Range& r) const { return r.heads / whole_.group; }

  Stack whole_;
  int dtype_ = HALFSTEP_F32;
  const Tensor* tensor_ = nullptr;
  bool copied_ = false;
  void* buffer_ = nullptr;
};

/// A tensor that products write to: where it lies, or rounded from a copy in the type of the sums.
class Result {
 public:
  Result() = default;
  Result(const Tensor& t, int64_t heads, int dtype) : whole_(stack_of(t, heads)), dtype_(dtype), tensor_(&t) {
    whole_.item = t.strides[0];
    copied_ = t.dtype != dtype;
  }
  bool reserve(const Call& call, const Range& most) {
    if (!copied_) return true;
    buffer_ = call.workspace<char>(most.items * (most.heads / whole_.group) * most.rows * tensor_->sizes[3] *
                                   item_size(dtype_));
    return buffer_ != nullptr;
  }
  Stack part(const Range& r) const {
    if (!copied_) return part_of(whole_, r);
    const int64_t columns = tensor_->sizes[3], heads = r.heads / whole_.group;
    return {buffer_, dtype_, heads * r.rows * columns, r.rows * columns, columns, 1, whole_.group};
  }
  /// After the last product of a piece.
  void finish(const Call& call, const Range& r) const {
    if (!copied_) return;
    const Stack to = part_of(whole_, r), from = part(r);
    const int64_t columns = tensor_->sizes[3], heads = r.heads / whole_.group;
    copy_view(
        call, View(to.data, to.dtype, {r.items, heads, r.rows, columns}, {to.item, to.head, to.row, to.column}),
        View(from.data, from.dtype, {r.items, heads, r.rows, columns}, {from.item, from.head, from.row, from.column}));
  }

 private:
  Stack whole_;
  int dtype_ = HALFSTEP_F32;
  const Tensor* tensor_ = nullptr;
  bool copied_ = false;
  void* buffer_ = nullptr;
};

/// c[m, n] = a[m, k] b[k, n] for all heads of a piece, or added to c. Heads that share one of c are added up.
halfstep_status multiply_heads(const Call& call, ProductSpace& space, int64_t items, int64_t heads, int64_t m,
                               int64_t n, int64_t k, const Stack& a, const Stack& b, const Stack& c, bool add = false) {
  Product p;
  p.dtype = a.dtype, p.out_dtype = c.dtype;
  p.m = m, p.n = n, p.k = k;
  p.a = {a.data, a.row, a.column, 0}, p.b = {b.data, b.row, b.column, 0}, p.c = {c.data, c.row, c.column, 0};
  p.accumulate = add;
  BatchDim dims[4];
  dims[0] = {items, a.item, b.item, c.item};
  head_dims(heads, {a.group, b.group, c.group}, {a.head, b.head, c.head}, dims + 1);
  const auto product = [&] {
    return for_batches(p, dims, [&](const Product& one) { return multiply(call, one, space); });
  };
  if (const auto status = product()) return status;
  if (a.rest == 0) return HALFSTEP_OK;
  p.a.data = static_cast<char*>(p.a.data) + a.rest * item_size(a.dtype);
  p.accumulate = true;
  return product();
}

/// Of kernels for rows of up to 256 keys (a warp has one), up to 1024 (a block), and any number.
template <class K>
K rows_kernel(int64_t keys, K small, K medium, K any) {
  return keys <= 8 * kWarp ? small : keys <= 4 * kThreads ? medium : any;
}
Launch rows_launch(int64_t rows, int64_t keys) {
  return {.grid = grid_size(rows, keys <= 8 * kWarp ? kThreads / kWarp : 1), .block = kThreads};
}

/// Bytes for the scores of a piece: HALFSTEP_CUDA_ATTENTION_BYTES, or what attention.h says.
int64_t piece_bytes() {
  static const int64_t bytes = bytes_setting("HALFSTEP_CUDA_ATTENTION_BYTES", kAttentionBytes);
  return bytes;
}

/// What both passes know of a call.
struct Plan {
  AttentionSizes s;
  const halfstep_attention_attributes& attributes;
  ScoreRows rows = {};

  /// `like` is [B, H, L, Ev].
  Plan(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& like, const halfstep_attention_attributes& a)
      : attributes(a) {
    const auto group = [&](const Tensor& t) { return t.sizes[1] == 0 ? 1 : like.sizes[1] / t.sizes[1]; };
    s = {like.sizes[0], like.sizes[1], q.sizes[2], k.sizes[2], q.sizes[3], v.sizes[3], group(q), group(k), group(v)};
    rows.keys = s.keys, rows.all_heads = s.heads, rows.all_queries = s.queries;
    rows.scale = a.scale, rows.causal = a.causal != 0;
  }
  void set_mask(const Call& call, int i) {
    if (!call.has(i)) return;
    const Tensor& mask = call.in[i];
    rows.mask = mask.data, rows.mask_dtype = mask.dtype;
    for (int d = 0; d < 4; ++d) rows.mask_strides[d] = mask.sizes[d] == 1 ? 0 : mask.strides[d];
  }
  void set_dropout(const Call& call, int i) {
    if (!call.has(i)) return;
    rows.state = static_cast<const int64_t*>(call.in[i].data);
    rows.threshold = halfstep::bernoulli_threshold(attributes.dropout);
    rows.kept = attributes.dropout < 1 ? 1 / (1 - attributes.dropout) : 0;
  }
  ScoreRows rows_of(const Range& r) const {
    ScoreRows part = rows;
    part.rows = r.items * r.heads * r.rows, part.heads = r.heads, part.queries = r.rows;
    part.first_item = r.item, part.first_head = r.head, part.first_query = r.row;
    return part;
  }
  /// Calls f(range of the queries), and before the first and after the last piece of the same heads `begin` and `end`
  /// with the range of the keys.
  template <class Begin, class F, class End>
  halfstep_status for_pieces(const AttentionPiece& piece, Begin&& begin, F&& f, End&& end) const {
    for (int64_t item = 0; item < s.items; item += piece.items) {
      for (int64_t head = 0; head < s.heads; head += piece.heads) {
        Range r = {item, std::min(piece.items, s.items - item), head, std::min(piece.heads, s.heads - head), 0, s.keys};
        const Range all_keys = r;
        begin(all_keys);
        for (int64_t query = 0; query < s.queries; query += piece.queries) {
          r.row = query, r.rows = std::min(piece.queries, s.queries - query);
          if (const auto status = f(r)) return status;
        }
        end(all_keys);
      }
    }
    return HALFSTEP_OK;
  }
};

/// Scores of a piece, row-major.
Stack scores_of(void* data, int dtype, const Range& r, int64_t keys) {
  return {data, dtype, r.heads * r.rows * keys, r.rows * keys, keys, 1, 1};
}
/// What has been made of them: split, or as they were.
Stack weights_of(void* data, int dtype, const Range& r, int64_t keys, bool split) {
  Stack s = scores_of(data, split ? HALFSTEP_BF16 : dtype, r, split ? 2 * keys : keys);
  s.rest = split ? keys : 0;
  return s;
}
/// Whether they are split: a thread has all its values of a row in registers, and halves begin on whole packs.
bool splits(int64_t keys, std::initializer_list<const Tensor*> others) {
  return keys <= 4 * kThreads && keys % 8 == 0 &&
         std::all_of(others.begin(), others.end(), [](const Tensor* t) { return t->dtype == HALFSTEP_BF16; });
}
/// The kernel for rows: f(kSplit).
template <class C, class F>
auto with_split(bool split, F&& f) {
  if constexpr (std::is_same_v<C, float>) {
    if (split) return f(std::true_type());
  }
  return f(std::false_type());
}

template <class C>
halfstep_status forward(Call& call) {
  const Tensor &q = call.in[0], &k = call.in[1], &v = call.in[2], &y = call.out[0], &lse = call.out[1];
  Plan plan(q, k, v, y, call.attributes<halfstep_attention_attributes>());
  plan.set_mask(call, 3);
  plan.set_dropout(call, 4);
  const AttentionSizes& s = plan.s;
  if (!groups_nest(s)) return call.refuse(kUnnested);
  const AttentionPiece piece = attention_piece(s, sizeof(C), 1, piece_bytes());
  const Range most = {0, piece.items, 0, piece.heads, 0, piece.queries},
              most_keys = {0, piece.items, 0, piece.heads, 0, s.keys};

  constexpr int kSums = kSumType<C>;
  const bool split = splits(s.keys, {&q, &k, &v});
  Operand query(q, s.heads, q.dtype), key(k, s.heads, q.dtype), value(v, s.heads, split ? v.dtype : kSums, split);
  Result result(y, s.heads, kSums);
  ProductSpace space(call);
  C* const scores = call.workspace<C>(piece.items * piece.heads * piece.queries * s.keys + 1);
  if (scores == nullptr || !query.reserve(call, most) || !key.reserve(call, most_keys) ||
      !value.reserve(call, most_keys) || !result.reserve(call, most) || !space.reserve_any()) {
    return call.no_memory();
  }
  Stack keys, values;
  const auto status = plan.for_pieces(
      piece,
      [&](const Range& r) {
        keys = key.part(call, r);
        values = value.part(call, r);
      },
      [&](const Range& r) -> halfstep_status {
        const Stack raw = scores_of(scores, kSums, r, s.keys), weights = weights_of(scores, kSums, r, s.keys, split);
        const auto multiply = [&](auto... arguments) {
          return multiply_heads(call, space, r.items, r.heads, arguments...);
        };
        if (const auto status = multiply(r.rows, s.keys, s.width, query.part(call, r), keys.turned(), raw)) {
          return status;
        }
        const ScoreRows rows = plan.rows_of(r);
        with_split<C>(split, [&](auto halves) {
          constexpr bool kSplit = halves();
          launch(call, rows_launch(rows.rows, s.keys),
                 rows_kernel(s.keys, softmax_rows<C, 8, kWarp, kSplit>, softmax_rows<C, 4, kThreads, kSplit>,
                             softmax_rows<C, 0, kThreads>),
                 rows, scores, static_cast<C*>(lse.data));
        });
        if (const auto status = multiply(r.rows, s.value_width, s.keys, weights, values, result.part(r))) {
          return status;
        }
        result.finish(call, r);
        return HALFSTEP_OK;
      },
      [](const Range&) {});
  return status ? status : call.launched();
}

template <class C>
halfstep_status backward(Call& call) {
  const Tensor &g = call.in[0], &q = call.in[1], &k = call.in[2], &v = call.in[3];
  const auto& a = call.attributes<halfstep_attention_attributes>();
  Plan plan(q, k, v, g, a);
  plan.set_mask(call, 4);
  plan.set_dropout(call, 5);
  const AttentionSizes& s = plan.s;
  if (!groups_nest(s)) return call.refuse(kUnnested);
  const bool want_q = a.want[0], want_k = a.want[1], want_v = a.want[2], want_mask = a.want[3];
  const bool want_scores = want_q || want_k || want_mask;
  const AttentionPiece piece = attention_piece(s, sizeof(C), want_scores ? 2 : 1, piece_bytes());
  const Range most = {0, piece.items, 0, piece.heads, 0, piece.queries},
              most_keys = {0, piece.items, 0, piece.heads, 0, s.keys};

  constexpr int kSums = kSumType<C>;
  ProductSpace space(call);
  const int64_t count = piece.items * piece.heads * piece.queries * s.keys + 1;
  C* const scores = call.workspace<C>(count);
  C* const slopes = want_scores ? call.workspace<C>(count) : nullptr;
  bool fine = scores != nullptr && (slopes != nullptr || !want_scores) && space.reserve_any();
  const auto operand = [&](const Tensor& t, int dtype, const Range& largest, bool wanted, bool joined = false) {
    if (!wanted) return Operand();
    Operand o(t, s.heads, dtype, joined);
    fine = fine && o.reserve(call, largest);
    return o;
  };
  // Products of what came in are made in its dtype, those of scores in the sums'.
  const int outer = g.dtype == v.dtype ? g.dtype : kSums;
  const bool split = splits(s.keys, {&q, &k, &v, &g});
  const Operand query = operand(q, q.dtype, most, true, split), key = operand(k, q.dtype, most_keys, true, split);
  const Operand gradient = operand(g, outer, most, want_scores || split, split),
                value = operand(v, outer, most_keys, want_scores, split);
  // What is split is multiplied by the same ones.
  const Operand wide_gradient = operand(g, kSums, most, want_v && !split);
  const Operand wide_query = operand(q, kSums, most, want_k && !split),
                wide_key = operand(k, kSums, most_keys, want_q && !split);
  const auto result = [&](int i, const Range& largest, bool wanted) {
    if (!wanted) return Result();
    Result o(call.out[i], s.heads, kSums);
    fine = fine && o.reserve(call, largest);
    return o;
  };
  const Result query_grad = result(0, most, want_q), key_grad = result(1, most_keys, want_k),
               value_grad = result(2, most_keys, want_v);
  if (!fine) return call.no_memory();

  Stack keys, values, wide_keys;
  const auto status = plan.for_pieces(
      piece,
      [&](const Range& r) {
        keys = key.part(call, r);
        if (want_scores) values = value.part(call, r);
        if (want_q) wide_keys = split ? keys : wide_key.part(call, r);
      },
      [&](const Range& r) -> halfstep_status {
        const Stack raw = scores_of(scores, kSums, r, s.keys), raw_slopes = scores_of(slopes, kSums, r, s.keys);
        const Stack weights = weights_of(scores, kSums, r, s.keys, split);
        const Stack ds = weights_of(slopes, kSums, r, s.keys, split);
        const Range all_keys = {r.item, r.items, r.head, r.heads, 0, s.keys};
        const bool add = r.row > 0;
        const auto multiply = [&](auto... arguments) {
          return multiply_heads(call, space, r.items, r.heads, arguments...);
        };
        const Stack queries = query.part(call, r);
        const Stack gradients = want_scores || split ? gradient.part(call, r) : Stack();
        halfstep_status status = multiply(r.rows, s.keys, s.width, queries, keys.turned(), raw);
        if (status == HALFSTEP_OK && want_scores) {
          status = multiply(r.rows, s.keys, s.value_width, gradients, values.turned(), raw_slopes);
        }
        if (status) return status;
        const ScoreRows rows = plan.rows_of(r);
        with_split<C>(split, [&](auto halves) {
          constexpr bool kSplit = halves();
          launch(call, rows_launch(rows.rows, s.keys),
                 rows_kernel(s.keys, softmax_gradient_rows<C, 8, kWarp, kSplit>,
                             softmax_gradient_rows<C, 4, kThreads, kSplit>, softmax_gradient_rows<C, 0, kThreads>),
                 rows, scores, slopes, static_cast<const C*>(call.in[6].data),
                 static_cast<C*>(want_mask ? call.out[3].data : nullptr));
        });
        if (want_v) {
          status = multiply(s.keys, s.value_width, r.rows, weights.turned(),
                            split ? gradients : wide_gradient.part(call, r), value_grad.part(all_keys), add);
        }
        if (status == HALFSTEP_OK && want_q) {
          status = multiply(r.rows, s.width, s.keys, ds, wide_keys, query_grad.part(r));
          query_grad.finish(call, r);
        }
        if (status == HALFSTEP_OK && want_k) {
          status = multiply(s.keys, s.width, r.rows, ds.turned(), split ? queries : wide_query.part(call, r),
                            key_grad.part(all_keys), add);
        }
        return status;
      },
      [&](const Range& r) {
        if (want_k) key_grad.finish(call, r);
        if (want_v) value_grad.finish(call, r);
      });
  return status ? status : call.launched();
}

halfstep_status attention(Call& call) {
  if (call.out[1].numel == 0) return HALFSTEP_OK;
  return call.in[0].dtype == HALFSTEP_F64 ? forward<double>(call) : forward<float>(call);
}

halfstep_status attention_backward(Call& call) {
  if (call.in[6].numel > 0) {
    return call.in[1].dtype == HALFSTEP_F64 ? backward<double>(call) : backward<float>(call);
  }
  // Without a query a key may still be there, for no one.
  for (int i = 0; i < 4; ++i) {
    const Tensor& t = call.out[i];
    if (t.numel == 0) continue;
    const auto bytes = static_cast<std::size_t>(t.numel) * static_cast<std::size_t>(item_size(t.dtype));
    if (const auto status = check(cudaMemsetAsync(t.data, 0, bytes, call.stream()), "cudaMemsetAsync", call.number())) {
      return status;
    }
  }
  return HALFSTEP_OK;
}

constexpr KernelDef kKernels[] = {
    {.op = "scaled_dot_product_attention",
     .dtypes = kFloating,
     .layouts = kStrided,
     .attributes = true,
     .run = attention},
    {.op = "scaled_dot_product_attention_backward",
     .dtypes = kFloating,
     .layouts = kStrided,
     .attributes = true,
     .run = attention_backward},
};

}  // namespace

std::span<const KernelDef> attention_kernels() { return kKernels; }

}  // namespace hscuda
