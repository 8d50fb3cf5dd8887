// E4M3 weights widened to 16-bit operands on their way from shared memory to the tensor core: the
// consumer of W8A16. What a weight becomes is defined bit by bit, by `widened` in sp24cli/reference.py:
//
//   code --exact--> f16 --exact--> f32 --x scale, rounded--> f32 --rounded--> f16 or bf16 --> limit
//
// A block of 64 rows and 64 columns, one bulk copy:
//   2048 bytes  codes by thread t = 32 w + 4 g + q of the warpgroup, 16 bytes each: for step 0 and 1 the
//               two kept codes of a group of four columns in row 16 w + g, in row 16 w + g + 8, both of
//               group q, then both of group q + 4. So a register of a fragment is two codes wide (PTX
//               ISA, matrix fragments of `wgmma` .f16/.bf16, A; a step has eight groups).
//    512 bytes  metadata, as that of 16-bit operands
//   the scales  block: f32 [4 warps][4 groups of 16 columns]; mx: E8M0 [64 rows][2 steps]
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "sp24/args.cuh"
#include "sp24/config.cuh"
#include "sp24/epilogue.cuh"
#include "sp24/exchange.cuh"
#include "sp24/ptx/convert.cuh"
#include "sp24/ptx/warp.cuh"
#include "sp24/ptx/wgmma_sp.cuh"
#include "sp24/ring.cuh"
#include "sp24/schedule.cuh"

namespace sp24 {

// Where one thread finds its codes and scales of a stage, and what it makes of them.
template <class Config>
struct Widener {
  using Shared = typename Config::Shared;
  using Operand = typename Config::Operand;
  static constexpr WeightScales kScales = Operand::kWeightScales;
  static constexpr bool kToF16 = std::is_same_v<typename Operand::Multiplied, f16>;
  static constexpr uint32_t kStageA = Config::kConsumers * Config::kBlockBytes;

  uint32_t codes0, scales0, limit;

  __device__ __forceinline__ Widener(const GemmArgs& args, uint32_t shared, int warpgroup)
      : limit(args.operand_limit) {
    const int t = threadIdx.x % 128, warp = t / 32, row = 16 * warp + t % 32 / 4;
    codes0 = shared + offsetof(Shared, a) + warpgroup * Config::kBlockBytes + 16 * t;
    scales0 = codes0 - 16 * t + Operand::kBlockValueBytes + Operand::kMetaBytes +
              (kScales == WeightScales::mx ? 2 * row : 16 * warp);
  }

  // The fragments of A of the stage's two steps.
  __device__ __forceinline__ void operator()(uint32_t stage, uint32_t (&a)[2][4]) const {
    const uint4 four = ptx::load_shared<uint4>(codes0 + stage * kStageA);
    const uint32_t codes[4] = {four.x, four.y, four.z, four.w};
    float scale[2][4];  // of a step's registers
    load_scales(scales0 + stage * kStageA, scale);
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t four_codes = codes[2 * s + h];
        a[s][2 * h] = widen(ptx::f16x2_of_e4m3x2<0>(four_codes), scale[s][2 * h]);
        a[s][2 * h + 1] = widen(ptx::f16x2_of_e4m3x2<1>(four_codes), scale[s][2 * h + 1]);
      }
  }

 private:
  static __device__ __forceinline__ void load_scales(uint32_t from, float (&scale)[2][4]) {
    if constexpr (kScales == WeightScales::block) {
      // Registers 0 and 1 are of a step's first 16 columns, 2 and 3 of the others.
      const float4 v = ptx::load_shared<float4>(from);
      scale[0][0] = scale[0][1] = v.x, scale[0][2] = scale[0][3] = v.y;
      scale[1][0] = scale[1][1] = v.z, scale[1][2] = scale[1][3] = v.w;
    } else if constexpr (kScales == WeightScales::mx) {
      // Registers 0 and 2 are of the upper row. Code e is 2^(e - 127): the exponent of an f32, since no
      // scale is subnormal or NaN.
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t both = ptx::load_shared<uint16_t>(from + 16 * h);
        scale[0][h] = scale[0][h + 2] = __uint_as_float(both << 23 & 0x7F800000u);
        scale[1][h] = scale[1][h + 2] = __uint_as_float(both << 15 & 0x7F800000u);
      }
    }
  }
  // Two operands of two codes, which `exact` has as f16.
  __device__ __forceinline__ uint32_t widen(uint32_t exact, float scale) const {
    if constexpr (kScales == WeightScales::none && kToF16) return exact;
    float2 v = ptx::f32_of_f16x2(exact);
    if constexpr (kScales == WeightScales::none) return ptx::bf16x2_of(v.x, v.y);
    v.x = __fmul_rn(v.x, scale), v.y = __fmul_rn(v.y, scale);
    // What rounds beyond the type is infinite, and then the limit: its largest value, or infinity.
    if constexpr (kToF16)
      return ptx::limited_f16x2(ptx::f16x2_of(v.x, v.y), limit);
    else
      return ptx::limited_bf16x2(ptx::bf16x2_of(v.x, v.y), limit);
  }
};

// One warpgroup: 64 rows of the tile; K is not split. As `consume`, but that a stage's A is read by
// loads, and multiplied from registers.
//
// Order. The loads are those of metadata, in `produce`'s proof: done before a warp gives the stage back,
// for their results have been multiplied by then. The tensor core reads the fragments and the metadata
// while the wgmmas run: they have been waited for when the registers are written again, two stages
// later, since each stage begins once the one before the last is over. ptxas does not know that; check.py
// proves it on the machine code.
template <class Config>
__device__ __forceinline__ void consume_widened(const GemmArgs& args, uint32_t shared,
                                                uint32_t m_rank, int warpgroup) {
  using Shared = typename Config::Shared;
  using Operand = typename Config::Operand;
  using Mma = ptx::WgmmaSpRegisters<typename Operand::Multiplied, Config::kTileN>;
  const StageReader<Config> stages(shared, m_rank, 0, warpgroup);
  const Widener<Config> widen(args, shared, warpgroup);
  typename Config::Accumulators acc;
  uint32_t fragments[2][2][4];  // of stages in turn
  Ring<Config::kStages> ring;
  Schedule<Config> schedule(args);
  const KShare<Config> share(args, 0);

  // Waits for the stage and starts its two steps.
  const auto multiply = [&](uint32_t (&a)[2][4], uint32_t accumulate) {
    stages.await(ring, accumulate == 0);
    const uint32_t meta = stages.meta(ring.stage);
    widen(ring.stage, a);
    const uint64_t desc_b = stages.desc_b(ring.stage);
    ptx::wgmma_fence();
    Mma::template issue<0>(acc, a[0], desc_b, meta, accumulate);
    Mma::template issue<Operand::kSelector1>(acc, a[1], desc_b + (64 >> 4), meta, 1);
    ptx::wgmma_commit();
  };

  uint32_t reading = 0;
  TileScales<Config> scales(shared, warpgroup);
  const uint32_t chunks =
      shared + offsetof(Shared, chunks) + warpgroup * sizeof(Shared::chunks) / Config::kConsumers;
  const int barrier = kBarriers * warpgroup + 1;
  // One k: see `consume`.
  const auto step = [&](uint32_t (&a)[2][4]) {
    multiply(a, 1);
    ptx::wgmma_wait<1>();
    stages.release(reading);
    reading = ring.stage;
    ring.advance();
  };

  ptx::wait_for_prerequisites();  // scales are read and D is written from here on
  for (int m0, n0; schedule.next(m_rank, m0, n0);) {
    m0 += warpgroup * kBlockRows;
    scales.fetch(args, m0, n0);
    multiply(fragments[0], 0);
    reading = ring.stage;
    ring.advance();
    int k = 1;
#pragma unroll 1
    for (; k + 2 <= share.blocks; k += 2) {
      step(fragments[1]);
      step(fragments[0]);
    }
    if (k < share.blocks) step(fragments[1]);
    ptx::wgmma_wait<0>();
    stages.release_last(reading);
    store_tile<Config>(acc, args, scales, chunks, barrier, m0, n0);
  }
}

}  // namespace sp24
