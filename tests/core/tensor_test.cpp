// SPDX-License-Identifier: Apache-2.0
#include "halfstep/core/tensor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <thread>

#include "halfstep/core/dlpack.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"

namespace halfstep {
namespace {

using Values = std::vector<double>;

TEST(Tensor, HandlesShareTheTensor) {
  Tensor a = zeros({2, 3});
  const Tensor b = a;
  EXPECT_TRUE(a.is_same(b));
  a.fill_(1);
  EXPECT_EQ(b.to_vector<double>(), Values(6, 1));
  EXPECT_FALSE(a.clone().is_same(a));
  EXPECT_FALSE(Tensor().defined());
}

TEST(Tensor, SizesAndStrides) {
  const Tensor x = empty({2, 3, 4});
  EXPECT_EQ(x.dim(), 3);
  EXPECT_EQ(x.numel(), 24);
  EXPECT_EQ(x.size(-1), 4);
  EXPECT_EQ(x.stride(0), 12);
  EXPECT_EQ(x.item_size(), 4u);
  EXPECT_THROW(x.size(3), ShapeError);
  EXPECT_THROW(x.size(-4), ShapeError);
  EXPECT_TRUE(x.is_contiguous());
  EXPECT_FALSE(x.is_contiguous(MemoryFormat::channels_last));
  EXPECT_TRUE(x.transpose(0, 2).is_contiguous(MemoryFormat::preserve)) << "dense in some order";
  EXPECT_FALSE(x.slice(2, 0, 2).is_contiguous(MemoryFormat::preserve));
  EXPECT_EQ(x.slice(0, 1).storage_offset(), 12);
  EXPECT_TRUE(empty({0, 5}).is_contiguous());
}

TEST(Tensor, NumbersOfElementsThatDoNotFitAreErrors) {
  const std::int64_t half = std::int64_t{1} << 32;
  EXPECT_EQ((Shape{half, half / 4}.numel()), std::int64_t{1} << 62);
  EXPECT_THROW((Shape{half, half}.numel()), ShapeError);
  EXPECT_EQ((Shape{half, half, 0}.numel()), 0) << "none, whatever the product of the others";
  EXPECT_THROW(tensor(Values{}, {half, half}), ShapeError);
}

TEST(Tensor, UndefinedTensorsAreRefusedByName) {
  const Tensor none;
  EXPECT_THROW(none.sizes(), Error);
  EXPECT_THROW(none.dtype(), Error);
  EXPECT_THROW(none.item<float>(), Error);
  EXPECT_THROW(none + none, Error);
}

TEST(Tensor, ItemsAndVectors) {
  EXPECT_EQ(scalar_tensor(2.5).item<float>(), 2.5f);
  EXPECT_EQ(scalar_tensor(INT64_MAX, {.dtype = i64}).item<std::int64_t>(), INT64_MAX);
  EXPECT_EQ(tensor({1}, {.dtype = boolean}).item<bool>(), true);
  EXPECT_EQ(tensor({1.5}, {.dtype = bf16}).item<int>(), 1);
  EXPECT_THROW(zeros({2}).item<float>(), ShapeError);
  EXPECT_THROW(zeros({0}).item<float>(), ShapeError);
  const Tensor t = tensor({1, 2, 3, 4}, {2, 2}).transpose(0, 1);
  EXPECT_EQ(t.to_vector<float>(), (std::vector<float>{1, 3, 2, 4}));
  EXPECT_EQ(t.to_vector<std::int64_t>(), (std::vector<std::int64_t>{1, 3, 2, 4}));
  EXPECT_THROW(t.data<double>(), DTypeError);
  EXPECT_EQ(t.data<float>()[1], 2);
}

TEST(Tensor, FromBlob) {
  std::vector<float> memory(6);
  std::iota(memory.begin(), memory.end(), 0.0f);
  int deleted = 0;
  {
    Tensor x = from_blob(memory.data(), {2, 3}, f32, [&] { ++deleted; });
    const Tensor row = x[1];
    x = Tensor();
    EXPECT_EQ(deleted, 0) << "a view keeps the memory";
    EXPECT_EQ(row.to_vector<double>(), (Values{3, 4, 5}));
    row.clone().fill_(0);
    Tensor(row).fill_(9);
  }
  EXPECT_EQ(deleted, 1);
  EXPECT_EQ(memory[5], 9);
  EXPECT_EQ(from_blob(memory.data(), {3, 2}, {1, 3}, f32).to_vector<double>()[1], 9) << "strides are in elements";
  EXPECT_THROW(from_blob(nullptr, {2}), Error);
  EXPECT_THROW(from_blob(memory.data(), {2}, {-1}, f32), ShapeError);
  EXPECT_THROW(from_blob(memory.data(), {2}, {1, 1}, f32), ShapeError);
  EXPECT_EQ(from_blob(nullptr, {0}).numel(), 0);
}

TEST(Tensor, VersionsCountWrites) {
  Tensor x = zeros({2, 2});
  const auto v = x.version();
  Tensor view = x[0];
  view.add_(1);
  EXPECT_EQ(x.version(), v + 1);
  x.mul_(2);
  EXPECT_EQ(view.version(), v + 2);
  (void)(x + x);
  EXPECT_EQ(x.version(), v + 2);
}

TEST(Tensor, ConversionsKeepTheLayout) {
  const Tensor x = tensor({1, 2.5, -3, 4}, {2, 2}).transpose(0, 1);
  const Tensor h = x.to(f16);
  EXPECT_EQ(h.strides(), x.strides());
  EXPECT_EQ(h.to_vector<double>(), (Values{1, -3, 2.5, 4}));
  EXPECT_TRUE(x.to(f32).is_same(x));
  EXPECT_FALSE(x.to(f32, {.copy = true}).is_same(x));
  EXPECT_EQ(x.to(i32).to_vector<double>(), (Values{1, -3, 2, 4}));
  EXPECT_TRUE(x.contiguous().is_contiguous());
  EXPECT_TRUE(x.contiguous().contiguous().is_contiguous());
}

TEST(Tensor, HandlesMayBeCopiedByManyThreads) {
  const Tensor x = ones({100});
  std::vector<std::jthread> threads;
  std::atomic<int> sum{0};
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int k = 0; k < 1000; ++k) {
        const Tensor copy = x, view = copy.slice(0, k % 10);
        sum += static_cast<int>(view.data<float>()[0]);
      }
    });
  }
  threads.clear();
  EXPECT_EQ(sum, 4000);
  EXPECT_EQ(x.impl()->use_count(), 1u);
}

TEST(DLPack, RoundTripSharesMemory) {
  for (const DType d : {f32, f64, f16, bf16, f8e4m3, f8e5m2, i64, i32, i8, u8, boolean}) {
    Tensor x = tensor({1, 0, 1, 1, 0, 1}, {2, 3}, {.dtype = d});
    const Tensor t = x.transpose(0, 1);
    Tensor back = from_dlpack(to_dlpack(t));
    EXPECT_EQ(back.dtype(), d);
    EXPECT_EQ(back.strides(), t.strides());
    EXPECT_EQ(back.to_vector<double>(), t.to_vector<double>()) << name(d);
    back.fill_(0);
    EXPECT_EQ(x.to_vector<double>(), Values(6, 0)) << name(d);
    EXPECT_EQ(from_dlpack(to_dlpack_versioned(x.slice(1, 1))).sizes(), Shape({2, 2}));
  }
  EXPECT_EQ(from_dlpack(to_dlpack(scalar_tensor(3))).item<double>(), 3);
  EXPECT_EQ(from_dlpack(to_dlpack(zeros({0, 2}))).sizes(), Shape({0, 2}));
}

TEST(DLPack, TheMemoryLivesUntilTheDeleter) {
  dlpack::ManagedTensor* managed = nullptr;
  {
    const Tensor x = ones({3});
    managed = to_dlpack(x);
  }
  EXPECT_EQ(managed->tensor.device.device_type, 1);
  EXPECT_EQ(managed->tensor.dtype.code, 2);
  EXPECT_EQ(managed->tensor.dtype.bits, 32);
  EXPECT_EQ(static_cast<float*>(managed->tensor.data)[2], 1);
  managed->deleter(managed);
  dlpack::ManagedTensorVersioned* versioned = to_dlpack_versioned(ones({1}));
  EXPECT_EQ(versioned->version.major, 1u);
  versioned->deleter(versioned);
}

TEST(DLPack, ForeignTensors) {
  float memory[] = {0, 1, 2, 3, 4, 5};
  std::int64_t shape[] = {2, 2}, strides[] = {3, 1};
  static int deleted;
  deleted = 0;
  dlpack::ManagedTensor managed{
      {memory, {1, 0}, 2, {2, 32, 1}, shape, strides, 4}, nullptr, [](dlpack::ManagedTensor*) { ++deleted; }};
  {
    const Tensor x = from_dlpack(&managed);
    EXPECT_EQ(x.to_vector<double>(), (Values{1, 2, 4, 5})) << "the offset is in bytes";
  }
  EXPECT_EQ(deleted, 1);
  managed.tensor.strides = nullptr;
  managed.tensor.byte_offset = 0;
  EXPECT_EQ(from_dlpack(&managed).to_vector<double>(), (Values{0, 1, 2, 3})) << "no strides: row-major";
  EXPECT_EQ(deleted, 2);

  const auto refused = [&](auto&& change) {
    dlpack::ManagedTensor other = managed;
    std::int64_t sizes[] = {2, 2}, steps[] = {2, 1};
    other.tensor.shape = sizes;
    other.tensor.strides = steps;
    change(other.tensor);
    EXPECT_THROW(from_dlpack(&other), Error);
  };
  refused([](auto& t) { t.dtype.lanes = 2; });
  refused([](auto& t) { t.dtype = {5, 64, 1}; });
  refused([](auto& t) { t.device.device_type = 99; });
  refused([](auto& t) { t.ndim = 9; });
  refused([](auto& t) { t.ndim = -1; });
  refused([](auto& t) { t.shape[0] = -2; });
  refused([](auto& t) { t.strides[1] = -1; });
  refused([](auto& t) { t.shape[0] = INT64_MAX; });
  refused([](auto& t) { t.strides[0] = INT64_MAX; });
  refused([](auto& t) { t.data = nullptr; });
  refused([](auto& t) { t.byte_offset = 2; });
  EXPECT_EQ(deleted, 2) << "what is refused stays the caller's";
  EXPECT_THROW(from_dlpack(static_cast<dlpack::ManagedTensor*>(nullptr)), Error);

  dlpack::ManagedTensorVersioned versioned{
      {1, 0}, nullptr, [](dlpack::ManagedTensorVersioned*) { ++deleted; }, dlpack::kReadOnly, managed.tensor};
  EXPECT_THROW(from_dlpack(&versioned), Error);
  versioned.flags = 0;
  versioned.version.major = 2;
  EXPECT_THROW(from_dlpack(&versioned), Error);
}

TEST(DLPack, WhatCanNotBeGiven) {
  EXPECT_THROW(to_dlpack(ones({1}, {.requires_grad = true})), AutogradError);
  EXPECT_THROW(to_dlpack(Tensor()), Error);
}

}  // namespace
}  // namespace halfstep
