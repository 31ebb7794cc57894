// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/amx_model.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>

namespace halfstep::cpu {
namespace {

// Whether a result that is close to `exact` is subnormal once it is rounded to 24 digits: below the middle between the
// smallest normal number and the one before it with as many digits, since a tie goes to the even one, which is normal.
float flushed(float rounded, double exact) {
  return std::abs(exact) < 0x1p-126 - 0x1p-151 ? std::copysign(0.0f, rounded) : rounded;
}
float seen(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

float multiplied(float a, float b, float sum) {
  const double product = static_cast<double>(a) * static_cast<double>(b);  // exact
  return flushed(std::fma(a, b, sum), product + static_cast<double>(sum));
}
float added(float a, float b) { return flushed(a + b, static_cast<double>(a) + static_cast<double>(b)); }

float float_at(const std::uint8_t* row, int n) {
  float x = 0;
  std::memcpy(&x, row + 4 * n, sizeof x);
  return seen(x);
}
// Element n of a row of bfloat16.
float half_at(const std::uint8_t* row, int n) {
  std::uint16_t x = 0;
  std::memcpy(&x, row + 2 * n, sizeof x);
  return seen(std::bit_cast<float>(static_cast<std::uint32_t>(x) << 16));
}

void require(bool condition, const char* what) {
  if (!condition) throw TileFault(std::string("AMX: ") + what);
}

}  // namespace

const TileModel::Tile& TileModel::shaped(int tile) const {
  require(configured_, "no tile is configured");
  require(tile >= 0 && tile < kTiles, "there is no such tile");
  const Tile& t = tiles_[tile];
  require(t.rows > 0, "the tile has no shape");
  return t;
}

void TileModel::configure(const TileConfig& config) {
  if (config.palette == 0) return release();
  require(config.palette == 1, "an unknown palette");
  for (const std::uint8_t byte : config.reserved) require(byte == 0, "a reserved byte of the configuration is set");
  for (int i = 0; i < 16; ++i) {
    const int rows = config.rows[i], bytes = config.row_bytes[i];
    require(i < kTiles || (rows == 0 && bytes == 0), "a tile that there isn't has a shape");
    require(rows <= kRows && bytes <= kRowBytes, "a tile is too large");
    require((rows == 0) == (bytes == 0), "a tile has rows without columns, or columns without rows");
  }
  for (int i = 0; i < kTiles; ++i) tiles_[i] = {.rows = config.rows[i], .row_bytes = config.row_bytes[i]};
  configured_ = true;
}

void TileModel::release() {
  for (Tile& t : tiles_) t = {};
  configured_ = false;
}

void TileModel::load(int tile, const void* from, std::int64_t stride) {
  Tile& t = shaped(tile);
  std::memset(t.data, 0, sizeof t.data);
  for (int m = 0; m < t.rows; ++m) {
    std::memcpy(t.data[m], static_cast<const char*>(from) + m * stride, static_cast<std::size_t>(t.row_bytes));
  }
}

void TileModel::store(int tile, void* to, std::int64_t stride) const {
  const Tile& t = shaped(tile);
  for (int m = 0; m < t.rows; ++m) {
    std::memcpy(static_cast<char*>(to) + m * stride, t.data[m], static_cast<std::size_t>(t.row_bytes));
  }
}

void TileModel::zero(int tile) {
  Tile& t = shaped(tile);
  std::memset(t.data, 0, sizeof t.data);
}

void TileModel::multiply(int c, int a, int b) {
  require(c != a && c != b && a != b, "operands must be different tiles");
  Tile& to = shaped(c);
  const Tile &first = shaped(a), &second = shaped(b);
  require(to.row_bytes % 4 == 0 && first.row_bytes % 4 == 0 && second.row_bytes % 4 == 0, "a row of half elements");
  require(to.rows == first.rows && to.row_bytes == second.row_bytes && first.row_bytes / 4 == second.rows,
          "the operands' shapes don't fit each other");
  const int columns = to.row_bytes / 4;
  for (int m = 0; m < to.rows; ++m) {
    float sums[2 * kRowBytes / 4] = {};
    for (int k = 0; k < second.rows; ++k) {
      for (int n = 0; n < 2 * columns; ++n) {
        sums[n] = multiplied(half_at(first.data[m], 2 * k + n % 2), half_at(second.data[k], n), sums[n]);
      }
    }
    for (int n = 0; n < columns; ++n) {
      const float result = added(float_at(to.data[m], n), added(sums[2 * n], sums[2 * n + 1]));
      std::memcpy(to.data[m] + 4 * n, &result, sizeof result);
    }
  }
}

}  // namespace halfstep::cpu
