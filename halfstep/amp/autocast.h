// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "halfstep/amp/module_precision.h"
#include "halfstep/amp/policy.h"

namespace halfstep::amp {

/// Another policy for one op inside a region.
struct OpOverride {
  std::string op;  ///< name, as `halfstep ops` prints it
  Policy policy;
};

/// Another precision for a module and all below it inside a region.
struct ModuleOverride {
  std::string path;                 ///< such as `encoder.layer1`; `*` stands for one name of the path
  bool enabled = true;              ///< false: it runs without autocast (type promotion makes float32 of mixed inputs)
  std::optional<DType> dtype = {};  ///< another 16-bit dtype
};

/// Options of a region.
struct AutocastOptions {
  DType dtype = f16;                         ///< f16 or bf16
  std::optional<Device> device = {};         ///< one kind of device; all unless named
  bool enabled = true;                       ///< false: ops run in the dtypes of their inputs
  bool cache = true;                         ///< keep the casts of weights for further uses in the region
  std::vector<OpOverride> ops = {};          ///< differences from the policy table
  std::vector<ModuleOverride> modules = {};  ///< differences by module path
};

namespace detail {
struct Region;
}

/// The state of a region, to be taken over by another thread.
class HS_API AutocastSnapshot {
 public:
  /// What this thread runs under now.
  AutocastSnapshot();

 private:
  friend class Autocast;
  AutocastState state_;
};

/// While it lives, ops on this thread run in the precision that the policy table gives them: matrix products in
/// `dtype`, sensitive ops in float32. Regions nest: the inner one's options hold, overrides of the outer one stay
/// unless overridden again. Exceptions restore the outer state. Threads start without a region; hand an
/// AutocastSnapshot over to give them one. Only forward pass and loss belong inside; backward() needs no region.
///
/// Guards that go in another order than they came, or on another thread, never leave autocast on: a region that is
/// closed before one inside it ends together with that, and one closed by another thread ends with the next op of its
/// own. An error in the log says so.
///
///     amp::Autocast autocast{{.dtype = f16}};
///
/// PyTorch's torch.autocast with its CUDA list on every device. Throws AmpError for a dtype other than f16 and bf16, an
/// unknown op in an override, or an override that asks for the impossible.
class HS_API Autocast {
 public:
  [[nodiscard]] explicit Autocast(const AutocastOptions& options = {});
  [[nodiscard]] explicit Autocast(const AutocastSnapshot& snapshot);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  std::shared_ptr<detail::Region> region_;
};

/// Whether this thread is in a region that is on.
HS_API bool is_autocast_enabled();
/// The 16-bit dtype of this thread's region.
HS_API DType autocast_dtype();

/// What autocast did with one call.
struct HS_API Decision {
  std::string op;
  std::string module;        ///< path of the module it ran in
  Policy policy;             ///< that was applied
  std::string reason;        ///< of the table, or that it was overridden
  std::vector<DType> given;  ///< dtypes of the inputs as they came
  std::vector<DType> used;   ///< and as the op got them
  std::string str() const;   ///< one line
};

/// Runs `function` and says, for each op that it called under autocast, in which dtype it ran and why.
HS_API std::vector<Decision> explain(const std::function<void()>& function);
/// What a region with these options would do with a call of `op` on inputs of these dtypes, and why. Throws AmpError
/// for an unknown op.
HS_API Decision explain(std::string_view op, const std::vector<DType>& inputs, const AutocastOptions& options = {});

/// For modules: the name of the module whose forward runs. Applies the region's overrides by path, then the module's
/// own precision, which is nearer.
class HS_API ModuleScope {
 public:
  explicit ModuleScope(std::string_view name, const ModulePrecision* precision = nullptr);
  ~ModuleScope();
  ModuleScope(const ModuleScope&) = delete;
  ModuleScope& operator=(const ModuleScope&) = delete;

 private:
  void enter(const ModulePrecision& precision);

  std::size_t length_;
  std::shared_ptr<detail::Region> by_path_;    // what the region says of modules by path
  std::shared_ptr<detail::Region> precision_;  // and the module's own, inside that
};
/// Path of the module whose forward runs on this thread, such as `encoder.fc1`; empty outside.
HS_API const std::string& module_path();

}  // namespace halfstep::amp
