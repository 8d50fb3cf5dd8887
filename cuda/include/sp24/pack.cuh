// Row order to block image: one CTA of 128 threads a block of 64 rows x 64 packed bytes.
#pragma once
#include <cstdint>

#include "sp24/config.cuh"

namespace sp24 {

#define SP24_PACK_ARGS(X)                                                        \
  X(uint64_t, values)   /* [m][k / 2] kept values, rows contiguous */            \
  X(uint64_t, meta)     /* [m][ceil(k / 8)], two groups a byte */                \
  X(uint64_t, image)    /* [m_blocks][k_blocks][block bytes], 16-byte aligned */ \
  X(int32_t, m)                                                                  \
  X(int32_t, k)                                                                  \
  X(int32_t, k_blocks)

struct PackArgs {
#define X(type, name) type name;
  SP24_PACK_ARGS(X)
#undef X
};

// Grid: m_blocks * k_blocks CTAs.
template <class Operand>
__device__ __forceinline__ void pack_block(const PackArgs& args) {
  constexpr int kBlockBytes = kBlockValueBytes + Operand::kMetaBytes;
  constexpr int kMetaRowBytes = Operand::kMetaBytes / kBlockRows;
  constexpr uint8_t kEmptyGroup = 0b0100;  // the pair (0, 1) of an all-zero group
  const int row_block = blockIdx.x / args.k_blocks, k_block = blockIdx.x % args.k_blocks;
  uint8_t* image = reinterpret_cast<uint8_t*>(args.image) + int64_t{blockIdx.x} * kBlockBytes;
  const int t = threadIdx.x;

  const int64_t value_bytes = int64_t{args.k} / 2 * Operand::kItemBytes;
  const uint8_t* values = reinterpret_cast<const uint8_t*>(args.values);
  for (int chunk = t; chunk < kBlockValueBytes / 16; chunk += 128) {
    const int i = chunk / 4, c = chunk % 4, row = row_block * kBlockRows + i;
    const int64_t at = int64_t{k_block} * 64 + c * 16;
    uint32_t w[4] = {0, 0, 0, 0};
    if (row < args.m) {
#pragma unroll
      for (int b = 0; b < 16; ++b)
        if (at + b < value_bytes)
          w[b / 4] |= uint32_t{values[row * value_bytes + at + b]} << (8 * (b % 4));
    }
    *reinterpret_cast<uint4*>(image + i * 64 + ((c ^ ((i >> 1) & 3)) * 16)) =
        make_uint4(w[0], w[1], w[2], w[3]);
  }

  const uint8_t* meta = reinterpret_cast<const uint8_t*>(args.meta);
  const int groups = args.k / 4, meta_bytes = (args.k + 7) / 8;
  // Byte b of the metadata of row i of this block, with what lies outside the matrix as empty groups.
  const auto meta_byte = [&](int i, int b) -> uint32_t {
    const int row = row_block * kBlockRows + i, at = k_block * kMetaRowBytes + b;
    const uint32_t stored =
        row < args.m && at < meta_bytes ? meta[int64_t{row} * meta_bytes + at] : 0;
    const uint32_t low = row < args.m && 2 * at < groups ? stored & 15 : kEmptyGroup;
    const uint32_t high = row < args.m && 2 * at + 1 < groups ? stored >> 4 : kEmptyGroup;
    return low | high << 4;
  };
  const int w = t / 32, r = (t % 32) >> 2, q = t & 3;
  uint32_t* words = reinterpret_cast<uint32_t*>(image + kBlockValueBytes);
  if constexpr (Operand::kItemBytes == 1) {
    for (int step = 0; step < 2; ++step) {
      uint32_t word = 0;
      for (int b = 0; b < 4; ++b)
        word |= meta_byte(16 * w + r + 8 * (q & 1), 8 * step + 4 * (q >> 1) + b) << (8 * b);
      words[2 * t + step] = word;
    }
  } else {
    uint32_t word = 0;
    for (int b = 0; b < 4; ++b)
      word |= meta_byte(16 * w + r + 8 * (b >> 1), 2 * q + (b & 1)) << (8 * b);
    words[t] = word;
  }
}

}  // namespace sp24
