// Reading a module: its variables, its kernels, and their statements.
#include "assembler.h"

#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <list>

namespace ptx {

namespace {

constexpr size_t kLargestShared = 48 * 1024; // static shared memory of a block, in bytes

bool is_name(char c) {
  return isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' || c == '.';
}

size_t align(size_t offset, size_t alignment) {
  return (offset + alignment - 1) / alignment * alignment;
}

// Removes the text from `opens` to `closes`, both included, except line ends.
string without(string_view text, string_view opens, string_view closes) {
  string out;
  out.reserve(text.size());
  for (size_t at; (at = text.find(opens)) != string_view::npos;) {
    const size_t close = text.find(closes, at), end = close == string_view::npos ? text.size() : close + closes.size();
    out += text.substr(0, at);
    out.append(static_cast<size_t>(std::count(text.begin() + at, text.begin() + end, '\n')), '\n');
    text.remove_prefix(end);
  }
  return out += text;
}

// `void gradscale::(anonymous namespace)::kernel<float>(gradscale::Table)` becomes `gradscale::kernel<float>`.
string readable_name(const string& mangled) {
  int status = 0;
  char* text = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
  string name = status == 0 ? text : mangled;
  free(text);
  for (const string_view part : {"(anonymous namespace)::", "void "}) {
    for (size_t at = name.find(part); at != string::npos; at = name.find(part)) {
      name.erase(at, part.size());
    }
  }
  int depth = 0;
  for (size_t k = !name.empty() && name.back() == ')' ? name.size() : 0; k-- > 0;) {
    depth += name[k] == ')' ? 1 : name[k] == '(' ? -1 : 0;
    if (depth == 0) {
      return name.substr(0, k);
    }
  }
  return name;
}

size_t end_of(string_view text, size_t open, char opens, char closes) {
  int depth = 0;
  for (size_t k = open; k < text.size(); ++k) {
    depth += text[k] == opens ? 1 : text[k] == closes ? -1 : 0;
    if (depth == 0) {
      return k;
    }
  }
  fail("a bracket is not closed");
}

// ---- Variables ------------------------------------------------------------------------------------------------------

struct Variable {
  string_view name, values;
  Type type = Type::b8;
  size_t alignment = 1, bytes = 0, count = 1;
  Space space = Space::param;
};

std::vector<string_view> words_of(string_view text) {
  std::vector<string_view> words;
  for (text = trimmed(text); !text.empty(); text = trimmed(text)) {
    const size_t end = std::min(text.find_first_of(" \t\r\n"), text.size());
    words.push_back(text.substr(0, end));
    text.remove_prefix(end);
  }
  return words;
}

// .shared .align 16 .b8 name[1024]; .param .u64 .ptr .global .align 8 name; .global .b32 name[2] = {1, 2}
Variable variable_from(string_view text) {
  static const std::unordered_map<string_view, Space> spaces = {
      {".shared", Space::shared},
      {".local", Space::local},
      {".param", Space::param},
      {".global", Space::global},
      {".const", Space::constant}};
  Variable variable;
  if (const size_t equals = text.find('='); equals != string_view::npos) {
    variable.values = trimmed(text.substr(equals + 1));
    text = text.substr(0, equals);
  }
  size_t alignment = 0;
  bool points = false; // after .ptr: the words describe the memory that the parameter points to
  const std::vector<string_view> words = words_of(text);
  for (size_t k = 0; k < words.size(); ++k) {
    const string_view word = words[k];
    if (word == ".align" && k + 1 < words.size()) {
      alignment = points ? alignment : number_from(words[++k]);
      k += points;
    } else if (const auto space = spaces.find(word); space != spaces.end()) {
      variable.space = points ? variable.space : space->second;
    } else if (word[0] == '.' && type_of(word.substr(1)) != Type::none) {
      variable.type = type_of(word.substr(1));
    } else if (word[0] != '.') {
      variable.name = word;
    }
    points = points || word == ".ptr";
  }
  for (size_t open = variable.name.find('['); open != string_view::npos; open = variable.name.find('[', open + 1)) {
    const string_view size = variable.name.substr(open + 1, variable.name.find(']', open) - open - 1);
    variable.count *= size.empty() ? 0 : number_from(size);
  }
  variable.name = variable.name.substr(0, variable.name.find('['));
  variable.bytes = bytes_of(variable.type) * variable.count;
  variable.alignment = std::max(alignment, bytes_of(variable.type));
  return variable;
}

// A number, or the address of a variable that was read before: name, generic(name).
u64 value_from(const Module& module, string_view text) {
  const string_view name = text.starts_with("generic(") ? text.substr(8, text.find(')') - 8) : text;
  const auto symbol = module.symbols.find(name);
  return symbol == module.symbols.end() ? number_from(text) : symbol->second.address;
}

void read_variable(Module& module, string_view text) {
  const Variable variable = variable_from(text);
  if (variable.count == 0) {
    fail("dynamic shared memory is not supported: " + string(text));
  }
  if (variable.space == Space::shared) {
    const u64 begin = module.shared.add(variable.bytes, variable.alignment);
    module.symbols[string(variable.name)] = {Space::shared, begin};
    return;
  }
  module.memory.emplace_back(new char[variable.bytes + 256]());
  char* begin = module.memory.back().get();
  begin += (256 - reinterpret_cast<u64>(begin) % 256) % 256;
  const size_t size = bytes_of(variable.type);
  if (const string_view values = variable.values; !values.empty()) {
    const bool list = values[0] == '{';
    const auto items = list ? split(values.substr(1, values.rfind('}') - 1), ',') : std::vector<string_view>{values};
    for (size_t k = 0; k < std::min(items.size(), variable.count); ++k) {
      const u64 bits = value_from(module, items[k]);
      memcpy(begin + k * size, &bits, size);
    }
  }
  module.symbols[string(variable.name)] = {variable.space, reinterpret_cast<u64>(begin)};
}

// ---- Statements of a kernel -----------------------------------------------------------------------------------------

class Body {
 public:
  Body(const Kernel& kernel, Code& code)
      : kernel_(kernel), code_(code), names_(*kernel.module, code), assembler_(kernel, code, names_, branches_) {
    for (const Parameter& parameter : kernel.parameters) {
      names_.add(parameter.name, {Space::param, parameter.offset});
    }
    code_.shared = kernel.module->shared;
  }

  void read() {
    string_view rest = kernel_.body;
    names_.enter();
    for (rest = trimmed(rest); !rest.empty();
         rest = rest.substr(std::min(rest.find_first_not_of(" \t\r\n"), rest.size()))) {
      rest.remove_prefix(read_one(rest));
    }
    close();
  }

 private:
  // Reads the first item of the text, and returns its number of characters.
  size_t read_one(string_view text) {
    if (text[0] == '{' || text[0] == '}') {
      text[0] == '{' ? names_.enter() : names_.leave();
      return 1;
    }
    if (text.starts_with(".loc")) {
      return std::min(text.find('\n'), text.size());
    }
    size_t end = 0;
    while (end < text.size() && is_name(text[end])) {
      ++end;
    }
    if (end < text.size() && text[end] == ':') {
      last_label_ = text.substr(0, end);
      labels_[last_label_] = static_cast<int>(code_.instructions.size());
      return end + 1;
    }
    end = text.find(';');
    if (end == string_view::npos) {
      fail("a statement of " + kernel_.readable + " does not end: " + string(text.substr(0, 80)));
    }
    statement(trimmed(text.substr(0, end)));
    return end + 1;
  }

  void statement(string_view text) {
    if (text.starts_with(".reg")) {
      names_.declare(text);
    } else if (text.starts_with(".branchtargets")) {
      tables_[last_label_] = split(text.substr(14), ',');
    } else if (text.starts_with(".shared")) {
      const Variable variable = variable_from(text);
      names_.add(variable.name, {Space::shared, code_.shared.add(variable.bytes, variable.alignment)});
    } else if (text.starts_with(".local")) {
      const Variable variable = variable_from(text);
      code_.local_bytes = align(code_.local_bytes, variable.alignment);
      names_.add(variable.name, {Space::local, code_.local_bytes});
      code_.local_bytes += variable.bytes;
    } else if (text.starts_with(".") && !text.starts_with(".pragma")) {
      fail("kernel " + kernel_.readable + ": the directive is not known: " + string(text));
    } else if (!text.empty() && text[0] != '.') {
      assembler_.read(text);
    }
  }

  int label(string_view name) const {
    const auto found = labels_.find(name);
    if (found == labels_.end() || found->second >= static_cast<int>(code_.instructions.size())) {
      fail("kernel " + kernel_.readable + ": no label " + string(name));
    }
    return found->second;
  }

  // Appends a return if there is none at the end, and finds the targets of the branches.
  void close() {
    if (code_.instructions.empty() || code_.instructions.back().flow != Flow::ret) {
      assembler_.read("ret");
    }
    for (const Branch& branch : branches_) {
      Instruction& i = code_.instructions[branch.at];
      if (i.flow == Flow::table) {
        i.table = static_cast<int>(code_.tables.size());
        code_.tables.emplace_back();
        for (const string_view target : tables_.at(branch.label)) {
          code_.tables.back().push_back(label(target));
        }
      } else {
        i.target = label(branch.label);
      }
    }
    find_meetings(code_);
  }

  const Kernel& kernel_;
  Code& code_;
  Names names_;
  std::vector<Branch> branches_;
  Assembler assembler_;
  std::unordered_map<string_view, int> labels_;
  std::unordered_map<string_view, std::vector<string_view>> tables_;
  string_view last_label_;
};

// ---- The module -----------------------------------------------------------------------------------------------------

void read_parameters(Kernel& kernel, string_view text) {
  for (const string_view parameter : split(text, ',')) {
    const Variable variable = variable_from(parameter);
    kernel.parameter_bytes = align(kernel.parameter_bytes, variable.alignment);
    kernel.parameters.push_back({string(variable.name), kernel.parameter_bytes, variable.bytes});
    kernel.parameter_bytes += variable.bytes;
  }
}

// Reads the largest number of threads of a block: the product in `.maxntid 128, 1, 1` or `.reqntid`.
void read_bounds(Kernel& kernel, string_view text) {
  for (const string_view name : {".maxntid", ".reqntid"}) {
    if (const size_t at = text.find(name); at != string_view::npos) {
      const string_view rest = text.substr(at + name.size());
      kernel.max_threads = 1;
      for (const string_view number : split(rest.substr(0, rest.find_first_of("\n.")), ',')) {
        kernel.max_threads *= static_cast<unsigned>(number_from(number));
      }
    }
  }
}

// Reads a kernel whose `.entry` is at `at`, and returns where it ends.
size_t read_kernel(Module& module, size_t at) {
  const string_view text = module.text;
  const size_t open = text.find('(', at);
  if (open == string_view::npos) {
    fail("a kernel has no parameters");
  }
  const size_t close = end_of(text, open, '(', ')'), begin = text.find('{', close);
  if (begin == string_view::npos) {
    fail("a kernel has no body");
  }
  const size_t end = end_of(text, begin, '{', '}');
  const string name(trimmed(text.substr(at + 6, open - at - 6)));
  Kernel& kernel = module.kernels[name];
  kernel.module = &module;
  kernel.name = name;
  kernel.readable = readable_name(name);
  kernel.body = text.substr(begin + 1, end - begin - 1);
  read_parameters(kernel, text.substr(open + 1, close - open - 1));
  read_bounds(kernel, text.substr(close + 1, begin - close - 1));
  return end + 1;
}

// ---- Kernels whose instructions are in memory -----------------------------------------------------------------------

constexpr size_t kMostInstructions = 400'000; // about 80 MB

std::list<Kernel*>& recent() {                   // most recently used first
  static auto* kernels = new std::list<Kernel*>; // outlives all modules
  return *kernels;
}

void make_room() {
  size_t sum = 0;
  auto kernel = recent().begin();
  for (; kernel != recent().end(); ++kernel) {
    sum += (*kernel)->code->instructions.size();
    if (sum > kMostInstructions && kernel != recent().begin()) {
      break;
    }
  }
  for (auto old = kernel; old != recent().end(); ++old) {
    (*old)->code.reset();
  }
  recent().erase(kernel, recent().end());
}

} // namespace

u64 SharedMemory::add(size_t bytes, size_t alignment) {
  const size_t begin = align(used, alignment) + (arrays.size() + 1) * kGuard;
  used = align(used, alignment) + bytes;
  arrays.push_back({begin, bytes});
  return begin;
}

Kernel::~Kernel() {
  recent().remove(this);
}

Code& code_of(Kernel& kernel) {
  recent().remove(&kernel);
  if (!kernel.code) {
    auto code = std::make_unique<Code>();
    Body(kernel, *code).read();
    kernel.shared_bytes = code->shared.used;
    kernel.local_bytes = code->local_bytes;
    if (kernel.shared_bytes > kLargestShared) {
      fail(kernel.readable + " uses " + std::to_string(kernel.shared_bytes) + " bytes of shared memory");
    }
    kernel.code = std::move(code);
  }
  recent().push_front(&kernel);
  make_room();
  return *kernel.code;
}

std::unique_ptr<Module> read_module(string_view whole) {
  auto module = std::make_unique<Module>();
  module->text = without(without(without(whole, "//", "\n"), "/*", "*/"), "\t.section", "}"); // no debug sections
  const string_view text = module->text;
  for (size_t at = 0; (at = text.find_first_not_of(" \t\r\n", at)) != string_view::npos;) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const string_view line = text.substr(at, end - at);
    const auto names = [&](string_view word) { return line.find(word) != string_view::npos; };
    if (const size_t entry = line.find(".entry"); entry != string_view::npos) {
      at = read_kernel(*module, at + entry);
    } else if (names(".func")) {
      fail("a function that is not inlined is not supported: " + string(line));
    } else if (names(".global") || names(".const") || names(".shared")) {
      const size_t close = text.find(';', at);
      if (close == string_view::npos) {
        fail("a variable does not end: " + string(line));
      }
      read_variable(*module, text.substr(at, close - at));
      at = close + 1;
    } else {
      at = end;
    }
  }
  for (auto& [name, kernel] : module->kernels) {
    code_of(kernel);
  }
  return module;
}

} // namespace ptx
