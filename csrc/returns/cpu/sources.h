// Operands of a call as the CPU's kernels read them: along one dimension, a piece at a time. Contiguous pieces of the
// kernel's type are read in place; others are copied to a buffer, which fits in the L1 cache if the piece is a tile.
//
// This file has no include guard: a file of CPU kernels includes it once for each instruction set, in its namespace.

namespace gradscale {
namespace GRADSCALE_VARIANT {

constexpr int kMostLanes = 16;
constexpr int64_t kTile = 1024; // steps of some rows, or rows of one step

// Elements of neighbouring rows: element i of row r is data[r * row_advance + i * advance]. If `advance` is 0, all
// elements of a row are equal, and `data` holds kMostLanes copies.
template <class A>
struct Piece {
  const A* data;
  int64_t advance;
  int64_t row_advance;

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

  // `count` elements from `begin` on, at each of the indices `outer` to `outer` + `rows` - 1 of the other dimension. A
  // copy is valid until the next call.
  Piece<A> piece(int64_t outer, int64_t rows, int64_t begin, int64_t count) {
    if (inner_stride_ == 0 && outer_stride_ == 0) {
      return {copies_, 0, 0};
    }
    if (inner_stride_ == 0 && rows == 1) {
      fill(inner_ == kStep ? element_at<A>(*operand_, outer, 0) : element_at<A>(*operand_, 0, outer));
      return {copies_, 0, 0};
    }
    const int64_t offset = outer * outer_stride_ + begin * inner_stride_;
    if (is_run_) {
      return {static_cast<const A*>(operand_->data) + offset, 1, outer_stride_};
    }
    if (static_cast<int64_t>(buffer_.size()) < rows * count) {
      grow(rows * count);
    }
    for (int64_t row = 0; row < rows; ++row) {
      copy(offset + row * outer_stride_, count, buffer_.data() + row * count);
    }
    return {buffer_.data(), 1, count};
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
  c10::SmallVector<A, kTile> buffer_;
};

// ---- Tiles ---------------------------------------------------------------------------------------------------------

// The inputs and outputs of a kernel for one tile: `count` steps of `rows` rows. In a kernel whose lanes are rows,
// these are `count` rows of one step.
template <class A>
struct Tile {
  int64_t rows, count;
  bool is_flat; // each row begins where the one before it ends, in all tensors
  Piece<A> numbers[kNumbers];
  Piece<uint8_t> terminated, truncated, live, later_live;
  Piece<A> later_values; // of the next steps
  A* out[kOutputs];
  int64_t out_row_advance[kOutputs];
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

  // Reads a tile. later_mask and later_values are read separately.
  void read(int64_t outer, int64_t rows, int64_t begin, int64_t count) {
    tile.rows = rows;
    tile.count = count;
    tile.is_flat = true;
    const auto add = [&](auto piece) {
      tile.is_flat = tile.is_flat && (rows == 1 || piece.row_advance == piece.advance * count);
      return piece;
    };
    for (int k = 0; k < kNumbers; ++k) {
      tile.numbers[k] = add(numbers_[k].piece(outer, rows, begin, count));
    }
    tile.terminated = add(flags_[0].piece(outer, rows, begin, count));
    tile.truncated = add(flags_[1].piece(outer, rows, begin, count));
    tile.live = add(flags_[2].piece(outer, rows, begin, count));
    for (int k = 0; k < kOutputs; ++k) {
      const ReturnsOutput& output = call.outputs[k];
      const bool in_place = output.data != nullptr && output.strides[inner_] == 1;
      const int64_t stride = output.strides[1 - inner_];
      tile.out[k] = in_place ? static_cast<A*>(output.data) + outer * stride + begin : results_[k];
      tile.out_row_advance[k] = in_place ? stride : count;
      tile.is_flat = tile.is_flat && (rows == 1 || tile.out_row_advance[k] == count);
    }
  }

  // Copies results that were not written in place.
  void write(int64_t outer, int64_t begin) const {
    for (int k = 0; k < kOutputs; ++k) {
      const ReturnsOutput& output = call.outputs[k];
      if (output.data == nullptr || tile.out[k] != results_[k]) {
        continue;
      }
      const int64_t stride = output.strides[inner_], row_stride = output.strides[1 - inner_];
      A* to = static_cast<A*>(output.data) + outer * row_stride + begin * stride;
      for (int64_t row = 0; row < tile.rows; ++row) {
        for (int64_t i = 0; i < tile.count; ++i) {
          to[row * row_stride + i * stride] = results_[k][row * tile.count + i];
        }
      }
    }
  }

  Tile<A> tile;
  Source<uint8_t> later_mask; // these two read the mask and the values of the next steps
  Source<A> later_values;

 private:
  int inner_;
  Source<A> numbers_[kNumbers];
  Source<uint8_t> flags_[3];
  A results_[kOutputs][kTile];
};

} // namespace GRADSCALE_VARIANT
} // namespace gradscale
