// SPDX-License-Identifier: Apache-2.0
// The lines of training and evaluation as the usual ImageNet scripts print them, so that what reads their logs reads
// ours.
#pragma once

#include <string>
#include <vector>

#include "halfstep/train/trainer.h"

namespace halfstep::cli {

/// `Epoch: [0][  10/5005]\tTime  0.302 ( 0.315)\tData ...\tLoss 6.9078e+00 (6.9112e+00)\tAcc@1   0.00 (  0.12)\tAcc@5
/// ...`: last value and mean of the epoch, the parts of the task behind the loss. Epochs count from 0 here, as in those
/// scripts.
std::string step_line(const training::StepReport& report);
/// The columns of a task's own line (training::Task::progress), or their names: each 11 characters wide, to the right.
std::string columns_text(const std::vector<training::ProgressColumn>& columns, bool names);
/// `Test: [ 10/782]\tTime ...\tLoss ...\tAcc@1 ...\tAcc@5 ...`.
std::string eval_line(const training::EvalProgress& progress);
/// Whether a result of this name is a share of right answers, as the usual ImageNet scripts name them: logs have it as
/// a fraction of 1, people read percentages. (Those of detectors stay fractions, as YOLOv5 prints them.)
bool is_share(const std::string& name);
/// ` * Acc@1 76.130 Acc@5 92.862`.
std::string accuracy_line(const training::MetricResults& results);
/// `top1 97.86%`, `loss 0.0712`.
std::string result_text(const std::string& name, double value);
/// `loss 0.0712, top1 97.86%, top5 99.91%`: the numbers among the results; shares of right answers in percent.
std::string results_text(const training::MetricResults& results);

}  // namespace halfstep::cli
