// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "cli/options.h"
#include "cli/suggest.h"
#include "cli/terminal.h"
#include "cli/verbs.h"
#include "halfstep/core/error.h"
#include "halfstep/core/text.h"
#include "halfstep/data/fetch.h"

namespace halfstep::cli {
namespace {

namespace fs = std::filesystem;

struct Arguments {
  std::string action, name;
  fs::path out;
  bool quiet = false;
  data::FetchOptions options;
};

double megabytes(std::uint64_t bytes) { return static_cast<double>(bytes) / 1e6; }

std::string size_text(std::uint64_t bytes) {
  return bytes < 1000000 ? fmt::format("{:.1f} kB", static_cast<double>(bytes) / 1e3)
                         : fmt::format("{:.1f} MB", megabytes(bytes));
}

// Fetches, with a bar on a terminal.
void fetch(const Arguments& arguments, const data::DataSetInfo& set) {
  ProgressBar bar(is_terminal(STDOUT_FILENO) && !arguments.quiet);
  const auto say = [&](const std::string& text) {
    bar.clear();
    if (arguments.quiet) return;
    fmt::print("{}\n", printable_lines(text));
    std::fflush(stdout);
  };
  data::FetchOptions options = arguments.options;
  options.stop = &g_stop;
  options.on_message = say;
  std::string file;
  std::uint64_t first = 0;
  auto start = std::chrono::steady_clock::now();
  options.progress = [&](const data::FetchProgress& p) {
    if (p.unpacking) {
      bar.update("unpacking " + p.file, static_cast<std::int64_t>(p.done), static_cast<std::int64_t>(p.total), "");
      return;
    }
    const auto now = std::chrono::steady_clock::now();
    if (p.file != file || p.done < first) {
      file = p.file;
      first = p.done;
      start = now;
    }
    const double seconds = std::chrono::duration<double>(now - start).count();
    const std::string rate =
        seconds > 0.5 ? fmt::format("  {:.1f} MB/s", megabytes(p.done - first) / seconds) : std::string();
    bar.update(p.file, static_cast<std::int64_t>(p.done), static_cast<std::int64_t>(std::max(p.total, p.done)),
               fmt::format("{:.1f}/{:.1f} MB{}", megabytes(p.done), megabytes(p.total), rate));
  };
  const data::FetchReport report = data::fetch(set.name, arguments.out, options);
  const std::string folder = shown_path(report.folder);
  say(fmt::format("{}: {} pictures for training, {} for the test; try: {}", folder, report.training, report.test,
                  fmt::format(fmt::runtime(set.command), folder)));
}

void print_list() {
  for (const data::DataSetInfo& set : data::data_sets()) {
    fmt::print("{:<14} {:>7}  {}; {}\n", set.name, size_text(set.bytes), set.description, set.terms);
  }
}

int run(const Arguments& o) {
  std::vector<std::string> names;
  const std::vector<data::DataSetInfo> sets = data::data_sets();
  for (const data::DataSetInfo& set : sets) names.push_back(set.name);
  const std::string choices = fmt::format("{} or list", fmt::join(names, ", "));
  if (o.action != "fetch") {
    throw UsageError(fmt::format("data: expected `halfstep data fetch NAME`, got '{}'{}", o.action,
                                 did_you_mean(o.action, {"fetch"})));
  }
  if (o.name.empty()) throw UsageError(fmt::format("data fetch: expected the name of a data set: {}", choices));
  if (o.name == "list") {
    print_list();
    return kDone;
  }
  const auto set = std::find(names.begin(), names.end(), o.name);
  if (set == names.end()) {
    throw UsageError(fmt::format("data fetch: expected {}, got '{}'{}", choices, o.name, did_you_mean(o.name, names)));
  }
  const auto with_host = [&](std::string_view scheme) {
    const std::string& mirror = o.options.mirror;
    return mirror.starts_with(scheme) && mirror.size() > scheme.size() &&
           std::string_view("/?#").find(mirror[scheme.size()]) == std::string_view::npos;
  };
  if (!o.options.mirror.empty() && !with_host("http://") && !with_host("https://")) {
    throw UsageError(
        fmt::format("--mirror: expected the URL of a folder, http://... or https://..., got '{}'", o.options.mirror));
  }
  refuse_many_processes("data fetch");
  catch_signals();
  try {
    fetch(o, sets[static_cast<std::size_t>(set - names.begin())]);
  } catch (const data::Interrupted&) {
    complain("interrupted; what was downloaded is kept, and the same command resumes");
    return 128 + g_signal.load();
  }
  return kDone;
}

}  // namespace

void add_data(CLI::App& program, int& status) {
  const Verb verb = add_verb(program, "data", "Fetch a public data set: halfstep data fetch NAME");
  auto o = std::make_shared<Arguments>();
  verb.add_option("ACTION", o->action, "fetch").required().value("");
  std::vector<std::string> names;
  for (const data::DataSetInfo& set : data::data_sets()) names.push_back(set.name);
  verb.add_option("NAME", o->name, fmt::format("Data set: {}; or list", fmt::join(names, ", "))).value("");
  add_path(verb, "--out", o->out, "Folder for the data set (default: data/NAME)");
  add_word(verb, "--mirror", o->options.mirror, "URL of a folder with the same files").value("URL");
  add_path(verb, "--checksums", o->options.checksums,
           "SHA-256 sums of a mirror's own files, as sha256sum prints them, in place of the published ones");
  add_whole(verb, "--timeout", o->options.timeout_s, 1, 3600, "Seconds without data before giving up on a server");
  add_whole(verb, "--tries", o->options.tries, 1, 100, "Number of attempts without progress");
  verb.add_switch("--keep", o->options.keep, "Keep the downloaded files beside what they are unpacked to");
  verb.add_switch("--force", o->options.force, "Fetch again and replace existing files");
  verb.add_switch("--quiet,-q", o->quiet, "Print errors only");
  verb.run([o, &status] { status = run(*o); });
}

}  // namespace halfstep::cli
