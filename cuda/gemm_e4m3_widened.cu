// E4M3 weights widened to f16 or bf16: rows of kernels.def.
#include "sp24/entry.cuh"
#define SP24_ONLY SP24_FAMILY_e4m3_widened
#define SP24_WIDENED SP24_DEFINE_WIDENED_GEMM
#define SP24_PACK_WIDENED SP24_DEFINE_PACK_WIDENED
#include "kernels.def"
