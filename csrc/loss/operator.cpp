// The loss as a registered operator, which torch.compile and export keep in their graphs. The predictions of all heads
// are one list, with a count for each field of each head: the number of its tensors, 0 for one tensor with a step
// dimension, or -2 for one that was expanded from a tensor without dimensions of samples and steps. The targets are
// another such list, with a count of -1 for no target or a field that was left out. The heads are passed as records
// (see Heads in call.h).
//
// A number of a head that changes between the calls of a compiled function is a tensor of the graph: the overload
// "varying" has one more argument, a list of scalars on the CPU, and each of them replaces a NaN in the record. A CUDA
// graph would keep the first values.
//
// Returns the tensors of GRADSCALE_OUTPUTS, and then the gradients of the predictions in `wants`, for a grad_output of
// 1. All gradients of one dtype are in one tensor, so that a compiler multiplies them in one loop. Only the loss has a
// gradient function; autograd fills in `wants`.
#include "../torch/arguments.h"
#include "../torch/gradient_pool.h"
#include "../torch/refusal.h"
#include "backward.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace gradscale {

// ---- The arguments that are options ---------------------------------------------------------------------------------

template <class T>
const char* schema_type(const ByHead<T>&) {
  return "Tensor?[]";
}

inline void read_argument(const char* name, const c10::IValue& given, StepNumbers& numbers) {
  read_argument(name, given, numbers.tensor);
}
inline void read_argument(const char* name, const c10::IValue& given, HeadWeight& weight) {
  read_argument(name, given, weight.tensor);
  weight.wants_gradient = weight.tensor.defined();
}
inline void read_argument(const char* name, const c10::IValue& given, NumEntries& entries) {
  read_argument(name, given, entries.tensor);
}
template <class T>
void read_argument(const char* name, const c10::IValue& given, ByHead<T>& by_head) {
  for (const c10::IValue& value : given.toListRef()) { // the dispatcher leaves their lazy negation
    read_argument(name, value.isTensor() ? value.toTensor().resolve_neg() : value, by_head.values.emplace_back());
  }
}

namespace {

// Positions of the operator's arguments; the options follow.
enum Argument { kPredictions, kTargets, kPredictionCounts, kTargetCounts, kHeadNames, kHeadNumbers, kWants, kOptions };

constexpr auto kHeadWeights = static_cast<size_t>(Option::head_weights);

std::string schema(const std::string& overload, const std::string& last) {
  std::string schema = "multi_step_loss" + overload +
                       "(Tensor[] predictions, Tensor[] targets, int[] prediction_counts, int[] target_counts, "
                       "str[] names, float[] numbers, int[] wants, ";
  const Options options;
  Options::each(options, SchemaWriter{schema});
  return schema + last + ") -> Tensor[]";
}

// Reads the record of the heads. A tracer has no values of the numbers that vary, and no size depends on them: each is
// replaced by 2, which all of them may be.
Heads heads_from(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> given) {
  std::vector<double> numbers = given[kHeadNumbers].toDoubleVector();
  const Tensors varying = op.schema().overload_name() == "varying" ? given.back().toTensorVector() : Tensors();
  size_t next = 0;
  for (double& number : numbers) {
    if (std::isnan(number) && next < varying.size()) {
      const at::Tensor& own = varying[next++];
      number = own.is_meta() ? 2 : own.item<double>();
    }
  }
  TORCH_CHECK(next == varying.size(), "multi_step_loss: there are more varying numbers than NaN in the record");
  return {given[kHeadNames].to<std::vector<std::string>>(), numbers};
}

constexpr int64_t kStacked = 0, kNone = -1, kShared = -2; // counts that are no numbers of tensors

// Splits a list of tensors into entries, with a list for each.
std::vector<std::vector<Entries>> entries_from(
    const c10::IValue& list, const std::vector<int64_t>& counts, bool has_steps) {
  const Tensors tensors = list.toTensorVector();
  std::vector<std::vector<Entries>> all;
  size_t next = 0;
  for (const int64_t count : counts) {
    const bool is_one = count == kStacked || count == kShared;
    const size_t end = next + (is_one ? 1 : std::max<int64_t>(count, 0));
    TORCH_CHECK(end <= tensors.size(), "multi_step_loss: the counts add up to more tensors than the list has");
    Entries entries{{tensors.begin() + next, tensors.begin() + end}, is_one && has_steps, count == kShared};
    entries.stacked = entries.stacked && !entries.sums_gradient();
    all.push_back({std::move(entries)});
    next = end;
  }
  TORCH_CHECK(next == tensors.size(), "multi_step_loss: the counts add up to fewer tensors than the list has");
  return all;
}

// Joins the entries of each head's fields.
std::vector<std::vector<Entries>> by_head(
    const std::vector<std::vector<Entries>>& all,
    const Heads& heads,
    const std::vector<const char*> KindOfHead::* names) {
  std::vector<std::vector<Entries>> result(heads.size());
  size_t next = 0;
  for (size_t h = 0; h < heads.size(); ++h) {
    const size_t count = Heads::num_fields(heads.kind(h).*names);
    TORCH_CHECK(all.size() - next >= count, "multi_step_loss: there are fewer counts than fields");
    for (size_t i = 0; i < count; ++i) {
      result[h].push_back(all[next++][0]);
    }
  }
  TORCH_CHECK(next == all.size(), "multi_step_loss: there are more counts than fields");
  return result;
}

// Reads a call from the operator's arguments. Each field is a head of its own, because the numbers of heads, which a
// tracer may not have, are not read.
Call call_from(at::ArrayRef<c10::IValue> given) {
  Call call;
  Options::each(call, ArgumentReader{&given[kOptions]});
  call.predictions = entries_from(given[kPredictions], given[kPredictionCounts].toIntVector(), call.steps);
  call.targets = entries_from(given[kTargets], given[kTargetCounts].toIntVector(), call.steps);
  const auto count = static_cast<int64_t>(given[kPredictions].toListRef().size());
  call.wants.resize(count);
  for (const int64_t index : given[kWants].toIntVector()) {
    TORCH_CHECK(index >= 0 && index < count, "multi_step_loss: wants must be indices of predictions");
    call.wants[index] = true;
  }
  return call;
}

// The same with the fields of each head together.
Call call_from(at::ArrayRef<c10::IValue> given, const Heads& heads) {
  Call call = call_from(given);
  call.heads = &heads;
  call.predictions = by_head(call.predictions, heads, &KindOfHead::prediction);
  call.targets = by_head(call.targets, heads, &KindOfHead::target);
  return call;
}

// ---- The kernels ----------------------------------------------------------------------------------------------------

void append(Tensors& list, const at::Tensor& tensor) {
  list.push_back(tensor);
}
void append(Tensors& list, const Tensors& by_head) { // without undefined tensors
  std::copy_if(by_head.begin(), by_head.end(), std::back_inserter(list), [](const at::Tensor& tensor) {
    return tensor.defined();
  });
}

template <class Function>
void run_or_raise(Function function) {
  try {
    function();
  } catch (const Refusal& refusal) {
    TORCH_CHECK_VALUE(false, "gradscale_ext::multi_step_loss: ", refusal.argument, " ", refusal.problem);
  }
}

Tensors results_of(const Call& call, const Layout& layout) {
  Tensors results;
  Outputs::each(call.outputs, [&](const char*, const auto& output) { append(results, output); });
  for (const JoinedGradients& joined : layout.joined) {
    results.push_back(joined.data);
  }
  return results;
}

void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const at::ArrayRef<c10::IValue> given = arguments_of(op, *stack);
  const Heads heads = heads_from(op, given);
  Call call = call_from(given, heads);
  Layout layout(call);
  const c10::Device device = given[kPredictions].toTensorVector().at(0).device();
  begin_pooled_call(device);
  for (JoinedGradients& joined : layout.joined) {
    joined.data = empty_pooled({joined.size.expect_int()}, at::TensorOptions(device).dtype(joined.data_type()));
  }
  call.gradients.resize(call.wants.size());
  for (const Gradient& gradient : layout.gradients) {
    call.gradients[gradient.prediction] = gradient.in(layout.joined);
  }
  run_or_raise([&] {
    call.check();
    run(call);
  });
  return_from(op, *stack, results_of(call, layout));
}

// The results without values, for tracers.
void meta_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const at::ArrayRef<c10::IValue> given = arguments_of(op, *stack);
  const Heads heads = heads_from(op, given);
  Call call = call_from(given, heads);
  Layout layout(call);
  run_or_raise([&] { call.trace_outputs(); });
  for (JoinedGradients& joined : layout.joined) {
    joined.data = at::empty_symint({joined.size}, call.sum_options.dtype(joined.data_type()));
  }
  return_from(op, *stack, results_of(call, layout));
}

void autograd_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  c10::IValue* given = stack->data() + stack->size() - count;
  const Tensors predictions = given[kPredictions].toTensorVector();
  const auto requires_grad = [](const at::Tensor& tensor) { return tensor.requires_grad(); };
  const auto has_tangent = [](const at::Tensor& tensor) { return tensor._fw_grad(/*level=*/0).defined(); };
  Tensors differentiable = predictions;
  const auto head_weights = given[kOptions + kHeadWeights].toListRef();
  for (const c10::IValue& weight : head_weights) {
    if (!weight.isNone()) {
      differentiable.push_back(weight.toTensor());
    }
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      !inside_transform() && std::none_of(differentiable.begin(), differentiable.end(), has_tangent),
      "gradscale_ext::multi_step_loss: torch.func transforms and forward mode need gradscale_ext.multi_step_loss, "
      "which uses plain PyTorch for them");
  const bool records =
      at::GradMode::is_enabled() && std::any_of(differentiable.begin(), differentiable.end(), requires_grad);
  std::vector<int64_t> wants = given[kWants].toIntVector();
  for (size_t i = 0; i < predictions.size() && records; ++i) {
    const auto index = static_cast<int64_t>(i);
    if (predictions[i].requires_grad() && std::find(wants.begin(), wants.end(), index) == wants.end()) {
      wants.push_back(index);
    }
  }
  given[kWants] = wants;
  std::optional<Layout> layout;
  if (records) {
    layout.emplace(call_from(at::ArrayRef<c10::IValue>(given, count)));
  }
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    op.callBoxed(stack);
  }
  if (!records) {
    return;
  }
  const Tensors results = stack->back().toTensorVector();
  size_t next = results.size() - layout->joined.size(); // gradients come last
  for (JoinedGradients& joined : layout->joined) {
    joined.data = results[next++];
  }
  Tensors shares; // of the head weights that are tensors; undefined where one gets no gradient
  next = results.size() - layout->joined.size() - (differentiable.size() - predictions.size()); // before the gradients
  for (size_t i = predictions.size(); i < differentiable.size(); ++i, ++next) {
    shares.push_back(differentiable[i].requires_grad() ? results[next] : at::Tensor());
  }
  record_operator(results.front(), differentiable, std::move(*layout), std::move(shares));
}

constexpr std::array<const char*, 2> names{"multi_step_loss", "multi_step_loss.varying"};

} // namespace

TORCH_LIBRARY_FRAGMENT(gradscale_ext, m) {
  m.def(torch::schema(schema("", "").c_str()));
  m.def(torch::schema(schema(".varying", ", Tensor[] varying").c_str()), {at::Tag::cudagraph_unsafe});
}

TORCH_LIBRARY_IMPL(gradscale_ext, CPU, m) {
  for (const char* name : names) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&kernel>());
  }
}

TORCH_LIBRARY_IMPL(gradscale_ext, CUDA, m) {
  for (const char* name : names) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&kernel>());
  }
}

TORCH_LIBRARY_IMPL(gradscale_ext, Meta, m) {
  for (const char* name : names) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&meta_kernel>());
  }
}

TORCH_LIBRARY_IMPL(gradscale_ext, Autograd, m) {
  for (const char* name : names) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autograd_kernel>());
  }
}

} // namespace gradscale
