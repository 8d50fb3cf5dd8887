// The sum of a tile whose rows all have one scale of A in each of its blocks along K: every block is
// multiplied into partial accumulators and added to f32 registers under its scale.
//
// A thread's accumulators lie in a quarter of the tile's columns, in two rows of each, and every thread needs
// the scales of its columns. Loads would fill the port of shared memory that the wgmmas read through. So the
// products of both scales lie there as three numbers of tf32 each that add up to them, and a wgmma by a matrix of
// ones adds them up, without an error, and hands each thread its own. In the upper eight of a warp's sixteen
// rows, where a thread has one row of its accumulators, that wgmma sums the scales of the left half of the
// columns, in the lower eight those of the right half: so it is half as wide as the tile, and no scale is there
// twice.
//
//               left half's terms   right half's         columns 0..N/2-1 of the wgmma
//   rows 0..7        1 1 1 0            0 0 0 0     ->   scales of the left half
//   rows 8..15       0 0 0 0            1 1 1 0     ->   scales of the right half
//
// The warpgroups lie one above the other, as without scales. While one adds, the tensor core multiplies for
// the other.
#pragma once
#include <cstddef>
#include <cstdint>

#include "sp24/args.cuh"
#include "sp24/config.cuh"
#include "sp24/exchange.cuh"
#include "sp24/promote.cuh"
#include "sp24/ptx/mbarrier.cuh"
#include "sp24/ptx/warp.cuh"
#include "sp24/ptx/wgmma_sp.cuh"
#include "sp24/ring.cuh"
#include "sp24/schedule.cuh"

namespace sp24 {

template <class Config>
struct SpreadSum {
  using Shared = typename Config::Shared;
  using Operand = typename Config::Operand;
  using Meta = typename Operand::Meta;
  using Stages = StageReader<Config>;
  using Position = Ring<Config::kStages>;
  static constexpr int kN = Config::kTileN;
  static constexpr int kSums = kN / 2;
  using Mma = ptx::WgmmaSp<Operand, kN>;
  using Spread = ptx::WgmmaTf32<kN / 2>;
  static_assert(kN % 16 == 0, "either half of the columns is what wgmma multiplies");
  static_assert(Operand::kSelector1 == 0, "the selector of both steps is taken to be 0");
  static_assert(Config::kStages > 1, "either warp that brings scales has a stage");

  float sum[kSums];

  __device__ __forceinline__ SpreadSum(uint32_t shared, int m)
      : terms0(ptx::descriptor_of_cores<16 * kN / 2, 128>(shared + offsetof(Shared, loop_scales))) {
    const int lane = threadIdx.x % 32, q = lane % 4;
    // From a lane (its own), or ptxas works them out anew for every stage.
    ones[0] = ones[3] = __shfl_sync(0xffffffffu, q < 3 ? __float_as_uint(1.0f) : 0, lane);
    ones[1] = ones[2] = 0;
    zero = uint32_t(m) >> 31;
  }

  // Sums k_blocks stages, the next of the ring, into `sum`.
  //
  // Order, of one warpgroup. A stage's wgmmas are waited for before their accumulators and scales are read,
  // and these are read before the next stage's are started, which the fence orders. A stage is released after
  // that wait, when the next one's have started, and its metadata, read before its own, are in registers: so
  // `produce_a`'s conditions hold, and those of `load_tile_scales`. The tensor core reads the metadata
  // registers until its wgmmas are done: `keep`, behind the wait, is there so that no other word gets them;
  // check.py proves that on the machine code.
  __device__ __forceinline__ void run(int k_blocks, const Stages& stages, Position& ring) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sum[i] = 0.0f;
    stages.await(ring, true);
    meta = stages.meta(ring.stage);
    if (k_blocks == 1) {
      stage<true, true>(stages, ring);
      return;
    }
    stage<true, false>(stages, ring);
#pragma unroll 1
    for (; k_blocks > 2; --k_blocks) stage<false, false>(stages, ring);
    stage<false, true>(stages, ring);
  }

 private:
  uint64_t terms0;
  uint32_t ones[4];
  float part[kSums], scale[kSums / 2];
  Meta meta;             // of the next stage
  uint32_t reading = 0;  // the stage before
  // 0, which ptxas does not know: it makes every wgmma wait if metadata registers are loaded while others'
  // wgmmas run (C7513), but not if they are computed after these.
  uint32_t zero;

  // Whether it is the last decides what is read ahead, and so must be known to ptxas (C7513).
  template <bool kFirst, bool kLast>
  __device__ __forceinline__ void stage(const Stages& stages, Position& ring) {
    const uint32_t now = ring.stage;
    const Meta own = meta;
    const uint64_t desc_a = stages.desc_a(now), desc_b = stages.desc_b(now);
    ptx::wgmma_fence();
    Spread::issue(scale, ones, terms0 + now * (Config::kScaleSlotBytes >> 4));
    Mma::template issue<0>(part, desc_a, desc_b, Operand::meta_word(own, 0), 0);
    Mma::template issue<0>(part, desc_a + (32 >> 4), desc_b + (64 >> 4), Operand::meta_word(own, 1), 1);
    ptx::wgmma_commit();
    // While they run: the stage before is given back, and the next one's metadata are read.
    if constexpr (!kFirst) stages.release(reading);
    reading = now;
    ring.advance();
    Meta next;
    if constexpr (!kLast) {
      stages.await(ring, false);
      next = stages.meta(ring.stage);
    }
    ptx::wgmma_wait<0>();
    Stages::keep(own);
    if constexpr (kLast) {
      stages.release_last(now);
    } else {
      asm volatile("xor.b32 %0, %1, %2;" : "=r"(meta.x) : "r"(next.x), "r"(zero));
      asm volatile("xor.b32 %0, %1, %2;" : "=r"(meta.y) : "r"(next.y), "r"(zero));
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      // Accumulator i is of column 8 (i / 4) + 2 q + i % 2: in the left half its scale came with the first
      // row of the thread, in the right one with the second.
      constexpr int kHalf = kN / 16;
      const int eight = i / 4, odd = i % 2;
      const int at = eight < kHalf ? 4 * eight + odd : 4 * (eight - kHalf) + 2 + odd;
      sum[i] = fmaf(part[i], scale[at], sum[i]);
    }
  }
};

// Four numbers of which tf32 takes the first eleven bits each: the first three of these add up to `s`, which has
// 24 (from 2^-113 on: below, what is left of the last lies under the least of tf32), and the fourth does not
// count. What is not finite becomes the largest that is: every row of the wgmma meets the terms of a column of
// either half, and 0 times infinity is a NaN in the other half's too.
__device__ __forceinline__ uint4 three_terms(float s) {
  constexpr float kMost = 3.40282347e38f;
  s = fmaxf(fminf(s, kMost), -kMost);
  const auto beyond = [](float x) { return x - __uint_as_float(__float_as_uint(x) & 0xffffe000); };
  const float second = beyond(s);
  const uint32_t third = __float_as_uint(beyond(second));
  return make_uint4(__float_as_uint(s), __float_as_uint(second), third, third);
}

// Where in a matrix of scales those of every other block along K lie: one spans `span` blocks, the next lies
// `along` elements further.
struct EveryOther {
  uint32_t at;
  int left, span, along;

  __device__ __forceinline__ EveryOther(int k, int steps, int along) : span(steps / 2), along(along) {
    at = k / span * along;
    left = span - k % span;
    if (span == 1) left = span = 2, this->along *= 2;
  }
  __device__ __forceinline__ void advance() {
    left -= 2;
    if (left <= 0) left += span, at += along;
  }
};

// Two warps of the last warpgroup, beside the producers', fill the stages' slots of terms, every other stage
// each. The fence waits for loads that are on their way: so several stages' scales are asked for at once, and then
// none until they are stored.
//
// Order. A slot belongs to its stage: it is written after empty[stage] has completed, and read after
// full[stage] has, to which each lane's arrival counts. The wgmmas, which are of the async proxy, read what
// these lanes write: each fences its own stores before it arrives. A wgmma that has been waited for has read
// its operands, so that the next stores come after `empty`. No wait takes another phase for its own: stages are
// given back in turn, so this one was for the last time but one when the one before in turn was for the
// last time; and it is not again before this warp has arrived.
template <class Config, int kWarp>
__device__ __forceinline__ void load_tile_scales(const GemmArgs& args, uint32_t shared,
                                                 uint32_t m_rank, int part) {
  using Shared = typename Config::Shared;
  constexpr int kEach = (Config::kTileN + 31) / 32;
  constexpr int kAtOnce = 3;
  const int lane = threadIdx.x % 32;
  const float* of_a = args.scale_a ? reinterpret_cast<const float*>(args.scale_a) : &kNoScale;
  const float* of_b = args.scale_b ? reinterpret_cast<const float*>(args.scale_b) : &kNoScale;
  const uint32_t slots = shared + offsetof(Shared, loop_scales) + 16 * lane;
  const uint32_t full = shared + offsetof(Shared, full), empty = shared + offsetof(Shared, empty);
  Ring<Config::kStages> ring(kWarp);
  Schedule<Config> schedule(args);
  const KShare<Config> share(args, part);
  int skipped = kWarp;  // of a tile's blocks: the first is the other warp's
  ptx::wait_for_prerequisites();  // scales of B may be what the kernel before has made
  for (int m0, n0; schedule.next(m_rank, m0, n0);) {
    // Rows past the edge, of which nothing is stored, take the last one's scale.
    const int a_row = min(m0, args.m - 1) / args.scale_a_rows * args.scale_a_stride;
    int b_row[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      b_row[i] = min(n0 + lane + 32 * i, args.n - 1) * args.scale_b_stride;
    EveryOther along_a(share.first + skipped, args.scale_a_steps, args.scale_a_along);
    EveryOther along_b(share.first + skipped, args.scale_b_steps, args.scale_b_along);
    int left = share.blocks - skipped;
#pragma unroll 1
    while (left > 0) {
      float a[kAtOnce], b[kAtOnce][kEach];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (left <= 2 * j) break;
        a[j] = of_a[a_row + along_a.at];
#pragma unroll
        for (int i = 0; i < kEach; ++i) b[j][i] = of_b[b_row[i] + along_b.at];
        along_a.advance(), along_b.advance();
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (left <= 0) break;
        ptx::mbarrier_wait(empty + ring.stage * 8, ring.parity ^ 1);
#pragma unroll
        for (int i = 0; i < kEach; ++i)
          if (lane + 32 * i < Config::kTileN)
            ptx::store_shared(slots + ring.stage * Config::kScaleSlotBytes + 16 * 32 * i,
                              three_terms(__fmul_rn(a[j], b[j][i])));
        ptx::fence_async_proxy();
        ptx::mbarrier_arrive(full + ring.stage * 8);
        ring.advance();
        ring.advance();
        left -= 2;
      }
    }
    skipped = -left;
  }
}

}  // namespace sp24
