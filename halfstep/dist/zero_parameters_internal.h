// SPDX-License-Identifier: Apache-2.0
// Internal: parameters that are on their owner, and elsewhere only while they are used (ZeRO's stage 3).
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "halfstep/dist/process_group.h"
#include "halfstep/nn/module.h"

namespace halfstep::dist::detail {

class ParameterShards : public std::enable_shared_from_this<ParameterShards> {
 public:
  /// `owner`: of a parameter; -1: all ranks have it.
  ParameterShards(const NamedTensors& parameters, const std::function<int(const Tensor&)>& owner,
                  const ProcessGroup& group);
  ~ParameterShards();
  /// Frees the others' parameters, and has the modules bring them when they run.
  void attach(const nn::ModuleBase& module);
  /// Some of them, or all, are whole while the result lives. All ranks call it.
  std::shared_ptr<void> gather(const std::vector<Tensor>& parameters);
  std::shared_ptr<void> gather_all();
  /// Notes what modules bring for as long as the result lives, and takes part in the others' passes that do the same.
  std::shared_ptr<void> watch_pass();
  void follow_pass();
  /// Bytes of parameters on this rank now.
  std::int64_t bytes() const;

 private:
  /// What a module brought, or, empty, that it let go what it had brought at event `begin`.
  struct Event {
    std::size_t begin;
    std::vector<Tensor> parameters;
  };
  using Pass = std::vector<Event>;
  struct Entry;
  class Saved;
  class Hook;
  class Guard;
  Tensor values_of(const Entry& entry);
  void bring(Entry& entry);
  void free(Entry& entry);
  Entry* entry_of(const Tensor& parameter);
  std::shared_ptr<void> gather_for_module(const std::vector<Tensor>& parameters);

  ProcessGroup group_;
  std::vector<std::unique_ptr<Entry>> entries_;
  std::vector<Entry*> live_;    // those that are here, for modules
  std::shared_ptr<Pass> pass_;  // the one that was watched last
  bool watching_ = false;
};

}  // namespace halfstep::dist::detail
