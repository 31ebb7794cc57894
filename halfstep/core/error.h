// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>
#include <string>

#include "halfstep/core/export.h"

namespace halfstep {

/// A mistake of the caller: wrong shapes, dtypes, devices, arguments or files. The text has the form
/// `op: what was expected, what came; hint`. Every other error class below except InternalError is one of these.
class HS_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Shapes or indices that don't fit the op.
class HS_API ShapeError : public Error {
 public:
  using Error::Error;
};

/// A dtype that the op does not take, or dtypes that don't go together.
class HS_API DTypeError : public Error {
 public:
  using Error::Error;
};

/// An unknown device, tensors on different devices, a missing kernel or a device out of memory.
class HS_API DeviceError : public Error {
 public:
  using Error::Error;
};

/// A device has no memory left; the text lists what is held there.
class HS_API OutOfMemoryError : public DeviceError {
 public:
  using DeviceError::DeviceError;
};

/// A device that failed for good: everything that is there is lost. A program goes on by loading its last checkpoint on
/// another device.
class HS_API DeviceLostError : public DeviceError {
 public:
  using DeviceError::DeviceError;
};

/// Misuse of the automatic differentiation: a freed graph, a saved tensor that was changed, no gradient to be had.
class HS_API AutogradError : public Error {
 public:
  using Error::Error;
};

/// Misuse of mixed precision: a call out of order on a scaler, an op that the policy bans.
class HS_API AmpError : public Error {
 public:
  using Error::Error;
};

/// A file or stream that is missing, damaged, too large, or can't be written.
class HS_API IoError : public Error {
 public:
  using Error::Error;
};

/// A bug in Halfstep itself; please report it.
class HS_API InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

}  // namespace halfstep
