// SPDX-License-Identifier: Apache-2.0
#include "halfstep/io/safetensors.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <cstring>
#include <fstream>

#include "halfstep/io/atomic_file.h"
#include "halfstep/ops/create.h"
#include "tests/support/test_data.h"

namespace halfstep {
namespace {

namespace fs = std::filesystem;

class Safetensors : public ::testing::Test {
 protected:
  test::TemporaryDir temporary_;
  const fs::path folder_ = temporary_.path();
};

std::string file(const std::string& header, const std::string& data, std::int64_t length = -1) {
  std::string bytes(8, '\0');
  const auto n = length < 0 ? header.size() : static_cast<std::size_t>(length);
  for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(n >> (8 * i));
  return bytes + header + data;
}

io::Safetensors parse(const std::string& bytes) {
  return io::parse_safetensors({reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size()}, "x.safetensors");
}

std::string error_of(const std::string& bytes) {
  try {
    parse(bytes);
  } catch (const IoError& e) {
    return e.what();
  }
  return "no error";
}

// Bytes as the format's reference writer in Python (safetensors 0.5) writes two tensors.
TEST_F(Safetensors, ReadsTheReferenceWritersBytes) {
  const std::string header =
      R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},"b":{"dtype":"I32","shape":[],"data_offsets":[12,16]}})";
  std::string data(16, '\0');
  const float a[] = {1, 2, 3.5};
  const std::int32_t b = -7;
  std::memcpy(data.data(), a, 12);
  std::memcpy(data.data() + 12, &b, 4);
  const auto parsed = parse(file(header, data));
  ASSERT_EQ(parsed.tensors.size(), 2u);
  EXPECT_EQ(parsed.tensors[0].name, "a");
  EXPECT_EQ(parsed.tensors[0].tensor.to_vector<float>(), (std::vector<float>{1, 2, 3.5}));
  EXPECT_EQ(parsed.tensors[1].tensor.item<int>(), -7);
}

TEST_F(Safetensors, RoundTripsEveryDtypeAndLayout) {
  NamedTensors tensors;
  for (int d = 0; d < kNumDTypes; ++d) {
    const auto dtype = static_cast<DType>(d);
    tensors.push_back({std::string("t.") + name(dtype), tensor({0, 1, 1, 0, 1, 1}, {2, 3}, {.dtype = dtype})});
  }
  tensors.push_back({"strided", tensor({1, 2, 3, 4, 5, 6}, {2, 3}).t()});
  tensors.push_back({"empty", zeros({0, 4})});
  tensors.push_back({"scalar", full({}, 2.5)});
  const fs::path path = folder_ / "x.safetensors";
  io::save_safetensors(path, tensors, {{"note", "\"quoted\" – ü"}});
  const auto loaded = io::load_safetensors(path);
  EXPECT_EQ(loaded.metadata.at("note"), "\"quoted\" – ü");
  ASSERT_EQ(loaded.tensors.size(), tensors.size());
  for (const auto& t : tensors) {
    const auto it =
        std::find_if(loaded.tensors.begin(), loaded.tensors.end(), [&](const auto& l) { return l.name == t.name; });
    ASSERT_NE(it, loaded.tensors.end()) << t.name;
    EXPECT_EQ(it->tensor.dtype(), t.tensor.dtype());
    EXPECT_EQ(it->tensor.sizes(), t.tensor.sizes());
    EXPECT_EQ(it->tensor.to_vector<double>(), t.tensor.to_vector<double>()) << t.name;
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator{}), 1);
}

TEST_F(Safetensors, RefusesDamagedFilesAndSaysWhy) {
  const std::string good = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  const std::string data(8, '\0');
  EXPECT_EQ(error_of(file(good, data)), "no error");
  EXPECT_EQ(error_of("abc"), "x.safetensors: expected a safetensors file, got 3 bytes");
  EXPECT_NE(error_of(file(good, data, 1 << 30)).find("at most 100000000"), std::string::npos);
  EXPECT_NE(error_of(file(good, data, 5000)).find("cut short"), std::string::npos);
  EXPECT_NE(error_of(file(good, data.substr(1))).find("cut short"), std::string::npos);
  EXPECT_NE(error_of(file(good, data + "x")).find("expected 8 bytes of data, got 9"), std::string::npos);
  EXPECT_NE(error_of(file("[]", "")).find("doesn't begin"), std::string::npos);
  EXPECT_NE(error_of(file("{\"a\":", "")).find("JSON"), std::string::npos);
  const auto with = [&](const std::string& entry) { return error_of(file("{\"a\":" + entry + "}", data)); };
  EXPECT_NE(with(R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})").find("needs 8 bytes"), std::string::npos);
  EXPECT_NE(with(R"({"dtype":"F32","shape":[2],"data_offsets":[8,0]})").find("needs 8 bytes"), std::string::npos);
  EXPECT_NE(with(R"({"dtype":"F32","shape":[-2],"data_offsets":[0,8]})").find("whole number"), std::string::npos);
  EXPECT_NE(with(R"({"dtype":"F31","shape":[2],"data_offsets":[0,8]})").find("F31"), std::string::npos);
  EXPECT_NE(with(R"({"dtype":"F32","shape":[281474976710656,281474976710656],"data_offsets":[0,8]})").find("too large"),
            std::string::npos);
  EXPECT_NE(with(R"({"dtype":"F32","shape":[1,1,1,1,1,1,1,1,2],"data_offsets":[0,8]})").find("at most 8 dimensions"),
            std::string::npos);
  EXPECT_NE(with(R"({"shape":[2]})").find("expected dtype"), std::string::npos);
  EXPECT_NE(
      error_of(
          file(
              R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
              data))
          .find("begins at 2"),
      std::string::npos);
  EXPECT_NE(
      error_of(
          file(
              R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}})",
              data))
          .find("twice"),
      std::string::npos);
  EXPECT_NE(
      error_of(file(R"({"a":{"dtype":"BOOL","shape":[8],"data_offsets":[0,8]}})", std::string("\1\0\1\0\1\0\1\2", 8)))
          .find("BOOL"),
      std::string::npos);
  EXPECT_NE(error_of(file(std::string(100000, '['), "")).find("x.safetensors"), std::string::npos);
  EXPECT_NE(error_of(file("{\"a\":" + std::string(100000, '['), "")).find("x.safetensors"), std::string::npos);
}

TEST_F(Safetensors, MissingFilesAndFoldersAreNamed) {
  try {
    io::load_safetensors(folder_ / "nope.safetensors");
    FAIL();
  } catch (const IoError& e) {
    EXPECT_NE(std::string(e.what()).find("nope.safetensors: there is no such file"), std::string::npos);
  }
  EXPECT_THROW(io::load_safetensors(folder_), IoError);
  io::save_safetensors(folder_ / "y.safetensors", {{"a", ones({1})}});
  const auto size = fs::file_size(folder_ / "y.safetensors");
  EXPECT_EQ(io::read_file(folder_ / "y.safetensors", size).size(), size);
  EXPECT_THROW(io::read_file(folder_ / "y.safetensors", size - 1), IoError);
  EXPECT_THROW(io::save_safetensors(folder_ / "no" / "such.safetensors", {}), IoError);
  EXPECT_THROW(io::save_safetensors(folder_ / "x.safetensors", {{"a", ones({1})}, {"a", ones({1})}}), Error);
}

// A full disk, played by a limit on the size of files.
TEST_F(Safetensors, AFailedWriteLeavesWhatWasThere) {
  const fs::path path = folder_ / "x.safetensors";
  io::save_safetensors(path, {{"a", ones({4})}});
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  rlimit small = before;
  small.rlim_cur = 4096;
  auto* old = std::signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &small);
  std::string error;
  try {
    io::save_safetensors(path, {{"a", zeros({100000})}});
  } catch (const IoError& e) {
    error = e.what();
  }
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, old);
  EXPECT_NE(error.find("x.safetensors"), std::string::npos) << error;
  EXPECT_EQ(io::load_safetensors(path).tensors[0].tensor.to_vector<float>(), std::vector<float>(4, 1.0f));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator{}), 1);
}

}  // namespace
}  // namespace halfstep
