// SPDX-License-Identifier: Apache-2.0
// Networks that are exported, run by ONNX's reference evaluator (check_onnx.py) and compared with Halfstep. Needs a
// Python with the package onnx: HALFSTEP_ONNX_PYTHON, HALFSTEP_PEER_PYTHON or python3, the first that has it.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/random.h"
#include "halfstep/io/onnx.h"
#include "halfstep/ops/create.h"
#include "tests/support/test_data.h"

namespace halfstep::test {

// Commands go through a shell: paths may have spaces.
inline std::string shell_quoted(const std::string& text) {
  std::string result = "'";
  for (char c : text) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return result + "'";
}

// A Python with the package onnx; empty if there is none.
inline std::string find_python() {
  for (const char* variable : {"HALFSTEP_ONNX_PYTHON", "HALFSTEP_PEER_PYTHON", ""}) {
    const char* value = *variable ? std::getenv(variable) : "python3";
    if (!value || !*value) continue;
    const std::string command = shell_quoted(value) + " -c 'import onnx.reference' >/dev/null 2>&1";
    if (std::system(command.c_str()) == 0) return value;
  }
  return {};
}

class OnnxReference : public ::testing::Test {
 protected:
  using Json = nlohmann::ordered_json;
  using Forward = std::function<Tensor(const Tensor&)>;

  static void SetUpTestSuite() { python_ = find_python(); }
  void SetUp() override {
    if (python_.empty()) GTEST_SKIP() << "needs a Python with the package onnx; HALFSTEP_ONNX_PYTHON names one";
    default_generator().manual_seed(7);
  }

  Json recorded(const Tensor& tensor, const std::string& name) {
    // The file's floating dtype is that of the input that the record is of.
    constexpr std::pair<DType, const char*> kNames[] = {{f32, "float32"}, {f16, "float16"},  {i64, "int64"},
                                                        {i32, "int32"},   {boolean, "bool"}, {u8, "uint8"}};
    const auto* known =
        std::find_if(std::begin(kNames), std::end(kNames), [&](const auto& k) { return k.first == tensor.dtype(); });
    if (known == std::end(kNames)) throw std::runtime_error("no NumPy name");
    const Tensor t = tensor.contiguous();
    const std::string file = std::to_string(files_++) + ".bin";
    std::ofstream(folder_ / file, std::ios::binary)
        .write(static_cast<const char*>(t.raw_data()), static_cast<std::streamsize>(t.item_size()) * t.numel());
    return {{"name", name},
            {"dtype", known->second},
            {"shape", std::vector<std::int64_t>(t.sizes().begin(), t.sizes().end())},
            {"file", file}};
  }

  // A file of one input and one output, checked on inputs of the example's batch and, if it may change, another.
  template <nn::TensorModule M>
  void add(const std::string& name, const M& module, const std::vector<Tensor>& inputs, double tolerance,
           const io::OnnxOptions& options = {}) {
    add(
        name, module, [&](const Tensor& x) { return module(x); }, inputs, tolerance, options);
  }
  void add(const std::string& name, const nn::ModuleBase& module, const Forward& forward,
           const std::vector<Tensor>& inputs, double tolerance, const io::OnnxOptions& options = {}) {
    SCOPED_TRACE(name);
    const auto one = [&](std::span<const Tensor> in) { return std::vector<Tensor>{forward(in[0])}; };
    io::export_onnx(folder_ / (name + ".onnx"), module, one, std::span(inputs).first(1), options);
    const NoGrad no_grad;
    const bool was_training = module.is_training();
    module.eval();
    Json runs = Json::array();
    for (const Tensor& x : inputs) {
      const auto typed = [&](const Tensor& t) { return t.is_floating() ? t.to(options.dtype) : t; };
      const Tensor given = typed(x);
      // Halfstep computes in float32 what the file does in its own dtype.
      const Tensor y = forward(given.is_floating() ? given.to(f32) : given);
      runs.push_back({{"inputs", Json::array({recorded(given, "input")})},
                      {"outputs", Json::array({recorded(typed(y), "output")})}});
    }
    module.train(was_training);
    std::ofstream(folder_ / (name + ".json")) << Json{{"tolerance", tolerance}, {"runs", runs}}.dump(1);
  }

  // Runs the script on all that was added.
  void check() {
    const std::filesystem::path script = goldens_dir().parent_path() / "io" / "check_onnx.py";
    const std::string command = "PYTHONDONTWRITEBYTECODE=1 " + shell_quoted(python_) + " " +
                                shell_quoted(script.string()) + " " + shell_quoted(folder_.string()) + " 2>&1";
    std::FILE* pipe = popen(command.c_str(), "r");
    ASSERT_NE(pipe, nullptr);
    std::string said;
    for (char buffer[4096]; const std::size_t n = std::fread(buffer, 1, sizeof buffer, pipe);) said.append(buffer, n);
    const int status = pclose(pipe);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << said;
    if (std::getenv("HALFSTEP_SHOW_DIFFERENCES")) std::printf("%s", said.c_str());
  }

  TemporaryDir temporary_;
  const std::filesystem::path folder_ = temporary_.path();
  int files_ = 0;
  static inline std::string python_;
};

// A function of the input, or of the input and two parameters, as a module.
struct Function : nn::Module<Function> {
  using F = std::function<Tensor(const Tensor& x, const std::vector<nn::Parameter>& p)>;
  template <class G>
  requires(!std::derived_from<G, nn::ModuleBase>) explicit Function(G f, const std::vector<Tensor>& tensors = {}) {
    if constexpr (std::is_invocable_v<G, const Tensor&>) {
      function = [f](const Tensor& x, const std::vector<nn::Parameter>&) { return f(x); };
    } else {
      function = f;
    }
    if (tensors.size() > 0) a = tensors[0];
    if (tensors.size() > 1) b = tensors[1];
  }
  Tensor forward(const Tensor& x) const { return function(x, {a, b}); }
  F function;
  nn::Parameter a = parameter("a", {});
  nn::Parameter b = parameter("b", {});
};

// Rounding, as a share of the largest value: 2^-24 once an operation. Elementary functions of Halfstep and NumPy are
// within 4 units in the last place each; sums of n terms within n of them.
inline constexpr double kUnit = 1.0 / (1 << 24);

}  // namespace halfstep::test
