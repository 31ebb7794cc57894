// SPDX-License-Identifier: Apache-2.0
#include "tests/support/golden.h"

#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

#include "tests/support/test_data.h"

namespace halfstep::test {
namespace {

using Json = nlohmann::json;

double parse_number(const Json& value) {
  if (value.is_number()) return value.get<double>();
  const auto& text = value.get_ref<const std::string&>();
  if (text == "inf") return std::numeric_limits<double>::infinity();
  if (text == "-inf") return -std::numeric_limits<double>::infinity();
  if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
  throw std::runtime_error("not a number: " + text);
}

GoldenTensor parse_tensor(const Json& value) {
  GoldenTensor tensor;
  tensor.dtype = value.at("dtype").get<std::string>();
  tensor.shape = value.at("shape").get<std::vector<int64_t>>();
  int64_t count = 1;
  for (int64_t size : tensor.shape) count *= size;
  const Json& data = value.at("data");
  if (static_cast<int64_t>(data.size()) != count) throw std::runtime_error("shape and data disagree");
  tensor.data.reserve(data.size());
  for (const Json& item : data) {
    const double number = parse_number(item);
    // An f32 is written as the shortest decimal that rounds to it; the other dtypes are written exactly.
    tensor.data.push_back(tensor.dtype == "f32" ? static_cast<double>(static_cast<float>(number)) : number);
  }
  return tensor;
}

template <class Item, class Parse>
void parse_list(const Json& entry, const char* key, std::vector<Item>& into, Parse parse) {
  const auto found = entry.find(key);
  if (found == entry.end()) return;
  for (const Json& item : *found) into.push_back(parse(item));
}

std::optional<GoldenTensor> parse_optional(const Json& value) {
  if (value.is_null()) return std::nullopt;
  return parse_tensor(value);
}

GoldenAttribute parse_attribute(const Json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_number()) return value.get<double>();
  if (value.is_string()) {
    const auto text = value.get<std::string>();
    if (text == "inf" || text == "-inf" || text == "nan") return parse_number(value);
    return text;
  }
  bool all_integers = true, all_numbers = true;
  for (const Json& item : value) {
    all_integers = all_integers && item.is_number_integer();
    all_numbers = all_numbers && item.is_number();
  }
  if (all_integers) return value.get<std::vector<int64_t>>();
  if (all_numbers) return value.get<std::vector<double>>();
  return value.get<std::vector<std::string>>();
}

GoldenEntry parse_entry(const Json& value) {
  GoldenEntry entry;
  entry.name = value.at("name").get<std::string>();
  entry.op = value.at("op").get<std::string>();
  entry.torch = value.value("torch", entry.op);
  for (const auto& [key, item] : value.at("attributes").items()) entry.attributes.emplace(key, parse_attribute(item));
  parse_list(value, "inputs", entry.inputs, parse_tensor);
  parse_list(value, "cotangents", entry.cotangents, parse_optional);
  parse_list(value, "outputs", entry.outputs, parse_tensor);
  parse_list(value, "grads", entry.grads, parse_optional);
  parse_list(value, "exact", entry.exact, parse_tensor);
  if (const auto found = value.find("tensors"); found != value.end()) {
    for (const auto& [key, item] : found->items()) entry.tensors.emplace(key, parse_tensor(item));
  }
  return entry;
}

// The attribute as T, where `convert` may make a T of a related type; `otherwise` when there is none.
template <class T, class Convert>
T attribute_as(const GoldenEntry& entry, const std::string& name, const std::optional<T>& otherwise, Convert convert) {
  const auto found = entry.attributes.find(name);
  if (found == entry.attributes.end()) {
    if (otherwise) return *otherwise;
    throw std::out_of_range(entry.name + ": no attribute " + name);
  }
  if (const T* value = std::get_if<T>(&found->second)) return *value;
  if (std::optional<T> value = convert(found->second)) return *std::move(value);
  throw std::invalid_argument(entry.name + ": attribute " + name + " has another type");
}

constexpr auto kNoConversion = [](const GoldenAttribute&) { return std::nullopt; };

}  // namespace

double GoldenEntry::real(const std::string& attribute, std::optional<double> otherwise) const {
  return attribute_as<double>(*this, attribute, otherwise, [](const GoldenAttribute& value) -> std::optional<double> {
    if (const auto* whole = std::get_if<int64_t>(&value)) return static_cast<double>(*whole);
    return std::nullopt;
  });
}

int64_t GoldenEntry::integer(const std::string& attribute, std::optional<int64_t> otherwise) const {
  return attribute_as<int64_t>(*this, attribute, otherwise, kNoConversion);
}

bool GoldenEntry::flag(const std::string& attribute, std::optional<bool> otherwise) const {
  return attribute_as<bool>(*this, attribute, otherwise, kNoConversion);
}

std::string GoldenEntry::text(const std::string& attribute, std::optional<std::string> otherwise) const {
  return attribute_as<std::string>(*this, attribute, otherwise, kNoConversion);
}

std::vector<int64_t> GoldenEntry::integers(const std::string& attribute) const {
  using List = std::vector<int64_t>;
  return attribute_as<List>(*this, attribute, {}, [](const GoldenAttribute& value) -> std::optional<List> {
    if (const auto* whole = std::get_if<int64_t>(&value)) return List{*whole};
    return std::nullopt;
  });
}

std::vector<double> GoldenEntry::reals(const std::string& attribute) const {
  using List = std::vector<double>;
  return attribute_as<List>(*this, attribute, {}, [](const GoldenAttribute& value) -> std::optional<List> {
    if (const auto* number = std::get_if<double>(&value)) return List{*number};
    if (const auto* whole = std::get_if<int64_t>(&value)) return List{static_cast<double>(*whole)};
    if (const auto* list = std::get_if<std::vector<int64_t>>(&value)) return List(list->begin(), list->end());
    return std::nullopt;
  });
}

std::vector<std::string> GoldenEntry::texts(const std::string& attribute) const {
  return attribute_as<std::vector<std::string>>(*this, attribute, {}, kNoConversion);
}

const GoldenTensor& GoldenEntry::tensor(const std::string& wanted) const {
  const auto found = tensors.find(wanted);
  if (found == tensors.end()) throw std::out_of_range(name + ": no tensor " + wanted);
  return found->second;
}

std::vector<GoldenEntry> read_goldens(const std::string& file) {
  const std::filesystem::path path = goldens_dir() / file;
  std::ifstream stream(path);
  if (!stream) throw std::runtime_error("golden file " + path.string() + " can't be opened");
  try {
    const Json document = Json::parse(stream);
    if (document.at("header").at("format") != 1) throw std::runtime_error("format 1 was expected");
    std::vector<GoldenEntry> entries;
    for (const Json& value : document.at("entries")) entries.push_back(parse_entry(value));
    return entries;
  } catch (const std::exception& error) {
    throw std::runtime_error("golden file " + path.string() + ": " + error.what());
  }
}

}  // namespace halfstep::test
