// SPDX-License-Identifier: Apache-2.0
#include "faults.h"

#include <charconv>
#include <cstdint>
#include <utility>

namespace sim {
namespace {

std::vector<std::string_view> split(std::string_view text, char at) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t end = text.find(at);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\n')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\n')) text.remove_suffix(1);
  return text;
}

/// A number and what follows it.
bool parse_number(std::string_view text, uint64_t* value, std::string_view* rest) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  if (error != std::errc{}) return false;
  *rest = text.substr(static_cast<std::size_t>(end - text.data()));
  return true;
}

bool parse_time(std::string_view text, std::chrono::nanoseconds* time) {
  uint64_t value;
  std::string_view unit;
  if (!parse_number(text, &value, &unit)) return false;
  constexpr std::pair<std::string_view, uint64_t> kUnits[] = {
      {"ns", 1}, {"us", 1'000}, {"ms", 1'000'000}, {"s", 1'000'000'000}};
  for (const auto& [name, factor] : kUnits) {
    if (unit != name) continue;
    if (value > uint64_t{3'600'000'000'000} / factor) return false;  // an hour
    *time = std::chrono::nanoseconds(value * factor);
    return true;
  }
  return false;
}

bool matches(std::string_view pattern, std::string_view op) {
  if (pattern == "*" || pattern == op) return true;
  return pattern == "matmul" && (op == "mm" || op == "bmm" || op == "linear");
}

}  // namespace

std::string Faults::parse(std::string_view text, Order* order) {
  constexpr std::pair<std::string_view, Kind> kKinds[] = {
      {"fail", Kind::fail},       {"refuse", Kind::refuse}, {"unsupported", Kind::unsupported},
      {"corrupt", Kind::corrupt}, {"delay", Kind::delay},   {"oom", Kind::oom},
      {"lost", Kind::lost}};
  const auto parts = split(text, ':');
  std::string quoted(text);
  quoted.insert(quoted.begin(), '\'');
  quoted += '\'';
  bool known = false;
  for (const auto& [name, kind] : kKinds) {
    if (parts[0] != name) continue;
    order->kind = kind;
    known = true;
  }
  if (!known) return "expected fail, refuse, unsupported, corrupt, delay, oom, lost, clear or restore, got " + quoted;
  std::size_t at = 1;
  if (order->kind != Kind::oom && order->kind != Kind::lost) {
    if (at >= parts.size() || parts[at].empty()) return "expected the name of an op or *, in " + quoted;
    order->op = parts[at++];
  }
  std::string_view rest;
  if (at >= parts.size() || !parse_number(parts[at], &order->left, &rest) || !rest.empty() || order->left == 0) {
    return "expected a number from 1, in " + quoted;
  }
  ++at;
  if (at < parts.size() && parts[at] == "always" && order->kind != Kind::lost) {
    order->always = true;
    ++at;
  }
  if (order->kind == Kind::delay) {
    if (at >= parts.size() || !parse_time(parts[at], &order->delay)) {
      return "expected a time such as 50ms, at most an hour, in " + quoted;
    }
    ++at;
  }
  if (at != parts.size()) return "unexpected '" + std::string(parts[at]) + "' in " + quoted;
  return "";
}

std::string Faults::order(std::string_view orders, bool* restore) {
  std::vector<Order> added;
  bool clear = false, wants_restore = false;
  for (std::string_view text : split(orders, ';')) {
    text = trimmed(text);
    if (text.empty()) continue;
    if (text == "clear") {
      clear = true;
      added.clear();
    } else if (text == "restore") {
      wants_restore = true;
    } else {
      Order order{};
      if (std::string wrong = parse(text, &order); !wrong.empty()) return wrong;
      added.push_back(std::move(order));
    }
  }
  std::lock_guard lock(mutex_);
  if (clear) orders_.clear();
  orders_.insert(orders_.end(), added.begin(), added.end());
  *restore = wants_restore;
  return "";
}

bool Faults::counts_down(Order& order) {
  if (order.left > 1) {
    --order.left;
    return false;
  }
  if (!order.always) order.left = 0;
  return true;
}

void Faults::drop_done() {
  std::erase_if(orders_, [](const Order& order) { return order.left == 0; });
}

void Faults::add(const Order& order, FaultPlan* plan) {
  switch (order.kind) {
    case Kind::fail:
      plan->fail = true;
      break;
    case Kind::refuse:
      plan->refuse = true;
      break;
    case Kind::unsupported:
      plan->unsupported = true;
      break;
    case Kind::corrupt:
      plan->corrupt = true;
      break;
    case Kind::delay:
      plan->delay += order.delay;
      break;
    default:
      plan->lost = true;
  }
}

FaultPlan Faults::next_kernel(std::string_view op) {
  FaultPlan plan;
  std::lock_guard lock(mutex_);
  if (orders_.empty()) return plan;
  for (Order& order : orders_) {
    if (order.kind == Kind::oom || (order.kind != Kind::lost && !matches(order.op, op)) || !counts_down(order)) {
      continue;
    }
    add(order, &plan);
  }
  drop_done();
  return plan;
}

FaultPlan Faults::next_entry(std::string_view entry) {
  FaultPlan plan;
  std::lock_guard lock(mutex_);
  for (Order& order : orders_) {
    if (order.op == entry && counts_down(order)) add(order, &plan);
  }
  drop_done();
  return plan;
}

bool Faults::next_allocation() {
  bool fails = false;
  std::lock_guard lock(mutex_);
  for (Order& order : orders_) {
    if (order.kind == Kind::oom && counts_down(order)) fails = true;
  }
  drop_done();
  return fails;
}

}  // namespace sim
