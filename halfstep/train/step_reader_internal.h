// SPDX-License-Identifier: Apache-2.0
// Brings the values of steps to the host, many at once where each read would make a device's queue wait.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "halfstep/train/callback.h"
#include "halfstep/train/train_step.h"

namespace halfstep::training {

class StepReader {
 public:
  /// Takes a step's values; `record` has what the host knows of it. On the CPU they are read now, elsewhere one small
  /// tensor of them is kept there.
  void add(const StepValues& values, StepRecord record);
  /// Steps since the last take().
  std::size_t size() const { return records_.size(); }
  /// Those steps, whole: one read of the device.
  std::vector<StepRecord> take();

 private:
  struct Pending {
    std::size_t place;  // in records_
    std::size_t losses;
    std::vector<double> weights;
    std::vector<std::string> parts;
    Tensor flags;
    std::shared_ptr<const std::vector<std::string>> names;
    std::vector<std::function<void(std::map<std::string, double>&)>> count_later;
  };
  static void fill(StepRecord& record, const Pending& kept, const double* numbers);
  void read();

  std::vector<StepRecord> records_;
  std::vector<Pending> pending_;  // a row of the ring each
  Tensor ring_;                   // [rows, numbers of a step] on the device
};

}  // namespace halfstep::training
