// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "halfstep/core/error.h"
#include "halfstep/core/tensor.h"

namespace halfstep::dist {

/// What a reduction does with the ranks' values. `mean` divides the sum by the number of ranks, before the one rounding
/// of a 16-bit result.
enum class ReduceOp : std::uint8_t { sum, mean, min, max, product };
/// `sum`, `mean`, ...
HS_API const char* name(ReduceOp op);

/// Who adds up in a reduction.
enum class Reduction : std::uint8_t {
  /// Halfstep: each rank adds a part of the elements, in the order of ranks, in float32 (float64 for float64), and
  /// rounds once. The bits depend on the values and the number of ranks only.
  rank_order,
  /// The MPI library, for dtypes that it knows (f32, f64, integers): its algorithm decides the order. 16-bit dtypes,
  /// which MPI lacks, are added up as above. On a device with collectives of its own that library, in 16 bits too.
  library,
};

/// A collective failed: a rank is gone or hangs, ranks disagree about what they do, or MPI reports an error.
class HS_API DistError : public Error {
 public:
  using Error::Error;
};

/// Options of ProcessGroup::init.
struct ProcessGroupOptions {
  Reduction reduction = Reduction::rank_order;
  /// Longest time that a collective may wait for other ranks; after it the collective throws DistError on this rank.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// The ranks watch each other (control.h): one that dies, is stopped or hangs is named on all others within 15
  /// seconds, one that is busy and doesn't come to a collective shortly before `timeout`, and their collectives throw
  /// DistError.
  bool watch = false;
  /// With `watch`: how long none of a rank's threads runs, while others wait for it in a collective and nothing outside
  /// of it explains that, until it hangs. At least 3 seconds, or 0: never. HALFSTEP_HANG_TIMEOUT, in seconds, takes its
  /// place where it is set. Code that waits on purpose says so by Busy.
  std::chrono::milliseconds hang_timeout = std::chrono::seconds(10);
  /// Becomes true when this rank is asked to stop, by a signal, say. Ranks that watch each other and stop together then
  /// have 2 seconds to answer: one that is stopped or cut off is not waited for any longer. May be null.
  const std::atomic<bool>* stop = nullptr;
};

class Control;

/// What a rank has sent and waited for since it began.
struct CommunicationStats {
  std::uint64_t collectives = 0;
  std::uint64_t bytes_sent = 0;  ///< of data, to other ranks
  double busy_seconds = 0;       ///< time during which the communication thread ran collectives
  double wait_seconds = 0;       ///< time that callers spent in Work::wait() and in blocking calls
  std::uint64_t on_devices = 0;  ///< collectives and messages by the devices' own, not through the host
};

/// A collective that was started. A handle: copies are the same one. Collectives run on one thread of the process, in
/// the order in which they were started.
class HS_API Work {
 public:
  /// Nothing: done.
  Work() = default;
  /// Returns when its results are there. Throws DistError if it failed, on every call.
  void wait() const;
  /// Whether wait() would return, or throw, at once.
  bool done() const;

 private:
  friend class ProcessGroup;
  struct State;
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

/// The processes of a job, or some of them, and the collectives between them. A handle: copies are the same group. The
/// data travel by MPI: the module for the implementation whose launcher started the process is opened at run time
/// (Open MPI, MPICH). A process that no launcher started is a group of one, whose collectives copy.
///
/// All ranks call the same collectives in the same order, with tensors of the same dtype and the sizes that the
/// collective asks for; before data are sent ranks compare what they are about to do, and where they differ all throw
/// DistError, which names the ranks and what each of them does. `label` names the collective there and in other errors.
///
/// Tensors are dense and of any dtype (reductions: no bool). Those on a device go by the collectives of its plug-in
/// where it has them and all ranks' tensors are on such devices, and otherwise through the host. A collective reads and
/// writes its tensors until Work::wait() has returned. Not differentiable: see functional.h for that.
class HS_API ProcessGroup {
 public:
  /// A group of this process alone, without MPI.
  ProcessGroup();
  /// The group of all processes of the job; all of them call it. The first call starts MPI, which ends with the
  /// process, and later ones return the same group. Throws DistError if the process was started by a launcher whose
  /// module is missing, or if the launcher's number of processes isn't MPI's.
  static ProcessGroup init(const ProcessGroupOptions& options = {});
  /// Tells the ranks that watch each other that this one ends because of an error, and why; without them, or when
  /// another failure came first, it does nothing. A process that exits with a status other than 0 does it by itself.
  static void report_failure(std::string_view text);
  /// Tells the ranks that watch each other that this one begins something for which others may have to wait: until its
  /// next collective it is neither late nor does it hang, whatever it waits for. Busy is the same for a scope.
  static void working(std::string_view what);
  /// Whether a launcher of MPI (mpirun, srun, ...) with more than one process started this one, or with one.
  static bool launched();

  int rank() const;        ///< of this process, from 0
  int size() const;        ///< number of ranks
  int local_rank() const;  ///< among the ranks on this machine
  int local_size() const;
  /// Name of the machine of a rank.
  const std::string& host(int rank) const;
  /// `Open MPI 4.1.4`, or `one process`.
  const std::string& library() const;

  /// Each element becomes the reduction of the ranks' elements; in place.
  Work all_reduce(const Tensor& tensor, ReduceOp op = ReduceOp::sum, std::string_view label = {});
  /// The tensor becomes that of rank `root`; in place.
  Work broadcast(const Tensor& tensor, int root = 0, std::string_view label = {});
  /// `output` [size * n, ...] becomes the ranks' inputs [n, ...], in the order of ranks.
  Work all_gather(const Tensor& output, const Tensor& input, std::string_view label = {});
  /// `output` [n, ...] becomes part `rank` of the reduction of the inputs [size * n, ...].
  Work reduce_scatter(const Tensor& output, const Tensor& input, ReduceOp op = ReduceOp::sum,
                      std::string_view label = {});
  /// On rank `root` `output` [size * n, ...] becomes the ranks' inputs; on others it may be undefined.
  Work gather(const Tensor& output, const Tensor& input, int root = 0, std::string_view label = {});
  /// `output` [n, ...] becomes part `rank` of the root's input [size * n, ...], which may be undefined on others.
  Work scatter(const Tensor& output, const Tensor& input, int root = 0, std::string_view label = {});
  /// Part r of `output` becomes part `rank` of rank r's input; both [size * n, ...].
  Work all_to_all(const Tensor& output, const Tensor& input, std::string_view label = {});
  /// Between two ranks; a receive fits the send with the same tag. Sizes and dtypes are compared on arrival. Where both
  /// tensors are on devices, those do it once they have done a collective of the group.
  Work send(const Tensor& tensor, int to, int tag = 0);
  Work receive(const Tensor& tensor, int from, int tag = 0);
  /// Parts of unlike lengths lie one behind the other in `tensor`: part r has counts[r] elements. The ranks' parts come
  /// to all: rank r gives part r, in place. MPI's Allgatherv.
  Work all_gather_parts(const Tensor& tensor, const std::vector<std::int64_t>& counts, std::string_view label = {});
  /// Part `rank` becomes the reduction of the ranks' parts `rank`, with the bits that all_reduce gives; the others stay
  /// as they are. In the order of ranks, whatever ProcessGroupOptions::reduction says. MPI's Reduce_scatter.
  Work reduce_scatter_parts(const Tensor& tensor, const std::vector<std::int64_t>& counts, ReduceOp op = ReduceOp::sum,
                            std::string_view label = {});
  /// Returns when all ranks have called it.
  void barrier(std::string_view label = {});

  /// The ranks' texts, of any bytes and lengths, in the order of ranks.
  std::vector<std::string> all_gather_text(std::string_view text);
  /// The text of rank `root`.
  std::string broadcast_text(std::string_view text, int root = 0);

  /// Groups of the ranks that give the same `color`, in the order of `key` and then of rank. All ranks call it. What
  /// MPI and devices hold for a group is freed at the first split, of a group that has all its ranks, behind the end of
  /// its last handle on the last of them.
  ProcessGroup split(int color, int key = 0);
  /// Frees that now. All ranks of a group that split() has made call it, when their messages are through. From then on
  /// every collective of it throws Error.
  void free();

  /// Of this process: of all groups together.
  CommunicationStats stats() const;
  /// Whether two handles are of the same group.
  friend bool operator==(const ProcessGroup& a, const ProcessGroup& b) { return a.impl_ == b.impl_; }

 private:
  struct Impl;
  explicit ProcessGroup(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<Impl> impl_;
};

/// Tells the ranks that watch each other, for its lifetime, that this one waits for something that they know nothing
/// of, such as an answer from another program: it is neither late nor does it hang. From any thread; without such ranks
/// it does nothing.
class HS_API Busy {
 public:
  /// `with` is said to others where they ask what this rank does: `the scheduler`.
  explicit Busy(std::string_view with);
  ~Busy();
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

 private:
  std::weak_ptr<Control> by_;
  std::uint64_t number_ = 0;
};

}  // namespace halfstep::dist
