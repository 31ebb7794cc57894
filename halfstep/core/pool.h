// SPDX-License-Identifier: Apache-2.0
// Internal: small objects that are created and destroyed at every op call come from a per-thread free list.
#pragma once

#include <cstddef>
#include <new>

namespace halfstep {

/// A free list of blocks of one size for one thread. A block may be freed on another thread than the one that allocated
/// it; each list is bounded and returns the rest to the system.
template <std::size_t kSize>
class ThreadPool {
 public:
  static void* allocate() {
    if constexpr (kPassThrough) return ::operator new(kSize);
    List& list = local();
    if (list.head) {
      Block* block = list.head;
      list.head = block->next;
      --list.count;
      return block;
    }
    return ::operator new(kSize);
  }
  static void deallocate(void* p) {
    if constexpr (kPassThrough) {
      ::operator delete(p);
      return;
    }
    List& list = local();
    if (list.closed || list.count >= kKeep) {
      ::operator delete(p);
      return;
    }
    auto* block = static_cast<Block*>(p);
    block->next = list.head;
    list.head = block;
    ++list.count;
  }

 private:
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  static constexpr bool kPassThrough = true;  // a cached block would hide a use after free
#else
  static constexpr bool kPassThrough = false;
#endif
  static constexpr std::size_t kKeep = 1024;
  struct Block {
    Block* next;
  };
  // Trivially destructible, so that it outlives every thread_local that still frees into it at thread exit.
  struct List {
    Block* head;
    std::size_t count;
    bool closed;
  };
  struct Closer {
    List* list;
    ~Closer() {
      list->closed = true;
      while (list->head) {
        Block* block = list->head;
        list->head = block->next;
        ::operator delete(block);
      }
    }
  };
  static List& local() {
    thread_local List list{};
    thread_local Closer closer{&list};
    (void)&closer;
    return list;
  }
};

/// Memory for one object of type T from the calling thread's list.
template <class T>
void* pool_allocate() {
  return ThreadPool<(sizeof(T) + 63) / 64 * 64>::allocate();
}
/// Returns memory from pool_allocate().
template <class T>
void pool_deallocate(void* p) {
  ThreadPool<(sizeof(T) + 63) / 64 * 64>::deallocate(p);
}

}  // namespace halfstep
