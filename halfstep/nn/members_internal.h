// SPDX-License-Identifier: Apache-2.0
// Which modules and parameters are alive, and where: a member that was never registered is one that lies inside of a
// module without being in its list.
#pragma once

#include <cstddef>
#include <mutex>
#include <set>
#include <vector>

#include "halfstep/nn/module.h"

namespace halfstep::nn {

/// The addresses of all handles of the process. They are few and long-lived; calls don't come here.
struct ModuleBase::Members {
  template <class T>
  class Places {
   public:
    void add(const T* place) {
      const std::scoped_lock lock(mutex_);
      places_.insert(place);
    }
    void remove(const T* place) {
      const std::scoped_lock lock(mutex_);
      places_.erase(place);
    }
    /// Those that begin in [from, from + bytes), in the order of their addresses.
    std::vector<const T*> within(const void* from, std::size_t bytes) {
      const std::less<const void*> before;
      const void* end = static_cast<const char*>(from) + bytes;
      const std::scoped_lock lock(mutex_);
      std::vector<const T*> result;
      for (auto at = places_.lower_bound(from); at != places_.end() && before(*at, end); ++at) {
        result.push_back(static_cast<const T*>(*at));
      }
      return result;
    }

   private:
    std::mutex mutex_;
    std::set<const void*, std::less<const void*>> places_;
  };
  Places<ModuleBase> modules;
  Places<Parameter> parameters;
};

}  // namespace halfstep::nn
