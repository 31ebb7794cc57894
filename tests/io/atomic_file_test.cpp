// SPDX-License-Identifier: Apache-2.0
#include "halfstep/io/atomic_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <future>
#include <sstream>

#include "halfstep/core/error.h"
#include "tests/support/errors.h"
#include "tests/support/test_data.h"

namespace halfstep {
namespace {

namespace fs = std::filesystem;

class AtomicFiles : public ::testing::Test {
 protected:
  fs::path put(const std::string& name, const std::string& text) {
    std::ofstream(folder_ / name) << text;
    return folder_ / name;
  }
  static std::string text_of(const fs::path& path) {
    std::ostringstream text;
    text << std::ifstream(path, std::ios::binary).rdbuf();
    return text.str();
  }
  static void write(const fs::path& path, const std::string& text) {
    io::AtomicFile file(path);
    file.write(text.data(), text.size());
    file.commit();
  }
  static std::string error_of(const fs::path& path, const std::string& text = "new") {
    return test::error_of<IoError>([&] { write(path, text); });
  }
  static mode_t mode_of(const fs::path& path) {
    struct stat info {};
    EXPECT_EQ(::lstat(path.c_str(), &info), 0) << path;
    return info.st_mode;
  }
  std::vector<std::string> names() const {
    std::vector<std::string> result;
    for (const auto& e : fs::directory_iterator(folder_)) result.push_back(e.path().filename());
    std::sort(result.begin(), result.end());
    return result;
  }

  test::TemporaryDir temporary_;
  const fs::path folder_ = temporary_.path();
};

using Names = std::vector<std::string>;

TEST_F(AtomicFiles, ADeviceIsWrittenIntoAndStays) {
  const fs::path device = folder_ / "null";
  if (::mknod(device.c_str(), S_IFCHR | 0666, makedev(1, 3)) != 0 || !std::ofstream(device)) {
    GTEST_SKIP() << "devices can't be made here";
  }
  write(device, "data");
  EXPECT_TRUE(S_ISCHR(mode_of(device)));
  EXPECT_EQ(names(), Names{"null"});
  // A link to it, as /dev/stdout is one.
  fs::create_symlink("null", folder_ / "link");
  write(folder_ / "link", "data");
  EXPECT_TRUE(S_ISLNK(mode_of(folder_ / "link")));
  EXPECT_TRUE(S_ISCHR(mode_of(device)));
  // The device that is always full.
  fs::remove(device);
  ASSERT_EQ(::mknod(device.c_str(), S_IFCHR | 0666, makedev(1, 7)), 0);
  EXPECT_NE(error_of(device).find("No space left"), std::string::npos) << error_of(device);
  EXPECT_EQ(error_of(device).find("unchanged"), std::string::npos);
  EXPECT_TRUE(S_ISCHR(mode_of(device)));
}

TEST_F(AtomicFiles, APipeIsWrittenIntoAndStays) {
  const fs::path pipe = folder_ / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const std::string text(300'000, 'x');
  auto reader = std::async(std::launch::async, [&] { return text_of(pipe); });
  write(pipe, text);
  EXPECT_EQ(reader.get(), text);
  EXPECT_TRUE(S_ISFIFO(mode_of(pipe)));
  EXPECT_EQ(names(), Names{"pipe"});
}

TEST_F(AtomicFiles, AReaderThatGoesAwayIsAnErrorAndNoSignal) {
  const fs::path pipe = folder_ / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const auto before = std::signal(SIGPIPE, SIG_DFL);
  auto reader = std::async(std::launch::async, [&] { ::close(::open(pipe.c_str(), O_RDONLY)); });
  const std::string error = error_of(pipe, std::string(1 << 20, 'x'));
  EXPECT_NE(error.find("Broken pipe"), std::string::npos) << error;
  reader.get();
  EXPECT_EQ(std::signal(SIGPIPE, before), SIG_DFL);
}

TEST_F(AtomicFiles, OpenFilesUnderProcAreWrittenInto) {
  const fs::path target = put("there", "old and longer");
  const int file = ::open(target.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(file, 0);
  struct stat before {
  }, after{};
  ASSERT_EQ(::fstat(file, &before), 0);
  write("/proc/self/fd/" + std::to_string(file), "new");
  ASSERT_EQ(::stat(target.c_str(), &after), 0);
  EXPECT_EQ(before.st_ino, after.st_ino);  // who has it open sees the data
  EXPECT_EQ(text_of(target), "new");
  ::close(file);
}

TEST_F(AtomicFiles, ALinkStaysAndItsTargetIsReplaced) {
  fs::create_directory(folder_ / "elsewhere");
  const fs::path target = put("elsewhere/target", "old");
  fs::create_symlink("elsewhere/second", folder_ / "link");
  fs::create_symlink("target", folder_ / "elsewhere/second");
  struct stat before {
  }, after{};
  ASSERT_EQ(::stat(target.c_str(), &before), 0);
  {
    io::AtomicFile file(folder_ / "link");
    file.write("new", 3);
    EXPECT_EQ(text_of(target), "old");
    file.commit();
  }
  ASSERT_EQ(::stat(target.c_str(), &after), 0);
  EXPECT_NE(before.st_ino, after.st_ino);
  EXPECT_EQ(text_of(target), "new");
  EXPECT_EQ(fs::read_symlink(folder_ / "link"), "elsewhere/second");
  EXPECT_EQ(fs::read_symlink(folder_ / "elsewhere/second"), "target");
  EXPECT_EQ(names(), (Names{"elsewhere", "link"}));
}

TEST_F(AtomicFiles, ALinkToNothingMakesItsTarget) {
  fs::create_directory(folder_ / "elsewhere");
  fs::create_symlink("elsewhere/target", folder_ / "link");
  write(folder_ / "link", "new");
  EXPECT_EQ(text_of(folder_ / "elsewhere/target"), "new");
  EXPECT_TRUE(fs::is_symlink(folder_ / "link"));
  fs::create_symlink("nowhere/target", folder_ / "lost");
  EXPECT_NE(error_of(folder_ / "lost").find("folder doesn't exist"), std::string::npos) << error_of(folder_ / "lost");
  EXPECT_TRUE(fs::is_symlink(folder_ / "lost"));
}

TEST_F(AtomicFiles, LinksInACircleAreAnError) {
  fs::create_symlink("b", folder_ / "a");
  fs::create_symlink("a", folder_ / "b");
  EXPECT_NE(error_of(folder_ / "a").find("in a circle"), std::string::npos) << error_of(folder_ / "a");
  EXPECT_EQ(names(), (Names{"a", "b"}));
}

TEST_F(AtomicFiles, AFileKeepsItsModeAndANewOneHasTheUmasks) {
  const fs::path old = put("old", "old");
  for (const mode_t mode : {0640, 0604, 0444, 0755}) {
    ASSERT_EQ(::chmod(old.c_str(), mode), 0);
    write(old, "new");
    EXPECT_EQ(mode_of(old) & 07777, mode);
  }
  for (const mode_t mask : {0022, 0077, 0027}) {
    const mode_t before = ::umask(mask);
    write(folder_ / std::to_string(mask), "new");
    ::umask(before);
    EXPECT_EQ(mode_of(folder_ / std::to_string(mask)) & 07777, 0666 & ~mask);
  }
  EXPECT_EQ(text_of(old), "new");
}

TEST_F(AtomicFiles, AFileKeepsItsOwner) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root gives files away";
  const fs::path old = put("old", "old");
  ASSERT_EQ(::chown(old.c_str(), 1234, 4321), 0);
  ASSERT_EQ(::chmod(old.c_str(), 0664), 0);
  write(old, "new");
  struct stat info {};
  ASSERT_EQ(::stat(old.c_str(), &info), 0);
  EXPECT_EQ(info.st_uid, 1234u);
  EXPECT_EQ(info.st_gid, 4321u);
  EXPECT_EQ(info.st_mode & 07777, 0664u);
  // Who may not: what the old group was allowed is not allowed to another.
  ASSERT_EQ(::chmod(folder_.c_str(), 0777), 0);
  ASSERT_EQ(::setegid(65534), 0);
  ASSERT_EQ(::seteuid(65534), 0);
  const std::string error = error_of(old);
  EXPECT_EQ(::seteuid(0), 0);
  EXPECT_EQ(::setegid(0), 0);
  EXPECT_EQ(error, "");
  ASSERT_EQ(::stat(old.c_str(), &info), 0);
  EXPECT_EQ(info.st_uid, 65534u);
  EXPECT_EQ(info.st_mode & 07777, 0644u);
}

TEST_F(AtomicFiles, TwoWritersOfOneFileDoNotMix) {
  const fs::path path = folder_ / "x";
  io::AtomicFile first(path), second(path);  // two processes may have the same number, in two containers
  first.write("first", 5);
  second.write("second", 6);
  first.commit();
  EXPECT_EQ(text_of(path), "first");
  second.commit();
  EXPECT_EQ(text_of(path), "second");
  EXPECT_EQ(names(), Names{"x"});
}

TEST_F(AtomicFiles, WhatTheDeadLeftIsRemovedAndWhatTheLivingWriteIsNot) {
  const fs::path dead = put("x.tmp0123456789abcdef", "half");
  const fs::path other = put("y.tmp0123456789abcdef", "half"), mine = put("x.tmp0123", "mine"),
                 word = put("x.tmp0123456789abcdeg", "mine");
  const fs::path living = put("x.tmpfedcba9876543210", "half");
  const int lock = ::open(living.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(::flock(lock, LOCK_EX | LOCK_NB), 0);
  write(folder_ / "x", "new");
  EXPECT_FALSE(fs::exists(dead));
  for (const fs::path& path : {other, mine, word, living}) EXPECT_TRUE(fs::exists(path)) << path;
  ::close(lock);
  write(folder_ / "x", "new");
  EXPECT_FALSE(fs::exists(living));
}

TEST_F(AtomicFiles, WhatTheDeadLeftIsRemovedOnDemand) {
  const fs::path dead = put("x.tmp0123456789abcdef", "half"), other = put("y.tmp0123456789abcdef", "half");
  const fs::path living = put("x.tmpfedcba9876543210", "half");
  const int held = ::open(living.c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_EQ(::flock(held, LOCK_EX | LOCK_NB), 0);
  io::AtomicFile::remove_leftovers(folder_ / "x");
  EXPECT_EQ(names(), (std::vector<std::string>{"x.tmpfedcba9876543210", "y.tmp0123456789abcdef"}));
  ::close(held);
  // Where a link leads, as it is written.
  put("y", "old");
  fs::create_directory(folder_ / "links");
  fs::create_symlink("../y", folder_ / "links/x");
  io::AtomicFile::remove_leftovers(folder_ / "links/x");
  EXPECT_EQ(names(), (std::vector<std::string>{"links", "x.tmpfedcba9876543210", "y"}));
  EXPECT_EQ(text_of(folder_ / "y"), "old");
  EXPECT_NO_THROW(io::AtomicFile::remove_leftovers(folder_ / "no/such"));
}

TEST_F(AtomicFiles, AFullDiskLeavesWhatWasThere) {
  const fs::path disk = folder_ / "disk";
  fs::create_directory(disk);
  if (::mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=65536") != 0) GTEST_SKIP() << "needs the right to mount";
  write(disk / "x", "old");
  const std::string error = error_of(disk / "x", std::string(1 << 20, 'x'));
  EXPECT_NE(error.find("No space left"), std::string::npos) << error;
  EXPECT_NE(error.find("unchanged"), std::string::npos) << error;
  EXPECT_EQ(text_of(disk / "x"), "old");
  EXPECT_EQ(std::distance(fs::directory_iterator(disk), {}), 1);
  EXPECT_EQ(::umount(disk.c_str()), 0);
}

TEST_F(AtomicFiles, TheLimitOnSizesIsAnErrorAndNoSignal) {
  const fs::path path = put("x", "old");
  const auto before = std::signal(SIGXFSZ, SIG_DFL);
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlimit small{.rlim_cur = 100'000, .rlim_max = limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string error = error_of(path, std::string(1 << 20, 'x'));
  ::setrlimit(RLIMIT_FSIZE, &limit);
  std::signal(SIGXFSZ, before);
  EXPECT_NE(error.find("File too large"), std::string::npos) << error;
  EXPECT_EQ(text_of(path), "old");
  EXPECT_EQ(names(), Names{"x"});
}

TEST_F(AtomicFiles, TheFolderMayBeRenamedMeanwhile) {
  fs::create_directory(folder_ / "run");
  io::AtomicFile file(folder_ / "run" / "x");
  file.write("new", 3);
  fs::rename(folder_ / "run", folder_ / "kept");
  file.commit();
  EXPECT_EQ(text_of(folder_ / "kept" / "x"), "new");
  EXPECT_EQ(names(), Names{"kept"});
}

TEST_F(AtomicFiles, TakesTheLongestNamesAndSaysWhatIsTooLong) {
  const std::string longest(255, 'n');
  write(folder_ / longest, "new");
  EXPECT_EQ(text_of(folder_ / longest), "new");
  EXPECT_NE(error_of(folder_ / (longest + "n")).find("name too long"), std::string::npos);
  fs::path deep = folder_;
  for (int i = 0; i < 100; ++i) deep /= std::string(100, 'd');
  const std::string error = error_of(deep / "x");
  EXPECT_NE(error.find("name too long"), std::string::npos);
  EXPECT_LT(error.size(), 600u);
}

TEST_F(AtomicFiles, SaysWhatCannotBeWritten) {
  fs::create_directory(folder_ / "folder");
  EXPECT_NE(error_of(folder_ / "folder").find("it is a folder"), std::string::npos);
  EXPECT_NE(error_of(folder_ / "no" / "x").find("its folder doesn't exist"), std::string::npos);
  EXPECT_NE(error_of(put("file", "") / "x").find("Not a directory"), std::string::npos);
  EXPECT_NE(error_of("").find("name is empty"), std::string::npos);
  EXPECT_NE(error_of(folder_ / "new" / "").find("can't be written"), std::string::npos);
  // What is in a name reaches no terminal.
  EXPECT_NE(error_of(folder_ / "no\x1b[2J\n" / "x").find("no\\e[2J\\n"), std::string::npos);
  EXPECT_EQ(names(), (Names{"file", "folder"}));
}

TEST_F(AtomicFiles, WithoutCommitNothingHappens) {
  const fs::path path = put("x", "old");
  {
    io::AtomicFile file(path);
    file.write("new", 3);
  }
  EXPECT_EQ(text_of(path), "old");
  EXPECT_EQ(names(), Names{"x"});
}

}  // namespace
}  // namespace halfstep
