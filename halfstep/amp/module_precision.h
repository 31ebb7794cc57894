// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "halfstep/core/dtype.h"
#include "halfstep/core/export.h"
#include "halfstep/core/tensor.h"

namespace halfstep::amp {

/// How the ops of a module run, as set by to_float() and the levels (amp/level.h).
struct ModulePrecision {
  std::shared_ptr<const void> policies;  ///< for each op, instead of the policy table; null: the table
  DType dtype = DType::f32;              ///< that "lower precision" means
  bool cast_inputs = false;              ///< tensors that the module is called with are cast to dtype
  bool float32_output = false;           ///< the module's results are cast to float32
  std::string label = {};                ///< when it is printed
};

/// A module's precision settings.
struct HS_API PrecisionSlot {
  std::shared_ptr<const ModulePrecision> own;    ///< from to_float()
  std::shared_ptr<const ModulePrecision> level;  ///< from auto_mixed_precision() or custom_mixed_precision()

  /// The module's effective setting; null: that of its surroundings.
  const ModulePrecision* get() const { return own ? own.get() : level.get(); }
  /// Whether the module returns float32 to its callers.
  bool float32_output() const { return level && level->float32_output; }
};

/// What levels require of a module; nn::ModuleBase implements it.
class HS_API Castable {
 public:
  virtual ~Castable();
  /// Name of its kind, such as `Linear`.
  virtual std::string kind() const = 0;
  /// The direct submodules, with their names.
  virtual std::vector<std::pair<std::string, const Castable*>> castables() const = 0;
  /// The module's settings; shared by all handles on it.
  virtual PrecisionSlot& precision() const = 0;
};

/// Sets a module's precision, which also applies to its submodules unless they have their own: the innermost setting
/// wins. Tensors that the module is called with are cast to `dtype`, and every op in it casts its floating inputs,
/// parameters included (they stay float32 in memory); results are not cast back. f32 keeps a module out of 16 bits.
/// MindSpore's Cell.to_float; modules provide it as `module.to_float(dtype)`. Throws AmpError for a dtype other than
/// f16, bf16 and f32.
HS_API void set_precision(const Castable& module, DType dtype);

/// The tensor in `dtype` if it is f32, f16 or bf16, else unchanged. A parameter's copy comes from the cast cache.
HS_API Tensor cast_input(const Tensor& tensor, DType dtype);

}  // namespace halfstep::amp
