// The body of every GEMM kernel: two threads that copy, warpgroups that multiply, a ring of stages
// between them, and a persistent walk over the tiles of D. cuda/README.md draws it.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "sp24/args.cuh"
#include "sp24/config.cuh"
#include "sp24/epilogue.cuh"
#include "sp24/exchange.cuh"
#include "sp24/promote.cuh"
#include "sp24/ptx/copy.cuh"
#include "sp24/ptx/mbarrier.cuh"
#include "sp24/ptx/warp.cuh"
#include "sp24/ptx/wgmma_sp.cuh"
#include "sp24/ring.cuh"
#include "sp24/schedule.cuh"
#include "sp24/spread.cuh"
#include "sp24/widen.cuh"

namespace sp24 {

// Boxes of B that a CTA prefetches at most.
constexpr int kPrefetchBoxes = 2;
// See Round.
constexpr int kFewTokens = 256, kManyRows = 3072;

// The blocks along K of a tile, of a part of K, in the order of its stages: from one on to the last and round
// to the first, then those that do not fill a stage.
//
// Every CTA reads the same B, and rows of A that lie equally far apart. In step, many CTAs would ask the same
// few slices of L2 for the same lines of B, and with some strides the same channels of memory for A. So with
// few tokens each row of tiles begins elsewhere, by the golden ratio, which spreads any number of rows over K.
// Few CTAs do not get in each other's way, and all of B would have to come from memory at once. Of many tokens
// B does not stay in L2, and what is read together should be read once. Scales of the loop come in the order
// of K.
template <class Config>
struct Round {
  uint32_t k, full;  // the next block, and the blocks of full stages: of the part of K

  // Of the cluster's row of tiles, from the stage after the first `skipped`.
  __device__ __forceinline__ Round(const GemmArgs& args, const KShare<Config>& share, uint32_t row,
                                   int skipped) {
    const uint32_t stages = uint32_t(share.blocks) / Config::kStageBlocks;
    const bool turns = !Config::kScaledInLoop && args.n <= kFewTokens && args.m >= kManyRows;
    full = stages * Config::kStageBlocks;
    k = ((turns ? __umulhi(row * 2654435769u, stages) : 0) + skipped) * Config::kStageBlocks;
    if (k >= full) k -= full;
  }
  // The first block of a full stage.
  __device__ __forceinline__ uint32_t next() {
    const uint32_t at = k;
    k += Config::kStageBlocks;
    if (k == full) k = 0;
    return at;
  }
};

// Where the blocks of a tile's rows lie in the image of A.
template <class Config>
struct BlocksA {
  const uint8_t* image;
  uint32_t rows[Config::kRowBlocks];  // numbers, in the image, of each row's first block of the part of K
  int row_blocks;                     // those that the tile has

  __device__ __forceinline__ BlocksA(const GemmArgs& args, const KShare<Config>& share, int m0,
                                     int row_blocks)
      : image(reinterpret_cast<const uint8_t*>(args.a)),
        row_blocks(Config::kBalanced ? row_blocks : Config::kRowBlocks) {
#pragma unroll
    for (int b = 0; b < Config::kRowBlocks; ++b) {
      // Blocks past the last are never stored: read the last again instead of beyond the image.
      const uint32_t block = min(m0 / kBlockRows + b, args.m_blocks - 1);
      rows[b] = block * args.k_blocks + share.first;
    }
  }
  // Asks for A of a free stage, `count` blocks along K from `k` on.
  __device__ __forceinline__ void fill(uint32_t shared, int stage, uint32_t k, int count,
                                       uint64_t policy) const {
    using Shared = typename Config::Shared;
    constexpr int kRoom = Config::kStageBlocks * Config::kBlockBytes;
    const uint32_t full = shared + offsetof(Shared, full) + stage * 8;
    const uint32_t to = shared + offsetof(Shared, a) + stage * Config::kRowBlocks * kRoom;
    ptx::mbarrier_arrive_expect_tx(full, count * row_blocks * Config::kBlockBytes);
#pragma unroll
    for (int b = 0; b < Config::kRowBlocks; ++b)
      if (b < row_blocks)
        ptx::bulk_copy(to + b * kRoom, image + uint64_t{rows[b] + k} * Config::kBlockBytes,
                       count * Config::kBlockBytes, full, policy);
  }
};

// Rows of B that a tile's stages are given: those that there are. What an earlier tile left behind them
// reaches no column of D.
template <class Config>
__device__ __forceinline__ int rows_of_b(const GemmArgs& args, int n0) {
  return min(Config::kTileN, args.n - n0);
}

// One thread. Asks for one block along K of a tile's rows of B, for all of the cluster that work on the
// same part of K: each CTA for its box of a whole tile, or one in turn for all rows of the last column's.
template <class Config>
__device__ __forceinline__ void fetch_b(const MapsB& maps, uint32_t to, int block, int n0, int rows_b,
                                        uint32_t m_rank, int part, uint32_t full, uint64_t policy) {
  const int x = block * kRowBytesB;
  const bool whole = rows_b == Config::kTileN;
  if constexpr (Config::kCluster == 1) {
    ptx::tensor_copy(to, whole ? &maps.whole : &maps.last, x, n0, full, policy);
  } else {
    const uint16_t ctas = ((1 << Config::kCluster) - 1) << part * Config::kCluster;
    const int box = m_rank * Config::kBoxRowsB;
    if (whole)
      ptx::tensor_copy_multicast(to + box * kRowBytesB, &maps.whole, x, n0 + box, full, ctas, policy);
    else if (block % Config::kCluster == m_rank)
      ptx::tensor_copy_multicast(to, &maps.last, x, n0, full, ctas, policy);
  }
}

// One thread. Asks for A of the first round of the ring, while the kernel before may still run: of
// what it leaves behind A is no part (a weight is uploaded and done before it is used).
//
// Order. Nothing has used these stages before, so there is no `empty` to wait for, and `produce_a` leaves
// them alone. The barriers are this CTA's own, and this thread has initialised them, behind the fence that
// shows them to the copies: so neither the CTA's other threads nor the cluster need be waited for.
template <class Config>
__device__ __forceinline__ void fill_first_round(const GemmArgs& args, uint32_t shared,
                                                 uint32_t m_rank, int part) {
  Schedule<Config> schedule(args);
  const KShare<Config> share(args, part);
  int m0, n0;
  if (!schedule.next(m_rank, m0, n0)) return;
  const BlocksA<Config> blocks(args, share, m0, schedule.blocks);
  Round<Config> round(args, share, schedule.row, 0);
  const uint64_t policy = ptx::l2_policy(args.read_once & 1);
  const int whole = min(share.blocks / Config::kStageBlocks, Config::kStages);
  for (int s = 0; s < whole; ++s)
    blocks.fill(shared, s, round.next(), Config::kStageBlocks, policy);
  const int left = share.blocks % Config::kStageBlocks;
  if (left && whole < Config::kStages) blocks.fill(shared, whole, round.full, left, policy);
}

// One thread. Brings B's maps near, and a B that all CTAs will read at once into L2, a box a CTA, or each
// box would be asked for by every one of them while it is still on its way from memory.
//
// Order. The kernel before may still be writing B: its stores go through the same L2, and nothing is
// read from there before it has ended.
template <class Config>
__device__ __forceinline__ void prefetch_b(const MapsB& maps, const GemmArgs& args) {
  if (args.n >= Config::kTileN) ptx::prefetch_tensor_map(&maps.whole);
  if (args.n % Config::kTileN) ptx::prefetch_tensor_map(&maps.last);
  const int whole = args.n / Config::kTileN * Config::kCluster;
  const int boxes_n = whole + (args.n % Config::kTileN > 0);
  const int boxes = args.k_blocks * boxes_n;
  if (boxes > kPrefetchBoxes * gridDim.x) return;
  for (int box = blockIdx.x; box < boxes; box += gridDim.x) {
    const int k = boxes_n == 1 ? box : box / boxes_n, of_k = box - k * boxes_n;
    ptx::tensor_prefetch(of_k < whole ? &maps.whole : &maps.last, k * kRowBytesB,
                         of_k * Config::kBoxRowsB);
  }
}

// Fills stages, by two threads: one asks for the tile's blocks of A for this CTA, the other for its boxes of
// B, for all of the cluster that work on the same part of K. Each says how many bytes of its operand the
// stage will hold.
//
// Order. A stage is written again only after empty[stage] has completed, that is after every
// consumer of every CTA that the write reaches has arrived there: each of its warps, when it has waited
// for the wgmmas that read the stage, or the first for all, behind a barrier (ring.cuh).
// - A and metadata are written by this CTA alone. Its consumers' arrivals release and the wait here
//   acquires, which orders their metadata loads before the copy; A they read by wgmma, which is over.
// - B is also written for the other CTAs of the cluster, and there read by wgmma alone. A wgmma that
//   has been waited for has read its operands, so nothing is left to order: the arrivals at other
//   CTAs are relaxed. (A release at cluster scope would be a MEMBAR.ALL.GPU in the loop.)
// The bytes are published by the copies' complete_tx on full[stage], which consumers acquire. It is no
// matter which thread, here or in another CTA, comes first: a phase of `full` ends once it has the arrivals
// of both threads here and all bytes. So neither falls a phase of `empty` behind, where its wait would take
// the next phase for this one: that of B arrives for a stage whose boxes other CTAs ask for, too.
template <class Config>
__device__ __forceinline__ void produce_a(const GemmArgs& args, uint32_t shared, uint32_t m_rank,
                                          int part) {
  using Shared = typename Config::Shared;
  Schedule<Config> schedule(args);
  const KShare<Config> share(args, part);
  const uint64_t policy = ptx::l2_policy(args.read_once & 1);
  // Stages of the first round that are asked for already.
  const int stages = (share.blocks + Config::kStageBlocks - 1) / Config::kStageBlocks;
  int filled = Config::kFillsEarly ? min(stages, Config::kStages) : 0;
  Ring<Config::kStages> ring(filled);
  for (int m0, n0; schedule.next(m_rank, m0, n0);) {
    const BlocksA<Config> blocks(args, share, m0, schedule.blocks);
    Round<Config> round(args, share, schedule.row, filled);
    const auto fill = [&](uint32_t k, int count) {
      // The first round finds the barrier fresh: the phase before its first counts as complete.
      ptx::mbarrier_wait(shared + offsetof(Shared, empty) + ring.stage * 8, ring.parity ^ 1);
      blocks.fill(shared, ring.stage, k, count, policy);
      ring.advance();
    };
    int left = share.blocks - filled * Config::kStageBlocks;
    filled = 0;
#pragma unroll 1
    for (; left >= Config::kStageBlocks; left -= Config::kStageBlocks) fill(round.next(), Config::kStageBlocks);
    if (Config::kStageBlocks > 1 && left > 0) fill(round.full, left);
  }
}

// The thread of B.
template <class Config>
__device__ __forceinline__ void produce_b(const MapsB& maps, const GemmArgs& args, uint32_t shared,
                                          uint32_t m_rank, int part) {
  using Shared = typename Config::Shared;
  Ring<Config::kStages> ring;
  Schedule<Config> schedule(args);
  const KShare<Config> share(args, part);
  const uint64_t policy = ptx::l2_policy(args.read_once & 2);
  int m0 = 0, n0 = 0;
  bool more = schedule.next(m_rank, m0, n0);
  // Worked out by now, and not behind the wait, where B's first boxes wait for it.
  asm volatile("" : "+r"(m0), "+r"(n0));
  ptx::wait_for_prerequisites();  // B is read from here on
  for (; more; more = schedule.next(m_rank, m0, n0)) {
    const int rows_b = rows_of_b<Config>(args, n0);
    Round<Config> round(args, share, schedule.row, 0);
    const auto fill = [&](int k, int count) {
      ptx::mbarrier_wait(shared + offsetof(Shared, empty) + ring.stage * 8, ring.parity ^ 1);
      const uint32_t full = shared + offsetof(Shared, full) + ring.stage * 8;
      ptx::mbarrier_arrive_expect_tx(full, count * rows_b * kRowBytesB);
#pragma unroll
      for (int j = 0; j < Config::kStageBlocks; ++j) {
        if (j >= count) break;
        const uint32_t to = shared + offsetof(Shared, b) +
                            (ring.stage * Config::kStageBlocks + j) * Config::kTileN * kRowBytesB;
        fetch_b<Config>(maps, to, k + j, n0, rows_b, m_rank, part, full, policy);
      }
      ring.advance();
    };
    int left = share.blocks;
#pragma unroll 1
    for (; left >= Config::kStageBlocks; left -= Config::kStageBlocks)
      fill(share.first + round.next(), Config::kStageBlocks);
    if (Config::kStageBlocks > 1 && left > 0) fill(share.first + round.full, left);
  }
  // What the cluster's other CTAs send here must find this CTA's shared memory still there, and what they
  // send are arrivals and bytes. The arrivals: it ends when every stage has been given back by all. The
  // bytes of B: its own consumers gave a stage back after these had landed. Of an exchange: see there.
  if constexpr (Config::kCluster > 1)
    for (int s = 0; s < Config::kStages; ++s) {
      ptx::mbarrier_wait(shared + offsetof(Shared, empty) + ring.stage * 8, ring.parity ^ 1);
      ring.advance();
    }
}

// One warpgroup: 64 rows of the tile, over one part of K.
template <class Config>
__device__ __forceinline__ void consume(const GemmArgs& args, uint32_t shared, uint32_t m_rank,
                                        int part, int warpgroup) {
  using Shared = typename Config::Shared;
  using Operand = typename Config::Operand;
  using Mma = ptx::WgmmaSp<Operand, Config::kTileN>;
  const StageReader<Config> stages(shared, m_rank, part, warpgroup);
  typename Config::Accumulators acc;
  Ring<Config::kStages> ring;
  Schedule<Config> schedule(args);
  const KShare<Config> share(args, part);

  // Waits for the stage and starts the two steps of each of its first `count` blocks.
  // The tensor core reads the metadata registers while the wgmmas run, which ptxas does not know: that
  // they are not written before the wait is proven on the machine code, by check.py.
  const auto multiply = [&](auto count, uint32_t accumulate) {
    constexpr int kBlocks = decltype(count)::value;
    stages.await(ring, accumulate == 0);
    typename Operand::Meta meta[kBlocks];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) meta[b] = stages.meta(ring.stage, b);
    ptx::wgmma_fence();
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const uint64_t desc_a = stages.desc_a(ring.stage, b), desc_b = stages.desc_b(ring.stage, b);
      Mma::template issue<0>(acc, desc_a, desc_b, Operand::meta_word(meta[b], 0), b == 0 ? accumulate : 1);
      Mma::template issue<Operand::kSelector1>(acc, desc_a + (32 >> 4), desc_b + (64 >> 4),
                                               Operand::meta_word(meta[b], 1), 1);
    }
    ptx::wgmma_commit();
  };

  uint32_t reading = 0;
  TileScales<Config> scales(shared, warpgroup);
  const uint32_t chunks =
      shared + offsetof(Shared, chunks) + warpgroup * sizeof(Shared::chunks) / Config::kConsumers;
  const int barrier = kBarriers * warpgroup + 1;
  // The wgmmas of a stage start, and the stage before is released once all but the newest group are done,
  // that is once it has been read.
  using Whole = std::integral_constant<int, Config::kStageBlocks>;
  using One = std::integral_constant<int, 1>;
  static_assert(Config::kStageBlocks <= 2, "what does not fill a stage is one block");
  const auto step = [&](auto count) {
    multiply(count, 1);
    ptx::wgmma_wait<1>();
    stages.release(reading);
    reading = ring.stage;
    ring.advance();
  };

  // A tile that has no rows for this warpgroup: its stages are given back as they come. Early is early enough:
  // it waits for `full`, and so arrives once a phase, and it reads nothing of the stage.
  // (kGathers: each stage is awaited and released before the next, so the order of ring.cuh holds.)
  const auto pass_over = [&] {
#pragma unroll(Config::kTall ? 1 : 4)  // as below: with more, some tall kernels spill
    for (int left = share.blocks; left > 0; left -= Config::kStageBlocks) {
      stages.await(ring, false);
      stages.release(ring.stage);
      ring.advance();
    }
  };

  ptx::wait_for_prerequisites();  // scales are read and D is written from here on
  Exchange<Config> exchange(shared, m_rank, part, warpgroup);
  for (int m0, n0; schedule.next(m_rank, m0, n0);) {
    if (Config::kBalanced && warpgroup >= schedule.blocks) {
      pass_over();
      continue;
    }
    m0 += warpgroup * kBlockRows;
    n0 += part * Config::kStoredN;
    scales.fetch(args, m0, n0);
    if (share.blocks < Config::kStageBlocks)
      multiply(One{}, 0);
    else
      multiply(Whole{}, 0);
    reading = ring.stage;
    ring.advance();
    int left = share.blocks - Config::kStageBlocks;
    // Each copy of the loop's body has metadata registers of its own: two are enough (see `multiply`).
#pragma unroll(Config::kTall ? 2 : 4)
    for (; left >= Config::kStageBlocks; left -= Config::kStageBlocks)
      step(Whole{});
    if (Config::kStageBlocks > 1 && left > 0) step(One{});
    ptx::wgmma_wait<0>();
    stages.release_last(reading);
    finish_tile<Config>(acc, exchange, share.counts, schedule.more(), args, scales, chunks, barrier, m0,
                        n0);
  }
  if constexpr (Config::kBalanced && Config::kSplit > 1) exchange.settle();
}

// The same where the sums are promoted.
template <class Config>
__device__ __forceinline__ void consume_promoted(const GemmArgs& args, uint32_t shared,
                                                 uint32_t m_rank, int part, int warpgroup) {
  using Shared = typename Config::Shared;
  const StageReader<Config> stages(shared, m_rank, part, warpgroup);
  Ring<Config::kStages> ring;
  Schedule<Config> schedule(args);
  const KShare<Config> share(args, part);
  auto promoted = [&] {
    if constexpr (Config::kSideBySide)
      return PromotedSum<Config>(shared, warpgroup);
    else
      return SpreadSum<Config>(shared, args.m);
  }();
  TileScales<Config> scales(shared, warpgroup);
  const uint32_t chunks =
      shared + offsetof(Shared, chunks) + warpgroup * sizeof(Shared::chunks) / Config::kConsumers;
  const int barrier = kBarriers * warpgroup + 1;
  ptx::wait_for_prerequisites();  // scales are read and D is written from here on
  Exchange<Config> exchange(shared, m_rank, part, warpgroup);
  for (int m0, n0; schedule.next(m_rank, m0, n0);) {
    m0 += (Config::kSideBySide ? part : warpgroup) * kBlockRows;
    n0 += (Config::kSideBySide ? warpgroup : part) * Config::kStoredN;
    scales.fetch(args, m0, n0);
    promoted.run(share.blocks, stages, ring);
    if constexpr (!Config::kSideBySide) {
      finish_tile<Config>(promoted.sum, exchange, share.counts, schedule.more(), args, scales, chunks,
                          barrier, m0, n0);
    } else if constexpr (Config::kSplit > 1) {
      ptx::wgmma_wait<0>();  // none is left: so check.py sees that what follows is no part of the loop over K
      constexpr int kPart = PromotedSum<Config>::kPart;
      typename Config::Accumulators all;
#pragma unroll
      for (int i = 0; i < 2 * kPart; ++i) all[i] = promoted.sum[i / kPart][i % kPart];
      finish_tile<Config>(all, exchange, share.counts, schedule.more(), args, scales, chunks, barrier, m0,
                          n0);
    } else {
#pragma unroll
      for (int b = 0; b < Config::kStoredBlocks; ++b)
        store_tile<Config>(promoted.sum[b], args, scales, chunks, barrier, m0 + b * kBlockRows, n0, b);
    }
  }
}

template <class Config>
__device__ __forceinline__ void gemm(const MapsB& maps, const GemmArgs& args) {
  using Shared = typename Config::Shared;
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  const uint32_t shared = ptx::shared_address(dynamic_shared);
  // A cluster's CTAs: M fastest, then the parts of K.
  const uint32_t cta_rank = Config::kClusterCtas == 1 ? 0 : ptx::cluster_cta_rank();
  const uint32_t m_rank = Config::kSplit == 1 ? cta_rank : cta_rank % Config::kCluster;
  const int part = Config::kSplit == 1 ? 0 : cta_rank / Config::kCluster;
  // Uniform for the compiler too; and of a tall tile's kernel not by the number that the consumers keep, to which
  // ptxas might give a register that a thread only has later.
  const int warp = __shfl_sync(0xffffffffu, (Config::kTall ? ptx::thread() : threadIdx.x) / 32, 0);

  // Two threads, for each barrier takes its time, and A is asked for behind the first half.
  if (warp == 0 && ptx::elect_one()) {
    for (int s = 0; s < Config::kStages; ++s)
      ptx::mbarrier_init(shared + offsetof(Shared, full) + s * 8, Config::kFills);
    ptx::fence_mbarrier_init();
    if constexpr (Config::kFillsEarly) fill_first_round<Config>(args, shared, m_rank, part);
  }
  if (warp == 2 && ptx::elect_one()) {
    for (int s = 0; s < Config::kStages; ++s)
      ptx::mbarrier_init(shared + offsetof(Shared, empty) + s * 8, Config::kReleases);
    if constexpr (Config::kSplit > 1)
      for (int w = 0; w < Config::kConsumers; ++w) {
        ptx::mbarrier_init(shared + offsetof(Shared, exchange.landed) + w * 8, 1);
        ptx::mbarrier_init(shared + offsetof(Shared, exchange.taken) + w * 8,
                           Config::kExchangeReleases);
      }
    ptx::fence_mbarrier_init();
  }
  if (warp == 1 && ptx::elect_one()) prefetch_b<Config>(maps, args);
  // No CTA may copy into, or arrive at, another's shared memory before its barriers stand.
  if constexpr (Config::kClusterCtas > 1)
    ptx::cluster_sync_barriers();
  else
    __syncthreads();

  ptx::launch_dependents();

  if (warp >= 4 * Config::kConsumers) {
    ptx::set_registers_down<Config::kProducerRegisters>();
    // From another lane, or ptxas asks the special register for it at every stage.
    const uint32_t base = __shfl_sync(0xffffffffu, shared, 0);
    if (warp == 4 * Config::kConsumers && ptx::elect_one())
      produce_a<Config>(args, base, m_rank, part);
    if (warp == 4 * Config::kConsumers + 3 && ptx::elect_one())
      produce_b<Config>(maps, args, base, m_rank, part);
    if constexpr (Config::kScaledInLoop) {
      if constexpr (Config::kScaledByTile) {
        if (warp == 4 * Config::kConsumers + 1) load_tile_scales<Config, 0>(args, shared, m_rank, part);
        if (warp == 4 * Config::kConsumers + 2) load_tile_scales<Config, 1>(args, shared, m_rank, part);
      } else {
        if (warp == 4 * Config::kConsumers + 1) load_scales<Config, true>(args, shared, m_rank, part);
        if (warp == 4 * Config::kConsumers + 2) load_scales<Config, false>(args, shared, m_rank, part);
      }
    }
    __syncwarp();
  } else {
    ptx::set_registers_up<Config::kConsumerRegisters>();
    if constexpr (Config::kPromoted)
      consume_promoted<Config>(args, shared, m_rank, part, warp / 4);
    else if constexpr (Config::Operand::kWidened)
      widen_and_consume<Config>(args, shared, m_rank, part, warp / 4);
    else
      consume<Config>(args, shared, m_rank, part, warp / 4);
  }
}

}  // namespace sp24
