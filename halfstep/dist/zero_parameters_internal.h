// SPDX-License-Identifier: Apache-2.0
// Internal: parameters that are on their owner, and elsewhere only while they are used (ZeRO's stage 3).
#pragma once

#include <functional>
#include <memory>

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
  /// Bytes of parameters on this rank now.
  std::int64_t bytes() const;

 private:
  struct Entry;
  class Saved;
  class Hook;
  class Guard;
  Tensor values_of(const Entry& entry);
  void bring(Entry& entry);
  void free(Entry& entry);
  Entry* entry_of(const Tensor& parameter);

  ProcessGroup group_;
  std::vector<std::unique_ptr<Entry>> entries_;
  std::vector<Entry*> live_;  // those that are here, for modules
};

}  // namespace halfstep::dist::detail
