// One rung of the ladder: the policies that tell it from its neighbours, and what follows from them.
// cuda/README.md walks through the rungs; kernels.def lists them.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "sp24/args.cuh"
#include "sp24/config.cuh"
#include "sp24/operand.cuh"

namespace sp24 {
namespace ladder {

// A: packed rows [M, K/2] by a tensor copy that swizzles; the block image by one bulk copy, read by
// descriptor or through registers.
enum class Source { rows, image, registers };

// How a lane gets its metadata words. From global memory: row order by plain or by read-only loads;
// in an order that puts a warp's words of one block into a cache line (`grouped`), both words of a
// lane side by side (`pairs`), the same loaded before the wait for the stage (`hoisted`). From shared
// memory: row order by a tensor copy, or in the block image.
enum class Meta { scalar, readonly, grouped, pairs, hoisted, tensor, image };

// Whether data and metadata of a stage arrive on one barrier or on two.
enum class Full { merged, split };

// When a consumer warpgroup gives a stage back: after the wgmmas of the stage that follows have been
// issued; right after the wait that proves it read, as a whole; each warp right after that wait; or
// its first warp for all, which then also waits for all that a stage has landed.
enum class Release { after_next, after_wait, by_warp, first_warp };

// From accumulators to D: each element stored alone (with FTZ or without); in lines of 128 bytes, by
// shared memory; or that beside the next tile's wgmmas.
enum class Store { scattered, scattered_ftz, wide, overlapped };

}  // namespace ladder

constexpr int kMetaRowBytes = 16;  // of one row of the metadata matrix, against one block of A

template <class Operand_, class Out_, int kConsumers_, int kStages_, int kRowBytes, ladder::Source kSource_,
          ladder::Meta kMeta_, ladder::Full kFull_, int kGroups_, int kWait_, ladder::Release kRelease_,
          int kCluster_, bool kPersistent_, bool kRaster_, ladder::Store kStore_, int kUnroll_>
struct RungConfig {
  using Operand = Operand_;
  using Out = Out_;
  static constexpr Order kOrder = Order::nm;
  static constexpr int kTileN = 256;
  static constexpr int kConsumers = kConsumers_;  // warpgroups, 64 rows each
  static constexpr int kStages = kStages_;
  static constexpr int kPanels = kRowBytes / kRowBytesB;  // copies of B a stage, 128 bytes of K each
  static constexpr ladder::Source kSource = kSource_;
  static constexpr ladder::Meta kMeta = kMeta_;
  static constexpr int kGroups = kGroups_;  // commit groups of wgmmas a stage
  static constexpr int kWait = kWait_;      // stages whose wgmmas may still run after a wait
  static constexpr ladder::Release kRelease = kRelease_;
  static constexpr int kCluster = kCluster_;       // CTAs along M that share B by multicast
  static constexpr int kClusterCtas = kCluster;
  static constexpr bool kPersistent = kPersistent_;  // a CTA takes tile after tile, or one
  static constexpr bool kRaster = kRaster_;  // tiles and L2 as the host orders them, or M first
  static constexpr ladder::Store kStore = kStore_;
  static constexpr int kUnroll = kUnroll_;  // of the loop over K, at least what kWait needs

  static constexpr bool kScaledInLoop = false, kScaledByTile = false;
  static constexpr int kStoredN = kTileN;  // K is not split
  static constexpr int kStoredBlocks = 1;
  using StoredSums = float[kStoredN / 2];

  static constexpr int kRowBlocks = kConsumers, kTileM = kRowBlocks * kBlockRows;
  static constexpr bool kBalanced = false;
  static constexpr int kTileK = kPanels * kRowBytesB / Operand::kItemBytes;  // logical K of a stage
  static constexpr int kSteps = 2 * kPanels;                                   // wgmmas a stage
  static constexpr int kThreads = (kConsumers + 1) * 128;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

  static constexpr bool kImage = kSource != ladder::Source::rows;
  static constexpr bool kMetaByTensor = kMeta == ladder::Meta::tensor;
  static constexpr bool kSplit = kFull_ == ladder::Full::split;
  static constexpr bool kTurned =
      kStore == ladder::Store::wide || kStore == ladder::Store::overlapped;
  static constexpr bool kDeferred = kStore == ladder::Store::overlapped;
  // Rows of the metadata matrix against 64 rows of A: a 16-bit type's words hold two rows each.
  static constexpr int kMetaRows = Operand::kItemBytes == 1 ? kBlockRows : kBlockRows / 2;

  static constexpr int kValueBytes = Operand::kBlockValueBytes * kPanels;  // of a warpgroup's A, a stage
  static constexpr int kTensorMetaBytes = kMetaByTensor ? kMetaRows * kMetaRowBytes * kPanels : 0;
  // A warpgroup's A of a stage: values, then metadata where it comes with them.
  static constexpr int kSlotBytes =
      kValueBytes + (kImage ? Operand::kMetaBytes : kTensorMetaBytes);
  static constexpr int kSwizzle = kImage ? 64 : 64 * kPanels;  // of A, bytes
  static constexpr int kBoxRowsB = kTileN / kCluster;
  // For racecheck every warp speaks for itself, see GemmConfig::kGathers.
  static constexpr bool kFirstWarp =
      kRelease == ladder::Release::first_warp && kArrivingLanes == 1;
  static constexpr bool kByWarp = kRelease == ladder::Release::by_warp ||
                                  (kRelease == ladder::Release::first_warp && !kFirstWarp);
  static constexpr int kReleases =
      kByWarp ? 4 * kConsumers * (kArrivingLanes + kCluster - 1) : kConsumers * kCluster;

  static_assert(kConsumers == 1 || kConsumers == 2, "a consumer needs 128 accumulators a thread");
  static_assert(kPanels == 1 || kPanels == 2, "a row of A fills a swizzle span of 64 or 128 bytes");
  static_assert(!kImage || kPanels == 1, "a block of the image is 64 bytes of a row of A");
  static_assert(kImage == (kMeta == ladder::Meta::image), "the image holds its metadata");
  static_assert(Operand::kItemBytes == 2 || kImage || kMetaByTensor || kMeta == ladder::Meta::scalar,
                "8-bit metadata is loaded from global memory in row order alone");
  static_assert(!kSplit || kMetaByTensor, "two barriers are for two copies");
  static_assert(kGroups == 1 || kGroups == 2, "a stage is committed whole or in halves");
  static_assert(kWait == 0 || kRelease != ladder::Release::after_next,
                "with a group in flight the stage after next could never be filled");
  static_assert(kCluster == 1 || kByWarp || kFirstWarp, "only warps arrive at other CTAs");
  static_assert(!kDeferred || kPersistent, "there is a next tile to store beside");
  static_assert(kSlotBytes % (8 * kSwizzle) == 0, "a slot is whole swizzle atoms");
  static_assert(sizeof(typename Out::Item) == 2, "16-bit output");

  static constexpr bool kByTurns = false;

  struct alignas(1024) Shared {
    uint8_t b[kStages][kPanels][kTileN * kRowBytesB];
    uint8_t a[kStages][kConsumers][kSlotBytes];
    // Of the epilogue: see Store16 and TileScales.
    uint8_t chunks[kConsumers][2][kTurned ? 16 * kBlockRows * sizeof(typename Out::Item) : 16];
    float scales[kConsumers][2][kTileN + 2 * kBlockRows];
    uint64_t full[kStages];
    uint64_t full_meta[kStages];
    uint64_t empty[kStages];
  };
  static constexpr uint32_t kMetaStageBytes = kConsumers * kTensorMetaBytes;
  static constexpr uint32_t kStageBytes =
      sizeof(Shared::b) / kStages + sizeof(Shared::a) / kStages - (kSplit ? kMetaStageBytes : 0);
  static_assert(sizeof(Shared) <= 227 * 1024, "shared memory of one CTA on sm_90");
};

// Tensor maps of a rung; one that it does not read is zero.
struct RungMaps {
  CUtensorMap a;     // packed rows [M, K/2], swizzled by kSwizzle
  CUtensorMap b;     // [N, K], swizzled by 128 bytes
  CUtensorMap meta;  // the metadata matrix, in row order
};

// X(type, name): what a rung takes beside the fields of GemmArgs.
#define SP24_RUNG_ARGS(X) \
  X(uint64_t, meta) /* metadata in global memory, in the rung's order; 0 if it is copied */

struct RungArgs {
  GemmArgs gemm;
#define X(type, name) type name;
  SP24_RUNG_ARGS(X)
#undef X
};

}  // namespace sp24
