// SPDX-License-Identifier: Apache-2.0
// The texts were compared with PyTorch's for the same values, but for the names of dtypes and
// flags, and for whole numbers beside inf, whose columns PyTorch doesn't align.
#include "halfstep/ops/print.h"

#include <sstream>

#include "tests/ops/index_checks.h"

namespace halfstep {
namespace {

using namespace test;

class Print : public testing::Test {
 protected:
  ~Print() override { set_print_options({}); }
  DeviceGuard on_the_cpu_{Device{}};  // elsewhere the device is named: tests/runtime
};

TEST_F(Print, ValuesAreAligned) {
  EXPECT_EQ(tensor({1, 2.5, -3}).str(), "tensor([ 1.0000,  2.5000, -3.0000])");
  EXPECT_EQ(tensor({1, 2, -3}).str(), "tensor([ 1.,  2., -3.])");
  EXPECT_EQ(tensor({0, 0}).str(), "tensor([0., 0.])");
  EXPECT_EQ(ints({1, -20, 300}).str(), "tensor([  1, -20, 300])");
  EXPECT_EQ(tensor({1, 0}, {.dtype = boolean}).str(), "tensor([ true, false])");
  EXPECT_EQ(tensor({{1, 2}, {3, 40}}).str(), "tensor([[ 1.,  2.],\n        [ 3., 40.]])");
  EXPECT_EQ(tensor({{{1, 2}, {3, 4}}, {{5, 6}, {7, 8}}}, {.dtype = i64}).str(),
            "tensor([[[1, 2],\n         [3, 4]],\n\n        [[5, 6],\n         [7, 8]]])");
}

TEST_F(Print, Scientific) {
  EXPECT_EQ(tensor({1e-5, 1}).str(), "tensor([1.0000e-05, 1.0000e+00])");
  EXPECT_EQ(tensor({1, 2000}).str(), "tensor([1.0000e+00, 2.0000e+03])");
  EXPECT_EQ(tensor({2e8}).str(), "tensor([2.0000e+08])");
  EXPECT_EQ(tensor({0.5, 499}).str(), "tensor([  0.5000, 499.0000])");
  set_print_options({.scientific = false});
  EXPECT_EQ(tensor({1e-5, 1}).str(), "tensor([0.0000, 1.0000])");
  set_print_options({.precision = 2, .scientific = true});
  EXPECT_EQ(tensor({0.5}).str(), "tensor([5.00e-01])");
}

TEST_F(Print, NotFinite) {
  EXPECT_EQ(tensor({1.5, NAN, -INFINITY}).str(), "tensor([1.5000,    nan,   -inf])");
  EXPECT_EQ(tensor({1, INFINITY}).str(), "tensor([ 1., inf])");
  EXPECT_EQ(tensor({NAN}).str(), "tensor([nan])");
}

TEST_F(Print, ScalarsAndEmpty) {
  EXPECT_EQ(scalar_tensor(1.5).str(), "tensor(1.5000)");
  EXPECT_EQ(scalar_tensor(7, {.dtype = i64}).str(), "tensor(7)");
  EXPECT_EQ(scalar_tensor(true, {.dtype = boolean}).str(), "tensor(true)");
  EXPECT_EQ(zeros({0}).str(), "tensor([])");
  EXPECT_EQ(zeros({2, 0}, {.dtype = i64}).str(), "tensor([], size=[2, 0], dtype=i64)");
  EXPECT_EQ(Tensor().str(), "tensor(undefined)");
  EXPECT_EQ(scalar_tensor(INT64_MAX, {.dtype = i64}).str(), "tensor(9223372036854775807)");
}

TEST_F(Print, Suffixes) {
  EXPECT_EQ(tensor({0.1}, {.dtype = f16}).str(), "tensor([0.1000], dtype=f16)");
  EXPECT_EQ(tensor({1}, {.dtype = f8e4m3}).str(), "tensor([1.], dtype=f8e4m3)");
  const Tensor x = tensor({1, 2}, {.requires_grad = true});
  EXPECT_EQ(x.str(), "tensor([1., 2.], requires_grad=true)");
  EXPECT_EQ((x + x).str(), "tensor([2., 4.], grad_fn=<add>)");
  set_print_options({.line_width = 30});
  EXPECT_EQ(x.str(), "tensor([1., 2.],\n       requires_grad=true)");
}

TEST_F(Print, LongLinesAreBroken) {
  EXPECT_EQ(arange(0, 25).str(),
            "tensor([ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11, 12, 13, 14, 15, 16, 17,\n"
            "        18, 19, 20, 21, 22, 23, 24])");
  set_print_options({.line_width = 20});
  EXPECT_EQ(arange(0, 6).str(), "tensor([0, 1, 2, 3,\n        4, 5])");
}

TEST_F(Print, LargeTensorsAreCut) {
  EXPECT_EQ(arange(0, 1001).str(), "tensor([   0,    1,    2,  ...,  998,  999, 1000])");
  EXPECT_EQ(arange(0, 1000).str().find("..."), std::string::npos);
  EXPECT_EQ(arange(0, 2000).view({2, 1000}).str(),
            "tensor([[   0,    1,    2,  ...,  997,  998,  999],\n"
            "        [1000, 1001, 1002,  ..., 1997, 1998, 1999]])");
  EXPECT_EQ(arange(0, 1600).view({800, 2}).str(),
            "tensor([[   0,    1],\n        [   2,    3],\n        [   4,    5],\n        ...,\n"
            "        [1594, 1595],\n        [1596, 1597],\n        [1598, 1599]])");
  EXPECT_EQ(arange(0, 1600).view({800, 1, 2}).str(),
            "tensor([[[   0,    1]],\n\n        [[   2,    3]],\n\n        [[   4,    5]],\n\n        ...,\n\n"
            "        [[1594, 1595]],\n\n        [[1596, 1597]],\n\n        [[1598, 1599]]])");
  set_print_options({.threshold = 4, .edge_items = 1});
  EXPECT_EQ(arange(0, 6).str(), "tensor([0,  ..., 5])");
  set_print_options({.threshold = 4, .edge_items = 0});
  EXPECT_EQ(arange(0, 6).str(), "tensor([ ...])");
}

TEST_F(Print, LayoutsAndStreams) {
  const Tensor x = tensor({{1, 2, 3}, {4, 5, 6}});
  std::ostringstream out;
  out << x.transpose(0, 1);
  EXPECT_EQ(out.str(), "tensor([[1., 4.],\n        [2., 5.],\n        [3., 6.]])");
  EXPECT_EQ(tensor({1}).expand({3}).str(), "tensor([1., 1., 1.])");
}

TEST_F(Print, Options) {
  EXPECT_THROW(set_print_options({.precision = -1}), Error);
  EXPECT_THROW(set_print_options({.edge_items = -1}), Error);
  set_print_options({.precision = 2});
  EXPECT_EQ(print_options().precision, 2);
  EXPECT_EQ(tensor({0.125}).str(), "tensor([0.12])");
}

}  // namespace
}  // namespace halfstep
