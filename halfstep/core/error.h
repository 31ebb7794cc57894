// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>
#include <string>

#include "halfstep/core/export.h"

namespace halfstep {

/// A mistake by the caller: wrong shapes, dtypes, devices, arguments or files. The text has the form
/// `op: what was expected, what was received; hint`. Every other error class below except InternalError is one of
/// these.
class HS_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Shapes or indices that don't fit the op.
class HS_API ShapeError : public Error {
 public:
  using Error::Error;
};

/// A dtype that the op does not accept, or incompatible dtypes.
class HS_API DTypeError : public Error {
 public:
  using Error::Error;
};

/// An unknown device, tensors on different devices, a missing kernel or a device out of memory.
class HS_API DeviceError : public Error {
 public:
  using Error::Error;
};

/// A device is out of memory; the text lists what is allocated there.
class HS_API OutOfMemoryError : public DeviceError {
 public:
  using DeviceError::DeviceError;
};

/// A device failed permanently: everything on it is lost. A program can continue by loading its last checkpoint on
/// another device.
class HS_API DeviceLostError : public DeviceError {
 public:
  using DeviceError::DeviceError;
};

/// Misuse of the automatic differentiation: a freed graph, a saved tensor that was modified, no gradient available.
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
