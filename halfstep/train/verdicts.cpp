// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/verdicts.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/train/likeliest_internal.h"
#include "halfstep/train/results.h"

namespace halfstep::training {
namespace {

double ratio(std::int64_t part, std::int64_t whole) {
  return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0;
}

std::size_t place(std::int64_t i) { return static_cast<std::size_t>(i); }

}  // namespace

void Verdicts::clear() {
  classes = 0;
  label.clear();
  said.clear();
  share.clear();
}

void Verdicts::add(const Tensor& scores, const Tensor& target) {
  const NoGrad no_grad;
  if (scores.dim() != 2 || target.dim() < 1 || target.dim() > 2 || target.size(0) != scores.size(0) ||
      (target.dim() == 2 && target.size(1) != scores.size(1)) || (size() > 0 && scores.size(1) != classes)) {
    fail<ShapeError>("Verdicts: expected scores [N, {}] and labels [N] or shares of that shape, got {} and {}",
                     size() > 0 ? std::to_string(classes) : "classes", scores.sizes().str(), target.sizes().str());
  }
  classes = scores.size(1);
  const std::vector<float> rows = scores.detach().to_vector<float>();
  std::vector<std::int64_t> labels;
  if (target.dim() == 1) {
    labels = target.to_vector<std::int64_t>();
  } else {
    const std::vector<double> shares = target.to_vector<double>();
    for (std::int64_t i = 0; i < target.size(0); ++i) labels.push_back(likeliest(&shares[place(i * classes)], classes));
  }
  for (std::size_t i = 0; i < labels.size(); ++i) {
    const float* row = rows.data() + i * place(classes);
    const std::int64_t best = likeliest(row, classes);
    double sum = 0;
    for (std::int64_t c = 0; c < classes && best >= 0; ++c) {
      if (!std::isnan(row[c])) sum += row[c] == row[best] ? 1 : std::exp(double{row[c]} - double{row[best]});
    }
    const bool known = labels[i] >= 0 && labels[i] < classes;
    label.push_back(known ? static_cast<std::int32_t>(labels[i]) : -1);
    said.push_back(static_cast<std::int32_t>(best));
    share.push_back(best >= 0 ? static_cast<float>(1 / sum) : 0);
  }
}

void Verdicts::merge(dist::ProcessGroup& group) {
  const auto text_of = [](const auto& list) {
    return std::string(reinterpret_cast<const char*>(list.data()), list.size() * sizeof(list[0]));
  };
  const auto merge_list = [&](auto& list) {
    const std::vector<std::string> parts = group.all_gather_text(text_of(list));
    list.clear();
    for (const std::string& part : parts) {
      const std::size_t old = list.size(), more = part.size() / sizeof(list[0]);
      list.resize(old + more);
      if (more > 0) std::memcpy(list.data() + old, part.data(), more * sizeof(list[0]));
    }
  };
  std::vector<std::int64_t> sizes{classes};
  merge_list(sizes);
  classes = *std::max_element(sizes.begin(), sizes.end());
  merge_list(label);
  merge_list(said);
  merge_list(share);
}

std::int64_t Verdicts::right() const {
  std::int64_t count = 0;
  for (std::size_t i = 0; i < said.size(); ++i) count += said[i] >= 0 && said[i] == label[i] ? 1 : 0;
  return count;
}

std::vector<ClassRow> class_rows(const Verdicts& verdicts, const std::vector<std::string>& names) {
  std::vector<ClassRow> rows(place(verdicts.classes));
  for (std::size_t c = 0; c < rows.size(); ++c) {
    rows[c].name = c < names.size() && !names[c].empty() ? names[c] : std::to_string(c);
  }
  for (std::size_t i = 0; i < verdicts.said.size(); ++i) {
    const std::int32_t label = verdicts.label[i], said = verdicts.said[i];
    if (label >= 0) ++rows[place(label)].count;
    // What was said of a sample without a label is neither right nor wrong.
    if (label >= 0 && said >= 0) ++rows[place(said)].said;
    if (label >= 0 && label == said) ++rows[place(label)].right;
  }
  for (ClassRow& r : rows) {
    r.precision = ratio(r.right, r.said);
    r.recall = ratio(r.right, r.count);
    r.f1 = ratio(2 * r.right, r.said + r.count);
  }
  return rows;
}

std::string class_rows_csv(const std::vector<ClassRow>& rows) {
  std::string text = "class,precision,recall,f1,count\n";
  for (const ClassRow& r : rows) {
    text += fmt::format("{},{},{},{},{}\n", csv_field(r.name), r.precision, r.recall, r.f1, r.count);
  }
  return text;
}

std::vector<std::int64_t> confusion_counts(const Verdicts& verdicts) {
  if (verdicts.classes > kMostConfusionClasses) {
    fail<Error>("confusion matrix: expected at most {} classes, got {}", kMostConfusionClasses, verdicts.classes);
  }
  std::vector<std::int64_t> counts(place(verdicts.classes * verdicts.classes));
  for (std::size_t i = 0; i < verdicts.said.size(); ++i) {
    const std::int64_t label = verdicts.label[i], said = verdicts.said[i];
    if (label >= 0 && said >= 0) ++counts[place(label * verdicts.classes + said)];
  }
  return counts;
}

}  // namespace halfstep::training
