// Turns tensors into calls of the kernels, and runs them.
#include "../cuda/driver.h"
#include "../cuda/empty_tensor.h"
#include "../torch/gradient_pool.h"
#include "../torch/tensor_element.h"
#include "../torch/to_device.h"
#include "returns.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <limits>

namespace gradscale {

namespace {

constexpr int64_t kGrain = 16384; // steps that are worth a thread

// The dimension of the steps in a tensor of two dimensions.
int step_dim(bool batch_first) {
  return batch_first ? 1 : 0;
}

// A tensor with one dimension has one element per row. Dimensions of one element are broadcast.
Operand operand_of(const at::Tensor& tensor, double constant, bool batch_first) {
  if (!tensor.defined()) {
    return {nullptr, {0, 0}, Element::float32, constant};
  }
  Operand operand{tensor.const_data_ptr(), {0, 0}, element_of(tensor), 0};
  for (int dim = 0; dim < tensor.dim(); ++dim) {
    const bool is_step = tensor.dim() == 2 && dim == step_dim(batch_first);
    operand.strides[is_step ? kStep : kRow] = tensor.size(dim) == 1 ? 0 : tensor.stride(dim);
  }
  return operand;
}

// The dtype in which a call computes and returns: float64 if a tensor has it, else float32.
at::ScalarType result_dtype(std::initializer_list<const at::Tensor*> tensors) {
  const auto is_double = [](const at::Tensor* x) { return x->defined() && x->scalar_type() == at::kDouble; };
  return std::any_of(tensors.begin(), tensors.end(), is_double) ? at::kDouble : at::kFloat;
}

at::ScalarType result_dtype(const LinearCall& call) {
  const auto& [rewards, values, next_values] = call.inputs;
  return result_dtype({&rewards, &values, &next_values, &call.ratios, &call.discounts, &call.lambdas});
}

ReturnsOutput output_of(const at::Tensor& tensor, bool batch_first) {
  if (!tensor.defined()) {
    return {nullptr, {0, 0}};
  }
  const int step = step_dim(batch_first);
  return {tensor.mutable_data_ptr(), {tensor.stride(1 - step), tensor.stride(step)}};
}

// Makes a contiguous result [B, steps]. On the meta device, as for tracers, sizes may be symbols.
at::Tensor make_result(
    const c10::SymInt& rows, const c10::SymInt& steps, bool batch_first, const at::TensorOptions& options) {
  if (options.device().is_meta()) {
    return at::empty_symint({batch_first ? rows : steps, batch_first ? steps : rows}, options);
  }
  const int64_t num_rows = rows.expect_int(), num_steps = steps.expect_int();
  const std::array<int64_t, 2> sizes{batch_first ? num_rows : num_steps, batch_first ? num_steps : num_rows};
  return empty_large(sizes, options);
}

// The coefficient on this device.
at::Tensor on_device(const at::Tensor& coefficient, c10::Device device, const char* function, const char* argument) {
  return coefficient.defined() ? to_device(coefficient, device, coefficient.scalar_type(), function, argument)
                               : coefficient;
}

// True if lanes run across rows. Then steps of the rewards are not neighbours in memory, and rows are, of the rewards
// or, for [T, B], of the results.
bool goes_across(const ReturnsCall& call, bool batch_first) {
  const int64_t* strides = call.operands[kRewards].strides;
  const bool neighbours = strides[kRow] == 1 && (strides[kStep] != 1 || call.steps == 1);
  return neighbours || (!batch_first && strides[kStep] != 1);
}

// Ratios for the adjoint of Retrace, which multiplies by them: 0 in the first transition of an episode and behind a
// discount of 0, where no formula reads the given ratio, which may be inf or NaN.
at::Tensor ratios_that_are_read(const LinearCall& linear, at::Tensor discounts) {
  const int step = step_dim(linear.batch_first);
  at::Tensor ratios = linear.ratios.clone();
  if (!discounts.defined() && linear.discount == 0) {
    return ratios.zero_();
  }
  discounts = discounts.defined() ? discounts.eq(0).expand_as(ratios) : discounts;
  const int64_t later_steps = ratios.size(step) - 1;
  if (later_steps < 0) {
    return ratios;
  }
  ratios.narrow(step, 0, 1).zero_();
  at::Tensor later = ratios.narrow(step, 1, later_steps);
  for (const at::Tensor& ends :
       {linear.terminated,
        linear.truncated,
        linear.mask.defined() ? linear.mask.logical_not() : linear.mask,
        discounts}) {
    if (ends.defined()) {
      later.masked_fill_(ends.narrow(step, 0, later_steps), 0);
    }
  }
  return ratios;
}

// ---- GPUs ----------------------------------------------------------------------------------------------------------

constexpr const char* kWindowsFile = "returns/cuda/windows.cuh";

// The layout of a call's tensors, and the set of given tensors as bits: template arguments of Row in recurrences.cuh.
std::string form_of(const ReturnsCall& call) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  unsigned given = 0, bit = 1;
  int64_t stride = 0; // between steps of the first output
  for (const ReturnsOutput& output : call.outputs) {
    stride = stride == 0 && output.data != nullptr ? output.strides[kStep] : stride;
  }
  bool is_plain = stride > 0 && call.steps < kMost / stride;
  const auto add = [&](const auto& tensor, bool has_own_type) {
    if (tensor.data != nullptr) {
      given |= bit;
      is_plain = is_plain && has_own_type && tensor.strides[kStep] == stride;
    }
    bit *= 2;
  };
  for (int k = 0; k < kOperands; ++k) {
    add(call.operands[k], k >= kNumbers || call.operands[k].element == call.element);
  }
  for (const ReturnsOutput& output : call.outputs) {
    add(output, true);
  }
  for (const Operand& clip : call.clips) {
    given |= clip.data == nullptr ? 0 : bit;
    is_plain = is_plain && (clip.data == nullptr || clip.element == call.element);
    bit *= 2;
  }
  return !is_plain ? "Layout::any, " + std::to_string(bit - 1)
                   : (stride == 1 ? "Layout::runs, " : "Layout::columns, ") + std::to_string(given);
}

int64_t blocks_for(int64_t count, int64_t per_block) {
  return (count + per_block - 1) / per_block;
}

// True if there are so few rows that a block for each chunk of a row is faster than a warp for each row.
//
// A warp takes about a microsecond, the time of a load, for 128 steps of its row: 8 us for 1024 steps. Chunks take
// about 4 us for their loads, for the maps of the chunks before them (see long_rows.cuh), and for their results. For
// 264 rows, two per multiprocessor of an H200, issuing 4 warp instructions per step of a row takes about 2 us more.
//
// If neighbouring rows are adjacent in memory, a chunk reads sectors with numbers of 8 rows and uses one of the rows,
// but most sectors come from the L2 cache. The alternative, recur_across, computes 32 steps of a row at a time: for
// 1024 steps it would need 32 passes, one after the other.
bool uses_chunks(const ReturnsCall& call) {
  return call.steps >= kChunkSteps && call.rows < 2 * multiprocessors() &&
         blocks_for(call.steps, kChunkSteps) <= std::numeric_limits<int32_t>::max() / call.rows;
}

// `across`: lanes run across rows, which are adjacent in memory, instead of along the steps of a row.
void launch_returns(ReturnsCall call, bool across, const OnDevice& device) {
  const char* type = type_name(call.element);
  const int64_t bytes = element_size(call.element);
  if (has_n(call.formula)) {
    const int64_t threads = call.rows * n_step_blocks_of_row(call);
    const at::Tensor memory = device.memory(threads * 2 * n_step_block_size(call) * bytes);
    call.workspace = memory.mutable_data_ptr();
    const char* kind = call.is_adjoint                           ? "NStep::adjoint"
                       : call.formula == Formula::n_step_returns ? "NStep::returns"
                                                                 : "NStep::transitions";
    const std::string name = instance("n_step_blocks", {type, kind, across ? "true" : "false"});
    device.launch(kWindowsFile, name, blocks_for(threads, kThreads), kThreads, call);
    return;
  }
  const std::string formula = function_of(call.formula).type_name;
  const std::vector<std::string> arguments{type, call.is_adjoint ? "Adjoint<" + formula + ">" : formula, form_of(call)};
  if (uses_chunks(call)) {
    // A row of two chunks is one chunk of twice as many threads, which waits for no other block.
    const int threads = call.steps > kChunkSteps && call.steps <= 2 * kChunkSteps ? 2 * kThreads : kThreads;
    const int64_t chunks = call.rows * blocks_for(call.steps, kAhead * threads);
    const at::Tensor memory = device.memory(8 + chunks * (8 + 2 * bytes)); // a counter, and maps of two numbers
    if (chunks > call.rows) {
      memory.zero_();
    }
    call.workspace = memory.mutable_data_ptr();
    const std::string name =
        instance("recur_chunks", {type, arguments[1], arguments[2], std::to_string(threads / kWarpSize)});
    device.launch("returns/cuda/long_rows.cuh", name, chunks, threads, call);
    return;
  }
  constexpr const char* file = "returns/cuda/recurrences.cuh";
  if (across || call.steps > kWarpSize) {
    const int64_t blocks = blocks_for(call.rows, across ? kWarpSize : kWarps);
    device.launch(file, instance(across ? "recur_across" : "recur_along", arguments), blocks, kThreads, call);
    return;
  }
  // The number of steps alone decides how many lanes have a row, because the order of its sums depends on it.
  const int lanes = call.steps <= 8 ? 8 : call.steps <= 16 ? 16 : kWarpSize;
  const int64_t warps = blocks_for(call.rows, kWarpSize / lanes);
  // With at least 16 warps per multiprocessor there are enough, although each of them takes kAhead turns.
  const int turns = warps >= 16 * multiprocessors() ? kAhead : 1;
  const std::string name = instance("recur_short", {type, arguments[1], arguments[2], std::to_string(lanes)});
  device.launch(file, name, blocks_for(warps, kWarps * turns), kThreads, call);
}

// True if the length of a row is from 0 to L, and its targets read at most two players.
bool is_valid(const MuZeroCall& call, int64_t row) {
  const int64_t length = length_at(call, row);
  if (length < 0 || length > call.moves) {
    return false;
  }
  if (call.to_play.data == nullptr) {
    return true;
  }
  int64_t last = 0; // the last entry that a target reads
  for (int64_t j = 0; j <= std::min(call.unroll_steps, length); ++j) {
    last = std::max(last, j + horizon_at(call, row, j));
  }
  last = std::min(last, element_at<uint8_t>(call.terminated, row, 0) != 0 ? length - 1 : length);
  const auto player = [&](int64_t i) { return integer_at(call.to_play, row, i); };
  int64_t second = 1;
  while (second <= last && player(second) == player(0)) {
    ++second;
  }
  bool has_third = false;
  for (int64_t i = second; i <= last; ++i) {
    has_third |= player(i) != player(0) && player(i) != player(second);
  }
  return !has_third;
}

// Calls function(begin, end) for ranges of all rows, on all threads where there are many targets.
template <class Function>
void each_row(const MuZeroCall& call, Function function) {
  const int64_t cost = (call.unroll_steps + 1) * (call.td_steps + 8);
  at::parallel_for(0, call.rows, std::max<int64_t>(1, kGrain / cost), function);
}

// True if all rows are valid.
bool are_valid(const MuZeroCall& call) {
  if (call.lengths.data == nullptr && call.to_play.data == nullptr) {
    return true;
  }
  std::atomic<bool> is_wrong{false};
  each_row(call, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (!is_valid(call, row)) {
        is_wrong = true;
      }
    }
  });
  return !is_wrong;
}

void launch_muzero(const MuZeroCall& call, const OnDevice& device) {
  const int64_t threads = call.rows * (call.unroll_steps + 1);
  const std::string name = instance("muzero_rows", {type_name(call.element)});
  device.launch(kWindowsFile, name, blocks_for(threads, kThreads), kThreads, call);
}

// ---- Calls ---------------------------------------------------------------------------------------------------------

void run(const ReturnsCall& call, const LinearCall& linear, const at::Tensor& like) {
  if (call.rows == 0 || call.steps == 0) {
    return;
  }
  const bool across = goes_across(call, linear.batch_first);
  if (runs_kernels(like.device())) {
    launch_returns(call, across, OnDevice(like.device()));
    return;
  }
  const auto over = [&](ReturnsRows kernel, int64_t rows_per_block) {
    const int64_t blocks = blocks_for(call.rows, rows_per_block);
    const int64_t grain = std::max<int64_t>(1, kGrain / (call.steps * rows_per_block));
    at::parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) {
      kernel(call, begin * rows_per_block, std::min(end * rows_per_block, call.rows));
    });
  };
  if (has_n(call.formula)) {
    over(n_step_kernel, 1);
  } else if (across) {
    over(across_rows_kernel, 64);
  } else {
    over(along_steps_kernel, 1);
  }
}

using Results = std::array<at::Tensor, 3>; // of an adjoint: of rewards, values and next values; undefined: not wanted

Results make_results(
    const LinearCall& linear, const c10::SymInt& rows, const c10::SymInt& steps, const at::TensorOptions& options) {
  const int64_t num_results = function_of(linear.formula).num_results;
  // The third result of a function is a number of steps, as n-step transitions return it.
  const at::TensorOptions third_options = linear.is_adjoint ? options : options.dtype(at::kLong);
  if (is_large(num_results == 3 ? third_options : options, rows * steps)) {
    begin_pooled_call(options.device());
  }
  Results results;
  for (int i = 0; i < 3; ++i) {
    if (linear.is_adjoint ? linear.wants[i] : i < num_results) {
      const bool has_last_state = linear.is_adjoint && linear.observations && i == 1;
      results[i] =
          make_result(rows, has_last_state ? steps + 1 : steps, linear.batch_first, i == 2 ? third_options : options);
    }
  }
  return results;
}

// Lets a call read its operands. Returns the tensors that were made for it, and that it reads.
std::array<at::Tensor, 3 + kClips> read_operands(const LinearCall& linear, c10::Device device, ReturnsCall& call) {
  const FunctionOverTrajectories& function = function_of(linear.formula);
  const bool batch_first = linear.batch_first;
  const int step = step_dim(batch_first);
  at::Tensor values = linear.inputs[1], next_values = linear.inputs[2], ratios = linear.ratios;
  if (linear.observations && !linear.is_adjoint && values.defined()) {
    next_values = values.narrow(step, 1, call.steps);
    values = function.reads_own_values() ? values.narrow(step, 0, call.steps) : at::Tensor();
  }
  const at::Tensor discounts = on_device(linear.discounts, device, function.name, "discount");
  const at::Tensor lambdas = on_device(linear.lambdas, device, function.name, "lambda_");
  if (call.is_adjoint && call.formula == Formula::retrace) {
    ratios = ratios_that_are_read(linear, discounts);
  }
  const auto read = [&](OperandIndex index, const at::Tensor& tensor, double constant) {
    call.operands[index] = operand_of(tensor, constant, batch_first);
  };
  read(kRewards, linear.inputs[0], 0);
  read(kValues, values, 0);
  read(kNextValues, next_values, 0);
  read(kDiscount, discounts, linear.discount);
  read(kLambda, lambdas, linear.lambda);
  read(kRatios, ratios, 1);
  read(kTerminated, linear.terminated, 0);
  read(kTruncated, linear.truncated, 0);
  read(kMask, linear.mask, 1);
  std::array<at::Tensor, 3 + kClips> made{discounts, lambdas, ratios};
  for (int k = 0; k < kClips; ++k) {
    const at::Tensor& clip = made[3 + k] = on_device(linear.clips[k], device, function.name, "a clip");
    TORCH_CHECK(!clip.defined() || clip.numel() == 1, "gradscale_ext::returns: a clip must have one element");
    call.clips[k] = operand_of(clip, linear.limits[k], batch_first);
  }
  return made;
}

// Splits the gradient of values that an adjoint's kernel writes. The returned tensors are parts of the gradient that
// are added one step later, after the kernel: an observation is the state of its step and the successor of the step
// before, and an advantage of V-trace contains the next step's target.
std::vector<at::Tensor> split_values(
    const LinearCall& linear, const ReturnsCall& call, std::array<at::Tensor, kOutputs>& outputs) {
  const at::Tensor to_values = outputs[1];
  const int step = step_dim(linear.batch_first);
  std::vector<at::Tensor> to_later;
  const auto add_to_later = [&](int index) {
    outputs[index] = make_result(call.rows, call.steps, linear.batch_first, to_values.options());
    to_later.push_back(outputs[index]);
  };
  if (linear.observations && function_of(linear.formula).reads_own_values()) {
    to_values.select(step, call.steps).zero_();
    add_to_later(2);
  } else if (linear.observations) {
    to_values.select(step, 0).zero_();
    outputs[1] = at::Tensor();
    outputs[2] = to_values.narrow(step, 1, call.steps);
  }
  if (call.formula == Formula::vtrace) {
    add_to_later(3);
  }
  return to_later;
}

void compute_into(
    const Results& results, const LinearCall& linear, int64_t rows, int64_t steps, const at::Tensor& like) {
  ReturnsCall call{};
  call.rows = rows;
  call.steps = steps;
  call.n = std::min(linear.n.expect_int(), steps);
  call.formula = linear.formula;
  call.is_adjoint = linear.is_adjoint;
  if (has_n(call.formula) && (call.is_adjoint || call.formula == Formula::n_step_returns)) {
    // If no window ends because it has n steps, n-step returns are λ-returns with λ = 1, which Python passes.
    call.formula = call.n == steps ? Formula::lambda_returns : Formula::n_step_returns;
  }
  call.element = element_of(result_dtype(linear));
  const auto made = read_operands(linear, like.device(), call);
  std::array<at::Tensor, kOutputs> outputs{results[0], results[1], results[2]};
  const bool has_values = call.is_adjoint && results[1].defined();
  const std::vector<at::Tensor> to_later = has_values ? split_values(linear, call, outputs) : std::vector<at::Tensor>();
  for (int k = 0; k < kOutputs; ++k) {
    call.outputs[k] = output_of(outputs[k], linear.batch_first);
  }
  run(call, linear, like);
  const int step = step_dim(linear.batch_first);
  for (const at::Tensor& gradient : to_later) {
    const int64_t count = std::min(steps, results[1].size(step) - 1);
    if (count > 0) {
      results[1].narrow(step, 1, count).add_(gradient.narrow(step, 0, count));
    }
  }
}

} // namespace

std::vector<at::Tensor> compute_returns(const LinearCall& linear) {
  const int step = step_dim(linear.batch_first);
  const auto& inputs = linear.inputs;
  const auto found = std::find_if(inputs.begin(), inputs.end(), [](const at::Tensor& x) { return x.defined(); });
  TORCH_CHECK(found != inputs.end(), "gradscale_ext::returns: rewards, values and next_values are all missing");
  const c10::SymInt rows = found->sym_size(1 - step);
  const bool is_longer = linear.observations && !linear.is_adjoint && !inputs[0].defined(); // than the results
  const c10::SymInt steps = is_longer ? found->sym_size(step) - 1 : found->sym_size(step);
  const Results results = make_results(linear, rows, steps, found->options().dtype(result_dtype(linear)));
  if (!found->is_meta()) {
    compute_into(results, linear, rows.expect_int(), steps.expect_int(), *found);
  }
  std::vector<at::Tensor> given; // the results that are wanted
  given.reserve(results.size());
  std::copy_if(
      results.begin(), results.end(), std::back_inserter(given), [](const at::Tensor& x) { return x.defined(); });
  return given;
}

std::vector<at::Tensor> muzero_targets(const MuZeroWindows& windows) {
  const bool batch_first = windows.batch_first;
  const at::TensorOptions options = windows.rewards.options();
  const c10::Device device = options.device();
  const at::ScalarType dtype =
      result_dtype({&windows.rewards, &windows.root_values, &windows.root_reward, &windows.discounts});
  const c10::SymInt rows = windows.rewards.sym_size(1 - step_dim(batch_first));
  const c10::SymInt steps = windows.num_unroll_steps, all_steps = steps + 1;
  if (is_large(options.dtype(dtype), rows * all_steps)) {
    begin_pooled_call(device);
  }
  const auto make = [&](const c10::SymInt& num_steps, at::ScalarType type) {
    return make_result(rows, num_steps, batch_first, options.dtype(type));
  };
  std::vector<at::Tensor> results{
      make(all_steps, dtype),
      make(windows.root_reward.defined() ? all_steps : steps, dtype),
      make(all_steps, at::kBool),
      make(all_steps, at::kBool)};
  if (device.is_meta()) {
    return results;
  }
  const at::Tensor discounts = on_device(windows.discounts, device, "muzero_targets", "discount");
  const at::Tensor to_play = windows.to_play.defined() ? windows.to_play.to(at::kLong) : windows.to_play;
  const int64_t moves = windows.rewards.size(step_dim(batch_first));
  const MuZeroCall call{
      element_of(dtype),
      rows.expect_int(),
      moves,
      steps.expect_int(),
      windows.horizons.defined() ? moves : std::min(windows.td_steps.expect_int(), moves),
      windows.prefix_horizon.expect_int(),
      operand_of(windows.rewards, 0, batch_first),
      operand_of(windows.root_values, 0, batch_first),
      operand_of(discounts, windows.discount, batch_first),
      operand_of(windows.root_reward, 0, batch_first),
      operand_of(windows.terminated, 0, batch_first),
      operand_of(windows.lengths, 0, batch_first),
      operand_of(to_play, 0, batch_first),
      operand_of(windows.horizons, 0, batch_first),
      output_of(results[0], batch_first),
      output_of(results[1], batch_first),
      results[2].mutable_data_ptr<bool>(),
      results[3].mutable_data_ptr<bool>()};
  if (windows.is_checked && !are_valid(call)) {
    return {};
  }
  if (call.rows > 0 && runs_kernels(device)) {
    launch_muzero(call, OnDevice(device));
  } else {
    each_row(call, [&](int64_t begin, int64_t end) { muzero_kernel(call, begin, end); });
  }
  return results;
}

} // namespace gradscale
