// Dense weights to 2:4 and to operands: prune, amax, scale, quantize. A warp takes 256 columns at a time:
// lane l has the eight from 8 l, which are two groups, a byte of metadata. What does not exist counts
// as zero.
//
// The results are the host's bit for bit (sp24cli/sparsity.py, scaling.py, fp8.py, packed.py), sums of
// squares included: those of a *patch*, 16 rows x 256 columns, are added up as sparsity.sum_patches
// does, and the host folds the patches.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "sp24/ptx/convert.cuh"

namespace sp24 {

#define SP24_CONVERT_ARGS(X)                                                                    \
  X(uint64_t, source)         /* [rows][k], tight; 16-byte aligned */                           \
  X(uint64_t, dense)          /* pruned [rows][k]; may be source itself for 2:4 */              \
  X(uint64_t, values)         /* [rows][k / 2] of the operand type; 16-byte aligned */          \
  X(uint64_t, meta)           /* [rows][ceil(k / 8)], two groups a byte */                      \
  X(uint64_t, scale)          /* f32 [ceil(rows / block_rows)][scale_columns]; 0 for none */    \
  X(uint64_t, amax)           /* f32 as bits, laid out as scale, zeroed before */               \
  X(uint64_t, sums)           /* f64 [Sum][ceil(rows / 16)][ceil(k / 256)] */                   \
  X(uint64_t, counts)         /* BandCounts [ceil(rows / band_rows)], zeroed before */          \
  X(int32_t, rows)                                                                              \
  X(int32_t, k)               /* a multiple of 4 */                                             \
  X(int32_t, band_rows)       /* rows that share one BandCounts: a multiple of 16, or all */     \
  X(int32_t, block_rows)      /* rows and columns that share a scale */                         \
  X(int32_t, block_columns)                                                                     \
  X(int32_t, scale_columns)                                                                     \
  X(int32_t, prune)           /* 0: more than two nonzeros in a group are counted as crowded */ \
  X(int32_t, saturate)        /* 0: past the end of the operand type lies NaN or infinity */    \
  X(uint64_t, norms)          /* f64 [k], for wanda; 16-byte aligned */                         \
  X(int32_t, kept)            /* N and */                                                       \
  X(int32_t, group)           /* M of a pattern other than 2:4; k is a multiple of it */

struct ConvertArgs {
#define X(type, name) type name;
  SP24_CONVERT_ARGS(X)
#undef X
};

#define SP24_BAND_COUNTS(X)                                                  \
  X(uint32_t, amax)        /* f32 as bits; not finite where a value is not */ \
  X(uint32_t, crowded)     /* groups of more than two nonzeros */            \
  X(uint32_t, kept)        /* nonzero kept values */                         \
  X(uint32_t, clipped)     /* those past the end of the type */              \
  X(uint32_t, underflowed) /* those whose code is zero */

struct BandCounts {
#define X(type, name) type name;
  SP24_BAND_COUNTS(X)
#undef X
};

#define SP24_SCALES_ARGS(X)                                                                  \
  X(uint64_t, amax)       /* f32 as bits [count] */                                          \
  X(uint64_t, scale)      /* f32 [count]; may be amax itself */                              \
  X(uint64_t, powers)     /* the scales as E8M0 [count], which they then are; 0 for none */  \
  X(int64_t, count)                                                                          \
  X(int32_t, max_finite)  /* of the operand type, a whole number that f32 holds */

struct ScalesArgs {
#define X(type, name) type name;
  SP24_SCALES_ARGS(X)
#undef X
};

constexpr int kPatchRows = 16;
constexpr int kPatchColumns = 256;
constexpr int kLaneColumns = kPatchColumns / 32;
constexpr int kGroup = 4;
constexpr int kConvertThreads = 256;
constexpr int kConvertWarps = kConvertThreads / 32;
// Rows whose loads are on their way at once.
constexpr int kAhead = 4;
static_assert(kLaneColumns == 2 * kGroup, "a lane has two groups: a byte of metadata");

// ---- source types: how the bits of a group read ----

template <uint32_t Infinity>
struct Source16 {
  using Item = uint16_t;
  static constexpr int kItemBytes = 2;
  static constexpr uint32_t kInfinity = Infinity;
  static constexpr int kGroupWords = 2;
  using Vector = uint2;  // one group
  static __device__ __forceinline__ uint32_t bits(const uint32_t* group, int i) {
    return i % 2 ? group[i / 2] >> 16 : group[i / 2] & 0xFFFF;
  }
  static __device__ __forceinline__ uint32_t magnitude(const uint32_t* group, int i) {
    return i % 2 ? group[i / 2] >> 16 & 0x7FFF : group[i / 2] & 0x7FFF;
  }
  // The group with zero for all whose bit of `keep` is not set.
  static __device__ __forceinline__ void mask(uint32_t* group, uint32_t keep) {
    group[0] &= (keep & 1 ? 0xFFFFu : 0) | (keep & 2 ? 0xFFFF0000u : 0);
    group[1] &= (keep & 4 ? 0xFFFFu : 0) | (keep & 8 ? 0xFFFF0000u : 0);
  }
  // The bits of elements `first` and `second`.
  static __device__ __forceinline__ uint2 pair(const uint32_t* group, uint32_t first,
                                               uint32_t second) {
    // Byte selectors 2 first, 2 first + 1, 2 second, 2 second + 1.
    const uint32_t both =
        __byte_perm(group[0], group[1], 0x1010 + first * 0x22 + second * 0x2200);
    return make_uint2(both & 0xFFFF, both >> 16);
  }
};

struct source_bf16 : Source16<0x7F80> {
  static __device__ __forceinline__ float value(uint32_t bits) { return __uint_as_float(bits << 16); }
  static __device__ __forceinline__ uint32_t f32_magnitude(uint32_t m) { return m << 16; }
};

struct source_f16 : Source16<0x7C00> {
  static __device__ __forceinline__ float value(uint32_t bits) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  }
  // By hand where it is not finite: the instruction loses a NaN's payload.
  static __device__ __forceinline__ uint32_t f32_magnitude(uint32_t m) {
    return m < kInfinity ? __float_as_uint(value(m)) : 0x7F800000 | (m & 0x3FF) << 13;
  }
};

struct source_f32 {
  using Item = uint32_t;
  static constexpr int kItemBytes = 4;
  static constexpr uint32_t kInfinity = 0x7F800000;
  static constexpr int kGroupWords = 4;
  using Vector = uint4;
  static __device__ __forceinline__ uint32_t bits(const uint32_t* group, int i) { return group[i]; }
  static __device__ __forceinline__ uint32_t magnitude(const uint32_t* group, int i) {
    return group[i] & 0x7FFFFFFF;
  }
  static __device__ __forceinline__ void mask(uint32_t* group, uint32_t keep) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) group[i] = keep >> i & 1 ? group[i] : 0;
  }
  static __device__ __forceinline__ uint2 pair(const uint32_t* group, uint32_t first,
                                               uint32_t second) {
    const auto at = [&](uint32_t i) {
      const uint32_t low = i & 1 ? group[1] : group[0], high = i & 1 ? group[3] : group[2];
      return i & 2 ? high : low;
    };
    return make_uint2(at(first), at(second));
  }
  static __device__ __forceinline__ float value(uint32_t bits) { return __uint_as_float(bits); }
  static __device__ __forceinline__ uint32_t f32_magnitude(uint32_t m) { return m; }
};

// ---- operand types: how a quotient becomes a code; `store` takes the four codes of two groups ----

struct Target8 {
  static constexpr int kItemBytes = 1;
  static __device__ __forceinline__ bool is_zero(uint32_t code) { return !(code & 0x7F); }
  static __device__ __forceinline__ void store(uint8_t* at, const uint32_t (&c)[4], bool aligned,
                                               bool both) {
    const uint32_t low = c[0] | c[1] << 8, high = c[2] | c[3] << 8;
    if (aligned) {
      *reinterpret_cast<uint32_t*>(at) = low | high << 16;
    } else {
      *reinterpret_cast<uint16_t*>(at) = static_cast<uint16_t>(low);
      if (both) *reinterpret_cast<uint16_t*>(at + 2) = static_cast<uint16_t>(high);
    }
  }
};

struct target_e4m3 : Target8 {
  // Values past it round past the largest finite one; the tie goes to that (its mantissa is even).
  static __device__ __forceinline__ bool is_clipped(float q) { return fabsf(q) > 464.0f; }
  static __device__ __forceinline__ uint32_t code(float q, bool saturate) {
    // NaN has one code, whatever its sign.
    return q != q || (!saturate && is_clipped(q)) ? 0x7Fu : ptx::e4m3_of(q);
  }
  static __device__ __forceinline__ float value(uint32_t code) {
    return source_f16::value(ptx::f16_of_e4m3(code));
  }
};

struct target_e5m2 : Target8 {
  // Here the tie goes past the end: the largest finite mantissa is odd.
  static __device__ __forceinline__ bool is_clipped(float q) { return fabsf(q) >= 61440.0f; }
  static __device__ __forceinline__ uint32_t code(float q, bool saturate) {
    if (q != q) return 0x7F;
    // Infinity, with its sign.
    return !saturate && is_clipped(q) ? (q < 0 ? 0xFCu : 0x7Cu) : ptx::e5m2_of(q);
  }
  // The upper byte of an f16.
  static __device__ __forceinline__ float value(uint32_t code) {
    return source_f16::value(code << 8);
  }
};

struct target_s8 : Target8 {
  static __device__ __forceinline__ bool is_clipped(float q) { return fabsf(rintf(q)) > 127.0f; }
  // Two's complement, saturated to -127 to 127 whatever `saturate` says; there is no NaN.
  static __device__ __forceinline__ uint32_t code(float q, bool) {
    if (q != q) return 0;
    return static_cast<uint32_t>(__float2int_rn(fminf(fmaxf(q, -127.0f), 127.0f))) & 0xFFu;
  }
  static __device__ __forceinline__ bool is_zero(uint32_t code) { return code == 0; }
  static __device__ __forceinline__ float value(uint32_t code) {
    return static_cast<float>(static_cast<int8_t>(code));
  }
};

struct Target16 {
  static constexpr int kItemBytes = 2;
  static __device__ __forceinline__ bool is_zero(uint32_t code) { return !(code & 0x7FFF); }
  static __device__ __forceinline__ void store(uint8_t* at, const uint32_t (&c)[4], bool aligned,
                                               bool both) {
    const uint32_t low = c[0] | c[1] << 16, high = c[2] | c[3] << 16;
    if (aligned) {
      *reinterpret_cast<uint2*>(at) = make_uint2(low, high);
    } else {
      *reinterpret_cast<uint32_t*>(at) = low;
      if (both) *reinterpret_cast<uint32_t*>(at + 4) = high;
    }
  }
};

struct target_f16 : Target16 {
  static __device__ __forceinline__ uint32_t rounded(float q) {
    return __half_as_ushort(__float2half_rn(q));
  }
  static __device__ __forceinline__ bool is_clipped(float q) {
    return (rounded(q) & 0x7FFF) >= 0x7C00;
  }
  static __device__ __forceinline__ uint32_t code(float q, bool saturate) {
    return rounded(saturate ? fminf(fmaxf(q, -65504.0f), 65504.0f) : q);
  }
  static __device__ __forceinline__ float value(uint32_t code) { return source_f16::value(code); }
};

struct target_bf16 : Target16 {
  static __device__ __forceinline__ uint32_t rounded(float q) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(q));
  }
  static __device__ __forceinline__ bool is_clipped(float q) {
    return (rounded(q) & 0x7FFF) >= 0x7F80;
  }
  static __device__ __forceinline__ uint32_t code(float q, bool saturate) {
    const float end = __uint_as_float(0x7F7F0000);
    return rounded(saturate ? fminf(fmaxf(q, -end), end) : q);
  }
  static __device__ __forceinline__ float value(uint32_t code) { return source_bf16::value(code); }
};

// ---- the parts ----

// Where a lane works: the rows of its warp's patch, and its columns.
struct Patch {
  int block, chunk, lane, row, rows, column;
  __device__ __forceinline__ explicit Patch(const ConvertArgs& args)
      : lane(static_cast<int>(threadIdx.x % 32)) {
    const int chunks = (args.k + kPatchColumns - 1) / kPatchColumns;
    const int item = static_cast<int>(blockIdx.x * kConvertWarps + threadIdx.x / 32);
    block = item / chunks;
    chunk = item % chunks;
    row = block * kPatchRows;
    rows = min(kPatchRows, args.rows - row);  // none for the warps past the end
    column = chunk * kPatchColumns + lane * kLaneColumns;
  }
};

// The two groups at `column`, zeros where the row has ended. A group is aligned to its own size in
// every row, since k is a multiple of 4; two of them to theirs where k is one of 8.
template <class Source>
__device__ __forceinline__ void load(const ConvertArgs& args, int row, int column,
                                     uint32_t (&words)[2 * Source::kGroupWords]) {
  using Vector = typename Source::Vector;
  constexpr int kWords = Source::kGroupWords;
#pragma unroll
  for (int i = 0; i < 2 * kWords; ++i) words[i] = 0;
  const int64_t at = (int64_t{row} * args.k + column) * Source::kItemBytes;
  const auto* from = reinterpret_cast<const uint8_t*>(args.source) + at;
  if (kWords == 2 && args.k % 8 == 0) {
    if (column < args.k) {
      const uint4 both = *reinterpret_cast<const uint4*>(from);
      words[0] = both.x, words[1] = both.y, words[2] = both.z, words[3] = both.w;
    }
    return;
  }
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    if (column + kGroup * g < args.k) {
      const Vector one = reinterpret_cast<const Vector*>(from)[g];
      const auto* word = reinterpret_cast<const uint32_t*>(&one);
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[g * kWords + i] = word[i];
    }
  }
}

// `load` turned round; nothing is written where the row has ended.
template <class Source>
__device__ __forceinline__ void store(const ConvertArgs& args, int row, int column,
                                      const uint32_t (&words)[2 * Source::kGroupWords]) {
  using Vector = typename Source::Vector;
  constexpr int kWords = Source::kGroupWords;
  const int64_t at = (int64_t{row} * args.k + column) * Source::kItemBytes;
  auto* to = reinterpret_cast<uint8_t*>(args.dense) + at;
  if (kWords == 2 && args.k % 8 == 0) {
    if (column < args.k)
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    return;
  }
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    if (column + kGroup * g < args.k) {
      Vector one;
      auto* word = reinterpret_cast<uint32_t*>(&one);
#pragma unroll
      for (int i = 0; i < kWords; ++i) word[i] = words[g * kWords + i];
      reinterpret_cast<Vector*>(to)[g] = one;
    }
  }
}

// A bit for each of the two highest scores whose magnitude is not zero: of equal ones the lower index
// wins.
template <class Score>
__device__ __forceinline__ uint32_t highest_two(const Score (&s)[kGroup],
                                                const uint32_t (&m)[kGroup]) {
  const bool b01 = s[0] >= s[1], b02 = s[0] >= s[2], b03 = s[0] >= s[3];
  const bool b12 = s[1] >= s[2], b13 = s[1] >= s[3], b23 = s[2] >= s[3];
  // Two wins of three.
  const auto most = [](bool a, bool b, bool c) { return (a && b) || (c && (a || b)); };
  return (m[0] && most(b01, b02, b03) ? 1u : 0) | (m[1] && most(!b01, b12, b13) ? 2u : 0) |
         (m[2] && most(!b02, !b12, b23) ? 4u : 0) | (m[3] && most(!b03, !b13, !b23) ? 8u : 0);
}

__device__ __forceinline__ uint32_t nonzero(const uint32_t (&m)[kGroup]) {
  return (m[0] ? 1u : 0) | (m[1] ? 2u : 0) | (m[2] ? 4u : 0) | (m[3] ? 8u : 0);
}

// The metadata nibble of a group by which of its four values are kept: digit i of the table is that of
// occupancy i (sparsity.keep_indices). Where more than two are, which is refused, it means nothing.
__device__ __forceinline__ uint32_t nibble_of(uint32_t occupancy) {
  constexpr uint64_t kNibbles = 0x000E'0DCC'098E'4DC4;
  return static_cast<uint32_t>(kNibbles >> (4 * occupancy)) & 15;
}

// Squares of a patch, N a lane and row, added up as sparsity.sum_patches does.
template <int N>
struct PatchSum {
  double v[N] = {};

  // Rows come in order.
  __device__ __forceinline__ void add(int i, double square) { v[i] = __dadd_rn(v[i], square); }

  // The sum of all, in every lane. An element's index is N lane + i, so the folds go over lanes from
  // 16 down, then over elements. While a lane has several, partners divide them: after lane bit b
  // those with bit b clear go on with the lower elements. Which of the two adds makes no difference,
  // since a + b is b + a.
  __device__ __forceinline__ double fold(int lane) {
#pragma unroll
    for (int bit = 16, n = N / 2; bit; bit /= 2, n /= 2) {
      if (n) {
        const bool upper = lane & bit;
#pragma unroll
        for (int i = 0; i < n; ++i) {
          const double mine = upper ? v[i + n] : v[i], theirs = upper ? v[i] : v[i + n];
          v[i] = __dadd_rn(mine, __shfl_xor_sync(~0u, theirs, bit));
        }
      } else {
        v[0] = __dadd_rn(v[0], __shfl_xor_sync(~0u, v[0], bit));
      }
    }
    // Lane bits 16, 8, ... now tell elements apart, the farthest first.
#pragma unroll
    for (int bit = 16, n = N / 2; n; bit /= 2, n /= 2)
      v[0] = __dadd_rn(v[0], __shfl_xor_sync(~0u, v[0], bit));
    return v[0];
  }
};

__device__ __forceinline__ double square(double x) { return __dmul_rn(x, x); }

enum class Sum { kAll, kKept, kError, kOutput, kLost };

__device__ __forceinline__ void put_sum(const ConvertArgs& args, const Patch& at, Sum which,
                                        double sum) {
  const int blocks = (args.rows + kPatchRows - 1) / kPatchRows;
  const int chunks = (args.k + kPatchColumns - 1) / kPatchColumns;
  const int64_t line = int64_t{static_cast<int>(which)} * blocks + at.block;
  reinterpret_cast<double*>(args.sums)[line * chunks + at.chunk] = sum;
}

__device__ __forceinline__ BandCounts& counts_of(const ConvertArgs& args, const Patch& at) {
  return reinterpret_cast<BandCounts*>(args.counts)[at.row / args.band_rows];
}

// Calls `work(row, words)` for every row of the patch, in order.
template <class Source, class Work>
__device__ __forceinline__ void for_each_row(const ConvertArgs& args, const Patch& at, Work work) {
  for (int base = 0; base < at.rows; base += kAhead) {
    uint32_t words[kAhead][2 * Source::kGroupWords];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (base + i < at.rows) load<Source>(args, at.row + base + i, at.column, words[i]);
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (base + i < at.rows) work(at.row + base + i, words[i]);
  }
}

template <class Source>
__device__ __forceinline__ void magnitudes(const uint32_t* group, uint32_t (&m)[kGroup],
                                           uint32_t& top) {
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    m[i] = Source::magnitude(group, i);
    top = max(top, m[i]);
  }
}

// ---- scores: which of the values of a group stay ----

struct score_magnitude {
  using Type = uint32_t;
  // Whether values are weighed by the norm of what they are multiplied with.
  static constexpr bool kWeighted = false;
  __device__ __forceinline__ score_magnitude(const ConvertArgs&, int) {}
  static __device__ __forceinline__ uint32_t of_item(const ConvertArgs&, uint32_t magnitude, float,
                                                     int) {
    return magnitude;
  }
};

// pruning.wanda: |w| * norm in f64, rounded once; a zero is below all that is not one.
struct score_wanda {
  using Type = double;
  static constexpr bool kWeighted = true;
  double norm[kLaneColumns];  // of a lane's columns
  __device__ __forceinline__ score_wanda(const ConvertArgs& args, int column) {
#pragma unroll
    for (int i = 0; i < kLaneColumns; i += 2) {
      const bool exists = column + i < args.k;
      const double2 two = exists ? *reinterpret_cast<const double2*>(norms(args) + column + i)
                                 : make_double2(0.0, 0.0);
      norm[i] = two.x, norm[i + 1] = two.y;
    }
  }
  static __device__ __forceinline__ const double* norms(const ConvertArgs& args) {
    return reinterpret_cast<const double*>(args.norms);
  }
  static __device__ __forceinline__ double weighted(double value, double norm) {
    return __dmul_rn(fabs(value), norm);
  }
  static __device__ __forceinline__ double of(uint32_t magnitude, double weighted) {
    return magnitude ? weighted : -1.0;
  }
  static __device__ __forceinline__ double of_item(const ConvertArgs& args, uint32_t magnitude,
                                                   float value, int column) {
    return of(magnitude, weighted(value, norms(args)[column]));
  }
};

// ---- patterns: what stays of four neighbours at `column` + 4 `g`, a bit each ----

struct pattern_24 {
  __device__ __forceinline__ pattern_24(const ConvertArgs&, int) {}
  template <class Source, class Score>
  __device__ __forceinline__ uint32_t keep(const ConvertArgs&, int, int,
                                           const typename Score::Type (&s)[kGroup],
                                           const uint32_t (&m)[kGroup]) const {
    return highest_two(s, m);
  }
};

// args.kept of args.group, wherever groups begin: every value counts those that come before it. It
// reads them where they lie, so nothing may be written there.
struct pattern_nm {
  int column, begin[kLaneColumns];  // of a lane's columns, and where the group of each begins
  __device__ __forceinline__ pattern_nm(const ConvertArgs& args, int first) : column(first) {
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) begin[i] = (first + i) / args.group * args.group;
  }
  template <class Source, class Score>
  __device__ __forceinline__ uint32_t keep(const ConvertArgs& args, int row, int g,
                                           const typename Score::Type (&s)[kGroup],
                                           const uint32_t (&m)[kGroup]) const {
    using Item = typename Source::Item;
    const auto* items = reinterpret_cast<const Item*>(args.source) + int64_t{row} * args.k;
    uint32_t keep = 0;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      // Not where the row has ended either, whose groups do not exist.
      if (!m[i]) continue;
      const int at = g * kGroup + i, own = column + at, first = begin[at];
      int before = 0;
#pragma unroll 1
      for (int other = first; other < first + args.group; ++other) {
        const uint32_t word = items[other];
        const auto score = Score::of_item(args, Source::magnitude(&word, 0), Source::value(word), other);
        before += other < own ? score >= s[i] : score > s[i];
      }
      keep |= before < args.kept ? 1u << i : 0;
    }
    return keep;
  }
};

// ---- the kernels: a warp a patch; grid ceil(patches / kConvertWarps) ----

// dense = the values of source with the highest scores of every group, +0 elsewhere.
// Sums kAll and kKept, of all 256 columns each; of weighted values also kOutput, of all, and kLost, of
// those that go. Counts amax, of source.
template <class Score, class Pattern, class Source>
__device__ __forceinline__ void prune_patches(const ConvertArgs& args) {
  const Patch at(args);
  if (at.rows <= 0) return;  // the whole warp
  const Score score(args, at.column);
  const Pattern pattern(args, at.column);
  PatchSum<kLaneColumns> all, kept;
  [[maybe_unused]] PatchSum<kLaneColumns> output, lost;
  uint32_t top = 0;
  for_each_row<Source>(args, at, [&](int row, auto& words) {
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      uint32_t* group = words + g * Source::kGroupWords;
      uint32_t m[kGroup];
      magnitudes<Source>(group, m, top);
      const auto wide = [&](int i) -> double { return Source::value(Source::bits(group, i)); };
      [[maybe_unused]] double weighted[kGroup];
      typename Score::Type s[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        if constexpr (Score::kWeighted) {
          weighted[i] = Score::weighted(wide(i), score.norm[g * kGroup + i]);
          s[i] = Score::of(m[i], weighted[i]);
        } else {
          s[i] = m[i];
        }
      }
      const uint32_t keep = pattern.template keep<Source, Score>(args, row, g, s, m);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const bool stays = keep >> i & 1;
        const double energy = square(wide(i));
        all.add(g * kGroup + i, energy);
        kept.add(g * kGroup + i, stays ? energy : 0.0);
        if constexpr (Score::kWeighted) {
          const double of_output = square(weighted[i]);
          output.add(g * kGroup + i, of_output);
          lost.add(g * kGroup + i, stays ? 0.0 : of_output);
        }
      }
      Source::mask(group, keep);
    }
    store<Source>(args, row, at.column, words);
  });
  top = __reduce_max_sync(~0u, top);
  const double sum_all = all.fold(at.lane), sum_kept = kept.fold(at.lane);
  if (at.lane == 0) {
    put_sum(args, at, Sum::kAll, sum_all);
    put_sum(args, at, Sum::kKept, sum_kept);
    atomicMax(&counts_of(args, at).amax, Source::f32_magnitude(top));
  }
  if constexpr (Score::kWeighted) {
    const double sum_output = output.fold(at.lane), sum_lost = lost.fold(at.lane);
    if (at.lane == 0) {
      put_sum(args, at, Sum::kOutput, sum_output);
      put_sum(args, at, Sum::kLost, sum_lost);
    }
  }
}

// Which row of scales a row has. Only blocks that end within a patch need a division a row.
struct ScaleRow {
  int block_rows, first;
  bool steady;
  __device__ __forceinline__ ScaleRow(const ConvertArgs& args, const Patch& at)
      : block_rows(args.block_rows),
        first(at.row / args.block_rows),
        steady((at.row + at.rows - 1) / args.block_rows == first) {}
  __device__ __forceinline__ int of(int row) const {
    return steady ? first : block_rows == 1 ? row : row / block_rows;
  }
};

// amax = the largest magnitude under every scale. A maximum does not depend on the order of atomics.
template <class Source>
__device__ __forceinline__ void amax_patches(const ConvertArgs& args) {
  const Patch at(args);
  if (at.rows <= 0) return;
  const ScaleRow scale_row(args, at);
  auto* out = reinterpret_cast<uint32_t*>(args.amax);
  const int begin = at.chunk * kPatchColumns, end = min(begin + kPatchColumns, args.k);
  const bool whole = begin / args.block_columns == (end - 1) / args.block_columns;
  // Past the row's end all is zero, which is not put.
  const int low_block = at.column / args.block_columns;
  const int high_block = (at.column + kGroup) / args.block_columns;
  uint32_t low = 0, high = 0;
  const auto put = [&](int row_of_scales, int block, uint32_t top) {
    if (top)
      atomicMax(out + int64_t{row_of_scales} * args.scale_columns + block,
                Source::f32_magnitude(top));
  };
  const auto put_both = [&](int row_of_scales) {
    if (whole) {
      const uint32_t top = __reduce_max_sync(~0u, max(low, high));
      if (at.lane == 0) put(row_of_scales, begin / args.block_columns, top);
    } else if (low_block == high_block) {
      put(row_of_scales, low_block, max(low, high));
    } else {
      put(row_of_scales, low_block, low);
      put(row_of_scales, high_block, high);
    }
    low = high = 0;
  };
  for_each_row<Source>(args, at, [&](int row, auto& words) {
    uint32_t m[kGroup];
    magnitudes<Source>(words, m, low);
    magnitudes<Source>(words + Source::kGroupWords, m, high);
    if (!scale_row.steady) put_both(scale_row.of(row));
  });
  if (scale_row.steady) put_both(scale_row.first);
}

// scaling.scales_from_amax: amax / max_finite, no less than the smallest normal f32, 1 for nothing.
__device__ __forceinline__ float scale_of(uint32_t amax_bits, float max_finite) {
  if (amax_bits == 0) return 1.0f;
  // A NaN goes through a division quieted, with its payload; the GPU's own would lose that.
  if (amax_bits > 0x7F800000) return __uint_as_float(amax_bits | 0x00400000);
  const float quotient = __fdiv_rn(__uint_as_float(amax_bits), max_finite);
  return fminf(fmaxf(quotient, __uint_as_float(0x00800000)), __uint_as_float(0x7F7FFFFF));
}

// scaling.make_scales of kind mx, as E8M0: the least power of two with amax / power <= max_finite, one
// of the normal f32 (codes 1 to 254); 1 for nothing.
__device__ __forceinline__ uint32_t power_of(uint32_t amax_bits, float max_finite) {
  if (amax_bits == 0) return 127;
  const uint32_t most = __float_as_uint(max_finite);
  const bool beyond = (amax_bits & 0x007FFFFF) > (most & 0x007FFFFF);
  // Of a subnormal this is more than it should be, and yet below the least: max_finite is 2 or more.
  const int exponent = static_cast<int>(amax_bits >> 23) - static_cast<int>(most >> 23) + beyond;
  return static_cast<uint32_t>(min(max(exponent, -126), 127) + 127);
}

// Grid: ceil(count / kConvertThreads) CTAs.
__device__ __forceinline__ void scales(const ScalesArgs& args) {
  const int64_t i = int64_t{blockIdx.x} * kConvertThreads + threadIdx.x;
  if (i >= args.count) return;
  const uint32_t bits = reinterpret_cast<const uint32_t*>(args.amax)[i];
  const float max_finite = static_cast<float>(args.max_finite);
  float scale;
  if (args.powers) {
    const uint32_t code = power_of(bits, max_finite);
    reinterpret_cast<uint8_t*>(args.powers)[i] = static_cast<uint8_t>(code);
    scale = __uint_as_float(code << 23);
  } else {
    scale = scale_of(bits, max_finite);
  }
  reinterpret_cast<float*>(args.scale)[i] = scale;
}

// values and meta of source, which is pruned on the way or must be 2:4.
// Sums kAll of 256 columns, if it prunes; kKept and kError of their 128 kept values. All of the counts.
template <class Target, class Source>
__device__ __forceinline__ void quantize_patches(const ConvertArgs& args) {
  const Patch at(args);
  if (at.rows <= 0) return;
  PatchSum<kLaneColumns> all;
  PatchSum<kLaneColumns / 2> kept, error;
  uint32_t top = 0, crowded = 0, count = 0, clipped = 0, underflowed = 0;
  const bool prune = args.prune, saturate = args.saturate, aligned = args.k % 8 == 0;
  const bool first = at.column < args.k, both = at.column + kGroup < args.k;
  const ScaleRow scale_row(args, at);
  // Past the row's end any scale will do.
  const auto* scale = reinterpret_cast<const float*>(args.scale);
  const int last = args.scale_columns - 1;
  const int scale_at[2] = {min(at.column / args.block_columns, last),
                           min((at.column + kGroup) / args.block_columns, last)};
  auto* values = reinterpret_cast<uint8_t*>(args.values);
  auto* meta = reinterpret_cast<uint8_t*>(args.meta);
  for_each_row<Source>(args, at, [&](int row, auto& words) {
    const float* scales = scale ? scale + int64_t{scale_row.of(row)} * args.scale_columns : nullptr;
    uint32_t codes[4], byte = 0;
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const uint32_t* group = words + g * Source::kGroupWords;
      uint32_t m[kGroup];
      magnitudes<Source>(group, m, top);
      uint32_t keep = nonzero(m);
      if (prune) {
        keep = highest_two(m, m);
#pragma unroll
        for (int i = 0; i < kGroup; ++i)
          all.add(g * kGroup + i, square(Source::value(Source::bits(group, i))));
      } else {
        crowded += __popc(keep) > 2;
      }
      count += __popc(keep);
      const uint32_t nibble = nibble_of(keep);
      byte |= nibble << (4 * g);
      const float s = scale ? scales[scale_at[g]] : 1.0f;
      const uint2 pair = Source::pair(group, nibble & 3, nibble >> 2);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        // A lone value's partner is a zero; adding +0 takes the sign from -0 and nothing else.
        const float v = __fadd_rn(Source::value(j ? pair.y : pair.x), 0.0f);
        const float q = scale ? __fdiv_rn(v, s) : v;
        const uint32_t code = Target::code(q, saturate);
        codes[2 * g + j] = code;
        clipped += Target::is_clipped(q);
        underflowed += v != 0.0f && Target::is_zero(code);
        // code * scale is exact in f64, so this rounds once, as the host does.
        const double wide = v;
        kept.add(2 * g + j, square(wide));
        error.add(2 * g + j, square(__fma_rn(Target::value(code), s, -wide)));
      }
    }
    if (first) {
      const int64_t place = int64_t{row} * (args.k / 2) + at.column / 2;
      Target::store(values + place * Target::kItemBytes, codes, aligned, both);
      meta[int64_t{row} * ((args.k + 7) / 8) + at.column / 8] =
          static_cast<uint8_t>(both ? byte : byte & 15);
    }
  });
  top = __reduce_max_sync(~0u, top);
  crowded = __reduce_add_sync(~0u, crowded);
  count = __reduce_add_sync(~0u, count);
  clipped = __reduce_add_sync(~0u, clipped);
  underflowed = __reduce_add_sync(~0u, underflowed);
  const double sum_all = prune ? all.fold(at.lane) : 0.0;
  const double sum_kept = kept.fold(at.lane), sum_error = error.fold(at.lane);
  if (at.lane == 0) {
    put_sum(args, at, Sum::kAll, sum_all);
    put_sum(args, at, Sum::kKept, sum_kept);
    put_sum(args, at, Sum::kError, sum_error);
    BandCounts& counts = counts_of(args, at);
    atomicMax(&counts.amax, Source::f32_magnitude(top));
    atomicAdd(&counts.kept, count);
    if (crowded) atomicAdd(&counts.crowded, crowded);
    if (clipped) atomicAdd(&counts.clipped, clipped);
    if (underflowed) atomicAdd(&counts.underflowed, underflowed);
  }
}

}  // namespace sp24
