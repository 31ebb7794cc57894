// SPDX-License-Identifier: Apache-2.0
// Internal: parameters that are on their owner, and elsewhere only while they are used (ZeRO's stage 3).
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "halfstep/dist/gather_order_internal.h"
#include "halfstep/dist/process_group.h"
#include "halfstep/dist/zero.h"
#include "halfstep/nn/module.h"

namespace halfstep::dist::detail {

/// While a module computes, the largest parameter of the one that is expected next (gather_order_internal.h) comes.
class ParameterShards : public std::enable_shared_from_this<ParameterShards> {
 public:
  /// `owner`: of a parameter; -1: all ranks have it.
  ParameterShards(const NamedTensors& parameters, const std::function<int(const Tensor&)>& owner,
                  const ProcessGroup& group, bool prefetch);
  ~ParameterShards();
  /// Frees the others' parameters, and has the modules bring them when they run.
  void attach(const nn::ModuleBase& module);
  /// Some of them, or all, are whole while the result lives. All ranks call it.
  std::shared_ptr<void> gather(const std::vector<Tensor>& parameters);
  std::shared_ptr<void> gather_all();
  /// Notes what modules bring for as long as the result lives, and takes part in the others' passes that do the same.
  std::shared_ptr<void> watch_pass();
  void follow_pass();
  /// The owners' values are about to change, or have: none that came ahead is used. All ranks call it.
  void values_change();
  /// Bytes of parameters on this rank now.
  std::int64_t bytes() const;
  const ZeroGathers& stats() const { return stats_; }

 private:
  /// What happens in a pass: it begins with the whole network, a module brings parameters at event `begin`, and lets
  /// them go.
  struct Event {
    enum Kind : std::uint8_t { pass_begins, brought, let_go } kind;
    std::size_t begin;
    std::vector<Tensor> parameters;
  };
  using Pass = std::vector<Event>;
  struct Entry;
  struct Gather;
  class Saved;
  class Hook;
  class Guard;
  void begin_pass();
  void drop_ahead();
  void begin_next(Gather& gather, bool ahead);
  std::vector<Tensor> values_of(const GatherOrder::Unit& unit, bool follows_order);
  void bring(const std::vector<Entry*>& entries, bool of_module);
  void place(Entry& entry, const Tensor& values);
  void free(Entry& entry);
  Entry* entry_of(const Tensor& parameter);
  void begin_pass_of_network();
  std::shared_ptr<void> gather_for_module(const std::vector<Tensor>& parameters);

  ProcessGroup group_;
  const bool prefetch_;
  std::vector<std::unique_ptr<Entry>> entries_;
  std::shared_ptr<Pass> pass_;  // the one that was watched last
  bool watching_ = false;
  std::vector<Entry*> live_;  // those that are here, for modules
  GatherOrder order_;
  std::unique_ptr<Gather> ahead_;  // what is expected next
  ZeroGathers stats_;
};

}  // namespace halfstep::dist::detail
