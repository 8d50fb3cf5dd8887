// Turns the rows of kernels.def into extern "C" kernels.
#pragma once
#include "sp24/activations.cuh"
#include "sp24/body.cuh"
#include "sp24/ceiling.cuh"
#include "sp24/clocks.cuh"
#include "sp24/convert.cuh"
#include "sp24/pack.cuh"

#define SP24_GEMM_CONFIG(operand, out, order, tile_n, consumers, cluster, stages, split)       \
  sp24::GemmConfig<sp24::operand, sp24::out_##out, sp24::Order::order, tile_n, consumers, cluster, \
                   stages, split>
// The name ends in the parts of K where there are several.
#define SP24_SPLIT_NAME_1
#define SP24_SPLIT_NAME_2 _k2
#define SP24_SPLIT_NAME_4 _k4
#define SP24_JOIN_(a, b) a##b
#define SP24_JOIN(a, b) SP24_JOIN_(a, b)
#define SP24_GEMM_NAME(operand, out, order, tile_n, consumers, cluster, stages, split)            \
  SP24_JOIN(gemm_##operand##_##out##_##order##_n##tile_n##_w##consumers##_c##cluster##_s##stages, \
            SP24_SPLIT_NAME_##split)
#define SP24_PROMOTED_CONFIG(operand, out, order, tile_n, consumers, cluster, stages, split, accumulate) \
  sp24::GemmConfig<sp24::operand, sp24::out_##out, sp24::Order::order, tile_n, consumers, cluster, \
                   stages, split, sp24::accumulate>
#define SP24_PROMOTED_NAME(operand, out, order, tile_n, consumers, cluster, stages, split, accumulate) \
  SP24_JOIN(SP24_GEMM_NAME(operand, out, order, tile_n, consumers, cluster, stages, split), _##accumulate)
#define SP24_PACK_NAME(operand) pack_##operand
#define SP24_WIDENED_CONFIG(operand, out, order, tile_n, consumers, cluster, stages, split, scales) \
  sp24::GemmConfig<sp24::operand<sp24::WeightScales::scales>, sp24::out_##out, sp24::Order::order,   \
                   tile_n, consumers, cluster, stages, split>
// The name ends in the scales of the weights, where there are some.
#define SP24_WEIGHT_SCALES_NAME_none
#define SP24_WEIGHT_SCALES_NAME_block _block
#define SP24_WEIGHT_SCALES_NAME_mx _mx
#define SP24_WIDENED_NAME(operand, out, order, tile_n, consumers, cluster, stages, split, scales)     \
  SP24_JOIN(SP24_GEMM_NAME(operand, out, order, tile_n, consumers, cluster, stages, split),           \
            SP24_WEIGHT_SCALES_NAME_##scales)
#define SP24_PACK_WIDENED_NAME(scales) pack_widened_##scales

#define SP24_FAMILY_e4m3 1
#define SP24_FAMILY_f16 2
#define SP24_FAMILY_bf16 3
#define SP24_FAMILY_e5m2 4
#define SP24_FAMILY_e4m3_e5m2 5
#define SP24_FAMILY_e5m2_e4m3 6
#define SP24_FAMILY_s8 7
#define SP24_FAMILY_tf32 8
#define SP24_FAMILY_f16_sum16 9
#define SP24_FAMILY_e4m3_precise 101
#define SP24_FAMILY_e4m3_blocks 102
#define SP24_FAMILY_e4m3_widened 103
#define SP24_FAMILY_convert 100

// The configuration comes last, since the commas of its template arguments are the macro's too.
#define SP24_DEFINE(NAME, BOUNDS, ...)                                                           \
  extern "C" __global__ void __cluster_dims__(__VA_ARGS__::kClusterCtas, 1, 1) BOUNDS(__VA_ARGS__) NAME( \
      const __grid_constant__ sp24::MapsB maps, const __grid_constant__ sp24::GemmArgs args) {     \
    sp24::gemm<__VA_ARGS__>(maps, args);                                                         \
  }
#define SP24_THREADS(...) __launch_bounds__(__VA_ARGS__::kThreads, 1)
#define SP24_REGISTERS(...) __maxnreg__((__VA_ARGS__::kConsumerRegisters))
#define SP24_DEFINE_GEMM(...) \
  SP24_DEFINE(SP24_GEMM_NAME(__VA_ARGS__), SP24_THREADS, SP24_GEMM_CONFIG(__VA_ARGS__))
#define SP24_DEFINE_TALL(...)                                \
  static_assert(SP24_GEMM_CONFIG(__VA_ARGS__)::kTall, "else ptxas is told of its threads"); \
  SP24_DEFINE(SP24_GEMM_NAME(__VA_ARGS__), SP24_REGISTERS, SP24_GEMM_CONFIG(__VA_ARGS__))
#define SP24_DEFINE_PROMOTED(...) \
  SP24_DEFINE(SP24_PROMOTED_NAME(__VA_ARGS__), SP24_THREADS, SP24_PROMOTED_CONFIG(__VA_ARGS__))
#define SP24_DEFINE_WIDENED_GEMM(...) \
  SP24_DEFINE(SP24_WIDENED_NAME(__VA_ARGS__), SP24_THREADS, SP24_WIDENED_CONFIG(__VA_ARGS__))
#define SP24_DEFINE_PACK_WIDENED(scales)                                                        \
  extern "C" __global__ void __launch_bounds__(sp24::kPackThreads)                              \
      SP24_PACK_WIDENED_NAME(scales)(const __grid_constant__ sp24::PackWidenedArgs args) {      \
    sp24::pack_widened<sp24::WeightScales::scales>(args);                                       \
  }
#define SP24_DEFINE_PACK(operand)                                                               \
  extern "C" __global__ void __launch_bounds__(sp24::kPackThreads)                              \
      SP24_PACK_NAME(operand)(const __grid_constant__ sp24::PackArgs args) {                    \
    sp24::pack_block<sp24::operand>(args);                                                      \
  }
#define SP24_CEILING_CONFIG(operand, source) sp24::CeilingConfig<sp24::operand, sp24::Source::source>
#define SP24_CEILING_NAME(operand, source) ceiling_##operand##_##source
#define SP24_DEFINE_CEILING(operand, source)                                                    \
  extern "C" __global__ void __launch_bounds__(SP24_CEILING_CONFIG(operand, source)::kThreads, 1) \
      SP24_CEILING_NAME(operand, source)(const __grid_constant__ sp24::CeilingArgs args) {      \
    sp24::ceiling<SP24_CEILING_CONFIG(operand, source)>(args);                                  \
  }

// The body comes last, since the commas of its template arguments are the macro's too.
#define SP24_DEFINE_CONVERSION(name, Args, ...)                       \
  extern "C" __global__ void __launch_bounds__(sp24::kConvertThreads) \
      name(const __grid_constant__ sp24::Args args) {                 \
    sp24::__VA_ARGS__(args);                                          \
  }
#define SP24_PRUNE_NAME(score, pattern, source) prune_##score##_##pattern##_##source
#define SP24_AMAX_NAME(source) amax_##source
#define SP24_SCALES_NAME(operand) scales_##operand
#define SP24_QUANTIZE_NAME(operand, source) quantize_##operand##_##source
#define SP24_TOKENS_NAME(operand, source) tokens_##operand##_##source
#define SP24_SMOOTH_TOKENS_NAME(operand, source) smooth_tokens_##operand##_##source
#define SP24_GATHER_NAME(bits) gather_##bits
#define SP24_CLOCKS_NAME() clocks
#define SP24_DEFINE_PRUNE(score, pattern, source)                              \
  SP24_DEFINE_CONVERSION(SP24_PRUNE_NAME(score, pattern, source), ConvertArgs, \
                         prune_patches<sp24::score_##score, sp24::pattern_##pattern, \
                                       sp24::source_##source>)
#define SP24_DEFINE_AMAX(source) \
  SP24_DEFINE_CONVERSION(SP24_AMAX_NAME(source), ConvertArgs, amax_patches<sp24::source_##source>)
#define SP24_DEFINE_SCALES(operand) \
  SP24_DEFINE_CONVERSION(SP24_SCALES_NAME(operand), ScalesArgs, scales)
#define SP24_DEFINE_QUANTIZE(operand, source)                              \
  SP24_DEFINE_CONVERSION(SP24_QUANTIZE_NAME(operand, source), ConvertArgs, \
                         quantize_patches<sp24::target_##operand, sp24::source_##source>)
#define SP24_DEFINE_TOKENS(operand, source)                             \
  SP24_DEFINE_CONVERSION(SP24_TOKENS_NAME(operand, source), TokensArgs, \
                         quantize_tokens<sp24::target_##operand, sp24::source_##source, false>)
#define SP24_DEFINE_SMOOTH_TOKENS(operand, source)                             \
  SP24_DEFINE_CONVERSION(SP24_SMOOTH_TOKENS_NAME(operand, source), TokensArgs, \
                         quantize_tokens<sp24::target_##operand, sp24::source_##source, true>)
#define SP24_DEFINE_GATHER(bits) \
  SP24_DEFINE_CONVERSION(SP24_GATHER_NAME(bits), GatherArgs, gather_columns<uint##bits##_t>)
#define SP24_DEFINE_CLOCKS() SP24_DEFINE_CONVERSION(SP24_CLOCKS_NAME(), ClocksArgs, mark_clocks)
