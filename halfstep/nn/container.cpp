// SPDX-License-Identifier: Apache-2.0
#include "halfstep/nn/container.h"

#include "halfstep/core/fail.h"

namespace halfstep::nn {

Sequential::Sequential(std::initializer_list<NamedModule> modules) {
  for (const NamedModule& m : modules) push_back(m);
}

void Sequential::push_back(NamedModule module) {
  if (module.name.empty() || module.name.find('.') != std::string::npos) {
    fail<Error>("Sequential: expected a name without dots, got '{}'", module.name);
  }
  for (const NamedModule& m : modules_) {
    if (m.name == module.name) fail<Error>("Sequential: there are two modules called '{}'", module.name);
  }
  set_name(*module.module, module.name);
  modules_.push_back(std::move(module));
}

Tensor Sequential::forward(const Tensor& input) const {
  Tensor x = input;
  for (const NamedModule& m : modules_) x = m.call(*m.module, x);
  return x;
}

const ModuleBase& Sequential::operator[](std::size_t i) const {
  if (i >= modules_.size()) fail<Error>("Sequential: expected a number under {}, got {}", modules_.size(), i);
  return *modules_[i].module;
}

void Sequential::wrong_kind(std::size_t i) const {
  fail<Error>("Sequential: module {} is a {}, not what was asked for", modules_[i].name, (*this)[i].kind());
}

void Sequential::unshare() {
  ModuleBase::unshare();
  for (NamedModule& m : modules_) {
    m.module = m.module->copy();
    m.module->unshare();
  }
}

std::vector<std::pair<std::string, ModuleBase*>> Sequential::held() const {
  std::vector<std::pair<std::string, ModuleBase*>> result;
  for (const NamedModule& m : modules_) result.emplace_back(m.name, m.module.get());
  return result;
}

}  // namespace halfstep::nn
