// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/task.h"

namespace halfstep::training {

Task::~Task() = default;
std::shared_ptr<const data::Dataset> Task::training_data(std::shared_ptr<const data::Dataset> samples) const {
  return samples;
}
void Task::count(TaskLoss& /*made*/, const data::Batch& /*batch*/) {}
void Task::begin_evaluation() {}
void Task::merge_evaluation(dist::ProcessGroup& /*group*/) {}
TaskLoss Task::evaluate(const data::Batch& batch) {
  TaskLoss made = loss(batch);
  count(made, batch);
  return made;
}
void Task::end_evaluation(MetricResults& /*results*/) {}
ResultTable Task::result_table() const { return {}; }
std::vector<std::string> Task::predictions(const data::Batch& /*batch*/) { return {}; }
std::vector<ProgressColumn> Task::progress(const ProgressState& /*state*/) const { return {}; }
void Task::write_results(const ResultPlace& /*place*/) const {}
std::string Task::best_by() const { return "loss"; }
bool Task::larger_is_better() const { return false; }
void Task::check_saved(const std::map<std::string, double>& /*parts*/, std::int64_t /*samples*/,
                       std::optional<double> /*best*/) const {}
std::string Task::network_description() const { return {}; }
void Task::check_network(const std::string& /*description*/) const {}
std::int64_t Task::samples(const data::Batch& batch) const { return batch.input.dim() > 0 ? batch.input.size(0) : 1; }

}  // namespace halfstep::training
