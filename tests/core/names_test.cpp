// SPDX-License-Identifier: Apache-2.0
// A program's own names beside `using namespace halfstep`, which the docs recommend: at file scope, as programs have
// them. What this file holds is that it compiles.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "halfstep/halfstep.h"

using namespace std;
using namespace halfstep;

struct Names {};
#define OWN_FUNCTION(name) \
  string name(Names) { return #name; }
#define FOR_ALL_NAMES(f)                                                                                               \
  f(train) f(test) f(eval) f(evaluate) f(predict) f(fit) f(dataset) f(model) f(net) f(network) f(loss) f(accuracy)     \
      f(step) f(run) f(init) f(setup) f(config) f(options) f(print) f(save) f(load) f(copy) f(move) f(fill) f(sort)    \
          f(find) f(count) f(sum) f(mean) f(max) f(min) f(stddev) f(var) f(norm) f(dot) f(where) f(gather) f(size)     \
              f(shape) f(view) f(reshape) f(zeros) f(ones) f(seed) f(device) f(image) f(images) f(label) f(labels)     \
                  f(batch) f(grad) f(gradient) f(backward) f(forward) f(capture) f(checkpoint) f(profile) f(trace)     \
                      f(split) f(chunk) f(cat) f(pad) f(flip) f(roll) f(repeat) f(tile) f(all) f(add) f(sub) f(mul)    \
                          f(neg) f(sign) f(clamp) f(square) f(relu) f(softmax) f(dropout) f(embedding) f(linear)       \
                              f(resize) f(crop) f(name) f(version) f(parse) f(type) f(reset) f(clear) f(update)        \
                                  f(apply) f(map_all) f(reduce) f(transform) f(call) f(normalize) f(shuffle) f(sample) \
                                      f(collate_samples) f(compare) f(check) f(log_line) f(tensor) f(empty) f(help)    \
                                          f(usage) f(error) f(fail) f(train_epoch) f(optimizer) f(schedule) f(layer)   \
                                              f(block) f(encode) f(decode) f(attention) f(policy) f(report) f(stats)   \
                                                  f(benchmark) f(timer) f(epoch) f(metrics) f(trainer) f(logger)       \
                                                      f(runtime) f(core) f(ops) f(autograd) f(backends) f(cpu) f(cuda) \
                                                          f(utils)
FOR_ALL_NAMES(OWN_FUNCTION)

namespace {

TEST(Names, FunctionsOfAProgramMayHaveAnyNameButANamespaces) {
#define CHECK_FUNCTION(name) EXPECT_EQ(name(Names()), #name);
  FOR_ALL_NAMES(CHECK_FUNCTION)
}

// The standard library's names go on meaning what they mean.
TEST(Names, TheStandardLibraryBeside) {
  std::vector<int> v = {3, 1, 2};
  sort(v.begin(), v.end());
  EXPECT_EQ(v, (vector<int>{1, 2, 3}));
  fill(v.begin(), v.end(), 1);
  vector<int> w(v.size());
  copy(v.begin(), v.end(), w.begin());
  EXPECT_EQ(w, v);
  EXPECT_EQ(max(1, 2) + min(1, 2) + abs(-3) + clamp(7, 1, 4), 10);
  EXPECT_EQ(exp(0.0) + pow(2.0, 3.0) + sqrt(4.0) + floor(1.5) + round(1.4), 13);
  EXPECT_EQ(accumulate(v.begin(), v.end(), 0), 3);
  EXPECT_EQ(count(v.begin(), v.end(), 1), 3);
  EXPECT_TRUE(equal(v.begin(), v.end(), w.begin()) && isfinite(1.0));
  swap(v, w);
  EXPECT_EQ(std::max(v[0], 5), 5);
}

// std(x) can't be written after `using namespace halfstep`: there is a namespace of that name.
TEST(Names, TheStandardDeviationHasANameOfItsOwn) {
  const Tensor x = tensor({1, 2, 3, 4, 5, 6}, {2, 3}, {.dtype = f64, .requires_grad = true});
  EXPECT_NEAR(stddev(x).item<double>(), std::sqrt(3.5), 1e-14);
  EXPECT_EQ(stddev(x, {1}, {.correction = 0, .keepdim = true}).to_vector<double>(),
            halfstep::std(x, {1}, {.correction = 0, .keepdim = true}).to_vector<double>());
  stddev(x).backward();
  EXPECT_NEAR(x.grad().to_vector<double>()[0], -2.5 / 5 / std::sqrt(3.5), 1e-14);
}

}  // namespace
