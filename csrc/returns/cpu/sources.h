// Operands of a call as the CPU's kernels read them: along one dimension, a piece at a time. Contiguous pieces of the
// kernel's type are read in place; others are copied to a buffer, which fits in the L1 cache if the piece is a tile.
//
// This file has no include guard: a file of CPU kernels includes it once for each instruction set, in its namespace.

namespace gradscale {
namespace GRADSCALE_VARIANT {

constexpr int kMostLanes = 16;
constexpr int64_t kTile = 512;                  // steps of a row
constexpr int64_t kRowsOfTile = 64;             // rows of a step: a cache line of flags
constexpr int64_t kBuffer = kTile + kMostLanes; // a tile, padded to whole vectors

// Element i is data[i * advance]. If `advance` is 0, all elements are equal, and `data` holds kMostLanes copies.
template <class A>
struct Piece {
  const A* data;
  int64_t advance;

  A operator[](int64_t i) const {
    return data[i * advance];
  }
};

// An operand along the dimension `inner`: numbers, or flags if A is uint8_t.
template <class A>
class Source {
 public:
  Source(const Operand& operand, int inner)
      : operand_(&operand),
        inner_(inner),
        inner_stride_(operand.strides[inner]),
        outer_stride_(operand.strides[1 - inner]) {
    if constexpr (kIsFlag) {
      is_run_ = inner_stride_ == 1;
    } else {
      is_run_ = inner_stride_ == 1 && operand.element == kElementOf<A>;
    }
    if (inner_stride_ == 0 && outer_stride_ == 0) {
      fill(element_at<A>(operand, 0, 0));
    }
  }

  // `count` elements from `begin` on, at index `outer` of the other dimension, padded with zeros to `padded` elements.
  // Numbers that are all equal are not padded with zeros, but with the same number. A copy is valid until the next
  // call.
  Piece<A> piece(int64_t outer, int64_t begin, int64_t count, int64_t padded) {
    const bool is_constant = kIsFlag ? operand_->data == nullptr && count == padded : inner_stride_ == 0;
    if (is_constant) {
      if (outer_stride_ != 0) {
        fill(inner_ == kStep ? element_at<A>(*operand_, outer, 0) : element_at<A>(*operand_, 0, outer));
      }
      return {copies_, 0};
    }
    const int64_t offset = outer * outer_stride_ + begin * inner_stride_;
    if (is_run_ && count == padded) {
      return {static_cast<const A*>(operand_->data) + offset, 1};
    }
    if (static_cast<int64_t>(buffer_.size()) < padded) {
      grow(padded);
    }
    copy(offset, count, buffer_.data());
    std::fill(buffer_.data() + count, buffer_.data() + padded, A(0));
    return {buffer_.data(), 1};
  }

 private:
  static constexpr bool kIsFlag = std::is_same_v<A, uint8_t>;

  void fill(A value) {
    std::fill(copies_, copies_ + kMostLanes, value);
  }

  // Out of line, so that the compiler inlines piece().
  __attribute__((noinline)) void grow(int64_t size) {
    buffer_.resize_for_overwrite(size);
  }

  void copy(int64_t offset, int64_t count, A* buffer) const {
    if (operand_->data == nullptr) {
      std::fill(buffer, buffer + count, copies_[0]);
      return;
    }
    if (is_run_) {
      memcpy(buffer, static_cast<const A*>(operand_->data) + offset, count * sizeof(A));
      return;
    }
    dispatch_operand<A>(*operand_, [&](auto type) {
      const auto* from = static_cast<const decltype(type)*>(operand_->data) + offset;
      for (int64_t i = 0; i < count; ++i) {
        buffer[i] = static_cast<A>(to_accumulate(from[i * inner_stride_]));
      }
    });
  }

  const Operand* operand_;
  int inner_;
  int64_t inner_stride_;
  int64_t outer_stride_;
  bool is_run_;
  A copies_[kMostLanes];
  c10::SmallVector<A, kBuffer> buffer_;
};

// ---- Tiles ---------------------------------------------------------------------------------------------------------

// The inputs and outputs of a kernel for one tile, along steps or across rows.
template <class A>
struct Tile {
  Piece<A> numbers[kNumbers];
  Piece<uint8_t> terminated, truncated, live, later_live;
  Piece<A> later_values; // of the next steps
  A* out[kOutputs];
  A limits[kClips];
};

// The operands and outputs of a call, a tile at a time.
template <class A>
class Sources {
 public:
  const ReturnsCall& call;

  Sources(const ReturnsCall& call, int inner)
      : call(call),
        later_mask(call.operands[kMask], inner),
        later_values(call.operands[kValues], inner),
        inner_(inner),
        numbers_{
            {call.operands[kRewards], inner},
            {call.operands[kValues], inner},
            {call.operands[kNextValues], inner},
            {call.operands[kDiscount], inner},
            {call.operands[kLambda], inner},
            {call.operands[kRatios], inner}},
        flags_{{call.operands[kTerminated], inner}, {call.operands[kTruncated], inner}, {call.operands[kMask], inner}} {
    for (int k = 0; k < kClips; ++k) {
      tile.limits[k] = element_at<A>(call.clips[k], 0, 0);
    }
  }

  // Reads `count` steps from `begin` on, padded with masked steps to `padded`. later_mask and later_values are read
  // separately.
  void read(int64_t outer, int64_t begin, int64_t count, int64_t padded) {
    for (int k = 0; k < kNumbers; ++k) {
      tile.numbers[k] = numbers_[k].piece(outer, begin, count, padded);
    }
    tile.terminated = flags_[0].piece(outer, begin, count, padded);
    tile.truncated = flags_[1].piece(outer, begin, count, padded);
    tile.live = flags_[2].piece(outer, begin, count, padded);
    for (int k = 0; k < kOutputs; ++k) {
      const ReturnsOutput& output = call.outputs[k];
      const bool in_place = output.data != nullptr && output.strides[inner_] == 1 && count == padded;
      tile.out[k] = in_place ? static_cast<A*>(output.data) + outer * output.strides[1 - inner_] + begin : results_[k];
    }
  }

  // Copies results that were not written in place.
  void write(int64_t outer, int64_t begin, int64_t count) const {
    for (int k = 0; k < kOutputs; ++k) {
      const ReturnsOutput& output = call.outputs[k];
      if (output.data != nullptr && tile.out[k] == results_[k]) {
        const int64_t stride = output.strides[inner_];
        A* to = static_cast<A*>(output.data) + outer * output.strides[1 - inner_] + begin * stride;
        for (int64_t i = 0; i < count; ++i) {
          to[i * stride] = results_[k][i];
        }
      }
    }
  }

  Tile<A> tile;
  Source<uint8_t> later_mask; // these two read the mask and the values of the next steps
  Source<A> later_values;
  alignas(64) uint8_t later_flags[kBuffer];
  int64_t later_count = -1; // steps of the tile that later_flags were made for

 private:
  int inner_;
  Source<A> numbers_[kNumbers];
  Source<uint8_t> flags_[3];
  A results_[kOutputs][kBuffer];
};

// Joins rows begin to end - 1 into `one`, a call with one row. Returns false if the rows are not contiguous.
inline bool joined(const ReturnsCall& call, int64_t begin, int64_t end, ReturnsCall& one) {
  one = call;
  one.rows = 1;
  one.steps = (end - begin) * call.steps;
  bool is_dense = true;
  const auto move = [&](auto& tensor, int64_t size) {
    const bool is_constant = tensor.data == nullptr || (tensor.strides[kRow] == 0 && tensor.strides[kStep] == 0);
    is_dense = is_dense && (is_constant || (tensor.strides[kStep] == 1 && tensor.strides[kRow] == call.steps));
    if (!is_constant) {
      using Pointer = decltype(tensor.data);
      tensor.data = reinterpret_cast<Pointer>(reinterpret_cast<intptr_t>(tensor.data) + begin * call.steps * size);
    }
  };
  for (int k = 0; k < kOperands; ++k) {
    move(one.operands[k], k < kNumbers ? element_size(one.operands[k].element) : 1);
  }
  for (ReturnsOutput& output : one.outputs) {
    move(output, element_size(call.element));
  }
  return is_dense;
}

} // namespace GRADSCALE_VARIANT
} // namespace gradscale
