// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/print.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <ostream>

#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/op.h"

namespace halfstep {
namespace {

struct Options {
  std::mutex mutex;
  PrintOptions value;
};
Options& options() {
  static Options& instance = *new Options;
  return instance;
}

constexpr const char* kOpening = "tensor(";

// Printing is not part of anybody's graph or region.
class Unrecorded {
 public:
  Unrecorded() : was_(thread_state().grad_enabled) { thread_state().grad_enabled = false; }
  ~Unrecorded() { thread_state().grad_enabled = was_; }
  Unrecorded(const Unrecorded&) = delete;
  Unrecorded& operator=(const Unrecorded&) = delete;

 private:
  bool was_;
  AutocastOff autocast_off_;
};

// The values shown, read from the device at once.
struct Values {
  DType dtype;
  std::vector<double> floating;
  std::vector<std::int64_t> integer;

  explicit Values(const Tensor& t) : dtype(t.dtype()) {
    if (halfstep::is_floating(dtype)) {
      floating = t.to_vector<double>();
    } else {
      integer = t.to_vector<std::int64_t>();
    }
  }
};

// How each value is written: one format for the whole tensor, so that columns line up.
class Format {
 public:
  Format(const Values& values, const PrintOptions& o) : values_(values), options_(o) {
    if (!values.floating.empty()) choose();
    const std::size_t n = values.floating.empty() ? values.integer.size() : values.floating.size();
    for (std::size_t i = 0; i < n; ++i) width_ = std::max(width_, text(i).size());
  }

  std::size_t width() const { return width_; }
  std::string text(std::size_t i) const {
    if (values_.dtype == DType::boolean) return values_.integer[i] ? "true" : "false";
    if (!halfstep::is_floating(values_.dtype)) return std::to_string(values_.integer[i]);
    const double v = values_.floating[i];
    if (std::isnan(v)) return "nan";
    if (std::isinf(v)) return v > 0 ? "inf" : "-inf";
    if (scientific_) return fmt::format("{:.{}e}", v, options_.precision);
    if (whole_) return fmt::format("{:.0f}.", v);
    return fmt::format("{:.{}f}", v, options_.precision);
  }

 private:
  void choose() {
    double smallest = HUGE_VAL, largest = 0;
    for (double v : values_.floating) {
      if (!std::isfinite(v) || v == 0) continue;
      whole_ &= v == std::trunc(v);
      smallest = std::min(smallest, std::fabs(v));
      largest = std::max(largest, std::fabs(v));
    }
    if (largest == 0) return;
    scientific_ = largest / smallest > 1000 || largest > 1e8 || (!whole_ && smallest < 1e-4);
    if (options_.scientific) scientific_ = *options_.scientific;
  }

  const Values& values_;
  const PrintOptions& options_;
  bool whole_ = true;
  bool scientific_ = false;
  std::size_t width_ = 0;
};

class Writer {
 public:
  Writer(const Format& format, const Shape& sizes, const Shape& cut, const PrintOptions& o, std::string& out)
      : format_(format), sizes_(sizes), cut_(cut), options_(o), out_(out) {}

  void write(int dim, std::size_t column) {
    if (sizes_.empty()) {
      out_ += format_.text(0);
      return;
    }
    out_ += '[';
    ++column;
    const std::int64_t n = sizes_[dim];
    const std::int64_t gap = cut_[dim] ? options_.edge_items : -1;
    const bool last = dim + 1 == sizes_.size();
    const auto per_line = std::max<std::int64_t>(1, (options_.line_width - static_cast<std::int64_t>(column) + 1) /
                                                        static_cast<std::int64_t>(format_.width() + 2));
    std::int64_t written = 0;
    // What stands before each item: commas, and in the last dimension as many items as fit a line.
    const auto separate = [&] {
      if (written > 0) out_ += ',';
      if (written > 0 && !last)
        out_.append(static_cast<std::size_t>(sizes_.size() - 1 - dim), '\n').append(column, ' ');
      if (written > 0 && last) written % per_line == 0 ? out_.append(1, '\n').append(column, ' ') : out_.append(1, ' ');
      ++written;
    };
    const auto gap_here = [&](std::int64_t i) {
      if (i != gap) return;
      separate();
      out_ += last ? " ..." : "...";
    };
    for (std::int64_t i = 0; i < n; ++i) {
      gap_here(i);
      separate();
      if (last) {
        const std::string text = format_.text(next_++);
        out_.append(format_.width() - text.size(), ' ').append(text);
      } else {
        write(dim + 1, column);
      }
    }
    if (n == 0) gap_here(0);
    out_ += ']';
  }

 private:
  const Format& format_;
  const Shape& sizes_;
  const Shape& cut_;  // per dimension: whether a middle part was left out
  const PrintOptions& options_;
  std::string& out_;
  std::size_t next_ = 0;
};

// The tensor without the middle of its long dimensions.
Tensor edges(const Tensor& t, std::int64_t edge_items, Shape& cut) {
  Tensor result = t;
  for (int d = 0; d < t.dim(); ++d) {
    const std::int64_t n = t.sizes()[d];
    if (n <= 2 * edge_items) continue;
    cut[d] = 1;
    const Tensor parts[] = {result.slice(d, 0, edge_items), result.slice(d, n - edge_items, n)};
    result = edge_items == 0 ? parts[0] : cat(parts, d);
  }
  return result;
}

}  // namespace

void set_print_options(const PrintOptions& o) {
  if (o.precision < 0 || o.threshold < 0 || o.edge_items < 0 || o.line_width < 0) {
    fail<Error>(
        "set_print_options: expected numbers of at least 0, got precision {}, threshold {}, edge_items {}, "
        "line_width {}",
        o.precision, o.threshold, o.edge_items, o.line_width);
  }
  std::lock_guard lock(options().mutex);
  options().value = o;
}

PrintOptions print_options() {
  std::lock_guard lock(options().mutex);
  return options().value;
}

std::string Tensor::str() const {
  if (!defined()) return "tensor(undefined)";
  const PrintOptions o = print_options();
  std::string text = kOpening;
  if (numel() == 0) {
    text += "[]";
  } else if (device().is_meta()) {
    text += "...";
  } else {
    const Unrecorded unrecorded;
    Shape cut = Shape::filled(dim(), 0);
    const Tensor shown = numel() > o.threshold ? edges(*this, o.edge_items, cut) : *this;
    const Values values(shown);
    Writer(Format(values, o), shown.sizes(), cut, o, text).write(0, text.size());
  }

  std::vector<std::string> notes;
  if ((numel() == 0 && dim() != 1) || device().is_meta()) notes.push_back(fmt::format("size={}", sizes().str()));
  const DType d = dtype();
  if ((d != DType::f32 && d != DType::i64 && d != DType::boolean) || (numel() == 0 && d != DType::f32)) {
    notes.push_back(fmt::format("dtype={}", name(d)));
  }
  if (!device().is_cpu()) notes.push_back(fmt::format("device={}", device().str()));
  if (requires_grad()) {
    const std::string made_by = impl()->grad_slot ? impl()->grad_slot->made_by() : std::string();
    notes.push_back(made_by.empty() ? std::string("requires_grad=true") : fmt::format("grad_fn=<{}>", made_by));
  }
  const std::size_t line_start = text.rfind('\n') == std::string::npos ? 0 : text.rfind('\n') + 1;
  auto length = static_cast<std::int64_t>(text.size() - line_start);
  for (const std::string& note : notes) {
    // Room for the comma and space before it and the bracket after it.
    if (length + static_cast<std::int64_t>(note.size()) + 3 > o.line_width) {
      text += ",\n" + std::string(std::char_traits<char>::length(kOpening), ' ') + note;
      length = static_cast<std::int64_t>(std::char_traits<char>::length(kOpening) + note.size());
    } else {
      text += ", " + note;
      length += static_cast<std::int64_t>(note.size()) + 2;
    }
  }
  return text + ")";
}

std::ostream& operator<<(std::ostream& out, const Tensor& tensor) { return out << tensor.str(); }

}  // namespace halfstep
