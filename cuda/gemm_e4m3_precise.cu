// The e4m3 family with promoted sums: rows of kernels.def.
#include "sp24/entry.cuh"
#define SP24_ONLY SP24_FAMILY_e4m3_precise
#define SP24_PROMOTED SP24_DEFINE_PROMOTED
#include "kernels.def"
