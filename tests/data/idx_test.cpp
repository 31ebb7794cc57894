// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/idx.h"

#include <sys/stat.h>

#include <bit>
#include <cstring>

#include "halfstep/core/error.h"
#include "tests/data/idx_files.h"
#include "tests/support/test_data.h"

namespace halfstep::data {
namespace {

using test::Bytes;
using test::expect_error;
using test::gzip;
using test::idx_header;
using test::idx_images;
using test::TemporaryDir;
using test::write_file;
using test::operator+;

template <class T>
std::vector<T> elements(const IdxArray& array) {
  std::vector<T> values(array.data.size() / sizeof(T));
  std::memcpy(values.data(), array.data.data(), values.size() * sizeof(T));
  return values;
}

TEST(Idx, ReadsBytes) {
  const IdxArray array = parse_idx(idx_header(8, {2, 3}) + Bytes{1, 2, 3, 4, 5, 255}, "x");
  EXPECT_EQ(array.type, IdxType::kUint8);
  EXPECT_EQ(array.shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(array.data, (Bytes{1, 2, 3, 4, 5, 255}));
}

TEST(Idx, ReadsEveryTypeInHostOrder) {
  EXPECT_EQ(elements<std::int8_t>(parse_idx(idx_header(9, {2}) + Bytes{0x80, 0x7F}, "x")),
            (std::vector<std::int8_t>{-128, 127}));
  EXPECT_EQ(elements<std::int16_t>(parse_idx(idx_header(0x0B, {2}) + Bytes{0x01, 0x02, 0xFF, 0xFE}, "x")),
            (std::vector<std::int16_t>{258, -2}));
  EXPECT_EQ(elements<std::int32_t>(parse_idx(idx_header(0x0C, {1}) + Bytes{0x01, 0x02, 0x03, 0x04}, "x")),
            (std::vector<std::int32_t>{0x01020304}));
  EXPECT_EQ(elements<float>(parse_idx(idx_header(0x0D, {1}) + Bytes{0xC0, 0x20, 0, 0}, "x")),
            (std::vector<float>{-2.5F}));
  EXPECT_EQ(elements<double>(parse_idx(idx_header(0x0E, {1}) + Bytes{0x3F, 0xF8, 0, 0, 0, 0, 0, 0}, "x")),
            (std::vector<double>{1.5}));
}

TEST(Idx, ReadsFilesPlainAndPackedByTheirContents) {
  const TemporaryDir dir;
  const Bytes plain = idx_images(3, 5, 7);
  const IdxArray expected = parse_idx(plain, "x");
  ASSERT_EQ(expected.data.size(), 105U);
  EXPECT_EQ(read_idx(write_file(dir.path() / "a", plain)).data, expected.data);
  EXPECT_EQ(read_idx(write_file(dir.path() / "b.gz", gzip(plain))).data, expected.data);
  EXPECT_EQ(read_idx(write_file(dir.path() / "packed-without-the-ending", gzip(plain))).shape, expected.shape);
  EXPECT_EQ(read_idx(write_file(dir.path() / "plain.gz", plain)).data, expected.data);
}

TEST(Idx, ReadsSeveralGzipMembers) {
  const Bytes plain = idx_images(2, 4, 4);
  const Bytes first(plain.begin(), plain.begin() + 20);
  const Bytes second(plain.begin() + 20, plain.end());
  EXPECT_EQ(parse_idx(gzip(first) + gzip(second), "x").data, parse_idx(plain, "x").data);
  // An empty member in the middle is legal as well.
  EXPECT_EQ(parse_idx(gzip(first) + gzip({}) + gzip(second), "x").data, parse_idx(plain, "x").data);
}

TEST(Idx, ReadsEmptyArrays) {
  EXPECT_EQ(parse_idx(idx_header(8, {0}), "x").data.size(), 0U);
  const IdxArray array = parse_idx(idx_header(8, {0, 0xFFFFFFFF, 0xFFFFFFFF}), "x");
  EXPECT_EQ(array.shape, (std::vector<std::int64_t>{0, 0xFFFFFFFF, 0xFFFFFFFF}));
  EXPECT_TRUE(array.data.empty());
}

TEST(Idx, RefusesAMissingFile) {
  const TemporaryDir dir;
  expect_error<IoError>([&] { read_idx(dir.path() / "gone"); }, {"gone", "cannot open", "No such file"});
}

TEST(Idx, RefusesWhatIsNoFile) {
  const TemporaryDir dir;
  expect_error<IoError>([&] { read_idx(dir.path()); }, {"expected a file", "the folder", dir.path().string()});
  // Opening a named pipe for reading would wait for a writer for ever.
  const std::string pipe = (dir.path() / "pipe").string();
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  expect_error<IoError>([&] { read_idx(pipe); }, {"expected a file", pipe});
  expect_error<IoError>([&] { read_idx("/dev/zero"); }, {"expected a file", "/dev/zero"});
}

TEST(Idx, RefusesOtherFormats) {
  for (const Bytes& bytes : {Bytes{'P', 'K', 3, 4, 0, 0}, Bytes{0, 0, 7, 1, 0, 0, 0, 0}, Bytes{0, 0, 8, 0},
                             Bytes{0, 1, 8, 1, 0, 0, 0, 0}, Bytes{0, 0, 8, 200}}) {
    expect_error<IoError>([&] { parse_idx(bytes, "some.file"); },
                          {"some.file", "magic number", "0x00000803", "got 0x"});
  }
  expect_error<IoError>([] { parse_idx({}, "some.file"); }, {"some.file", "at least 4 bytes", "got 0"});
  expect_error<IoError>([] { parse_idx(gzip({}), "some.file"); }, {"some.file", "at least 4 bytes", "got 0"});
}

TEST(Idx, RefusesEveryPrefixOfAFile) {
  const Bytes plain = idx_images(2, 3, 3);
  for (std::size_t n = 0; n < plain.size(); ++n) {
    SCOPED_TRACE(n);
    expect_error<IoError>([&] { parse_idx(std::span(plain).first(n), "cut"); }, {"cut", "expected"});
  }
  const Bytes packed = gzip(plain);
  for (std::size_t n = 0; n < packed.size(); ++n) {
    SCOPED_TRACE(n);
    expect_error<IoError>([&] { parse_idx(std::span(packed).first(n), "cut.gz"); }, {"cut.gz", "expected"});
  }
}

TEST(Idx, SaysHowMuchIsMissing) {
  Bytes plain = idx_images(10);
  plain.resize(1000);
  expect_error<IoError>([&] { parse_idx(plain, "short"); },
                        {"short", "7856 bytes", "[10, 28, 28]", "at most 1000", "cut short"});
  expect_error<IoError>([&] { parse_idx(gzip(plain), "short.gz"); },
                        {"short.gz", "7840 bytes", "[10, 28, 28]", "got 984", "cut short"});
}

TEST(Idx, RefusesBytesBehindTheEnd) {
  const Bytes plain = idx_images(1, 2, 2);
  expect_error<IoError>([&] { parse_idx(plain + Bytes{0}, "long"); },
                        {"long", "end of the file after 20 bytes", "more"});
  expect_error<IoError>([&] { parse_idx(gzip(plain + Bytes{0}), "long"); }, {"long", "end of the file after 20 bytes"});
  expect_error<IoError>([&] { parse_idx(gzip(plain) + Bytes{0}, "long"); }, {"long", "after the gzip data"});
  expect_error<IoError>([&] { parse_idx(gzip(plain) + gzip({1}), "long"); },
                        {"long", "end of the file after 20 bytes"});
}

TEST(Idx, RefusesDamagedGzip) {
  const Bytes packed = gzip(idx_images(4));
  // The last eight bytes are the checksum and the length.
  for (const std::size_t position : {packed.size() - 8, packed.size() - 1, packed.size() / 2}) {
    Bytes damaged = packed;
    damaged[position] ^= 0x55;
    expect_error<IoError>([&] { parse_idx(damaged, "bad.gz"); }, {"bad.gz", "expected"});
  }
  expect_error<IoError>(
      [] {
        parse_idx(Bytes{0x1F, 0x8B, 99, 0, 0, 0, 0, 0, 0, 0, 0, 0}, "bad.gz");
      },
      {"bad.gz", "expected sound gzip data"});
}

TEST(Idx, RefusesShapesThatOverflow) {
  for (const std::vector<std::uint32_t>& shape :
       std::vector<std::vector<std::uint32_t>>{{0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF},
                                               {0x80000000, 0x80000000, 4},  // 2^64: wraps to zero
                                               {0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 1, 1, 1, 3}}) {
    expect_error<IoError>([&] { parse_idx(idx_header(8, shape) + Bytes(64), "huge"); }, {"huge", "expected at most"});
  }
  expect_error<IoError>([] { parse_idx(idx_header(0x0E, {0x20000000}) + Bytes(64), "huge"); },
                        {"huge", "8-byte elements"});
}

TEST(Idx, RefusesWhatIsOverTheLimit) {
  const Bytes plain = idx_images(4, 5, 5);
  EXPECT_EQ(parse_idx(plain, "x", {.max_bytes = 100}).data.size(), 100U);
  expect_error<IoError>([&] { parse_idx(plain, "x", {.max_bytes = 99}); }, {"at most 99 bytes", "[4, 5, 5]"});
}

// A header that announces 2 GiB in a file of a few bytes: refused before memory is taken, so that the test passes where
// 2 GiB can't be had (the sanitizer build limits it).
TEST(Idx, TakesNoMemoryForWhatAFileCannotHold) {
  expect_error<IoError>([] { parse_idx(idx_header(8, {0x7FFFFFFF}) + Bytes(100), "thin"); },
                        {"thin", "expected 2147483655 bytes", "at most 108"});
  expect_error<IoError>([] { parse_idx(gzip(idx_header(8, {0x7FFFFFFF}) + Bytes(100)), "thin.gz"); },
                        {"thin.gz", "expected 2147483655 bytes", "at most"});
}

// Some 100 KiB that unpack to 100 MB of zeros behind a header that announces 16 bytes: only those are unpacked.
TEST(Idx, DoesNotUnpackABomb) {
  const Bytes bomb = gzip(idx_header(8, {16}) + Bytes(100'000'000), 9);
  ASSERT_LT(bomb.size(), 200'000U);
  expect_error<IoError>([&] { parse_idx(bomb, "bomb.gz"); }, {"bomb.gz", "end of the file after 24 bytes"});
}

TEST(Idx, ReadsTheRealFiles) {
  const auto dir = test::data_dir();
  if (!dir) GTEST_SKIP() << "no data folder: set HALFSTEP_DATA";
  const IdxArray labels = read_idx(*dir / "mnist" / "t10k-labels-idx1-ubyte.gz");
  EXPECT_EQ(labels.shape, (std::vector<std::int64_t>{10000}));
  EXPECT_EQ(labels.data[0], 7);  // the first test digit is known to be a seven, the second a two
  EXPECT_EQ(labels.data[1], 2);
}

}  // namespace
}  // namespace halfstep::data
