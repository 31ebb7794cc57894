// SPDX-License-Identifier: Apache-2.0
// Modules inside of others whose classes know nothing of them.
#include <gtest/gtest.h>

#include "halfstep/nn/container.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/module.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "tests/support/errors.h"

namespace halfstep::nn {
namespace {

// Notes when the forward() of its owner begins and ends.
struct Watch : Module<Watch> {
  explicit Watch(std::vector<std::string>* notes) : notes_(notes) {}
  Parameter scale = parameter("scale", full({2}, 3.0).requires_grad_());
  Buffer seen = buffer("seen", zeros({1}));
  Tensor forward(const Tensor& x) const { return x * scale; }
  std::string kind() const override { return "Watch"; }
  std::shared_ptr<void> around_forward(const ModuleBase& owner) const override {
    notes_->push_back("begin " + owner.kind());
    return std::shared_ptr<void>(nullptr, [notes = notes_](void*) { notes->push_back("end"); });
  }

 private:
  std::vector<std::string>* notes_;
};

std::vector<std::string> names_of(const NamedTensors& tensors) {
  std::vector<std::string> result;
  for (const NamedTensor& t : tensors) result.push_back(t.name);
  return result;
}

TEST(Attached, IsTrainedMovedSavedAndPrintedWithItsOwner) {
  std::vector<std::string> notes;
  const Linear linear{{.in = 2, .out = 2}};
  const Linear before = linear;  // another handle
  linear.eval();
  linear.attach("watch", std::make_shared<Watch>(&notes));
  EXPECT_EQ(names_of(before.parameters()), (std::vector<std::string>{"weight", "bias", "watch.scale"}));
  EXPECT_EQ(names_of(linear.state_dict()), (std::vector<std::string>{"weight", "bias", "watch.scale", "watch.seen"}));
  EXPECT_FALSE(linear.attached("watch")->is_training());
  linear.train();
  EXPECT_TRUE(linear.attached("watch")->is_training());
  linear.to(f64);
  EXPECT_EQ(linear.attached("watch")->own_tensor("scale").dtype(), f64);
  linear.to(f32);
  EXPECT_EQ(linear.str(), "Linear(2, 2\n  (watch): Watch()\n)");
  (void)before(ones({1, 2}));
  EXPECT_EQ(notes, (std::vector<std::string>{"begin Linear", "end"}));

  EXPECT_EQ(test::error_of<Error>([&] { linear.attach("weight", std::make_shared<Watch>(&notes)); }),
            "attach: expected a name that is free, got 'weight'");
  EXPECT_EQ(test::error_of<Error>([&] { linear.attach("watch", std::make_shared<Watch>(&notes)); }),
            "attach: expected a name that is free, got 'watch'");
  EXPECT_EQ(test::error_of<Error>([&] { linear.attach("self", linear.copy()); }),
            "attach: expected another module as 'self', got one that this one is in");
  EXPECT_TRUE(before.remove_attached("watch"));
  EXPECT_FALSE(linear.remove_attached("watch"));
  EXPECT_EQ(linear.parameters().size(), 2U);
}

TEST(Attached, ClonesHaveTheirOwn) {
  std::vector<std::string> notes;
  const Sequential net{Linear{{.in = 2, .out = 2}}};
  net.attach("watch", std::make_shared<Watch>(&notes));
  const Sequential copy = clone(net);
  ASSERT_NE(copy.attached("watch"), nullptr);
  ASSERT_NE(copy.attached("watch"), net.attached("watch"));
  copy.attached("watch")->own_tensor("seen").add_(1);
  EXPECT_EQ(net.attached("watch")->own_tensor("seen").item<float>(), 0);
  EXPECT_EQ(names_of(copy.state_dict()), names_of(net.state_dict()));
  (void)copy(ones({1, 2}));
  EXPECT_EQ(notes, (std::vector<std::string>{"begin Sequential", "end"}));
}

}  // namespace
}  // namespace halfstep::nn
