// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/average_precision.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <optional>

#include "halfstep/core/fail.h"
#include "halfstep/train/verdicts.h"

namespace halfstep::training {
namespace {

constexpr int kOverlaps = 10;  // 0.5, 0.55, ... 0.95
constexpr int kRecalls = 101;
// As numpy's linspace makes them, so that a recall of 7 in 100 falls on the same side of 0.07 as in pycocotools.
double overlap_number(int i) { return i + 1 == kOverlaps ? 0.95 : 0.5 + i * ((0.95 - 0.5) / (kOverlaps - 1)); }
double recall_number(int i) { return i + 1 == kRecalls ? 1 : i * 0.01; }

struct AreaRange {
  double least, most;
};
constexpr double kEvery = 1e10;  // as pycocotools says "all"
constexpr AreaRange kAreas[] = {{0, kEvery}, {0, 32 * 32}, {32 * 32, 96 * 96}, {96 * 96, kEvery}};

double area_of(const BoxSides& b) { return b[2] * b[3]; }
double area_of(const TrueBox& t) { return t.area >= 0 ? t.area : area_of(t.box); }

// Numbers 0 to n - 1, those with the larger value first, equal ones in their order; NaN isn't there.
template <class F>
std::vector<std::size_t> falling(std::size_t n, F&& value) {
  std::vector<std::size_t> order(n);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return value(a) > value(b); });
  return order;
}

// A box that was found and counts, in the order of scores over all pictures.
struct Scored {
  double score;
  bool right;
};

// What a class reached at one overlap: of `objects` that count.
struct Curve {
  std::vector<double> recall, precision;  // after each box
};
Curve curve_of(const std::vector<Scored>& boxes, std::int64_t objects, double eps) {
  Curve c;
  double right = 0, wrong = 0;
  for (const Scored& s : boxes) {
    (s.right ? right : wrong) += 1;
    c.recall.push_back(right / static_cast<double>(objects));
    c.precision.push_back(right / (right + wrong + eps));
  }
  return c;
}
void make_envelope(std::vector<double>& precision) {
  for (std::size_t i = precision.size(); i-- > 1;) precision[i - 1] = std::max(precision[i - 1], precision[i]);
}

// --- COCO

// Boxes and objects of one class in one picture, with their overlaps.
struct Group {
  std::vector<const DetectedBox*> detected;  // by falling score, at most 100
  std::vector<const TrueBox*> truth;
  std::vector<double> overlaps;  // [detected, truth]
};

struct CocoCounts {
  std::vector<Scored> boxes;  // of all pictures, by falling score
  std::int64_t objects = 0;
};

// For each of the first `most` boxes whether it found an object that counts (1), none (0), or doesn't count itself
// (-1).
std::vector<int> match(const Group& g, const AreaRange& area, double threshold, std::size_t most,
                       std::int64_t& objects) {
  const auto ignored = [&](const TrueBox& t) { return t.crowd || area_of(t) < area.least || area_of(t) > area.most; };
  // Objects that count come first: a box takes one that doesn't only where it finds none.
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < g.truth.size(); ++i) {
    if (!ignored(*g.truth[i])) order.push_back(i);
  }
  const std::size_t counted = order.size();
  for (std::size_t i = 0; i < g.truth.size(); ++i) {
    if (ignored(*g.truth[i])) order.push_back(i);
  }
  objects += static_cast<std::int64_t>(counted);
  std::vector<bool> taken(order.size());
  std::vector<int> result;
  for (std::size_t d = 0; d < std::min(most, g.detected.size()); ++d) {
    double best = std::min(threshold, 1 - 1e-10);
    std::optional<std::size_t> found;
    for (std::size_t k = 0; k < order.size(); ++k) {
      if (taken[k] && !g.truth[order[k]]->crowd) continue;
      if (found && *found < counted && k >= counted) break;
      const double overlap = g.overlaps[d * g.truth.size() + order[k]];
      if (overlap < best) continue;
      best = overlap;
      found = k;
    }
    if (found) {
      taken[*found] = true;
      result.push_back(*found < counted ? 1 : -1);
    } else {
      const double size = area_of(g.detected[d]->box);
      result.push_back(size < area.least || size > area.most ? -1 : 0);
    }
  }
  return result;
}

// Numbers of the boxes of all groups, one group behind the other, by falling score: the order of every curve of them.
std::vector<std::size_t> order_of(const std::vector<Group>& groups) {
  std::vector<double> scores;
  for (const Group& g : groups) {
    for (const DetectedBox* d : g.detected) scores.push_back(d->score);
  }
  return falling(scores.size(), [&](std::size_t i) { return scores[i]; });
}

CocoCounts count(const std::vector<Group>& groups, const std::vector<std::size_t>& order, const AreaRange& area,
                 double threshold, std::size_t most) {
  CocoCounts counts;
  std::vector<Scored> boxes;
  std::vector<bool> counted;
  for (const Group& g : groups) {
    const std::vector<int> matches = match(g, area, threshold, most, counts.objects);
    for (std::size_t d = 0; d < g.detected.size(); ++d) {
      boxes.push_back({g.detected[d]->score, d < matches.size() && matches[d] == 1});
      counted.push_back(d < matches.size() && matches[d] >= 0);
    }
  }
  for (const std::size_t i : order) {
    if (counted[i]) counts.boxes.push_back(boxes[i]);
  }
  return counts;
}

struct Reached {
  double precision = -1, recall = -1;
};
Reached reached(const CocoCounts& counts) {
  if (counts.objects == 0) return {};
  Curve c = curve_of(counts.boxes, counts.objects, std::numeric_limits<double>::epsilon());
  make_envelope(c.precision);
  double sum = 0;
  for (int r = 0; r < kRecalls; ++r) {
    const auto at = std::lower_bound(c.recall.begin(), c.recall.end(), recall_number(r)) - c.recall.begin();
    if (at < std::ssize(c.precision)) sum += c.precision[static_cast<std::size_t>(at)];
  }
  return {sum / kRecalls, c.recall.empty() ? 0 : c.recall.back()};
}

// The mean of what is there; -1 of nothing.
class Mean {
 public:
  void add(double v) {
    if (v < 0) return;
    sum_ += v;
    ++n_;
  }
  double value() const { return n_ ? sum_ / n_ : -1; }

 private:
  double sum_ = 0;
  int n_ = 0;
};

// --- the trainers' protocol

struct Pair {
  std::size_t detected, truth;
  double overlap;
};
// Pairs of at least `least`, by falling overlap, each box and each object once, whatever their classes.
std::vector<Pair> pairs_of(const std::vector<const DetectedBox*>& detected, const std::vector<const TrueBox*>& truth,
                           double least) {
  std::vector<Pair> all, result;
  for (std::size_t d = 0; d < detected.size(); ++d) {
    for (std::size_t t = 0; t < truth.size(); ++t) {
      const double overlap = overlap_of(detected[d]->box, truth[t]->box);
      if (overlap >= least) all.push_back({d, t, overlap});
    }
  }
  std::stable_sort(all.begin(), all.end(), [](const Pair& a, const Pair& b) { return a.overlap > b.overlap; });
  std::vector<bool> used(detected.size()), found(truth.size());
  for (const Pair& p : all) {
    if (used[p.detected] || found[p.truth]) continue;
    used[p.detected] = found[p.truth] = true;
    result.push_back(p);
  }
  return result;
}

// Which boxes are right: each claims the object of its class that it overlaps most, by at least `least`, and of those
// that claim one the best has it. `detected` by falling score.
std::vector<bool> right_boxes(const std::vector<const DetectedBox*>& detected, const std::vector<const TrueBox*>& truth,
                              const std::vector<double>& overlaps, double least) {
  std::vector<bool> right(detected.size()), found(truth.size());
  for (std::size_t d = 0; d < detected.size(); ++d) {
    std::size_t claimed = truth.size();
    double most = least;
    for (std::size_t t = 0; t < truth.size(); ++t) {
      const double overlap = overlaps[d * truth.size() + t];
      if (detected[d]->label != truth[t]->label || overlap < most || (claimed < truth.size() && overlap == most))
        continue;
      most = overlap;
      claimed = t;
    }
    if (claimed == truth.size() || found[claimed]) continue;
    right[d] = found[claimed] = true;
  }
  return right;
}

// The value at x of the line through points of rising x; the first or last value beyond them.
double interpolated(const std::vector<double>& xs, const std::vector<double>& ys, double x) {
  const auto above = std::upper_bound(xs.begin(), xs.end(), x) - xs.begin();
  if (above == 0) return ys.front();
  if (above == std::ssize(xs)) return ys.back();
  const auto i = static_cast<std::size_t>(above);
  const double share = (x - xs[i - 1]) / (xs[i] - xs[i - 1]);
  return ys[i - 1] + share * (ys[i] - ys[i - 1]);
}

// Precision over recall as a curve from (0, 1) to (1, 0) that never rises.
Curve closed(const Curve& c) {
  Curve result{{0}, {1}};
  result.recall.insert(result.recall.end(), c.recall.begin(), c.recall.end());
  result.precision.insert(result.precision.end(), c.precision.begin(), c.precision.end());
  result.recall.push_back(1);
  result.precision.push_back(0);
  make_envelope(result.precision);
  return result;
}
double area_under(const Curve& c) {
  const Curve line = closed(c);
  double sum = 0, before = interpolated(line.recall, line.precision, 0);
  for (int r = 1; r < kRecalls; ++r) {
    const double here = interpolated(line.recall, line.precision, r / 100.0);
    sum += (before + here) / 200;
    before = here;
  }
  return sum;
}

// The boxes of a class over all pictures by falling score, at each overlap.
struct ClassBoxes {
  std::int64_t label = 0, pictures = 0, objects = 0;
  std::vector<double> scores;
  std::array<std::vector<Scored>, kOverlaps> boxes;
};

// The curve's value at a score: what the boxes of at least that score reached; `none` above all of them. `negative`:
// the boxes' scores with the other sign, so that they rise.
double at_score(const std::vector<double>& negative, const std::vector<double>& values, double score, double none) {
  if (negative.empty() || -score < negative.front()) return none;
  return interpolated(negative, values, -score);
}

// Means over a tenth of the points, the ends repeated.
std::vector<double> smoothed(const std::vector<double>& y) {
  const auto half = static_cast<std::ptrdiff_t>(y.size()) / 20, last = std::ssize(y) - 1;
  std::vector<double> result;
  for (std::ptrdiff_t i = 0; i <= last; ++i) {
    double sum = 0;
    for (std::ptrdiff_t k = i - half; k <= i + half; ++k) {
      sum += y[static_cast<std::size_t>(std::clamp<std::ptrdiff_t>(k, 0, last))];
    }
    result.push_back(sum / static_cast<double>(2 * half + 1));
  }
  return result;
}

void check_box(const BoxSides& b, const char* what) {
  const bool finite = std::all_of(b.begin(), b.end(), [](double v) { return std::isfinite(v); });
  if (!finite || b[2] < 0 || b[3] < 0) {
    fail<Error>("DetectionEvaluation: expected a {} box with finite sides of at least 0, got {}", what,
                fmt::join(b, ", "));
  }
}

}  // namespace

double overlap_of(const BoxSides& a, const BoxSides& b, bool crowd) {
  const double width = std::min(a[0] + a[2], b[0] + b[2]) - std::max(a[0], b[0]);
  const double height = std::min(a[1] + a[3], b[1] + b[3]) - std::max(a[1], b[1]);
  if (width <= 0 || height <= 0) return 0;
  const double both = width * height;
  return both / (crowd ? area_of(a) : area_of(a) + area_of(b) - both);
}

DetectionEvaluation::DetectionEvaluation(std::int64_t classes) : classes_(classes) {
  if (classes < 1) fail<Error>("DetectionEvaluation: expected at least 1 class, got {}", classes);
}

void DetectionEvaluation::add(std::vector<DetectedBox> detected, std::vector<TrueBox> truth) {
  const auto check_label = [&](std::int64_t label) {
    if (label < 0 || label >= classes_) {
      fail<Error>("DetectionEvaluation: expected labels from 0 to {}, got {}", classes_ - 1, label);
    }
  };
  for (const DetectedBox& d : detected) {
    check_label(d.label);
    check_box(d.box, "detected");
    if (std::isnan(d.score)) fail<Error>("DetectionEvaluation: expected scores that are numbers, got NaN");
  }
  for (const TrueBox& t : truth) {
    check_label(t.label);
    check_box(t.box, "true");
  }
  pictures_.push_back({std::move(detected), std::move(truth)});
}

void DetectionEvaluation::add(const DetectionEvaluation& other) {
  if (other.classes_ != classes_) {
    fail<Error>("DetectionEvaluation: expected an evaluation of {} classes, got one of {}", classes_, other.classes_);
  }
  const std::vector<Picture> more = other.pictures_;  // `other` may be this one
  pictures_.insert(pictures_.end(), more.begin(), more.end());
}

std::int64_t DetectionEvaluation::pictures() const { return std::ssize(pictures_); }
std::int64_t DetectionEvaluation::objects() const {
  std::int64_t n = 0;
  for (const Picture& p : pictures_) n += std::ssize(p.truth);
  return n;
}

CocoSummary DetectionEvaluation::coco() const {
  CocoSummary s;
  Mean ap50, ap75, of_area[4], ar1, ar10, ar_of_area[4];
  std::vector<std::vector<Group>> by_label(static_cast<std::size_t>(classes_));
  for (const Picture& p : pictures_) {
    std::map<std::int64_t, Group> of_picture;
    for (const std::size_t i : falling(p.detected.size(), [&](std::size_t d) { return p.detected[d].score; })) {
      Group& g = of_picture[p.detected[i].label];
      if (g.detected.size() < 100) g.detected.push_back(&p.detected[i]);
    }
    for (const TrueBox& t : p.truth) of_picture[t.label].truth.push_back(&t);
    for (auto& [label, g] : of_picture) {
      for (const DetectedBox* d : g.detected) {
        for (const TrueBox* t : g.truth) g.overlaps.push_back(overlap_of(d->box, t->box, t->crowd));
      }
      by_label[static_cast<std::size_t>(label)].push_back(std::move(g));
    }
  }
  for (const std::vector<Group>& groups : by_label) {
    const std::vector<std::size_t> order = order_of(groups);
    Mean own, own50;
    for (int i = 0; i < kOverlaps; ++i) {
      const double threshold = overlap_number(i);
      for (int a = 0; a < 4; ++a) {
        const Reached all = reached(count(groups, order, kAreas[a], threshold, 100));
        of_area[a].add(all.precision);
        ar_of_area[a].add(all.recall);
        if (a != 0) continue;
        own.add(all.precision);
        if (i == 0) own50.add(all.precision), ap50.add(all.precision);
        if (i == 5) ap75.add(all.precision);
      }
      ar1.add(reached(count(groups, order, kAreas[0], threshold, 1)).recall);
      ar10.add(reached(count(groups, order, kAreas[0], threshold, 10)).recall);
    }
    s.ap_of_class.push_back(own.value());
    s.ap50_of_class.push_back(own50.value());
  }
  s.ap = of_area[0].value(), s.ap50 = ap50.value(), s.ap75 = ap75.value();
  s.ap_small = of_area[1].value(), s.ap_medium = of_area[2].value(), s.ap_large = of_area[3].value();
  s.ar1 = ar1.value(), s.ar10 = ar10.value(), s.ar100 = ar_of_area[0].value();
  s.ar_small = ar_of_area[1].value(), s.ar_medium = ar_of_area[2].value(), s.ar_large = ar_of_area[3].value();
  return s;
}

namespace {

// The boxes of each class that has objects, by falling score over all pictures.
std::vector<ClassBoxes> by_class(std::int64_t classes, const auto& pictures) {
  std::vector<ClassBoxes> all(static_cast<std::size_t>(classes));
  for (const auto& p : pictures) {
    std::vector<const DetectedBox*> detected;
    std::vector<const TrueBox*> truth;
    for (const DetectedBox& d : p.detected) detected.push_back(&d);
    for (const TrueBox& t : p.truth) {
      if (t.crowd) continue;
      const bool first =
          std::none_of(truth.begin(), truth.end(), [&](const TrueBox* o) { return o->label == t.label; });
      truth.push_back(&t);
      ClassBoxes& c = all[static_cast<std::size_t>(t.label)];
      c.pictures += first ? 1 : 0;
      ++c.objects;
    }
    std::stable_sort(detected.begin(), detected.end(),
                     [](const DetectedBox* a, const DetectedBox* b) { return a->score > b->score; });
    std::vector<double> overlaps;
    for (const DetectedBox* d : detected) {
      for (const TrueBox* t : truth) overlaps.push_back(d->label == t->label ? overlap_of(d->box, t->box) : 0);
    }
    for (int i = 0; i < kOverlaps; ++i) {
      const std::vector<bool> right = right_boxes(detected, truth, overlaps, overlap_number(i));
      for (std::size_t d = 0; d < detected.size(); ++d) {
        ClassBoxes& c = all[static_cast<std::size_t>(detected[d]->label)];
        c.boxes[static_cast<std::size_t>(i)].push_back({detected[d]->score, right[d]});
      }
    }
  }
  std::vector<ClassBoxes> result;
  for (std::size_t label = 0; label < all.size(); ++label) {
    ClassBoxes& c = all[label];
    if (c.objects == 0) continue;
    c.label = static_cast<std::int64_t>(label);
    for (auto& boxes : c.boxes) {
      std::stable_sort(boxes.begin(), boxes.end(), [](const Scored& a, const Scored& b) { return a.score > b.score; });
    }
    for (const Scored& s : c.boxes[0]) c.scores.push_back(s.score);
    result.push_back(std::move(c));
  }
  return result;
}

DetectionCurves curves_of(const ClassBoxes& c, int points) {
  const Curve curve = curve_of(c.boxes[0], c.objects, 0), line = closed(curve);
  DetectionCurves result{.label = c.label};
  std::vector<double> negative;
  for (const double score : c.scores) negative.push_back(-score);
  for (int i = 0; i < points; ++i) {
    const double x = static_cast<double>(i) / (points - 1);
    const double precision = at_score(negative, curve.precision, x, 1), recall = at_score(negative, curve.recall, x, 0);
    result.precision.push_back(c.scores.empty() ? 0 : precision);
    result.recall.push_back(recall);
    result.f1.push_back(2 * precision * recall / (precision + recall + 1e-16));
    result.precision_at_recall.push_back(interpolated(line.recall, line.precision, x));
  }
  return result;
}

// Bytes of numbers, one behind the other.
template <class T>
void put(std::string& to, T value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof(value));
}
template <class T>
T take(std::string_view& from) {
  T value{};
  if (from.size() < sizeof(value)) fail<Error>("DetectionEvaluation: expected bytes of an evaluation, got too few");
  std::memcpy(&value, from.data(), sizeof(value));
  from.remove_prefix(sizeof(value));
  return value;
}
// A number of items of `bytes` each, which must be there.
std::size_t take_count(std::string_view& from, std::size_t bytes) {
  const auto n = take<std::uint64_t>(from);
  if (n > from.size() / bytes) fail<Error>("DetectionEvaluation: expected bytes of an evaluation, got too few");
  return static_cast<std::size_t>(n);
}

}  // namespace

DetectionSummary DetectionEvaluation::summary() const {
  constexpr int kPoints = 1000;
  const std::vector<ClassBoxes> classes = by_class(classes_, pictures_);
  DetectionSummary s;
  if (classes.empty()) return s;
  std::vector<DetectionCurves> curves;
  std::vector<double> f1(kPoints);
  for (const ClassBoxes& c : classes) {
    curves.push_back(curves_of(c, kPoints));
    for (std::size_t i = 0; i < f1.size(); ++i) f1[i] += curves.back().f1[i];
  }
  const std::vector<double> mean = smoothed(f1);
  const auto best = static_cast<std::size_t>(std::max_element(mean.begin(), mean.end()) - mean.begin());
  s.score = static_cast<double>(best) / (kPoints - 1);
  const auto n = static_cast<double>(classes.size());
  for (std::size_t k = 0; k < classes.size(); ++k) {
    const ClassBoxes& c = classes[k];
    ClassDetection one{.label = c.label,
                       .pictures = c.pictures,
                       .objects = c.objects,
                       .precision = curves[k].precision[best],
                       .recall = curves[k].recall[best]};
    for (std::size_t i = 0; i < kOverlaps; ++i) {
      const double area = c.boxes[i].empty() ? 0 : area_under(curve_of(c.boxes[i], c.objects, 0));
      one.ap += area / kOverlaps;
      if (i == 0) one.ap50 = area;
    }
    s.precision += one.precision / n, s.recall += one.recall / n;
    s.ap50 += one.ap50 / n, s.ap += one.ap / n;
    s.classes.push_back(one);
  }
  return s;
}

std::vector<DetectionCurves> DetectionEvaluation::curves(int points) const {
  if (points < 2) fail<Error>("DetectionEvaluation: expected curves of at least 2 points, got {}", points);
  std::vector<DetectionCurves> result;
  for (const ClassBoxes& c : by_class(classes_, pictures_)) result.push_back(curves_of(c, points));
  return result;
}

std::vector<std::int64_t> DetectionEvaluation::confusion(double score, double overlap) const {
  if (classes_ > kMostConfusionClasses) {
    fail<Error>("confusion matrix: expected at most {} classes, got {}", kMostConfusionClasses, classes_);
  }
  const auto side = static_cast<std::size_t>(classes_ + 1), none = static_cast<std::size_t>(classes_);
  std::vector<std::int64_t> counts(side * side);
  for (const Picture& p : pictures_) {
    std::vector<const DetectedBox*> detected;
    std::vector<const TrueBox*> truth;
    for (const DetectedBox& d : p.detected) {
      if (d.score >= score) detected.push_back(&d);
    }
    for (const TrueBox& t : p.truth) {
      if (!t.crowd) truth.push_back(&t);
    }
    std::vector<bool> used(detected.size()), found(truth.size());
    for (const Pair& pair : pairs_of(detected, truth, overlap)) {
      used[pair.detected] = found[pair.truth] = true;
      ++counts[static_cast<std::size_t>(detected[pair.detected]->label) * side +
               static_cast<std::size_t>(truth[pair.truth]->label)];
    }
    for (std::size_t d = 0; d < detected.size(); ++d) {
      if (!used[d]) ++counts[static_cast<std::size_t>(detected[d]->label) * side + none];
    }
    for (std::size_t t = 0; t < truth.size(); ++t) {
      if (!found[t]) ++counts[none * side + static_cast<std::size_t>(truth[t]->label)];
    }
  }
  return counts;
}

std::string DetectionEvaluation::serialized() const {
  std::string bytes;
  put(bytes, classes_);
  put(bytes, static_cast<std::uint64_t>(pictures_.size()));
  for (const Picture& p : pictures_) {
    put(bytes, static_cast<std::uint64_t>(p.detected.size()));
    for (const DetectedBox& d : p.detected) put(bytes, d.label), put(bytes, d.score), put(bytes, d.box);
    put(bytes, static_cast<std::uint64_t>(p.truth.size()));
    for (const TrueBox& t : p.truth) {
      put(bytes, t.label), put(bytes, t.box), put(bytes, t.area), put(bytes, static_cast<std::uint8_t>(t.crowd));
    }
  }
  return bytes;
}

DetectionEvaluation DetectionEvaluation::deserialized(std::string_view bytes) {
  DetectionEvaluation result(take<std::int64_t>(bytes));
  constexpr std::size_t kBox = 4 * sizeof(double), kLeast = 2 * sizeof(std::uint64_t);
  for (std::size_t n = take_count(bytes, kLeast); n > 0; --n) {
    std::vector<DetectedBox> detected(take_count(bytes, kBox + 16));
    for (DetectedBox& d : detected) {
      d.label = take<std::int64_t>(bytes), d.score = take<double>(bytes), d.box = take<BoxSides>(bytes);
    }
    std::vector<TrueBox> truth(take_count(bytes, kBox + 17));
    for (TrueBox& t : truth) {
      t.label = take<std::int64_t>(bytes), t.box = take<BoxSides>(bytes), t.area = take<double>(bytes);
      t.crowd = take<std::uint8_t>(bytes) != 0;
    }
    result.add(std::move(detected), std::move(truth));
  }
  if (!bytes.empty())
    fail<Error>("DetectionEvaluation: expected bytes of an evaluation, got {} too many", bytes.size());
  return result;
}

}  // namespace halfstep::training
