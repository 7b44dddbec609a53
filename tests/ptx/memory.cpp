// Loads, stores and atomic operations, and conversions between generic addresses and state spaces.
#include "assembler.h"
#include "operations.h"

#include <algorithm>

namespace ptx {

namespace {

constexpr u64 kSmallestPointer = 65536; // smaller addresses are null pointers plus an offset

struct Region {
  char* begin;
  size_t bytes;
};

Region region_of(Warp& w, Space space, int lane) {
  Launch& launch = *w.launch;
  switch (space) {
    case Space::shared:
      return {launch.shared.data(), launch.shared.size()};
    case Space::param:
      return {launch.parameters.data(), launch.parameters.size()};
    case Space::local:
      return {w.local.data() + lane * launch.code.local_bytes, launch.code.local_bytes};
    default:
      return {nullptr, 0};
  }
}

void to_generic(Warp& w, const Instruction& i, u32 m) {
  each(m, [&](int l) {
    w.lanes(i.d[0])[l] = w.lanes(i.s[0])[l] + reinterpret_cast<u64>(region_of(w, i.space, l).begin);
  });
}

void from_generic(Warp& w, const Instruction& i, u32 m) {
  each(m, [&](int l) {
    w.lanes(i.d[0])[l] = w.lanes(i.s[0])[l] - reinterpret_cast<u64>(region_of(w, i.space, l).begin);
  });
}

// True if addresses of the space are pointers of the host, not offsets.
bool has_pointers(Space space) {
  return space == Space::generic || space == Space::global || space == Space::constant;
}

[[noreturn]] void fail_address(Warp& w, const Instruction& i, int lane, u64 address, size_t bytes) {
  char text[32];
  snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(address));
  const string who = "lane " + std::to_string(lane);
  if (address % bytes != 0) {
    fail_at(w, i, "misaligned address " + string(text) + " of " + who);
  }
  if (has_pointers(i.space)) {
    fail_at(w, i, who + " dereferences the invalid pointer " + text);
  }
  fail_at(
      w,
      i,
      who + " is out of bounds: " + text + " in a space of " + std::to_string(region_of(w, i.space, lane).bytes) +
          " bytes");
}

// Fails unless the access is inside one array. The arrays are separated by guard zones.
void check_shared(Warp& w, const Instruction& i, int lane, u64 address, size_t bytes) {
  const SharedMemory& shared = w.launch->code.shared;
  u64 least = ~u64(0);
  const SharedMemory::Array* nearest = nullptr;
  for (const SharedMemory::Array& array : shared.arrays) {
    if (address >= array.begin && address + bytes <= array.begin + array.bytes) {
      return;
    }
    const u64 distance = address < array.begin ? array.begin - address : address - array.begin;
    if (distance < least) {
      least = distance;
      nearest = &array;
    }
  }
  const string where = nearest == nullptr ? ""
                                          : ": byte " + std::to_string(static_cast<s64>(address - nearest->begin)) +
                                                " of a shared array of " + std::to_string(nearest->bytes) + " bytes";
  fail_at(w, i, "lane " + std::to_string(lane) + " is out of bounds" + where);
}

char* place_in_space(Warp& w, const Instruction& i, int lane, u64 address, size_t bytes) {
  const Region region = region_of(w, i.space, lane);
  if (address % bytes != 0 || address > region.bytes || address + bytes > region.bytes) {
    fail_address(w, i, lane, address, bytes);
  }
  if (i.space == Space::shared) {
    check_shared(w, i, lane, address, bytes);
  }
  return region.begin + address;
}

// The memory that a lane accesses at the address in register `base`. Fails if the address is invalid.
inline char* place(Warp& w, const Instruction& i, u32 base, int lane, size_t bytes) {
  const u64 address = w.lanes(base)[lane] + static_cast<u64>(i.offset);
  if (!has_pointers(i.space)) {
    return place_in_space(w, i, lane, address, bytes);
  }
  if ((address & (bytes - 1)) != 0 || address < kSmallestPointer) {
    fail_address(w, i, lane, address, bytes);
  }
  const u64 in_shared = address - reinterpret_cast<u64>(w.launch->shared.data());
  if (in_shared < w.launch->shared.size()) {
    check_shared(w, i, lane, in_shared, bytes);
  }
  return reinterpret_cast<char*>(address);
}

// ---- Counting -------------------------------------------------------------------------------------------------------

Space space_at(Warp& w, const char* where, int lane) {
  for (const Space space : {Space::param, Space::shared, Space::local}) {
    const Region region = region_of(w, space, lane);
    if (static_cast<size_t>(where - region.begin) < region.bytes) {
      return space;
    }
  }
  return Space::global;
}

// The distinct units of memory (sectors or words) that the lanes access, in ascending order.
class Units {
 public:
  Units(const u64* addresses, int lanes, size_t bytes, size_t unit) {
    bool ascending = true;
    for (int k = 0; k < lanes; ++k) {
      for (u64 index = addresses[k] / unit; index <= (addresses[k] + bytes - 1) / unit; ++index) {
        if (count_ != 0 && units_[count_ - 1] == index) {
          continue;
        }
        ascending = ascending && (count_ == 0 || units_[count_ - 1] < index);
        units_[count_++] = index;
      }
    }
    if (!ascending) {
      std::sort(units_, units_ + count_);
      count_ = std::unique(units_, units_ + count_) - units_;
    }
  }
  const u64* begin() const {
    return units_;
  }
  const u64* end() const {
    return units_ + count_;
  }

 private:
  u64 units_[32 * 9]; // an access of 32 bytes touches at most 9 words
  size_t count_ = 0;
};

// Counts the sectors of an access to global memory, and the bank conflicts of an access to shared memory: one for each
// distinct word of the busiest bank except the first.
void count_access(Warp& w, const Instruction& i, u32 m, u32 base, size_t bytes, bool stores) {
  Launch& launch = *w.launch;
  Counts& counts = launch.counts[&i - launch.code.instructions.data()];
  u64 addresses[32];
  int lanes = 0;
  each(m, [&](int l) { addresses[lanes++] = reinterpret_cast<u64>(place(w, i, base, l, bytes)); });
  const int first = std::countr_zero(m);
  const Space space = i.space == Space::generic ? space_at(w, reinterpret_cast<char*>(addresses[0]), first) : i.space;
  if (i.space == Space::generic) {
    counts.in_param += space == Space::param;
    counts.in_shared += space == Space::shared;
    counts.in_local += space == Space::local;
  }
  counts.bytes += bytes * lanes;
  if (space == Space::global) {
    for (const u64 sector : Units(addresses, lanes, bytes, 32)) {
      ++counts.sectors;
      (stores ? launch.stored : launch.loaded).add(sector);
    }
  } else if (space == Space::shared) {
    u64 words_in_bank[32] = {};
    const u64 begin = reinterpret_cast<u64>(launch.shared.data());
    for (u64& address : addresses) {
      address -= begin;
    }
    for (const u64 word : Units(addresses, lanes, bytes, 4)) {
      ++words_in_bank[word % 32];
    }
    counts.conflicts += *std::max_element(std::begin(words_in_bank), std::end(words_in_bank)) - 1;
  }
}

// ---- Races ----------------------------------------------------------------------------------------------------------

void find_races(Warp& w, const Instruction& i, u32 m, u32 base, size_t bytes, bool reads, bool writes) {
  Races& races = *w.launch->races;
  each(m, [&](int l) {
    const char* const memory = place(w, i, base, l, bytes);
    const Space space = i.space == Space::generic ? space_at(w, memory, l) : i.space;
    if (space != Space::shared && space != Space::global) {
      return;
    }
    races.access(w, i, l, memory, bytes, space == Space::shared, writes);
    if (i.atomic && reads) {
      races.acquire(w, i, l, memory);
    }
    if (i.atomic && writes) {
      races.release(w, i, l, memory, reads);
    }
  });
}

// Counts an access and checks it for races, if the launch asks for it.
inline void observe(Warp& w, const Instruction& i, u32 m, u32 base, size_t bytes, bool reads, bool writes) {
  if (w.launch->counts_wanted()) {
    count_access(w, i, m, base, bytes, writes);
  }
  if (w.launch->races) {
    find_races(w, i, m, base, bytes, reads, writes);
  }
}

// ---- Accesses -------------------------------------------------------------------------------------------------------

template <class T>
struct Load {
  static void run(Warp& w, const Instruction& i, u32 m) {
    const size_t bytes = sizeof(T) * i.count;
    observe(w, i, m, i.s[0], bytes, true, false);
    each(m, [&](int l) {
      const char* const from = place(w, i, i.s[0], l, bytes);
      for (int k = 0; k < i.count; ++k) {
        T value;
        memcpy(&value, from + k * sizeof(T), sizeof(T));
        w.lanes(i.d[k])[l] = static_cast<u64>(static_cast<std::conditional_t<std::is_signed_v<T>, s64, u64>>(value));
      }
    });
  }
};

template <class T>
struct Store {
  static void run(Warp& w, const Instruction& i, u32 m) {
    if (i.space == Space::param || i.space == Space::constant) {
      fail_at(w, i, "a store to constant memory");
    }
    const size_t bytes = sizeof(T) * i.count;
    observe(w, i, m, i.d[0], bytes, false, true);
    each(m, [&](int l) {
      char* const to = place(w, i, i.d[0], l, bytes);
      for (int k = 0; k < i.count; ++k) {
        const T value = get<T>(w, i.s[k], l);
        memcpy(to + k * sizeof(T), &value, sizeof(T));
      }
    });
  }
};

enum Atomic { a_add, a_min, a_max, a_inc, a_dec, a_exch, a_cas, a_and, a_or, a_xor };

template <class T>
T combined(int operation, T old, T b, T c) {
  switch (operation) {
    case a_add:
      return static_cast<T>(old + b);
    case a_min:
      return Min::f<T>(old, b);
    case a_max:
      return Max::f<T>(old, b);
    case a_exch:
      return b;
    case a_cas:
      return old == b ? c : old;
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    switch (operation) {
      case a_and:
        return static_cast<T>(old & b);
      case a_or:
        return static_cast<T>(old | b);
      case a_xor:
        return static_cast<T>(old ^ b);
      case a_inc:
        return static_cast<T>(old >= b ? 0 : old + 1);
      default:
        return static_cast<T>(old == 0 || old > b ? b : old - 1);
    }
  }
  return old;
}

struct AtomicOperation {
  template <class T>
  static void run(Warp& w, const Instruction& i, u32 m) {
    observe(w, i, m, i.s[0], sizeof(T), true, true);
    each(m, [&](int l) {
      char* const to = place(w, i, i.s[0], l, sizeof(T));
      T old;
      memcpy(&old, to, sizeof(T));
      const T c = i.variant == a_cas ? get<T>(w, i.s[2], l) : old;
      const T value = combined<T>(i.variant, old, get<T>(w, i.s[1], l), c);
      memcpy(to, &value, sizeof(T));
      if (i.has_p1) { // atom, not red
        put<T>(w, i.d[0], l, old);
      }
    });
  }
};

// ---- Reading the instructions ---------------------------------------------------------------------------------------

template <template <class> class K>
Run by_size(Type type) {
  switch (type) {
    case Type::none:
    case Type::pred:
      return nullptr;
    case Type::s8:
      return K<s8>::run;
    case Type::s16:
      return K<s16>::run;
    case Type::s32:
      return K<s32>::run;
    default:
      break;
  }
  const size_t bytes = bytes_of(type);
  return bytes == 1 ? K<u8>::run : bytes == 2 ? K<u16>::run : bytes == 4 ? K<u32>::run : K<u64>::run;
}

Class class_of(Space space, bool stores) {
  switch (space) {
    case Space::shared:
      return stores ? shared_store : shared_load;
    case Space::local:
      return stores ? local_store : local_load;
    case Space::param:
      return param_load;
    case Space::constant:
      return const_load;
    default:
      return stores ? global_store : global_load;
  }
}

std::vector<Operand> read_access(Assembler& a, const Operand& data, const Operand& where) {
  a.memory_hints();
  a.i.space = a.space();
  a.i.count = a.has("v2") ? 2 : a.has("v4") ? 4 : a.has("v8") ? 8 : 1;
  a.types();
  if (const Symbol* symbol = a.symbol(where.text); a.i.space == Space::generic && symbol != nullptr) {
    a.i.space = symbol->space;
  }
  const std::vector<Operand> parts = data.kind == Operand::list ? data.parts : std::vector<Operand>{data};
  if (parts.size() != static_cast<size_t>(a.i.count)) {
    a.unknown("the number of operands differs from the size of the vector");
  }
  return parts;
}

void ld(Assembler& a) {
  a.need(2);
  const std::vector<Operand> parts = read_access(a, a.o[0], a.o[1]);
  a.i.s[0] = a.address(a.o[1]);
  for (size_t k = 0; k < parts.size(); ++k) {
    a.i.d[k] = a.destination(parts[k]);
  }
  a.done(by_size<Load>(a.i.type), class_of(a.i.space, false));
}

void st(Assembler& a) {
  a.need(2);
  const std::vector<Operand> parts = read_access(a, a.o[1], a.o[0]);
  a.i.d[0] = a.address(a.o[0]);
  for (size_t k = 0; k < parts.size(); ++k) {
    a.i.s[k] = a.source(parts[k]);
  }
  a.done(by_size<Store>(a.i.type), class_of(a.i.space, true));
}

template <bool returns>
void atom(Assembler& a) {
  static const std::pair<const char*, Atomic> operations[] = {
      {"add", a_add},
      {"min", a_min},
      {"max", a_max},
      {"inc", a_inc},
      {"dec", a_dec},
      {"exch", a_exch},
      {"cas", a_cas},
      {"and", a_and},
      {"or", a_or},
      {"xor", a_xor}};
  a.memory_hints();
  a.i.atomic = true;
  a.i.space = a.space();
  const auto found =
      std::find_if(std::begin(operations), std::end(operations), [&](const auto& item) { return a.has(item.first); });
  if (found == std::end(operations)) {
    a.unknown("the atomic operation is not known");
  }
  a.i.variant = found->second;
  a.i.has_p1 = returns; // has_p1: atom, which returns the old value; otherwise red
  a.types();
  const size_t sources = a.i.variant == a_cas ? 2 : 1;
  a.need(1 + returns + sources);
  if (returns) {
    a.i.d[0] = a.destination(a.o[0]);
  }
  a.i.s[0] = a.address(a.o[returns]);
  for (size_t k = 0; k < sources; ++k) {
    a.i.s[1 + k] = a.source(a.o[returns + 1 + k]);
  }
  const Run run = for_bits<AtomicOperation>(a.i.type);
  a.done(run ? run : for_floats<AtomicOperation>(a.i.type), atomic);
}

void copy(Warp& w, const Instruction& i, u32 m) {
  each(m, [&](int l) { w.lanes(i.d[0])[l] = w.lanes(i.s[0])[l]; });
}

void cvta(Assembler& a) {
  const bool to = a.has("to");
  a.i.space = a.space();
  a.types();
  a.simple(1);
  a.done(has_pointers(a.i.space) ? copy : to ? from_generic : to_generic, move);
}

void prefetch(Assembler& a) {
  a.words.clear();
  a.done([](Warp&, const Instruction&, u32) {}, global_load);
}

} // namespace

void Footprint::add(u64 sector) {
  if (bits == nullptr || sector >> 7 != last) {
    last = sector >> 7;
    bits = &pages[last];
  }
  (*bits)[sector >> 6 & 1] |= u64(1) << (sector & 63);
}

u64 Footprint::bytes() const {
  u64 sum = 0;
  for (const auto& [page, bits] : pages) {
    sum += std::popcount(bits[0]) + std::popcount(bits[1]);
  }
  return 32 * sum;
}

void add_memory(Instructions& all) {
  all.insert(
      {{"ld", ld},
       {"ldu", ld},
       {"st", st},
       {"atom", atom<true>},
       {"red", atom<false>},
       {"cvta", cvta},
       {"prefetch", prefetch},
       {"prefetchu", prefetch}});
}

} // namespace ptx
