// Conversions of weights and activations, and the clocks of the SMs: rows of kernels.def.
#include "sp24/entry.cuh"
#define SP24_ONLY SP24_FAMILY_convert
#define SP24_PRUNE SP24_DEFINE_PRUNE
#define SP24_AMAX SP24_DEFINE_AMAX
#define SP24_SCALES SP24_DEFINE_SCALES
#define SP24_QUANTIZE SP24_DEFINE_QUANTIZE
#define SP24_TOKENS SP24_DEFINE_TOKENS
#define SP24_SMOOTH_TOKENS SP24_DEFINE_SMOOTH_TOKENS
#define SP24_GATHER SP24_DEFINE_GATHER
#define SP24_CLOCKS SP24_DEFINE_CLOCKS
#include "kernels.def"
