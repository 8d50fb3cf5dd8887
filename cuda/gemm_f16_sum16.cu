// The f16_sum16 family: rows of kernels.def.
#include "sp24/entry.cuh"
#define SP24_ONLY SP24_FAMILY_f16_sum16
#define SP24_GEMM SP24_DEFINE_GEMM
#define SP24_PACK SP24_DEFINE_PACK
#include "kernels.def"
