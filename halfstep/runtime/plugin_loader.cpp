// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/plugin_loader.h"

#include <dlfcn.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <utility>

#include "halfstep/core/fail.h"
#include "halfstep/runtime/device_backend.h"
#include "halfstep/runtime/float32_precision_internal.h"
#include "halfstep/runtime/kernel.h"
#include "halfstep/runtime/log.h"

namespace halfstep {
namespace {

namespace fs = std::filesystem;

struct Loader {
  std::recursive_mutex mutex;  // a plug-in's log sink may ask for devices
  bool searched = false;
  std::vector<PluginReport> reports;
  std::vector<void*> opened;  // libraries whose function has been called, which happens once
};
Loader& loader() {
  static Loader& instance = *new Loader;
  return instance;
}

// The table as this version knows it: what lies behind the plug-in's end is absent, and so is an entry that the end
// cuts through.
halfstep_plugin_table whole_table(const halfstep_plugin_table& given) {
  halfstep_plugin_table table;
  std::memset(&table, 0, sizeof(table));
  const std::size_t known = std::min<std::size_t>(given.size, sizeof(table));
  std::memcpy(&table, &given,
              known < offsetof(halfstep_plugin_table, name) ? known : known / sizeof(void*) * sizeof(void*));
  return table;
}

// Groups of entries are there as a whole or not at all.
template <class... F>
void all_or_none(F&... entries) {
  if ((... && (entries != nullptr))) return;
  ((entries = nullptr), ...);
}

void check_table(const halfstep_plugin_table& t, std::uint32_t size, const std::string& origin) {
  if (size < offsetof(halfstep_plugin_table, name)) {
    fail<DeviceError>("plug-in {}: expected a table of at least {} bytes, got one that says {}", origin,
                      offsetof(halfstep_plugin_table, name), size);
  }
  if (t.major != HALFSTEP_PLUGIN_MAJOR) {
    fail<DeviceError>("plug-in {}: it was made for version {}.{} of the plug-in interface, this Halfstep has {}.{}",
                      origin, t.major, t.minor, HALFSTEP_PLUGIN_MAJOR, HALFSTEP_PLUGIN_MINOR);
  }
  std::string missing;
  const auto need = [&](const void* entry, const char* what) {
    if (!entry) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", what);
  };
  const auto need_function = [&](auto* entry, const char* what) { need(reinterpret_cast<const void*>(entry), what); };
  need(t.name, "name");
  need_function(t.device_count, "device_count");
  need_function(t.device_info, "device_info");
  need_function(t.error, "error");
  need_function(t.synchronize, "synchronize");
  need_function(t.allocate, "allocate");
  need_function(t.deallocate, "deallocate");
  need_function(t.memory_info, "memory_info");
  need_function(t.copy, "copy");
  need_function(t.queue_create, "queue_create");
  need_function(t.queue_destroy, "queue_destroy");
  need_function(t.queue_synchronize, "queue_synchronize");
  need_function(t.queue_query, "queue_query");
  need_function(t.queue_wait, "queue_wait");
  need_function(t.event_create, "event_create");
  need_function(t.event_destroy, "event_destroy");
  need_function(t.event_record, "event_record");
  need_function(t.event_query, "event_query");
  need_function(t.event_synchronize, "event_synchronize");
  need_function(t.event_elapsed, "event_elapsed");
  need_function(t.kernel, "kernel");
  if (!missing.empty()) {
    fail<DeviceError>("plug-in {}: its table of {} bytes (version {}.{}) lacks mandatory entries: {}", origin, size,
                      t.major, t.minor, missing);
  }
  const std::string_view name = t.name;
  const bool good = !name.empty() && name.size() <= 32 && name[0] >= 'a' && name[0] <= 'z' &&
                    std::all_of(name.begin(), name.end(),
                                [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_'; });
  if (!good || name == "cpu" || name == "meta") {
    fail<DeviceError>(
        "plug-in {}: expected a kind of device of lower-case letters, digits and underscores other than cpu and "
        "meta, got '{}'",
        origin, name.substr(0, 64));
  }
  for (const DeviceBackend* b : backends()) {
    if (b->kind == name) {
      fail<DeviceError>("plug-in {}: there is a device of kind '{}' already, from {}", origin, name, b->path);
    }
  }
}

PluginReport use_table(const halfstep_plugin_table& given, const std::string& origin) {
  halfstep_plugin_table table = whole_table(given);
  check_table(table, given.size, origin);
  all_or_none(table.host_allocate, table.host_deallocate);
  all_or_none(table.profile_start, table.profile_stop, table.profile_read);
  all_or_none(table.graph_begin, table.graph_end, table.graph_launch, table.graph_destroy);
  all_or_none(table.group_id, table.group_create, table.group_destroy, table.group_abort, table.all_reduce,
              table.broadcast, table.all_gather, table.reduce_scatter, table.all_to_all, table.send_receive,
              table.group_error);
  // Lives to the end: tensors may outlast everything else.
  DeviceBackend* backend = std::make_unique<DeviceBackend>(table, origin).release();
  detail::tell_float32_precision(*backend);
  return {.path = origin,
          .kind = backend->kind,
          .vendor = table.vendor ? table.vendor : "",
          .version = table.version ? table.version : "",
          .devices = backend->count,
          .error = ""};
}

PluginReport open_library(const std::string& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) {
    const int why = errno;
    if (why == ENOENT) fail<DeviceError>("plug-in {}: there is no such file", path);
    fail<DeviceError>("plug-in {}: it can't be opened: {}", path, std::generic_category().message(why));
  }
  if (!S_ISREG(status.st_mode)) fail<DeviceError>("plug-in {}: it is not a file", path);
  // It will run with our rights: nobody else may be able to put code there.
  if (status.st_mode & S_IWOTH)
    fail<DeviceError>("plug-in {}: anybody may write to it (mode {:o}); refused", path, status.st_mode & 0777);
  // The file that was looked at: a name without a slash would be searched for elsewhere.
  std::error_code error;
  const fs::path absolute = fs::absolute(path, error);
  void* library = dlopen(error ? path.c_str() : absolute.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char* why = dlerror();
    fail<DeviceError>("plug-in {}: it can't be opened: {}", path, why ? why : "unknown reason");
  }
  const auto entry = reinterpret_cast<halfstep_plugin_fn>(dlsym(library, HALFSTEP_PLUGIN_SYMBOL));
  if (!entry) {
    dlclose(library);
    fail<DeviceError>("plug-in {}: it exports no function {}", path, HALFSTEP_PLUGIN_SYMBOL);
  }
  auto& opened = loader().opened;
  if (std::find(opened.begin(), opened.end(), library) != opened.end()) {
    dlclose(library);
    fail<DeviceError>("plug-in {}: it has been loaded already", path);
  }
  opened.push_back(library);
  const halfstep_plugin_table* table = entry(&plugin_host());
  // From here on the library stays: its threads may run.
  if (!table) fail<DeviceError>("plug-in {}: it can't be used here, and says no more", path);
  return use_table(*table, path);
}

std::vector<std::string> libraries_in(const fs::path& folder) {
  std::vector<std::string> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string file = entry.path().filename().string();
    if (file.starts_with("libhalfstep_") && file.ends_with(".so")) found.push_back(entry.path().string());
  }
  std::sort(found.begin(), found.end());
  return found;
}

// The folder that `make install` fills, beside the library that this code is in.
fs::path installed_folder() {
  if (const char* folder = std::getenv("HALFSTEP_PLUGIN_DIR")) return folder;
  Dl_info info{};
  if (!dladdr(reinterpret_cast<const void*>(&plugin_host), &info) || !info.dli_fname) return {};
  std::error_code error;
  const fs::path library = fs::canonical(info.dli_fname, error);
  return error ? fs::path() : library.parent_path() / "halfstep" / "plugins";
}

bool tried(const std::string& path) {
  std::error_code error;
  for (const PluginReport& r : loader().reports) {
    if (r.path == path || fs::equivalent(r.path, path, error)) return true;
  }
  return false;
}

void shut_down_all() {
  for (DeviceBackend* b : backends()) b->shutdown();
}
// After each library that was opened, so that shutdown() runs before the destructors of its static objects.
void shut_down_at_exit() { (void)std::atexit(shut_down_all); }

// Opens it and keeps what became of it, for plugin_reports().
const PluginReport& load_library(const std::string& path) {
  auto& reports = loader().reports;
  try {
    reports.push_back(open_library(path));
    shut_down_at_exit();
  } catch (const Error& e) {
    reports.push_back({.path = path, .kind = "", .vendor = "", .version = "", .devices = 0, .error = e.what()});
    throw;
  }
  return reports.back();
}

void try_library(const std::string& path, LogLevel level) {
  if (tried(path)) return;
  try {
    load_library(path);
  } catch (const Error& e) {
    log(level, e.what());
  }
}

void log_for_plugin(std::int32_t level, const char* text) {
  try {
    const int bounded = std::clamp(level, std::int32_t{HALFSTEP_LOG_DEBUG}, std::int32_t{HALFSTEP_LOG_ERROR});
    log(static_cast<LogLevel>(bounded), text ? text : "");
  } catch (...) {  // a sink that throws must not unwind through C
  }
}

// The CPU's kernels take a state of their own; here it is the kernel itself. They may throw what a thread of theirs has
// thrown, which must not unwind through C.
halfstep_status run_cpu_kernel(halfstep_context* context, const halfstep_tensor* in, int n, halfstep_tensor* out, int m,
                               const void* attributes) {
  // Without a state, which tells what to run, there is nowhere to say more either.
  if (context->size < offsetof(halfstep_context, state) + sizeof(context->state)) return HALFSTEP_FAILED;
  void* const state = std::exchange(context->state, nullptr);
  const auto run = reinterpret_cast<halfstep_kernel_fn>(state);
  halfstep_status status = HALFSTEP_FAILED;
  try {
    status = run(context, in, n, out, m, attributes);
  } catch (const std::exception& e) {
    context->set_error(context, e.what());
  } catch (...) {
    context->set_error(context, "an exception of unknown type");
  }
  context->state = state;
  return status;
}

halfstep_status cpu_kernel(const char* op, std::int32_t version, std::int32_t dtype, halfstep_kernel* kernel) {
  const KernelTable* table = find_kernel_table(op);
  const char* reason = !table                      ? "the CPU has no kernel for the op"
                       : table->version != version ? "the op has another version"
                                                   : "the CPU has no kernel for this dtype";
  KernelFn run = nullptr;
  if (table && table->version == version && dtype >= 0 && dtype < kNumDTypes) {
    run = table->find(Device{}, static_cast<DType>(dtype));
  }
  halfstep_kernel answer{};
  answer.size = kernel->size;
  if (run) {
    answer.layouts = HALFSTEP_LAYOUT_STRIDED;
    answer.run = run_cpu_kernel;
    answer.state = reinterpret_cast<void*>(run);
  } else {
    answer.reason = reason;
  }
  std::memcpy(kernel, &answer, std::min<std::size_t>(kernel->size, sizeof(answer)));
  return run ? HALFSTEP_OK : HALFSTEP_UNSUPPORTED;
}

[[maybe_unused]] const bool installed = [] {
  set_device_finder(load_plugins, [](std::uint8_t type) {
    const DeviceBackend* backend = backend_of(type);
    return backend ? backend->count : -1;
  });
  return true;
}();

}  // namespace

const halfstep_host& plugin_host() {
  static const halfstep_host host = {.size = sizeof(halfstep_host),
                                     .major = HALFSTEP_PLUGIN_MAJOR,
                                     .minor = HALFSTEP_PLUGIN_MINOR,
                                     .version = HALFSTEP_VERSION,
                                     .log = log_for_plugin,
                                     .cpu_kernel = cpu_kernel};
  return host;
}

PluginReport load_plugin(const std::string& path) {
  Loader& l = loader();
  std::lock_guard lock(l.mutex);
  return load_library(path);
}

PluginReport register_plugin(const halfstep_plugin_table& table, const std::string& origin) {
  Loader& l = loader();
  std::lock_guard lock(l.mutex);
  PluginReport report = use_table(table, origin);
  shut_down_at_exit();
  l.reports.push_back(report);
  return report;
}

void load_plugins() {
  Loader& l = loader();
  std::lock_guard lock(l.mutex);
  if (l.searched) return;
  l.searched = true;
  if (const char* list = std::getenv("HALFSTEP_PLUGINS")) {
    std::string_view rest = list;
    while (!rest.empty()) {
      const std::string path(rest.substr(0, rest.find(':')));
      rest.remove_prefix(std::min(rest.size(), path.size() + 1));
      if (path.empty()) continue;
      std::error_code ignored;  // what can't be looked at is no folder: opening it says why
      if (fs::is_directory(path, ignored)) {
        const auto libraries = libraries_in(path);
        if (libraries.empty())
          log(LogLevel::error, fmt::format("HALFSTEP_PLUGINS: no libhalfstep_*.so in folder {}", path));
        for (const std::string& file : libraries) try_library(file, LogLevel::error);
      } else {
        try_library(path, LogLevel::error);
      }
    }
  }
  for (const std::string& file : libraries_in(installed_folder())) try_library(file, LogLevel::warning);
}

std::vector<PluginReport> plugin_reports() {
  Loader& l = loader();
  std::lock_guard lock(l.mutex);
  return l.reports;
}

}  // namespace halfstep
