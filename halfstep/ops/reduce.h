// SPDX-License-Identifier: Apache-2.0
// Reductions. Unless one says otherwise: `dims` are counted from the end when negative, none means all of them; 16-bit
// inputs are computed in float32 and the result is rounded once; sums over n elements have the error of a blocked sum,
// not of n additions; a result doesn't depend on the number of threads. NaN propagates as in PyTorch.
#pragma once

#include <utility>

#include "halfstep/core/tensor.h"

namespace halfstep {

/// Sums over the dimensions that broadcasting would repeat, so that the result has `sizes`; errors name `op`. The
/// inverse of expand.
HS_API Tensor sum_to(const Tensor& input, const Shape& sizes, const char* op = "sum_to");

/// Options of reductions.
struct ReduceOptions {
  bool keepdim = false;             ///< reduced dimensions stay, with size 1
  std::optional<DType> dtype = {};  ///< of the result; by default the input's (i64 for integers and bool)
};
/// Sum over the dimensions given; 0 over nothing.
HS_API Tensor sum(const Tensor& input, const Shape& dims = {}, const ReduceOptions& options = {});
/// Mean over the dimensions given; NaN over nothing. Floating-point inputs, unless a floating-point dtype is requested.
HS_API Tensor mean(const Tensor& input, const Shape& dims = {}, const ReduceOptions& options = {});
/// Product over the dimensions given (any number of them, unlike PyTorch's one); 1 over nothing. The gradient is also
/// correct where factors are 0.
HS_API Tensor prod(const Tensor& input, const Shape& dims = {}, const ReduceOptions& options = {});

/// Options of var, std and var_mean.
struct VarOptions {
  double correction = 1;  ///< the divisor is n - correction: 1 for the unbiased estimate, 0 for the mean square
  bool keepdim = false;   ///< reduced dimensions stay, with size 1
};
/// Variance, in two passes: no precision is lost if the mean is large. Sums and squares of 16-bit and float32 elements
/// have float64's range here and in the following functions: a result that its dtype can represent is correct, whatever
/// the squares are.
HS_API Tensor var(const Tensor& input, const Shape& dims = {}, const VarOptions& options = {});
/// Square root of var, taken before var is rounded: it may be in range where var isn't. The gradient is 0 where it is
/// 0, as in PyTorch.
HS_API Tensor std(const Tensor& input, const Shape& dims = {}, const VarOptions& options = {});
/// The same as std(), under an unambiguous name: after `using namespace halfstep` an unqualified `std(x)` is ambiguous
/// with the standard library's namespace.
HS_API Tensor stddev(const Tensor& input, const Shape& dims = {}, const VarOptions& options = {});
/// Variance and mean.
HS_API std::pair<Tensor, Tensor> var_mean(const Tensor& input, const Shape& dims = {}, const VarOptions& options = {});

/// Options of reductions that keep the dtype.
struct KeepOptions {
  bool keepdim = false;  ///< reduced dimensions stay, with size 1
};
/// Largest elements. The gradient is shared evenly among ties. Throws ShapeError over nothing.
HS_API Tensor amax(const Tensor& input, const Shape& dims = {}, const KeepOptions& options = {});
/// Smallest elements; otherwise as amax.
HS_API Tensor amin(const Tensor& input, const Shape& dims = {}, const KeepOptions& options = {});
/// The largest element of all: amax over everything.
HS_API Tensor max(const Tensor& input);
/// The smallest element of all: amin over everything.
HS_API Tensor min(const Tensor& input);

/// Values along a dimension, and where they are.
struct ValuesAndIndices {
  Tensor values;   ///< of the input's dtype
  Tensor indices;  ///< i64
};
/// Largest (smallest) elements along one dimension and their indices, the first of several. The gradient goes to that
/// element alone. Throws ShapeError where the dimension has size 0.
HS_API ValuesAndIndices max(const Tensor& input, std::int64_t dim, const KeepOptions& options = {});
HS_API ValuesAndIndices min(const Tensor& input, std::int64_t dim, const KeepOptions& options = {});
/// Index (i64) of the largest element along a dimension, or in the flattened tensor; the first of several.
HS_API Tensor argmax(const Tensor& input, std::optional<std::int64_t> dim = {}, const KeepOptions& options = {});
/// Index (i64) of the smallest element; otherwise as argmax.
HS_API Tensor argmin(const Tensor& input, std::optional<std::int64_t> dim = {}, const KeepOptions& options = {});

/// Whether any element differs from zero, as bool.
HS_API Tensor any(const Tensor& input, const Shape& dims = {}, const KeepOptions& options = {});
/// Whether all elements differ from zero, as bool.
HS_API Tensor all(const Tensor& input, const Shape& dims = {}, const KeepOptions& options = {});
/// How many elements differ from zero, as i64.
HS_API Tensor count_nonzero(const Tensor& input, const Shape& dims = {});

/// Vector norm: (sum |x|^p)^(1/p); the largest |x| for p = infinity, the smallest for -infinity, the number of nonzero
/// elements for 0. As torch.linalg.vector_norm, but that powers of 16-bit and float32 elements have float64's range.
/// The gradient is 0 where the norm is 0.
HS_API Tensor norm(const Tensor& input, double p = 2, const Shape& dims = {}, const ReduceOptions& options = {});
/// log(sum(exp(x))) without overflow.
HS_API Tensor logsumexp(const Tensor& input, const Shape& dims, const KeepOptions& options = {});

/// Options of cumsum and cumprod.
struct CumulateOptions {
  std::optional<DType> dtype = {};  ///< of the result; by default the input's (i64 for integers and bool)
};
/// Sums of the elements up to and with each one along a dimension.
HS_API Tensor cumsum(const Tensor& input, std::int64_t dim, const CumulateOptions& options = {});
/// Products of the elements up to and with each one along a dimension.
HS_API Tensor cumprod(const Tensor& input, std::int64_t dim, const CumulateOptions& options = {});

/// Sum of products of two vectors of one length. Mixed dtypes follow type promotion.
HS_API Tensor dot(const Tensor& input, const Tensor& other);

}  // namespace halfstep
