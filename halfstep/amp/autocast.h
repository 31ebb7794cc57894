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
  std::string path;     ///< such as `encoder.layer1`; `*` matches one name of the path
  bool enabled = true;  ///< false: it runs without autocast (type promotion turns mixed inputs into float32)
  std::optional<DType> dtype = {};  ///< another 16-bit dtype
};

/// Options of a region.
struct AutocastOptions {
  DType dtype = f16;                         ///< f16 or bf16
  std::optional<Device> device = {};         ///< one kind of device; by default all
  bool enabled = true;                       ///< false: ops run in the dtypes of their inputs
  bool cache = true;                         ///< cache the casts of weights for further uses in the region
  std::vector<OpOverride> ops = {};          ///< differences from the policy table
  std::vector<ModuleOverride> modules = {};  ///< differences by module path
};

namespace detail {
struct Region;
}

/// The state of a region, to be restored on another thread.
class HS_API AutocastSnapshot {
 public:
  /// The calling thread's current state.
  AutocastSnapshot();

 private:
  friend class Autocast;
  AutocastState state_;
};

/// For its lifetime, ops on this thread run in the precision given by the policy table: matrix products in `dtype`,
/// sensitive ops in float32. Regions nest: the inner one's options apply, and overrides of the outer one stay in effect
/// unless overridden again. Exceptions restore the outer state. Threads start without a region; pass an
/// AutocastSnapshot to give them one. Only forward pass and loss belong inside; backward() needs no region.
///
/// Guards destroyed out of order or on another thread never leave autocast enabled: a region closed before a region
/// nested in it ends when that one does, and a region closed by another thread ends at its own thread's next op. The
/// log reports an error.
///
///     amp::Autocast autocast{{.dtype = f16}};
///
/// PyTorch's torch.autocast with its CUDA list on every device. Throws AmpError for a dtype other than f16 and bf16, an
/// unknown op in an override, or an override that can't be satisfied.
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

/// Whether this thread is in an enabled region.
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

/// Runs `function` and reports, for each op that it called under autocast, the dtype in which it ran and why.
HS_API std::vector<Decision> explain(const std::function<void()>& function);
/// What a region with these options would do with a call of `op` on inputs of these dtypes, and why. Throws AmpError
/// for an unknown op.
HS_API Decision explain(std::string_view op, const std::vector<DType>& inputs, const AutocastOptions& options = {});

/// For modules: the name of the module whose forward runs. Applies the region's overrides by path, then the module's
/// own precision, which takes precedence.
class HS_API ModuleScope {
 public:
  explicit ModuleScope(std::string_view name, const ModulePrecision* precision = nullptr);
  ~ModuleScope();
  ModuleScope(const ModuleScope&) = delete;
  ModuleScope& operator=(const ModuleScope&) = delete;

 private:
  void enter(const ModulePrecision& precision);

  std::size_t length_;
  std::shared_ptr<detail::Region> by_path_;    // the region's overrides by module path
  std::shared_ptr<detail::Region> precision_;  // and the module's own precision, inside that
};
/// Path of the module whose forward runs on this thread, such as `encoder.fc1`; empty outside.
HS_API const std::string& module_path();

}  // namespace halfstep::amp
