// SPDX-License-Identifier: Apache-2.0
// A flag is one row: every row of the table in the check, the recipe and the fields of a configuration, and a row that
// is added here.
#include "halfstep/train/flags.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <set>
#include <type_traits>

#include "halfstep/core/error.h"
#include "halfstep/train/registry.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

using training::Flag;
using training::FlagKept;
using training::FlagRange;
using training::FlagResume;
using training::TrainConfig;

const void* address_of(const Flag& flag) {
  return std::visit(
      [](const auto& field) -> const void* {
        using T = std::decay_t<decltype(field)>;
        if constexpr (std::is_same_v<T, training::TurnsOff>) {
          return field.on;
        } else if constexpr (std::is_pointer_v<T>) {
          return field;
        } else {
          return nullptr;
        }
      },
      flag.field);
}

// Sets a number; returns whether the flag has one.
bool set_number(const Flag& flag, double value) {
  return std::visit(
      [&](const auto& field) {
        using T = std::decay_t<decltype(field)>;
        if constexpr (std::is_same_v<T, int*> || std::is_same_v<T, std::int64_t*> || std::is_same_v<T, double*>) {
          *field = static_cast<std::remove_pointer_t<T>>(value);
          return true;
        } else {
          return false;
        }
      },
      flag.field);
}

bool is_real(const Flag& flag) { return std::holds_alternative<double*>(flag.field); }

// Of the flags of images the configuration's own check knows nothing: a network without images has none.
void check_all(TrainConfig& c) { training::check(training::flags(c)); }

TEST(Flags, EachHasANameAFieldAndAHelpOfItsOwn) {
  TrainConfig c;
  std::set<std::string> names;
  std::set<const void*> fields;
  const auto* begin = reinterpret_cast<const char*>(&c);
  for (const Flag& flag : training::flags(c)) {
    EXPECT_TRUE(names.insert(flag.name()).second) << flag.name();
    EXPECT_TRUE(flag.name().starts_with("--")) << flag.name();
    EXPECT_EQ("--" + flag.key(), flag.name());
    EXPECT_FALSE(flag.help.empty()) << flag.name();
    EXPECT_FALSE(flag.group.empty()) << flag.name();
    EXPECT_TRUE(fields.insert(address_of(flag)).second) << flag.name() << " has another flag's field";
    const auto* field = static_cast<const char*>(address_of(flag));
    EXPECT_TRUE(field >= begin && field < begin + sizeof(c)) << flag.name() << " has a field of something else";
  }
  EXPECT_GT(names.size(), 40u);
}

TEST(Flags, EveryRangeIsChecked) {
  std::size_t bounds = 0;
  TrainConfig usual;
  EXPECT_NO_THROW(check_all(usual));
  for (std::size_t i = 0; i < training::flags(usual).size(); ++i) {
    const auto fails_with = [&](double value, bool inside) {
      TrainConfig c;
      c.debug.dump = "dump";
      const Flag flag = training::flags(c)[i];
      if (!set_number(flag, value)) return;
      ++bounds;
      std::string said;
      try {
        check_all(c);
      } catch (const Error& e) {
        said = e.what();
      }
      if (inside) {
        // Other flags may be missing, but no number is wrong.
        EXPECT_EQ(said.find(flag.name() + ": expected " + flag.range.text(!is_real(flag))), std::string::npos) << said;
      } else {
        EXPECT_TRUE(said.starts_with(flag.name() + ": expected ")) << flag.name() << " " << value << ": " << said;
      }
    };
    const Flag flag = training::flags(usual)[i];
    const FlagRange& range = flag.range;
    if (!range.bounded()) continue;
    // Beside a bound: the next number of its kind.
    const double step = is_real(flag) ? 1e-9 : 1;
    if (std::isfinite(range.least)) {
      fails_with(range.least, !range.open_least);
      fails_with(range.least - step, false);
      fails_with(range.least + step, true);
    }
    if (std::isfinite(range.most)) {
      fails_with(range.most, !range.open_most);
      fails_with(range.most + step, false);
    }
    if (is_real(flag)) {
      fails_with(NAN, false);
      fails_with(INFINITY, false);
    }
  }
  EXPECT_GT(bounds, 50u);
}

// What a checkpoint requires of the run that resumes is what the rows say, and follows their fields.
TEST(Flags, TheRecipeIsWhatTheRowsSay) {
  TrainConfig c;
  c.lr_schedule = "cosine";
  std::size_t found = 0;
  for (std::size_t i = 0; i < training::flags(c).size(); ++i) {
    TrainConfig other = c;
    other.quantization.on = training::flags(other)[i].name() != "--qat";  // whose flags have no meaning without it
    const Flag flag = training::flags(other)[i];
    const bool belongs = flag.resume == FlagResume::recipe || flag.name() == "--epochs";
    const auto before = training::recipe(training::flags(other));
    EXPECT_EQ(before.contains(flag.key()), belongs) << flag.name();
    if (!belongs) continue;
    if (flag.is_switch()) {
      if (auto* const* on = std::get_if<bool*>(&flag.field)) **on = true;
      if (const auto* off = std::get_if<training::TurnsOff>(&flag.field)) *off->on = false;
      EXPECT_EQ(before.at(flag.key()), "no");
    } else if (!set_number(flag, 7)) {
      if (flag.name() != "--lr-schedule") *std::get<std::string*>(flag.field) = "another";
      if (flag.name() == "--lr-schedule") other.lr_schedule = "onecycle";
    }
    EXPECT_NE(training::recipe(training::flags(other)).at(flag.key()), before.at(flag.key())) << flag.name();
    ++found;
  }
  EXPECT_EQ(found, 60u);
  // The same as the checkpoint's own, which for networks without images leaves theirs out.
  const auto saved = training::recipe(c);
  EXPECT_EQ(saved.size(), 18u);
  EXPECT_FALSE(saved.contains("image-size"));
  c.lr_schedule = "constant";
  EXPECT_FALSE(training::recipe(c).contains("epochs"));
}

// Saved with a network of another task, such a flag would be refused when the run resumes.
TEST(Flags, BelongToTheDataAndTheTaskOfTheNetwork) {
  training::register_task({.name = "ranking", .make = training::task_kind("classification").make});
  for (const char* data : {"digits", "cifar"}) {
    training::register_network({.name = std::string("ranker of ") + data,
                                .task = "ranking",
                                .data = data,
                                .make = training::network_kind("mlp").make});
  }
  TrainConfig c;
  const auto taken = [&](const std::string& network) {
    std::set<std::string> names;
    for (const Flag& flag : training::flags(c)) {
      if (training::takes(network, flag)) names.insert(flag.name());
    }
    return names;
  };
  const std::pair<const char*, std::array<bool, 3>> cases[] = {{"mlp", {true, false, true}},
                                                               {"resnet20", {true, true, true}},
                                                               {"ranker of digits", {true, false, false}},
                                                               {"ranker of cifar", {true, true, false}}};
  for (const auto& [network, expected] : cases) {
    const auto names = taken(network);
    EXPECT_EQ(names.contains("--lr"), expected[0]) << network;
    for (const char* of_images : {"--crop", "--image-size"})
      EXPECT_EQ(names.contains(of_images), expected[1]) << network;
    for (const char* of_classes : {"--mixup", "--label-smoothing"}) {
      EXPECT_EQ(names.contains(of_classes), expected[2]) << network;
    }
  }
}

TEST(Flags, OfEvaluations) {
  TrainConfig c;
  std::set<std::string> names;
  for (const Flag& flag : training::flags(c)) {
    if (flag.evaluation) names.insert(flag.name());
  }
  EXPECT_EQ(names, (std::set<std::string>{"--image-size", "--resize", "--no-rect", "--conf-thres", "--iou-thres",
                                          "--max-detections"}));
}

// All that a new flag takes.
TEST(Flags, ARowIsAllThatAFlagTakes) {
  struct Options {
    double dropout = 0;
    std::string reader = "fast";
    bool shuffle = true;
  };
  const auto rows = [](Options& o) {
    return std::vector<Flag>{{.names = "--dropout,-d",
                              .field = &o.dropout,
                              .help = "Share of values left out",
                              .range = FlagRange::from_under(0, 1),
                              .resume = FlagResume::recipe},
                             {.names = "--reader", .field = &o.reader, .help = "How", .choices = {"fast", "exact"}},
                             {.names = "--in-order",
                              .field = training::TurnsOff{&o.shuffle},
                              .help = "Without shuffling",
                              .resume = FlagResume::recipe}};
  };
  Options o, other;
  EXPECT_NO_THROW(training::check(rows(o)));
  o.dropout = 1;
  const auto refused = [&] { return test::error_of<Error>([&] { training::check(rows(o)); }); };
  EXPECT_EQ(refused(), "--dropout: expected 0 to under 1, got 1");
  o.dropout = 0.25;
  o.reader = "slow";
  EXPECT_EQ(refused(), "--reader: expected fast or exact, got 'slow'");
  EXPECT_EQ(test::error_of<Error>([&] { training::check_value(rows(o)[1]); }), refused());
  EXPECT_EQ(test::error_of<Error>([&] { training::check_value(rows(o)[0]); }), "");
  o.shuffle = false;
  using Recipe = std::map<std::string, std::string>;
  EXPECT_EQ(training::recipe(rows(o)), (Recipe{{"dropout", "0.25"}, {"in-order", "yes"}}));
  EXPECT_EQ(training::recipe(rows(other)), (Recipe{{"dropout", "0"}, {"in-order", "no"}}));
  EXPECT_EQ(rows(o)[2].saved(), "true");
  for (std::size_t i = 0; i < 3; ++i) training::copy_value(rows(o)[i], rows(other)[i]);
  EXPECT_EQ(other.dropout, 0.25);
  EXPECT_EQ(other.reader, "slow");
  EXPECT_FALSE(other.shuffle);
}

TEST(Flags, RangesSayWhatIsExpected) {
  EXPECT_EQ(FlagRange::at_least(1).text(true), "at least 1");
  EXPECT_EQ(FlagRange::at_least(0).text(false), "a number of at least 0");
  EXPECT_EQ(FlagRange::above(0).text(false), "a number above 0");
  EXPECT_EQ(FlagRange::from_to(0, 256).text(true), "0 to 256");
  EXPECT_EQ(FlagRange::from_under(0, 1).text(false), "0 to under 1");
  EXPECT_EQ(FlagRange::above_to(0, 1).text(false), "above 0 to 1");
}

}  // namespace
}  // namespace halfstep
