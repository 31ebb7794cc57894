// SPDX-License-Identifier: Apache-2.0
#include "halfstep/dist/gather_order_internal.h"

namespace halfstep::dist::detail {

void GatherOrder::begin(bool with_gradients) {
  order_ = with_gradients ? &with_gradients_ : &without_;
  at_ = 0;
}

const GatherOrder::Unit* GatherOrder::next(const Unit& unit) {
  if (at_ == kLongest) {
    order_->clear();
    at_ = 0;
  }
  const bool expected = at_ < order_->size() && (*order_)[at_] == unit;
  if (!expected) {
    order_->resize(at_);
    order_->push_back(unit);
  }
  ++at_;
  return at_ < order_->size() ? &(*order_)[at_] : nullptr;
}

}  // namespace halfstep::dist::detail
