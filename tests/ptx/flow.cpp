// Finds the basic blocks of a kernel, and where lanes that diverge at the end of a block reconverge: at its immediate
// post-dominator, the first block that is on every path from there to the exit.
#include "program.h"

namespace ptx {

namespace {

using Edges = std::vector<std::vector<int>>;

bool ends_block(const Instruction& i) {
  return i.flow != Flow::none && i.flow != Flow::bar;
}

std::vector<int> targets_of(const Code& code, const Instruction& i) {
  return i.table >= 0 ? code.tables[i.table] : i.target >= 0 ? std::vector<int>{i.target} : std::vector<int>();
}

// Returns the first instruction of each block, and stores in every instruction the number of its block.
std::vector<int> number_blocks(Code& code) {
  const int size = static_cast<int>(code.instructions.size());
  std::vector<char> leads(size + 1, 0);
  leads[0] = 1;
  for (int k = 0; k < size; ++k) {
    for (const int target : targets_of(code, code.instructions[k])) {
      leads[target] = 1;
    }
    leads[k + 1] |= ends_block(code.instructions[k]);
  }
  std::vector<int> first;
  for (int k = 0; k < size; ++k) {
    if (leads[k]) {
      first.push_back(k);
    }
    code.instructions[k].block = static_cast<int>(first.size()) - 1;
  }
  return first;
}

// The blocks that may follow each block. The last entry, which has none, is the exit.
Edges followers(const Code& code, const std::vector<int>& first) {
  const int blocks = static_cast<int>(first.size());
  Edges next(blocks + 1);
  for (int b = 0; b < blocks; ++b) {
    const size_t last = (b + 1 < blocks ? first[b + 1] : code.instructions.size()) - 1;
    const Instruction& i = code.instructions[last];
    for (const int target : targets_of(code, i)) {
      next[b].push_back(code.instructions[target].block);
    }
    if (i.flow == Flow::ret || i.flow == Flow::trap) {
      next[b].push_back(blocks);
    }
    if (i.guard >= 0 || !ends_block(i)) {
      next[b].push_back(b + 1);
    }
  }
  return next;
}

Edges turned_round(const Edges& edges) {
  Edges result(edges.size());
  for (size_t from = 0; from < edges.size(); ++from) {
    for (const int to : edges[from]) {
      result[to].push_back(static_cast<int>(from));
    }
  }
  return result;
}

// Nodes that can be reached from `root`, in the postorder of a depth-first search.
std::vector<int> postorder(int root, const Edges& forth) {
  std::vector<int> order;
  std::vector<char> seen(forth.size(), 0);
  std::vector<std::pair<int, size_t>> stack = {{root, 0}};
  seen[root] = 1;
  while (!stack.empty()) {
    auto& [node, k] = stack.back();
    if (k == forth[node].size()) {
      order.push_back(node);
      stack.pop_back();
    } else if (const int to = forth[node][k++]; !seen[to]) {
      seen[to] = 1;
      stack.emplace_back(to, 0);
    }
  }
  return order;
}

// Immediate dominators in the graph `forth` from `root`; `back` is its reverse (Cooper, Harvey, Kennedy).
std::vector<int> dominators(int root, const Edges& forth, const Edges& back) {
  const std::vector<int> order = postorder(root, forth);
  std::vector<int> number(forth.size(), -1), dominator(forth.size(), -1);
  for (size_t k = 0; k < order.size(); ++k) {
    number[order[k]] = static_cast<int>(k);
  }
  const auto common = [&](int a, int b) {
    while (a != b) {
      int& lower = number[a] < number[b] ? a : b;
      lower = dominator[lower];
    }
    return a;
  };
  dominator[root] = root;
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t k = order.size() - 1; k-- > 0;) {
      int found = -1;
      for (const int other : back[order[k]]) {
        if (dominator[other] >= 0) {
          found = found < 0 ? other : common(other, found);
        }
      }
      changed = changed || dominator[order[k]] != found;
      dominator[order[k]] = found;
    }
  }
  return dominator;
}

} // namespace

void find_meetings(Code& code) {
  const std::vector<int> first = number_blocks(code);
  const int blocks = static_cast<int>(first.size());
  const Edges next = followers(code, first);
  const std::vector<int> dominator = dominators(blocks, turned_round(next), next);
  for (int b = 0; b < blocks; ++b) {
    const size_t last = (b + 1 < blocks ? first[b + 1] : code.instructions.size()) - 1;
    code.instructions[last].meet = dominator[b] < 0 || dominator[b] == blocks ? -1 : first[dominator[b]];
  }
}

} // namespace ptx
