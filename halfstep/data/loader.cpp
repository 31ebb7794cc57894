// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/loader.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>
#include <system_error>
#include <thread>

#include "halfstep/core/error.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/philox.h"
#include "halfstep/data/parts_internal.h"
#include "halfstep/runtime/log.h"
#include "halfstep/runtime/queue.h"
#include "halfstep/runtime/trace.h"

namespace halfstep::data {
namespace {

std::int64_t batches_of_a_pass(const Dataset& dataset, const LoaderOptions& options) {
  const std::int64_t n = dataset.size();
  // Asked at each epoch: a data set of the program's own may change.
  if (n < 0) fail<Error>("DataLoader: expected a data set of at least 0 samples, its size() says {}", n);
  return n / options.batch_size + (!options.drop_last && n % options.batch_size != 0 ? 1 : 0);
}

/// One epoch's plan: which samples batch k has. Several threads ask.
class Plan {
 public:
  Plan(const Dataset& dataset, const LoaderOptions& options, std::int64_t epoch)
      : dataset_(dataset),
        options_(options),
        first_pass_(epoch * options.repeat),
        size_(dataset.size()),
        batches_(batches_of_a_pass(dataset, options)) {}

  Batch make(std::int64_t batch) {
    const TraceRange range("batch", "loader");
    const std::int64_t pass = first_pass_ + batch / batches_;
    const std::int64_t first = batch % batches_ * options_.batch_size;
    const std::int64_t all = std::min(options_.batch_size, size_ - first);
    // A rank's part is that of its shards.
    const int parts = std::max(options_.shards, options_.ranks), own = parts / options_.ranks;
    const auto begin_of = [&](int part) { return detail::part_begin(all, options_.batch_size, part, parts); };
    const int part = options_.rank * own;
    const std::int64_t begin = begin_of(part), end = begin_of(part + own);
    const bool none = begin == end;
    Batch made = read(none ? first : first + begin, none ? 1 : end - begin, pass, batch % batches_);
    if (options_.ranks > 1) made.all_samples = all;
    made.stand_in = none;
    for (int k = part; options_.shards > 0 && k < part + own; ++k) made.shards.push_back(begin_of(k + 1) - begin_of(k));
    return made;
  }

 private:
  using Order = std::shared_ptr<const std::vector<std::int64_t>>;

  Batch read(std::int64_t first, std::int64_t n, std::int64_t pass, std::int64_t number) {
    if (options_.shuffle) {
      const Order order = order_of(pass);
      return request(std::span(*order).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(n)), pass,
                     number);
    }
    std::vector<std::int64_t> in_order(static_cast<std::size_t>(n));
    std::iota(in_order.begin(), in_order.end(), first);
    return request(in_order, pass, number);
  }

  // Workers are in one pass, or where it ends in two (in more where passes are short): older ones are forgotten.
  Order order_of(std::int64_t pass) {
    const std::scoped_lock lock(mutex_);
    Order& order = orders_[pass];
    if (order == nullptr) {
      order = std::make_shared<const std::vector<std::int64_t>>(shuffled_order(size_, options_.seed, pass));
    }
    const Order result = order;
    orders_.erase(orders_.begin(), orders_.lower_bound(pass - 1));
    return result;
  }

  Batch request(std::span<const std::int64_t> indices, std::int64_t pass, std::int64_t number) const {
    Batch batch = dataset_.batch({.indices = indices, .seed = options_.seed, .epoch = pass, .number = number});
    if (options_.device.is_cpu()) return batch;
    visit_tensors(batch, [&](Tensor& t) {
      if (t.defined() && t.device().is_cpu()) t = t.pin_memory(options_.device);
    });
    return batch;
  }

  const Dataset& dataset_;
  const LoaderOptions& options_;
  std::int64_t first_pass_;  // passes are counted over all epochs
  std::int64_t size_;
  std::int64_t batches_;  // of a pass
  std::mutex mutex_;
  std::map<std::int64_t, Order> orders_;
};

/// Threads that make the batches of a plan ahead of the loop, into a ring of places.
class Workers {
 public:
  Workers(Plan& plan, std::int64_t first, std::int64_t end, int threads, std::int64_t ahead)
      : plan_(plan), next_(first), taken_(first), end_(end), places_(static_cast<std::size_t>(ahead)) {
    const auto useful = std::min<std::int64_t>(threads, end - first);
    try {
      threads_.reserve(static_cast<std::size_t>(useful));
      for (std::int64_t i = 0; i < useful; ++i) threads_.emplace_back([this] { run(); });
    } catch (const std::system_error& e) {
      log_once(LogLevel::warning, "DataLoader: no thread",
               fmt::format("DataLoader: {} of {} workers could be started ({}){}", threads_.size(), useful,
                           e.code().message(), threads_.empty() ? "; the loop makes its batches itself" : ""));
    } catch (...) {
      stop();  // the threads that did start wait for work that will not be asked for
      throw;
    }
  }
  ~Workers() { stop(); }

  /// Whether no thread could be started: nobody makes a batch.
  bool empty() const { return threads_.empty(); }

  /// Whether take(number) has something without waiting.
  bool ready(std::int64_t number) {
    const std::scoped_lock lock(mutex_);
    if (number >= taken_ + static_cast<std::int64_t>(places_.size())) return false;
    const Place& place = place_of(number);
    return place.batch.has_value() || place.error;
  }

  /// Batch `number`, once it is made; throws what its worker threw. Called with rising numbers.
  Batch take(std::int64_t number) {
    const TraceRange range("wait for batch", "wait");
    std::unique_lock lock(mutex_);
    Place& place = place_of(number);
    made_.wait(lock, [&] { return place.batch.has_value() || place.error; });
    if (place.error) std::rethrow_exception(std::exchange(place.error, nullptr));
    Batch batch = std::move(*place.batch);
    place.batch.reset();
    taken_ = number + 1;
    lock.unlock();
    room_.notify_one();
    return batch;
  }

 private:
  struct Place {
    std::optional<Batch> batch;
    std::exception_ptr error;
  };

  Place& place_of(std::int64_t number) { return places_[static_cast<std::size_t>(number) % places_.size()]; }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      room_.wait(lock, [&] {
        return stopped_ || next_ >= end_ || next_ < taken_ + static_cast<std::int64_t>(places_.size());
      });
      if (stopped_ || next_ >= end_) return;
      const std::int64_t number = next_++;
      lock.unlock();
      Place result;
      try {
        result.batch = plan_.make(number);
      } catch (...) {
        result.error = std::current_exception();
      }
      lock.lock();
      // Nothing behind a batch that failed will be asked for.
      if (result.error) end_ = std::min(end_, number + 1);
      place_of(number) = std::move(result);
      made_.notify_one();
    }
  }

  void stop() {
    {
      const std::scoped_lock lock(mutex_);
      stopped_ = true;
    }
    room_.notify_all();
    threads_.clear();  // joins
  }

  Plan& plan_;
  std::mutex mutex_;
  std::condition_variable room_;  // a place became free
  std::condition_variable made_;  // a batch is ready
  std::int64_t next_;             // the next batch to make
  std::int64_t taken_;            // batches before this one were handed out
  std::int64_t end_;
  bool stopped_ = false;
  std::vector<Place> places_;
  std::vector<std::jthread> threads_;
};

}  // namespace

std::vector<std::int64_t> shuffled_order(std::int64_t n, std::uint64_t seed, std::int64_t epoch) {
  if (n < 0) fail<Error>("shuffled_order: expected at least 0 samples, got {}", n);
  std::vector<std::int64_t> order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), std::int64_t{0});
  constexpr std::uint64_t kPurpose = 0x6C6F61646572;  // keeps the order apart from other uses of seed and epoch
  const PhiloxState state{.seed = derive_seed(seed, static_cast<std::uint64_t>(epoch), kPurpose), .offset = 0};
  for (std::int64_t i = 0; i + 1 < n; ++i) {
    const auto rest = static_cast<std::uint64_t>(n - i);
    const auto j = i + static_cast<std::int64_t>(integer_below(state, static_cast<std::uint64_t>(i), rest));
    std::swap(order[static_cast<std::size_t>(i)], order[static_cast<std::size_t>(j)]);
  }
  return order;
}

// Copies batches to a device ahead of the loop, on a queue of their own.
class DeviceStage {
 public:
  explicit DeviceStage(Device device) : device_(device), queue_(device, {.priority = 1}) {}

  bool empty() const { return staged_.empty(); }
  std::int64_t next() const { return next_; }
  void start(std::int64_t first) { next_ = first; }

  /// Takes the next batch from `make` (what it throws is kept for its turn) and sends it on its way.
  template <class Make>
  void put(Make&& make) {
    ++next_;
    Staged s;
    try {
      const Batch host = make();
      const QueueGuard guard(queue_);
      s.batch = host;
      visit_tensors(s.batch, [&](Tensor& t) {
        if (t.defined()) t = t.to(device_, {.non_blocking = true});
      });
      s.arrived.emplace(device_);
      s.arrived->record(queue_);
    } catch (...) {
      s.error = std::current_exception();
    }
    staged_.push_back(std::move(s));
  }

  /// The oldest one. This thread's queue waits for it; the thread doesn't.
  Batch take() {
    Staged s = std::move(staged_.front());
    staged_.pop_front();
    if (s.error) std::rethrow_exception(s.error);
    Queue::current(device_).wait(*s.arrived);
    return s.batch;
  }

 private:
  struct Staged {
    Batch batch;
    std::optional<Event> arrived;
    std::exception_ptr error;
  };
  Device device_;
  Queue queue_;
  std::int64_t next_ = 0;
  std::deque<Staged> staged_;
};

struct DataLoader::Impl {
  std::shared_ptr<const Dataset> dataset;
  LoaderOptions options;
  LoaderState state;
  bool resume = false;     // seek() was called: the next loop goes on where state says
  bool in_a_loop = false;  // there is an iterator
  std::optional<Plan> plan;
  std::optional<Workers> workers;
  std::optional<DeviceStage> stage;

  Batch make(std::int64_t number) { return workers ? workers->take(number) : plan->make(number); }
  std::int64_t batches() const { return batches_of_a_pass(*dataset, options) * options.repeat; }
  void stop() {
    stage.reset();
    workers.reset();
    plan.reset();
    in_a_loop = false;
  }
};

DataLoader::DataLoader(std::shared_ptr<const Dataset> dataset, const LoaderOptions& options)
    : impl_(std::make_shared<Impl>()) {
  if (dataset == nullptr) fail<Error>("DataLoader: expected a data set, got none");
  if (options.batch_size < 1)
    fail<Error>("DataLoader: expected a batch size of at least 1, got {}", options.batch_size);
  constexpr int kMostWorkers = 256;
  if (options.workers < 0 || options.workers > kMostWorkers) {
    fail<Error>("DataLoader: expected 0 to {} workers, got {}", kMostWorkers, options.workers);
  }
  constexpr int kMostPrefetch = 1 << 16;
  if (options.prefetch < 1 || options.prefetch > kMostPrefetch) {
    fail<Error>("DataLoader: expected a prefetch of 1 to {} batches, got {}", kMostPrefetch, options.prefetch);
  }
  constexpr std::int64_t kMostPasses = std::numeric_limits<std::int32_t>::max();
  if (options.repeat < 1 || options.repeat > kMostPasses) {
    fail<Error>("DataLoader: expected an epoch of 1 to {} passes, got {}", kMostPasses, options.repeat);
  }
  if (options.ranks < 1 || options.rank < 0 || options.rank >= options.ranks) {
    fail<Error>("DataLoader: expected a rank from 0 to ranks - 1, got rank {} of {}", options.rank, options.ranks);
  }
  if (options.shards < 0 || options.shards % options.ranks != 0) {
    fail<Error>("DataLoader: expected a number of shards that the {} ranks divide, got {}", options.ranks,
                options.shards);
  }
  const std::int64_t batches = batches_of_a_pass(*dataset, options);
  if (batches > std::numeric_limits<std::int64_t>::max() / options.repeat) {
    fail<Error>("DataLoader: {} batches in each of {} passes are too many", batches, options.repeat);
  }
  impl_->dataset = std::move(dataset);
  impl_->options = options;
}

DataLoader::DataLoader(DataLoader&&) noexcept = default;
DataLoader& DataLoader::operator=(DataLoader&&) noexcept = default;
DataLoader::~DataLoader() = default;

std::int64_t DataLoader::size() const { return impl_->batches(); }
const Dataset& DataLoader::dataset() const { return *impl_->dataset; }
const LoaderOptions& DataLoader::options() const { return impl_->options; }
LoaderState DataLoader::state() const { return impl_->state; }

void DataLoader::seek(const LoaderState& state) {
  if (impl_->in_a_loop) fail<Error>("DataLoader::seek: expected to be called between loops, got a call inside one");
  if (state.epoch < 0 || state.batch < 0 || state.batch > size()) {
    fail<Error>("DataLoader::seek: expected an epoch of at least 0 and a batch from 0 to {}, got epoch {}, batch {}",
                size(), state.epoch, state.batch);
  }
  impl_->state = state;
  impl_->resume = true;
}

DataLoader::Iterator DataLoader::begin() {
  Impl& impl = *impl_;
  if (impl.in_a_loop)
    fail<Error>("DataLoader: expected one loop at a time, got a loop inside a loop over the same loader");
  // A position in the middle without seek() is what a loop left early left behind.
  if (!impl.resume && impl.state.batch != 0) impl.state = {.epoch = impl.state.epoch + 1, .batch = 0};
  impl.resume = false;
  const std::int64_t batches = impl.batches();
  impl.in_a_loop = true;
  Iterator iterator(impl_);  // from here on it puts things in order when something throws
  impl.plan.emplace(*impl.dataset, impl.options, impl.state.epoch);
  if (impl.options.workers > 0 && impl.state.batch < batches) {
    impl.workers.emplace(*impl.plan, impl.state.batch, batches, impl.options.workers,
                         std::int64_t{impl.options.workers} * impl.options.prefetch);
    if (impl.workers->empty()) impl.workers.reset();
  }
  if (!impl.options.device.is_cpu()) impl.stage.emplace(impl.options.device).start(impl.state.batch);
  iterator.advance();
  return iterator;
}

DataLoader::Iterator::Iterator(Iterator&& other) noexcept
    : impl_(std::exchange(other.impl_, nullptr)), batch_(std::move(other.batch_)) {}

DataLoader::Iterator& DataLoader::Iterator::operator=(Iterator&& other) noexcept {
  std::swap(impl_, other.impl_);
  std::swap(batch_, other.batch_);
  return *this;
}

DataLoader::Iterator::~Iterator() {
  if (impl_ != nullptr) impl_->stop();
}

DataLoader::Iterator& DataLoader::Iterator::operator++() {
  advance();
  return *this;
}

void DataLoader::Iterator::advance() {
  batch_ = {};  // its memory is free for one that is being made
  Impl& impl = *impl_;
  const std::int64_t number = impl.state.batch;
  if (number >= impl.batches()) {
    impl.stop();
    impl.state = {.epoch = impl.state.epoch + 1, .batch = 0};
    impl_.reset();
    return;
  }
  if (impl.stage) {
    DeviceStage& stage = *impl.stage;
    if (stage.empty()) stage.put([&] { return impl.make(stage.next() - 1); });
    batch_ = stage.take();
    // The next one travels while the loop computes, if it is there already.
    if (stage.empty() && impl.workers && stage.next() < impl.batches() && impl.workers->ready(stage.next())) {
      stage.put([&] { return impl.make(stage.next() - 1); });
    }
  } else {
    batch_ = impl.make(number);
  }
  impl.state.batch = number + 1;
}

}  // namespace halfstep::data
