// The loss as a registered operator, which the compiler and export keep in their graphs. The entries of all heads come
// in one list, with a count for each head: how many tensors its prediction or target is, 0 for one with a step
// dimension, -1 for no target. The heads come as records (see heads.h).
//
// Returns the tensors of GRADSCALE_OUTPUTS one after the other, and for every prediction tensor in `wants` its gradient
// for grad_output 1. Only the loss has a gradient function; autograd fills in `wants`.
#include "../host/context.h"
#include "backward.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

namespace gradscale {

namespace {

// Places of the operator's arguments; the options follow.
enum Argument { kPredictions, kTargets, kPredictionCounts, kTargetCounts, kHeadNames, kHeadNumbers, kWants, kOptions };

struct SchemaWriter {
  std::string& schema;

  template <class Option>
  void operator()(const char* name, const Option& option) {
    schema += std::string(", ") + type_of(option) + " " + name;
  }
  static const char* type_of(const StepNumbers&) {
    return "Tensor?";
  }
  static const char* type_of(const at::Tensor&) {
    return "Tensor?";
  }
  static const char* type_of(const Tensors&) {
    return "Tensor?[]";
  }
  static const char* type_of(bool) {
    return "bool";
  }
  template <class Choice, std::enable_if_t<std::is_enum_v<Choice>, int> = 0>
  static const char* type_of(Choice) {
    return "str";
  }
};

std::string schema() {
  std::string schema =
      "multi_step_loss(Tensor[] predictions, Tensor[] targets, int[] prediction_counts, int[] target_counts, "
      "str[] names, float[] numbers, int[] wants";
  const Options options;
  Options::each(options, SchemaWriter{schema});
  return schema + ") -> Tensor[]";
}

// Reads the options from the operator's arguments, one after the other.
struct StackReader {
  const c10::IValue* next;

  template <class Option>
  void operator()(const char* name, Option& option) {
    read(name, *next++, option);
  }
  static void read(const char*, const c10::IValue& given, at::Tensor& tensor) {
    tensor = given.isNone() ? at::Tensor() : given.toTensor();
  }
  static void read(const char* name, const c10::IValue& given, StepNumbers& numbers) {
    read(name, given, numbers.tensor);
  }
  static void read(const char*, const c10::IValue& given, Tensors& tensors) {
    for (const c10::IValue& tensor : given.toListRef()) {
      tensors.push_back(tensor.isNone() ? at::Tensor() : tensor.toTensor());
    }
  }
  static void read(const char*, const c10::IValue& given, bool& flag) {
    flag = given.toBool();
  }
  template <class Choice, std::enable_if_t<std::is_enum_v<Choice>, int> = 0>
  static void read(const char* name, const c10::IValue& given, Choice& choice) {
    const auto names = names_of(choice);
    const auto found = std::find(names.begin(), names.end(), given.toStringRef());
    TORCH_CHECK_VALUE(found != names.end(), "multi_step_loss: unknown ", name, " '", given.toStringRef(), "'");
    choice = static_cast<Choice>(found - names.begin());
  }
};

// Shares a list of tensors out among the heads.
std::vector<Entries> entries_from(const c10::IValue& list, const std::vector<int64_t>& counts) {
  const Tensors tensors = list.toTensorVector();
  std::vector<Entries> of_heads;
  size_t next = 0;
  for (const int64_t count : counts) {
    Entries& entries = of_heads.emplace_back();
    entries.stacked = count == 0;
    const size_t end = next + (count < 0 ? 0 : std::max<int64_t>(count, 1));
    TORCH_CHECK(end <= tensors.size(), "multi_step_loss: the counts name more tensors than there are");
    entries.tensors.assign(tensors.begin() + next, tensors.begin() + end);
    next = end;
  }
  TORCH_CHECK(next == tensors.size(), "multi_step_loss: the counts name fewer tensors than there are");
  return of_heads;
}

// The call that the operator's arguments make.
Call call_from(at::ArrayRef<c10::IValue> given) {
  Call call;
  call.predictions = entries_from(given[kPredictions], given[kPredictionCounts].toIntVector());
  call.targets = entries_from(given[kTargets], given[kTargetCounts].toIntVector());
  Options::each(call, StackReader{&given[kOptions]});
  const std::vector<int64_t> wants = given[kWants].toIntVector();
  const auto count = static_cast<int64_t>(given[kPredictions].toListRef().size());
  TORCH_CHECK(
      std::all_of(wants.begin(), wants.end(), [=](int64_t index) { return index >= 0 && index < count; }),
      "multi_step_loss: wants must be indices of predictions");
  int64_t index = 0;
  for (const Entries& entries : call.predictions) {
    std::vector<bool>& of_head = call.wants.emplace_back();
    for (size_t i = 0; i < entries.tensors.size(); ++i) {
      of_head.push_back(std::find(wants.begin(), wants.end(), index++) != wants.end());
    }
  }
  return call;
}

// Lists outputs one after the other, by head the defined ones.
struct Lister {
  Tensors& list;

  void operator()(const char*, const at::Tensor& tensor) {
    list.push_back(tensor);
  }
  void operator()(const char*, const Tensors& tensors) {
    std::copy_if(tensors.begin(), tensors.end(), std::back_inserter(list), [](const at::Tensor& tensor) {
      return tensor.defined();
    });
  }
};

void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const at::ArrayRef<c10::IValue> given = torch::jit::last(*stack, count);
  const Heads heads(given[kHeadNames].to<std::vector<std::string>>(), given[kHeadNumbers].toDoubleVector());
  Call call = call_from(given);
  TORCH_CHECK_VALUE(
      call.settle(heads),
      "gradscale_ext::multi_step_loss: the tensors do not fit each other and the heads; call "
      "gradscale_ext.multi_step_loss, which says what is wrong with them");
  run(call, /*wide=*/true);
  Tensors results;
  Lister add{results};
  Outputs::each(call.outputs, add);
  for (const Tensors& gradients : call.gradients) {
    add("gradients", gradients);
  }
  torch::jit::drop(*stack, count);
  torch::jit::push(*stack, std::move(results));
}

void autograd_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  c10::IValue* given = stack->data() + stack->size() - count;
  const Tensors predictions = given[kPredictions].toTensorVector();
  const auto requires_grad = [](const at::Tensor& tensor) { return tensor.requires_grad(); };
  const auto has_tangent = [](const at::Tensor& tensor) { return tensor._fw_grad(/*level=*/0).defined(); };
  TORCH_CHECK_NOT_IMPLEMENTED(
      !inside_transform() && std::none_of(predictions.begin(), predictions.end(), has_tangent),
      "gradscale_ext::multi_step_loss: torch.func transforms and forward mode need gradscale_ext.multi_step_loss, "
      "which chooses plain PyTorch for them");
  const bool records = at::GradMode::is_enabled() && std::any_of(predictions.begin(), predictions.end(), requires_grad);
  std::vector<int64_t> wants = given[kWants].toIntVector();
  for (size_t i = 0; i < predictions.size() && records; ++i) {
    if (predictions[i].requires_grad()) {
      wants.push_back(static_cast<int64_t>(i));
    }
  }
  std::sort(wants.begin(), wants.end());
  wants.erase(std::unique(wants.begin(), wants.end()), wants.end());
  given[kWants] = wants;
  Call call = records ? call_from(at::ArrayRef<c10::IValue>(given, count)) : Call();
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    op.callBoxed(stack);
  }
  if (!records) {
    return;
  }
  const Tensors results = stack->back().toTensorVector();
  size_t next = results.size() - wants.size(); // gradients come last
  for (size_t h = 0, i = 0; h < call.wants.size(); ++h) {
    Tensors& gradients = call.gradients.emplace_back();
    for (size_t k = 0; k < call.wants[h].size(); ++k, ++i) {
      const at::Tensor gradient = call.wants[h][k] ? results[next++] : at::Tensor();
      call.wants[h][k] = predictions[i].requires_grad();
      gradients.push_back(call.wants[h][k] ? gradient : at::Tensor());
    }
  }
  record_call(std::move(call), results[static_cast<size_t>(Output::loss)], nullptr);
}

} // namespace

TORCH_LIBRARY_FRAGMENT(gradscale_ext, m) {
  m.def(torch::schema(schema().c_str()));
}

TORCH_LIBRARY_IMPL(gradscale_ext, CPU, m) {
  m.impl("multi_step_loss", torch::CppFunction::makeFromBoxedFunction<&kernel>());
}

TORCH_LIBRARY_IMPL(gradscale_ext, CUDA, m) {
  m.impl("multi_step_loss", torch::CppFunction::makeFromBoxedFunction<&kernel>());
}

TORCH_LIBRARY_IMPL(gradscale_ext, Autograd, m) {
  m.impl("multi_step_loss", torch::CppFunction::makeFromBoxedFunction<&autograd_kernel>());
}

} // namespace gradscale
