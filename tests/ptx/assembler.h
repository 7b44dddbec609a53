// Reads one instruction, the parts of its name and its operands, into an Instruction.
#pragma once

#include "program.h"

namespace ptx {

struct Operand {
  enum Kind { name, number, address, list, pair } kind = name;
  string_view text;
  u64 bits = 0;
  s64 offset = 0;
  bool negated = false;
  std::vector<Operand> parts;
};

string_view trimmed(string_view text);
std::vector<string_view> split(string_view text, char by); // ignores `by` within brackets
u64 number_from(string_view text);

struct Register {
  u32 index;
  Type type;
};

// Names that a kernel's instructions may use: registers by scope, symbols, labels.
class Names {
 public:
  Names(const Module& module, Code& code) : module_(module), code_(code) {
  }

  void enter() {
    scopes_.emplace_back();
  }
  void leave();
  void declare(string_view text); // .reg .b32 %r<20>, %temp
  void add(string_view name, Symbol symbol);

  bool find(string_view name, Register& found) const;
  const Symbol* symbol(string_view name) const;

 private:
  struct Group { // %r0, %r1, ...; if the count is 0, one register, whose name is the prefix
    string_view prefix;
    u32 first, count;
    Type type;
  };

  const Module& module_;
  Code& code_;
  std::vector<std::vector<Group>> scopes_;
  std::map<string, Symbol, std::less<>> symbols_;
};

// A branch. Its target is set once all labels have been read.
struct Branch {
  size_t at;
  string_view label;
};

class Assembler {
 public:
  Assembler(const Kernel& kernel, Code& code, Names& names, std::vector<Branch>& branches)
      : kernel_(kernel), code_(code), names_(names), branches_(branches) {
  }

  // Reads a statement and adds it to the code.
  void read(string_view text);

  Instruction i;
  string_view op;
  std::vector<string_view> words; // parts of the name after `op` that have not been read yet
  std::vector<Operand> o;

  bool has(string_view word); // removes the word if it is there
  void need(size_t operands) const;
  void types(); // removes the types from `words`; the first is the result's, the last is the sources'
  void rounding();
  void memory_hints();
  Space space(); // removes the state space from `words`
  bool has_floats() const;
  void simple(size_t sources); // reads one destination and `sources` sources
  void done(Run run, Class kind);

  u32 destination(const Operand& operand);
  u32 source(const Operand& operand);
  u32 address(const Operand& operand); // returns the register; stores the offset in the instruction
  u32 predicate(const Operand& operand);
  u32 scratch_predicate() {
    return code_.num_predicates++;
  }
  void written(const Operand& operand); // a destination, or destination|predicate
  void third_predicate(const Operand& operand);
  const Symbol* symbol(string_view name) const {
    return names_.symbol(name);
  }
  void branch_to(string_view label) {
    branches_.push_back({code_.instructions.size(), label});
  }
  [[noreturn]] void unknown(const string& what) const;

 private:
  void read_guard(string_view& text);
  u32 constant(u64 bits);
  u32 special(string_view name);

  const Kernel& kernel_;
  Code& code_;
  Names& names_;
  std::vector<Branch>& branches_;
};

using Assemble = void (*)(Assembler&);
using Instructions = std::unordered_map<string_view, Assemble>;

// Each adds the instructions of its file.
void add_arithmetic(Instructions& all);
void add_functions(Instructions& all);
void add_bits(Instructions& all);
void add_predicates(Instructions& all);
void add_conversions(Instructions& all);
void add_memory(Instructions& all);
void add_collectives(Instructions& all);
void add_control(Instructions& all);

} // namespace ptx
