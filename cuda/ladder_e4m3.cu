// The ladder of e4m3: rungs of kernels.def.
#include "sp24/ladder_entry.cuh"
#define SP24_ONLY SP24_FAMILY_e4m3
#define SP24_RUNG SP24_DEFINE_RUNG
#include "kernels.def"
