// Branches, returns and traps, and how a launch runs: one block after another. The warps of a block take turns (see
// PTX_SLICE in driver.cpp). Shared memory is filled with 0xFF before each block; registers keep the values of earlier
// blocks and launches.
#include "assembler.h"
#include "warp.h"

#include <csetjmp>
#include <csignal>

#include <algorithm>

namespace ptx {

namespace {

void nothing(Warp&, const Instruction&, u32) {
}

void bra(Assembler& a) {
  a.has("uni");
  a.need(1);
  a.i.flow = Flow::branch;
  a.branch_to(a.o[0].text);
  a.done(nothing, control);
}

void brx(Assembler& a) {
  a.has("idx");
  a.has("uni");
  a.need(2);
  a.i.flow = Flow::table;
  a.i.s[0] = a.source(a.o[0]);
  a.branch_to(a.o[1].text);
  a.done(nothing, control);
}

template <Flow flow>
void end(Assembler& a) {
  a.has("uni");
  a.i.flow = flow;
  a.done(nothing, control);
}

void order_memory(Warp& w, const Instruction&, u32 m) {
  if (w.launch->races) {
    w.launch->races->fence(w, m);
  }
}

// A fence with .cta does nothing: within a block, only barriers order memory.
void fence_instruction(Assembler& a) {
  const bool in_block = a.has("cta");
  a.words.clear();
  a.done(in_block ? nothing : order_memory, fence);
}

template <Class kind>
void ignored(Assembler& a) {
  a.words.clear();
  a.done(nothing, kind);
}

// ---- The initial state of a warp ------------------------------------------------------------------------------------

u64 special_value(const Warp& w, string_view name, int lane) {
  const Launch& launch = *w.launch;
  const u32 one = 1u << lane, below = one - 1;
  const std::pair<string_view, u64> values[] = {
      {"%tid.x", w.index * 32 + lane},
      {"%ntid.x", launch.threads},
      {"%ctaid.x", launch.block},
      {"%nctaid.x", launch.blocks},
      {"%laneid", lane},
      {"%warpid", w.index},
      {"%nwarpid", (launch.threads + 31) / 32},
      {"%lanemask_eq", one},
      {"%lanemask_lt", below},
      {"%lanemask_le", one | below},
      {"%lanemask_gt", ~(one | below)},
      {"%lanemask_ge", ~below}};
  for (const auto& [known, value] : values) {
    if (known == name) {
      return value;
    }
  }
  return name[1] == 'n'; // in y and z, sizes are 1 and indices 0
}

void prepare(Warp& w) {
  const Launch& launch = *w.launch;
  w.alive = w.present;
  w.waits = false;
  w.paths.assign(1, {0, -1, w.present});
  w.predicates[0] = 0;
  w.predicates[1] = ~0u;
  for (const auto& [name, reg] : launch.code.specials) {
    for (int lane = 0; lane < 32; ++lane) {
      w.lanes(reg)[lane] = special_value(w, name, lane);
    }
  }
  if (launch.checks) {
    w.written.assign(launch.code.num_registers, 0);
    for (const auto& [bits, reg] : launch.code.constants) {
      w.written[reg] = ~0u;
    }
    for (const auto& [name, reg] : launch.code.specials) {
      w.written[reg] = ~0u;
    }
  }
}

void check_registers(Warp& w, const Instruction& i, u32 m) {
  const Code& code = w.launch->code;
  for (u32 k = i.used; k < i.used_end; ++k) {
    u32& written = w.written[code.used[k] / 2];
    if (code.used[k] % 2 == 1) {
      written |= m;
    } else if (m & ~written) {
      fail_at(w, i, "a register is read that was never written");
    }
  }
}

// ---- Branches -------------------------------------------------------------------------------------------------------

// Splits the current path by the targets of its lanes. Each target has its own path until they reconverge.
void part(Warp& w, const Instruction& i, const std::map<int, u32>& lanes_of) {
  if (lanes_of.size() == 1) {
    w.paths.back().pc = lanes_of.begin()->first;
    return;
  }
  const Path whole = w.paths.back();
  const int meet = i.meet < 0 ? whole.meet : i.meet;
  if (w.launch->counts_wanted()) {
    ++w.launch->counts[&i - w.launch->code.instructions.data()].diverged;
  }
  if (meet == whole.meet) {
    w.paths.pop_back();
  } else {
    w.paths.back().pc = meet;
  }
  for (const auto& [target, lanes] : lanes_of) {
    if (target != meet) {
      w.paths.push_back({target, meet, lanes});
    }
  }
}

void branch(Warp& w, const Instruction& i, u32 m) {
  Path& path = w.paths.back();
  if (m == 0) {
    ++path.pc;
  } else if (m == path.mask) {
    path.pc = i.target;
  } else {
    part(w, i, {{path.pc + 1, path.mask & ~m}, {i.target, m}});
  }
}

void branch_by_table(Warp& w, const Instruction& i, u32 m) {
  const std::vector<int>& targets = w.launch->code.tables[i.table];
  const Path& path = w.paths.back();
  std::map<int, u32> lanes_of;
  each(m, [&](int l) {
    const u32 index = get<u32>(w, i.s[0], l);
    if (index >= targets.size()) {
      fail_at(w, i, "a branch beyond its table");
    }
    lanes_of[targets[index]] |= 1u << l;
  });
  if (m != path.mask) {
    lanes_of[path.pc + 1] |= path.mask & ~m;
  }
  part(w, i, lanes_of);
}

void leave(Warp& w, u32 m) {
  ++w.paths.back().pc;
  w.alive &= ~m;
  for (Path& path : w.paths) {
    path.mask &= ~m;
  }
  std::erase_if(w.paths, [](const Path& path) { return path.mask == 0; });
}

void change_flow(Warp& w, const Instruction& i, u32 m) {
  switch (i.flow) {
    case Flow::branch:
      return branch(w, i, m);
    case Flow::table:
      return branch_by_table(w, i, m);
    case Flow::ret:
      return leave(w, m);
    case Flow::bar:
      if (m != w.present) {
        fail_at(w, i, "divergent barrier: not all lanes of the warp execute it");
      }
      w.waits = true;
      break;
    default:
      if (m != 0) {
        fail_at(w, i, "trap");
      }
  }
  ++w.paths.back().pc;
}

// ---- Running --------------------------------------------------------------------------------------------------------

// What the signal handler needs.
struct Running {
  Warp* warp = nullptr;
  const Instruction* instruction = nullptr;
  void* address = nullptr;
  sigjmp_buf back;
};
thread_local Running* running = nullptr;

// Runs a warp until it waits in a barrier, has returned, or has run `slice` instructions (0: no limit).
void run_warp(Warp& w, u64 slice) {
  Launch& launch = *w.launch;
  const Instruction* const code = launch.code.instructions.data();
  Counts* const counts = launch.counts.data();
  running->warp = &w;
  for (u64 n = 0; !w.paths.empty() && !w.waits && (slice == 0 || n < slice); ++n) {
    Path& path = w.paths.back();
    if (path.pc == path.meet) {
      w.paths.pop_back();
      continue;
    }
    const Instruction& i = code[path.pc];
    u32 m = path.mask;
    if (i.guard >= 0) {
      m &= i.guard_not ? ~w.predicates[i.guard] : w.predicates[i.guard];
    }
    if (launch.left-- == 0) {
      fail_at(w, i, "the launch has not ended after " + std::to_string(launch.limit) + " instructions");
    }
    if (counts != nullptr) {
      ++counts[path.pc].issued;
      counts[path.pc].lanes += std::popcount(m);
    }
    if (launch.checks && m != 0) {
      check_registers(w, i, m);
    }
    running->instruction = &i;
    if (i.flow != Flow::none) {
      change_flow(w, i, m);
      continue;
    }
    if (m != 0) {
      i.run(w, i, m);
    }
    ++path.pc;
  }
}

bool idle(const Warp& w) {
  return w.paths.empty() || w.waits;
}

// Releases the warps from a barrier, when all are idle and at least one waits.
void pass_barrier(std::vector<Warp*>& warps) {
  const auto barrier_of = [](const Warp& w) { return w.launch->code.instructions.data() + w.paths.back().pc - 1; };
  const Warp& first = **std::find_if(warps.begin(), warps.end(), [](const Warp* w) { return w->waits; });
  for (const Warp* w : warps) {
    const string others = "divergent barrier: warp " + std::to_string(w->index);
    if (!w->waits) {
      fail_at(first, *barrier_of(first), others + " has returned");
    }
    if (barrier_of(*w) != barrier_of(first)) {
      fail_at(first, *barrier_of(first), others + " waits in another one");
    }
  }
  for (Warp* w : warps) {
    w->waits = false;
  }
  if (first.launch->races) {
    first.launch->races->block_barrier();
  }
}

void run_block(std::vector<Warp*>& warps, u64 slice) {
  for (Warp* w : warps) {
    prepare(*w);
  }
  while (true) {
    for (Warp* w : warps) {
      if (!idle(*w)) {
        run_warp(*w, slice);
      }
    }
    if (!std::all_of(warps.begin(), warps.end(), [](const Warp* w) { return idle(*w); })) {
      continue;
    }
    if (std::all_of(warps.begin(), warps.end(), [](const Warp* w) { return w->paths.empty(); })) {
      return;
    }
    pass_barrier(warps);
  }
}

// Warps are kept from launch to launch, with their memory.
std::vector<Warp*> warps_of(Launch& launch) {
  static auto* kept = new std::vector<Warp>(32);
  const Code& code = launch.code;
  std::vector<Warp*> warps;
  for (unsigned k = 0; k < (launch.threads + 31) / 32; ++k) {
    Warp& w = (*kept)[k];
    w.launch = &launch;
    w.index = k;
    const unsigned lanes = std::min(32u, launch.threads - 32 * k);
    w.present = lanes == 32 ? ~0u : (1u << lanes) - 1;
    w.registers.resize(std::max(w.registers.size(), static_cast<size_t>(code.num_registers) * 32));
    w.predicates.resize(std::max<size_t>(w.predicates.size(), code.num_predicates));
    w.local.resize(std::max(w.local.size(), 32 * code.local_bytes));
    for (const auto& [bits, reg] : code.constants) {
      std::fill_n(w.lanes(reg), 32, bits);
    }
    warps.push_back(&w);
  }
  if (launch.reverse) {
    std::reverse(warps.begin(), warps.end());
  }
  return warps;
}

void run_blocks(Launch& launch) {
  std::vector<Warp*> warps = warps_of(launch);
  for (s64 k = 0; k < launch.blocks; ++k) {
    launch.block = launch.reverse ? launch.blocks - 1 - k : k;
    launch.shared.assign(launch.code.shared.extent(), static_cast<char>(0xff));
    if (launch.races) {
      launch.races->begin_block(launch.block);
    }
    run_block(warps, launch.slice);
  }
}

struct sigaction other_handlers[NSIG];

void at_fault(int signal, siginfo_t* info, void*) {
  if (running == nullptr) { // a fault outside of a launch is raised again, for the other handler
    sigaction(signal, &other_handlers[signal], nullptr);
    return;
  }
  running->address = info->si_addr;
  siglongjmp(running->back, 1);
}

void handle_faults(bool here) {
  for (const int signal : {SIGSEGV, SIGBUS}) {
    struct sigaction action{};
    action.sa_sigaction = at_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(signal, here ? &action : &other_handlers[signal], here ? &other_handlers[signal] : nullptr);
  }
}

} // namespace

void fail_at(const Warp& w, const Instruction& i, const string& message) {
  fail(
      "kernel " + w.launch->kernel.readable + ", block " + std::to_string(w.launch->block) + ", warp " +
      std::to_string(w.index) + ": " + message + ", at `" + string(i.text) + "`");
}

void run(Launch& launch) {
  Running now;
  running = &now;
  handle_faults(true);
  string message;
  if (sigsetjmp(now.back, 1) == 0) {
    try {
      run_blocks(launch);
    } catch (const std::exception& error) {
      message = error.what();
    }
  } else {
    fesetround(FE_TONEAREST);
    char where[32];
    snprintf(where, sizeof(where), "%p", now.address);
    try {
      fail_at(*now.warp, *now.instruction, string("no memory at ") + where);
    } catch (const std::exception& error) {
      message = error.what();
    }
  }
  running = nullptr;
  handle_faults(false);
  if (!message.empty()) {
    fail(message);
  }
}

void add_control(Instructions& all) {
  all.insert(
      {{"bra", bra},
       {"brx", brx},
       {"ret", end<Flow::ret>},
       {"exit", end<Flow::ret>},
       {"trap", end<Flow::trap>},
       {"membar", fence_instruction},
       {"fence", fence_instruction},
       {"nanosleep", ignored<control>}});
}

} // namespace ptx
