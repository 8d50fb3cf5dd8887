// One kernel of the family: every number that its shape follows from, and its shared memory.
#pragma once
#include <cstdint>
#include <type_traits>

#include "sp24/accumulate.cuh"
#include "sp24/operand.cuh"

namespace sp24 {

enum class Order { mn, nm };  // D as M x N, or as N x M

constexpr int kBlockRows = 64;       // M of one wgmma
constexpr int kRowBytesB = 128;      // bytes of a row of B against one block: one swizzle span

// Lanes of a warp that arrive for it at a barrier of another CTA once it has read what came from there.
// One is enough, after a __syncwarp; but racecheck does not see that (in converged code it is no
// instruction) and reports the other lanes' loads, so for it every lane arrives for itself:
// build.py --racecheck.
#ifdef SP24_RACECHECK
constexpr int kArrivingLanes = 32;
#else
constexpr int kArrivingLanes = 1;
#endif

// Named barriers of a warpgroup, from 1 on: one of the epilogue, two of the ring (ring.cuh).
constexpr int kBarriers = 3;

// What a split over K needs in shared memory beside the ring; exchange.cuh says how it is used. A
// vector is four sums of each thread of a warpgroup.
template <int kConsumers, int kSplit, int kVectors>
struct ExchangeShared {
  alignas(16) float partial[kConsumers][kSplit - 1][kVectors][128][4];
  uint64_t landed[kConsumers];
  uint64_t taken[kConsumers];
};
template <int kConsumers, int kVectors>
struct ExchangeShared<kConsumers, 1, kVectors> {};

template <class Operand_, class Out_, Order kOrder_, int kTileN_, int kConsumers_, int kCluster_,
          int kStages_, int kSplit_, class Accumulate_ = fast>
struct GemmConfig {
  using Operand = Operand_;
  using Out = Out_;
  static constexpr Order kOrder = kOrder_;
  static constexpr int kTileN = kTileN_;
  static constexpr int kConsumers = kConsumers_;  // warpgroups
  static constexpr int kCluster = kCluster_;      // CTAs along M that share B
  static constexpr int kStages = kStages_;
  static constexpr int kSplit = kSplit_;          // parts of K, a CTA each
  static constexpr int kClusterCtas = kCluster * kSplit;
  using Accumulate = Accumulate_;
  static constexpr bool kScaledByTile = Accumulate::kScales == LoopScales::tile;

  // What a consumer thread sums in: 64 rows by the tile's columns over 128 threads.
  using Accumulators = typename Operand::Register[kTileN / 2 / Operand::kPerRegister];

  // Promoted sums (promote.cuh): warpgroups side by side, each of two blocks of rows. Others, and where a
  // tile's rows have one scale (spread.cuh): one above the other, of one block each.
  static constexpr bool kPromoted = Accumulate::kSteps != 0;
  static constexpr bool kSideBySide = kPromoted && !kScaledByTile;
  static constexpr int kRowBlocks = kSideBySide ? 2 : kConsumers;  // a tile's blocks of 64 rows
  // Those that a warpgroup stores: of two one, where another part of K stores the other.
  static constexpr int kStoredBlocks = kSideBySide && kSplit == 1 ? 2 : 1;
  static constexpr int kTileM = kRowBlocks * kBlockRows;
  // Whether the rows of D are dealt out evenly, in tiles of up to kTileM (schedule.cuh).
  static constexpr bool kBalanced = !kPromoted && !Operand::kWidened && kConsumers > 2;
  // Blocks along K of a stage. With few columns what a stage costs sets the pace, and several blocks share
  // it: where weights are widened it is instructions, else the thread that asks for A.
  static constexpr int kStageBlocks =
      Operand::kWidened ? (kTileN > 64 ? 1 : kTileN > 16 ? 2 : 4)  // as many as registers leave room for
                        : (!kPromoted && kTileN <= 32 && kConsumers <= 2 ? 2 : 1);
  static constexpr int kTileK = kRowBytesB / Operand::kItemBytes;  // logical K of a block
  static constexpr int kThreads = (kConsumers + 1) * 128;          // the last warpgroup produces
  // Registers a thread once the roles are known: what the launch gave an SM's threads, shared out again.
  static constexpr bool kTall = kConsumers == 3 && kTileN > 128;  // rows SP24_TALL of kernels.def
  static constexpr int kProducerRegisters = kScaledByTile ? 56 : kTall ? 32 : 40;
  static constexpr int kConsumerRegisters =
      kScaledByTile ? 224 : kConsumers == 2 ? 232 : kTall ? 160 : kConsumers == 3 ? 152 : 104;
  static constexpr int kBlockBytes =
      Operand::kBlockValueBytes + Operand::kMetaBytes + Operand::kBlockScaleBytes;
  // Columns of a tile that one warpgroup stores: those of its part of K, or those that it sums beside others.
  static constexpr int kStoredN = kTileN / (kSideBySide ? kConsumers : kSplit);
  using StoredSums = typename Operand::Register[kStoredN / 2 / Operand::kPerRegister];
  // Whether one warp of a warpgroup waits for stages and gives them back for all four (ring.cuh): where
  // the wgmmas of a stage take longer than the warps take to agree.
  // Racecheck does not follow an order through a named barrier to one thread's arrival: there, no.
  static constexpr bool kGathers = kTileN > 128 && !kScaledByTile && kArrivingLanes == 1;
  // Whether A of the first round is asked for before the kernel before has ended (fill_first_round):
  // where memory sets the pace. Wide tiles were 0 to 1 % slower for it.
  static constexpr bool kFillsEarly = kTileN <= 128;
  // Arrivals that free a stage: of the consumers of this CTA, or their warps, and of the others that B
  // is shared with.
  static constexpr int kReleases =
      kGathers ? kConsumers * kCluster : 4 * kConsumers * (kArrivingLanes + kCluster - 1);
  // Arrivals that free a slot of the exchange: of a warpgroup's warps in the other parts.
  static constexpr int kExchangeReleases = 4 * kArrivingLanes * (kSplit - 1);
  // Whether chunks of D are turned through shared memory: see Store16 and store_32bit.
  static constexpr bool kTurned = kOrder == Order::nm;
  // Whether a chunk is written while the one before is read back (Store16::store_by_turns, store_32bit): in
  // narrower tiles it was no faster.
  static constexpr bool kByTurns =
      kTurned && kTileN > 128 && !kPromoted && Operand::kPerRegister == 1;
  static constexpr int kBoxRowsB = kTileN / kCluster;  // rows of a whole tile's B that one CTA fetches

  // Promoted sums: units of a stage, and the slot of scales that each has.
  static constexpr bool kScaledInLoop = Accumulate::kScales != LoopScales::none;
  static constexpr int kUnits = Accumulate::kSteps == 1 ? 2 : 1;
  // One a column, of four words; else one a column, and of A kRowBlocks or kTileM.
  static constexpr int kSlotScales =
      kScaledByTile ? 4 * kTileN
                    : kTileN + (Accumulate::kScales == LoopScales::block ? 4 : kTileM);
  static constexpr int kScaleSlotBytes = kSlotScales * 4;
  // Arrivals that fill a stage: the producers', and each lane's of the warps that bring its scales.
  static constexpr int kFills = 2 + (kScaledByTile ? 32 : kScaledInLoop ? 2 * 32 : 0);
  // Logical K of a piece of the sum; 0 where the tensor cores keep all of it.
  static constexpr int kPromoteK = Accumulate::kSteps * kTileK / 2;

  static_assert(kScaleSlotBytes % 16 == 0, "scales of columns are read by 16 bytes");
  // (One consumer's launch has registers to spare.)
  static_assert(kConsumers == 1 || kConsumers * kConsumerRegisters + kProducerRegisters <=
                                       65536 / kThreads / 8 * 8 * (kConsumers + 1),
                "what the warpgroups take together is what the launch gave them");
  static_assert(kConsumers == 2 || kTall || (kConsumers <= 4 && kTileN <= 128),
                "a consumer thread's registers hold its accumulators");
  static_assert(kTileN % 8 == 0 && kTileN <= 256, "what wgmma multiplies");
  static_assert(!kScaledByTile || kConsumers == 2, "the registers of two consumers' launch, shared out");
  static_assert(!kSideBySide || (kTileN % kConsumers == 0 && (kStoredN % 16 == 0 || kTileN == 16)),
                "groups of columns as load_scales places them");
  static_assert(kStoredN == 8 || kStoredN % 16 == 0, "an epilogue chunk is 16 columns wide");
  static_assert(kSplit == 1 || Operand::kPerRegister == 1, "parts of K exchange sums of 32 bits");
  static_assert(kTileN % kSplit == 0 && kStoredN % 8 == 0, "a message is four sums a thread");
  static_assert(kCluster == 1 || kBoxRowsB % 8 == 0, "a share of B is whole swizzle atoms");
  static_assert(Operand::kWidened ? kBlockBytes % 16 == 0 : kBlockBytes % 512 == 0,
                "a bulk copy is of 16 bytes, a 64-byte swizzle atom is 512");
  static_assert(!Operand::kWidened || !kPromoted, "what consume_widened does");
  static_assert(!kSideBySide || kSplit <= kRowBlocks, "a part of K stores a block of rows");

  struct alignas(1024) Shared {
    uint8_t b[kStages][kStageBlocks][kTileN * kRowBytesB];
    uint8_t a[kStages][kRowBlocks][kStageBlocks * kBlockBytes];
    // Chunks of D on their way out, two in turn a warpgroup.
    uint8_t chunks[kConsumers][2][kTurned ? 32 * kBlockRows : 16];
    float scales[kConsumers][2][kStoredN + 2 * kStoredBlocks * kBlockRows];  // see TileScales
    uint64_t full[kStages];
    uint64_t empty[kStages];
    alignas(kScaledByTile ? 128 : 16) float loop_scales[kStages][kUnits][kScaledInLoop ? kSlotScales : 4];
    ExchangeShared<kConsumers, kSplit, kStoredN / 8> exchange;
  };
  static_assert(sizeof(Shared) <= 227 * 1024, "shared memory of one CTA on sm_90");
};

}  // namespace sp24
