// SPDX-License-Identifier: Apache-2.0
// The files in tests/goldens/pth were written by PyTorch (tests/goldens/make_pth.py).
#include "halfstep/io/pth.h"

#include <gtest/gtest.h>
#include <zlib.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "halfstep/io/pth_internal.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/view.h"
#include "tests/support/errors.h"
#include "tests/support/test_data.h"

namespace halfstep {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

fs::path golden(const std::string& name) { return test::goldens_dir() / "pth" / name; }

std::string contents(const fs::path& path) { return io::read_file(path, 1 << 20); }

io::PthFile parse(const std::string& bytes) {
  return io::parse_pth({reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size()}, "x.pth");
}

std::string error_of(const std::string& bytes) {
  return test::error_of<IoError>([&] { parse(bytes); });
}

Tensor get(const NamedTensors& tensors, const std::string& name) {
  for (const NamedTensor& t : tensors) {
    if (t.name == name) return t.tensor;
  }
  ADD_FAILURE() << "no tensor " << name;
  return zeros({1});
}

std::vector<double> counted(int n, double start = 0) {
  std::vector<double> values;
  for (int i = 0; i < n; ++i) values.push_back(start + i);
  return values;
}

TEST(Pth, ReadsEveryDtype) {
  const auto file = io::load_pth(golden("dtypes.pth"));
  ASSERT_EQ(file.tensors.size(), static_cast<std::size_t>(kNumDTypes) + 1);
  EXPECT_EQ(file.tensors[0].name, "f32");
  for (int d = 0; d < kNumDTypes; ++d) {
    const auto dtype = static_cast<DType>(d);
    const Tensor t = get(file.tensors, dtype == boolean ? "bool" : std::string(name(dtype)));
    EXPECT_EQ(t.dtype(), dtype);
    EXPECT_EQ(t.to_vector<double>(), (std::vector<double>{0, 1, 1, 0, 1})) << name(dtype);
  }
  EXPECT_EQ(get(file.tensors, "halves").to_vector<double>(),
            (std::vector<double>{0.5, -1.5, 65504, 0x1p-24, std::numeric_limits<double>::infinity()}));
}

void expect_layouts(const io::PthFile& file) {
  const auto& t = file.tensors;
  EXPECT_EQ(get(t, "transposed").sizes(), (Shape{3, 2}));
  EXPECT_EQ(get(t, "transposed").strides(), (Shape{1, 3}));
  EXPECT_EQ(get(t, "transposed").to_vector<double>(), (std::vector<double>{0, 3, 1, 4, 2, 5}));
  EXPECT_EQ(get(t, "slice").to_vector<double>(), (std::vector<double>{8, 10, 14, 16}));
  EXPECT_EQ(get(t, "slice").storage_offset(), 8);
  EXPECT_EQ(get(t, "slice").storage(), get(t, "whole").storage());
  EXPECT_EQ(get(t, "whole").to_vector<double>(), counted(24));
  const Tensor tied = get(t, "embedding.weight"), other = get(t, "decoder.weight");
  EXPECT_EQ(tied.storage(), other.storage());
  EXPECT_NE(tied.storage(), get(t, "whole").storage());
  tied.detach().fill_(1);
  EXPECT_EQ(other.to_vector<double>(), std::vector<double>(6, 1));
  EXPECT_TRUE(get(t, "image").is_contiguous(MemoryFormat::channels_last));
  EXPECT_EQ(get(t, "image").to_vector<double>(), counted(12));
  EXPECT_EQ(get(t, "scalar").sizes(), Shape{});
  EXPECT_EQ(get(t, "scalar").item<double>(), 2.5);
  EXPECT_EQ(get(t, "empty").sizes(), (Shape{0, 4}));
  EXPECT_EQ(get(t, "expanded").to_vector<double>(), (std::vector<double>{7, 7, 7}));
  EXPECT_EQ(get(t, "parameter").to_vector<double>(), counted(2));
  EXPECT_FALSE(get(t, "parameter").requires_grad());
  EXPECT_EQ(get(t, "buffer").to_vector<double>(), counted(3));
}

TEST(Pth, KeepsLayoutsAndSharedMemory) {
  const auto file = io::load_pth(golden("layouts.pth"));
  EXPECT_EQ(file.tensors.size(), 11u);
  expect_layouts(file);
}

TEST(Pth, ReadsTheLegacyForm) {
  const auto file = io::load_pth(golden("legacy.pth"));
  EXPECT_EQ(file.tensors.size(), 12u);
  expect_layouts(file);
  EXPECT_EQ(get(file.tensors, "f8").dtype(), f8e5m2);
  EXPECT_EQ(get(file.tensors, "f8").to_vector<double>(), (std::vector<double>{1, 1, 1}));
}

TEST(Pth, ReadsAStateDictInItsOrder) {
  const auto file = io::load_pth(golden("module.pth"));
  std::vector<std::string> names;
  for (const NamedTensor& t : file.tensors) names.push_back(t.name);
  EXPECT_EQ(names, (std::vector<std::string>{"0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean",
                                             "1.running_var", "1.num_batches_tracked", "2.weight", "2.bias"}));
  EXPECT_EQ(get(file.tensors, "2.weight").to_vector<double>(), counted(4, 40));
  EXPECT_EQ(get(file.tensors, "1.num_batches_tracked").dtype(), i64);
  EXPECT_TRUE(file.metadata.empty());
  EXPECT_EQ(file.state_dict_key, "");
}

TEST(Pth, FindsTheStateDictOfATrainingCheckpoint) {
  const auto file = io::load_pth(golden("checkpoint.pth"));
  EXPECT_EQ(file.state_dict_key, "state_dict");
  ASSERT_EQ(file.tensors.size(), 2u);
  EXPECT_EQ(file.tensors[0].name, "module.weight");
  EXPECT_EQ(file.tensors[0].tensor.to_vector<double>(), counted(6));
  ASSERT_EQ(file.others.size(), 3u);
  EXPECT_EQ(get(file.others, "best_acc1").item<double>(), 76.25);
  EXPECT_EQ(get(file.others, "optimizer.state.0.momentum_buffer").sizes(), (Shape{2, 3}));
  const auto value = [&](const std::string& name) { return json::parse(file.metadata.at(name)); };
  EXPECT_EQ(value("epoch"), 90);
  EXPECT_EQ(value("arch"), "resnet50");
  EXPECT_EQ(value("name"), "größer");
  EXPECT_EQ(value("accuracy"), "nan");
  EXPECT_EQ(value("size"), json::array({224, 224}));
  EXPECT_EQ(value("args"), json::parse(R"({"lr": 0.1, "gpu": null, "seed": 1099511627776, "milestones": [30]})"));
  EXPECT_EQ(value("optimizer")["param_groups"][0]["momentum"], 0.9);
  EXPECT_EQ(value("optimizer")["state"]["0"]["momentum_buffer"]["tensor"], "optimizer.state.0.momentum_buffer");
  EXPECT_FALSE(file.metadata.contains("best_acc1"));
}

TEST(Pth, ReadsOtherFormsOfTheSame) {
  for (const char* name : {"deflated.pth", "protocol5.pth"}) {
    const auto file = io::load_pth(golden(name));
    ASSERT_EQ(file.tensors.size(), 3u) << name;
    EXPECT_EQ(get(file.tensors, "a").to_vector<double>(), (std::vector<double>{0, 3, 1, 4, 2, 5})) << name;
    EXPECT_EQ(get(file.tensors, "b").dtype(), f16);
    EXPECT_EQ(get(file.tensors, "a").storage(), get(file.tensors, "tied").storage());
  }
  const auto one = io::load_pth(golden("tensor.pth"));
  EXPECT_EQ(get(one.tensors, "tensor").to_vector<double>(), counted(3));
}

TEST(Pth, RefusesWhatItCannotHold) {
  const auto error = [](const char* name) { return error_of(contents(golden(name))); };
  EXPECT_EQ(error("int16.pth"), "x.pth: 'short' is int16, a dtype that Halfstep doesn't have");
  EXPECT_EQ(error("big_endian.pth"), "x.pth: expected little-endian data, got byte order 'big'");
  EXPECT_NE(error("whole_model.pth").find("refers to torch.nn.modules.linear.Linear"), std::string::npos);
  EXPECT_NE(error("whole_model.pth").find("state_dict()"), std::string::npos);
  EXPECT_NE(error_of("abc").find("expected a file of torch.save"), std::string::npos);
  EXPECT_NE(error_of("").find("expected a file of torch.save"), std::string::npos);
  EXPECT_NE(test::error_of<IoError>([] { io::load_pth("no/such.pth"); }).find("no such file"), std::string::npos);
  EXPECT_NE(test::error_of<IoError>([] { io::load_pth(test::goldens_dir()); }).find("folder"), std::string::npos);
}

// Every byte of the data and of the pickle is behind a checksum; what is left are names, times and paddings.
TEST(Pth, NoticesEveryFlippedByteOfTheData) {
  for (const char* name : {"module.pth", "deflated.pth"}) {
    const std::string good = contents(golden(name));
    const auto whole = parse(good);
    int noticed = 0;
    for (std::size_t i = 0; i < good.size(); ++i) {
      std::string bad = good;
      bad[i] = static_cast<char>(bad[i] ^ 0x10);
      try {
        const auto file = parse(bad);
        ASSERT_EQ(file.tensors.size(), whole.tensors.size()) << name << " " << i;
        for (std::size_t k = 0; k < file.tensors.size(); ++k) {
          EXPECT_EQ(file.tensors[k].tensor.to_vector<double>(), whole.tensors[k].tensor.to_vector<double>())
              << name << " " << i;
        }
      } catch (const IoError&) {
        ++noticed;
      }
    }
    EXPECT_GT(noticed, 400) << name;
  }
}

TEST(Pth, NoticesFilesCutShort) {
  for (const char* name : {"module.pth", "legacy.pth", "deflated.pth"}) {
    const std::string good = contents(golden(name));
    for (std::size_t n = 0; n < good.size(); ++n) {
      EXPECT_NE(error_of(good.substr(0, n)), "") << name << " cut to " << n;
    }
  }
}

// --- Hostile pickles, in the form before PyTorch 1.6, which has no checksums.

std::string le(std::uint64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) text += static_cast<char>(value >> (8 * i));
  return text;
}
std::string global(const std::string& module, const std::string& name) { return "c" + module + "\n" + name + "\n"; }
std::string text(const std::string& value) { return "X" + le(value.size(), 4) + value; }
std::string number(std::uint64_t value) { return "\x8a\x08" + le(value, 8); }

const std::string kProto = "\x80\x02";

std::string legacy(const std::string& object, const std::string& keys, const std::string& data) {
  return kProto + "\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19." + kProto + "M\xe9\x03." + kProto + "}." + kProto +
         object + "." + kProto + "](" + keys + "e." + data;
}

struct TensorText {
  std::string storage = "FloatStorage", key = "k";
  std::uint64_t elements = 4, offset = 0;
  std::vector<std::uint64_t> sizes = {4}, strides = {1};
  std::string str() const {
    const auto tuple = [](const std::vector<std::uint64_t>& values) {
      std::string t = "(";
      for (const std::uint64_t v : values) t += number(v);
      return t + "t";
    };
    return global("torch._utils", "_rebuild_tensor_v2") + "((" + text("storage") + global("torch", storage) +
           text(key) + text("cpu") + number(elements) + "NtQ" + number(offset) + tuple(sizes) + tuple(strides) +
           "\x89" + global("collections", "OrderedDict") + ")RtR";
  }
};

std::string with(const TensorText& tensor, const std::string& data = le(4, 8) + std::string(16, '\0')) {
  return error_of(legacy("}" + text("w") + tensor.str() + "s", text("k"), data));
}

TEST(Pth, ChecksWhereTensorsLie) {
  EXPECT_EQ(with({}), "");
  EXPECT_EQ(with({.sizes = {2, 2}, .strides = {2, 1}}), "");
  EXPECT_NE(with({.sizes = {5}}).find("its storage has 16 bytes"), std::string::npos);
  EXPECT_NE(with({.offset = 1}).find("its storage has 16 bytes"), std::string::npos);
  EXPECT_NE(with({.offset = std::uint64_t{1} << 62}).find("too large"), std::string::npos);
  EXPECT_NE(with({.offset = ~std::uint64_t{0}}).find("whole number"), std::string::npos);
  EXPECT_NE(with({.sizes = {4}, .strides = {2}}).find("its storage"), std::string::npos);
  EXPECT_NE(with({.sizes = {4}, .strides = {~std::uint64_t{0}}}).find("whole number"), std::string::npos);
  EXPECT_NE(with({.sizes = {4, 1}}).find("sizes [4, 1] and strides [1]"), std::string::npos);
  const std::uint64_t big = std::uint64_t{1} << 32;
  EXPECT_NE(with({.sizes = {big, big, big}, .strides = {0, 0, 0}}).find("too large"), std::string::npos);
  EXPECT_NE(with({.sizes = {big}, .strides = {0}}).find("repeats"), std::string::npos);
  EXPECT_NE(with({.sizes = {1, 1, 1, 1, 1, 1, 1, 1, 1}}).find("at most 8"), std::string::npos);
  EXPECT_NE(with({.elements = std::uint64_t{1} << 60}).find("too large"), std::string::npos);
  EXPECT_NE(with({.elements = std::uint64_t{1} << 37}).find("cut short"), std::string::npos);
  EXPECT_NE(with({.elements = 3, .sizes = {3}}).find("should have 3 elements and has 4"), std::string::npos);
  EXPECT_NE(with({.key = "other"}).find("not used"), std::string::npos);
  EXPECT_NE(with({.storage = "OtherStorage"}).find("torch.OtherStorage"), std::string::npos);
  EXPECT_NE(with({}, le(4, 8) + std::string(15, '\0')).find("cut short"), std::string::npos);
  EXPECT_NE(with({.storage = "BoolStorage"}, le(4, 8) + "\1\1\1\2").find("bools"), std::string::npos);
  EXPECT_EQ(with({.storage = "BoolStorage"}, le(4, 8) + std::string("\1\1\1\0", 4)), "");
  const std::string two = TensorText{}.str();
  EXPECT_NE(
      error_of(legacy("}" + text("w") + two + "s" + text("w") + two + "s", text("k"), le(4, 8) + std::string(16, '\0')))
          .find("two tensors called 'w'"),
      std::string::npos);
}

TEST(Pth, RunsNothing) {
  const std::string call = global("os", "system") + text("exit 1") + "\x85R";
  EXPECT_NE(error_of(legacy("}" + text("w") + call + "s", "", "")).find("refers to os.system"), std::string::npos);
  EXPECT_NE(error_of(legacy(text("builtins") + text("eval") + "\x93" + text("1") + "\x85R", "", ""))
                .find("refers to builtins.eval"),
            std::string::npos);
  // A name that the file chose doesn't write to the terminal.
  EXPECT_NE(error_of(legacy(global("\x1b[31m", "x"), "", "")).find("refers to \\e[31m.x"), std::string::npos);
  // Names that are allowed are not called either.
  EXPECT_EQ(error_of(legacy(global("torch", "device") + text("cpu") + "\x85R", "", "")), "");
}

TEST(Pth, StandsValuesThatGoOnForever) {
  const std::string start = "]q";  // a list, remembered as number 0
  const std::string cyclic = start + std::string("\0h\0a", 4);
  EXPECT_NE(error_of(legacy("}" + text("w") + cyclic + "s", "", "")).find("hold themselves"), std::string::npos);
  // Each list holds the one before it ten times: 10^60 values in 60 levels.
  std::string laughs = "]q" + std::string("\0", 1);
  for (char level = 1; level < 60; ++level) {
    laughs += "](";
    for (int i = 0; i < 10; ++i) laughs += std::string("h") + static_cast<char>(level - 1);
    laughs += "eq" + std::string(1, level);
  }
  // What is under the last one on the stack goes away by a tuple.
  EXPECT_NE(error_of(legacy("(" + laughs + "t", "", "")).find("too many values"), std::string::npos);
  std::string deep = std::string(100'000, ']') + std::string(99'999, 'a');
  EXPECT_NE(error_of(legacy(deep, "", "")).find("nested too deeply"), std::string::npos);
}

// A file of some kilobytes whose tensors repeat one element each: not one over the limit, but all of them together.
TEST(Pth, TensorsThatRepeatTheirElementsCountInFull) {
  std::string dict = "}(";
  for (int i = 0; i < 50; ++i) {
    dict +=
        text("w" + std::to_string(i)) + TensorText{.sizes = {std::uint64_t{1} << 26}, .strides = {0}}.str();  // 256 MB
  }
  const std::string file = legacy(dict + "u", text("k"), le(4, 8) + std::string(16, '\0'));
  EXPECT_LT(file.size(), 20'000u);
  EXPECT_NE(error_of(file).find("--max-unpacked"), std::string::npos) << error_of(file);
  const std::span bytes(reinterpret_cast<const unsigned char*>(file.data()), file.size());
  EXPECT_EQ(io::parse_pth(bytes, "x", {.max_unpacked = std::uint64_t{50} << 28}).tensors.size(), 50u);
  EXPECT_THROW(io::parse_pth(bytes, "x", {.max_unpacked = std::uint64_t{49} << 28}), IoError);
  // Weights that are tied several times are no such file.
  std::string tied = "}(";
  for (int i = 0; i < 6; ++i)
    tied += text("w" + std::to_string(i)) + TensorText{.elements = 4000, .sizes = {4000}}.str();
  const std::string good = legacy(tied + "u", text("k"), le(4000, 8) + std::string(16000, '\0'));
  const std::span good_bytes(reinterpret_cast<const unsigned char*>(good.data()), good.size());
  EXPECT_EQ(io::parse_pth(good_bytes, "x", {.max_unpacked = 0}).tensors.size(), 6u);
}

TEST(Pth, TheLegacyFormIsReadInPieces) {
  const test::TemporaryDir folder;
  const fs::path path = folder.path() / "x.pth";
  // The pickles are longer than what is read at first.
  const std::string dict =
      "}(" + text("note") + text(std::string(3'000'000, 'n')) + text("w") + TensorText{}.str() + "u";
  const float values[] = {1, 2, 3, 4};
  const std::string data(reinterpret_cast<const char*>(values), sizeof(values));
  const std::string good = legacy(dict, text("k"), le(4, 8) + data);
  std::ofstream(path, std::ios::binary) << good;
  EXPECT_EQ(get(io::load_pth(path).tensors, "w").to_vector<float>(), (std::vector<float>{1, 2, 3, 4}));
  std::ofstream(path, std::ios::binary) << good.substr(0, good.size() - 1);
  EXPECT_NE(test::error_of<IoError>([&] { io::load_pth(path); }).find("cut short"), std::string::npos);
  EXPECT_THROW(io::load_pth(path, {.max_bytes = 10}), IoError);
}

// A zip archive of one deflated file beside stored ones (PKWARE's APPNOTE.TXT 4.3).
std::string zipped(const std::vector<std::pair<std::string, std::string>>& files) {
  std::string archive, directory;
  for (const auto& [name, content] : files) {
    std::string packed(compressBound(content.size()) + 64, '\0');
    z_stream stream{};
    EXPECT_EQ(deflateInit2(&stream, 9, Z_DEFLATED, -15, 8, Z_DEFAULT_STRATEGY), Z_OK);
    stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(content.data()));
    stream.avail_in = static_cast<uInt>(content.size());
    stream.next_out = reinterpret_cast<Bytef*>(packed.data());
    stream.avail_out = static_cast<uInt>(packed.size());
    EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
    packed.resize(stream.total_out);
    deflateEnd(&stream);
    const auto crc = crc32_z(0, reinterpret_cast<const Bytef*>(content.data()), content.size());
    const std::string head = le(20, 2) + le(0, 2) + le(8, 2) + le(0, 4) + le(crc, 4) + le(packed.size(), 4) +
                             le(content.size(), 4) + le(name.size(), 2) + le(0, 2);
    directory +=
        "PK\x01\x02" + le(20, 2) + head + le(0, 2) + le(0, 2) + le(0, 2) + le(0, 4) + le(archive.size(), 4) + name;
    archive += "PK\x03\x04" + head + name + packed;
  }
  const std::size_t at = archive.size();
  return archive + directory + "PK\x05\x06" + le(0, 4) + le(files.size(), 2) + le(files.size(), 2) +
         le(directory.size(), 4) + le(at, 4) + le(0, 2);
}

TEST(Pth, CompressedDataHaveALimit) {
  constexpr std::uint64_t kElements = 4'000'000;
  const std::string pickle =
      kProto + "}" + text("w") + TensorText{.elements = kElements, .sizes = {kElements}}.str() + "s.";
  const std::string file = zipped({{"a/data.pkl", pickle}, {"a/data/k", std::string(4 * kElements, '\0')}});
  EXPECT_LT(file.size(), 20'000u);
  const std::span bytes(reinterpret_cast<const unsigned char*>(file.data()), file.size());
  EXPECT_EQ(parse(file).tensors.size(), 1u);
  const auto error = [&](const io::ReadLimits& limits) {
    return test::error_of<IoError>([&] { io::parse_pth(bytes, "x", limits); });
  };
  EXPECT_NE(error({.max_unpacked = 1'000'000}).find("16000000 bytes"), std::string::npos)
      << error({.max_unpacked = 1'000'000});
  EXPECT_NE(error({.max_bytes = 15'999'999}).find("at most 15999999"), std::string::npos);
  EXPECT_EQ(error({.max_bytes = 16'000'000}), "");
  // What calls are given that name none.
  io::set_read_limits({.max_unpacked = 1'000'000});
  EXPECT_NE(error_of(file), "");
  io::set_read_limits({});
  // A pickle unpacks too.
  const std::string large = zipped({{"a/data.pkl", kProto + text(std::string(10'000'000, 'x')) + "."}});
  const std::span large_bytes(reinterpret_cast<const unsigned char*>(large.data()), large.size());
  EXPECT_THROW(io::parse_pth(large_bytes, "x", {.max_unpacked = 1'000'000}), IoError);
}

// --- Writing.

NamedTensors samples() {
  NamedTensors tensors;
  for (int d = 0; d < kNumDTypes; ++d) {
    const auto dtype = static_cast<DType>(d);
    tensors.push_back({std::string("t.") + name(dtype), tensor({0, 1, 1, 0, 1, 1}, {2, 3}, {.dtype = dtype})});
  }
  const Tensor base = tensor(counted(24), {4, 6}), other = tensor(counted(24), {4, 6});
  const Tensor image = to_channels_last(tensor(counted(12), {1, 2, 2, 3}));
  tensors.push_back({"transposed", tensor({1, 2, 3, 4, 5, 6}, {2, 3}).t()});
  tensors.push_back({"image", image});
  tensors.push_back({"columns", base.slice(1, 2, 6, 2)});
  tensors.push_back({"row", other[0]});  // in one storage, but apart
  tensors.push_back({"rows", other.slice(0, 2, 4)});
  tensors.push_back({"tied.a", tensor(counted(6), {2, 3})});
  tensors.push_back({"tied.b", tensors.back().tensor});
  tensors.push_back({"tied.t", tensors.back().tensor.t()});
  tensors.push_back({"empty", zeros({0, 4})});
  tensors.push_back({"scalar", full({}, 2.5)});
  tensors.push_back({"parameter", tensor({3, 4}, {2}, {.requires_grad = true})});
  return tensors;
}

TEST(Pth, ReadsWhatItWrites) {
  const test::TemporaryDir folder;
  const fs::path path = folder.path() / "x.pth";
  const NamedTensors tensors = samples();
  io::save_pth(path, tensors);
  const auto file = io::load_pth(path);
  ASSERT_EQ(file.tensors.size(), tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Tensor &a = tensors[i].tensor, b = file.tensors[i].tensor;
    EXPECT_EQ(file.tensors[i].name, tensors[i].name);
    EXPECT_EQ(b.dtype(), a.dtype());
    EXPECT_EQ(b.sizes(), a.sizes());
    EXPECT_EQ(b.to_vector<double>(), a.to_vector<double>()) << tensors[i].name;
  }
  const Tensor tied = get(file.tensors, "tied.a");
  EXPECT_EQ(tied.storage(), get(file.tensors, "tied.b").storage());
  EXPECT_EQ(tied.storage(), get(file.tensors, "tied.t").storage());
  EXPECT_EQ(get(file.tensors, "image").strides(), get(tensors, "image").strides());
  // Parts of a larger storage bring only themselves.
  EXPECT_EQ(get(file.tensors, "columns").storage()->bytes(), 32u);
  EXPECT_EQ(get(file.tensors, "row").storage()->bytes(), 24u);
  EXPECT_EQ(get(file.tensors, "rows").storage()->bytes(), 48u);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator{}), 1);
  const std::string once = contents(path);
  io::save_pth(path, tensors);
  EXPECT_EQ(contents(path), once);
}

TEST(Pth, WritesValuesBesideTheStateDict) {
  const test::TemporaryDir folder;
  const fs::path path = folder.path() / "x.pth";
  const std::map<std::string, std::string> metadata = {
      {"epoch", "3"}, {"arch", "\"net\""}, {"o", R"({"lr":[0.1,-5000000000,null,true],"nested":{}})"}};
  io::save_pth(path, {{"w", ones({2})}}, {.metadata = metadata});
  const auto file = io::load_pth(path);
  EXPECT_EQ(file.state_dict_key, "state_dict");
  EXPECT_EQ(file.tensors.size(), 1u);
  EXPECT_EQ(file.metadata, metadata);
  const auto refused = [&](const NamedTensors& tensors, const std::map<std::string, std::string>& values) {
    return test::error_of<Error>([&] { io::save_pth(path, tensors, {.metadata = values}); });
  };
  EXPECT_NE(refused({{"w", ones({1})}}, {{"epoch", "three"}}).find("expected JSON for 'epoch'"), std::string::npos);
  EXPECT_NE(refused({{"w", ones({1})}, {"w", ones({1})}}, {}).find("two tensors called 'w'"), std::string::npos);
  EXPECT_NE(refused({{"w", {}}}, {}).find("undefined"), std::string::npos);
  EXPECT_NE(refused({{"\xff", ones({1})}}, {}).find("UTF-8"), std::string::npos);
  EXPECT_EQ(io::load_pth(path).metadata, metadata);
}

TEST(Zip, WritesThe64BitFormWhereItIsNeeded) {
  const test::TemporaryDir folder;
  const fs::path path = folder.path() / "x.zip";
  std::map<std::string, std::string> files = {{"a/one", "1"}, {"a/two", std::string(1000, 'x')}, {"a/none", ""}};
  for (const std::uint64_t limit : {std::uint64_t{0}, std::uint64_t{500}, std::uint64_t{0xffffffff}}) {
    io::AtomicFile file(path);
    io::ZipWriter zip(file, limit);
    for (const auto& [name, data] : files) zip.add(name, data.data(), data.size());
    zip.finish();
    file.commit();
    std::map<std::string, std::string> read;
    io::visit_zip({.name = "x.zip", .path = path}, [&](io::ZipEntry& entry) {
      read[entry.name()] = entry.text(1000);
      return true;
    });
    EXPECT_EQ(read, files) << limit;
    const std::string bytes = contents(path);
    EXPECT_EQ(bytes.find("PK\x06\x06") != std::string::npos, limit <= 1000) << limit;
    if (const char* python = std::getenv("HALFSTEP_PEER_PYTHON")) {
      const std::string test = std::string(python) + " -m zipfile -t " + path.string() + " > /dev/null";
      EXPECT_EQ(std::system(test.c_str()), 0) << limit;
    }
  }
}

TEST(PthPeer, PyTorchReadsWhatIsWritten) {
  const char* python = std::getenv("HALFSTEP_PEER_PYTHON");
  if (python == nullptr) GTEST_SKIP() << "HALFSTEP_PEER_PYTHON names no Python with PyTorch";
  const test::TemporaryDir folder;
  const NamedTensors tensors = samples();
  const json tied = json::array({json::array({"tied.a", "tied.b"}), json::array({"tied.a", "tied.t"})});
  nlohmann::ordered_json list;
  for (const NamedTensor& t : tensors) {
    const Shape& s = t.tensor.sizes();
    const std::string dtype = t.tensor.dtype() == boolean ? "bool" : std::string(name(t.tensor.dtype()));
    list[t.name] = {dtype, std::vector<std::int64_t>(s.begin(), s.end()), t.tensor.to_vector<double>()};
  }
  for (const bool with_metadata : {false, true}) {
    nlohmann::ordered_json wanted = {{"tied", tied}, {"tensors", list}};
    std::map<std::string, std::string> metadata;
    if (with_metadata) {
      wanted["metadata"] = {{"epoch", 3}, {"o", {{"lr", {0.1, -5000000000, nullptr, true}}}}, {"name", "größer"}};
      for (const auto& [key, value] : wanted["metadata"].items()) metadata[key] = value.dump();
    }
    io::save_pth(folder.path() / "x.pth", tensors, {.metadata = metadata});
    std::ofstream(folder.path() / "x.json") << wanted.dump();
    const std::string command = std::string(python) + " " + (test::goldens_dir() / "make_pth.py").string() +
                                " --check " + (folder.path() / "x.pth").string() + " " +
                                (folder.path() / "x.json").string();
    EXPECT_EQ(std::system(command.c_str()), 0);
  }
}

}  // namespace
}  // namespace halfstep
