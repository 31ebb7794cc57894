// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/image_folder.h"

#include <sys/stat.h>

#include <algorithm>
#include <mutex>

#include "halfstep/core/error.h"
#include "halfstep/core/text.h"
#include "halfstep/data/image.h"
#include "halfstep/data/image_list.h"
#include "halfstep/runtime/log.h"
#include "tests/data/idx_files.h"
#include "tests/support/test_data.h"

namespace halfstep::data {
namespace {

namespace fs = std::filesystem;
using test::Bytes;
using test::expect_error;
using test::TemporaryDir;
using test::write_file;

Bytes text(const std::string& s) { return {s.begin(), s.end()}; }

/// What is logged while it lives.
class Heard {
 public:
  Heard() {
    set_log_sink([this](LogLevel, std::string_view line) { text_ += std::string(line) + '\n'; });
  }
  ~Heard() { set_log_sink({}); }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

class ImageFolders : public testing::Test {
 protected:
  void picture(const std::string& name) { write_file(path() / name, text(name)); }
  void list(const std::string& name, const std::string& lines) { write_file(path() / name, text(lines)); }
  const fs::path& path() const { return dir_.path(); }
  static std::string contents(const ImageSource& source, std::int64_t i) {
    Bytes buffer;
    const auto bytes = source.read(i, buffer);
    return {bytes.begin(), bytes.end()};
  }

 private:
  TemporaryDir dir_;
};

TEST(ImageList, ReadsLines) {
  const auto entries = parse_image_list(
      "\xEF\xBB\xBF# made by hand\r\nval/n03623198/ILSVRC2012_val_00030341.JPEG 997\r\n\r\n  my cat.png\t 3  \n"
      "last.jpg 0",
      "val.txt");
  EXPECT_EQ(entries, (std::vector<ImageListEntry>{
                         {"val/n03623198/ILSVRC2012_val_00030341.JPEG", 997}, {"my cat.png", 3}, {"last.jpg", 0}}));
}

TEST(ImageList, RefusesBadLinesByNumber) {
  for (const std::string line : {"a.jpg", "a.jpg x", "a.jpg -1", "a.jpg 1.5", "a.jpg 1048576", "17",
                                 "a.jpg 99999999999999999999", "a.jpg 0x3"}) {
    expect_error<IoError>([&] { parse_image_list("ok.jpg 1\n\n" + line + "\n", "lists/train.txt"); },
                          {"lists/train.txt:3:", "'" + line + "'"});
  }
  expect_error<IoError>([] { parse_image_list(std::string_view("a\0b.jpg 1", 9), "x"); }, {"x:1:", "a\\x00b.jpg"});
  expect_error<IoError>([] { parse_image_list("\n# nothing\n", "x.txt"); }, {"x.txt", "none"});
  const std::string longer(5000, 'a');
  expect_error<IoError>([&] { parse_image_list(longer, "x"); }, {"aaa..."});
}

TEST_F(ImageFolders, ClassesAreSortedFolders) {
  for (const std::string name : {"tulip/2.jpg", "tulip/10.JPEG", "daisy/b.PNG", "daisy/sub/a.jpg", "Zinnia/x.jpg",
                                 "tulip/readme.txt", "daisy/.hidden.jpg", ".git/a.jpg", "loose.jpg"}) {
    picture(name);
  }
  const ImageFolder folder(path());
  EXPECT_EQ(folder.classes(), (std::vector<std::string>{"Zinnia", "daisy", "tulip"}));
  std::vector<std::string> found;
  for (std::int64_t i = 0; i < folder.size(); ++i) {
    found.push_back(contents(folder, i) + " " + std::to_string(folder.label(i)));
    EXPECT_EQ(folder.name(i), (path() / contents(folder, i)).string());
  }
  EXPECT_EQ(found, (std::vector<std::string>{"Zinnia/x.jpg 0", "daisy/b.PNG 1", "daisy/sub/a.jpg 1", "tulip/10.JPEG 2",
                                             "tulip/2.jpg 2"}));
  EXPECT_EQ(folder.class_to_index().at("tulip"), 2);
}

TEST_F(ImageFolders, AnEmptyClassKeepsItsLabelAndIsWarnedOf) {
  picture("b/1.jpg");
  fs::create_directories(path() / "a");
  const Heard heard;
  const ImageFolder folder(path());
  EXPECT_EQ(folder.label(0), 1);
  EXPECT_NE(heard.text().find("1 of 2 classes have no pictures, a first"), std::string::npos) << heard.text();
}

TEST_F(ImageFolders, RefusesFoldersWithoutPictures) {
  expect_error<IoError>([&] { ImageFolder(path() / "none"); }, {"none", "no such folder"});
  expect_error<IoError>([&] { ImageFolder{path()}; }, {"no folder"});
  picture("loose.jpg");
  fs::create_directories(path() / "a");
  expect_error<IoError>([&] { ImageFolder{path()}; }, {"1 folders without any"});
}

TEST_F(ImageFolders, AListWinsOverTheFoldersAndADisagreementIsWarnedOf) {
  for (const std::string name : {"val/ant/1.jpg", "val/bee/2.jpg", "val/cat/3.jpg"}) picture(name);
  list("val.txt", "val/bee/2.jpg 0\nval/ant/1.jpg 1\nval/cat/3.jpg 2\n");
  const Heard heard;
  const auto source = open_images(path(), Split::kTest);
  ASSERT_EQ(source->size(), 3);
  EXPECT_EQ(contents(*source, 0), "val/bee/2.jpg");
  EXPECT_EQ(source->label(0), 0);
  EXPECT_EQ(source->label(1), 1);
  EXPECT_EQ(source->classes(), (std::vector<std::string>{"bee", "ant", "cat"}));
  EXPECT_NE(heard.text().find("2 of 3 classes"), std::string::npos) << heard.text();
  EXPECT_NE(heard.text().find("ant is 1 in the list and 0 among the sorted folders"), std::string::npos)
      << heard.text();
}

TEST_F(ImageFolders, AListThatAgreesIsNotWarnedOf) {
  for (const std::string name : {"train/ant/1.jpg", "train/bee/2.jpg", "train/cat/3.jpg", "train/dog/3.jpg"})
    picture(name);
  // Paths from inside train/, and not every class: places are among the folders, not among the list's names.
  list("train.txt", "cat/3.jpg 2\nbee/2.jpg 1\n");
  const Heard heard;
  const auto source = open_images(path(), Split::kTrain);
  EXPECT_EQ(heard.text(), "");
  EXPECT_EQ(contents(*source, 0), "train/cat/3.jpg");
  EXPECT_EQ(source->classes(), (std::vector<std::string>{"0", "bee", "cat"}));
}

TEST_F(ImageFolders, AListOfOneFolderHasNoNames) {
  picture("val/1.jpg");
  picture("val/2.jpg");
  list("val.txt", "1.jpg 1\n2.jpg 0\n");
  const Heard heard;
  const auto source = open_images(path(), Split::kTest);
  EXPECT_EQ(source->classes(), (std::vector<std::string>{"0", "1"}));
  EXPECT_EQ(contents(*source, 0), "val/1.jpg");
  EXPECT_EQ(heard.text(), "");
}

TEST_F(ImageFolders, AListWithoutItsPicturesIsRefused) {
  picture("train/a/1.jpg");
  list("train.txt", "b/1.jpg 0\n");
  expect_error<IoError>([&] { open_images(path(), Split::kTrain); }, {"train.txt", "b/1.jpg", "train"});
}

TEST_F(ImageFolders, FindsWhatThereIs) {
  expect_error<IoError>([&] { open_images(path() / "x", Split::kTrain); }, {"no such folder"});
  expect_error<IoError>([&] { open_images(path(), Split::kTrain); }, {"train.txt", "train.tar.gz"});
  expect_error<IoError>([&] { open_images(path(), Split::kTest); }, {"val.txt", "test in place of val"});
  picture("test/a/1.jpg");
  EXPECT_EQ(contents(*open_images(path(), Split::kTest), 0), "test/a/1.jpg");
  picture("val/a/1.jpg");
  EXPECT_EQ(contents(*open_images(path(), Split::kTest), 0), "val/a/1.jpg");
  expect_error<IoError>([&] { open_images(path(), Split::kTrain); }, {"found none"});
}

// Class folders may be called by any bytes but 0 and a slash: what they become is UTF-8, does nothing to a terminal,
// and is another one for each folder.
TEST_F(ImageFolders, ClassesOfAnyNameArePrintableAndDifferent) {
  const std::vector<std::string> raw{"a\nb", "caf\\xe9", "caf\xc3\xa9", "caf\xe9", "\x1b[31mred"};
  for (const std::string& name : raw) picture(name + "/1.jpg");
  const Heard heard;
  const ImageFolder folder(path());
  EXPECT_EQ(folder.classes(),
            (std::vector<std::string>{"\\e[31mred", "a\\nb", "caf\\\\xe9", "caf\xc3\xa9", "caf\\xe9"}));
  std::vector<std::string> back;
  for (std::int64_t i = 0; i < folder.size(); ++i) {
    const std::string& name = folder.classes()[static_cast<std::size_t>(folder.label(i))];
    back.push_back(raw_name(name));
    EXPECT_EQ(contents(folder, i), back.back() + "/1.jpg");
    EXPECT_EQ(folder.class_to_index().at(name), folder.label(i));
    EXPECT_EQ(printable(folder.name(i)), folder.name(i));
  }
  std::sort(back.begin(), back.end());
  std::vector<std::string> sorted = raw;
  std::sort(sorted.begin(), sorted.end());
  EXPECT_EQ(back, sorted);
}

TEST_F(ImageFolders, NamesInMessagesDoNothingToATerminal) {
  picture("\x1b[2J/1.txt");
  expect_error<IoError>([&] { ImageFolder(path() / "\x1b[2J"); }, {"\\e[2J"});
  fs::create_directories(path() / "two" / "b\x1b]0;x\x07");
  picture("two/a/1.jpg");
  const Heard heard;
  const ImageFolder folder(path() / "two");
  EXPECT_NE(heard.text().find("b\\e]0;x\\x07 first"), std::string::npos) << heard.text();
  picture("train/caf\xe9/1.jpg");
  list("train.txt", "train/caf\xe9/1.jpg 0\n");
  EXPECT_EQ(contents(*open_images(path(), Split::kTrain), 0), "train/caf\xe9/1.jpg");
  list("train.txt", "nowhere\x1b[2J/1.jpg 0\n");
  expect_error<IoError>([&] { open_images(path(), Split::kTrain); }, {"nowhere\\e[2J/1.jpg"});
}

TEST_F(ImageFolders, WhatIsNoFileIsPassedOver) {
  picture("a/1.jpg");
  ASSERT_EQ(::mkfifo((path() / "a/pipe.jpg").c_str(), 0600), 0);  // whose writer would be waited for
  fs::create_directories(path() / "a/folder.jpg");
  fs::create_symlink("nowhere", path() / "a/lost.jpg");
  fs::create_symlink("round.jpg", path() / "a/round.jpg");
  EXPECT_EQ(ImageFolder(path()).size(), 1);
  Bytes bytes;
  expect_error<IoError>([&] { read_file(path() / "a/pipe.jpg", 100, bytes); }, {"expected a file"});
  expect_error<IoError>([&] { read_file("/dev/zero", 100, bytes); }, {"expected a file"});
  expect_error<IoError>([&] { read_file(path() / std::string(5000, 'x'), 100, bytes); }, {"too long"});
}

}  // namespace
}  // namespace halfstep::data
