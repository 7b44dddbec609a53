// The runtime of simt.h. It is compiled without -fsanitize and serves programs with any sanitizer and with none: a
// sanitizer's functions are weak symbols, null where it is absent. Nothing here may be seen by ThreadSanitizer, which
// takes each CUDA thread for a thread of its own: inside a CUDA thread this file calls no function that a sanitizer
// intercepts (memset, malloc) on memory that CUDA threads have in common, unless it orders the accesses.
#include "simt.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

simt::Index threadIdx;
simt::Index blockIdx;
simt::Index blockDim;
simt::Index gridDim;

extern "C" {
#define SIMT_WEAK __attribute__((weak))
void __sanitizer_start_switch_fiber(void** save_fake_stack, const void* stack, size_t bytes) SIMT_WEAK;
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** old_stack, size_t* old_bytes) SIMT_WEAK;
void __asan_unpoison_memory_region(const volatile void* from, size_t bytes) SIMT_WEAK;
void* __tsan_get_current_fiber() SIMT_WEAK;
void* __tsan_create_fiber(unsigned flags) SIMT_WEAK;
void __tsan_destroy_fiber(void* fiber) SIMT_WEAK;
void __tsan_switch_to_fiber(void* fiber, unsigned flags) SIMT_WEAK;
void __tsan_acquire(void* tag) SIMT_WEAK;
void __tsan_release(void* tag) SIMT_WEAK;

// Pushes the registers that a call preserves, stores the stack pointer, and goes on with another stack.
__attribute__((visibility("hidden"))) void simt_switch(void** save_stack_pointer, void* stack_pointer);
__attribute__((visibility("hidden"))) void simt_enter();
}

#if defined(__x86_64__)
// It leaves by a jump, whose target processors predict: they expect a return to lead to the call before.
asm(R"(
.text
.globl simt_switch
.hidden simt_switch
.type simt_switch, %function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmp *%rcx
.size simt_switch, . - simt_switch
)");
constexpr int kFrameWords = 8; // six registers, the return address, and one that aligns the stack as a call does
constexpr int kReturnAddress = 6;
#elif defined(__aarch64__)
asm(R"(
.text
.globl simt_switch
.hidden simt_switch
.type simt_switch, %function
simt_switch:
  stp x29, x30, [sp, #-160]!
  stp x19, x20, [sp, #16]
  stp x21, x22, [sp, #32]
  stp x23, x24, [sp, #48]
  stp x25, x26, [sp, #64]
  stp x27, x28, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #16]
  ldp x21, x22, [sp, #32]
  ldp x23, x24, [sp, #48]
  ldp x25, x26, [sp, #64]
  ldp x27, x28, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  ldp x29, x30, [sp], #160
  ret
.size simt_switch, . - simt_switch
)");
constexpr int kFrameWords = 20;
constexpr int kReturnAddress = 1;
#else
#error "simt.cpp knows the registers of x86-64 and AArch64 alone"
#endif

namespace simt {
namespace runtime {
namespace {

constexpr unsigned kMaxThreads = 1024;
constexpr unsigned kWarpThreads = 32;
constexpr unsigned kMaxShared = 64;
constexpr size_t kMaxSharedBytes = 48 * 1024; // what a kernel may declare
constexpr size_t kForbiddenBytes = 64 * 1024; // below each stack: whole pages, whatever their size
constexpr size_t kStackBytes = 256 * 1024;    // with room for a sanitizer's report

// A place where threads wait.
struct Place {
  const char* what; // one address for each name
  const char* file;
  int line;

  bool operator==(const Place& other) const {
    return line == other.line && what == other.what && (file == other.file || strcmp(file, other.file) == 0);
  }
};

// What has a stack of its own: a CUDA thread, or the launcher that called this file.
struct Fiber {
  char* stack; // the lowest byte that may be used
  size_t stack_bytes;
  void* stack_pointer; // while others run
  void* asan_fake_stack;
  void* tsan_fiber;
};

struct Thread : Fiber {
  unsigned index;
  bool returned;
  bool fenced;
  Place place;
  uint64_t result; // of the collective
};

// A collective for which some lanes of a warp wait.
struct Meeting {
  Collective what;
  Place place;
  unsigned mask;
  unsigned arrived;
  uint64_t value[kWarpThreads];
  int operand[kWarpThreads];
  int width[kWarpThreads];
  unsigned turn; // which of two tags is used: a lane may come here again before another one has left
};

struct Warp {
  unsigned returned; // lanes
  unsigned open;     // meetings; as masks of those are disjoint, the lowest lane of a mask numbers its meeting
  Meeting meetings[kWarpThreads];
};

struct Barrier {
  unsigned arrived;
  Place place;
  unsigned turn;
};

struct Shared {
  const char* file;
  int line;
  const void* type;
  void* memory;
  size_t bytes;
};

// The addresses by which ThreadSanitizer is told what orders the accesses of a block's threads.
struct Tags {
  char barrier[2];
  char meetings[kMaxThreads / kWarpThreads][kWarpThreads][2];
  char shared_arrays[kMaxShared];
};

// The threads that can go on, in the order in which they became able to.
struct Queue {
  unsigned threads[kMaxThreads];
  unsigned first;
  unsigned count;
};

// ThreadSanitizer's fibers of threads that returned. They are destroyed late: a fiber that took over the number of
// another one would be taken for it, and races between the two be missed.
struct Retired {
  void* fibers[4096];
  unsigned next;
};

// Everything is static and of fixed size, since accesses by CUDA threads must not be seen (a container's functions
// could be those that were compiled with a sanitizer).
Thread threads[kMaxThreads];
Warp warps[kMaxThreads / kWarpThreads];
Barrier barrier_of_block;
Shared shared_arrays[kMaxShared];
unsigned shared_count;
Queue queue;
Retired retired;
Tags tags_without_sanitizer;
Tags* tags = &tags_without_sanitizer;

std::mutex launching;
const char* kernel_name;
Body kernel_body;
const void* kernel_argument;
unsigned thread_count;
unsigned running_count; // threads of the block that have not returned
Thread* current;
uint64_t random_state;
bool failed;
std::string failure;
char start_tag;
char end_tag;

Fiber launcher;
Fiber* left; // by the last switch

bool under_address_sanitizer() {
  return __sanitizer_start_switch_fiber != nullptr && __asan_unpoison_memory_region != nullptr;
}

bool under_thread_sanitizer() {
  return __tsan_create_fiber != nullptr;
}

void acquire(char* tag) {
  if (under_thread_sanitizer()) {
    __tsan_acquire(tag);
  }
}

void release(char* tag) {
  if (under_thread_sanitizer()) {
    __tsan_release(tag);
  }
}

Options options_of_environment() {
  Options result;
  if (const char* order = getenv("SIMT_ORDER")) {
    if (strcmp(order, "forward") == 0) {
      result.order = Order::forward;
    } else if (strcmp(order, "reverse") == 0) {
      result.order = Order::reverse;
    } else if (strcmp(order, "random") == 0) {
      result.order = Order::random;
    } else {
      throw std::runtime_error(
          std::string("simt: SIMT_ORDER must be forward, reverse or random, but is \"") + order + "\"");
    }
  }
  if (const char* seed = getenv("SIMT_SEED")) {
    char* end = nullptr;
    result.seed = strtoull(seed, &end, 10);
    if (end == seed || *end != '\0') {
      throw std::runtime_error(std::string("simt: SIMT_SEED must be a whole number, but is \"") + seed + "\"");
    }
  }
  return result;
}

std::string text_of(const Place& place) {
  return std::string(place.what) + " at " + place.file + ":" + std::to_string(place.line);
}

std::string text_of_mask(unsigned mask) {
  char text[16];
  snprintf(text, sizeof(text), "%08x", mask);
  return text;
}

const char* name_of(Collective what) {
  switch (what) {
    case Collective::sync:
      return "__syncwarp";
    case Collective::shuffle:
      return "__shfl_sync";
    case Collective::shuffle_up:
      return "__shfl_up_sync";
    case Collective::shuffle_down:
      return "__shfl_down_sync";
    case Collective::shuffle_xor:
      return "__shfl_xor_sync";
    case Collective::ballot:
      return "__ballot_sync";
    case Collective::any:
      return "__any_sync";
    case Collective::all:
      return "__all_sync";
  }
  return "?";
}

std::string text_of_block() {
  return std::string("simt: kernel ") + kernel_name + ", block " + std::to_string(blockIdx.x);
}

// The first failure ends the launch.
void fail(const std::string& message) {
  if (!failed) {
    failed = true;
    failure = message;
  }
}

void fail_in_thread(unsigned thread, const std::string& message) {
  fail(text_of_block() + ", thread " + std::to_string(thread) + ": " + message);
}

uint64_t next_random() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

void make_ready(unsigned thread) {
  queue.threads[(queue.first + queue.count) % kMaxThreads] = thread;
  queue.count++;
}

unsigned take_next() {
  if (options().order == Order::forward) {
    const unsigned thread = queue.threads[queue.first];
    queue.first = (queue.first + 1) % kMaxThreads;
    queue.count--;
    return thread;
  }
  const unsigned last = (queue.first + queue.count - 1) % kMaxThreads;
  unsigned chosen = last;
  if (options().order == Order::random) {
    chosen = static_cast<unsigned>((queue.first + next_random() % queue.count) % kMaxThreads);
  }
  const unsigned thread = queue.threads[chosen];
  queue.threads[chosen] = queue.threads[last];
  queue.count--;
  return thread;
}

void switch_fibers(Fiber& from, Fiber& to, bool for_ever) {
  left = &from;
  if (under_address_sanitizer()) {
    __sanitizer_start_switch_fiber(for_ever ? nullptr : &from.asan_fake_stack, to.stack, to.stack_bytes);
  }
  if (under_thread_sanitizer()) {
    __tsan_switch_to_fiber(to.tsan_fiber, 1); // 1: the switch orders nothing
  }
  simt_switch(&from.stack_pointer, to.stack_pointer);
  if (under_address_sanitizer()) {
    __sanitizer_finish_switch_fiber(from.asan_fake_stack, nullptr, nullptr);
  }
}

// Goes on with the next thread, or with the launcher where no thread can or the launch failed.
void switch_from(Fiber& from, bool for_ever) {
  Fiber* next = &launcher;
  if (queue.count > 0 && !failed) {
    current = &threads[take_next()];
    threadIdx = {current->index, 0, 0};
    next = current;
  }
  if (next != &from) {
    switch_fibers(from, *next, for_ever);
  }
}

// Leaves a thread that returned or failed, and is not resumed. Its caller must own no memory any more.
[[noreturn]] void abandon() {
  release(&end_tag);
  switch_from(*current, /*for_ever=*/true);
  abort();
}

void wait_in(const Place& place) {
  current->place = place;
  release(&end_tag); // where the launch fails, the thread is not resumed, and the caller may free what it used
  switch_from(*current, /*for_ever=*/false);
}

// ThreadSanitizer would take free() for an access that nothing orders after the threads' own, but not munmap().
void* allocate_shared(size_t bytes, size_t alignment) {
  void* memory = nullptr;
  if (under_thread_sanitizer()) {
    memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
      abort();
    }
  } else if (posix_memalign(&memory, std::max<size_t>(alignment, 16), bytes) != 0) {
    abort();
  }
  volatile unsigned char* const filled = static_cast<unsigned char*>(memory); // volatile: no call of memset
  for (size_t i = 0; i < bytes; i++) {
    filled[i] = 0xFF;
  }
  return memory;
}

void free_shared() {
  for (unsigned i = 0; i < shared_count; i++) {
    if (under_thread_sanitizer()) {
      munmap(shared_arrays[i].memory, shared_arrays[i].bytes);
    } else {
      free(shared_arrays[i].memory);
    }
  }
  shared_count = 0;
}

void* map(void* where, size_t bytes, int flags) {
  void* const memory = mmap(where, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  if (memory == MAP_FAILED) {
    throw std::runtime_error("simt: no memory for a block's threads");
  }
  return memory;
}

char* map_stack() {
  char* const memory = static_cast<char*>(map(nullptr, kForbiddenBytes + kStackBytes, MAP_NORESERVE));
  if (mprotect(memory, kForbiddenBytes, PROT_NONE) != 0) {
    throw std::runtime_error("simt: no memory may be forbidden below the stack of a thread");
  }
  return memory + kForbiddenBytes;
}

// Mapped again, the tags are free of the block before, which would else be ordered before this one. Unmapping is what
// makes ThreadSanitizer forget them.
void prepare_tags() {
  if (!under_thread_sanitizer()) {
    return;
  }
  if (tags != &tags_without_sanitizer) {
    munmap(tags, sizeof(Tags));
    tags = &tags_without_sanitizer;
  }
  tags = static_cast<Tags*>(map(nullptr, sizeof(Tags), 0));
}

// Functions that were left where the launch failed have red zones on their stacks.
void remove_red_zones() {
  for (const Thread& thread : threads) {
    if (under_address_sanitizer() && thread.stack != nullptr) {
      __asan_unpoison_memory_region(thread.stack, kStackBytes);
    }
  }
}

// Gives the thread a stack on which it begins in simt_enter().
void prepare_stack(Thread& thread) {
  if (thread.stack == nullptr) {
    thread.stack = map_stack();
    thread.stack_bytes = kStackBytes;
  } else if (under_thread_sanitizer()) {
    // Mapped again, the stack is free of the accesses of the thread that had it in the block before.
    map(thread.stack, kStackBytes, MAP_NORESERVE | MAP_FIXED);
  }
  // Stacks that all began at the same offset in a page would compete for the same lines of the cache.
  char* const top = thread.stack + kStackBytes - thread.index % kWarpThreads * 128;
  void** const frame = reinterpret_cast<void**>(top) - kFrameWords;
  void* volatile* const words = frame; // volatile: no call of memset
  for (int i = 0; i < kFrameWords; i++) {
    words[i] = i == kReturnAddress ? reinterpret_cast<void*>(&simt_enter) : nullptr;
  }
  thread.stack_pointer = frame;
}

void prepare_thread(unsigned index) {
  Thread& thread = threads[index];
  thread.index = index;
  thread.asan_fake_stack = nullptr;
  thread.returned = false;
  thread.fenced = false;
  thread.place = {"its first statement", "", 0};
  prepare_stack(thread);
  if (under_thread_sanitizer()) {
    thread.tsan_fiber = __tsan_create_fiber(0); // one for each block, so that nothing orders blocks
  }
  make_ready(index);
}

void prepare_block() {
  queue.first = 0;
  queue.count = 0;
  running_count = thread_count;
  prepare_tags();
  barrier_of_block.arrived = 0;
  for (Warp& warp : warps) {
    warp.returned = 0;
    warp.open = 0;
  }
  for (unsigned index = 0; index < thread_count; index++) {
    prepare_thread(index);
  }
}

void retire_fibers() {
  if (!under_thread_sanitizer()) {
    return;
  }
  for (unsigned index = 0; index < thread_count; index++) {
    void*& slot = retired.fibers[retired.next];
    if (slot != nullptr) {
      __tsan_destroy_fiber(slot);
    }
    slot = threads[index].tsan_fiber;
    retired.next = (retired.next + 1) % (sizeof(retired.fibers) / sizeof(void*));
  }
}

void destroy_retired_fibers() {
  for (void*& fiber : retired.fibers) {
    if (fiber != nullptr) {
      __tsan_destroy_fiber(fiber);
    }
    fiber = nullptr;
  }
}

// Nobody can go on, and not all have returned: says how many threads wait where.
void fail_for_deadlock() {
  std::string message = text_of_block() + ": deadlock: " + std::to_string(thread_count - running_count) + " of " +
                        std::to_string(thread_count) + " threads returned";
  bool told[kMaxThreads] = {};
  for (unsigned first = 0; first < thread_count; first++) {
    if (threads[first].returned || told[first]) {
      continue;
    }
    unsigned count = 0;
    for (unsigned index = first; index < thread_count; index++) {
      if (!threads[index].returned && threads[index].place == threads[first].place) {
        told[index] = true;
        count++;
      }
    }
    message += ", " + std::to_string(count) + " wait in " + text_of(threads[first].place) + " (the first is thread " +
               std::to_string(first) + ")";
  }
  fail(message);
}

void run_block(unsigned index) {
  blockIdx = {index, 0, 0};
  prepare_block();
  switch_from(launcher, /*for_ever=*/false);
  if (!failed && running_count > 0) {
    fail_for_deadlock();
  }
  retire_fibers();
  free_shared();
}

std::vector<unsigned> order_of_blocks(unsigned count) {
  std::vector<unsigned> blocks(count);
  std::iota(blocks.begin(), blocks.end(), 0U);
  if (options().order == Order::reverse) {
    std::reverse(blocks.begin(), blocks.end());
  } else if (options().order == Order::random) {
    std::shuffle(blocks.begin(), blocks.end(), std::mt19937_64(options().seed));
  }
  return blocks;
}

unsigned lowest_lane(unsigned lanes) {
  return static_cast<unsigned>(__builtin_ctz(lanes));
}

// The lane whose value a lane gets: its own where the distance leads out of its `width` lanes.
unsigned source_of(const Meeting& meeting, unsigned lane) {
  const int self = static_cast<int>(lane);
  const int width = meeting.width[lane];
  const int operand = meeting.operand[lane];
  const int first = self & ~(width - 1);
  const int last = first + width - 1;
  int source = self;
  if (meeting.what == Collective::shuffle) {
    source = first + (operand & (width - 1));
  } else if (meeting.what == Collective::shuffle_up && self - operand >= first) {
    source = self - operand;
  } else if (meeting.what == Collective::shuffle_down && self + operand <= last) {
    source = self + operand;
  } else if (meeting.what == Collective::shuffle_xor && (self ^ operand) <= last) {
    source = self ^ operand;
  }
  return static_cast<unsigned>(source);
}

uint64_t result_of_vote(const Meeting& meeting) {
  unsigned votes = 0;
  for (unsigned lane = 0; lane < kWarpThreads; lane++) {
    if ((meeting.mask >> lane & 1) != 0 && meeting.value[lane] != 0) {
      votes |= 1U << lane;
    }
  }
  if (meeting.what == Collective::any) {
    return votes != 0;
  }
  if (meeting.what == Collective::all) {
    return votes == meeting.mask;
  }
  return votes;
}

// All lanes have come: gives each its result and lets it go on.
void conclude(Meeting& meeting, unsigned first_thread) {
  const bool is_vote =
      meeting.what == Collective::ballot || meeting.what == Collective::any || meeting.what == Collective::all;
  const uint64_t vote = is_vote ? result_of_vote(meeting) : 0;
  for (unsigned lane = 0; lane < kWarpThreads; lane++) {
    if ((meeting.mask >> lane & 1) == 0) {
      continue;
    }
    Thread& thread = threads[first_thread + lane];
    thread.result = vote;
    if (!is_vote && meeting.what != Collective::sync) {
      const unsigned source = source_of(meeting, lane);
      if ((meeting.mask >> source & 1) == 0) {
        fail_in_thread(
            thread.index,
            text_of(meeting.place) + " reads lane " + std::to_string(source) + ", which is not in the mask " +
                text_of_mask(meeting.mask));
      }
      thread.result = meeting.value[source];
    }
    make_ready(thread.index);
  }
  warps[first_thread / kWarpThreads].open &= ~(1U << lowest_lane(meeting.mask));
}

// Ends the launch for what the running thread does. Messages are made by the caller and freed before the stack is left.
#define SIMT_FAIL(message)                   \
  do {                                       \
    fail_in_thread(current->index, message); \
    abandon();                               \
  } while (false)

// The meeting for which a lane of `mask` waits, or null.
Meeting* open_meeting(Warp& warp, unsigned mask) {
  for (unsigned rest = warp.open; rest != 0; rest &= rest - 1) {
    Meeting& meeting = warp.meetings[lowest_lane(rest)];
    if ((meeting.mask & mask) != 0) {
      return &meeting;
    }
  }
  return nullptr;
}

Meeting& begin_meeting(Warp& warp, Collective what, const Place& place, unsigned mask) {
  const unsigned lane = lowest_lane(mask);
  Meeting& meeting = warp.meetings[lane];
  meeting.what = what;
  meeting.place = place;
  meeting.mask = mask;
  meeting.arrived = 0;
  meeting.turn ^= 1;
  warp.open |= 1U << lane;
  return meeting;
}

void check_mask(const Place& place, unsigned mask, unsigned lane, unsigned returned) {
  if ((mask >> lane & 1) == 0) {
    SIMT_FAIL(text_of(place) + " is not for lane " + std::to_string(lane) + ": its mask is " + text_of_mask(mask));
  }
  if ((mask & returned) != 0) {
    SIMT_FAIL(
        text_of(place) + " waits for ever: its mask " + text_of_mask(mask) + " names lanes that returned, " +
        text_of_mask(mask & returned));
  }
}

void check_distance(const Place& place, Collective what, int distance) {
  const bool has_distance =
      what == Collective::shuffle_up || what == Collective::shuffle_down || what == Collective::shuffle_xor;
  if (has_distance && (distance < 0 || distance >= static_cast<int>(kWarpThreads))) {
    SIMT_FAIL(text_of(place) + " has distance " + std::to_string(distance) + ", which is not from 0 to 31");
  }
}

void check_width(const Place& place, int width) {
  if (width < 1 || width > static_cast<int>(kWarpThreads) || (width & (width - 1)) != 0) {
    SIMT_FAIL(text_of(place) + " has width " + std::to_string(width) + ", which is no power of two up to 32");
  }
}

void fail_for_alignment(const void* pointer, size_t bytes, const char* what, const char* file, int line) {
  char address[32];
  snprintf(address, sizeof(address), "%p", pointer);
  std::string message =
      std::string("misaligned ") + what + " of " + std::to_string(bytes) + " bytes, address " + address;
  if (file != nullptr) {
    message += std::string(", at ") + file + ":" + std::to_string(line);
  }
  if (current == nullptr) {
    throw std::runtime_error("simt: " + message);
  }
  fail_in_thread(current->index, message);
}

} // namespace

void launch(const char* name, int64_t blocks, int thread_count_of_block, Body body, const void* kernel) {
  const std::lock_guard<std::mutex> lock(launching);
  if (blocks < 1 || blocks > INT32_MAX || thread_count_of_block < 1 ||
      thread_count_of_block > static_cast<int>(kMaxThreads)) {
    throw std::runtime_error(
        std::string("simt: kernel ") + name + " cannot be launched with " + std::to_string(blocks) + " blocks of " +
        std::to_string(thread_count_of_block) + " threads");
  }
  kernel_name = name;
  kernel_body = body;
  kernel_argument = kernel;
  thread_count = static_cast<unsigned>(thread_count_of_block);
  gridDim = {static_cast<unsigned>(blocks), 1, 1};
  blockDim = {thread_count, 1, 1};
  random_state = options().seed * 0x9E3779B97F4A7C15 | 1;
  failed = false;
  if (under_thread_sanitizer()) {
    launcher.tsan_fiber = __tsan_get_current_fiber();
  }
  release(&start_tag);
  for (const unsigned index : order_of_blocks(gridDim.x)) {
    if (!failed) {
      run_block(index);
    }
  }
  acquire(&end_tag);
  destroy_retired_fibers();
  current = nullptr;
  if (failed) {
    remove_red_zones();
    throw std::runtime_error(failure);
  }
}

void* shared(const char* file, int line, const void* type, size_t bytes, size_t alignment) {
  size_t total = bytes;
  for (unsigned i = 0; i < shared_count; i++) {
    Shared& array = shared_arrays[i];
    if (array.line == line && array.type == type && strcmp(array.file, file) == 0) {
      acquire(&tags->shared_arrays[i]);
      return array.memory;
    }
    total += array.bytes;
  }
  if (total > kMaxSharedBytes || shared_count == kMaxShared) {
    SIMT_FAIL(
        std::string("the shared array at ") + file + ":" + std::to_string(line) + " brings the block to " +
        std::to_string(total) + " bytes in " + std::to_string(shared_count + 1) + " shared arrays");
  }
  const unsigned index = shared_count;
  shared_count++;
  Shared& array = shared_arrays[index];
  array.file = file;
  array.line = line;
  array.type = type;
  array.bytes = bytes;
  array.memory = allocate_shared(bytes, alignment);
  release(&tags->shared_arrays[index]); // to ThreadSanitizer the allocation is a write
  return array.memory;
}

void barrier(const char* file, int line) {
  const Place place = {"__syncthreads", file, line};
  Barrier& barrier = barrier_of_block;
  if (barrier.arrived > 0 && !(barrier.place == place)) {
    SIMT_FAIL("divergent barrier: comes to " + text_of(place) + " while others wait in " + text_of(barrier.place));
  }
  barrier.place = place;
  barrier.arrived++;
  char* const tag = &tags->barrier[barrier.turn];
  release(tag);
  if (barrier.arrived == thread_count) {
    barrier.arrived = 0;
    barrier.turn ^= 1;
    for (unsigned index = 0; index < thread_count; index++) {
      make_ready(index);
    }
  }
  wait_in(place);
  acquire(tag);
}

uint64_t meet(Collective what, unsigned mask, uint64_t value, int operand, int width, const char* file, int line) {
  const Place place = {name_of(what), file, line};
  const unsigned lane = current->index % kWarpThreads;
  const unsigned first_thread = current->index - lane;
  const unsigned warp_index = first_thread / kWarpThreads;
  Warp& warp = warps[warp_index];
  if (thread_count - first_thread < kWarpThreads) {
    mask &= (1U << (thread_count - first_thread)) - 1;
  }
  check_mask(place, mask, lane, warp.returned);
  check_distance(place, what, operand);
  check_width(place, width);
  Meeting* meeting = open_meeting(warp, mask);
  if (meeting == nullptr) {
    meeting = &begin_meeting(warp, what, place, mask);
  } else if (!(meeting->place == place) || meeting->mask != mask) {
    SIMT_FAIL(
        "divergent collective: comes to " + text_of(place) + " with mask " + text_of_mask(mask) +
        " while others of its warp wait in " + text_of(meeting->place) + " with mask " + text_of_mask(meeting->mask));
  }
  meeting->arrived |= 1U << lane;
  meeting->value[lane] = value;
  meeting->operand[lane] = operand;
  meeting->width[lane] = width;
  char* const tag = &tags->meetings[warp_index][lowest_lane(mask)][meeting->turn];
  if (what == Collective::sync) {
    release(tag);
  }
  if (meeting->arrived == mask) {
    conclude(*meeting, first_thread);
  }
  wait_in(place);
  if (what == Collective::sync) {
    acquire(tag);
  }
  return current->result;
}

void fence() {
  current->fenced = true;
}

bool has_fenced() {
  return current == nullptr || current->fenced;
}

// Called in place of a kernel's caller, on the new stack of the running thread.
void run_thread() {
  if (under_address_sanitizer()) {
    const void* stack = nullptr;
    __sanitizer_finish_switch_fiber(nullptr, &stack, &left->stack_bytes);
    left->stack = static_cast<char*>(const_cast<void*>(stack)); // the launcher's is known from here alone
  }
  acquire(&start_tag);
  try {
    kernel_body(kernel_argument);
  } catch (const std::exception& error) {
    fail_in_thread(current->index, std::string("exception: ") + error.what());
  } catch (...) {
    fail_in_thread(current->index, "exception");
  }
  current->returned = true;
  running_count--;
  warps[current->index / kWarpThreads].returned |= 1U << current->index % kWarpThreads;
  abandon();
}

} // namespace runtime

Options& options() {
  static Options result = runtime::options_of_environment();
  return result;
}

void check_aligned(const void* pointer, size_t bytes, const char* what, const char* file, int line) {
  if (reinterpret_cast<uintptr_t>(pointer) % bytes == 0) {
    return;
  }
  runtime::fail_for_alignment(pointer, bytes, what, file, line);
  runtime::abandon();
}

} // namespace simt

extern "C" void simt_enter() {
  simt::runtime::run_thread();
}
