// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "cli/options.h"
#include "cli/suggest.h"
#include "cli/verbs.h"
#include "halfstep/amp/autocast.h"
#include "halfstep/amp/policy.h"
#include "halfstep/train/config.h"

namespace halfstep::cli {
namespace {

struct OpsOptions {
  std::vector<std::string> names;
  std::string policy, amp = "f16";
  std::vector<std::string> explain;
  bool markdown = false;
};

std::vector<std::string> op_names() {
  std::vector<std::string> names;
  for (const amp::PolicyRow& row : amp::policy_table()) names.emplace_back(row.op);
  return names;
}

int run(const OpsOptions& o) {
  const auto region = as_usage([&] { return training::amp_dtype(o.amp); });
  if (!o.policy.empty() && !amp::parse_policy(o.policy)) {
    throw UsageError(fmt::format(
        "--policy: expected 'lower precision', float32, 'float32 output', widest, 'pass through', banned or 'low "
        "output', got '{}'",
        o.policy));
  }
  for (const std::string& name : o.names) {
    if (!find_op(name))
      throw UsageError(fmt::format("ops: there is no op called '{}'{}; `halfstep ops` lists them", name,
                                   did_you_mean(name, op_names())));
  }
  if (!o.explain.empty()) {
    if (o.names.size() != 1) throw UsageError("--explain: expected one op, as in `halfstep ops mm --explain f32 f32`");
    std::vector<DType> dtypes;
    for (const std::string& d : o.explain) {
      const auto dtype = parse_dtype(d);
      if (!dtype) throw UsageError(fmt::format("--explain: '{}' is no dtype", d));
      dtypes.push_back(*dtype);
    }
    const amp::Decision d = as_usage([&] {
      return amp::explain(o.names[0], dtypes, {.dtype = region.value_or(f16), .enabled = region.has_value()});
    });
    fmt::print("{}\n", d.str());
    return kDone;
  }
  const auto wanted = [&](const amp::PolicyRow& row) {
    if (!o.policy.empty() && row.policy != *amp::parse_policy(o.policy)) return false;
    return o.names.empty() || std::find(o.names.begin(), o.names.end(), row.op) != o.names.end();
  };
  if (o.markdown) fmt::print("| op | call | under autocast | why |\n| --- | --- | --- | --- |\n");
  for (const amp::PolicyRow& row : amp::policy_table()) {
    if (!wanted(row)) continue;
    const Op* op = find_op(row.op);
    if (o.markdown) {
      fmt::print("| `{}` | `{}` | {} | {} |\n", row.op, op ? op->signature : "", amp::name(row.policy), row.reason);
    } else {
      fmt::print("{:<30} {:<16} {}\n", row.op, amp::name(row.policy), row.reason);
    }
  }
  return kDone;
}

}  // namespace

void add_ops(CLI::App& program, int& status) {
  const Verb verb = add_verb(program, "ops", "List the ops and how autocast treats them");
  auto o = std::make_shared<OpsOptions>();
  verb.add_list("NAME", o->names, "Only these ops").value("");
  verb.add_option("--policy", o->policy, "Only ops of this class, such as 'lower precision'");
  verb.add_list("--explain", o->explain, "Print in which dtype a call of NAME with inputs of these dtypes would run")
      .values(1, 16)
      .split(',');
  add_word(verb, "--amp", o->amp, "Region for --explain: off, bf16 or f16");
  verb.add_switch("--markdown", o->markdown, "Print a table for the docs");
  verb.run([o, &status] { status = run(*o); });
}

}  // namespace halfstep::cli
