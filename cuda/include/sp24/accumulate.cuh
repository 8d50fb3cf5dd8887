// How a sum over K is kept: in the tensor cores' accumulators from end to end, or promoted, piece by
// piece, into f32 registers of its own, where scales that vary along K can be applied.
#pragma once

namespace sp24 {

// The scales that meet a piece of a sum before it is added.
enum class LoopScales {
  none,   // none: the epilogue applies those of tensors and vectors
  block,  // one for 64 rows of A and one a row of B: blocks of A of a multiple of 64 rows
  row,    // one a row of A and one a row of B: any block
};

struct fast {
  static constexpr int kSteps = 0;
  static constexpr LoopScales kScales = LoopScales::none;
};

// A piece is kSteps wgmma steps: half a stage, or whole stages. The tile's columns are multiplied in
// kHalves parts: in two, one is added while the other is multiplied; in one, A is read only once a
// step, and a warpgroup adds while the other multiplies.
template <int kSteps_, LoopScales kScales_, int kHalves_ = 2>
struct Promote {
  static constexpr int kSteps = kSteps_;
  static constexpr int kHalves = kHalves_;
  static constexpr LoopScales kScales = kScales_;
  static_assert(kSteps == 1 || kSteps == 2 || kSteps == 4 || kSteps == 8, "1 step or 1, 2, 4 stages");
  static_assert(kScales == LoopScales::none || kSteps <= 2, "one slot of scales a stage or step");
  static_assert(kHalves == 2 || kSteps >= 2, "whole rows are multiplied by whole stages");
};

// As kernels.def and the kernels' names say it: the K of a piece of 8-bit operands behind the scales,
// and w for whole rows.
using precise256 = Promote<4, LoopScales::none>;
using precise256w = Promote<4, LoopScales::none, 1>;
using precise512w = Promote<8, LoopScales::none, 1>;
using block128 = Promote<2, LoopScales::block>;
using block128w = Promote<2, LoopScales::block, 1>;
using row128 = Promote<2, LoopScales::row>;
using row64 = Promote<1, LoopScales::row>;

}  // namespace sp24
