// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/json_log.h"

#include <cerrno>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "halfstep/core/fail.h"

namespace halfstep::train {

JsonLog::JsonLog(const std::filesystem::path& path, bool append)
    : path_(path), file_(path, append ? std::ios::app : std::ios::trunc) {
  if (!file_) {
    const int error = errno;
    fail<IoError>("{}: can't be written: {}", path.string(), std::strerror(error));
  }
}

void JsonLog::write(const char* event, std::initializer_list<std::pair<const char*, Value>> fields) {
  if (!file_.is_open()) return;
  nlohmann::ordered_json line = {{"event", event}};
  for (const auto& field : fields) {
    nlohmann::ordered_json& slot = line[field.first];
    std::visit(
        [&slot](const auto& v) {
          using T = std::decay_t<decltype(v)>;
          if constexpr (std::is_same_v<T, double>) {
            slot = std::isfinite(v) ? nlohmann::ordered_json(v) : nlohmann::ordered_json(nullptr);
          } else {
            slot = v;
          }
        },
        field.second);
  }
  file_ << line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << '\n' << std::flush;
  if (!file_) fail<IoError>("{}: writing failed; is the disk full?", path_.string());
}

}  // namespace halfstep::train
