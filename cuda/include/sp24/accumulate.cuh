// How a sum over K is kept: in the tensor cores' accumulators from end to end, or promoted, piece by
// piece, into f32 registers of its own, where scales that vary along K can be applied.
#pragma once

namespace sp24 {

// The scales that meet a piece of a sum before it is added.
enum class LoopScales {
  none,   // none: the epilogue applies those of tensors and vectors
  tile,   // one for a tile's 128 rows of A and one a row of B: blocks of A of a multiple of 128 rows
  block,  // one for 64 rows of A and one a row of B: blocks of A of a multiple of 64 rows
  row,    // one a row of A and one a row of B: any block
};

struct fast {
  static constexpr int kSteps = 0;
  static constexpr LoopScales kScales = LoopScales::none;
};

// A piece is kSteps wgmma steps: half a stage, or whole stages.
template <int kSteps_, LoopScales kScales_>
struct Promote {
  static constexpr int kSteps = kSteps_;
  static constexpr LoopScales kScales = kScales_;
  static_assert(kSteps == 1 || kSteps == 2 || kSteps == 4, "1 step or 1, 2 stages");
  static_assert(kScales != LoopScales::tile || kSteps == 2, "a tile's scales are one to a stage");
  static_assert(kScales == LoopScales::none || kSteps <= 2, "one slot of scales a stage or step");
};

// As kernels.def and the kernels' names say it: the K of a piece of 8-bit operands behind the scales.
using precise256 = Promote<4, LoopScales::none>;
using tile128 = Promote<2, LoopScales::tile>;
using block128 = Promote<2, LoopScales::block>;
using row128 = Promote<2, LoopScales::row>;
using row64 = Promote<1, LoopScales::row>;

}  // namespace sp24
