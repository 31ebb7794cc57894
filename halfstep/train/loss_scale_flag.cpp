// SPDX-License-Identifier: Apache-2.0
// --loss-scale: every policy of amp/loss_scale.h by its name.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <span>
#include <string_view>

#include "halfstep/core/fail.h"
#include "halfstep/train/config.h"

namespace halfstep::training {
namespace {

enum class Kind { real, whole, count, yes_no };  // counts begin at 0, other whole numbers at 1

struct Parameter {
  const char* name;
  double standard;
  Kind kind = Kind::real;
};

// Values by their parameters' places.
using Values = std::vector<double>;

struct Form {
  const char* name;
  std::vector<Parameter> parameters;
  std::function<amp::LossScalePolicy(const Values&)> make;
};

int as_int(double value) { return static_cast<int>(value); }

// The parameters of a policy are called as in the system that it is of, with that system's defaults.
const std::vector<Form>& all_forms() {
  static const std::vector<Form> forms = [] {
    const amp::TorchScale torch;
    const amp::ApexScale apex;
    const amp::KerasScale keras;
    const amp::JmpScale jmp;
    const amp::DeepSpeedScale deep;
    const amp::MegatronScale mega;
    const auto make_torch = [](const Values& v) {
      return amp::LossScalePolicy::torch(
          {.init_scale = v[0], .growth_factor = v[1], .backoff_factor = v[2], .growth_interval = as_int(v[3])});
    };
    const std::vector<Parameter> of_torch = {
        {"init_scale", torch.init_scale},
        {"growth_factor", torch.growth_factor},
        {"backoff_factor", torch.backoff_factor},
        {"growth_interval", static_cast<double>(torch.growth_interval), Kind::whole}};
    // The library's own: all of amp::LossScaleRules, under their names there.
    const amp::LossScaleRules rules;
    std::vector<Parameter> of_rules = of_torch;
    of_rules.insert(of_rules.end(), {{"floor", rules.floor},
                                     {"cap", rules.cap},
                                     {"hysteresis", static_cast<double>(rules.hysteresis), Kind::whole},
                                     {"refill_on_good_step", rules.refill_on_good_step ? 1.0 : 0.0, Kind::yes_no},
                                     {"late_growth", rules.late_growth ? 1.0 : 0.0, Kind::yes_no},
                                     {"error_at_floor", rules.error_at_floor ? 1.0 : 0.0, Kind::yes_no},
                                     {"overflow_limit", static_cast<double>(rules.overflow_limit), Kind::count}});
    const auto make_rules = [](const Values& v) {
      return amp::LossScalePolicy({.init_scale = v[0],
                                   .growth_factor = v[1],
                                   .backoff_factor = v[2],
                                   .growth_interval = as_int(v[3]),
                                   .floor = v[4],
                                   .cap = v[5],
                                   .hysteresis = as_int(v[6]),
                                   .refill_on_good_step = v[7] != 0,
                                   .late_growth = v[8] != 0,
                                   .error_at_floor = v[9] != 0,
                                   .overflow_limit = as_int(v[10])});
    };
    constexpr double kMindsporeScale = 0x1p24, kMindsporeWindow = 2000;  // the defaults of LossScalePolicy::mindspore
    return std::vector<Form>{
        {"dynamic", of_rules, make_rules},
        {"torch", of_torch, make_torch},
        {"mindspore",
         {{"init_scale", kMindsporeScale},
          {"scale_factor", 2},
          {"scale_window", kMindsporeWindow, Kind::whole},
          {"overflow_limit", 0, Kind::count}},
         [](const Values& v) {
           // A limit as amp::DynamicLossScaleManager has one.
           amp::LossScaleRules r = amp::LossScalePolicy::mindspore(v[0], v[1], as_int(v[2])).rules();
           r.overflow_limit = as_int(v[3]);
           return amp::LossScalePolicy(r);
         }},
        {"apex",
         {{"init_scale", apex.init_scale},
          {"scale_factor", apex.scale_factor},
          {"scale_window", static_cast<double>(apex.scale_window), Kind::whole},
          {"min_loss_scale", apex.min_loss_scale},
          {"max_loss_scale", apex.max_loss_scale}},
         [](const Values& v) {
           return amp::LossScalePolicy::apex({.init_scale = v[0],
                                              .scale_factor = v[1],
                                              .scale_window = as_int(v[2]),
                                              .min_loss_scale = v[3],
                                              .max_loss_scale = v[4]});
         }},
        {"keras",
         {{"initial_scale", keras.initial_scale},
          {"dynamic_growth_steps", static_cast<double>(keras.dynamic_growth_steps), Kind::whole}},
         [](const Values& v) {
           return amp::LossScalePolicy::keras({.initial_scale = v[0], .dynamic_growth_steps = as_int(v[1])});
         }},
        {"jmp",
         {{"loss_scale", jmp.loss_scale},
          {"period", static_cast<double>(jmp.period), Kind::whole},
          {"factor", jmp.factor},
          {"min_loss_scale", jmp.min_loss_scale}},
         [](const Values& v) {
           return amp::LossScalePolicy::jmp(
               {.loss_scale = v[0], .period = as_int(v[1]), .factor = v[2], .min_loss_scale = v[3]});
         }},
        {"deepspeed",
         {{"init_scale", deep.init_scale},
          {"scale_factor", deep.scale_factor},
          {"scale_window", static_cast<double>(deep.scale_window), Kind::whole},
          {"min_scale", deep.min_scale},
          {"hysteresis", static_cast<double>(deep.hysteresis), Kind::whole},
          {"consecutive_hysteresis", deep.consecutive_hysteresis ? 1.0 : 0.0, Kind::yes_no},
          {"raise_error_at_min_scale", deep.raise_error_at_min_scale ? 1.0 : 0.0, Kind::yes_no}},
         [](const Values& v) {
           return amp::LossScalePolicy::deepspeed({.init_scale = v[0],
                                                   .scale_factor = v[1],
                                                   .scale_window = as_int(v[2]),
                                                   .min_scale = v[3],
                                                   .hysteresis = as_int(v[4]),
                                                   .consecutive_hysteresis = v[5] != 0,
                                                   .raise_error_at_min_scale = v[6] != 0});
         }},
        {"megatron",
         {{"initial_scale", mega.initial_scale},
          {"min_scale", mega.min_scale},
          {"growth_factor", mega.growth_factor},
          {"backoff_factor", mega.backoff_factor},
          {"growth_interval", static_cast<double>(mega.growth_interval), Kind::whole},
          {"hysteresis", static_cast<double>(mega.hysteresis), Kind::whole}},
         [](const Values& v) {
           return amp::LossScalePolicy::megatron({.initial_scale = v[0],
                                                  .min_scale = v[1],
                                                  .growth_factor = v[2],
                                                  .backoff_factor = v[3],
                                                  .growth_interval = as_int(v[4]),
                                                  .hysteresis = as_int(v[5])});
         }},
    };
  }();
  return forms;
}

std::string names_of(const Form& form) {
  std::vector<std::string> names;
  for (const Parameter& p : form.parameters) names.emplace_back(p.name);
  return fmt::format("{}", fmt::join(names, ","));
}

// `expected` is what stands before the value that came.
[[noreturn]] void refuse(const std::string& expected, std::string_view got) {
  fail<Error>("--loss-scale: expected {}, got '{}'", expected, got);
}

// A line of it; loss_scale_forms() has all.
std::string choices() {
  std::string text = "none, N, fixed:N, ";
  for (const Form& form : all_forms())
    text += fmt::format("{}{}", &form == &all_forms().front() ? "" : ", ", form.name);
  return text + ", with values behind a colon as `halfstep train --help` has them";
}

double number(std::string_view text, const std::string& whole) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || !std::isfinite(value)) {
    refuse(choices(), whole);
  }
  return value;
}

double value_of(const Parameter& p, std::string_view text, const std::string& whole) {
  if (p.kind == Kind::yes_no) {
    for (const char* yes : {"1", "true", "yes"}) {
      if (text == yes) return 1;
    }
    for (const char* no : {"0", "false", "no"}) {
      if (text == no) return 0;
    }
    refuse(fmt::format("true or false for {} in '{}'", p.name, whole), text);
  }
  const double value = number(text, whole);
  const int least = p.kind == Kind::count ? 0 : 1;
  if (p.kind != Kind::real && (!(value >= least) || value > 1e9 || value != std::floor(value))) {
    refuse(fmt::format("a whole number of at least {} for {} in '{}'", least, p.name, whole), text);
  }
  return value;
}

// `1024,2,growth_interval=50`: first those without a name, in order.
Values values_of(const Form& form, std::string_view list, const std::string& whole) {
  Values values;
  for (const Parameter& p : form.parameters) values.push_back(p.standard);
  std::vector<bool> given(values.size(), false);
  std::size_t unnamed = 0;
  bool named = false;
  for (std::size_t at = 0; at <= list.size();) {
    const std::size_t comma = std::min(list.find(',', at), list.size());
    std::string_view part = list.substr(at, comma - at);
    at = comma + 1;
    std::size_t place = unnamed;
    if (const std::size_t equals = part.find('='); equals != std::string_view::npos) {
      named = true;
      const std::string_view name = part.substr(0, equals);
      const auto it = std::find_if(form.parameters.begin(), form.parameters.end(),
                                   [&](const Parameter& p) { return name == p.name; });
      if (it == form.parameters.end()) {
        refuse(fmt::format("one of {} as a name in '{}'", names_of(form), whole), name);
      }
      place = static_cast<std::size_t>(it - form.parameters.begin());
      part = part.substr(equals + 1);
    } else if (named || place >= values.size()) {
      refuse(fmt::format("{}:{}, values with a name last, in '{}'", form.name, names_of(form), whole), part);
    } else {
      ++unnamed;
    }
    if (given[place]) refuse(fmt::format("{} once in '{}'", form.parameters[place].name, whole), "it twice");
    given[place] = true;
    values[place] = value_of(form.parameters[place], part, whole);
  }
  return values;
}

amp::LossScalePolicy policy_of(const std::string& text) {
  const std::size_t colon = text.find(':');
  const bool has_list = colon != std::string::npos;
  const std::string_view view = text;
  const std::string_view name = view.substr(0, colon);
  if (name == "fixed" && has_list) return amp::LossScalePolicy::fixed(number(view.substr(colon + 1), text));
  for (const Form& form : all_forms()) {
    if (name != form.name) continue;
    if (has_list) return form.make(values_of(form, view.substr(colon + 1), text));
    Values values;
    for (const Parameter& p : form.parameters) values.push_back(p.standard);
    return form.make(values);
  }
  return amp::LossScalePolicy::fixed(number(view, text));
}

}  // namespace

std::string loss_scale_forms() {
  std::string text = "none, N, fixed:N";
  for (const Form& form : all_forms()) {
    const bool last = &form == &all_forms().back();
    text += fmt::format("{}{}[:{}]", last ? " or " : ", ", form.name, names_of(form));
  }
  return text + " (values may be left out from the end, and named: megatron:hysteresis=4)";
}

std::optional<amp::LossScalePolicy> parse_loss_scale(const std::string& text) {
  if (text == "none") return std::nullopt;
  try {
    return policy_of(text);
  } catch (const AmpError& e) {
    fail<Error>("--loss-scale '{}': {}", text, e.what());
  }
}

std::optional<amp::LossScalePolicy> loss_scale_policy(const TrainConfig& config) {
  if (!config.loss_scale.empty()) return parse_loss_scale(config.loss_scale);
  if (amp_mode(config).dtype() == DType::f16) return amp::LossScalePolicy::torch();
  return std::nullopt;
}

amp::GradScaler make_scaler(const TrainConfig& config) {
  const auto policy = loss_scale_policy(config);
  return policy ? amp::GradScaler(*policy) : amp::GradScaler({.enabled = false});
}

std::string loss_scale_text(const TrainConfig& config) {
  if (!config.loss_scale.empty()) return config.loss_scale;
  const auto policy = loss_scale_policy(config);
  if (!policy) return "none";
  const amp::LossScaleRules& r = policy->rules();
  return fmt::format("dynamic:{},{},{},{}", r.init_scale, r.growth_factor, r.backoff_factor, r.growth_interval);
}

std::map<std::string, double> loss_scale_rules(const amp::LossScalePolicy& policy) {
  const amp::LossScaleRules& r = policy.rules();
  const auto yes = [](bool on) { return on ? 1.0 : 0.0; };
  if (!r.dynamic) return {{"dynamic", 0}, {"init_scale", r.init_scale}};
  return {{"dynamic", 1},
          {"growth_factor", r.growth_factor},
          {"backoff_factor", r.backoff_factor},
          {"growth_interval", r.growth_interval},
          {"floor", r.floor},
          {"cap", r.cap},
          {"hysteresis", r.hysteresis},
          {"refill_on_good_step", yes(r.refill_on_good_step)},
          {"late_growth", yes(r.late_growth)},
          {"error_at_floor", yes(r.error_at_floor)},
          {"overflow_limit", r.overflow_limit}};
}

}  // namespace halfstep::training
