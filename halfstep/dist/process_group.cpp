// SPDX-License-Identifier: Apache-2.0
#include "halfstep/dist/process_group.h"

#include <limits.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <mutex>
#include <utility>

#include "halfstep/core/capture.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/write_internal.h"
#include "halfstep/dist/communication_thread_internal.h"
#include "halfstep/dist/device_group_internal.h"
#include "halfstep/dist/launcher_internal.h"
#include "halfstep/dist/mpi_library_internal.h"
#include "halfstep/dist/process_group_internal.h"
#include "halfstep/dist/watch_internal.h"
#include "halfstep/runtime/transfer.h"

namespace halfstep::dist {

struct Work::State {
  std::shared_ptr<detail::WorkState> shared;
};
struct ProcessGroup::Impl : detail::GroupState {};

namespace {

using detail::Call;
using detail::CallKind;
using detail::CommunicationThread;
using detail::GroupState;
using CallPtr = std::shared_ptr<Call>;

constexpr int kLargestTag = 32000;  // MPI promises 32767

// Whether the elements fill a block of memory, in any order of dimensions.
bool fills_block(const Tensor& t) {
  if (t.is_contiguous()) return true;
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // stride, size
  for (int d = 0; d < t.dim(); ++d) {
    if (t.sizes()[d] != 1) dims.emplace_back(t.strides()[d], t.sizes()[d]);
  }
  std::sort(dims.begin(), dims.end());
  std::int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

// Ranks' elements are paired in the order of memory: a tensor that isn't row-major must lie the same way everywhere.
std::uint32_t layout_of(const Tensor& t) {
  if (t.is_contiguous()) return 0;
  std::uint32_t h = 2166136261U;
  for (int d = 0; d < t.dim(); ++d) {
    h = (h ^ static_cast<std::uint32_t>(t.strides()[d])) * 16777619U;
    h = (h ^ static_cast<std::uint32_t>(t.sizes()[d])) * 16777619U;
  }
  return h == 0 ? 1 : h;
}

std::string shown(const Tensor& t) { return fmt::format("{} {}", name(t.dtype()), t.sizes().str()); }

std::size_t bytes_of(const Tensor& t) { return static_cast<std::size_t>(t.numel()) * t.item_size(); }

void refuse_capture(CallKind kind) {
  if (CaptureSink* sink = capture_sink()) {
    sink->refuse(fmt::format("it communicates with other ranks ({})", name(kind)));
  }
}

CallPtr new_call(CallKind kind, std::shared_ptr<GroupState> group, std::string_view label) {
  refuse_capture(kind);
  if (group->freed) fail<Error>("{}: the group was freed", name(kind));
  auto call = std::make_shared<Call>();
  call->kind = kind;
  call->group = std::move(group);
  call->label = label;
  return call;
}

CallPtr new_call(CallKind kind, std::shared_ptr<GroupState> group, std::string_view label, int root) {
  if (root < 0 || root >= group->size) {
    fail<Error>("{}: expected a root from 0 to {}, got {}", name(kind), group->size - 1, root);
  }
  CallPtr call = new_call(kind, std::move(group), label);
  call->root = root;
  return call;
}

void check_tensor(const Call& call, const Tensor& t, const char* what, bool any_layout = false) {
  if (!t.defined()) fail<Error>("{}: expected {}, got an undefined tensor", name(call.kind), what);
  if (!(any_layout ? fills_block(t) : t.is_contiguous())) {
    fail<ShapeError>("{}: expected {} without gaps{}, got {} with strides {}; call contiguous()", name(call.kind), what,
                     any_layout ? "" : ", row-major", shown(t), t.strides().str());
  }
}

// `large` has `times` the elements of `small`, and its dtype.
void check_sizes(const Call& call, const Tensor& large, const char* what, const Tensor& small, const char* other,
                 int times) {
  if (large.dtype() != small.dtype()) {
    fail<DTypeError>("{}: expected input and output of one dtype, got {} and {}", name(call.kind), name(large.dtype()),
                     name(small.dtype()));
  }
  if (large.numel() != small.numel() * times) {
    fail<ShapeError>("{}: expected {} of {} times as many elements as the {}, got {} and {}", name(call.kind), what,
                     times, other, large.sizes().str(), small.sizes().str());
  }
}

void check_reduction(const Call& call, DType dtype, ReduceOp op) {
  if (dtype == DType::boolean) fail<DTypeError>("{}: expected a number, got bool", name(call.kind));
  if (op == ReduceOp::mean && is_integral(dtype)) {
    fail<DTypeError>("{}: expected a floating dtype for the mean, got {}; use the sum", name(call.kind), name(dtype));
  }
}

// An output may be an input's place in itself, or lie elsewhere.
void check_overlap(const Call& call, const Tensor& in, const Tensor& out, std::int64_t allowed_offset) {
  if (in.storage() != out.storage()) return;
  const auto item = static_cast<std::int64_t>(in.item_size());
  const std::int64_t a = in.storage_offset() * item, b = out.storage_offset() * item;
  const std::int64_t a_end = a + in.numel() * item, b_end = b + out.numel() * item;
  if (a >= b_end || b >= a_end || a - b == allowed_offset) return;
  fail<Error>("{}: expected an output that doesn't overlap the input, got {} and {} of the same memory",
              name(call.kind), shown(in), shown(out));
}
constexpr std::int64_t kNoOffset = std::numeric_limits<std::int64_t>::min();

void describe(Call& call, const Tensor& operand, std::int64_t count) {
  call.operand = shown(operand);
  call.dtype = operand.dtype();
  call.count = count;
}

// Parts of unlike lengths fill the tensor; ranks compare a hash of the lengths.
void check_parts(Call& call, const Tensor& tensor, const std::vector<std::int64_t>& counts, int ranks) {
  std::int64_t all = 0;
  std::uint32_t hash = 2166136261u;
  for (const std::int64_t n : counts) {
    if (n < 0) fail<Error>("{}: expected lengths of at least 0, got {}", name(call.kind), n);
    all += n;
    for (int byte = 0; byte < 8; ++byte) hash = (hash ^ static_cast<std::uint8_t>(n >> (8 * byte))) * 16777619u;
  }
  if (counts.size() != static_cast<std::size_t>(ranks) || all != tensor.numel()) {
    fail<ShapeError>(
        "{}: expected lengths for {} ranks that add up to the {} elements of the tensor, got {} that add "
        "up to {}",
        name(call.kind), ranks, tensor.numel(), counts.size(), all);
  }
  describe(call, tensor, tensor.numel());
  call.counts = counts;
  call.layout = hash;
}

// The address on the host from which a tensor is read; a device's is copied.
const void* host_input(Call& call, const Tensor& t) {
  call.tensors.push_back(t);
  if (t.device().is_cpu()) return t.const_raw_data();
  call.buffers.emplace_back(bytes_of(t));
  char* copy = call.buffers.back().data();
  if (t.numel() != 0) read_memory(copy, t.const_raw_data(), t.device(), bytes_of(t));
  return copy;
}

// The address on the host to which results are written; they go to a device when somebody waits for them.
void* host_output(Call& call, const Tensor& t, bool with_contents) {
  if (t.device().is_cpu()) {
    call.tensors.push_back(t);
    call.written.push_back(t);
    return write_raw_data(t);
  }
  void* copy = nullptr;
  if (with_contents) {
    copy = const_cast<void*>(host_input(call, t));
  } else {
    call.tensors.push_back(t);
    call.buffers.emplace_back(bytes_of(t));
    copy = call.buffers.back().data();
  }
  call.state->copy_back = [keep = std::make_shared<detail::HostBuffer>(std::move(call.buffers.back())), t] {
    if (t.numel() != 0) copy_memory(write_raw_data(t), t.device(), keep->data(), Device{}, bytes_of(t));
  };
  call.buffers.pop_back();
  return copy;
}

// Either tensor may be undefined.
void attach(Call& call, const Tensor& input, const Tensor& output, bool output_counts = false) {
  if (detail::use_device(call, input, output, output_counts)) return;
  if (input.defined()) call.input = host_input(call, input);
  if (output.defined()) call.output = host_output(call, output, output_counts);
}

void copy_alone(const Tensor& output, const Tensor& input) {
  if (output.numel() == 0 || output.const_raw_data() == input.const_raw_data()) return;
  copy_memory(write_raw_data(output), output.device(), input.const_raw_data(), input.device(), bytes_of(input));
}

CallPtr new_message(CallKind kind, std::shared_ptr<GroupState> group, const Tensor& tensor, int peer, int tag) {
  const int size = group->size, rank = group->rank;
  CallPtr call = new_call(kind, std::move(group), {});
  if (peer < 0 || peer >= size || peer == rank) {
    fail<Error>("{}: expected another rank of the {}, got {}", name(kind), size, peer);
  }
  if (tag < 0 || tag > kLargestTag) {
    fail<Error>("{}: expected a tag from 0 to {}, got {}", name(kind), kLargestTag, tag);
  }
  check_tensor(*call, tensor, "a tensor");
  describe(*call, tensor, tensor.numel());
  call->peer = peer;
  call->tag = tag;
  return call;
}

std::shared_ptr<detail::WorkState> hand_over(const CallPtr& call) {
  CommunicationThread::get().submit(call);
  return call->state;
}

void count_alone() { detail::StatsCounter::get().add({.collectives = 1}); }

}  // namespace

// --- Work

void Work::wait() const {
  if (state_) CommunicationThread::get().wait(*state_->shared);
}

bool Work::done() const {
  if (!state_) return true;
  const std::lock_guard lock(state_->shared->mutex);
  return state_->shared->done;
}

namespace {

// --- the start of MPI

std::string own_host() {
  std::array<char, HOST_NAME_MAX + 1> text{};
  gethostname(text.data(), text.size() - 1);
  return text.data();
}

void find_local_place(GroupState& group) {
  const std::string& own = group.hosts[static_cast<std::size_t>(group.rank)];
  group.local_rank = static_cast<int>(std::count(group.hosts.begin(), group.hosts.begin() + group.rank, own));
  group.local_size = static_cast<int>(std::count(group.hosts.begin(), group.hosts.end(), own));
}

// Another implementation's launcher starts programs that each take themselves for the only one.
void check_size(const detail::Launch& launch, const GroupState& world) {
  if (launch.size < 0 || launch.size == world.size) return;
  fail<DistError>(
      "ProcessGroup::init: {} started {} processes ({}={}), but {} knows of {}: the launcher is of another MPI than "
      "the "
      "library; start the program with the mpirun of the library's MPI{}",
      launch.launcher, launch.size, launch.size_variable, launch.size, world.library, world.size,
      launch.by_user ? ", or unset HALFSTEP_MPI" : "");
}

void start_mpi(const detail::Launch& launch, const ProcessGroupOptions& options,
               const std::shared_ptr<GroupState>& world) {
  world->reduction = options.reduction;
  world->timeout = options.timeout;
  world->hosts = {own_host()};
  if (launch.mpi.empty() || launch.size == 1) return;
  CommunicationThread& thread = CommunicationThread::get();
  thread.start(detail::open_mpi_module(launch.mpi), world);
  check_size(launch, *world);
  for (int r = 0; r < world->size; ++r) world->members.push_back(r);
  if (world->size == 1) return;
  thread.end_together(world);
  const CallPtr call = new_call(CallKind::all_gather_text, world, "host names");
  call->text = own_host();
  thread.submit(call);
  thread.wait(*call->state);
  world->hosts = call->texts;
  find_local_place(*world);
}

}  // namespace

// --- ProcessGroup

ProcessGroup::ProcessGroup() : impl_(std::make_shared<Impl>()) { impl_->hosts = {own_host()}; }

ProcessGroup ProcessGroup::init(const ProcessGroupOptions& options) {
  static std::mutex& mutex = *new std::mutex;
  static std::shared_ptr<Impl>& world = *new std::shared_ptr<Impl>;
  static std::string& error = *new std::string;
  const std::lock_guard lock(mutex);
  if (world) return ProcessGroup(world);
  if (!error.empty()) throw DistError(error);  // MPI starts once in a process
  if (options.timeout <= std::chrono::milliseconds::zero()) {
    fail<Error>("ProcessGroup::init: expected a positive timeout, got {} ms", options.timeout.count());
  }
  const std::chrono::milliseconds hang_timeout = detail::hang_timeout(options.hang_timeout);
  auto made = std::make_shared<Impl>();
  try {
    start_mpi(detail::find_launch(), options, made);
  } catch (const DistError& e) {
    error = e.what();
    throw;
  }
  world = std::move(made);
  ProcessGroup group(world);
  if (options.watch && world->size > 1) {
    detail::start_watch(
        world, [&](std::string_view text) { return group.all_gather_text(text); }, hang_timeout, options.stop);
  }
  return group;
}

void ProcessGroup::report_failure(std::string_view text) {
  if (const auto watch = detail::watch(); watch && !detail::end_is_expected()) watch->report_failure(text);
}

void ProcessGroup::working(std::string_view what) {
  if (const auto watch = detail::watch()) watch->working(what);
}

bool ProcessGroup::launched() { return !detail::find_launch().mpi.empty(); }

int ProcessGroup::rank() const { return impl_->rank; }
int ProcessGroup::size() const { return impl_->size; }
int ProcessGroup::local_rank() const { return impl_->local_rank; }
int ProcessGroup::local_size() const { return impl_->local_size; }
const std::string& ProcessGroup::library() const { return impl_->library; }

const std::string& ProcessGroup::host(int rank) const {
  if (rank < 0 || rank >= impl_->size) {
    fail<Error>("ProcessGroup::host: expected a rank from 0 to {}, got {}", impl_->size - 1, rank);
  }
  return impl_->hosts[static_cast<std::size_t>(rank)];
}

Work ProcessGroup::all_reduce(const Tensor& tensor, ReduceOp op, std::string_view label) {
  const CallPtr call = new_call(CallKind::all_reduce, impl_, label);
  check_tensor(*call, tensor, "a tensor", true);
  check_reduction(*call, tensor.dtype(), op);
  call->op = op;
  describe(*call, tensor, tensor.numel());
  call->layout = layout_of(tensor);
  if (impl_->size == 1) return count_alone(), Work();
  attach(*call, {}, tensor, true);
  return Work(std::make_shared<Work::State>(hand_over(call)));
}

Work ProcessGroup::broadcast(const Tensor& tensor, int root, std::string_view label) {
  const CallPtr call = new_call(CallKind::broadcast, impl_, label, root);
  check_tensor(*call, tensor, "a tensor", true);
  describe(*call, tensor, tensor.numel());
  call->layout = layout_of(tensor);
  if (impl_->size == 1) return count_alone(), Work();
  const bool from_here = impl_->rank == root;
  if (!detail::use_device(*call, {}, tensor, from_here)) {
    // The root's tensor is only read: what is known of its contents holds.
    call->output = from_here ? const_cast<void*>(host_input(*call, tensor)) : host_output(*call, tensor, false);
  }
  return Work(std::make_shared<Work::State>(hand_over(call)));
}

Work ProcessGroup::all_gather(const Tensor& output, const Tensor& input, std::string_view label) {
  const CallPtr call = new_call(CallKind::all_gather, impl_, label);
  check_tensor(*call, output, "an output");
  check_tensor(*call, input, "an input");
  check_sizes(*call, output, "an output", input, "input", impl_->size);
  check_overlap(*call, input, output, impl_->rank * static_cast<std::int64_t>(bytes_of(input)));
  describe(*call, input, input.numel());
  if (impl_->size == 1) return copy_alone(output, input), count_alone(), Work();
  attach(*call, input, output);
  return Work(std::make_shared<Work::State>(hand_over(call)));
}

Work ProcessGroup::reduce_scatter(const Tensor& output, const Tensor& input, ReduceOp op, std::string_view label) {
  const CallPtr call = new_call(CallKind::reduce_scatter, impl_, label);
  check_tensor(*call, output, "an output");
  check_tensor(*call, input, "an input");
  check_sizes(*call, input, "an input", output, "output", impl_->size);
  check_reduction(*call, input.dtype(), op);
  check_overlap(*call, input, output, impl_->size == 1 ? 0 : kNoOffset);
  call->op = op;
  describe(*call, output, output.numel());
  if (impl_->size == 1) return copy_alone(output, input), count_alone(), Work();
  attach(*call, input, output);
  return Work(std::make_shared<Work::State>(hand_over(call)));
}

Work ProcessGroup::all_gather_parts(const Tensor& tensor, const std::vector<std::int64_t>& counts,
                                    std::string_view label) {
  const CallPtr call = new_call(CallKind::all_gather_parts, impl_, label);
  check_tensor(*call, tensor, "a tensor");
  check_parts(*call, tensor, counts, impl_->size);
  if (impl_->size == 1) return count_alone(), Work();
  attach(*call, {}, tensor, true);
  return Work(std::make_shared<Work::State>(hand_over(call)));
}

Work ProcessGroup::reduce_scatter_parts(const Tensor& tensor, const std::vector<std::int64_t>& counts, ReduceOp op,
                                        std::string_view label) {
  const CallPtr call = new_call(CallKind::reduce_scatter_parts, impl_, label);
  check_tensor(*call, tensor, "a tensor");
  check_reduction(*call, tensor.dtype(), op);
  check_parts(*call, tensor, counts, impl_->size);
  call->op = op;
  if (impl_->size == 1) return count_alone(), Work();
  attach(*call, {}, tensor, true);
  return Work(std::make_shared<Work::State>(hand_over(call)));
}

Work ProcessGroup::gather(const Tensor& output, const Tensor& input, int root, std::string_view label) {
  const CallPtr call = new_call(CallKind::gather, impl_, label, root);
  check_tensor(*call, input, "an input");
  if (impl_->rank == root) {
    check_tensor(*call, output, "an output");
    check_sizes(*call, output, "an output", input, "input", impl_->size);
    check_overlap(*call, input, output, root * static_cast<std::int64_t>(bytes_of(input)));
  }
  describe(*call, input, input.numel());
  if (impl_->size == 1) return copy_alone(output, input), count_alone(), Work();
  attach(*call, input, impl_->rank == root ? output : Tensor());
  return Work(std::make_shared<Work::State>(hand_over(call)));
}

Work ProcessGroup::scatter(const Tensor& output, const Tensor& input, int root, std::string_view label) {
  const CallPtr call = new_call(CallKind::scatter, impl_, label, root);
  check_tensor(*call, output, "an output");
  if (impl_->rank == root) {
    check_tensor(*call, input, "an input");
    check_sizes(*call, input, "an input", output, "output", impl_->size);
    check_overlap(*call, input, output, -root * static_cast<std::int64_t>(bytes_of(output)));
  }
  describe(*call, output, output.numel());
  if (impl_->size == 1) return copy_alone(output, input), count_alone(), Work();
  attach(*call, impl_->rank == root ? input : Tensor(), output);
  return Work(std::make_shared<Work::State>(hand_over(call)));
}

Work ProcessGroup::all_to_all(const Tensor& output, const Tensor& input, std::string_view label) {
  const CallPtr call = new_call(CallKind::all_to_all, impl_, label);
  check_tensor(*call, output, "an output");
  check_tensor(*call, input, "an input");
  check_sizes(*call, output, "an output", input, "input", 1);
  if (input.numel() % impl_->size != 0) {
    fail<ShapeError>("all_to_all: expected elements for {} ranks alike, got {}", impl_->size, input.sizes().str());
  }
  check_overlap(*call, input, output, impl_->size == 1 ? 0 : kNoOffset);
  describe(*call, input, input.numel() / impl_->size);
  if (impl_->size == 1) return copy_alone(output, input), count_alone(), Work();
  attach(*call, input, output);
  return Work(std::make_shared<Work::State>(hand_over(call)));
}

Work ProcessGroup::send(const Tensor& tensor, int to, int tag) {
  const CallPtr call = new_message(CallKind::send, impl_, tensor, to, tag);
  attach(*call, tensor, {});
  return Work(std::make_shared<Work::State>(hand_over(call)));
}

Work ProcessGroup::receive(const Tensor& tensor, int from, int tag) {
  const CallPtr call = new_message(CallKind::receive, impl_, tensor, from, tag);
  attach(*call, {}, tensor);
  return Work(std::make_shared<Work::State>(hand_over(call)));
}

void ProcessGroup::barrier(std::string_view label) {
  const CallPtr call = new_call(CallKind::barrier, impl_, label);
  if (impl_->size == 1) return count_alone();
  CommunicationThread::get().wait(*hand_over(call));
}

std::vector<std::string> ProcessGroup::all_gather_text(std::string_view text) {
  const CallPtr call = new_call(CallKind::all_gather_text, impl_, {});
  if (impl_->size == 1) return count_alone(), std::vector{std::string(text)};
  call->text = text;
  CommunicationThread::get().wait(*hand_over(call));
  return std::move(call->texts);
}

std::string ProcessGroup::broadcast_text(std::string_view text, int root) {
  const CallPtr call = new_call(CallKind::broadcast_text, impl_, {}, root);
  if (impl_->size == 1) return count_alone(), std::string(text);
  call->text = text;
  CommunicationThread::get().wait(*hand_over(call));
  return std::move(call->texts.at(0));
}

ProcessGroup ProcessGroup::split(int color, int key) {
  const CallPtr call = new_call(CallKind::split, impl_, {});
  if (color < 0) fail<Error>("split: expected a color from 0 on, got {}", color);
  auto made = std::make_shared<Impl>();
  made->library = impl_->library;
  made->reduction = impl_->reduction;
  made->timeout = impl_->timeout;
  made->hosts = impl_->hosts;
  if (impl_->size == 1) {
    made->identity.number = 1;
    return count_alone(), ProcessGroup(made);
  }
  made->hosts.clear();
  call->color = color;
  call->key = key;
  call->made = made;
  CommunicationThread::get().wait(*hand_over(call));
  find_local_place(*made);
  return ProcessGroup(made);
}

void ProcessGroup::free() {
  const CallPtr call = new_call(CallKind::free, impl_, {});
  if (impl_->identity.number == 0)
    fail<Error>("free: expected a group that split() has made, got that of all processes");
  if (!impl_->comm) {
    impl_->freed = true;
    return count_alone();
  }
  CommunicationThread::get().wait(*hand_over(call));
}

CommunicationStats ProcessGroup::stats() const { return detail::StatsCounter::get().read(); }

}  // namespace halfstep::dist
