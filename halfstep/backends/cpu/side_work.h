// SPDX-License-Identifier: Apache-2.0
// Products of tiles leave the vector units idle. A thread that multiplies does other work in small steps meanwhile:
// TileProduct::beside is called after every few products, and the processor overlaps the instructions of both.
//
// Vector work takes about twice as long beside products, as if tiles occupied one of the two ports of 512-bit vectors.
// So it should take less than half the time of the products, and should not consist of shuffles, which that port
// executes (measured on a Granite Rapids).
#pragma once

#include <cstdint>
#include <utility>

#include "halfstep/backends/cpu/amx_tile.h"

namespace halfstep::cpu {

/// Work of `count` steps of about the same length that is spread over one or more TileProducts. step(i) is called for i
/// from 0 to count - 1, and must neither use nor release tiles.
template <class Step>
class SideWork {
 public:
  SideWork(Step step, std::int64_t count) : step_(std::move(step)), count_(count) {}
  SideWork(const SideWork&) = delete;  // products keep its address
  SideWork& operator=(const SideWork&) = delete;

  /// Spreads 1 / `products` of what is left evenly over a product, which is one of as many that are still to come.
  void attach(TileProduct& product, std::int64_t products) {
    if (done_ == count_) return;
    product.beside = [](void* work) { static_cast<SideWork*>(work)->run(); };
    product.beside_state = this;
    each_ = (static_cast<double>(count_ - done_) - due_) / static_cast<double>(products * product.count_beside());
  }
  /// Does what is left.
  void finish() {
    while (done_ < count_) step_(done_++);
  }

 private:
  void run() {
    for (due_ += each_; due_ >= 1 && done_ < count_; due_ -= 1) step_(done_++);
  }

  const Step step_;
  const std::int64_t count_;
  std::int64_t done_ = 0;
  double each_ = 0, due_ = 0;  // steps per call, and those that should be done by now
};

}  // namespace halfstep::cpu
