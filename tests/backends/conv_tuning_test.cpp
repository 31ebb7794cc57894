// SPDX-License-Identifier: Apache-2.0
// Choices of convolutions by timing: what is chosen of given times, what is kept, and that every choice computes the
// same convolution.
#include "halfstep/backends/cpu/conv_tuning.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "halfstep/backends/cpu/isa.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/conv.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/random.h"
#include "halfstep/runtime/parallel.h"
#include "halfstep/runtime/tuning.h"
#include "tests/backends/conv_calls.h"
#include "tests/support/test_data.h"

namespace halfstep::cpu {
namespace {

namespace fs = std::filesystem;
using Times = std::map<ConvPath, std::vector<double>>;

// Returns scripted times in order; the first of each path is the warm-up's. A path without times fails.
ConvChoices::Time told(Times& times, int* calls = nullptr) {
  return [&times, calls](ConvPath path) -> std::optional<double> {
    if (calls != nullptr) ++*calls;
    auto& left = times[path];
    if (left.empty()) return std::nullopt;
    const double first = left.front();
    if (left.size() > 1) left.erase(left.begin());
    return first;
  };
}

constexpr ConvPath kThree[] = {ConvPath::native, ConvPath::pairs, ConvPath::blocks};

TEST(ConvChoices, TakeTheLeastTimeBehindTheFirstCall) {
  ConvChoices choices("");
  // The warm-up would say blocks, the means would say native.
  Times times = {{ConvPath::native, {9, 2.0, 2.0, 2.0, 2.0, 2.0}},
                 {ConvPath::pairs, {9, 7.0, 1.8, 7.0, 7.0, 7.0}},
                 {ConvPath::blocks, {1, 3.0, 3.0, 3.0, 3.0, 3.0}}};
  EXPECT_EQ(choices.choose("a", kThree, told(times)), ConvPath::pairs);
  EXPECT_EQ(choices.find("a"), ConvPath::pairs);
  EXPECT_EQ(choices.find("b"), std::nullopt);
}

TEST(ConvChoices, StayWithTheFirstUnlessAnotherIsClearlyFaster) {
  ConvChoices choices("");
  Times close = {{ConvPath::native, {1, 1}}, {ConvPath::pairs, {0.98, 0.98}}, {ConvPath::blocks, {2, 2}}};
  EXPECT_EQ(choices.choose("close", kThree, told(close)), ConvPath::native);
  Times clear = {{ConvPath::native, {1, 1}}, {ConvPath::pairs, {0.96, 0.96}}, {ConvPath::blocks, {0.95, 0.95}}};
  EXPECT_EQ(choices.choose("clear", kThree, told(clear)), ConvPath::blocks);
}

TEST(ConvChoices, PassOverWhatFails) {
  ConvChoices choices("");
  Times one = {{ConvPath::native, {}}, {ConvPath::pairs, {3, 3}}, {ConvPath::blocks, {}}};
  EXPECT_EQ(choices.choose("one", kThree, told(one)), ConvPath::pairs);
  Times none;
  EXPECT_EQ(choices.choose("none", kThree, told(none)), ConvPath::native);
  EXPECT_EQ(choices.find("none"), std::nullopt);  // and is tried again
}

TEST(ConvChoices, OfLongCallsTakeTwoTurns) {
  ConvChoices choices("");
  Times times = {{ConvPath::native, {2}}, {ConvPath::pairs, {1}}, {ConvPath::blocks, {3}}};
  int calls = 0;
  EXPECT_EQ(choices.choose("long", kThree, told(times, &calls)), ConvPath::pairs);
  EXPECT_EQ(calls, 9);
}

std::string text_of(const fs::path& file) {
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

TEST(ConvChoices, AreKeptAndAddedToThoseOfOthers) {
  const test::TemporaryDir folder;
  const fs::path file = folder.path() / "deeper" / "choices.json";
  Times slow = {{ConvPath::native, {2}}, {ConvPath::pairs, {1}}, {ConvPath::blocks, {3}}};
  ConvChoices one(file), two(file);
  one.choose("a", kThree, told(slow));
  two.choose("b", kThree, told(slow));
  ConvChoices later(file);
  EXPECT_EQ(later.find("a"), ConvPath::pairs);
  EXPECT_EQ(later.find("b"), ConvPath::pairs);
  int calls = 0;
  later.choose("a", kThree, told(slow, &calls));
  EXPECT_EQ(calls, 0);
}

TEST(ConvChoices, OfAnotherMachineOrBuildOrDamagedAreIgnoredAndReplaced) {
  const test::TemporaryDir folder;
  const fs::path file = folder.path() / "choices.json";
  Times times = {{ConvPath::native, {2}}, {ConvPath::pairs, {1}}, {ConvPath::blocks, {3}}};
  ConvChoices(file).choose("a", kThree, told(times));
  const std::string good = text_of(file);
  for (const char* field : {"\"cpu\": \"", "\"isa\": \"", "\"library\": \"", "\"format\": "}) {
    std::string other = good;
    const auto at = other.find(field);
    ASSERT_NE(at, std::string::npos) << field;
    other.insert(at + std::string(field).size(), "1");
    std::ofstream(file) << other;
    EXPECT_EQ(ConvChoices(file).find("a"), std::nullopt) << field;
  }
  for (const std::string& bad :
       {std::string(), good.substr(0, good.size() / 2), std::string("[1]"), std::string(1000, '[')}) {
    std::ofstream(file) << bad;
    ConvChoices choices(file);
    EXPECT_EQ(choices.find("a"), std::nullopt) << bad;
    choices.choose("b", kThree, told(times));
    EXPECT_EQ(ConvChoices(file).find("b"), ConvPath::pairs) << bad;
  }
  // A path that this build doesn't know.
  std::string unknown = good;
  unknown.replace(unknown.find("pairs"), 5, "magic");
  std::ofstream(file) << unknown;
  EXPECT_EQ(ConvChoices(file).find("a"), std::nullopt);
}

TEST(ConvChoices, GoOnWhereNothingCanBeKept) {
  const test::TemporaryDir folder;
  std::ofstream(folder.path() / "file") << "x";
  Times times = {{ConvPath::native, {2}}, {ConvPath::pairs, {1}}, {ConvPath::blocks, {3}}};
  for (const fs::path& file : {folder.path() / "file" / "choices.json", folder.path()}) {
    ConvChoices choices(file);
    EXPECT_EQ(choices.choose("a", kThree, told(times)), ConvPath::pairs);
    EXPECT_EQ(choices.find("a"), ConvPath::pairs);
  }
}

TEST(ConvChoices, AreToldApartByAllThatMatters) {
  const auto signature = [](const ConvGeometry& g, ConvPart part, DType dtype, MemoryFormat format, bool bias,
                            Winograd allowed, Float32Precision precision = Float32Precision::highest) {
    const Tensor x = empty({g.n, g.c, g.h, g.w}, {.dtype = dtype}).contiguous(format),
                 w = empty({g.o, g.c, g.kh, g.kw}),
                 y = empty({g.n, g.o, g.oh, g.ow}, {.dtype = dtype}).contiguous(format), b = empty({g.o});
    const TensorView offset = view(b);
    ConvCall call{part, g, view(x), view(w), view(y)};
    if (bias) call.bias = &offset;
    call.precision = precision;
    return conv_signature(call, allowed);
  };
  const auto last = MemoryFormat::channels_last, first = MemoryFormat::contiguous;
  const ConvGeometry g = geometry(2, 8, 6, 8, 3, 1, 1);
  const std::set<std::string> all = {
      signature(g, ConvPart::output, f32, last, false, Winograd::off),
      signature(g, ConvPart::input, f32, last, false, Winograd::off),
      signature(g, ConvPart::output, bf16, last, false, Winograd::off),
      signature(g, ConvPart::output, f32, first, false, Winograd::off),
      signature(g, ConvPart::output, f32, last, true, Winograd::off),
      signature(g, ConvPart::output, f32, last, false, Winograd::tiles_2x2),
      signature(g, ConvPart::output, f32, last, false, Winograd::off, Float32Precision::high),
      signature(geometry(3, 8, 6, 8, 3, 1, 1), ConvPart::output, f32, last, false, Winograd::off),
      signature(geometry(2, 8, 6, 8, 1, 1, 0), ConvPart::output, f32, last, false, Winograd::off),
      signature(geometry(2, 8, 6, 8, 3, 2, 1), ConvPart::output, f32, last, false, Winograd::off)};
  EXPECT_EQ(all.size(), 10U);
  EXPECT_EQ(signature(g, ConvPart::output, bf16, last, false, Winograd::off, Float32Precision::high),
            signature(g, ConvPart::output, bf16, last, false, Winograd::off));
}

TEST(ConvPathsThatServe, BeginWithTheModelsAndHaveNoneTwice) {
  const ConvGeometry g = geometry(2, 16, 6, 16, 3, 1, 1);
  for (const DType dtype : {f32, bf16, f16, f64}) {
    const Tensor x = empty({g.n, g.c, g.h, g.w}, {.dtype = dtype}).contiguous(MemoryFormat::channels_last),
                 w = empty({g.o, g.c, g.kh, g.kw}, {.dtype = dtype}).contiguous(MemoryFormat::channels_last),
                 y = empty({g.n, g.o, g.oh, g.ow}, {.dtype = dtype}).contiguous(MemoryFormat::channels_last);
    for (const ConvPart part : {ConvPart::output, ConvPart::input, ConvPart::weight}) {
      const ConvCall call{part, g, view(x), view(w), view(y)};
      for (const Isa isa : {Isa::avx2, Isa::avx512_bf16}) {
        for (const Winograd allowed : {Winograd::off, Winograd::tiles_2x2, Winograd::tiles_4x4}) {
          const ConvPath model = choose_conv_path(call, isa, allowed);
          const auto paths = conv_paths(call, isa, allowed, model);
          EXPECT_EQ(paths.front(), model);
          EXPECT_EQ(std::set<ConvPath>(paths.begin(), paths.end()).size(), paths.size());
          const std::set<ConvPath> all(paths.begin(), paths.end());
          EXPECT_EQ(all.count(ConvPath::winograd2) == 1, dtype != f64 && allowed != Winograd::off);
          EXPECT_EQ(all.count(ConvPath::winograd4) == 1, dtype != f64 && allowed == Winograd::tiles_4x4);
          EXPECT_EQ(all.count(ConvPath::native) == 1, dtype == bf16 && isa == Isa::avx512_bf16);
        }
      }
    }
  }
}

// With tuning on, the calls of users are timed once, choose what is kept, and compute the same convolution.
TEST(Tuning, KeepsResultsWithinTheirBounds) {
  const test::TemporaryDir folder;
  const char* const before = std::getenv("XDG_CACHE_HOME");
  const std::string cache = before != nullptr ? before : "";
  setenv("XDG_CACHE_HOME", folder.path().c_str(), 1);
  const int threads = num_threads();
  set_num_threads(threads + 1);  // choices that no other test has asked for
  manual_seed(5);
  for (const DType dtype : {f32, f16, bf16}) {
    const auto last = MemoryFormat::channels_last;
    const Tensor x = randn({2, 16, 9, 9}).to(dtype).contiguous(last),
                 w = randn({24, 16, 3, 3}).to(dtype).contiguous(last);
    const Tensor g = randn({2, 24, 9, 9}).to(dtype).contiguous(last);
    const auto results = [&] {
      Tensor a = x.detach().requires_grad_(), b = w.detach().requires_grad_();
      const Tensor y = conv2d(a, b, {}, {.padding = {1}});
      y.backward(g);
      return std::vector<Tensor>{y, a.grad(), b.grad()};
    };
    const std::vector<Tensor> plain = results();
    set_tuning(true);
    const std::vector<Tensor> tuned = results(), again = results();
    set_tuning(false);
    const double unit = dtype == f32 ? 0x1p-24 : dtype == f16 ? 0x1p-11 : 0x1p-8;
    for (std::size_t t = 0; t < plain.size(); ++t) {
      const auto a = plain[t].to_vector<double>(), b = tuned[t].to_vector<double>(), c = again[t].to_vector<double>();
      EXPECT_EQ(b, c);
      // Each within half a unit and its sum's bound of the exact result: at most 216 products of about 1.
      for (std::size_t i = 0; i < a.size(); ++i) {
        ASSERT_NEAR(a[i], b[i], 2 * unit * std::abs(a[i]) + 2 * 218 * 0x1p-24 * 216) << name(dtype) << ' ' << i;
      }
    }
  }
  set_num_threads(threads);
  if (before != nullptr) {
    setenv("XDG_CACHE_HOME", cache.c_str(), 1);
  } else {
    unsetenv("XDG_CACHE_HOME");
  }
  EXPECT_TRUE(fs::exists(folder.path() / "halfstep" / "choices"));
}

}  // namespace
}  // namespace halfstep::cpu
