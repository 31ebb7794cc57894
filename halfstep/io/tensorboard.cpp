// SPDX-License-Identifier: Apache-2.0
#include "halfstep/io/tensorboard.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <vector>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/io/little_endian_internal.h"
#include "tensorboard.pb.h"  // made by protoc from tensorboard.proto

namespace halfstep::io {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

// The polynomial 0x1EDC6F41 with its bits reversed.
constexpr std::uint32_t kPolynomial = 0x82F63B78;

constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kPolynomial : 0);
    table[i] = crc;
  }
  return table;
}

// The format keeps checksums turned and shifted, so that a checksum of data with checksums in it stays useful.
std::uint32_t masked(std::uint32_t crc) { return std::rotr(crc, 15) + 0xA282EAD8u; }

// Upper limits of TensorBoard's buckets: -1e20 ... -1e-12, 0, 1e-12 ... 1e20 in steps of a tenth, then everything else.
const std::vector<double>& bucket_limits() {
  static const std::vector<double> limits = [] {
    std::vector<double> positive;
    for (double v = 1e-12; v < 1e20; v *= 1.1) positive.push_back(v);
    constexpr double kMax = std::numeric_limits<double>::max();
    std::vector<double> all{-kMax};
    for (auto v = positive.rbegin(); v != positive.rend(); ++v) all.push_back(-*v);
    all.push_back(0);
    all.insert(all.end(), positive.begin(), positive.end());
    all.push_back(kMax);
    return all;
  }();
  return limits;
}

double now() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

std::string host() {
  char name[256] = {};
  if (::gethostname(name, sizeof name - 1) != 0 || !name[0]) return "localhost";
  return name;
}

}  // namespace

std::uint32_t detail::crc32c(const void* data, std::size_t bytes) {
  static constexpr std::array<std::uint32_t, 256> kTable = make_table();
  const auto* at = static_cast<const unsigned char*>(data);
  std::uint32_t crc = ~std::uint32_t{0};
  for (std::size_t i = 0; i < bytes; ++i) crc = (crc >> 8) ^ kTable[(crc ^ at[i]) & 0xFF];
  return ~crc;
}

struct TensorBoardWriter::Impl {
  fs::path path;
  std::ofstream file;
  Clock::time_point flushed = Clock::now();

  void failed(const char* what) const {
    const int error = errno;
    fail<IoError>("{}: {}: {}", shown_path(path), what, error ? std::strerror(error) : "unknown reason");
  }

  void write(const tensorboard_file::Event& event) {
    const std::string data = event.SerializeAsString();
    std::string record;
    little_endian(record, data.size(), 8);
    little_endian(record, masked(detail::crc32c(record.data(), 8)), 4);
    record += data;
    little_endian(record, masked(detail::crc32c(data.data(), data.size())), 4);
    errno = 0;
    if (!file.write(record.data(), static_cast<std::streamsize>(record.size()))) failed("writing failed");
    if (Clock::now() - flushed > std::chrono::seconds(1)) flush();
  }

  void flush() {
    errno = 0;
    if (!file.flush()) failed("writing failed; is the disk full?");
    flushed = Clock::now();
  }

  static tensorboard_file::Event event(std::int64_t step, std::optional<double> wall_time) {
    tensorboard_file::Event e;
    e.set_wall_time(wall_time.value_or(now()));
    e.set_step(step);
    return e;
  }
};

TensorBoardWriter::TensorBoardWriter(const fs::path& folder, const TensorBoardOptions& options)
    : impl_(std::make_unique<Impl>()) {
  static std::atomic<int> number{0};
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) fail<IoError>("{}: can't be made: {}", shown_path(folder), error.message());
  // Processes of two containers may have the same host, number and second: whoever creates the file owns it.
  int file = -1;
  do {
    impl_->path = folder / fmt::format("events.out.tfevents.{}.{}.{}.{}{}", static_cast<std::int64_t>(now()), host(),
                                       ::getpid(), number++, options.suffix);
    file = ::open(impl_->path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (file < 0 && errno == EEXIST);
  if (file < 0) impl_->failed("can't be written");
  ::close(file);
  errno = 0;
  impl_->file.open(impl_->path, std::ios::binary | std::ios::trunc);
  if (!impl_->file) impl_->failed("can't be written");
  tensorboard_file::Event first = Impl::event(0, {});
  first.clear_step();
  first.set_file_version("brain.Event:2");
  impl_->write(first);
  if (options.purge_step) {
    tensorboard_file::Event start = Impl::event(*options.purge_step, {});
    start.mutable_session_log()->set_status(tensorboard_file::SessionLog::START);
    impl_->write(start);
  }
  impl_->flush();
}

TensorBoardWriter::~TensorBoardWriter() = default;
TensorBoardWriter::TensorBoardWriter(TensorBoardWriter&&) noexcept = default;
TensorBoardWriter& TensorBoardWriter::operator=(TensorBoardWriter&&) noexcept = default;

void TensorBoardWriter::scalar(const std::string& tag, double value, std::int64_t step,
                               std::optional<double> wall_time) {
  tensorboard_file::Event event = Impl::event(step, wall_time);
  tensorboard_file::Value& v = *event.mutable_summary()->add_value();
  v.set_tag(printable(tag));
  v.set_simple_value(static_cast<float>(value));
  impl_->write(event);
}

void TensorBoardWriter::histogram(const std::string& tag, const Tensor& values, std::int64_t step,
                                  std::optional<double> wall_time) {
  if (!values.defined() || values.numel() == 0)
    fail<ShapeError>("histogram: expected values for {}, got none", printable(tag));
  const std::vector<double>& limits = bucket_limits();
  std::vector<double> counts(limits.size(), 0);
  double low = std::numeric_limits<double>::infinity(), high = -low, count = 0, sum = 0, squares = 0, nonfinite = 0;
  for (double v : values.to_vector<double>()) {
    if (!std::isfinite(v)) {
      ++nonfinite;
      continue;
    }
    low = std::min(low, v), high = std::max(high, v);
    ++count, sum += v, squares += v * v;
    // A bucket ends before its limit; the last one takes the largest double too.
    const auto limit = std::upper_bound(limits.begin(), limits.end() - 1, v);
    ++counts[static_cast<std::size_t>(limit - limits.begin())];
  }
  tensorboard_file::Event event = Impl::event(step, wall_time);
  if (count > 0) {
    tensorboard_file::Value& value = *event.mutable_summary()->add_value();
    value.set_tag(printable(tag));
    tensorboard_file::Histogram& h = *value.mutable_histo();
    h.set_min(low);
    h.set_max(high);
    h.set_num(count);
    h.set_sum(sum);
    h.set_sum_squares(squares);
    // Empty buckets at both ends say nothing, and TensorBoard takes the least value for the begin of the first one.
    std::size_t first = 0, last = counts.size() - 1;
    while (counts[first] == 0) ++first;
    while (counts[last] == 0) --last;
    for (std::size_t i = first; i <= last; ++i) {
      h.add_bucket_limit(limits[i]);
      h.add_bucket(counts[i]);
    }
  }
  if (nonfinite > 0) {
    tensorboard_file::Value& value = *event.mutable_summary()->add_value();
    value.set_tag(printable(tag) + "/nonfinite");
    value.set_simple_value(static_cast<float>(nonfinite));
  }
  impl_->write(event);
}

void TensorBoardWriter::flush() { impl_->flush(); }

const fs::path& TensorBoardWriter::path() const { return impl_->path; }

}  // namespace halfstep::io
