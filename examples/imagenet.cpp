// SPDX-License-Identifier: Apache-2.0
// PyTorch's ImageNet script as a program: its flags, its loop, its lines. A folder with train/ and val/ holds the
// images, for example:
//
//     imagenet --arch resnet50 --epochs 90 --workers 10 --device cuda --amp f16 DATA
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "halfstep/halfstep.h"

using namespace halfstep;
namespace fs = std::filesystem;

struct Flags {
  fs::path data = {};
  std::string arch = "resnet18";
  int workers = 4, epochs = 90, start_epoch = 0, batch_size = 256, print_freq = 10, image_size = 224;
  double lr = 0.1, momentum = 0.9, weight_decay = 1e-4;
  fs::path resume = {}, pretrained = {}, out = ".";
  std::uint64_t seed = 0;
  bool evaluate = false, dummy = false;
  std::string device = "cpu", amp = "off";
};

[[noreturn]] void usage(const std::string& problem) {
  std::cerr << "imagenet: " << problem << "\nusage: imagenet [flags] DATA\n"
            << "  -a, --arch NAME  -j, --workers N  --epochs N  --start-epoch N  -b, --batch-size N\n"
            << "  --lr, --learning-rate X  --momentum X  --wd, --weight-decay X  -p, --print-freq N\n"
            << "  --resume FILE  -e, --evaluate  --pretrained FILE  --seed N  --gpu N  --dummy\n"
            << "  --device NAME  --amp off|f16|bf16  --image-size N  --out FOLDER\n";
  std::exit(2);
}

// Flags may be abbreviated as long as they are unambiguous, as Python's argparse has it: --epoch is --epochs.
Flags parse(int argc, char** argv) {
  Flags f;
  using Setter = std::function<void(const std::string& value)>;
  const auto whole = [](int& to) { return [&to](const std::string& v) { to = std::stoi(v); }; };
  const auto real = [](double& to) { return [&to](const std::string& v) { to = std::stod(v); }; };
  const auto text = [](auto& to) { return [&to](const std::string& v) { to = v; }; };
  const auto refuse = [](const std::string&) { usage("one process trains on one device so far"); };
  std::map<std::string, Setter> with_value = {{"--arch", text(f.arch)},
                                              {"--workers", whole(f.workers)},
                                              {"--epochs", whole(f.epochs)},
                                              {"--start-epoch", whole(f.start_epoch)},
                                              {"--batch-size", whole(f.batch_size)},
                                              {"--lr", real(f.lr)},
                                              {"--learning-rate", real(f.lr)},
                                              {"--momentum", real(f.momentum)},
                                              {"--wd", real(f.weight_decay)},
                                              {"--weight-decay", real(f.weight_decay)},
                                              {"--print-freq", whole(f.print_freq)},
                                              {"--resume", text(f.resume)},
                                              {"--pretrained", text(f.pretrained)},
                                              {"--seed", [&](const std::string& v) { f.seed = std::stoull(v); }},
                                              {"--gpu", [&](const std::string& v) { f.device = "cuda:" + v; }},
                                              {"--device", text(f.device)},
                                              {"--amp", text(f.amp)},
                                              {"--image-size", whole(f.image_size)},
                                              {"--out", text(f.out)},
                                              {"--world-size", refuse},
                                              {"--rank", refuse},
                                              {"--dist-url", refuse},
                                              {"--dist-backend", refuse}};
  const std::map<std::string, std::function<void()>> alone = {{"--evaluate", [&] { f.evaluate = true; }},
                                                              {"--dummy", [&] { f.dummy = true; }},
                                                              {"--multiprocessing-distributed", [&] { refuse(""); }},
                                                              {"--quick", [&] {  // for the tests: some seconds
                                                                 f.dummy = true, f.epochs = 2, f.batch_size = 8,
                                                                 f.image_size = 32, f.print_freq = 2, f.workers = 1;
                                                                 f.amp = "f16", f.lr = 0.01, f.out = "imagenet-quick";
                                                               }}};
  const std::map<std::string, std::string> letters = {
      {"-a", "--arch"}, {"-j", "--workers"}, {"-b", "--batch-size"}, {"-p", "--print-freq"}, {"-e", "--evaluate"}};
  for (int i = 1; i < argc; ++i) {
    std::string flag = argv[i];
    if (!flag.starts_with('-')) {
      f.data = flag;
      continue;
    }
    if (letters.contains(flag)) flag = letters.at(flag);
    std::vector<std::string> fits;
    for (const auto& [name, set] : with_value) {
      if (name == flag || name.starts_with(flag)) fits.push_back(name);
    }
    for (const auto& [name, set] : alone) {
      if (name == flag || name.starts_with(flag)) fits.push_back(name);
    }
    if (with_value.contains(flag) || alone.contains(flag)) fits = {flag};
    if (fits.size() != 1) usage((fits.empty() ? "unknown flag " : "ambiguous flag ") + flag);
    if (alone.contains(fits[0])) {
      alone.at(fits[0])();
    } else if (i + 1 == argc) {
      usage("expected a value after " + flag);
    } else {
      try {
        with_value.at(fits[0])(argv[++i]);
      } catch (const std::logic_error&) {
        usage("expected a number after " + flag + ", got " + argv[i]);
      }
    }
  }
  if (f.data.empty() && !f.dummy) usage("expected the folder of the images");
  return f;
}

// Images that need no files: noise whose mean tells the class.
struct DummyImages final : data::Dataset {
  std::int64_t images, classes, side;
  DummyImages(std::int64_t n, std::int64_t c, std::int64_t s) : images(n), classes(c), side(s) {}
  std::int64_t size() const override { return images; }
  data::Batch batch(const data::BatchRequest& request) const override {
    std::vector<Tensor> pictures;
    std::vector<std::int64_t> labels;
    for (const std::int64_t i : request.indices) {
      Generator random(static_cast<std::uint64_t>(i));
      labels.push_back(i % classes);
      const double mean = 2.0 * static_cast<double>(labels.back()) / static_cast<double>(classes) - 1;
      pictures.push_back(randn({3, side, side}, {}, &random) * 0.2 + mean);
    }
    return {stack(pictures), tensor(labels, {static_cast<std::int64_t>(labels.size())}), {}};
  }
};

struct Meter {
  double last = 0, sum = 0, count = 0;
  void add(double value, double n) { last = value, sum += value * n, count += n; }
  double mean() const { return count > 0 ? sum / count : 0; }
};

// Loss and hits of each batch stay on the device until a line is printed: reading them would make it wait.
class Progress {
 public:
  Progress(std::string prefix, std::int64_t batches) : prefix_(std::move(prefix)), batches_(batches) {}

  void batch_is_here() { data_.add(since(last_), 1); }
  void add(const Tensor& loss, const Tensor& output, const Tensor& target) {
    const NoGrad no_grad;
    const training::TopHits hits = training::count_top_hits(output.detach(), target);
    pending_.push_back(stack({loss.detach().to(f32), hits.top1, hits.top5}));
    sizes_.push_back(static_cast<double>(target.size(0)));
    time_.add(since(last_), 1);
    last_ = Clock::now();
  }
  void read() {
    if (pending_.empty()) return;
    const std::vector<float> values = stack(pending_).to_vector<float>();
    for (std::size_t i = 0; i < pending_.size(); ++i) {
      const double n = sizes_[i];
      loss_.add(values[3 * i], n);
      top1_.add(100 * values[3 * i + 1] / n, n);
      top5_.add(100 * values[3 * i + 2] / n, n);
    }
    pending_.clear();
    sizes_.clear();
  }
  void print(std::int64_t batch) {
    read();
    std::printf(
        "%s[%4d/%4d]\tTime %6.3f (%6.3f)\tData %6.3f (%6.3f)\tLoss %.4e (%.4e)\t"
        "Acc@1 %6.2f (%6.2f)\tAcc@5 %6.2f (%6.2f)\n",
        prefix_.c_str(), static_cast<int>(batch), static_cast<int>(batches_), time_.last, time_.mean(), data_.last,
        data_.mean(), loss_.last, loss_.mean(), top1_.last, top1_.mean(), top5_.last, top5_.mean());
    std::fflush(stdout);
  }
  const Meter& top1() const { return top1_; }
  const Meter& top5() const { return top5_; }
  const Meter& loss() const { return loss_; }

 private:
  using Clock = std::chrono::steady_clock;
  static double since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

  std::string prefix_;
  std::int64_t batches_;
  Clock::time_point last_ = Clock::now();
  Meter time_, data_, loss_, top1_, top5_;
  std::vector<Tensor> pending_;
  std::vector<double> sizes_;
};

amp::AutocastOptions region(const Flags& f) {
  return {.dtype = f.amp == "bf16" ? bf16 : f16, .enabled = f.amp != "off"};
}

double train(const Flags& f, int epoch, data::DataLoader& loader, const models::Model& net, optim::SGD& optimizer,
             amp::GradScaler& scaler) {
  net.module->train();
  Progress progress("Epoch: [" + std::to_string(epoch) + "]", loader.size());
  std::int64_t batch = 0;
  for (auto [images, target] : loader) {
    progress.batch_is_here();
    optimizer.zero_grad();
    Tensor output, loss;
    {
      const amp::Autocast autocast{region(f)};
      output = net.forward(images);
      loss = cross_entropy(output, target);
    }
    scaler.scale(loss).backward();
    scaler.step(optimizer);
    scaler.update();
    progress.add(loss, output, target);
    ++batch;
    if (f.print_freq > 0 && batch % f.print_freq == 0) progress.print(batch);
  }
  progress.read();
  return progress.loss().mean();
}

double validate(const Flags& f, data::DataLoader& loader, const models::Model& net) {
  net.module->eval();
  const NoGrad no_grad;
  Progress progress("Test: ", loader.size());
  std::int64_t batch = 0;
  for (auto [images, target] : loader) {
    progress.batch_is_here();
    const amp::Autocast autocast{region(f)};
    const Tensor output = net.forward(images);
    progress.add(cross_entropy(output, target), output, target);
    ++batch;
    if (f.print_freq > 0 && batch % f.print_freq == 0) progress.print(batch);
  }
  progress.read();
  std::printf(" * Acc@1 %.3f Acc@5 %.3f\n", progress.top1().mean(), progress.top5().mean());
  return progress.top1().mean();
}

int run(const Flags& f) {
  if (f.amp != "off" && f.amp != "f16" && f.amp != "bf16") usage("--amp: expected off, f16 or bf16, got " + f.amp);
  manual_seed(f.seed);
  const Device device(f.device);

  std::shared_ptr<const data::Dataset> training, validation;
  std::int64_t classes = 4;
  if (f.dummy) {
    training = std::make_shared<DummyImages>(4 * f.batch_size, classes, f.image_size);
    validation = std::make_shared<DummyImages>(f.batch_size, classes, f.image_size);
  } else {
    const auto source = data::open_images(f.data, data::Split::kTrain);
    classes = static_cast<std::int64_t>(source->classes().size());
    const std::int64_t resize = f.image_size * 256 / 224;
    training = std::make_shared<data::ImageDataset>(source, data::TrainTransform{.size = f.image_size});
    validation = std::make_shared<data::ImageDataset>(data::open_images(f.data, data::Split::kTest),
                                                      data::EvalTransform{.size = f.image_size, .resize = resize});
  }
  data::LoaderOptions options{
      .batch_size = f.batch_size, .shuffle = true, .workers = f.workers, .seed = f.seed, .device = device};
  data::DataLoader train_loader{training, options};
  options.shuffle = false;
  data::DataLoader val_loader{validation, options};

  const models::Model net = models::make_model(f.arch, {.classes = classes});
  if (!f.pretrained.empty()) io::load_pretrained(*net.module, io::load_weights_file(f.pretrained).tensors);
  net.module->to(device);
  optim::SGD optimizer{net.module->parameters(), {.lr = f.lr, .momentum = f.momentum, .weight_decay = f.weight_decay}};
  optim::StepLR schedule{optimizer, {.step_size = 30}};
  amp::GradScaler scaler{{.enabled = f.amp == "f16"}};

  int start = f.start_epoch;
  double best = 0;
  if (!f.resume.empty()) {
    const training::Checkpoint saved = training::load_checkpoint(f.resume);
    net.module->load_state_dict(saved.weights);
    optimizer.load_state_dict(saved.optimizer);
    if (!saved.scaler.empty() && f.amp == "f16") scaler.load_state_dict(saved.scaler);
    default_generator().set_state(saved.random);
    train_loader.seek(saved.loader);
    start = static_cast<int>(saved.loader.epoch);
    best = saved.best.value_or(0);
    std::cout << "=> loaded checkpoint '" << shown_path(f.resume) << "' (epoch " << start << ")\n";
  } else {
    train_loader.seek({.epoch = start, .batch = 0});
  }
  for (int i = 0; i < start; ++i) schedule.step();
  if (f.evaluate) return validate(f, val_loader, net), 0;

  fs::create_directories(f.out);
  double loss = 0;
  for (int epoch = start; epoch < f.epochs; ++epoch) {
    loss = train(f, epoch, train_loader, net, optimizer, scaler);
    const double top1 = validate(f, val_loader, net);
    schedule.step();
    const bool is_best = top1 > best;
    best = std::max(best, top1);
    const training::Checkpoint checkpoint{.model = f.arch,
                                          .weights = net.module->state_dict(),
                                          .optimizer_kind = optimizer.kind(),
                                          .optimizer = optimizer.state_dict(),
                                          .scaler = scaler.state_dict(),
                                          .loader = train_loader.state(),
                                          .loader_seed = f.seed,
                                          .batch_size = f.batch_size,
                                          .samples = training->size(),
                                          .random = default_generator().state(),
                                          .step = (epoch + 1) * train_loader.size(),
                                          .best = best,
                                          .best_by = "top1",
                                          .amp = f.amp};
    training::save_checkpoint(f.out / "checkpoint.safetensors", checkpoint);
    if (is_best) training::save_checkpoint(f.out / "model_best.safetensors", checkpoint);
  }
  return std::isfinite(loss) ? 0 : 1;
}

int main(int argc, char** argv) try { return run(parse(argc, argv)); } catch (const std::exception& e) {
  std::cerr << "imagenet: " << e.what() << '\n';
  return 1;
}
