// SPDX-License-Identifier: Apache-2.0
#include "cli/progress.h"

#include <fmt/format.h>

#include <cmath>

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
std::string accuracy_text(const char* name, const training::Meter& m) {
  return fmt::format("{} {:6.2f} ({:6.2f})", name, 100 * m.last, 100 * m.mean());
}

}  // namespace

std::string step_line(const training::StepReport& r) {
  return fmt::format("Epoch: [{}]{}\t{}\t{}\t{}\t{}\t{}", r.epoch - 1, place(r.step_in_epoch, r.steps_in_epoch),
                     time_text("Time", r.seconds), time_text("Data", r.data_seconds), loss_text(r.loss, r.mean_loss),
                     accuracy_text("Acc@1", r.top1), accuracy_text("Acc@5", r.top5));
}

std::string eval_line(const training::EvalProgress& p) {
  return fmt::format("Test: {}\t{}\t{}\t{}\t{}", place(p.batch, p.batches), time_text("Time", p.seconds),
                     loss_text(p.loss.last, p.loss.mean()), accuracy_text("Acc@1", p.top1),
                     accuracy_text("Acc@5", p.top5));
}

std::string accuracy_line(const training::EvalReport& r) {
  return fmt::format(" * Acc@1 {:.3f} Acc@5 {:.3f}", 100 * r.top1, 100 * r.top5);
}

}  // namespace halfstep::cli
