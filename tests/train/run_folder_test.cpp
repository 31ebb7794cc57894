// SPDX-License-Identifier: Apache-2.0
// The folder of a run: one run in it, one writer; for programs that call train() as much as for `halfstep train`.
#include "halfstep/train/run_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <fstream>
#include <mutex>
#include <set>
#include <thread>

#include "halfstep/runtime/log.h"
#include "halfstep/train/checkpoint.h"
#include "halfstep/train/json_log.h"
#include "tests/support/errors.h"
#include "tests/support/test_data.h"
#include "tests/train/small_run.h"

namespace halfstep {
namespace {

namespace fs = std::filesystem;
using test::error_of;
using test::Regression;
using test::Samples;
using training::ExistingRun;
using training::RunFolder;

void write(const fs::path& path, const std::string& text) { std::ofstream(path) << text; }
std::string read(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

class Folders : public ::testing::Test {
 protected:
  test::TemporaryDir temporary_;
  const fs::path folder_ = temporary_.path();
};

TEST_F(Folders, AreLockedWhileTheyAreHeld) {
  const fs::path path = folder_ / "a/b";
  {
    RunFolder first(path, ExistingRun::refuse);
    EXPECT_TRUE(fs::exists(path / "run.lock"));
    try {
      RunFolder second(path, ExistingRun::resume);
      ADD_FAILURE() << "two at once";
    } catch (const IoError& e) {
      const std::string text = e.what();
      EXPECT_NE(text.find("another program writes a run there: process " + std::to_string(getpid()) + " on "),
                std::string::npos)
          << text;
    }
    RunFolder moved = std::move(first);
    EXPECT_THROW(RunFolder::check(path, ExistingRun::replace), IoError) << "held by the one it was moved to";
    write(path / "log.jsonl", "{}");
  }
  EXPECT_FALSE(fs::exists(path / "run.lock"));
  EXPECT_TRUE(fs::exists(path / "log.jsonl"));
  EXPECT_THROW(RunFolder(path, ExistingRun::refuse), IoError);
  EXPECT_TRUE(RunFolder(path, ExistingRun::resume));
  // Empty ones that were made go, with those above.
  { const RunFolder folder(folder_ / "x/y/z", ExistingRun::refuse); }
  EXPECT_FALSE(fs::exists(folder_ / "x"));
  fs::create_directory(folder_ / "mine");
  { const RunFolder folder(folder_ / "mine/y", ExistingRun::refuse); }
  EXPECT_TRUE(fs::exists(folder_ / "mine")) << "it was there before";
}

// A run that is being written is none to go on with or to replace yet.
TEST_F(Folders, WhoWritesComesBeforeWhatIsThere) {
  const fs::path path = folder_ / "a";
  const RunFolder first(path, ExistingRun::refuse);
  write(path / "config.yaml", "model: mlp\n");
  const std::string holder = "another program writes a run there: process " + std::to_string(getpid()) + " on ";
  for (const ExistingRun existing : {ExistingRun::refuse, ExistingRun::resume, ExistingRun::replace}) {
    EXPECT_NE(error_of<IoError>([&] { RunFolder::check(path, existing); }).find(holder), std::string::npos);
    EXPECT_NE(error_of<IoError>([&] { RunFolder(path, existing); }).find(holder), std::string::npos);
  }
}

// check() of another program holds the lock for a moment.
TEST_F(Folders, ALookKeepsNobodyOut) {
  const fs::path path = folder_ / "a";
  fs::create_directory(path);
  write(path / "run.lock", "process 1 on nowhere\n");
  std::atomic<bool> done{false};
  std::thread looks([&] {
    while (!done) {
      const int lock = ::open((path / "run.lock").c_str(), O_RDONLY | O_CLOEXEC);
      if (lock < 0) continue;
      ::flock(lock, LOCK_SH | LOCK_NB);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      ::close(lock);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  for (int i = 0; i < 20; ++i) {
    EXPECT_NO_THROW(RunFolder(path, ExistingRun::refuse));
    // Gone with the one who held it; one that was killed leaves its own.
    write(path / "run.lock", "process 1 on nowhere\n");
  }
  done = true;
  looks.join();
}

TEST_F(Folders, LeftoversGoWithTheLock) {
  const fs::path ours = folder_ / "best.safetensors.tmp0123456789abcdef", other = folder_ / "x.tmp0123456789abcdef";
  write(ours, "half"), write(other, "half");
  RunFolder().remove_leftovers();
  {
    RunFolder folder(folder_, ExistingRun::refuse);
    EXPECT_TRUE(fs::exists(ours)) << "the start may still be refused";
    folder.remove_leftovers();
  }
  EXPECT_FALSE(fs::exists(ours));
  EXPECT_TRUE(fs::exists(other));
}

TEST_F(Folders, AProcessThatIsKilledHoldsNone) {
  const fs::path path = folder_ / "a";
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    const RunFolder folder(path, ExistingRun::refuse);
    (void)!::write(ready[1], "x", 1);
    for (;;) pause();
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_THROW(RunFolder(path, ExistingRun::refuse), IoError);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_TRUE(fs::exists(path / "run.lock"));
  EXPECT_TRUE(RunFolder(path, ExistingRun::refuse)) << "its file means nothing any more";
  EXPECT_FALSE(fs::exists(path / "run.lock"));
  close(ready[0]), close(ready[1]);
}

// Folders come and go under those who want them; no two ever hold one.
TEST_F(Folders, ManyAtOnce) {
  const fs::path path = folder_ / "a/b";
  std::atomic<int> holders{0}, held{0};
  std::atomic<bool> two{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 300; ++i) {
        try {
          const RunFolder folder(path, ExistingRun::refuse);
          two = two || ++holders > 1;
          ++held;
          --holders;
        } catch (const IoError&) {
        }
      }
    });
  }
  for (auto& t : threads) t.join();
  EXPECT_FALSE(two);
  EXPECT_GT(held, 0);
  // Where who made a folder is not who leaves it last, it stays, empty.
  for (const auto& entry : fs::recursive_directory_iterator(folder_)) EXPECT_TRUE(entry.is_directory()) << entry.path();
  // Those that are made anew have all names of their own.
  threads.clear();
  std::mutex mutex;
  std::vector<RunFolder> folders;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 5; ++i) {
        RunFolder folder = RunFolder::make(folder_ / "c/d");
        const std::scoped_lock lock(mutex);
        folders.push_back(std::move(folder));
      }
    });
  }
  for (auto& t : threads) t.join();
  std::set<fs::path> names;
  for (const RunFolder& f : folders) names.insert(f.path());
  EXPECT_EQ(names.size(), 20U);
  EXPECT_TRUE(names.contains(folder_ / "c/d") && names.contains(folder_ / "c/d-20"));
}

TEST_F(Folders, TrainWritesOverNoRun) {
  const Samples samples(32, 4, 2, 1);
  training::TrainConfig config;
  config.out = folder_ / "run";
  config.log_json = config.out / "log.jsonl";
  config.batch_size = 16;
  const Regression net(4, 2);
  test::run(config, net, samples.dataset(), samples.dataset());
  const std::string log = read(config.log_json);
  config.seed = 1;
  EXPECT_THROW(test::run(config, net, samples.dataset(), samples.dataset()), IoError);
  EXPECT_EQ(read(config.log_json), log);
  config.overwrite = true;
  write(config.out / "notes", "mine");
  write(config.out / "config.yaml", "seed: 0");
  test::run(config, net, samples.dataset(), samples.dataset());
  EXPECT_EQ(training::load_checkpoint(config.out).loader_seed, 1U);
  EXPECT_EQ(read(config.out / "notes"), "mine");
  EXPECT_FALSE(fs::exists(config.out / "config.yaml")) << "of the run before";
  EXPECT_NE(read(config.log_json), log);
  // A start that is refused changes nothing, and is told to nobody.
  config.overwrite = false;
  config.resume = config.out;
  config.seed = 2;
  const std::string now = read(config.log_json);
  EXPECT_THROW(test::run(config, net, samples.dataset(), samples.dataset()), IoError);
  EXPECT_EQ(read(config.log_json), now);
  EXPECT_FALSE(fs::exists(config.out / "run.lock"));
}

// Anybody has a results.csv: without a checkpoint, a configuration or a log beside it, it is no run's.
TEST_F(Folders, TablesWithoutARunAreSomebodysOwn) {
  const std::vector<std::string> names = {"results.csv",     "curves.svg", "classes.csv",         "confusion.svg",
                                          "predictions.png", "labels.svg", "train-batch.png",     "f1.svg",
                                          "precision.svg",   "recall.svg", "precision-recall.svg"};
  for (const std::string& name : names) {
    const fs::path path = folder_ / name;
    fs::create_directory(path);
    write(path / name, "mine");
    EXPECT_FALSE(training::holds_run(path));
    for (const ExistingRun existing : {ExistingRun::refuse, ExistingRun::replace}) {
      const std::string said = error_of<IoError>([&] { RunFolder(path, existing); });
      EXPECT_NE(said.find(name + ": a run writes a file of that name, and this one is in a folder without a run"),
                std::string::npos)
          << said;
      EXPECT_EQ(error_of<IoError>([&] { RunFolder::check(path, existing); }), said);
    }
    EXPECT_EQ(read(path / name), "mine");
    // Beside a run it is the run's.
    write(path / "log.jsonl", "{}");
    EXPECT_TRUE(training::holds_run(path));
    EXPECT_NO_THROW(RunFolder(path, ExistingRun::replace));
  }
  // So are curves for TensorBoard of another program.
  const Samples samples(32, 4, 2, 1);
  const Regression net(4, 2);
  training::TrainConfig config;
  config.out = folder_ / "run";
  config.overwrite = true;
  const fs::path events = config.out / "tensorboard/events.out.tfevents.1.other.1";
  fs::create_directories(events.parent_path());
  write(events, "mine");
  test::run(config, net, samples.dataset(), samples.dataset());
  EXPECT_EQ(read(events), "mine");
  test::run(config, net, samples.dataset(), samples.dataset());
  EXPECT_FALSE(fs::exists(events)) << "of the run that is replaced";
}

TEST_F(Folders, EveryFileOfARunIsAmongTheNames) {
  const Samples samples(32, 4, 2, 1);
  const Regression net(4, 2);
  training::TrainConfig config;
  config.out = folder_ / "run";
  config.log_json = config.out / "log.jsonl";
  config.debug.nonfinite = "log";
  config.overwrite = true;
  const auto all = training::run_file_names();
  for (const char* compare : {"f64", "twin"}) {
    config.debug.compare = compare;
    config.amp = compare == std::string("twin") ? "bf16" : "off";
    test::run(config, net, samples.dataset(), samples.dataset());
    std::size_t files = 0, reports = 0;
    for (const auto& entry : fs::directory_iterator(config.out)) {
      const std::string name = entry.path().filename().string();
      EXPECT_NE(std::find(all.begin(), all.end(), name), all.end()) << name;
      ++files;
      reports += name.starts_with("debug-") ? 1 : 0;
    }
    EXPECT_EQ(reports, 2u) << "the other one went with the run before";
    EXPECT_EQ(training::run_files(config.out).size(), files);
  }
}

TEST_F(Folders, LogsLoseWhatComesAgain) {
  const fs::path path = folder_ / "log";
  const auto step = [](int n) {
    return fmt::format("{{\"event\":\"step\",\"epoch\":{},\"step\":{}}}\n", (n + 1) / 2, n);
  };
  const auto eval = [](int n) { return fmt::format("{{\"event\":\"eval\",\"epoch\":{},\"step\":{}}}\n", n, 2 * n); };
  const std::string start = "{\"event\":\"start\",\"step\":0}\n", end = "{\"event\":\"end\",\"step\":4}\n";
  const std::string whole = start + step(1) + step(2) + eval(1) + step(3) + step(4) + eval(2) + end;
  struct Case {
    std::string before;
    std::int64_t step, epochs;
    std::string after;
    std::int64_t torn, repeated;
  };
  const Case cases[] = {
      {whole, 4, 2, whole, 0, 0},
      {whole, 3, 1, start + step(1) + step(2) + eval(1) + step(3) + end, 0, 2},
      {whole, 2, 0, start + step(1) + step(2) + end, 0, 4},
      {whole, 0, 0, start + end, 0, 6},
      {start + step(1) + step(2), 1, 0, start + step(1), 0, 1},
      {start + step(1) + "{\"eve", 1, 0, start + step(1), 1, 0},
      {start + step(1).substr(0, step(1).size() - 1), 1, 0, start + step(1), 0, 0},
      {start + step(1) + "{\"event\":\"st" + start + step(2), 2, 0, start + step(1) + start + step(2), 1, 0},
      {start + "garbage\n\n" + step(1), 1, 0, start + "\n" + step(1), 1, 0},
      {"", 0, 0, "", 0, 0},
  };
  for (const Case& c : cases) {
    write(path, c.before);
    const training::LogRepair repair = training::prepare_log(path, c.step, c.epochs);
    EXPECT_EQ(read(path), c.after) << c.before;
    EXPECT_EQ(repair.torn, c.torn) << c.before;
    EXPECT_EQ(repair.repeated, c.repeated) << c.before;
  }
  EXPECT_EQ(training::prepare_log(folder_ / "none", 1, 1).first, 0);
  EXPECT_FALSE(fs::exists(folder_ / "none"));
}

TEST_F(Folders, LogsAreStartedWithTheirFirstLine) {
  const fs::path path = folder_ / "log";
  write(path, "before\n");
  { const training::JsonLog log(path); }
  EXPECT_EQ(read(path), "before\n");
  {
    training::JsonLog log(path);
    log.write("start", {});
    log.write("end", {{"loss", std::nan("")}});
  }
  EXPECT_EQ(read(path), "{\"event\":\"start\"}\n{\"event\":\"end\",\"loss\":null}\n");
  { const training::JsonLog log(folder_ / "new"); }
  EXPECT_FALSE(fs::exists(folder_ / "new"));
}

TEST(Logs, ReplaceNothingElse) {
  const test::TemporaryDir dir;
  const auto write = [&](const char* name, const char* text) {
    std::ofstream(dir.path() / name) << text;
    return dir.path() / name;
  };
  EXPECT_THROW(training::check_log(write("weights.safetensors", "8 bytes and a header"), {}), IoError);
  EXPECT_THROW(training::check_log(write("recipe.yaml", "model: mlp\n"), {}), IoError);
  for (const char* own : {"last.safetensors", "best.safetensors", "config.yaml", "run.lock"}) {
    EXPECT_THROW(training::check_log(dir.path() / own, dir.path()), IoError) << own;
  }
  training::check_log(write("log.jsonl", "{\"event\": \"start\"}\n"), dir.path());
  training::check_log(write("empty", ""), dir.path());
  training::check_log(dir.path() / "new", dir.path());
  training::check_log("/dev/null", {});
  for (const char* text : {"{\"name\": 1}\n", "{\"event\":\"click\"}\n", "[]\n", "{\"event\":1}\n", "\n"}) {
    EXPECT_THROW(training::check_log(write("other.json", text), {}), IoError) << text;
  }
  for (const char* text :
       {"{\"ev", "{\"event\":\"eval\",\"lo", "{\"event\":\"st{\"event\":\"start\",\"model\":\"mlp\"}\n"}) {
    training::check_log(write("log.jsonl", text), {});
  }
  // What the same command reads, and the log of another run.
  write("empty.yaml", "");
  EXPECT_THROW(training::check_log(dir.path() / "." / "empty.yaml", {}, {dir.path() / "empty.yaml"}), IoError);
  EXPECT_THROW(training::check_log(dir.path() / "config.yaml", {}, {dir.path()}), IoError);
  EXPECT_THROW(training::check_log(dir.path() / "config.yaml", {}, {dir.path() / "best.safetensors"}), IoError);
  training::check_log(dir.path() / "empty.yaml", {}, {dir.path() / "config.yaml", {}});
  write("last.safetensors", "");
  training::check_log(dir.path() / "log.jsonl", dir.path(), {dir.path()});
  EXPECT_THROW(training::check_log(dir.path() / "log.jsonl", {}, {}), IoError);
  EXPECT_THROW(training::check_log(dir.path() / "log.jsonl", dir.path() / "b", {}), IoError);
}

TEST(Logs, WaitForTheReaderOfAPipeUntilTheyAreStopped) {
  const test::TemporaryDir dir;
  const fs::path path = dir.path() / "pipe";
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  std::vector<std::string> said;
  set_log_sink([&](LogLevel, std::string_view text) { said.emplace_back(text); });
  std::atomic<bool> stop{false};
  std::thread stopper([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    stop = true;
  });
  {
    training::JsonLog log(path, false, &stop);
    EXPECT_FALSE(log);
    log.write("start", {});
  }
  stopper.join();
  ASSERT_EQ(said.size(), 1U);
  EXPECT_NE(said[0].find("pipe: waiting for a reader of this pipe"), std::string::npos) << said[0];
  std::string got;
  std::thread reader([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    got = read(path);
  });
  {
    stop = false;
    training::JsonLog log(path, false, &stop);
    EXPECT_TRUE(log);
    log.write("start", {});
    log.write("end", {});
  }
  reader.join();
  set_log_sink({});
  EXPECT_EQ(got, "{\"event\":\"start\"}\n{\"event\":\"end\"}\n");
}

TEST(Logs, EndWhereAReaderTakesNothingMoreAndTheRunIsToStop) {
  const test::TemporaryDir dir;
  const fs::path path = dir.path() / "pipe";
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  const int reader = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  std::atomic<bool> stop{false};
  training::JsonLog log(path, false, &stop);
  ASSERT_TRUE(log);
  std::vector<std::string> said;
  set_log_sink([&](LogLevel, std::string_view text) { said.emplace_back(text); });
  std::thread stopper([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    stop = true;
  });
  // A pipe holds 64 KiB unless it was told otherwise.
  for (int line = 0; log && line < 100000; ++line) log.write("step", {{"step", std::int64_t{line}}});
  stopper.join();
  set_log_sink({});
  EXPECT_FALSE(log);
  ASSERT_EQ(said.size(), 1U);
  EXPECT_NE(said[0].find("its reader takes nothing more"), std::string::npos) << said[0];
  ::close(reader);
}

// Whoever shows a message lets no byte of a name reach a terminal.
TEST(Logs, NamesInMessagesAreShown) {
  const test::TemporaryDir dir;
  const fs::path odd = dir.path() / "a\x1b[31m\xff\n";
  const auto shown = [](const std::string& text) {
    EXPECT_NE(text.find("a\\e[31m\\xff\\n"), std::string::npos) << text;
    EXPECT_EQ(text.find_first_of("\x1b\xff\n"), std::string::npos) << text;
  };
  std::ofstream(odd) << "no log";
  shown(error_of<IoError>([&] { training::check_log(odd, {}); }));
  shown(error_of<IoError>([&] { training::check_log(odd, {}, {odd}); }));
  shown(error_of<IoError>([&] { training::JsonLog(odd / "log"); }));
  shown(error_of<IoError>([&] { RunFolder(odd, ExistingRun::refuse); }));
  fs::remove(odd);
  fs::create_directory(odd);
  shown(error_of<IoError>([&] { training::JsonLog log(odd); }));
  std::ofstream(odd / "log.jsonl") << "{}";
  shown(error_of<IoError>([&] { RunFolder(odd, ExistingRun::refuse); }));
  const RunFolder folder(odd, ExistingRun::resume);
  shown(error_of<IoError>([&] { RunFolder(odd, ExistingRun::resume); }));
}

}  // namespace
}  // namespace halfstep
