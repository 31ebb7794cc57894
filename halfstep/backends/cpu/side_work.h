// SPDX-License-Identifier: Apache-2.0
// Products of tiles leave the vector units idle. A thread that multiplies does other work in small steps meanwhile:
// TileProduct::beside is called after every few products, and the processor overlaps the instructions of both.
//
// Tiles and 512-bit vectors share a port, so vector work takes about twice as long beside products. What takes longer
// than they do isn't worth spreading, nor what mostly shuffles, which needs that port (measured on a Granite Rapids).
#pragma once

#include <cstdint>

#include "halfstep/backends/cpu/amx_tile.h"

namespace halfstep::cpu {

/// Work of `count` steps that is spread over one or more TileProducts. step(i) is called for i from 0 to count - 1, and
/// must not use tiles. `cost`: about how many instructions a step takes.
template <class Step>
class SideWork {
 public:
  SideWork(const Step& step, std::int64_t count, std::int64_t cost) : step_(step), count_(count), cost_(cost) {}

  /// Spreads 1 / `products` of what is left evenly over a product, which is one of as many that are still to come.
  void attach(TileProduct& product, std::int64_t products) {
    if (done_ == count_) return;
    product.beside = [](void* work) { static_cast<SideWork*>(work)->run(); };
    product.beside_state = this;
    each_ = (count_ - done_) * cost_ / (products * product.count_beside()) + 1;
    due_ = 0;
  }
  /// Does what is left.
  void finish() {
    while (done_ < count_) step_(done_++);
  }

 private:
  void run() {
    for (due_ += each_; done_ < count_ && due_ >= cost_; due_ -= cost_) step_(done_++);
  }

  const Step& step_;
  const std::int64_t count_, cost_;
  std::int64_t done_ = 0, each_ = 0, due_ = 0;
};

}  // namespace halfstep::cpu
