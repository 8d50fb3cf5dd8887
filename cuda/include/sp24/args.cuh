// What the host passes to a GEMM kernel.
#pragma once
#include <cuda.h>

#include <cstdint>

namespace sp24 {

// B in boxes that lie in it as a whole. Rows beyond the last are never asked for: filling one with zeros
// takes the copy engine several times as long as bringing one.
struct MapsB {
  CUtensorMap whole;  // boxes of a CTA's share of a tile's rows
  CUtensorMap last;   // of all rows in the last column of tiles
};

// X(type, name): the one list that the struct, the manifest and so the host are made from.
#define SP24_GEMM_ARGS(X)                                                                     \
  X(uint64_t, a)              /* block image of A, [m_blocks][k_blocks][block bytes] */       \
  X(uint64_t, d)              /* output, rows of ldd elements */                              \
  X(uint64_t, scale_a)        /* f32, one or one a row of A; 0 for none */                    \
  X(uint64_t, scale_b)        /* f32, one or one a row of B; 0 for none */                    \
  X(uint64_t, bias)           /* f32, one a row of A; 0 for none */                           \
  X(int64_t, ldd)             /* elements between rows of D */                                \
  X(int32_t, m)               /* rows of A */                                                 \
  X(int32_t, n)               /* rows of B */                                                 \
  X(int32_t, m_blocks)        /* blocks of 64 rows of A */                                    \
  X(int32_t, k_blocks)        /* blocks along K */                                            \
  X(int32_t, scale_a_stride)  /* 0: one scale for all rows; 1: one a row; else of the loop */ \
  X(int32_t, scale_b_stride)  /* the same for B */                                            \
  X(int32_t, vector_store)    /* D and ldd allow 16-byte stores */                            \
  X(int32_t, raster)          /* cluster rows a group of the tile order */                    \
  X(int32_t, cluster_rows)    /* rows of tiles of clusters */                                 \
  X(int32_t, tile_blocks)     /* where tiles are balanced: blocks of 64 rows of a low one */  \
  X(int32_t, high_rows)       /* so many rows of tiles, the first, have a block more */       \
  X(int32_t, skew)            /* and rows that each column begins after the one before */     \
  X(int32_t, read_once)       /* bit 0: A is read only once, bit 1: B; first to leave L2 */   \
  X(int32_t, scale_a_rows)    /* rows of A that share scales, where the loop applies them */  \
  X(int32_t, scale_a_steps)   /* wgmma steps along K that share a scale of A, the same */     \
  X(int32_t, scale_b_steps)   /* the same for B */                                            \
  X(int32_t, k_steps)         /* wgmma steps that K reaches into, at least 1 */               \
  X(uint32_t, operand_limit)  /* largest magnitude of a widened operand, twice; 0: none leaves it */ \
  X(int32_t, scale_a_along)   /* elements between scales of A along K, in the loop */         \
  X(int32_t, scale_b_along)   /* the same for B */

struct GemmArgs {
#define X(type, name) type name;
  SP24_GEMM_ARGS(X)
#undef X
};

}  // namespace sp24
