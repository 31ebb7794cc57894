// SPDX-License-Identifier: Apache-2.0
#include "halfstep/io/safetensors.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <cstring>
#include <fstream>

#include "halfstep/core/input_file_internal.h"
#include "halfstep/io/atomic_file.h"
#include "halfstep/ops/create.h"
#include "tests/support/errors.h"
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
  EXPECT_EQ(io::safetensors_bytes(tensors, {{"note", "\"quoted\" – ü"}}), fs::file_size(path));
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

TEST_F(Safetensors, TakesTheHeaderApartStrictly) {
  const std::string data(8, '\0');
  const auto with = [&](const std::string& entry) { return error_of(file("{\"a\":" + entry + "}", data)); };
  const auto has = [](const std::string& error, const std::string& part) {
    EXPECT_NE(error.find(part), std::string::npos) << error;
  };
  // What the format doesn't know is passed over, as its own reader does.
  EXPECT_EQ(with(R"({"dtype":"U8","x":[{"dtype":1}],"shape":[8],"y":null,"z":"t","data_offsets":[0,8],"v":{"w":[]}})"),
            "no error");
  EXPECT_EQ(error_of(file(R"({"a":{"data_offsets":[0,8],"shape":[8],"dtype":"U8"}}   )", data)), "no error");
  EXPECT_EQ(error_of(file(R"({"__metadata__":{},"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}})", data)),
            "no error");
  has(with(R"({"dtype":"U8","x":[[[[1]]]],"shape":[8],"data_offsets":[0,8]})"), "nested too deeply");
  has(with(R"({"dtype":"U8","dtype":"U8","shape":[8],"data_offsets":[0,8]})"), "'dtype' is there twice");
  has(with(R"({"dtype":"U8","shape":[8],"shape":[8],"data_offsets":[0,8]})"), "'shape' is there twice");
  has(with(R"({"dtype":"U8","shape":[8],"data_offsets":[0,8],"data_offsets":[0,8]})"), "'data_offsets' is there twice");
  has(error_of(file(R"({"__metadata__":{"k":"1","k":"2"}})", "")), "'k' is there twice");
  has(error_of(file(R"({"__metadata__":{},"__metadata__":{}})", "")), "'__metadata__' is there twice");
  has(error_of(file(R"({"__metadata__":{"k":1}})", "")), "'k' in __metadata__ is no text");
  has(error_of(file(R"({"__metadata__":{"k":{"l":"1"}}})", "")), "'k' in __metadata__ is no text");
  has(error_of(file(R"({"__metadata__":["k"]})", "")), "__metadata__ is no object");
  for (const char* value : {"null", "1", "\"x\"", "[]", "true", "-1", "1.5", "{}"}) {
    has(error_of(file("{\"a\":" + std::string(value) + "}", "")), "expected dtype, shape and data_offsets");
  }
  has(with(R"({"dtype":5,"shape":[8],"data_offsets":[0,8]})"), "dtype");
  has(with(R"({"dtype":{"dtype":"U8"},"shape":[8],"data_offsets":[0,8]})"), "dtype");
  has(with(R"({"dtype":"U8","shape":8,"data_offsets":[0,8]})"), "expected a shape");
  has(with(R"({"dtype":"U8","shape":[[8]],"data_offsets":[0,8]})"), "whole number");
  has(with(R"({"dtype":"U8","shape":[8.0],"data_offsets":[0,8]})"), "whole number");
  has(with(R"({"dtype":"U8","shape":["8"],"data_offsets":[0,8]})"), "whole number");
  has(with(R"({"dtype":"U8","shape":[8],"data_offsets":[0,8,16]})"), "two data_offsets");
  has(with(R"({"dtype":"U8","shape":[8],"data_offsets":[8]})"), "two data_offsets");
  has(with(R"({"dtype":"U8","shape":[8],"data_offsets":{"0":0}})"), "two data_offsets");
  // Beyond 2^53 a number that went through a double would be another; beyond 2^64 there is none.
  has(with(R"({"dtype":"U8","shape":[9007199254740993],"data_offsets":[0,9007199254740993]})"), "too large");
  has(with(R"({"dtype":"U8","shape":[8],"data_offsets":[9007199254740993,9007199254741001]})"),
      "begins at 9007199254740993");
  has(with(R"({"dtype":"U8","shape":[8],"data_offsets":[18446744073709551608,18446744073709551616]})"), "whole number");
  has(with(R"({"dtype":"U8","shape":[8],"data_offsets":[18446744073709551615,7]})"), "needs 8 bytes");
  has(error_of(file(R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}} x)", data)), "JSON");
  has(error_of(file("{\"a\xff\":1}", "")), "JSON");
  // The name of a tensor reaches no terminal.
  const std::string error = error_of(file(R"({"\u001b[2J\n":{"dtype":"?","shape":[],"data_offsets":[0,0]}})", ""));
  has(error, "'\\e[2J\\n' has the dtype");
}

// Time that grows by the square of the names would be hours here, in reading and in writing.
TEST_F(Safetensors, HundredsOfThousandsOfNames) {
  constexpr int kNames = 300'000;
  NamedTensors tensors;
  const Tensor one = ones({1});
  for (int i = 0; i < kNames; ++i) tensors.push_back({"layers." + std::to_string(i) + ".weight", one});
  std::map<std::string, std::string> metadata;
  for (int i = 0; i < 50'000; ++i) metadata["key" + std::to_string(i)] = "value";
  const fs::path path = folder_ / "many.safetensors";
  io::save_safetensors(path, tensors, metadata);
  const auto loaded = io::load_safetensors(path);
  EXPECT_EQ(loaded.tensors.size(), tensors.size());
  EXPECT_EQ(loaded.metadata.size(), metadata.size());
  EXPECT_EQ(loaded.tensors.back().tensor.item<float>(), 1);
}

std::uint64_t peak_memory() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return std::stoull(line.substr(6)) << 10;
  }
  return 0;
}

TEST_F(Safetensors, ReadingTakesNoMoreMemoryThanTheTensors) {
  constexpr std::uint64_t kBytes = std::uint64_t{384} << 20;
  const fs::path path = folder_ / "large.safetensors";
  const std::string header = R"({"a":{"dtype":"U8","shape":[402653184],"data_offsets":[0,402653184]}})";
  std::ofstream(path, std::ios::binary) << file(header, "");
  fs::resize_file(path, 8 + header.size() + kBytes);  // zeros that take no room on the disk
  const std::uint64_t before = peak_memory();
  const auto loaded = io::load_safetensors(path);
  EXPECT_LT(peak_memory(), before + kBytes + kBytes / 4);
  EXPECT_EQ(loaded.tensors[0].tensor.numel(), 402653184);
}

TEST_F(Safetensors, WhatAFileClaimsHasALimit) {
  const fs::path path = folder_ / "sparse.safetensors";
  const std::string header = R"({"a":{"dtype":"U8","shape":[1099511627776],"data_offsets":[0,1099511627776]}})";
  std::ofstream(path, std::ios::binary) << file(header, "");
  std::error_code error;
  fs::resize_file(path, 8 + header.size() + (std::uint64_t{1} << 40), error);
  if (error) GTEST_SKIP() << "no sparse files of 1 TB here";
  const auto error_with = [&](const io::ReadLimits& limits) {
    return test::error_of<IoError>([&] { io::load_safetensors(path, limits); });
  };
  EXPECT_NE(error_with({}).find("1099511627776 bytes"), std::string::npos) << error_with({});
  EXPECT_NE(error_with({.max_bytes = 1000}).find("at most 1000"), std::string::npos);
  io::save_safetensors(path, {{"a", zeros({250})}});
  EXPECT_EQ(error_with({.max_bytes = 1000}), "");
  EXPECT_NE(error_with({.max_bytes = 999}), "");
}

TEST_F(Safetensors, FilesThatChangeWhileTheyAreReadAreAnError) {
  const fs::path path = folder_ / "x";
  std::ofstream(path) << std::string(100, 'x');
  const InputFile input(path);
  std::string bytes(100, ' ');
  input.read(0, bytes.data(), bytes.size());
  input.check_unchanged();
  fs::resize_file(path, 50);
  EXPECT_NE(test::error_of<IoError>([&] { input.read(40, bytes.data(), 20); }).find("ends at byte 50 now"),
            std::string::npos);
  EXPECT_NE(test::error_of<IoError>([&] { input.check_unchanged(); }).find("has 50 now"), std::string::npos);
  fs::resize_file(path, 101);
  EXPECT_THROW(input.check_unchanged(), IoError);
  const InputFile again(path);
  std::ofstream(path) << std::string(101, 'y');  // of the same length
  fs::last_write_time(path, fs::last_write_time(path) + std::chrono::seconds(1));
  EXPECT_NE(test::error_of<IoError>([&] { again.check_unchanged(); }).find("written meanwhile"), std::string::npos);
}

TEST_F(Safetensors, NamesThatAreNoUtf8AreRefusedBeforeAnythingIsWritten) {
  const fs::path path = folder_ / "x.safetensors";
  const auto error = test::error_of<Error>([&] { io::save_safetensors(path, {{"caf\xe9", ones({1})}}); });
  EXPECT_NE(error.find("'caf\\xe9'"), std::string::npos) << error;
  EXPECT_THROW(io::save_safetensors(path, {}, {{"k", "caf\xe9"}}), Error);
  EXPECT_TRUE(fs::is_empty(folder_));
  const std::string odd = "\"\\\n\t\x01\x7f/ \u2028 é";
  io::save_safetensors(path, {{odd, ones({1})}}, {{odd, odd}});
  EXPECT_EQ(io::load_safetensors(path).tensors[0].name, odd);
  EXPECT_EQ(io::load_safetensors(path).metadata.at(odd), odd);
}

}  // namespace
}  // namespace halfstep
