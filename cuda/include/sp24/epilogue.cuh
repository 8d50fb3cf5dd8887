// From a warpgroup's accumulators to D.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "sp24/args.cuh"
#include "sp24/config.cuh"
#include "sp24/ptx/copy.cuh"
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
// The sums of integers themselves: no scale and no bias touches them.
struct out_s32 {
  using Item = int32_t;
};

// Scales and bias of what a warpgroup stores of a tile, in shared memory: of its columns a scale each,
// then of its rows a scale and a bias each. Each warpgroup brings its own copy while it multiplies, by
// asynchronous copies, for a load would hold up the warp's next wgmma; two of them in turn.
//
// value = (accumulator * scale_a[row]) * scale_b[col] + bias[row], in f32 (an s32 accumulator is rounded
// to it first). Lane l of a warp holds rows r and r + 8 (r = l / 4) of a block and, of every eight
// columns, 2q and 2q + 1 (q = l % 4).
//
// Order. A thread brings its share at the start of a tile and every thread of the warpgroup reads
// all of it at the end, behind `publish` of block 0: the wait for its own copies, then a barrier of the
// warpgroup. A slot is written again two tiles later: the writer has by then passed the barrier of
// the tile between, which every reader of the slot reached after its reads.
template <class Config>
struct TileScales {
  static constexpr int kRows = Config::kStoredBlocks * kBlockRows;
  static constexpr int kScales = Config::kStoredN, kBias = kScales + kRows;
  uint32_t slots, slot = 0;
  int barrier;
  float row_scale[2], row_bias[2];  // of this lane's rows, from `publish` on

  __device__ __forceinline__ TileScales(uint32_t shared, int warpgroup)
      : slots(shared + offsetof(typename Config::Shared, scales) +
              warpgroup * sizeof(Config::Shared::scales) / Config::kConsumers),
        barrier(kBarriers * warpgroup + 1) {}

  // `count` values from `first` on, of those that there are; `otherwise` where there are none. Those
  // past the end belong to rows or columns that are not stored.
  static __device__ __forceinline__ void bring(uint32_t to, uint64_t from, int first, int count,
                                               int end, int stride, float otherwise, int thread,
                                               int threads) {
    const float* values = reinterpret_cast<const float*>(from);
    for (int i = thread; i < count; i += threads) {
      if (values)
        ptx::copy_async(to + 4 * i, values + min(first + i, end - 1) * stride);
      else
        ptx::store_shared(to + 4 * i, otherwise);
    }
  }
  // For the warpgroup's rows from `m0` and its columns from `n0`.
  __device__ __forceinline__ void fetch(const GemmArgs& args, int m0, int n0) {
    constexpr int kSlotBytes = sizeof(Config::Shared::scales) / Config::kConsumers / 2;
    slot = slot ? 0 : kSlotBytes;
    const int t = threadIdx.x % 128;
    const uint32_t to = slots + slot;
    // Scales that the loop has applied are none here.
    const uint64_t scale_a = Config::kScaledInLoop ? 0 : args.scale_a;
    const uint64_t scale_b = Config::kScaledInLoop ? 0 : args.scale_b;
    bring(to, scale_b, n0, Config::kStoredN, args.n, args.scale_b_stride, 1.0f, t, 128);
    // Half of the threads bring the rows' scales, half the biases.
    if (t < 64)
      bring(to + 4 * kScales, scale_a, m0, kRows, args.m, args.scale_a_stride, 1.0f, t, 64);
    else
      bring(to + 4 * kBias, args.bias, m0, kRows, args.m, 1, 0.0f, t - 64, 64);
  }
  // Before a block of 64 rows is stored, the warpgroup's first one first.
  __device__ __forceinline__ void publish(int block) {
    if (block == 0) {
      ptx::copy_async_wait_all();
      ptx::named_barrier_sync(barrier, 128);
    }
    const int row = block * kBlockRows + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row_scale[h] = ptx::load_shared<float>(slots + slot + 4 * (kScales + row + 8 * h));
      row_bias[h] = ptx::load_shared<float>(slots + slot + 4 * (kBias + row + 8 * h));
    }
  }
  // Columns `col` and the next, of the warpgroup's.
  __device__ __forceinline__ float2 pair(int col) const {
    return ptx::load_shared<float2>(slots + slot + 4 * col);
  }
  // `h`: this lane's upper or lower row.
  template <class Sum>
  __device__ __forceinline__ float apply(Sum acc, int h, float col) const {
    return fmaf(static_cast<float>(acc) * row_scale[h], col, row_bias[h]);
  }
};

// 16-bit output of 64 rows by one warpgroup. `take` rounds the accumulators to words of two neighbours, `store`
// writes them, a chunk of four words a lane at a time. (Stored beside the next tile's wgmmas, a chunk a
// step, D was 1 to 2 % slower: the other warpgroup's wgmmas hide it as well, and nothing waits.)
//
// Order mn: of a chunk's words, `kChunksN` differ in their group of eight columns and `kChunksH` in
// their half of the sixteen rows; a transpose within the quad turns them into 16 neighbouring bytes
// a lane. Order nm: a chunk is 16 columns of the warpgroup's 64 rows, turned through shared memory,
// so that a line of D gets its 128 bytes at once: 32 at a time, a warp's own, cost 1 to 4 %.
// Of eight columns a chunk's second group is empty.
template <class Config>
struct Store16 {
  using Out = typename Config::Out;
  using Item = typename Out::Item;
  static constexpr bool kTurned = Config::kOrder == Order::nm;
  static constexpr int kChunksN = kTurned || Config::kStoredN < 32 ? 2 : 4;
  static constexpr int kChunksH = 4 / kChunksN;
  static constexpr bool kEmptyGroup = Config::kStoredN == 8;
  static constexpr int kChunks = (Config::kStoredN + 15) / 16;
  static constexpr int kChunkBytes = 16 * kBlockRows * sizeof(Item);

  uint32_t words[4 * kChunks];
  Item* at = nullptr;   // where this lane's part of chunk 0 goes
  int rows = 0, cols = 0;  // of D, from there to its edge; nothing is stored when not positive

  static __device__ __forceinline__ int place(int c, int block) {
    return (c + block * kChunks) % 2 * kChunkBytes;
  }
  static __device__ __forceinline__ int chunk_j(int c) { return c / (2 / kChunksH) * kChunksN; }
  static __device__ __forceinline__ int chunk_h(int c) { return c % (2 / kChunksH); }

  __device__ __forceinline__ void take(const typename Config::StoredSums& acc,
                                       const GemmArgs& args, TileScales<Config>& scales, int m0,
                                       int n0, int block = 0) {
    const int t = threadIdx.x % 128, lane = t % 32, r = lane >> 2, q = lane & 3;
    [[maybe_unused]] const bool scaled = args.scale_a || args.scale_b || args.bias;
    if constexpr (kEmptyGroup) words[1] = words[3] = 0;
    scales.publish(block);
#pragma unroll
    for (int j = 0; j < Config::kStoredN / 8; ++j) {
      const float2 col = scales.pair(8 * j + 2 * q);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int c = j / kChunksN * (2 / kChunksH) + h / kChunksH;
        const int i = j % kChunksN + kChunksN * (h % kChunksH);
        if constexpr (Config::Operand::kPerRegister == 2) {
          // Sums in f16 are stored as they are, unless something is to be applied to them.
          const uint32_t sums = acc[2 * j + h];
          words[4 * c + i] = sums;
          if (scaled) {
            const float2 wide = __half22float2(reinterpret_cast<const __half2&>(sums));
            words[4 * c + i] =
                Out::pack(scales.apply(wide.x, h, col.x), scales.apply(wide.y, h, col.y));
          }
        } else {
          words[4 * c + i] = Out::pack(scales.apply(acc[4 * j + 2 * h], h, col.x),
                                       scales.apply(acc[4 * j + 2 * h + 1], h, col.y));
        }
      }
    }
    // This lane's sixteen bytes of chunk 0: eight rows of one column, or eight columns of one row.
    const int row = m0 + (kTurned ? 8 * (t % 8) : t / 32 * 16 + 8 * (q / kChunksN) + r);
    const int col = n0 + (kTurned ? t / 8 : 8 * (q % kChunksN));
    at = reinterpret_cast<Item*>(args.d) + (kTurned ? col * args.ldd + row : row * args.ldd + col);
    rows = args.m - row;
    cols = (kEmptyGroup ? min(args.n, n0 + 8) : args.n) - col;
  }

  // The c-th chunk, in two halves with a barrier of the warpgroup between them in order nm. `chunks`
  // are two chunks of shared memory of this warpgroup, which take turns from one block of 64 rows to the
  // next of a tile too.
  //
  // Order (nm). The warpgroup writes a chunk, passes the barrier and reads it. The chunk after the next
  // goes to the same place: its writer has then passed the next chunk's barrier, which every thread
  // reached after its read of this one. (Of the last chunks of a tile, and the next tile's first, the
  // barrier of `TileScales::publish` stands between.)
  __device__ __forceinline__ void turn(int c, uint32_t chunks, int block = 0) {
    if constexpr (kTurned) {
      // Matrix i holds columns 8 (i % 2) .. + 7 and rows 16 warp + 8 (i / 2) .. + 7. The 16 bytes of
      // rows 8q .. + 7 of column n lie at q ^ (n % 8), so that neither side meets a bank twice.
      const int t = threadIdx.x % 128, lane = t % 32, i = lane / 8;
      const int n = 8 * (i % 2) + lane % 8, q = t / 32 * 2 + i / 2;
      ptx::store_matrices_transposed(
          chunks + place(c, block) + n * 128 + (q ^ (n & 7)) * 16, words[4 * c], words[4 * c + 1],
          words[4 * c + 2], words[4 * c + 3]);
    }
  }
  __device__ __forceinline__ void write(int c, const GemmArgs& args, uint32_t chunks,
                                        int block = 0) {
    if constexpr (kTurned) {
      const int t = threadIdx.x % 128, line = t / 8;
      const uint4 v = ptx::load_shared<uint4>(chunks + place(c, block) + line * 128 +
                                              ((t % 8) ^ (line & 7)) * 16);
      int64_t pitch = args.ldd;
      // The loop over K leaves no registers for its multiples, which would be worked out ahead of all tiles.
      if constexpr (Config::kScaledByTile) asm volatile("" : "+l"(pitch));
      if (16 * c < cols) store_line(at + 16 * c * pitch, v, rows, args.vector_store);
    } else {
      uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = words[4 * c + i];
      ptx::transpose_quad(w, threadIdx.x & 3);
      const int dn = 8 * chunk_j(c), dm = 8 * chunk_h(c);
      if (dm < rows)
        store_line(at + dm * args.ldd + dn, make_uint4(w[0], w[1], w[2], w[3]), cols - dn,
                   args.vector_store);
    }
  }
  // All chunks, with nothing to do beside them. `barrier` is the epilogue's.
  __device__ __forceinline__ void store(const GemmArgs& args, uint32_t chunks, int barrier,
                                        int block = 0) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      turn(c, chunks, block);
      if constexpr (kTurned) ptx::named_barrier_sync(barrier, 128);
      write(c, args, chunks, block);
    }
  }

  // Rounds and stores 64 rows (order nm), each chunk rounded and written to shared memory while the one before is
  // on its way back. Of rows that lie in D as a whole (`kInside`) nothing is asked for a chunk.
  //
  // Order. Chunk c + 1 goes to the place of chunk c - 1, which every thread has read before the barrier behind
  // which c is read; and it is read behind the next. (The first chunk: as in `turn`.)
  template <bool kInside>
  __device__ __forceinline__ void store_by_turns(const typename Config::StoredSums& acc,
                                                 const GemmArgs& args, TileScales<Config>& scales,
                                                 uint32_t chunks, int barrier, int m0, int n0) {
    // Read anew: in tall tiles the loop over K leaves no registers for what follows from it.
    const int t = ptx::thread() % 128, line = t / 8, row = m0 + 8 * (t % 8), col = n0 + line;
    Item* to = reinterpret_cast<Item*>(args.d) + col * args.ldd + row;
    const int64_t pitch = 16 * args.ldd;
    const uint32_t from = chunks + line * 128 + ((t % 8) ^ (line & 7)) * 16;
    const auto put = [&](int c) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int j = 2 * c + i;
        const float2 col = scales.pair(8 * j + 2 * (t & 3));
#pragma unroll
        for (int h = 0; h < 2; ++h)
          words[4 * c + i + 2 * h] = Out::pack(scales.apply(acc[4 * j + 2 * h], h, col.x),
                                               scales.apply(acc[4 * j + 2 * h + 1], h, col.y));
      }
      turn(c, chunks);
    };
    scales.publish(0);
    put(0);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      ptx::named_barrier_sync(barrier, 128);
      const uint4 v = ptx::load_shared<uint4>(from + place(c, 0));
      if (c + 1 < kChunks) put(c + 1);
      if constexpr (kInside)
        __stcs(reinterpret_cast<uint4*>(to), v);
      else if (col + 16 * c < args.n)
        store_line(to, v, args.m - row, args.vector_store);
      to += pitch;
    }
  }

  // Eight neighbouring elements, `along` of them inside D. Nobody reads D in this kernel: its lines
  // go first when L2 needs room.
  static __device__ __forceinline__ void store_line(Item* to, uint4 v, int along, bool vector) {
    if (vector && along >= 8) {
      __stcs(reinterpret_cast<uint4*>(to), v);
    } else {
      const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (e < along)
          reinterpret_cast<uint16_t*>(to)[e] = static_cast<uint16_t>(w[e / 2] >> (16 * (e % 2)));
    }
  }
};

// 32-bit output, straight from the accumulators: `values(j, v)` gives v[h][e] of column 8j + 2q + e and
// this lane's row r + 8h.
//
// Order mn: a warp's store covers whole 32-byte sectors as it is. Order nm: eight columns of the
// warpgroup's 64 rows are turned through shared memory, so that a line of D gets 256 bytes at once; two
// such chunks together, so that their trips there and back overlap.
//
// Order (nm). The warpgroup writes two chunks, passes the barrier and reads them; it passes the barrier
// again before it writes the next two, and that of `TileScales::publish` before the next tile's.
// Of kByTurns, where the rows lie in D as a whole (`inside`), chunks go one by one, in the order of
// `Store16::store_by_turns`.
template <class Config, class Values>
__device__ __forceinline__ void store_32bit(const GemmArgs& args, uint32_t chunks, int barrier,
                                            int m0, int n0, int block, bool inside,
                                            const Values& values) {
  using Item = typename Config::Out::Item;
  const int t = threadIdx.x % 128, lane = t % 32, r = lane >> 2, q = lane & 3;
  Item* d = reinterpret_cast<Item*>(args.d);
  constexpr int kGroups = Config::kStoredN / 8, kChunkBytes = 8 * kBlockRows * 4;
  if constexpr (Config::kOrder == Order::nm) {
    const int line = t / 16, row = m0 + 4 * (t % 16), along = args.m - row;
    // Rows 4i .. 4i + 3 of column c, 16 bytes, lie at i ^ 2 (c / 2): no bank is met twice.
    const auto put = [&](int j, int p) {
      Item v[2][2];
      values(j, v);
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          ptx::store_shared(chunks + p * kChunkBytes + (2 * q + e) * 256 +
                                ((t / 32 * 4 + 2 * h + r / 4) ^ (2 * q)) * 16 + r % 4 * 4,
                            reinterpret_cast<const uint32_t&>(v[h][e]));
    };
    const uint32_t from = chunks + line * 256 + ((t % 16) ^ (line / 2 * 2)) * 16;
    if (Config::kByTurns && inside) {
      Item* to = d + (n0 + line) * args.ldd + row;
      const int64_t pitch = 8 * args.ldd;
      put(0, 0);
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        ptx::named_barrier_sync(barrier, 128);
        const uint4 v = ptx::load_shared<uint4>(from + j % 2 * kChunkBytes);
        if (j + 1 < kGroups) put(j + 1, (j + 1) % 2);
        __stcs(reinterpret_cast<uint4*>(to), v);
        to += pitch;
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < kGroups; j += 2) {
      if (j > 0 || block > 0) ptx::named_barrier_sync(barrier, 128);
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        if (j + p >= kGroups) break;
        put(j + p, p);
      }
      ptx::named_barrier_sync(barrier, 128);
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        if (j + p >= kGroups) break;
        const uint4 v = ptx::load_shared<uint4>(from + p * kChunkBytes);
        const int col = n0 + 8 * (j + p) + line;
        if (col >= args.n || along <= 0) continue;
        Item* to = d + col * args.ldd + row;
        if (args.vector_store && along >= 4) {
          __stcs(reinterpret_cast<uint4*>(to), v);
        } else {
          const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (i < along) reinterpret_cast<uint32_t*>(to)[i] = w[i];
        }
      }
    }
  } else {
    using Pair = std::conditional_t<std::is_same_v<Item, float>, float2, int2>;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const int col = n0 + 8 * j + 2 * q;
      Item both[2][2];
      values(j, both);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = m0 + t / 32 * 16 + r + 8 * h;
        const Pair v = {both[h][0], both[h][1]};
        if (row >= args.m) continue;
        Item* at = d + row * args.ldd + col;
        if (args.vector_store && col + 1 < args.n) {
          *reinterpret_cast<Pair*>(at) = v;
        } else {
          if (col < args.n) at[0] = v.x;
          if (col + 1 < args.n) at[1] = v.y;
        }
      }
    }
  }
}

// 64 rows of a tile, from `m0` on, by one warpgroup: its block of that number, all of them in order.
template <class Config>
__device__ __forceinline__ void store_tile(const typename Config::StoredSums& acc,
                                           const GemmArgs& args,
                                           TileScales<Config>& scales, uint32_t chunks,
                                           int barrier, int m0, int n0, int block = 0) {
  const bool inside = args.vector_store && m0 + kBlockRows <= args.m && n0 + Config::kStoredN <= args.n;
  if constexpr (sizeof(typename Config::Out::Item) == 2) {
    Store16<Config> tile;
    if constexpr (Config::kByTurns) {
      if (inside)
        tile.template store_by_turns<true>(acc, args, scales, chunks, barrier, m0, n0);
      else
        tile.template store_by_turns<false>(acc, args, scales, chunks, barrier, m0, n0);
    } else {
      tile.take(acc, args, scales, m0, n0, block);
      tile.store(args, chunks, barrier, block);
    }
  } else {
    using Item = typename Config::Out::Item;
    scales.publish(block);
    store_32bit<Config>(args, chunks, barrier, m0, n0, block, inside, [&](int j, Item (&v)[2][2]) {
      const float2 col = scales.pair(8 * j + 2 * (threadIdx.x & 3));
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const auto sum = acc[4 * j + 2 * h + e];
          if constexpr (std::is_same_v<Item, float>)
            v[h][e] = scales.apply(sum, h, e ? col.y : col.x);
          else
            v[h][e] = sum;
        }
    });
  }
}

}  // namespace sp24
