#include "assembler.h"

#include <algorithm>
#include <charconv>

namespace ptx {

namespace {

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

// Removes the first word, which ends at white space, from the text, and returns it.
string_view take_word(string_view& text) {
  const size_t end = std::min(text.find_first_of(" \t\r\n"), text.size());
  const string_view word = text.substr(0, end);
  text = trimmed(text.substr(end));
  return word;
}

Operand operand_from(string_view text) {
  Operand operand;
  text = trimmed(text);
  if (text.empty()) {
    fail("an empty operand");
  }
  operand.text = text;
  if (text[0] == '{' || text.find('|') != string_view::npos) {
    const bool list = text[0] == '{';
    operand.kind = list ? Operand::list : Operand::pair;
    for (const string_view part : list ? split(text.substr(1, text.rfind('}') - 1), ',') : split(text, '|')) {
      operand.parts.push_back(operand_from(part));
    }
  } else if (text[0] == '[') {
    operand.kind = Operand::address;
    string_view inside = trimmed(text.substr(1, text.rfind(']') - 1));
    if (const size_t plus = inside.find('+'); plus != string_view::npos) {
      operand.offset = static_cast<s64>(number_from(trimmed(inside.substr(plus + 1))));
      inside = trimmed(inside.substr(0, plus));
    }
    operand.text = inside;
  } else if (text[0] == '!') {
    operand.negated = true;
    operand.text = trimmed(text.substr(1));
  } else if (is_digit(text[0]) || text[0] == '-') {
    operand.kind = Operand::number;
    operand.bits = number_from(text);
  }
  return operand;
}

std::vector<string_view> name_parts(string_view name) {
  std::vector<string_view> words;
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    words.push_back(name.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

const Instructions& all_instructions() {
  static const Instructions all = [] {
    Instructions result;
    for (const auto add :
         {add_arithmetic,
          add_functions,
          add_bits,
          add_predicates,
          add_conversions,
          add_memory,
          add_collectives,
          add_control}) {
      add(result);
    }
    return result;
  }();
  return all;
}

} // namespace

string_view trimmed(string_view text) {
  const size_t begin = text.find_first_not_of(" \t\r\n"), end = text.find_last_not_of(" \t\r\n");
  return begin == string_view::npos ? string_view() : text.substr(begin, end - begin + 1);
}

std::vector<string_view> split(string_view text, char by) {
  std::vector<string_view> parts;
  int depth = 0;
  size_t begin = 0;
  for (size_t k = 0; k < text.size(); ++k) {
    const char c = text[k];
    depth += c == '{' || c == '[' || c == '(';
    depth -= c == '}' || c == ']' || c == ')';
    if (c == by && depth == 0) {
      parts.push_back(trimmed(text.substr(begin, k - begin)));
      begin = k + 1;
    }
  }
  const string_view last = trimmed(text.substr(begin));
  if (!last.empty() || !parts.empty()) {
    parts.push_back(last);
  }
  return parts;
}

u64 number_from(string_view text) {
  const bool negative = !text.empty() && text[0] == '-';
  string_view digits = text.substr(negative);
  int base = 10;
  if (digits.size() > 2 && digits[0] == '0' && string_view("fFdDxX").find(digits[1]) != string_view::npos) {
    base = 16;
    digits.remove_prefix(2);
  } else if (digits.size() > 1 && digits[0] == '0') {
    base = 8;
  }
  if (digits.size() > 1 && digits.back() == 'U') {
    digits.remove_suffix(1);
  }
  u64 magnitude = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), magnitude, base);
  if (error != std::errc() || end != digits.data() + digits.size()) {
    fail("not a number: " + string(text));
  }
  return negative ? 0 - magnitude : magnitude;
}

// ---- Names ----------------------------------------------------------------------------------------------------------

void Names::leave() {
  if (scopes_.size() < 2) {
    fail("a closing bracket without an opening one");
  }
  scopes_.pop_back();
}

void Names::declare(string_view text) {
  take_word(text);
  const Type type = type_of(take_word(text).substr(1));
  u32& next = type == Type::pred ? code_.num_predicates : code_.num_registers;
  for (const string_view name : split(text, ',')) {
    const size_t bracket = name.find('<');
    u32 count = 0; // 0: one register, not a numbered group
    if (bracket != string_view::npos) {
      count = static_cast<u32>(number_from(trimmed(name.substr(bracket + 1, name.find('>') - bracket - 1))));
    }
    scopes_.back().push_back({trimmed(name.substr(0, bracket)), next, count, type});
    next += std::max(count, 1u);
  }
}

void Names::add(string_view name, Symbol symbol) {
  symbols_[string(name)] = symbol;
}

bool Names::find(string_view name, Register& found) const {
  size_t digits = name.size();
  u32 number = 0;
  while (digits > 0 && is_digit(name[digits - 1])) {
    --digits;
  }
  std::from_chars(name.data() + digits, name.data() + name.size(), number);
  const string_view prefix = name.substr(0, digits);
  for (size_t k = scopes_.size(); k-- > 0;) {
    for (const Group& group : scopes_[k]) {
      const bool matches = group.count == 0 ? group.prefix == name
                                            : digits < name.size() && group.prefix == prefix && number < group.count;
      if (matches) {
        found = {group.first + (group.count == 0 ? 0 : number), group.type};
        return true;
      }
    }
  }
  return false;
}

const Symbol* Names::symbol(string_view name) const {
  const auto own = symbols_.find(name);
  if (own != symbols_.end()) {
    return &own->second;
  }
  const auto module_symbol = module_.symbols.find(name);
  return module_symbol == module_.symbols.end() ? nullptr : &module_symbol->second;
}

// ---- Parts of an instruction's name ---------------------------------------------------------------------------------

void Assembler::unknown(const string& what) const {
  fail("kernel " + kernel_.readable + ": " + what + ", in `" + string(i.text) + "`");
}

bool Assembler::has(string_view word) {
  const auto found = std::find(words.begin(), words.end(), word);
  if (found == words.end()) {
    return false;
  }
  words.erase(found);
  return true;
}

void Assembler::need(size_t operands) const {
  if (o.size() != operands) {
    unknown("expected " + std::to_string(operands) + " operands, but there are " + std::to_string(o.size()));
  }
}

void Assembler::types() {
  for (auto word = words.begin(); word != words.end();) {
    const Type type = type_of(*word);
    if (type == Type::none) {
      ++word;
      continue;
    }
    i.type = i.type == Type::none ? type : i.type;
    i.from = type;
    word = words.erase(word);
  }
}

void Assembler::rounding() {
  i.mode = has("rz") || has("rzi")   ? FE_TOWARDZERO
           : has("rm") || has("rmi") ? FE_DOWNWARD
           : has("rp") || has("rpi") ? FE_UPWARD
                                     : FE_TONEAREST;
  has("rn");
  i.ftz = has("ftz");
  i.sat = has("sat") || has("satfinite");
}

void Assembler::memory_hints() {
  for (const string_view word : {"volatile", "relaxed"}) {
    i.atomic = has(word) || i.atomic;
  }
  const bool both = has("acq_rel");
  i.acquires = has("acquire") || both;
  i.releases = has("release") || both;
  i.atomic = i.atomic || i.acquires || i.releases;
  i.within_block = has("cta");
  i.read_only = has("nc");
  static const string_view hints[] = {
      "weak", "cluster", "gpu", "sys", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "noftz"};
  std::erase_if(words, [](string_view word) {
    return word.starts_with("L1:") || word.starts_with("L2:") ||
           std::find(std::begin(hints), std::end(hints), word) != std::end(hints);
  });
}

Space Assembler::space() {
  static const std::unordered_map<string_view, Space> spaces = {
      {"global", Space::global},
      {"shared", Space::shared},
      {"local", Space::local},
      {"param", Space::param},
      {"const", Space::constant}};
  for (auto word = words.begin(); word != words.end(); ++word) {
    const auto found = spaces.find(word->substr(0, word->find(':')));
    if (found == spaces.end()) {
      continue;
    }
    if (word->find("cluster") != string_view::npos || word->find("func") != string_view::npos) {
      unknown("the state space is not known");
    }
    words.erase(word);
    return found->second;
  }
  return Space::generic;
}

bool Assembler::has_floats() const {
  return std::any_of(words.begin(), words.end(), [](string_view word) { return is_float(type_of(word)); });
}

void Assembler::simple(size_t sources) {
  need(1 + sources);
  i.d[0] = destination(o[0]);
  for (size_t k = 0; k < sources; ++k) {
    i.s[k] = source(o[1 + k]);
  }
}

void Assembler::done(Run run, Class kind) {
  if (run == nullptr || !words.empty()) {
    unknown("the instruction is not known" + (words.empty() ? string() : " with ." + string(words[0])));
  }
  i.run = run;
  i.kind = kind;
}

// ---- Operands -------------------------------------------------------------------------------------------------------

u32 Assembler::constant(u64 bits) {
  const auto [found, is_new] = code_.constants.try_emplace(bits, code_.num_registers);
  code_.num_registers += is_new;
  return found->second;
}

u32 Assembler::special(string_view name) {
  static const string_view known[] = {"%tid.x",       "%tid.y",       "%tid.z",       "%ntid.x",      "%ntid.y",
                                      "%ntid.z",      "%ctaid.x",     "%ctaid.y",     "%ctaid.z",     "%nctaid.x",
                                      "%nctaid.y",    "%nctaid.z",    "%laneid",      "%warpid",      "%nwarpid",
                                      "%lanemask_eq", "%lanemask_lt", "%lanemask_le", "%lanemask_gt", "%lanemask_ge"};
  if (std::find(std::begin(known), std::end(known), name) == std::end(known)) {
    unknown("the special register " + string(name) + " is not known");
  }
  const auto [found, is_new] = code_.specials.try_emplace(string(name), code_.num_registers);
  code_.num_registers += is_new;
  return found->second;
}

u32 Assembler::destination(const Operand& operand) {
  Register found;
  if (operand.kind != Operand::name || !names_.find(operand.text, found)) {
    if (operand.text == "_") {
      return code_.num_registers++;
    }
    unknown("no register " + string(operand.text));
  }
  if (found.type == Type::pred) {
    unknown("a predicate in place of a number");
  }
  code_.used.push_back(2 * found.index + 1);
  return found.index;
}

u32 Assembler::source(const Operand& operand) {
  if (operand.kind == Operand::number) {
    return constant(operand.bits);
  }
  if (operand.kind != Operand::name || operand.negated) {
    unknown("an operand that is not a number");
  }
  if (Register found; names_.find(operand.text, found)) {
    if (found.type == Type::pred) {
      unknown("a predicate in place of a number");
    }
    code_.used.push_back(2 * found.index);
    return found.index;
  }
  if (operand.text == "WARP_SZ") {
    return constant(32);
  }
  if (operand.text[0] == '%') {
    return special(operand.text);
  }
  const size_t plus = operand.text.find('+');
  const u64 offset = plus == string_view::npos ? 0 : number_from(trimmed(operand.text.substr(plus + 1)));
  const Symbol* symbol = names_.symbol(trimmed(operand.text.substr(0, plus)));
  if (symbol == nullptr) {
    unknown("no symbol " + string(operand.text));
  }
  return constant(symbol->address + offset);
}

u32 Assembler::address(const Operand& operand) {
  if (operand.kind != Operand::address || operand.text.empty()) {
    unknown("the operand is not an address");
  }
  i.offset = operand.offset;
  Operand base;
  base.text = operand.text;
  if (is_digit(operand.text[0])) {
    base.kind = Operand::number;
    base.bits = number_from(operand.text);
  }
  return source(base);
}

u32 Assembler::predicate(const Operand& operand) {
  if (operand.kind == Operand::number) {
    return operand.bits != 0 ? 1 : 0;
  }
  if (Register found; names_.find(operand.text, found) && found.type == Type::pred) {
    return found.index;
  }
  if (operand.text == "_") {
    return scratch_predicate();
  }
  unknown("no predicate " + string(operand.text));
}

void Assembler::written(const Operand& operand) {
  i.has_p1 = operand.kind == Operand::pair;
  i.d[0] = destination(i.has_p1 ? operand.parts[0] : operand);
  if (i.has_p1) {
    i.p[1] = predicate(operand.parts[1]);
  }
}

void Assembler::third_predicate(const Operand& operand) {
  i.p[2] = predicate(operand);
  i.p2_not = operand.negated;
}

// ---- A statement ----------------------------------------------------------------------------------------------------

void Assembler::read_guard(string_view& text) {
  if (text[0] != '@') {
    return;
  }
  text.remove_prefix(1);
  const Operand guard = operand_from(take_word(text));
  i.guard = static_cast<int>(predicate(guard));
  i.guard_not = guard.negated;
}

void Assembler::read(string_view text) {
  i = Instruction();
  i.text = text;
  i.used = static_cast<u32>(code_.used.size());
  o.clear();
  read_guard(text);
  words = name_parts(take_word(text));
  op = words[0];
  words.erase(words.begin());
  if (!text.empty()) {
    for (const string_view operand : split(text, ',')) {
      o.push_back(operand_from(operand));
    }
  }
  const auto found = all_instructions().find(op);
  if (found == all_instructions().end()) {
    unknown("the instruction is not known");
  }
  found->second(*this);
  i.used_end = static_cast<u32>(code_.used.size());
  code_.instructions.push_back(i);
}

} // namespace ptx
