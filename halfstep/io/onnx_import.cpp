// SPDX-License-Identifier: Apache-2.0
#include "halfstep/io/onnx_import.h"

#include <algorithm>
#include <array>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/input_file_internal.h"
#include "halfstep/core/text.h"
#include "halfstep/core/write_internal.h"
#include "halfstep/io/onnx_import_internal.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/recorder.h"

namespace halfstep::io {
namespace detail {

/// Tensors under one path, in whose scope the operators run that read them.
class OnnxPart : public nn::ModuleBase {
 public:
  /// Number `i`.
  virtual const Tensor& tensor(std::size_t i) const = 0;
  /// Calls it inside the module's scope.
  virtual void run(const std::function<void()>& function) const = 0;
};

namespace {

// A module's tensors are its members, so that their number is one of a few.
template <std::size_t N>
class OnnxTensors final : public nn::Module<OnnxTensors<N>, OnnxPart> {
 public:
  explicit OnnxTensors(const OnnxPartPlan& plan) {
    for (std::size_t i = 0; i < plan.tensors.size(); ++i) {
      const OnnxPartPlan::Tensor& t = plan.tensors[i];
      if (t.trained) {
        tensors_[i] = this->parameter(t.name, t.tensor.clone());
      } else {
        tensors_[i] = this->buffer(t.name, t.tensor.clone());
      }
    }
  }
  void forward(const std::function<void()>& function) const { function(); }
  const Tensor& tensor(std::size_t i) const override { return tensors_[i]; }
  void run(const std::function<void()>& function) const override { (*this)(function); }
  std::string kind() const override { return "Tensors"; }

 private:
  std::array<nn::Parameter, N> tensors_;
};

std::shared_ptr<OnnxPart> make_part(const OnnxPartPlan& plan) {
  const std::size_t n = plan.tensors.size();
  if (n <= 4) return std::make_shared<OnnxTensors<4>>(plan);
  if (n <= 32) return std::make_shared<OnnxTensors<32>>(plan);
  if (n <= 256) return std::make_shared<OnnxTensors<256>>(plan);
  return std::make_shared<OnnxTensors<4096>>(plan);
}

std::shared_ptr<quant::FakeQuantize> make_quantizer(const OnnxQuantizerPlan& plan) {
  auto result = std::make_shared<quant::FakeQuantize>(plan.options);
  const NoGrad no_grad;
  std::vector<double> zero(plan.zero_point.begin(), plan.zero_point.end());
  Tensor scale = result->scale, zero_point = result->zero_point;
  scale.copy_(tensor({plan.scale.begin(), plan.scale.end()}, scale.sizes(), {.dtype = f32, .device = Device{}}));
  zero_point.copy_(tensor(zero, zero_point.sizes(), {.dtype = f32, .device = Device{}}));
  result->disable_observer();
  return result;
}

}  // namespace

void refuse_step(const std::string& file, const OnnxStep& step, const std::string& why) {
  fail<Error>("{}: node '{}' ({}): {}", file, printable_start(step.name), printable_start(step.type), why);
}

Tensor host_tensor(const OnnxHost& h, Device device) {
  // Written here rather than by ops, which a trace or a prepared network would see. A captured step reads it again.
  const Tensor t = [&] {
    const CapturePause pause;
    Tensor numbers = empty(h.dims, {.dtype = h.dtype, .device = Device{}});
    if (h.is_floating()) {
      std::copy(h.floats.begin(), h.floats.end(), write_data<float>(numbers));
    } else if (h.dtype == DType::boolean) {
      std::copy(h.ints.begin(), h.ints.end(), write_data<bool>(numbers));
    } else {
      std::copy(h.ints.begin(), h.ints.end(), write_data<std::int64_t>(numbers));
    }
    return numbers;
  }();
  if (KernelRecorder* recorder = kernel_recorder()) recorder->keep(t);
  return device.is_cpu() ? t : t.to(device);
}

const OnnxValue& OnnxCall::value(int i) const {
  return values_[static_cast<std::size_t>(step_.inputs[static_cast<std::size_t>(i)])];
}
const OnnxHost& OnnxCall::host(int i) const {
  if (!has(i)) refuse(fmt::format("input {} is left out", i));
  if (!value(i).host) {
    refuse(fmt::format("input {} depends on the values of tensors; expected numbers that follow from sizes", i));
  }
  return *value(i).host;
}
Tensor OnnxCall::in(int i) const {
  if (!has(i)) refuse(fmt::format("input {} is left out", i));
  if (!value(i).host) return value(i).tensor;
  return host_tensor(*value(i).host, device_);
}
std::vector<std::int64_t> OnnxCall::ints(int i) const {
  const OnnxHost& h = host(i);
  if (h.is_floating()) refuse(fmt::format("input {}: expected whole numbers", i));
  return h.ints;
}
double OnnxCall::number(int i) const {
  const OnnxHost& h = host(i);
  if (h.size() != 1) refuse(fmt::format("input {}: expected one number, got {}", i, h.size()));
  return h.number(0);
}
const OnnxAttribute* OnnxCall::attribute(std::string_view name) const {
  for (const OnnxAttribute& a : step_.attributes) {
    if (a.name == name) return &a;
  }
  return nullptr;
}
std::int64_t OnnxCall::integer(std::string_view name, std::int64_t standard) const {
  const OnnxAttribute* a = attribute(name);
  return a ? std::get<std::int64_t>(a->value) : standard;
}
double OnnxCall::real(std::string_view name, double standard) const {
  const OnnxAttribute* a = attribute(name);
  return a ? std::get<float>(a->value) : standard;
}
std::string OnnxCall::text(std::string_view name, std::string_view standard) const {
  const OnnxAttribute* a = attribute(name);
  return a ? printable_start(std::get<std::string>(a->value)) : std::string(standard);
}
std::optional<std::vector<std::int64_t>> OnnxCall::list(std::string_view name) const {
  const OnnxAttribute* a = attribute(name);
  if (!a) return std::nullopt;
  return std::get<std::vector<std::int64_t>>(a->value);
}
int OnnxCall::dim(std::int64_t d, int dims) const {
  if (d < -dims || d >= dims) refuse(fmt::format("axis {} of {} dimensions", d, dims));
  return static_cast<int>(d < 0 ? d + dims : d);
}
void OnnxCall::out(Tensor tensor, int i) {
  if (wanted(i))
    values_[static_cast<std::size_t>(step_.outputs[static_cast<std::size_t>(i)])].tensor = std::move(tensor);
}
void OnnxCall::out(OnnxHost host, int i) {
  if (!wanted(i)) return;
  values_[static_cast<std::size_t>(step_.outputs[static_cast<std::size_t>(i)])].host =
      std::make_shared<const OnnxHost>(std::move(host));
}

}  // namespace detail

using detail::OnnxCall;
using detail::OnnxStep;
using detail::OnnxValue;

OnnxNetwork::OnnxNetwork(std::shared_ptr<const detail::OnnxPlan> plan) : plan_(std::move(plan)) {
  for (const detail::OnnxPartPlan& p : plan_->parts) {
    parts_.push_back(detail::make_part(p));
    set_name(*parts_.back(), p.path);
  }
  for (const detail::OnnxQuantizerPlan& q : plan_->quantizers) {
    quantizers_.push_back(detail::make_quantizer(q));
    set_name(*quantizers_.back(), q.path);
  }
}

std::vector<std::pair<std::string, nn::ModuleBase*>> OnnxNetwork::held() const {
  std::vector<std::pair<std::string, nn::ModuleBase*>> result;
  for (const auto& part : parts_) result.emplace_back(part->name(), part.get());
  for (const auto& quantizer : quantizers_) result.emplace_back(quantizer->name(), quantizer.get());
  return result;
}

void OnnxNetwork::unshare() {
  Module::unshare();
  const auto renew = [](auto& module) {
    const std::string name = module->name();
    auto own = std::dynamic_pointer_cast<typename std::remove_cvref_t<decltype(module)>::element_type>(module->copy());
    own->unshare();
    set_name(*own, name);
    module = std::move(own);
  };
  for (auto& part : parts_) renew(part);
  for (auto& quantizer : quantizers_) renew(quantizer);
}

Tensor OnnxNetwork::forward(const Tensor& input) const {
  if (plan_->inputs.size() != 1 || plan_->outputs.size() != 1) {
    fail<Error>("{}: expected a network of one input and one output, got {} and {}; call it with a list of inputs",
                plan_->file, plan_->inputs.size(), plan_->outputs.size());
  }
  return forward(std::span<const Tensor>(&input, 1))[0];
}

std::vector<Tensor> OnnxNetwork::forward(std::span<const Tensor> inputs) const {
  const detail::OnnxPlan& plan = *plan_;
  if (inputs.size() != plan.inputs.size()) {
    fail<Error>("{}: expected {} inputs, got {}", plan.file, plan.inputs.size(), inputs.size());
  }
  std::vector<OnnxValue> values(static_cast<std::size_t>(plan.values));
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_defined(inputs[i], "OnnxNetwork", "an input");
    values[static_cast<std::size_t>(plan.inputs[i])].tensor = inputs[i];
  }
  for (const auto& [value, host] : plan.constants) values[static_cast<std::size_t>(value)].host = host;
  for (std::size_t p = 0; p < parts_.size(); ++p) {
    const auto& tensors = plan.parts[p].tensors;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      values[static_cast<std::size_t>(tensors[i].value)].tensor = parts_[p]->tensor(i);
    }
  }
  const Device device = inputs[0].device();
  for (const OnnxStep& step : plan.steps) {
    const auto compute = [&] {
      if (step.quantizer >= 0) {
        Tensor& to = values[static_cast<std::size_t>(step.outputs[0])].tensor;
        const OnnxValue& from = values[static_cast<std::size_t>(step.inputs[0])];
        if (from.host) refuse_step(plan.file, step, "quantizes a number");
        to = (*quantizers_[static_cast<std::size_t>(step.quantizer)])(from.tensor);
        return;
      }
      if (run_on_host(plan, step, values)) return;
      const bool in_part = step.part >= 0;
      OnnxCall call(plan, step, values, device,
                    in_part ? parts_[static_cast<std::size_t>(step.part)]->is_training() : is_training());
      if (!step.op->run) call.refuse("depends on the values of tensors; expected numbers that follow from sizes");
      if (!in_part || parts_[static_cast<std::size_t>(step.part)]->name().empty()) return step.op->run(call);
      parts_[static_cast<std::size_t>(step.part)]->run([&] { step.op->run(call); });
    };
    try {
      compute();
    } catch (const DeviceError&) {
      throw;
    } catch (const Error& e) {
      if (std::string_view(e.what()).starts_with(plan.file + ": node '")) throw;
      refuse_step(plan.file, step, e.what());
    }
    for (const int v : step.drops) values[static_cast<std::size_t>(v)] = {};
  }
  std::vector<Tensor> outputs;
  for (const int v : plan.outputs) {
    const OnnxValue& value = values[static_cast<std::size_t>(v)];
    if (!value.tensor.defined() && !value.host) fail<InternalError>("{}: an output has no value", plan.file);
    const OnnxStep output{.type = "the output", .inputs = {v}};
    outputs.push_back(value.host ? OnnxCall(plan, output, values, device, false).in(0) : value.tensor);
  }
  return outputs;
}

const std::vector<OnnxPortInfo>& OnnxNetwork::inputs() const { return plan_->input_ports; }
const std::vector<OnnxPortInfo>& OnnxNetwork::outputs() const { return plan_->output_ports; }
std::string OnnxNetwork::describe() const { return fmt::format("{}, {} operators", plan_->file, plan_->nodes); }

OnnxNetwork parse_onnx(std::span<const unsigned char> bytes, const std::string& name,
                       const OnnxImportOptions& options) {
  auto plan = std::make_shared<detail::OnnxPlan>(
      detail::plan_onnx(detail::read_onnx(bytes, name, options.limits), name, options.learned_scales));
  OnnxNetwork network(plan);
  // The modules have copies of their own.
  for (detail::OnnxPartPlan& part : plan->parts) {
    for (detail::OnnxPartPlan::Tensor& t : part.tensors) t.tensor = {};
  }
  return network;
}

OnnxNetwork load_onnx(const std::filesystem::path& path, const OnnxImportOptions& options) {
  std::string bytes;
  std::string name;
  {
    const InputFile file(path);
    name = file.name();
    constexpr std::uint64_t kLargest = std::numeric_limits<std::int32_t>::max();
    if (file.size() > kLargest) {
      fail<IoError>("{}: has {} bytes, and an ONNX file has at most 2 GiB", name, file.size());
    }
    bytes.resize(static_cast<std::size_t>(file.size()));
    if (!bytes.empty()) file.read(0, bytes.data(), bytes.size());
    file.check_unchanged();
  }
  return parse_onnx({reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size()}, name, options);
}

std::vector<std::string> onnx_import_ops() {
  std::vector<std::string> names{"Constant", "DequantizeLinear", "QuantizeLinear"};
  for (const auto& [name, op] : detail::onnx_operators()) {
    if (name[0] >= 'A' && name[0] <= 'Z') names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace halfstep::io
