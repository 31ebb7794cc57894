// SPDX-License-Identifier: Apache-2.0
#include "halfstep/debug/dump.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "halfstep/amp/autocast.h"
#include "halfstep/io/safetensors.h"
#include "halfstep/ops/pool.h"
#include "halfstep/ops/reduce.h"
#include "tests/debug/nets.h"
#include "tests/support/test_data.h"

namespace halfstep {
namespace {

namespace fs = std::filesystem;
using debug::Dump;
using debug::DumpLevel;
using nlohmann::json;

std::string text_of(const fs::path& file) {
  std::ifstream stream(file);
  std::ostringstream text;
  text << stream.rdbuf();
  EXPECT_TRUE(stream.good() || stream.eof()) << file;
  return text.str();
}

std::vector<std::string> names(const fs::path& folder) {
  std::set<std::string> found;
  for (const auto& entry : fs::directory_iterator(folder)) found.insert(entry.path().filename());
  return {found.begin(), found.end()};
}

class DumpTest : public ::testing::Test {
 protected:
  test::TemporaryDir temporary_;
  const fs::path folder_ = temporary_.path() / "dump";
};

// Every field of a call's attributes by its name, each as what it is; `sizes` are the image's, then its strides.
TEST_F(DumpTest, NamesTheAttributes) {
  const Tensor x = ones({1, 2, 6, 6});
  {
    const Dump dump{{.folder = folder_, .level = DumpLevel::first}};
    max_pool2d(x, {3, 2}, {.stride = {2, 1}, .ceil_mode = true});
    sum(x, {1, 3}, {.keepdim = true, .dtype = f64});
    x.to(bf16);
    add(x, x, -2);
  }
  const auto attributes = [&](const char* call) {
    return json::parse(text_of(folder_ / call / "call.json"))["attributes"];
  };
  EXPECT_EQ(attributes("000001_max_pool2d"), json({{"kernel", {3, 2}},
                                                   {"stride", {2, 1}},
                                                   {"padding", {0, 0}},
                                                   {"dilation", {1, 1}},
                                                   {"ceil_mode", true},
                                                   {"count_include_pad", true},
                                                   {"dtype", nullptr},
                                                   {"divisor", 0},
                                                   {"sizes", {1, 2, 6, 6, 72, 36, 6, 1}}}));
  EXPECT_EQ(attributes("000002_sum"), json({{"dims", {1, 3}}, {"keepdim", true}, {"dtype", "f64"}}));
  EXPECT_EQ(attributes("000003_to"), json({{"dtype", "bf16"}}));
  EXPECT_EQ(attributes("000004_add"), json({{"alpha", -2.0}, {"integer_alpha", -2}}));
}

// relu(x * 2): two calls with values that anyone can work out.
TEST_F(DumpTest, HasAFolderACallWithItsValues) {
  const Tensor x = tensor({-1.0, 0.5, 3.0, 0.0}, {2, 2});
  {
    Dump dump{{.folder = folder_, .level = DumpLevel::first, .first = 3}};
    relu(mul(x, 2));
    EXPECT_EQ(dump.calls(), 2u);
    EXPECT_EQ(dump.folder(), folder_);
  }
  relu(x);  // after it
  ASSERT_EQ(names(folder_), (std::vector<std::string>{"000001_mul_scalar", "000002_relu"}));
  EXPECT_EQ(names(folder_ / "000002_relu"), (std::vector<std::string>{"call.json", "call.txt"}));
  const json first = json::parse(text_of(folder_ / "000001_mul_scalar/call.json"));
  EXPECT_EQ(first["number"], 1);
  EXPECT_EQ(first["op"], "mul_scalar");
  EXPECT_EQ(first["module"], "");
  EXPECT_EQ(first["backward_of"], nullptr);
  EXPECT_EQ(first["device"], "cpu");
  EXPECT_EQ(first["path"], "native");
  EXPECT_EQ(first["in_place"], false);
  EXPECT_EQ(first["attributes"]["value"], 2);
  ASSERT_EQ(first["inputs"].size(), 1u);
  EXPECT_EQ(first["inputs"][0]["first"], (std::vector<double>{-1, 0.5, 3}));
  const json second = json::parse(text_of(folder_ / "000002_relu/call.json"));
  const json& in = second["inputs"][0];
  EXPECT_EQ(in["dtype"], "f32");
  EXPECT_EQ(in["shape"], (std::vector<int>{2, 2}));
  EXPECT_EQ(in["device"], "cpu");
  EXPECT_EQ(in["statistics"], json({{"min", -2},
                                    {"max", 6},
                                    {"mean", 1.25},
                                    {"abs_sum", 9},
                                    {"nan", 0},
                                    {"inf", 0},
                                    {"zero", 1},
                                    {"subnormal", 0}}));
  EXPECT_EQ(in["first"], (std::vector<double>{-2, 1, 6}));
  EXPECT_EQ(second["outputs"][0]["first"], (std::vector<double>{0, 1, 6}));
  EXPECT_EQ(text_of(folder_ / "000002_relu/call.txt"),
            "call 2: relu, cpu, native\n"
            "input 0: f32 [2, 2]: min -2, max 6, mean 1.25, sum|x| 9; 1 zero\n"
            "  -2 1 6 ...\n"
            "output 0: f32 [2, 2]: min 0, max 6, mean 1.75, sum|x| 7; 2 zero\n"
            "  0 1 6 ...\n");
}

TEST_F(DumpTest, SaysWhereACallWasMadeForwardAndBackward) {
  const test::Small net;
  {
    Dump dump{{.folder = folder_}};
    const amp::Autocast autocast{{.dtype = bf16}};
    sum(net(ones({4, 3}))).backward();
  }
  std::set<std::string> forward, backward;
  for (const std::string& name : names(folder_)) {
    const json call = json::parse(text_of(folder_ / name / "call.json"));
    EXPECT_FALSE(call["outputs"][0].contains("first"));
    if (call["op"] == "linear") {
      EXPECT_EQ(call["outputs"][0]["dtype"], "bf16");
    }
    (call["backward_of"].is_null() ? forward : backward)
        .insert(call["module"].get<std::string>() + " " +
                (call["backward_of"].is_null() ? call["op"] : call["backward_of"]).get<std::string>());
  }
  EXPECT_TRUE(forward.contains("fc1 linear") && forward.contains("fc2 linear") && forward.contains(" relu"))
      << ::testing::PrintToString(forward);
  EXPECT_TRUE(backward.contains("fc1 linear") && backward.contains("fc2 linear") && backward.contains(" relu"))
      << ::testing::PrintToString(backward);
}

TEST_F(DumpTest, WritesWholeTensorsAndTheInputsOfInPlaceOps) {
  Tensor x = tensor({1.0, 2.0, 3.0, 4.0}, {2, 2}).to(f16);
  {
    Dump dump{{.folder = folder_, .level = DumpLevel::whole}};
    x.t().mul_(3);
  }
  const fs::path call = folder_ / "000001_mul_scalar";
  EXPECT_EQ(names(call), (std::vector<std::string>{"call.json", "call.txt", "tensors.safetensors"}));
  EXPECT_EQ(json::parse(text_of(call / "call.json"))["in_place"], true);
  const io::Safetensors file = io::load_safetensors(call / "tensors.safetensors");
  ASSERT_EQ(file.tensors.size(), 2u);
  EXPECT_EQ(file.tensors[0].name, "input0");
  EXPECT_EQ(file.tensors[0].tensor.dtype(), f16);
  EXPECT_EQ(file.tensors[0].tensor.to_vector<double>(), (std::vector<double>{1, 3, 2, 4}));  // the view's order
  EXPECT_EQ(file.tensors[1].name, "output0");
  EXPECT_EQ(file.tensors[1].tensor.to_vector<double>(), (std::vector<double>{3, 9, 6, 12}));
  EXPECT_EQ(file.metadata.at("op"), "mul_scalar");
}

TEST_F(DumpTest, TakesOnlyWhatWasAskedFor) {
  const test::Small net;
  const Tensor x = ones({4, 3});
  {
    Dump dump{{.folder = folder_, .module = "fc2"}};
    net(x);
    EXPECT_EQ(dump.calls(), 1u);
  }
  EXPECT_EQ(names(folder_), (std::vector<std::string>{"000001_linear"}));
  {
    Dump dump{{.folder = folder_, .ops = {"relu"}}};
    net(x);
    net(x);
    EXPECT_EQ(names(dump.folder()), (std::vector<std::string>{"000001_relu", "000002_relu"}));
  }
  {
    Dump dump{{.folder = folder_, .ops = {"select", "view"}, .views = true}};
    x.select(0, 1);
    EXPECT_EQ(names(dump.folder()), (std::vector<std::string>{"000001_select"}));
  }
  {
    Dump dump{{.folder = folder_, .most_calls = 1}};
    net(x);
    EXPECT_EQ(dump.calls(), 1u);
  }
}

TEST_F(DumpTest, NeverWritesIntoAFolderThatIsThere) {
  Dump first{{.folder = folder_ / "a"}};
  Dump second{{.folder = folder_ / "a"}};
  EXPECT_EQ(second.folder(), folder_ / "a.1");
  relu(ones({1}));
  EXPECT_EQ(names(folder_ / "a"), names(folder_ / "a.1"));
  std::ofstream(folder_ / "file") << "x";
  EXPECT_EQ(Dump({.folder = folder_ / "file"}).folder(), folder_ / "file.1");
  EXPECT_THROW(Dump({.folder = folder_ / "file" / "below"}), IoError);
}

// Files that reach the limit on their size: what is left is whole, and the op says which file it was.
TEST_F(DumpTest, LeavesNothingHalfWrittenWhenTheDiskIsFull) {
  const Tensor x = ones({64, 64});
  Dump dump{{.folder = folder_, .level = DumpLevel::whole}};
  relu(x);
  rlimit old{};
  getrlimit(RLIMIT_FSIZE, &old);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit small = old;
  small.rlim_cur = 8192;
  setrlimit(RLIMIT_FSIZE, &small);
  std::string message;
  try {
    relu(x);
  } catch (const IoError& e) {
    message = e.what();
  }
  setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(message.find("tensors.safetensors"), std::string::npos) << message;
  EXPECT_NE(message.find("File too large"), std::string::npos) << message;
  EXPECT_EQ(names(folder_), (std::vector<std::string>{"000001_relu"}));
  relu(x);  // it goes on
  EXPECT_EQ(names(folder_).size(), 2u);
}

}  // namespace
}  // namespace halfstep
