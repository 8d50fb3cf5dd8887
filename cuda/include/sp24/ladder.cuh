// The body of every rung of the ladder: a producer, one or two consumer warpgroups and a ring between
// them, as in body.cuh, with each choice that body.cuh has made left open. The last rung of a ladder
// is body.cuh itself.
#pragma once
#include "sp24/body.cuh"
#include "sp24/ladder_config.cuh"
#include "sp24/ladder_meta.cuh"

namespace sp24 {
namespace ladder {

// Tiles of a rung. Without kRaster the rows of M come first, the order of a plain two-dimensional
// grid, and L2 treats A and B alike; without kPersistent the grid has a CTA a tile and `next` is asked
// once.
template <class Config>
__device__ __forceinline__ Schedule<Config> schedule(const RungArgs& args) {
  Schedule<Config> tiles(args.gemm);
  if constexpr (!Config::kRaster) tiles.raster = tiles.rows;
  return tiles;
}

template <class Config>
__device__ __forceinline__ int k_tiles(const RungArgs& args) {
  return (args.gemm.k_blocks + Config::kPanels - 1) / Config::kPanels;
}

// One thread. Order: a stage is written again only after empty[stage] has completed, which takes
// arrivals that speak for every warp of every CTA that the write reaches, made after the wait for the
// wgmmas that read the stage and after its metadata was loaded (see `consume`). An arrival at this CTA
// releases and the wait here acquires; B, which alone is also written for other CTAs, is read by
// wgmmas alone, so that arrivals there may be relaxed, as body.cuh says. The bytes are published by
// the copies' complete_tx on full[stage] (and full_meta[stage]), which consumers acquire.
template <class Config>
__device__ __forceinline__ void produce(const RungMaps& maps, const RungArgs& args, uint32_t shared,
                                        uint32_t cta_rank) {
  using Shared = typename Config::Shared;
  const uint8_t* a = reinterpret_cast<const uint8_t*>(args.gemm.a);
  const int64_t row_bytes = int64_t{args.gemm.k_blocks} * Config::kSlotBytes;  // of the image
  const uint64_t policy_a = ptx::l2_policy(Config::kRaster && (args.gemm.read_once & 1));
  const uint64_t policy_b = ptx::l2_policy(Config::kRaster && (args.gemm.read_once & 2));
  const int stages_of_k = k_tiles<Config>(args);
  Ring<Config::kStages> ring;
  Schedule<Config> tiles = schedule<Config>(args);
  for (int m0, n0; tiles.next(cta_rank, m0, n0);) {
#pragma unroll 1
    for (int k = 0; k < stages_of_k; ++k) {
      const uint32_t full = shared + offsetof(Shared, full) + ring.stage * 8;
      const uint32_t full_meta =
          Config::kSplit ? shared + offsetof(Shared, full_meta) + ring.stage * 8 : full;
      // The first round finds the barrier fresh: the phase before its first counts as complete.
      ptx::mbarrier_wait(shared + offsetof(Shared, empty) + ring.stage * 8, ring.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, Config::kStageBytes);
      if constexpr (Config::kSplit)
        ptx::mbarrier_arrive_expect_tx(full_meta, Config::kMetaStageBytes);
      const uint32_t slots = shared + offsetof(Shared, a) +
                             ring.stage * Config::kConsumers * Config::kSlotBytes;
#pragma unroll
      for (int w = 0; w < Config::kConsumers; ++w) {
        const uint32_t slot = slots + w * Config::kSlotBytes;
        if constexpr (Config::kImage) {
          // Blocks past the last are never stored: read the last again instead of beyond the image.
          const int block = min(m0 / kBlockRows + w, args.gemm.m_blocks - 1);
          ptx::bulk_copy(slot, a + block * row_bytes + int64_t{k} * Config::kSlotBytes,
                         Config::kSlotBytes, full, policy_a);
        } else {
          // What lies outside the matrix comes as zeros and is counted like the rest.
          ptx::tensor_copy(slot, &maps.a, k * Config::kSwizzle, m0 + w * kBlockRows, full,
                           policy_a);
        }
        if constexpr (Config::kMetaByTensor)
          ptx::tensor_copy(slot + Config::kValueBytes, &maps.meta,
                           k * (kMetaRowBytes * Config::kPanels),
                           (m0 / kBlockRows + w) * Config::kMetaRows, full_meta, policy_a);
      }
#pragma unroll
      for (int p = 0; p < Config::kPanels; ++p) {
        const uint32_t to = shared + offsetof(Shared, b) +
                            ((ring.stage * Config::kPanels + p) * Config::kTileN +
                             cta_rank * Config::kBoxRowsB) *
                                kRowBytesB;
        const int x = (k * Config::kPanels + p) * kRowBytesB;
        if constexpr (Config::kCluster == 1)
          ptx::tensor_copy(to, &maps.b, x, n0, full, policy_b);
        else
          ptx::tensor_copy_multicast(to, &maps.b, x, n0 + cta_rank * Config::kBoxRowsB, full,
                                     static_cast<uint16_t>((1 << Config::kCluster) - 1), policy_b);
      }
      ring.advance();
    }
    if constexpr (!Config::kPersistent) break;
  }
}

// The value of an element as TileScales::apply has it; with FTZ, subnormals are zero on the way.
template <bool kFtz>
__device__ __forceinline__ float scaled(float acc, float row, float col, float bias) {
  if constexpr (!kFtz) return fmaf(acc * row, col, bias);
  float value;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(value) : "f"(acc), "f"(row));
  asm("fma.rn.ftz.f32 %0, %0, %1, %2;" : "+f"(value) : "f"(col), "f"(bias));
  return value;
}

// D straight from the accumulators, two bytes a store: eight lanes of a warp write 16 neighbouring
// bytes, the others elsewhere. Scales and bias come by loads, for rows and columns that are stored.
template <class Config>
__device__ __forceinline__ void store_scattered(const float (&acc)[Config::kTileN / 2],
                                                const GemmArgs& args, int m0, int n0) {
  const int lane = threadIdx.x % 32, r = lane >> 2, q = lane & 3;
  const int row = m0 + threadIdx.x % 128 / 32 * 16 + r;
  const auto load = [](uint64_t from, int at, float otherwise) {
    return from ? __ldg(reinterpret_cast<const float*>(from) + at) : otherwise;
  };
  float row_scale[2], row_bias[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int at = min(row + 8 * h, args.m - 1);
    row_scale[h] = load(args.scale_a, at * args.scale_a_stride, 1.0f);
    row_bias[h] = load(args.bias, at, 0.0f);
  }
  uint16_t* d = reinterpret_cast<uint16_t*>(args.d);
#pragma unroll
  for (int j = 0; j < Config::kTileN / 8; ++j) {
    const int col = n0 + 8 * j + 2 * q;
    float col_scale[2];
#pragma unroll
    for (int e = 0; e < 2; ++e)
      col_scale[e] = load(args.scale_b, min(col + e, args.n - 1) * args.scale_b_stride, 1.0f);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float value[2];
#pragma unroll
      for (int e = 0; e < 2; ++e)
        value[e] = scaled<Config::kStore == Store::scattered_ftz>(
            acc[4 * j + 2 * h + e], row_scale[h], col_scale[e], row_bias[h]);
      const uint32_t word = Config::Out::pack(value[0], value[1]);
      if (row + 8 * h >= args.m) continue;
      uint16_t* to = d + col * args.ldd + row + 8 * h;
      if (col < args.n) to[0] = static_cast<uint16_t>(word);
      if (col + 1 < args.n) to[args.ldd] = static_cast<uint16_t>(word >> 16);
    }
  }
}

// One warpgroup: 64 rows of the tile.
template <class Config>
__device__ __forceinline__ void consume(const RungArgs& args, uint32_t shared, uint32_t cta_rank,
                                        int warpgroup) {
  using Shared = typename Config::Shared;
  using Operand = typename Config::Operand;
  constexpr int kSteps = Config::kSteps;
  const int lane = threadIdx.x % 32;

  // Gives a stage back. Whoever calls this has waited for the wgmmas that read the stage. The loads of
  // its metadata are ordered too: by the barrier of the warpgroup or the warp, before the arrival of
  // the thread that speaks for it. Lane c of a warp arrives at CTA c's barrier, as in body.cuh.
  const bool first_warp = __shfl_sync(0xffffffffu, threadIdx.x % 128 / 32, 0) == 0;
  const uint32_t empty = shared + offsetof(Shared, empty);
  const bool arrives_there = lane < Config::kCluster && lane != cta_rank;
  const bool arrives_here = (Config::kByWarp && kArrivingLanes == 32) || lane == cta_rank;  // racecheck
  const uint32_t there = ptx::map_to_cta(empty, arrives_there ? lane : cta_rank);
  const int epilogue = kBarriers * warpgroup + 1;
  const int has_read = kBarriers * warpgroup + 2, has_landed = kBarriers * warpgroup + 3;
  // With kFirstWarp the first warp waits for stages and sends the others on by `has_landed`, and
  // gathers them by `has_read`, where they do not wait. No warp counts twice in a phase of either: the
  // first meets `has_landed` again only after `has_read`, which takes the others, who arrive there
  // after `has_landed`; the others meet `has_read` again only after `has_landed`, which takes the
  // first, who arrives there after `has_read`. A tile's first stage, which no `has_read` follows, every
  // warp waits for itself; its last stage, which no `has_landed` precedes, is given back behind the
  // barrier of the epilogue, where all wait (`tile_ends`).
  const auto release = [&](uint32_t stage, bool tile_ends = false) {
    if constexpr (Config::kByWarp) {
      __syncwarp();
    } else {
      if (Config::kFirstWarp && tile_ends)
        ptx::named_barrier_sync(epilogue, 128);
      else if (!Config::kFirstWarp || first_warp)
        ptx::named_barrier_sync(has_read, 128);
      else
        ptx::named_barrier_arrive(has_read, 128);
      if (!first_warp) return;
    }
    if (arrives_here) ptx::mbarrier_arrive(empty + stage * 8);
    if (Config::kCluster > 1 && arrives_there)
      ptx::mbarrier_arrive_relaxed_cluster(there + stage * 8);
  };
  const auto wait_landed = [&](uint32_t stage, uint32_t parity, bool alone) {
    if (Config::kFirstWarp && !alone && !first_warp) {
      ptx::named_barrier_sync(has_landed, 128);
      return;
    }
    ptx::mbarrier_wait(shared + offsetof(Shared, full) + stage * 8, parity);
    if constexpr (Config::kSplit)
      ptx::mbarrier_wait(shared + offsetof(Shared, full_meta) + stage * 8, parity);
    if (Config::kFirstWarp && !alone) ptx::named_barrier_arrive(has_landed, 128);
  };

  constexpr uint32_t kStageA = Config::kConsumers * Config::kSlotBytes;
  constexpr uint32_t kPanelB = Config::kTileN * kRowBytesB;
  const uint32_t a0 = shared + offsetof(Shared, a) + warpgroup * Config::kSlotBytes;
  const uint64_t desc_a0 = ptx::descriptor<Config::kSwizzle == 64 ? 2 : 1, 8 * Config::kSwizzle>(a0);
  const uint64_t desc_b0 = ptx::descriptor<1, 1024>(shared + offsetof(Shared, b));
  // For A through registers: lane l gives row l % 8 of matrix l / 8, which are rows and rows + 8 of the
  // warp's sixteen, left chunk of the step, then the same of the right one.
  const int row_a = threadIdx.x % 128 / 32 * 16 + lane % 8 + lane / 8 % 2 * 8;
  const uint32_t matrices = a0 + row_a * 64, chunk = lane / 16, turn = (row_a >> 1) & 3;

  float acc[Config::kTileN / 2];
  Ring<Config::kStages> ring;
  MetaReader<Config> meta(a0);
  const int stages_of_k = k_tiles<Config>(args);

  // Waits for the stage and starts its wgmmas. Step s lies 32 bytes further in a row of A and 64 bytes
  // further in a row of B than the one before, inside the swizzle span, where the hardware swizzles
  // the sum; B's next panel begins every other step. The tensor core reads the metadata registers while
  // the wgmmas run, which ptxas does not know: that they are not written before the wait is proven on
  // the machine code, by check.py.
  const auto multiply = [&](uint32_t accumulate) {
    MetaWords<Config> words;
    if constexpr (Config::kMeta == Meta::hoisted) words = meta.next(ring.stage);
    wait_landed(ring.stage, ring.parity, !accumulate);
    if constexpr (Config::kMeta != Meta::hoisted) words = meta.next(ring.stage);
    const uint64_t desc_a = desc_a0 + ring.stage * (kStageA >> 4);
    const uint64_t desc_b = desc_b0 + ring.stage * (Config::kPanels * kPanelB >> 4);
    uint32_t fragments[kSteps][4];
    if constexpr (Config::kSource == Source::registers) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
        ptx::load_matrices(fragments[s],
                           matrices + ring.stage * kStageA + (((2 * s + chunk) ^ turn) << 4));
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      constexpr int kOdd = Config::kImage ? Operand::kSelector1 : 0;
      const uint64_t a = desc_a + s * (32 >> 4);
      const uint64_t b = desc_b + (s / 2 * kPanelB + s % 2 * 64 >> 4);
      const uint32_t onto = s == 0 ? accumulate : 1;
      if constexpr (Config::kSource == Source::registers) {
        using Mma = ptx::WgmmaSpRegisters<Operand, Config::kTileN>;
        if (s % 2 == 0)
          Mma::template issue<0>(acc, fragments[s], b, words.word[s], onto);
        else
          Mma::template issue<kOdd>(acc, fragments[s], b, words.word[s], onto);
      } else {
        using Mma = ptx::WgmmaSp<Operand, Config::kTileN>;
        if (s % 2 == 0)
          Mma::template issue<0>(acc, a, b, words.word[s], onto);
        else
          Mma::template issue<kOdd>(acc, a, b, words.word[s], onto);
      }
      if (Config::kGroups == 2 && s == kSteps / 2 - 1) ptx::wgmma_commit();
    }
    ptx::wgmma_commit();
  };

  uint32_t reading = 0;  // the stage before, while it is not given back yet
  // Its wgmmas are over once those of all but the newest kWait stages are. With kWait 0 the stage of
  // this step is over after its own wait, and `after_next` keeps it for one step more.
  constexpr bool kKeeps = Config::kWait == 1 || Config::kRelease == Release::after_next;
  const auto finish = [&] {
    ptx::wgmma_wait<Config::kWait * Config::kGroups>();
    if constexpr (!kKeeps) release(ring.stage);
  };
  TileScales<Config> scales(shared, warpgroup);
  const uint32_t chunks =
      shared + offsetof(Shared, chunks) + warpgroup * sizeof(Shared::chunks) / Config::kConsumers;
  Store16<Config> finished;  // the tile before, as far as it is not stored yet
  // A chunk of the tile before (c >= 0) is stored beside the wgmmas.
  const auto step = [&](int c) {
    multiply(1);
    if constexpr (Config::kRelease == Release::after_next) release(reading);
    if (Config::kDeferred && c >= 0) {
      finished.turn(c, chunks);
      ptx::named_barrier_sync(epilogue, 128);
      finished.write(c, args.gemm, chunks);
    }
    finish();
    if constexpr (Config::kWait == 1) release(reading);
    reading = ring.stage;
    ring.advance();
  };

  Schedule<Config> tiles = schedule<Config>(args);
  for (int m0, n0; tiles.next(cta_rank, m0, n0);) {
    m0 += warpgroup * kBlockRows;
    if constexpr (Config::kTurned) scales.fetch(args.gemm, m0, n0);
    meta.begin(args, m0, stages_of_k);
    multiply(0);
    finish();
    reading = ring.stage;
    ring.advance();
    int k = 1;
    if constexpr (Config::kDeferred) {
      constexpr int kChunks = Store16<Config>::kChunks;
      if (stages_of_k > kChunks) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) step(c);
        k += kChunks;
      } else {
        finished.store(args.gemm, chunks, epilogue);
      }
    }
    if constexpr (Config::kUnroll > 2) {
      for (; k + Config::kUnroll <= stages_of_k; k += Config::kUnroll) {
#pragma unroll
        for (int u = 0; u < Config::kUnroll; ++u) step(-1);
      }
    }
    // Rolled up, a loop with a group in flight would load metadata over the words that it still reads.
#pragma unroll(Config::kWait + 1)
    for (; k < stages_of_k; ++k) step(-1);
    ptx::wgmma_wait<0>();
    if constexpr (kKeeps) release(reading, true);
    if constexpr (Config::kDeferred)
      finished.take(acc, args.gemm, scales, m0, n0);
    else if constexpr (Config::kTurned)
      store_tile<Config>(acc, args.gemm, scales, chunks, epilogue, m0, n0);
    else
      store_scattered<Config>(acc, args.gemm, m0, n0);
    if constexpr (!Config::kPersistent) break;
  }
  if constexpr (Config::kDeferred) finished.store(args.gemm, chunks, epilogue);
}

template <class Config>
__device__ __forceinline__ void rung(const RungMaps& maps, const RungArgs& args) {
  using Shared = typename Config::Shared;
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  const uint32_t shared = ptx::shared_address(dynamic_shared);
  const uint32_t cta_rank = Config::kCluster == 1 ? 0 : ptx::cluster_cta_rank();
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // uniform for the compiler too

  if (warp == 0 && ptx::elect_one()) {
    for (int s = 0; s < Config::kStages; ++s) {
      ptx::mbarrier_init(shared + offsetof(Shared, full) + s * 8, 1);
      ptx::mbarrier_init(shared + offsetof(Shared, full_meta) + s * 8, 1);
      ptx::mbarrier_init(shared + offsetof(Shared, empty) + s * 8, Config::kReleases);
    }
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(&maps.b);
  }
  // No CTA may copy into, or arrive at, another's shared memory before its barriers stand.
  ptx::cluster_sync();

  // Two consumers and a producer share the registers of an SM out again; one consumer has enough.
  constexpr bool kShares = Config::kConsumers == 2;
  if (warp >= 4 * Config::kConsumers) {
    if constexpr (kShares) ptx::set_registers_down<Config::kProducerRegisters>();
    if (warp == 4 * Config::kConsumers && ptx::elect_one())
      produce<Config>(maps, args, shared, cta_rank);
    __syncwarp();
  } else {
    if constexpr (kShares) ptx::set_registers_up<Config::kConsumerRegisters>();
    consume<Config>(args, shared, cta_rank, warp / 4);
  }
  // A CTA's shared memory must outlive the copies and arrivals that its cluster sends to it.
  ptx::cluster_sync();
}

}  // namespace ladder
}  // namespace sp24
