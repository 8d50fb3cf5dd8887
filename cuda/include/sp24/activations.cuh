// What a product needs done to its activations: quantized by row, or their columns put in another order.
#pragma once
#include <cstdint>
#include <type_traits>

#include "sp24/convert.cuh"

namespace sp24 {

#define SP24_TOKENS_ARGS(X)                                                                \
  X(uint64_t, x)       /* [rows][k], rows of ldx elements */                               \
  X(uint64_t, smooth)  /* f32 [k], what columns are divided by first; of smooth_tokens */  \
  X(uint64_t, codes)   /* [rows][k] of the operand type, tight */                          \
  X(uint64_t, scale)   /* f32 [rows] */                                                    \
  X(int64_t, ldx)      /* elements */                                                      \
  X(int32_t, k)                                                                            \
  X(int32_t, vector)   /* rows of x, and smooth, lie at multiples of 16 bytes, of codes at 8 */ \
  X(int32_t, max_finite)

struct TokensArgs {
#define X(type, name) type name;
  SP24_TOKENS_ARGS(X)
#undef X
};

#define SP24_GATHER_ARGS(X)                                                                    \
  X(uint64_t, x)             /* [rows][k] items, rows of x_pitch bytes */                       \
  X(uint64_t, order)         /* i32 [k]; 16-byte aligned */                                     \
  X(uint64_t, out)           /* [rows][k], rows of out_pitch bytes, zeros after k */            \
  X(int64_t, x_pitch)                                                                          \
  X(int64_t, out_pitch)      /* a multiple of 16, as out is */                                  \
  X(int32_t, rows)                                                                             \
  X(int32_t, k)              /* a multiple of 4 */                                              \
  X(int32_t, cta_rows)       /* rows a CTA keeps in shared memory; 0: one, read where it lies */ \
  X(int32_t, column_blocks)  /* CTAs that share a row; 1 unless cta_rows is 0 */                \
  X(int32_t, vector)         /* x and x_pitch are multiples of 16 */

struct GatherArgs {
#define X(type, name) type name;
  SP24_GATHER_ARGS(X)
#undef X
};

// Shared memory of a gather: two CTAs an SM.
constexpr int kGatherBytes = 96 * 1024;

// The bits of a value divided by a factor, as f32: one IEEE division, subnormals kept.
template <class Source>
__device__ __forceinline__ uint32_t divided(uint32_t bits, float factor) {
  const uint32_t quotient = __float_as_uint(__fdiv_rn(Source::value(bits), factor));
  const uint32_t magnitude = Source::magnitude(&bits, 0);
  // A NaN goes through quieted, with its payload (nobody asks for its sign); the GPU's own division
  // loses that.
  return magnitude > Source::kInfinity ? Source::f32_magnitude(magnitude) | 0x00400000 : quotient;
}

// A row a CTA, read twice: the second time it is in L1 or L2. Grid: rows.
// codes = x / scale with the row's scale, amax / max_finite; saturated. With kSmooth every column of x
// is divided by its factor first, both times.
template <class Target, class Source, bool kSmooth>
__device__ __forceinline__ void quantize_tokens(const TokensArgs& args) {
  // What is quantized: the activations as they are, or f32 quotients.
  using Value = std::conditional_t<kSmooth, source_f32, Source>;
  // A group at once, or two where no factors are held besides (eight of them would spill).
  constexpr int kAtOnce = kSmooth ? kGroup : 2 * kGroup;
  constexpr int kWords = kAtOnce / kGroup * Value::kGroupWords;
  __shared__ uint32_t warp_top[kConvertThreads / 32];
  const int t = static_cast<int>(threadIdx.x);
  const int64_t row = blockIdx.x;
  const auto* x = reinterpret_cast<const uint8_t*>(args.x) + row * args.ldx * Source::kItemBytes;
  const auto* factors = reinterpret_cast<const float*>(args.smooth);
  auto* codes = reinterpret_cast<uint8_t*>(args.codes) + row * args.k;
  static_assert(Target::kItemBytes == 1, "codes are bytes");
  // kAtOnce elements at `column`.
  const auto load = [&](int column, uint32_t (&words)[kWords]) {
    const auto* from = x + int64_t{column} * Source::kItemBytes;
    if constexpr (kSmooth) {
      const auto four = *reinterpret_cast<const typename Source::Vector*>(from);
      const float4 by = *reinterpret_cast<const float4*>(factors + column);
      const auto* given = reinterpret_cast<const uint32_t*>(&four);
      words[0] = divided<Source>(Source::bits(given, 0), by.x);
      words[1] = divided<Source>(Source::bits(given, 1), by.y);
      words[2] = divided<Source>(Source::bits(given, 2), by.z);
      words[3] = divided<Source>(Source::bits(given, 3), by.w);
    } else {
#pragma unroll
      for (int i = 0; i < kWords / 4; ++i) {
        const uint4 part = reinterpret_cast<const uint4*>(from)[i];
        words[4 * i] = part.x, words[4 * i + 1] = part.y;
        words[4 * i + 2] = part.z, words[4 * i + 3] = part.w;
      }
    }
  };
  // One element, as the first of a group.
  const auto one = [&](int column, uint32_t (&words)[kWords]) {
    if constexpr (Source::kItemBytes == 2)
      words[0] = reinterpret_cast<const uint16_t*>(x)[column];
    else
      words[0] = reinterpret_cast<const uint32_t*>(x)[column];
    if constexpr (kSmooth) words[0] = divided<Source>(words[0], factors[column]);
  };

  uint32_t top = 0, words[kWords];
  if (args.vector) {
    for (int column = kAtOnce * t; column < args.k; column += kAtOnce * kConvertThreads) {
      load(column, words);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) top = max(top, Value::magnitude(words, i));
    }
  } else {
    for (int column = t; column < args.k; column += kConvertThreads) {
      one(column, words);
      top = max(top, Value::magnitude(words, 0));
    }
  }
  top = __reduce_max_sync(~0u, top);
  if (t % 32 == 0) warp_top[t / 32] = top;
  // Orders the writes of warp_top before the reads; nothing is written to it again.
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kConvertThreads / 32; ++i) top = max(top, warp_top[i]);
  const float scale = scale_of(Value::f32_magnitude(top), static_cast<float>(args.max_finite));
  if (t == 0) reinterpret_cast<float*>(args.scale)[row] = scale;

  const auto code = [&](uint32_t bits) {
    return Target::code(__fdiv_rn(Value::value(bits), scale), true);
  };
  if (args.vector) {
#pragma unroll 1  // eight divisions are enough to hide each other
    for (int column = kAtOnce * t; column < args.k; column += kAtOnce * kConvertThreads) {
      load(column, words);
      uint32_t out[kAtOnce / 4] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) out[i / 4] |= code(Value::bits(words, i)) << (8 * (i % 4));
      if constexpr (kAtOnce == 4)
        *reinterpret_cast<uint32_t*>(codes + column) = out[0];
      else
        *reinterpret_cast<uint2*>(codes + column) = make_uint2(out[0], out[1]);
    }
  } else {
#pragma unroll 1
    for (int column = t; column < args.k; column += kConvertThreads) {
      one(column, words);
      codes[column] = static_cast<uint8_t>(code(Value::bits(words, 0)));
    }
  }
}

// out[r][j] = x[r][order[j]]. Grid: ceil(rows / max(cta_rows, 1)) * column_blocks.
//
// An order's four bytes an item outweigh the item itself, so a CTA holds several rows and reads the
// order once for all of them.
template <class Item>
__device__ __forceinline__ void gather_columns(const GatherArgs& args) {
  constexpr int kItems = 16 / static_cast<int>(sizeof(Item));  // of one 16-byte store
  extern __shared__ __align__(16) uint8_t staged[];
  const int t = static_cast<int>(threadIdx.x);
  const int row_block = static_cast<int>(blockIdx.x) / args.column_blocks;
  const int column_block = static_cast<int>(blockIdx.x) % args.column_blocks;
  const int step = max(args.cta_rows, 1);
  const int64_t first = int64_t{row_block} * step;
  const int rows = static_cast<int>(min(int64_t{step}, args.rows - first));
  const auto* x = reinterpret_cast<const uint8_t*>(args.x) + first * args.x_pitch;
  const int row_bytes = args.k * static_cast<int>(sizeof(Item));
  const uint8_t* from = x;
  int64_t pitch = args.x_pitch;
  if (args.cta_rows) {
    from = staged;
    pitch = (row_bytes + 15) / 16 * 16;
    for (int r = 0; r < rows; ++r) {
      const uint8_t* row = x + r * args.x_pitch;
      uint8_t* to = staged + r * pitch;
      // Whole vectors first, and what is left (all, where rows are not aligned) by items.
      const int vectors = args.vector ? row_bytes / 16 : 0;
      for (int i = t; i < vectors; i += kConvertThreads)
        reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(row)[i];
      for (int i = vectors * kItems + t; i < args.k; i += kConvertThreads)
        reinterpret_cast<Item*>(to)[i] = reinterpret_cast<const Item*>(row)[i];
    }
    // Orders the writes of `staged` before the reads; it is written once.
    __syncthreads();
  }
  const int chunks = static_cast<int>(args.out_pitch / 16);
  const auto* order = reinterpret_cast<const int4*>(args.order);
  auto* out = reinterpret_cast<uint8_t*>(args.out) + first * args.out_pitch;
  for (int chunk = column_block * kConvertThreads + t; chunk < chunks;
       chunk += args.column_blocks * kConvertThreads) {
    // k is a multiple of 4, so four neighbours exist or do not together.
    int at[kItems];
#pragma unroll
    for (int i = 0; i < kItems; i += 4) {
      const int j = chunk * kItems + i;
      const int4 four = j < args.k ? order[j / 4] : make_int4(-1, -1, -1, -1);
      at[i] = four.x, at[i + 1] = four.y, at[i + 2] = four.z, at[i + 3] = four.w;
    }
    for (int r = 0; r < rows; ++r) {
      const auto* items = reinterpret_cast<const Item*>(from + r * pitch);
      uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const uint32_t item = at[i] < 0 ? 0 : static_cast<uint32_t>(items[at[i]]);
        words[i * 4 / kItems] |= item << (8 * sizeof(Item) * (i % (kItems / 4)));
      }
      *reinterpret_cast<uint4*>(out + r * args.out_pitch + int64_t{chunk} * 16) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

}  // namespace sp24
