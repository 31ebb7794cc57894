// SPDX-License-Identifier: Apache-2.0
// How lists of tensors are cut into the blocks of a few launches.
#include "halfstep/backends/cuda/device/chunks.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

namespace hscuda {
namespace {

// A tensor as a list has it. Nothing is read through its address.
struct Item {
  int64_t numel;
  uintptr_t address = 4096;
  uint8_t dtype = HALFSTEP_F32;
  bool defined = true;
};

halfstep_tensor tensor_of(const Item& item, const int64_t* stride) {
  return {.data = reinterpret_cast<void*>(item.address),
          .sizes = &item.numel,
          .strides = stride,
          .numel = item.numel,
          .ndim = 1,
          .dtype = item.dtype,
          .defined = item.defined,
          .contiguous = 1,
          .reserved = 0};
}

// What all blocks of all launches do, tensor by tensor, in the order of the launches; and how many launches there were.
struct Work {
  std::vector<std::vector<Chunk>> chunks;
  std::vector<std::vector<uint64_t>> addresses;  ///< as the kernel sees them in column 3
  int launches = 0;
};

// Column 3 holds the tensor, column 7 a number of its own.
Work cut(const std::vector<Item>& items, int64_t each) {
  const int64_t stride = 1;
  Work work{std::vector<std::vector<Chunk>>(items.size()), std::vector<std::vector<uint64_t>>(items.size())};
  const auto describe = [&](int i, ChunkColumns& columns) -> int64_t {
    const Item& item = items[static_cast<std::size_t>(i)];
    columns.add(3, tensor_of(item, &stride));
    columns.set(7, static_cast<uint64_t>(i) * 1000);
    return item.defined ? item.numel : 0;
  };
  for_each_table(static_cast<int>(items.size()), each, describe, [&](const ChunkTable& table) {
    ++work.launches;
    EXPECT_GT(table.blocks(), 0u);
    for (uint32_t b = 0; b < table.blocks(); ++b) {
      const Chunk chunk = table.at(b);
      const auto tensor = static_cast<std::size_t>(chunk.tensor);
      ASSERT_LT(tensor, items.size());
      EXPECT_EQ(table.word(chunk, 7), tensor * 1000);
      work.chunks[tensor].push_back(chunk);
      work.addresses[tensor].push_back(reinterpret_cast<uint64_t>(table.address(chunk, 3)));
    }
  });
  return work;
}

// Every element is in one chunk, in order, and what is said about each chunk is its tensor's.
void expect_covered(const std::vector<Item>& items, const Work& work, int64_t each) {
  for (std::size_t i = 0; i < items.size(); ++i) {
    int64_t at = 0;
    for (std::size_t c = 0; c < work.chunks[i].size(); ++c) {
      const Chunk& chunk = work.chunks[i][c];
      ASSERT_EQ(chunk.begin, at) << "tensor " << i;
      ASSERT_GT(chunk.end, chunk.begin);
      ASSERT_LE(chunk.end - chunk.begin, each);
      EXPECT_EQ(chunk.dtype(3), items[i].dtype);
      EXPECT_EQ(chunk.aligned, items[i].address % 16 == 0);
      EXPECT_TRUE(chunk.has(3));
      EXPECT_FALSE(chunk.has(0));
      EXPECT_EQ(work.addresses[i][c], items[i].address);
      at = chunk.end;
    }
    ASSERT_EQ(at, items[i].defined ? items[i].numel : 0) << "tensor " << i;
  }
}

TEST(CudaChunks, OneTensorIsCutWithoutGaps) {
  for (const int64_t numel : {1, 63, 64, 65, 128, 1000}) {
    const std::vector<Item> items = {{numel}};
    const Work work = cut(items, 64);
    EXPECT_EQ(work.launches, 1);
    EXPECT_EQ(static_cast<int64_t>(work.chunks[0].size()), divide_up(numel, 64));
    expect_covered(items, work, 64);
  }
}

TEST(CudaChunks, ManyTinyTensorsTakeFewLaunches) {
  std::vector<Item> items;
  for (int i = 0; i < 1000; ++i) {
    items.push_back({1 + i % 7, static_cast<uintptr_t>(4096 + 4 * i), static_cast<uint8_t>(i % 4)});
  }
  const Work work = cut(items, 8192);
  // Two columns and an entry of three words each.
  const int fit = ChunkTable::kWords / 5;
  EXPECT_EQ(work.launches, divide_up(1000, fit));
  expect_covered(items, work, 8192);
}

TEST(CudaChunks, EmptyAndAbsentTensorsAreLeftOut) {
  const std::vector<Item> items = {{0}, {5}, {0}, {7, 4096, HALFSTEP_F32, false}, {3}, {0}};
  const Work work = cut(items, 4);
  EXPECT_EQ(work.launches, 1);
  EXPECT_TRUE(work.chunks[0].empty());
  EXPECT_EQ(work.chunks[1].size(), 2u);
  EXPECT_TRUE(work.chunks[3].empty());
  expect_covered(items, work, 4);
  EXPECT_EQ(cut({}, 4).launches, 0);
  EXPECT_EQ(cut({{0}, {0}}, 4).launches, 0);
}

TEST(CudaChunks, AlignmentIsThatOfAllColumns) {
  const int64_t stride = 1;
  const Item aligned{100, 4096}, shifted{100, 4098, HALFSTEP_BF16};
  ChunkTables tables(64);
  ChunkColumns both;
  both.add(0, tensor_of(aligned, &stride));
  both.add(5, tensor_of(shifted, &stride));
  ChunkColumns one;
  one.add(0, tensor_of(aligned, &stride));
  one.set(5, 4097);  // a number is no address
  ASSERT_TRUE(tables.add(11, 100, both));
  ASSERT_TRUE(tables.add(12, 100, one));
  const ChunkTable& table = tables.table();
  ASSERT_EQ(table.blocks(), 4u);
  EXPECT_FALSE(table.at(1).aligned);
  EXPECT_TRUE(table.at(2).aligned);
  EXPECT_EQ(table.at(1).tensor, 11);
  EXPECT_EQ(table.at(2).tensor, 12);
  EXPECT_EQ(table.at(0).dtype(5), HALFSTEP_BF16);
  EXPECT_EQ(reinterpret_cast<uint64_t>(table.address(table.at(0), 5)), 4098u);
  EXPECT_EQ(table.address(table.at(0), 4), nullptr);
  EXPECT_EQ(table.word(table.at(3), 5), 4097u);
}

TEST(CudaChunks, ATensorOfMoreThanTwoToThe31Elements) {
  const int64_t numel = (int64_t{5} << 30) + 3, stride = 1;
  ChunkTables tables(8192);
  ChunkColumns columns;
  columns.add(0, tensor_of({numel}, &stride));
  ASSERT_TRUE(tables.add(0, 10, columns));
  ASSERT_TRUE(tables.add(1, numel, columns));
  ASSERT_TRUE(tables.add(2, 10, columns));
  const ChunkTable& table = tables.table();
  ASSERT_EQ(table.blocks(), 2 + divide_up(numel, 8192));
  const Chunk last = table.at(table.blocks() - 2), after = table.at(table.blocks() - 1);
  EXPECT_EQ(table.at(1).begin, 0);
  EXPECT_EQ(last.tensor, 1);
  EXPECT_EQ(last.begin, int64_t{5} << 30);
  EXPECT_EQ(last.end, numel);
  EXPECT_EQ(after.tensor, 2);
  EXPECT_EQ(after.end, 10);
}

TEST(CudaChunks, ALaunchHasNoMoreBlocksThanAGridTakes) {
  const int64_t stride = 1, numel = int64_t{3} << 29;
  ChunkTables tables(1);
  ChunkColumns columns;
  columns.add(0, tensor_of({numel}, &stride));
  ASSERT_TRUE(tables.add(0, numel, columns));
  EXPECT_FALSE(tables.add(1, numel, columns));
  tables.restart();
  EXPECT_TRUE(tables.add(1, numel, columns));
  EXPECT_EQ(tables.table().at(7).tensor, 1);
}

}  // namespace
}  // namespace hscuda
