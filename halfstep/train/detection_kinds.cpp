// SPDX-License-Identifier: Apache-2.0
// The library's detectors, their data and their task by name.
#include <zlib.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <utility>

#include "halfstep/core/fail.h"
#include "halfstep/core/random.h"
#include "halfstep/core/text.h"
#include "halfstep/data/detection_dataset.h"
#include "halfstep/data/detection_description.h"
#include "halfstep/models/yolov5_description.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/random.h"
#include "halfstep/runtime/log.h"
#include "halfstep/train/built_in_internal.h"
#include "halfstep/train/detection.h"
#include "halfstep/train/flags.h"

namespace halfstep::training {
namespace {

constexpr const char* kBoxes = "boxes";
constexpr std::int64_t kCocoClasses = 80, kImageSize = 640, kStride = 32;

std::string description_name(const TrainConfig& c) {
  const NetworkDescription& d = c.description;
  if (!d.file.empty()) return "--cfg " + shown_path(d.file);
  return d.text.empty() ? std::string() : "--cfg describes";
}

models::Yolov5Options options_of(const TrainConfig& c, const RunData& data) {
  models::Yolov5Options options;
  if (!c.description.empty()) options = described_network(c.description);
  if (data.num_classes > 0) options.classes = data.num_classes;
  return options;
}

// Of the coarsest level: sides of pictures are multiples of it.
std::int64_t stride_of(const TrainConfig& c) {
  if (c.description.empty()) return kStride;
  const PhiloxState random = default_generator().state();  // weights that nobody keeps
  const models::Yolov5 network(options_of(c, {}));
  default_generator().set_state(random);
  return *std::max_element(network.strides().begin(), network.strides().end());
}

void check_boxes(const TrainConfig& config) {
  TrainConfig c = config;
  std::vector<Flag> rows = flags(c);
  std::erase_if(rows, [](const Flag& flag) { return flag.data.empty() || !flag.of_data(kBoxes); });
  check(rows);
  if (c.data.empty()) {
    fail<Error>(
        "--data: expected the description of a data set for detection, such as coco.yaml, or a folder, got "
        "none");
  }
  if (const std::int64_t stride = stride_of(c); c.images.image_size % stride != 0) {
    fail<Error>("--image-size: expected a multiple of {}, got {}; {} is the next", stride, c.images.image_size,
                (c.images.image_size / stride + 1) * stride);
  }
  // The flag's own limit is that of small inputs.
  const double most = data::largest_perspective(c.images.image_size);
  if (const double perspective = c.detection.perspective; perspective > most) {
    fail<Error>("--perspective: expected 0 to {:.3g} with an --image-size of {}, got {}", most, c.images.image_size,
                perspective);
  }
}

data::DetectionTransform training_transform(const TrainConfig& c) {
  const DetectionConfig& d = c.detection;
  return {.size = c.images.image_size,
          .stride = stride_of(c),
          .mosaic = d.mosaic,
          .mixup = d.mixup,
          .copy_paste = d.copy_paste,
          .degrees = d.degrees,
          .translate = d.translate,
          .scale = d.scale,
          .shear = d.shear,
          .perspective = d.perspective,
          .flip_up_down = d.flip_ud,
          .flip_left_right = d.flip_lr,
          .hue = d.hsv_h,
          .saturation = d.hsv_s,
          .value = d.hsv_v,
          .multi_scale = d.multi_scale};
}

// Of what the labels say, wherever the pictures lie.
std::string checksum(const data::DetectionData& all) {
  std::string text = fmt::format("{}\n", fmt::join(all.classes, "\n"));
  for (const data::LabeledPicture& picture : all.pictures) {
    text += picture.file.filename().string();
    for (const data::LabeledObject& o : picture.objects) {
      text += fmt::format(" {} {} {} {} {}", o.label, o.x, o.y, o.width, o.height);
    }
    text += "\n";
  }
  return fmt::format("{:08x}",
                     crc32_z(crc32_z(0, nullptr, 0), reinterpret_cast<const Bytef*>(text.data()), text.size()));
}

// Where programs keep what they can make again.
std::filesystem::path cache_folder() {
  const auto given = [](const char* name) {
    const char* value = std::getenv(name);
    return std::filesystem::path(value ? value : "");
  };
  std::filesystem::path folder = given("XDG_CACHE_HOME");
  if (!folder.is_absolute()) folder = given("HOME") / ".cache";
  if (!folder.is_absolute()) fail<Error>("--cache disk: expected a folder in XDG_CACHE_HOME or HOME, got none");
  return folder / "halfstep" / "pictures";
}

struct Part {
  std::shared_ptr<const data::DetectionDataset> dataset;
  std::string checksum;
};

Part load_part(const TrainConfig& c, const std::string& split) {
  const DetectionConfig& d = c.detection;
  const bool train = split == "train";
  data::DetectionLoadOptions options;
  if (!d.polygon_boxes) options.segment_boxes = false;
  options.keep_segments = train && d.copy_paste > 0;
  data::DetectionData all = data::load_detection(c.data, split, options);
  if (train && c.limit > 0 && c.limit < static_cast<std::int64_t>(all.pictures.size())) {
    all.pictures.resize(static_cast<std::size_t>(c.limit));
  }
  if (all.skipped > 0 && c.group.rank() == 0) {
    log(LogLevel::warning,
        fmt::format("{}, part {}: {} label{} or picture{} left out; the first: {}", shown_path(c.data), split,
                    all.skipped, all.skipped == 1 ? "" : "s", all.skipped == 1 ? "" : "s",
                    all.problems.empty() ? std::string("not known") : all.problems[0]));
  }
  Part part{.dataset = nullptr, .checksum = checksum(all)};
  data::DetectionTransform transform = training_transform(c);
  if (!train)
    transform = {.train = false, .size = c.images.image_size, .stride = transform.stride, .rectangular = d.rect};
  data::DetectionDatasetOptions own{.batch_size = std::max<std::int64_t>(c.eval_batch_size / c.group.size(), 1),
                                    .cache = d.cache == "ram"    ? data::PictureCache::memory
                                             : d.cache == "disk" ? data::PictureCache::disk
                                                                 : data::PictureCache::none,
                                    .max_damaged = c.images.max_damaged};
  if (own.cache == data::PictureCache::disk) own.cache_folder = cache_folder();
  part.dataset = std::make_shared<data::DetectionDataset>(std::move(all), transform, own);
  return part;
}

RunData load_boxes(const TrainConfig& c, bool training) {
  RunData result;
  const auto damaged = [&](const std::shared_ptr<const data::DetectionDataset>& set) {
    result.damaged.push_back([set] { return static_cast<std::int64_t>(set->bad_pictures().size()); });
  };
  if (training) {
    const Part part = load_part(c, "train");
    result.training = part.dataset;
    result.checksums["train"] = part.checksum;
    damaged(part.dataset);
  }
  const Part part = load_part(c, "val");
  result.test = part.dataset;
  result.checksums["test"] = part.checksum;
  damaged(part.dataset);
  result.classes = part.dataset->data().classes;
  if (training) {
    const auto* trained = dynamic_cast<const data::DetectionDataset*>(result.training.get());
    const auto &a = trained->data().classes, &b = result.classes;
    if (a != b) {
      const auto [x, y] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
      fail<IoError>(
          "{}: expected the same classes in the parts train and val, got {} and {}; the first that differs: {} and {}",
          shown_path(c.data), a.size(), b.size(), x == a.end() ? "none" : printable_start(*x),
          y == b.end() ? "none" : printable_start(*y));
    }
  }
  result.num_classes = static_cast<std::int64_t>(result.classes.size());
  return result;
}

// The published recipe of small networks on COCO: 300 epochs with gradients of sums over 64 pictures.
void usual_boxes(TrainConfig& c) {
  constexpr std::int64_t kNominal = 64;
  if (c.batch_size == 0) c.batch_size = 16;
  c.eval_batch_size = 2 * c.batch_size;
  c.prefetch = 2;
  c.epochs = 300;
  c.lr = 0.01;
  c.lr_schedule = "linear:0.01";
  c.momentum = 0.937;
  c.nesterov = true;
  c.weight_decay = 5e-4;
  c.norm_decay = false;
  c.warmup_epochs = 3;
  c.warmup_steps = 100;
  c.warmup_momentum = 0.8;
  c.warmup_bias_lr = 0.1;
  c.nominal_batch = kNominal;
  c.accumulate = static_cast<int>(
      std::max<std::int64_t>(std::llround(static_cast<double>(kNominal) / static_cast<double>(c.batch_size)), 1));
  c.clip_norm = 10;
  c.ema = 0.9999;
  c.patience = 100;
}

data::Batch random_boxes(const NetworkKind& network, std::int64_t n, std::int64_t image_size) {
  constexpr std::int64_t kObjects = 8;
  const std::int64_t side = image_size > 0 ? image_size : network.image_size;
  std::vector<double> rows, places;
  for (std::int64_t i = 0; i < n * kObjects; ++i) {
    const Tensor shares = rand({4});
    const std::vector<float> u = shares.to_vector<float>();
    const double w = 0.02 + 0.4 * u[2], h = 0.02 + 0.4 * u[3];
    rows.insert(rows.end(),
                {static_cast<double>(i % network.classes), w / 2 + u[0] * (1 - w), h / 2 + u[1] * (1 - h), w, h});
  }
  const auto pixels = static_cast<double>(side);
  for (std::int64_t i = 0; i < n; ++i) places.insert(places.end(), {static_cast<double>(i), 1, 0, 0, pixels, pixels});
  return {.input = rand({n, 3, side, side}).contiguous(MemoryFormat::channels_last),
          .target = tensor(rows, {n, kObjects, 5}),
          .more = {tensor(places, {n, 6}, {.dtype = f64})}};
}

// Rows of a level's predictions are those of each anchor: a box, objectness and the classes.
std::int64_t classes_in(const NamedTensors& weights) {
  const NamedTensor* anchors = nullptr;
  for (const NamedTensor& t : weights) {
    if (t.name.ends_with(".anchors") && t.tensor.dim() == 3) anchors = &t;
  }
  if (!anchors || anchors->tensor.size(1) < 1) return 0;
  const std::string head = anchors->name.substr(0, anchors->name.size() - std::string("anchors").size());
  for (const NamedTensor& t : weights) {
    if (t.name == head + "m.0.weight" && t.tensor.dim() == 4) return t.tensor.size(0) / anchors->tensor.size(1) - 5;
  }
  return 0;
}

std::vector<std::string> heads_of(const nn::ModuleBase& network) {
  const auto* detector = dynamic_cast<const models::Yolov5*>(&network);
  if (!detector) return {};
  return {fmt::format("model.{}.m.", detector->model.size() - 1)};
}

}  // namespace

models::Yolov5Options described_network(const NetworkDescription& d) {
  if (d.text.empty()) return models::read_yolov5_description(d.file);
  return models::parse_yolov5_description(d.text, d.file.empty() ? std::string("--cfg") : shown_path(d.file));
}

DataKind boxes_kind() {
  return {.name = kBoxes,
          .load = load_boxes,
          .check = check_boxes,
          .usual = usual_boxes,
          .flags = kBoxes,
          .images = true,
          .random = random_boxes};
}

std::vector<NetworkKind> detection_networks() {
  using Make = models::Yolov5 (*)(const models::Yolov5Options&);
  const std::pair<const char*, Make> sizes[] = {{"yolov5n", models::yolov5n},
                                                {"yolov5s", models::yolov5s},
                                                {"yolov5m", models::yolov5m},
                                                {"yolov5l", models::yolov5l},
                                                {"yolov5x", models::yolov5x}};
  std::vector<NetworkKind> kinds;
  for (const auto& [name, make] : sizes) {
    kinds.push_back(
        {.name = name,
         .task = "detection",
         .data = kBoxes,
         .make =
             [make = make](const TrainConfig& c, const RunData& data) {
               const models::Yolov5Options options = options_of(c, data);
               const auto net =
                   std::make_shared<models::Yolov5>(c.description.empty() ? make(options) : models::Yolov5(options));
               return Network{.module = net,
                              .forward = [net](const Tensor& x) { return net->decode((*net)(x)); },
                              .name = {},
                              .outputs = [net](const Tensor& x) { return (*net)(x); }};
             },
         .image_size = kImageSize,
         .classes = kCocoClasses,
         .classes_in = classes_in,
         .heads = heads_of,
         .described_by = description_name,
         .description = [](const NetworkDescription& d) { return models::yolov5_description(described_network(d)); },
         .difference =
             [](const NetworkDescription& a, const NetworkDescription& b) {
               return models::yolov5_difference(described_network(a), described_network(b));
             }});
  }
  return kinds;
}

TaskKind detection_kind() {
  return {.name = "detection", .make = [](const TrainConfig& c, const RunData& data, const Network& network) {
            const DetectionConfig& d = c.detection;
            DetectionTaskOptions options{
                .loss = {.box = d.box_gain,
                         .objectness = d.object_gain,
                         .classes = d.class_gain,
                         .anchor_ratio = d.anchor_ratio,
                         .label_smoothing = c.label_smoothing,
                         .focal_gamma = d.focal_gamma,
                         .class_weight = d.class_weight,
                         .object_weight = d.object_weight},
                .found = {.score = d.score, .overlap = d.overlap, .limit = d.max_detections, .multi_label = true},
                .classes = data.classes,
                .evaluated = std::dynamic_pointer_cast<const data::DetectionDataset>(data.test),
                .training = std::dynamic_pointer_cast<const data::DetectionDataset>(data.training),
                .seed = c.seed,
                .levels = network.outputs};
            return std::make_shared<DetectionTask>(network.as<models::Yolov5>(), std::move(options));
          }};
}

}  // namespace halfstep::training
