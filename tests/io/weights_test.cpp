// SPDX-License-Identifier: Apache-2.0
#include "halfstep/io/weights.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cmath>
#include <fstream>
#include <mutex>

#include "halfstep/io/pth.h"
#include "halfstep/io/safetensors.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/create.h"
#include "halfstep/runtime/log.h"
#include "tests/support/errors.h"
#include "tests/support/test_data.h"

namespace halfstep {
namespace {

namespace fs = std::filesystem;

struct Net : nn::Module<Net> {
  nn::Linear body;
  nn::BatchNorm1d bn = child("bn", nn::BatchNorm1d{{.channels = 4}});
  nn::Linear fc;
  explicit Net(std::int64_t classes)
      : body(child("body", nn::Linear{{.in = 3, .out = 4}})), fc(child("fc", nn::Linear{{.in = 4, .out = classes}})) {}
  Net(const Net&) = default;
  Tensor forward(const Tensor& x) const { return fc(bn(body(x))); }
};

// What the log says while it lives.
class Log {
 public:
  Log() {
    set_log_level(LogLevel::info);
    set_log_sink([this](LogLevel level, std::string_view text) {
      lines.emplace_back((level == LogLevel::info ? "info: " : "warning: ") + std::string(text));
    });
  }
  ~Log() {
    set_log_sink({});
    set_log_level(LogLevel::warning);
  }
  std::vector<std::string> lines;
};

NamedTensors filled(const Net& net, double value) {
  NamedTensors tensors;
  for (const NamedTensor& t : net.state_dict()) tensors.push_back({t.name, full_like(t.tensor.detach(), value)});
  return tensors;
}

void rename(NamedTensors& tensors, const std::string& from, const std::string& to) {
  for (NamedTensor& t : tensors) {
    if (t.name == from) t.name = to;
  }
}

std::string error_of(const Net& net, const NamedTensors& tensors, const io::PretrainedOptions& options = {}) {
  return test::error_of<Error>([&] { io::load_pretrained(net, tensors, options); });
}

TEST(LoadPretrained, LoadsAllWhereAllFits) {
  const Net net(5);
  const Log log;
  const auto report = io::load_pretrained(net, filled(Net(5), 2));
  EXPECT_EQ(report.loaded.size(), net.state_dict().size());
  EXPECT_TRUE(report.missing.empty() && report.unexpected.empty() && report.replaced.empty());
  EXPECT_TRUE(log.lines.empty());
  for (const NamedTensor& t : net.state_dict()) EXPECT_EQ(t.tensor.to_vector<double>()[0], 2) << t.name;
}

TEST(LoadPretrained, LeavesAHeadOfAnotherSizeAsItIsAndSaysSo) {
  const Net net(5);
  net.fc.weight.detach().fill_(7);
  net.fc.bias.detach().fill_(7);
  NamedTensors file = filled(Net(1000), 2);
  const Log log;
  const auto report = io::load_pretrained(net, file);
  EXPECT_EQ(report.replaced, (std::vector<std::string>{"fc.weight", "fc.bias"}));
  EXPECT_EQ(report.loaded.size(), 7u);
  EXPECT_EQ(net.fc.weight.to_vector<double>(), std::vector<double>(20, 7));
  EXPECT_EQ(net.fc.bias.to_vector<double>(), std::vector<double>(5, 7));
  EXPECT_EQ(net.body.weight.to_vector<double>(), std::vector<double>(12, 2));
  ASSERT_EQ(log.lines.size(), 1u);
  EXPECT_NE(log.lines[0].find("warning: the last layer was not loaded"), std::string::npos);
  EXPECT_NE(log.lines[0].find("fc.weight ([5, 4] here, [1000, 4] in the file)"), std::string::npos);
  EXPECT_NE(error_of(net, file, {.replace_head = false}).find("fc.weight is [5, 4] in the network and [1000, 4]"),
            std::string::npos);
}

TEST(LoadPretrained, TakesAHeadOfAnotherName) {
  const Net net(5);
  NamedTensors file = filled(Net(9), 2);
  rename(file, "fc.weight", "classifier.1.weight");
  rename(file, "fc.bias", "classifier.1.bias");
  const auto report = io::load_pretrained(net, file);
  EXPECT_EQ(report.replaced, (std::vector<std::string>{"fc.weight", "fc.bias"}));
  EXPECT_EQ(report.unexpected, (std::vector<std::string>{"classifier.1.bias", "classifier.1.weight"}));
}

TEST(LoadPretrained, OldFilesHaveNoCountersOfBatches) {
  const Net net(5);
  NamedTensors file = filled(Net(5), 2);
  std::erase_if(file, [](const NamedTensor& t) { return t.name == "bn.num_batches_tracked"; });
  EXPECT_EQ(io::load_pretrained(net, file).missing, std::vector<std::string>{"bn.num_batches_tracked"});
}

TEST(LoadPretrained, CountersAreWholeNumbersAndPossible) {
  const Net net(5);
  net.body.weight.detach().fill_(7);
  const auto with = [](const Tensor& counter) {
    NamedTensors file = filled(Net(5), 2);
    for (NamedTensor& t : file) {
      if (t.name == "bn.num_batches_tracked") t.tensor = counter;
    }
    return file;
  };
  const auto counter = [](std::int64_t value) { return tensor({static_cast<double>(value)}, {}, {.dtype = i64}); };
  EXPECT_NE(error_of(net, with(full({}, std::nan("")))).find("bn.num_batches_tracked is i64 in the network and f32"),
            std::string::npos)
      << error_of(net, with(full({}, std::nan(""))));
  EXPECT_NE(error_of(net, with(full({}, 3))).find("i64 in the network and f32 in the file"), std::string::npos);
  EXPECT_NE(error_of(net, with(counter(-1))).find("bn.num_batches_tracked counts to -1"), std::string::npos);
  EXPECT_NE(error_of(net, with(counter(INT64_MIN))).find("counts to -9223372036854775808"), std::string::npos);
  EXPECT_NE(error_of(net, with(counter((std::int64_t{1} << 62) + 1024))).find("counts to"), std::string::npos);
  EXPECT_EQ(net.body.weight.detach().to_vector<float>(), std::vector<float>(12, 7));
  EXPECT_EQ(error_of(net, with(counter(3))), "");
  EXPECT_EQ(net.bn.num_batches_tracked.item<std::int64_t>(), 3);
  // Other whole numbers are only as wide as they need be.
  EXPECT_EQ(error_of(net, with(tensor({4}, {}, {.dtype = i32}))), "");
}

// Each dot of a name may end a prefix that all names have: of a hundred thousand dots and names each, hours.
TEST(LoadPretrained, NamesOfDots) {
  NamedTensors file;
  const Tensor weight = zeros({4, 3});
  std::string dots;
  for (int i = 0; i < 100'000; ++i) dots += "a.";
  file.push_back({dots, weight});
  for (int i = 0; i < 100'000; ++i) file.push_back({"other." + std::to_string(i), weight});
  const std::string error = error_of(Net(5), file);
  EXPECT_NE(error.find("and 99995 more"), std::string::npos) << error.substr(0, 1000);
  EXPECT_LT(error.size(), 3000u);
}

TEST(LoadPretrained, NamesAllOtherDifferencesAndChangesNothing) {
  const Net net(5);
  net.body.weight.detach().fill_(7);
  NamedTensors file = filled(Net(5), 2);
  rename(file, "body.weight", "boddy.weight");
  rename(file, "body.bias", "something");
  const std::string error = error_of(net, file);
  EXPECT_NE(error.find("the file lacks body.weight (it has boddy.weight, of the same shape), body.bias;"),
            std::string::npos)
      << error;
  EXPECT_NE(error.find("the network lacks boddy.weight, something"), std::string::npos) << error;
  EXPECT_EQ(net.body.weight.to_vector<double>(), std::vector<double>(12, 7));
  file = filled(Net(5), 2);
  file[0].tensor = ones({4, 9});
  EXPECT_NE(error_of(net, file).find("body.weight is [4, 3] in the network and [4, 9] in the file"), std::string::npos);
  file = filled(Net(5), 2);
  std::erase_if(file, [](const NamedTensor& t) { return t.name == "fc.bias"; });  // half a head is none
  EXPECT_NE(error_of(net, file).find("the file lacks fc.bias"), std::string::npos);
}

TEST(LoadPretrained, SeesNamesThatBeginOtherwise) {
  const Net net(5);
  NamedTensors file;
  for (NamedTensor& t : filled(net, 2)) file.push_back({"backbone." + t.name, t.tensor});
  EXPECT_NE(error_of(net, file).find("names in the file begin with 'backbone.', those in the network don't"),
            std::string::npos);
}

TEST(LoadWeightsFile, KnowsTheFormByItsContent) {
  const test::TemporaryDir folder;
  const auto path = folder.path() / "weights";
  io::save_pth(path, {{"w", ones({2})}}, {.metadata = {{"epoch", "3"}}});
  auto file = io::load_weights_file(path);
  EXPECT_EQ(file.format, io::WeightsFormat::pth);
  EXPECT_EQ(file.tensors[0].tensor.to_vector<double>(), (std::vector<double>{1, 1}));
  EXPECT_EQ(file.metadata.at("epoch"), "3");
  // Headers of 640 bytes begin as pickles do.
  for (std::size_t filling = 570; filling < 600; ++filling) {
    io::save_safetensors(path, {{"w", ones({2})}}, {{"m", std::string(filling, 'x')}});
    file = io::load_weights_file(path);
    EXPECT_EQ(file.format, io::WeightsFormat::safetensors);
    EXPECT_EQ(file.metadata.at("m").size(), filling);
  }
  EXPECT_EQ(io::load_weights_file(test::goldens_dir() / "pth/legacy.pth").format, io::WeightsFormat::pth);
  EXPECT_NE(test::error_of<IoError>([&] { io::load_weights_file(folder.path() / "none"); }).find("no such file"),
            std::string::npos);
  io::save_safetensors(path, {});
  EXPECT_NE(test::error_of<IoError>([&] { io::load_weights_file(path); }).find("no tensors"), std::string::npos);
}

TEST(LoadWeightsFile, LeavesOutThePrefixOfDataParallel) {
  const Log log;
  const auto file = io::load_weights_file(test::goldens_dir() / "pth/checkpoint.pth");
  ASSERT_EQ(file.tensors.size(), 2u);
  EXPECT_EQ(file.tensors[0].name, "weight");
  EXPECT_EQ(file.tensors[1].name, "bias");
  EXPECT_EQ(file.others.size(), 3u);
  ASSERT_EQ(log.lines.size(), 1u);
  EXPECT_NE(log.lines[0].find("info: "), std::string::npos);
  EXPECT_NE(log.lines[0].find("DataParallel"), std::string::npos);
}

TEST(LoadWeightsFile, OpensFilesOnly) {
  const test::TemporaryDir dir;
  const fs::path pipe = dir.path() / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);  // whose writer would be waited for
  const auto error = [](const fs::path& path) { return test::error_of<IoError>([&] { io::load_weights_file(path); }); };
  EXPECT_NE(error(pipe).find("expected a file, got a pipe"), std::string::npos) << error(pipe);
  EXPECT_NE(error("/dev/zero").find("expected a file, got a device"), std::string::npos) << error("/dev/zero");
  EXPECT_NE(error(dir.path()).find("expected a file, got a folder"), std::string::npos) << error(dir.path());
  EXPECT_NE(error(dir.path() / "no").find("no such file"), std::string::npos);
  EXPECT_NE(error(dir.path() / std::string(5000, 'x')).find("too long"), std::string::npos);
  EXPECT_NE(error(dir.path() / "a\x1b[2J\nb").find("a\\e[2J\\nb: there is no such file"), std::string::npos);
  for (const char* name : {"empty.pth", "empty.safetensors"}) {
    std::ofstream file(dir.path() / name);
    EXPECT_NE(error(dir.path() / name).find("got 0 bytes"), std::string::npos) << error(dir.path() / name);
  }
}

}  // namespace
}  // namespace halfstep
