// SPDX-License-Identifier: Apache-2.0
#include "exchange.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

namespace sim {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr uint64_t kRingBytes = 256 << 10;
constexpr auto kForOthers = std::chrono::minutes(1);
constexpr auto kBetweenLooks = milliseconds(5);  // at whether the others are there
constexpr uint32_t kHere = 1, kAborted = 2, kLeft = 3;

std::runtime_error system_error(const std::string& what) { return std::runtime_error(what + ": " + strerror(errno)); }

// Files that rank 0 has made an id for, and not yet a group.
struct MadeFiles {
  std::mutex mutex;
  std::map<uint64_t, int> files;
};
MadeFiles& made_files() {
  static MadeFiles& instance = *new MadeFiles;
  return instance;
}

// Waits without keeping a processor from others.
class Pause {
 public:
  void operator()() {
    if (Clock::now() < awake_) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(microseconds(50));
    }
  }
  void reset() { awake_ = Clock::now() + microseconds(200); }

 private:
  Clock::time_point awake_ = Clock::now() + microseconds(200);
};

}  // namespace

struct Exchange::Shared {
  std::atomic<uint64_t> nonce;  ///< set when the rest is there
  uint32_t ranks;
  std::atomic<uint32_t> states[kMostRanks];
};

struct Exchange::Ring {
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
  alignas(64) char bytes[kRingBytes];
};

/// How far a transfer has come. A message begins with which it is.
struct Exchange::Progress {
  struct Head {
    uint64_t number, bytes;
  };
  Head head;
  uint64_t moved = 0;  ///< of head and data together
  uint64_t total() const { return sizeof(Head) + bytes; }
  uint64_t bytes = 0;
};

Exchange::Id Exchange::make_id() {
  Id id = {};
  if (getrandom(&id.nonce, sizeof id.nonce, 0) != sizeof id.nonce) throw system_error("no random number for an id");
  id.nonce |= 1;  // fresh memory is 0
  id.process = getpid();
  id.file = memfd_create("halfstep_sim_group", MFD_CLOEXEC);
  if (id.file < 0) throw system_error("no file in memory for a group");
  MadeFiles& made = made_files();
  const std::lock_guard lock(made.mutex);
  made.files[id.nonce] = id.file;
  return id;
}

Exchange::Exchange(const Id& id, int ranks, int rank) : ranks_(ranks), rank_(rank) {
  const auto until = Clock::now() + kForOthers;
  bool placed = false;
  const auto parts = static_cast<uint64_t>(ranks) * static_cast<uint64_t>(ranks);
  constexpr uint64_t kHead = (sizeof(Shared) + 4095) / 4096 * 4096;
  bytes_ = kHead + parts * sizeof(Ring);
  static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);
  try {
    if (rank == 0) {
      MadeFiles& made = made_files();
      const std::lock_guard lock(made.mutex);
      const auto file = made.files.find(id.nonce);
      if (file == made.files.end())
        throw std::runtime_error("rank 0 is not where the id was made, or has a group of it");
      file_ = file->second;
      made.files.erase(file);
      if (ftruncate(file_, static_cast<off_t>(bytes_)) != 0) throw system_error("no memory for a group");
    } else {
      // A file of its own for the lock, which belongs to who has opened it.
      const std::string path = "/proc/" + std::to_string(id.process) + "/fd/" + std::to_string(id.file);
      file_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
      if (file_ < 0) throw system_error("rank 0's memory can't be opened, it has ended or is on another machine");
      struct stat status = {};
      while (fstat(file_, &status) == 0 && status.st_size == 0) {
        if (Clock::now() > until) throw std::runtime_error("rank 0 did not come");
        std::this_thread::sleep_for(milliseconds(1));
      }
      if (static_cast<uint64_t>(status.st_size) != bytes_)
        throw std::runtime_error("rank 0 has a group of another size");
    }
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_, 0);
    if (memory == MAP_FAILED) throw system_error("no address space for a group");
    memory_ = static_cast<char*>(memory);
    shared_ = reinterpret_cast<Shared*>(memory_);
    struct flock lock = {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = rank;
    lock.l_len = 1;
    if (fcntl(file_, F_OFD_SETLK, &lock) != 0) {
      throw std::runtime_error("there is a rank " + std::to_string(rank) + " already");
    }
    placed = true;
    if (rank == 0) {
      shared_->ranks = static_cast<uint32_t>(ranks);
      shared_->nonce.store(id.nonce, std::memory_order_release);
    }
    while (shared_->nonce.load(std::memory_order_acquire) != id.nonce) {
      if (Clock::now() > until) throw std::runtime_error("what was opened is no group's memory");
      std::this_thread::sleep_for(milliseconds(1));
    }
    shared_->states[rank].store(kHere);
    for (int r = 0; r < ranks; ++r) {
      while (shared_->states[r].load() == 0) {
        const bool late = Clock::now() > until;
        if (late || (rank != 0 && !is_there(0))) {
          throw std::runtime_error("rank " + std::to_string(late ? r : 0) + (late ? " did not come" : " has ended"));
        }
        std::this_thread::sleep_for(microseconds(200));
      }
    }
  } catch (...) {
    if (placed) shared_->states[rank].store(kLeft);
    if (shared_ != nullptr) munmap(memory_, bytes_);
    if (file_ >= 0) close(file_);
    throw;
  }
}

Exchange::~Exchange() {
  uint32_t here = kHere;
  shared_->states[rank_].compare_exchange_strong(here, kLeft);
  munmap(memory_, bytes_);
  close(file_);
}

void Exchange::abort() { shared_->states[rank_].store(kAborted); }

Exchange::Ring& Exchange::ring(int from, int to) const {
  const auto at = static_cast<uint64_t>(from) * static_cast<uint64_t>(ranks_) + static_cast<uint64_t>(to);
  return *reinterpret_cast<Ring*>(memory_ + (bytes_ - static_cast<uint64_t>(ranks_ * ranks_) * sizeof(Ring)) +
                                  at * sizeof(Ring));
}

bool Exchange::is_there(int rank) const {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return fcntl(file_, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

// As much as there is or fits. True when something moved.
bool Exchange::move(const Transfer& t, Progress& p, uint64_t number, std::string* wrong) {
  Ring& r = t.receive ? ring(t.peer, rank_) : ring(rank_, t.peer);
  uint64_t written = r.written.load(std::memory_order_acquire), read = r.read.load(std::memory_order_acquire);
  const uint64_t begin = p.moved;
  while (p.moved < p.total()) {
    const uint64_t available = t.receive ? written - read : kRingBytes - (written - read);
    if (available == 0) break;
    const bool in_head = p.moved < sizeof(Progress::Head);
    char* own = in_head ? reinterpret_cast<char*>(&p.head) + p.moved : t.data + (p.moved - sizeof(Progress::Head));
    const uint64_t left = (in_head ? sizeof(Progress::Head) : p.total()) - p.moved;
    uint64_t& at = t.receive ? read : written;
    const uint64_t size = std::min({available, left, kRingBytes - at % kRingBytes});
    char* there = r.bytes + at % kRingBytes;
    if (t.receive) {
      std::memcpy(own, there, size);
    } else {
      std::memcpy(there, own, size);
    }
    at += size;
    p.moved += size;
    if (t.receive && p.moved == sizeof(Progress::Head) && (p.head.number != number || p.head.bytes != t.bytes)) {
      *wrong = "rank " + std::to_string(t.peer) + " sent " + std::to_string(p.head.bytes) + " bytes in call " +
               std::to_string(p.head.number) + " of the group, expected " + std::to_string(t.bytes) + " in call " +
               std::to_string(number);
    }
  }
  (t.receive ? r.read : r.written).store(t.receive ? read : written, std::memory_order_release);
  return p.moved != begin;
}

// Who is waited for and won't come.
std::string Exchange::missing(std::span<const Transfer> transfers, std::span<const Progress> progress) const {
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    if (progress[i].moved == progress[i].total()) continue;
    const int peer = transfers[i].peer;
    const std::string rank = "rank " + std::to_string(peer);
    switch (shared_->states[peer].load()) {
      case kAborted:
        return rank + " has given up";
      case kLeft:
        return rank + " has left the group";
      default:
        if (!is_there(peer)) return rank + " is gone";
    }
  }
  return {};
}

std::string Exchange::run(std::span<const Transfer> transfers, uint64_t number, const std::function<bool()>& given_up) {
  std::vector<Progress> progress(transfers.size());
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    progress[i].bytes = transfers[i].bytes;
    progress[i].head = {number, transfers[i].bytes};
  }
  std::string wrong;
  // Moves what can be moved; those between the same ranks go one by one. Returns whether anything did.
  bool all = false;
  const auto pass = [&] {
    bool any = false;
    all = true;
    std::vector<char> busy(2 * static_cast<std::size_t>(ranks_));
    for (std::size_t i = 0; i < transfers.size() && wrong.empty(); ++i) {
      const Transfer& t = transfers[i];
      Progress& p = progress[i];
      char& way = busy[2 * static_cast<std::size_t>(t.peer) + (t.receive ? 1 : 0)];
      if (p.moved != p.total() && way == 0) any = move(t, p, number, &wrong) || any;
      if (p.moved == p.total()) continue;
      way = 1;
      all = false;
    }
    return any;
  };
  Pause pause;
  auto looked = Clock::now();
  while (true) {
    if (pass()) pause.reset();
    if (wrong.empty() && !all && Clock::now() - looked > kBetweenLooks) {
      looked = Clock::now();
      if (given_up()) wrong = "it was given up";
      const std::string who = missing(transfers, progress);
      // What it had sent before it went still counts.
      if (wrong.empty() && !who.empty() && !pass() && !all) wrong = who;
    }
    if (!wrong.empty()) return wrong;
    if (all) return {};
    pause();
  }
}

}  // namespace sim
