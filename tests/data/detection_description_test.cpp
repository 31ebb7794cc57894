// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/detection_description.h"

#include <map>

#include "halfstep/core/error.h"
#include "tests/data/detection_files.h"
#include "tests/support/test_data.h"

namespace halfstep::data {
namespace {

namespace fs = std::filesystem;
using test::expect_error;
using test::TemporaryDir;
using test::write_grey;
using test::write_text;

std::vector<std::string> names_of(const DetectionData& data, const fs::path& root) {
  std::vector<std::string> names;
  for (const LabeledPicture& picture : data.pictures) {
    names.push_back(picture.file.lexically_relative(root.lexically_normal()).generic_string());
  }
  return names;
}

std::map<std::string, std::int64_t> counts_of(const DetectionData& data) {
  std::map<std::string, std::int64_t> counts;
  for (const LabeledPicture& picture : data.pictures) {
    for (const LabeledObject& o : picture.objects) ++counts[data.classes.at(static_cast<std::size_t>(o.label))];
  }
  return counts;
}

/// images/train/{a,b,sub/c}.png with labels for the first two, images/val/d.png.
void write_small_set(const fs::path& root) {
  write_grey(root / "images/train/b.png", 20, 10);
  write_grey(root / "images/train/a.png", 10, 20);
  write_grey(root / "images/train/sub/c.png", 8, 8);
  write_grey(root / "images/val/d.png", 16, 16);
  write_text(root / "images/train/notes.md", "no picture");
  write_text(root / "labels/train/a.txt", "0 0.5 0.5 0.5 0.5\n1 0.5 0.5 0.2 0.2\n");
  write_text(root / "labels/train/b.txt", "1 0.5 0.5 0.5 0.5\n7 0.5 0.5 0.5 0.5\n");
  write_text(root / "labels/val/d.txt", "0 0.5 0.5 1 1\n");
}

TEST(DetectionDescription, ReadsAYamlFile) {
  const TemporaryDir dir;
  const fs::path root = dir.path() / "set";
  write_small_set(root);
  const fs::path file = write_text(dir.path() / "coco.yaml",
                                   "# a comment\npath: set\ntrain: images/train\nval: [images/val]\ntest:\n"
                                   "names:\n  0: person\n  1: two words\ndownload: https://example.com/x.zip\n");
  const DetectionData train = load_detection(file, "train");
  EXPECT_EQ(train.classes, (std::vector<std::string>{"person", "two words"}));
  EXPECT_EQ(names_of(train, root),
            (std::vector<std::string>{"images/train/a.png", "images/train/b.png", "images/train/sub/c.png"}));
  EXPECT_EQ(train.pictures[0].width, 10);
  EXPECT_EQ(train.pictures[0].height, 20);
  EXPECT_EQ(train.pictures[0].objects.size(), 2U);
  EXPECT_EQ(train.pictures[1].objects.size(), 1U);
  EXPECT_TRUE(train.pictures[2].objects.empty());  // no file of labels: background
  EXPECT_EQ(train.skipped, 1);
  ASSERT_EQ(train.problems.size(), 1U);
  EXPECT_NE(train.problems[0].find("labels/train/b.txt:2: expected a class from 0 to 1, got 7"), std::string::npos);
  EXPECT_EQ(load_detection(file, "val").pictures.size(), 1U);
  expect_error<IoError>([&] { load_detection(file, "test"); }, {"coco.yaml: expected the key `test`"});
}

TEST(DetectionDescription, NamesLabelsThatCanNotBeReached) {
  const TemporaryDir dir;
  write_small_set(dir.path());
  write_text(dir.path() / "classes.txt", "a\nb\n");
  // Links that lead round in a circle, of the file and of its folder.
  fs::remove(dir.path() / "labels/train/b.txt");
  fs::create_symlink("b.txt", dir.path() / "labels/train/b.txt");
  fs::create_symlink("sub", dir.path() / "labels/train/sub");
  const DetectionData data = load_detection(dir.path(), "train");
  EXPECT_EQ(names_of(data, dir.path()), (std::vector<std::string>{"images/train/a.png"}));
  EXPECT_EQ(data.skipped, 2);
  ASSERT_EQ(data.problems.size(), 2U);
  EXPECT_NE(data.problems[0].find("labels/train/b.txt: can't be opened"), std::string::npos) << data.problems[0];
  EXPECT_NE(data.problems[1].find("labels/train/sub/c.txt: can't be opened"), std::string::npos) << data.problems[1];
}

TEST(DetectionDescription, ReadsListsOfPictures) {
  const TemporaryDir dir;
  const fs::path root = dir.path();
  write_small_set(root);
  write_text(root / "train.txt",
             "images/train/b.png\n\nimages/train/a.png\r\nimages/train/b.png\nimages/train/no.png\n");
  write_text(root / "lists/val.txt", "./../images/val/d.png\n");
  const fs::path file = write_text(root / "data.yaml", "train: [train.txt, images/val]\nval: lists/val.txt\nnc: 2\n");
  const DetectionData train = load_detection(file, "train");
  EXPECT_EQ(train.classes, (std::vector<std::string>{"0", "1"}));
  EXPECT_EQ(names_of(train, root),
            (std::vector<std::string>{"images/train/b.png", "images/train/a.png", "images/val/d.png"}));
  EXPECT_EQ(train.skipped, 3);  // a picture twice, one that isn't there, a class that there isn't
  EXPECT_EQ(load_detection(root, "val").pictures.size(), 1U);  // data.yaml is found in the folder
}

TEST(DetectionDescription, NamesWhatIsWrongInAYamlFile) {
  const TemporaryDir dir;
  const fs::path root = dir.path();
  write_small_set(root);
  const auto load = [&](const std::string& text) { return load_detection(write_text(root / "d.yaml", text), "train"); };
  expect_error<IoError>([&] { load("- a\n- b\n"); },
                        {"d.yaml: expected lines such as `train: images/train`", "a list"});
  expect_error<IoError>([&] { load("train: [a\nval"); }, {"d.yaml:", "expected YAML"});
  expect_error<IoError>([&] { load(std::string("train: a\0b", 10)); }, {"zero byte at offset 8"});
  expect_error<IoError>([&] { load("trian: images/train\nnc: 1\n"); }, {"d.yaml: expected the key `train`"});
  expect_error<IoError>([&] { load("train: images/train\n"); }, {"`names`", "`nc`", "neither"});
  expect_error<IoError>([&] { load("train: images/train\nnc: two\n"); }, {"d.yaml:2: nc:", "'two'"});
  expect_error<IoError>([&] { load("train: images/train\nnc: 0\n"); }, {"nc: expected a number of classes from 1"});
  expect_error<IoError>([&] { load("train: images/train\nnc: 3\nnames: [a, b]\n"); },
                        {"d.yaml:2: nc: expected 2, as many as there are names, got 3"});
  expect_error<IoError>([&] { load("train: images/train\nnames: {0: a, 2: c}\n"); },
                        {"names: expected the numbers 0 to 1, got no 1"});
  expect_error<IoError>([&] { load("train: images/train\nnames: {0: a, x: c}\n"); },
                        {"names: expected the number of a class, got 'x'"});
  expect_error<IoError>([&] { load("train: images/train\nnames: {0: a, 0: c}\n"); }, {"got 0 again"});
  expect_error<IoError>([&] { load("train: images/train\nnames: [a, [b]]\n"); },
                        {"names: expected a text, got a list"});
  expect_error<IoError>([&] { load("train: images/train\nnames: ['', b]\n"); },
                        {"d.yaml:2: names: expected a text, got an empty one"});
  expect_error<IoError>([&] { load("train: images/none\nnc: 1\n"); },
                        {"train: expected a folder", "images/none", "not there"});
  expect_error<IoError>([&] { load("train: [[images/train]]\nnc: 1\n"); }, {"train: expected a text, got a list"});
  expect_error<IoError>([&] { load("train: []\nnc: 1\n"); }, {"train: expected paths, got an empty list"});
  expect_error<IoError>([&] { load("path: nowhere\ntrain: a\nnc: 1\ndownload: x\n"); },
                        {"d.yaml:1: path: expected a folder", "nowhere", "`download` names is not fetched"});
  expect_error<IoError>([&] { load("train: labels\nnc: 1\n"); },
                        {"train: expected .jpg, .jpeg or .png pictures, found none"});
  expect_error<IoError>([&] { load("train: images/train\nnc: 1\nannotations: x.json\n"); },
                        {"annotations: expected a map"});
  expect_error<IoError>([&] { load("train: images/train\nnc: 1\nannotations: {train: x.json}\n"); }, {"x.json"});
  fs::remove_all(root / "labels");
  expect_error<IoError>([&] { load("train: images/train\nnc: 1\n"); },
                        {"train: expected labels in", "labels/train/a.txt, which isn't there"});
  // An alias that grows like a power of two stays what it is: references.
  std::string bomb = "a0: &a0 [x, x]\n";
  for (int i = 1; i < 60; ++i) bomb += fmt::format("a{0}: &a{0} [*a{1}, *a{1}]\n", i, i - 1);
  expect_error<IoError>([&] { load(bomb); }, {"expected the key `train`"});
  expect_error<IoError>([&] { load("train: " + std::string(100000, '[')); }, {"d.yaml"});
}

TEST(DetectionDescription, ReadsCocoJson) {
  const TemporaryDir dir;
  const fs::path root = dir.path();
  write_grey(root / "images/train2017/a.png", 100, 50);
  write_grey(root / "images/train2017/b.png", 50, 100);
  write_text(root / "annotations/instances_train2017.json", R"({
    "images": [{"id": 4, "file_name": "b.png", "width": 50, "height": 100},
               {"id": 2, "file_name": "a.png", "width": 200, "height": 100},
               {"id": 1, "file_name": "gone.png", "width": 200, "height": 100},
               {"id": 3, "file_name": "a.png", "width": 10, "height": 100}],
    "annotations": [{"image_id": 2, "category_id": 1, "bbox": [10, 10, 20, 20],
                     "segmentation": [[12, 12, 30, 12, 30, 30]]}],
    "categories": [{"id": 1, "name": "person"}]})");
  const auto expect = [&](const DetectionData& data, double width) {
    EXPECT_EQ(names_of(data, root), (std::vector<std::string>{"images/train2017/b.png", "images/train2017/a.png"}));
    EXPECT_EQ(data.pictures[1].id, 2);
    EXPECT_EQ(data.pictures[1].width, 100);  // the file's own: it is half as large as the labels say
    EXPECT_NEAR(data.pictures[1].objects.at(0).width, width, 1e-12);
    EXPECT_EQ(data.category_ids, (std::vector<std::int64_t>{1}));
    EXPECT_EQ(data.skipped, 2);  // one picture isn't there, one has another shape
  };
  expect(load_detection(root / "annotations/instances_train2017.json", "train"), 0.09);
  expect(load_detection(root / "annotations/instances_train2017.json", "val"), 0.1);
  expect(load_detection(root / "annotations/instances_train2017.json", "train", {.segment_boxes = false}), 0.1);
  const fs::path direct = write_text(root / "a/direct.yaml", "path: ..\ntrain: annotations/instances_train2017.json\n");
  expect(load_detection(direct, "train"), 0.09);
  const fs::path both = write_text(
      root / "both.yaml",
      "train: images/train2017\nannotations: {train: annotations/instances_train2017.json}\nnames: [human]\n");
  expect(load_detection(both, "train"), 0.09);
  const fs::path wrong =
      write_text(root / "wrong.yaml", "train: annotations/instances_train2017.json\nnames: [human, dog]\n");
  expect_error<IoError>([&] { load_detection(wrong, "train"); }, {"expected 2 categories", "got 1"});
  fs::remove_all(root / "images");
  expect_error<IoError>(
      [&] { load_detection(direct, "train"); },
      {"instances_train2017.json: expected its pictures (b.png first) in one of:", "found them nowhere"});
}

TEST(DetectionDescription, FindsTheFolderOfCocoByAnyPicture) {
  const TemporaryDir dir;
  write_grey(dir.path() / "images/train/z.png", 8, 8);
  fs::create_directories(dir.path() / "train");  // tried first
  std::string images;
  for (int i = 0; i < 9; ++i) {
    images += fmt::format(R"({{"id": {0}, "file_name": "{0}.png", "width": 8, "height": 8}}, )", i);
  }
  images += R"({"id": 9, "file_name": "z.png", "width": 8, "height": 8})";
  const fs::path file = write_text(
      dir.path() / "annotations/instances_train.json",
      fmt::format(R"({{"images": [{}], "annotations": [], "categories": [{{"id": 1, "name": "a"}}]}})", images));
  const DetectionData data = load_detection(file, "train");
  EXPECT_EQ(names_of(data, dir.path()), (std::vector<std::string>{"images/train/z.png"}));
  EXPECT_EQ(data.skipped, 9);
}

TEST(DetectionDescription, ReadsAFolderOfVoc) {
  const TemporaryDir dir;
  const fs::path root = dir.path();
  const auto annotate = [&](const std::string& name, const std::string& label) {
    write_text(root / "Annotations" / (name + ".xml"),
               fmt::format("<annotation><size><width>0</width><height>0</height></size><object><name>{}</name><bndbox>"
                           "<xmin>10</xmin><ymin>0</ymin><xmax>20</xmax><ymax>10</ymax></bndbox></object></annotation>",
                           label));
  };
  for (const char* name : {"1", "2", "3"}) write_grey(root / "JPEGImages" / fmt::format("{}.png", name), 40, 20);
  annotate("1", "dog");
  annotate("2", "cat");
  annotate("4", "ant");
  write_text(root / "Annotations/3.xml", "<annotation>");
  write_text(root / "ImageSets/Main/train.txt", "2 1\n1.png -1\n3\n4\n5\n");
  write_text(root / "val.txt", "1\n");
  const DetectionData train = load_detection(root, "train");
  EXPECT_EQ(train.classes, (std::vector<std::string>{"ant", "cat", "dog"}));
  EXPECT_EQ(names_of(train, root), (std::vector<std::string>{"JPEGImages/2.png", "JPEGImages/1.png"}));
  EXPECT_EQ(train.pictures[0].objects.at(0),
            (LabeledObject{.label = 1, .x = 0.375, .y = 0.25, .width = 0.25, .height = 0.5}));
  EXPECT_EQ(train.skipped, 3);
  EXPECT_EQ(load_detection(root, "val").classes, train.classes);
  expect_error<IoError>([&] { load_detection(root, "test"); }, {"expected test.txt (or ImageSets/Main/test.txt)"});
  write_text(root / "classes.txt", "dog\ncat\n");
  EXPECT_EQ(load_detection(root, "val").classes, (std::vector<std::string>{"dog", "cat"}));
  EXPECT_EQ(load_detection(root, "val").pictures[0].objects.at(0).label, 0);
}

TEST(DetectionDescription, ReadsAFolderWithClasses) {
  const TemporaryDir dir;
  write_small_set(dir.path());
  expect_error<IoError>([&] { load_detection(dir.path(), "train"); }, {"no classes.txt"});
  write_text(dir.path() / "classes.txt", "a\nb\n");
  EXPECT_EQ(load_detection(dir.path(), "train").pictures.size(), 3U);
  std::string many;
  for (int i = 0; i < 65537; ++i) many += "a\n";
  write_text(dir.path() / "classes.txt", many);
  expect_error<IoError>([&] { load_detection(dir.path(), "train"); },
                        {"classes.txt: expected at most 65536 names of classes, got 65537"});
  expect_error<IoError>([&] { load_detection(dir.path(), "other"); }, {"no images/other"});
  expect_error<Error>([&] { load_detection(dir.path(), "../train"); }, {"expected a part such as train"});
  expect_error<IoError>([&] { load_detection(dir.path() / "none.yaml", "train"); }, {"none.yaml", "isn't there"});
}

TEST(DetectionDescription, SkipsPicturesThatAreNone) {
  const TemporaryDir dir;
  const fs::path root = dir.path();
  write_small_set(root);
  write_text(root / "classes.txt", "a\nb\n");
  write_text(root / "images/train/a.png", "not a picture at all");
  const DetectionData data = load_detection(root, "train");
  EXPECT_EQ(data.pictures.size(), 2U);
  EXPECT_EQ(data.skipped, 2);
  EXPECT_NE(data.problems.at(0).find("a.png: expected a JPEG or PNG picture"), std::string::npos) << data.problems[0];
  EXPECT_EQ(load_detection(root, "train", {.check_pictures = false}).pictures.size(), 3U);
  for (const char* name : {"b.png", "sub/c.png"}) write_text(root / "images/train" / name, "");
  expect_error<IoError>([&] { load_detection(root, "train"); }, {"none that can be used", "a.png"});
}

// The counts that the sets' own description gives, less the two boxes without a size.
TEST(DetectionDescription, ReadsRealData) {
  const auto folder = test::data_dir();
  if (!folder || !fs::exists(*folder / "detection")) GTEST_SKIP() << "no real data";
  const DetectionData train = load_detection(*folder / "detection/bccd", "train");
  EXPECT_EQ(train.pictures.size(), 205U);
  EXPECT_EQ(train.skipped, 1);
  EXPECT_NE(train.problems.at(0).find("BloodImage_00343.xml:"), std::string::npos);
  EXPECT_EQ(counts_of(train), (std::map<std::string, std::int64_t>{{"Platelets", 209}, {"RBC", 2381}, {"WBC", 214}}));
  const DetectionData val = load_detection(*folder / "detection/bccd", "val");
  EXPECT_EQ(val.pictures.size(), 87U);
  EXPECT_EQ(val.skipped, 1);
  EXPECT_NE(val.problems.at(0).find("BloodImage_00338.xml:"), std::string::npos);
  EXPECT_EQ(counts_of(val), (std::map<std::string, std::int64_t>{{"Platelets", 83}, {"RBC", 967}, {"WBC", 87}}));

  std::int64_t boxes = 0, background = 0;
  const DetectionData mini = load_detection(*folder / "detection/coco-mini", "train");
  for (const LabeledPicture& picture : mini.pictures) {
    boxes += std::ssize(picture.objects);
    background += picture.objects.empty() ? 1 : 0;
  }
  EXPECT_EQ(mini.classes.size(), 80U);
  EXPECT_EQ(mini.pictures.size(), 26U);
  EXPECT_EQ(boxes, 181);
  EXPECT_EQ(background, 1);
  EXPECT_EQ(mini.skipped, 0);
  boxes = 0;
  const DetectionData mini_val = load_detection(*folder / "detection/coco-mini", "val");
  for (const LabeledPicture& picture : mini_val.pictures) boxes += std::ssize(picture.objects);
  EXPECT_EQ(mini_val.pictures.size(), 16U);
  EXPECT_EQ(boxes, 109);
}

}  // namespace
}  // namespace halfstep::data
