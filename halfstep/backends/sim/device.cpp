// SPDX-License-Identifier: Apache-2.0
#include "device.h"

#include <time.h>

#include <algorithm>

#include "queue.h"

namespace sim {
namespace {

Machine* the_machine = nullptr;

}  // namespace

Machine& machine() { return *the_machine; }
bool is_running() { return the_machine != nullptr; }
void set_machine(std::unique_ptr<Machine> made) { the_machine = made.release(); }
void end_machine() {
  if (the_machine == nullptr) return;
  the_machine->ending = true;
  for (const auto& device : the_machine->devices) {
    for (const auto& queue : device->queues()) queue->stop();
  }
  delete the_machine;
  the_machine = nullptr;
}

uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(t.tv_nsec);
}

Device* Machine::device(int32_t index) const {
  if (index >= 0 && static_cast<std::size_t>(index) < devices.size()) {
    return devices[static_cast<std::size_t>(index)].get();
  }
  fail(HALFSTEP_FAILED, 0, "expected a device from 0 to %d, got %d", static_cast<int>(devices.size()) - 1, index);
  return nullptr;
}

void Device::restore() {
  std::lock_guard lock(mutex_);
  failures_ = 0;
  lost_.store(false, std::memory_order_release);
}

halfstep_status Device::present() const { return lost() ? fail(HALFSTEP_LOST, 0, "the device is lost") : HALFSTEP_OK; }

void Device::note_failure(uint64_t call, const std::string& text) {
  std::lock_guard lock(mutex_);
  if (failures_++ == 0) {
    failed_call_ = call;
    failure_ = text;
  }
}

halfstep_status Device::outcome() {
  if (lost()) return present();
  std::lock_guard lock(mutex_);
  if (failures_ == 0) return HALFSTEP_OK;
  const uint64_t more = failures_ - 1;
  failures_ = 0;
  if (more == 0) return fail(HALFSTEP_FAILED, failed_call_, "%s", failure_.c_str());
  return fail(HALFSTEP_FAILED, failed_call_, "%.200s (and %llu more)", failure_.c_str(),
              static_cast<unsigned long long>(more));
}

Queue* Device::create_queue(int32_t priority) {
  auto queue = std::make_shared<Queue>(*this, ++machine().queues_made, priority);
  std::lock_guard lock(mutex_);
  queues_.push_back(queue);
  return queue.get();
}

bool Device::destroy_queue(Queue* queue) {
  std::shared_ptr<Queue> held;
  {
    std::lock_guard lock(mutex_);
    const auto at = std::find_if(queues_.begin(), queues_.end(), [&](const auto& q) { return q.get() == queue; });
    if (at == queues_.end()) return false;
    held = std::move(*at);
    queues_.erase(at);
  }
  held->stop();
  return true;
}

std::vector<std::shared_ptr<Queue>> Device::queues() const {
  std::lock_guard lock(mutex_);
  return queues_;
}

void Device::add_record(const halfstep_record& record) {
  std::lock_guard lock(mutex_);
  records_.push_back(record);
}

uint64_t Device::take_records(halfstep_record* records, uint64_t capacity) {
  std::lock_guard lock(mutex_);
  const uint64_t count = std::min<uint64_t>(capacity, records_.size());
  std::copy_n(records_.begin(), count, records);
  records_.erase(records_.begin(), records_.begin() + static_cast<std::ptrdiff_t>(count));
  return count;
}

}  // namespace sim
