// What the tensor cores do at most: the main loop's wgmmas on operands that already lie in shared
// memory, and nothing else.
#pragma once
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "sp24/config.cuh"
#include "sp24/operand.cuh"
#include "sp24/ptx/copy.cuh"
#include "sp24/ptx/warp.cuh"
#include "sp24/ptx/wgmma_sp.cuh"

namespace sp24 {

#define SP24_CEILING_ARGS(X)                                     \
  X(uint64_t, sums)  /* f32, [CTAs][threads]: what was summed */ \
  X(int32_t, tiles)  /* tiles that a CTA multiplies */

struct CeilingArgs {
#define X(type, name) type name;
  SP24_CEILING_ARGS(X)
#undef X
};

// Where a wgmma takes A from: shared memory, by descriptor (ss), or registers (rs).
enum class Source { ss, rs };

template <class Operand_, Source kSource_>
struct CeilingConfig {
  using Operand = Operand_;
  static constexpr Source kSource = kSource_;
  static constexpr int kConsumers = 2, kTileM = kConsumers * kBlockRows, kTileN = 256;
  static constexpr int kTileK = kRowBytesB / Operand::kItemBytes;
  static constexpr int kThreads = kConsumers * 128;
  static constexpr int kStages = 2;       // read in turn, as from a ring
  static constexpr int kTileStages = 64;  // of a sum, which then begins anew: K 8192 of 8-bit types

  struct alignas(1024) Shared {
    uint8_t b[kStages][kTileN * kRowBytesB];
    uint8_t a[kStages][kConsumers][Operand::kBlockValueBytes];
  };
  static_assert(kTileStages % kStages == 0, "a sum is whole rounds of the stages");
};

// A word of noise for each argument (the finalizer of MurmurHash3 by A. Appleby, public domain).
__device__ __forceinline__ uint32_t noise(uint32_t x) {
  x ^= x >> 16;
  x *= 0x85ebca6bu;
  x ^= x >> 13;
  x *= 0xc2b2ae35u;
  return x ^ (x >> 16);
}

// Nearly normal with mean 0 and deviation 1: four bytes' sum.
__device__ __forceinline__ float normal(uint32_t x) {
  const uint32_t n = noise(x);
  const int sum = (n & 255) + (n >> 8 & 255) + (n >> 16 & 255) + (n >> 24);
  return (sum - 510) * (1.0f / 147.8f);
}

// The word of shared memory at index i: four 8-bit or two 16-bit values.
template <class Operand>
__device__ __forceinline__ uint32_t operand_word(uint32_t i) {
  if constexpr (Operand::kItemBytes == 1) {
    // Scaled as a weight is, so that the largest come near to the type's.
    const float scale = 128.0f;
    return ptx::pack_e4m3(scale * normal(4 * i), scale * normal(4 * i + 1)) |
           ptx::pack_e4m3(scale * normal(4 * i + 2), scale * normal(4 * i + 3)) << 16;
  } else {
    const __half2 pair = __floats2half2_rn(normal(2 * i), normal(2 * i + 1));
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

// Eight groups, each one of the six index pairs.
__device__ __forceinline__ uint32_t metadata_word(uint32_t i) {
  uint32_t random = noise(~i), word = 0;
#pragma unroll
  for (int g = 0; g < 8; ++g) {
    word |= (0xed9c84u >> (random % 6 * 4) & 15) << (4 * g);
    random /= 6;
  }
  return word;
}

// Grid: as many CTAs as there are SMs. Each writes one number a thread, so that nothing of the sums
// can be left out.
template <class Config>
__device__ __forceinline__ void ceiling(const CeilingArgs& args) {
  using Shared = typename Config::Shared;
  using Operand = typename Config::Operand;
  constexpr int kStages = Config::kStages;
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  const uint32_t shared = ptx::shared_address(dynamic_shared);
  const uint32_t seed = blockIdx.x * (sizeof(Shared) / 4);
  for (uint32_t i = threadIdx.x; i < sizeof(Shared) / 4; i += Config::kThreads)
    ptx::store_shared(shared + 4 * i, operand_word<Operand>(seed + i));
  ptx::fence_async_proxy();  // the wgmmas read what was written by ordinary stores
  __syncthreads();

  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32, q = lane & 3;
  const uint32_t a0 = shared + offsetof(Shared, a) + warpgroup * Operand::kBlockValueBytes;
  constexpr uint32_t kStageA = Config::kConsumers * Operand::kBlockValueBytes;
  constexpr uint32_t kStageB = Config::kTileN * kRowBytesB;
  const uint64_t desc_a0 = ptx::descriptor<2, 512>(a0);
  const uint64_t desc_b0 = ptx::descriptor<1, 1024>(shared + offsetof(Shared, b));

  // The first step's metadata and, where they are read from registers, both steps' values of A.
  uint32_t meta[kStages][2];
  uint32_t a[kStages][2][4];
#pragma unroll
  for (int s = 0; s < kStages; ++s) {
    const uint32_t at = (seed + s) * Config::kThreads + threadIdx.x;
    meta[s][0] = metadata_word(2 * at);
    meta[s][1] = Operand::kSelector1 == 0 ? metadata_word(2 * at + 1) : meta[s][0];
    if constexpr (Config::kSource == Source::rs) {
#pragma unroll
      for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          // Register i: row r + 8 (i % 2) of the warp's sixteen, half i / 2 of the step's 32 bytes.
          const int row = threadIdx.x % 128 / 32 * 16 + (lane >> 2) + 8 * (i % 2);
          const int chunk = 2 * step + i / 2;
          a[s][step][i] = ptx::load_shared<uint32_t>(
              a0 + s * kStageA + row * 64 + (chunk ^ ((row >> 1) & 3)) * 16 + q * 4);
        }
    }
  }

  float acc[Config::kTileN / 2];
  // A round of the stages; the first of a tile overwrites the sums of the one before.
  const auto round = [&](uint32_t accumulate) {
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      const uint64_t desc_a = desc_a0 + s * (kStageA >> 4), desc_b = desc_b0 + s * (kStageB >> 4);
      if constexpr (Config::kSource == Source::ss) {
        using Mma = ptx::WgmmaSp<Operand, Config::kTileN>;
        Mma::template issue<0>(acc, desc_a, desc_b, meta[s][0], s > 0 ? 1 : accumulate);
        Mma::template issue<Operand::kSelector1>(acc, desc_a + (32 >> 4), desc_b + (64 >> 4),
                                                 meta[s][1], 1);
      } else {
        using Mma = ptx::WgmmaSpRegisters<Operand, Config::kTileN>;
        Mma::template issue<0>(acc, a[s][0], desc_b, meta[s][0], s > 0 ? 1 : accumulate);
        Mma::template issue<Operand::kSelector1>(acc, a[s][1], desc_b + (64 >> 4), meta[s][1], 1);
      }
    }
    ptx::wgmma_commit();
  };
  constexpr int kRounds = Config::kTileStages / kStages;
  round(0);
#pragma unroll 1
  for (int k = 1; k < args.tiles * kRounds; ++k) {
    round(k % kRounds);
    ptx::wgmma_wait<1>();
  }
  ptx::wgmma_wait<0>();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < Config::kTileN / 2; ++i) sum += acc[i];
  reinterpret_cast<float*>(args.sums)[blockIdx.x * Config::kThreads + threadIdx.x] = sum;
}

}  // namespace sp24
