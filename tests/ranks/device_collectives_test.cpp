// SPDX-License-Identifier: Apache-2.0
// Collectives of a device's own library: the bits of the host's. HALFSTEP_SIM_COLLECTIVES says what the simulated
// device promises: sums in the order of ranks, those of a ring (`ring`), or that it has none (`0`).
#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "halfstep/core/fail.h"
#include "halfstep/core/random.h"
#include "halfstep/dist/data_parallel.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/random.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/runtime/devices.h"
#include "tests/ranks/networks.h"

namespace halfstep::dist::test {
namespace {

std::string_view promise() {
  const char* text = std::getenv("HALFSTEP_SIM_COLLECTIVES");
  return text ? text : "1";
}

class DeviceCollectives : public testing::Test {
 protected:
  void SetUp() override {
    try {
      device_ = Device("sim");
    } catch (const Error& e) {
      GTEST_SKIP() << e.what();
    }
  }
  void TearDown() override {
    if (HasFailure() || IsSkipped()) return;
    EXPECT_EQ(device_info(device_).collectives, promise() != "0");
  }

  /// Runs `f`, which starts one collective of `bytes` a rank, and checks who has done it: the device, unless the data
  /// travel with the ranks' agreement, or `device` is false.
  template <class F>
  void one(const std::string& what, std::int64_t bytes, F&& f, bool device = true) const {
    const std::uint64_t before = world().stats().on_devices;
    f();
    const bool expected = device && bytes > 24 && promise() != "0";
    EXPECT_EQ(world().stats().on_devices - before, expected ? 1U : 0U) << what;
  }

  template <class T>
  Tensor there(std::int64_t n, int salt = 0) const {
    return values<T>(world().rank(), n, salt).to(device_);
  }
  template <class T>
  Tensor blank(std::int64_t n) const {
    return zeros({n}, {.dtype = dtype_of<T>, .device = device_});
  }
  Device device_;
};

template <class T>
std::int64_t bytes_of(std::int64_t n) {
  return n * static_cast<std::int64_t>(item_size(dtype_of<T>));
}

// A ring's min and max say nothing of NaN, and are left to the host.
template <class T>
bool reduces_there(ReduceOp op) {
  return promise() != "ring" || is_integral(dtype_of<T>) || (op != ReduceOp::min && op != ReduceOp::max);
}

// Odd counts are no equal parts.
TEST_F(DeviceCollectives, ReductionsHaveTheBitsOfTheHost) {
  const int size = world().size(), rank = world().rank();
  for (const DType dtype : kNumbers) {
    for (const ReduceOp op : kOps) {
      if (op == ReduceOp::mean && is_integral(dtype)) continue;
      for (const std::int64_t n : {std::int64_t{0}, std::int64_t{7}, std::int64_t{64}, std::int64_t{20011}}) {
        visit_dtype(dtype, [&](auto tag) {
          using T = storage_t<tag.value>;
          if constexpr (!std::is_same_v<T, bool>) {
            const std::string what = std::string(halfstep::name(dtype)) + " " + name(op) + " " + std::to_string(n);
            std::vector<T> expected, part;
            for (std::int64_t i = 0; i < n; ++i) {
              expected.push_back(reduced<T>(op, size, i));
              part.push_back(reduced<T>(op, size, n * rank + i));
            }
            const Tensor t = there<T>(n);
            one(
                what, bytes_of<T>(n), [&] { world().all_reduce(t, op).wait(); }, reduces_there<T>(op));
            expect_bits(t.to(Device()), expected, what);
            const Tensor output = blank<T>(n);
            one(
                what, bytes_of<T>(n), [&] { world().reduce_scatter(output, there<T>(n * size), op).wait(); },
                reduces_there<T>(op));
            expect_bits(output.to(Device()), part, what + ", scattered");
            // The host's.
            const Tensor host = values<T>(rank, n);
            world().all_reduce(host, op).wait();
            expect_bits(host, expected, what + ", host");
          }
        });
      }
    }
  }
}

TEST_F(DeviceCollectives, MoveEveryDtype) {
  const int size = world().size(), rank = world().rank(), root = size - 1;
  for (const DType dtype : kEverything) {
    for (const std::int64_t n : {std::int64_t{1}, std::int64_t{999}, std::int64_t{150001}}) {
      visit_dtype(dtype, [&](auto tag) {
        using T = storage_t<tag.value>;
        const std::string what = std::string(halfstep::name(dtype)) + " " + std::to_string(n);
        const std::int64_t bytes = bytes_of<T>(n);
        std::vector<Stored<T>> roots, all, swapped, part;
        for (std::int64_t i = 0; i < n; ++i) {
          roots.push_back(value<T>(root, i));
          part.push_back(value<T>(root, n * rank + i));
        }
        for (int r = 0; r < size; ++r) {
          for (std::int64_t i = 0; i < n; ++i) {
            all.push_back(value<T>(r, i));
            swapped.push_back(value<T>(r, n * rank + i));
          }
        }
        const Tensor own = there<T>(n), large = there<T>(n * size);
        one(what, bytes, [&] { world().broadcast(own, root).wait(); });
        expect_same<T>(own.to(Device()), roots, what + " broadcast");
        Tensor output = blank<T>(n * size);
        one(what, bytes, [&] { world().all_gather(output, there<T>(n)).wait(); });
        expect_same<T>(output.to(Device()), all, what + " all_gather");
        output = blank<T>(n * size);
        Tensor place = output.narrow(0, n * rank, n);
        place.copy_(there<T>(n));
        one(what, bytes, [&] { world().all_gather(output, place).wait(); });
        expect_same<T>(output.to(Device()), all, what + " all_gather in place");
        output = blank<T>(n * size);
        one(what, bytes, [&] { world().all_to_all(output, large).wait(); });
        expect_same<T>(output.to(Device()), swapped, what + " all_to_all");
        output = rank == root ? blank<T>(n * size) : Tensor();
        one(what, bytes, [&] { world().gather(output, there<T>(n), root).wait(); });
        if (rank == root) expect_same<T>(output.to(Device()), all, what + " gather");
        output = blank<T>(n);
        one(what, bytes, [&] { world().scatter(output, rank == root ? large : Tensor(), root).wait(); });
        expect_same<T>(output.to(Device()), part, what + " scatter");
      });
    }
  }
}

// Parts alike, of unlike lengths, some of them empty, and all with one rank; `seed` chooses.
std::vector<std::int64_t> parts_of(int ranks, std::int64_t scale, int seed) {
  std::vector<std::int64_t> counts;
  for (int r = 0; r < ranks; ++r) {
    const bool last = r == ranks - 1;
    counts.push_back(seed == 0 ? scale : seed == 1 ? scale * (r + 1) + r : seed == 2 ? (r == 1 ? 0 : scale + r) : 0);
    if (seed == 3 && last) counts.back() = scale;
  }
  return counts;
}

TEST_F(DeviceCollectives, GatherAndReducePartsOfUnlikeLengths) {
  const int size = world().size(), rank = world().rank();
  for (const DType dtype : kEverything) {
    for (int seed = 0; seed < 4; ++seed) {
      for (const std::int64_t scale : {std::int64_t{1}, std::int64_t{501}, std::int64_t{60001}}) {
        if (scale > 1000 && dtype != f32 && dtype != bf16) continue;
        const std::vector<std::int64_t> counts = parts_of(size, scale, seed);
        std::int64_t total = 0, begin = 0;
        for (int r = 0; r < size; ++r) {
          if (r == rank) begin = total;
          total += counts[static_cast<std::size_t>(r)];
        }
        const std::int64_t own = counts[static_cast<std::size_t>(rank)];
        visit_dtype(dtype, [&](auto tag) {
          using T = storage_t<tag.value>;
          const std::string what = fmt::format("{}, parts {} of {}", halfstep::name(dtype), seed, scale);
          std::vector<Stored<T>> gathered;
          for (int r = 0; r < size; ++r) {
            for (std::int64_t k = 0; k < counts[static_cast<std::size_t>(r)]; ++k) {
              gathered.push_back(value<T>(r, static_cast<std::int64_t>(gathered.size())));
            }
          }
          const Tensor all = there<T>(total);
          one(what, bytes_of<T>(total), [&] { world().all_gather_parts(all, counts).wait(); });
          expect_same<T>(all.to(Device()), gathered, what + " all_gather_parts");
          if constexpr (!std::is_same_v<T, bool>) {
            for (const ReduceOp op : kOps) {
              if (op == ReduceOp::mean && is_integral(dtype)) continue;
              std::vector<T> expected;
              for (std::int64_t i = 0; i < total; ++i) {
                const bool mine = i >= begin && i < begin + own;
                expected.push_back(mine ? reduced<T>(op, size, i) : value<T>(rank, i));
              }
              const Tensor t = there<T>(total), host = values<T>(rank, total);
              one(
                  what, bytes_of<T>(total), [&] { world().reduce_scatter_parts(t, counts, op).wait(); },
                  reduces_there<T>(op));
              expect_bits(t.to(Device()), expected, what + " reduce_scatter_parts " + name(op));
              world().reduce_scatter_parts(host, counts, op).wait();
              expect_bits(host, expected, what + " reduce_scatter_parts " + name(op) + ", host");
            }
          }
        });
      }
    }
  }
}

TEST_F(DeviceCollectives, ReadWhatTheDeviceStillComputes) {
  const std::int64_t n = 100'003;
  for (int round = 0; round < 5; ++round) {
    Tensor x = there<float>(n, round);
    for (int i = 0; i < 10; ++i) x = x * 2.0;
    const Work work = world().all_reduce(x);
    const Tensor other = there<float>(n) * 3.0;  // meanwhile
    work.wait();
    const Tensor half = x * 0.5, host = half.to(Device());  // read by another queue than the collective's
    for (const std::int64_t i : {std::int64_t{0}, n / 2, n - 1}) {
      ASSERT_EQ(host.data<const float>()[i], 512 * reduced<float>(ReduceOp::sum, world().size(), i, round)) << i;
    }
  }
}

// Who isn't there makes all go through the host, and the next collective goes by the devices again.
TEST_F(DeviceCollectives, OneRankMayUseTheHostOrAnotherDevice) {
  const int size = world().size();
  if (device_count("sim") < 2) GTEST_SKIP() << "one device";
  for (const Device other : {Device(), Device("sim:1")}) {
    const Tensor first = there<float>(999);
    one("before", 3996, [&] { world().all_reduce(first).wait(); });
    Tensor t = values<float>(world().rank(), 999);
    t = t.to(world().rank() == 0 ? other : device_);
    one(
        "mixed", 3996, [&] { world().all_reduce(t).wait(); }, false);
    EXPECT_EQ(t.to(Device()).data<const float>()[998], reduced<float>(ReduceOp::sum, size, 998));
    const Tensor all = zeros({999 * size}, {.device = world().rank() == 0 ? other : device_});
    one(
        "mixed", 3996, [&] { world().all_gather(all, t).wait(); }, false);
    EXPECT_EQ(all.to(Device()).data<const float>()[999 * size - 1], reduced<float>(ReduceOp::sum, size, 998));
    one("after", 3996, [&] { world().all_reduce(first).wait(); });
  }
}

TEST_F(DeviceCollectives, GroupsOfSomeRanksHaveTheirOwn) {
  ProcessGroup half = world().split(world().rank() % 2);
  const Tensor t = there<float>(1001);
  half.all_reduce(t).wait();
  float expected = value<float>(world().rank() % 2, 1000);
  for (int r = world().rank() % 2 + 2; r < world().size(); r += 2) expected += value<float>(r, 1000);
  EXPECT_EQ(t.to(Device()).data<const float>()[1000], expected);
  one("of all", 4004, [&] { world().all_reduce(t).wait(); });
}

// Found before anything goes to the devices, which are used on.
TEST_F(DeviceCollectives, RanksThatDisagreeAreNamed) {
  const Tensor t = there<float>(world().rank() == 0 ? 64 : 65);
  const std::string error = error_of([&] { world().all_reduce(t, ReduceOp::sum, "gradients").wait(); });
  EXPECT_NE(error.find("(gradients): expected all ranks to do the same, got rank 0: all_reduce f32 [64] sum"),
            std::string::npos)
      << error;
  expect_bits(t.to(Device()), std::vector<float>(values<float>(world().rank(), t.numel()).to_vector<float>()), "kept");
  const Tensor again = there<float>(64);
  one("after", 256, [&] { world().all_reduce(again).wait(); });
}

struct Small : nn::Module<Small> {
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 32, .out = 64}});
  nn::BatchNorm1d norm = child("norm", nn::BatchNorm1d{{.channels = 64}});
  nn::Linear fc2 = child("fc2", nn::Linear{{.in = 64, .out = 10}});
  Tensor forward(const Tensor& x) const { return fc2(relu(norm(fc1(x)))); }
};

// The simulated device computes with the CPU's kernels: weights are bit-identical to the CPU's.
TEST_F(DeviceCollectives, DataParallelTrainsAsOnTheHost) {
  for (const std::optional<DType> dtype : {std::optional<DType>(), std::optional(f16), std::optional(bf16)}) {
    manual_seed(3);
    const Small host;
    Small net = nn::clone(host);
    net.to(device_);
    DataParallelOptions options{.bucket_cap_mb = 0.01, .first_bucket_cap_mb = 0.001};
    if (dtype) options.hook = compress_hook(*dtype);
    DataParallel on_host(host, world(), options), on_device(net, world(), options);
    optim::SGD a(host.parameters(), {.lr = 0.05, .momentum = 0.9}), b(net.parameters(), {.lr = 0.05, .momentum = 0.9});
    const std::uint64_t before = world().stats().on_devices;
    manual_seed(7);
    for (int i = 0; i < 5; ++i) {
      const Tensor x = randn({48, 32}), y = randint(0, 10, {48});
      a.zero_grad();
      b.zero_grad();
      cross_entropy(on_host(halfstep::test::part_of(x)), halfstep::test::part_of(y)).backward();
      cross_entropy(on_device(halfstep::test::part_of(x).to(device_)), halfstep::test::part_of(y).to(device_))
          .backward();
      a.step();
      b.step();
    }
    EXPECT_EQ(halfstep::test::values_of(net.state_dict()), halfstep::test::values_of(host.state_dict()));
    on_device.broadcast_buffers();  // statistics are the rank's own
    EXPECT_EQ(first_difference(net, world()), "");
    EXPECT_EQ(world().stats().on_devices - before >= 10, promise() != "0");
  }
}

}  // namespace
}  // namespace halfstep::dist::test
