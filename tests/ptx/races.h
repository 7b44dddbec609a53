// Finds accesses that race: two threads of a launch touch a byte of shared or global memory, at least one of them
// writes, and nothing orders them. Each access is compared with earlier ones, so a race is found in every order of
// warps and blocks. Accesses are ordered
//
// - within a thread;
// - within a block, by barriers; within a warp, by bar.warp.sync, but not by shuffles and votes;
// - between blocks, if the thread of the first access then runs a fence of GPU scope and an atomic operation, and the
//   thread of the second access has run an atomic operation that reads its result, and then a fence. This reading
//   operation and this fence may also be in two threads of a block, with a barrier between them. Operations with
//   .release and .acquire contain their fence.
//
// Atomic operations do not race with each other.
//
// A cell (up to 4 bytes of memory) keeps its last write and up to three reads that nothing orders. An access has an
// epoch, the number of barriers that its block has passed, and a time, a counter of its lane that each bar.warp.sync
// and each fence advances.
#pragma once

#include "types.h"

#include <array>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

namespace ptx {

struct Warp;
struct Instruction;

// The accesses of a block that are ordered before a fence of one of its threads.
struct Snapshot {
  u32 thread, epoch;
  std::array<u32, 32> lanes; // includes accesses up to these times of the warp's lanes
};

// Snapshots by block: the accesses that are ordered before a point.
using Clock = std::map<u32, std::vector<Snapshot>>;
using SharedClock = std::shared_ptr<const Clock>;

struct Access {
  static constexpr u32 kNone = 0xffffffff;

  u32 block = kNone, epoch = 0, time = 0;
  u32 instruction : 19 = 0, thread : 10 = 0;
  u32 writes : 1 = 0, atomic : 1 = 0, within_block : 1 = 0; // within_block: atomic only within the block

  bool none() const {
    return block == kNone;
  }
};

class Races {
 public:
  explicit Races(unsigned threads);

  void begin_block(s64 block);
  void block_barrier();
  void warp_barrier(const Warp& w, u32 mask);
  void fence(const Warp& w, u32 mask);

  // Records a lane's access to memory; fails if it races. `shared`: it is to shared memory.
  void access(Warp& w, const Instruction& i, int lane, const char* memory, size_t bytes, bool shared, bool writes);
  // The memory order of an atomic operation: acquire after a load, release before a store.
  void acquire(const Warp& w, const Instruction& i, int lane, const char* memory);
  void release(const Warp& w, const Instruction& i, int lane, const char* memory, bool reads);

 private:
  struct History {
    Access write;
    std::array<Access, 3> reads; // the last read; an unordered read by another lane of its warp; one by another warp
  };
  struct Cell {
    Access only;
    u32 history = 0; // 1 + its index in histories_; 0: `only` is the whole history
  };
  struct Page {
    size_t unit = 4; // bytes of a cell
    std::vector<Cell> cells;
  };
  struct Thread {
    SharedClock known, observed, fenced; // observed: known after the next fence; fenced: known at the last one
    std::unique_ptr<Snapshot> at_fence;
  };

  Cell& cell(u64 address, size_t bytes, size_t& unit);
  History history_of(const Cell& cell) const;
  void keep(Cell& cell, const History& history);
  History with_read(const History& history, const Access& now, bool shared) const;
  bool ordered(const Access& before, const Access& now) const;
  [[noreturn]] void fail_race(Warp& w, const Instruction& i, int lane, const Access& other, bool writes, bool shared);
  void fence_thread(u32 thread);

  u32 block_ = 0, epoch_ = 0;
  std::vector<Thread> threads_;
  std::vector<std::array<u32, 32>> seen_; // by thread: the time up to which it is ordered after each lane of its warp
  std::unordered_map<u64, Page> pages_;
  std::vector<History> histories_;
  u64 last_number_ = ~0ull;
  Page* last_page_ = nullptr;
  std::unordered_map<u64, SharedClock> released_; // by address
};

} // namespace ptx
