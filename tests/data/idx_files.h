// SPDX-License-Identifier: Apache-2.0
// Makes IDX files for tests, byte by byte and without the reader's code.
#pragma once

#include <gtest/gtest.h>
#include <zlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace halfstep::test {

using Bytes = std::vector<std::uint8_t>;

/// The header of an IDX file: type code and dimensions.
inline Bytes idx_header(std::uint8_t code, const std::vector<std::uint32_t>& shape) {
  Bytes bytes{0, 0, code, static_cast<std::uint8_t>(shape.size())};
  for (const std::uint32_t n : shape) {
    for (const int shift : {24, 16, 8, 0}) bytes.push_back(static_cast<std::uint8_t>(n >> shift));
  }
  return bytes;
}

inline Bytes operator+(Bytes a, const Bytes& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// n images of rows x columns whose pixels count upwards.
inline Bytes idx_images(std::uint32_t n, std::uint32_t rows = 28, std::uint32_t columns = 28) {
  Bytes bytes = idx_header(8, {n, rows, columns});
  for (std::uint64_t i = 0; i < std::uint64_t{n} * rows * columns; ++i)
    bytes.push_back(static_cast<std::uint8_t>(i * 7));
  return bytes;
}

inline Bytes idx_labels(const Bytes& labels) {
  return idx_header(8, {static_cast<std::uint32_t>(labels.size())}) + labels;
}

inline Bytes gzip(const Bytes& plain, int level = 6) {
  z_stream stream{};
  if (deflateInit2(&stream, level, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) != Z_OK)
    throw std::runtime_error("zlib");
  Bytes packed(deflateBound(&stream, plain.size()) + 32);
  stream.next_in = const_cast<Bytef*>(plain.data());
  stream.avail_in = static_cast<uInt>(plain.size());
  stream.next_out = packed.data();
  stream.avail_out = static_cast<uInt>(packed.size());
  if (deflate(&stream, Z_FINISH) != Z_STREAM_END) throw std::runtime_error("zlib");
  packed.resize(stream.total_out);
  deflateEnd(&stream);
  return packed;
}

inline std::filesystem::path write_file(const std::filesystem::path& path, const Bytes& bytes) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  if (!file) throw std::runtime_error("cannot write " + path.string());
  return path;
}

/// Runs `call`, expects it to throw E with a text of one line that has every one of `parts` in it.
template <class E, class Call>
void expect_error(Call&& call, const std::vector<std::string>& parts) {
  try {
    call();
  } catch (const E& error) {
    const std::string text = error.what();
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
    for (const std::string& part : parts) EXPECT_NE(text.find(part), std::string::npos) << text << "\nlacks: " << part;
    return;
  }
  ADD_FAILURE() << "nothing was thrown";
}

}  // namespace halfstep::test
