// The ladder of f16: rungs of kernels.def.
#include "sp24/ladder_entry.cuh"
#define SP24_ONLY SP24_FAMILY_f16
#define SP24_RUNG SP24_DEFINE_RUNG
#include "kernels.def"
