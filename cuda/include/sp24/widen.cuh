// E4M3 weights widened to 16-bit operands on their way from shared memory to the tensor core: the
// consumer of W8A16. What a weight becomes is defined bit by bit, by `widened` in sp24cli/reference.py:
//
//   code --exact--> f16 --exact--> f32 --x scale, rounded--> f32 --rounded--> f16 or bf16 --> limit
//
// A weight is plain, `operand_limit` 0, where `plain` in sp24cli/fragments.py has found that no scale takes
// a finite code beyond the type: then nothing is limited, and a power of two (mx) multiplies two operands
// at once, in their type. The product in f32 would be exact, so the one rounding is that of the definition.
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

// Where one thread finds its codes and scales of a stage, and what it makes of them: of a plain weight, or
// with kLimited of any.
template <class Config, bool kLimited>
struct Widener {
  using Shared = typename Config::Shared;
  using Operand = typename Config::Operand;
  static constexpr WeightScales kScales = Operand::kWeightScales;
  static constexpr bool kToF16 = std::is_same_v<typename Operand::Multiplied, f16>;
  // Whether a scale multiplies two operands at once, in their type.
  static constexpr bool kByPairs = kScales == WeightScales::mx && !kLimited;
  static constexpr uint32_t kRoom = Config::kStageBlocks * Config::kBlockBytes;
  static constexpr uint32_t kStageA = Config::kConsumers * kRoom;

  // A block's codes and scales, as they are stored.
  struct Stored {
    uint4 codes;
    float4 scales;          // block: of four groups of 16 columns
    uint32_t upper, lower;  // mx: of the two steps, a byte each, in row g and g + 8
  };

  uint32_t codes0, scales0, limit;

  __device__ __forceinline__ Widener(const GemmArgs& args, uint32_t shared, int warpgroup)
      : limit(args.operand_limit) {
    const int t = threadIdx.x % 128, warp = t / 32, row = 16 * warp + t % 32 / 4;
    const uint32_t a0 = shared + offsetof(Shared, a) + warpgroup * kRoom;
    codes0 = a0 + 16 * t;
    scales0 = a0 + Operand::kBlockValueBytes + Operand::kMetaBytes +
              (kScales == WeightScales::mx ? 2 * row : 16 * warp);
  }

  __device__ __forceinline__ Stored load(uint32_t stage, int block) const {
    const uint32_t at = stage * kStageA + block * Config::kBlockBytes;
    Stored stored;
    stored.codes = ptx::load_shared<uint4>(codes0 + at);
    if constexpr (kScales == WeightScales::block) {
      stored.scales = ptx::load_shared<float4>(scales0 + at);
    } else if constexpr (kScales == WeightScales::mx) {
      stored.upper = ptx::load_shared<uint16_t>(scales0 + at);
      stored.lower = ptx::load_shared<uint16_t>(scales0 + at + 16);
    }
    return stored;
  }

  // The fragments of A of the block's two steps.
  __device__ __forceinline__ void operator()(const Stored& stored, uint32_t (&a)[2][4]) const {
    const uint32_t codes[4] = {stored.codes.x, stored.codes.y, stored.codes.z, stored.codes.w};
    Scale scale[2][4];  // of a step's registers
    if constexpr (kScales == WeightScales::block) {
      // Registers 0 and 1 are of a step's first 16 columns, 2 and 3 of the others.
      scale[0][0] = scale[0][1] = stored.scales.x, scale[0][2] = scale[0][3] = stored.scales.y;
      scale[1][0] = scale[1][1] = stored.scales.z, scale[1][2] = scale[1][3] = stored.scales.w;
    } else if constexpr (kScales == WeightScales::mx) {
      // Registers 0 and 2 are of the upper row.
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t both = h == 0 ? stored.upper : stored.lower;
        scale[0][h] = scale[0][h + 2] = power(both & 0xFFu);
        scale[1][h] = scale[1][h + 2] = power(both >> 8);
      }
    }
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
  using Scale = std::conditional_t<kByPairs, uint32_t, float>;

  // 2^(code - 127): an f32 by its exponent, since no scale is subnormal or NaN; by pairs the type, twice.
  static __device__ __forceinline__ Scale power(uint32_t code) {
    if constexpr (!kByPairs) {
      return __uint_as_float(code << 23);
    } else if constexpr (kToF16) {
      const float one = __uint_as_float(code << 23);
      return ptx::f16x2_of(one, one);
    } else {
      return code * 0x00800080u;
    }
  }
  // Two operands of two codes, which `exact` has as f16.
  __device__ __forceinline__ uint32_t widen(uint32_t exact, Scale scale) const {
    if constexpr (kToF16 && kByPairs) return ptx::multiplied_f16x2(exact, scale);
    if constexpr (kToF16 && kScales == WeightScales::none) return exact;
    float2 v = ptx::f32_of_f16x2(exact);
    if constexpr (kByPairs) return ptx::multiplied_bf16x2(ptx::bf16x2_of(v.x, v.y), scale);
    if constexpr (kScales == WeightScales::none) return ptx::bf16x2_of(v.x, v.y);
    if constexpr (!kByPairs) v.x = __fmul_rn(v.x, scale), v.y = __fmul_rn(v.y, scale);
    uint32_t pair = kToF16 ? ptx::f16x2_of(v.x, v.y) : ptx::bf16x2_of(v.x, v.y);
    // What rounds beyond the type is infinite, and then the limit: its largest value, or infinity.
    if constexpr (kLimited)
      pair = kToF16 ? ptx::limited_f16x2(pair, limit) : ptx::limited_bf16x2(pair, limit);
    return pair;
  }
};

// One warpgroup: 64 rows of the tile, over one part of K. As `consume`, but that a stage's A is read by
// loads, and multiplied from registers.
//
// Order. The loads are those of metadata, in `produce_a`'s proof: done before a warp gives the stage back,
// for their results have been multiplied by then, or are never used. The tensor core reads the fragments
// and the metadata of a block while its wgmmas run: they have been waited for when the registers are
// written again, two blocks later, since each block begins once the one before the last is over. ptxas
// does not know that; check.py proves it on the machine code. Several blocks of a stage are awaited at its
// first and given back with its last, as one; a stage that K ends in has brought only those that there are.
template <class Config, bool kLimited>
__device__ __forceinline__ void consume_widened(const GemmArgs& args, uint32_t shared,
                                                uint32_t m_rank, int part, int warpgroup) {
  using Shared = typename Config::Shared;
  using Operand = typename Config::Operand;
  using Mma = ptx::WgmmaSpRegisters<typename Operand::Multiplied, Config::kTileN>;
  using Stages = StageReader<Config>;
  using Widen = Widener<Config, kLimited>;
  constexpr int kStageBlocks = Config::kStageBlocks;
  constexpr int kTurn = kStageBlocks == 1 ? 2 : kStageBlocks;  // blocks of the loop's body
  const Stages stages(shared, m_rank, part, warpgroup);
  const Widen widen(args, shared, warpgroup);
  typename Config::Accumulators acc;
  uint32_t fragments[2][2][4];         // of blocks in turn
  typename Widen::Stored stored[2];    // the same
  Ring<Config::kStages> ring;          // the next stage
  Schedule<Config> schedule(args);
  const KShare<Config> share(args, part);
  uint32_t stage = 0;    // whose blocks are multiplied
  uint32_t reading = 0;  // the last that has not been given back

  // Waits for the next stage, and fetches its first block's codes and scales. `first`: of a sum.
  const auto open = [&](bool first) {
    stages.await(ring, first);
    stored[0] = widen.load(ring.stage, 0);
  };
  // Starts the two steps of the turn's block of that number, whose codes and scales have been fetched, and
  // fetches those of the next: of the same stage, past the end of K something that is not multiplied; or,
  // where the sum goes on, of the stage after it. Metadata waits until its registers are free.
  const auto multiply = [&](auto number, bool goes_on, uint32_t accumulate) {
    constexpr int kBlock = decltype(number)::value % kStageBlocks;
    uint32_t(&a)[2][4] = fragments[decltype(number)::value % 2];
    if constexpr (kBlock == 0) {
      stage = ring.stage;
      ring.advance();
    }
    const uint32_t meta = stages.meta(stage, kBlock);
    if constexpr (kBlock + 1 < kStageBlocks)
      stored[(kBlock + 1) % 2] = widen.load(stage, kBlock + 1);
    else if (kStageBlocks > 1 && goes_on)
      open(false);
    widen(stored[kBlock % 2], a);
    const uint64_t desc_b = stages.desc_b(stage, kBlock);
    ptx::wgmma_fence();
    Mma::template issue<0>(acc, a[0], desc_b, meta, accumulate);
    Mma::template issue<Operand::kSelector1>(acc, a[1], desc_b + (64 >> 4), meta, 1);
    ptx::wgmma_commit();
  };

  TileScales<Config> scales(shared, warpgroup);
  const uint32_t chunks =
      shared + offsetof(Shared, chunks) + warpgroup * sizeof(Shared::chunks) / Config::kConsumers;
  const int barrier = kBarriers * warpgroup + 1;
  // One block. Once all but its wgmmas are done, the stage before has been read.
  const auto step = [&](auto number, bool goes_on) {
    if constexpr (kStageBlocks == 1) open(false);
    multiply(number, goes_on, 1);
    ptx::wgmma_wait<1>();
    if constexpr (decltype(number)::value % kStageBlocks == 0) {
      stages.release(reading);
      reading = stage;
    }
  };
  constexpr std::integral_constant<int, 0> first{};
  constexpr std::integral_constant<int, 1> second{};
  constexpr std::integral_constant<int, 2 % kTurn> third{};
  constexpr std::integral_constant<int, 3 % kTurn> fourth{};

  ptx::wait_for_prerequisites();  // scales are read and D is written from here on
  Exchange<Config> exchange(shared, m_rank, part, warpgroup);
  for (int m0, n0; schedule.next(m_rank, m0, n0);) {
    m0 += warpgroup * kBlockRows;
    n0 += part * Config::kStoredN;
    scales.fetch(args, m0, n0);
    open(true);
    multiply(first, false, 0);
    reading = stage;
    int k = 1;
#pragma unroll 1
    for (; k + kTurn <= share.blocks; k += kTurn) {
      step(second, true);
      if constexpr (kTurn == 4) step(third, true), step(fourth, true);
      step(first, true);
    }
    if (k < share.blocks) step(second, false);
    if constexpr (kTurn == 4) {
      if (k + 1 < share.blocks) step(third, false);
      if (k + 2 < share.blocks) step(fourth, false);
    }
    ptx::wgmma_wait<0>();
    stages.release_last(reading);
    finish_tile<Config>(acc, exchange, share.counts, schedule.more(), args, scales, chunks, barrier, m0,
                        n0);
  }
}

// Plain is faster, and what nearly all weights are.
template <class Config>
__device__ __forceinline__ void widen_and_consume(const GemmArgs& args, uint32_t shared,
                                                  uint32_t m_rank, int part, int warpgroup) {
  if (Config::Operand::kWeightScales != WeightScales::none && args.operand_limit)
    consume_widened<Config, true>(args, shared, m_rank, part, warpgroup);
  else
    consume_widened<Config, false>(args, shared, m_rank, part, warpgroup);
}

}  // namespace sp24
