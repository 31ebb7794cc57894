// SPDX-License-Identifier: Apache-2.0
// A group of one process, and what the environment says of launchers.
#include <gtest/gtest.h>

#include <map>

#include "halfstep/autograd/gradcheck.h"
#include "halfstep/dist/functional.h"
#include "halfstep/dist/launcher_internal.h"
#include "halfstep/dist/process_group.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "tests/support/errors.h"

namespace halfstep::dist {
namespace {

using Values = std::vector<double>;

TEST(GroupOfOne, CollectivesCopy) {
  ProcessGroup group;
  EXPECT_EQ(group.rank(), 0);
  EXPECT_EQ(group.size(), 1);
  EXPECT_EQ(group.local_rank(), 0);
  EXPECT_EQ(group.local_size(), 1);
  EXPECT_EQ(group.library(), "one process");
  EXPECT_FALSE(group.host(0).empty());
  const auto before = group.stats();
  const Tensor x = tensor(Values{1, 2, 3, 4}, {4}, {.device = Device()});
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::mean, ReduceOp::min, ReduceOp::max, ReduceOp::product}) {
    group.all_reduce(x, op).wait();
    EXPECT_EQ(x.to_vector<double>(), (Values{1, 2, 3, 4}));
  }
  group.broadcast(x).wait();
  const Tensor y = zeros({4}, {.device = Device()});
  const auto check = [&](const Work& work) {
    EXPECT_TRUE(work.done());
    work.wait();
    EXPECT_EQ(y.to_vector<double>(), (Values{1, 2, 3, 4}));
    Tensor cleared = y;
    cleared.zero_();
  };
  check(group.all_gather(y, x));
  check(group.reduce_scatter(y, x));
  check(group.gather(y, x));
  check(group.scatter(y, x));
  check(group.all_to_all(y, x));
  group.barrier();
  EXPECT_EQ(group.all_gather_text("text"), std::vector<std::string>{"text"});
  EXPECT_EQ(group.broadcast_text("text"), "text");
  EXPECT_EQ(group.split(3).size(), 1);
  EXPECT_GT(group.stats().collectives, before.collectives);
  EXPECT_EQ(group.stats().bytes_sent, before.bytes_sent);
  EXPECT_TRUE(Work().done());
  Work().wait();
}

TEST(GroupOfOne, ChecksWhatALargerGroupWould) {
  ProcessGroup group;
  const Tensor x = zeros({4}, {.device = Device()}), matrix = zeros({2, 4}, {.device = Device()});
  EXPECT_THROW(group.all_reduce(Tensor()), Error);
  EXPECT_THROW(group.all_reduce(x.to(boolean)), DTypeError);
  EXPECT_THROW(group.all_reduce(x.to(i64), ReduceOp::mean), DTypeError);
  EXPECT_THROW(group.all_reduce(x.expand({3, 4})), ShapeError);
  EXPECT_THROW(group.all_gather(matrix, x), ShapeError);
  EXPECT_THROW(group.all_gather(x.to(f64), x), DTypeError);
  EXPECT_THROW(group.all_gather(matrix.t(), matrix), ShapeError);
  EXPECT_THROW(group.broadcast(x, 1), Error);
  EXPECT_THROW(group.send(x, 0), Error);
  EXPECT_THROW(group.host(1), Error);
  EXPECT_THROW(group.split(-1), Error);
  EXPECT_THROW(ProcessGroup::init({.timeout = std::chrono::milliseconds(0)}), Error);
  EXPECT_EQ(test::error_of<ShapeError>([&] { group.all_gather(matrix, x); }),
            "all_gather: expected an output of 1 times as many elements as the input, got [2, 4] and [4]");
  group.all_reduce(matrix.t()).wait();  // dense, in another order
}

TEST(GroupOfOne, FunctionsHaveGradients) {
  const ProcessGroup group;
  const Tensor x = tensor(Values{1, -2, 3, 4}, {2, 2}, {.dtype = f64, .device = Device(), .requires_grad = true});
  const std::vector<std::function<Tensor(const Tensor&)>> functions = {
      [&](const Tensor& t) { return all_reduce(t, group); },
      [&](const Tensor& t) { return all_reduce(t, group, ReduceOp::mean); },
      [&](const Tensor& t) { return reduce(t, group); },
      [&](const Tensor& t) { return broadcast(t, group); },
      [&](const Tensor& t) { return all_gather(t, group); },
      [&](const Tensor& t) { return reduce_scatter(t, group); },
      [&](const Tensor& t) { return all_to_all(t, group); },
  };
  for (const auto& f : functions) {
    EXPECT_EQ(f(x).to_vector<double>(), x.to_vector<double>());
    const auto squared = [&](const std::vector<Tensor>& in) { return f(in[0] * in[0]); };
    gradcheck(squared, {x});
    gradgradcheck(squared, {x});
  }
  EXPECT_THROW(all_reduce(x, group, ReduceOp::product), AutogradError);
  EXPECT_THROW(reduce_scatter(x.detach().reshape({4})[0], group), ShapeError);
}

// --- launchers

using Variables = std::map<std::string, std::string>;

detail::Launch launch_of(const Variables& variables) {
  return detail::find_launch([&](const char* name) -> const char* {
    const auto it = variables.find(name);
    return it == variables.end() ? nullptr : it->second.c_str();
  });
}

void expect_launch(const Variables& variables, const std::string& mpi, int size, int rank, int local_rank) {
  const detail::Launch l = launch_of(variables);
  EXPECT_EQ(l.mpi, mpi);
  EXPECT_EQ(l.size, size);
  EXPECT_EQ(l.rank, rank);
  EXPECT_EQ(l.local_rank, local_rank);
}

// The variables are those that the launchers themselves set (Open MPI 4.1.4, MPICH 4.0.2; Slurm's by its manual).
TEST(Launcher, IsKnownByItsVariables) {
  expect_launch({}, "", -1, -1, -1);
  expect_launch({{"OMPI_COMM_WORLD_SIZE", "4"},
                 {"OMPI_COMM_WORLD_RANK", "3"},
                 {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                 {"PMIX_RANK", "3"}},
                "openmpi", 4, 3, 1);
  expect_launch({{"PMI_SIZE", "8"}, {"PMI_RANK", "5"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "4"}}, "mpich", 8,
                5, 1);
  expect_launch({{"PMIX_RANK", "2"},
                 {"SLURM_PROCID", "2"},
                 {"SLURM_NTASKS", "6"},
                 {"SLURM_STEP_NUM_TASKS", "3"},
                 {"SLURM_LOCALID", "0"}},
                "openmpi", 3, 2, 0);
  expect_launch({{"PMI_SIZE", "2"}, {"PMI_RANK", "1"}, {"SLURM_LOCALID", "1"}, {"SLURM_STEP_NUM_TASKS", "2"}}, "mpich",
                2, 1, 1);
  // A batch script of Slurm is one process, however many tasks it was given.
  expect_launch({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "16"}}, "", -1, -1, -1);
  expect_launch({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}, {"SLURM_STEP_NUM_TASKS", "1"}}, "", -1, -1, -1);
}

TEST(Launcher, CanBeChosen) {
  EXPECT_EQ(launch_of({{"HALFSTEP_MPI", "mpich"}}).mpi, "mpich");
  const detail::Launch other = launch_of({{"OMPI_COMM_WORLD_SIZE", "2"}, {"HALFSTEP_MPI", "mpich"}});
  EXPECT_EQ(other.mpi, "mpich");
  EXPECT_EQ(other.size, 2);  // compared with what MPI says
  EXPECT_TRUE(other.by_user);
  EXPECT_EQ(test::error_of<DistError>([] {
              launch_of({{"HALFSTEP_MPI", "gloo"}});
            }),
            "HALFSTEP_MPI: expected openmpi or mpich, got 'gloo'");
}

TEST(Launcher, WhatCannotBeIsRefused) {
  EXPECT_EQ(test::error_of<DistError>([] {
              launch_of({{"PMI_SIZE", "two"}});
            }),
            "PMI_SIZE: expected a number that a launcher of MPI sets, got 'two'");
  EXPECT_EQ(test::error_of<DistError>([] {
              launch_of({{"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_PROCID", "1"}});
            }),
            "srun started 4 processes that can't find each other: expected it to be called with --mpi=pmix (Open MPI) "
            "or --mpi=pmi2 (MPICH)");
}

}  // namespace
}  // namespace halfstep::dist
