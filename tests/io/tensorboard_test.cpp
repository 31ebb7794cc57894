// SPDX-License-Identifier: Apache-2.0
// Event files byte by byte against the format, and by TensorBoard's own reader where there is a Python with the package
// tensorboard: HALFSTEP_TENSORBOARD_PYTHON, HALFSTEP_PEER_PYTHON or python3, the first that has it.
#include "halfstep/io/tensorboard.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <bit>
#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "halfstep/io/atomic_file.h"
#include "halfstep/ops/create.h"
#include "tests/support/errors.h"
#include "tests/support/test_data.h"

namespace halfstep {
namespace {

namespace fs = std::filesystem;
using test::error_of;
using Json = nlohmann::json;

constexpr double kInf = std::numeric_limits<double>::infinity();

// The values of the Castagnoli CRC that RFC 3720 gives (B.4), and the usual check value.
TEST(TensorBoard, ChecksumIsCastagnolis) {
  using io::detail::crc32c;
  EXPECT_EQ(crc32c("123456789", 9), 0xE3069283u);
  std::string bytes(32, '\0');
  EXPECT_EQ(crc32c(bytes.data(), 32), 0x8A9136AAu);
  std::fill(bytes.begin(), bytes.end(), '\xff');
  EXPECT_EQ(crc32c(bytes.data(), 32), 0x62A8AB43u);
  for (int i = 0; i < 32; ++i) bytes[static_cast<std::size_t>(i)] = static_cast<char>(i);
  EXPECT_EQ(crc32c(bytes.data(), 32), 0x46DD794Eu);
}

template <class T>
T read(const std::string& bytes, std::size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);  // both are little-endian
  return value;
}

// A file, taken apart into records whose checksums agree.
std::vector<std::string> records(const fs::path& path) {
  const std::string bytes = io::read_file(path, 1 << 20);
  const auto masked = [](std::uint32_t crc) { return std::rotr(crc, 15) + 0xA282EAD8u; };
  std::vector<std::string> result;
  for (std::size_t at = 0; at < bytes.size();) {
    const auto length = read<std::uint64_t>(bytes, at);
    EXPECT_EQ(read<std::uint32_t>(bytes, at + 8), masked(io::detail::crc32c(bytes.data() + at, 8)));
    result.push_back(bytes.substr(at + 12, length));
    EXPECT_EQ(read<std::uint32_t>(bytes, at + 12 + length),
              masked(io::detail::crc32c(result.back().data(), result.back().size())));
    at += length + 16;
  }
  return result;
}

template <class T>
std::string bytes_of(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

TEST(TensorBoard, RecordsAreWhatTheFormatSays) {
  test::TemporaryDir dir;
  fs::path path;
  {
    io::TensorBoardWriter writer(dir.path() / "a" / "b", {.suffix = ".train"});
    path = writer.path();
    writer.scalar("loss", 0.5, 300, 1.5);
  }
  const std::string name = path.filename().string();
  EXPECT_TRUE(name.starts_with("events.out.tfevents.") && name.ends_with(".train")) << name;
  const std::vector<std::string> found = records(path);
  ASSERT_EQ(found.size(), 2u);
  // wall_time (field 1, 64 bits), file_version (3, bytes).
  EXPECT_EQ(found[0].substr(0, 1), "\x09");
  EXPECT_EQ(found[0].substr(9),
            "\x1a\x0d"
            "brain.Event:2");
  // wall_time, step (2, varint: 300), summary (5): value (1): tag (1), simple_value (2, 32 bits).
  EXPECT_EQ(found[1], "\x09" + bytes_of(1.5) + "\x10\xac\x02" + "\x2a\x0d\x0a\x0b\x0a\x04loss\x15" + bytes_of(0.5f));
  // The masked checksum of a length of 72, as TensorFlow writes it.
  const std::string length = bytes_of(std::uint64_t{72});
  EXPECT_EQ(std::rotr(io::detail::crc32c(length.data(), 8), 15) + 0xA282EAD8u, 0x9d4892feu);
}

TEST(TensorBoard, AResumedRunSaysFromWhichStepOn) {
  test::TemporaryDir dir;
  const io::TensorBoardWriter writer(dir.path(), {.purge_step = 300});
  const std::vector<std::string> found = records(writer.path());
  ASSERT_EQ(found.size(), 2u);
  // Behind wall_time (field 1, 64 bits): step (2, varint: 300), session_log (7): status (1): START (1).
  EXPECT_EQ(found[1].substr(9), "\x10\xac\x02\x3a\x02\x08\x01");
}

TEST(TensorBoard, WritersHaveFilesOfTheirOwn) {
  test::TemporaryDir dir;
  io::TensorBoardWriter one(dir.path()), two(dir.path());
  EXPECT_NE(one.path(), two.path());
  one.scalar("x", 1, 1);
  one.flush();
  EXPECT_EQ(records(one.path()).size(), 2u);  // seen by others while it is open
  EXPECT_EQ(records(two.path()).size(), 1u);
}

TEST(TensorBoard, SaysWhatIsWrong) {
  test::TemporaryDir dir;
  std::ofstream(dir.path() / "file") << "x";
  const std::string error = error_of<IoError>([&] { io::TensorBoardWriter writer(dir.path() / "file" / "events"); });
  EXPECT_NE(error.find("can't be made"), std::string::npos) << error;
  io::TensorBoardWriter writer(dir.path());
  EXPECT_NE(error_of<ShapeError>([&] { writer.histogram("w", {}, 1); }).find("expected values for w, got none"),
            std::string::npos);
}

std::string shell_quoted(const std::string& text) {
  std::string result = "'";
  for (char c : text) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return result + "'";
}

std::string find_python() {
  for (const char* variable : {"HALFSTEP_TENSORBOARD_PYTHON", "HALFSTEP_PEER_PYTHON", ""}) {
    const char* value = *variable ? std::getenv(variable) : "python3";
    if (!value || !*value) continue;
    const std::string command =
        shell_quoted(value) + " -c 'import tensorboard.backend.event_processing.event_accumulator' >/dev/null 2>&1";
    if (std::system(command.c_str()) == 0) return value;
  }
  return {};
}

TEST(TensorBoard, ItsOwnReaderReadsTheFile) {
  const std::string python = find_python();
  if (python.empty()) GTEST_SKIP() << "needs a Python with tensorboard; HALFSTEP_TENSORBOARD_PYTHON names one";
  test::TemporaryDir dir;
  Json scalars, histograms;
  {
    io::TensorBoardWriter writer(dir.path() / "events");
    const auto scalar = [&](const std::string& tag, double value, std::int64_t step, double time) {
      writer.scalar(tag, value, step, time);
      scalars[tag].push_back({time, step, std::isnan(value) ? Json() : Json(value)});
    };
    // Values that float32 holds.
    scalar("train/loss", 2.25, 1, 1e9);
    scalar("train/loss", 0.125, 1LL << 40, 1e9 + 0.5);
    scalar("train/loss", std::nan(""), 1LL << 41, 1e9 + 1);
    scalar("lr", -1e-3f, 0, 1e9);
    // Where values that float64 holds go, by hand: equal ones share a bucket, ones a tenth apart don't.
    const auto add = [&](const std::string& tag, const std::vector<double>& values, DType dtype, const Json& counts,
                         std::int64_t step) {
      writer.histogram(tag, tensor(values, {.dtype = dtype}), step, 1e9);
      double low = kInf, high = -kInf, sum = 0, squares = 0, number = 0, lost = 0;
      for (double v : values) {
        if (!std::isfinite(v)) {
          ++lost;
          continue;
        }
        low = std::min(low, v), high = std::max(high, v), sum += v, squares += v * v, ++number;
      }
      if (lost > 0) scalars[tag + "/nonfinite"].push_back({1e9, step, lost});
      if (number == 0) return;
      histograms[tag].push_back({{"wall_time", 1e9},
                                 {"step", step},
                                 {"min", low},
                                 {"max", high},
                                 {"num", number},
                                 {"sum", sum},
                                 {"sum_squares", squares},
                                 {"counts", counts}});
    };
    add("w", {-2, -2, -0.25, 0, 0.25, 0.5, 0.5, 0.5, 1e15}, f64,
        {{-2, -2, 2}, {-0.25, -0.25, 1}, {0, 0, 1}, {0.25, 0.25, 1}, {0.5, 0.5, 3}, {1e15, 1e15, 1}}, 1);
    add("w", {3, 3}, f16, {{3, 3, 2}}, 2);
    add("w", {-7}, f64, {{-7, -7, 1}}, 3);
    add("ends", {-1e30, 1e30, 0, 0}, f64, {{-1e30, -1e30, 1}, {0, 0, 2}, {1e30, 1e30, 1}}, 1);
    add("grad", {kInf, 1, std::nan(""), -kInf}, f32, {{1, 1, 1}}, 1);
    add("bad", {kInf}, f32, {}, 4);
  }
  std::ofstream(dir.path() / "expected.json") << Json{{"scalars", scalars}, {"histograms", histograms}}.dump(1);
  const fs::path script = test::goldens_dir().parent_path() / "io" / "check_tensorboard.py";
  const std::string command = "PYTHONDONTWRITEBYTECODE=1 " + shell_quoted(python) + " " +
                              shell_quoted(script.string()) + " " + shell_quoted(dir.path().string()) + " 2>&1";
  std::FILE* pipe = popen(command.c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  std::string said;
  for (char buffer[4096]; const std::size_t n = std::fread(buffer, 1, sizeof buffer, pipe);) said.append(buffer, n);
  const int status = pclose(pipe);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << said;
}

}  // namespace
}  // namespace halfstep
