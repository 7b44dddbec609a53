#include "races.h"

#include "warp.h"

#include <algorithm>
#include <utility>

namespace ptx {

namespace {

constexpr u64 kPage = 4096;

bool covers(const Snapshot& snapshot, const Access& access) {
  const bool same_warp = snapshot.thread / 32 == access.thread / 32;
  return access.epoch < snapshot.epoch || (same_warp && access.time <= snapshot.lanes[access.thread % 32]);
}

bool contains(const SharedClock& clock, const Access& access) {
  if (clock == nullptr) {
    return false;
  }
  const auto in_block = clock->find(access.block);
  return in_block != clock->end() && std::any_of(in_block->second.begin(), in_block->second.end(), [&](const auto& s) {
           return covers(s, access);
         });
}

void add(Clock& clock, u32 block, const Snapshot& snapshot) {
  std::vector<Snapshot>& known = clock[block];
  std::erase_if(known, [&](const Snapshot& s) { return s.thread == snapshot.thread && s.epoch <= snapshot.epoch; });
  known.push_back(snapshot);
}

SharedClock joined(const SharedClock& a, const SharedClock& b) {
  if (a == nullptr || b == nullptr || a == b) {
    return a == nullptr ? b : a;
  }
  auto result = std::make_shared<Clock>(*a);
  for (const auto& [block, snapshots] : *b) {
    for (const Snapshot& snapshot : snapshots) {
      add(*result, block, snapshot);
    }
  }
  return result;
}

u32 thread_of(const Warp& w, int lane) {
  return w.index * 32 + static_cast<u32>(lane);
}

} // namespace

Races::Races(unsigned threads) : threads_((threads + 31) / 32 * 32), seen_(threads_.size()) {
}

void Races::begin_block(s64 block) {
  block_ = static_cast<u32>(block);
  epoch_ = 0;
  for (Thread& thread : threads_) {
    thread = Thread();
  }
  for (size_t k = 0; k < seen_.size(); ++k) {
    seen_[k].fill(0);
    seen_[k][k % 32] = 1;
  }
}

void Races::block_barrier() {
  ++epoch_;
  SharedClock known, observed;
  for (const Thread& thread : threads_) {
    known = joined(known, thread.known);
    observed = joined(observed, thread.observed);
  }
  for (Thread& thread : threads_) {
    thread.known = known;
    thread.observed = observed;
  }
}

void Races::warp_barrier(const Warp& w, u32 mask) {
  std::array<u32, 32> seen{};
  SharedClock known;
  each(mask, [&](int lane) {
    for (int k = 0; k < 32; ++k) {
      seen[k] = std::max(seen[k], seen_[thread_of(w, lane)][k]);
    }
    known = joined(known, threads_[thread_of(w, lane)].known);
  });
  each(mask, [&](int lane) {
    const u32 thread = thread_of(w, lane);
    seen_[thread] = seen;
    ++seen_[thread][lane];
    threads_[thread].known = known;
  });
}

void Races::fence_thread(u32 number) {
  Thread& thread = threads_[number];
  thread.known = joined(thread.known, std::exchange(thread.observed, nullptr));
  thread.fenced = thread.known;
  thread.at_fence = std::make_unique<Snapshot>(Snapshot{number, epoch_, seen_[number]});
  ++seen_[number][number % 32];
}

void Races::fence(const Warp& w, u32 mask) {
  each(mask, [&](int lane) { fence_thread(thread_of(w, lane)); });
}

void Races::acquire(const Warp& w, const Instruction& i, int lane, const char* memory) {
  const auto found = released_.find(reinterpret_cast<u64>(memory));
  if (found == released_.end() || i.within_block) {
    return;
  }
  Thread& thread = threads_[thread_of(w, lane)];
  SharedClock& to = i.acquires ? thread.known : thread.observed;
  to = joined(to, found->second);
}

// An operation that reads and writes also passes on what was released to its address before.
void Races::release(const Warp& w, const Instruction& i, int lane, const char* memory, bool reads) {
  const u32 number = thread_of(w, lane);
  if (i.releases) {
    fence_thread(number);
  }
  const Thread& thread = threads_[number];
  if (thread.at_fence == nullptr || i.within_block) {
    if (!reads) {
      released_.erase(reinterpret_cast<u64>(memory));
    }
    return;
  }
  auto clock = thread.fenced == nullptr ? std::make_shared<Clock>() : std::make_shared<Clock>(*thread.fenced);
  add(*clock, block_, *thread.at_fence);
  SharedClock& released = released_[reinterpret_cast<u64>(memory)];
  released = joined(reads ? released : nullptr, clock);
}

bool Races::ordered(const Access& before, const Access& now) const {
  if (before.block == now.block) {
    const bool same_warp = before.thread / 32 == now.thread / 32;
    if (before.thread == now.thread || before.epoch < now.epoch ||
        (same_warp && before.time <= seen_[now.thread][before.thread % 32])) {
      return true;
    }
  }
  return contains(threads_[now.thread].known, before);
}

// The cells of a page have 4 bytes, until a smaller access to the page splits them.
Races::Cell& Races::cell(u64 address, size_t bytes, size_t& unit) {
  if (last_page_ == nullptr || address / kPage != last_number_) {
    last_number_ = address / kPage;
    last_page_ = &pages_[last_number_];
    if (last_page_->cells.empty()) {
      last_page_->cells.resize(kPage / last_page_->unit);
    }
  }
  Page& page = *last_page_;
  if (bytes < page.unit) {
    std::vector<Cell> cells(kPage / bytes);
    for (size_t k = 0; k < cells.size(); ++k) {
      keep(cells[k], history_of(page.cells[k * bytes / page.unit]));
    }
    page = {bytes, std::move(cells)};
  }
  unit = page.unit;
  return page.cells[address % kPage / unit];
}

Races::History Races::history_of(const Cell& cell) const {
  if (cell.history != 0) {
    return histories_[cell.history - 1];
  }
  return cell.only.writes ? History{cell.only, {}} : History{{}, {cell.only}};
}

void Races::keep(Cell& cell, const History& history) {
  const auto& reads = history.reads;
  const bool one_read = history.write.none() && reads[1].none() && reads[2].none();
  const bool no_read = reads[0].none() && reads[1].none() && reads[2].none();
  if (cell.history == 0 && (one_read || no_read)) {
    cell.only = no_read ? history.write : reads[0];
    return;
  }
  if (cell.history == 0) {
    histories_.emplace_back();
    cell.history = static_cast<u32>(histories_.size());
  }
  histories_[cell.history - 1] = history;
}

Races::History Races::with_read(const History& history, const Access& now, bool shared) const {
  History result{history.write, {now}};
  for (const Access& read : history.reads) {
    if (read.none() || (shared && read.block != now.block) || ordered(read, now)) {
      continue;
    }
    const bool same_warp = read.block == now.block && read.thread / 32 == now.thread / 32;
    Access& place = result.reads[same_warp ? 1 : 2];
    place = place.none() ? read : place;
  }
  return result;
}

void Races::access(
    Warp& w, const Instruction& i, int lane, const char* memory, size_t bytes, bool shared, bool writes) {
  const u32 thread = thread_of(w, lane);
  Access now{block_, epoch_, seen_[thread][lane]};
  now.instruction = static_cast<u32>(&i - w.launch->code.instructions.data());
  now.thread = thread;
  now.writes = writes;
  now.atomic = i.atomic;
  now.within_block = i.within_block;
  const auto races = [&](const Access& other) {
    const bool same_block = other.block == block_;
    if (other.none() || (shared && !same_block) || !(other.writes || writes)) {
      return false;
    }
    const bool atomic = other.atomic && now.atomic && (same_block || !(other.within_block || now.within_block));
    return !atomic && !ordered(other, now);
  };
  const auto same_point = [&](const Access& other) {
    return other.block == now.block && other.thread == now.thread && other.epoch == now.epoch &&
           other.time == now.time && other.atomic == now.atomic;
  };
  const u64 begin = reinterpret_cast<u64>(memory);
  size_t unit = 0;
  for (u64 address = begin; address < begin + bytes; address += unit) {
    Cell& c = cell(address, bytes, unit);
    const History history = history_of(c);
    if (i.read_only && !history.write.none()) {
      fail_at(w, i, "lane " + std::to_string(lane) + " reads with .nc what the launch has written");
    }
    if (races(history.write)) {
      fail_race(w, i, lane, history.write, writes, shared);
    }
    if (!writes) {
      if (!same_point(history.write) && !same_point(history.reads[0])) {
        keep(c, with_read(history, now, shared));
      }
      continue;
    }
    for (const Access& read : history.reads) {
      if (races(read)) {
        fail_race(w, i, lane, read, writes, shared);
      }
    }
    keep(c, {now, {}});
  }
}

void Races::fail_race(Warp& w, const Instruction& i, int lane, const Access& other, bool writes, bool shared) {
  const string where = other.block == block_ ? "" : " of block " + std::to_string(other.block);
  fail_at(
      w,
      i,
      "data race in " + string(shared ? "shared" : "global") + " memory: lane " + std::to_string(lane) +
          (writes ? " writes" : " reads") + " what thread " + std::to_string(other.thread) + where +
          (other.writes ? " has written" : " has read") + " at `" +
          string(w.launch->code.instructions[other.instruction].text) + "`, and nothing orders them");
}

} // namespace ptx
