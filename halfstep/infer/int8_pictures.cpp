// SPDX-License-Identifier: Apache-2.0
// Bytes of pictures onto the grid of a network's input.
#include "halfstep/infer/sites_internal.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/view.h"

namespace halfstep::infer::detail {

std::vector<Tensor> picture_tables(const PictureTensors& pictures, std::int64_t channels, const Int8Grid& grid,
                                   Device device) {
  const Tensor bytes = arange(256).to(u8).view({256, 1}).expand({256, channels}).to(device);
  const Tensor integers = to_grid(pictures(bytes.clone().view({256, channels, 1, 1})).to(f32), grid);
  const bool one = pictures.mean.numel() == 1 && pictures.std.numel() == 1;
  std::vector<Tensor> tables;
  for (std::int64_t c = 0; c < (one ? 1 : channels); ++c) {
    tables.push_back(integers.select(1, c).reshape({256}).clone());
  }
  return tables;
}

Tensor look_up_pictures(const Tensor& pictures, std::span<const Tensor> tables) {
  const Tensor x = pictures.contiguous();
  if (tables.size() == 1) return lookup_int8(x, tables[0]).contiguous(MemoryFormat::channels_last);
  std::vector<Tensor> parts;
  for (std::size_t c = 0; c < tables.size(); ++c) {
    const auto at = static_cast<std::int64_t>(c);
    parts.push_back(lookup_int8(x.slice(1, at, at + 1).contiguous(), tables[c]));
  }
  return cat(parts, 1).contiguous(MemoryFormat::channels_last);
}

}  // namespace halfstep::infer::detail
