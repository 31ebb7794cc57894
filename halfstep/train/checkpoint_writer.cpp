// SPDX-License-Identifier: Apache-2.0
#include <pthread.h>
#include <csignal>

#include <system_error>
#include <utility>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/ops/create.h"
#include "halfstep/runtime/log.h"
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

void CheckpointWriter::write(const std::vector<std::filesystem::path>& files, Checkpoint checkpoint) {
  wait();
  if (!beside_ || !copy(checkpoint.weights, weights_) || !copy(checkpoint.optimizer.tensors, optimizer_) ||
      !copy(checkpoint.communication, communication_) || !copy(checkpoint.training_weights, training_weights_)) {
    return write_files(files, checkpoint);
  }
  checkpoint.weights = weights_;
  checkpoint.optimizer.tensors = optimizer_;
  checkpoint.communication = communication_;
  checkpoint.training_weights = training_weights_;
  finished_ = false;
  // Signals are for the program's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this, files, checkpoint] {
      try {
        write_files(files, checkpoint);
      } catch (...) {
        error_ = std::current_exception();
      }
      finished_ = true;
    });
  } catch (const std::system_error&) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return write_files(files, checkpoint);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void CheckpointWriter::wait() {
  if (thread_.joinable()) thread_.join();
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

}  // namespace halfstep::training
