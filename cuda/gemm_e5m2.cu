// The e5m2 family: rows of kernels.def.
#include "sp24/entry.cuh"
#define SP24_ONLY SP24_FAMILY_e5m2
#define SP24_GEMM SP24_DEFINE_GEMM
#define SP24_TALL SP24_DEFINE_TALL
#define SP24_PACK SP24_DEFINE_PACK
#include "kernels.def"
