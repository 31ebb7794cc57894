// SPDX-License-Identifier: Apache-2.0
#include "queue.h"

#include <algorithm>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace sim {
namespace {

class Mark : public Work {
 public:
  explicit Mark(std::shared_ptr<Ticket> ticket) : Work(Kind::mark, 0), ticket_(std::move(ticket)) {}
  std::string run() const override {
    ticket_->pass(now_ns());
    return {};
  }

 private:
  std::shared_ptr<Ticket> ticket_;
};

class Wait : public Work {
 public:
  explicit Wait(std::shared_ptr<Ticket> ticket) : Work(Kind::wait, 0), ticket_(std::move(ticket)) {}
  std::string run() const override {
    ticket_->wait();
    return {};
  }

 private:
  std::shared_ptr<Ticket> ticket_;
};

template <class F>
std::thread start_thread(F function) {
  try {
    return std::thread(std::move(function));
  } catch (const std::system_error& e) {
    throw std::runtime_error("a queue needs a thread, and none could be started: " + e.code().message());
  }
}

}  // namespace

void Ticket::pass(uint64_t time_ns) {
  // Notified under the lock: whoever waits may drop the last reference as soon as it has it.
  std::lock_guard lock(mutex_);
  passed_ = true;
  time_ns_ = time_ns;
  changed_.notify_all();
}

void Ticket::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return passed_; });
}

bool Ticket::passed(uint64_t* time_ns) const {
  std::lock_guard lock(mutex_);
  if (passed_ && time_ns != nullptr) *time_ns = time_ns_;
  return passed_;
}

std::shared_ptr<Ticket> Event::ticket() const {
  std::lock_guard lock(mutex_);
  return ticket_;
}

void Event::set_ticket(std::shared_ptr<Ticket> ticket) {
  std::lock_guard lock(mutex_);
  ticket_ = std::move(ticket);
}

Queue::Queue(Device& device, uint32_t number, int32_t priority)
    : device_(device), number_(number), priority_(priority), thread_(start_thread([this] { loop(); })) {}

Queue::~Queue() { stop(); }

uint64_t Queue::push(std::shared_ptr<const Work> work, const FaultPlan& faults) {
  if (capture) {
    capture->work.push_back(std::move(work));
    return 0;
  }
  std::lock_guard lock(mutex_);
  items_.push_back({std::move(work), faults});
  added_.notify_one();
  return ++pushed_;
}

void Queue::mark(std::shared_ptr<Ticket> ticket) { push(std::make_shared<Mark>(std::move(ticket))); }
void Queue::wait_for(std::shared_ptr<Ticket> ticket) { push(std::make_shared<Wait>(std::move(ticket))); }

void Queue::wait(uint64_t number) {
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return finished_ >= number; });
}

void Queue::drain() {
  std::unique_lock lock(mutex_);
  const uint64_t number = pushed_;
  done_.wait(lock, [&] { return finished_ >= number; });
}

bool Queue::idle() const {
  std::lock_guard lock(mutex_);
  return finished_ == pushed_;
}

bool Queue::uses(const Span& span) const {
  const auto overlaps = [&](const Work& work) {
    return std::any_of(work.touches.begin(), work.touches.end(),
                       [&](const Span& s) { return s.begin < span.end && span.begin < s.end; });
  };
  std::lock_guard lock(mutex_);
  return (running_ && overlaps(*running_)) ||
         std::any_of(items_.begin(), items_.end(), [&](const Item& item) { return overlaps(*item.work); });
}

void Queue::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    added_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

void Queue::loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    added_.wait(lock, [&] { return !items_.empty() || stopping_; });
    if (items_.empty()) return;
    Item item = std::move(items_.front());
    items_.pop_front();
    running_ = item.work;
    lock.unlock();
    execute(item);
    item.work.reset();
    lock.lock();
    running_.reset();
    ++finished_;
    done_.notify_all();
  }
}

// In short pieces: a device that is lost meanwhile, or the end of the program, must not keep anybody waiting.
void Queue::sleep(std::chrono::nanoseconds time) const {
  const auto end = std::chrono::steady_clock::now() + time;
  while (!device_.lost() && !machine().ending) {
    const auto left = end - std::chrono::steady_clock::now();
    if (left <= std::chrono::nanoseconds(0)) return;
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(left, std::chrono::milliseconds(5)));
  }
}

void Queue::execute(const Item& item) {
  const Work& work = *item.work;
  // Marks are passed on a lost device too, so that nobody waits for ever.
  if (work.kind == Work::Kind::mark || work.kind == Work::Kind::wait) {
    work.run();
    return;
  }
  if (item.faults.delay.count() > 0) sleep(item.faults.delay);
  if (device_.lost()) return;
  const uint64_t start = now_ns();
  std::string wrong;
  if (item.faults.fail) {
    wrong = "a failure was ordered";
  } else {
    try {
      wrong = work.run();
    } catch (const std::exception& e) {
      wrong = e.what();
    }
  }
  if (item.faults.corrupt && wrong.empty()) work.corrupt();
  const uint64_t end = now_ns();
  device_.busy_ns.fetch_add(end - start, std::memory_order_relaxed);
  Machine& all = machine();
  if (work.kind == Work::Kind::kernel) {
    all.kernels.fetch_add(1, std::memory_order_relaxed);
    if (!wrong.empty()) all.failed_kernels.fetch_add(1, std::memory_order_relaxed);
  }
  if (device_.profiling()) device_.add_record({work.call, device_.index, number_, start, end});
  if (!wrong.empty()) device_.note_failure(work.call, wrong);
}

}  // namespace sim
