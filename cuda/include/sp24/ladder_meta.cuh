// Metadata of a rung: which words a lane needs, and the ways they come.
#pragma once
#include <cstddef>
#include <cstdint>

#include "sp24/ladder_config.cuh"
#include "sp24/ptx/warp.cuh"

namespace sp24 {

// The words of one stage, one a wgmma.
template <class Config>
struct MetaWords {
  uint32_t word[Config::kSteps];
};

// Lane l of warp w, r = l / 4, q = l % 4, needs for a step of an 8-bit type the word of row
// 16w + r + 8(q & 1), half q >> 1 of the step's eight bytes; for a 16-bit type, with selector 0, lanes
// q = 0 and 1 need words 0 and 1 of the step, each of rows 16w + r (low half) and 16w + r + 8.
//
// Row order is the metadata matrix: 8-bit types, a row a row of A; 16-bit types, a row two rows of A
// (word order 16(i / 16) + i % 8), so that in both a step is eight bytes and a block sixteen.
template <class Config>
struct MetaReader {
  static constexpr bool kByte = Config::Operand::kItemBytes == 1;
  static constexpr bool kGlobal =
      Config::kMeta != ladder::Meta::tensor && Config::kMeta != ladder::Meta::image;
  static constexpr bool kRowOrder =
      Config::kMeta == ladder::Meta::scalar || Config::kMeta == ladder::Meta::readonly;
  static constexpr bool kPairs =
      Config::kMeta == ladder::Meta::pairs || Config::kMeta == ladder::Meta::hoisted;
  static constexpr int kLaneOrderBytes = 512;  // of a block, 16-bit types, in the lanes' order

  const uint8_t* at = nullptr;  // this lane's first word of the next stage, in global memory
  uint32_t shared = 0;          // or of stage 0, in shared memory

  // This lane's place within a block of the metadata matrix.
  static __device__ __forceinline__ int lane_row() {
    const int lane = threadIdx.x % 32, w = threadIdx.x % 128 / 32, r = lane >> 2, q = lane & 3;
    return kByte ? 16 * w + r + 8 * (q & 1) : 8 * w + r;
  }
  static __device__ __forceinline__ int lane_byte() {
    const int q = threadIdx.x & 3;
    return 4 * (kByte ? q >> 1 : q & 1);
  }

  // `slot0`: this warpgroup's slot of stage 0.
  __device__ __forceinline__ explicit MetaReader(uint32_t slot0) {
    shared = slot0 + Config::kValueBytes;
    if constexpr (Config::kMeta == ladder::Meta::tensor)
      shared += lane_row() * kMetaRowBytes * Config::kPanels + lane_byte();
    else
      shared += threadIdx.x % 128 * sizeof(typename Config::Operand::Meta);
  }

  // The tile's rows of this warpgroup start at `row`, a multiple of 64. `k_tiles` stages make a row.
  __device__ __forceinline__ void begin(const RungArgs& args, int row, int k_tiles) {
    if constexpr (kGlobal) {
      const int64_t block = row / kBlockRows, blocks = int64_t{k_tiles} * Config::kPanels;
      at = reinterpret_cast<const uint8_t*>(args.meta);
      if constexpr (kRowOrder) {
        at += (block * Config::kMetaRows + lane_row()) * blocks * kMetaRowBytes + lane_byte();
      } else {
        const int lane = threadIdx.x % 32, w = threadIdx.x % 128 / 32;
        const int among = 2 * (lane >> 2) + (lane & 1);  // of the sixteen lanes that are read
        at += block * blocks * kLaneOrderBytes + w * 128 + among * (kPairs ? 8 : 4);
      }
    }
  }

  // The next stage of the tile, which lies in stage `stage` of the ring.
  __device__ __forceinline__ MetaWords<Config> next(uint32_t stage) {
    MetaWords<Config> words;
    if constexpr (Config::kMeta == ladder::Meta::image) {
      using Packed = typename Config::Operand::Meta;
      const Packed packed =
          ptx::load_shared<Packed>(shared + stage * Config::kConsumers * Config::kSlotBytes);
#pragma unroll
      for (int s = 0; s < Config::kSteps; ++s)
        words.word[s] = Config::Operand::meta_word(packed, s);
    } else if constexpr (Config::kMeta == ladder::Meta::tensor) {
#pragma unroll
      for (int s = 0; s < Config::kSteps; ++s)
        words.word[s] = ptx::load_shared<uint32_t>(
            shared + stage * Config::kConsumers * Config::kSlotBytes + 8 * s);
    } else if constexpr (kRowOrder) {
#pragma unroll
      for (int s = 0; s < Config::kSteps; ++s) words.word[s] = load_word(at + 8 * s);
      at += kMetaRowBytes * Config::kPanels;
    } else {
#pragma unroll
      for (int p = 0; p < Config::kPanels; ++p, at += kLaneOrderBytes) {
        if constexpr (kPairs) {
          asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];"
                       : "=r"(words.word[2 * p]), "=r"(words.word[2 * p + 1])
                       : "l"(at));
        } else {
          words.word[2 * p] = load_word(at);
          words.word[2 * p + 1] = load_word(at + 64);
        }
      }
    }
    return words;
  }

 private:
  static __device__ __forceinline__ uint32_t load_word(const uint8_t* from) {
    uint32_t word;
    if constexpr (Config::kMeta == ladder::Meta::scalar)
      asm volatile("ld.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
    else
      asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(word) : "l"(from));
    return word;
  }
};

}  // namespace sp24
