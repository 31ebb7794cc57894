// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/image_archive.h"

#include <algorithm>
#include <cstdio>

#include "halfstep/core/error.h"
#include "halfstep/runtime/log.h"
#include "tests/data/idx_files.h"
#include "tests/support/test_data.h"

namespace halfstep::data {
namespace {

using test::Bytes;
using test::expect_error;
using test::gzip;
using test::TemporaryDir;
using test::write_file;
using test::operator+;

/// One entry of a ustar archive: the header that POSIX describes, the contents, zeros up to 512 bytes.
Bytes entry(const std::string& name, const std::string& contents, char type = '0', const std::string& link = "") {
  Bytes block(512, 0);
  const auto put = [&](std::size_t at, const std::string& text) {
    std::copy(text.begin(), text.end(), block.begin() + static_cast<std::ptrdiff_t>(at));
  };
  put(0, name);
  put(100, "0000644");
  put(108, "0000000");
  put(116, "0000000");
  char size[12];
  std::snprintf(size, sizeof size, "%011o", static_cast<unsigned>(contents.size()));
  put(124, size);
  put(136, "00000000000");
  put(148, "        ");
  block[156] = static_cast<std::uint8_t>(type);
  put(157, link);
  put(257, std::string("ustar\0"
                       "00",
                       8));
  unsigned sum = 0;
  for (const std::uint8_t byte : block) sum += byte;
  char checksum[8];
  std::snprintf(checksum, sizeof checksum, "%06o", sum);
  put(148, std::string(checksum) + '\0' + ' ');
  block.insert(block.end(), contents.begin(), contents.end());
  block.resize((block.size() + 511) / 512 * 512, 0);
  return block;
}

Bytes ending() { return Bytes(1024, 0); }

std::vector<std::string> described(const ImageArchive& archive) {
  std::vector<std::string> lines;
  Bytes buffer;
  for (std::int64_t i = 0; i < archive.size(); ++i) {
    const auto bytes = archive.read(i, buffer);
    lines.push_back(archive.name(i) + "=" + std::string(bytes.begin(), bytes.end()) + "/" +
                    std::to_string(archive.label(i)));
  }
  return lines;
}

Bytes usual() {
  return entry("train/", "", '5') + entry("train/dog/0002.jpg", "second dog") +
         entry("train/dog/0001.jpg", "first dog") + entry("train/cat/0001.PNG", std::string(700, 'c')) +
         entry("train/cat/notes.txt", "text") + entry("train/cat/._0001.jpg", "junk") +
         entry("train/cat/link.jpg", "", '2') + ending();
}

TEST(ImageArchive, ReadsPicturesOfFolders) {
  const std::vector<std::string> expected{"x:train/cat/0001.PNG=" + std::string(700, 'c') + "/0",
                                          "x:train/dog/0001.jpg=first dog/1", "x:train/dog/0002.jpg=second dog/1"};
  for (const Bytes& bytes : {usual(), gzip(usual())}) {
    const ImageArchive archive(bytes, "x");
    EXPECT_EQ(described(archive), expected);
    EXPECT_EQ(archive.classes(), (std::vector<std::string>{"cat", "dog"}));
  }
}

TEST(ImageArchive, OpensFilesAndIsFoundByOpenImages) {
  const TemporaryDir dir;
  write_file(dir.path() / "train.tar.gz", gzip(usual()));
  write_file(dir.path() / "test.tar", entry("./test/cat/1.jpg", "a") + ending());
  EXPECT_EQ(ImageArchive(dir.path() / "train.tar.gz").size(), 3);
  EXPECT_EQ(open_images(dir.path(), Split::kTrain)->size(), 3);
  const auto test = open_images(dir.path(), Split::kTest);
  EXPECT_EQ(test->size(), 1);
  EXPECT_EQ(test->classes(), std::vector<std::string>{"cat"});
  expect_error<IoError>([&] { ImageArchive(dir.path() / "none.tar"); }, {"none.tar", "no such file"});
  expect_error<IoError>([&] { ImageArchive{dir.path()}; }, {"something else"});
}

TEST(ImageArchive, RefusesWhatIsDamaged) {
  const Bytes packed = gzip(usual());
  for (std::size_t n = 20; n + 8 < packed.size(); n += 23) {
    const Bytes cut(packed.begin(), packed.begin() + static_cast<std::ptrdiff_t>(n));
    expect_error<IoError>([&] { ImageArchive(cut, "cut.tar.gz"); }, {"cut.tar.gz"});
  }
  Bytes flipped = usual();
  flipped[512 + 3] ^= 1;  // the checksum of the first picture's header is wrong now
  expect_error<IoError>([&] { ImageArchive(flipped, "a.tar"); }, {"a.tar"});
  const Bytes whole = usual();
  const Bytes cut(whole.begin(), whole.begin() + 2048 + 700);  // in the middle of a picture
  expect_error<IoError>([&] { ImageArchive(cut, "a.tar"); }, {"a.tar"});
  expect_error<IoError>([&] { ImageArchive(Bytes(3000, 'x'), "text"); }, {"text", "tar"});
  expect_error<IoError>([&] { ImageArchive(Bytes{}, "nothing"); }, {"nothing"});
}

TEST(ImageArchive, RefusesWhatIsNoDataSet) {
  expect_error<IoError>([] { ImageArchive(entry("readme.txt", "a") + ending(), "x"); }, {"found none"});
  expect_error<IoError>([] { ImageArchive(entry("1.jpg", "a") + ending(), "x"); }, {"found none"});
  expect_error<IoError>(
      [] { ImageArchive(entry("train/cat/1.jpg", "a") + entry("test/cat/1.jpg", "b") + ending(), "x"); },
      {"one folder", "test/cat/1.jpg", "train/cat/1.jpg"});
}

TEST(ImageArchive, KeepsToItsLimits) {
  EXPECT_NO_THROW(ImageArchive(usual(), "x", {.max_bytes = 719, .max_files = 3}));
  expect_error<IoError>([] { ImageArchive(usual(), "x", {.max_bytes = 718}); }, {"718 bytes"});
  expect_error<IoError>([] { ImageArchive(usual(), "x", {.max_files = 2}); }, {"2 pictures"});
}

Bytes hard(const std::string& name, const std::string& target) { return entry(name, "", '1', target); }
Bytes soft(const std::string& name, const std::string& target) { return entry(name, "", '2', target); }

// What is logged while `f` runs.
template <class F>
std::string logged(F&& f) {
  std::string text;
  set_log_sink([&](LogLevel, std::string_view line) { text += std::string(line) + '\n'; });
  f();
  set_log_sink({});
  return text;
}

TEST(ImageArchive, WhatIsUnpackedHasALimit) {
  // Of zeros, a thousandth of their size: as a picture, and as something else that would be passed over.
  for (const char* name : {"train/cat/0.jpg", "notes.txt"}) {
    const Bytes packed = gzip(entry(name, std::string(20'000'000, '\0')) + usual());
    EXPECT_LT(packed.size(), 100'000u);
    expect_error<IoError>([&] { ImageArchive(packed, "x", {.max_unpacked = 10'000'000}); }, {"unpacks to more than 8"});
    EXPECT_NO_THROW(ImageArchive(packed, "x", {.max_unpacked = 20'010'000}));
  }
}

TEST(ImageArchive, FollowsLinksInside) {
  const Bytes bytes = entry("./train/cat/1.jpg", "first") + hard("train/cat/2.jpg", "train/cat/1.jpg") +
                      hard("train/dog/1.jpg", "./train/cat/1.jpg") + soft("train/dog/2.jpg", "../cat/1.jpg") +
                      soft("train/dog/3.jpg", "2.jpg") + soft("train/dog/4.jpg", "../../blobs/17") +
                      soft("train/dog/5.jpg", "../tom/./1.jpg") + soft("train/tom", "cat") +
                      hard("train/dog/6.jpg", "blobs/17") + entry("blobs/17", "a blob") + ending();
  for (const Bytes& b : {bytes, gzip(bytes)}) {
    const std::string said = logged([&] {
      const ImageArchive archive(b, "x", {.max_bytes = 11});  // links take no room
      EXPECT_EQ(described(archive),
                (std::vector<std::string>{"x:./train/cat/1.jpg=first/0", "x:train/cat/2.jpg=first/0",
                                          "x:train/dog/1.jpg=first/1", "x:train/dog/2.jpg=first/1",
                                          "x:train/dog/3.jpg=first/1", "x:train/dog/4.jpg=a blob/1",
                                          "x:train/dog/5.jpg=first/1", "x:train/dog/6.jpg=a blob/1"}));
    });
    EXPECT_EQ(said, "");
  }
  expect_error<IoError>([&] { ImageArchive(bytes, "x", {.max_files = 7}); }, {"7 pictures"});
  expect_error<IoError>([&] { ImageArchive(bytes, "x", {.max_bytes = 10}); }, {"10 bytes"});
}

TEST(ImageArchive, NamesLinksThatLeadOutOfIt) {
  const TemporaryDir dir;
  write_file(dir.path() / "secret.jpg", Bytes(10, 's'));
  const std::string outside = (dir.path() / "secret.jpg").string();
  const Bytes bytes = entry("train/cat/1.jpg", "first") + soft("train/cat/2.jpg", outside) +
                      soft("train/cat/3.jpg", "../../../secret.jpg") + hard("train/cat/4.jpg", outside) +
                      hard("train/cat/5.jpg", "../secret.jpg") + soft("train/cat/6\x1b[31m.jpg", "nothing.jpg") +
                      soft("train/cat/7.jpg", "") + soft("train/cat/8.jpg", "../cat") + ending();
  const std::string said = logged([&] {
    const ImageArchive archive(bytes, "x");
    EXPECT_EQ(described(archive), (std::vector<std::string>{"x:train/cat/1.jpg=first/0"}));
  });
  EXPECT_NE(said.find("7 links to nothing in the archive are left out: "), std::string::npos) << said;
  EXPECT_NE(said.find("train/cat/2.jpg"), std::string::npos) << said;
  EXPECT_EQ(said.find('\x1b'), std::string::npos) << said;
  // Where links are all there is.
  expect_error<IoError>([&] { ImageArchive(soft("train/cat/1.jpg", outside) + ending(), "x"); }, {"found none"});
}

TEST(ImageArchive, LinksInACircleAreAnError) {
  const Bytes picture = entry("train/cat/1.jpg", "first");
  for (const Bytes& links : {soft("train/cat/a.jpg", "a.jpg"), hard("train/cat/a.jpg", "train/cat/a.jpg"),
                             soft("train/cat/a.jpg", "b.jpg") + soft("train/cat/b.jpg", "a.jpg"),
                             soft("train/cat/a.jpg", "../x/1.jpg") + soft("train/x", "y") + soft("train/y", "x"),
                             soft("train/cat/a.jpg", "../x/1.jpg") + soft("train/x", "x/x")}) {
    expect_error<IoError>([&] { ImageArchive(picture + links + ending(), "x"); }, {"train/cat/a.jpg", "in a circle"});
  }
}

TEST(ImageArchive, ClassesOfAnyNameArePrintable) {
  const ImageArchive archive(entry("caf\xe9/\x1b[2J.jpg", "first") + entry("b\\c/1.jpg", "second") + ending(), "x\x1b");
  EXPECT_EQ(archive.classes(), (std::vector<std::string>{"b\\\\c", "caf\\xe9"}));
  EXPECT_EQ(archive.name(1), "x\\e:caf\\xe9/\\e[2J.jpg");
}

}  // namespace
}  // namespace halfstep::data
