// SPDX-License-Identifier: Apache-2.0
#include "halfstep/conformance/device_record.h"

#include <cctype>
#include <cstdlib>
#include <ctime>
#include <nlohmann/json.hpp>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/io/atomic_file.h"

namespace halfstep::conformance {
namespace {

namespace fs = std::filesystem;

constexpr std::uintmax_t kMostBytes = 1 << 16;

// `cuda-nvidia-h200.json`: one file a kind of hardware, so that nothing has to be read to be written.
fs::path file_of(const std::string& kind, const std::string& hardware, const fs::path& folder) {
  std::string name = kind + "-";
  for (char c : hardware) {
    const auto u = static_cast<unsigned char>(c);
    if (std::isalnum(u)) {
      name += static_cast<char>(std::tolower(u));
    } else if (name.back() != '-') {
      name += '-';
    }
  }
  while (name.back() == '-') name.pop_back();
  return folder / (name + ".json");
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  return fmt::format("{:04}-{:02}-{:02}", parts.tm_year + 1900, parts.tm_mon + 1, parts.tm_mday);
}

}  // namespace

std::string kind_of(Device device) {
  const std::string text = device.str();
  return text.substr(0, text.find(':'));
}

fs::path device_records_folder() {
  // The base directory specification: a path that is not absolute is to be passed over.
  if (const char* state = std::getenv("XDG_STATE_HOME"); state && state[0] == '/') {
    return fs::path(state) / "halfstep" / "devices";
  }
  if (const char* home = std::getenv("HOME"); home && home[0] == '/') {
    return fs::path(home) / ".local" / "state" / "halfstep" / "devices";
  }
  return {};
}

DeviceRecord make_device_record(const DeviceInfo& device, double seconds) {
  return {.kind = kind_of(device.device),
          .hardware = device.name,
          .version = device.version,
          .halfstep = HALFSTEP_VERSION,
          .date = today(),
          .seconds = fmt::format("{:.0f}", seconds)};
}

void save_device_record(const DeviceRecord& record, const fs::path& folder) {
  if (folder.empty()) fail<IoError>("save_device_record: there is neither XDG_STATE_HOME nor HOME");
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) fail<IoError>("{}: can't be made: {}", shown_path(folder), error.message());
  const nlohmann::ordered_json json = {{"kind", record.kind},       {"hardware", record.hardware},
                                       {"version", record.version}, {"halfstep", record.halfstep},
                                       {"date", record.date},       {"seconds", record.seconds}};
  const std::string text = json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  io::AtomicFile file(file_of(record.kind, record.hardware, folder));
  file.write(text.data(), text.size());
  file.commit();
}

std::optional<DeviceRecord> load_device_record(const DeviceInfo& device, const fs::path& folder) {
  if (folder.empty()) return {};
  const std::string kind = kind_of(device.device);
  const fs::path path = file_of(kind, device.name, folder);
  std::error_code error;
  if (!fs::is_regular_file(path, error)) return {};
  try {
    const auto json = nlohmann::json::parse(io::read_file(path, kMostBytes));
    const auto text = [&](const char* key) { return json.at(key).get<std::string>(); };
    DeviceRecord record{.kind = text("kind"),
                        .hardware = text("hardware"),
                        .version = text("version"),
                        .halfstep = text("halfstep"),
                        .date = text("date"),
                        .seconds = text("seconds")};
    // Two names may come to the same file.
    if (record.kind != kind || record.hardware != device.name) return {};
    return record;
  } catch (const nlohmann::json::exception&) {  // damaged: as if it had never been checked
    return {};
  } catch (const IoError&) {
    return {};
  }
}

bool is_current(const DeviceRecord& record, const DeviceInfo& device) {
  return record.version == device.version && record.halfstep == HALFSTEP_VERSION;
}

bool needs_check(Device device) { return !device.is_cpu() && device_extension(device, "needs_check") != nullptr; }

}  // namespace halfstep::conformance
