// SPDX-License-Identifier: Apache-2.0
// Which libraries are taken for plug-ins, and what is said of those that aren't: versions of the interface, tables of
// other lengths, entries that are missing, files that are something else. Each table ends where readable memory ends
// (tests/runtime/plugins).
#include "halfstep/runtime/plugin_loader.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "halfstep/core/device.h"
#include "halfstep/core/error.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/devices.h"
#include "halfstep/runtime/fallback.h"
#include "halfstep/runtime/queue.h"
#include "tests/support/test_data.h"

namespace halfstep {
namespace {

namespace fs = std::filesystem;

const fs::path kFolder = HALFSTEP_TINY_PLUGINS;

std::string library(const std::string& name) { return kFolder / ("libhalfstep_tiny_" + name + ".so"); }

/// What load_plugin() says against a library; empty when it takes it.
std::string refusal(const std::string& path) {
  try {
    load_plugin(path);
  } catch (const DeviceError& e) {
    return e.what();
  }
  return {};
}
std::string refusal_of(const std::string& name) { return refusal(library(name)); }

testing::AssertionResult says(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    if (text.find(part) == std::string::npos)
      return testing::AssertionFailure() << "'" << part << "' is not in: " << text;
  }
  return testing::AssertionSuccess();
}

std::string version(int major, int minor) { return std::to_string(major) + "." + std::to_string(minor); }
const std::string kHere = version(HALFSTEP_PLUGIN_MAJOR, HALFSTEP_PLUGIN_MINOR);

/// A device that was accepted works: memory, copies, its own kernel, ops that it lacks.
void use(const std::string& kind) {
  const Device device(kind);
  const Tensor host = tensor({1.5, -2.5, 3.0, 4.0, 5.0, 6.0}, {2, 3});
  const Tensor x = host.to(device);
  EXPECT_EQ((x + x).to(Device{}).to_vector<float>(), (std::vector<float>{3, -5, 6, 8, 10, 12}));
  reset_fallback_counts();
  EXPECT_EQ(x.to(i32).to(Device{}).to_vector<std::int64_t>(), (std::vector<std::int64_t>{1, -2, 3, 4, 5, 6}));
  EXPECT_TRUE(fallback_counts().empty());
  synchronize(device);
}

TEST(PluginLoader, TakesAWholeTable) {
  if (device_count("tiny") > 0) GTEST_SKIP() << "a test that ran before has taken it";
  const PluginReport report = load_plugin(library("whole"));
  EXPECT_EQ(report.kind, "tiny");
  EXPECT_EQ(report.vendor, "Tiny vendor");
  EXPECT_EQ(report.version, "0.1");
  EXPECT_EQ(report.devices, 1);
  EXPECT_EQ(report.error, "");
  EXPECT_EQ(plugin_reports().back().path, library("whole"));
  use("tiny");
  EXPECT_NE(device_extension(Device("tiny"), "answer"), nullptr);
  EXPECT_EQ(device_extension(Device("tiny"), "question"), nullptr);
}

TEST(PluginLoader, TakesAnOlderMinorWhoseTableIsShorter) {
  load_plugin(library("older"));
  use("tiny_older");
  // What its table has no room for is absent, though the library would have had it.
  EXPECT_EQ(device_extension(Device("tiny_older"), "answer"), nullptr);
  const DeviceInfo info = device_info(Device("tiny_older"));
  EXPECT_FALSE(info.pinned || info.graphs || info.collectives || info.profile);
}

TEST(PluginLoader, TakesANewerMinorAndPassesOverWhatItAdds) {
  load_plugin(library("newer"));
  use("tiny_newer");
  EXPECT_NE(device_extension(Device("tiny_newer"), "answer"), nullptr);
  EXPECT_FALSE(device_info(Device("tiny_newer")).collectives);
}

TEST(PluginLoader, AnEntryThatTheEndCutsThroughIsAbsent) {
  load_plugin(library("cut"));
  use("tiny_cut");
  EXPECT_EQ(device_extension(Device("tiny_cut"), "answer"), nullptr);
}

TEST(PluginLoader, RefusesAnotherMajorAndNamesBothVersions) {
  EXPECT_TRUE(says(refusal_of("other_major"), {library("other_major"), version(HALFSTEP_PLUGIN_MAJOR + 1, 7), kHere}));
  // Of another major nothing is known but where its version stands.
  EXPECT_TRUE(
      says(refusal_of("other_major_short"), {version(HALFSTEP_PLUGIN_MAJOR + 1, HALFSTEP_PLUGIN_MINOR), kHere}));
  EXPECT_EQ(device_count("tiny_other"), 0);
}

TEST(PluginLoader, NamesTheMandatoryEntriesThatAShortTableLacks) {
  const std::string text = refusal_of("short");
  EXPECT_TRUE(says(text, {"event_record, event_query, event_synchronize, event_elapsed, kernel",
                          std::to_string(offsetof(halfstep_plugin_table, event_record)) + " bytes", kHere}));
  EXPECT_EQ(text.find("event_destroy"), std::string::npos) << text;  // the last one that is there
  EXPECT_TRUE(says(refusal_of("nameless"), {"name, device_count, device_info, error, synchronize, allocate"}));
  EXPECT_TRUE(says(refusal_of("no_version"), {"at least", "8"}));
}

TEST(PluginLoader, NamesAMissingEntryInTheMiddle) {
  EXPECT_TRUE(refusal_of("no_queue_wait").ends_with("lacks mandatory entries: queue_wait"));
  EXPECT_TRUE(refusal_of("no_name").ends_with("lacks mandatory entries: name"));
}

TEST(PluginLoader, RefusesWhatIsNoPlugin) {
  EXPECT_TRUE(says(refusal_of("no_symbol"), {"exports no function halfstep_plugin"}));
  EXPECT_TRUE(says(refusal_of("null"), {"can't be used here"}));
  EXPECT_TRUE(says(refusal_of("nowhere"), {library("nowhere"), "no such file"}));
  EXPECT_TRUE(says(refusal(kFolder), {"not a file"}));
  const test::TemporaryDir folder;
  const fs::path text = folder.path() / "libhalfstep_text.so", pipe = folder.path() / "libhalfstep_pipe.so";
  std::ofstream(text) << "This is no library.\n";
  EXPECT_TRUE(says(refusal(text), {text, "can't be opened"}));
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_TRUE(says(refusal(pipe), {"not a file"}));  // to open it would wait for a writer
}

TEST(PluginLoader, RefusesAFileThatAnybodyMayWrite) {
  const test::TemporaryDir folder;
  const fs::path open = folder.path() / "libhalfstep_open.so";
  fs::copy_file(library("whole"), open);
  ASSERT_EQ(chmod(open.c_str(), 0777), 0);
  EXPECT_TRUE(says(refusal(open), {open, "anybody may write", "777"}));
}

TEST(PluginLoader, RefusesNamesThatDevicesCantHave) {
  EXPECT_TRUE(says(refusal_of("bad_name"), {"lower-case letters", "'Bad-Name'"}));
  EXPECT_TRUE(says(refusal_of("cpu"), {"other than cpu", "'cpu'"}));
  EXPECT_TRUE(says(refusal_of("meta"), {"other than cpu and meta", "'meta'"}));
}

TEST(PluginLoader, RefusesANameThatIsTakenAndALibraryThatIsThere) {
  if (device_count("tiny") == 0) load_plugin(library("whole"));
  EXPECT_TRUE(says(refusal_of("taken"), {"'tiny' already", library("whole")}));
  EXPECT_TRUE(says(refusal_of("whole"), {"loaded already"}));
  use("tiny");
}

TEST(PluginLoader, ADriverWithoutDevicesIsNoError) {
  EXPECT_EQ(load_plugin(library("no_devices")).devices, 0);
  EXPECT_EQ(device_count("tiny_no_devices"), 0);
  EXPECT_THROW(Device("tiny_no_devices"), DeviceError);
}

TEST(PluginLoader, ADeviceThatCantBeDescribedIsRefusedWithItsReason) {
  EXPECT_TRUE(says(refusal_of("unable"), {"tiny_unable:0", "its cable is unplugged"}));
  EXPECT_EQ(device_count("tiny_unable"), 0);
}

TEST(PluginLoader, RefusalsAreReported) {
  const std::size_t before = plugin_reports().size();
  const std::string why = refusal_of("never_there");
  ASSERT_EQ(plugin_reports().size(), before + 1);
  const PluginReport report = plugin_reports().back();
  EXPECT_EQ(report.path, library("never_there"));
  EXPECT_EQ(report.kind, "");
  EXPECT_EQ(report.error, why);
}

TEST(PluginLoader, AKernelThatWantsContiguousTensorsIsNotAskedToMakeThem) {
  if (device_count("tiny") == 0) load_plugin(library("whole"));
  const Tensor x = tensor({1.0, 2.0, 3.0, 4.0}, {2, 2}).to(Device("tiny"));
  reset_fallback_counts();
  EXPECT_EQ(x.transpose(0, 1).to(i32).to(Device{}).contiguous().to_vector<std::int64_t>(),
            (std::vector<std::int64_t>{1, 3, 2, 4}));
  EXPECT_FALSE(fallback_counts().empty());
}

// The search through the environment happens once a program: it is another one.
class PluginSearch : public testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
  /// Exit status 0 when the kinds that `HALFSTEP_PLUGINS` brings are those of `kinds`. The other program has run the
  /// test up to here too, and leaves by no destructor: its folder is removed here.
  [[noreturn]] static void search(const std::string& list, const std::vector<std::string>& kinds,
                                  const fs::path& folder = {}) {
    setenv("HALFSTEP_PLUGINS", list.c_str(), 1);
    setenv("HALFSTEP_PLUGIN_DIR", "/nonexistent", 1);
    std::vector<std::string> found;
    for (const DeviceInfo& d : devices()) {
      if (!d.device.is_cpu()) found.push_back(d.device.str());
    }
    if (!folder.empty()) fs::remove_all(folder);
    _exit(found == kinds ? 0 : 1);
  }
};

TEST_F(PluginSearch, TakesFilesAndFoldersAndGoesOnAfterErrors) {
  const test::TemporaryDir folder;
  fs::copy_file(library("newer"), folder.path() / "libhalfstep_b.so");
  fs::copy_file(library("older"), folder.path() / "libhalfstep_a.so");
  fs::copy_file(library("cut"), folder.path() / "other.so");
  fs::create_symlink("round", folder.path() / "round");  // to itself
  const std::string list = library("nowhere") + "::" + (folder.path() / "round").string() + ":" +
                           std::string(300, 'a') + ":" + library("other_major") + ":" + folder.path().string() + ":" +
                           library("whole") + ":" + library("whole");
  EXPECT_EXIT(search(list, {"tiny_older:0", "tiny_newer:0", "tiny:0"}, folder.path()), testing::ExitedWithCode(0),
              "no such file(.|\n)*made for version");
}

TEST_F(PluginSearch, ANameWithoutAFolderIsAFileHere) {
  EXPECT_EXIT(
      {
        fs::current_path(kFolder);
        search("libhalfstep_tiny_whole.so", {"tiny:0"});
      },
      testing::ExitedWithCode(0), "");
}

TEST_F(PluginSearch, AnUnknownDeviceIsNamedWithThoseThereAre) {
  EXPECT_EXIT(
      {
        setenv("HALFSTEP_PLUGINS", library("whole").c_str(), 1);
        setenv("HALFSTEP_PLUGIN_DIR", "/nonexistent", 1);
        try {
          Device("tinny");
        } catch (const DeviceError& e) {
          std::fprintf(stderr, "%s\n", e.what());
          _exit(3);
        }
        _exit(0);
      },
      testing::ExitedWithCode(3), "cpu, meta, tiny, got 'tinny'");
}

}  // namespace
}  // namespace halfstep
