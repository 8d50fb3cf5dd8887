// The body of every GEMM kernel: one warp that copies, warpgroups that multiply, a ring of stages
// between them, and a persistent walk over the tiles of D. cuda/README.md draws it.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "sp24/args.cuh"
#include "sp24/config.cuh"
#include "sp24/epilogue.cuh"
#include "sp24/exchange.cuh"
#include "sp24/ptx/copy.cuh"
#include "sp24/ptx/mbarrier.cuh"
#include "sp24/ptx/warp.cuh"
#include "sp24/ptx/wgmma_sp.cuh"
#include "sp24/schedule.cuh"

namespace sp24 {

// Position in the ring: which stage, and the parity of its current round.
template <int kStages>
struct Ring {
  uint32_t stage = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Boxes of B that a CTA prefetches at most.
constexpr int kPrefetchBoxes = 2;

// One thread. Fills stages: each consumer's block of A for this CTA, and this CTA's share of B for
// all of the cluster that work on the same part of K.
//
// Order. A stage is written again only after empty[stage] has completed, that is after every
// consumer of every CTA that the write reaches has arrived there: its first warp does, behind a
// barrier that each of its warps reaches when the wgmmas that read the stage have been waited for.
// - A and metadata are written by this CTA alone. Its consumers' arrivals release and the wait here
//   acquires, which orders their metadata loads before the copy; A they read by wgmma, which is over.
// - B is also written for the other CTAs of the cluster, and there read by wgmma alone. A wgmma that
//   has been waited for has read its operands, so nothing is left to order: the arrivals at other
//   CTAs are relaxed. (A release at cluster scope would be a MEMBAR.ALL.GPU in the loop.)
// The bytes are published by the copies' complete_tx on full[stage], which consumers acquire.
template <class Config>
__device__ __forceinline__ void produce(const CUtensorMap* map_b, const GemmArgs& args,
                                        uint32_t shared, uint32_t m_rank, int part) {
  using Shared = typename Config::Shared;
  const uint8_t* a = reinterpret_cast<const uint8_t*>(args.a);
  const int64_t row_bytes = int64_t{args.k_blocks} * Config::kBlockBytes;
  Ring<Config::kStages> ring;
  Schedule<Config> schedule(args);
  const KShare<Config> share(args, part);
  const uint64_t policy_a = ptx::l2_policy(args.read_once & 1);
  const uint64_t policy_b = ptx::l2_policy(args.read_once & 2);
  ptx::wait_for_prerequisites();  // B is read from here on
  // A B that all CTAs will read at once is brought into L2 first, a box a CTA, or each box would be
  // asked for by every one of them while it is still on its way from memory.
  const int boxes_n = (args.n + Config::kBoxRowsB - 1) / Config::kBoxRowsB;
  const int boxes = args.k_blocks * boxes_n;
  if (boxes <= kPrefetchBoxes * gridDim.x)
    for (int box = blockIdx.x; box < boxes; box += gridDim.x)
      ptx::tensor_prefetch(map_b, box / boxes_n * kRowBytesB, box % boxes_n * Config::kBoxRowsB);
  for (int m0, n0; schedule.next(m_rank, m0, n0);) {
    const uint8_t* blocks[Config::kConsumers];
#pragma unroll
    for (int w = 0; w < Config::kConsumers; ++w) {
      // Blocks past the last are never stored: read the last again instead of beyond the image.
      const int block = min(m0 / kBlockRows + w, args.m_blocks - 1);
      blocks[w] = a + block * row_bytes + share.first * Config::kBlockBytes;
    }
#pragma unroll 1
    for (int k = share.first; k < share.first + share.blocks; ++k) {
      const uint32_t full = shared + offsetof(Shared, full) + ring.stage * 8;
      const uint32_t empty = shared + offsetof(Shared, empty) + ring.stage * 8;
      // The first round finds the barrier fresh: the phase before its first counts as complete.
      ptx::mbarrier_wait(empty, ring.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, Config::kStageBytes);
      const uint32_t stage_a =
          shared + offsetof(Shared, a) + ring.stage * Config::kConsumers * Config::kBlockBytes;
#pragma unroll
      for (int w = 0; w < Config::kConsumers; ++w) {
        ptx::bulk_copy(stage_a + w * Config::kBlockBytes, blocks[w], Config::kBlockBytes, full,
                       policy_a);
        blocks[w] += Config::kBlockBytes;
      }
      const uint32_t stage_b = shared + offsetof(Shared, b) +
                               (ring.stage * Config::kTileN + m_rank * Config::kBoxRowsB) *
                                   kRowBytesB;
      if constexpr (Config::kCluster == 1)
        ptx::tensor_copy(stage_b, map_b, k * kRowBytesB, n0, full, policy_b);
      else
        ptx::tensor_copy_multicast(stage_b, map_b, k * kRowBytesB,
                                   n0 + m_rank * Config::kBoxRowsB, full,
                                   static_cast<uint16_t>(((1 << Config::kCluster) - 1)
                                                         << part * Config::kCluster),
                                   policy_b);
      ring.advance();
    }
  }
}

// One warpgroup: 64 rows of the tile, over one part of K.
template <class Config>
__device__ __forceinline__ void consume(const GemmArgs& args, uint32_t shared, uint32_t m_rank,
                                        int part, int warpgroup) {
  using Shared = typename Config::Shared;
  using Operand = typename Config::Operand;
  using Mma = ptx::WgmmaSp<Operand, Config::kTileN>;
  constexpr int kStages = Config::kStages;
  const int lane = threadIdx.x % 32;

  // The first warp waits for stages and gives them back for all four, for the wgmmas fill the port of
  // shared memory and each access beside them lengthens the loop. Its lane c arrives at the
  // barrier of the CTA at place c along M: see `produce` for the two kinds of arrival.
  const bool first_warp = __shfl_sync(0xffffffffu, threadIdx.x % 128 / 32, 0) == 0;
  const uint32_t empty = shared + offsetof(Shared, empty);
  const bool arrives_there = lane < Config::kCluster && lane != m_rank;
  const bool arrives_here = lane == m_rank;
  const uint32_t there =
      ptx::map_to_cta(empty, part * Config::kCluster + (arrives_there ? lane : m_rank));
  // Order. `has_read` gathers the warps behind their reads of a stage, `has_landed` sends them on once
  // the first has acquired its bytes. A warp reaches `has_read` again only through `has_landed`, which
  // the first warp reaches only through `has_read`: neither barrier is met twice in a phase.
  const int has_read = kBarriers * warpgroup + 2, has_landed = kBarriers * warpgroup + 3;
  // (At the end of a tile, where two stages are given back in a row, all meet at the epilogue's barrier.)
  const auto give_back = [&](uint32_t stage) {
    if (!first_warp) return;
    if (arrives_here) ptx::mbarrier_arrive(empty + stage * 8);
    if (Config::kCluster > 1 && arrives_there)
      ptx::mbarrier_arrive_relaxed_cluster(there + stage * 8);
  };
  const auto wait_landed = [&](uint32_t stage, uint32_t parity) {
    if (first_warp) {
      ptx::mbarrier_wait(shared + offsetof(Shared, full) + stage * 8, parity);
      ptx::named_barrier_arrive(has_landed, 128);
    } else {
      ptx::named_barrier_sync(has_landed, 128);
    }
  };

  const uint32_t a0 = shared + offsetof(Shared, a) + warpgroup * Config::kBlockBytes;
  const uint32_t b0 = shared + offsetof(Shared, b);
  const uint32_t meta0 =
      a0 + kBlockValueBytes + (threadIdx.x % 128) * sizeof(typename Operand::Meta);
  const uint64_t desc_a0 = ptx::descriptor<2, 512>(a0), desc_b0 = ptx::descriptor<1, 1024>(b0);
  constexpr uint32_t kStageA = Config::kConsumers * Config::kBlockBytes;
  constexpr uint32_t kStageB = Config::kTileN * kRowBytesB;

  float acc[Config::kTileN / 2];
  Ring<kStages> ring;
  Schedule<Config> schedule(args);
  const KShare<Config> share(args, part);

  // Waits for the stage and starts its two steps. Step 1 lies 32 bytes further in a row of A and 64
  // bytes further in a row of B: inside the swizzle span, where the hardware swizzles the sum.
  // The tensor core reads the metadata registers while the wgmmas run, which ptxas does not know: that
  // they are not written before the wait is proven on the machine code, by check.py.
  const auto multiply = [&](uint32_t accumulate) {
    wait_landed(ring.stage, ring.parity);
    const typename Operand::Meta meta = ptx::load_shared<typename Operand::Meta>(
        meta0 + ring.stage * kStageA);
    const uint64_t desc_a = desc_a0 + ring.stage * (kStageA >> 4);
    const uint64_t desc_b = desc_b0 + ring.stage * (kStageB >> 4);
    ptx::wgmma_fence();
    Mma::template issue<0>(acc, desc_a, desc_b, Operand::meta_word(meta, 0), accumulate);
    Mma::template issue<Operand::kSelector1>(acc, desc_a + (32 >> 4), desc_b + (64 >> 4),
                                             Operand::meta_word(meta, 1), 1);
    ptx::wgmma_commit();
  };

  uint32_t reading = 0;
  TileScales<Config> scales(shared, warpgroup);
  const uint32_t chunks =
      shared + offsetof(Shared, chunks) + warpgroup * sizeof(Shared::chunks) / Config::kConsumers;
  const int barrier = kBarriers * warpgroup + 1;
  Store16<Config> finished;  // the tile before, as far as it is not stored yet
  // One k: the wgmmas of this stage start, and the stage before is released once all but the newest
  // group are done, that is once it has been read. A chunk of the tile before is stored beside them
  // (c >= 0); the barrier that turning it needs is the one that gathers the readers.
  const auto step = [&](int c) {
    const bool turns = Config::kTurned && c >= 0;
    multiply(1);
    if (turns)
      finished.turn(c, chunks);
    else if (c >= 0)
      finished.write(c, args, chunks);
    ptx::wgmma_wait<1>();
    if (first_warp || turns)
      ptx::named_barrier_sync(has_read, 128);
    else
      ptx::named_barrier_arrive(has_read, 128);
    give_back(reading);
    if (turns) finished.write(c, args, chunks);
    reading = ring.stage;
    ring.advance();
  };

  ptx::wait_for_prerequisites();  // scales are read and D is written from here on
  [[maybe_unused]] Exchange<Config> exchange(shared, m_rank, part, warpgroup);
  for (int m0, n0; schedule.next(m_rank, m0, n0);) {
    m0 += warpgroup * kBlockRows;
    n0 += part * Config::kStoredN;
    scales.fetch(args, m0, n0);
    multiply(0);
    reading = ring.stage;
    ring.advance();
    int k = 1;
    if constexpr (Config::kDeferred) {
      constexpr int kChunks = Store16<Config>::kChunks;
      if (share.blocks > kChunks) {
        // The tile before is stored in the shadow of this one's wgmmas, a chunk a step.
#pragma unroll
        for (int c = 0; c < kChunks; ++c) step(c);
        k += kChunks;
      } else {
        finished.store(args, chunks, barrier);
      }
    }
    for (; k < share.blocks; ++k) step(-1);
    ptx::wgmma_wait<0>();
    ptx::named_barrier_sync(barrier, 128);
    give_back(reading);
    if constexpr (Config::kSplit > 1) {
      typename Config::StoredSums sums;
      exchange(acc, sums, share.counts, schedule.more());
      store_tile<Config>(sums, args, scales, chunks, barrier, m0, n0);
    } else if constexpr (Config::kDeferred) {
      finished.take(acc, args, scales, m0, n0);
    } else {
      store_tile<Config>(acc, args, scales, chunks, barrier, m0, n0);
    }
  }
  if constexpr (Config::kDeferred) finished.store(args, chunks, barrier);
}

template <class Config>
__device__ __forceinline__ void gemm(const CUtensorMap& map_b, const GemmArgs& args) {
  using Shared = typename Config::Shared;
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  const uint32_t shared = ptx::shared_address(dynamic_shared);
  // A cluster's CTAs: M fastest, then the parts of K.
  const uint32_t cta_rank = Config::kClusterCtas == 1 ? 0 : ptx::cluster_cta_rank();
  const uint32_t m_rank = Config::kSplit == 1 ? cta_rank : cta_rank % Config::kCluster;
  const int part = Config::kSplit == 1 ? 0 : cta_rank / Config::kCluster;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // uniform for the compiler too

  if (warp == 0 && ptx::elect_one()) {
    for (int s = 0; s < Config::kStages; ++s) {
      ptx::mbarrier_init(shared + offsetof(Shared, full) + s * 8, 1);
      ptx::mbarrier_init(shared + offsetof(Shared, empty) + s * 8, Config::kReleases);
    }
    if constexpr (Config::kSplit > 1)
      for (int w = 0; w < Config::kConsumers; ++w) {
        ptx::mbarrier_init(shared + offsetof(Shared, exchange.landed) + w * 8, 1);
        ptx::mbarrier_init(shared + offsetof(Shared, exchange.taken) + w * 8,
                           Config::kExchangeReleases);
      }
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(&map_b);
  }
  // No CTA may copy into, or arrive at, another's shared memory before its barriers stand.
  ptx::cluster_sync();

  ptx::launch_dependents();

  if (warp >= 4 * Config::kConsumers) {
    ptx::set_registers_down<Config::kProducerRegisters>();
    if (warp == 4 * Config::kConsumers && ptx::elect_one())
      produce<Config>(&map_b, args, shared, m_rank, part);
    __syncwarp();
  } else {
    ptx::set_registers_up<Config::kConsumerRegisters>();
    consume<Config>(args, shared, m_rank, part, warp / 4);
  }
  // A CTA's shared memory must outlive the copies and arrivals that its cluster sends to it.
  ptx::cluster_sync();
}

}  // namespace sp24
