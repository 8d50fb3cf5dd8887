// The ring of stages, as its readers see it. What orders reads and writes is in body.cuh.
#pragma once
#include <cstddef>
#include <cstdint>

#include "sp24/config.cuh"
#include "sp24/ptx/mbarrier.cuh"
#include "sp24/ptx/warp.cuh"
#include "sp24/ptx/wgmma_sp.cuh"

namespace sp24 {

// Position in the ring: which stage, and the parity of its current round.
template <int kStages>
struct Ring {
  uint32_t stage = 0, parity = 0;
  Ring() = default;
  // After up to a whole round of stages.
  __device__ __forceinline__ explicit Ring(int stages)
      : stage(stages == kStages ? 0 : stages), parity(stages == kStages) {}
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Where one warpgroup finds a stage's operands, and how it hands the stage back.
//
// With kGathers the first warp waits for stages and gives them back for all four: the wgmmas of wide
// tiles fill the port of shared memory, and each access beside them lengthens the loop. Else every warp
// does for itself. Lane c of a warp that gives back arrives at the barrier of the CTA at place c along
// M: see `produce_a` for the two kinds of arrival.
//
// Order (kGathers). `has_read` gathers the warps behind their reads of a stage, `has_landed` sends them
// on once the first has acquired its bytes. A warp that only arrives at a barrier must not come to it
// again before the phase is over. Stages are awaited and released in turn, so each barrier's next phase
// lies behind the other's, except at the ends of a sum: its second stage is awaited before one has been
// released, so at the first all warps wait for each other; and its last two are released in a row, so
// the last is gathered by the epilogue's barrier, at which all wait.
template <class Config>
struct StageReader {
  using Shared = typename Config::Shared;
  using Meta = typename Config::Operand::Meta;
  static constexpr uint32_t kStageA = Config::kRowBlocks * Config::kStageBlocks * Config::kBlockBytes;
  static constexpr uint32_t kBlockB = Config::kTileN * kRowBytesB;
  static constexpr uint32_t kStageB = Config::kStageBlocks * kBlockB;

  __device__ __forceinline__ StageReader(uint32_t shared, uint32_t m_rank, int part, int warpgroup)
      : full(shared + offsetof(Shared, full)),
        empty(shared + offsetof(Shared, empty)),
        epilogue(kBarriers * warpgroup + 1),
        has_read(kBarriers * warpgroup + 2),
        has_landed(kBarriers * warpgroup + 3) {
    const int lane = threadIdx.x % 32;
    first_warp = __shfl_sync(0xffffffffu, threadIdx.x % 128 / 32, 0) == 0;
    arrives_there = lane < Config::kCluster && lane != m_rank;
    arrives_here = lane == m_rank || (!Config::kGathers && kArrivingLanes == 32);
    there = ptx::map_to_cta(empty, part * Config::kCluster + (arrives_there ? lane : m_rank));
    // Its own block of rows, or the first of those that all warpgroups share.
    const uint32_t a0 = shared + offsetof(Shared, a) +
                        (Config::kSideBySide ? 0 : warpgroup * Config::kStageBlocks * Config::kBlockBytes);
    meta0 = a0 + Config::Operand::kBlockValueBytes + (threadIdx.x % 128) * sizeof(Meta);
    desc_a0 = ptx::descriptor<2, 512>(a0);
    desc_b0 = ptx::descriptor<1, 1024>(
        shared + offsetof(Shared, b) +
        (Config::kSideBySide ? warpgroup * Config::kStoredN * kRowBytesB : 0));
  }

  // Waits for the ring's stage. `first`: of a sum.
  __device__ __forceinline__ void await(const Ring<Config::kStages>& ring, bool first) const {
    if (first_warp || !Config::kGathers) ptx::mbarrier_wait(full + ring.stage * 8, ring.parity);
    if constexpr (Config::kGathers) {
      if (first_warp && !first)
        ptx::named_barrier_arrive(has_landed, 128);
      else
        ptx::named_barrier_sync(has_landed, 128);
    }
  }
  // The metadata of a stage that has landed, of the warpgroup's block of that number: of rows, or along K.
  __device__ __forceinline__ Meta meta(uint32_t stage, int block = 0) const {
    return ptx::load_shared<Meta>(meta0 + stage * kStageA + block * Config::kBlockBytes);
  }
  // Of an 8-bit type: words that the tensor core may read until here, not to be given others' registers before.
  static __device__ __forceinline__ void keep(const Meta& meta) {
    asm volatile("" ::"r"(meta.x), "r"(meta.y));
  }
  // Descriptors of a block's first step. The second lies 32 bytes further in a row of A and 64 bytes
  // further in a row of B: inside the swizzle span, where the hardware swizzles the sum.
  __device__ __forceinline__ uint64_t desc_a(uint32_t stage, int block = 0) const {
    return desc_a0 + stage * (kStageA >> 4) + block * (Config::kBlockBytes >> 4);
  }
  __device__ __forceinline__ uint64_t desc_b(uint32_t stage, int block = 0) const {
    return desc_b0 + stage * (kStageB >> 4) + block * (kBlockB >> 4);
  }

  // This warp has read the stage.
  __device__ __forceinline__ void release(uint32_t stage) const {
    if constexpr (Config::kGathers) {
      if (first_warp)
        ptx::named_barrier_sync(has_read, 128);
      else
        ptx::named_barrier_arrive(has_read, 128);
    }
    give_back(stage);
  }
  // The same of a sum's last stage.
  __device__ __forceinline__ void release_last(uint32_t stage) const {
    if constexpr (Config::kGathers) ptx::named_barrier_sync(epilogue, 128);
    give_back(stage);
  }

 private:
  uint32_t full, empty, there, meta0;
  uint64_t desc_a0, desc_b0;
  int epilogue, has_read, has_landed;  // named barriers
  bool first_warp, arrives_there, arrives_here;

  __device__ __forceinline__ void give_back(uint32_t stage) const {
    if (Config::kGathers && !first_warp) return;
    if constexpr (!Config::kGathers) __syncwarp();  // the arriving lanes speak for the reads of all
    if (arrives_here) ptx::mbarrier_arrive(empty + stage * 8);
    if (Config::kCluster > 1 && arrives_there)
      ptx::mbarrier_arrive_relaxed_cluster(there + stage * 8);
  }
};

}  // namespace sp24
