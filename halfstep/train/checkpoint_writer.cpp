// SPDX-License-Identifier: Apache-2.0
#include <pthread.h>
#include <csignal>

#include <system_error>
#include <utility>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/io/checkpoint_shards_internal.h"
#include "halfstep/ops/create.h"
#include "halfstep/runtime/caching_allocator.h"
#include "halfstep/runtime/log.h"
#include "halfstep/train/checkpoint_internal.h"
#include "halfstep/train/checkpoint_writer_internal.h"

namespace halfstep::training {
namespace {

void write_files(const std::vector<std::filesystem::path>& files, const Checkpoint& checkpoint) {
  for (const std::filesystem::path& file : files) save_checkpoint(file, checkpoint);
}

}  // namespace

CheckpointWriter::~CheckpointWriter() {
  try {
    wait();
  } catch (const std::exception& e) {
    log(LogLevel::error, e.what());
  }
}

// Returns false where there is no memory for it. Memory that is there already costs a fraction of the time.
bool CheckpointWriter::copy(NamedTensors& tensors, NamedTensors& copies) {
  try {
    const NoGrad no_grad;
    copies.resize(tensors.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const Tensor& from = tensors[i].tensor;
      Tensor& to = copies[i].tensor;
      if (!to.defined() || to.sizes() != from.sizes() || to.dtype() != from.dtype()) {
        to = {};
        to = empty(from.sizes(), {.dtype = from.dtype(), .device = Device{}});
      }
      copies[i].name = tensors[i].name;
      to.copy_(from);
    }
  } catch (const std::exception& e) {
    log(LogLevel::warning,
        std::string("no copy could be made for a checkpoint, so training waits for it: ") + e.what());
    copies.clear();
    return false;
  }
  return true;
}

// Whether the peak of tensors before the copies can be reached again while the copies are held. If not, they are
// released. Copies into existing tensors take no more memory.
bool CheckpointWriter::leaves_room(const MemoryStats& before) {
  const bool none_new = memory_stats().allocated <= before.allocated;
  if (none_new || can_allocate(before.allocated_peak - before.allocated)) return true;
  log(LogLevel::warning,
      "too little memory to train while a copy of the checkpoint is held, so training waits until it is written");
  for (NamedTensors* copies : {&weights_, &optimizer_, &communication_, &training_weights_, &shard_}) copies->clear();
  return false;
}

bool CheckpointWriter::copy(Checkpoint& c) {
  return copy(c.weights, weights_) && copy(c.optimizer.tensors, optimizer_) && copy(c.communication, communication_) &&
         copy(c.training_weights, training_weights_);
}

void CheckpointWriter::use_copies(Checkpoint& c) const {
  c.weights = weights_;
  c.optimizer.tensors = optimizer_;
  c.communication = communication_;
  c.training_weights = training_weights_;
}

// Returns false where there is no thread for it.
bool CheckpointWriter::start(std::function<void()> job) {
  finished_ = false;
  // Signals are for the program's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  bool started = true;
  try {
    thread_ = std::thread([this, job = std::move(job)] {
      try {
        job();
      } catch (...) {
        error_ = std::current_exception();
      }
      finished_ = true;
    });
  } catch (const std::system_error&) {
    started = false;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

void CheckpointWriter::write(const std::vector<std::filesystem::path>& files, Checkpoint checkpoint) {
  wait();
  const MemoryStats before = memory_stats();
  if (!beside_ || !copy(checkpoint) || !leaves_room(before)) return write_files(files, checkpoint);
  use_copies(checkpoint);
  if (!start([files, checkpoint] { write_files(files, checkpoint); })) write_files(files, checkpoint);
}

bool CheckpointWriter::write_shards(const std::vector<std::filesystem::path>& files, NamedTensors shard,
                                    bool has_weights, std::optional<Checkpoint> rest) {
  wait();
  const MemoryStats before = memory_stats();
  const bool copied = beside_ && copy(shard, shard_) && (!rest || copy(*rest)) && leaves_room(before);
  if (copied) {
    shard = shard_;
    if (rest) use_copies(*rest);
  }
  rest_ = std::move(rest);
  shards_.clear();
  const auto job = [this, files, shard = std::move(shard), has_weights] {
    for (const std::filesystem::path& file : files) shards_.push_back(io::write_shard(file, shard, has_weights));
  };
  if (copied && start(job)) return true;
  try {
    job();
  } catch (...) {
    error_ = std::current_exception();  // the other ranks are to hear of it
  }
  return false;
}

void CheckpointWriter::write_rest(const std::vector<std::filesystem::path>& files,
                                  const std::vector<nlohmann::json>& lists) {
  wait();
  const auto job = [files, lists, rest = *std::exchange(rest_, std::nullopt)] {
    for (std::size_t i = 0; i < files.size(); ++i) save_checkpoint(files[i], rest, lists[i]);
  };
  if (!beside_ || !start(job)) job();
}

void CheckpointWriter::wait() {
  if (thread_.joinable()) thread_.join();
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

}  // namespace halfstep::training
