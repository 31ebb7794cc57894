// SPDX-License-Identifier: Apache-2.0
// Internal: where a prepared network is quantized, with the numbers of each place.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "halfstep/infer/graph_internal.h"
#include "halfstep/ops/int8.h"
#include "halfstep/quant/quantization.h"

namespace halfstep::infer::detail {

/// The integers of a tensor, read off a FakeQuantize.
struct Site {
  std::string name = {};
  Tensor scale, zero_point;  ///< f32 and i32 of one element, or of the channels
  std::int64_t quant_min = 0, quant_max = 255;
  std::optional<std::int64_t> axis = {};
  Tensor bound = {};                  ///< values are clipped to 0 to this before; undefined: they aren't
  std::optional<Int8Grid> grid = {};  ///< of 8 bits or fewer for the whole tensor; none: channels, or more bits

  /// The tensor on its grid, in floating point: what FakeQuantize::forward() gives.
  Tensor fake(const Tensor& t) const;
  /// The integers of a weight.
  Tensor weight(const Tensor& t) const;
};

/// Gives a site its `grid`, where it has one.
void set_grid(Site& site);

/// A network's places, by call and number of the input (-1: the result). Those that are switched off are none.
class Sites {
 public:
  Sites() = default;
  /// Throws Error, in the name of `who`, for places whose range nobody has observed.
  Sites(std::span<const quant::TracedGrid> grids, std::string_view who);
  void add(int call, int input, Site site) { sites_.insert_or_assign({call, input}, std::move(site)); }
  bool empty() const { return sites_.empty(); }
  /// Null: none.
  const Site* find(int call, int input) const {
    const auto at = sites_.find({call, input});
    return at == sites_.end() ? nullptr : &at->second;
  }

 private:
  std::map<std::pair<int, int>, Site> sites_;
};

/// Grids are one: their integers stand for the same numbers.
bool same_grid(const Int8Grid& a, const Int8Grid& b);
/// The integers of a tensor's values, and the values of integers: the ops quantize and dequantize.
Tensor to_grid(const Tensor& values, const Int8Grid& grid);
Tensor from_grid(const Tensor& integers, const Int8Grid& grid);
/// For lookup_int8: the integers of `to` for each of `from`, put through `function` as values between.
Tensor table_of(const Int8Grid& from, const Int8Grid& to, Device device,
                const std::function<Tensor(const Tensor&)>& function = {});
/// For look_up_pictures: the integers of each byte, a table for each channel, or one where all channels are
/// normalised alike; by way of the numbers that the network would have been given.
std::vector<Tensor> picture_tables(const PictureTensors& pictures, std::int64_t channels, const Int8Grid& grid,
                                   Device device);
/// The integers of bytes u8 [N, C, H, W], channels-last.
Tensor look_up_pictures(const Tensor& pictures, std::span<const Tensor> tables);

/// Takes fake quantization that the network itself calls, as the import of a quantized file does, out of a trace: of
/// constants into the calls that read them, of a call's result that nobody else reads into that call. Other calls of it
/// stay, with the tensor as their only input and a place for their result: is_grid_call().
Sites take_fake_quantization(nn::Trace& trace);
bool is_grid_call(const nn::TracedCall& call);

/// The source of a prepared network, or of one that calls fake quantization itself, with its places.
struct QuantizedSource {
  Source source;
  Sites sites;
};
QuantizedSource make_quantized_source(std::string_view who, const nn::ModuleBase& network,
                                      const nn::TracedForward& forward, std::span<const Tensor> example,
                                      bool dynamic_batch);

/// The network in integers where it has grids. Values that are integers have theirs in Value::grid, and calls that
/// compute them or end in floating point have a name in Node::layer. What has no grid computes in `dtype`, as in
/// float_graph().
Graph int8_graph(const QuantizedSource& quantized, const std::optional<PictureNumbers>& pictures = {},
                 std::optional<DType> dtype = {});
/// The network with its fake quantizations, in floating point: what it computes in evaluation.
Graph fake_graph(const QuantizedSource& quantized);

}  // namespace halfstep::infer::detail
