// SPDX-License-Identifier: Apache-2.0
// Colour adjustments of images, as torchvision applies them to Pillow images: on 8-bit values, rounded after each.
#pragma once

#include "halfstep/core/export.h"
#include "halfstep/data/image.h"

namespace halfstep::data {

/// Mixes with black: 0 gives black, 1 changes nothing, over 1 is brighter. Throws Error for a negative factor; so do
/// the next two.
HS_API void adjust_brightness(Image& image, double factor);
/// Mixes with a grey image of the mean luma (rounded).
HS_API void adjust_contrast(Image& image, double factor);
/// Mixes with the image's own luma, 0.299 red + 0.587 green + 0.114 blue.
HS_API void adjust_saturation(Image& image, double factor);
/// Rotates the hue by `shift` of a full circle, in steps of 1/255, through 8-bit hue, saturation and value. Throws
/// Error for a shift outside -0.5 to 0.5.
HS_API void adjust_hue(Image& image, double shift);

}  // namespace halfstep::data
