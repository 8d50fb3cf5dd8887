// Row order to block image: one CTA a block of 64 rows x 64 packed bytes, or x 32 that will be widened.
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

#define SP24_PACK_WIDENED_ARGS(X)                                                             \
  X(uint64_t, values)       /* [m][k / 2] kept codes, rows contiguous */                      \
  X(uint64_t, meta)         /* [m][ceil(k / 8)], two groups a byte */                         \
  X(uint64_t, scale)        /* block: f32 [ceil(m / scale_rows)][scale_columns]; mx: E8M0 */  \
  X(uint64_t, image)        /* [m_blocks][k_blocks][block bytes], 16-byte aligned */          \
  X(int32_t, m)                                                                               \
  X(int32_t, k)                                                                               \
  X(int32_t, k_blocks)                                                                        \
  X(int32_t, scale_rows)    /* rows and columns of A that share a scale: block, multiples of */ \
  X(int32_t, scale_k)       /* 16; mx, 1 and 32 */                                            \
  X(int32_t, scale_columns) /* scales a row of them */

struct PackWidenedArgs {
#define X(type, name) type name;
  SP24_PACK_WIDENED_ARGS(X)
#undef X
};

constexpr int kPackThreads = 128;

// Metadata of one block, of kMetaRowBytes a row, with what lies outside the matrix as empty groups.
template <int kMetaRowBytes>
struct BlockMeta {
  static constexpr uint8_t kEmptyGroup = 0b0100;  // the pair (0, 1) of an all-zero group
  const uint8_t* meta;
  int m, groups, meta_bytes, row0, byte0;

  template <class Args>
  __device__ __forceinline__ BlockMeta(const Args& args, int row_block, int k_block)
      : meta(reinterpret_cast<const uint8_t*>(args.meta)),
        m(args.m),
        groups(args.k / 4),
        meta_bytes((args.k + 7) / 8),
        row0(row_block * kBlockRows),
        byte0(k_block * kMetaRowBytes) {}

  // Byte b of row i.
  __device__ __forceinline__ uint32_t operator()(int i, int b) const {
    const int row = row0 + i, at = byte0 + b;
    const uint32_t stored =
        row < m && at < meta_bytes ? meta[int64_t{row} * meta_bytes + at] : 0;
    const uint32_t low = row < m && 2 * at < groups ? stored & 15 : kEmptyGroup;
    const uint32_t high = row < m && 2 * at + 1 < groups ? stored >> 4 : kEmptyGroup;
    return low | high << 4;
  }
  // Thread t's word of 16-bit operands.
  __device__ __forceinline__ uint32_t word16(int t) const {
    const int w = t / 32, r = (t % 32) >> 2, q = t & 3;
    uint32_t word = 0;
    for (int b = 0; b < 4; ++b)
      word |= (*this)(16 * w + r + 8 * (b >> 1), 2 * q + (b & 1)) << (8 * b);
    return word;
  }
};

// Grid: m_blocks * k_blocks CTAs.
template <class Operand>
__device__ __forceinline__ void pack_block(const PackArgs& args) {
  constexpr int kBlockBytes = Operand::kBlockValueBytes + Operand::kMetaBytes;
  constexpr int kMetaRowBytes = Operand::kMetaBytes / kBlockRows;
  const int row_block = blockIdx.x / args.k_blocks, k_block = blockIdx.x % args.k_blocks;
  uint8_t* image = reinterpret_cast<uint8_t*>(args.image) + int64_t{blockIdx.x} * kBlockBytes;
  const int t = threadIdx.x;

  const int64_t value_bytes = int64_t{args.k} / 2 * Operand::kItemBytes;
  const uint8_t* values = reinterpret_cast<const uint8_t*>(args.values);
  for (int chunk = t; chunk < Operand::kBlockValueBytes / 16; chunk += kPackThreads) {
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

  const BlockMeta<kMetaRowBytes> meta(args, row_block, k_block);
  uint32_t* words = reinterpret_cast<uint32_t*>(image + Operand::kBlockValueBytes);
  if constexpr (Operand::kItemBytes == 1) {
    const int w = t / 32, r = (t % 32) >> 2, q = t & 3;
    for (int step = 0; step < 2; ++step) {
      uint32_t word = 0;
      for (int b = 0; b < 4; ++b)
        word |= meta(16 * w + r + 8 * (q & 1), 8 * step + 4 * (q >> 1) + b) << (8 * b);
      words[2 * t + step] = word;
    }
  } else {
    words[t] = meta.word16(t);
  }
}

// Row order to the blocks of widen.cuh, which draws them. Grid: m_blocks * k_blocks CTAs.
template <WeightScales kScales>
__device__ __forceinline__ void pack_widened(const PackWidenedArgs& args) {
  using Operand = Widened<kScales>;
  constexpr int kScalesAt = Operand::kBlockValueBytes + Operand::kMetaBytes;
  constexpr int kBlockBytes = kScalesAt + Operand::kBlockScaleBytes;
  constexpr int kBlockK = 64;
  const int row_block = blockIdx.x / args.k_blocks, k_block = blockIdx.x % args.k_blocks;
  const int row0 = row_block * kBlockRows, column0 = k_block * kBlockK;
  uint8_t* image = reinterpret_cast<uint8_t*>(args.image) + int64_t{blockIdx.x} * kBlockBytes;
  const int t = threadIdx.x, w = t / 32, g = t % 32 / 4, q = t % 4;

  // The pair of codes of a group: a row's pairs begin at even addresses, since K is a multiple of 4.
  const uint16_t* pairs = reinterpret_cast<const uint16_t*>(args.values);
  const int groups = args.k / 4;
  uint32_t codes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // step i / 2, group q + 4 (i % 2)
    codes[i] = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row0 + 16 * w + g + 8 * h;
      const int group = column0 / 4 + 8 * (i / 2) + 4 * (i % 2) + q;
      if (row < args.m && group < groups)
        codes[i] |= uint32_t{pairs[int64_t{row} * groups + group]} << (16 * h);
    }
  }
  reinterpret_cast<uint4*>(image)[t] = make_uint4(codes[0], codes[1], codes[2], codes[3]);

  const BlockMeta<Operand::kMetaBytes / kBlockRows> meta(args, row_block, k_block);
  reinterpret_cast<uint32_t*>(image + Operand::kBlockValueBytes)[t] = meta.word16(t);

  // What lies outside the matrix has scale 1.
  const auto scale_at = [&](int row, int column) {
    return int64_t{row / args.scale_rows} * args.scale_columns + column / args.scale_k;
  };
  if constexpr (kScales == WeightScales::block) {
    const int row = row0 + 16 * (t / 4), column = column0 + 16 * (t % 4);
    if (t < 16)
      reinterpret_cast<float*>(image + kScalesAt)[t] =
          row < args.m && column < args.k
              ? reinterpret_cast<const float*>(args.scale)[scale_at(row, column)]
              : 1.0f;
  } else if constexpr (kScales == WeightScales::mx) {
    const int row = row0 + t / 2, column = column0 + 32 * (t % 2);
    image[kScalesAt + t] =
        row < args.m && column < args.k
            ? reinterpret_cast<const uint8_t*>(args.scale)[scale_at(row, column)]
            : 127;
  }
}

}  // namespace sp24
