// From a warpgroup's accumulators to D, through registers alone: no shared memory, no barrier.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "sp24/args.cuh"
#include "sp24/config.cuh"
#include "sp24/ptx/warp.cuh"

namespace sp24 {

struct out_f16 {
  using Item = __half;
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t w;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
    return w;
  }
};
struct out_bf16 {
  using Item = __nv_bfloat16;
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t w;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
    return w;
  }
};
struct out_f32 {
  using Item = float;
};

// value = (accumulator * scale_a[row]) * scale_b[col] + bias[row], in f32. Lane l of a warp holds
// rows r and r + 8 (r = l / 4) and, of every eight columns, 2q and 2q + 1 (q = l % 4).
struct RowScaling {
  float scale[2], bias[2];

  __device__ __forceinline__ RowScaling(const GemmArgs& args, int row) {
    const float* scale_a = reinterpret_cast<const float*>(args.scale_a);
    const float* bias_a = reinterpret_cast<const float*>(args.bias);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = min(row + 8 * h, args.m - 1);  // rows past M are not stored
      scale[h] = scale_a ? __ldg(scale_a + at * args.scale_a_stride) : 1.0f;
      bias[h] = bias_a ? __ldg(bias_a + at) : 0.0f;
    }
  }
  __device__ __forceinline__ float apply(float acc, int h, float col) const {
    return fmaf(acc * scale[h], col, bias[h]);
  }
};

// The scales of a tile's columns, in shared memory: each warpgroup brings its own copy while it
// multiplies, two of them in turn.
//
// Order. A thread writes its columns at the start of a tile and every thread of the warpgroup reads
// all of them at the end, behind `publish`, a barrier of the warpgroup. A slot is written again two
// tiles later: the writer has by then passed the barrier of the tile between, which every reader of
// the slot reached after its reads.
template <class Config>
struct ColumnScales {
  uint32_t slots, slot = 0;
  int barrier;

  __device__ __forceinline__ ColumnScales(uint32_t shared, int warpgroup)
      : slots(shared + offsetof(typename Config::Shared, column_scales) +
              warpgroup * 2 * Config::kTileN * 4),
        barrier(1 + warpgroup) {}

  __device__ __forceinline__ void fetch(const GemmArgs& args, int n0) {
    slot = slot ? 0 : Config::kTileN * 4;
    const float* scale_b = reinterpret_cast<const float*>(args.scale_b);
    for (int c = threadIdx.x % 128; c < Config::kTileN; c += 128) {
      const int at = min(n0 + c, args.n - 1);  // columns past N are not stored
      ptx::store_shared(slots + slot + 4 * c,
                        scale_b ? __ldg(scale_b + at * args.scale_b_stride) : 1.0f);
    }
  }
  __device__ __forceinline__ void publish() const { ptx::named_barrier_sync(barrier, 128); }
  // Columns `col` and the next of the tile.
  __device__ __forceinline__ float2 pair(int col) const {
    return ptx::load_shared<float2>(slots + slot + 4 * col);
  }
};

// 16-bit output of one warpgroup. `take` rounds the accumulators to words of two neighbours, which
// frees them for the next tile; `store<c>` writes the c-th chunk, four words a lane, and may be
// called while the next tile is being multiplied. Of a chunk's words, `kChunksN` differ in their
// group of eight columns and `kChunksH` in their half of the sixteen rows; a transpose within the
// quad turns them into 16 neighbouring bytes a lane.
template <class Config>
struct Store16 {
  using Out = typename Config::Out;
  using Item = typename Out::Item;
  static constexpr bool kTransposed = Config::kOrder == Order::nm;
  static constexpr int kChunksN = kTransposed || Config::kTileN < 32 ? 2 : 4;
  static constexpr int kChunksH = 4 / kChunksN;
  static constexpr int kChunks = Config::kTileN / 16;

  uint32_t words[4 * kChunks];
  Item* at = nullptr;   // where this lane's part of chunk 0 goes
  int rows = 0, cols = 0;  // of D, from there to its edge; nothing is stored when not positive

  static __device__ __forceinline__ int chunk_j(int c) { return c / (2 / kChunksH) * kChunksN; }
  static __device__ __forceinline__ int chunk_h(int c) { return c % (2 / kChunksH); }

  __device__ __forceinline__ void take(const float (&acc)[Config::kTileN / 2],
                                       const GemmArgs& args, const ColumnScales<Config>& scales,
                                       int m0, int n0) {
    const int lane = threadIdx.x % 32, r = lane >> 2, q = lane & 3;
    const int row0 = m0 + threadIdx.x % 128 / 32 * 16;
    const RowScaling scaling(args, row0 + r);
    scales.publish();
#pragma unroll
    for (int j = 0; j < Config::kTileN / 8; ++j) {
      const float2 col = scales.pair(8 * j + 2 * q);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int c = j / kChunksN * (2 / kChunksH) + h / kChunksH;
        const int i = j % kChunksN + kChunksN * (h % kChunksH);
        words[4 * c + i] = Out::pack(scaling.apply(acc[4 * j + 2 * h], h, col.x),
                                     scaling.apply(acc[4 * j + 2 * h + 1], h, col.y));
      }
    }
    // This lane's sixteen bytes of chunk 0: eight rows of one column, or eight columns of one row.
    const int row = row0 + 8 * (q / kChunksN) + (kTransposed ? 0 : r);
    const int col = n0 + 8 * (q % kChunksN) + (kTransposed ? r : 0);
    at = reinterpret_cast<Item*>(args.d) + (kTransposed ? col * args.ldd + row : row * args.ldd + col);
    rows = args.m - row;
    cols = args.n - col;
  }

  __device__ __forceinline__ void store(int c, const GemmArgs& args) {
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      w[i] = kTransposed ? ptx::transpose_8x8_b16(words[4 * c + i]) : words[4 * c + i];
    ptx::transpose_quad(w, threadIdx.x & 3);
    const int dn = 8 * chunk_j(c), dm = 8 * chunk_h(c);
    const int along = kTransposed ? rows - dm : cols - dn;   // elements left in this lane's line
    const bool inside = kTransposed ? dn < cols : dm < rows;  // its line is one of D's
    Item* to = at + (kTransposed ? dn * args.ldd + dm : dm * args.ldd + dn);
    if (!inside) return;
    if (args.vector_store && along >= 8) {
      *reinterpret_cast<uint4*>(to) = make_uint4(w[0], w[1], w[2], w[3]);
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (e < along)
          reinterpret_cast<uint16_t*>(to)[e] = static_cast<uint16_t>(w[e / 2] >> (16 * (e % 2)));
    }
  }
};

// 32-bit output: a warp's store covers whole 32-byte sectors in either order as it is, straight from
// the accumulators.
template <class Config>
__device__ __forceinline__ void store_32bit(const float (&acc)[Config::kTileN / 2],
                                            const GemmArgs& args,
                                            const ColumnScales<Config>& scales, int m0, int n0) {
  const int lane = threadIdx.x % 32, r = lane >> 2, q = lane & 3;
  const int row0 = m0 + threadIdx.x % 128 / 32 * 16;
  const RowScaling scaling(args, row0 + r);
  float* d = reinterpret_cast<float*>(args.d);
  scales.publish();
#pragma unroll
  for (int j = 0; j < Config::kTileN / 8; ++j) {
    const int col = n0 + 8 * j + 2 * q;
    const float2 scale = scales.pair(8 * j + 2 * q);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row0 + r + 8 * h;
      const float2 v = {scaling.apply(acc[4 * j + 2 * h], h, scale.x),
                        scaling.apply(acc[4 * j + 2 * h + 1], h, scale.y)};
      if (row >= args.m) continue;
      if constexpr (Config::kOrder == Order::nm) {
        if (col < args.n) d[col * args.ldd + row] = v.x;
        if (col + 1 < args.n) d[(col + 1) * args.ldd + row] = v.y;
      } else {
        float* at = d + row * args.ldd + col;
        if (args.vector_store && col + 1 < args.n) {
          *reinterpret_cast<float2*>(at) = v;
        } else {
          if (col < args.n) at[0] = v.x;
          if (col + 1 < args.n) at[1] = v.y;
        }
      }
    }
  }
}

// A whole tile at once.
template <class Config>
__device__ __forceinline__ void store_tile(const float (&acc)[Config::kTileN / 2],
                                           const GemmArgs& args,
                                           const ColumnScales<Config>& scales, int m0, int n0) {
  if constexpr (sizeof(typename Config::Out::Item) == 2) {
    Store16<Config> tile;
    tile.take(acc, args, scales, m0, n0);
#pragma unroll
    for (int c = 0; c < Store16<Config>::kChunks; ++c) tile.store(c, args);
  } else {
    store_32bit<Config>(acc, args, scales, m0, n0);
  }
}

}  // namespace sp24
