// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/detection_labels.h"

#include <cmath>
#include <limits>

#include "halfstep/core/error.h"
#include "tests/data/detection_files.h"

namespace halfstep::data {
namespace {

using test::expect_error;

std::vector<LabeledObject> yolo(const std::string& text, LabelProblems& problems, std::int64_t classes = 3) {
  return parse_yolo_labels(text, "a.txt", classes, problems);
}

/// Expects one problem with this text.
void expect_problem(const LabelProblems& problems, const std::string& text) {
  ASSERT_EQ(problems.skipped, 1) << text;
  EXPECT_NE(problems.first.at(0).find(text), std::string::npos) << problems.first.at(0) << "\nlacks: " << text;
}

TEST(YoloLabels, ReadsBoxesAndPolygons) {
  LabelProblems problems;
  const auto objects = yolo(
      "\xEF\xBB\xBF"
      "0 0.5 0.5 0.25 0.5\r\n\n  2\t0.1 0.2 .1 1e-1  \n1 0.2 0.3 0.6 0.3 0.4 0.7\n",
      problems);
  EXPECT_EQ(problems.skipped, 0);
  ASSERT_EQ(objects.size(), 3U);
  EXPECT_EQ(objects[0], (LabeledObject{.label = 0, .x = 0.5, .y = 0.5, .width = 0.25, .height = 0.5}));
  EXPECT_EQ(objects[1].label, 2);
  EXPECT_NEAR(objects[1].x, 0.1, 1e-15);
  EXPECT_NEAR(objects[1].height, 0.1, 1e-15);
  // The polygon's bounding box: 0.2 to 0.6, 0.3 to 0.7.
  EXPECT_EQ(objects[2].label, 1);
  EXPECT_NEAR(objects[2].x, 0.4, 1e-15);
  EXPECT_NEAR(objects[2].y, 0.5, 1e-15);
  EXPECT_NEAR(objects[2].width, 0.4, 1e-15);
  EXPECT_NEAR(objects[2].height, 0.4, 1e-15);
  EXPECT_EQ(objects[2].segments, (std::vector<std::vector<double>>{{0.2, 0.3, 0.6, 0.3, 0.4, 0.7}}));
  EXPECT_TRUE(yolo("", problems).empty());
  EXPECT_TRUE(yolo("\n \n", problems).empty());
  EXPECT_EQ(problems.skipped, 0);
}

TEST(YoloLabels, SkipsWhatCannotBeAndNamesIt) {
  const auto alone = [](const std::string& line, const std::string& text) {
    LabelProblems problems;
    const auto objects = yolo("0 0.5 0.5 0.5 0.5\n" + line + "\n1 0.5 0.5 0.5 0.5", problems);
    EXPECT_EQ(objects.size(), 2U) << line;
    expect_problem(problems, "a.txt:2: ");
    expect_problem(problems, text);
  };
  alone("3 0.5 0.5 0.5 0.5", "class from 0 to 2, got 3");
  alone("-1 0.5 0.5 0.5 0.5", "class from 0 to 2, got -1");
  alone("nan 0.5 0.5 0.5 0.5", "number of a class, got 'nan'");
  alone("1.5 0.5 0.5 0.5 0.5", "number of a class");
  alone("cat 0.5 0.5 0.5 0.5", "number of a class, got 'cat'");
  alone("1 0.5 0.5 0.5", "4 numbers, or the corners of a polygon, got 3");
  alone("1", "got 0 numbers");
  alone("1 0.5 0.5 0.5 0.5 0.5", "got 5 numbers");
  alone("1 0.1 0.1 0.2 0.2 0.3 0.3 0.4", "got 7 numbers");
  alone("1 0.5 0.5 0.5 x\x1b", "expected numbers behind the class, got 'x\\e'");
  alone("1 0.5 nan 0.5 0.5", "finite");
  alone("1 0.5 0.5 inf 0.5", "finite");
  alone("1 0.5 0.5 0 0.5", "width and a height over 0");
  alone("1 0.5 0.5 0.5 -0.5", "width and a height over 0");
  alone("1 320 240 100 50", "lies in the picture");
  alone("1 1.1 0.5 0.1 0.1", "lies in the picture");
  alone("1 0.1 0.1 0.1 0.5 0.1 0.9", "width and a height over 0");
  alone("1 0.1 0.1 nan 0.5 0.2 0.9", "finite");
  // A number beyond double's range is none, and one with four hundred digits is.
  alone("1 0.5 0.5 1e999 0.5", "expected numbers behind the class");
}

TEST(YoloLabels, ClipsWhatIsALittleOverTheEdge) {
  LabelProblems problems;
  // From 0.85 to 1.05: 3/4 of it are in the picture.
  const auto objects = yolo("0 0.95 0.5 0.2 1.02\n1 -0.1 0.5 0.5 0.5 0.5 0.9", problems);
  ASSERT_EQ(objects.size(), 2U);
  EXPECT_NEAR(objects[0].x, 0.925, 1e-12);
  EXPECT_NEAR(objects[0].width, 0.15, 1e-12);
  EXPECT_NEAR(objects[0].y, 0.5, 1e-12);
  EXPECT_NEAR(objects[0].height, 1, 1e-12);
  EXPECT_NEAR(objects[1].x, 0.25, 1e-12);
  EXPECT_EQ(objects[1].segments[0][0], 0);
  EXPECT_EQ(problems.skipped, 0);
  // 0.4 of a box is too little, 0.6 is enough: the limit is half.
  EXPECT_TRUE(yolo("0 1.02 0.5 0.2 0.5", problems).empty());
  EXPECT_EQ(yolo("0 0.98 0.5 0.2 0.5", problems).size(), 1U);
}

TEST(YoloLabels, DropsEqualLines) {
  LabelProblems problems;
  const auto objects = yolo("0 0.5 0.5 0.5 0.5\n1 0.5 0.5 0.5 0.5\n0 0.5 0.50 0.5 0.5\n", problems);
  EXPECT_EQ(objects.size(), 2U);
  expect_problem(problems, "a.txt: expected different labels, got class 0 at (0.5, 0.5) twice");
}

TEST(YoloLabels, KeepsOnlyTheFirstTexts) {
  LabelProblems problems;
  std::string text;
  for (int i = 0; i < 1000; ++i) text += "x\n";
  EXPECT_TRUE(yolo(text, problems).empty());
  EXPECT_EQ(problems.skipped, 1000);
  EXPECT_EQ(problems.first.size(), LabelProblems::kMost);
}

const char* const kVoc = R"(<?xml version="1.0"?>
<annotation>
  <filename>one.jpg</filename>
  <size><width>200</width><height>100</height><depth>3</depth></size>
  <object><name>cat</name><bndbox><xmin>20</xmin><ymin>10</ymin><xmax>60</xmax><ymax> 50.5 </ymax></bndbox></object>
  <object><name>dog</name><bndbox><xmin>0</xmin><ymin>0</ymin><xmax>200</xmax><ymax>104</ymax></bndbox></object>
  <object><name>cow</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>9</xmax><ymax>9</ymax></bndbox></object>
  <object><name>cat</name><bndbox><xmin>50</xmin><ymin>33</ymin><xmax>50</xmax><ymax>33</ymax></bndbox></object>
  <object><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>9</xmax><ymax>9</ymax></bndbox></object>
  <object><name>cat</name><bndbox><xmin>one</xmin><ymin>1</ymin><xmax>9</xmax><ymax>9</ymax></bndbox></object>
  <object><name>cat</name></object>
</annotation>
)";

TEST(VocLabels, ReadsObjectsAndNamesWhatItSkips) {
  LabelProblems problems;
  const VocAnnotation annotation = parse_voc(kVoc, "one.xml", problems);
  EXPECT_EQ(annotation.file, "one.jpg");
  EXPECT_EQ(annotation.width, 200);
  EXPECT_EQ(annotation.height, 100);
  EXPECT_EQ(annotation.names, (std::vector<std::string>{"cat", "dog", "cow", "cat"}));
  EXPECT_EQ(problems.skipped, 3);
  const std::vector<std::string> classes = {"cat", "dog"};
  const auto objects = voc_objects(annotation, "one.xml", 200, 100, classes, problems);
  ASSERT_EQ(objects.size(), 2U);
  EXPECT_EQ(objects[0].label, 0);
  EXPECT_NEAR(objects[0].x, 0.2, 1e-15);
  EXPECT_NEAR(objects[0].y, 0.3025, 1e-15);
  EXPECT_NEAR(objects[0].width, 0.2, 1e-15);
  EXPECT_NEAR(objects[0].height, 0.405, 1e-15);
  EXPECT_EQ(objects[1], (LabeledObject{.label = 1, .x = 0.5, .y = 0.5, .width = 1, .height = 1}));
  EXPECT_EQ(problems.skipped, 5);
  EXPECT_EQ(problems.first, (std::vector<std::string>{
                                "one.xml:9: expected an object with a name, got none",
                                "one.xml:10: expected a bndbox with numbers xmin, ymin, xmax, ymax",
                                "one.xml:11: expected a bndbox with numbers xmin, ymin, xmax, ymax",
                                "one.xml:7: expected one of the 2 classes, got 'cow'",
                                "one.xml:8: expected a box with a width and a height over 0",
                            }));
}

TEST(VocLabels, RefusesWhatIsNoAnnotation) {
  LabelProblems problems;
  const auto parse = [&](const std::string& text) { return parse_voc(text, "bad\x1b.xml", problems); };
  expect_error<IoError>([&] { parse(""); }, {"bad\\e.xml:1: expected XML"});
  expect_error<IoError>([&] { parse("<annotation>\n<object>\n"); }, {"bad\\e.xml:", "expected XML"});
  expect_error<IoError>([&] { parse("<html></html>"); }, {"the element 'annotation', got 'html'"});
  // An entity of the document's own stays a name: it is neither read from a file nor made large.
  const VocAnnotation annotation =
      parse("<!DOCTYPE a [<!ENTITY x SYSTEM 'file:///etc/passwd'>]><annotation><filename>&x;</filename></annotation>");
  EXPECT_EQ(annotation.file, "&x;");
  EXPECT_EQ(problems.skipped, 0);
  // Depth costs no stack.
  std::string deep = "<annotation>";
  for (int i = 0; i < 200000; ++i) deep += "<a>";
  expect_error<IoError>([&] { parse(deep); }, {"expected XML"});
  EXPECT_THROW((void)voc_objects(annotation, "x", 0, 5, {}, problems), Error);
}

const char* const kCoco = R"({
 "info": {"year": 2017, "nested": {"images": [1, 2]}},
 "annotations": [
  {"id": 1, "image_id": 9, "category_id": 7, "bbox": [10, 20, 30, 40], "area": 600.5, "iscrowd": 0,
   "segmentation": [[12, 20, 40, 20, 40, 60], [11, 30, 12, 31, 12, 32]]},
  {"id": 2, "image_id": 9, "category_id": 3, "bbox": [0, 0, 50, 50], "area": 900, "iscrowd": 1,
   "segmentation": {"counts": [1, 2, 3], "size": [100, 200]}},
  {"id": 3, "image_id": 5, "category_id": 3, "bbox": [95, 10, 10, 10]},
  {"id": 4, "image_id": 77, "category_id": 3, "bbox": [1, 1, 1, 1]},
  {"id": 5, "image_id": 5, "category_id": 4, "bbox": [1, 1, 1, 1]},
  {"id": 6, "image_id": 5, "category_id": 3, "bbox": [1, 1, 0, 1]},
  {"id": 6, "image_id": 5, "category_id": 3, "bbox": [2, 2, 2, 2]},
  {"id": 7, "image_id": 5, "category_id": 3, "bbox": [1, 1, "a", 1]},
  {"id": 8, "image_id": 5, "category_id": 3},
  {"id": 9, "image_id": 5.5, "category_id": 3, "bbox": [1, 1, 1, 1]},
  "text"
 ],
 "images": [{"id": 5, "file_name": "b.jpg", "width": 100, "height": 100},
            {"id": 9, "file_name": "a.jpg", "width": 200, "height": 100},
            {"id": 5, "file_name": "c.jpg", "width": 200, "height": 100},
            {"id": 11, "file_name": "d.jpg", "width": 0, "height": 100},
            {"id": 12, "width": 10, "height": 100}],
 "categories": [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat", "supercategory": "animal"}]
})";

TEST(CocoLabels, ReadsInstancesInAnyOrder) {
  const DetectionData data = parse_coco(kCoco, "c.json");
  EXPECT_EQ(data.classes, (std::vector<std::string>{"cat", "dog"}));
  EXPECT_EQ(data.category_ids, (std::vector<std::int64_t>{3, 7}));
  ASSERT_EQ(data.pictures.size(), 2U);
  EXPECT_EQ(data.pictures[0].id, 5);
  EXPECT_EQ(data.pictures[0].file, "b.jpg");
  ASSERT_EQ(data.pictures[0].objects.size(), 1U);
  // 95 to 105 of 100 pixels: half of it is in the picture.
  EXPECT_NEAR(data.pictures[0].objects[0].x, 0.975, 1e-12);
  EXPECT_NEAR(data.pictures[0].objects[0].width, 0.05, 1e-12);
  EXPECT_EQ(data.pictures[0].objects[0].area, -1);
  const auto& two = data.pictures[1].objects;
  ASSERT_EQ(two.size(), 2U);
  // Polygons from 11 to 40 and 20 to 60, in a picture of 200x100.
  EXPECT_EQ(two[0].label, 1);
  EXPECT_NEAR(two[0].x, 25.5 / 200, 1e-12);
  EXPECT_NEAR(two[0].width, 29.0 / 200, 1e-12);
  EXPECT_NEAR(two[0].y, 0.4, 1e-12);
  EXPECT_NEAR(two[0].height, 0.4, 1e-12);
  EXPECT_EQ(two[0].area, 600.5);
  EXPECT_EQ(two[0].segments.size(), 2U);
  EXPECT_FALSE(two[0].crowd);
  EXPECT_TRUE(two[1].crowd);
  EXPECT_EQ(two[1].label, 0);
  EXPECT_EQ(two[1].width, 0.25);
  EXPECT_TRUE(two[1].segments.empty());
  EXPECT_EQ(data.skipped, 11);
  for (const char* text :
       {"annotations[3]: expected the id of an image that is in the file, got 77",
        "annotations[4]: expected a category", "annotations[5]: expected a box with a width",
        "annotations[6]: expected different ids, got 6 twice", "annotations[7]: expected a 'bbox' of 4 numbers",
        "annotations[8]: expected a 'bbox'", "annotations[9]: expected whole numbers",
        "annotations[10]: expected an object", "images[2]: expected different ids, got 5 twice",
        "images[3]: expected a 'width' and a 'height' over 0",
        "images[4]: expected a whole number 'id' and a text 'file_name'"}) {
    const bool found = std::any_of(data.problems.begin(), data.problems.end(), [&](const std::string& problem) {
      return problem.find("c.json: " + std::string(text)) == 0;
    });
    EXPECT_TRUE(found) << text;
  }
}

TEST(CocoLabels, TakesTheBoxFieldByOption) {
  const DetectionData boxes = parse_coco(kCoco, "c.json", {.segment_boxes = false});
  EXPECT_EQ(boxes.pictures[1].objects[0].x, 0.125);
  EXPECT_NEAR(boxes.pictures[1].objects[0].width, 0.15, 1e-15);
  EXPECT_EQ(boxes.pictures[1].objects[0].segments.size(), 2U);
  const DetectionData bare = parse_coco(kCoco, "c.json", {.keep_segments = false});
  EXPECT_NEAR(bare.pictures[1].objects[0].width, 29.0 / 200, 1e-12);
  EXPECT_TRUE(bare.pictures[1].objects[0].segments.empty());
}

TEST(CocoLabels, RefusesWhatIsNoInstancesFile) {
  const auto parse = [](const std::string& text) { return parse_coco(text, "x.json"); };
  expect_error<IoError>([&] { parse(""); }, {"x.json: expected COCO's JSON"});
  expect_error<IoError>([&] { parse("[1, 2"); }, {"x.json: expected COCO's JSON"});
  expect_error<IoError>([&] { parse("[]"); }, {"x.json: expected a JSON object"});
  expect_error<IoError>([&] { parse("{}"); }, {"got no 'images'"});
  expect_error<IoError>([&] { parse(R"({"images": [], "annotations": {}, "categories": []})"); },
                        {"got no 'annotations'"});
  expect_error<IoError>([&] { parse(R"({"images": [], "annotations": [], "categories": []})"); },
                        {"expected categories, got none"});
  expect_error<IoError>([&] { parse(R"({"images": [], "annotations": [], "categories": [{"id": 1}]})"); },
                        {"categories[0]: expected a whole number 'id' and a text 'name'"});
  expect_error<IoError>(
      [&] { parse(R"({"images":[],"annotations":[],"categories":[{"id":1,"name":"a"},{"id":1,"name":"b"}]})"); },
      {"categories[1]: expected different ids, got 1 twice"});
  const auto of_categories = [&](int count) {
    std::string text = R"({"images":[],"annotations":[],"categories":[)";
    for (int i = 0; i < count; ++i) text += fmt::format(R"({}{{"id":{},"name":"a"}})", i == 0 ? "" : ",", i);
    return text + "]}";
  };
  EXPECT_EQ(parse(of_categories(65536)).classes.size(), 65536U);
  expect_error<IoError>([&] { parse(of_categories(65537)); }, {"x.json: expected at most 65536 categories, got more"});
  std::string deep;
  for (int i = 0; i < 200000; ++i) deep += R"({"a":[)";
  expect_error<IoError>([&] { parse(deep); }, {"expected COCO's JSON"});
}

}  // namespace
}  // namespace halfstep::data
