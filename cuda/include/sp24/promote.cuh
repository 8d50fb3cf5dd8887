// The sum of one tile in pieces of K, each multiplied into partial accumulators and then added to f32
// registers: the tensor core's few bits of FP8 accumulation span a piece only.
//
// The warpgroups lie side by side: each sums both blocks of 64 rows of the tile, in a part of its columns.
// The blocks have partial accumulators of their own, so that one is added while the other is multiplied
// and the tensor core need not wait for an addition:
//
//   tensor core   X(0)  Y(0)  X(1)  Y(1)  X(2) ...      X: the upper 64 rows, Y: the lower
//   registers           +X(0) +Y(0) +X(1) +Y(1) ...
//
// So a thread holds half as many columns as with 64 rows of all of them, and reads half as many of their
// scales, which is what a loop with scales spends most on: they come through the port of shared memory
// that the wgmmas fill, and every thread needs its own copy of them.
// Where all rows of the tile have one scale of A, spread.cuh does without most of that.
#pragma once
#include <cstddef>
#include <cstdint>

#include "sp24/args.cuh"
#include "sp24/config.cuh"
#include "sp24/exchange.cuh"
#include "sp24/ptx/copy.cuh"
#include "sp24/ptx/mbarrier.cuh"
#include "sp24/ptx/warp.cuh"
#include "sp24/ptx/wgmma_sp.cuh"
#include "sp24/ring.cuh"
#include "sp24/schedule.cuh"

namespace sp24 {

template <class Config>
struct PromotedSum {
  using Shared = typename Config::Shared;
  using Operand = typename Config::Operand;
  using Meta = typename Operand::Meta;
  using Stages = StageReader<Config>;
  using Position = Ring<Config::kStages>;
  using Accumulate = typename Config::Accumulate;
  static constexpr bool kBlock = Accumulate::kScales == LoopScales::block;
  static constexpr bool kScaled = Accumulate::kScales != LoopScales::none;
  static constexpr int kN = Config::kStoredN;    // the warpgroup's columns
  static constexpr int kPart = kN / 2;           // accumulators a thread of one block
  static constexpr int kColumns = kN % 16 == 0 ? 16 : 8;
  using Mma = ptx::WgmmaSp<Operand, kN>;
  static_assert(Operand::kSelector1 == 0, "the selector of both steps is taken to be 0");

  static constexpr int kUnits = Config::kUnits;                     // groups of wgmmas a stage and half
  static constexpr int kUnitSteps = 2 / kUnits;                     // wgmmas of a group
  static constexpr int kPiece = kUnits == 2 ? 1 : Accumulate::kSteps / 2;  // stages of a piece

  float part[2][kPart];
  float sum[2][kPart];

  __device__ __forceinline__ PromotedSum(uint32_t shared, int warpgroup) {
    const int lane = threadIdx.x % 32;
    const uint32_t slots = shared + offsetof(Shared, loop_scales);
    // This lane's columns of 16 lie side by side (see load_scales).
    columns0 = slots + 16 * (lane % 4) + (kColumns == 16 ? 4 * kN : 8) * warpgroup;
    rows0 = slots + 4 * Config::kTileN +
            (kBlock ? 0 : 4 * (static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane / 4));
  }

  // Sums k_blocks stages, the next of the ring, into `sum`.
  //
  // Order, of one warpgroup. A group of wgmmas is waited for, by "all but the newest are done", before
  // its partial accumulators are read, and they are read before they are multiplied into again, which
  // the fence before every group orders. A stage is released after X and Y of it have been waited for
  // and added, and so after its scales have arrived in registers: so `produce_a`'s conditions hold.
  // Scales, and the next stage's metadata, are read while wgmmas run: beside them a load of shared memory
  // takes long. The tensor core reads a stage's words of metadata until its wgmmas are done: `keep`, behind
  // the wait that proves it, is there so that no other word gets their registers; check.py proves that on
  // the machine code.
  //
  // ptxas lets accumulators be read while others are multiplied into only where it can follow both, or
  // it makes every wgmma wait (C7514): on all paths that join the same wgmmas must be in flight, and
  // the piece of one that is in flight from one round of a loop to the next must go on there. With
  // pieces of several stages a round ends inside a piece; with shorter ones it ends with a wait for
  // all, once in kBody stages, while the other warpgroup multiplies. So do metadata that a branch has read
  // (C7513): whether they are read ahead does not depend on what is only known as the kernel runs.
  __device__ __forceinline__ void run(int k_blocks, const Stages& stages, Position& ring) {
#pragma unroll
    for (int i = 0; i < 2 * kPart; ++i) sum[i / kPart][i % kPart] = 0.0f;
    int k = 0;
    if constexpr (kPiece > 1) {
      stage<true, false>(stages, ring, true, false);
#pragma unroll 1
      for (k = 1; k + kPiece <= k_blocks; k += kPiece) {
#pragma unroll
        for (int s = 1; s <= kPiece; ++s)
          stage<false, false>(stages, ring, s % kPiece == 0, (s + 1) % kPiece == 0);
      }
#pragma unroll
      for (int s = 1; s < kPiece; ++s) {
        if (k == k_blocks) break;
        stage<false, false>(stages, ring, false, s + 1 == kPiece);
        ++k;
      }
      drain(stages, k % kPiece != 0);  // the last piece may be a shorter one
    } else {
      constexpr int kBody = kBlock ? 8 : 4;  // more would not fit the registers of scales of rows
#pragma unroll 1
      for (; k + kBody <= k_blocks; k += kBody) {
        stage<true, true>(stages, ring, true, true);
#pragma unroll
        for (int s = 1; s < kBody - 1; ++s) stage<false, true>(stages, ring, true, true);
        stage<false, false>(stages, ring, true, true);
        drain(stages, false);
      }
#pragma unroll 1
      for (; k < k_blocks; ++k) {
        stage<true, false>(stages, ring, true, true);
        drain(stages, false);
      }
    }
  }

 private:
  uint32_t reading = 0;          // the stage that Y has in flight
  uint32_t columns0, rows0;      // where this lane's columns and rows have their scales
  // Those of its columns, for X's piece and then Y's, and of the rows of either.
  float column[kScaled ? kN / 4 : 1], row[2][2];
  Meta meta[2], flying;  // read last, of X and Y; of Y in flight

  // Starts one block's wgmmas of a unit.
  __device__ __forceinline__ void issue(const Stages& stages, int block, int unit, uint32_t stage,
                                        Meta meta, bool begins) {
    const uint64_t desc_a = stages.desc_a(stage, block), desc_b = stages.desc_b(stage);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kUnitSteps; ++i) {
      const int step = unit * kUnitSteps + i;
      Mma::template issue<0>(part[block], desc_a + step * (32 >> 4), desc_b + step * (64 >> 4),
                             Operand::meta_word(meta, step), !(begins && i == 0));
    }
    ptx::wgmma_commit();
  }

  // One stage: the First, with nothing in flight, or one that finds Y of the stage before; it leaves
  // its own. With Ahead it waits for the next one too and reads its metadata, while its own wgmmas run:
  // then that one, which is none of the First, does not.
  // `begins` and `ends`: the stage does so with a piece.
  template <bool First, bool Ahead>
  __device__ __forceinline__ void stage(const Stages& stages, Position& ring, bool begins, bool ends) {
    if constexpr (First || kPiece > 1) {
      stages.await(ring, First);
      read_meta(stages, ring.stage);
    }
    Position next = ring;
    next.advance();
    const Meta own[2] = {meta[0], meta[1]};
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      issue(stages, 0, unit, ring.stage, own[0], kUnits == 2 || begins);
      if (unit > 0) {
        ptx::wgmma_wait<1>();
        add(1);
      } else if constexpr (!First) {
        ptx::wgmma_wait<1>();
        Stages::keep(flying);
        if (begins) add(1);
      }
      issue(stages, 1, unit, ring.stage, own[1], kUnits == 2 || begins);
      // The stage before has been read since that wait; first the tensor core got its work.
      if (!First && unit == 0) stages.release(reading);
      fetch_scales(ring.stage, unit);
      if constexpr (Ahead)
        if (unit == kUnits - 1) {
          stages.await(next, false);
          read_meta(stages, next.stage);
        }
      ptx::wgmma_wait<1>();
      Stages::keep(own[0]);
      if (kUnits == 2 || ends) add(0);
    }
    flying = own[1];
    reading = ring.stage;
    ring = next;
  }
  __device__ __forceinline__ void read_meta(const Stages& stages, uint32_t stage) {
    meta[0] = stages.meta(stage, 0), meta[1] = stages.meta(stage, 1);
  }

  // Waits for all and adds Y's piece, and X's where it has not ended yet.
  __device__ __forceinline__ void drain(const Stages& stages, bool x_too) {
    ptx::wgmma_wait<0>();
    Stages::keep(flying);
    if (x_too) add(0);
    add(1);
    stages.release_last(reading);
  }

  // Reads the scales of a unit, while its wgmmas run.
  __device__ __forceinline__ void fetch_scales(uint32_t stage, int unit) {
    if constexpr (kScaled) {
      const uint32_t slot = (stage * kUnits + unit) * Config::kScaleSlotBytes;
#pragma unroll
      for (int n = 0; n < kN; n += kColumns) {
        float* to = column + n / 4;
        if constexpr (kColumns == 16) {
          const float4 four = ptx::load_shared<float4>(columns0 + slot + 4 * n);
          to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
        } else {
          const float2 two = ptx::load_shared<float2>(columns0 + slot);
          to[0] = two.x, to[1] = two.y;
        }
      }
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const uint32_t from = rows0 + slot + 4 * (kBlock ? 1 : kBlockRows) * b;
        row[b][0] = ptx::load_shared<float>(from);
        row[b][1] = kBlock ? 0.0f : ptx::load_shared<float>(from + 32);
      }
    }
  }

  // Adds one block's piece, which has been waited for, to the sum. `part` and `sum` pass through empty
  // statements: the compiler takes `part` for known as soon as its wgmma has been started, and would
  // move additions into later branches, where ptxas no longer sees that the wgmma has ended (C7514).
  __device__ __forceinline__ void add(int block) {
#pragma unroll
    for (int i = 0; i < kPart; ++i) asm volatile("" : "+f"(part[block][i])::"memory");
    if constexpr (!kScaled) {
#pragma unroll
      for (int i = 0; i < kPart; ++i) sum[block][i] += part[block][i];
    } else {
#pragma unroll
      for (int c = 0; c < kN / 4; ++c) {
        const float scale = kBlock ? column[c] * row[block][0] : column[c];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int i = 4 * (c / 2) + 2 * h + c % 2;
          const float value = kBlock ? part[block][i] : part[block][i] * row[block][h];
          sum[block][i] = fmaf(value, scale, sum[block][i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kPart; ++i) asm volatile("" : "+f"(sum[block][i])::"memory");
  }
};

// What is not given is this, for all rows.
__device__ const float kNoScale = 1.0f;

// Two warps of the last warpgroup, beside the producer's: one for A, one for B. They fill the stages'
// slots of scales, four bytes a copy, since scales of neighbouring rows do not lie side by side.
//
// Order. A slot belongs to its stage: it is written after empty[stage] has completed, to which every
// consumer of this CTA arrives after all its warps have read the slot (release there, acquire here),
// and read after full[stage] has completed, to which each lane's arrival counts when its copies have
// been made. No arrival is early: the next round of a stage is filled only after empty[stage] has
// completed again, and so after full[stage] has been waited for. These copies are not of the async
// proxy, and no other writes or reads the slots.
template <class Config, bool kOfA>
__device__ __forceinline__ void load_scales(const GemmArgs& args, uint32_t shared,
                                            uint32_t m_rank, int part) {
  using Shared = typename Config::Shared;
  constexpr bool kBlock = kOfA && Config::Accumulate::kScales == LoopScales::block;
  constexpr int kCount = !kOfA ? Config::kTileN : kBlock ? Config::kRowBlocks : Config::kTileM;
  constexpr int kApart = kBlock ? kBlockRows : 1;  // rows
  constexpr int kEach = (kCount + 31) / 32;
  constexpr int kUnits = Config::kUnits, kUnitSteps = 2 / kUnits;
  const int lane = threadIdx.x % 32;
  const uint64_t given = kOfA ? args.scale_a : args.scale_b;
  const float* scales = given ? reinterpret_cast<const float*>(given) : &kNoScale;
  const int last = (kOfA ? args.m : args.n) - 1, rows = kOfA ? args.scale_a_rows : 1;
  const int stride = kOfA ? args.scale_a_stride : args.scale_b_stride;
  const int steps = kOfA ? args.scale_a_steps : args.scale_b_steps;
  const int along = kOfA ? args.scale_a_along : args.scale_b_along;
  // Of 16 columns, those that a lane of the accumulators holds, 2q, 2q + 1, 2q + 8 and 2q + 9, become
  // neighbours: the wgmmas fill the port of shared memory, so they are read as few times as can be.
  const int place = kOfA ? Config::kTileN + lane
                         : (lane & 16) + lane % 8 / 2 * 4 + lane / 8 % 2 * 2 + lane % 2;
  const uint32_t slots = shared + offsetof(Shared, loop_scales) + 4 * place;
  Ring<Config::kStages> ring;
  Schedule<Config> schedule(args);
  const KShare<Config> share(args, part);
  ptx::wait_for_prerequisites();  // scales of B may be what the kernel before has made
  for (int m0, n0; schedule.next(m_rank, m0, n0);) {
    // Rows past the edge, of which nothing is stored, take the last one's scale.
    int row[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      row[i] = min((kOfA ? m0 : n0) + (i * 32 + lane) * kApart, last) / rows * stride;
#pragma unroll 1
    for (int k = share.first; k < share.first + share.blocks; ++k) {
      ptx::mbarrier_wait(shared + offsetof(Shared, empty) + ring.stage * 8, ring.parity ^ 1);
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        const uint32_t slot = slots + (ring.stage * kUnits + unit) * Config::kScaleSlotBytes;
        // The last stage may have a step past K, where all products are 0: not so its scale.
        const float* from =
            scales + min(2 * k + unit * kUnitSteps, args.k_steps - 1) / steps * along;
#pragma unroll
        for (int i = 0; i < kEach; ++i)
          if (i * 32 + lane < kCount) ptx::copy_async(slot + 4 * i * 32, from + row[i]);
      }
      ptx::mbarrier_arrive_after_copies(shared + offsetof(Shared, full) + ring.stage * 8);
      ring.advance();
    }
  }
}

}  // namespace sp24
