// SPDX-License-Identifier: Apache-2.0
// Which places of images the CUDA plug-in's kernels read: against going through all of them. Needs no GPU.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "halfstep/backends/cuda/device/window_plan.h"

namespace hscuda {
namespace {

// The windows' places one by one, and each place's windows, of fixed windows.
TEST(CudaImagePlan, FixedWindows) {
  for (const int size : {1, 2, 5, 12, 13}) {
    for (const int kernel : {1, 2, 3, 5}) {
      for (const int stride : {1, 2, 3, 7}) {
        for (int padding = 0; padding <= kernel / 2; ++padding) {
          for (const int step : {1, 2, 3}) {
            const int room = size + 2 * padding - step * (kernel - 1) - 1;
            if (room < 0) continue;
            // One window more than fits, as with ceil_mode.
            const int count = room / stride + 2;
            const Windows w = fixed_windows(size, count, kernel, stride, padding, step);
            for (int place = 0; place < size; ++place) {
              const Range windows = w.of_place(place);
              for (int i = 0; i < count; ++i) {
                int expected = -1;
                for (int k = 0; k < kernel; ++k) {
                  if (i * stride - padding + k * step == place) expected = k;
                }
                const bool looked_at = i >= windows.first && i < windows.end;
                ASSERT_EQ(looked_at ? w.number(i, place) : -1, expected)
                    << size << ' ' << kernel << ' ' << stride << ' ' << padding << ' ' << step << ": " << i << ' '
                    << place;
                const Range inside = w.inside(i);
                const bool there = expected >= inside.first && expected < inside.end;
                ASSERT_EQ(there, expected >= 0);
              }
            }
            for (int i = 0; i < count; ++i) {
              const Range inside = w.inside(i);
              for (int k = inside.first; k < inside.end; ++k) {
                const int place = w.start(i) + k * w.step;
                ASSERT_TRUE(place >= 0 && place < size && k < kernel);
              }
            }
          }
        }
      }
    }
  }
}

TEST(CudaImagePlan, AdaptiveWindows) {
  for (int size = 1; size < 20; ++size) {
    for (int count = 1; count < 25; ++count) {
      const Windows w = adaptive_windows(size, count);
      int widest = 0;
      for (int i = 0; i < count; ++i) {
        const int begin = i * size / count, end = ((i + 1) * size + count - 1) / count;
        EXPECT_EQ(w.start(i), begin);
        EXPECT_EQ(w.inside(i).first, 0);
        EXPECT_EQ(w.inside(i).end, end - begin);
        EXPECT_EQ(w.places(i, false), end - begin);
        widest = std::max(widest, end - begin);
        for (int place = 0; place < size; ++place) {
          const Range windows = w.of_place(place);
          ASSERT_EQ(i >= windows.first && i < windows.end, place >= begin && place < end)
              << size << ' ' << count << ": " << i << ' ' << place;
        }
      }
      EXPECT_EQ(w.widest, widest);
      EXPECT_EQ(one_divisor(w, false), size % count == 0);
    }
  }
}

TEST(CudaImagePlan, DivisorsCountPaddingButNotWhatLiesFurtherOut) {
  // 5 places, windows of 3 by 2 with padding 1 and one that hangs over: it has place 5 of the padding, not 6.
  const Windows w = fixed_windows(5, 4, 3, 2, 1, 1);
  EXPECT_EQ(w.places(0, true), 3);
  EXPECT_EQ(w.places(0, false), 2);
  EXPECT_EQ(w.places(2, true), 3);
  EXPECT_EQ(w.places(2, false), 2);
  EXPECT_EQ(w.places(3, true), 1);
  EXPECT_EQ(w.places(3, false), 0);
  EXPECT_FALSE(one_divisor(w, true));
  EXPECT_TRUE(one_divisor(fixed_windows(5, 3, 3, 2, 1, 1), true));
}

// All that a place goes into is within its range, in every mode.
TEST(CudaImagePlan, ResamplingReversed) {
  for (const int from : {1, 2, 3, 7, 16, 31}) {
    for (const int to : {1, 2, 5, 14, 16, 33, 62}) {
      for (const int mode : {0, 1, 2}) {
        for (const bool align : {false, true}) {
          if (align && mode != 2) continue;
          for (const double factor : {1.0, 0.97, 1.04}) {  // a scale need not be the ratio
            Resampling r;
            r.from = from;
            r.to = to;
            r.mode = mode;
            r.align_corners = align;
            r.scale = align ? (to > 1 ? static_cast<double>(from - 1) / (to - 1) : 0)
                            : factor * static_cast<double>(from) / to;
            for (int place = 0; place < from; ++place) {
              const Range range = r.of_place(place);
              ASSERT_TRUE(range.first >= 0 && range.end <= to);
              for (int i = 0; i < to; ++i) {
                const Resampling::Taps t = r.taps(i);
                ASSERT_TRUE(t.low >= 0 && t.low < from && t.share >= 0 && t.share < 1);
                ASSERT_TRUE(t.share == 0 || t.low + 1 < from);
                if (r.weight(i, place) == 0) continue;
                ASSERT_TRUE(i >= range.first && i < range.end)
                    << from << " to " << to << " mode " << mode << ": " << i << ' ' << place;
              }
            }
          }
        }
      }
    }
  }
}

TEST(CudaImagePlan, CopiesOfPaddedPlaces) {
  for (const int mode : {0, 1, 2, 3}) {
    for (const int inner : {1, 2, 5}) {
      for (int before = -inner; before <= inner; ++before) {
        for (int after = -inner; after <= inner; ++after) {
          if (mode == 1 && std::max(before, after) > inner - 1) continue;
          const int kept = inner + std::min(before, 0) + std::min(after, 0);
          if (kept < 1 || inner + before + after < 1) continue;
          PadDim dim;
          dim.size = inner + before + after;
          dim.inner = inner;
          dim.before = before;
          dim.after = after;
          dim.mode = mode;
          for (int place = 0; place < inner; ++place) {
            std::vector<int64_t> expected, got;
            for (int i = 0; i < dim.size; ++i) {
              const int64_t source = dim.source(i);
              ASSERT_TRUE(source >= (mode == 0 ? -1 : 0) && source < inner);
              if (source == place) expected.push_back(i);
            }
            const PadDim::Copies copies = dim.copies(place);
            for (int64_t k = 0; k < copies.count; ++k) got.push_back(copies.at(k));
            ASSERT_EQ(got, expected) << mode << ": " << before << ' ' << inner << ' ' << after << ", " << place;
          }
        }
      }
    }
  }
}

TEST(CudaImagePlan, ImagesAreGoneOverInTheOrderOfMemory) {
  const std::vector<int64_t> sizes{2, 16, 3, 5}, rows{240, 15, 5, 1}, last{240, 1, 80, 16};
  for (const bool channels_last : {false, true}) {
    for (const int width : {1, 8}) {
      if (width > 1 && !channels_last) continue;
      const auto& strides = channels_last ? last : rows;
      const halfstep_tensor t{.data = nullptr,
                              .sizes = sizes.data(),
                              .strides = strides.data(),
                              .numel = 480,
                              .ndim = 4,
                              .dtype = HALFSTEP_F16,
                              .defined = 1,
                              .contiguous = 0,
                              .reserved = 0};
      const ImageOrder order = image_order(t, width);
      ASSERT_EQ(order.per_image * order.images * width, t.numel);
      for (uint32_t i = 0; i < order.per_image * order.images; ++i) {
        const ImageOrder::Place p = order.place(i);
        EXPECT_EQ(p.n * strides[0] + p.c * width * strides[1] + p.h * strides[2] + p.w * strides[3], i * width);
      }
    }
  }
}

}  // namespace
}  // namespace hscuda
