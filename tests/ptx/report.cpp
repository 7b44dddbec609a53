// The report of a launch: one line of JSON.
#include "warp.h"

#include <algorithm>
#include <sstream>

namespace ptx {

namespace {

const char* const kClassNames[] = {"fp32",         "fp32_minmaxabsneg",
                                   "fp64",         "fp64_minmaxabsneg",
                                   "half",         "division_sqrt",
                                   "special",      "integer",
                                   "logic_shift",  "compare_select",
                                   "convert",      "move",
                                   "shuffle",      "vote",
                                   "barrier",      "fence",
                                   "atomic",       "global_load",
                                   "global_store", "shared_load",
                                   "shared_store", "local_load",
                                   "local_store",  "param_load",
                                   "const_load",   "control"};
static_assert(sizeof(kClassNames) / sizeof(kClassNames[0]) == num_classes);

string quoted(string_view text) {
  string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
    }
    out += c == '\n' || c == '\t' ? ' ' : c;
  }
  return out + "\"";
}

// Numbers or lists, separated by commas.
class List {
 public:
  template <class T>
  List& add(const T& item) {
    out_ << comma_ << item;
    comma_ = ", ";
    return *this;
  }
  template <class T>
  List& add(string_view name, const T& item) {
    add(quoted(name));
    out_ << ": " << item;
    return *this;
  }
  string in(const char* brackets) const {
    return brackets[0] + out_.str() + brackets[1];
  }

 private:
  std::ostringstream out_;
  const char* comma_ = "";
};

struct Totals {
  u64 classes[num_classes] = {}, bytes[num_classes] = {};
  u64 issued = 0, lanes = 0, diverged = 0, loaded = 0, stored = 0, conflicts = 0, generic_param = 0;
};

Totals totals_of(const Launch& launch) {
  Totals sum;
  for (size_t k = 0; k < launch.counts.size(); ++k) {
    const Instruction& i = launch.code.instructions[k];
    const Counts& of = launch.counts[k];
    sum.issued += of.issued;
    sum.lanes += of.lanes;
    sum.diverged += of.diverged;
    sum.conflicts += of.conflicts;
    sum.generic_param += of.in_param;
    const bool stores = i.kind == global_store;
    const u64 elsewhere = of.in_param + of.in_shared + of.in_local;
    sum.classes[i.kind] += of.issued - elsewhere;
    sum.classes[param_load] += of.in_param;
    sum.classes[stores ? shared_store : shared_load] += of.in_shared;
    sum.classes[stores ? local_store : local_load] += of.in_local;
    if (of.issued != elsewhere || of.in_param == 0) {
      sum.bytes[i.kind] += of.bytes;
    }
    (i.kind == global_load ? sum.loaded : sum.stored) += of.sectors;
  }
  return sum;
}

string opcodes_of(const Launch& launch) {
  std::map<string_view, u64> opcodes;
  for (size_t k = 0; k < launch.counts.size(); ++k) {
    string_view text = launch.code.instructions[k].text;
    if (text[0] == '@') {
      text.remove_prefix(std::min(text.find_first_of(" \t"), text.size()));
      text.remove_prefix(std::min(text.find_first_not_of(" \t"), text.size()));
    }
    if (launch.counts[k].issued != 0) {
      opcodes[text.substr(0, text.find_first_of(" \t"))] += launch.counts[k].issued;
    }
  }
  List list;
  for (const auto& [name, count] : opcodes) {
    list.add(name, count);
  }
  return list.in("{}");
}

// A list of [line of the PTX, times issued].
string lines_of(const Launch& launch) {
  const string& text = launch.kernel.module->text;
  const char* at = text.data();
  size_t line = 1;
  List list;
  for (size_t k = 0; k < launch.counts.size(); ++k) {
    const char* const here = launch.code.instructions[k].text.data();
    if (launch.counts[k].issued != 0 && here >= at && here < text.data() + text.size()) { // not an appended `ret`
      line += static_cast<size_t>(std::count(at, here, '\n'));
      at = here;
      list.add(List().add(line).add(launch.counts[k].issued).in("[]"));
    }
  }
  return list.in("[]");
}

// A list of [first instruction, number of instructions, times issued, [their text]].
string blocks_of(const Launch& launch) {
  const std::vector<Instruction>& all = launch.code.instructions;
  List list;
  for (size_t k = 0, end; k < all.size(); k = end) {
    List texts;
    for (end = k; end < all.size() && all[end].block == all[k].block; ++end) {
      texts.add(quoted(all[end].text));
    }
    if (launch.counts[k].issued != 0) {
      list.add(List().add(k).add(end - k).add(launch.counts[k].issued).add(texts.in("[]")).in("[]"));
    }
  }
  return list.in("[]");
}

} // namespace

string report(const Launch& launch, bool by_line, bool by_block) {
  const Totals sum = totals_of(launch);
  List classes, line;
  for (int k = 0; k < num_classes; ++k) {
    if (sum.classes[k] != 0) {
      classes.add(kClassNames[k], sum.classes[k]);
    }
  }
  line.add("kernel", quoted(launch.kernel.readable)).add("entry", quoted(launch.kernel.name));
  line.add("grid", launch.blocks).add("block", launch.threads).add("warp_instructions", sum.issued);
  line.add("lanes", sum.issued == 0 ? 0.0 : static_cast<double>(sum.lanes) / static_cast<double>(sum.issued));
  line.add("divergent_branches", sum.diverged).add("load_sectors", sum.loaded).add("store_sectors", sum.stored);
  line.add("bytes_loaded", sum.bytes[global_load]).add("bytes_stored", sum.bytes[global_store]);
  line.add("memory_loaded", launch.loaded.bytes()).add("memory_stored", launch.stored.bytes());
  line.add("shared_conflicts", sum.conflicts).add("generic_param_loads", sum.generic_param);
  line.add("classes", classes.in("{}")).add("opcodes", opcodes_of(launch));
  if (by_line) {
    line.add("lines", lines_of(launch));
  }
  if (by_block) {
    line.add("blocks", blocks_of(launch));
  }
  return line.in("{}") + "\n";
}

} // namespace ptx
