// SPDX-License-Identifier: Apache-2.0
#include "cli/progress.h"

#include <fmt/format.h>

#include <cmath>
#include <map>

namespace halfstep::cli {
namespace {

// The width of the larger number, so that the lines of an epoch are aligned.
std::string place(std::int64_t now, std::int64_t all) {
  const auto width = std::to_string(all).size();
  return fmt::format("[{:{}}/{}]", now, width, all);
}

// A NaN has no sign here: which one it got is chance.
double unsigned_nan(double value) { return std::isnan(value) ? std::fabs(value) : value; }

std::string loss_text(double last, double mean) {
  return fmt::format("Loss {:.4e} ({:.4e})", unsigned_nan(last), unsigned_nan(mean));
}
std::string time_text(const char* name, const training::Meter& m) {
  return fmt::format("{} {:6.3f} ({:6.3f})", name, m.last, m.mean());
}
std::string label(const std::string& name) { return name.starts_with("top") ? "Acc@" + name.substr(3) : name; }

std::string part_text(const std::string& name, const training::Meter& m) {
  if (!is_share(name)) return fmt::format("{} {:.4e} ({:.4e})", name, unsigned_nan(m.last), unsigned_nan(m.mean()));
  return fmt::format("{} {:6.2f} ({:6.2f})", label(name), 100 * m.last, 100 * m.mean());
}
std::string parts_text(const std::map<std::string, training::Meter>& parts) {
  std::string text;
  for (const auto& [name, meter] : parts) text += "\t" + part_text(name, meter);
  return text;
}

}  // namespace

bool is_share(const std::string& name) { return name.starts_with("top") || name == "accuracy"; }

std::string step_line(const training::StepReport& r) {
  return fmt::format("Epoch: [{}]{}\t{}\t{}\t{}{}", r.epoch - 1, place(r.step_in_epoch, r.steps_in_epoch),
                     time_text("Time", r.step_seconds), time_text("Data", r.step_data_seconds),
                     loss_text(r.loss, r.mean_loss), parts_text(r.part_means));
}

std::string columns_text(const std::vector<training::ProgressColumn>& columns, bool names) {
  std::string text;
  for (const training::ProgressColumn& c : columns) text += fmt::format("{:>11}", names ? c.name : c.value);
  return text;
}

std::string eval_line(const training::EvalProgress& p) {
  return fmt::format("Test: {}\t{}\t{}{}", place(p.batch, p.batches), time_text("Time", p.seconds),
                     loss_text(p.loss.last, p.loss.mean()), parts_text(p.parts));
}

std::string accuracy_line(const training::MetricResults& results) {
  std::string text = " *";
  for (const auto& [name, value] : results) {
    if (name == "loss" || !value.is_number()) continue;
    const double number = value;
    text +=
        is_share(name) ? fmt::format(" {} {:.3f}", label(name), 100 * number) : fmt::format(" {} {:.4g}", name, number);
  }
  return text;
}

std::string result_text(const std::string& name, double value) {
  return is_share(name) ? fmt::format("{} {:.2f}%", name, 100 * value)
                        : fmt::format("{} {:.4f}", name, unsigned_nan(value));
}

std::string results_text(const training::MetricResults& results) {
  std::string text;
  for (const auto& [name, value] : results) {
    if (value.is_number()) text += (text.empty() ? "" : ", ") + result_text(name, value);
  }
  return text;
}

}  // namespace halfstep::cli
