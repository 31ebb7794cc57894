// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/einsum.h"

#include <algorithm>
#include <bitset>
#include <string>

#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/triangle.h"
#include "halfstep/ops/view.h"

namespace halfstep {
namespace {

const Op& einsum_op = define_op({.name = "einsum", .signature = "einsum(equation, operands)", .composite = true});
const Op& tensordot_op =
    define_op({.name = "tensordot", .signature = "tensordot(input, other, dims)", .composite = true});

// Labels: capitals, small letters, then the dimensions of the ellipsis, counted from the right.
constexpr int kLetters = 52, kLabels = kLetters + kMaxDims;
using Labels = std::vector<int>;
using Set = std::bitset<kLabels>;

int label_of(char c) { return c <= 'Z' ? c - 'A' : c - 'a' + 26; }
std::string text_of(int label) {
  if (label >= kLetters) return "...";
  return std::string(1, static_cast<char>(label < 26 ? 'A' + label : 'a' + label - 26));
}
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

bool contains(const Labels& labels, int label) {
  return std::find(labels.begin(), labels.end(), label) != labels.end();
}

// A tensor with the label of each of its dimensions, all different.
struct Term {
  Tensor tensor;
  Labels labels;

  int place(int label) const {
    return static_cast<int>(std::find(labels.begin(), labels.end(), label) - labels.begin());
  }
  bool has(int label) const { return contains(labels, label); }
  std::int64_t size(int label) const { return has(label) ? tensor.sizes()[place(label)] : 1; }
  // Sums over the labels that are not in `kept`.
  void sum_out(const Set& kept) {
    Shape dims;
    Labels left;
    for (std::size_t i = 0; i < labels.size(); ++i) {
      if (kept[static_cast<std::size_t>(labels[i])]) {
        left.push_back(labels[i]);
      } else {
        dims.push_back(static_cast<std::int64_t>(i));
      }
    }
    if (dims.empty()) return;
    // In the operands' dtype, as a product of the same sum is.
    tensor = sum(tensor, dims, {.dtype = tensor.dtype()});
    labels = std::move(left);
  }
  // Takes a dimension of size 1 out.
  void drop(int label) {
    const int i = place(label);
    tensor = tensor.squeeze(i);
    labels.erase(labels.begin() + i);
  }
  // The dimensions in this order; labels that are not there become dimensions of size 1.
  Tensor ordered(const Labels& order) const {
    Shape dims;
    for (int label : order) {
      if (has(label)) dims.push_back(place(label));
    }
    Tensor result = tensor.permute(dims);
    for (std::size_t i = 0; i < order.size(); ++i) {
      if (!has(order[i])) result = result.unsqueeze(static_cast<std::int64_t>(i));
    }
    return result;
  }
};

[[noreturn]] void malformed(std::string_view equation, const std::string& why) {
  fail<Error>("einsum: {} in \"{}\"", why, equation);
}

// The two sides of the equation, without spaces.
struct Sides {
  std::vector<std::string> inputs;
  std::string output;
  bool has_output = false;

  explicit Sides(std::string_view equation) {
    std::string text;
    for (char c : equation) {
      if (c != ' ') text += c;
    }
    const std::size_t arrow = text.find("->");
    if (arrow != std::string::npos) {
      has_output = true;
      output = text.substr(arrow + 2);
      text.resize(arrow);
    }
    inputs.emplace_back();
    for (char c : text) {
      if (c == ',') {
        inputs.emplace_back();
      } else {
        inputs.back() += c;
      }
    }
    for (std::string& side : inputs) check(equation, side);
    check(equation, output);
  }

 private:
  // Letters and at most one ellipsis, which becomes one dot.
  static void check(std::string_view equation, std::string& side) {
    const std::size_t dots = side.find("...");
    if (dots != std::string::npos) side.erase(dots, 2);
    for (std::size_t i = 0; i < side.size(); ++i) {
      if (!is_letter(side[i]) && i != dots) {
        malformed(equation, fmt::format("expected letters, commas, one ... a term and one ->, got '{}'", side[i]));
      }
    }
  }
};

Term term_of(std::string_view equation, const std::string& side, const Tensor& operand, std::size_t number) {
  const bool ellipsis = side.find('.') != std::string::npos;
  const int letters = static_cast<int>(side.size()) - (ellipsis ? 1 : 0);
  const int extra = operand.dim() - letters;
  if (extra < 0 || (extra > 0 && !ellipsis)) {
    fail<ShapeError>("einsum: expected {} dimensions for operand {} (\"{}\"), got {}",
                     ellipsis ? fmt::format("at least {}", letters) : fmt::format("{}", letters), number, equation,
                     operand.sizes().str());
  }
  Term term{operand, {}};
  for (char c : side) {
    if (c == '.') {
      for (int i = extra - 1; i >= 0; --i) term.labels.push_back(kLetters + i);
    } else {
      term.labels.push_back(label_of(c));
    }
  }
  // A label that comes twice: its diagonal, which diagonal() puts last.
  for (std::size_t i = 0; i < term.labels.size(); ++i) {
    for (std::size_t j = i + 1; j < term.labels.size(); ++j) {
      if (term.labels[j] != term.labels[i]) continue;
      const int label = term.labels[i];
      const auto a = static_cast<std::int64_t>(i), b = static_cast<std::int64_t>(j);
      if (term.tensor.size(a) != term.tensor.size(b)) {
        fail<ShapeError>("einsum: expected equal sizes for {} in operand {} (\"{}\"), got {} and {}", text_of(label),
                         number, equation, term.tensor.size(a), term.tensor.size(b));
      }
      term.tensor = diagonal(term.tensor, 0, a, b);
      term.labels.erase(term.labels.begin() + static_cast<std::ptrdiff_t>(j));
      term.labels.erase(term.labels.begin() + static_cast<std::ptrdiff_t>(i));
      term.labels.push_back(label);
      // From the start: what was at i is gone.
      i = static_cast<std::size_t>(-1);
      break;
    }
  }
  return term;
}

Set set_of(const Labels& labels) {
  Set set;
  for (int label : labels) set.set(static_cast<std::size_t>(label));
  return set;
}

std::int64_t product(const Term& t, const Labels& labels) {
  std::int64_t n = 1;
  for (int label : labels) n *= t.size(label);
  return n;
}

// The sum over all labels of both that are not in `kept`, as one matrix product.
Term contract(Term a, Term b, const Set& kept) {
  // What only one of them has and nobody needs is summed first; a size of 1 takes no part.
  for (int label : Labels(a.labels)) {
    if (!b.has(label) || a.size(label) == b.size(label)) continue;
    (a.size(label) == 1 ? a : b).drop(label);
  }
  a.sum_out(kept | set_of(b.labels));
  b.sum_out(kept | set_of(a.labels));
  Labels batch, summed, left, right;
  for (int label : a.labels) {
    const bool keep = kept[static_cast<std::size_t>(label)];
    (!b.has(label) ? left : keep ? batch : summed).push_back(label);
  }
  for (int label : b.labels) {
    if (!a.has(label)) right.push_back(label);
  }
  Term result;
  Shape sizes;
  for (const Labels* part : {&batch, &left, &right}) {
    for (int label : *part) {
      result.labels.push_back(label);
      sizes.push_back(part == &right ? b.size(label) : a.size(label));
    }
  }
  if (summed.empty()) {
    // No sum: products of elements.
    result.tensor = a.ordered(result.labels) * b.ordered(result.labels);
    return result;
  }
  const std::int64_t count = product(a, batch), m = product(a, left), n = product(b, right), k = product(a, summed);
  Labels a_order = batch, b_order = batch;
  a_order.insert(a_order.end(), left.begin(), left.end());
  a_order.insert(a_order.end(), summed.begin(), summed.end());
  b_order.insert(b_order.end(), summed.begin(), summed.end());
  b_order.insert(b_order.end(), right.begin(), right.end());
  if (batch.empty()) {
    result.tensor = mm(a.ordered(a_order).reshape({m, k}), b.ordered(b_order).reshape({k, n})).reshape(sizes);
  } else {
    result.tensor =
        bmm(a.ordered(a_order).reshape({count, m, k}), b.ordered(b_order).reshape({count, k, n})).reshape(sizes);
  }
  return result;
}

// Elements of the result of a pair less those of the two: what contracting it first costs in memory.
double cost(const Term& a, const Term& b, const Set& kept) {
  double size = 1;
  for (int label = 0; label < kLabels; ++label) {
    if (kept[static_cast<std::size_t>(label)]) size *= static_cast<double>(std::max(a.size(label), b.size(label)));
  }
  return size - static_cast<double>(a.tensor.numel()) - static_cast<double>(b.tensor.numel());
}

Tensor evaluate(std::string_view equation, std::span<const Tensor> operands) {
  const Sides sides(equation);
  if (sides.inputs.size() != operands.size()) {
    fail<Error>("einsum: expected {} operands for \"{}\", got {}", sides.inputs.size(), equation, operands.size());
  }
  std::vector<Term> terms;
  for (std::size_t i = 0; i < operands.size(); ++i) {
    check_defined(operands[i], "einsum", "operands");
    terms.push_back(term_of(equation, sides.inputs[i], operands[i], i));
  }
  // Sizes of one label agree but for 1.
  std::int64_t sizes[kLabels];
  int terms_with[kLabels] = {};
  std::fill(std::begin(sizes), std::end(sizes), std::int64_t{-1});
  for (const Term& t : terms) {
    for (int label : t.labels) {
      std::int64_t& known = sizes[label];
      const std::int64_t n = t.size(label);
      if (known < 0 || known == 1) {
        known = n;
      } else if (n != known && n != 1) {
        fail<ShapeError>("einsum: expected equal sizes or 1 for {} in \"{}\", got {} and {}", text_of(label), equation,
                         known, n);
      }
    }
  }
  for (const std::string& side : sides.inputs) {
    for (char c : side) {
      if (c != '.') ++terms_with[label_of(c)];
    }
  }
  int ellipsis = 0;
  for (int i = 0; i < kMaxDims; ++i) {
    if (sizes[kLetters + i] >= 0) ellipsis = i + 1;
  }
  Labels output;
  const auto put_ellipsis = [&] {
    for (int i = ellipsis - 1; i >= 0; --i) output.push_back(kLetters + i);
  };
  if (sides.has_output) {
    for (char c : sides.output) {
      if (c == '.') {
        put_ellipsis();
        continue;
      }
      const int label = label_of(c);
      if (sizes[label] < 0) malformed(equation, fmt::format("the result's {} is in no operand", c));
      if (contains(output, label)) malformed(equation, fmt::format("the result has {} twice", c));
      output.push_back(label);
    }
  } else {
    put_ellipsis();
    for (int label = 0; label < kLetters; ++label) {
      if (terms_with[label] == 1) output.push_back(label);
    }
  }
  if (output.size() > static_cast<std::size_t>(kMaxDims)) {
    fail<ShapeError>("einsum: the result of \"{}\" has {} dimensions, at most {} are allowed", equation, output.size(),
                     kMaxDims);
  }

  const Set wanted = set_of(output);
  while (terms.size() > 1) {
    std::size_t first = 0, second = 1;
    double best = 0;
    Set best_kept;
    for (std::size_t i = 0; i < terms.size(); ++i) {
      for (std::size_t j = i + 1; j < terms.size(); ++j) {
        Set kept = wanted;
        for (std::size_t k = 0; k < terms.size(); ++k) {
          if (k != i && k != j) kept |= set_of(terms[k].labels);
        }
        const double c = cost(terms[i], terms[j], kept);
        if ((i == 0 && j == 1) || c < best) {
          first = i;
          second = j;
          best = c;
          best_kept = kept;
        }
      }
    }
    Term result = contract(terms[first], terms[second], best_kept);
    terms.erase(terms.begin() + static_cast<std::ptrdiff_t>(second));
    terms[first] = std::move(result);
  }
  Term& result = terms[0];
  result.sum_out(wanted);
  return result.ordered(output);
}

}  // namespace

Tensor einsum(std::string_view equation, std::span<const Tensor> operands) {
  // composite() takes a list that the program wrote; this one comes at run time.
  if (!thread_state().autocast.enabled || !op_hooks().autocast) return evaluate(equation, operands);
  std::vector<const Tensor*> pointers;
  for (const Tensor& t : operands) {
    check_defined(t, "einsum", "operands");
    pointers.push_back(&t);
  }
  std::vector<Tensor> storage(operands.size());
  AutocastCall call{einsum_op, pointers, storage, nullptr};
  op_hooks().autocast(call);
  std::vector<Tensor> cast;
  for (const Tensor* t : pointers) cast.push_back(*t);
  const AutocastOff off;
  return evaluate(equation, cast);
}

Tensor tensordot(const Tensor& input, const Tensor& other, int dims) {
  check_defined(input, "tensordot", "input 0");
  check_defined(other, "tensordot", "input 1");
  if (dims < 0 || dims > input.dim() || dims > other.dim()) {
    fail<ShapeError>("tensordot: expected from 0 to {} dims for {} and {}, got {}", std::min(input.dim(), other.dim()),
                     input.sizes().str(), other.sizes().str(), dims);
  }
  Shape a, b;
  for (int i = 0; i < dims; ++i) {
    a.push_back(input.dim() - dims + i);
    b.push_back(i);
  }
  return tensordot(input, other, a, b);
}

Tensor tensordot(const Tensor& input, const Tensor& other, const Shape& dims_a, const Shape& dims_b) {
  return composite(tensordot_op, {&input, &other}, [&](std::span<const Tensor> in) {
    check_defined(in[0], "tensordot", "input 0");
    check_defined(in[1], "tensordot", "input 1");
    if (dims_a.size() != dims_b.size()) {
      fail<ShapeError>("tensordot: expected as many dims of both, got {} and {}", dims_a.str(), dims_b.str());
    }
    // Labels in order; those of the summed dimensions are shared.
    Term a{in[0], {}}, b{in[1], {}};
    for (int i = 0; i < in[0].dim(); ++i) a.labels.push_back(i);
    for (int i = 0; i < in[1].dim(); ++i) b.labels.push_back(kMaxDims + i);
    Set kept = set_of(a.labels) | set_of(b.labels);
    for (int i = 0; i < dims_a.size(); ++i) {
      const int x = wrap_dim(dims_a[i], in[0].dim(), "tensordot"), y = wrap_dim(dims_b[i], in[1].dim(), "tensordot");
      if (in[0].dim() == 0 || in[1].dim() == 0 || !kept[static_cast<std::size_t>(x)] ||
          b.labels[static_cast<std::size_t>(y)] < kMaxDims) {
        fail<ShapeError>("tensordot: expected each dimension once, got {} and {}", dims_a.str(), dims_b.str());
      }
      if (in[0].sizes()[x] != in[1].sizes()[y]) {
        fail<ShapeError>("tensordot: expected equal sizes in dimensions {} of {} and {} of {}", x, in[0].sizes().str(),
                         y, in[1].sizes().str());
      }
      kept.reset(static_cast<std::size_t>(x));
      kept.reset(static_cast<std::size_t>(kMaxDims) + static_cast<std::size_t>(y));
      b.labels[static_cast<std::size_t>(y)] = x;
    }
    return contract(std::move(a), std::move(b), kept).tensor;
  });
}

}  // namespace halfstep
